# SPDX-License-Identifier: Apache-2.0
"""Sequence to sequence: rows of a source text and a target text to generate.

Without a decoder a row is [CLS] text [SEP] target [SEP]. Only the target and its final
[SEP] are predicted, each token from the one before it (Dong et al. 2019, UniLM, section
2.3). Targets are cut to `task.target_length`, and this length is always reserved, so
that the text keeps the same tokens whether a target of any length follows or none.

With a decoder, the text has the whole row, and the target has its own arrays. BART
reads [CLS] text [SEP], and predicts [CLS] target [SEP] from a decoder input that starts
with [SEP]; T5 reads text [SEP], and predicts target [SEP] from an input that starts
with padding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted, registry
from bertjax.data import counter_rng
from bertjax.data.rendering import decode
from bertjax.tasks import tables, text_metrics, text_rows
from bertjax.tasks.tables import Row, Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, Ragged, min_mean_max
from bertjax.tasks.task_type import TaskType

OF_TARGETS = "perplexity", "accuracy"
METRICS = (*OF_TARGETS, *text_metrics.METRICS, "exact")


@dataclass(frozen=True, eq=False)
class Sequences(text_rows.Texts):
    """Examples with texts of one or two columns, as for classification.

    tokenizer: of all texts. targets: of all examples, or None; example i has [first[i],
    first[i + 1]), with first i64 [n + 1]. references: the targets of each example, as
    text. draws: whether each epoch draws one of an example's targets; otherwise it is
    the first.
    """

    tokenizer: Any = None
    targets: Ragged | None = None
    first: np.ndarray | None = None
    references: Sequence[Sequence[str]] = ()
    draws: bool = True

    def arrays(self) -> list[np.ndarray | None]:
        if self.targets is None:
            return super().arrays()
        own = self.targets.tokens, self.targets.offsets, self.first
        return [*super().arrays(), *own]

    @property
    def writes(self) -> bool:
        return self.targets is None or not {*self.form.metrics} <= {*OF_TARGETS}

    @property
    def in_row(self) -> bool:
        """Whether targets are in the rows of the texts."""
        return self.form.targets.place != "decoder"

    @property
    def reserved(self) -> int:
        """The tokens of a row that are reserved for a target and its end token."""
        return self.form.targets.width if self.in_row else 0

    @property
    def specials(self) -> int:
        return super().specials - self.form.targets.bare

    @property
    def shortest(self) -> int:
        return super().shortest + self.reserved

    @property
    def room(self) -> int:
        return self.planned - self.reserved

    def plan(self, length: int) -> Self:
        if self.in_row and length < self.shortest:
            raise UserError(
                f"data.length={length} is too short: rows need {self.shortest}, of "
                f"which task.target_length={self.form.targets.length} is for targets"
            )
        return super().plan(length)

    @cached_property
    def target_sizes(self) -> np.ndarray:
        """The number of kept tokens per target: i64 [targets]."""
        return np.minimum(self.targets.lengths, self.form.targets.length)

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        texts, cut = self.text_sizes
        if self.targets is None:
            return texts, cut
        lost = self.targets.lengths - self.target_sizes
        cut = cut + np.add.reduceat(lost, self.first[:-1])
        if not self.in_row:
            return texts, cut
        longest = np.maximum.reduceat(self.target_sizes, self.first[:-1])
        return texts + longest + 1, cut

    def notes(self) -> Iterator[str]:
        _, cut = self.text_sizes
        if many := int((cut > 0).sum()):
            less = f" less {self.reserved} for the target" * self.in_row
            yield (
                f"{many:,} of {self.n:,} texts are cut at {self.room} tokens: "
                f"data.length={self.length}{less}"
            )
        if self.targets is not None:
            lost = int((self.targets.lengths > self.target_sizes).sum())
            if lost:
                yield (
                    f"{lost:,} of {counted(len(self.target_sizes), 'target')} cut at "
                    f"task.target_length={self.form.targets.length}"
                )

    def chosen(self, example: np.ndarray, keys: np.ndarray | None) -> np.ndarray:
        """Return the number of each example's target: i64 [b]."""
        first = self.first[example]
        if keys is None or not self.draws:
            return first
        count = self.first[example + 1] - first
        return first + counter_rng.below(counter_rng.fold(keys, "target"), 0, count)

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask i32 [b, L]; for place="prefix"
        attention_steps i32 [b, L]; lm_positions, lm_ids i32 and lm_weights f32
        [b, T + 1], the predictions. Without targets there are only the texts. With a
        decoder, see `decoder_side`.

        Text 7 8 9, target 5 6, length 10, T = 3 ([CLS] 1, [SEP] 2, padding 0):

            input_ids        1  7  8  9  2  5  6  2  0  0
            attention_mask   1  1  1  1  1  1  1  1  0  0
            attention_steps  0  0  0  0  0  1  2  3  0  0

            lm_positions     4  5  6  0
            lm_ids           5  6  2  0
            lm_weights       1  1  1  0
        """
        rows = self.kept_tokens(example)
        bare = int(self.form.targets.bare)
        laid = self.length + bare, self.form.separators
        batch = text_rows.lay_out(rows, *laid, specials)
        # All tokens have type 0, also when texts are generated.
        del batch["token_type_ids"]
        batch = {name: values[:, bare:] for name, values in batch.items()}
        targets = None
        if self.targets is not None:
            most, chosen = self.form.targets.length, self.chosen(example, keys)
            targets = [self.targets[k][:most] for k in chosen]
        if not self.in_row:
            return batch | self.decoder_side(batch, targets, specials)
        steps = np.zeros_like(batch["input_ids"])
        if targets is not None:
            batch |= self._write(batch, steps, targets, specials)
        if self.form.targets.place == "prefix":
            batch["attention_steps"] = steps
        return batch

    def _write(
        self,
        batch: Batch,
        steps: np.ndarray,
        targets: Sequence[np.ndarray],
        specials: Any,
    ) -> Batch:
        """Write targets after the texts of a batch; return the lm_* arrays."""
        ids, real = _ended(targets, self.form.targets.width, (), specials)
        begins = batch["attention_mask"].sum(axis=1)
        positions = np.zeros_like(ids)
        for row, (at, n) in enumerate(zip(begins, real.sum(axis=1), strict=True)):
            batch["input_ids"][row, at : at + n] = ids[row, :n]
            batch["attention_mask"][row, at : at + n] = 1
            steps[row, at : at + n] = np.arange(1, n + 1)
            positions[row, :n] = np.arange(at - 1, at + n - 1)
        weights = real.astype(np.float32)
        return {"lm_positions": positions, "lm_ids": ids * real, "lm_weights": weights}

    def decoder_side(
        self, batch: Batch, targets: Sequence[np.ndarray] | None, specials: Any
    ) -> Batch:
        """Make decoder_input_ids, decoder_attention_mask, lm_ids i32 and lm_weights f32
        [b, T], and text_tokens i32 [b], the tokens of both sides. Without targets, only
        the decoder's start token, [b, 1].

        For BART with the target 5 6 ([CLS] 1, [SEP] 2, padding 0), and for T5:

            lm_ids             1  5  6  2  0        5  6  2  0
            decoder_input_ids  2  1  5  6  0        0  5  6  0
            lm_weights         1  1  1  1  0        1  1  1  0
        """
        bare = self.form.targets.bare
        start = specials.pad_id if bare else specials.sep_id
        first = np.full((len(batch["input_ids"]), 1), start, np.int32)
        if targets is None:
            ones = np.ones_like(first)
            return {"decoder_input_ids": first, "decoder_attention_mask": ones}
        begin = () if bare else (specials.cls_id,)
        ids, real = _ended(targets, self.form.targets.width, begin, specials)
        before = np.concatenate([first, ids[:, :-1]], axis=1)
        counts = batch["attention_mask"].sum(axis=1) + real.sum(axis=1)
        return {
            "decoder_input_ids": np.where(real, before, np.int32(specials.pad_id)),
            "decoder_attention_mask": real.astype(np.int32),
            "lm_ids": ids * real,
            "lm_weights": real.astype(np.float32),
            "text_tokens": counts.astype(np.int32),
        }

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the text and the target."""
        real = row["attention_mask"] > 0
        size = int(self.text_sizes[0][example])
        yield "text", decode(tokenizer, row["input_ids"][:size])
        if self.targets is not None:
            ids = row["input_ids"][size:][real[size:]]
            if not self.in_row:
                ids = row["lm_ids"][row["lm_weights"] > 0]
            yield "target", decode(tokenizer, ids)

    def label_counts(self) -> dict[str, dict[str, float]]:
        if self.targets is None:
            return {}
        return {"target tokens": min_mean_max(self.targets.lengths)}

    def for_scores(self) -> "Sequences":
        return replace(self, draws=False)

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Compute the metrics.

        perplexity and accuracy are over all tokens of each example's first target
        ("nats", "right" f32 [n] are sums per row); the others compare generated texts
        ("generated_ids") with all targets.
        """
        more = self.form.targets.width - self.form.targets.length
        tokens = float((self.target_sizes[self.first[example]] + more).sum())
        nats, right = (np.asarray(outputs[k], np.float64) for k in ("nats", "right"))
        found = {
            "perplexity": exp(float(nats.sum()) / tokens),
            "accuracy": float(right.sum()) / tokens,
        }
        names = self.form.metrics
        if self.writes:
            ids = [*self.written(outputs)]
            texts = [self.tokenizer.decode(one) for one in ids]
            references = [self.references[i] for i in example]
            lower = self.tokenizer.lower_case
            found |= text_metrics.text_scores(names, texts, references, lower)
            pairs = zip(ids, example, strict=True)
            same = [one.tolist() in self._targets_of(i) for one, i in pairs]
            found["exact"] = sum(same) / len(same)
        return {name: found[name] for name in names}

    def _targets_of(self, example: int) -> list[list[int]]:
        """Return the ids of each target of an example."""
        return [self.targets[k].tolist() for k in range(*self.first[example:][:2])]

    def written(self, outputs: Outputs) -> Iterator[np.ndarray]:
        """Yield the generated ids of each row.

        Special tokens are left out, and ids beyond the vocabulary, which the padded
        embedding table of an imported model may have.
        """
        special = np.setdiff1d(self.tokenizer.special_ids, [self.tokenizer.unk_id])
        ids, lengths = outputs["generated_ids"], outputs["generated_lengths"]
        for row, length in zip(ids, lengths, strict=True):
            kept = row[: int(length)]
            is_piece = kept < self.tokenizer.vocab_size
            yield kept[is_piece & ~np.isin(kept, special)]

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"text", "score"}: the generated text, and the sum of ln p of its
        tokens."""
        scores = outputs["generated_scores"]
        for ids, score in zip(self.written(outputs), scores, strict=True):
            yield {"text": self.tokenizer.decode(ids), "score": float(score)}


