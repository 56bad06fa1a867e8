# SPDX-License-Identifier: Apache-2.0
"""Answers from Python and by the command: one compilation, lines without columns."""

import json

import jax
import numpy as np
import pytest

import bertjax
from bertjax import UserError, evaluate, fill_mask, predict, train
from bertjax.assembly import models
from bertjax.inference import embed_texts, fill_blanks, predict_rows
from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.scoring import pseudo_likelihoods as pll

pytestmark = pytest.mark.usefixtures("no_listener")
GOOD = "The result is clear and useful"
COLUMNS = "--config.task.text=text", "--config.task.label=label"
BAD = "The result is wrong"


@pytest.fixture(scope="module")
def finetuned(vocabulary, tmp_path_factory):
    """{objective: workdir} of two runs of two steps, on classes and on tags."""
    folder = tmp_path_factory.mktemp("predicting")
    rows = [f"{GOOD} {i}\tgood\n{BAD} {i}\tbad\n" for i in range(8)]
    (folder / "rows.tsv").write_text("text\tlabel\n" + "".join(rows))
    (folder / "rows.bio").write_text("The\tO\nresult\tB-X\nis\tO\n\n" * 8)
    found = {}
    for name, table, *more in (
        (
            "classify",
            "rows.tsv",
            "--config.task.text=text",
            "--config.task.label=label",
        ),
        ("tag", "rows.bio"),
    ):
        arguments = [
            f"--config=finetune/{name}.py:smoke",
            f"--config.data.vocab={vocabulary}",
            f"--config.data.train={folder / table}",
            f"--config.data.valid={folder / table}",
            "--config.data.length=64",
            "--config.batch_size=8",
            "--config.model.num_hidden_layers=1",
            "--config.model.hidden_size=32",
            "--config.total.steps=2",
            *more,
        ]
        train.main([*arguments, f"--workdir={folder / name}"])
        found[name] = folder / name
    return found


# ---------------------------------------------------------------- from Python
@pytest.fixture
def traces(monkeypatch):
    """A list that grows each time a program with an encoder is traced."""
    seen, apply = [], encoder.apply

    def counted(*given, **named):
        seen.append(1)
        return apply(*given, **named)

    monkeypatch.setattr(encoder, "apply", counted)
    return seen


def answer(model, *texts):
    rows = [predict.tables.Row({"text": text}, "x:1") for text in texts]
    return list(predict_rows.answer(model, rows))


def test_a_second_call_compiles_nothing(finetuned, traces):
    """One program serves texts one by one, one serves a few at a time, also when the
    model is opened again."""
    path = str(finetuned["classify"])
    model = predict_rows.open_finetuned(path)
    turned = "The result is useful and clear"
    first = answer(model, GOOD)
    again = answer(model, turned), answer(predict_rows.open_finetuned(path), turned)
    assert len(traces) == 1 and again[0] == again[1]
    together = answer(model, GOOD, turned, GOOD)
    assert len(traces) == 2 and answer(model, turned, GOOD, turned, turned)
    assert len(traces) == 2
    shares = first[0]["probabilities"]
    assert shares.keys() == {"bad", "good"} and sum(shares.values()) == pytest.approx(1)
    assert first[0]["score"] == max(shares.values()) == shares[first[0]["label"]]
    alone = first[0]["score"], again[0][0]["score"]
    assert [row["score"] for row in together[:2]] == pytest.approx(alone, abs=1e-5)


def test_nor_in_vectors_blanks_and_likelihoods(traces):
    cfg = EncoderConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64,
    )  # fmt: skip
    a, b = jax.random.split(jax.random.key(3))
    params = {"encoder": encoder.init(a, cfg), "mlm": heads.init_mlm(b, cfg)}

    class Letters:
        pad_id, unk_id, cls_id, sep_id, mask_id = range(5)
        vocab_size, pieces = 40, [chr(60 + i) for i in range(40)]
        word_starts = np.ones(40, bool)

        def encode_batch(self, texts):
            return [[ord(x) - 60 for x in text] for text in texts]

    def vectors(*sizes):
        encode = embed_texts.make_encoder(cfg, params, "mean", True)
        rows = [np.full(n, 7, np.int32) for n in sizes]
        return embed_texts.embed_rows(encode, rows, 0, 4, 64)

    def blanks(*ids):
        return fill_blanks.make_filler(cfg, params, Letters(), 3)([2, *ids, 3])

    def likely(*texts):
        score = pll.make_scorer(cfg, params, Letters(), "original")
        return pll.score_texts(cfg, Letters(), texts, score)

    for first, second in (
        (lambda: vectors(9), lambda: vectors(12)),
        (lambda: blanks(4, 7, 9), lambda: blanks(8, 4, 9, 4)),
        (lambda: likely("ABC"), lambda: likely("CBA")),
    ):
        first()
        assert len(traces) == 1
        second()
        assert len(traces) == 1
        traces.clear()


