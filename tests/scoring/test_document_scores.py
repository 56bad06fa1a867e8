# SPDX-License-Identifier: Apache-2.0
"""--what=lm and --what=elbo: documents, their totals, and refusals."""

import json
import math
import types

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from bertjax import UserError, evaluate
from bertjax.assembly import models
from bertjax.data.corpus.documents import Document
from bertjax.scoring import document_costs, sequence_scorers
from bertjax.scoring import lm as lm_scores
from bertjax.scoring.document_costs import Cost, Text, first_characters, read_text


class Tokenizer:
    """One token per letter; the encoder of documents reads `kind`."""

    kind, joins_with_space, has_sentences, vocab_size = "wordpiece", False, True, 128

    @property
    def engine(self):
        return self

    def encode_batch(self, texts, joined=False):
        return [[ord(x) for x in text if not x.isspace()] for text in texts]


def test_the_text_of_a_document():
    document = Document(["One  two. Three", "é\u200b四"])
    text = read_text(Tokenizer(), Document(["One  two. Three", "four"]))
    assert bytes(text.ids.tolist()) == b"Onetwo.Threefour"
    assert text[1:] == (len("One two. Three") + 4, len("One two. Three") + 4)
    some = read_text(Tokenizer(), Document(["One  two. Three", "four"]), 17)
    assert bytes(some.ids.tolist()) == b"Onetwo.Threefou"
    wide = Tokenizer()
    wide.vocab_size = 1 << 20
    text = read_text(wide, document)
    assert text[1:] == (14 + 3, 14 + 2 + 3 + 3)
    assert first_characters(["ab cd"], 4) == ["ab"]
    assert first_characters(["四四四", "a"], 2) == ["四四"]
    assert first_characters(["ab", "cd"], 2) == ["ab"]
    assert first_characters(["ab", "cd"], 9) == ["ab", "cd"]


def test_costs_add_up_by_hand():
    """Two documents and one without tokens add up to these scores."""
    texts = [
        Text(np.array([5, 1, 7]), 6, 8),
        Text(np.array([5]), 4, 4),
        Text(np.array([], int), 1, 2),
    ]
    found = document_costs.add_up(
        "lm", texts, [Cost(6.0, 3), Cost(2.0, 1), Cost(0.0, 0)], 1
    )
    assert found["lm_loss"] == 2.0
    assert found["bits_per_character"] == pytest.approx(8 / math.log(2) / 11)
    assert found["bits_per_byte"] == pytest.approx(8 / math.log(2) / 14)
    counts = {"tokens": 4, "unknown": 1, "documents": 3, "no_tokens": 1}
    assert counts.items() <= found.items() and found["lm_loss_ci95"] == 0
    with pytest.raises(UserError, match="no token can be scored"):
        document_costs.add_up("lm", texts[1:2], [Cost(0.0, 0)], 1)


@pytest.fixture
def run(trained, corpus, tmp_path, monkeypatch, capsys):
    """A function that runs the command on three short documents, as if the run had the
    given objective."""
    file = tmp_path / "some.txt"
    some = (corpus / "valid.txt").read_text(encoding="utf-8").split("\n\n")[:3]
    file.write_text("\n\n".join(text[:400] for text in some), encoding="utf-8")
    open_model = models.open_model

    def call(*given, objective="mlm", text=file):
        def opened(*args):
            model = open_model(*args)
            model.config.objective = objective
            return model

        monkeypatch.setattr(models, "open_model", opened)
        capsys.readouterr()
        if text and not any("--text" in x for x in given):
            given = (f"--text={text}", *given)
        assert evaluate.main([f"--model={trained}", *given]) == 0
        return capsys.readouterr().out

    return call


def test_lm_of_documents(run, trained):
    found = json.loads(run("--what=lm", "--json", objective="mlm*3+clm*1"))
    assert (found["model"], found["step"]) == (str(trained), 12)
    assert found["layout"] == {
        "name": "common",
        "unit": "document",
        "characters": 0,
        "examples": 0,
        "length": 32,
        "stride": 16,
        "begin": "cls",
    }
    assert 0 < found["lm_loss"] < 12 and found["lm_loss_ci95"] > 0
    bits = found["lm_loss"] * found["tokens"] / math.log(2)
    assert found["bits_per_character"] == pytest.approx(bits / found["characters"])
    assert found["bits_per_byte"] == pytest.approx(bits / found["bytes"])
    assert found["documents"] == 3 and found["windows"] > 6
    # The documents are the same with any windows.
    given = "--what=lm", "--json", "--length=64", "--stride=64", "--begin=none"
    with pytest.raises(UserError, match=r"--stride=64 .* it is 62 at most"):
        run(*given, objective="clm")
    more = json.loads(run(*given[:3], "--stride=9", "--begin=none", objective="clm"))
    assert more["tokens"] == found["tokens"] - 3, "the first of each is not scored"
    assert more["layout"]["begin"] == "none"
    for same in ("characters", "bytes", "documents", "unknown"):
        assert more[same] == found[same]
    told = run("--what=lm", "--characters=60", "--examples=2", objective="clm")
    assert "layout common: unit document; characters 60; examples 2; len" in told
    assert "documents                2" in told and "windows                  2" in told


