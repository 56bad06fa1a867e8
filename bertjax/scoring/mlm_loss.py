# SPDX-License-Identifier: Apache-2.0
"""Compute held-out loss with masks that depend only on the example."""

import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax import UserError
from bertjax.assembly import batches as run_batches
from bertjax.assembly import prepared_text, resolve
from bertjax.assembly.models import LoadedModel
from bertjax.config import cli
from bertjax.data.masking.masker import read_masker
from bertjax.data.tokenizers.tokenizer import BYTES
from bertjax.inference import fill_blanks
from bertjax.interop.hf_read import Imported
from bertjax.models import encoder, heads
from bertjax.objectives.losses import logits_of
from bertjax.objectives.make_objective import make_objective
from bertjax.objectives.token_head import sum_in_chunks
from bertjax.scoring.confidence import Calibration, half_width, interval
from bertjax.training import step

ANSWERS = "dialogue_loss"  # report its perplexity, because nothing is masked
# SentencePiece's pieces for rare characters
BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def evaluate(
    opened: LoadedModel,
    params: Any,
    batch_size: int | None,
    rates: Sequence[float],
    before: bool = False,
    per_id: np.ndarray | None = None,
) -> dict[str, dict[float, dict[str, float]]]:
    """Score each validation set at each mask rate: {name: {rate: scores}}.

    The objective, the rows and their masks are the config's (mlm.py sets those that all
    models share). For objective=mlm the parameters may contain more, such as ELECTRA's.
    batch_size: by default 32. rates: () means the config's own. before: masked tokens
    are predicted one position to the left (MNTP). per_id: f64 [2, V], to which is added
    how often each id had to be guessed, and how often it was guessed. Computes in
    config.dtype on one device.

    mlm_loss is in nats per predicted token, *_ci95 is the half-width of its 95%
    confidence interval over documents; docs/evaluation.md describes the rest. Raises
    UserError if a set has nothing to predict.
    """
    config, tokenizer, checkpoint, _ = opened
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    if config.objective == "mlm":
        params, cfg = fill_blanks.masked_lm(params, cfg)
    tokens = resolve.token_ids(config, tokenizer)
    objective, cfg = make_objective(config.objective, cfg, tokens)
    whole = objective.whole_batch
    if whole and batch_size not in (None, whole):
        raise UserError(
            f"--batch_size={batch_size}: objective={config.objective} is evaluated on "
            f"{whole} rows at once (whole_batch): leave it out"
        )
    size = whole or batch_size or 32
    size += -size % objective.group  # for a mixture by rows, a batch is whole groups
    guesses = "mlm" in params and "mlm" in objective.needs
    guess = make_guesser(cfg) if guesses else None
    sums = step.make_eval_step(objective.sums, objective.weights)
    # The compiler computes common parts once; for mlm alone, that is everything.
    run = jax.jit(lambda params, x: (sums(params, x), guess and guess(params, x)))
    params = jax.device_put(params)
    counts, log_unigram = read_counts(checkpoint), None
    if counts is not None:  # add one to each, so that none is impossible
        log_unigram = np.log((counts + 1) / (counts.sum() + len(counts)))
    characters = count_characters(tokenizer)
    own = resolve.eval_mask_rate(config)
    rates = rates or (read_masker(config.data, own).rate,)
    prepared_text.settle_cache(config, cli.say)
    out: dict[str, dict[float, dict[str, float]]] = {}
    for name, store in prepared_text.prepare_valid(config, tokenizer, cli.say).items():
        known = store.counts if counts is None else counts
        tables = run_batches.make_tables(config, tokenizer, known)
        out[name] = {}
        for rate in rates:
            config.eval.mask_rate = rate
            batches = run_batches.make_eval_batches(
                config, objective.needs, tokenizer, name, store, tables, cli.say
            )
            examples = config.eval.examples or None
            ids = batches.eval_ids(examples)
            none = np.zeros(0, np.int64)
            documents = batches.plans[0].documents_of(ids) if guesses else none
            heads_of = (n.removesuffix("_weights") for n in batches.loss_weights)
            predicted = [n for n in heads_of if f"{n}_ids" in batches.specs]
            tally = Tally(documents, log_unigram, characters, predicted, per_id)
            rows = batches.eval_batches(size, examples)
            if before:
                rows = map(read_before, rows)
            values = tally.score(run, params, rows)
            if predicted and not tally.predictions:
                raise UserError(
                    f"{name}: nothing was predicted, with data.mask_unit="
                    f"{config.data.mask_unit}, mask_rate={rate:g}"
                )
            seen = {"rows": len(ids), "all_rows": batches.n}
            out[name][rate] = {**values, **seen, **tally.results()}
            if "mask_rate" in batches.features.keys:
                out[name][rate]["mask_rate"] = rate
    return out


def read_counts(checkpoint: Any) -> np.ndarray | None:
    """Return how often the training text has each piece, [V]; None if unknown."""
    if isinstance(checkpoint, Imported):
        return None
    file = checkpoint.parents[1] / "unigram.npy"
    return np.load(io.BytesIO(file.read_bytes())) if file.exists() else None


