# SPDX-License-Identifier: Apache-2.0
"""Create batches ahead of time, in order, in threads or with tf.data."""

import collections
import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.registry import pick

Batch = dict[str, np.ndarray]
PREFETCH, WORKERS = 2, 2  # batches created ahead, threads
_WARM_UP = 2  # batches consumed before the import of tensorflow may use the cores
_WORTH_TF = 64  # steps: a shorter stream ends before tensorflow is imported


def stream(
    make: Callable[[int], Batch],
    start: int,
    stop: int,
    engine: str = "python",
) -> Iterator[Batch]:
    """Yield make(start), ..., make(stop - 1) in order, working ahead in threads.

    Both engines, "python" and "tf", yield the same batches. "tf" begins with the python
    engine, imports tensorflow in a thread once the first batches are consumed, and then
    switches to tf.data at the next step; streams under 64 steps never load it. An
    exception in `make` is raised unchanged, at its step. Closing the iterator ends the
    threads. Raises UserError for an unknown engine or a missing tensorflow.
    """
    run = pick("data.engine", engine, ENGINES)
    if engine == "tf" and importlib.util.find_spec("tensorflow") is None:
        raise UserError("data.engine='tf' needs tensorflow; use data.engine='python'")
    return run(make, start, stop)


def _python(
    make: Callable[[int], Batch], start: int, stop: int, workers: int | None = None
) -> Iterator[Batch]:
    pool = ThreadPoolExecutor(workers or WORKERS, thread_name_prefix="batches")
    ahead: collections.deque = collections.deque()
    try:
        for step in range(start, stop):
            while len(ahead) <= PREFETCH and step + len(ahead) < stop:
                ahead.append(pool.submit(make, step + len(ahead)))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _tf_after_import(
    make: Callable[[int], Batch], start: int, stop: int
) -> Iterator[Batch]:
    """Yield from the python engine until tensorflow is imported, then from tf.data."""
    step, importing = start, None
    with contextlib.closing(_python(make, start, stop)) as batches:
        for batch in batches:
            yield batch
            step += 1
            if step == start + _WARM_UP and stop - step >= _WORTH_TF:
                # Not a daemon: a process that ends during the import would crash.
                importing = ThreadPoolExecutor(1).submit(_import_tensorflow)
            if importing is not None and importing.done():
                importing.result()  # raises what the import raised
                break
    if step < stop:
        yield from _tf_data(make, step, stop)


def _import_tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # oneDNN only speeds up floating-point kernels, which are not used here, and prints.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    import tensorflow as tf

    # The accelerator is for jax alone. RuntimeError: tensorflow has already started.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    return tf


def _tf_data(make: Callable[[int], Batch], start: int, stop: int) -> Iterator[Batch]:
    tf = _import_tensorflow()
    failed: dict[int, BaseException] = {}
    # tf.data needs the same structure at every step, but a phase may have arrays of its
    # own. Therefore tf.data passes step numbers, and the batches are stored here.
    batches: dict[int, Batch] = {}

    def put(step: np.ndarray) -> np.ndarray:
        try:
            batches[int(step)] = make(int(step))
        except BaseException as error:
            failed[int(step)] = error
            raise
        return step

    @tf.autograph.experimental.do_not_convert
    def load(step: Any) -> Any:
        return tf.numpy_function(put, [step], tf.int64)

    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = WORKERS
    data = tf.data.Dataset.range(start, stop)
    data = data.map(load, num_parallel_calls=WORKERS, deterministic=True)
    values = data.prefetch(PREFETCH).with_options(options).as_numpy_iterator()

    def take(step: int) -> Batch:
        return batches.pop(int(next(values)))

    try:
        # `next` wakes tensorflow's threads, which compete for cores with the current
        # step. One more thread waits for them, so that the training loop does not.
        yield from _python(take, start, stop, workers=1)
    except tf.errors.OpError:
        if not failed:
            raise
        raise failed[min(failed)] from None


ENGINES = {"python": _python, "tf": _tf_after_import}
