# SPDX-License-Identifier: Apache-2.0
"""Heads on one encoder make an objective: together, or each on rows of its own."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.models.flops import encoder_flops
from bertjax.models.heads import task_shardings
from bertjax.models.layers import Params, fold_in, take_at
from bertjax.models.row_chunks import map_rows
from bertjax.objectives.base import (
    EVERYWHERE,
    NOWHERE,
    SEQUENCES,
    Batch,
    Head,
    Objective,
    Specs,
    Term,
    check_terms,
)
from bertjax.parallel.sharding import gather_params, gather_rows, is_matrix


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
        init_teacher=both.init_teacher if any(h.init_teacher for h in heads) else None,
        needs_teacher=any(h.needs_teacher for h in heads),
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
    together = CombinedHeads(heads, cfg)
    for head, n in zip(heads, counts, strict=True):
        if len(head.needs) != 1 or head.pooled or head.task_type or head.outputs:
            raise UserError(
                f"objective: {head.name} cannot have rows of its own: a mixture by "
                "rows is of heads that predict tokens, such as mntp*15+clm*1"
            )
        needs.append(f"{next(iter(head.needs))}*{n}")
        own = dataclasses.replace(cfg, is_decoder=cfg.is_decoder or head.causal)
        part = CombinedHeads([head], own)
        part.shardings = together.shardings  # it is given the others' parameters too
        parts.append((head, part, slice(first, first + n)))
        first += n

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
    for head, n in zip(heads, counts, strict=True):
        each = {f"{head.name}_loss": 1.0, **head.coefficients}
        coefficients |= {term: factor * n / group for term, factor in each.items()}

    def flops(specs: Specs) -> float:
        pairs = zip(parts, counts, strict=True)
        return sum(part.flops(specs) * n / group for (_, part, _), n in pairs)

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
        nothing = not self.positions and not cfg.pooler  # inner layers alone
        self.everywhere = is_mean or EVERYWHERE in reads or nothing
        self.depths = tuple(dict.fromkeys(n for head in heads for n in head.inner))
        self.chunks = max(head.chunks for head in heads)
        if self.chunks > 1 and (len(heads) > 1 or not heads[0].reduce):
            raise UserError(
                f"objective: {'+'.join(h.name for h in heads)} has chunks of a batch, "
                "which only a head that stands alone, with `reduce`, may have"
            )

    def init(self, rng: jax.Array) -> Params:
        rngs = jax.random.split(rng, len(self.heads) + 1)
        params = {"encoder": encoder.init(rngs[0], self.cfg)}
        for head, key in zip(self.heads, rngs[1:], strict=True):
            name = head.params or head.name
            if name not in params and (own := head.init(key, self.cfg)):
                params[name] = own
        return params

    def init_teacher(self, rng: jax.Array) -> Params:
        """Make them in the dtypes that a step computes with: no other is needed."""
        trees = [head.init_teacher(rng) for head in self.heads if head.init_teacher]
        params = {name: part for tree in trees for name, part in tree.items()}
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x.astype(self.cfg.dtype if is_matrix(path, x) else x.dtype),
            params,
        )

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        return self.merge([head.weights(batch) for head in self.heads])

    def labels(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {k: v for h in self.heads for k, v in h.labels(rows, length).items()}

    def sums(
        self, params: Params, batch: Batch, rng: jax.Array | None
    ) -> dict[str, Term]:
        chunks = self.chunks if len(batch["input_ids"]) % self.chunks == 0 else 1
        params, encoded = self._encode(params, batch, rng, chunks)
        return self._add_up(params, encoded, batch, rng)

    def evaluate(self, params: Params, batch: Batch) -> tuple[dict[str, Term], Any]:
        params, encoded = self._encode(params, batch, None)
        outputs = self.merge(
            [
                head.outputs(params, self.cfg, own, batch) if head.outputs else {}
                for head, own in zip(self.heads, encoded, strict=True)
            ]
        )
        return self._add_up(params, encoded, batch, None), gather_rows(outputs)

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
        self, params: Params, batch: Batch, rng: jax.Array | None, chunks: int = 1
    ) -> tuple[Params, list[Any]]:
        """Gather the parameters, and make what each head reads."""
        params = gather_params(params, self.cfg.dtype, self.shardings)
        batch = flatten_sequences(batch)

        def make(rows: Batch, number: Any) -> list[Any]:
            key = rng if chunks == 1 else fold_in(rng, number)
            encoded = self._encode_rows(params, rows, key)
            return [
                h.reduce(params, self.cfg, own, rows) if h.reduce else own
                for h, own in zip(self.heads, encoded, strict=True)
            ]

        return params, map_rows(make, chunks, batch)

    def _encode_rows(
        self, params: Params, batch: Batch, rng: jax.Array | None
    ) -> list[encoder.Encoded]:
        """Encode what each head reads."""
        encode = functools.partial(
            encoder.apply, params["encoder"], self.cfg, batch, rng, depths=self.depths
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
        hidden[EVERYWHERE] = x

        def own(head: Head) -> Any:
            inner = ()
            if head.inner:
                states = dict(zip(self.depths, encoded.inner, strict=True))
                inner = tuple(states[depth] for depth in head.inner)
            if head.reads == NOWHERE:
                return encoder.EncodedNowhere(encoded.pooled, inner)
            result = encoder.Encoded(hidden[head.reads], encoded.pooled)
            return encoder.EncodedInside(*result, inner) if inner else result

        return [*map(own, self.heads)]

    def _add_up(
        self, params: Params, encoded: Any, batch: Batch, rng: jax.Array | None
    ) -> dict[str, Term]:
        found = []
        for head, own in zip(self.heads, encoded, strict=True):
            found.append(head.sums(params, self.cfg, own, batch, rng))
            check_terms(f"objective: the head {head.name}", found[-1])
        return self.merge(found)

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