def read_before(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Predict masked tokens one position to the left, i32 [B, P]; keep unused slots."""
    moved = batch["mlm_positions"] - (batch["mlm_weights"] > 0)
    return {**batch, "mlm_positions": moved}


def make_guesser(cfg: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Build guess(params, batch) -> {"loss", "confidence", "right"}, each [B, P].

    loss: -ln p of the true token; confidence: the largest p; right: whether the true
    token has it. The head is computed in as many chunks as in training.
    """

    def guess(params: Any, batch: Any) -> dict[str, Any]:
        is_pair = "generator" in params
        params, own = fill_blanks.masked_lm(params, cfg)
        # With the objective's pooling, the compiler computes the encoder once for both.
        seen = own if is_pair or cfg.classifier_pooling == "mean" else cfg
        at = batch["mlm_positions"]
        hidden = encoder.apply(params["encoder"], seen, batch, at=at).hidden
        word = params["encoder"]["embeddings"]["word"]

        def score(first: Any, hidden: Any, ids: Any) -> tuple[Any, dict[str, Any]]:
            logits = heads.mlm_logits(params["mlm"], word, own, hidden)
            true = logits_of(logits, ids)
            peak = jnp.max(logits, axis=-1)
            norm = peak + jnp.log(jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
            return (), {
                "loss": norm - true,
                "confidence": jnp.exp(peak - norm),
                "right": true >= peak,
            }

        return sum_in_chunks(score, own, (hidden, batch["mlm_ids"]))[1]

    return guess


def count_characters(tokenizer: Any) -> np.ndarray | None:
    """Count the characters, without white space, that each piece represents: i64 [V].

    A character of several pieces counts for the piece with its first byte; special
    pieces count 0. None if ids do not represent text.

    >>> count_characters(tokenizer)[tokenizer.encode("unaffable")]  # una ##ffa ##ble
    array([3, 3, 3])
    """
    if tokenizer.kind == "ids":
        return None

    def count(piece: str) -> int:
        if tokenizer.kind == "wordpiece":
            piece = piece.removeprefix("##")
        elif tokenizer.kind == "byte_bpe" and all(x in BYTES for x in piece):
            data = bytes(BYTES[x] for x in piece)
            spaces = sum(map(str.isspace, data.decode("utf-8", "replace")))
            return sum(b & 0xC0 != 0x80 for b in data) - spaces
        elif match := BYTE_PIECE.fullmatch(piece):
            return int(int(match[1], 16) & 0xC0 != 0x80)
        return sum(x != "▁" and not x.isspace() for x in piece)

    counts = np.array([count(piece) for piece in tokenizer.pieces])
    counts[tokenizer.special_ids] = 0
    return counts


@dataclasses.dataclass
class Tally:
    """Add up real tokens, predictions and their costs, row by row.

    documents: i64 [n], of the rows in order; log_unigram: ln p [V]; characters: [V].
    predicted: the names of predictions: a batch has `<name>_ids` and `<name>_weights`.
    per_id: see `evaluate`.
    """

    documents: np.ndarray
    log_unigram: np.ndarray | None
    characters: np.ndarray | None
    predicted: Sequence[str]
    per_id: np.ndarray | None = None
    tokens: int = 0
    predictions: int = 0
    cost: float = 0.0
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    # One array [4, b] per batch: weight, loss, right, characters of each row.
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)

    def score(
        self, run: Callable[..., Any], params: Any, batches: Iterable[Any]
    ) -> dict[str, float]:
        """Run batches through run(params, batch) -> (sums, guesses), and count them.

        Returns the means of the sums, and the perplexity of answers.
        """
        pending: list[Any] = []  # batches, with guesses still on the device

        def evaluate(params: Any, batch: Any) -> Any:
            sums, guesses = run(params, jax.device_put(batch))
            pending.append((batch, guesses))
            if len(pending) > 2:
                self._count(*pending.pop(0))
            return sums

        means = step.run_eval(evaluate, params, batches)
        for each in pending:
            self._count(*each)
        if ANSWERS in means:
            means["perplexity"] = math.exp(min(means[ANSWERS], 700))
        return means

    def _count(self, batch: Mapping[str, np.ndarray], guesses: Any) -> None:
        real = batch["example_weights"] > 0
        self.tokens += int(batch["attention_mask"][real].sum())
        for name in self.predicted:
            ids = batch[f"{name}_ids"][batch[f"{name}_weights"] > 0]
            self.predictions += len(ids)
            if self.log_unigram is not None:
                self.cost -= float(self.log_unigram[ids].sum())
        if guesses is None:
            return
        ids, weight = batch["mlm_ids"], batch["mlm_weights"].astype(np.float64)
        guesses = {name: np.asarray(values) for name, values in guesses.items()}
        size = np.zeros_like(ids) if self.characters is None else self.characters[ids]
        each = np.stack([np.ones_like(ids), guesses["loss"], guesses["right"], size])
        self.rows.append((weight * each).sum(-1)[:, real])
        confidence = guesses["confidence"].astype(np.float64)
        self.calibration.add(confidence, guesses["right"], weight)
        if self.per_id is not None:
            for row, part in enumerate((weight, weight * guesses["right"])):
                number = np.bincount(ids.ravel(), part.ravel(), self.per_id.shape[1])
                self.per_id[row] += number

    def results(self) -> dict[str, float]:
        """Return the totals, without the means that the objective computes."""
        out: dict[str, float] = {"tokens": self.tokens, "predictions": self.predictions}
        if self.log_unigram is not None and self.predictions:
            out["unigram_cross_entropy"] = self.cost / self.predictions
        if not self.rows or not self.predictions:
            return out
        weight, loss, right, characters = np.concatenate(self.rows, axis=1)
        out["documents"] = len(np.unique(self.documents))
        out["mlm_calibration_error"] = self.calibration.error()
        means = {"mlm_loss": (loss, weight), "mlm_accuracy": (right, weight)}
        if characters.sum():
            bits = loss / np.log(2)
            out["bits_per_character"] = float(bits.sum() / characters.sum())
            means["bits_per_character"] = bits, characters
        for name, sums in means.items():
            out |= interval(name, half_width(*sums, self.documents))
        return out
