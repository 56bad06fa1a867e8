# SPDX-License-Identifier: Apache-2.0
"""Predict with runs' models: blanks over training, and one sentence's attention."""

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.assembly import models, resolve
from bertjax.checkpoints import manifest
from bertjax.inference import fill_blanks as filling
from bertjax.reporting.read_runs import Run

TOP = 5  # guesses per blank
LONGEST = 64  # tokens of a sentence whose attention is still readable
Log = Callable[[str], None]


def fill_blanks(runs: Sequence[Run], texts: Sequence[str], log: Log) -> list[Any]:
    """Fill the blanks of texts by every kept checkpoint of every run.

    Returns {"run", "text", "rows": [(step, result of make_filler's fill)]} for each
    text and run. Models that are not masked LMs are left out and reported by `log`.
    Raises UserError for texts in which no run finds a blank.
    """
    rows: dict[tuple[str, str], list[Any]] = {}
    for run, step, opened, ids in open_checkpoints(
        runs, texts, manifest.steps, filling.encode, log
    ):
        cfg, params, tokenizer, before = opened
        top = min(TOP, tokenizer.vocab_size)
        fill = filling.make_filler(cfg, params, tokenizer, top, before)
        for text, one in ids.items():
            rows.setdefault((run.name, text), []).append((step, fill(one)))
    return [{"run": run, "text": t, "rows": some} for (run, t), some in rows.items()]


def view_sentences(
    runs: Sequence[Run], sentences: Sequence[str], log: Log
) -> list[dict[str, Any]]:
    """View sentences by the newest intact checkpoint of each run (see make_viewer).

    Models that are not masked LMs are left out and reported by `log`. Raises UserError
    for sentences that no run can show.
    """

    def newest(path: Any) -> list[int]:
        step = manifest.newest_before(path, 2**62)
        return [] if step is None else [step]

    views = []
    for run, step, opened, ids in open_checkpoints(
        runs, sentences, newest, encode, log
    ):
        cfg, params, tokenizer, before = opened
        longest = min(LONGEST, cfg.max_length)
        view = make_viewer(cfg, params, tokenizer, longest, before)
        for text, one in ids.items():
            views.append({"run": run.name, "step": step, "text": text, **view(one)})
    return views


def open_checkpoints(
    runs: Sequence[Run],
    texts: Sequence[str],
    find_steps: Callable[[Any], Sequence[int]],
    encode: Callable[..., list[int]],
    log: Log,
) -> Iterator[tuple[Run, int, tuple[Any, ...], dict[str, list[int]]]]:
    """Yield (run, step, (cfg, params, tokenizer, resolve.reads_before), {text: ids}).

    These are the checkpoints at find_steps(workdir) that fill blanks and can read a
    text. encode(tokenizer, text, longest=N) raises UserError for a text that it cannot
    read; if no run could read a text, the first such error is raised at the end.
    """
    errors: dict[str, UserError | None] = {}  # by text; None: a run could read it
    others = []
    for run in runs if texts else ():
        opened = ids = None
        for step in find_steps(run.path):
            try:
                opened = open_step(run, step)
            except UserError as e:
                log(f"left out: {e}")
                continue
            tokenizer, cfg = opened.tokenizer, opened.cfg
            try:
                models.check_masked_lm(opened, run.name)
                params, cfg = filling.masked_lm(opened.read_params("mlm"), cfg)
            except UserError:  # the run's other checkpoints are no masked LMs either
                others.append(run.name)
                break
            if ids is None:
                ids = {}
                for text in texts:
                    try:
                        ids[text] = encode(tokenizer, text, longest=cfg.max_length)
                        errors[text] = None
                    except UserError as e:
                        errors.setdefault(text, e)
                        log(f"{run.name}: left out: {e}")
            if not ids:
                break
            before = resolve.reads_before(opened.config)
            yield run, step, (cfg, params, tokenizer, before), ids
        if opened is None:
            log(f"{run.name}: no checkpoint that fills blanks")
    if others:  # finetuned models, for example
        log(f"no masked LM, so no guesses: {', '.join(others)}")
    for error in filter(None, errors.values()):
        raise error


