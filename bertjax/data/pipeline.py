# SPDX-License-Identifier: Apache-2.0
"""Make batch number `step`, a pure function of (config, seed, step), and stream them.

Nothing here remembers anything between batches: step -> (epoch, slot) is arithmetic,
slot -> example is a seeded bijection of the epoch, and all other draws are addressed by
(seed, epoch, example). So seeking costs nothing, and rows, hosts, threads, prefetching
and the engine cannot change a batch.
"""

import collections
import contextlib
import hashlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data import counter
from bertjax.data.masking import (
    Masking,
    Tables,
    mask_tokens,
    predictions_per_sequence,
)
from bertjax.data.plan import Plan, gather, truncated
from bertjax.registry import pick

Batch = dict[str, np.ndarray]
Rows = slice | np.ndarray | None  # of the global batch; None: all
EVAL_SEED = (
    20181011  # the same for every run: evaluations of all runs share their masks
)
_WARM_UP = 2  # batches consumed before tensorflow's import may compete for the cores
_WORTH_TF = 64  # steps: a shorter stream is over before tensorflow is imported


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of a plan: B = `batch_size` rows, global over all hosts.

    `masking` (and `tables`) is None where no objective predicts masked tokens;
    `specials` has pad_id, cls_id and sep_id, as a Tokenizer does; `needs` names what
    the objectives want: "mlm" masks, any other name is the pair rule of the plan.
    `max_predictions` is P; None derives it from the masking's rate. Raises UserError
    when the store holds an id that the vocabulary of `tables` lacks.
    """

    plan: Plan
    masking: Masking | None
    tables: Tables | None
    specials: Any
    batch_size: int
    seed: int
    needs: frozenset[str] = frozenset({"mlm", "nsp"})
    max_predictions: int | None = None

    def __post_init__(self) -> None:
        if "mlm" in self.needs and (self.masking is None or self.tables is None):
            raise ValueError("masked tokens are needed: give a masking and its tables")
        if self.tables is not None:
            self.plan.check_ids(self.tables.vocab_size)

    @property
    def n(self) -> int:
        """The number of examples, so of rows in an epoch."""
        return self.plan.n

    @property
    def P(self) -> int:
        """The number of prediction slots in a row."""
        if self.max_predictions is not None:
            return self.max_predictions
        return predictions_per_sequence(self.masking.rate, self.plan.length)

    @property
    def pair_rule(self) -> str | None:
        """What the pairs are drawn by: the one name in `needs` beside "mlm"."""
        rules = sorted(self.needs - {"mlm"})
        if len(rules) > 1:
            raise UserError(f"one pair objective at a time, not {' and '.join(rules)}")
        return rules[0] if rules else None

    def batch(self, step: int, rows: Rows = None) -> Batch:
        """Make the rows `rows` (default: all) of batch `step`.

        Returns the arrays of `plan.gather` and `masking.mask_tokens` by name.

        Worked example: n = 10, B = 4, step 3: positions 12 to 15 of the run, so epoch
        1, slots 2 to 5; permute(slot, 10, fold(seed, "order", 1)) makes them examples.
        """
        return self._make(*self._draw(step, rows))

    def truncated(self, step: int) -> np.ndarray:
        """Count the tokens cut off each row of batch `step`, i64 [B]."""
        return truncated(self.plan, *self._draw(step, None), self.pair_rule)

    def _draw(self, step: int, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return the examples of rows of batch `step` and their keys."""
        index = np.arange(self.batch_size)[slice(None) if rows is None else rows]
        epoch, slot = np.divmod(step * self.batch_size + index, self.n)
        if epoch.size and epoch[0] == epoch[-1]:  # nearly always, and cheaper
            epoch = epoch[:1]
        order = counter.fold(self.seed, "order", epoch)
        example = counter.permute(slot, self.n, order)
        return example, counter.fold(self.seed, epoch, example)

    def eval_batches(
        self, batch_size: int, examples: int | None = None, rows: Rows = None
    ) -> Iterator[Batch]:
        """Yield one pass in natural order over all examples, or a fixed subset of them.

        Draws depend on the example alone: never on batch size, run seed or host. The
        last batch is filled up with copies of its last row, with mlm_weights 0.
        `example_weights` f32 [b] is 1 for real rows and 0 for copies.
        """
        ids = np.arange(self.n)
        if examples is not None and examples < self.n:
            key = counter.fold(EVAL_SEED, "subset")
            ids = np.sort(counter.permute(ids[:examples], self.n, key))
        mine = np.arange(batch_size)[slice(None) if rows is None else rows]
        for low in range(0, len(ids), batch_size):
            real = low + mine < len(ids)
            example = ids[np.minimum(low + mine, len(ids) - 1)]
            batch = self._make(example, counter.fold(EVAL_SEED, "eval", example))
            batch["example_weights"] = real.astype(np.float32)
            if "mlm_weights" in batch:
                batch["mlm_weights"] *= batch["example_weights"][:, None]
            yield batch

    def _make(self, example: np.ndarray, keys: np.ndarray) -> Batch:
        batch = gather(self.plan, example, keys, self.pair_rule, self.specials)
        if "mlm" in self.needs:
            masked = mask_tokens(
                batch["input_ids"], batch["attention_mask"], keys, self.masking,
                self.tables, self.P,
            )  # fmt: skip
            batch |= masked._asdict()
        return batch


