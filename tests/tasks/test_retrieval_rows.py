# SPDX-License-Identifier: Apache-2.0
"""Collections from files, and the rows made from them."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax import UserError
from bertjax.assembly import command_line
from bertjax.config.schema import base
from bertjax.data import counter_rng
from bertjax.data.corpus import tfds_source
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.scoring.retrieval import of_width
from bertjax.tasks import search, search_measures
from bertjax.tasks.passages import COLUMNS, Collection, locate, read_collections
from bertjax.tasks.prepare_task import prepare
from bertjax.tasks.retrieval_options import check_pooling, read_widths
from bertjax.tasks.task_rows import Form, Ragged
from bertjax.tasks.types import rerank, retrieve, splade
from bertjax.tasks.types.retrieve import make_pairs, pack

FORM = Form(("query", "positive"), "negatives", (), 1, (*search_measures.MEASURES,))
CORPUS = [
    {"_id": "a", "title": "Modules", "text": "a module is a file"},
    {"_id": "b", "text": "a list of words"},
    {"_id": "q2", "title": "", "text": "what is a list"},
    {"_id": "c", "title": "Modules", "text": "a module is a file"},
    {"_id": "d", "title": "", "text": ""},
]
QUERIES = [{"_id": f"q{i}", "text": t} for i, t in enumerate(["x", "y", "z", "x"])]
GRADES = ["q0 a 1", "q0 b 0", "q3 b 2", "q2 b 1", "q1 c -1", "q9 a 1", "q2 zz 1"]


def write(folder, grades=GRADES, name="qrels/train.tsv"):
    (folder / "qrels").mkdir(exist_ok=True)
    lines = ["query-id corpus-id score", *grades]
    text = "\n".join(line.replace(" ", "\t") for line in lines) + "\n"
    (folder / name).write_text(text)
    for name, rows in (("corpus", CORPUS), ("queries", QUERIES)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
            file.write(text)
    return folder


def read(value, key="data.train", columns=COLUMNS):
    said = []
    return read_collections(str(value), key, columns, said.append), "\n".join(said)


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return load_tokenizer(vocabulary)


# ---------------------------------------------------------------- files
def test_a_folder(tmp_path):
    (found,), said = read(write(tmp_path))
    assert found.passages[0] == "Modules a module is a file" and not found.passages[4]
    assert found.queries == ["x", "z", "x"]
    assert found.grades == [{0: 1, 1: 0}, {1: 1}, {1: 2}]
    assert found.own == [-1, 2, -1]  # passage q2 is query q2
    path = tmp_path / "qrels/train.tsv"
    lacks = "that the folder does not have, left out"
    for line in (
        f"{path}: 1 row with a query {lacks}: {path}:7",
        f"{path}: 1 row with a passage {lacks}: {path}:8",
        f"{path}: 1 query without an answer, left out",
        f"{path}: 3 queries, 5 passages, 3 answers, 1 given negative",
        f"{path}: 1 empty passage, kept",
    ):
        assert line in said.split("\n")
    assert "not in these grades" not in said
    (named,), _ = read(path, "data.valid")
    assert named == found


def test_what_several_files_share_is_one_passage(tmp_path, monkeypatch):
    write(tmp_path)
    (alone,), _ = read(tmp_path)
    write(tmp_path, ["q1 b 1"], "qrels/dev.tsv")
    monkeypatch.chdir(tmp_path.parent)
    folder = tmp_path.name  # another path of the same folder
    (both,), _ = read(f"{tmp_path},{folder}/qrels/dev.tsv")
    assert both.passages == alone.passages and both.queries == ["x", "z", "x", "y"]
    assert both.grades == [*alone.grades, {1: 1}] and both.own == [-1, 2, -1, -1]
    pairs = [("one", "two"), ("two", "one")]
    for name, (positive, negative) in zip("ab", pairs, strict=True):
        row = {"query": name, "positive": positive, "negatives": negative}
        row["scores"] = [2.0, 1.0]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (both,), _ = read(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")
    assert both.passages == ["one", "two"]
    assert both.grades == [{0: 1, 1: 0}, {1: 1, 0: 0}]
    assert both.scores == [{0: 2.0, 1: 1.0}, {1: 2.0, 0: 1.0}]


def test_which_grades_a_folder_stands_for(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=r"neither qrels/dev.tsv nor qrels.tsv; other"):
        locate(str(tmp_path), "data.valid")
    write(tmp_path, name="qrels.tsv")
    assert locate(f"{tmp_path}/", "data.valid") == f"{tmp_path}/qrels.tsv"
    assert locate(str(tmp_path), "data.train") == f"{tmp_path}/qrels/train.tsv"
    write(tmp_path, name="qrels/test.tsv")
    assert locate(str(tmp_path), "--text") == f"{tmp_path}/qrels/test.tsv"
    assert locate("a.jsonl", "data.train") == "a.jsonl"


@pytest.mark.parametrize(
    "grades, words",
    [
        (["q0 a one"], ["train.tsv:2", "the score 'one'"]),
        (["q0 a 1_0"], ["train.tsv:2", "the score '1_0'"]),
        (["q0 a"], ["train.tsv:2", "2 cells"]),
        (["q0 a 1", "q0 a 0"], ["train.tsv:3", "'q0'", "'a'", "0, and 1 in a line"]),
        (["q0 a 0"], ["train.tsv", "no query has a passage that answers it"]),
    ],
)
def test_bad_grades(tmp_path, grades, words):
    with pytest.raises(UserError) as e:
        read(write(tmp_path, grades))
    assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize("first", ["q0\ta\t1", "q0 0 a 1", "query-id corpus-id score"])
def test_grades_without_a_header(tmp_path, first):
    (write(tmp_path) / "qrels/train.tsv").write_text(f"{first}\n")
    with pytest.raises(UserError) as e:
        read(tmp_path)
    words = "train.tsv: the first line has to name the columns query-id, corpus-id, sco"
    assert words in str(e.value)


def test_repeated_grades_count_once(tmp_path):
    (found,), said = read(write(tmp_path, ["q0 a 1", "q0 b 0", "q0 a 1"]))
    assert found.grades == [{0: 1, 1: 0}]
    path = tmp_path / "qrels/train.tsv"
    assert f"{path}: 1 repeated grade: {path}:4" in said
    assert f"{path}: 3 queries not in these grades, left out" in said


def test_bad_folders(tmp_path, monkeypatch):
    monkeypatch.setitem(QUERIES[1], "_id", "q0")
    with pytest.raises(UserError, match=r"queries.jsonl.gz:2: the _id 'q0' occurs tw"):
        read(write(tmp_path))
    monkeypatch.setitem(CORPUS[1], "text", 3)
    with pytest.raises(
        UserError, match=r"corpus.jsonl.gz:2: title and text have to be"
    ):
        read(write(tmp_path))
    (tmp_path / "queries.jsonl.gz").rename(tmp_path / "questions.jsonl.gz")
    monkeypatch.undo()
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as file:
        file.write(json.dumps(CORPUS[0]) + "\n")
    with pytest.raises(UserError, match=r"there is no .*/queries.jsonl"):
        read(tmp_path / "qrels/train.tsv")
    with pytest.raises(UserError, match=r"the folder has no queries.jsonl"):
        read(tmp_path)


def test_a_folder_without_passages(tmp_path):
    (write(tmp_path) / "corpus.jsonl.gz").unlink()
    with pytest.raises(UserError) as e:
        locate(str(tmp_path), "data.train")
    assert f"data.train={tmp_path}: the folder has no corpus.jsonl" in str(e.value)
    grades = tmp_path / "qrels/train.tsv"
    with pytest.raises(UserError) as e:
        read(grades)
    assert str(e.value) == f"{grades}: {tmp_path} has no corpus.jsonl"


def test_pairs_and_triples(tmp_path):
    rows = [
        {"query": "x", "positive": "one", "negatives": ["two", "three", ""]},
        {"query": "y", "positive": "two", "negatives": "one"},
        {"query": "x", "positive": "three"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,), said = read(file)
    assert found.passages == ["one", "two", "three"] and found.queries == ["x", "y"]
    assert found.grades == [{0: 1, 1: 0, 2: 1}, {1: 1, 0: 0}]
    assert "2 queries, 3 passages, 3 answers, 2 given negatives" in said
    assert "1 given negative among the positives of the same query, left " in said
    assert f"left out: {file}:1\n" in said and "repeat" not in said
    assert f"1 empty given negative, left out: {file}:1\n" in said
    file.write_text((json.dumps(rows[1]) + "\n") * 2)
    (found,), said = read(file)
    assert found.grades == [{0: 1, 1: 0}]
    assert (
        f"1 row with a query and its positive that came before, counted once: {file}:2"
        in said
    )
    table = tmp_path / "pairs.tsv"
    table.write_text("q\tp\tn\nx\tone\ttwo\n")
    columns = dict(zip(COLUMNS, "qpn", strict=True))
    (found,), _ = read(table, columns=columns)
    assert found.grades == [{0: 1, 1: 0}]
    file.write_text('{"query": "x", "positive": "one", "negatives": [3]}\n')
    with pytest.raises(UserError, match=r"pairs.jsonl:1: query, positive, negatives"):
        read(file)
    with pytest.raises(UserError, match=r"task.text='query' is unknown.*p, q"):
        read(table)


def test_pairs_of_tfds_have_negatives_and_scores(monkeypatch):
    row = {"query": b"x", "positive": b"one", "negatives": [b"two", b"three"]}
    row |= {"scores": [3.0, 2.0, 1.0], "image": b"of no use"}
    builder = SimpleNamespace(info=SimpleNamespace(features=dict.fromkeys(row)))

    def read_split(builder, split, names):
        return iter([{name: row[name] for name in names}])

    monkeypatch.setattr(tfds_source, "open_split", lambda *told: (builder, "train"))
    monkeypatch.setattr(tfds_source, "read_split", read_split)
    (found,), _ = read("tfds:pairs:train")
    assert found.grades == [{0: 1, 1: 0, 2: 0}]
    assert found.scores == [{0: 3.0, 1: 2.0, 2: 1.0}]
    with pytest.raises(UserError, match=r"pairs:train: task\.label='hard' is unknown"):
        read("tfds:pairs:train", columns={**COLUMNS, "task.label": "hard"})
    del row["scores"], builder.info.features["scores"]
    (found,), _ = read("tfds:pairs:train")
    assert found.grades == [{0: 1, 1: 0, 2: 0}] and not any(found.scores)


# ---------------------------------------------------------------- rows
def test_packing_by_hand():
    marks = SimpleNamespace(cls_id=1, sep_id=2, pad_id=0)
    texts = Ragged.of([[7, 8], [9], [5, 5, 5, 5]])
    members = np.array([[0, 1, -1], [1, -1, 2]])
    batch = pack(texts, members, 5, 9, marks)
    assert batch["input_ids"].tolist() == [
        [1, 7, 8, 2, 1, 9, 2, 0, 0],
        [1, 9, 2, 1, 5, 5, 5, 2, 0],
    ]
    assert batch["segment_ids"].tolist() == [
        [1, 1, 1, 1, 2, 2, 2, 0, 0],
        [1, 1, 1, 3, 3, 3, 3, 3, 0],
    ]
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert batch["cls_positions"].tolist() == [[0, 4, 0], [0, 0, 3]]
    assert batch["cls_weights"].tolist() == [[1, 1, 0], [1, 0, 1]]
    assert batch["attention_mask"].sum() == 15


def test_rows_to_train_on(tokenizer, tmp_path):
    read_, _ = read(write(tmp_path))
    rows = make_pairs(read_, FORM, tokenizer, True).plan(32)
    assert (
        rows.pairs.tolist() == [[0, 3], [1, 4], [2, 4]] and rows.negatives.tokens.size
    )
    keys = counter_rng.fold(0, np.arange(3))
    batch = rows.gather(np.arange(3), keys, tokenizer)
    assert batch["input_ids"].shape == (3, rows.length) and rows.length % 16 == 0
    # Passages a and c have the same text; so have queries q0 and q3, which therefore
    # share answers.
    assert batch["passage_numbers"].tolist() == [[0, 1], [1, -1], [1, -1]]
    # Passage 2 is query q2 itself, which is not its own negative.
    assert batch["relevant_numbers"].tolist() == [[0, 1], [1, 2], [0, 1]]
    assert batch["cls_weights"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert rows.lengths().tolist() == [
        len(rows.texts[q]) + len(rows.texts[p]) + 4 for q, p in rows.pairs
    ]
    again = rows.gather(np.array([2]), keys[2:], tokenizer)
    for name, values in again.items():
        np.testing.assert_array_equal(values, batch[name][2:], err_msg=name)
    short = rows.plan(4)
    assert (short.truncated(np.arange(3)) > 0).all()
    assert [*short.notes()][1] == "4 of 8 texts are cut at 4"
    with pytest.raises(UserError, match=r"data.length=2"):
        rows.plan(2)


def test_texts_that_are_one_when_they_are_cut(tokenizer, tmp_path):
    """A passage equal to an answer after the cut is not a negative."""
    file = tmp_path / "pairs.jsonl"
    pairs = ("a list of words", "b c d"), ("a list of names", "b c e"), ("x", "b d")
    lines = [json.dumps({"query": q, "positive": p}) + "\n" for q, p in pairs]
    file.write_text("".join(lines))
    rows = make_pairs(read(file)[0], FORM, tokenizer, True)
    sizes = {len(rows.texts[rows.queries + i]) for i in range(3)}
    whole, cut = rows.plan(32), rows.plan(4)  # two tokens of a text
    assert min(sizes) >= 2
    assert whole.identity.tolist() == [0, 1, 2]
    assert whole.relevant(np.arange(3)).tolist() == [[0], [1], [2]]
    assert cut.identity.tolist() == [0, 0, 2]
    assert cut.relevant(np.arange(3)).tolist() == [[0], [0], [2]]
    batch = cut.gather(np.arange(3), counter_rng.fold(0, np.arange(3)), tokenizer)
    assert batch["passage_numbers"].tolist() == [[0], [0], [2]]


def test_a_query_that_is_a_passage_too(tokenizer, tmp_path):
    """It is neither a negative of itself nor found, unless it answers itself."""
    pairs = ("a list", "b"), ("b", "a list"), ("c", "c"), ("c", "b")
    lines = [json.dumps({"query": q, "positive": p}) + "\n" for q, p in pairs]
    for name, part in zip("xy", (lines[:1], lines[1:]), strict=True):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    (found,), _ = read(f"{tmp_path}/x.jsonl,{tmp_path}/y.jsonl")
    assert found.passages == ["b", "a list", "c"] and found.own == [1, 0, -1]
    rows = make_pairs([found], FORM, tokenizer, True).plan(16)
    batch = rows.gather(np.arange(4), counter_rng.fold(0, np.arange(4)), tokenizer)
    assert batch["relevant_numbers"].tolist() == [[0, 1], [0, 1], [0, 2], [0, 2]]


def test_many_answers_of_one_query_cost_the_others_nothing(
    tokenizer, tmp_path, monkeypatch
):
    pairs = [(f"a {i}", f"b {i}") for i in range(300)]
    pairs += [("c", f"b {i}") for i in range(300)]
    file = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"query": q, "positive": p}) + "\n" for q, p in pairs]
    file.write_text("".join(lines))
    rows = make_pairs(read(file)[0], FORM, tokenizer, True).plan(16)
    assert len(rows.relevant_keys) == 600  # not a table of 301 x 300
    found = rows.relevant(np.array([300, 7]))
    assert found[0].tolist() == [*range(300)]
    assert found[1].tolist() == [7, *[-1] * 299] and len([*rows.notes()]) == 1
    assert rows.is_relevant(np.array([300, 7, 7]), np.array([9, 9, 7])).tolist() == [
        *(True, False, True)
    ]
    monkeypatch.setattr(retrieve, "MOST", 8)
    assert rows.relevant(np.array([300])).tolist() == [[*range(8)]]
    assert [*rows.notes()][1].startswith("1 query with more than 8 answers: a batch")


def test_given_negatives_change_with_the_epoch(tokenizer, tmp_path):
    file = tmp_path / "pairs.jsonl"
    many = [f"word {i}" for i in range(20)]
    file.write_text(json.dumps({"query": "x", "positive": "y", "negatives": many}))
    rows = make_pairs(read(file)[0], FORM, tokenizer, True).plan(16)
    keys = counter_rng.fold(0, np.arange(200))
    numbers = rows.gather(np.zeros(200, np.int64), keys, tokenizer)["passage_numbers"]
    assert {*numbers[:, 0]} == {0} and {*numbers[:, 1]} == {*range(1, 21)}


def test_a_column_of_negatives_that_is_named_is_there(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("query\tpositive\thard\nx\ty\tz\n")
    columns = {**COLUMNS, "task.label": "hardd"}
    with pytest.raises(UserError, match=r"pairs\.tsv: task\.label='hardd'.*'hard'"):
        read_collections(str(file), "data.train", columns, print)
    assert read_collections(str(file), "data.valid", columns, print)
    columns["task.label"] = "hard"
    (found,) = read_collections(str(file), "data.train", columns, print)
    assert found.grades == [{0: 1, 1: 0}]


def test_all_texts_are_searched(tokenizer, tmp_path):
    """Rows contain each text once, and the right vectors find all answers."""
    made = make_pairs(read(write(tmp_path))[0], FORM, tokenizer, True)
    rows = made.for_scores().plan(32)
    assert rows.n < 8 and rows.lengths().sum() == made.texts.lengths.sum() + 16
    batch = rows.gather(np.arange(rows.n), None, tokenizer)
    assert batch["cls_weights"].sum() == 8 and batch["input_ids"].shape[1] <= 48
    assert rows.content_hash == made.content_hash
    vectors = np.zeros((rows.n, 4, 5), np.float32)
    answers = [0, 1, 1]
    at = np.argwhere(rows.members(np.arange(rows.n)) >= 0)
    for text, (row, slot) in enumerate(at):
        vectors[row, slot, answers[text] if text < 3 else text - 3] = 1
    scores = rows.score({"vectors": vectors}, np.arange(rows.n))
    assert scores == dict.fromkeys(search_measures.MEASURES, 1.0)


def test_weights_of_pieces_that_the_tokenizer_lacks(tokenizer, tmp_path):
    """The padded embeddings of an imported model have such pieces."""
    made = splade.TASK_TYPE.make_rows(read(write(tmp_path))[0], FORM, tokenizer, True)
    rows = made.for_scores().plan(32)
    terms = np.full((rows.n, retrieve.TOGETHER, 2), tokenizer.vocab_size + 3)
    outputs = {"weights": np.ones(terms.shape, np.float32), "terms": terms}
    scores = rows.score(outputs, np.arange(rows.n))
    assert 0 < scores["mrr@10"] <= 1


def test_copies_of_an_answer_are_no_candidates(tokenizer, tmp_path):
    made = rerank.make_rows(read(write(tmp_path))[0], FORM, tokenizer, True)
    rows = made.for_scores().plan(32)
    # Passage 3 has the text of passage 0; both queries "x" share their answers.
    found = {q: {*rows.pairs[rows.pairs[:, 0] == q, 1].tolist()} for q in range(3)}
    assert found == {0: {3, 4, 5, 7}, 1: {3, 4, 6, 7}, 2: {4, 5, 7}}


def test_a_copy_of_an_answer_is_no_given_negative(tokenizer):
    passages = ["a list", "A list", "b", "c"]  # two have the same tokens
    grades = [{0: 1, 1: 0, 2: 0}]
    collection = Collection(passages, ["q"], grades, [-1])
    form = FORM._replace(drawn=2)
    rows = rerank.make_rows([collection], form, tokenizer, True).plan(32)
    assert rows.identity.tolist() == [0, 0, 2, 3]
    example = np.zeros(50, np.int64)
    batch = rows.gather(example, counter_rng.fold(0, np.arange(50)), tokenizer)
    ids = batch["input_ids"]
    assert not (ids[:, 1:] == ids[:, :1]).all(-1).any()
    assert (batch["choice_weights"][:, 1:].sum(axis=1) > 0).all()


def test_a_cross_encoder_needs_a_wrong_passage(tokenizer):
    collection = Collection(["a", "a"], ["q", "p"], [{0: 1}, {1: 1}], [-1, -1])
    with pytest.raises(UserError, match="all passages are the same, and a query needs"):
        rerank.make_rows([collection], FORM, tokenizer, True)


def test_measures_of_widths_compare_as_the_model_does():
    queries, texts = search.Dense(np.eye(3)[:1]), [[1, 1, 9], [2, 4, 9], [0, 1, 9]]
    collection = Collection([*"abc"], ["q"], [{1: 1}], [-1])
    how = 2, queries, search.Dense(np.float32(texts)), collection
    assert of_width(*how)["mrr@10"] == 0.5  # the cosines are 0.71, 0.45, 0
    assert of_width(*how, dot=True)["mrr@10"] == 1


def test_the_first_token_of_a_causal_model_is_no_vector():
    config = base()
    config.task.pooling = "cls"
    check_pooling(config)
    config.model.is_decoder = True
    with pytest.raises(UserError, match=r"sees itself alone, .*task\.pooling=mean"):
        check_pooling(config)
    config.task.pooling = "mean"
    check_pooling(config)


def test_a_width_that_occurs_twice():
    assert read_widths("64,32") == [64, 32]
    with pytest.raises(UserError, match=r"task\.widths=64,64: 64 occurs twice"):
        read_widths("64,64")


@pytest.mark.parametrize("name", ["retrieve", "splade", "colbert", "rerank"])
def test_a_named_collection_leaves_the_objective(name):
    config = command_line.parse([f"--config=finetune/{name}.py:smoke,task=beir"]).config
    assert config.objective == name and config.task.metrics == "ndcg@10,recall@100"


def test_learning_what_is_scored_is_said(vocabulary, tmp_path):
    given = ["--config=finetune/retrieve.py:smoke", f"--config.data.vocab={vocabulary}"]
    given += [f"--config.data.{side}={tmp_path}" for side in ("train", "valid")]
    config = command_line.parse(given).config
    said = []
    write(tmp_path, name="qrels.tsv")
    prepare(config, said.append)
    told = f"data.train and data.valid both read {tmp_path}/qrels.tsv: the model is"
    assert said[0].startswith(told)
    write(tmp_path)
    said.clear()
    prepare(config, said.append)
    assert not any("both read" in line for line in said)
