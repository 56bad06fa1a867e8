# SPDX-License-Identifier: Apache-2.0
"""bertjax.evaluate: mask rates, lines, pairs, and refusals."""

import json
import math

import jax
import numpy as np
import pytest
from conftest import succeeded

from bertjax import UserError, evaluate
from bertjax.assembly import models, prepared_text
from bertjax.config.schema import base
from bertjax.data.batches import Batches, batch_sha256
from bertjax.models.config import EncoderConfig
from bertjax.objectives.make_objective import make_objective
from bertjax.scoring import own, retrieval
from bertjax.scoring.mlm_loss import Tally, make_guesser
from bertjax.scoring.scorer import Scores, value_lines
from bertjax.tasks import passages
from bertjax.tasks.passages import Collection

PAIR = dict(sentence_good="a list of words.", sentence_bad="a words list of.", UID="x")

NO_TOKEN = dict(sentence_bad="\u200b")


@pytest.fixture
def run(trained, capsys):
    """A function that runs the command in this process and returns its output."""

    def call(*given):
        capsys.readouterr()
        assert evaluate.main([f"--model={trained}", *given]) == 0
        return capsys.readouterr()

    return call


def test_rows_add_up_by_hand():
    """Two batches, one padding row, and a document 0 of two rows."""
    log_unigram, characters = np.log([0.5, 0.25, 0.25]), np.array([0, 2, 4])
    tally = Tally(np.array([0, 0, 1]), log_unigram, characters, ["mlm"])
    real = np.array([1.0, 1.0]), np.array([1.0, 0.0])
    ids = np.array([[1, 2], [1, 0]]), np.array([[2, 2], [2, 2]])
    weights = np.array([[1.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 1.0], [0.0, 0.0]])
    batches = [
        {
            "example_weights": r,
            "attention_mask": np.ones((2, 3), int),
            "mlm_ids": i,
            "mlm_weights": w,
        }
        for r, i, w in zip(real, ids, weights, strict=True)
    ]
    loss = np.array([[1.0, 2.0], [3.0, 9.0]])
    guesses = {
        "loss": loss,
        "confidence": np.full((2, 2), 0.5),
        "right": np.array([[True, False], [True, True]]),
    }
    sums = {"mlm_loss": (6.0, 3.0)}
    means = tally.score(lambda params, batch: (sums, guesses), None, batches)
    assert means == {"mlm_loss": 2.0}
    found = tally.results()
    assert (found["tokens"], found["predictions"], found["documents"]) == (9, 5, 2)
    assert found["unigram_cross_entropy"] == pytest.approx(math.log(4))
    # Losses 1 2 3 | 1 2, characters 2 4 2 | 4 4.
    assert found["bits_per_character"] == pytest.approx(9 / math.log(2) / 16)
    assert found["mlm_calibration_error"] == pytest.approx(3 / 5 - 0.5)
    # Document 0 has loss 6, weight 3; document 1 loss 3, weight 2. The mean is 9/5, and
    # the residuals are 0.6 and -0.6.
    width = 12.7062 * math.sqrt(2 * 2 * 0.36) / 5
    assert found["mlm_loss_ci95"] == pytest.approx(width, rel=1e-4)


# Keys with which a run may have been trained: its own rows, masks and objective.
OTHERS = (
    {},
    {
        "data.plan": "document",
        "data.packed": True,
        "data.length": 20,
        "data.paper_compat": True,
        "eval.mask_rate": 0.5,
    },
    {
        "objective": "mlm+sop",
        "phases": "steps=3 length=16; mask_rate=0.4",
        "data.short_seq_prob": 0.9,
        "data.masking": "macbert",
        "data.similar": "nosuch.txt",
        "data.mask_rate": 0.4,
        "data.corruption": "1,0,0",
        "data.max_predictions": 2,
    },
    {"objective": "electra:generator=0.5", "data.replacement": "unigram"},
)


@pytest.fixture
def pretend(monkeypatch):
    """A function that makes opened models look as if trained with other keys."""
    open_model, read_params = models.open_model, models.read_params

    def change(keys):
        def opened(*given):
            model = open_model(*given)
            model.config.update_from_flattened_dict(keys)
            if "electra" in model.config.objective:
                made, _ = make_objective(model.config.objective, model.cfg)
                params = made.init(jax.random.key(0))
                monkeypatch.setattr(models, "read_params", lambda *_: params)
            return model

        monkeypatch.setattr(models, "open_model", opened)
        monkeypatch.setattr(models, "read_params", read_params)

    return change


