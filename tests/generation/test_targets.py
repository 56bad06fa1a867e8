# SPDX-License-Identifier: Apache-2.0
"""Models that were finetuned to write targets: generate and predict write the same."""

import jax
import numpy as np
import pytest

from bertjax import UserError, generate
from bertjax.assembly import command_line
from bertjax.assembly.models import LoadedModel
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.generation import open_writer, texts
from bertjax.generation.options import Options
from bertjax.inference import predict_rows
from bertjax.objectives.make_objective import make_objective
from bertjax.tasks import prepare_task

TEXTS = [
    "The class statement",
    "a name",
    "Assignment expressions bind names to values, and return these values, " * 4,
    "",
]
PLACES = {
    "prefix": [],
    "causal": ["model.is_decoder=True"],
    "bart": ["model.family=bart", "model.num_decoder_layers=2"],
    "t5": ["model.family=t5", "model.num_decoder_layers=2"],
}


def open_random(vocabulary, place, *more):
    """Return an opened model and its parameters, larger than their initial values."""
    flags = ["task.target_length=6", "data.length=24", "model.hidden_size=32", *more]
    flags = [f"--config.{flag}" for flag in [*PLACES[place], *flags]]
    config = command_line.parse(["--config=finetune/seq2seq.py:smoke", *flags]).config
    config.dtype = "float32"
    tokenizer = load_tokenizer(str(vocabulary))
    opened = LoadedModel(config, tokenizer, "here", {"task": {"labels": []}})
    objective, _ = make_objective("seq2seq", opened.cfg)
    params = jax.jit(objective.init)(jax.random.key(1))
    return opened, jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, params)


def predicted(opened, params, rows):
    form = prepare_task.saved_form(opened.config, opened.meta)
    model = predict_rows.Finetuned(
        opened.config, "seq2seq", form, opened.tokenizer, params
    )
    read = prepare_task.parse_objects(opened.config, form, rows, "rows")
    return list(predict_rows.answer(model, read, 3))


@pytest.mark.parametrize("place", PLACES)
def test_texts_are_those_of_predict(vocabulary, place):
    """Also for truncated texts and an empty one, in batches of other sizes."""
    opened, params = open_random(vocabulary, place)
    wanted = Options(batch_size=2)
    assert open_writer.pick_how(opened, wanted, "m") == "left"
    writer = open_writer.open_writer(opened, "left", params)
    assert not open_writer.continues_prompt(writer)
    found = open_writer.write(writer, TEXTS, wanted)
    expected = predicted(opened, params, TEXTS)
    assert [one.text for [one] in found] == [one["text"] for one in expected]
    scores = [one["score"] for one in expected]
    np.testing.assert_allclose([one.score for [one] in found], scores, rtol=1e-4)
    assert len({*np.round(scores, 3)}) > 2
    if place != "prefix":
        return
    # Beam search, too, with the task's own options.
    opened.config.task.update(num_beams=3, length_penalty=2.0)
    wanted = Options(num_beams=3, length_penalty=2.0, num_return_sequences=2)
    found = open_writer.write(writer, TEXTS, wanted)
    best = [one["text"] for one in predicted(opened, params, TEXTS)]
    assert [outputs[0].text for outputs in found] == best
    assert all(len({one.text for one in outputs}) == 2 for outputs in found)


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_a_prefix(vocabulary, place):
    """It is at the position of a target, and is causal, unlike the text before it."""
    opened, params = open_random(vocabulary, place)
    writer = open_writer.open_writer(opened, "left", params)
    tokenizer = opened.tokenizer
    options = Options(prefix="the class")
    rows = [*texts.make_rows(writer, ["a name", "a"], options)]
    forced = tokenizer.encode("the class")
    forced = [tokenizer.cls_id] * (place == "bart") + forced
    assert [row.forced for row in rows] == [forced] * 2
    own = [tokenizer.cls_id, *tokenizer.encode("a"), tokenizer.sep_id]
    batch = texts.make_batch(writer, rows, 12, 2)
    real = batch["attention_mask"][1] > 0
    if place in ("bart", "t5"):
        start = tokenizer.pad_id if place == "t5" else tokenizer.sep_id
        assert batch["decoder_input_ids"][1].tolist() == [start, *forced]
        assert batch["input_ids"][1][real].tolist() == own[place == "t5" :]
        return
    assert batch["input_ids"][1][real].tolist() == own + forced
    if place == "prefix":
        sees = batch["attention_steps"][1][real]
        assert not sees[: len(own)].any() and (np.diff(sees[len(own) - 1 :]) > 0).all()


def test_two_texts_are_columns(vocabulary):
    opened, params = open_random(vocabulary, "prefix", "task.text_pair=answer")
    writer = open_writer.open_writer(opened, "left", params)
    rows = [{"text": "a name", "answer": "names"}, {"text": "x", "answer": "class"}]
    found = open_writer.write(writer, rows, Options())
    expected = predicted(opened, params, rows)
    assert [one.text for [one] in found] == [one["text"] for one in expected]
    with pytest.raises(UserError, match=r"'a name' is one text, .* text and answer"):
        open_writer.write(writer, ["a name"], Options())
    with pytest.raises(UserError, match="prompts:1"):
        open_writer.write(writer, [{"text": "a name"}], Options())


def test_what_is_refused(vocabulary, trained, tmp_path):
    opened, _ = open_random(vocabulary, "prefix")
    with pytest.raises(UserError, match=r"how=unmask: m was finetuned .* --how=left"):
        open_writer.pick_how(opened, Options(how="unmask"), "m")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": {"text": "a"}}\n')
    with pytest.raises(UserError, match="a prompt has columns"):
        generate.main([f"--model={trained}", f"--input={rows}"])
    rows.write_text('{"prompt": {"text": 3}}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:1 is not a JSON object"):
        generate.main([f"--model={trained}", f"--input={rows}"])
