# SPDX-License-Identifier: Apache-2.0
"""UNITER: predict masked words, masked image regions, and whether text and image match.

Chen et al. 2020, arXiv 1909.11740, section 3. One encoder reads the words of a text,
with token type 0, and after them the regions of an image, with type 1. A region's
embedding is the sum of a projection of its feature and a projection of its box, each
normalized (section 3.1). Regions have no order: all have position 0, that of the first
word. Whether text and image match is predicted at the first word.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.models.flops import encoder_flops, head_flops
from bertjax.models.layers import (
    Params,
    Rng,
    activate,
    draw,
    layer_norm,
    linear,
    linear_specs,
    lookup,
    norm_specs,
    take_at,
)
from bertjax.objectives.base import Batch, Objective, Specs, Sum, Term
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.metrics import accuracy, loss_and_accuracy, nats_and_right
from bertjax.objectives.token_head import PARAMS, score_tokens, sum_in_chunks
from bertjax.parallel.sharding import constrain, gather_params, gather_rows

BOX = 4  # x1, y1, x2, y2 as shares of the image's width and height
# The kind of prediction -> the prefix of its terms' names.
TERMS = {"words": "mlm", "regions": "region", "pairs": "alignment"}
SHARDINGS = (
    ("regions/(features|boxes)/kernel", "table embed"),
    ("regions/transform/kernel", "embed width"),
    ("regions/(features|boxes|transform)/bias", "width"),
    ("regions/(features|boxes|transform)_norm/(scale|bias)", "width"),
    ("regions/to_(features|classes)/kernel|alignment/kernel", "embed classes"),
    ("regions/to_(features|classes)/bias|alignment/bias", "classes"),
)


def make_objective(
    cfg: EncoderConfig,
    regions: int = 36,
    masked: int = 6,
    features: int = 2048,
    classes: int = 0,
    kinds: str = "words/regions/pairs",
) -> tuple[Objective, EncoderConfig]:
    """Build the objective for rows with R regions and features of width F.

    regions, features: R and F; masked: K, the most regions that are predicted per row;
    classes: C, the number of classes of a region, 0 for none; kinds: keys of TERMS,
    joined by "/"; only their losses are used. A task sets the options from task.* of
    its config. Raises UserError for a decoder, and for type_vocab_size=1, with which
    words and regions would have the same token type.
    """
    if cfg.is_decoder or cfg.num_decoder_layers:
        raise UserError(
            "objective=regions is of encoders: set model.is_decoder=False and "
            "model.num_decoder_layers=0"
        )
    if cfg.type_vocab_size == 1:
        raise UserError(
            "objective=regions: model.type_vocab_size=1 leaves words and regions one "
            "token type: give 2, or 0 for none"
        )
    cfg = encoder.without_pooler(cfg)
    wanted = tuple(TERMS[kind] for kind in kinds.split("/"))

    def evaluate(
        params: Params, batch: Batch, rng: Rng = None
    ) -> tuple[dict[str, Term], dict[str, jax.Array]]:
        terms, outputs = score(cfg, params, batch, rng)
        return {k: v for k, v in terms.items() if k.startswith(wanted)}, outputs

    objective = Objective(
        init=functools.partial(init, cfg, features, classes),
        weights=functools.partial(weights, classes, wanted),
        sums=lambda params, batch, rng: evaluate(params, batch, rng)[0],
        needs=frozenset({"regions", "labels"}),
        coefficients={},
        shardings=SHARDINGS,
        evaluate=evaluate,
        labels=functools.partial(labels, regions, masked, features, classes),
        everywhere=False,
        flops=functools.partial(flops, cfg),
        task_type="regions",
    )
    return objective, cfg


def init(cfg: EncoderConfig, features: int, classes: int, rng: jax.Array) -> Params:
    """Make the parameters of the encoder, the regions and the heads."""
    d, e = cfg.hidden_size, cfg.embedding_width
    rngs = jax.random.split(rng, 4)
    specs: dict[str, Any] = {
        "features": linear_specs((features,), (e,)),
        "features_norm": norm_specs(e),
        "boxes": linear_specs((BOX,), (e,)),
        "boxes_norm": norm_specs(e),
        "transform": linear_specs((d,), (d,)),
        "transform_norm": norm_specs(d),
        "to_features": linear_specs((d,), (features,)),
    }
    if classes:
        specs["to_classes"] = linear_specs((d,), (classes,))
    params = {
        "encoder": encoder.init(rngs[0], cfg),
        "regions": draw(rngs[1], specs, cfg.initializer_range),
        "alignment": heads.init_classes(rngs[2], cfg),
    }
    if head := heads.init_mlm(rngs[3], cfg):
        params[PARAMS] = head
    return params


def weights(
    classes: int, wanted: tuple[str, ...], batch: Batch
) -> dict[str, jax.Array]:
    """Return the weights of the losses, f32 []: masked words, masked regions, pairs.

    wanted: the prefixes of the losses' names that are used.
    """
    masked = jnp.sum(batch["region_weights"])
    every = {
        "mlm_loss": jnp.sum(batch["mlm_weights"]),
        "region_feature_loss": masked,
        **({"region_class_loss": masked} if classes else {}),
        "alignment_loss": jnp.sum(batch["alignment_weights"]),
    }
    return {name: weight for name, weight in every.items() if name.startswith(wanted)}


def labels(
    regions: int, masked: int, features: int, classes: int, rows: int, length: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of a batch, beside those of the masked text."""
    each = {
        "region_features": ((regions, features), jnp.float32),
        "region_boxes": ((regions, BOX), jnp.float32),
        "region_mask": ((regions,), jnp.int32),
        "region_positions": ((masked,), jnp.int32),
        "region_targets": ((masked, features), jnp.float32),
        "region_weights": ((masked,), jnp.float32),
        "alignment_labels": ((), jnp.int32),
        "alignment_weights": ((), jnp.float32),
    }
    if classes:
        each["region_classes"] = ((masked,), jnp.int32)
    return {k: jax.ShapeDtypeStruct((rows, *n), kind) for k, (n, kind) in each.items()}


