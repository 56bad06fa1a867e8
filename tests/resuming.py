# SPDX-License-Identifier: Apache-2.0
"""Check that runs that lost their newest checkpoint resume to the same bits."""

import shutil

import jax
from conftest import read_rows, succeeded, timeless

from bertjax.checkpoints import manifest
from bertjax.checkpoints.manager import restore_params


def newest(workdir):
    """Return the newest checkpoint of a workdir."""
    return workdir / "checkpoints" / str(manifest.steps(workdir)[-1])


def parameters(workdir, part="params"):
    """Return the parameters of the newest checkpoint as {path: bytes}."""
    params = restore_params(newest(workdir), part=part)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): leaf.tobytes() for path, leaf in leaves}


def check_same_end(workdir, whole):
    """Check that two runs have the same metrics and the same final parameters."""
    assert timeless(read_rows(workdir)) == timeless(read_rows(whole))
    assert parameters(workdir) == parameters(whole)


def without_last(whole, workdir):
    """Copy a run as if it was killed before it wrote its newest checkpoint."""
    shutil.copytree(whole, workdir)
    shutil.rmtree(newest(workdir))
    return workdir


def check_resuming(command, arguments, whole, workdir):
    """Copy `whole`, a run of these arguments, to `workdir`, resume it there from its
    last checkpoint but one, and check that it ends as `whole` did; return its log."""
    without_last(whole, workdir)
    said = succeeded(command("train", *arguments, f"--workdir={workdir}")).stderr
    assert f"resuming after step {manifest.steps(whole)[-2]}" in said
    check_same_end(workdir, whole)
    return said
