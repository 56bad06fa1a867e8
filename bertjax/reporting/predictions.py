# SPDX-License-Identifier: Apache-2.0
"""Ask the models of runs: blanks over training, and what one sees in a sentence."""

import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bertjax import UserError, fill_mask
from bertjax.assembly import models, resolve
from bertjax.checkpoints import manifest
from bertjax.reporting.read_runs import Run

TOP = 5  # guesses of a blank
LONGEST = 64  # tokens of a sentence whose attention can still be read
Say = Callable[[str], None]
Wrong = dict[str, UserError | None]


def fill_blanks(runs: Sequence[Run], texts: Sequence[str], note: Say) -> list[Any]:
    """Fill the blanks of texts by every kept checkpoint of every run.

    Returns a {"run", "text", "rows": [(step, what make_filler's fill returns)]} for
    each text and run. What cannot guess is left out with a note. Raises UserError for
    texts that have a blank for none.
    """
    found = []
    wrong: Wrong = {}
    headless = []
    for run in runs if texts else ():
        rows: dict[str, list[Any]] = {text: [] for text in texts}
        ids = None
        for step in manifest.steps(run.path):
            try:
                config, tokenizer, checkpoint = open_step(run, step)
            except UserError as e:
                note(f"left out: {e}")
                continue
            cfg = resolve.encoder_config(config, tokenizer.vocab_size)
            if ids is None:
                read = partial(fill_mask.encode, tokenizer, longest=cfg.max_length)
                ids = encode_all(run, texts, read, wrong, note)
            if not ids:
                break
            try:
                cfg, params = fill_mask.read_params(checkpoint, cfg)
            except UserError:
                headless.append(run.name)
                ids = {}  # nor have the others of this run
                break
            top = min(TOP, tokenizer.vocab_size)
            fill = fill_mask.make_filler(cfg, params, tokenizer, top)
            for text, one in ids.items():
                rows[text].append((step, fill(one)))
        if not any(rows.values()) and ids != {}:
            note(f"{run.name}: no checkpoint that fills blanks")
        told = [{"run": run.name, "text": t, "rows": r} for t, r in rows.items() if r]
        found += told
    tell_headless(headless, note)
    refuse(wrong)
    return found


def tell_headless(names: Sequence[str], note: Say) -> None:
    """Note which runs cannot guess, as finetuned ones, in one line."""
    if names:
        note(f"no masked-LM head, so no guesses: {', '.join(names)}")


def encode_all(
    run: Run,
    texts: Sequence[str],
    read: Callable[[str], list[int]],
    wrong: Wrong,
    note: Say,
) -> dict[str, list[int]]:
    """Return {text: ids} of those that a run's model can read; the others are noted.

    wrong: {text: why the first run could not, None where one could}, which grows.
    """
    found = {}
    for text in texts:
        try:
            found[text] = read(text)
            wrong[text] = None
        except UserError as e:
            wrong.setdefault(text, e)
            note(f"{run.name}: left out: {e}")
    return found


def refuse(wrong: Wrong) -> None:
    """Raise what is wrong with a text that no model could read."""
    for error in filter(None, wrong.values()):
        raise error


def open_step(run: Run, step: int) -> tuple[Any, Any, Any]:
    """Open a checkpoint: (config, tokenizer, what read_params takes)."""
    where = f"{run.path}/checkpoints/{step}"
    config, tokenizer, checkpoint, _ = models.open_model(where, "checkpoint")
    config.dtype = "float32"
    return config, tokenizer, checkpoint


def view_sentences(
    runs: Sequence[Run], sentences: Sequence[str], note: Say
) -> list[Any]:
    """See sentences as the newest whole checkpoint of each run does (see make_viewer).

    What has no masked-LM head is left out with a note. Raises UserError for sentences
    that none can show.
    """
    found = []
    wrong: Wrong = {}
    headless = []
    for run in runs if sentences else ():
        step = manifest.newest_before(run.path, 2**62)
        if step is None:
            note(f"{run.name}: no checkpoint, so nothing is seen in a sentence")
            continue
        config, tokenizer, checkpoint = open_step(run, step)
        cfg = resolve.encoder_config(config, tokenizer.vocab_size)
        longest = min(LONGEST, cfg.max_length)
        read = partial(encode, tokenizer, longest=longest)
        ids = encode_all(run, sentences, read, wrong, note)
        if not ids:
            continue
        try:
            cfg, params = fill_mask.read_params(checkpoint, cfg)
        except UserError:
            headless.append(run.name)
            continue
        view = make_viewer(cfg, params, tokenizer, longest)
        for text, one in ids.items():
            found.append({"run": run.name, "step": step, "text": text, **view(one)})
    tell_headless(headless, note)
    refuse(wrong)
    return found


