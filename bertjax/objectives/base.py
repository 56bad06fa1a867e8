# SPDX-License-Identifier: Apache-2.0
"""What an objective is, and the heads that make one.

A module of this package (or any dotted name) exports `make_head()` or
`make_objective(cfg)`; `config.objective = "mlm+nsp"` imports by name. Both may take
options, arguments with a default (text, numbers, true or false):
`"electra:generator=0.5"` (`objectives.parse`). Both may take `tokens`, which is the
tokenizer's TokenIds, and `teacher` (teacher.py), which are no options.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax import UserError
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params

Batch = Mapping[str, jax.Array]
Specs = Mapping[str, Any]  # of the arrays of a batch; each has a `shape`, without B
SEQUENCES = ("input_ids", "attention_mask", "token_type_ids")


class Sum(NamedTuple):
    """A sum and its weight, f32 []; the quotient over the global batch is the mean."""

    value: jax.Array
    weight: jax.Array


# A loss or a metric. One that is no quotient of two sums, such as metrics.Ranking, is a
# NamedTuple of sums with a `mean()` of its own.
Term = Any


def check_terms(owner: str, found: Any) -> None:
    """Refuse what `sums` must not return: UserError. owner: begins the message."""

    def is_term(total: Any) -> bool:
        known = isinstance(total, tuple) and (len(total) == 2 or hasattr(total, "mean"))
        return known and (hasattr(total, "mean") or not any(map(jnp.ndim, total)))

    terms = found.items() if isinstance(found, Mapping) else [("", found)]
    wrong = {name: total for name, total in terms if not (name and is_term(total))}
    for name, total in wrong.items():
        where = f" for {name!r}" * bool(name)
        is_array = isinstance(total, jax.Array | jax.ShapeDtypeStruct)
        kind = "array" if is_array else type(total).__name__
        shapes = ", ".join(str(jnp.shape(x)) for x in jax.tree.leaves(total))
        shaped = f" of shape {shapes}" * bool(shapes)
        raise UserError(
            f"{owner}: sums() returns {kind}{shaped}{where}: "
            'it has to return {"NAME": Sum(value, weight)}, two scalars each, such as '
            "jnp.sum(losses * weights) and jnp.sum(weights)"
        )


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """The ids of the tokenizer's special pieces, by the names that it has for them, and
    of the text's streams (data.streams) names with numbers of ids.

    Where there is no tokenizer yet, they are the first five: what is made then is asked
    what it needs, or measured on made-up rows, and never trained.
    """

    pad_id: int = 0
    unk_id: int = 1
    cls_id: int = 2
    sep_id: int = 3
    mask_id: int = 4
    special_ids: tuple[int, ...] = (0, 1, 2, 3, 4)
    streams: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenIds":
        """Take them from a tokenizer (data/tokenizers/tokenizer.py)."""
        names = "pad_id", "unk_id", "cls_id", "sep_id", "mask_id"
        special = tuple(int(i) for i in tokenizer.special_ids)
        return cls(*(int(getattr(tokenizer, name)) for name in names), special)


NO_TOKENIZER = TokenIds()


def row_keys(batch: Batch, *names: str) -> jax.Array:
    """Return a key of jax.random for each row, [B], made of what is in the row.

    names: arrays of the batch, integers [B, ...]; the same values give the same key on
    any mesh, in any micro-batch and in every evaluation, which has no rng. Masks are
    drawn anew in each epoch: with what they chose among the names, rows do not recur.
    """
    arrays = [batch[name].reshape(len(batch[name]), -1) for name in names]
    row = jnp.concatenate(arrays, axis=1).astype(jnp.uint32)
    # Odd powers of an odd number: a 32-bit polynomial of the row.
    base = np.full(row.shape[1], 0x9E3779B1, np.uint32)
    digests = jnp.sum((row + 1) * np.cumprod(base, dtype=np.uint32), 1, jnp.uint32)
    start = jax.random.key(0, impl="threefry2x32")
    return jax.vmap(lambda digest: jax.random.fold_in(start, digest))(digests)


Labels = Callable[[int, int], dict[str, jax.ShapeDtypeStruct]]
# Values of Head.reads.
EVERYWHERE, NOWHERE = "everywhere", "nowhere"


@dataclasses.dataclass(frozen=True)
class Head:
    """A loss on the shared encoder.

    name: its part of the parameters, `params[name]`.
    init(rng, cfg) -> parameters, {} for none.
    weights(batch) -> {term: global weight}: the terms that are losses, from the batch
    alone.
    sums(params, cfg, encoded, batch, rng) -> {term: Sum}: those terms and any metrics;
    params is the whole tree (for tied embeddings). What is optimised and what is logged
    of a loss is its value over the weight of `weights`; the Sum's own weight is that of
    metrics alone.
    reads: where it reads encoded.hidden: EVERYWHERE, [B, L, D]; NOWHERE; or the name of
    an array of the batch, i32 [B, P], that holds positions, [B, P, D].
    inner: layers, from 0, or -1 for the last, whose inputs [B, L, D] it reads too, as
    encoded.inner.
    needs: what the host has to make: "mlm" or another module of data/features, or a
    dotted name, with its options ("diffusion:schedule=cosine"); "nsp" or "sop": pairs
    with labels. pooled: whether it reads the pooled vector. causal: in its rows a
    token sees itself and those before it alone (EncoderConfig.is_decoder is set): a
    head beside it has to be causal too.
    params: the name of its part of the parameters, which heads may share; "": its own.
    init_teacher(rng) -> parameters of the form that params["teacher"] have, of another
    model that it learns from; None: it reads none. needs_teacher: it has no loss
    without one.
    outputs(params, cfg, encoded, batch) -> {name: f32 [B, ...]}: what an evaluation
    keeps of every row.
    reduce(params, cfg, encoded, batch) -> arrays [B, ...]: what sums and outputs get in
    the place of encoded, made of each row by itself. chunks: in how many parts a step
    makes it, one after the other, so that memory holds one part's activations (of a
    head that stands alone, where they divide the rows).
    labels(B, L) -> {name: shape and dtype}: what a batch holds for it, beside tokens
    and what "mlm" and pairs bring; measuring makes it up.
    coefficients: {term: factor}, 1 for those it does not name.
    shardings: rows for parameters that parallel/sharding.py does not know; a task's
    head that has none is one of heads.init_task.
    flops(cfg, L, P) -> those that it adds to the encoder's, of a token slot, forward
    and backward, P being the predictions of a row (`<name>_ids`, else those of
    "mlm_ids"); None: of a head from outside nobody knows them.
    whole_batch: where rows are compared with each other (in-batch negatives), the rows
    that an evaluation takes at once, so that its figures depend on no batch size; 0
    where they do not anyway. A step's batch is not parted then (accumulate). None: each
    row is by itself.
    task_type: the labelled rows that it learns from: a module of bertjax/tasks/types
    ("classify", "tag", ...) or a dotted name, whose TASK_TYPE reads their columns,
    gives the head its options, and scores its outputs; None: running text. Where a row
    has several sequences, [B, C, L], encoded has [B C, ...].

    Raises UserError without `reads`, or with `at`, its name in version 0.1.
    """

    name: str
    init: Callable[[jax.Array, EncoderConfig], Params]
    weights: Callable[[Batch], dict[str, jax.Array]]
    sums: Callable[..., dict[str, Term]]
    reads: str = ""
    needs: frozenset[str] = frozenset()
    pooled: bool = False
    outputs: Callable[..., dict[str, jax.Array]] | None = None
    labels: Labels = lambda rows, length: {}
    coefficients: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shardings: tuple[tuple[str, str], ...] = ()
    flops: Callable[[EncoderConfig, int, int], float] | None = None
    whole_batch: int | None = None
    task_type: str | None = None
    causal: bool = False
    params: str = ""
    init_teacher: Callable[[jax.Array], Params] | None = None
    needs_teacher: bool = False
    inner: tuple[int, ...] = ()
    reduce: Callable[..., Any] | None = None
    chunks: int = 1
    at: dataclasses.InitVar[str | None] = None

    def __post_init__(self, at: str | None) -> None:
        if at is not None or not isinstance(self.reads, str) or not self.reads:
            raise UserError(
                f"objective: the head {self.name} does not say where it reads hidden: "
                'give its Head reads="everywhere", reads="nowhere" (at="" before) or '
                'reads="mlm_positions", an array of the batch (at= before)'
            )


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is trained: like a Head, but it owns its forward pass.

    init(rng) -> params; weights(batch); sums(params, batch, rng). evaluate(params,
    batch) -> (sums, outputs), where there are outputs. everywhere: what the last layer
    makes of every token is read. flops(specs) -> those of a token slot, forward and
    backward, by the arrays of a batch; None where nobody knows them. whole_batch,
    task_type, init_teacher, needs_teacher: as a Head has them. group: of a mixture by
    rows, how many neighbouring rows make a group, which lie on one device. tables:
    shapes and dtypes of what it finds in params["tables"], arrays [N, ...] by name that
    no gradient and no checkpoint holds: those of the rows' `tables`, whose N devices
    share and fill up. find(params, batch) -> the batch with what it finds there, which
    is read before texts are written.
    """

    init: Callable[[jax.Array], Params]
    weights: Callable[[Batch], dict[str, jax.Array]]
    sums: Callable[[Params, Batch, jax.Array | None], dict[str, Term]]
    needs: frozenset[str]
    coefficients: Mapping[str, float]
    shardings: tuple[tuple[str, str], ...] = ()
    evaluate: Callable[[Params, Batch], tuple[dict[str, Term], Any]] | None = None
    labels: Labels = lambda rows, length: {}
    everywhere: bool = True
    flops: Callable[[Specs], float] | None = None
    whole_batch: int | None = None
    task_type: str | None = None
    init_teacher: Callable[[jax.Array], Params] | None = None
    needs_teacher: bool = False
    group: int = 1
    tables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    find: Callable[[Params, Batch], Batch] | None = None
