# SPDX-License-Identifier: Apache-2.0
"""ONNX files: onnxruntime computes what the model computes."""

import json

import numpy as np
import pytest
import small_served as small

from bertjax import UserError
from bertjax.serving import differences, write_onnx
from bertjax.serving.export_model import Options, check_options, export_model
from bertjax.serving.served_model import make_served

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
CLOSE = 1e-4


def exported(folder, model, **options):
    facts = export_model(str(folder), "onnx", model, "--from=x", Options(**options))
    assert json.loads((folder / "card.json").read_text()) == facts
    return facts, write_onnx.open_session(folder / write_onnx.FILE, threads=1)


SLOW = ("roberta", "electra", "distilbert")  # variants of bert's layers


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in small.FAMILIES],
)
def test_families(family, vocabulary, tmp_path):
    model = small.small_model(vocabulary, family)
    facts, _ = exported(tmp_path / "out", model)
    assert facts["task"] == "fill-mask"
    assert facts["largest_difference"] < CLOSE
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == family
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert not (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize(
    "family, task",
    [*(("bert", task) for task in small.TASKS), ("modernbert", "text-classification")],
)
def test_tasks(family, task, vocabulary, tmp_path):
    model = small.finetuned(vocabulary, family, task)
    facts, predict = exported(tmp_path / "out", model)
    name = "text-classification" if task == "a score" else task
    assert (facts["task"], facts["largest_difference"] < CLOSE) == (name, True)
    served = make_served(model, "x")
    batch = differences.make_batch(served, [np.array([2, 9, 3])], 0, (1, 5))
    shapes = {name: x.shape for name, x in predict(batch).items()}
    assert (
        shapes
        == {
            "text-classification": {"logits": (1, 3)},
            "a score": {"logits": (1, 1)},
            "token-classification": {"logits": (1, 5, 3)},
            "question-answering": {"start_logits": (1, 5), "end_logits": (1, 5)},
        }[task]
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(qk_norm=True, value_skip=True, unet_skips=True, embedding_skip=True),
        dict(relative_attention_num_buckets=8, position_embedding_type="none"),
        dict(
            norm_type="rms_norm",
            norm_bias=False,
            norm_position="pre",
            mlp_type="glu",
            hidden_act="relu2",
            vocab_size=1024,
            final_logit_softcapping=5.0,
        ),
    ],
    ids=lambda options: next(iter(options)),
)
def test_switches_of_our_own(options, vocabulary, tmp_path, capsys):
    """Models that no Hugging Face family has are served too, without config.json."""
    facts, _ = exported(tmp_path / "out", small.small_model(vocabulary, **options))
    assert facts["largest_difference"] < CLOSE
    told = "not written: config.json" in capsys.readouterr().err
    assert told != (tmp_path / "out/config.json").exists()


def test_a_head_that_no_class_of_theirs_has(vocabulary, tmp_path, capsys):
    """It is served too, without config.json."""
    model = small.finetuned(vocabulary, classifier_pooling="mean")
    facts, _ = exported(tmp_path / "out", model)
    assert facts["largest_difference"] < CLOSE
    assert "not written: config.json" in capsys.readouterr().err
    assert not (tmp_path / "out/config.json").exists()
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_200_texts_of_all_lengths(vocabulary, tmp_path):
    """From an empty text to a truncated one, alone and with longer ones."""
    model = small.small_model(vocabulary)
    _, predict = exported(tmp_path / "out", model)
    served = make_served(model, "x")
    batches = write_onnx.compared_batches(model, served, count=200)
    sizes = np.concatenate([b["attention_mask"].sum(axis=1) for b in batches])
    assert len(sizes) == 200
    assert (sizes.min(), sizes.max()) == (2, small.LONGEST)
    assert differences.largest_difference(served, predict, batches) < CLOSE


