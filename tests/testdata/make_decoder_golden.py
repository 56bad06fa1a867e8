# SPDX-License-Identifier: Apache-2.0
"""Write decoder_golden.npz: small random T5 and BART models, and transformers' outputs.

Needs torch and transformers 5, which the tests do not.

    python tests/testdata/make_decoder_golden.py

A case <name> has <name>/config (JSON: EncoderConfig), <name>/params/<path> (int8, in
64ths), the arrays of a batch, <name>/logits f32 [B, T, V] and <name>/greedy i32 [B, n],
the ids that `generate` adds to the first decoder token.
"""

import json
from pathlib import Path

import jax
import numpy as np
import torch
import transformers as t

from bertjax.models import decoder, encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.models.families import T5, T5_1_1
from bertjax.parallel.sharding import path_name

SIZES = dict(
    vocab_size=29,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    num_decoder_layers=3,
)
RELATIVE = dict(relative_attention_num_buckets=8, relative_attention_max_distance=11)
CASES = {
    "t5": {**T5, **RELATIVE, "logit_scale": 0.25},
    "t5_v1_1": {**T5, **RELATIVE, **T5_1_1},
    "bart": dict(
        max_position_embeddings=22,
        position_offset=2,
        type_vocab_size=0,
        pooler=False,
        layer_norm_eps=1e-5,
        classifier_transform=False,
    ),
}
NEW = 8  # tokens that are generated

# ---------------------------------------------------------------- names
T5_NAMES = {
    "encoder/embeddings/word": "shared.weight",
    "*/embeddings/relative": "*.block.0.layer.0.SelfAttention.relative_attention_bias",
    "*/layers/attention": "*.block.{}.layer.0.SelfAttention",
    "*/layers/attention/norm": "*.block.{}.layer.0.layer_norm",
    "*/layers/cross": "*.block.{}.layer.1.EncDecAttention",
    "*/layers/cross/norm": "*.block.{}.layer.1.layer_norm",
    "encoder/layers/mlp": "encoder.block.{}.layer.1.DenseReluDense",
    "encoder/layers/mlp/norm": "encoder.block.{}.layer.1.layer_norm",
    "decoder/layers/mlp": "decoder.block.{}.layer.2.DenseReluDense",
    "decoder/layers/mlp/norm": "decoder.block.{}.layer.2.layer_norm",
    "*/final_norm": "*.final_layer_norm",
    "mlm/decoder": "lm_head.weight",
    "query": "q",
    "key": "k",
    "value": "v",
    "output": "o",
    "up": "wi",
    "down": "wo",
}
GATED = T5_NAMES | {"up": "wi_0", "gate": "wi_1"}
BART_NAMES = {
    "encoder/embeddings/word": "model.shared.weight",
    "*/embeddings/position": "model.*.embed_positions.weight",
    "*/embeddings/norm": "model.*.layernorm_embedding",
    "*/layers/attention": "model.*.layers.{}.self_attn",
    "*/layers/attention/norm": "model.*.layers.{}.self_attn_layer_norm",
    "*/layers/cross": "model.*.layers.{}.encoder_attn",
    "*/layers/cross/norm": "model.*.layers.{}.encoder_attn_layer_norm",
    "*/layers/mlp": "model.*.layers.{}",
    "*/layers/mlp/norm": "model.*.layers.{}.final_layer_norm",
    "mlm/bias": "final_logits_bias",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "out_proj",
    "up": "fc1",
    "down": "fc2",
}
NAMES = {"t5": T5_NAMES, "t5_v1_1": GATED, "bart": BART_NAMES}


def find(name: str, path: str, index: int) -> str:
    """Return transformers' name of one of our leaves."""
    table, (side, _, rest) = NAMES[name], path.partition("/")

    def look_up(key: str) -> str | None:
        found = table.get(f"{side}/{key}", table.get(f"*/{key}"))
        return found and found.replace("*", side).format(index)

    if whole := look_up(rest):
        relative = rest.endswith("relative")
        return f"{whole}.weight" if relative else whole
    folder, _, leaf = rest.rpartition("/")
    kind = "bias" if leaf == "bias" else "weight"
    if norm := look_up(folder):
        return f"{norm}.{kind}"
    above, _, part = folder.rpartition("/")
    return f"{look_up(above)}.{table[part]}.{kind}"