@pytest.fixture
def batches(monkeypatch):
    """A list that collects the hashes of the scored batches."""
    seen, eval_batches = [], Batches.eval_batches

    def watched(self, *given):
        for batch in eval_batches(self, *given):
            seen.append(batch_sha256(batch))
            yield batch

    monkeypatch.setattr(Batches, "eval_batches", watched)
    return seen


def test_models_are_compared_on_the_same_rows_and_masks(run, pretend, batches):
    """They do not depend on the training config, so a model's scores do not either."""
    hashes, found = [], []
    for keys in OTHERS:
        pretend(keys)
        batches.clear()
        said = run("--what=mlm", "--json", "--rates=0.15,0.3", "--length=48").out
        hashes.append(tuple(batches))
        if "electra" not in keys.get("objective", ""):
            found.append(said)
    assert len(set(hashes)) == 1 and len(hashes[0]) > 2
    assert len(set(found)) == 1


def test_without_what_rows_and_masks_are_the_run_s_own(run, pretend, batches):
    hashes = []
    for keys in (*OTHERS[:2], {"data.masking": "spanbert"}):
        pretend(keys | {"objective": "mlm"})
        batches.clear()
        about = json.loads(run("--json").out)["layout"]
        assert about["name"] == "own" and about["length"] == keys.get("data.length", 32)
        hashes.append(tuple(batches))
    assert len(set(hashes)) == 3


def test_the_layout_and_the_rows_are_said(run, pretend, corpus):
    common = json.loads(run("--what=mlm", "--json").out)
    assert common["layout"] == {
        "name": "common",
        "length": 128,
        "plan": "full_sentences",
        "packed": False,
        "masking": "bert",
        "mask_unit": "token",
        "corruption": "0.8,0.1,0.1",
        "replacement": "uniform",
    }
    assert common["rows"] == common["all_rows"] > 16
    some = json.loads(run("--what=mlm", "--json", "--examples=5").out)
    assert (some["rows"], some["all_rows"]) == (5, common["all_rows"])
    own = json.loads(run("--json").out)
    assert own["rows"] == 16 < own["all_rows"], "as in training: eval.examples=16"
    other = json.loads(run("--json", f"--text={corpus / 'valid.txt'}").out)
    assert other["rows"] == other["all_rows"] == own["all_rows"]
    said = run("--what=mlm", "--length=32", "--mask_unit=word", "--examples=5").out
    assert "layout common: length 32; plan full_sentences" in said
    assert "mask_unit word" in said and "valid at step 12, 5 of " in said
    pretend({"model.max_position_embeddings": 64})
    short = json.loads(run("--what=mlm", "--json", "--examples=5").out)
    assert short["layout"]["length"] == 64


def test_the_layout_of_what_masks_nothing_names_no_masking(run, pretend):
    pretend({"objective": "clm"})
    assert json.loads(run("--json").out)["layout"].keys() == {
        *("name", "length", "plan", "packed")
    }


def test_what_is_no_number_is_null(run, monkeypatch):
    """An accuracy without predictions is null, as JSON has no NaN."""
    rates = {0.1: {"mlm_accuracy": math.nan, "mlm_loss": 2.0}}
    scores = Scores([{"step": 3, "rates": rates}], [])
    monkeypatch.setattr(own, "score", lambda *_: scores)
    found = json.loads(run("--json").out, parse_constant=pytest.fail)
    told = {"0.1": {"mlm_accuracy": None, "mlm_loss": 2.0}}
    assert found == {"step": 3, "rates": told}


