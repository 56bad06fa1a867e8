# SPDX-License-Identifier: Apache-2.0
import json
import os
from types import SimpleNamespace

import pytest

from bertjax import UserError
from bertjax.data.corpus import builtin
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.corpus.sources import parse_sources
from bertjax.storage import directories


def test_strings_and_comments_of_a_module_are_read():
    source = '"""The module."""\n# One line\n# goes on\n# to the third.\n'
    source += "class A:\n  def f():\n    'The method.'\nadd_newdoc(1, 'a', 'B.')\n"
    assert list(builtin._texts(source)) == [
        "The module.",
        "The method.",
        "a",
        "B.",
        "One line\ngoes on\nto the third.\n",
    ]
    assert list(builtin._texts("def broken(:\n")) == []


def make(i):
    letters = "".join(chr(97 + int(d)) for d in f"{i:04d}")
    return [
        " ".join(f"{letters}{chr(97 + k)}" for k in range(j, j + 12)) for j in (0, 9)
    ]


def test_near_duplicates_go_to_one_side():
    documents = [make(i) for i in range(300)]
    # Each copy has a new paragraph: it shares half of its shingles.
    copies = [[*make(i), make(1000 + i)[0]] for i in range(300)]
    train, valid = builtin.split(documents + copies)
    assert 6 <= len(valid) <= 60
    assert len(train) + len(valid) == 600
    first = {d[0] for d in train}
    assert not any(d[0] in first for d in valid)
    assert builtin.split(documents + copies) == (train, valid)


def test_paragraphs_of_train_leave_valid():
    documents = [make(i) for i in range(400)]
    _, valid = builtin.split(documents)
    shared = valid[0][0]
    # Long documents that are not near-duplicates but share a paragraph with valid.
    filler = [p for i in range(2000, 2020) for p in make(i)]
    train, valid = builtin.split([*documents, [shared, *filler]])
    inside = [any(shared in d for d in side) for side in (train, valid)]
    assert inside != [True, True]


@pytest.fixture
def small(monkeypatch):
    calls = []

    def documents(say):
        calls.append(1)
        return [make(i) for i in range(300)]

    monkeypatch.setattr(builtin, "_documents", documents)
    return calls


def test_it_is_made_once_and_read_as_a_source(small, tmp_path):
    said = []
    made = builtin.materialize(tmp_path, said.append)
    assert builtin.materialize(tmp_path, said.append) == made
    assert len(small) == 1 and "once" in said[0]
    assert sorted(os.listdir(tmp_path)) == ["builtin-docs"]
    meta = json.loads((tmp_path / "builtin-docs" / "meta.json").read_text())
    assert meta["files"]["train"]["documents"] > 250 and "python" in meta["versions"]
    found = {}
    for role, value in (("train", "builtin:docs"), ("train", "builtin:docs:valid")):
        (source,) = parse_sources(value, "data.train", role)
        assert made["hash"] in source.fingerprint(tmp_path)
        found[value] = [d.paragraphs for d in source.documents(Counts(), 1 << 20)]
    assert len(found["builtin:docs"]) == meta["files"]["train"]["documents"]
    assert sorted([*found["builtin:docs"], *found["builtin:docs:valid"]]) == sorted(
        make(i) for i in range(300)
    )


def test_what_is_unfinished_or_damaged_is_made_again(small, tmp_path, monkeypatch):
    made = builtin.materialize(tmp_path, str)
    with open(made["train"], "a") as file:
        file.write("x")
    assert builtin.materialize(tmp_path, str) == made and len(small) == 2
    (tmp_path / "builtin-docs" / "meta.json").write_text("{")
    monkeypatch.setattr(directories.os, "fsync", lambda _: 1 / 0)  # fail while writing
    with pytest.raises(ZeroDivisionError):
        builtin.materialize(tmp_path, str)
    assert builtin._read_meta(tmp_path / "builtin-docs") is None
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache"):
        builtin.materialize(tmp_path / "file" / "cache", str)


def test_only_base_dependencies_count(monkeypatch):
    asked = []

    def distribution(name):
        asked.append(name)
        return SimpleNamespace(version="1", files=[], metadata={})

    monkeypatch.setattr(builtin.importlib.metadata, "distribution", distribution)
    files = builtin._python_files()
    assert asked and not {"torch", "transformers", "pytest", "libtpu"} & set(asked)
    assert files and not any("site-packages" in f for f in files)
    assert files == builtin._python_files()
