# SPDX-License-Identifier: Apache-2.0
"""Sentence similarity: correlations, their intervals, tables and refusals."""

import json

import numpy as np
import pytest

from bertjax import UserError, evaluate
from bertjax.inference import embed_texts
from bertjax.scoring import sts
from bertjax.scoring.confidence import correlation_half_width
from bertjax.tasks import metrics

ROWS = [
    ("The name of a list.", "The name of a string.", "4.2"),
    ("A function returns an object.", "An object is returned.", "5"),
    ("Import the module.", "A string of words.", "0.4"),
    ("The value is a number.", "Numbers are values.", "3.8"),
    ("The statement is executed.", "A class has methods.", "1"),
    ("The name of a list.", "A module has a name.", "1"),
]
HEADLESS = [*ROWS]  # for a file without a header
METRICS = {"pearson": metrics.pearson, "spearman": metrics.spearman}


def write(file, rows=ROWS, head=("sentence1", "sentence2", "score")):
    lines = [head, *rows] if head else rows
    file.write_text("".join("\t".join(line) + "\n" for line in lines))
    return file


def test_as_the_vectors_of_embed_say(trained, tmp_path, capsys):
    """Scores are those of sentence-transformers' EmbeddingSimilarityEvaluator."""
    scipy_stats = pytest.importorskip("scipy.stats")
    table = write(tmp_path / "sts.tsv")
    given = [f"--model={trained}", "--what=sts", f"--text={table}"]
    assert evaluate.main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = embed_texts.open_embedder(str(trained), "--model")
    first, second = (model.embed([row[i] for row in ROWS])[0] for i in (0, 1))
    cosine = (first * second).sum(1)
    cosine /= np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    gold = [float(row[2]) for row in ROWS]
    for name, function in (("pearson", "pearsonr"), ("spearman", "spearmanr")):
        wanted = getattr(scipy_stats, function)(gold, cosine)[0]
        assert found[f"{name}_cosine"] == pytest.approx(wanted, abs=1e-5)
        assert found[f"{name}_cosine_ci95"] > 0
    assert (found["pairs"], found["step"]) == (6, 12)
    assert found["model"] == str(trained)
    # A table without a header, as a named set, with columns by number.
    bare = write(tmp_path / "bare.tsv", head=None)
    columns = ["--columns=1,2", "--label=3"]
    evaluate.main([*given[:2], f"--text=dev={bare}", *columns])
    said = capsys.readouterr().out
    assert said.startswith("dev at step 12:\n") and "spearman_cosine_ci95" in said


def test_a_model_for_inner_products_is_scored_by_them(capsys):
    vectors = np.array([[3.0, 0], [0, 1], [1, 1], [2, 0], [0, 5], [1, 0]], np.float32)

    class Model:
        class how:
            longest, dot = 9, True

        def embed(self, texts, batch_size):
            assert texts == ["a", "b", "c", "d", "e", "f"]
            return vectors, 2

    scores = np.array([3.0, 2.0, 1.0])
    found = sts.correlations(Model(), [*"abcdef"], scores, 4)  # products 6, 5, 1
    assert found["spearman_dot"] == 1 and "spearman_cosine" not in found
    assert found["pearson_dot"] == pytest.approx(metrics.pearson(
        np.array([6.0, 5, 1]), np.array([3.0, 2, 1])))  # fmt: skip
    assert capsys.readouterr().err == "2 texts cut at 9 tokens\n"


@pytest.mark.parametrize("name", METRICS)
def test_intervals_of_correlations(name):
    """They equal the jackknife's, also with ties, and have the right coverage."""
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 6, 400).astype(float)
    seen = gold + rng.gumbel(0, 2, 400)
    left = [METRICS[name](np.delete(seen, i), np.delete(gold, i)) for i in range(400)]
    jackknife = 1.966 * np.sqrt(399) * np.std(left)  # Student's t, 399 d.o.f.
    assert correlation_half_width(seen, gold, name == "spearman") == pytest.approx(
        jackknife, rel=0.03
    )
    covered, rho = 0, 0.7
    truth = rho if name == "pearson" else 6 / np.pi * np.arcsin(rho / 2)
    for _ in range(400):
        a, b = rng.normal(0, 1, (2, 150))
        b = rho * a + np.sqrt(1 - rho**2) * b
        width = correlation_half_width(a, b, name == "spearman")
        covered += abs(METRICS[name](a, b) - truth) <= width
    assert 0.90 < covered / 400 < 0.98


def test_where_there_is_no_interval():
    one = np.ones(4)
    assert correlation_half_width(one, np.arange(4.0), False) is None
    assert correlation_half_width(np.arange(1.0), np.arange(1.0), True) is None


@pytest.mark.parametrize(
    "more, rows, words",
    [
        ([], None, "--what=sts needs --text=FILE"),
        (["--columns=a"], ROWS, "--columns=a has 1 name: give two, TEXT,TEXT_PAIR"),
        (["--columns=a,sentence2"], ROWS, r"--columns: TEXT='a' is unknown"),
        (["--label=scor"], ROWS, "--label='scor' is unknown.*'score'"),
        ([], HEADLESS, "give their numbers, for instance --columns=1,2 --label=3$"),
        (["--variant=within_word"], ROWS, "--variant has no effect with --what=sts"),
        ([], [("a", "b", "high")], r"sts.tsv:2: the score 'high' has to be"),
        (
            [],
            [("a", "b", "2"), ("c", "d", "2.0")],
            "--text=.*: every row has the score",
        ),
    ],
)
def test_what_is_refused(trained, tmp_path, more, rows, words):
    given = [f"--model={trained}", "--what=sts", *more]
    if rows:
        head = () if rows is HEADLESS else ("sentence1", "sentence2", "score")
        given += [f"--text={write(tmp_path / 'sts.tsv', rows, head)}"]
    with pytest.raises(UserError, match=words):
        evaluate.main(given)