def encode(tokenizer: Any, text: str, longest: int) -> list[int]:
    """Return [CLS] text [SEP] as ids. UserError for what is empty or too long."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"--sentence: {text[:60]!r} is not UTF-8") from e
    ids = tokenizer.encode_with_masks(text)
    if not ids:
        raise UserError(f"--sentence={text!r} has no token")
    if len(ids) + 2 > longest:
        raise UserError(
            f"--sentence: {text[:60]!r}... has {len(ids) + 2} tokens; up to {longest} "
            "can be shown"
        )
    return [tokenizer.cls_id, *ids, tokenizer.sep_id]


def make_viewer(cfg: Any, params: Any, tokenizer: Any, length: int) -> Any:
    """Make view(ids) -> {"tokens", "attention"} for rows of at most `length` ids.

    tokens: for each that is not special, masked alone, {"token", "probability" of it,
    "right": whether it is the best guess, "guesses": the best as make_filler's}.
    attention: {"layers", "heads", "tokens": pieces, "weights"}, the sentence unmasked:
    base64 of u8 [layers, heads, n, n], 255 being all of a token's attention.
    """
    import jax
    import jax.numpy as jnp

    from bertjax.models import encoder, heads
    from bertjax.models.attention_maps import attention_maps

    cfg = encoder.without_pooler(cfg)
    params = jax.device_put({k: params[k] for k in ("encoder", "mlm")})
    beyond = np.arange(cfg.vocab_size) >= tokenizer.vocab_size
    top = min(TOP, tokenizer.vocab_size)

    @jax.jit
    def guess(params: Any, batch: Any, ids: Any) -> Any:
        at = jnp.arange(length)[:, None]
        hidden = encoder.apply(params["encoder"], cfg, batch, at=at).hidden
        word = params["encoder"]["embeddings"]["word"]
        logits = heads.mlm_logits(params["mlm"], word, cfg, hidden)
        likely = jax.nn.softmax(logits[:, 0], axis=-1)
        own = jnp.take_along_axis(likely, ids[:, None], axis=1)[:, 0]
        return own, jax.lax.top_k(jnp.where(beyond, -1.0, likely), top)

    @jax.jit
    def look(params: Any, batch: Any) -> Any:
        maps = attention_maps(params["encoder"], cfg, batch)[:, 0]
        return jnp.round(255 * maps).astype(jnp.uint8)

    def view(ids: list[int]) -> dict[str, Any]:
        n, pieces = len(ids), tokenizer.pieces
        row = np.full(length, tokenizer.pad_id, np.int32)
        row[:n] = ids
        real = (np.arange(length) < n).astype(np.int32)
        masked = np.tile(row, (length, 1))  # row i has a blank at i
        np.fill_diagonal(masked, tokenizer.mask_id)
        batch = {"input_ids": masked, "attention_mask": np.tile(real, (length, 1))}
        own, (values, best) = jax.device_get(guess(params, batch, row))
        special = {*tokenizer.special_ids.tolist()}
        tokens = [
            {
                "token": pieces[t],
                "probability": float(own[i]),
                "right": bool(best[i][0] == t),
                "guesses": [
                    {"token": pieces[g], "probability": float(p)}
                    for g, p in zip(best[i], values[i], strict=True)
                ],
            }
            for i, t in enumerate(ids)
            if t not in special
        ]
        batch = {"input_ids": row[None], "attention_mask": real[None]}
        maps = np.asarray(look(params, batch))[:, :, :n, :n]
        attention = {"layers": maps.shape[0], "heads": maps.shape[1]}
        attention["tokens"] = [pieces[t] for t in ids]
        attention["weights"] = base64.b64encode(maps.tobytes()).decode()
        return {"tokens": tokens, "attention": attention}

    return view
