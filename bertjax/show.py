# SPDX-License-Identifier: Apache-2.0
"""Look at real batches: python -m bertjax.show --config=... [--step=N] [--batches=N]

Prints statistics over the batches and a decoded row of each; `--json` the statistics
alone, with the hash of every batch. Needs no accelerator and compiles nothing.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError, build
from bertjax import config as c


def define_flags(values: flags.FlagValues) -> None:
    integer = flags.DEFINE_integer
    integer("step", 0, "", lower_bound=0, upper_bound=2**40, flag_values=values)
    integer("batches", 1, "", lower_bound=1, flag_values=values)
    integer("hosts", 1, "", lower_bound=1, flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = c.parse(argv, define_flags)
    config = args.config
    c.check(config)
    build.check_inputs(config)
    if config.batch_size % args.hosts:
        raise UserError(
            f"--hosts={args.hosts} does not divide {config.batch_size} rows"
        )
    prepared = build.prepare(
        config, lambda text: print(text, file=sys.stderr, flush=True)
    )

    from bertjax.data.pipeline import batch_sha256, stream
    from bertjax.objectives.base import make_objective

    tokenizer = prepared.tokenizer
    cfg = c.encoder_config(config, tokenizer.vocab_size)
    needs = make_objective(config.objective, cfg)[0].needs
    batches = build.make_batches(config, needs, tokenizer, prepared.train)
    share = config.batch_size // args.hosts
    parts = [slice(h * share, (h + 1) * share) for h in range(args.hosts)]

    def make(step: int) -> dict[str, np.ndarray]:
        made = [batches.batch(step, rows) for rows in parts]
        return {name: np.concatenate([m[name] for m in made]) for name in made[0]}

    statistics = Statistics(tokenizer, batches.masking.unit)
    stop = args.step + args.batches
    for step, batch in enumerate(
        stream(make, args.step, stop, config.data.engine), args.step
    ):
        statistics.add(batch, batch_sha256(batch), batches.truncated(step))
        if not args.json:
            print(f"step {step}:", decode(batch, tokenizer, 0))
    results = statistics.results()
    if args.json:
        print(json.dumps(results))
    else:
        for key, value in results.items():
            print(f"{key:22} {value}")
    return 0


def decode(batch: dict[str, np.ndarray], tokenizer: Any, row: int) -> str:
    """Write a row: what is predicted stands as seen>original."""
    real = batch["attention_mask"][row] > 0
    words = [tokenizer.pieces[i] for i in batch["input_ids"][row][real]]
    if "mlm_ids" in batch:
        for at, token, weight in zip(
            batch["mlm_positions"][row],
            batch["mlm_ids"][row],
            batch["mlm_weights"][row],
            strict=True,
        ):
            if weight:
                words[at] += f">{tokenizer.pieces[token]}"
    return " ".join(words)


class Statistics:
    """Counts over batches what masking and plan did."""

    def __init__(self, tokenizer: Any, unit: str) -> None:
        self.tokenizer, self.unit = tokenizer, unit
        self.special = np.zeros(tokenizer.vocab_size, bool)
        self.special[tokenizer.special_ids] = True
        self.n: Counter[str] = Counter()
        self.labels: Counter[str] = Counter()
        self.hashes: list[str] = []

    def add(
        self, batch: dict[str, np.ndarray], sha256: str, truncated: np.ndarray
    ) -> None:
        """Count a batch; `truncated` [B] are the tokens its rows had no room for."""
        n, t = self.n, self.tokenizer
        real = batch["attention_mask"] > 0
        self.hashes.append(sha256)
        n["rows"] += len(real)
        n["slots"] += real.size
        n["tokens"] += int(real.sum())
        n["truncated"] += int((truncated > 0).sum())
        original = batch["input_ids"].copy()
        if "mlm_ids" in batch:
            chosen = batch["mlm_weights"] > 0
            row = np.nonzero(chosen)[0]
            at, true = batch["mlm_positions"][chosen], batch["mlm_ids"][chosen]
            seen = batch["input_ids"][row, at]
            original[row, at] = true
            masked, kept = seen == t.mask_id, seen == true
            n["selected"] += true.size
            n["masked"] += int(masked.sum())
            n["kept"] += int(kept.sum())
            n["special_selected"] += int(self.special[true].sum())
            drawn = ~masked & ~kept
            n["special_replacements"] += int(self.special[seen[drawn]].sum())
            self._count_words(original, real, row, at)
        n["unknown"] += int((original[real] == t.unk_id).sum())
        for label, count in zip(
            *np.unique(batch.get("nsp_labels", []), return_counts=True), strict=True
        ):
            self.labels[str(int(label))] += int(count)

    def _count_words(
        self, ids: np.ndarray, real: np.ndarray, row: np.ndarray, at: np.ndarray
    ) -> None:
        """Count words of which some pieces are selected and others are not."""
        chosen = np.zeros(ids.shape, bool)
        chosen[row, at] = True
        starts = self.tokenizer.word_starts[ids] | self.special[ids]
        # Behind a special token, and so at the start of a row, a word begins.
        starts[:, 1:] |= self.special[ids[:, :-1]]
        starts[:, 0] = True
        word = np.cumsum(starts.ravel()) - 1
        pieces = np.bincount(word, real.ravel(), minlength=word[-1] + 1)
        taken = np.bincount(word, (chosen & real).ravel(), minlength=word[-1] + 1)
        self.n["units"] += int((taken > 0).sum()) if self.unit == "word" else len(at)
        self.n["partial_words"] += int(((taken > 0) & (taken < pieces)).sum())

    def results(self) -> dict[str, Any]:
        """Return what the contract names (rates are shares of what was selected)."""
        n = self.n
        selected = max(n["selected"], 1)
        return {
            "sequences": n["rows"],
            "tokens": n["tokens"],
            "fill": n["tokens"] / n["slots"],
            "segments_per_row": 1.0,
            "selected_rate": n["selected"] / n["tokens"],
            "mask_rate": n["masked"] / selected,
            "random_rate": 1 - (n["masked"] + n["kept"]) / selected
            if n["selected"]
            else 0.0,
            "keep_rate": n["kept"] / selected,
            "special_selected": n["special_selected"],
            "special_replacements": n["special_replacements"],
            "partial_words": n["partial_words"],
            "unit_lengths": {"1": n["units"]} if n["units"] else {},
            "unknown_rate": n["unknown"] / n["tokens"],
            "truncated": n["truncated"] / n["rows"],
            "pair_labels": dict(self.labels),
            "batch_sha256": self.hashes,
        }


if __name__ == "__main__":
    c.command(main)
