# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring checkpoints with orbax; manifest.py describes the layout.

A save is written to checkpoints/saving-<step>, gets its manifest, and is then renamed
to its plain number. So a kill at any moment leaves no number on a half-written
checkpoint. A bucket has no atomic rename of directories, so there a save is written
under its number, and is complete once it has its manifest.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from bertjax import RunError, UserError
from bertjax.checkpoints import manifest
from bertjax.parallel.sharding import leaves_of, path_name
from bertjax.parallel.watch import is_broken_collective
from bertjax.storage.atomic import is_remote
from bertjax.training.frozen import join
from bertjax.training.state import State, complete, in_pairs, out_of_pairs

LEAST_SLICE = 2**20  # the fewest bytes of an array that one of several devices writes


class Checkpoints:
    """The checkpoints of one workdir, saved in the background.

    Raises UserError if WORKDIR/checkpoints is a file.
    """

    def __init__(self, workdir: Any, keep_last: int, keep_every: int | None) -> None:
        self.workdir = workdir
        self.folder = workdir / "checkpoints"
        self.keep_last, self.keep_every = keep_last, keep_every
        self.primary = jax.process_index() == 0
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is not a directory")
        hush()
        self.saver = ocp.AsyncCheckpointer(_make_writer())
        self.thread = ThreadPoolExecutor(1)
        self.saving: Future[None] | None = None
        if self.primary and self.folder.is_dir():
            for left in manifest.unfinished(workdir):  # left by a killed run
                _remove(left)

    def save(
        self,
        step: int,
        state: State | dict[str, Any],
        meta: dict[str, Any],
        keep: Collection[int | None] = (),
    ) -> None:
        """Begin to save a state, or parts of one by name; return when it is copied.

        keep: steps of checkpoints to keep in addition to the newest ones. Raises
        RunError if this or the previous checkpoint cannot be written.
        """
        self.wait()
        parts = state.parts() if isinstance(state, State) else state
        remote = is_remote(self.folder)
        temporary = self.folder / (str(step) if remote else f"saving-{step}")
        try:
            if self.primary:
                if remote and temporary.exists():
                    self._delete(step)
                temporary.mkdir(parents=True, exist_ok=True)
                text = json.dumps({"format": manifest.FORMAT, "step": step, **meta})
                (temporary / manifest.META).write_text(text)
            args = ocp.args.PyTreeSave(parts)
            self.saver.save(temporary / "state", args=args, force=True)
        except (OSError, ValueError) as e:
            raise self._error(f"cannot write {self.folder}/{step}", e) from e
        self.saving = self.thread.submit(self._finish, step, temporary, keep)

    def wait(self) -> None:
        """Wait for the save in progress. Raises RunError if it could not be written."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def _finish(self, step: int, temporary: Any, keep: Collection[int | None]) -> None:
        try:
            self.saver.wait_until_finished()
            if self.primary:
                manifest.write_manifest(temporary)
                if temporary.name != str(step):
                    if (self.folder / str(step)).exists():
                        # In a notebook an interrupted run may have saved it meanwhile.
                        self._delete(step)
                    temporary.rename(self.folder / str(step))
        except BaseException as e:  # wait raises it in the loop's thread
            if self.primary:
                with contextlib.suppress(OSError):
                    (temporary / manifest.MANIFEST).unlink(missing_ok=True)
                    _remove(temporary)
            raise self._error(f"cannot write {self.folder}/{step}", e) from e
        what = f"cannot delete an older checkpoint in {self.folder}"
        try:  # this checkpoint is complete even if older ones cannot be deleted
            for old in manifest.steps(self.workdir)[: -self.keep_last]:
                every = self.keep_every and old % self.keep_every == 0
                if self.primary and old not in keep and not every:
                    self._delete(old)
        except BaseException as e:
            raise self._error(what, e) from e

    def _error(self, what: str, error: BaseException) -> BaseException:
        if is_broken_collective(error):  # another process is gone: watch.py says which
            return error
        reason = " ".join(str(error).split())
        if code := re.search(r"os_error_code='(\d+)'", reason):  # TensorStore's
            reason = os.strerror(int(code[1]))
        if len(reason) > 300:  # the cause is at the end
            reason = f"{reason[:100]} ... {reason[-180:]}"
        return RunError(f"{what}: {reason}")

    def _delete(self, step: int) -> None:
        doomed = self.folder / str(step)
        if is_remote(doomed):
            (doomed / manifest.MANIFEST).unlink(missing_ok=True)
        else:
            doomed = doomed.rename(self.folder / f"deleting-{step}")
        _remove(doomed)

    def restore(self, step: int, abstract: State) -> State:
        """Restore a state; abstract: its shapes, dtypes and shardings.

        Raises UserError if the checkpoint is of another model or optimizer.
        """
        folder = self.folder / str(step)
        saved = _tree(folder)
        wanted = abstract.parts()
        item = {k: v for k, v in wanted.items() if k in saved}
        theirs, ours = _joined_shapes(saved), _joined_shapes(wanted)
        for name in sorted({*theirs, *ours}):
            if theirs.get(name) != ours.get(name):
                raise UserError(
                    f"{folder} holds another model: {name} has shape "
                    f"{theirs.get(name)} there, {ours.get(name)} here"
                )
        if _shapes(saved["params"]) != _shapes(abstract.params):
            raise UserError(
                f"{folder} was trained with another optim.freeze, and has moments of "
                "what was not frozen then: keep it, or begin another workdir with "
                f"--config.init_from={self.workdir}"
            )
        moments, first = _shapes(saved["opt_state"]), in_pairs(abstract.opt_state)
        is_first = moments != _shapes(abstract.opt_state) and moments == _shapes(first)
        if is_first:
            item["opt_state"] = first
        elif moments != _shapes(abstract.opt_state):
            raise UserError(
                f"{folder} has the state of another optimizer: keep "
                "optim.name and optim.clip, or begin another workdir with "
                f"--config.init_from={self.workdir}"
            )
        args = ocp.checkpoint_utils.construct_restore_args(item)
        parts = _read(folder, item, args, partial=item.keys() != saved.keys())
        if is_first:
            parts["opt_state"] = out_of_pairs(parts["opt_state"])
        return complete(parts, abstract)

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps."""
        self.wait()
        for later in manifest.steps(self.workdir):
            if self.primary and later > step:
                self._delete(later)

    def close(self) -> None:
        """Finish the save in progress and stop."""
        self.wait()
        self.saver.close()
        self.thread.shutdown()


