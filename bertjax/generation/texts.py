# SPDX-License-Identifier: Apache-2.0
"""Texts behind prompts, from left to right: rows of few shapes in, texts out."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.progress import Progress
from bertjax.generation.options import Options

# A text; or of a finetuned model a row of its task, {column: text}.
Prompt = str | Mapping[str, str]
Encode = Callable[[str], list[int]]


class Output(NamedTuple):
    """What was written behind a prompt: its tokens, the end token included; score: the
    sum of ln p of those that the model chose."""

    text: str
    ids: list[int]
    score: float


class Side(NamedTuple):
    """Special tokens around the tokens of a prompt."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def lay_out(self, encode: Encode, prompts: Sequence[str]) -> list[list[int]]:
        """Return the ids of prompts, these tokens around them."""
        return [[*self.before, *encode(text), *self.behind] for text in prompts]


class TextModel(NamedTuple):
    """What writes from left to right.

    decoder: models.incremental.Decoder; params: what it takes, on the device. lay_out:
    of prompts to ids, special tokens included. start: None, or of an encoder-decoder
    what its decoder's side begins with. context: the tokens of a prompt see each other,
    as a prefix LM has it; causal_steps: attention_steps say that they do not; else
    neither is in a batch. most: tokens that a row can have, of an encoder-decoder those
    of either side.
    target: None, or of a model that has learnt to write a target for a text how long
    these are at most, in tokens; begin: what they begin with. arrange: in the place of
    lay_out, of prompts to arrays i32 [n] by name, of ids and what else a batch has of
    each token.
    """

    decoder: Any
    params: Any
    tokenizer: Any
    lay_out: Callable[[Sequence[Any]], list[list[int]]]
    ends: Any
    most: int
    start: tuple[int, ...] | None = None
    context: bool = False
    causal_steps: bool = False
    target: int | None = None
    begin: tuple[int, ...] = ()
    arrange: Callable[[Sequence[Any]], list[dict[str, np.ndarray]]] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether texts go on where prompts end, and are none by themselves."""
        return self.start is None and self.target is None


class Row(NamedTuple):
    """A prompt's ids, with special tokens; the decoder's first ids, of an
    encoder-decoder; the written ones that it ends with; further arrays of the ids."""

    ids: np.ndarray
    first: np.ndarray | None
    forced: list[int]
    more: Mapping[str, np.ndarray] = MappingProxyType({})

    @property
    def begun(self) -> np.ndarray:
        """Ids that new ones stand behind."""
        return self.ids if self.first is None else self.first


def make_rows(
    model: TextModel, prompts: Sequence[Prompt], options: Options
) -> Iterator[Row]:
    """Yield the row of each prompt. Raises UserError for one that is too long.

    Of the prompt 17 25 with a prefix 31, begun with 2; and of an encoder-decoder whose
    decoder's side begins with 0:

        ids    2 17 25 31        ids    17 25  1
                                 first   0 31
    """
    forced = []
    if options.prefix:
        forced = [*model.begin, *model.tokenizer.encode_with_masks(options.prefix)]
    most, new = model.most, options.new_tokens
    if model.arrange is None:
        arranged = [{"input_ids": own} for own in model.lay_out(prompts)]
    else:
        arranged = model.arrange(prompts)
    for prompt, more in zip(prompts, arranged, strict=True):
        own = list(more.pop("input_ids"))
        if model.start is None:
            # A model of texts without a begin token has nothing else to begin with.
            own = own or [model.tokenizer.cls_id]
            more = {name: go_on(name, x, len(forced)) for name, x in more.items()}
            row = Row(np.array([*own, *forced], np.int32), None, forced, more)
        else:
            first = np.array([*model.start, *forced], np.int32)
            begun = [*model.start[1:], *forced]
            row = Row(np.array(own, np.int32), first, begun)
        size = max(len(row.begun) + new, len(row.ids))
        if size > most:
            room = most - len(row.begun)
            name = str(prompt)[:40]
            raise UserError(
                f"--max_new_tokens={new}: {name!r} has {len(row.ids)} tokens, "
                f"and with new ones {size}, more than the model's {most}"
                + f"; give --max_new_tokens={room}"
                * (room > 0)
            )
        yield row


def go_on(name: str, values: np.ndarray, number: int) -> np.ndarray:
    """Return an array of a prompt's tokens with those of so many new ones behind: what
    counts tokens counts on, what else there is of the last one they have too."""
    counts = name in ("position_ids", "attention_steps")
    more = values[-1] + counts * np.arange(1, number + 1)
    return np.append(values, more.astype(values.dtype))


def make_batch(
    model: TextModel, rows: Sequence[Row], length: int, size: int
) -> dict[str, np.ndarray]:
    """Make a batch of rows padded to a length; rows of padding fill it up to `size`.

    Of an encoder-decoder the decoder's side is padded to its longest.
    """
    pad = model.ends.pad_id
    filled = [*rows, *[rows[-1]] * (size - len(rows))]
    batch = {}
    sides = {"": [row.ids for row in filled]}
    if model.start is not None:
        sides["decoder_"] = [row.begun for row in filled]
    for name, parts in sides.items():
        width = max(map(len, parts)) if name else length
        ids = np.full((size, width), pad, np.int32)
        real = np.arange(width) < np.array([len(part) for part in parts])[:, None]
        ids[real] = np.concatenate(parts)
        batch[f"{name}input_ids"] = ids
        batch[f"{name}attention_mask"] = real.astype(np.int32)
    for name in rows[0].more:
        batch[name] = np.zeros((size, length), np.int32)
        for k, row in enumerate(filled):
            batch[name][k, : len(row.ids)] = row.more[name]
    if (model.context or model.causal_steps) and model.arrange is None:
        columns = np.arange(1, length + 1, dtype=np.int32)
        steps = columns * batch["attention_mask"]
        if model.context:  # of which what a text begins with is none
            own = [len(row.ids) - len(row.forced) for row in filled]
            steps *= columns > np.array(own)[:, None]
        batch["attention_steps"] = steps
    return batch


def write_texts(
    model: TextModel, prompts: Sequence[Prompt], options: Options
) -> list[list[Output]]:
    """Write behind each prompt: as many outputs each as options say, best first where
    there are beams. Raises UserError for a prompt that is too long, and where
    probabilities are no numbers."""
    from bertjax.inference import forward  # which needs jax

    rows = [*make_rows(model, prompts, options)]
    if not rows:
        return []
    samples, kept = options.samples, options.num_return_sequences
    run = make_run(model, options)
    n = max(samples, options.beams)
    sizes = np.array([len(row.ids) for row in rows])
    longest = model.most - options.new_tokens * (model.start is None)
    at_once = max(1, options.batch_size // n)
    size, planned = forward.plan_batches(sizes, at_once, longest)
    outputs: list[list[Output]] = [[] for _ in rows]
    with Progress("generate", len(rows), "prompts") as progress:
        for which, length in planned:
            some = [rows[i] for i in which]
            batch = make_batch(model, some, length, size)
            numbers = np.resize(which, size).astype(np.int32)
            written = run(batch, numbers)
            check_finite(written.log_probs)
            found = [*read_outputs(written)]
            for k, i in enumerate(which):
                candidates = [
                    finish(model, rows[i], ids, log_probs, options.stop or ())
                    for ids, log_probs in found[k * samples : (k + 1) * samples]
                ]
                if options.rank is not None:
                    key = functools.partial(mean_score, len(rows[i].forced))
                    candidates.sort(key=key, reverse=True)
                outputs[i] = candidates[:kept]
            progress.add(len(which))
    return outputs


def check_finite(log_probs: Any) -> None:
    """Refuse what a model says that is broken: UserError."""
    if np.isnan(np.asarray(log_probs)).any():  # -inf is what may not be written
        raise UserError("the model's probabilities are not finite numbers")


def mean_score(forced: int, output: Output) -> float:
    """Return the mean of ln p of an output's tokens, by which candidates are ranked;
    forced: how many of them, the first, were given, and are in no score."""
    return output.score / max(len(output.ids) - forced, 1)


def make_run(
    model: TextModel, options: Options
) -> Callable[[Mapping[str, np.ndarray], np.ndarray], Any]:
    """Make run(batch, rows) -> Generated; rows: numbers of the rows, i32 [B]."""
    from bertjax.generation import beam, decode
    from bertjax.generation.pick import Pick

    shared = dict(
        max_new_tokens=options.new_tokens,
        ends=model.ends,
        samples=options.samples,
    )
    penalty = options.repetition_penalty or 1.0
    if options.beams > 1:
        beams = beam.Beams(
            options.beams,
            1.0 if options.length_penalty is None else options.length_penalty,
            options.early_stopping or "false",
            penalty,
        )
        search = functools.partial(beam.beam_search, model.decoder, model.params)
        # Lengths are counted as in transformers: what is written first whatever the
        # model says is of the text, and a prefix is not.
        forced = 0 if options.prefix else len((model.start or ())[1:])
        return lambda batch, rows: search(batch, beams=beams, forced=forced, **shared)
    top_p = 1.0 if options.top_p is None else options.top_p
    pick = Pick(options.draw_temperature, options.top_k or 0, top_p, penalty)
    generate = functools.partial(decode.generate, model.decoder, model.params)
    return lambda batch, rows: generate(
        batch, rows=rows, pick=pick, seed=options.seed, **shared
    )


def read_outputs(written: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, ln p of them) of each row, without padding."""
    for ids, length, log_probs in zip(*map(np.asarray, written), strict=True):
        yield ids[:length], log_probs[:length]


