# SPDX-License-Identifier: Apache-2.0
"""Task heads, read and written: every tensor, and the logits of transformers."""

import dataclasses
import functools
import json

import heads_data as data
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_hf_read import roles

from bertjax import UserError
from bertjax.interop import hf_read, hf_write, tensor_layout
from bertjax.interop.task_heads import CLASSES
from bertjax.models import encoder, heads
from bertjax.objectives import span
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.sharding import PARAM_AXES, axes_of
from bertjax.tasks.task_type import load_task_type, with_options

GOLDEN = json.loads((data.DATA / "hf_heads.json").read_text())
OURS = dict(zip(data.KINDS, ("classify", "tag", "span", "choose"), strict=True))


@functools.partial(jax.jit, static_argnums=1)
def logits(params, cfg):
    """Return the outputs of all heads on one encoder for data.IDS, by kind."""
    batch = {"input_ids": data.IDS, "attention_mask": data.MASK}
    encoded = encoder.apply(params["encoder"], cfg, batch)
    spans = heads.task_logits(params["span"], cfg, encoded.hidden)
    told = (
        heads.task_logits(params["classify"], cfg, encoded.pooled),
        heads.task_logits(params["tag"], cfg, encoded.hidden),
        jax.numpy.stack(span.mask_padding(spans, batch), axis=-1),
        heads.task_logits(params["choose"], cfg, encoded.pooled),
    )
    return dict(zip(data.KINDS, told, strict=True))


def write(folder, family, kind, **config):
    return data.write(folder, family, kind, GOLDEN[family][kind]["shapes"], **config)


@pytest.mark.parametrize("family", data.FAMILIES)
def test_heads_of_a_family(family, tmp_path):
    params, model = {}, None
    for kind, name in OURS.items():
        given = write(tmp_path / kind, family, kind)
        model = hf_read.open_model(tmp_path / kind, "x")
        assert not model.unexpected and not model.missing
        labels = () if name in ("span", "choose") else (*data.LABELS,)
        assert model.task == (name, labels)
        own = model.params()
        head, labels = model.task
        options = load_task_type(head).head_options(None, labels)
        objective, _ = make_objective(with_options(head, **options), model.cfg)
        shapes = jax.eval_shape(objective.init, jax.random.key(0))
        ours = {path: leaf.shape for path, leaf in tensor_layout.walk(shapes)}
        rows = *PARAM_AXES, *objective.shardings
        assert model.describe() == ours and all(axes_of(path, rows) for path in ours)
        params = {**own, **params}  # the first kind has the pooler

        back = tmp_path / f"{kind}.back"
        back.mkdir()
        told = back, own, model.cfg, roles(data.FAMILIES[family]), family, model.raw
        hf_write.write_model(*told, labels=model.task.labels)
        made = load_file(back / "model.safetensors")
        assert made.keys() == given.keys()
        for key, tensor in given.items():
            assert made[key].tobytes() == tensor.tobytes(), key
        config = json.loads((back / "config.json").read_text())
        there = data.config_of(family, kind)
        assert {k: config[k] for k in there if k != "dtype"} == {
            k: v for k, v in there.items() if k != "dtype"
        }
        kinds = {"classify": "single_label_classification"}
        assert config.get("problem_type") == kinds.get(name)
    real = data.MASK[..., None] > 0
    cfg = dataclasses.replace(model.cfg, unroll=1)  # compiles faster
    said = logits(params, cfg)
    said |= {kind: logits({**params, **own}, cfg)[kind]}  # with its own pooler
    for kind, found in said.items():
        wanted = np.array(GOLDEN[family][kind]["logits"], np.float32)
        whole = np.ones_like(wanted, bool) if wanted.ndim == 2 else real
        np.testing.assert_allclose(
            np.where(whole, found, 0), np.where(whole, wanted, 0), atol=1e-5
        )


def test_task_types_say_the_class_that_opens_them(tmp_path):
    for name, hf_class in CLASSES.items():
        assert load_task_type(name).hf_class == hf_class
    write(tmp_path, "bert", data.KINDS[0])
    model = hf_read.open_model(tmp_path, "x")
    params = model.params()
    params["stars"] = params.pop("classify")  # a head from outside
    back = tmp_path / "back"
    back.mkdir()
    told = back, params, model.cfg, roles(data.FAMILIES["bert"]), "bert"
    hf_write.write_model(*told, labels="abc", hf_class="ForTokenClassification")
    made = load_file(back / "model.safetensors")
    np.testing.assert_array_equal(
        made["classifier.weight"].T, params["stars"]["kernel"]
    )
    config = json.loads((back / "config.json").read_text())
    assert config["architectures"] == ["BertForTokenClassification"]
    assert [*config["id2label"].values()] == [*"abc"]


