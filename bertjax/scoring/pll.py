# SPDX-License-Identifier: Apache-2.0
"""Score lines by their log-likelihood, by one of the methods of sequence_scorers.py."""

from typing import Any

from bertjax import UserError
from bertjax.data.corpus.line_files import FileSource
from bertjax.scoring import sequence_scorers
from bertjax.scoring.lines import read_lines, total
from bertjax.scoring.pseudo_likelihoods import pick_variant
from bertjax.scoring.scorer import Scores, identify, value_lines

FLAGS = ("variant", "scorer", "draws", "estimator")


def score(args: Any, path: str, flag: str) -> Scores:
    """Score each line of --text; return an object per line, and totals for people."""
    pick_variant(args.variant)
    if not args.text:
        raise UserError("--what=pll scores lines of text: give --text=FILES")
    lines = list(read_lines(args.text))
    if records := [line.file for line in lines if FileSource(line.file).is_json]:
        raise UserError(
            f"--text={records[0]} is JSON: --what=pll scores lines of plain text"
        )
    written = [line for line in lines if line.text.strip()]
    if not written:
        raise UserError(f"--text={args.text}: every line is empty")
    scorer, lm = sequence_scorers.open_language_model(
        args, path, flag, args.scorer, "--scorer"
    )
    options = sequence_scorers.read_options(args, scorer)
    texts = [line.text for line in written]
    scores = sequence_scorers.score_texts(lm, texts, scorer, options)
    # Objects of earlier versions do not name a scorer, which means pll.
    about = identify(args, lm.meta) | ({} if scorer == "pll" else {"scorer": scorer})
    rows = [
        {**about, "file": x.file, "line": x.number, "text": x.text, **score._asdict()}
        for x, score in zip(written, scores, strict=True)
    ]
    summary = total(rows)
    if not summary["lines"]:
        raise UserError(
            f"--text={args.text}: no line can be scored: {summary['too_long']:,} have "
            f"more than the model's {lm.cfg.max_length - 2} tokens, "
            f"{summary['no_tokens']:,} none"
        )
    summary["empty_lines"] = len(lines) - len(written)
    note = "; ".join(f"{key} {value:,.6g}" for key, value in summary.items())
    return Scores(rows, [*value_lines(summary)], [note])
