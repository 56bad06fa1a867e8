# SPDX-License-Identifier: Apache-2.0
"""Fill blanks: python -m bertjax.fill_mask --model=DIR "The [MASK] is here." ..."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError
from bertjax import config as c

# Lengths and numbers of blanks are rounded up to these, so that few programs are
# compiled for texts of all lengths.
LENGTHS = (32, 128, 512, 2048, 8192)
BLANKS = (4, 64)


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "", flag_values=values)
    flags.DEFINE_integer("top_k", 5, "", lower_bound=1, flag_values=values)
    flags.DEFINE_string("dtype", "float32", "", flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = c.parse(argv, define_flags, needs_config=False, words=True)
    texts = args.words
    if not args.model:
        raise UserError("--model is missing: a workdir or one of its checkpoints")
    if not texts:
        raise UserError("no text: give sentences with blanks, such as 'A [MASK].'")
    config, tokenizer, checkpoint, _ = c.open_model(args.model, "--model")
    config.dtype = args.dtype
    cfg = c.encoder_config(config, tokenizer.vocab_size)
    rows = [encode(tokenizer, text, cfg.max_position_embeddings) for text in texts]
    fill = make_filler(
        cfg,
        read_params(checkpoint),
        tokenizer,
        min(args.top_k, tokenizer.vocab_size),
    )
    for text, ids in zip(texts, rows, strict=True):
        masks = fill(ids)
        if args.json:
            print(json.dumps({"text": text, "masks": masks}), flush=True)
            continue
        print(text)
        for blank in masks:
            words = (f"{g['token']} {g['probability']:.3f}" for g in blank)
            print("  " + "   ".join(words), flush=True)
    return 0


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


def read_params(checkpoint: Any) -> Any:
    """Read a checkpoint's parameters. UserError when nobody trained its head."""
    import jax

    from bertjax.training.checkpoint import restore_params

    params = jax.device_put(restore_params(checkpoint))
    if "mlm" not in params:
        raise UserError(f"{checkpoint} has no masked-LM head")
    return params


def make_filler(cfg: Any, params: Any, tokenizer: Any, top_k: int) -> Any:
    """Make fill(ids) -> for each blank its top_k {"token", "probability"}, best first.

    The head is computed at the blanks alone. Rows of the embedding beyond the
    vocabulary (padding) cannot be guessed.
    """
    import jax
    import jax.numpy as jnp

    from bertjax.models import encoder, heads

    cfg = encoder.without_pooler(cfg)
    beyond = np.arange(cfg.vocab_size) >= tokenizer.vocab_size

    @jax.jit
    def guess(params: Any, batch: Any) -> Any:
        hidden = encoder.apply(params["encoder"], cfg, batch).hidden
        word = params["encoder"]["embeddings"]["word"]
        logits = heads.mlm_logits(
            params["mlm"], word, cfg, hidden, batch["mlm_positions"]
        )
        logits = jnp.where(beyond, -jnp.inf, logits)
        return jax.lax.top_k(jax.nn.softmax(logits[0], axis=-1), top_k)

    def fill(ids: list[int]) -> list[list[dict[str, Any]]]:
        blanks = [i for i, t in enumerate(ids) if t == tokenizer.mask_id]
        length = bucket(len(ids), LENGTHS, cfg.max_position_embeddings)
        slots = bucket(len(blanks), BLANKS, length)
        row = np.full((1, length), tokenizer.pad_id, np.int32)
        row[0, : len(ids)] = ids
        positions = np.zeros((1, slots), np.int32)
        positions[0, : len(blanks)] = blanks
        batch = {
            "input_ids": row,
            "attention_mask": (np.arange(length) < len(ids))[None].astype(np.int32),
            "mlm_positions": positions,
        }
        values, tokens = jax.device_get(guess(params, batch))
        return [
            [
                {"token": tokenizer.pieces[t], "probability": float(p)}
                for t, p in zip(tokens[i], values[i], strict=True)
            ]
            for i in range(len(blanks))
        ]

    return fill


def bucket(size: int, sizes: Sequence[int], most: int) -> int:
    """Round up to one of `sizes`, or to `most`.

    >>> bucket(20, (32, 128), 512), bucket(200, (32, 128), 512)
    (32, 512)
    """
    return min(next((s for s in sizes if s >= size), most), most)


if __name__ == "__main__":
    c.command(main)