def test_a_difference_is_seen(vocabulary):
    served = make_served(small.small_model(vocabulary), "x")
    batch = differences.make_batch(served, [np.array([2, 9, 3])], 0, (2, 4))

    def predict(batch):
        logits = np.array(served.run(served.params, batch)["logits"])
        logits[0, 3] += 9  # padding
        logits[0, 1, 7] += 0.5
        return {"logits": logits}

    found = differences.largest_difference(served, predict, [batch])
    assert found == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    "pooling",
    ["mean", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cls", "last"))],
)
def test_vectors(pooling, vocabulary, tmp_path):
    """Vectors in the form that sentence-transformers opens with backend="onnx"."""
    how = {"pooling": pooling, "normalize": True, "longest": 32, "prompt": "query: "}
    model = small.small_model(vocabulary, meta={"sentences": how})
    facts, predict = exported(tmp_path / "out", model, vectors=True)
    assert facts["outputs"] == ["sentence_embedding", "last_hidden_state"]
    assert (facts["max_length"], facts["prompt"]) == (32, "query: ")
    assert facts["largest_difference"] < CLOSE
    ids = np.array([[2, 9, 8, 3, 0], [2, 7, 3, 0, 0]])
    mask = (ids > 0).astype(int)
    found = predict(
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
    )
    hidden = found["last_hidden_state"]
    ends = mask.sum(axis=1) - 1
    want = {
        "mean": (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1)[:, None],
        "cls": hidden[:, 0],
        "last": hidden[np.arange(2), ends],
    }[pooling]
    want /= np.linalg.norm(want, axis=1, keepdims=True)
    np.testing.assert_allclose(found["sentence_embedding"], want, atol=1e-5)
    if pooling == "last":  # bertjax writes no modules.json for it
        return
    steps = json.loads((tmp_path / "out/modules.json").read_text())
    assert [step["path"] for step in steps] == ["", "1_Pooling", "2_Normalize"]


def test_vectors_of_a_finetuned_model(vocabulary, tmp_path):
    """The export describes an encoder, as the head of the task is not served."""
    model = small.finetuned(vocabulary)
    facts, _ = exported(tmp_path / "out", model, vectors=True)
    assert facts["task"] == "sentence-similarity"
    assert facts["largest_difference"] < CLOSE
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["BertModel"]
    assert (tmp_path / "out/modules.json").exists()


# ---------------------------------------------------------------- 8 bits
@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("The loop ends when it is done.\nA name is bound to an object.\n")
    return path


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_8_bits(kind, vocabulary, texts, tmp_path):
    """It has a quarter of the bytes, one tied table, and outputs near the model's."""
    wide = dict(hidden_size=128, intermediate_size=512)
    model = small.small_model(vocabulary, **wide)
    whole, _ = exported(tmp_path / "whole", model, vectors=True)
    facts, predict = exported(
        tmp_path / "out", model, quantize=kind, gate=str(texts), vectors=True
    )
    assert facts["quantize"] == kind
    assert facts["bytes"] < 0.29 * whole["bytes"]  # the model is small
    assert facts["gate"]["metric"] == "cosine"
    assert 0.995 < facts["gate"][kind] <= 1 + 1e-6
    assert facts["gate"]["count"] == 2
    assert facts["largest_difference"] < 0.4

    ids = np.array([[2, 9, 8, 3, 0], [2, 700, 600, 500, 3]])
    batch = {"input_ids": ids, "attention_mask": ids > 0, "token_type_ids": 0 * ids}
    alone = {name: x[:1, :4] for name, x in batch.items()}
    found, name = predict(batch), "sentence_embedding"
    np.testing.assert_allclose(found[name][:1], predict(alone)[name], atol=1e-6)

    # A model that always predicts one piece has some right guesses.
    bias = model.checkpoint["mlm"]["bias"].copy()
    bias[model.tokenizer.encode_batch(["."])[0][0]] += 9
    model.checkpoint["mlm"]["bias"] = bias
    head, _ = exported(tmp_path / "mlm", model, quantize=kind, gate=str(texts))
    assert head["gate"]["metric"] == "mlm_accuracy"
    assert head["bytes"] - facts["bytes"] < 0.2 * facts["bytes"]


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_the_gate_refuses_what_lost_too_much(
    kind, vocabulary, texts, tmp_path, monkeypatch
):
    from bertjax.serving import onnx_int8

    monkeypatch.setattr(onnx_int8, "LEVELS", 1)  # -1, 0 and 1
    model = small.small_model(vocabulary)
    options = Options(quantize=kind, gate=str(texts), vectors=True)
    words = r"cosine over 2 texts is 1.0000 in float32, 0\.\d+ in"
    with pytest.raises(UserError, match=rf"{words} {kind}, .*nothing is written"):
        export_model(str(tmp_path / "out"), "onnx", model, "--from=x", options)
    assert not (tmp_path / "out").exists()


def test_the_gate_is_read_before_the_graph_is_made(vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(write_onnx, "write_onnx", lambda *_: pytest.fail("too late"))
    model = small.small_model(vocabulary)
    options = Options(quantize="int8", gate=f"{tmp_path}/none", vectors=True)
    with pytest.raises(UserError, match=r"^--gate=.*none: cannot be read"):
        export_model(str(tmp_path / "out"), "onnx", model, "--from=x", options)


@pytest.mark.parametrize("task", small.TASKS)
def test_rows_are_scored_by_what_is_served(task, vocabulary):
    """The scored outputs equal those of the objective itself."""
    from bertjax.objectives.make_objective import make_objective
    from bertjax.serving.gate import outputs_of

    model = small.finetuned(vocabulary, "bert", task)
    served = make_served(model, "x")
    batch = differences.make_batch(served, [np.array([2, 9, 8, 3])], 0, (2, 6))
    objective, _ = make_objective(small.TASKS[task], model.cfg)
    labels = {
        name: np.zeros(x.shape, x.dtype) for name, x in objective.labels(2, 6).items()
    }
    _, wanted = objective.evaluate(model.checkpoint, {**batch, **labels})
    logits = {k: np.asarray(x) for k, x in served.run(served.params, batch).items()}
    found = outputs_of(model.config.objective, logits)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, atol=1e-5)


