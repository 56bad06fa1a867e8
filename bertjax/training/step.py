# SPDX-License-Identifier: Apache-2.0
"""The train step and the eval step: sums are divided once, by the global weight."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bertjax.training import guard
from bertjax.training.frozen import join
from bertjax.training.schedules import Schedule
from bertjax.training.state import State

Batch = Mapping[str, jax.Array]
# {term: (sum, weight)}, f32 []. If a metric is not a quotient of two sums, the value is
# a NamedTuple of sums whose mean() is the metric.
Sums = dict[str, Any]
SumsFn = Callable[[Any, Batch, jax.Array | None], Sums]
Weights = dict[str, jax.Array]
WeightsFn = Callable[[Batch], Weights]


def divide(value: jax.Array, weight: jax.Array) -> jax.Array:
    """Return value / weight, and 0 where the weight is 0."""
    return jnp.where(weight > 0, value / jnp.where(weight > 0, weight, 1.0), 0.0)


def with_weights(sums: Sums, weights: Mapping[str, jax.Array]) -> Sums:
    """Replace the losses' weights by those of the optimized loss, so logs match it."""
    return {**sums, **{term: (sums[term][0], w) for term, w in weights.items()}}


def mean(total: Any) -> Any:
    """Return a term's mean from its sums over the global batch; 0 without weight."""
    return total.mean() if hasattr(total, "mean") else divide(*total)


def make_gradients(
    sums_fn: SumsFn, coefficients: Mapping[str, float], accumulate: int = 1
) -> Callable[..., tuple[Any, Sums]]:
    """Return gradients(params, batch, weights, rng, frozen) -> (gradient, sums).

    The gradient is that of the loss with respect to params only. weights: those of the
    whole batch, shared by its `accumulate` micro-batches. frozen: parameters that are
    not trained.
    """

    def loss_fn(
        params: Any, batch: Batch, weights: Weights, rng: jax.Array, frozen: Any = None
    ) -> tuple[jax.Array, Sums]:
        sums = sums_fn(join(params, frozen), batch, rng)
        loss = sum(
            coefficients.get(term, 1.0) * divide(sums[term][0], weight)
            for term, weight in weights.items()
        )
        return loss, sums

    grad_fn = jax.grad(loss_fn, has_aux=True)
    if accumulate == 1:
        return grad_fn

    def accumulated(
        params: Any, batch: Batch, weights: Weights, rng: jax.Array, frozen: Any = None
    ) -> tuple[Any, Sums]:
        # A micro-batch has every accumulate-th row, so that rows stay on their device.
        micro = jax.tree.map(
            lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )

        def add(carry: Any, inputs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            rows, index = inputs
            key = jax.random.fold_in(rng, index)
            more = grad_fn(params, rows, weights, key, frozen)
            return jax.tree.map(jnp.add, carry, more), None

        first = jax.tree.map(lambda x: x[0], micro)
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype),
            jax.eval_shape(grad_fn, params, first, weights, rng, frozen),
        )
        return jax.lax.scan(add, zeros, (micro, jnp.arange(accumulate)))[0]

    return accumulated