def test_what_an_imported_model_lacks_goes_where_it_is_asked_for(
    finetuned, tmp_path, capsys
):
    from bertjax import convert

    there = tmp_path / "hf"
    convert.main([f"--from={finetuned['classify']}", f"--to={there}", "--format=hf"])
    capsys.readouterr()
    said: list[str] = []
    models.open_model(str(there), "--model", said.append)
    assert said and "bert, 1 layer of" in said[0]
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------- the command
def said(capsys, model, *arguments):
    capsys.readouterr()
    predict.main([f"--model={model}", *map(str, arguments)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_bare_lines(finetuned, tmp_path, pipe, capsys):
    """.txt files and --format=text have one text per line; an empty line is a text."""
    model, other = finetuned["classify"], tmp_path / "lines.dat"
    lines = tmp_path / "lines.txt"
    table = tmp_path / "table.tsv"
    texts = [GOOD, "", BAD]
    lines.write_text("\n".join(texts) + "\n")
    other.write_text("\r\n".join(texts))
    table.write_text("\n".join(["text", *texts]) + "\n")
    found = said(capsys, model, f"--input={table}")
    assert len(found) == 3 and said(capsys, model, f"--input={lines}") == found
    assert said(capsys, model, f"--input={other}", "--format=text") == found
    pipe(lines.read_bytes())
    assert said(capsys, model, "--input=-", "--format=text") == found
    pipe(lines.read_bytes())
    with pytest.raises(UserError, match=r"TEXT='text' is unknown.*--format=text reads"):
        said(capsys, model, "--input=-")
    with pytest.raises(
        UserError, match=r"lines\.txt: lines of text have one column; a"
    ):
        said(capsys, model, f"--input={lines}", "--columns=a,b")
    with pytest.raises(UserError, match=r"text: .*; this model's rows have a, b"):
        said(capsys, model, f"--input={lines}", "--columns=a,b", "--format=text")


def test_tags_have_probabilities(finetuned, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text("The result is\n\nresult\n")
    found = said(capsys, finetuned["tag"], f"--input={lines}")
    assert [len(row["scores"]) for row in found] == [3, 0, 1]
    assert [len(row["tags"]) for row in found] == [3, 0, 1]
    scores = [score for row in found for score in row["scores"]]
    assert all(0.5 <= score <= 1 for score in scores) and len({*scores}) == 4
    other = tmp_path / "lines.dat"
    other.write_text("The\tresult is\n\nresult\n")  # a tab is a space in plain text
    assert said(capsys, finetuned["tag"], f"--input={other}", "--format=text") == found


def test_a_finetuned_model_fills_no_blanks(finetuned, tmp_path):
    model, text = finetuned["classify"], tmp_path / "text.txt"
    text.write_text(GOOD)
    named = r"was finetuned \(objective=classify\) and has no masked-LM head; "
    with pytest.raises(UserError, match=f"--model={model} {named}bertjax.predict uses"):
        fill_mask.main([f"--model={model}", "A [MASK]."])
    with pytest.raises(UserError, match=f"--what=pll: {model} {named}without --what"):
        evaluate.main([f"--model={model}", "--what=pll", f"--text={text}"])


@pytest.mark.parametrize("name", ["answers.csv", "answers.TSV"])
def test_a_table_is_not_written(finetuned, name, tmp_path):
    given = [
        f"--model={finetuned['classify']}",
        "--input=-",
        f"--out={tmp_path}/{name}",
    ]
    with pytest.raises(UserError, match=rf"--out=.*{name}: JSON lines are written"):
        predict.main(given)


def test_a_tagger_takes_texts_as_it_takes_lines(finetuned):
    model = bertjax.load(str(finetuned["tag"]))
    texts = ["The result\nis", "", "The  end"]
    objects = model.predict([{"tokens": text.split()} for text in texts])
    assert model.predict(texts) == objects
    assert [one["tokens"] for one in objects][1:] == [[], ["The", "end"]]


@pytest.mark.parametrize("name", ["tag", "classify"])
def test_a_label_that_no_training_row_has(finetuned, name, tmp_path):
    folder = finetuned[name].parent
    other = {
        "tag": ("v.bio", "The\tB-Z\n"),
        "classify": ("v.tsv", "text\tlabel\na\tno"),
    }
    file = tmp_path / other[name][0]
    file.write_text(other[name][1])
    given = [f"--config=finetune/{name}.py:smoke", f"--config.data.valid={file}"]
    given += [f"--config.data.train={folder / 'rows'}{file.suffix}", "--dry_run"]
    given += [f"--config.init_from={finetuned[name]}"]
    given += COLUMNS * (name == "classify")
    words = (
        r"no row of data.train has it \(list all in task.labels\): the (tag|label)='"
    )
    with pytest.raises(UserError, match=words):
        train.main(given)
