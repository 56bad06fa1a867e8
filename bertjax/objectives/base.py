# SPDX-License-Identifier: Apache-2.0
"""What an objective is, and how heads on one encoder make one.

A module of this package (or any dotted name) exports `make_head()` or
`make_objective(cfg)`; `config.objective = "mlm+nsp"` imports by name. Both may take
options, numbers with a default: `"electra:generator=0.5"` (`objectives.parse`), and
`tokens`, which is the tokenizer's TokenIds and no option.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax import UserError, registry
from bertjax.models import attention, encoder
from bertjax.models.config import EncoderConfig, encoder_flops
from bertjax.models.heads import task_shardings
from bertjax.models.layers import Params, fold_in, take_at
from bertjax.objectives import SUPPORT, parse
from bertjax.parallel.sharding import constrain, gather_params

Batch = Mapping[str, jax.Array]
Specs = Mapping[str, Any]  # of the arrays of a batch; each has a `shape`, without B
PACKAGE = "bertjax.objectives"
SEQUENCES = ("input_ids", "attention_mask", "token_type_ids")


class Sum(NamedTuple):
    """A sum and its weight, f32 []; the quotient over the global batch is the mean."""

    value: jax.Array
    weight: jax.Array


# A loss or a metric. One that is no quotient of two sums, such as metrics.Ranking, is a
# NamedTuple of sums with a `mean()` of its own.
Term = Any


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """The ids of the tokenizer's special pieces, by the names that it has for them.

    Where there is no tokenizer yet, they are the first five: what is made then is asked
    what it needs, or measured on made-up rows, and never trained.
    """

    pad_id: int = 0
    unk_id: int = 1
    cls_id: int = 2
    sep_id: int = 3
    mask_id: int = 4
    special_ids: tuple[int, ...] = (0, 1, 2, 3, 4)

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenIds":
        """Take them from a tokenizer (data/tokenizers/tokenizer.py)."""
        names = "pad_id", "unk_id", "cls_id", "sep_id", "mask_id"
        special = tuple(int(i) for i in tokenizer.special_ids)
        return cls(*(int(getattr(tokenizer, name)) for name in names), special)


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
    needs: what the host has to make: "mlm" or another module of data/features, or a
    dotted name, with its options ("diffusion:schedule=cosine"); "nsp" or "sop": pairs
    with labels. pooled: whether it reads the pooled vector. causal: in its rows a
    token sees itself and those before it alone (EncoderConfig.is_decoder is set), so
    that no head beside it can pool a vector of the first one.
    params: the name of its part of the parameters, which heads may share; "": its own.
    outputs(params, cfg, encoded, batch) -> {name: f32 [B, ...]}: what an evaluation
    keeps of every row.
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
    task_type: as a Head has them. group: of a mixture by rows, how many neighbouring
    rows make a group, which lie on one device.
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
    group: int = 1


def make_objective(
    name: str, cfg: EncoderConfig, tokens: TokenIds = TokenIds()
) -> tuple[Objective, EncoderConfig]:
    """Build "mlm+nsp" and the like; also returns cfg, with a pooler only if needed.

    tokens: for modules whose make_head or make_objective has an argument `tokens`.
    Raises UserError on an unknown name or option, or parts that cannot be combined.
    """
    attention.import_backend(cfg.attention)
    named = [part for part in parse(name) if part.rows != 0]
    parts = [
        (registry.load("objective", part.name, PACKAGE, SUPPORT), part.options)
        for part in named
    ]
    if whole := [part for part in parts if hasattr(part[0], "make_objective")]:
        module, options = whole[0]
        if len(parts) > 1:
            raise UserError(f"objective={name!r}: {module.__name__} stands alone")
        maker = module, "make_objective", options
        objective, cfg = registry.make("objective", *maker, cfg, tokens=tokens)
    else:
        heads = [
            registry.make("objective", module, "make_head", options, tokens=tokens)
            for module, options in parts
        ]
        if len({h.name for h in heads}) < len(heads):
            raise UserError(f"objective={name!r} names a head twice")
        cfg = dataclasses.replace(cfg, pooler=any(h.pooled for h in heads))
        rows = [part.rows for part in named] if len(named) > 1 else [None]
        check_causal(name, heads, cfg, mixed=rows[0] is not None)
        if all(head.causal for head in heads):
            cfg = dataclasses.replace(cfg, is_decoder=True)
        if rows[0] is None:
            objective = combine(heads, cfg)
        else:
            objective = mix_by_rows(heads, cfg, rows)
        for (module, _), head in zip(parts, heads, strict=True):
            if head.flops is None and not module.__name__.startswith(f"{PACKAGE}."):
                objective = dataclasses.replace(objective, flops=None)
    if not objective.task_type:
        return objective, cfg
    if objective.evaluate is None:
        raise UserError(
            f"objective: a head for rows of {objective.task_type} needs `outputs`, by "
            "which they are scored and answered"
        )
    needs = objective.needs | {"labels"}
    return dataclasses.replace(objective, needs=needs), cfg


def check_causal(
    name: str, heads: Sequence[Head], cfg: EncoderConfig, mixed: bool
) -> None:
    """Refuse what does not go with rows whose tokens see none after them."""
    causal = [h.name for h in heads if h.causal]
    others = [h.name for h in heads if not (h.causal or h.task_type)]
    if cfg.is_decoder and others:
        raise UserError(
            f"model.is_decoder=True: objective={name} has {' and '.join(others)}, "
            "whose tokens see those after them: leave model.is_decoder out"
        )
    if pooled := [h.name for h in heads if h.pooled and causal and not mixed]:
        raise UserError(
            f"objective={name}: {' and '.join(causal)} lets the first token see itself "
            f"alone, of which {' and '.join(pooled)} would be told: leave one of the "
            "two out"
        )


def combine(heads: Sequence[Head], cfg: EncoderConfig) -> Objective:
    """Put heads on one encoder.

    Raises UserError when it is traced where two heads return what has one name.
    """
    both = CombinedHeads(heads, cfg)
    return Objective(
        init=both.init,
        weights=both.weights,
        sums=both.sums,
        needs=both.needs,
        coefficients={k: v for h in heads for k, v in h.coefficients.items()},
        shardings=both.shardings,
        evaluate=both.evaluate if any(h.outputs for h in heads) else None,
        labels=both.labels,
        everywhere=both.everywhere,
        flops=both.flops,
        whole_batch=_whole_batch(heads),
        task_type=next((h.task_type for h in heads if h.task_type), None),
    )


def mix_by_rows(
    heads: Sequence[Head], cfg: EncoderConfig, rows: Sequence[int]
) -> Objective:
    """Give each head rows of its own: of each group of neighbouring rows the first
    rows[0], the next rows[1], and so on.

    A loss is divided by its own weight, and counts by its share of the rows. Each head
    encodes its rows by itself, as if it were alone. Raises UserError for a head that is
    no head of predictions.
    """
    divisor = math.gcd(*rows)
    counts = [n // divisor for n in rows]
    group, first, parts, needs = sum(counts), 0, [], []
    for head, n in zip(heads, counts, strict=True):
        if len(head.needs) != 1 or head.pooled or head.task_type or head.outputs:
            raise UserError(
                f"objective: {head.name} cannot have rows of its own: a mixture by "
                "rows is of heads that predict tokens, such as mntp*15+clm*1"
            )
        needs.append(f"{next(iter(head.needs))}*{n}")
        own = dataclasses.replace(cfg, is_decoder=cfg.is_decoder or head.causal)
        parts.append((head, combine([head], own), slice(first, first + n)))
        first += n
    together = CombinedHeads(heads, cfg)

    def take(head: Head, rows: slice, batch: Batch) -> Batch:
        # Steps of a causal head's rows are 0 where other rows have some.
        return {
            name: x.reshape(-1, group, *x.shape[1:])[:, rows].reshape(-1, *x.shape[1:])
            for name, x in batch.items()
            if not (head.causal and name == "attention_steps")
        }

    def sums(params: Params, batch: Batch, rng: jax.Array | None) -> dict[str, Term]:
        return together.merge(
            [
                part.sums(params, take(head, rows, batch), fold_in(rng, i))
                for i, (head, part, rows) in enumerate(parts)
            ]
        )

    coefficients = {}
    for head, _, rows in parts:
        each = {f"{head.name}_loss": 1.0, **head.coefficients}
        share = (rows.stop - rows.start) / group
        coefficients |= {term: share * factor for term, factor in each.items()}

    def flops(specs: Specs) -> float:
        each = (part.flops(specs) * (r.stop - r.start) / group for _, part, r in parts)
        return sum(each)

    return Objective(
        init=together.init,
        weights=together.weights,
        sums=sums,
        needs=frozenset({"+".join(needs)}),
        coefficients=coefficients,
        shardings=together.shardings,
        flops=flops,
        group=group,
    )


class CombinedHeads:
    """The functions of an Objective whose heads share one encoder."""

    def __init__(self, heads: Sequence[Head], cfg: EncoderConfig) -> None:
        self.heads, self.cfg = heads, cfg
        self.needs = frozenset().union(*(head.needs for head in heads))
        # Of a task's head that says none, those of heads.init_task.
        own = (h.shardings or task_shardings(h.name) * bool(h.task_type) for h in heads)
        self.shardings = tuple(itertools.chain.from_iterable(own))
        reads = dict.fromkeys(head.reads for head in heads)
        self.positions = [name for name in reads if name not in (EVERYWHERE, NOWHERE)]
        is_mean = cfg.pooler and cfg.classifier_pooling == "mean"
        self.everywhere = is_mean or EVERYWHERE in reads

    def init(self, rng: jax.Array) -> Params:
        rngs = jax.random.split(rng, len(self.heads) + 1)
        params = {"encoder": encoder.init(rngs[0], self.cfg)}
        for head, key in zip(self.heads, rngs[1:], strict=True):
            name = head.params or head.name
            if name not in params and (own := head.init(key, self.cfg)):
                params[name] = own
        return params

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        return self.merge([head.weights(batch) for head in self.heads])

    def labels(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {k: v for h in self.heads for k, v in h.labels(rows, length).items()}

    def sums(
        self, params: Params, batch: Batch, rng: jax.Array | None
    ) -> dict[str, Term]:
        params, encoded = self._encode(params, batch, rng)
        return self._add_up(params, encoded, batch, rng)

    def evaluate(self, params: Params, batch: Batch) -> tuple[dict[str, Term], Any]:
        params, encoded = self._encode(params, batch, None)
        outputs = self.merge(
            [
                head.outputs(params, self.cfg, own, batch) if head.outputs else {}
                for head, own in zip(self.heads, encoded, strict=True)
            ]
        )
        # Every process has the rows of all, for the metrics.
        outputs = {k: constrain(v, " ".join("_" * v.ndim)) for k, v in outputs.items()}
        return self._add_up(params, encoded, batch, None), outputs

    def flops(self, specs: Specs) -> float:
        """Count the encoder, and what heads say of their own."""
        length = specs["input_ids"].shape[-1]
        read = sum(specs[name].shape[-1] for name in self.positions if name in specs)
        whole = encoder_flops(self.cfg, length, read, self.everywhere)
        for head in self.heads:
            ids = specs.get(f"{head.name}_ids", specs.get("mlm_ids"))
            predictions = ids.shape[-1] if ids else 0
            if head.flops:
                whole += head.flops(self.cfg, length, predictions)
        return whole

    def _encode(
        self, params: Params, batch: Batch, rng: jax.Array | None
    ) -> tuple[Params, list[encoder.Encoded]]:
        """Gather the parameters, and encode what each head reads."""
        params = gather_params(params, self.cfg.dtype, self.shardings)
        batch = flatten_sequences(batch)
        encode = functools.partial(
            encoder.apply, params["encoder"], self.cfg, batch, rng
        )
        if self.everywhere:
            encoded = encode()
            x = encoded.hidden
            hidden = {name: take_at(x, batch[name]) for name in self.positions}
        else:
            none = jnp.zeros((len(batch["input_ids"]), 0), jnp.int32)
            places = [none, *(batch[name] for name in self.positions)]
            encoded = encode(at=jnp.concatenate(places, axis=1))
            x = encoded.hidden
            ends = [*itertools.accumulate(place.shape[1] for place in places)]
            parts = jnp.split(x, ends[:-1], axis=1)[1:]
            hidden = dict(zip(self.positions, parts, strict=True))
        hidden |= {NOWHERE: x[:, :0], EVERYWHERE: x}
        return params, [encoded._replace(hidden=hidden[h.reads]) for h in self.heads]

    def _add_up(
        self, params: Params, encoded: Any, batch: Batch, rng: jax.Array | None
    ) -> dict[str, Term]:
        pairs = zip(self.heads, encoded, strict=True)
        return self.merge([h.sums(params, self.cfg, e, batch, rng) for h, e in pairs])

    def merge(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Put what each head returns into one dict; a name is one head's alone."""
        owners: dict[str, str] = {}
        for head, part in zip(self.heads, parts, strict=True):
            for key in part:
                if key in owners:
                    raise UserError(
                        f"objective: the heads {owners[key]} and {head.name} both "
                        f"return {key!r}, and one of the two would be lost: rename it "
                        "in one of them"
                    )
                owners[key] = head.name
        return {key: value for part in parts for key, value in part.items()}