def test_each_way_names_its_model(run, trained, tmp_path):
    """So a page or table of many results can tell the models apart."""
    (tmp_path / "lines.txt").write_text("a list of words.\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR))
    row = {"query": "a list", "positive": "a list of words."}
    (tmp_path / "table.jsonl").write_text(json.dumps(row))
    for given in (
        ["--examples=8"],
        ["--what=mlm", "--examples=8"],
        ["--what=pll", f"--text={tmp_path}/lines.txt"],
        ["--what=pairs", f"--text={tmp_path}/pairs.jsonl"],
        ["--what=retrieval", f"--text={tmp_path}/table.jsonl"],
        ["--step=12", "--what=pairs", f"--text={tmp_path}/pairs.jsonl"],
    ):
        found = json.loads(run("--json", *given).out)
        assert (found["model"], found["step"]) == (str(trained), 12), given


def test_several_rates_at_once(run):
    given = "--what=mlm", "--json", "--rates=0.15,0.3", "--examples=24"
    found = json.loads(run(*given).out)
    low, high = found["rates"]["0.15"], found["rates"]["0.3"]
    assert 1.8 < high["predictions"] / low["predictions"] < 2.2
    assert low["tokens"] == high["tokens"] and low["mask_rate"] == 0.15
    for scores in (low, high):
        assert 0 <= scores["mlm_calibration_error"] <= 1
        assert 0 < scores["mlm_loss_ci95"] < scores["mlm_loss"]
        assert scores["bits_per_character"] > 0 and scores["documents"] > 1


def test_lines(run, tmp_path):
    file = tmp_path / "lines.txt"
    lines = "a list of words.", "", "The statement " + "is " * 600, "A [MASK]", "\u200b"
    file.write_text("\n".join(lines))
    said = run("--what=pll", f"--text={file}", "--json")
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [r["line"] for r in rows] == [1, 3, 4, 5]
    assert rows[0]["score"] < 0 and rows[0]["text"] == "a list of words."
    assert rows[1]["score"] is None and rows[1]["tokens"] > 600
    assert rows[3]["score"] is None and rows[3]["tokens"] == 0
    for told in ("lines 2", "empty_lines 1", "too_long 1", "no_tokens 1"):
        assert told in said.err
    totals = run("--what=pll", f"--text={file}", "--variant=within_word").out
    assert "pseudo_perplexity" in totals and "bits_per_character" in totals


def test_a_way_from_outside(run, trained, tmp_path, monkeypatch):
    (tmp_path / "lines.txt").write_text("a list, 2.\nwords")
    given = "--what=lab.characters", f"--text={tmp_path}/lines.txt"
    found = run(*given, "--json", "--label=n")
    assert [json.loads(line) for line in found.out.splitlines()] == [
        {"model": str(trained), "n": 5}, {"model": str(trained), "n": 5},
    ]  # fmt: skip
    assert found.err == "counted\n"
    assert run(*given).out == "--model: 10 letters\n"
    with pytest.raises(
        UserError, match=r"--rates has no effect with --what=lab\.charact"
    ):
        run(*given, "--rates=0.1")
    with pytest.raises(UserError, match=r"--what=json\.tool is not a scorer"):
        run("--what=json.tool")
    monkeypatch.setattr("lab.characters.score", lambda args, path, flag: 3)
    with pytest.raises(UserError, match=r"lab\.characters\.score must .*Scores.* 3$"):
        run(*given)


def test_pairs(command, trained, tmp_path):
    file = tmp_path / "pairs.jsonl"
    same = PAIR | {"sentence_bad": "A list of  words."}  # the same tokens, a tie
    file.write_text("\n".join(map(json.dumps, [PAIR, same, PAIR | {"field": "f"}])))
    given = ["--what=pairs", f"--model={trained}", f"--text={file}", "--json"]
    found = json.loads(succeeded(command("evaluate", *given)).stdout)
    assert (found["pairs"], found["ties"], found["step"]) == (3, 1, 12)
    assert found["variant"] == "original" and found["empty_lines"] == 0
    share = found["by_paradigm"]["x"]["accuracy"]
    assert share == pytest.approx((2 * found["by_field"]["f"] + 1 / 2) / 3)


@pytest.mark.parametrize(
    "given, words",
    [
        (["--what=plll"], "'pll'"),
        (["--what=pll"], "--text"),
        (["--what=pairs"], "--text"),
        (["--what=pairs", "--rates=0.1"], "--rates"),
        (["--variant=within_word"], "--variant"),
        (
            ["--rates=0.1"],
            "--rates has no effect without --what: it is read with --what=mlm; ",
        ),
        (["--length=16"], "--length has no effect without --what"),
        (["--what=mlm", "--columns=text"], "--columns"),
        (
            ["--what=mlm", "--length=513"],
            "--length=513 is too long: the model has 512 positions",
        ),
        (["--what=mlm", "--rates=0.1,15"], "--rates=0.1,15"),
        (["--what=mlm", "--rates="], "--rates="),
        (["--what=mlm", "--rates=0.15,0.15"], "--rates=0.15,0.15: give different"),
        (["--what=mlm", "--text={}/no.txt"], "--text={}/no.txt: there is no such file"),
        (["--what=mlm", "--text={}/empty"], "--text={}/empty: the file is empty"),
        (["--what=mlm", "--mask_unit=wrd"], "'word'"),
        (["--what=pll", "--text={}/a.txt", "--variant=word"], "within_word"),
        (["--what=pll", "--text={}/b.txt"], "every line is empty"),
        (["--what=pll", "--text={}/c.jsonl"], "JSON"),
        (["--what=pll", "--text={}/d*.txt"], "no file matches"),
        (["--what=pll", "--text={}/long.txt"], "1 have more than the model's 510 tok"),
        (["--what=pll", "--text={}/none.txt"], "510 tokens, 2 none"),
        (["--what=pairs", "--text={}/pairs"], "pairs, line 2: the field sentence_bad"),
    ],
)
def test_refusals(run, tmp_path, given, words):
    for name, text in {
        "a.txt": "a",
        "b.txt": "\n \n",
        "empty": "",
        "c.jsonl": "{}",
        "long.txt": "a " * 700,
        "none.txt": "\u200b\n\u200b\u200b\n",
        "pairs": f"{json.dumps(PAIR)}\n{json.dumps(PAIR | NO_TOKEN)}",
    }.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as e:
        run(*(x.format(tmp_path) for x in given))
    assert words.format(tmp_path) in str(e.value)


def test_nothing_predicted_is_no_perfect_score(run):
    with pytest.raises(UserError, match=r"nothing was predicted, with .*unit=entity"):
        run("--what=mlm", "--mask_unit=entity")


def test_a_cache_of_another_machine(tmp_path):
    (tmp_path / "file").write_text("")
    config, said = base(), []
    config.data.cache = str(tmp_path / "file" / "cache")
    prepared_text.settle_cache(config, said.append)
    assert config.data.cache == base().data.cache
    assert len(said) == 1 and "is not a directory: ~/.cache/bertjax is taken" in said[0]
    prepared_text.settle_cache(config, pytest.fail)


def test_what_is_guessed_costs_no_second_encoder():
    """Guesses share the encoder with the objective's sums; formerly the last layer ran
    twice with sentence pairs."""
    cfg = EncoderConfig(100, 64, 2, 2, 256, max_position_embeddings=32)
    objective, cfg = make_objective("mlm+nsp", cfg)
    guess = make_guesser(cfg)
    params = jax.eval_shape(objective.init, jax.random.key(0))
    sizes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (4, 32))
    sizes |= dict.fromkeys(("mlm_positions", "mlm_ids", "mlm_weights"), (4, 5))
    sizes["nsp_labels"] = (4,)
    batch = {
        name: jax.ShapeDtypeStruct(size, "f4" if "weights" in name else "i4")
        for name, size in sizes.items()
    }

    def flops(run):
        return jax.jit(run).lower(params, batch).compile().cost_analysis()["flops"]

    alone = flops(lambda p, b: objective.sums(p, b, None))
    both = flops(lambda p, b: (objective.sums(p, b, None), guess(p, b)))
    assert both == pytest.approx(alone, rel=0.02)


