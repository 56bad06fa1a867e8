# SPDX-License-Identifier: Apache-2.0
"""Score held-out loss on rows and masks that all models of one tokenizer share.

They depend only on the tokenizer and the text, not on how a model was trained
(docs/evaluation.md).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax import UserError, registry
from bertjax.assembly import models, resolve
from bertjax.data.corpus.sources import named_sources, parse_sources
from bertjax.data.masking import mask_weights
from bertjax.data.masking.presets import UNITS
from bertjax.scoring.scorer import (
    Scores,
    heading,
    identify,
    join_sets,
    text_to_score,
    value_lines,
)
from bertjax.scoring.sequence_scorers import fills_masks, find_scorers, never_trained
from bertjax.storage import atomic

FLAGS = ("rates", "length", "mask_unit", "mask_weights", "examples")

# Keys of config.data that decide rows and masks, besides their length. They are spelled
# out, so that a changed default does not change comparisons.
COMMON = dict(
    plan="full_sentences",
    packed=False,
    max_segments=None,
    masking="bert",
    mask_unit="token",
    mask_rate=None,
    mask_lengths=None,
    corruption="0.8,0.1,0.1",
    replacement="uniform",
    similar="",
    mask_weights="",
    swap="",
    max_predictions=None,
    paper_compat=False,
)


def score(args: Any, path: str, flag: str) -> Scores:
    """Score a masked LM on the common rows, at each of the mask rates of --rates.

    A model that predicts masked tokens from the position before them is read there.
    Writes --mask_weights from the guesses at all rates and in all texts.
    """
    out = None
    if args.mask_weights is not None:
        source = "--text", args.text
        out = atomic.check_out(args.mask_weights, "--mask_weights", source=source)
    rates = read_rates(args.rates) if args.rates is not None else ()
    opened = models.open_model(path, flag)
    config = opened.config
    then = "without --what its task is scored"
    models.check_pretrained(opened, f"--what=mlm: {path}", then)
    learnt = resolve.trained_objectives(config)
    able = find_scorers(opened.cfg.is_decoder, learnt)
    before = resolve.reads_before(config)
    if not fills_masks(able):
        raise never_trained("--what=mlm", "pll", able, learnt[0], path)
    models.check_masked_lm(opened, f"--what=mlm: {path}", then)
    unit = args.mask_unit or "token"
    registry.pick("--mask_unit", unit, UNITS)
    length = models.row_length(opened.cfg, args.length)
    # Whatever objective, phases, plan and masking the run had, two configs with the
    # same text and tokenizer now build the same batches (batches.make_eval_batches).
    config.objective, config.phases = "mlm", ""
    config.eval.mask_rate = None
    config.data.update(COMMON | {"length": length, "mask_unit": unit})
    config.eval.examples = args.examples or 0
    per_id = np.zeros((2, opened.tokenizer.vocab_size)) if out else None
    scores = score_rows(args, opened, "mlm", rates, before=before, per_id=per_id)
    if out:
        weights = mask_weights.weigh(*per_id)
        text = mask_weights.format_weights(weights, opened.tokenizer)
        atomic.write_file(out, text, f"--mask_weights={out}")
    return scores


def score_rows(
    args: Any,
    opened: models.LoadedModel,
    head: str,
    rates: Sequence[float] = (),
    layout: str = "common",
    before: bool = False,
    per_id: np.ndarray | None = None,
) -> Scores:
    """Score the rows and masks of the config, at each mask rate.

    head: a head that the model must have. layout: the name of these rows, "own" if they
    are as in the run's training. before, per_id: see mlm_loss.evaluate. Raises
    UserError without the head or a text.
    """
    config, meta = opened.config, opened.meta
    config.dtype = args.dtype
    config.data.valid, key = text_to_score(args, config)
    if args.text:
        for part in named_sources(args.text, key).values():
            parse_sources(part, key, "valid")  # its messages name the flag
        config.data.group_field = ""  # the flag names the sets of the text
    params = opened.read_params(head, args.weights)
    from bertjax.scoring import mlm_loss  # needs jax

    sets = mlm_loss.evaluate(opened, params, args.batch_size, rates, before, per_id)
    # Omit the mask rate, because each evaluation may have its own.
    keys = [key for key in ("length", *COMMON) if key != "mask_rate"]
    rows = {k: config.data[k] for k in keys if config.data[k] or k == "packed"}
    if not any(
        "mask_rate" in values for one in sets.values() for values in one.values()
    ):
        rows.pop("masking", None)  # the objective masks nothing
    if before:
        rows["read"] = "before"  # from one position to the left
    lines = [f"layout {layout}: " + "; ".join(f"{k} {v}" for k, v in rows.items())]
    for name, scores in sets.items():
        for rate, values in scores.items():
            few, every = values["rows"], values["all_rows"]
            masked = f", {rate:.0%} masked" if rates else ""
            lines.append(f"{heading(name, meta)}, {few:,} of {every:,} rows{masked}:")
            rest = {k: v for k, v in values.items() if k not in ("rows", "all_rows")}
            lines += value_lines(rest)
    objects = {
        name: {"rates": scores} if rates else next(iter(scores.values()))
        for name, scores in sets.items()
    }
    about = identify(args, meta) | {"layout": {"name": layout} | rows}
    return Scores([join_sets(about, objects)], lines)


def read_rates(text: str) -> tuple[float, ...]:
    """Return the mask rates of --rates, a comma-separated list."""
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if not rates or len({rate for rate in rates if 0 < rate <= 1}) < len(rates):
        raise UserError(
            f"--rates={text}: give different shares above 0 and at most 1, such as "
            "--rates=0.15,0.3"
        )
    return rates