def _make_writer() -> ocp.PyTreeCheckpointHandler:
    """Create the handler that writes a state: each replica writes a slice of an array.

    Only large arrays are sliced, because slicing compiles a program for each shape and
    device, which takes longer than to write a small array whole.
    """
    types = ocp.type_handlers
    arrays = types.ArrayHandler(min_slice_bytes_for_replica_parallel=LEAST_SLICE)
    scalars = types.ScalarHandler()
    registry = types.create_type_handler_registry(
        (jax.Array, arrays),
        (np.ndarray, types.NumpyHandler()),
        *((kind, scalars) for kind in (int, float, np.number)),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def hush() -> None:
    """Prevent orbax and tensorstore from printing errors that they also raise."""

    def ignore_closed_loops(raised: Any) -> None:
        # This one comes from writes in progress.
        if str(raised.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(raised)

    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    sys.unraisablehook = ignore_closed_loops


def _tree(folder: Any) -> Any:
    """Return the metadata of a checkpoint's state by part."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.metadata(folder / "state").item_metadata.tree


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in leaves_of(params).items()}


def _joined_shapes(parts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a whole model's parameters by path; parts: State.parts."""
    shapes, frozen = _shapes(parts["params"]), _shapes(parts.get("frozen", {}))
    for name, shape in frozen.items():
        if name in shapes:  # the rest of axis 0 is trained
            shape = (shape[0] + shapes[name][0], *shape[1:])
        shapes[name] = shape
    return shapes


def describe(folder: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's parameters by path, without reading them."""
    return _joined_shapes(_tree(folder))


def has_average(folder: Any) -> bool:
    """Return True if a checkpoint has an average of the parameters."""
    return "ema" in _tree(folder)


def restore_params(folder: Any, abstract: Any = None, part: str = "params") -> Any:
    """Restore only the parameters, or their average (part="ema").

    With `abstract` (a part of the tree: shapes and shardings) they are restored to its
    devices, otherwise all of them as numpy arrays. The result includes the parameters
    that the run did not train.
    """
    tree = _tree(folder)
    saved = {name: tree[name] for name in (part, "frozen") if name in tree}
    if abstract is not None and "frozen" not in saved:
        args = ocp.checkpoint_utils.construct_restore_args(abstract)
        return _read(folder, {part: abstract}, {part: args}, partial=True)[part]
    item = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), saved)
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    parts = _read(folder, item, args, partial=True)
    params = join(parts[part], parts["frozen"]) if "frozen" in parts else parts[part]
    if abstract is None:
        return params
    return place(abstract, leaves_of(params).__getitem__)


def place(abstract: Any, read: Callable[[str], np.ndarray]) -> Any:
    """Place numpy arrays on devices with the shapes, dtypes, shardings of `abstract`.

    read: returns an array by its path.
    """

    def one(path: Any, leaf: Any) -> jax.Array:
        values = read(path_name(path))
        return jax.make_array_from_callback(
            leaf.shape,
            leaf.sharding,
            lambda index: values[index].astype(leaf.dtype, copy=False),
        )

    return jax.tree_util.tree_map_with_path(one, abstract)


def _read(folder: Any, item: Any, args: Any, partial: bool) -> Any:
    """Read a state, or parts of one; args: ocp.RestoreArgs of each leaf of `item`."""
    args = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=partial)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(folder / "state", args=args)


