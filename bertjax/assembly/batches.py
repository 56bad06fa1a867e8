# SPDX-License-Identifier: Apache-2.0
"""Build the batches of a run from a config and prepared text."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.assembly import prepared_text, resolve
from bertjax.config import durations
from bertjax.data import batches, mixture, phases
from bertjax.data.features.base import Features
from bertjax.data.features.make_features import split_needs
from bertjax.data.masking import vocab_tables
from bertjax.data.masking.counterfactual import make_pair_table
from bertjax.data.masking.mask_weights import read_mask_weights
from bertjax.data.masking.masker import read_masker
from bertjax.data.masking.presets import Masking
from bertjax.data.masking.similar_words import NONE, Similar, make_similar, read_similar
from bertjax.data.sequences.make_plan import make_plan
from bertjax.data.sequences.plan import Plan
from bertjax.data.token_store.cache import open_cache
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.data.tokenizers.word_pairs import read_pairs, written_forms
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.tables import Say, silent


class Run(NamedTuple):
    """The batches of a run, its number of steps, and its phases."""

    data: batches.PhasedBatches
    total: int
    phases: tuple[phases.Phase, ...]

    def objective_before(self, step: int) -> str:
        """Return the objective of the phase that led to `step`.

        `data` of a resumed run has no batches of that phase if the next phase
        begins at `step`.
        """
        return [p for p in self.phases if p.start < max(step, 1)][-1].objective


def make_run(
    config: ConfigDict,
    needs: frozenset[str] | Mapping[str, frozenset[str]],
    tokenizer: Tokenizer,
    parts: Mapping[str, Any],
    tables: Any,
    past: Sequence[phases.Phase] = (),
    at: int = 0,
    total: int | None = None,
    say: Say = silent,
) -> Run:
    """Build the batch function of a run from its config and the stores of data.train.

    needs: of the objective, or {objective of a phase: its needs}. past: if a run
    resumes with another config, the phases that led to step `at`. total: the number of
    steps if it is known; counting again could give another number, because phases that
    have begun stay where they were planned. Raises UserError when the text cannot
    provide what is needed.
    """
    if isinstance(needs, frozenset):
        needs = {"": needs}
    wanted = resolve.wanted_phases(config)
    weights = mixture.read_weights(config.data.weights)

    def make_half(phase: phases.Wanted | phases.Phase) -> Features:
        rates = phases.rates_of_shape([*wanted, *past], phase)
        how = tokenizer, tables, phase.length, phase.mask_rate, rates
        return resolve.make_features(config, needs[phase.objective], *how)

    @functools.cache
    def plan_rows(form: RowForm) -> tuple[Any, mixture.Mixture]:
        plans = make_plans(config, form, parts, say)
        rows = {name: p.n for name, p in plans.items()}
        mixed = mixture.make_mixture(rows, weights, config.data.alpha)
        for line in mixed.lines():
            say(line)
        return tuple(plans.values()), mixed

    def rows_of(phase: phases.Wanted | phases.Phase) -> tuple[Any, mixture.Mixture]:
        return plan_rows(row_form(make_half(phase), needs[phase.objective]))

    sizes = {phase.shape: rows_of(phase)[1].n for phase in wanted}

    def place(total: int) -> tuple[phases.Phase, ...]:
        planned = phases.place_phases(wanted, total, lambda phase: sizes[phase.shape])
        return phases.change_phases(planned, past, at)

    if not at:  # a resumed run may have been started with keys without effect
        resolve.check_keys(config, map(make_half, wanted))
    if total is None:
        total = phases.count_steps(*durations.unit_of(config, "total"), place)
    placed = place(total)
    for repeat in phases.find_repeats(placed):
        if repeat.phase not in past:  # otherwise it was reported when the run began
            say(str(repeat))
    ends = [*(phase.start for phase in placed[1:]), total]
    stages = [
        batches.Batches(
            *rows_of(phase),
            features=make_half(phase),
            specials=tokenizer,
            batch_size=phase.batch_size,
            seed=config.seed,
            start=phase.start,
            first=phase.first,
            end=end,
            objective=phase.objective,
            ramp_start=phase.ramp_start,
        )
        for phase, end in zip(placed, ends, strict=True)
        if phase.start >= at or phase is [p for p in placed if p.start <= at][-1]
    ]  # fmt: skip
    return Run(batches.PhasedBatches(tuple(stages)), total, placed)


def make_phased_batches(
    config: ConfigDict,
    tokenizer: Tokenizer,
    parts: Mapping[str, Any],
    say: Say = silent,
) -> batches.PhasedBatches:
    """Build the batches of a config from its first step on, from the stores `parts`."""
    needs = {name: o.needs for name, o in resolve.objectives_of(config).items()}
    counts = prepared_text.count_tokens(parts)
    tables = make_tables(config, tokenizer, counts, say)
    return make_run(config, needs, tokenizer, parts, tables, say=say).data


def make_eval_batches(
    config: ConfigDict,
    needs: frozenset[str],
    tokenizer: Tokenizer,
    name: str,
    store: Any,
    tables: Any,
    say: Say = silent,
) -> batches.Batches:
    """Build the batches of a validation store, the same for every run on this text.

    All phases use one length and mask rate, and the rows do not depend on the seed.
    """
    resolve.check_plan(config, needs)
    seed, length = batches.EVAL_SEED, config.data.length
    rate = resolve.eval_mask_rate(config)
    half = resolve.make_features(
        config, needs, tokenizer, tables, length, rate, is_evaluation=True
    )
    plans = make_plans(config, row_form(half, needs), {name: store}, say, seed=seed)
    return batches.Batches(
        plans=tuple(plans.values()),
        mixture=mixture.make_mixture({name: p.n for name, p in plans.items()}),
        features=half,
        specials=tokenizer,
        batch_size=config.batch_size,
        seed=seed,
    )


def make_valid(
    config: ConfigDict,
    needs: frozenset[str],
    tokenizer: Tokenizer,
    stores: Any,
    *more: Any,
) -> dict[str, batches.Batches]:
    """Build the batches of each validation store; `more`: as for make_eval_batches."""
    return {
        name: make_eval_batches(config, needs, tokenizer, name, store, *more)
        for name, store in stores.items()
    }


def make_tables(
    config: ConfigDict,
    tokenizer: Tokenizer,
    counts: np.ndarray | None,
    say: Say = silent,
) -> Any:
    """Build the tables that masking needs; counts: of the training text, [V].

    Reads data.similar, data.swap and data.mask_weights, and reports which words of the
    first two cannot be used.
    """
    masking = read_masker(config.data)
    if not isinstance(masking, Masking):
        return masking.tables(tokenizer, counts)
    data = config.data
    if not len(tokenizer.replacement_ids):
        raise UserError(f"data.vocab={data.vocab}: every piece is a special one")
    words = make_similar({}) if data.similar == NONE else None
    if data.similar and words is None:
        words = read_similar(data.similar, tokenizer)
        left = _left_out(words)
        say(f"{data.similar}: {len(words.keys):,} words; left out: {left}")
    weights = None
    if data.mask_weights:
        weights = read_mask_weights(data.mask_weights, tokenizer)
    pairs = None
    if data.swap:
        forms = written_forms(read_pairs(data.swap, "data.swap"))
        pairs = make_pair_table(forms, tokenizer)
        say(f"{data.swap}: {len(pairs.keys):,} words; left out: {_left_out(pairs)}")
    return vocab_tables.make_tables(tokenizer, counts, words, weights, pairs)


def _left_out(words: Similar) -> str:
    """Describe how many words of a table cannot be used, and why."""
    why = ", ".join(f"{n:,} {why}" for why, n in words.skipped.items() if n)
    return why or "none"


class RowForm(NamedTuple):
    """What a host half requires of a plan (see Features).

    length: of rows, special tokens included. pair_rule: how pairs are drawn. slots:
    what sequences of 0, 1, ... tokens occupy in a packed row; None: as many slots as
    tokens. streams: those that rows bring. limits: of rows of turns.
    """

    length: int
    pair_rule: str | None = None
    slots: tuple[int, ...] | None = None
    streams: frozenset[str] = frozenset()
    limits: tuple[int, int, int] | None = None


def row_form(half: Features, needs: frozenset[str]) -> RowForm:
    """Return the row form of a host half; needs: those of its objective."""
    tokens, rule = np.arange(half.raw + 1), split_needs(needs).pair_rule
    slots = half.slots(tokens)
    own = None if np.array_equal(slots, tokens) else (*slots.tolist(),)
    return RowForm(half.raw, rule, own, half.streams, half.limits)


def make_plans(
    config: ConfigDict,
    form: RowForm,
    stores: Mapping[str, Any],
    say: Say = silent,
    cache: Path | None = None,
    seed: int | None = None,
) -> dict[str, Plan]:
    """Plan the rows of each store, and report what the plan leaves out.

    cache: directory for large plans; None: data.cache. seed: None means the config's.
    """
    if tasks.is_task(config):
        laid = {name: rows.plan(form.length) for name, rows in stores.items()}
        # Batches may use rows of any component, so all get the length of the longest.
        longest = max(rows.length for rows in laid.values())
        return {
            name: rows if rows.length == longest else replace(rows, length=longest)
            for name, rows in laid.items()
        }
    data = config.data
    cache = cache or open_cache(data.cache).root
    plans = {}
    for name, store in stores.items():
        try:
            plans[name] = make_plan(
                store,
                data.plan,
                form.length,
                config.seed if seed is None else seed,
                short_seq_prob=data.short_seq_prob,
                pair_rule=form.pair_rule,
                packed=data.packed,
                max_segments=data.max_segments,
                cache=cache,
                slots=None if form.slots is None else np.array(form.slots),
                streams=form.streams,
                limits=form.limits,
            )
        except UserError as e:
            which = str(e).removeprefix("data.train or data.valid: ")
            raise UserError(f"the text `{name}`: {which}") from None
        for what, number in plans[name].skipped.items():
            if number:
                one = re.sub(r"^(oldest )?(\w+)s\b", r"\1\2", what)
                left = counted(number, one, what)
                say(f"{name}: {left} left out of the plan")
        if form.pair_rule == "nsp" and len(store.documents) == 2:
            say(
                f"{name}: a single document, so that random next sentences come from "
                "it as well; a blank line parts documents"
            )
    return plans
