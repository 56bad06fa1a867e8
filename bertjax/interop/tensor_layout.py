# SPDX-License-Identifier: Apache-2.0
"""Map a config's leaves to their tensors and shapes in files."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from bertjax.interop.family import Family
from bertjax.models.config import EncoderConfig

# Axes of our leaves: V vocabulary, E embedding, D hidden, H heads, K head width, M mlp,
# P positions, R buckets of relative positions, T token types, C two classes, S the
# classes of a task, O one. "in>out" is a dense layer, stored as [out, in] in their
# files and followed by a bias. Letters without a comma between them are one axis there:
# "D>HK" is [D, H, K] here and [H*K, D] there. Leaves of encoder/layers have the layer
# axis first. The decoder's leaves are as the encoder's of the same name, and its
# cross-attention as attention.
LAYOUTS = {
    "encoder/embeddings/word": "V,E",
    "encoder/embeddings/position": "P,E",
    "encoder/embeddings/relative": "R,H",
    "encoder/embeddings/token_type": "T,E",
    "encoder/embeddings/norm": "E",
    "encoder/embeddings/projection": "E>D",
    "encoder/layers/attention/query": "D>HK",
    "encoder/layers/attention/key": "D>HK",
    "encoder/layers/attention/value": "D>HK",
    "encoder/layers/attention/output": "HK>D",
    "encoder/layers/attention/norm": "D",
    "encoder/layers/mlp/up": "D>M",
    "encoder/layers/mlp/gate": "D>M",
    "encoder/layers/mlp/down": "M>D",
    "encoder/layers/mlp/norm": "D",
    "encoder/final_norm": "D",
    "encoder/pooler": "D>D",
    "mlm/transform": "D>E",
    "mlm/norm": "E",
    "mlm/bias": "V",
    "mlm/decoder": "V,E",
    "rtd/transform": "D>D",
    "rtd/output": "D>O",
    "nsp": "D>C",
    "sop": "D>C",
    # The name of a task's head does not matter.
    "task/transform": "D>D",
    "task/norm": "D",
    "task": "D>S",
}


STACKS = ("encoder", "decoder")  # beginnings of the paths of leaves outside heads


class Leaf(NamedTuple):
    """A leaf of ours, and its place in files.

    shape: here, including the stack's axis. stored_shape: of one tensor, or of this
    leaf's part of it. is_transposed: [in, out] here, [out, in] there. tensors: (name,
    part, parts) for each entry of the stack, whose rows are part number `part` of the
    tensor's; with parts = 1, all rows. For weights that a family has swapped
    (family.py), shapes and rows are still those of [out, in].
    """

    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    is_transposed: bool
    is_stacked: bool
    tensors: list[tuple[str, int, int]]


def layout_of(path: str) -> str:
    """Return the axes of a leaf, in the notation of LAYOUTS.

    >>> layout_of("encoder/layers/mlp/up/bias"), layout_of("classify/kernel")
    ('M', 'D>S')
    >>> layout_of("decoder/layers/cross/output/kernel")
    'HK>D'
    """
    if path.startswith("decoder/"):
        path = path.replace("decoder/", "encoder/", 1).replace("/cross/", "/attention/")
    if path in LAYOUTS:
        return LAYOUTS[path]
    module, _, leaf = path.rpartition("/")
    if module not in LAYOUTS:
        module = "/".join(["task", *module.split("/")[1:]])
    axes = LAYOUTS[module]
    return axes.rpartition(">")[2] if leaf == "bias" else axes


def leaves(family: Family, cfg: EncoderConfig, classes: int = 2) -> dict[str, Leaf]:
    """Return the leaves of a model of this family and config, with all its heads.

    classes: the number of a task's classes.
    """
    present = {
        "^decoder/": cfg.num_decoder_layers,
        "embeddings/position": cfg.position_embedding_type == "absolute",
        "embeddings/relative": cfg.relative_attention_num_buckets,
        "embeddings/token_type": cfg.type_vocab_size,
        "embeddings/norm/": cfg.embedding_norm,
        "embeddings/projection/": cfg.embedding_size,
        "norm/bias": cfg.norm_bias,
        "(attention|cross)/(query|key|value|output)/bias": cfg.attention_bias,
        "attention/norm/": cfg.first_attention_norm or cfg.num_hidden_layers > 1,
        "mlp/gate/": cfg.mlp_type == "glu",
        "mlp/(up|gate|down)/bias": cfg.mlp_bias,
        "final_norm/": cfg.final_norm,
        "transform/bias": cfg.classifier_bias,
        "mlm/bias": cfg.decoder_bias,
        "mlm/decoder": not cfg.tie_word_embeddings,
    }
    dims = {
        "V": cfg.vocab_size,
        "E": cfg.embedding_width,
        "D": cfg.hidden_size,
        "H": cfg.num_attention_heads,
        "K": cfg.head_dim,
        "M": cfg.intermediate_size,
        "P": cfg.max_position_embeddings,
        "R": cfg.relative_attention_num_buckets,
        "T": cfg.type_vocab_size,
        "C": 2,
        "S": classes,
        "O": 1,
    }
    absent = [pattern for pattern, is_present in present.items() if not is_present]
    found = {}
    for path, name in family.names_for(cfg.mlp_type).items():
        if any(re.search(pattern, path) for pattern in absent):
            continue
        name, _, share = name.partition("@")
        part, parts = map(int, (share or "0/1").split("/"))
        is_stacked, layers = "{}" in name, range(1)
        if is_stacked:
            first = "/attention/norm/" in path and not cfg.first_attention_norm
            depth = cfg.groups[-1] + 1
            if path.startswith("decoder/"):
                depth = cfg.num_decoder_layers
            layers = range(first, depth)
        axes = layout_of(path)
        sizes = [[dims[x] for x in axis] for axis in axes.replace(">", ",").split(",")]
        found[path] = Leaf(
            (*[len(layers)] * is_stacked, *itertools.chain(*sizes)),
            tuple(map(math.prod, sizes[::-1] if ">" in axes else sizes)),
            ">" in axes,
            is_stacked,
            [(name.replace("{}", str(i)), part, parts) for i in layers],
        )
    return found


def heads_of(paths: Iterable[str]) -> frozenset[str]:
    """Return the heads that these leaves belong to."""
    return frozenset(p.split("/")[0] for p in paths) - set(STACKS)


def bare_heads(family: Family, cfg: EncoderConfig) -> frozenset[str]:
    """Return the heads without leaves, which are always there: {"mlm"} or none."""
    return frozenset() if cfg.has_head_parameters else heads_of(family.names) & {"mlm"}


def unflatten(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build a nested dict from (path, leaf) pairs, as `walk` yields them."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        *folders, name = path.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[name] = leaf
    return tree


def walk(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the (path, leaf) pairs of a nested dict."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from walk(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value
