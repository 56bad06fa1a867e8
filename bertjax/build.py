# SPDX-License-Identifier: Apache-2.0
"""From a config to the parts of a run: prepared text, batches, the update.

What several commands build alike; jax is imported only where the update is made.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax import config as c
from bertjax.data import masking, pipeline, plan
from bertjax.data import prepare as text
from bertjax.data.sources import named_sources, parse_sources
from bertjax.data.store import Store, build_store
from bertjax.data.tokenizers import Tokenizer


def prepare(config: ConfigDict, say: Callable[[str], None]) -> text.Prepared:
    """Prepare or reuse tokenizer and token stores (bertjax/data/prepare.py)."""
    return text.prepare_data(**_inputs(config), say=say)


def check_inputs(config: ConfigDict) -> None:
    """Refuse missing or unreadable files, in a moment and before jax is imported."""
    if not config.data.train:
        raise UserError(
            "data.train is empty: give text, for instance "
            "--config.data.train='corpus/*.txt' or builtin:docs"
        )
    if "train" in named_sources(config.data.valid):
        raise UserError("data.valid: `train` is the training text's own name")
    given = _inputs(config)
    del given["max_line_bytes"]
    text.check_inputs(**given)


def _inputs(config: ConfigDict) -> dict[str, Any]:
    data = config.data
    return dict(
        train=data.train,
        valid=data.valid,
        vocab=str(Path(data.vocab).expanduser()) if data.vocab else "",
        tokenizer_kind=data.tokenizer,
        vocab_size=data.vocab_size,
        lower_case=data.lower_case,
        cache=str(Path(data.cache).expanduser()),
        max_line_bytes=data.max_line_bytes,
    )


def prepare_valid(
    config: ConfigDict, tokenizer: Tokenizer, say: Callable[[str], None]
) -> dict[str, Store]:
    """Prepare or reuse the stores of data.valid alone: {name: store}."""
    data = config.data
    return {
        name: build_store(
            parse_sources(value, "data.valid", "valid"),
            tokenizer,
            str(Path(data.cache).expanduser()),
            max_line_bytes=data.max_line_bytes,
            say=say,
            label=name,
        )
        for name, value in named_sources(data.valid).items()
    }


def make_batches(
    config: ConfigDict,
    needs: frozenset[str],
    tokenizer: Tokenizer,
    store: Any,
    counts: Any = None,
) -> pipeline.Batches:
    """Make the batch function of a store: plan, masking and order from the config.

    `counts` [V] are the training text's, for unigram replacements. Raises UserError
    when the objective needs what the plan cannot give.
    """
    data = config.data
    c.check_plan(config, needs)
    if not len(tokenizer.replacement_ids):
        raise UserError(f"data.vocab={data.vocab}: every piece is a special one")
    return pipeline.Batches(
        plan=plan.make_plan(
            store,
            data.plan,
            data.length,
            config.seed,
            short_seq_prob=data.short_seq_prob,
            cache=str(Path(data.cache).expanduser()),
        ),
        masking=c.make_masking(config),
        tables=masking.make_tables(
            tokenizer, store.counts if counts is None else counts
        ),
        specials=tokenizer,
        batch_size=config.batch_size,
        seed=config.seed,
        needs=needs,
        max_predictions=data.max_predictions,
    )


class Update(NamedTuple):
    """The update of a config: `step(state, batch) -> (state, metrics)`, jitted.

    init() -> parameters, tx the optax transform, shapes and shardings of the state.
    """

    init: Callable[[], Any]
    tx: Any
    shapes: Any
    shardings: Any
    step: Any


def make_update(
    config: ConfigDict, objective: Any, mesh: Any, warmup: int, total: int
) -> Update:
    """Make optimizer, state layout and update; durations are in steps."""
    import jax

    from bertjax.training import optim, state, step

    o = config.optim
    schedule = optim.make_schedule(o.schedule, o.lr, warmup, total)
    tx = optim.make_optimizer(
        o.name, schedule, wd=o.wd, b1=o.b1, b2=o.b2, eps=o.eps, clip=o.clip
    )

    def init() -> Any:
        return objective.init(jax.random.key(config.seed))

    shapes, shardings = state.plan_state(init, tx, mesh, objective.shardings)
    update = step.make_train_step(
        objective.sums,
        objective.weights,
        objective.coefficients,
        tx,
        schedule,
        seed=config.seed,
        accumulate=config.accumulate,
    )
    compiled = step.compile_train_step(update, shardings)
    return Update(init, tx, shapes, shardings, compiled)