def finish(
    model: TextModel,
    row: Row,
    ids: np.ndarray,
    log_probs: np.ndarray,
    stop: Sequence[str],
) -> Output:
    """Return the output of new ids, i32 [T]; log_probs f32 [T].

    A text that goes on reads on where the prompt ends. Special tokens are left out, and
    ids of no piece, which a model from elsewhere may have as padding.
    """
    tokenizer = model.tokenizer
    special = {*tokenizer.special_ids.tolist()} - {tokenizer.unk_id}
    before = row.ids[: len(row.ids) - len(row.forced)] if model.goes_on else ()
    shown = [int(i) for i in before if int(i) not in special]

    def text_of(new: Sequence[int]) -> str:
        pieces = (i for i in (*row.forced, *new) if i < tokenizer.vocab_size)
        return text_behind(tokenizer, shown, [i for i in pieces if i not in special])

    new = ids.tolist()
    text, kept = cut_at_stop(new, text_of, stop)
    score = float(log_probs[:kept].astype(np.float64).sum())
    return Output(text, [*row.forced, *new[:kept]], score)


def text_behind(tokenizer: Any, before: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of new ids as it goes on behind others: with its first space, and
    without the ## of a word's later piece, as far as the tokenizer shows it."""
    if not before or not new:
        return tokenizer.decode(new)
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *new])
    if whole.startswith(start):
        return whole[len(start) :]
    return tokenizer.decode(new)


def cut_at_stop(
    ids: Sequence[int], text_of: Callable[[Sequence[int]], str], stop: Sequence[str]
) -> tuple[str, int]:
    """Cut a text before the first of the strings that end it.

    Returns the text, and how many ids it takes to write that string.

    >>> cut_at_stop([1, 2, 3], lambda ids: "ab. " * len(ids), ["b."])
    ('a', 1)
    """
    text = text_of(ids)
    places = [(at, at + len(s)) for s in stop if (at := text.find(s)) >= 0]
    if not places:
        return text, len(ids)
    begin, end = min(places)
    needed = text[:end]
    every = range(len(ids) + 1)
    return text[:begin], next(n for n in every if text_of(ids[:n]).startswith(needed))
