# SPDX-License-Identifier: Apache-2.0
"""Filling of blanks in texts with a masked LM's most likely tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.assembly import resolve
from bertjax.assembly.models import LoadedModel, check_masked_lm
from bertjax.data import rendering
from bertjax.data.corpus.line_repair import check_utf8

__all__ = ["add_sequences", "encode", "fill_texts", "make_filler", "masked_lm"]

BLANKS = 8  # blanks per forward pass
Filler = Callable[[list[int]], list[list[dict[str, Any]]]]


def readable_piece(tokenizer: Any, token: int) -> str:
    """Return the text of a piece; it begins with ## if it continues a word."""
    text, joined = rendering.surface(tokenizer, token)
    return "##" * joined + rendering.visible(text)


def add_sequences(
    tokenizer: Any, ids: Sequence[int], masks: list[list[dict[str, Any]]]
) -> None:
    """Add "sequence" to each guess: the text with this blank filled, others not."""
    blanks = [i for i, t in enumerate(ids) if t == tokenizer.mask_id]
    for i, blank in zip(blanks, masks, strict=True):
        for guess in blank:
            filled = [*ids[1:i], guess["id"], *ids[i + 1 : -1]]
            guess["sequence"] = tokenizer.decode(filled)


def encode(tokenizer: Any, text: str, longest: int) -> list[int]:
    """Return [CLS] text [SEP] as ids.

    Raises UserError for a text without a blank, or with more than `longest` tokens.
    """
    check_utf8(text)
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
    """Return the masked LM's parameters {"encoder", "mlm"} and its config.

    For ELECTRA these are the generator's. An encoder-decoder keeps its "decoder".
    """
    from bertjax.models import encoder

    if "generator" in params:
        from bertjax.objectives.electra import split_pair

        params, cfg = split_pair(params, cfg)["generator"]
    # A tied head without parameters of its own (GPT's) is missing.
    parts = ["encoder", "mlm", *["decoder"] * (cfg.num_decoder_layers > 0)]
    own = {k: params[k] for k in parts if k in params}
    return own, encoder.without_pooler(cfg)


def make_filler(
    cfg: Any, params: Any, tokenizer: Any, top_k: int, before: bool = False
) -> Filler:
    """Return fill(ids) -> the top_k guesses for each blank, best first.

    A guess is {"token", "id", "probability"}. The head is computed only at the blanks,
    or with `before` (resolve.reads_before) one position to the left of each. Rows of
    the embeddings beyond the vocabulary (padding) have probabilities, but are no
    guesses. `fill` raises UserError if probabilities are not finite.
    """
    import jax

    from bertjax.inference import forward

    params, cfg = masked_lm(params, cfg)
    params = forward.place_params(params, cfg)
    shown = tokenizer.vocab_size, top_k
    run = forward.make_forward(cfg, forward.top_guesses, *shown)
    lengths = forward.bucket_lengths(cfg.max_length)

    def guess(token: int, probability: float) -> dict[str, Any]:
        name = tokenizer.pieces[token]
        return {"token": name, "id": int(token), "probability": float(probability)}

    def fill(ids: list[int]) -> list[list[dict[str, Any]]]:
        blanks = [i for i, t in enumerate(ids) if t == tokenizer.mask_id]
        row = np.full((1, next(n for n in lengths if n >= len(ids))), tokenizer.pad_id)
        row[0, : len(ids)] = ids
        sizes = np.array([len(ids)], np.int32)
        batch = {"input_ids": row.astype(np.int32), "sizes": sizes}
        guesses = []
        for begin in range(0, len(blanks), BLANKS):
            some = blanks[begin : begin + BLANKS]
            at = np.zeros((1, BLANKS), np.int32)
            at[0, : len(some)] = np.array(some) - int(before)
            values, tokens = jax.device_get(run(params, {**batch, "mlm_positions": at}))
            if not np.isfinite(values).all():
                raise UserError("the model's probabilities are not finite numbers")
            guesses += [
                [guess(*pair) for pair in zip(*best, strict=True)]
                for best in zip(tokens[: len(some)], values, strict=False)
            ]
        return guesses

    return fill


def fill_texts(
    model: LoadedModel, texts: Sequence[str], top_k: int, weights: str, flag: str
) -> Iterator[tuple[list[int], list[list[dict[str, Any]]]]]:
    """Yield (ids, guesses for each blank) of each text, as from `make_filler`.

    All texts are checked before the first is filled. Raises UserError for a text that
    has no blank or is too long, and for a model without a masked-LM head.
    """
    check_masked_lm(model, flag)
    tokenizer, cfg = model.tokenizer, model.cfg
    rows = [encode(tokenizer, text, cfg.max_length) for text in texts]
    params, cfg = masked_lm(model.read_params("mlm", weights), cfg)
    most, before = min(top_k, tokenizer.vocab_size), resolve.reads_before(model.config)
    fill = make_filler(cfg, params, tokenizer, most, before)
    for ids in rows:
        masks = fill(ids)
        add_sequences(tokenizer, ids, masks)
        yield ids, masks
