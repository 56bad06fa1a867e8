# SPDX-License-Identifier: Apache-2.0
"""Which documents a language model is scored on."""

import json
from types import SimpleNamespace

import pytest

from bertjax.config import schema
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.scoring import document_costs

JAVA = "/** What it is. */\nclass A {\n  int f() { return 1; } // of one\n}\n"
RECORDS = {
    "code": [{"text": JAVA, "path": "A.java"}],
    "sentences": [{"sentences": ["int a;", "a = 1;"], "type": [[], []]}],
}


def documents_of(path, vocabulary, tmp_path, text="", **data):
    config = schema.base()
    config.data.update(valid=str(path), cache=str(tmp_path / "cache"), **data)
    tokenizer = load_tokenizer(str(vocabulary), None)
    lm = SimpleNamespace(config=config, tokenizer=tokenizer)
    args = SimpleNamespace(text=text)
    layout = document_costs.Layout("document", 0, 0, 16, 8, 15)
    ((_, texts),) = document_costs.read_sets(args, lm, layout)
    return [one.characters for one in texts]


@pytest.mark.parametrize("kind", RECORDS)
def test_records_of_data_valid_are_read_as_in_training(kind, vocabulary, tmp_path):
    pytest.importorskip("tree_sitter_java")
    path = tmp_path / "valid.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[kind]))
    given = {"code_field": "path"} if kind == "code" else {"streams": "type:8"}
    found = documents_of(path, vocabulary, tmp_path, **given)
    lines = ["class A {", "int f() { return 1; }", "}"]
    lines = lines if kind == "code" else RECORDS[kind][0]["sentences"]
    assert found == [sum(map(len, lines))]
    if kind == "code":  # --text is the same for all models
        found = documents_of("", vocabulary, tmp_path, text=str(path), **given)
        assert found == [sum(len(" ".join(x.split())) for x in JAVA.splitlines())]