def test_bytes_are_whole_numbers():
    small = {"int8": {"index_bytes": 1_536_000, "mrr@10": 0.25}}
    (line,) = value_lines({"precisions": small})
    assert line.split(maxsplit=2)[2] == "index_bytes 1,536,000, mrr@10 0.25"


def test_options_are_refused_before_a_model_is_opened(tmp_path):
    given = ["--model=nowhere", "--what=retrieval", "--text=nowhere"]
    with pytest.raises(UserError, match="--depth needs --rerank=MODEL"):
        evaluate.main([*given, "--depth=5"])
    with pytest.raises(
        UserError, match=r"--mine=.*x\.txt is not a name of such a file"
    ):
        evaluate.main([*given, f"--mine={tmp_path}/x.txt"])


def test_what_is_written_replaces_no_text(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    with pytest.raises(UserError, match=r"--mask_weights=.* is --text, which it would"):
        given = "--model=nowhere", "--what=mlm", f"--text={file}"
        evaluate.main([*given, f"--mask_weights={file}"])
    folder = tmp_path / "collection"
    folder.mkdir()
    for name in ("corpus", "queries"):
        (folder / f"{name}.jsonl").write_text('{"_id": "1", "text": "a"}\n')
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n1\t1\t1\n")
    read = passages.read_collections(str(folder), "--text", {}, lambda text: None)
    for name in ("corpus", "queries"):
        mine = str(folder / f"{name}.jsonl")
        with pytest.raises(UserError, match=r"--mine=.* is a file of --text, which it"):
            retrieval.check_mining(mine, {"valid": read[0]})
    odd = folder / "a,b.jsonl"  # commas separate patterns
    odd.write_text("{}\n")
    with pytest.raises(UserError, match=r"--mine=.* is a file of --text, which it"):
        retrieval.check_mining(str(odd), {"valid": Collection(files=[str(odd)])})
    assert file.read_text() == "{}\n"