def test_a_text_of_one_token_has_nothing_to_predict(run, tmp_path):
    (tmp_path / "one.txt").write_text("a\n")
    given = f"--text={tmp_path}/one.txt", "--what=lm", "--begin=none"
    with pytest.raises(UserError, match="no token can be scored"):
        run(*given, objective="clm")


def test_elbo_of_documents(run):
    given = "--what=elbo", "--json", "--characters=60", "--draws=4"
    found = json.loads(run(*given))
    assert found == json.loads(run(*given)), "fixed draws"
    assert found["layout"]["draws"] == 4
    assert found["layout"]["estimator"] == "any_order"
    assert 0 < found["elbo_loss"] < 12 and found["characters"] <= 180
    assert 0 < found["interval"] < found["elbo_loss"]
    bits = found["elbo_loss"] * found["tokens"] / math.log(2)
    assert found["bits_per_character"] == pytest.approx(bits / found["characters"])
    other = json.loads(run(*given, "--estimator=continuous"))
    off = 3 * (found["interval"] + other["interval"])
    assert found["elbo_loss"] == pytest.approx(other["elbo_loss"], abs=off)
    assert found["elbo_loss"] != other["elbo_loss"]


PAIR = dict(sentence_good="a list of words.", sentence_bad="a words list of.", UID="x")


def test_pairs_and_lines_by_other_scorers(run, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR))
    pairs = "--what=pairs", f"--text={tmp_path}/pairs.jsonl", "--json"
    default = {"mlm": "pll", "clm": "lm", "diffusion": "elbo", "mntp*3+clm*1": "mntp"}
    for objective, name in default.items():
        found = json.loads(run(*pairs, objective=objective))
        assert found["scorer"] == name and found["pairs"] == 1
        assert ("draws" in found) == (name == "elbo")
        assert ("variant" in found) == (name in ("pll", "mntp"))
    (tmp_path / "lines.txt").write_text("a list of words.\nThe statement")
    lines = "--what=pll", f"--text={tmp_path}/lines.txt"
    rows = run(*lines, "--json", objective="clm").splitlines()
    assert [json.loads(row)["scorer"] for row in rows] == ["lm", "lm"]
    told = run(*lines, objective="clm")
    assert "  log_likelihood" in told and "  perplexity" in told
    assert "pseudo_perplexity" in run(*lines)
    assert "bound_of_perplexity" in run(*lines, "--scorer=elbo", "--draws=4")


@pytest.mark.parametrize(
    "given, objective, words",
    [
        (["--what=lm"], "mlm", "use --what=pll or --what=elbo"),
        (["--what=elbo"], "clm", "which never fills masks: use --what=lm"),
        (["--what=mlm"], "clm", "use --what=lm"),
        (["--what=lm", "--length=513"], "clm", "--length=513 is too long: the model"),
        (["--what=lm", "--stride=33"], "clm", "--stride=33 is too large"),
        (["--what=lm", "--begin=bos"], "clm", "--begin='bos' is unknown"),
        (["--what=lm", "--scorer=pll"], "clm", "--scorer has no effect with --what=lm"),
        (
            ["--what=elbo", "--begin=cls"],
            "mlm",
            "--begin has no effect with --what=elbo",
        ),
        (["--what=elbo", "--draws=3"], "mlm", "--draws=3 is odd"),
        (["--what=elbo", "--estimator=x"], "mlm", "--estimator='x' is unknown"),
        (["--what=lm", "--text={}/none.txt"], "clm", "leaves no token of"),
        (
            ["--what=pll", "--scorer=lm", "--text={}/a.txt"],
            "mlm",
            "--scorer=lm: {trained} has objective=mlm, which never predicts",
        ),
        (
            ["--what=pll", "--variant=original", "--text={}/a.txt"],
            "clm",
            "--variant has no effect with --scorer=lm: it is read with --scorer=pll or",
        ),
        (
            ["--what=pll", "--draws=4", "--text={}/a.txt"],
            "mlm",
            "--draws has no effect",
        ),
    ],
)
def test_refusals(run, trained, tmp_path, given, objective, words):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "none.txt").write_text("\u200b\n")
    with pytest.raises(UserError) as e:
        run(*(x.format(tmp_path) for x in given), objective=objective)
    assert words.format(trained=trained) in str(e.value) and "\n" not in str(e.value)


