# SPDX-License-Identifier: Apache-2.0
"""StableHLO files: jax and the reader in the docs compute what the model does."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import small_served as small
from tokenizers import Tokenizer

from bertjax import UserError
from bertjax.serving import card, differences, write_stablehlo
from bertjax.serving.export_model import Options, export_model
from bertjax.serving.gate import read_texts
from bertjax.serving.served_model import make_served

ROOT = Path(__file__).parents[2]
CLOSE = 1e-4


def exported(folder, model, **options):
    return export_model(str(folder), "stablehlo", model, "--from=x", Options(**options))


@pytest.fixture(scope="module")
def reader():
    """The reader in docs/serving.md, which is that of launch/serve.py."""
    text = (ROOT / "docs/serving.md").read_text("utf-8")
    [block] = [
        b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "memmap" in b
    ]
    imports, function = block.split("\n\n\n")
    assert function.strip() in (ROOT / "launch/serve.py").read_text("utf-8")
    names = {}
    exec(imports + "\n" + function, names)
    assert "bertjax" not in block
    return names["load_stablehlo"]


def test_200_texts_of_all_lengths(reader, vocabulary, tmp_path):
    """Weights are stored once, programs per shape; a text runs in the smallest."""
    model = small.small_model(vocabulary, "modernbert")
    facts = exported(tmp_path / "out", model, batch_sizes=[8], lengths=[16, 64])
    assert facts["largest_difference"] < CLOSE
    assert [p["length"] for p in facts["programs"]] == [16, 64]
    programs = [tmp_path / "out" / p["file"] for p in facts["programs"]]
    weights = (tmp_path / "out/model.safetensors").stat().st_size
    served = make_served(model, "x")
    numbers = sum(x.size for x in jax.tree.leaves(served.params))
    assert 4 * numbers <= weights < 4 * numbers + 9000
    assert facts["bytes"] == weights + sum(p.stat().st_size for p in programs)

    card, run = reader(tmp_path / "out")
    assert card == json.loads((tmp_path / "out/card.json").read_text()) == facts
    rows = differences.real_rows(model.tokenizer, small.LONGEST, 200)
    batches = []
    for begin in range(0, 200, 8):
        part = rows[begin : begin + 8]
        shape = len(part), max(map(len, part))
        batch = differences.make_batch(served, part, model.tokenizer.pad_id, shape)
        at = differences.blank_positions(batch, card["blanks"])
        batches.append({**batch, "mlm_positions": at})
    # The model compiles once per shape, so pad batches as the programs do.
    largest = 0.0
    for batch in batches:
        length = 16 if batch["input_ids"].shape[1] <= 16 else 64
        found = run(**batch)["logits"]
        wide = length - batch["input_ids"].shape[1]
        padded = {
            k: np.pad(x, [(0, 0), (0, 0 if k == "mlm_positions" else wide)])
            for k, x in batch.items()
        }
        largest = max(
            largest,
            differences.largest_difference(
                served, lambda batch, found=found: {"logits": found}, [padded]
            ),
        )
    assert 0 <= largest < CLOSE
    with pytest.raises(ValueError, match="no program takes 9 texts"):
        run(input_ids=np.zeros((9, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["token-classification", "question-answering"])
def test_tasks(task, reader, vocabulary, tmp_path):
    model = small.finetuned(vocabulary, "bert", task)
    facts = exported(tmp_path / "out", model, batch_sizes=[2], lengths=[16])
    assert (facts["task"], facts["largest_difference"] < CLOSE) == (task, True)
    _, run = reader(tmp_path / "out")
    ids = np.array([[2, 9, 3]])
    found = run(input_ids=ids, attention_mask=ids > 0, token_type_ids=0 * ids)
    assert {k: v.shape[:2] for k, v in found.items()} == dict.fromkeys(
        facts["outputs"], (1, 16)
    )


def test_two_texts_are_parted_as_the_model_has_seen_them(vocabulary, tmp_path):
    model = small.finetuned(vocabulary, "roberta", "a score")
    card.write_own_tokenizer(tmp_path, model, make_served(model, "x"))
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a", "a").ids
    assert ids.count(model.tokenizer.sep_id) == 3


def test_vectors(reader, vocabulary, tmp_path):
    how = {"pooling": "mean", "normalize": True}
    model = small.small_model(vocabulary, "roberta", meta={"sentences": how})
    options = dict(batch_sizes=[1], lengths=[8], vectors=True)
    facts = exported(tmp_path / "out", model, **options)
    assert (facts["task"], facts["outputs"]) == (
        "sentence-similarity",
        ["sentence_embedding"],
    )
    assert facts["largest_difference"] < CLOSE
    _, run = reader(tmp_path / "out")
    ids = np.array([[2, 9, 3]])
    [vector] = run(input_ids=ids, attention_mask=ids > 0)["sentence_embedding"]
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_programs_are_for_all_platforms(vocabulary, tmp_path):
    exported(
        tmp_path / "out", small.small_model(vocabulary), batch_sizes=[1], lengths=[8]
    )
    stored = (tmp_path / "out/batch1_length8.jaxexport").read_bytes()
    assert set(jax.export.deserialize(bytearray(stored)).platforms) == {
        "cpu",
        "cuda",
        "tpu",
    }


def test_lengths(vocabulary, tmp_path):
    assert write_stablehlo.default_lengths(8192) == [32, 128, 512]
    assert write_stablehlo.default_lengths(100) == [32, 100]
    assert write_stablehlo.default_lengths(20) == [20]
    with pytest.raises(UserError, match="--lengths=65: the model takes 64 tokens"):
        exported(tmp_path / "out", small.small_model(vocabulary), lengths=[8, 65])
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_none_are_refused(vocabulary, tmp_path):
    """Nothing is written for a model whose outputs are not finite."""
    model = small.small_model(vocabulary)
    broken = {**model.checkpoint["encoder"]}
    broken["layers"] = jax.tree.map(lambda x: x * np.nan, broken["layers"])
    bad = model._replace(checkpoint={**model.checkpoint, "encoder": broken})
    with pytest.raises(UserError, match="logits of the model are not finite numbers"):
        exported(tmp_path / "out", bad, batch_sizes=[1], lengths=[8])
    assert not (tmp_path / "out").exists()

    served = make_served(model, "x")
    batch = differences.make_batch(served, [np.array([2, 9, 3])], 0, (1, 3))

    def predict(batch):
        return {"logits": served.run(served.params, batch)["logits"] * np.nan}

    with pytest.raises(UserError, match="logits of what was written are not finite"):
        differences.largest_difference(served, predict, [batch])


def test_each_program_is_compared_on_all_texts_that_fit(
    vocabulary, tmp_path, monkeypatch
):
    """The longest text is included, also if a batch has one row."""
    seen = {}

    def compare(served, predict, batches):
        sizes = [batch["attention_mask"].sum(axis=1) for batch in batches]
        seen[batches[0]["input_ids"].shape] = np.concatenate(sizes)
        return 0.0

    monkeypatch.setattr(write_stablehlo, "largest_difference", compare)
    sizes = dict(batch_sizes=[1, 3], lengths=[1, small.LONGEST])
    exported(tmp_path / "out", small.small_model(vocabulary), **sizes)
    assert [len(seen[1, n]) for n in sizes["lengths"]] == [1, differences.TEXTS]
    assert seen[1, 64].max() == seen[3, 64].max() == 64 and seen[1, 64].min() == 2


def test_a_text_a_line_for_the_gate(tmp_path):
    """Only line feeds end lines."""
    path = tmp_path / "texts.txt"
    path.write_text("one\u2028text\n\nanother\r\n", "utf-8", newline="")
    assert read_texts(str(path)) == ["one\u2028text", "another"]
    with pytest.raises(UserError, match=r"--gate=.*none: cannot be read"):
        read_texts(f"{tmp_path}/none")
