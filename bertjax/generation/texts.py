# SPDX-License-Identifier: Apache-2.0
"""Generation from left to right: prompts are batched, and outputs become texts."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.progress import Progress
from bertjax.generation.options import Options, reading_prompt

# A text; for a finetuned model also a row of its task, {column: text}.
Prompt = str | Mapping[str, str]
Encode = Callable[[str], list[int]]


class Output(NamedTuple):
    """A generated text and its tokens, including the end token.

    score: the sum of ln p of the tokens that the model chose.
    """

    text: str
    ids: list[int]
    score: float


class Side(NamedTuple):
    """Special tokens around the tokens of a prompt."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def lay_out(self, encode: Encode, prompts: Sequence[str]) -> list[list[int]]:
        """Return the ids of prompts with these tokens around them."""
        return [[*self.before, *encode(text), *self.behind] for text in prompts]


class TextModel(NamedTuple):
    """A model that writes from left to right.

    decoder: a models.incremental.Decoder. params: its parameters, on the device.
    lay_out: a function from prompts to ids, including special tokens. start: None, or
    the first tokens of an encoder-decoder's decoder. context: the tokens of a prompt
    attend to each other (a prefix LM). causal_steps: they do not, and a batch needs
    attention_steps that say so; with neither, a batch has no attention_steps. most: the
    tokens that a row can have; for an encoder-decoder those of each side.
    target: for a model that was finetuned to write targets, their greatest length in
    tokens; otherwise None. begin: the tokens with which targets begin. arrange: used
    instead of lay_out; a function from prompts to arrays i32 [n] by name: the ids and
    the other arrays that a batch has per token.
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
    def continues_prompt(self) -> bool:
        """Whether the texts continue the prompts, and are no texts of their own."""
        return self.start is None and self.target is None


class Row(NamedTuple):
    """A prompt as the model reads it.

    ids: with special tokens. first: an encoder-decoder's first decoder ids, or None.
    forced: the given ids that count as generated (of --prefix, and the decoder's first
    ones). more: further arrays for the ids.
    """

    ids: np.ndarray
    first: np.ndarray | None
    forced: list[int]
    more: Mapping[str, np.ndarray] = MappingProxyType({})

    @property
    def begun(self) -> np.ndarray:
        """The ids that are continued."""
        return self.ids if self.first is None else self.first


def make_rows(
    model: TextModel, prompts: Sequence[Prompt], options: Options
) -> Iterator[Row]:
    """Yield the row of each prompt. Raises PromptError for one that is too long.

    For the prompt 17 25 and the prefix 31: on the left a model whose rows begin with 2,
    on the right an encoder-decoder whose decoder begins with 0:

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
    for number, (prompt, more) in enumerate(zip(prompts, arranged, strict=True)):
        own = list(more.pop("input_ids"))
        if model.start is None:
            # An empty prompt without a begin token has nothing else to begin with.
            own = own or [model.tokenizer.cls_id]
            more = {name: go_on(name, x, len(forced)) for name, x in more.items()}
            row = Row(np.array([*own, *forced], np.int32), None, forced, more)
        else:
            first = np.array([*model.start, *forced], np.int32)
            begun = [*model.start[1:], *forced]
            row = Row(np.array(own, np.int32), first, begun)
        with reading_prompt(number):
            check_room(row, str(prompt)[:40], new, most)
        yield row


def check_room(row: Row, name: str, new: int, most: int) -> None:
    """Raise UserError for a row longer than `most`, alone or with `new` ids."""
    read, size = len(row.ids), len(row.begun) + new
    if row.first is not None and read > most:
        raise UserError(f"{name!r} has {read} tokens, more than the model's {most}")
    if size > most:
        room = most - len(row.begun)
        with_new = f"{name!r} has {read} tokens, and with new ones {size}"
        if row.first is not None:
            with_new = f"what is written has {size} tokens with those it begins with"
        raise UserError(
            f"--max_new_tokens={new}: {with_new}, more than the model's {most}"
            + f"; give --max_new_tokens={room}" * (room > 0)
        )


def go_on(name: str, values: np.ndarray, number: int) -> np.ndarray:
    """Extend an array of a prompt's tokens by `number` new tokens.

    position_ids and attention_steps count up; other arrays repeat the last value.
    """
    counts = name in ("position_ids", "attention_steps")
    more = values[-1] + counts * np.arange(1, number + 1)
    return np.append(values, more.astype(values.dtype))


