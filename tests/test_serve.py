# SPDX-License-Identifier: Apache-2.0
"""launch/serve.py answers clients with the files that convert wrote."""

import http.client
import importlib.util
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent / "serving"))
import small_served as small

from bertjax.inference.embed_texts import make_embedder
from bertjax.inference.fill_blanks import fill_texts
from bertjax.serving.card import describe
from bertjax.serving.export_model import Options, export_model
from bertjax.serving.served_model import make_served

ROOT = Path(__file__).parents[1]


@contextmanager
def serving(folder, environment, *more):
    """Run the server; yield ask(path, body) -> (status, answer)."""
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
    """Guesses are fill_mask's, with several clients at once; errors are reported."""
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
            (json.dumps({"texts": ["[MASK]" + " a" * 20 + " [MASK]"]}), "is cut off"),
            ('{"texts": [3]}', "strings"),
        ]:
            status, answer = ask("/predict", body)
            assert (status, word in answer["error"]) == (400, True), answer
        assert ask("/predict", " " * (1 << 21))[0] == 413
        assert ask("/other", "{}")[0] == 404
        assert predict(ask, []) == []


@pytest.fixture
def serve():
    """launch/serve.py as a module."""
    spec = importlib.util.spec_from_file_location("serve", ROOT / "launch/serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_request_that_cannot_be_answered_is_told_so(serve, capsys):
    """Also if the model fails, and if the request has no valid length."""

    class Failing:
        def answer(self, texts):
            raise RuntimeError("out of memory")

    for body in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError, match=r"^the body is not JSON: "):
            serve.texts_of(body)
    for body in (b"{}", b"[]", b"3", b'{"texts": "x"}'):
        with pytest.raises(
            ValueError, match=r"^the body is not an object with a list, "
        ):
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


def without_model(serve, **card):
    """Make a server with a card but no model."""
    server = serve.Server.__new__(serve.Server)
    server.card = {"prompt": "", **card}
    return server


def test_texts_that_no_model_can_read(serve):
    for task in ("token-classification", "sentence-similarity"):
        server = without_model(serve, task=task)
        with pytest.raises(ValueError, match=f"texts of {task} are strings, not pairs"):
            server.encode(["one", "two"])
    for text in ("\ud800", ["a", "\udfff"]):
        with pytest.raises(ValueError, match="half a character"):
            server.encode(text)


def test_a_directory_that_cannot_be_served(serve, tmp_path, monkeypatch, capsys):
    """It is refused in one line, whatever is wrong with it."""
    command = ["serve.py", f"--model={tmp_path}", "--port=0"]
    monkeypatch.setattr(sys, "argv", command)
    program = {"file": "a.jaxexport", "batch_size": 1, "length": 8}
    whole = {"format": "stablehlo", "weights": "w", "programs": [program]}
    cards = "{", "{}", "[]", '{"format": "tflite"}', json.dumps(whole)
    for card in cards:
        (tmp_path / "card.json").write_text(card)
        with pytest.raises(SystemExit, match="2"):
            serve.main()
        at_fault = "w" if card == cards[-1] else "card.json"
        assert f"error: --model={tmp_path}: {at_fault}: " in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"no program", None])
def test_programs_are_read_before_the_service_begins(
    content, serve, tmp_path, monkeypatch, capsys
):
    """And not at the first request, which then failed."""
    program = {"file": "a.jaxexport", "batch_size": 1, "length": 8}
    card = {"format": "stablehlo", "weights": "w", "programs": [program]}
    (tmp_path / "card.json").write_text(json.dumps(card))
    (tmp_path / "w").write_bytes((2).to_bytes(8, "little") + b"{}")
    if content:
        (tmp_path / "a.jaxexport").write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["serve.py", f"--model={tmp_path}", "--port=0"])
    with pytest.raises(SystemExit, match="2"):
        serve.main()
    assert f"error: --model={tmp_path}: a.jaxexport: " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--batch_size=0", "--threads=-1"])
def test_senseless_numbers_are_refused(flag, serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve.py", f"--model={tmp_path}", flag])
    with pytest.raises(SystemExit, match="2"):
        serve.main()
    assert f"error: {flag}: give " in capsys.readouterr().err


def test_a_question_without_a_context_has_no_answer(serve):
    """No position has a score, and -Infinity is not valid JSON."""
    server = without_model(serve, task="question-answering")
    row = SimpleNamespace(ids=[0] * 4, sequence_ids=[None, 0, None, None])
    server.tokenizer = SimpleNamespace(encode=lambda question, context: row)
    with pytest.raises(ValueError, match="no context is left beside the question 'q'"):
        server.encode(["q", " "])


def test_padding_of_the_vocabulary_is_no_guess(serve):
    """As in fill_mask, the padding still has a share of the probability."""
    server = without_model(serve, mask_id=4, inputs=["input_ids"])
    pieces = SimpleNamespace(get_vocab_size=lambda: 2, id_to_token="ab".__getitem__)
    server.tokenizer, row = pieces, SimpleNamespace(ids=[1, 4])
    odds = {"logits": np.log(np.float32([[1, 1, 1], [0.3, 0.1, 0.6]]))}
    [masks] = server.fill_mask(row, "", odds)["masks"]
    assert [guess["token"] for guess in masks] == ["a", "b"]
    assert masks[0]["probability"] == pytest.approx(0.3)


def test_classes_of_one_name_share_their_probability(serve):
    server = without_model(serve, labels=["a", "b", "a"])
    odds = {"logits": np.log(np.float32([0.3, 0.4, 0.3]))}
    found = server.text_classification(None, "", odds)
    assert found["probabilities"] == pytest.approx({"a": 0.6, "b": 0.4})
    assert (found["label"], found["score"]) == ("a", pytest.approx(0.6))


def test_a_question_may_have_no_answer(serve, vocabulary):
    """The model's threshold and answer length apply, as in predict."""
    text = ["q", "one two"]  # [CLS] q [SEP] one two [SEP]
    sequence, offsets = [None, 0, None, 1, 1, None], [(0, 0)] * 3 + [(0, 3), (4, 7)]
    row = SimpleNamespace(ids=[0] * 6, sequence_ids=sequence, offsets=offsets)
    found = {
        "start_logits": np.float32([2, 0, 0, 1, 0, 0]),
        "end_logits": np.float32([1, 0, 0, 0, 1, 0]),
    }
    for threshold, length, answer in (
        (None, 30, "one two"),
        (1.5, 30, "one two"),
        (0.5, 30, ""),
        (None, 1, "one"),
    ):
        model = small.finetuned(vocabulary, "bert", "question-answering")
        if threshold is not None:
            model.meta["task"]["threshold"] = threshold
        model.config.task.answer_length = length
        facts = describe(model, make_served(model, "x"))
        said = without_model(serve, **facts).question_answering(row, text, found)
        assert said["answer"] == answer
        assert said.get("null_score") == (None if threshold is None else 3.0)


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


def test_a_port_that_is_taken(environment, tmp_path):
    (tmp_path / "card.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 99999):
            done = subprocess.run(
                [
                    *(sys.executable, ROOT / "launch/serve.py"),
                    *(f"--model={tmp_path}", f"--port={port}"),
                ],
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 2
            assert f"--port={port}" in done.stderr.splitlines()[-1]
