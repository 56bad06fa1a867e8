# SPDX-License-Identifier: Apache-2.0
"""Filling of blanks by a masked LM or a diffusion model, in a selectable order.

A text without a blank is continued: as many blanks as new tokens are appended to it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, counted
from bertjax.data.progress import Progress
from bertjax.generation.options import Options, reading_prompt
from bertjax.generation.texts import Output, check_finite

LOGITS_MB = 256  # the largest logits of a batch
MASKS = ("[MASK]", "<mask>")  # mask tokens; a model has one of them


class BlankModel(NamedTuple):
    """A model that fills blanks.

    params: {"encoder", "mlm"} on the device. before: predictions are read one position
    to the left, as in masked next-token prediction. block: tokens per block, where a
    block attends only to itself and the blocks before it; 0: no blocks.
    """

    cfg: Any
    params: Any
    tokenizer: Any
    before: bool = False
    block: int = 0


class Row(NamedTuple):
    """[CLS] text [SEP] as ids i32 [n]; blanks: the positions of the masks, i32 [p]."""

    ids: np.ndarray
    blanks: np.ndarray


def make_row(model: BlankModel, text: str, options: Options) -> Row:
    """Return the row of a text.

    Raises UserError if it is too long, or has the mask token of another model.
    """
    tokenizer, most = model.tokenizer, model.cfg.max_length
    ids = tokenizer.encode_with_masks(text)
    begun = tokenizer.mask_id not in ids
    if begun and (other := next((m for m in MASKS if m in text), "")):
        raise UserError(
            f"{text[:40]!r}: {other} is not a blank of this model: write "
            f"{tokenizer.mask_token}"
        )
    if begun:
        ids = [*ids, *[tokenizer.mask_id] * options.new_tokens]
    ids = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    if len(ids) > most:
        new = f" with --max_new_tokens={options.new_tokens}" * begun
        raise UserError(
            f"{text[:40]!r} has {len(ids)} tokens{new}, more than the model's {most}"
        )
    row = np.array(ids, np.int32)
    return Row(row, np.flatnonzero(row == tokenizer.mask_id).astype(np.int32))


def fill_texts(
    model: BlankModel,
    texts: Sequence[str],
    options: Options,
    say: Callable[[str], None] = lambda text: None,
) -> list[list[Output]]:
    """Fill the blanks of each text; return options.num_return_sequences outputs each.

    say: is called with the number of model calls. Raises PromptError for a text that is
    too long, and UserError for a block size other than that of the model's training,
    and if probabilities are nan.
    """
    from bertjax.generation.pick import Pick
    from bertjax.generation.unmask import Order, unmask

    if model.block and options.block not in (None, model.block):
        raise UserError(
            f"--block={options.block}: this model was trained with blocks of "
            f"{model.block} tokens: leave it out"
        )
    rows = []
    for number, text in enumerate(texts):
        with reading_prompt(number):
            rows.append(make_row(model, text, options))
    order = Order(
        options.order or "confidence",
        options.steps or 0,
        options.gamma or 0.0,
        options.remask or 0.0,
    )
    top_p = 1.0 if options.top_p is None else options.top_p
    pick = Pick(options.draw_temperature, options.top_k or 0, top_p)
    fill = make_fill(model.cfg, model.before)
    run = functools.partial(unmask, fill, model.params, order=order, pick=pick)
    samples = options.num_return_sequences
    outputs: list[list[Output]] = [[] for _ in rows]
    calls = 0
    with Progress("generate", len(rows) * samples, "texts") as progress:
        for which, batch in make_batches(model, rows, options):
            done = run(batch, seed=np.uint32(options.seed))
            check_finite(done.log_probs)
            scores = np.asarray(done.scores).astype(float)
            ids = np.asarray(done.ids)
            for k, i in enumerate(which):
                own = ids[k, 1 : len(rows[i].ids) - 1].tolist()
                text = model.tokenizer.decode(own)
                outputs[i].append(Output(text, own, float(scores[k])))
            calls += int(np.asarray(done.calls)[: len(which)].sum())
            progress.add(len(which))
    blanks = samples * sum(len(row.blanks) for row in rows)
    if rows:
        filled, took = counted(blanks, "blank"), counted(calls, "call")
        say(f"{filled} filled in {took} of the model (a text each)")
    return outputs


def make_batches(
    model: BlankModel, rows: Sequence[Row], options: Options
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yield (indices of rows, batch) for `unmask` and `make_fill`.

    Each row is repeated num_return_sequences times. Rows are padded to a few lengths
    and to one number of blanks, and batches are filled up with rows without blanks.
    """
    from bertjax.inference import forward

    tokenizer, cfg = model.tokenizer, model.cfg
    if not rows:
        return
    samples = options.num_return_sequences
    owner = np.repeat(np.arange(len(rows)), samples)
    number = np.tile(np.arange(samples, dtype=np.int32), len(rows))
    slots = 1 << (max(len(row.blanks) for row in rows) - 1).bit_length()
    most = max(1, LOGITS_MB * 2**20 // (4 * slots * cfg.vocab_size))
    sizes = np.array([len(row.ids) for row in rows])[owner]
    size, planned = forward.plan_batches(
        sizes, min(options.batch_size, most), cfg.max_length
    )
    never = np.arange(cfg.vocab_size) >= tokenizer.vocab_size
    never[tokenizer.special_ids] = True
    for which, length in planned:
        batch = {
            "input_ids": np.full((size, length), tokenizer.pad_id, np.int32),
            "attention_mask": np.zeros((size, length), np.int32),
            "mlm_positions": np.zeros((size, slots), np.int32),
            "free": np.zeros((size, slots), bool),
            "blocks": np.zeros((size, slots), np.int32),
            "rows": np.resize(owner[which], size).astype(np.int32),
            "samples": np.resize(number[which], size),
            "never": never,
        }
        batch["attention_mask"][:, 0] = 1
        for k, i in enumerate(owner[which]):
            ids, blanks = rows[i]
            batch["input_ids"][k, : len(ids)] = ids
            batch["attention_mask"][k, : len(ids)] = 1
            batch["mlm_positions"][k, : len(blanks)] = blanks
            batch["free"][k, : len(blanks)] = True
            batch["blocks"][k, : len(blanks)] = block_numbers(model, blanks, options)
        if model.block:
            steps = np.arange(length, dtype=np.int32) // model.block + 1
            batch["attention_steps"] = steps * batch["attention_mask"]
        yield owner[which].tolist(), batch


def block_numbers(
    model: BlankModel, blanks: np.ndarray, options: Options
) -> np.ndarray:
    """Return the block number of each blank, i32 [p]; lower ones are filled first.

    With --block=K a block is K blanks, from left to right. A model that was trained
    with blocks uses its own, which are given by positions in the row.
    """
    if model.block:
        return blanks // model.block
    return np.arange(len(blanks), dtype=np.int32) // (options.block or len(blanks))


@functools.lru_cache(maxsize=8)
def make_fill(cfg: Any, before: bool) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Return fill(params, batch) -> logits f32 [B, P, V] for the mlm_positions.

    Equal arguments return the same function, so that later calls compile nothing.
    batch: input_ids, attention_mask i32 [B, L], optionally attention_steps;
    mlm_positions i32 [B, P]; never: bool [V], ids without probability. before: as in
    BlankModel.
    """
    import jax.numpy as jnp

    from bertjax.models import encoder, heads

    cfg = encoder.without_pooler(cfg)
    names = ("input_ids", "attention_mask", "attention_steps")

    def fill(params: Any, batch: Mapping[str, Any]) -> Any:
        inputs = {name: batch[name] for name in names if name in batch}
        at = jnp.maximum(batch["mlm_positions"] - int(before), 0)
        hidden = encoder.apply(params["encoder"], cfg, inputs, at=at).hidden
        logits = heads.token_logits(params, cfg, hidden)
        return jnp.where(batch["never"], heads.NEG_INF, logits)

    return fill