def warm_start(
    folder: Any,
    abstract: Any,
    say: Callable[[str], None],
    part: str = "params",
    fresh: tuple[str, ...] = (),
    of_classes: tuple[str, ...] = (),
    reads: bool = True,
) -> Any:
    """Restore the parameters that match those of another model (init_from).

    folder: a checkpoint, or an object with describe() -> {path: shape} and read(path).
    part: "params", or "ema" for the average. Returns the matching part of the tree, and
    reports missing and unexpected parameters through `say`. Paths that begin with one
    of `fresh` count as missing; so do paths that begin with one of `of_classes` if the
    number of classes differs. reads: whether to read the values; otherwise the part is
    that of `abstract`. Raises UserError for other shapes, and if one encoder has
    parameters that the other lacks, the pooler aside.
    """
    foreign = hasattr(folder, "describe")
    theirs = dict(folder.describe() if foreign else describe(folder))
    here = _shapes(abstract)
    theirs = {k: v for k, v in theirs.items() if not k.startswith(fresh)}
    for name in sorted(theirs.keys() & here.keys()):
        if theirs[name] != here[name]:
            if name.startswith(of_classes):
                say(f"init_from={folder}: {name} is of {theirs.pop(name)[-1]} classes")
                continue
            raise UserError(
                f"init_from={folder}: {name} has shape {theirs[name]} there, "
                f"{here[name]} here"
            )
    missing = sorted(here.keys() - theirs.keys())
    unexpected = sorted(theirs.keys() - here.keys())
    lost, odd = (
        ", ".join(n for n in some if n.startswith("encoder/") and "/pooler/" not in n)
        for some in (missing, unexpected)
    )
    if lost:
        raise UserError(f"init_from={folder} lacks {lost}")
    if odd:
        raise UserError(f"init_from={folder} has {odd}, the config has not")
    say(f"init_from={folder}: {len(here) - len(missing)} parameters matched")
    if missing:
        say(f"not in it, newly initialized: {', '.join(missing)}")
    if unexpected:
        say(f"in it, not used: {', '.join(unexpected)}")
    wanted = _without(abstract, missing)
    if not reads:
        return wanted
    return (
        place(wanted, folder.read) if foreign else restore_params(folder, wanted, part)
    )


def _without(tree: dict[str, Any], missing: list[str], prefix: str = "") -> Any:
    out = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            if kept := _without(value, missing, f"{prefix}{key}/"):
                out[key] = kept
        elif f"{prefix}{key}" not in missing:
            out[key] = value
    return out


def _remove(folder: Any) -> None:
    if is_remote(folder):
        folder.rmtree(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
