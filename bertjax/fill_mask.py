# SPDX-License-Identifier: Apache-2.0
"""Fill blanks: python -m bertjax.fill_mask --model=DIR "The [MASK] is here." ...

Each blank gets a line of guesses, the best first; a piece that goes on with the word
before it begins with ##. The last line is the text with the best guesses in it. With
--json comes an object a text: text and masks, a list a blank of guesses, which have
token (the piece as the vocabulary has it), id, probability, and sequence, the text with
this one blank filled.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError
from bertjax.assembly import command_line, models, resolve
from bertjax.config import cli
from bertjax.data import rendering

# Few programs are compiled for texts of all lengths: so many lengths, each with so many
# blanks at once.
LENGTHS, BLANKS = 5, 8


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "", flag_values=values)
    flags.DEFINE_integer(
        "top_k", 5, "guesses for each blank", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string("dtype", "float32", "", flag_values=values)
    flags.DEFINE_string("weights", "", "", flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, define_flags, needs_config=False, words=True)
    texts = args.words
    if not args.model:
        raise UserError(
            "--model is missing: a workdir, or a directory of Hugging Face's"
        )
    if not texts:
        raise UserError("no text: give sentences with blanks, such as 'A [MASK].'")
    opened = config, tokenizer, checkpoint, _ = models.open_model(args.model, "--model")
    models.check_masked_lm(opened, f"--model={args.model}")
    config.dtype = args.dtype
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    rows = [encode(tokenizer, text, cfg.max_length) for text in texts]
    cfg, params = read_params(checkpoint, cfg, args.weights)
    fill = make_filler(cfg, params, tokenizer, min(args.top_k, tokenizer.vocab_size))
    for text, ids in zip(texts, rows, strict=True):
        masks = fill(ids)
        if args.json:
            add_sequences(tokenizer, ids, masks)
            print(json.dumps({"text": text, "masks": masks}), flush=True)
            continue
        print(text)
        for blank in masks:
            words = (readable(tokenizer, g["id"]) for g in blank)
            told = zip(words, blank, strict=True)
            print("  " + "   ".join(f"{w} {g['probability']:.3f}" for w, g in told))
        best = iter(blank[0]["id"] for blank in masks)
        filled = [next(best) if t == tokenizer.mask_id else t for t in ids[1:-1]]
        print("  =", tokenizer.decode(filled), flush=True)
    return 0


def readable(tokenizer: Any, token: int) -> str:
    """Return the text of a piece; ## begins one that a word goes on with."""
    text, joined = rendering.surface(tokenizer, token)
    return "##" * joined + rendering.visible(text)


def add_sequences(
    tokenizer: Any, ids: Sequence[int], masks: list[list[dict[str, Any]]]
) -> None:
    """Give each guess its sequence: the text with this blank filled, others not."""
    blanks = [i for i, t in enumerate(ids) if t == tokenizer.mask_id]
    for i, blank in zip(blanks, masks, strict=True):
        for guess in blank:
            filled = [*ids[1:i], guess["id"], *ids[i + 1 : -1]]
            guess["sequence"] = tokenizer.decode(filled)


def read_params(checkpoint: Any, cfg: Any, weights: str = "") -> tuple[Any, Any]:
    """Return (config, parameters) of the model in a checkpoint that fills blanks.

    cfg: the encoder's. Raises UserError where there is none.
    """
    params, cfg = masked_lm(models.read_params(checkpoint, "mlm", weights), cfg)
    return cfg, params


