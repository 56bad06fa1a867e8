# SPDX-License-Identifier: Apache-2.0
"""From config values to stores, and the tokenizer that is trained on the way."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from bertjax import UserError
from bertjax.data.token_store import trained_tokenizer
from bertjax.data.token_store.prepare_data import check_inputs, prepare_data


@pytest.fixture
def config(tmp_path) -> dict:
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "dog", "ran", "tree", "house", "river"]
    for name in ("train.txt", "wiki.txt", "novels.txt"):
        lines = [" ".join(rng.choice(words, 8)).capitalize() + "." for _ in range(99)]
        (tmp_path / name).write_text("\n".join(lines) + f"\n\n{name}\n")
    return {
        "train": str(tmp_path / "train.txt"),
        "valid": f"wiki={tmp_path / 'wiki.txt'},novels={tmp_path / 'novels.txt'}",
        "vocab": "",
        "tokenizer_kind": "unigram",
        "vocab_size": 60,
        "lower_case": None,
        "cache": str(tmp_path / "cache"),
    }


def test_prepare_trains_builds_and_reuses(config, tmp_path):
    said: list[list[str]] = [[], []]
    made = [prepare_data(**config, max_line_bytes=999, say=s.append) for s in said]
    assert [*made[0].valid] == ["wiki", "novels"]
    for a, b in zip(
        *([*p.parts.values(), *p.valid.values()] for p in made), strict=True
    ):
        assert a.content_hash == b.content_hash and a.meta["documents"] == 2
    assert made[0].tokenizer.identity == made[1].tokenizer.identity
    assert said[0][0] == "training a unigram tokenizer of 60 pieces"
    assert said[0][1] == "how it fits a sample of the text that it was trained on:"
    assert re.fullmatch(
        r"  train: [\d.]+% of 3,015 characters known, 1\.\d\d tokens a word \(793\)",
        said[0][2],
    )
    assert said[1] == said[0][3:]
    # Users can name the trained tokenizer as data.vocab.
    found = next((tmp_path / "cache").glob("tokenizer-*"))
    again = prepare_data(
        **{**config, "vocab": str(found)}, max_line_bytes=999, say=lambda _: None
    )
    assert again.parts["train"].path == made[0].parts["train"].path
    twice, told = {**config, "train": f"{config['train']},{config['train']}"}, []
    made = prepare_data(**{**twice, "vocab": str(found)}, say=told.append)
    assert made.parts["train"].meta["documents"] == 4
    assert f"data.train reads {config['train']} 2 times, so its text" in told[0]


def test_workers_do_not_run_the_script_that_asks_for_them(config, tmp_path):
    """A script without `if __name__ == "__main__"`, as in docs/python_api.md, used to
    fail with "a worker was killed (out of memory?)" for any text over 4 MB."""
    script = f"""
import sys
from bertjax.data.token_store import encoding, prepare_data