def test_the_longest_row_that_a_run_has_seen(trained):
    from bertjax.scoring.sequence_scorers import make_language_model

    opened = models.open_model(str(trained), "--model")
    assert make_language_model(opened, ({}, opened.cfg)).longest == 32
    opened.config.phases = "percent=50; length=48"
    assert make_language_model(opened, ({}, opened.cfg)).longest == 48
    # 36 of the 48 slots are text, the others copies.
    opened.config.objective = "pmlm"
    assert make_language_model(opened, ({}, opened.cfg)).longest == 36


def test_no_token_stands_where_training_had_sep(trained):
    """The last token of full training rows was always [SEP], so no other token is
    likely at that position."""
    args = types.SimpleNamespace(length=32, stride=0, characters=0, examples=0)
    opened = models.open_model(str(trained), "--model")
    lm = sequence_scorers.make_language_model(opened, ({}, opened.cfg))
    seen = []

    def read_layout(args, lm, specials, unscored=0, read=document_costs.read_layout):
        seen.append((read(args, lm, specials, unscored).room, unscored))
        raise UserError("seen")

    for closed, begin, room in (
        (True, "cls", 30),
        (True, "none", 31),
        (False, "cls", 31),
        (False, "none", 32),
    ):
        args.begin = begin
        with pytest.MonkeyPatch.context() as patch:
            found = "lm", lm._replace(closed=closed)
            patch.setattr(lm_scores, "open_language_model", lambda *a, f=found: f)
            patch.setattr(document_costs, "read_layout", read_layout)
            with pytest.raises(UserError, match="seen"):
                lm_scores.score(args, str(trained), "--model")
        assert seen.pop() == (room, begin == "none")


def test_gpt2_equals_transformers(corpus, tmp_path, capsys):
    """The loss of a text in windows is that of transformers' guide to perplexity."""
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder, text = tmp_path / "gpt2", tmp_path / "text.txt"
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(corpus / "train.txt")], 400, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(tmp_path))
    tokenizer = hf.GPT2Tokenizer(
        vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt")
    )
    sizes = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    ends = dict(bos_token_id=0, eos_token_id=0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=400, **sizes, **ends)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text("The history of a name began with a small market. It grew. " * 5)
    ids = tokenizer(text.read_text().strip(), return_tensors="pt")["input_ids"]
    given = f"--model={folder}", "--what=lm", f"--text={text}", "--json"
    for stride in (16, 32):
        costs, tokens, told = 0.0, 0, 0
        for start in range(0, ids.shape[1], stride):
            window = ids[:, start : start + 64]
            labels = window.clone()
            labels[:, : told - start] = -100
            with torch.no_grad():
                loss = float(model(window, labels=labels).loss)
            new = int((labels[:, 1:] != -100).sum())
            costs, tokens, told = costs + loss * new, tokens + new, start + 64
            if told >= ids.shape[1]:
                break
        capsys.readouterr()
        evaluate.main([*given, f"--stride={stride}"])
        found = json.loads(capsys.readouterr().out)
        assert found["layout"]["begin"] == "none" and found["windows"] > 3
        assert found["tokens"] == tokens == ids.shape[1] - 1
        assert found["lm_loss"] == pytest.approx(costs / tokens, rel=1e-5)


def test_mntp_is_scored_on_the_common_rows_one_place_to_the_left(run, trained):
    """The objective itself has the same loss on the same rows and masks."""
    from bertjax.scoring import mlm_loss
    from bertjax.scoring.mlm import COMMON

    given = "--what=mlm", "--json", "--rates=0.3", "--length=32"
    found = json.loads(run(*given, objective="mntp*3+clm*1", text=""))
    assert found["layout"]["read"] == "before"
    plain = json.loads(run(*given, objective="mlm", text=""))
    found, plain = (x["rates"]["0.3"] for x in (found, plain))
    assert found["predictions"] == plain["predictions"]
    assert found["mlm_loss"] != plain["mlm_loss"]
    opened = models.open_model(str(trained), "--model")
    opened.config.update(objective="mntp", phases="")
    opened.config.data.update(COMMON | {"length": 32})
    opened.config.eval.update(examples=0, mask_rate=None)
    own = mlm_loss.evaluate(opened, opened.read_params("mlm"), None, [0.3])
    (own,) = own.values()
    assert own[0.3]["mntp_loss"] == pytest.approx(found["mlm_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "objective",
    ["clm", "prefix", "mntp*3+clm*1", "pmlm", "diffusion", "diffusion:block=8"],
)
def test_without_what_a_model_is_scored_by_its_own_objective(run, objective):
    found = json.loads(run("--json", objective=objective))
    losses = [key for key in found if key.endswith("_loss")]
    assert losses and all(0 < found[key] < 30 for key in losses)
    assert 0 < found["predictions"] <= 2 * found["tokens"]
