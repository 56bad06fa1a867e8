# SPDX-License-Identifier: Apache-2.0
"""bertjax.load and bertjax.fit return what the commands print and write."""

import json
import subprocess
import sys

import numpy as np
import pytest

import bertjax
from bertjax import UserError, config, embed, evaluate, fill_mask, predict
from bertjax.checkpoints import workdir

TEXTS = ["A short line.", "Another one, which is longer than the first of them."]
BLANK = "This function returns a [MASK] of strings."


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run, trained from Python."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "text.txt").write_text("\n".join(TEXTS * 40) + "\n")
    made = config.base()
    made.model.size = "tiny"
    config.make_smoke(made)
    made.data.train = made.data.valid = str(folder / "text.txt")
    made.data.cache, made.data.vocab_size = str(folder / "cache"), 300
    made.data.plan = "full_sentences"
    made.total.steps = 3
    assert bertjax.fit(made, str(folder / "run")) == 0
    return folder / "run"


def test_importing_loads_nothing():
    code = "import sys, bertjax; bertjax.load, bertjax.fit; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not {"jax", "numpy", "tensorflow", "flax"} & {*done.stdout.split()}


def test_fit_is_what_train_runs(trained):
    rows = workdir.rows_up_to(trained / "metrics.jsonl", 3)
    assert json.loads(rows[-1])["step"] == 3
    assert json.loads((trained / "overrides.json").read_text()) == {}


def test_blanks_are_those_of_the_command(trained, capsys):
    model = bertjax.load(trained)
    one, two = model.fill_mask([BLANK, f"{BLANK} And [MASK]."], top_k=3)
    assert len(one) == 1 and len(two) == 2 and len(two[0]) == 3
    assert model.fill_mask(BLANK, top_k=3) == one
    fill_mask.main([f"--model={trained}", "--json", "--top_k=3", BLANK])
    assert json.loads(capsys.readouterr().out)["masks"] == one
    with pytest.raises(UserError, match="nothing to fill"):
        model.fill_mask("no blank")


def test_vectors_are_those_of_the_command(trained, tmp_path):
    lines, out = tmp_path / "lines.txt", tmp_path / "out.npy"
    lines.write_text("\n".join(TEXTS) + "\n")
    embed.main([f"--model={trained}", f"--text={lines}", f"--out={out}"])
    model = bertjax.load(trained)
    np.testing.assert_array_equal(model.embed(TEXTS), np.load(out))
    hidden = model.hidden(TEXTS)
    means = np.stack([h.mean(axis=0) for h in hidden])
    np.testing.assert_allclose(model.embed(TEXTS, pooling="mean"), means, atol=1e-5)
    firsts = model.embed(TEXTS, pooling="cls", normalize=True)
    np.testing.assert_allclose((firsts**2).sum(1), 1, rtol=1e-5)


def test_a_batch_is_padded_and_cut(trained):
    model = bertjax.load(trained)
    batch = model.make_batch(TEXTS, max_length=8)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert ids.shape == mask.shape == (2, 8) and ids.dtype == mask.dtype == np.int32
    for text, row, real in zip(TEXTS, ids, mask, strict=True):
        pieces = model.tokenizer.encode(text)[:6]
        whole = [model.tokenizer.cls_id, *pieces, model.tokenizer.sep_id]
        assert row[real == 1].tolist() == whole
        assert (row[len(whole) :] == model.tokenizer.pad_id).all()
        assert real.tolist() == sorted(real, reverse=True)


def test_logits_are_what_blanks_are_guessed_by(trained):
    model = bertjax.load(trained)
    (logits,) = model.logits([BLANK])
    ids = [model.tokenizer.cls_id, *model.tokenizer.encode_with_masks(BLANK)]
    at = ids.index(model.tokenizer.mask_id)
    likely = np.exp(logits[at] - logits[at].max())
    ((best, *_),) = model.fill_mask(BLANK)
    share = likely[best["id"]] / likely.sum()
    assert share == pytest.approx(best["probability"], rel=1e-4)


def test_blanks_are_guessed_where_the_model_learnt_to(trained):
    """A model of masked next-token prediction guesses a blank from the position before
    it, as generate does."""
    model = bertjax.load(trained)
    model.config.objective = "mntp"
    (logits,) = model.logits([BLANK])
    ids = [model.tokenizer.cls_id, *model.tokenizer.encode_with_masks(BLANK)]
    at = ids.index(model.tokenizer.mask_id) - 1
    likely = np.exp(logits[at] - logits[at].max())
    ((best, *_),) = model.fill_mask(BLANK)
    share = likely[best["id"]] / likely.sum()
    assert share == pytest.approx(best["probability"], rel=1e-4)
    assert model.generate([BLANK])[0][0]["ids"][at] == best["id"]


