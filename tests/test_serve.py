# SPDX-License-Identifier: Apache-2.0
"""launch/serve.py: a client asks, what convert wrote answers."""

import http.client
import importlib.util
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent / "serving"))
import small_served as small

from bertjax.inference.embed_texts import make_embedder
from bertjax.inference.fill_blanks import fill_texts
from bertjax.serving.export_model import Options, export_model

ROOT = Path(__file__).parents[1]


@contextmanager
def serving(folder, environment, *more):
    """Run the service; yield ask(path, body) -> (status, answer)."""
    command = [
        sys.executable,
        "launch/serve.py",
        f"--model={folder}",
        "--port=0",
        *more,
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    assert line.startswith("serving http://127.0.0.1:"), line
    root = line.split()[1].removesuffix("/predict")

    def ask(path, body=None):
        data = None if body is None else body.encode()
        try:
            with urllib.request.urlopen(root + path, data, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    try:
        yield ask
    finally:
        process.terminate()
        assert process.wait(60) == 0


def predict(ask, texts):
    status, answer = ask("/predict", json.dumps({"texts": texts}))
    assert status == 200, answer
    return answer["answers"]


def test_blanks_by_jax_alone(vocabulary, environment, tmp_path):
    """The same guesses as fill_mask's; clients at once; what is wrong is said."""
    model = small.small_model(vocabulary)
    sizes = dict(batch_sizes=[4], lengths=[16])
    export_model(str(tmp_path / "out"), "stablehlo", model, "x", Options(**sizes))
    texts = ["The [MASK] is bound.", "A [MASK] of [MASK].", "[MASK]"] * 3
    wanted = [masks for _, masks in fill_texts(model, texts[:3], 5, "", "x")] * 3
    with serving("~/out", environment | {"HOME": str(tmp_path)}) as ask:
        assert ask("/health") == (200, {"task": "fill-mask", "labels": []})
        with ThreadPoolExecutor(9) as pool:
            found = [*pool.map(lambda text: predict(ask, [text])[0], texts)]
        for answer, want in zip(
            [*found, *predict(ask, texts)], wanted * 2, strict=True
        ):
            for guesses, best in zip(answer["masks"], want, strict=True):
                assert [g["token"] for g in guesses] == [g["token"] for g in best]
                assert [g["probability"] for g in guesses] == pytest.approx(
                    [g["probability"] for g in best], rel=1e-4
                )
        for body, word in [
            ('{"texts": ["nothing to fill"]}', "0 blanks"),
            ('{"texts": [3]}', "strings"),
        ]:
            status, answer = ask("/predict", body)
            assert (status, word in answer["error"]) == (400, True), answer
        assert ask("/predict", " " * (1 << 21))[0] == 413
        assert ask("/other", "{}")[0] == 404
        assert predict(ask, []) == []


def test_a_request_that_cannot_be_answered_is_told_so(capsys):
    """Also where the model fails, and where the request has no length."""
    spec = importlib.util.spec_from_file_location("serve", ROOT / "launch/serve.py")
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)

    class Failing:
        def answer(self, texts):
            raise RuntimeError("out of memory")

    for body in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError, match=r"^the body is no JSON: "):
            serve.texts_of(body)
    for body in (b"{}", b"[]", b"3", b'{"texts": "x"}'):
        with pytest.raises(ValueError, match=r"^the body is no object with a list, "):
            serve.texts_of(body)

    server = serve.ThreadingHTTPServer(("127.0.0.1", 0), serve.Handler)
    server.daemon_threads, server.model = True, Failing()
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def post(length):
        client = http.client.HTTPConnection(*server.server_address, timeout=20)
        client.putrequest("POST", "/predict")
        client.putheader("Content-Length", length)
        client.endheaders(b'{"texts": ["x"]}')
        found = client.getresponse()
        return found.status, json.load(found)["error"]

    why = "the model cannot answer; the server's log says why"
    assert post("16") == (500, why)
    assert "RuntimeError: out of memory" in capsys.readouterr().err
    server.model.answer = lambda texts: {}[texts[0]]
    assert post("16") == (500, why)
    assert post("many")[0] == post("-1")[0] == 411
    server.shutdown()
    server.server_close()


@pytest.fixture
def onnx_folder(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")

    def write(model, **options):
        folder = tmp_path / model.config.objective
        export_model(str(folder), "onnx", model, "x", Options(**options))
        return folder

    return write


def test_vectors_by_onnxruntime(vocabulary, environment, onnx_folder):
    how = {"pooling": "mean", "normalize": True, "longest": 16, "prompt": "about: "}
    model = small.small_model(vocabulary, meta={"sentences": how})
    texts = ["", "A name.", "Names are bound to objects. " * 20]
    vectors, _ = make_embedder(model, "x").embed(texts)
    with serving(onnx_folder(model, vectors=True), environment, "--threads=1") as ask:
        found = [answer["embedding"] for answer in predict(ask, texts)]
    np.testing.assert_allclose(found, vectors, atol=1e-5)


@pytest.mark.slow
def test_tasks_by_onnxruntime(vocabulary, environment, onnx_folder):
    text = "Names are bound to objects."
    tagged = small.finetuned(vocabulary, "bert", "token-classification")
    with serving(onnx_folder(tagged), environment) as ask:
        [answer] = predict(ask, [text])
    words = [tag["word"] for tag in answer["tags"]]
    assert words == ["Names", "are", "bound", "to", "objects", "."]
    assert all(text[t["start"] :].startswith(t["word"]) for t in answer["tags"])
    assert {tag["tag"] for tag in answer["tags"]} <= {*small.LABELS}

    asked = small.finetuned(vocabulary, "bert", "question-answering")
    with serving(onnx_folder(asked), environment) as ask:
        [answer] = predict(ask, [["What is bound?", text]])
        assert ask("/predict", '{"texts": ["alone"]}')[0] == 400
    assert answer["answer"] and text[answer["start"] :].startswith(answer["answer"])

    classes = small.finetuned(vocabulary)
    with serving(onnx_folder(classes), environment) as ask:
        alone, pair = predict(ask, [text, [text, "A pair."]])
    assert alone["label"] in small.LABELS and 1 / 3 <= alone["score"] <= 1
    assert alone["probabilities"].keys() == {*small.LABELS}
    assert pair != alone


def test_no_card(environment, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "launch/serve.py", f"--model={tmp_path}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "no card.json" in done.stderr.splitlines()[-1]
