# SPDX-License-Identifier: Apache-2.0
"""From a config to the parts of a run: prepared text, batches, the update.

What several commands build alike; jax is imported only where the update is made.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax import config as c
from bertjax.data import mixture, phases, pipeline
from bertjax.data.masks import masking
from bertjax.data.plans import plan
from bertjax.data.stores import prepare as text
from bertjax.data.stores.cache import open_cache
from bertjax.data.stores.store import Store
from bertjax.data.text.sources import named_sources
from bertjax.data.vocab.tokenizers import Tokenizer
from bertjax.defaults import base
from bertjax.tasks import prepare as tasks

# By which rules rows are made, as run.json says of a run (`row_rules`; 1 without it).
# 2: unpacked pairs draw short targets for chunks, and mixtures give rows in passes.
ROW_RULES = 2


def prepare(config: ConfigDict, say: Callable[[str], None]) -> text.Prepared:
    """Prepare or reuse tokenizer and token stores (bertjax/data/stores/prepare.py).

    Of a task, which has labelled rows instead, see bertjax/tasks/prepare.py.
    """
    if tasks.is_task(config):
        return tasks.prepare(config, say)
    return settle(config, text.prepare_data(**inputs(config), say=say))


def settle(config: ConfigDict, prepared: text.Prepared) -> text.Prepared:
    """Put components in the order of their names, which decides batches.

    Raises UserError for names, known only now where a field gives them, that do not go
    with each other or with data.weights.
    """
    _check_components(config, prepared.parts, prepared.valid)
    return prepared._replace(parts=dict(sorted(prepared.parts.items())))


def check_inputs(config: ConfigDict) -> None:
    """Refuse missing or unreadable files, in a moment and before jax is imported."""
    if not config.data.train:
        what = "text, for instance --config.data.train='corpus/*.txt' or builtin:docs"
        if kind := tasks.KINDS.get(config.objective):
            what = f"labelled rows, {kind.wanted}: --config.data.train=FILE and "
            what += "--config.data.valid=FILE"
        raise UserError(f"data.train is empty: give {what}")
    if tasks.is_task(config):
        tasks.check(config)
        return
    data = config.data
    train = named_sources(data.train, "data.train")
    valid = named_sources(data.valid, "data.valid")
    if "train" in valid:
        raise UserError("data.valid: `train` is the training text's own name")
    if not data.group_field:  # then the names are known when the text was read
        _check_components(config, train, valid)
        for key in ("alpha", "vocab_alpha"):
            if data[key] is not None and len(train) == 1:
                raise UserError(
                    f"data.{key}={data[key]}: data.train has one component, there is "
                    "nothing to mix"
                )
    text.check_inputs(**inputs(config))


def refuse_task(config: ConfigDict) -> None:
    """Raise UserError for a config whose text are a task's rows: no store is made."""
    if tasks.is_task(config) or config.objective in tasks.KINDS:
        raise UserError(
            f"objective={config.objective}: token stores are made of running text, "
            "and this is a task, whose rows bertjax.train reads itself"
        )


def _check_components(
    config: ConfigDict, train: Mapping[str, Any], valid: Mapping[str, Any]
) -> None:
    """Refuse names that do not go with each other or with data.weights."""
    mixture.check_names(train, valid, config.data.alpha)
    if config.data.weights:
        weights = mixture.read_weights(config.data.weights)
        mixture.mixture_shares(dict.fromkeys(train, 1), weights)


def inputs(config: ConfigDict) -> dict[str, Any]:
    data = config.data
    return dict(
        train=data.train,
        valid=data.valid,
        vocab=str(Path(data.vocab).expanduser()) if data.vocab else "",
        tokenizer_kind=data.tokenizer,
        vocab_size=data.vocab_size,
        lower_case=data.lower_case,
        cache=data.cache,
        max_line_bytes=data.max_line_bytes,
        text_field=data.text_field,
        group_field=data.group_field,
        entity_field=data.entity_field,
        segmenter=data.segmenter,
        vocab_alpha=data.alpha if data.vocab_alpha is None else data.vocab_alpha,
        vocab_weights=None
        if data.vocab_alpha is not None
        else mixture.read_weights(data.weights),
    )