def make_batch(
    model: TextModel, rows: Sequence[Row], length: int, size: int
) -> dict[str, np.ndarray]:
    """Build a batch of rows padded to a length, with copies of the last up to `size`.

    The decoder's side of an encoder-decoder is padded to its longest row.
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
        if model.context:  # the context has step 0, but a prefix is no part of it
            own = [len(row.ids) - len(row.forced) for row in filled]
            steps *= columns > np.array(own)[:, None]
        batch["attention_steps"] = steps
    return batch


def write_texts(
    model: TextModel, prompts: Sequence[Prompt], options: Options
) -> list[list[Output]]:
    """Continue each prompt; return options.num_return_sequences outputs for each.

    With beams, or with options.rank, the best comes first. Raises PromptError for a
    prompt that is too long, and UserError if probabilities are nan.
    """
    from bertjax.inference import forward  # this imports jax

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
    """Raise UserError for nan among a model's log probabilities."""
    if np.isnan(np.asarray(log_probs)).any():  # -inf is valid: an excluded token
        raise UserError("the model's probabilities are not finite numbers")


def mean_score(forced: int, output: Output) -> float:
    """Return the mean of ln p of an output's tokens, by which candidates are ranked.

    forced: the number of its first tokens that were given, which no score includes.
    """
    return output.score / max(len(output.ids) - forced, 1)


def make_run(
    model: TextModel, options: Options
) -> Callable[[Mapping[str, np.ndarray], np.ndarray], Any]:
    """Return run(batch, rows) -> Generated; rows: numbers of the rows, i32 [B]."""
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
        # Lengths are counted as in transformers: a forced first token is part of the
        # text, and a prefix is not.
        forced = 0 if options.prefix else len((model.start or ())[1:])
        return lambda batch, rows: search(batch, beams=beams, forced=forced, **shared)
    top_p = 1.0 if options.top_p is None else options.top_p
    pick = Pick(options.draw_temperature, options.top_k or 0, top_p, penalty)
    generate = functools.partial(decode.generate, model.decoder, model.params)
    return lambda batch, rows: generate(
        batch, rows=rows, pick=pick, seed=options.seed, **shared
    )


def read_outputs(written: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, their ln p) of each row, without padding."""
    for ids, length, log_probs in zip(*map(np.asarray, written), strict=True):
        yield ids[:length], log_probs[:length]


def finish(
    model: TextModel,
    row: Row,
    ids: np.ndarray,
    log_probs: np.ndarray,
    stop: Sequence[str],
) -> Output:
    """Return the output for new ids, i32 [T]; log_probs: f32 [T].

    A continuation is decoded so that it can be appended to the prompt. Special tokens
    are left out, and so are ids without a piece, which an imported model may have as
    padding of its vocabulary.
    """
    tokenizer = model.tokenizer
    special = {*tokenizer.special_ids.tolist()} - {tokenizer.unk_id}
    before = row.ids[: len(row.ids) - len(row.forced)] if model.continues_prompt else ()
    shown = [int(i) for i in before if int(i) not in special]

    def text_of(new: Sequence[int]) -> str:
        pieces = (i for i in (*row.forced, *new) if i < tokenizer.vocab_size)
        return text_behind(tokenizer, shown, [i for i in pieces if i not in special])

    new = ids.tolist()
    text, kept = cut_at_stop(new, text_of, stop)
    score = float(log_probs[:kept].astype(np.float64).sum())
    return Output(text, [*row.forced, *new[:kept]], score)


def text_behind(tokenizer: Any, before: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of new ids so that it can be appended to the text of `before`.

    It has its leading space, and no ## of a continued word, as far as the tokenizer's
    decoding of both together shows that.
    """
    if not before or not new:
        return tokenizer.decode(new)
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *new])
    if whole.startswith(start):
        return whole[len(start) :]
    return tokenizer.decode(new)


def cut_at_stop(
    ids: Sequence[int], text_of: Callable[[Sequence[int]], str], stop: Sequence[str]
) -> tuple[str, int]:
    """Cut a text before the first of the stop strings.

    Returns the text, and the number of ids up to the end of that string.

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