@pytest.mark.slow
@pytest.mark.parametrize("family", data.FAMILIES)
def test_transformers_opens_what_we_write(family, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for kind in OURS:
        write(tmp_path / "a", family, kind)
        model = hf_read.open_model(tmp_path / "a", "x")
        back = tmp_path / kind
        back.mkdir()
        told = back, model.params(), model.cfg, roles(data.FAMILIES[family]), family
        hf_write.write_model(*told, labels=model.task.labels)
        theirs = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(back)
        batch = {"input_ids": data.IDS, "attention_mask": data.MASK}
        several = kind == "MultipleChoice"  # the rows are one example's choices
        with torch.inference_mode():
            batch = {
                k: torch.tensor(v[None] if several else v) for k, v in batch.items()
            }
            out = theirs.eval()(**batch)
        if kind == "QuestionAnswering":
            found = torch.stack([out.start_logits, out.end_logits], dim=-1)
        else:
            found = out.logits.reshape(-1, 1) if several else out.logits
        wanted = np.array(GOLDEN[family][kind]["logits"], np.float32)
        real = data.MASK[..., None] if wanted.ndim == 3 else 1
        np.testing.assert_allclose(found.numpy() * real, wanted * real, atol=1e-5)


def test_scores(tmp_path):
    """A single class is a score. ModernBERT can also pool by the mean of all tokens."""
    one = {"id2label": {"0": "LABEL_0"}}
    heads = dict(GOLDEN["bert"]["SequenceClassification"]["shapes"])
    heads |= {"classifier.weight": [1, 8], "classifier.bias": [1]}
    data.write(tmp_path / "a", "bert", data.KINDS[0], heads, **one)
    model = hf_read.open_model(tmp_path / "a", "x")
    assert model.task == ("regress", ())
    assert model.describe()["regress/kernel"] == (8, 1)
    back = tmp_path / "b"
    back.mkdir()
    hf_write.write_model(back, model.params(), model.cfg, roles("bert"))
    config = json.loads((back / "config.json").read_text())
    assert config["problem_type"] == "regression" and len(config["id2label"]) == 1
    write(tmp_path / "c", "modernbert", data.KINDS[0], classifier_pooling="mean")
    model = hf_read.open_model(tmp_path / "c", "x")
    assert model.cfg.classifier_pooling == "mean"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, ["id2label", "0, 1"]),
        ({"id2label": {"0": "a", "1": "b"}}, ["classifier.weight [3, 8], not [2, 8]"]),
        ({"id2label": None, "num_labels": 0}, ["num_labels=0"]),
        ({"architectures": ["RobertaForSequenceClassification"]}, ["classifier.dense"]),
    ],
)
def test_what_is_refused(config, words, tmp_path):
    family = "roberta" if "architectures" in config else "bert"
    write(tmp_path / "a", family, "TokenClassification", **config)
    with pytest.raises(UserError) as e:
        hf_read.open_model(tmp_path / "a", "--model=a")
    assert all(word in str(e.value) for word in words), e.value
    assert "\n" not in str(e.value)


def test_many_labels_at_once_are_no_task(tmp_path):
    kind = "SequenceClassification"
    many = {"problem_type": "multi_label_classification"}
    write(tmp_path / "a", "bert", kind, **many)
    model = hf_read.open_model(tmp_path / "a", "x")
    assert model.task is None and "classifier.weight" in model.unexpected


def test_a_head_that_transformers_computes_otherwise_is_refused(tmp_path):
    write(tmp_path / "a", "distilbert", "SequenceClassification")
    model = hf_read.open_model(tmp_path / "a", "x")
    cfg = dataclasses.replace(model.cfg, pooler_activation="tanh")
    (tmp_path / "b").mkdir()
    given = tmp_path / "b", model.params(), cfg, roles("distilbert"), "distilbert"
    with pytest.raises(UserError, match=r"activation='tanh'.*distilbert.*'relu'"):
        hf_write.write_model(*given, labels=data.LABELS)