def flatten_sequences(batch: Batch) -> Batch:
    """Make each sequence of a row a row of its own: [B, C, L] -> [B C, L].

    Of a sequence that fills up the first token is seen, so that some key always is.
    What is no array of SEQUENCES stays, and so does a batch of one sequence a row.
    """
    if batch["input_ids"].ndim == 2:
        return batch
    rows = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in SEQUENCES}
    rows["attention_mask"] = rows["attention_mask"].at[:, 0].set(1)
    return {**batch, **rows}


def _whole_batch(heads: Sequence[Head]) -> int | None:
    """Return how many rows an evaluation takes at once. Raises UserError."""
    sizes = {h.name: h.whole_batch for h in heads if h.whole_batch is not None}
    if len({size for size in sizes.values() if size}) > 1:
        each = " and ".join(f"{name} {size}" for name, size in sizes.items() if size)
        raise UserError(
            "objective: the heads want other numbers of rows in an evaluation "
            f"(whole_batch), {each}: give them one"
        )
    return max(sizes.values(), default=None)


def task_type_of(objective: str) -> str | None:
    """Return the labelled rows that an objective says it learns from; None: none.

    No device is used. Raises UserError.
    """
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    cfg = EncoderConfig(8, hidden_size=8, intermediate_size=8, **sizes)
    return make_objective(objective, cfg)[0].task_type