def encode(tokenizer: Any, text: str, longest: int) -> list[int]:
    """Return [CLS] text [SEP] as ids. UserError without a blank or when too long."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{text[:60]!r} is not UTF-8") from e
    ids = tokenizer.encode_with_masks(text)
    if tokenizer.mask_id not in ids:
        raise UserError(f"no {tokenizer.mask_token} in {text[:80]!r}: nothing to fill")
    ids = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    if len(ids) > longest:
        raise UserError(
            f"{text[:60]!r}... has {len(ids)} tokens, more than the model's {longest}"
        )
    return ids


def masked_lm(params: Any, cfg: Any) -> tuple[Any, Any]:
    """Return the masked LM {"encoder", "mlm"} and its config.

    Of the two models of ELECTRA it is the generator that fills blanks.
    """
    from bertjax.models import encoder

    if "generator" in params:
        from bertjax.objectives.electra import split_pair

        params, cfg = split_pair(params, cfg)["generator"]
    return {k: params[k] for k in ("encoder", "mlm")}, encoder.without_pooler(cfg)


def make_filler(cfg: Any, params: Any, tokenizer: Any, top_k: int) -> Any:
    """Make fill(ids) -> for each blank its top_k {"token", "id", "probability"}, best
    first.

    The head is computed at the blanks alone. Rows of the embedding beyond the
    vocabulary (padding) have probabilities, but are no guesses.
    """
    import jax

    from bertjax.models import stacked_layers

    params, cfg = masked_lm(params, cfg)
    params = jax.device_put(params)
    params["encoder"] = stacked_layers.unstack(params["encoder"], cfg)
    guess = make_forward(cfg, tokenizer.vocab_size, top_k)
    lengths = bucket_lengths(cfg.max_length)

    def fill(ids: list[int]) -> list[list[dict[str, Any]]]:
        blanks = [i for i, t in enumerate(ids) if t == tokenizer.mask_id]
        length = next(n for n in lengths if n >= len(ids))
        row = np.full((1, length), tokenizer.pad_id, np.int32)
        row[0, : len(ids)] = ids
        real = (np.arange(length) < len(ids))[None].astype(np.int32)
        batch = {"input_ids": row, "attention_mask": real}
        found = []
        for begin in range(0, len(blanks), BLANKS):
            some = blanks[begin : begin + BLANKS]
            at = np.array([some + [0] * (BLANKS - len(some))], np.int32)
            values, tokens = jax.device_get(
                guess(params, {**batch, "mlm_positions": at})
            )
            found += [
                [
                    {
                        "token": tokenizer.pieces[t],
                        "id": int(t),
                        "probability": float(p),
                    }
                    for t, p in zip(*guesses, strict=True)
                ]
                for guesses in zip(tokens[: len(some)], values, strict=False)
            ]
        return found

    return fill


@functools.lru_cache(maxsize=8)
def make_forward(cfg: Any, pieces: int, top_k: int) -> Callable[[Any, Any], Any]:
    """Make guess(parameters, batch of one row) -> (probabilities, ids), [P, top_k].

    The same function for the same model: another checkpoint of it compiles nothing.
    """
    import jax
    import jax.numpy as jnp

    from bertjax.models import encoder, heads

    beyond = np.arange(cfg.vocab_size) >= pieces

    @jax.jit
    def guess(params: Any, batch: Any) -> Any:
        at = batch["mlm_positions"]
        hidden = encoder.apply(params["encoder"], cfg, batch, at=at).hidden
        word = params["encoder"]["embeddings"]["word"]
        logits = heads.mlm_logits(params["mlm"], word, cfg, hidden)
        likely = jax.nn.softmax(logits[0], axis=-1)
        return jax.lax.top_k(jnp.where(beyond, -1.0, likely), top_k)

    return guess


def bucket_lengths(most: int) -> list[int]:
    """Return the lengths that texts are padded to: `most`, and from 32 on less.

    >>> bucket_lengths(512), bucket_lengths(8192)
    ([32, 64, 128, 256, 512], [32, 128, 512, 2048, 8192])
    """
    ratio = max(2.0, (most / 32) ** (1 / (LENGTHS - 1)))
    return sorted({math.ceil(most / ratio**k) for k in range(LENGTHS)})


def falling_batches(
    sizes: np.ndarray, batch_size: int, longest: int
) -> tuple[int, list[tuple[np.ndarray, int]]]:
    """Plan batches of rows by falling length, in at most five shapes.

    sizes: tokens of the rows, i64 [n]; longest: what no row is padded beyond. Returns
    the rows of a batch, and (which rows, the length that they are padded to) of each.
    Lengths end at the longest row. What is one batch has the model's lengths and a
    power of two of rows, so that calls with a few texts find the programs of earlier
    ones.

    >>> falling_batches(np.array([7, 20, 9]), 32, 512)
    (4, [(array([1, 2, 0]), 32)])
    """
    if len(sizes) > batch_size:
        longest = min(-(-int(sizes.max()) // 16) * 16, longest)
    else:
        batch_size = min(1 << (len(sizes) - 1).bit_length(), batch_size)
    lengths = bucket_lengths(longest)
    order = np.argsort(-sizes, kind="stable")
    parts = (order[i : i + batch_size] for i in range(0, len(order), batch_size))
    return batch_size, [
        (which, next(n for n in lengths if n >= sizes[which[0]])) for which in parts
    ]


def count_work(planned: Sequence[tuple[np.ndarray, int]]) -> int:
    """Return the padded tokens of planned batches: what they cost, nearly."""
    return sum(len(which) * length for which, length in planned)


if __name__ == "__main__":
    cli.command(main)