print("run", sys.modules["__main__"].__file__ == __file__, __spec__)
encoding.SMALL = 0
prepare_data.prepare_data(**{config!r}, workers=2)
print("still", sys.modules["__main__"].__file__ == __file__)
"""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, tmp_path / "script.py"]
    how = dict(capture_output=True, text=True, timeout=60)
    done = subprocess.run(command, check=False, **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run True None") == 1 and "still True" in done.stdout
    assert "train: " in done.stdout


def test_a_damaged_trained_tokenizer_is_named(config, tmp_path):
    prepare_data(**config, max_line_bytes=999, say=lambda _: None)
    found = next((tmp_path / "cache").glob("tokenizer-*"))
    (found / "spiece.model").write_bytes(b"")
    with pytest.raises(UserError, match=str(found)):
        prepare_data(**config, max_line_bytes=999, say=lambda _: None)
    shutil.rmtree(found)
    prepare_data(**config, max_line_bytes=999, say=lambda _: None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": "nosuch.txt"}, ["data.train", "nosuch.txt"]),
        ({"valid": "a=nosuch.txt"}, ["data.valid", "nosuch.txt"]),
        ({"vocab": "nosuch.txt"}, ["data.vocab", "nosuch.txt"]),
        ({"tokenizer_kind": "unigrm"}, ["did you mean 'unigram'"]),
        ({"cache": "train.txt"}, ["data.cache=train.txt"]),
        ({"segmenter": "jeba"}, ["data.segmenter='jeba' is unknown"]),
        ({"segmenter": "jieba:nosuch.txt"}, ["data.segmenter=jieba"]),
    ],
)
def test_inputs_are_checked_before_anything_is_built(
    change, words, config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    check_inputs(**config)
    with pytest.raises(UserError) as caught:
        check_inputs(**{**config, **change})
    assert all(w in str(caught.value) for w in words)
    assert not (tmp_path / "cache").exists()


# The tokenizer's sample of a mixture


def test_a_sample_has_the_shares_of_alpha():
    rng = np.random.default_rng(0)
    sizes = {"en": 40_000, "sw": 4_000, "gd": 400}
    names = rng.permutation(np.repeat([*sizes], [*sizes.values()]))
    texts = [(name, name * int(rng.integers(1, 9))) for name in names]
    for alpha in (1.0, 0.7, 0.3, 0.0):
        found = trained_tokenizer.sample_mixture(texts, alpha, characters=30_000)
        got = np.array([sum(len(t) for t in found if t[:2] == n) for n in sizes])
        whole = np.array([sum(len(t) for n, t in texts if n == name) for name in sizes])
        want = whole**alpha / (whole**alpha).sum()
        assert 28_000 < got.sum() <= 30_000
        np.testing.assert_allclose(got / got.sum(), want, rtol=0.05, atol=0.002)


def test_a_sample_of_little_text_and_of_none():
    texts = [("a", "xx")] * 3 + [("b", "yyy")]
    assert sorted(trained_tokenizer.sample_mixture(texts, 1.0)) == [
        "xx",
        "xx",
        "xx",
        "yyy",
    ]
    assert trained_tokenizer.sample_mixture([], 0.5) == []


def test_a_sample_by_weights():
    texts = [("en", "x" * 50)] * 900 + [("sw", "y" * 50)] * 100
    found = trained_tokenizer.sample_mixture(texts, None, 10_000, {"sw": 3, "en": 1})
    share = sum(map("y".__eq__, "".join(found))) / len("".join(found))
    assert 0.74 < share < 0.76
    for weights, words in (
        ({"en": 1}, "no weight for sw"),
        ({"en": 1, "sw": 1, "sv": 1}, "'sv'"),
    ):
        with pytest.raises(UserError, match=rf"data\.weights.*{words}"):
            trained_tokenizer.sample_mixture(texts, None, 10_000, weights)


@pytest.mark.parametrize("named", [True, False])
def test_weights_of_components_and_of_groups(config, tmp_path, named, monkeypatch):
    """A tokenizer's sample uses the names of the stores."""
    records = [{"text": "abc " * 9, "lang": "en"}] * 30 + [
        {"text": "xyz " * 9, "lang": "sw"}
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    config |= {"train": f"{'web=' * named}{path}", "group_field": "lang", "valid": ""}
    prefix = "web." * named
    weights = {f"{prefix}en": 1.0, f"{prefix}sw": 1.0}
    seen: list[str] = []
    train = trained_tokenizer.train_tokenizer

    def spy(texts, *args):
        seen[:] = texts
        return train(seen, *args)

    monkeypatch.setattr(trained_tokenizer, "train_tokenizer", spy)
    said: list[str] = []
    made = prepare_data(**config, vocab_weights=weights, say=said.append)
    assert [*made.parts] == [*weights]
    letters = "".join(seen)
    assert letters.count("x") == letters.count("a") > 0
    assert [x.split(":")[0].strip() for x in said[2:4]] == [*weights]


def test_alpha_trains_another_tokenizer(config, tmp_path):
    (tmp_path / "few.txt").write_text("Qqq zzz qqq zz.\n" * 3)
    config["train"] = f"many={config['train']},few={tmp_path / 'few.txt'}"
    plain, flat, again = (
        prepare_data(**config, vocab_alpha=alpha, say=lambda _: None).tokenizer
        for alpha in (None, 0.0, 0.0)
    )
    assert flat.identity == again.identity != plain.identity
