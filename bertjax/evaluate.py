# SPDX-License-Identifier: Apache-2.0
"""Score held-out text with fixed masks: python -m bertjax.evaluate --workdir=DIR

The masks depend on the example alone, so that any two runs on the same text and
tokenizer are scored on the same predictions. Next to the model stands the unigram
cross-entropy: what guessing every token by its frequency in the training text costs.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError, build, disk, registry
from bertjax import config as c
from bertjax.interop.hf import Imported


def define_flags(values: flags.FlagValues) -> None:
    string = flags.DEFINE_string
    string("model", None, "", flag_values=values)
    string("workdir", None, "", flag_values=values)
    flags.DEFINE_integer("step", None, "", flag_values=values)
    string("text", None, "", flag_values=values)
    string("what", "mlm", "", flag_values=values)
    flags.DEFINE_integer("examples", None, "", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("batch_size", 32, "", lower_bound=1, flag_values=values)
    string("dtype", "float32", "", flag_values=values)
    string("weights", "", "", flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = c.parse(argv, define_flags, needs_config=False)
    registry.pick("--what", args.what, {"mlm": evaluate})
    flag = "--workdir" if args.workdir else "--model"
    where = args.workdir or args.model
    if not where:
        raise UserError("--workdir or --model is missing: what to evaluate")
    if args.step is not None:
        where = f"{where.rstrip('/')}/checkpoints/{args.step}"
    config, tokenizer, checkpoint, meta = disk.open_model(where, flag)
    config.dtype = args.dtype
    if args.examples is not None:
        config.eval.examples = args.examples
    if args.text:
        config.data.valid = args.text
        config.data.group_field = ""  # the text has what names the flag gives it
    if not config.data.valid:
        raise UserError("data.valid is empty in this run's config: give --text=FILES")
    scores = evaluate(config, tokenizer, checkpoint, args.batch_size, args.weights)
    if args.json:
        first, *more = scores.values()
        found = {"eval": scores} if more else first
        print(json.dumps({"step": meta["step"], **found}))
        return 0
    for name, values in scores.items():
        print(f"{name} at step {meta['step']}:")
        for key, value in values.items():
            print(f"  {key:24} {value:,.4f}".rstrip("0").rstrip("."))
    return 0


def evaluate(
    config: Any,
    tokenizer: Any,
    checkpoint: Any,
    batch_size: int = 32,
    weights: str = "",
) -> dict[str, dict[str, float]]:
    """Score each named validation set: {name: {"mlm_loss": ..., "tokens": ...}}.

    Losses are in nats a predicted token. Computes in config.dtype on one device.
    """
    import jax

    from bertjax.objectives.base import make_objective
    from bertjax.training import step

    cfg = c.encoder_config(config, tokenizer.vocab_size)
    objective, cfg = make_objective(config.objective, cfg)
    head = "mlm" if "mlm" in config.objective.split("+") else ""
    params = jax.device_put(disk.read_params(checkpoint, head, weights))
    run = jax.jit(step.make_eval_step(objective.sums))
    counts = unigram = None
    # Of an imported model nobody knows what it was trained on.
    imported = isinstance(checkpoint, Imported)
    file = None if imported else checkpoint.parents[1] / "unigram.npy"
    if file is not None and file.exists():
        with file.open("rb") as f:
            counts = np.load(f)
        unigram = log_unigram(counts)
    out = {}
    for name, store in build.prepare_valid(config, tokenizer, c.say).items():
        known = store.counts if counts is None else counts
        batches = build.make_eval_batches(
            config,
            objective.needs,
            tokenizer,
            name,
            store,
            build.make_tables(config, tokenizer, known),
            c.say,
        )
        tally = Tally(unigram)
        made = batches.eval_batches(batch_size, examples=config.eval.examples or None)
        values = step.run_eval(run, params, map(jax.device_put, tally.count(made)))
        out[name] = {**values, **tally.results()}
    return out


def log_unigram(counts: np.ndarray) -> np.ndarray:
    """Return ln p [V] of counts [V], one added to each so that none is impossible."""
    return np.log((counts + 1) / (counts.sum() + len(counts)))


class Tally:
    """Counts what passes by: real tokens, predictions, and their unigram cost."""

    def __init__(self, log_unigram: np.ndarray | None) -> None:
        self.log_unigram = log_unigram
        self.tokens = self.predictions = 0
        self.cost = 0.0

    def count(self, batches: Iterator[dict[str, np.ndarray]]) -> Iterator[Any]:
        for batch in batches:
            real = batch["example_weights"] > 0
            self.tokens += int(batch["attention_mask"][real].sum())
            if "mlm_ids" in batch:
                weights = batch["mlm_weights"]
                self.predictions += int(weights.sum())
                if self.log_unigram is not None:
                    cost = self.log_unigram[batch["mlm_ids"]]
                    self.cost -= float((weights * cost).sum())
            yield batch

    def results(self) -> dict[str, float]:
        out: dict[str, float] = {"tokens": self.tokens, "predictions": self.predictions}
        if self.log_unigram is not None and self.predictions:
            out["unigram_cross_entropy"] = self.cost / self.predictions
        return out


if __name__ == "__main__":
    c.command(main)
