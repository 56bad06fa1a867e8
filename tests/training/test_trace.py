# SPDX-License-Identifier: Apache-2.0
import shutil

import pytest
from conftest import read_rows, succeeded, timeless

from bertjax.training.trace import Trace

STAGES = ("embeddings", "qkv", "scores", "context", "attention_out", "mlp", "mlm_head")
STAGES += ("mlm_loss", "classes", "optimizer")


def traced(workdir):
    """Return the bytes of the only trace and the numbers of its updates."""
    from jax.profiler import ProfileData

    (file,) = (workdir / "profile").rglob("*.xplane.pb")
    lines = [x for p in ProfileData.from_file(str(file)).planes for x in p.lines]
    events = [e for line in lines for e in line.events if e.name == "train"]
    return file.read_bytes(), [dict(e.stats)["step_num"] for e in events]


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_a_trace_names_the_stages(command, arguments, trained, tmp_path):
    """The run ends before its trace does, and has the results of a run without one."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    shutil.rmtree(workdir / "checkpoints/12")
    arguments = [*arguments, "--config.profile.start=2", "--config.profile.steps=9"]
    done = succeeded(command("train", *arguments, f"--workdir={workdir}"))
    assert f"updates 10 to 11 are traced in {workdir}/profile" in done.stderr
    content, updates = traced(workdir)
    assert updates == [10, 11]
    assert [s for s in STAGES if f"/{s}/".encode() not in content] == []
    assert timeless(read_rows(workdir)) == timeless(read_rows(trained))


def test_a_trace_ends_after_its_updates(bucket, tmp_path):
    """It may go to an object store. Without a path or steps nothing is traced."""
    from etils import epath

    said = []
    path = epath.Path("gs://bucket/profile")
    with Trace(path, 5, start=1, steps=2, say=said.append) as trace:
        for step in range(5, 10):
            with trace.update(step, 1, ()):
                pass
            assert len(said) == (step > 7)
    assert said == ["updates 6 to 7 are traced in gs://bucket/profile"]
    assert traced(tmp_path / "bucket")[1] == [6, 7]
    for path, steps in ((None, 2), (tmp_path / "none", 0)):
        trace = Trace(path, 0, start=0, steps=steps, say=said.append)
        with trace, trace.update(0, 1, ()):
            pass
    assert len(said) == 1 and not (tmp_path / "none").exists()