def _ended(
    targets: Sequence[np.ndarray], width: int, begin: tuple[int, ...], specials: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Put `begin` before targets and [SEP] after them.

    Returns ids i32 and whether they are real, bool, [b, width].
    """
    ended = [(*begin, *target, specials.sep_id) for target in targets]
    ids, real = filled(ended, width, specials)
    return ids, real > 0


def filled(
    rows: Sequence[Sequence[int]], width: int, specials: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Pad rows: return ids, and 1 where they are real, i32 [b, width]."""
    ids = np.full((len(rows), width), specials.pad_id, np.int32)
    real = np.zeros_like(ids)
    for row, own in enumerate(rows):
        ids[row, : len(own)], real[row, : len(own)] = own, 1
    return ids, real


def exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def make_sequences(
    rows: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> Sequences:
    """Encode rows, and report empty texts.

    Raises UserError, naming the place, for targets that are empty or not texts.
    """
    texts = [text_rows.encode_column(rows, c, tokenizer, say) for c in form.columns]
    counts = sum(text.counts(tokenizer) for text in texts)
    if not labelled:
        return Sequences(form, counts, tuple(texts), tokenizer)
    text_metrics.check_packages(form.metrics, "task.metrics")
    targets = [targets_of(row, form.label) for row in rows]
    if {*form.metrics} & {*text_metrics.ROUGE}:
        both = zip(rows, targets, strict=True)
        mute = [r.place for r, own in both if not any(map(text_metrics.has_rouge, own))]
        note = " with a target without a letter a to z or a digit: its ROUGE is 0"
        tables.report(say, mute, "row", note)
    every = [target for own in targets for target in own]
    encoded = Ragged.encode(tokenizer, every)
    return Sequences(
        form,
        counts + encoded.counts(tokenizer),
        tuple(texts),
        tokenizer,
        encoded,
        np.cumsum([0, *map(len, targets)]),
        targets,
    )


def targets_of(row: Row, column: str) -> list[str]:
    """Return the targets of a row: one text, or, in JSON lines, a list of texts, each
    of which is right. Raises UserError for other values.

    >>> targets_of(Row({"target": ["Who?", "Which man?"]}, "dev.jsonl:2"), "target")
    ['Who?', 'Which man?']
    """
    value = row.cells[column]
    targets = value if isinstance(value, list) else [value]
    if not targets:
        raise UserError(f"{row.place}: the list of {column} is empty")
    for target in targets:
        if not isinstance(target, str):
            raise UserError(
                f"{row.place}: the {column} has to be a text, or a list of texts, and "
                f"is {value!r:.60}"
            )
        if not target.strip():
            raise UserError(f"{row.place}: the {column} is empty")
    return targets


def _check(config: ConfigDict) -> None:
    names = registry.split_list(config.task.metrics)
    text_metrics.check_packages(names, "task.metrics")


TASK_TYPE = TaskType(
    parse_lines=tables.parse_lines,
    make_rows=make_sequences,
    metrics=METRICS,
    default_metrics=OF_TARGETS,
    outputs=("nats", "right"),
    label_key="target",
    columns={"text": "text", "target": "target"},
    unused={"label": "", "labels": "", "choices": ""},
    settings=("target", "target_length", "num_beams", "length_penalty"),
    check=_check,
    head_options=lambda task, labels: {"target_length": task.target_length},
    generates=True,
)