def flops(cfg: EncoderConfig, specs: Specs) -> float:
    """Count the FLOPs of the encoder on words and regions and of the heads, per slot of
    the text."""
    length, regions = (specs[k].shape[0] for k in ("input_ids", "region_features"))
    words, masked = (specs[k].shape[0] for k in ("mlm_ids", "region_positions"))
    width, d = specs["region_features"].shape[-1], cfg.hidden_size
    both = length + regions
    read = encoder_flops(cfg, both, words + masked + 1, False) * both
    own = 6.0 * (regions * width * cfg.embedding_width + masked * d * (d + width))
    return (read + own) / length + head_flops(cfg, length, words)


def embed_regions(params: Params, cfg: EncoderConfig, batch: Batch) -> jax.Array:
    """Embed region_features and region_boxes: f32 [B, R, E]."""
    with jax.named_scope("regions"):
        parts = []
        for name, array in (("features", "region_features"), ("boxes", "region_boxes")):
            x = linear(params[name], batch[array].astype(cfg.dtype))
            x = layer_norm(params[f"{name}_norm"], x, cfg.layer_norm_eps)
            parts.append(x.astype(jnp.float32))
        return parts[0] + parts[1]


def encode(
    params: Params, cfg: EncoderConfig, batch: Batch, rng: Rng, at: Any
) -> jax.Array:
    """Encode L words and R regions after them; return hidden [B, P, D] at `at`.

    at: i32 [B, P], positions in [0, L + R). The encoder reads all padding at the end of
    a row, which cuDNN's attention needs, so that regions directly follow the words.
    """
    ids, real = batch["input_ids"], batch["region_mask"]
    words = lookup(params["encoder"]["embeddings"]["word"], ids)
    regions = embed_regions(params["regions"], cfg, batch)
    place = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    rows = {
        "attention_mask": jnp.concatenate([batch["attention_mask"], real], axis=1),
        "position_ids": jnp.concatenate([place, jnp.zeros_like(real)], axis=1),
        "token_type_ids": jnp.concatenate(
            [jnp.zeros_like(ids), jnp.ones_like(real)], axis=1
        ),
    }
    order = jnp.argsort(rows["attention_mask"] == 0, axis=1, stable=True)
    rows = {name: take_at(x, order) for name, x in rows.items()}
    inputs = take_at(jnp.concatenate([words, regions], axis=1), order)
    inputs, at = constrain(inputs, "batch length _"), take_at(jnp.argsort(order), at)
    return encoder.apply(params["encoder"], cfg, rows, rng, at, inputs).hidden


