# SPDX-License-Identifier: Apache-2.0
"""Write family_golden.npz: small random encoders of each family, and transformers'
outputs. Needs torch and transformers 5, which the tests do not.

    python tests/testdata/make_family_golden.py

A case <name> has <name>/config (JSON: EncoderConfig), <name>/params/<path> (int8, in
64ths, so that small files hold exact numbers), <name>/input_ids ..., and the results:
<name>/hidden and the like, at length 1 <name>/hidden_of_one, <name>/grads/<path>.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import torch
import transformers as t

from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.parallel.sharding import path_name

# ---------------------------------------------------------------- names
EMBEDDINGS = {
    "embeddings/word": "embeddings.word_embeddings.weight",
    "embeddings/position": "embeddings.position_embeddings.weight",
    "embeddings/token_type": "embeddings.token_type_embeddings.weight",
    "embeddings/norm": "embeddings.LayerNorm",
}
BERT = EMBEDDINGS | {
    "layers/attention/query": "encoder.layer.{}.attention.self.query",
    "layers/attention/key": "encoder.layer.{}.attention.self.key",
    "layers/attention/value": "encoder.layer.{}.attention.self.value",
    "layers/attention/output": "encoder.layer.{}.attention.output.dense",
    "layers/attention/norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layers/mlp/up": "encoder.layer.{}.intermediate.dense",
    "layers/mlp/down": "encoder.layer.{}.output.dense",
    "layers/mlp/norm": "encoder.layer.{}.output.LayerNorm",
    "pooler": "pooler.dense",
}
GROUP = "encoder.albert_layer_groups.{}.albert_layers.0."
ENCODERS = {
    "bert": BERT,
    "roberta": BERT,
    "electra": BERT | {"embeddings/projection": "embeddings_project"},
    "albert": EMBEDDINGS
    | {
        "embeddings/projection": "encoder.embedding_hidden_mapping_in",
        "layers/attention/query": GROUP + "attention.query",
        "layers/attention/key": GROUP + "attention.key",
        "layers/attention/value": GROUP + "attention.value",
        "layers/attention/output": GROUP + "attention.dense",
        "layers/attention/norm": GROUP + "attention.LayerNorm",
        "layers/mlp/up": GROUP + "ffn",
        "layers/mlp/down": GROUP + "ffn_output",
        "layers/mlp/norm": GROUP + "full_layer_layer_norm",
        "pooler": "pooler",
    },
    "distilbert": EMBEDDINGS
    | {
        "layers/attention/query": "transformer.layer.{}.attention.q_lin",
        "layers/attention/key": "transformer.layer.{}.attention.k_lin",
        "layers/attention/value": "transformer.layer.{}.attention.v_lin",
        "layers/attention/output": "transformer.layer.{}.attention.out_lin",
        "layers/attention/norm": "transformer.layer.{}.sa_layer_norm",
        "layers/mlp/up": "transformer.layer.{}.ffn.lin1",
        "layers/mlp/down": "transformer.layer.{}.ffn.lin2",
        "layers/mlp/norm": "transformer.layer.{}.output_layer_norm",
    },
    "mpnet": BERT
    | {
        "embeddings/relative": "encoder.relative_attention_bias.weight",
        "layers/attention/query": "encoder.layer.{}.attention.attn.q",
        "layers/attention/key": "encoder.layer.{}.attention.attn.k",
        "layers/attention/value": "encoder.layer.{}.attention.attn.v",
        "layers/attention/output": "encoder.layer.{}.attention.attn.o",
        "layers/attention/norm": "encoder.layer.{}.attention.LayerNorm",
    },
    "model": {  # ModernBERT; @i/n: part i of n of a joint matrix
        "embeddings/word": "embeddings.tok_embeddings.weight",
        "embeddings/norm": "embeddings.norm",
        "layers/attention/query": "layers.{}.attn.Wqkv@0/3",
        "layers/attention/key": "layers.{}.attn.Wqkv@1/3",
        "layers/attention/value": "layers.{}.attn.Wqkv@2/3",
        "layers/attention/output": "layers.{}.attn.Wo",
        "layers/attention/norm": "layers.{}.attn_norm",
        "layers/mlp/up": "layers.{}.mlp.Wi@0/2",
        "layers/mlp/gate": "layers.{}.mlp.Wi@1/2",
        "layers/mlp/down": "layers.{}.mlp.Wo",
        "layers/mlp/norm": "layers.{}.mlp_norm",
        "final_norm": "final_norm",
    },
}
HEADS = {
    "bert": {
        "mlm/transform": "cls.predictions.transform.dense",
        "mlm/norm": "cls.predictions.transform.LayerNorm",
        "mlm/bias": "cls.predictions.bias",
        "mlm/decoder": "cls.predictions.decoder.weight",
        "nsp": "cls.seq_relationship",
    },
    "roberta": {
        "mlm/transform": "lm_head.dense",
        "mlm/norm": "lm_head.layer_norm",
        "mlm/bias": "lm_head.bias",
    },
    "albert": {
        "mlm/transform": "predictions.dense",
        "mlm/norm": "predictions.LayerNorm",
        "mlm/bias": "predictions.bias",
        "sop": "sop_classifier.classifier",
    },
    "electra": {
        "mlm/transform": "generator_predictions.dense",
        "mlm/norm": "generator_predictions.LayerNorm",
        "mlm/bias": "generator_lm_head.bias",
        "rtd/transform": "discriminator_predictions.dense",
        "rtd/output": "discriminator_predictions.dense_prediction",
    },
    "distilbert": {
        "mlm/transform": "vocab_transform",
        "mlm/norm": "vocab_layer_norm",
        "mlm/bias": "vocab_projector.bias",
    },
    "mpnet": {
        "mlm/transform": "lm_head.dense",
        "mlm/norm": "lm_head.layer_norm",
        "mlm/bias": "lm_head.bias",
    },
    "model": {
        "mlm/transform": "head.dense",
        "mlm/norm": "head.norm",
        "mlm/bias": "decoder.bias",
    },
}
# Second names of biases, for models without tied weights.
TWINS = {"cls.predictions.bias": "cls.predictions.decoder.bias"}


def find(path: str, index: int, stem: str, first: int) -> tuple[str, int, int]:
    """Return (transformers' name, part, number of parts) of one of our leaves."""
    folder, _, leaf = path.removeprefix("encoder/").rpartition("/")
    table = {k: f"{stem}.{v}" for k, v in ENCODERS[stem].items()} | HEADS[stem]
    name = table.get(f"{folder}/{leaf}")
    if name is None:
        name, _, part = table[folder].partition("@")
        name += ".bias" if leaf == "bias" else ".weight"
    else:
        part = ""
    which, _, of = part.partition("/")
    return name.format(index + first), int(which or 0), int(of or 1)


def walk(params, stem, cfg):
    """Yield (path, leaf, layer or None, transformers' name, part, parts) per leaf."""
    for key, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = path_name(key)
        stacked = path.startswith("encoder/layers")
        late = path.startswith("encoder/layers/attention/norm")
        first = int(late and not cfg.first_attention_norm)
        for i in range(len(leaf)) if stacked else (None,):
            yield path, leaf, i, *find(path, i or 0, stem, first)


def to_theirs(path: str, leaf: np.ndarray) -> np.ndarray:
    if path.endswith("kernel"):
        wide = "attention/output" in path
        flat = leaf.reshape(-1, leaf.shape[-1]) if wide else leaf.reshape(len(leaf), -1)
        return flat.T
    return leaf.reshape(-1) if path.endswith("bias") else leaf


# ---------------------------------------------------------------- cases
SMALL = dict(vocab_size=41, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             intermediate_size=24, max_position_embeddings=20)  # fmt: skip
OTHER = dict(vocab_size=37, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
             intermediate_size=40, max_position_embeddings=16,
             layer_norm_eps=1e-5)  # fmt: skip
ROBERTA = dict(position_offset=2, type_vocab_size=1, classifier_activation="gelu")
MODERN = dict(
    type_vocab_size=0, pooler=False, layer_norm_eps=1e-5,
    position_embedding_type="rope", rope_theta=160_000.0, local_rope_theta=10_000.0,
    norm_position="pre", norm_bias=False, first_attention_norm=False, final_norm=True,
    attention_bias=False, local_attention=8, global_attn_every_n_layers=3,
    mlp_type="glu", mlp_bias=False, classifier_bias=False, num_hidden_layers=5,
    max_position_embeddings=32,
)  # fmt: skip
CASES = {  # name -> (stem of transformers' attribute, EncoderConfig)
    "bert": ("bert", dict(SMALL)),
    "bert_untied": (
        "bert",
        OTHER | dict(hidden_act="gelu_new", tie_word_embeddings=False),
    ),
    "roberta": ("roberta", SMALL | ROBERTA | dict(layer_norm_eps=1e-5)),
    "xlm-roberta": ("roberta", OTHER | ROBERTA | dict(hidden_act="gelu_pytorch_tanh")),
    "albert": ("albert", SMALL | dict(embedding_size=8, num_hidden_groups=1)),
    "albert_groups": (
        "albert",
        OTHER
        | dict(embedding_size=24, num_hidden_groups=2, num_hidden_layers=5)
        | dict(hidden_act="gelu_new"),
    ),
    "electra": (
        "electra",
        SMALL | dict(embedding_size=12, pooler=False, classifier_activation="gelu"),
    ),
    "electra_wide": (
        "electra",
        OTHER | dict(hidden_act="gelu_new", classifier_activation="gelu", pooler=False),
    ),
    "distilbert": ("distilbert", SMALL | dict(type_vocab_size=0, pooler=False)),
    "distilbert_relu": (
        "distilbert",
        OTHER
        | dict(type_vocab_size=0, pooler=False, hidden_act="relu")
        | dict(layer_norm_eps=1e-12),
    ),
    "modernbert": ("model", SMALL | MODERN),
    "modernbert_biases": (
        "model",
        OTHER
        | MODERN
        | dict(norm_bias=True, attention_bias=True, mlp_bias=True, decoder_bias=False)
        | dict(classifier_bias=True, hidden_act="silu", classifier_activation="gelu")
        | dict(local_attention=5, global_attn_every_n_layers=2, hidden_size=48),
    ),
    # long enough that distances share buckets
    "mpnet": (
        "mpnet",
        SMALL
        | ROBERTA
        | dict(type_vocab_size=0, relative_attention_num_buckets=32)
        | dict(max_position_embeddings=60),
    ),
}
GRADIENTS = ("bert", "modernbert")


def build(name: str, stem: str, cfg: EncoderConfig) -> list[torch.nn.Module]:
    """Build transformers' models of a case; ELECTRA has two."""
    keys = (
        "vocab_size hidden_size num_hidden_layers hidden_act num_attention_heads "
        "intermediate_size max_position_embeddings type_vocab_size layer_norm_eps "
        "tie_word_embeddings"
    )
    sizes = {key: getattr(cfg, key) for key in keys.split()}
    eager = dict(attn_implementation="eager")
    if stem == "bert":
        return [t.BertForPreTraining(t.BertConfig(**sizes, **eager))]
    if stem == "roberta":
        config, whole, bare = (
            (t.XLMRobertaConfig, t.XLMRobertaForMaskedLM, t.XLMRobertaModel)
            if name == "xlm-roberta"
            else (t.RobertaConfig, t.RobertaForMaskedLM, t.RobertaModel)
        )
        made = config(**sizes, pad_token_id=1, bos_token_id=0, eos_token_id=2, **eager)
        model = whole(made)
        model.roberta = bare(made, add_pooling_layer=True)
        model.tie_weights()
        return [model]
    if stem == "mpnet":
        config = t.MPNetConfig(**sizes, **eager)
        model = t.MPNetForMaskedLM(config)
        model.mpnet = t.MPNetModel(config, add_pooling_layer=True)
        model.tie_weights()
        return [model]
    if stem == "albert":
        more = dict(embedding_size=cfg.embedding_size, inner_group_num=1)
        more["num_hidden_groups"] = cfg.num_hidden_groups
        return [t.AlbertForPreTraining(t.AlbertConfig(**sizes, **more, **eager))]
    if stem == "electra":
        config = t.ElectraConfig(**sizes, embedding_size=cfg.embedding_width, **eager)
        return [t.ElectraForMaskedLM(config), t.ElectraForPreTraining(config)]
    if stem == "distilbert":
        config = t.DistilBertConfig(
            vocab_size=cfg.vocab_size, dim=cfg.hidden_size,
            n_layers=cfg.num_hidden_layers, n_heads=cfg.num_attention_heads,
            hidden_dim=cfg.intermediate_size, activation=cfg.hidden_act,
            max_position_embeddings=cfg.max_position_embeddings, **eager,
        )  # fmt: skip
        return [t.DistilBertForMaskedLM(config)]
    del sizes["hidden_act"], sizes["type_vocab_size"], sizes["layer_norm_eps"]
    keys = (
        "norm_bias attention_bias mlp_bias decoder_bias classifier_bias "
        "local_attention global_attn_every_n_layers"
    )
    config = t.ModernBertConfig(
        **sizes, **{k: getattr(cfg, k) for k in keys.split()},
        norm_eps=cfg.layer_norm_eps,
        hidden_activation=cfg.hidden_act,
        classifier_activation=cfg.classifier_activation or cfg.hidden_act,
        global_rope_theta=cfg.rope_theta, local_rope_theta=cfg.local_rope_theta,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        **eager,
    )  # fmt: skip
    return [t.ModernBertForMaskedLM(config)]


def make_params(cfg: EncoderConfig, stem: str, draw: np.random.Generator):
    """Draw every leaf of the encoder and the family's heads, as multiples of 1/64."""
    key = jax.random.key(0)
    shapes = {
        "encoder": jax.eval_shape(lambda: encoder.init(key, cfg)),
        "mlm": jax.eval_shape(lambda: heads.init_mlm(key, cfg)),
    }
    for name, make in (
        ("nsp", heads.init_classes),
        ("sop", heads.init_classes),
        ("rtd", heads.init_rtd),
    ):
        if any(k.startswith(name) for k in HEADS[stem]):
            shapes[name] = jax.eval_shape(lambda make=make: make(key, cfg))

    def one(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        value = centre + 0.3 * draw.standard_normal(leaf.shape)
        return np.clip(np.round(64 * value), -127, 127).astype(np.float32) / 64

    return jax.tree_util.tree_map_with_path(one, shapes)


def load(models, params, stem, cfg) -> None:
    """Copy our parameters to transformers' models, and check that all are filled."""
    theirs = [dict(m.named_parameters(remove_duplicate=False)) for m in models]
    filled = set()
    with torch.no_grad():
        for path, leaf, i, name, part, of in walk(params, stem, cfg):
            value = to_theirs(path, leaf if i is None else leaf[i])
            for table in theirs:
                for alias in (name, TWINS.get(name)):
                    if alias in table:
                        table[alias].chunk(of)[part].copy_(torch.tensor(value.copy()))
                        filled.add(table[alias])
    left = {n for table in theirs for n, p in table.items() if p not in filled}
    assert not left, left


def run(models, stem, inputs):
    """Return transformers' outputs."""
    given = dict(inputs)
    if stem in ("distilbert", "model", "mpnet"):
        del given["token_type_ids"]
    if stem == "roberta":
        given["token_type_ids"] = torch.zeros_like(given["token_type_ids"])
    first = models[0]
    bare = getattr(first, stem)(**given)
    out = first(**given)
    found = {
        "hidden": bare.last_hidden_state,
        "pooled": getattr(bare, "pooler_output", None),
        "mlm_logits": out.get("prediction_logits", out.get("logits")),
        "nsp_logits": out.get("seq_relationship_logits"),
        "sop_logits": out.get("sop_logits"),
        "rtd_logits": models[1](**given).logits if len(models) > 1 else None,
    }
    return {k: v for k, v in found.items() if v is not None}


def gradients(models, params, stem, cfg, inputs, labels):
    """Return the gradients of the mean masked-LM loss in our layout."""
    (model,) = models
    logits = run(models, stem, inputs)["mlm_logits"]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    table = dict(model.named_parameters(remove_duplicate=False))
    grads = {}
    for path, leaf, i, name, part, of in walk(params, stem, cfg):
        theirs = table[name].grad
        grad = np.zeros_like(leaf if i is None else leaf[i])
        if theirs is not None:
            chunk = theirs.chunk(of)[part].numpy()
            chunk = chunk.T if path.endswith("kernel") else chunk
            grad = chunk.reshape(grad.shape)
        grads.setdefault(path, []).append(grad)
    stacked = {p for p in grads if p.startswith("encoder/layers")}
    return {p: np.stack(g) if p in stacked else g[0] for p, g in grads.items()}


def main() -> None:
    arrays = {"versions": np.array(f"transformers {t.__version__}")}
    for seed, (name, (stem, options)) in enumerate(CASES.items()):
        draw = np.random.default_rng(seed)
        cfg = EncoderConfig(**options)
        models = build(name, stem, cfg)
        for model in models:
            model.eval()
        params = make_params(cfg, stem, draw)
        load(models, params, stem, cfg)
        length = cfg.max_length
        lengths = np.array([length, length // 2, 1])[:, None]
        places = np.arange(length)
        ids = draw.integers(5, cfg.vocab_size, (3, length))
        pad = 1 if stem in ("roberta", "mpnet") else 0
        inputs = {
            "input_ids": np.where(places < lengths, ids, pad),
            "attention_mask": (places < lengths).astype(np.int64),
            "token_type_ids": (places >= lengths // 2) * 1,
        }
        arrays[f"{name}/config"] = np.array(json.dumps(dataclasses.asdict(cfg)))
        arrays |= {f"{name}/{k}": v.astype(np.int16) for k, v in inputs.items()}
        for key, leaf in jax.tree_util.tree_leaves_with_path(params):
            path = f"{name}/params/{path_name(key)}"
            arrays[path] = np.round(64 * leaf).astype(np.int8)
        tensors = {k: torch.from_numpy(v) for k, v in inputs.items()}
        alone = {k: v[:, :1] for k, v in tensors.items()}
        with torch.no_grad():
            for end, given in (("", tensors), ("_of_one", alone)):
                for key, value in run(models, stem, given).items():
                    arrays[f"{name}/{key}{end}"] = value.numpy()
        if name in GRADIENTS:
            labels = torch.from_numpy(
                np.where((places < lengths) & (places % 3 == 0), ids, -100)
            )
            arrays[f"{name}/labels"] = labels.numpy().astype(np.int16)
            for path, grad in gradients(
                models, params, stem, cfg, tensors, labels
            ).items():
                arrays[f"{name}/grads/{path}"] = grad
        print(name, "done")
    np.savez_compressed(Path(__file__).with_name("family_golden.npz"), **arrays)


if __name__ == "__main__":
    main()