def make_train_step(
    sums_fn: SumsFn,
    weights_fn: WeightsFn,
    coefficients: Mapping[str, float],
    tx: optax.GradientTransformation,
    schedule: Schedule,
    *,
    seed: int,
    accumulate: int = 1,
    guard_factor: float = 0.0,
    ema: float = 0.0,
    average_from: int = 0,
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """Return update(state, batch) -> (state, metrics).

    loss = sum over terms of coefficient x global sum / global weight. The weights come
    only from weights_fn, in the gradient and in the metrics. They are computed from the
    whole batch before the first micro-batch, so accumulation changes nothing. Dropout
    keys derive from (seed, step, micro-batch, layer). metrics: f32 scalars by the names
    of metrics.jsonl, and `tokens` i32, the real tokens: the sum of the batch's
    `text_tokens` i32 [B] if it has them, otherwise of its attention_mask.

    A state with a guard (guard.py) skips bad updates. For a state with a moving
    average, ema is the decay d: average = d x average + (1 - d) x parameters, where d
    is at most (1 + step) / (10 + step), so that the initial parameters are soon
    forgotten. The average of a tail (state.averaged) begins with the update at the
    schedule's time average_from. If a batch has `at`, f32 [devices], that is the
    schedule's time (budget.py); otherwise it is the step.
    """
    tx = optax.with_extra_args_support(tx)
    gradients = make_gradients(sums_fn, coefficients, accumulate)

    def update(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        batch = dict(batch)
        stop = batch.pop("stop", None)  # hosts that were asked to stop, i32 [devices]
        at = batch.pop("at", None)
        time = state.step if at is None else jnp.max(at)
        rng = jax.random.fold_in(jax.random.key(seed), state.step)
        weights = weights_fn(batch)
        # Separate `frozen` from the parts that an update changes, because a branch or a
        # loop may copy those.
        frozen, state = state.frozen, state._replace(frozen=None)
        grads, sums = gradients(state.params, batch, weights, rng, frozen)
        sums = with_weights(sums, weights)
        terms = {term: mean(total) for term, total in sums.items()}
        loss = sum(coefficients.get(term, 1.0) * terms[term] for term in weights)
        norm = optax.tree.norm(grads)

        def advance(state: State) -> State:
            updates, moments = tx.update(
                grads, state.opt_state, state.params, at=time, norm=norm, frozen=frozen
            )
            params = optax.apply_updates(state.params, updates)
            new = state._replace(params=params, opt_state=moments)
            return with_average(new, ema, time, average_from)

        with jax.named_scope("optimizer"):
            if state.guard is None:
                new = advance(state)
            else:
                good, kept = guard.check_update(state.guard, loss, norm, guard_factor)
                new = guard.advance_if(good, advance, state)._replace(guard=kept)
        metrics = {f"train/{term}": value for term, value in terms.items()}
        metrics |= {
            "train/loss": loss,
            "optim/grad_norm": norm,
            "optim/lr": schedule(time),
            # Rows of copies, or of two sides, count their text in text_tokens.
            "tokens": jnp.sum(batch.get("text_tokens", batch["attention_mask"])),
        }
        if stop is not None:
            metrics["stop"] = jnp.sum(stop)
        if at is not None:
            metrics["at"] = time
        if state.guard is not None:
            metrics |= {"guard/skipped": kept.skipped, "streak": kept.streak}
        return new._replace(step=state.step + 1, frozen=frozen), metrics

    return update


def with_average(state: State, decay: float, time: Any, average_from: int) -> State:
    """Return a state with its average, if it has one, updated by its parameters."""
    if state.averaged is not None:
        count = jnp.where(time >= average_from, state.averaged + 1, 0)
        tail = average_tail(state.ema, state.params, count)
        return state._replace(ema=tail, averaged=count)
    if state.ema is not None:
        moving = average(state.ema, state.params, decay, state.step)
        return state._replace(ema=moving)
    return state


def average(ema: Any, params: Any, decay: float, step: jax.Array) -> Any:
    """Return the moving average after update `step` (0-based)."""
    rest = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda a, p: a + rest * (p - a), ema, params)


def average_tail(mean: Any, params: Any, count: jax.Array) -> Any:
    """Return the mean of `count` updates' parameters; mean: of all but the newest.

    If count is at most 1, it is a copy of the parameters. For 2, 4 and 9 it becomes
    2; 2 + (4 - 2) / 2 = 3; 3 + (9 - 3) / 3 = 5.
    """
    share = 1.0 / jnp.maximum(count, 1)
    return jax.tree.map(
        lambda a, p: jnp.where(count > 1, a + share * (p - a), p), mean, params
    )


def make_eval_step(
    sums_fn: SumsFn,
    weights_fn: WeightsFn,
    evaluate_fn: Callable[[Any, Batch], tuple[Sums, Any]] | None = None,
) -> Callable[..., Sums]:
    """Return evaluate(params, batch, frozen) -> {term: (sum, weight)}, without dropout.

    Losses have the weights of weights_fn(batch), as in training. evaluate_fn(params,
    batch) -> (sums, `outputs` of every row) replaces sums_fn if given. A batch's `stop`
    (feed.with_flag) is returned as a sum of that name. frozen: see State.
    """

    def evaluate(params: Any, batch: Batch, frozen: Any = None) -> Sums:
        batch, params = dict(batch), join(params, frozen)
        stop = batch.pop("stop", None)
        outputs = {}
        if evaluate_fn is None:
            sums = sums_fn(params, batch, None)
        else:
            sums, more = evaluate_fn(params, batch)
            outputs = {"outputs": more}
        sums = with_weights(sums, weights_fn(batch)) | outputs
        if stop is not None:
            sums["stop"] = (jnp.sum(stop), jnp.ones(()))
        return sums

    return evaluate


def run_eval(
    evaluate: Callable[[Any, Batch], Sums],
    params: Any,
    batches: Iterable[Batch],
    asked: Callable[[], bool] = lambda: False,
    outputs: list[Any] | None = None,
) -> dict[str, float] | None:
    """Evaluate all batches: {term: mean over all of them}, summed in float64.

    A mean with weight 0 is nan. The outputs of each batch, if the model has any, are
    appended to `outputs`. Returns None if `asked` or a batch's `stop` interrupted it.
    """
    total: Sums = {}
    pending: list[Sums] = []

    def collect(keep: int) -> None:
        while len(pending) > keep:
            found = jax.device_get(pending.pop(0))
            batch_outputs = found.pop("outputs", None)
            if batch_outputs is not None and outputs is not None:
                outputs.append(batch_outputs)
            add_sums(total, found)

    for batch in batches:
        pending.append(evaluate(params, batch))
        collect(keep=2)
        if asked() or total.get("stop", [0])[0]:
            return None
    collect(keep=0)
    total.pop("stop", None)
    return {term: mean_on_host(sums) for term, sums in total.items()}


def add_sums(total: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add a batch's sums of each term to those in `total`, on the host in float64."""
    for term, part in found.items():
        part = jax.tree.map(np.float64, part)
        known = total.get(term)
        total[term] = jax.tree.map(np.add, known, part) if known else part


def mean_on_host(sums: Any) -> float:
    """Return a term's mean from its sums on the host; nan if its weight is 0."""
    if hasattr(sums, "mean"):
        return float(sums.mean())
    return float(sums[0] / sums[1]) if sums[1] else math.nan
