# SPDX-License-Identifier: Apache-2.0
"""Writers of a run's metrics: always metrics.jsonl, others by name (log.writers).

A writer is a class with write(row), flush() and close(). A dotted name such as
`my_package.my_module.MyWriter` in log.writers selects one from outside the package.
"""

import hashlib
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from bertjax import RunError, UserError, counted, registry
from bertjax.checkpoints.workdir import finite, rows_up_to
from bertjax.storage.atomic import append_line, copy_files, is_remote, write_file

Row = dict[str, Any]


class Writer(Protocol):
    """The interface of a writer; a subclass may leave out flush and close."""

    def write(self, row: Row) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def write(writers: Sequence[Writer], row: Row, workdir: Any) -> None:
    """Write a row with all writers. Raises RunError if the workdir is not writable."""
    try:
        for writer in writers:
            writer.write(row)
    except OSError as e:
        raise RunError(f"--workdir={workdir} cannot be written: {e}") from e


class JsonlWriter(Writer):
    """Writes metrics.jsonl: one object per line, on disk before the next step's.

    At the start it drops rows of steps after the restored one, and an unfinished last
    line. Object stores cannot append, so there each flush writes the whole file.
    """

    def __init__(self, workdir: Any, step: int) -> None:
        self.path = workdir / "metrics.jsonl"
        self.lines = rows_up_to(self.path, step)
        self.remote = is_remote(self.path)
        if not self.remote:
            write_file(self.path, "".join(self.lines))
            self.lines = []
            self.file = self.path.open("a")

    def write(self, row: Row) -> None:
        line = json.dumps(finite(row)) + "\n"
        if self.remote:
            self.lines.append(line)
        else:
            append_line(self.file, line)

    def flush(self) -> None:
        if self.remote:
            write_file(self.path, "".join(self.lines))

    def close(self) -> None:
        self.flush()
        if not self.remote:
            self.file.close()


class TensorBoardWriter(Writer):
    """Writes TensorBoard event files to WORKDIR/tb, and hides rows after `step`."""

    def __init__(self, workdir: Any, step: int) -> None:
        from tensorboardX import SummaryWriter

        self.target = workdir / "tb"
        self.local = self.target
        if is_remote(workdir):  # write locally; each flush copies the files
            self.own = tempfile.TemporaryDirectory(prefix="bertjax-tb-")
            self.local = Path(self.own.name)
        self.tb = SummaryWriter(str(self.local), purge_step=step + 1)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                self.tb.add_scalar(name, value, row["step"])

    def flush(self) -> None:
        self.tb.flush()
        self._copy()

    def close(self) -> None:
        self.tb.close()
        self._copy()
        if self.local is not self.target:
            self.own.cleanup()

    def _copy(self) -> None:
        if self.local is not self.target:
            copy_files(self.local, self.target)


class WandbWriter(Writer):
    """Writes to Weights & Biases, which its own environment variables configure.

    It needs `pip install wandb`. The run's id is a hash of the workdir's path, so a
    resumed run continues the same record.
    """

    def __init__(self, workdir: Any, step: int) -> None:
        import wandb

        own = hashlib.sha256(str(workdir).encode()).hexdigest()[:8]
        name = f"{workdir.name}-{own}"
        # wandb writes local files: for a workdir in a bucket they would be in "./gs:/".
        place = None if is_remote(workdir) else str(workdir)
        self.run = wandb.init(dir=place, id=name, name=workdir.name, resume="allow")

    def write(self, row: Row) -> None:
        self.run.log(row, step=row["step"])

    def close(self) -> None:
        self.run.finish()


WRITERS = {"jsonl": JsonlWriter, "tensorboard": TensorBoardWriter, "wandb": WandbWriter}


FILES = "jsonl", "tensorboard"  # writers that write into the workdir


def find_writer(name: str) -> type:
    """Return the class of a writer by its name or dotted name.

    Raises UserError if there is none.
    """
    if "." in name:
        module, _, attribute = name.rpartition(".")
        registry.OUTSIDE[module] = f"log.writers={name!r}"
        try:
            found = getattr(importlib.import_module(module), attribute)
        except Exception as e:  # a module from outside may raise anything
            reason = f"{type(e).__name__}: " + " ".join(str(e).split())
            raise UserError(
                f"log.writers: {name!r} cannot be imported: {reason}"
            ) from e
        methods = "write", "flush", "close"
        lacking = [m for m in methods if not hasattr(found, m)]
        if lacking or not isinstance(found, type):
            method = [*lacking, "write"][0]
            raise UserError(
                f"log.writers: {name!r} is not a class with a method `{method}`"
            )
        return found
    if name == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError("log.writers=wandb needs a package: pip install wandb")
    return registry.pick("log.writers", name, WRITERS)