def batch_sha256(batch: Mapping[str, np.ndarray]) -> str:
    """Hash a global batch: names, types, shapes and values, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def stream(
    make: Callable[[int], Batch],
    start: int,
    stop: int,
    engine: str = "python",
    prefetch: int = 2,
    workers: int = 2,
) -> Iterator[Batch]:
    """Yield make(start), ..., make(stop - 1) in order, working ahead in threads.

    Both engines, "python" and "tf", yield the same batches. "tf" begins with the python
    engine, imports tensorflow in a thread once the first batches are consumed, and goes
    over to tf.data at the next step; streams under 64 steps never load it. An
    exception of `make` surfaces as it is, at its step. Closing the iterator ends the
    threads. Raises UserError for an unknown engine or a missing tensorflow.
    """
    run = pick("data.engine", engine, ENGINES)
    if engine == "tf" and importlib.util.find_spec("tensorflow") is None:
        raise UserError("data.engine='tf' needs tensorflow; use data.engine='python'")
    return run(make, start, stop, prefetch, workers)


def _python(
    make: Callable[[int], Batch], start: int, stop: int, prefetch: int, workers: int
) -> Iterator[Batch]:
    pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
    ahead: collections.deque = collections.deque()
    try:
        for step in range(start, stop):
            while len(ahead) <= prefetch and step + len(ahead) < stop:
                ahead.append(pool.submit(make, step + len(ahead)))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _tf_after_import(
    make: Callable[[int], Batch], start: int, stop: int, prefetch: int, workers: int
) -> Iterator[Batch]:
    """Yield from the python engine until tensorflow is there, then from tf.data."""
    step, ready, failed = start, threading.Event(), []

    def load() -> None:
        try:
            _import_tensorflow()
        except BaseException as error:
            failed.append(error)
        ready.set()

    with contextlib.closing(_python(make, start, stop, prefetch, workers)) as batches:
        for batch in batches:
            yield batch
            step += 1
            if step == start + _WARM_UP and stop - step >= _WORTH_TF:
                # no daemon: ending the process in mid-import would crash it
                threading.Thread(target=load, name="import-tensorflow").start()
            if ready.is_set():
                break
    if failed:
        raise failed[0]
    if step < stop:
        yield from _tf_data(make, step, stop, prefetch, workers)


def _import_tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    # The accelerator is jax's alone; RuntimeError: someone has started tensorflow.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    return tf


def _tf_data(
    make: Callable[[int], Batch], start: int, stop: int, prefetch: int, workers: int
) -> Iterator[Batch]:
    tf = _import_tensorflow()
    first = make(start)
    names = sorted(first)
    failed: dict[int, BaseException] = {}

    def arrays(step: np.ndarray) -> list[np.ndarray]:
        try:
            batch = make(int(step))
            return [batch[name] for name in names]
        except BaseException as error:
            failed[int(step)] = error
            raise

    @tf.autograph.experimental.do_not_convert
    def load(step: Any) -> list:
        return tf.numpy_function(arrays, [step], [first[n].dtype for n in names])

    steps = tf.data.Dataset.range(start, stop)
    data = steps.map(load, num_parallel_calls=workers, deterministic=True)
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = workers
    data = data.prefetch(prefetch).with_options(options)
    try:
        for values in data.as_numpy_iterator():
            yield dict(zip(names, values, strict=True))
    except tf.errors.OpError:
        if not failed:
            raise
        raise failed[min(failed)] from None


ENGINES = {"python": _python, "tf": _tf_after_import}
