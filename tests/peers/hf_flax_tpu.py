# SPDX-License-Identifier: Apache-2.0
"""Cost of transformers' Flax model on a TPU slice, by the compiler, without a TPU.

python tests/peers/hf_flax_tpu.py --topology=v5e:2x4 --rows=32 --length=128

The peer of `bertjax.preflight`: FlaxBertForMaskedLM of BERT-base's size in bfloat16,
parameters in float32, optax.adamw, data parallel, hidden dropout 0.1, no attention
dropout, and logits at every position, as its users train it. bertjax's code compiles
and analyzes both. Needs transformers 4.57, JAX 0.10 (Python 3.11), libtpu and bertjax.
"""

import argparse
import json

from bertjax.measuring import topologies

topologies.prepare()  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax_update import make_update  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from transformers import BertConfig, FlaxBertForMaskedLM  # noqa: E402

from bertjax.measuring import compile_steps, memory_analysis  # noqa: E402
from bertjax.parallel.chips import CHIPS  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--topology", default="v5e:2x4")
parser.add_argument("--rows", type=int, default=32, help="a device")
parser.add_argument("--length", type=int, default=128)
args = parser.parse_args()

mesh = Mesh(np.array(topologies.find_devices(args.topology)), ("data",))
everywhere = NamedSharding(mesh, PartitionSpec())
by_rows = NamedSharding(mesh, PartitionSpec("data"))
config = BertConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0)
model = FlaxBertForMaskedLM(
    config, _do_init=False, dtype=jnp.bfloat16, input_shape=(1, 8)
)
tx = optax.adamw(1e-4, weight_decay=0.01)


def placed(tree):
    """Return the shapes with a sharding that replicates them on every device."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree
    )


key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
params = jax.eval_shape(
    lambda: model.init_weights(jax.random.PRNGKey(0), input_shape=(1, 8))
)
slots = (args.rows * mesh.size, args.length)
batch = dict.fromkeys(
    ("input_ids", "attention_mask", "labels"),
    jax.ShapeDtypeStruct(slots, jnp.int32, sharding=by_rows),
)
given = (*placed((params, jax.eval_shape(tx.init, params), key)), batch)
update = make_update(model, tx, dropout=True)
found = memory_analysis.compile_lowered(update.lower(*given))
if found["fits"]:
    chip = CHIPS[mesh.devices.flat[0].device_kind]
    seconds = found["cycles"] / (1e9 * chip.ghz)
    tokens = args.rows * args.length * chip.devices
    found["estimated_step_ms"] = 1e3 * seconds
    found["estimated_tokens_per_second_per_chip"] = tokens / seconds
found["kernels"] = len(found.get("kernels", ()))
print(json.dumps({**found, "versions": compile_steps.versions()}))