# ---------------------------------------------------------------- models
def make_model(name: str, cfg: EncoderConfig) -> torch.nn.Module:
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ids |= dict(decoder_start_token_id=0, attn_implementation="eager")
    if name == "bart":
        sides = {
            f"{side}_{key}": value
            for side, n in (
                ("encoder", cfg.num_hidden_layers),
                ("decoder", cfg.num_decoder_layers),
            )
            for key, value in (
                ("layers", n),
                ("attention_heads", cfg.num_attention_heads),
                ("ffn_dim", cfg.intermediate_size),
            )
        }
        return t.BartForConditionalGeneration(
            t.BartConfig(
                vocab_size=cfg.vocab_size, d_model=cfg.hidden_size, **sides, **ids,
                max_position_embeddings=cfg.max_length, activation_function="gelu",
                forced_eos_token_id=None,
            )
        )  # fmt: skip
    is_gated = cfg.mlp_type == "glu"
    model = t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=cfg.vocab_size, d_model=cfg.hidden_size, d_kv=cfg.head_dim,
            d_ff=cfg.intermediate_size, num_layers=cfg.num_hidden_layers,
            num_decoder_layers=cfg.num_decoder_layers,
            num_heads=cfg.num_attention_heads,
            relative_attention_num_buckets=cfg.relative_attention_num_buckets,
            relative_attention_max_distance=cfg.relative_attention_max_distance,
            feed_forward_proj="gated-gelu" if is_gated else "relu",
            tie_word_embeddings=cfg.tie_word_embeddings, **ids,
        )
    )  # fmt: skip
    if not cfg.tie_word_embeddings:  # transformers 5 ties it anyway
        own = torch.empty_like(model.lm_head.weight)
        model.lm_head.weight = torch.nn.Parameter(own)
    return model


def make_params(cfg: EncoderConfig, draw: np.random.Generator) -> dict:
    """Draw every leaf, as multiples of 1/64."""
    key = jax.random.key(0)
    parts = {"encoder": encoder.init, "decoder": decoder.init, "mlm": heads.init_mlm}
    shapes = jax.eval_shape(lambda: {k: make(key, cfg) for k, make in parts.items()})

    def one(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        value = centre + 0.3 * draw.standard_normal(leaf.shape)
        return np.clip(np.round(64 * value), -127, 127).astype(np.float32) / 64

    return jax.tree_util.tree_map_with_path(one, shapes)


def to_theirs(path: str, leaf: np.ndarray) -> np.ndarray:
    """Return a leaf in the shape that torch's modules use."""
    if path == "mlm/bias":
        return leaf[None]
    if not path.endswith("kernel"):
        return leaf.reshape(-1) if path.endswith("bias") else leaf
    wide = leaf.shape[:-1] if "/output/" in path else leaf.shape[:1]
    return leaf.reshape(int(np.prod(wide)), -1).T


def load(model: torch.nn.Module, name: str, params: dict) -> None:
    """Copy our parameters to transformers' model, and check that all are filled."""
    table = dict(model.named_parameters(remove_duplicate=False))
    table |= {k: v for k, v in model.named_buffers() if k == "final_logits_bias"}
    filled = set()
    with torch.no_grad():
        for key, leaf in jax.tree_util.tree_leaves_with_path(params):
            path = path_name(key)
            stacked = "/layers/" in path
            for i in range(len(leaf)) if stacked else (0,):
                value = to_theirs(path, leaf[i] if stacked else leaf)
                own = table[find(name, path, i)]
                own.copy_(torch.tensor(np.ascontiguousarray(value)))
                filled.add(own)
    left = {k for k, p in table.items() if p not in filled}
    assert not left, left


def make_batch(cfg: EncoderConfig, draw: np.random.Generator) -> dict:
    """Make rows of various lengths on both sides; each target begins with id 0."""
    b, s, length = 3, 12, 14
    ids = draw.integers(3, cfg.vocab_size, (b, s)).astype(np.int32)
    mask = (np.arange(s) < np.array([[s], [5], [1]])).astype(np.int32)
    target = draw.integers(3, cfg.vocab_size, (b, length)).astype(np.int32)
    target[:, 0] = 0
    real = (np.arange(length) < np.array([[9], [length], [2]])).astype(np.int32)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "decoder_input_ids": target * real,
        "decoder_attention_mask": real,
    }


def make_case(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the arrays of a case, without <name>/."""
    cfg = EncoderConfig(**SIZES, **CASES[name])
    draw = np.random.default_rng(seed)
    params, model = make_params(cfg, draw), make_model(name, cfg).eval()
    load(model, name, params)
    batch = make_batch(cfg, draw)
    given = {k: torch.tensor(v, dtype=torch.long) for k, v in batch.items()}
    with torch.no_grad():
        logits = model(**given).logits.numpy()
        side = {k: given[k] for k in ("input_ids", "attention_mask")}
        # transformers' cache assumes an encoder as deep as the decoder.
        how = dict(max_new_tokens=NEW, do_sample=False, num_beams=1, use_cache=False)
        greedy = model.generate(**side, **how, min_new_tokens=NEW)[:, 1:]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    case = {f"params/{path_name(p)}": np.int8(64 * leaf) for p, leaf in leaves}
    case |= batch | {"logits": logits, "greedy": greedy.numpy().astype(np.int32)}
    return {"config": json.dumps({**SIZES, **CASES[name]}), **case}


if __name__ == "__main__":
    cases = {f"{n}/{k}": v for n in CASES for k, v in make_case(n).items()}
    np.savez_compressed(Path(__file__).with_name("decoder_golden.npz"), **cases)