class ServiceWriter(Writer):
    """Wraps a writer so that its errors do not end the run.

    A service may be unreachable, and metrics.jsonl has every row. say: is called with
    the first error, and at the end with the number of rows that were lost.
    """

    def __init__(self, writer: Writer, say: Callable[[str], None]) -> None:
        self.writer, self.say, self.lost = writer, say, 0
        self.faulty = False

    def write(self, row: Row) -> None:
        self.lost += not self._call(self.writer.write, row)

    def flush(self) -> None:
        self._call(self.writer.flush)

    def close(self) -> None:
        self._call(self.writer.close)
        if self.lost:
            rows = counted(self.lost, "row is", "rows are")
            self.say(f"{type(self.writer).__name__}: {rows} not written")

    def _call(self, function: Callable[..., None], *args: Any) -> bool:
        try:
            function(*args)
        except (UserError, RunError):
            raise
        except Exception as e:  # a service or a class from outside may raise anything
            if not self.faulty:
                reason = f"{type(e).__name__}: " + " ".join(str(e).split())
                name = type(self.writer).__name__
                self.say(
                    f"{name}: {reason}; the run continues, metrics.jsonl has all rows"
                )
            self.faulty = True
            return False
        return True


def make_writers(
    names: str, workdir: Any, step: int, say: Callable[[str], None] | None = None
) -> list[Writer]:
    """Open the writers in a list such as "jsonl,tensorboard".

    The first writer is always that of metrics.jsonl. say: for a resumed run; it is
    called with a message for each writer that cannot be opened, and the run continues
    without that writer. With say=None such a writer (wandb without a login) raises
    UserError. So does a file of the workdir that cannot be written, in any case.
    """
    writers: list[Writer] = []
    for name in dict.fromkeys(["jsonl", *registry.split_list(names)]):
        kind = find_writer(name)
        try:
            writers.append(kind(workdir, step))
        except (UserError, RunError):
            raise
        except Exception as e:  # a service or a class from outside may raise anything
            if isinstance(e, OSError) and name in FILES:
                raise UserError(f"--workdir={workdir} cannot be written: {e}") from e
            reason = f"{type(e).__name__}: " + " ".join(str(e).split())
            why = f"log.writers: {name!r} cannot begin: {reason}"
            if say is None:
                raise UserError(why) from e
            say(f"{why}; the run continues without it")
    return writers


class ProgressWriter(Writer):
    """Shows loss, tokens/s and time left: a bar on a terminal, otherwise plain lines.

    budget: seconds after which a run ends; budget/share in a row is the share spent.
    """

    def __init__(
        self,
        total: int,
        step: int,
        seconds: float = 10.0,
        budget: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.first, self.seconds = total, step, seconds
        self.budget, self.now = budget, now
        self.begun = self.printed_at = now()
        self.paced: tuple[int, float] | None = None  # step and time of the first row
        # With a budget, leave out tqdm's own time left: it is based on the steps.
        form = None
        if budget is not None:
            form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"
        self.bar = tqdm(
            total=total, initial=step, unit="step", disable=None, bar_format=form
        )

    def write(self, row: Row) -> None:
        if "train/loss" not in row:
            scores = {k: v for k, v in row.items() if k.startswith("eval/")}
            text = "  ".join(f"{k} {v:.4f}" for k, v in scores.items())
            self.say(f"step {row['step']}: {text}")
            return
        rate = row.get("perf/tokens_per_second", 0.0)
        now = self.now()
        left = f"{self._left(row, now) / 60:.1f} min left"
        if not self.bar.disable:
            postfix = f"loss={row['train/loss']:.3f}, tok_s={rate:,.0f}"
            self.bar.set_postfix_str(postfix + f", {left}" * (self.budget is not None))
            self.bar.update(row["step"] - self.bar.n)
        elif now - self.printed_at >= self.seconds or row["step"] in (
            self.first + 1,
            self.total,
        ):
            self.printed_at = now
            text = f"step {row['step']}/{self.total}  loss {row['train/loss']:.4f}"
            if rate:  # the first step is mostly compilation
                text += f"  {rate:,.0f} tokens/s  {left}"
            self.say(text)

    def _left(self, row: Row, now: float) -> float:
        """Return the seconds until the last step or the end of the budget.

        The pace is measured since the first row, because compilation came before it; at
        the first row it is that row's own.
        """
        step, (first, begun) = row["step"], self.paced or (self.first, self.begun)
        pace = (now - begun) / (step - first)
        if self.paced is None:
            self.paced, pace = (step, now), row.get("perf/step_seconds", pace)
        left = pace * (self.total - step)
        if self.budget is None:
            return left
        return min(left, (1 - row["budget/share"]) * self.budget)

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
