# SPDX-License-Identifier: Apache-2.0
"""A run in a bucket: trained, resumed, damaged, lengthened, evaluated and opened."""

from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from conftest import read_rows

import bertjax
from bertjax import UserError, evaluate, glue, sweep
from bertjax import config as c
from bertjax.checkpoints import manifest
from bertjax.training.trace import Trace
from bertjax.training.writer import TensorBoardWriter

RUN = "gs://bucket/run"


@pytest.fixture
def orbax_bucket(bucket, monkeypatch):
    """conftest's stand-in for a bucket, also for orbax, which opens buckets itself."""

    def patch(owner, name):
        whole = getattr(owner, name)

        def local(self, directory, *args, **kw):
            directory = str(directory).replace("gs://bucket", str(bucket))
            return whole(self, Path(directory), *args, **kw)

        monkeypatch.setattr(owner, name, local)

    patch(ocp.AsyncCheckpointer, "save")
    patch(ocp.Checkpointer, "restore")
    patch(ocp.Checkpointer, "metadata")
    return bucket


@pytest.mark.slow
def test_a_run_in_a_bucket(orbax_bucket, corpus, vocabulary, tmp_path, capfd):
    config = c.load_config("bert.py:smoke")
    config.data.train = str(corpus / "train.txt")
    config.data.valid, config.data.vocab = str(corpus / "valid.txt"), str(vocabulary)
    config.data.length, config.model.hidden_size = 32, 32
    config.data.cache = str(tmp_path / "cache")
    config.checkpoint.every = c.duration(steps=2)
    config.eval.every = c.duration(steps=3)
    config.eval.best = "auto"
    config.total = c.duration(steps=6)
    assert bertjax.fit(config, RUN) == 0
    capfd.readouterr()
    assert bertjax.fit(config, RUN) == 0
    assert "gs://bucket/run is done: step 6" in capfd.readouterr().err

    config.total = c.duration(steps=8)
    assert bertjax.fit(config, RUN, allow_config_change=True) == 0
    (orbax_bucket / "run/checkpoints/8/meta.json").write_text("{}")
    config.total = c.duration(steps=10)
    assert bertjax.fit(config, RUN, allow_config_change=True) == 0
    assert "checkpoints/8 is damaged: meta.json" in capfd.readouterr().err
    assert (orbax_bucket / "run/damaged/8").is_dir()
    assert read_rows(orbax_bucket / "run")[-1]["step"] == 10

    assert evaluate.main([f"--workdir={RUN}"]) == 0
    assert "mlm_loss" in capfd.readouterr().out
    model = bertjax.load(RUN)
    assert model.embed(["a text"]).shape == (1, model.cfg.hidden_size)


def test_what_goes_to_a_bucket_leaves_nothing_on_the_disk(
    bucket, tmp_path, monkeypatch
):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "disk"))
    run = manifest.as_path(RUN)
    writer = TensorBoardWriter(run, 0)
    writer.write({"step": 1, "loss": 2.0})
    writer.close()
    assert list((bucket / "run/tb").glob("events.*"))

    lines: list[str] = []
    trace = Trace(run / "profile", 0, start=0, steps=1, say=lines.append)
    with trace, trace.update(0, 1, ()):
        pass
    assert lines == ["updates 0 to 0 are traced in gs://bucket/run/profile"]
    assert list((bucket / "run/profile").rglob("*.xplane.pb"))
    assert not list((tmp_path / "disk").iterdir())


def test_other_kinds_of_urls_are_refused():
    with pytest.raises(UserError, match=r"file:///run cannot be reached"):
        manifest.as_path("file:///run")
    for command in (sweep, glue):
        with pytest.raises(UserError, match=r"--workdir=s3://b/run: give a directory"):
            command.main(["--config=finetune/classify.py", "--workdir=s3://b/run"])
