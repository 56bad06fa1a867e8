# SPDX-License-Identifier: Apache-2.0
"""Build an objective of heads on one encoder: on the same rows, or each on its own."""

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
from bertjax.models.layers import Params, Rng, fold_in, take_at
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

    Raises UserError for different whole_batch; when traced, for two heads that return
    the same name.
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
    """Give each head its own rows: in each group of neighboring rows the first rows[0]
    belong to the first head, the next rows[1] to the second, and so on.

    Each loss is divided by its own weight and multiplied by its head's share of the
    rows. Each head encodes its rows separately, as if it were alone. Raises UserError
    for a head that does not predict tokens; when traced, for a loss whose factor is not
    known.
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
        part.shardings = together.shardings  # each part receives the whole tree
        parts.append((head, part, slice(first, first + n)))
        first += n

    def take(head: Head, rows: slice, batch: Batch) -> Batch:
        # Rows of causal heads have no attention_steps of their own; other rows' heads
        # may, and then the array has zeros for these rows.
        return {
            name: x.reshape(-1, group, *x.shape[1:])[:, rows].reshape(-1, *x.shape[1:])
            for name, x in batch.items()
            if not (head.causal and name == "attention_steps")
        }

    def sums(params: Params, batch: Batch, rng: Rng) -> dict[str, Term]:
        return together.merge(
            [
                part.sums(params, take(head, rows, batch), fold_in(rng, i))
                for i, (head, part, rows) in enumerate(parts)
            ]
        )

    factors = [{f"{head.name}_loss": 1.0, **head.coefficients} for head in heads]
    coefficients = {}
    for own, n in zip(factors, counts, strict=True):
        coefficients |= {term: factor * n / group for term, factor in own.items()}

    def weights(batch: Batch) -> dict[str, jax.Array]:
        found = [head.weights(batch) for head in heads]
        for head, own, losses in zip(heads, factors, found, strict=True):
            if own.keys() != losses.keys():
                raise UserError(
                    f"objective: the head {head.name} has the losses "
                    f"{', '.join(losses)}, and in a mixture by rows {', '.join(own)} "
                    f"are weighted by its share of the rows: call its loss "
                    f"{head.name}_loss, and name any others in its coefficients"
                )
        return together.merge(found)

    def flops(specs: Specs) -> float:
        pairs = zip(parts, counts, strict=True)
        return sum(part.flops(specs) * n / group for (_, part, _), n in pairs)

    return Objective(
        init=together.init,
        weights=weights,
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
        # A task's head without shardings has the parameters of heads.init_task.
        own = (h.shardings or task_shardings(h.name) * bool(h.task_type) for h in heads)
        self.shardings = tuple(itertools.chain.from_iterable(own))
        reads = dict.fromkeys(head.reads for head in heads)
        self.positions = [name for name in reads if name not in (EVERYWHERE, NOWHERE)]
        is_mean = cfg.pooler and cfg.classifier_pooling == "mean"
        # Heads that read only inner layers, such as minilm's.
        nothing = not self.positions and not cfg.pooler
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
            if name not in params:
                own = head.init(key, self.cfg)
                params |= {name: own} if jax.tree.leaves(own) else {}
        return params

    def init_teacher(self, rng: jax.Array) -> Params:
        """Make the teacher's parameters in the dtypes that a step computes with.

        They are not trained, so no f32 copy is needed.
        """
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

    def sums(self, params: Params, batch: Batch, rng: Rng) -> dict[str, Term]:
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
        """Count the FLOPs of the encoder and of the heads, per token slot."""
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
        self, params: Params, batch: Batch, rng: Rng, chunks: int = 1
    ) -> tuple[Params, list[Any]]:
        """Gather the parameters; return them and what each head reads."""
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
        self, params: Params, batch: Batch, rng: Rng
    ) -> list[encoder.Encoded]:
        """Run the encoder, and return the Encoded of each head."""
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
        self, params: Params, encoded: Any, batch: Batch, rng: Rng
    ) -> dict[str, Term]:
        found = []
        for head, own in zip(self.heads, encoded, strict=True):
            found.append(head.sums(params, self.cfg, own, batch, rng))
            check_terms(f"objective: the head {head.name}", found[-1])
        return self.merge(found)

    def merge(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Merge the dicts of the heads. Raises UserError if two have the same name."""
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
    """Make each sequence of a row its own row: [B, C, L] -> [B C, L].

    The first token of a padding sequence stays visible, because attention needs at
    least one visible key. Arrays other than SEQUENCES, and batches with one sequence
    per row, are returned unchanged.
    """
    if batch["input_ids"].ndim == 2:
        return batch
    rows = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in SEQUENCES}
    rows["attention_mask"] = rows["attention_mask"].at[:, 0].set(1)
    return {**batch, **rows}


def _whole_batch(heads: Sequence[Head]) -> int | None:
    """Return how many rows an evaluation processes at once; see Head.whole_batch.

    Raises UserError if heads differ.
    """
    sizes = {h.name: h.whole_batch for h in heads if h.whole_batch is not None}
    if len({size for size in sizes.values() if size}) > 1:
        each = " and ".join(f"{name} {size}" for name, size in sizes.items() if size)
        raise UserError(
            "objective: the heads want other numbers of rows in an evaluation "
            f"(whole_batch), {each}: give them one"
        )
    return max(sizes.values(), default=None)