def score(
    cfg: EncoderConfig, params: Params, batch: Batch, rng: Rng
) -> tuple[dict[str, Term], dict[str, jax.Array]]:
    """Encode a batch, and compute the losses of masked words, regions and pairs.

    Returns (terms, outputs). The outputs are `alignment_logits` f32 [B, 2] and, for the
    P slots of masked words, word_ids, word_weights, word_nats and word_right [B, P]. A
    batch of rows to answer has nothing masked: it has no terms, and only
    alignment_logits.
    """
    params = gather_params(params, cfg.dtype, SHARDINGS)
    length = batch["input_ids"].shape[1]
    first = jnp.zeros((len(batch["input_ids"]), 1), jnp.int32)
    places, is_masked = [first], "mlm_ids" in batch
    if is_masked:
        places += [batch["mlm_positions"], length + batch["region_positions"]]
    hidden = encode(params, cfg, batch, rng, jnp.concatenate(places, axis=1))
    logits = heads.class_logits(params["alignment"], hidden[:, 0])
    outputs = {"alignment_logits": logits}
    if is_masked:
        words = 1 + batch["mlm_ids"].shape[1]
        terms, of_words = score_words(params, cfg, hidden[:, 1:words], batch)
        terms |= score_regions(params["regions"], cfg, hidden[:, words:], batch)
        args = logits, batch["alignment_labels"], batch["alignment_weights"]
        terms |= loss_and_accuracy("alignment", *args)
        outputs |= of_words
    else:
        terms = {}
    return terms, gather_rows(outputs)


def score_words(
    params: Params, cfg: EncoderConfig, hidden: jax.Array, batch: Batch
) -> tuple[dict[str, Term], dict[str, jax.Array]]:
    """Compute the terms of masked words and the outputs per word; hidden [B, P, D]."""

    def one(first: Any, hidden: Any, ids: Any, weights: Any) -> tuple[Any, Any]:
        terms, logits = score_tokens(params, cfg, hidden, ids, weights)
        nats, right = nats_and_right(logits, ids)
        return terms, {"word_nats": nats, "word_right": right.astype(jnp.float32)}

    arrays = hidden, batch["mlm_ids"], batch["mlm_weights"]
    terms, each = sum_in_chunks(one, cfg, arrays)
    return terms, each | {"word_ids": arrays[1], "word_weights": arrays[2]}


def score_regions(
    params: Params, cfg: EncoderConfig, hidden: jax.Array, batch: Batch
) -> dict[str, Term]:
    """Compute the terms of masked regions; hidden [B, K, D].

    Features are regressed by the squared error, averaged over F. The loss of classes is
    the cross-entropy if region_classes holds numbers, or KL(truth || prediction) if it
    holds probabilities (UNITER, section 3.3).
    """
    with jax.named_scope("regions_head"):
        x = activate(linear(params["transform"], hidden), cfg.hidden_act)
        x = layer_norm(params["transform_norm"], x, cfg.layer_norm_eps)
        found = heads.linear_f32(params["to_features"], x)
        counted = batch["region_weights"]
        square = jnp.mean(jnp.square(found - batch["region_targets"]), axis=-1)
        total = jnp.sum(counted)
        terms: dict[str, Term] = {
            "region_feature_loss": Sum(jnp.sum(counted * square), total)
        }
        if "to_classes" not in params:
            return terms
        logits = heads.linear_f32(params["to_classes"], x)
        truth = batch["region_classes"]
        best = truth if truth.ndim == 2 else jnp.argmax(truth, axis=-1)
        if truth.ndim == 2:
            terms["region_class_loss"] = cross_entropy(logits, truth, counted)
        else:
            log = jnp.log(jnp.maximum(truth, 1e-9)) - jax.nn.log_softmax(logits)
            each = jnp.sum(truth * log, axis=-1)
            terms["region_class_loss"] = Sum(jnp.sum(counted * each), total)
        terms["region_class_accuracy"] = accuracy(logits, best, counted)
    return terms