def open_step(run: Run, step: int) -> models.LoadedModel:
    """Open a checkpoint, to compute in float32."""
    opened = models.open_model(f"{run.path}/checkpoints/{step}", "checkpoint")
    opened.config.dtype = "float32"
    return opened


def encode(tokenizer: Any, text: str, longest: int) -> list[int]:
    """Return [CLS] text [SEP] as ids. Raises UserError for empty or too long texts."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"--sentence: {text[:60]!r} is not UTF-8") from e
    ids = tokenizer.encode_with_masks(text)
    if not ids:
        raise UserError(f"--sentence={text!r} has no token")
    longest = min(LONGEST, longest)
    if len(ids) + 2 > longest:
        raise UserError(
            f"--sentence: {text[:60]!r}... has {len(ids) + 2} tokens; up to {longest} "
            "can be shown"
        )
    return [tokenizer.cls_id, *ids, tokenizer.sep_id]


def make_viewer(
    cfg: Any, params: Any, tokenizer: Any, length: int, before: bool = False
) -> Any:
    """Build view(ids) -> {"tokens", "attention"} for rows of at most `length` ids.

    tokens: for each non-special token, masked alone, {"token", "probability" of it,
    "right": whether it is the best guess, "guesses": the best as from make_filler}.
    attention: for the unmasked sentence {"layers", "heads", "tokens": pieces,
    "weights"}: base64 of u8 [layers, heads, n, n], where 255 is all of a token's
    attention. before: as for make_filler.
    """
    import jax
    import jax.numpy as jnp

    from bertjax.inference import forward
    from bertjax.models.attention_maps import attention_maps

    params = jax.device_put({k: params[k] for k in ("encoder", "mlm")})
    beyond = np.arange(cfg.vocab_size) >= tokenizer.vocab_size
    top = min(TOP, tokenizer.vocab_size)
    run = forward.make_forward(cfg, forward.mlm_logits)
    attend = jax.jit(lambda params, batch: attention_maps(params, cfg, batch)[:, 0])

    def view(ids: list[int]) -> dict[str, Any]:
        n, pieces = len(ids), tokenizer.pieces
        row = np.full(length, tokenizer.pad_id, np.int32)
        row[:n] = ids
        masked = np.tile(row, (length, 1))  # row i has a blank at position i
        np.fill_diagonal(masked, tokenizer.mask_id)
        batch = {"input_ids": masked, "sizes": np.full(length, n, np.int32)}
        at = np.arange(length, dtype=np.int32)[:, None]
        batch["mlm_positions"] = np.maximum(at - int(before), 0)
        likely = jax.nn.softmax(run(params, batch)[:, 0], axis=-1)
        guesses = jax.lax.top_k(jnp.where(beyond, -1.0, likely), top)
        likely, (values, best) = jax.device_get((likely, guesses))
        tokens = [
            {
                "token": pieces[t],
                "probability": float(likely[i, t]),
                "right": bool(best[i][0] == t),
                "guesses": [
                    {"token": pieces[g], "probability": float(p)}
                    for g, p in zip(best[i], values[i], strict=True)
                ],
            }
            for i, t in enumerate(ids)
            if t not in tokenizer.special_ids
        ]
        real = (np.arange(length) < n).astype(np.int32)
        batch = {"input_ids": row[None], "attention_mask": real[None]}
        maps = np.round(255 * np.asarray(attend(params["encoder"], batch)))
        maps = maps[:, :, :n, :n].astype(np.uint8)
        attention = {"layers": maps.shape[0], "heads": maps.shape[1]}
        attention["tokens"] = [pieces[t] for t in ids]
        attention["weights"] = base64.b64encode(maps.tobytes()).decode()
        return {"tokens": tokens, "attention": attention}

    return view