def test_scores_are_those_of_evaluate(trained, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS) + "\n")
    evaluate.main([f"--model={trained}", "--what=pll", f"--text={lines}", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert bertjax.load(trained).score(TEXTS) == [row["score"] for row in rows]


def test_saved_for_hugging_face_and_opened_again(trained, tmp_path):
    model = bertjax.load(str(trained))
    for form in ("hf", "bertjax"):
        model.save(tmp_path / form, format=form)
        again = bertjax.load(tmp_path / form)
        np.testing.assert_array_equal(again.embed(TEXTS), model.embed(TEXTS))
    assert (tmp_path / "hf/model.safetensors").exists()
    with pytest.raises(UserError, match="exists already"):
        model.save(tmp_path / "hf")
    with pytest.raises(UserError, match="not finetuned"):
        model.predict(["a row"])
    with pytest.raises(UserError, match="no such directory"):
        bertjax.load(tmp_path / "nothing")


@pytest.fixture(scope="module")
def finetuned(trained, tmp_path_factory):
    """The tiny run, finetuned for a few steps to classify lines of two kinds."""
    folder = tmp_path_factory.mktemp("finetuned")
    rows = [f"A short line {i}.\tshort\nA longer line {i}.\tlong\n" for i in range(8)]
    (folder / "rows.tsv").write_text("line\tkind\n" + "".join(rows))
    made = config.load_config("finetune/classify.py:smoke")
    made.init_from = str(trained)
    made.data.train = made.data.valid = str(folder / "rows.tsv")
    made.data.cache = str(folder / "cache")
    made.task.text, made.task.label = "line", "kind"
    made.total.steps = 3
    assert bertjax.fit(made, str(folder / "run")) == 0
    return folder / "run"


def test_answers_are_those_of_the_command(finetuned, tmp_path, capsys):
    lines = [*TEXTS, "A short line 3."]
    rows = [{"line": line} for line in lines]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    predict.main([f"--model={finetuned}", f"--input={tmp_path / 'rows.jsonl'}"])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = bertjax.load(finetuned)
    assert model.predict(rows) == said and len(said) == 3
    assert model.predict(lines) == said
    assert model.predict(line for line in lines) == said
    assert model.predict(np.array(lines)) == said
    with pytest.raises(UserError, match="rows=None must be a list of objects"):
        model.predict(None)
    with pytest.raises(UserError, match=r"^rows: .*int64 is not JSON"):
        model.predict([{**rows[0], "more": np.int64(3)}])
    assert {answer["label"] for answer in said} <= {"short", "long"}
    with pytest.raises(UserError, match=r"rows:1.*line"):
        model.predict([{"text": "no such column"}])
    with pytest.raises(UserError, match="no masked-LM head"):
        model.fill_mask(BLANK)


def test_numbers_of_numpy_are_numbers(trained):
    """Formerly the program for the first number was used for the next one."""
    model = bertjax.load(trained)
    for n in (2, 4):
        assert len(model.fill_mask(BLANK, top_k=np.int64(n))[0]) == n
    short, long = (model.embed(TEXTS[1:], max_length=np.int64(n)) for n in (4, 9))
    assert np.abs(short - long).max() > 1e-3
    assert np.array_equal(long, model.embed(TEXTS[1:], max_length=9))


def test_tables_are_not_taken_for_the_names_of_their_columns(trained, finetuned):
    class Table(list):
        columns = ("text", "label")

    texts, model = Table(["text", "label"]), bertjax.load(trained)
    for method in (model.embed, model.score, model.generate):
        with pytest.raises(UserError, match=r"texts is a table: .*to_dict"):
            method(texts)
        with pytest.raises(UserError, match="must be a list of strings"):
            method({"text": "a text"})
    with pytest.raises(UserError, match=r"rows is a table: .*to_dict"):
        bertjax.load(finetuned).predict(texts)


def test_what_is_refused(trained, tmp_path):
    model = bertjax.load(trained)
    assert repr(model).startswith("Model(") and "layers of" in repr(model)
    assert model.embed([]).shape == (0, model.cfg.hidden_size)
    for method in (model.embed, model.hidden, model.logits, model.score):
        with pytest.raises(UserError, match="must be a list of strings"):
            method("one text")
        with pytest.raises(UserError, match="5 must be a string"):
            method(["a text", 5])
    for wrong in (0, "3", 2.5):
        with pytest.raises(UserError, match="top_k="):
            model.fill_mask(BLANK, top_k=wrong)
    for method in (model.embed, model.hidden, model.logits):
        with pytest.raises(UserError, match=r"^batch_size=-1 must be a whole number"):
            method(["a text"], batch_size=-1)
    with pytest.raises(UserError, match=r"^max_length=2 must be a whole number from 3"):
        model.make_batch(["a text"], 2)
    for method in (model.make_batch, model.embed):
        with pytest.raises(UserError, match=r"^max_length=999: the model has "):
            method(["a text"], max_length=999)
    with pytest.raises(UserError, match=r"^pooling='max' is unknown"):  # not --pooling
        model.embed(["a text"], pooling="max")
    with pytest.raises(UserError, match=r"^weights=ema: .* has no moving average"):
        bertjax.load(trained, weights="ema")
    with pytest.raises(UserError, match=r"^path=.* --local-dir DIR"):
        bertjax.load("no/such")
    with pytest.raises(UserError, match=f"model={trained}.* was not finetuned"):
        model.predict(["a row"])
    with pytest.raises(UserError, match=r"^dtype=<class .*> must be a name"):
        bertjax.load(trained, dtype=np.float32)
    with pytest.raises(UserError, match=r"^normalize='no' must be True or False"):
        model.embed(TEXTS, normalize="no")
    with pytest.raises(UserError, match="must be a list of strings"):
        model.embed(np.array("one text"))
    with pytest.raises(UserError, match="config is a dict"):
        bertjax.fit({}, str(tmp_path))
    made = config.load_config("bert.py:smoke")
    with pytest.raises(UserError, match="workdir='' must be a path"):
        bertjax.fit(made, "")
    with pytest.raises(UserError, match=r"duration='step' is unknown.* 'steps'"):
        config.duration(step=3)
    made.optim.foo = 1
    with pytest.raises(UserError, match=r"config: key='optim\.foo' is unknown"):
        bertjax.fit(made, str(tmp_path / "run"))
    del made.optim.foo
    made.optim.lr = None
    with pytest.raises(UserError, match=r"config: optim\.lr is None; its default is"):
        bertjax.fit(made, str(tmp_path / "run"))
    for method in (bertjax.load, model.save):
        with pytest.raises(UserError, match="=3 must be a path"):
            method(3)
    assert not (tmp_path / "run").exists()