def test_the_gate_scores_a_task(vocabulary, tmp_path, monkeypatch):
    """The rows' labels are the model's own answers, so its accuracy is 1."""
    from bertjax.assembly import models
    from bertjax.serving import gate

    monkeypatch.setattr(models, "read_params", lambda params, *_: params)
    model = small.finetuned(vocabulary)
    model.config.task.label = "label"
    served = make_served(model, "x")
    texts = ["Names are bound.", "A loop ends.", "An object.", "It is a name for it."]
    rows = model.tokenizer.encode_batch(texts)
    lines = ["text\tlabel"]
    for text, ids in zip(texts, rows, strict=True):
        row = np.array([model.tokenizer.cls_id, *ids, model.tokenizer.sep_id])
        batch = differences.make_batch(served, [row], 0, (1, len(row)))
        batch["token_type_ids"][:] = 0
        best = np.asarray(served.run(served.params, batch)["logits"]).argmax()
        lines.append(f"{text}\t{small.LABELS[best]}")
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join([*lines, ""]))

    def times(factor):
        def predict(batch):
            found = served.run(served.params, batch)
            return {name: factor * np.asarray(x) for name, x in found.items()}

        opened = gate.open_gate(str(path), model, served, "--from=x")
        return opened.check(predict, "uint8")

    wanted = dict(metric="accuracy", float32=1.0, uint8=1.0, count=4, unit="rows")
    assert times(2) == wanted
    words = r"rows is 1\.0000 in float32, 0\.0000 in uint8"
    with pytest.raises(UserError, match=words):
        times(-1)


@pytest.mark.parametrize("kind, zero", [("int8", 0), ("uint8", 128)])
def test_rounded_tables_are_within_half_a_level(kind, zero):
    from bertjax.serving import onnx_int8
    from bertjax.serving.onnx_graph import Graph

    numbers = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    numbers[3] = 0
    graph = Graph()
    for axis in (0, 1):
        levels, scale = onnx_int8.rounded(
            graph, graph.constant(numbers, "w"), axis, kind
        )
        step = np.expand_dims(scale.constant, axis)
        away = np.abs((levels.constant.astype(float) - zero) * step - numbers)
        assert levels.dtype == kind
        assert (away <= step / 2 + 1e-6).all()


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "objective, options, word",
    [
        ("clm", {}, "is a decoder, which writes texts"),
        ("prefix", {}, r"next token \(objective=prefix\), and fills no blanks"),
        ("choose", {}, "objective=choose, which is not served"),
        ("mntp", {}, "predicts a masked token from the place before it"),
    ],
)
def test_models_that_are_not_served(objective, options, word, vocabulary):
    meta = {"task": {"labels": []}} if objective == "choose" else {}
    model = small.small_model(vocabulary, "bert", objective, meta, **options)
    with pytest.raises(UserError, match=word):
        make_served(model, "--from=x")


def test_an_operator_that_is_not_known(vocabulary):
    import jax.numpy as jnp

    from bertjax.serving.jaxpr_to_onnx import convert

    def run(params, batch):
        return {"y": jnp.sort(batch["x"] * params["w"], axis=1), "z": batch["x"]}

    given = {"w": np.float32(2)}, {"x": "b, l"}, 8
    with pytest.raises(UserError, match="computes sort, which bertjax cannot write"):
        convert(run, *given, ["y"])
    assert convert(run, *given, ["z"]).outputs.keys() == {"z"}


@pytest.mark.parametrize(
    "format, options, word",
    [
        ("onnx", dict(lengths=[8]), "--lengths needs --format=stablehlo"),
        ("stablehlo", dict(quantize="int8"), "--quantize needs --format=onnx"),
        ("onnx", dict(quantize="int4"), "int8 or uint8"),
        ("onnx", dict(quantize="int8"), "needs --gate"),
        ("onnx", dict(gate="x"), "give --quantize=int8"),
        ("hf", dict(vectors=True), "--vectors has no effect"),
    ],
)
def test_options(format, options, word):
    with pytest.raises(UserError, match=word):
        check_options(format, Options(**options))


def test_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(write_onnx, "PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(UserError, match=r"no_such_package: pip install 'bertjax\[onnx"):
        check_options("onnx", Options())