def settle_cache(config: ConfigDict, say: Callable[[str], None]) -> None:
    """Take the default data.cache where the config's is of another machine; say so."""
    default = base().data.cache
    try:
        open_cache(config.data.cache)
    except UserError as e:
        if config.data.cache == default:
            raise
        say(f"{e}: {default} is taken")
        config.data.cache = default


def prepare_valid(
    config: ConfigDict, tokenizer: Tokenizer, say: Callable[[str], None]
) -> dict[str, Store]:
    """Prepare or reuse the stores of data.valid alone: {name: store}."""
    return text.prepare_valid(tokenizer, **inputs(config), say=say)


class Run(NamedTuple):
    """What a run sees: its batches, how many steps there are, and its phases."""

    course: pipeline.Course
    total: int
    phases: tuple[phases.Phase, ...]


def make_run(
    config: ConfigDict,
    needs: frozenset[str],
    tokenizer: Tokenizer,
    parts: Mapping[str, Any],
    tables: masking.Tables,
    past: Sequence[phases.Phase] = (),
    at: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Run:
    """Make the batch function of a run from its config and the stores of data.train.

    past: the phases that led to step `at` where a run goes on with another config.
    Raises UserError when the objective needs what the plan cannot give.
    """
    c.check_plan(config, needs)
    wanted = c.wanted_phases(config)
    weights = mixture.read_weights(config.data.weights)
    plans, mixtures = {}, {}
    for length in {p.length for p in wanted}:
        plans[length] = make_plans(config, needs, parts, length, say)
        rows = {name: p.n for name, p in plans[length].items()}
        mixtures[length] = mixture.make_mixture(rows, weights, config.data.alpha)
        for line in mixtures[length].lines():
            say(line)
    sizes = {length: m.n for length, m in mixtures.items()}

    def place(total: int) -> tuple[phases.Phase, ...]:
        planned = phases.place_phases(wanted, total, sizes)
        return phases.change_phases(planned, past, at)

    total = phases.count_steps(*c.unit_of(config, "total"), place)
    placed = place(total)
    for repeat in phases.find_repeats(placed):
        if repeat.phase not in past:  # else it was said when the run began
            say(str(repeat))
    stages = [
        pipeline.Batches(
            plans=tuple(plans[phase.length].values()),
            mixture=mixtures[phase.length],
            masking=c.make_masking(config, phase.mask_rate),
            tables=tables,
            specials=tokenizer,
            batch_size=phase.batch_size,
            seed=config.seed,
            needs=needs,
            max_predictions=slots(config, placed, phase),
            start=phase.start,
            first=phase.first,
        )
        for phase in placed
        if phase.start >= at or phase is [p for p in placed if p.start <= at][-1]
    ]
    return Run(pipeline.Course(tuple(stages)), total, placed)


def slots(
    config: ConfigDict, placed: Sequence[phases.Phase], phase: phases.Phase
) -> int:
    """Return P of a phase: enough for the highest rate of all phases of its shape."""
    shape = phase.length, phase.batch_size
    rates = {p.mask_rate for p in placed if (p.length, p.batch_size) == shape}
    return max(predictions(config, phase.length, rate) for rate in rates)


def predictions(config: ConfigDict, length: int, rate: float | None = None) -> int:
    """Return P, the prediction slots of a row of this length."""
    if config.data.max_predictions is not None:
        return min(config.data.max_predictions, length)
    made = c.make_masking(config, rate)
    return masking.predictions_per_sequence(made, length)


def make_eval_batches(
    config: ConfigDict,
    needs: frozenset[str],
    tokenizer: Tokenizer,
    name: str,
    store: Any,
    tables: masking.Tables,
    say: Callable[[str], None] = lambda text: None,
) -> pipeline.Batches:
    """Make the batches of a validation store, the same for every run on this text.

    One length and one mask rate, however the run's phases change theirs, and rows that
    do not depend on the run's seed.
    """
    c.check_plan(config, needs)
    seed = pipeline.EVAL_SEED
    length = config.data.length
    plans = make_plans(config, needs, {name: store}, length, say, seed=seed)
    return pipeline.Batches(
        plans=tuple(plans.values()),
        mixture=mixture.make_mixture({name: p.n for name, p in plans.items()}),
        masking=c.make_masking(config, config.eval.mask_rate),
        tables=tables,
        specials=tokenizer,
        batch_size=config.batch_size,
        seed=seed,
        needs=needs,
        max_predictions=config.data.max_predictions,
    )


def make_valid(
    config: ConfigDict,
    needs: frozenset[str],
    tokenizer: Tokenizer,
    stores: Any,
    *more: Any,
) -> dict[str, pipeline.Batches]:
    """Make the batches of each validation store; `more` as make_eval_batches has it."""
    return {
        name: make_eval_batches(config, needs, tokenizer, name, store, *more)
        for name, store in stores.items()
    }


def make_tables(
    config: ConfigDict,
    tokenizer: Tokenizer,
    counts: np.ndarray | None,
    say: Callable[[str], None] = lambda text: None,
) -> masking.Tables:
    """Make what masking knows of the vocabulary and of the training text's counts [V].

    Reads data.similar, and says which of its words cannot be used.
    """
    data = config.data
    if not len(tokenizer.replacement_ids):
        raise UserError(f"data.vocab={data.vocab}: every piece is a special one")
    words = None
    if data.similar:
        words = masking.read_similar(Path(data.similar).expanduser(), tokenizer)
        left = ", ".join(f"{n:,} {why}" for why, n in words.skipped.items() if n)
        say(f"{data.similar}: {len(words.keys):,} words; left out: {left or 'none'}")
    return masking.make_tables(tokenizer, counts, words)


def content_hashes(config: ConfigDict, prepared: text.Prepared) -> dict[str, str]:
    """Return the hash of each store, and of each file beside them that decides batches.

    The training text's components are train, or train/NAME.
    """
    hashes = {
        name if name == "train" else f"train/{name}": store.content_hash
        for name, store in prepared.parts.items()
    }
    hashes |= {name: store.content_hash for name, store in prepared.valid.items()}
    if config.data.similar:
        with open(Path(config.data.similar).expanduser(), "rb") as file:
            hashes["data.similar"] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def check_rows(
    config: ConfigDict, parts: Mapping[str, Any], path: Any, rules: int
) -> None:
    """Refuse to go on in a workdir whose rows were made by older rules: UserError.

    Unless the rows of this config are what they were. parts: the stores of data.train.
    """
    data, what = config.data, ""
    if len(parts) > 1:
        what = f"a mixture (data.train has {len(parts)} components)"
    elif not tasks.is_task(config) and data.plan == "pairs" and not data.packed:
        what = "unpacked pairs (data.plan=pairs)" if data.short_seq_prob else ""
    if rules < 2 and what:
        raise UserError(
            f"--workdir={path} was begun by an older version, which made other rows of "
            f"{what}: finish it with that version (run.json names its commit), or "
            f"begin a new workdir with --config.init_from={path}"
        )


def count_tokens(stores: Mapping[str, Any]) -> np.ndarray:
    """Add up how often each id occurs in the stores: i64 [V]."""
    return np.sum([store.counts for store in stores.values()], axis=0)


def make_plans(
    config: ConfigDict,
    needs: frozenset[str],
    stores: Mapping[str, Any],
    length: int,
    say: Callable[[str], None] = lambda text: None,
    cache: Path | None = None,
    seed: int | None = None,
) -> dict[str, plan.Plan]:
    """Plan the rows of each store; say what the plan leaves out.

    Large plans are kept in `cache` (None: data.cache). seed: None is the config's.
    """
    if tasks.is_task(config):
        return {name: rows.plan(length) for name, rows in stores.items()}
    data = config.data
    cache = cache or open_cache(data.cache).root
    rule = pipeline.pair_rule(needs)
    made = {}
    for name, store in stores.items():
        try:
            made[name] = plan.make_plan(
                store,
                data.plan,
                length,
                config.seed if seed is None else seed,
                short_seq_prob=data.short_seq_prob,
                pair_rule=rule,
                packed=data.packed,
                max_segments=data.max_segments,
                cache=cache,
            )
        except UserError as e:
            which = str(e).removeprefix("data.train or data.valid: ")
            raise UserError(f"the text `{name}`: {which}") from None
        for what, number in made[name].skipped.items():
            if number:
                say(f"{name}: {number:,} {what} left out of the plan")
        if rule == "nsp" and len(store.documents) == 2:
            say(
                f"{name}: a single document, so that random next sentences come from "
                "it as well; a blank line parts documents"
            )
    return made
