# SPDX-License-Identifier: Apache-2.0
"""The interfaces Objective and Head, and the types they use.

A module of this package (or any module, by its dotted name) exports `make_head()` or
`make_objective(cfg)`; `config.objective = "mlm+nsp"` imports modules by name. Both
functions may accept options, which are arguments with a default (a string, a number or
a boolean): `"electra:generator=0.5"` (`objectives.parse`). Both may also accept
arguments that are not options: `tokens`, the tokenizer's TokenIds; `teacher`
(teacher.py); and `candidates`, the candidates of a task's rows.
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
# A specification of each array of a batch; its `shape` leaves out the batch axis B.
Specs = Mapping[str, Any]
SEQUENCES = ("input_ids", "attention_mask", "token_type_ids")


class Sum(NamedTuple):
    """A weighted sum and its weight, f32 [] each.

    The mean is the quotient of the two totals over the global batch.
    """

    value: jax.Array
    weight: jax.Array


# A loss or a metric: a Sum, or, if it is not the quotient of two sums (such as
# metrics.Ranking), a NamedTuple of sums with its own `mean()`.
Term = Any


def check_terms(owner: str, found: Any) -> None:
    """Raise UserError if `found` is not a valid return value of `sums`.

    owner: the beginning of the error message.
    """

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
    """The ids of the tokenizer's special tokens, named as in the tokenizer.

    streams: the name and number of ids of each stream of the text (data.streams).
    The defaults are for code that has no tokenizer yet. An objective built with them
    is only asked what it needs, or measured on made-up rows; it is never trained.
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
        """Read the ids from a tokenizer (data/tokenizers/tokenizer.py)."""
        names = "pad_id", "unk_id", "cls_id", "sep_id", "mask_id"
        special = tuple(int(i) for i in tokenizer.special_ids)
        return cls(*(int(getattr(tokenizer, name)) for name in names), special)


NO_TOKENIZER = TokenIds()


def row_keys(batch: Batch, *names: str) -> jax.Array:
    """Return a jax.random key for each row, [B], derived from the row's contents.

    names: integer arrays of the batch, [B, ...]. Equal contents give the same key on
    any mesh, in any micro-batch, and in evaluations, which have no rng. Include the
    masked positions in `names`: masks are drawn anew in each epoch, so keys then do not
    repeat from epoch to epoch.
    """
    arrays = [batch[name].reshape(len(batch[name]), -1) for name in names]
    row = jnp.concatenate(arrays, axis=1).astype(jnp.uint32)
    # Hash the row by a 32-bit polynomial; the powers of an odd base are all odd.
    base = np.full(row.shape[1], 0x9E3779B1, np.uint32)
    digests = jnp.sum((row + 1) * np.cumprod(base, dtype=np.uint32), 1, jnp.uint32)
    start = jax.random.key(0, impl="threefry2x32")
    return jax.vmap(lambda digest: jax.random.fold_in(start, digest))(digests)


Labels = Callable[[int, int], dict[str, jax.ShapeDtypeStruct]]
# Special values of Head.reads.
EVERYWHERE, NOWHERE = "everywhere", "nowhere"


@dataclasses.dataclass(frozen=True)
class Head:
    """One or more losses on the shared encoder.

    name: the head's name; its parameters are `params[name]`.
    init(rng, cfg) -> parameters, {} for none.
    weights(batch) -> {term: global weight} of each term that is a loss, computed from
    the batch only.
    sums(params, cfg, encoded, batch, rng) -> {term: Sum} of those losses and any
    metrics; params is the whole tree (for tied embeddings). A loss is optimized and
    logged as its value over the weight that `weights` returns; the weight in the Sum
    counts only for metrics.
    reads: where the head reads encoded.hidden: EVERYWHERE, [B, L, D]; NOWHERE; or the
    name of an array of the batch that holds positions, i32 [B, P], for [B, P, D].
    inner: the layers, from 0 or -1 for the last, whose inputs [B, L, D] the head also
    reads, as encoded.inner.
    needs: what the host must prepare: "mlm" or another module of data/features, or a
    dotted name, with options ("diffusion:schedule=cosine"); "nsp" or "sop" for labeled
    pairs. pooled: whether the head reads the pooled vector. causal: whether in its rows
    a token sees only itself and earlier tokens (EncoderConfig.is_decoder is set then);
    all heads on the same rows have to be causal then.
    params: the name of the head's parameters, which heads may share; "": `name`.
    init_teacher(rng) -> parameters with the structure of params["teacher"], the model
    that the head learns from; None: no teacher. needs_teacher: the head has no loss
    without a teacher.
    outputs(params, cfg, encoded, batch) -> {name: f32 [B, ...]}: what an evaluation
    keeps per row.
    reduce(params, cfg, encoded, batch) -> arrays [B, ...] that replace `encoded` in
    sums and outputs; each row depends on that row only. chunks: the number of parts in
    which a training step computes them, one after the other, to hold the activations of
    one part only. Chunks need a single head, and are used if they divide the rows.
    labels(B, L) -> {name: shape and dtype} of the arrays that a batch holds for this
    head, beside tokens and the arrays of "mlm" and of pairs; measuring makes them up.
    coefficients: {term: factor}; the factor of other terms is 1.
    shardings: rows for parameters that parallel/sharding.py does not know; a task's
    head without any gets those of heads.init_task.
    flops(cfg, L, P) -> FLOPs per token slot, forward and backward, that the head adds
    to the encoder's; P: the predictions per row (of `<name>_ids`, otherwise "mlm_ids");
    None: nothing is added, and the total is unknown if the head is from outside.
    whole_batch: if rows are compared with each other (in-batch negatives), the number
    of rows that an evaluation processes at once, so that results do not depend on the
    batch size; 0 if they do not depend on it anyway. The batch of a training step is
    then never split (accumulate=1). None: rows are independent.
    task_type: the kind of labeled rows that the head learns from: a module of
    bertjax/tasks/types ("classify", "tag", ...) or a dotted name. Its TASK_TYPE reads
    the columns, sets the head's options and scores its outputs. None: running text. If
    a row has several sequences, [B, C, L], encoded has [B C, ...].

    Raises UserError without `reads`, or with `at`, the name of `reads` in version 0.1.
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
    """What a run trains: like a Head, but with its own forward pass.

    init(rng) -> params; weights(batch); sums(params, batch, rng): as in Head, without
    cfg and encoded. evaluate(params, batch) -> (sums, outputs), if there are outputs.
    everywhere: whether the last layer's output is read at every token. flops(specs) ->
    FLOPs per token slot, forward and backward, from the arrays of a batch; None if
    unknown. whole_batch, task_type, init_teacher, needs_teacher: as in Head.
    group: in a mixture by rows, the number of neighboring rows per group; the rows of a
    group are on one device. tables: names, shapes and dtypes of the arrays [N, ...] in
    params["tables"], which come from the `tables` of the rows and have no gradient and
    no place in checkpoints; N is padded and sharded over devices. find(params, batch)
    -> the batch with what was found in the tables; generation calls it before it writes
    texts.
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
