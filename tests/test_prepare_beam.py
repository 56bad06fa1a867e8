# SPDX-License-Identifier: Apache-2.0
"""launch/prepare_beam.py on Beam's DirectRunner makes the stores of bertjax.prepare."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("apache_beam")

from bertjax import UserError
from bertjax.data.token_store import pieces, prepare_data


@pytest.fixture
def launch():
    path = Path(__file__).parent.parent / "launch/prepare_beam.py"
    spec = importlib.util.spec_from_file_location("prepare_beam", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_pipeline_makes_the_same_stores(launch, tmp_path, monkeypatch, capsys):
    words = ["the", "cat", "sat", "on", "a", "mat"]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab))
    for name in ("a", "b"):
        lines = [" ".join(words[i % 6 : i % 6 + 3]) + ". " + name for i in range(400)]
        text = "\n".join(x + "\n" * (i % 7 == 0) for i, x in enumerate(lines))
        (tmp_path / f"{name}.txt").write_text(text)
    given = {
        "train": f"{tmp_path}/a.txt",
        "valid": f"{tmp_path}/b.txt",
        "vocab": f"{tmp_path}/vocab.txt",
        "cache": f"{tmp_path}/beam",
    }
    monkeypatch.setattr(pieces.cut, "__defaults__", (2000,))
    flags = [f"--config.data.{key}={value}" for key, value in given.items()]
    command = ["--config", "bert.py:smoke", *flags, "--runner=DirectRunner"]
    assert launch.main(command) == 0
    made = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert launch.main(command) == 0  # again: nothing is left to do
    assert "0 pieces to encode, 0 stores" in capsys.readouterr().err

    given |= {"tokenizer_kind": "unigram", "vocab_size": 60, "lower_case": None}
    given["cache"] = f"{tmp_path}/here"
    want = prepare_data.prepare_data(**given, workers=1, say=lambda line: None)
    stores = [*want.parts.values(), *want.valid.values()]
    assert [Path(m).name for m in made] == [s.path.name for s in stores]
    for path, store in zip(made, stores, strict=True):
        for file in store.path.iterdir():
            if file.name != "meta.json":
                assert (Path(path) / file.name).read_bytes() == file.read_bytes()
    assert not list((tmp_path / "beam").glob("parts-*"))
    with pytest.raises(UserError, match=r"data\.train"):
        launch.main([*command, "--config.data.train=no.txt"])
    for flag in ("--merge=2", "--report"):
        with pytest.raises(UserError, match=f"{flag[:5]}.* is of bertjax.prepare"):
            launch.main([*command, flag])
