# SPDX-License-Identifier: Apache-2.0
"""Drawings of a page's script, in a browser, or in node with a minimal DOM."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from pages import make_probes, make_run, some_rows
from test_score_files import make_sweep

from bertjax.reporting import page, read_runs, score_files

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
TOKENS = ["[CLS]", "the", "<b>", "[SEP]"]
LAYERS, HEADS = 2, 3
CURVE = r'<path class="curve c\d[^>]* d="(M[^"]+)"'


def attention():
    """Return weights that are all different: u8 [LAYERS, HEADS, 4, 4]."""
    n = len(TOKENS)
    weights = np.arange(LAYERS * HEADS * n * n, dtype=np.uint8)
    return weights.reshape(LAYERS, HEADS, n, n)


@pytest.fixture
def written(tmp_path):
    """A page with two runs, a sweep, probes, a blank and a sentence."""
    folders = [
        make_run(tmp_path / n, some_rows(shift=s)) for n, s in (("a", 0), ("<b>", 1))
    ]
    folders.append(make_sweep(tmp_path / "swept"))
    guess = {"token": "<b>", "probability": 0.5}
    blank = {"run": "a", "text": "the [MASK]", "rows": [(10, [[guess]])]}
    told = {"token": "the", "probability": 0.25, "right": False, "guesses": [guess]}
    view = {"run": "a", "step": 30, "text": "the <b>", "tokens": [told]}
    maps = base64.b64encode(attention().tobytes()).decode()
    view["attention"] = {"layers": LAYERS, "heads": HEADS, "tokens": TOKENS}
    view["attention"]["weights"] = maps
    text = page.write_page(
        read_runs.read_runs([*map(str, folders)], print),
        blanks=[blank],
        views=[view],
        probes=[score_files.read_probe(str(make_probes(tmp_path / "probes.json")))],
    )
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    return file


FIGURES = 5 + 1 + 2  # runs, sweep, probes
CURVES = 2 * 5 + 4 + 5 + 2


def test_by_node(written):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    script = Path(__file__).with_name("dom.js")
    done = subprocess.run(
        [node, str(script), str(written)], capture_output=True, text=True, timeout=60
    )
    assert not done.stderr, done.stderr
    drawn = json.loads(done.stdout)
    assert len(drawn["plots"]) == FIGURES
    curves = re.findall(CURVE, "".join(drawn["plots"]))
    assert len(curves) == CURVES and not re.search("NaN|undefined", done.stdout)
    (view,) = drawn["views"]
    n, weights = len(TOKENS), attention() / 255
    assert view["selects"] == [[1, 2], [1, 2, 3, "mean"]]
    assert view["texts"] == [token for token in TOKENS for _ in range(2)]
    assert view["said"] == f"the looks at <b>: {weights[0, 0, 1, 2]:.3f}"
    for svg, wanted in (
        (view["svg"], weights[0, 0]),
        (view["mean"], weights[1].mean(0)),
    ):
        rects = re.findall(r'<rect[^>]* fill-opacity="([^"]+)" data-q="(\d)"', svg)
        assert [int(q) for _, q in rects] == [i // n for i in range(n * n)]
        shown = np.array([float(opacity) for opacity, _ in rects]).reshape(n, n)
        np.testing.assert_allclose(shown, 0.04 + 0.96 * wanted, atol=6e-4)


@pytest.mark.slow
def test_in_a_browser(written):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--virtual-time-budget=3000", "--enable-logging=stderr"),
            f"--user-data-dir={written.parent / 'profile'}",
            f"file://{written}",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "CONSOLE" not in done.stderr, done.stderr  # errors or blocked requests
    drawn = re.findall(CURVE, done.stdout)
    assert done.stdout.count("<figure") == FIGURES and len(drawn) == CURVES
    assert "NaN" not in "".join(drawn)
    _, attended = done.stdout.split('<div class="attention"', 1)
    attended, _ = attended.split("</svg>", 1)
    assert attended.count("<rect") == len(TOKENS) ** 2
    assert attended.count("<select") == 2
    assert attended.count("<option") == LAYERS + HEADS + 1  # 1: the mean
    assert attended.count("&lt;b&gt;</text>") == 2
