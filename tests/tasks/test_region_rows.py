# SPDX-License-Identifier: Apache-2.0
"""Rows of texts and regions: files, the arrays of a row, pairs."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from region_data import TOKENIZER, make_config, make_rows, read, write, write_image

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.tasks.prepare_task import make_form
from bertjax.tasks.region_settings import PAIRS, REGIONS, WORDS, group_ids
from bertjax.tasks.tables import Row
from bertjax.tasks.types import regions
from bertjax.tasks.types.regions import OTHER, head_options

ALL = {"kinds": "words/regions/pairs"}
KEYS = counter_rng.fold(5, "row", np.arange(4000))


def gather(rows, example, keys=None, length=12):
    return rows.plan(length).gather(np.asarray(example), keys, TOKENIZER)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write(tmp_path_factory.mktemp("regions") / "rows.jsonl", make_rows())


def test_objects_are_features_boxes_and_classes(tmp_path):
    one = {"type": "circle", "color": "Red", "size": 20, "x_loc": 50, "y_loc": 10}
    two = {"type": "square", "color": "Blue", "box": [0, 0, 100, 50]}
    row = {"sentence": "a red circle", "scenes": [[one], [], [two, one]]}
    _, rows = read(write(tmp_path / "a.jsonl", [row]), max_regions=4)
    assert rows.form.labels == ("Blue/square", "Red/circle")
    batch = gather(rows, [0])
    assert batch["input_ids"][0].tolist()[:6] == [2, 10, 11, 13, 3, 0]
    # The features are Blue, Red, circle, square, size; three scenes are side by side.
    np.testing.assert_allclose(
        batch["region_features"][0],
        [[0, 1, 1, 0, 0.2], [1, 0, 0, 1, 1], [0, 1, 1, 0, 0.2], [0] * 5],
    )
    third = [50 / 300, 0.1, 70 / 300, 0.3]
    boxes = [third, [2 / 3, 0, 1, 0.5], np.add(third, [2 / 3, 0, 2 / 3, 0]), [0] * 4]
    np.testing.assert_allclose(batch["region_boxes"][0], boxes, rtol=1e-6)
    assert batch["region_mask"].tolist() == [[1, 1, 1, 0]]
    assert batch["region_classes"].tolist() == [[1, 0, 1, 0]]
    flat = {**row, "scenes": [one, two]}  # one scene
    _, rows = read(write(tmp_path / "b.jsonl", [flat]))
    assert gather(rows, [0])["region_boxes"][0, 0].tolist() == pytest.approx(
        [0.5, 0.1, 0.7, 0.3]
    )
    found = head_options(make_config().task, rows.form.labels)
    assert found == {"regions": 36, "masked": 6, "features": 5, "classes": 2} | ALL


@pytest.mark.parametrize(
    "scenes, message",
    [
        ("a circle", r"rows\.jsonl:2: scenes has to be a list of objects.*'a circle'"),
        ([[3]], r"rows\.jsonl:2: scenes: an object has color, type.*this is 3"),
        ([{"type": "circle"}], r"rows\.jsonl:2: scenes: an object has.*KeyError"),
        ([{"type": "c", "color": "r", "box": [5, 5, 1, 9]}], r":2: scenes.*no box"),
        (
            [{"type": "c", "color": "r", "box": [0, 0, 640, 480]}],
            r":2: scenes.*no box.*, in a scene of 100 x 100",
        ),
        ([{"type": "c", "color": "r", "box": [5, 5, 1]}], r":2: scenes: an object"),
    ],
)
def test_objects_that_are_none(tmp_path, scenes, message):
    rows = [*make_rows(1), {"sentence": "it is", "scenes": scenes}]
    if isinstance(scenes, str):  # the first row decides what the others must be
        rows[1]["scenes"] = {"name": scenes}
        message = message.replace("'a circle'", "name")
    with pytest.raises(UserError, match=message):
        read(write(tmp_path / "rows.jsonl", rows))


def test_rows_to_answer_that_lack_their_regions():
    bare = [Row({"sentence": "a red circle"}, "new.jsonl:3")]
    for labels in ("Red/circle",), ():  # objects, files
        form = make_form(make_config())._replace(labels=labels)
        with pytest.raises(UserError, match=r"new\.jsonl:3: task\.regions='scenes'"):
            regions.make_rows(bare, form, TOKENIZER, False)


def test_other_objects_than_the_training_rows_have(table):
    with pytest.raises(UserError, match=r"rows\.jsonl:1: scenes has '.*', which the"):
        read(table, labels=("Green/star",))


def test_files_are_read_and_those_that_lack_are_counted(tmp_path):
    write_image(tmp_path / "one.npz", 3)
    (tmp_path / "sub").mkdir()
    pixels = np.float32([[0, 0, 320, 240]])
    size = {"image_w": 640, "image_h": 480}
    write_image(tmp_path / "sub/two.npz", 1, boxes=pixels, **size)
    names = ["one", "sub/two.npz", "gone", "one.npz", str(tmp_path / "one.npz")]
    rows = [{"text": f"it is {'red ' * i}", "image": x} for i, x in enumerate(names)]
    said = []
    keys = dict(text="text", regions="image", region_size=5, max_regions=2)
    config, rows = read(write(tmp_path / "rows.jsonl", rows), said, **keys)
    assert rows.n == 4 and rows.images.sizes.tolist() == [3, 1]
    assert rows.image.tolist() == [0, 1, 0, 0]
    lacking = f"1 row whose image is not a file, left out: {tmp_path}/rows.jsonl:3"
    assert lacking in said
    cut = "3 of 4 images have more than task.max_regions=2 regions: 3 are left out"
    assert cut in [*rows.plan(12).notes()]
    batch = gather(rows, [1, 3])
    assert batch["region_boxes"][0, 0].tolist() == [0, 0, 0.5, 0.5]
    assert batch["region_mask"].tolist() == [[1, 0], [1, 1]]
    assert "region_classes" not in batch
    wanted = {"regions": 2, "masked": 1, "features": 5, "classes": 0} | ALL
    assert head_options(config.task, ()) == wanted
    # The hash depends on a file's contents, not on when it was written.
    before = rows.plan(12).content_hash
    write_image(tmp_path / "one.npz", 3)
    again = read(tmp_path / "rows.jsonl", **keys)[1].plan(12)
    assert again.content_hash == before
    write_image(tmp_path / "one.npz", 3, seed=1)
    again = read(tmp_path / "rows.jsonl", **keys)[1].plan(12)
    assert again.content_hash != before


@pytest.mark.parametrize("soft", [False, True])
def test_classes_of_files(tmp_path, soft):
    classes = np.eye(7)[[6, 2]] if soft else np.array([6, 2])
    write_image(tmp_path / "a.npz", 2, classes=classes)
    table = write(tmp_path / "r.jsonl", [{"sentence": "it is", "image": "a"}])
    keys = dict(regions="image", region_size=5, region_classes=7, max_regions=3)
    found = gather(read(table, **keys)[1], [0])["region_classes"][0]
    assert found.dtype == (np.float32 if soft else np.int32)
    assert (found[:2] == classes).all() and not found[2].any()
    write_image(tmp_path / "a.npz", 2)  # without classes, which answers do not use
    assert "region_classes" not in gather(read(table, labelled=False, **keys)[1], [0])


@pytest.mark.parametrize(
    "arrays, message",
    [
        (dict(features=np.ones((3, 4))), r"shape \[3, 4\], and task.region_size=5"),
        (dict(boxes=np.ones((2, 4))), r"boxes have the shape \[2, 4\].*\[3, 4\]"),
        (dict(boxes=None), r"a\.npz: has no boxes; it has classes, features"),
        (dict(classes=None), r"a\.npz: has no classes"),
        (dict(classes=np.ones((3, 4))), r"classes have the shape \[3, 4\]"),
        (dict(classes=np.array([0, 1, 9])), r"classes have to be from 0 to 6"),
        (dict(boxes=np.full((3, 4), 30.0)), r"boxes have to be shares of the image"),
        (
            dict(boxes=np.tile([0.5, 0.5, 0.2, 0.2], (3, 1))),
            r"have to be x1, y1, x2, y2",
        ),
        (dict(features=np.full((3, 5), np.nan)), r"features are not all finite"),
    ],
)
def test_files_that_hold_something_else(tmp_path, arrays, message):
    write_image(tmp_path / "a.npz", 3, **{"classes": np.arange(3), **arrays})
    table = write(tmp_path / "rows.jsonl", [{"sentence": "it is", "image": "a"}])
    keys = dict(regions="image", region_size=5, region_classes=7)
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path))}.*{message}"):
        gather(read(table, **keys)[1], [0])


@pytest.mark.parametrize(
    "keys", [{"region_mixture": "words=1,regions=1"}, {"hide_regions": True}]
)
def test_pairs_are_said_by_those_alone_who_have_learnt_them(table, keys):
    with pytest.raises(UserError, match="was not trained to match"):
        read(table, labelled=False, **keys)
    assert read(table, labelled=True, **keys)[1].n


def test_a_file_that_is_no_archive_and_files_that_all_lack(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    table = write(tmp_path / "rows.jsonl", [{"sentence": "it is", "image": "a"}])
    with pytest.raises(UserError, match=r"a\.npz: is not an npz file"):
        read(table, regions="image")
    (tmp_path / "a.npz").unlink()
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*a\.npz is not there"):
        read(table, regions="image")


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(region_mixture="words=1,images=2"), "region_mixture.*'images'"),
        (dict(region_mixture="words"), "task.region_mixture=words: 'words' is not"),
        (dict(region_mixture=""), "task.region_mixture= names none of"),
        (dict(region_mixture="pairs=1", hide_regions=True), "hide_regions=True leaves"),
        (dict(word_groups="number"), "task.word_groups=number: 'number' is not a"),
        (dict(word_groups="n:one|star"), "word_groups: n: 'star' is not one piece"),
        (dict(word_groups="n:one,m:one"), "'one' is there twice"),
        (dict(label="truth"), r"rows\.jsonl:1: task.label=truth: there is no such"),
        (dict(label="sentence"), "neither true nor false"),
    ],
)
def test_keys_that_cannot_be(table, keys, message):
    with pytest.raises(UserError, match=message):
        read(table, **keys)


def test_kinds_and_pairs_are_drawn_by_the_row(table):
    _, rows = read(table, region_mixture="words=1,regions=1,pairs=2")
    example = np.arange(4000) % rows.n
    batch = gather(rows, example, KEYS)
    kinds = np.bincount(batch["region_task"], minlength=3) / 4000
    np.testing.assert_allclose(kinds, [0.25, 0.25, 0.5], atol=0.03)
    is_pair = batch["region_task"] == PAIRS
    is_other = batch["alignment_labels"] == OTHER
    assert (batch["alignment_weights"] == is_pair).all()
    # Only pairs may have another row's image, and half of them do.
    assert not is_other[~is_pair].any()
    assert abs(is_other[is_pair].mean() - 0.5) < 0.05
    own = gather(rows, example)
    assert (own["region_task"] == PAIRS).all() and not own["alignment_labels"].any()
    same = (batch["region_boxes"] == own["region_boxes"]).all(axis=(1, 2))
    assert (same == ~is_other).all()
    # A row alone is the same.
    alone = gather(rows, example[70:71], KEYS[70:71])
    assert all((alone[name][0] == batch[name][70]).all() for name in batch)


def test_a_row_of_one_text_is_no_pair_of_two(tmp_path):
    rows = make_rows(8)
    for row in rows:
        row["sentence"] = "it is red"
    _, rows = read(write(tmp_path / "r.jsonl", rows), region_mixture="pairs=1")
    batch = gather(rows, np.arange(4000) % 8, KEYS)
    assert not batch["alignment_labels"].any() and batch["alignment_weights"].all()


def test_a_column_says_what_is_true(tmp_path):
    table = write(tmp_path / "r.jsonl", make_rows(truth=True))
    _, rows = read(table, label="label")
    example = np.arange(3000) % 30
    batch = gather(rows, example, KEYS[:3000])
    true, false = example % 3 == 0, example % 3 == 1
    kinds, weights = batch["region_task"], batch["alignment_weights"]
    assert {*kinds[true].tolist()} == {WORDS, REGIONS, PAIRS}
    assert (kinds[~true] == PAIRS).all()
    assert (batch["alignment_labels"] == false).all()
    assert weights[false].all() and not weights[~(true | false)].any()
    own = gather(rows, example)
    assert (own["region_features"] == batch["region_features"]).all()
    assert rows.label_counts()["texts"] == {"true": 14, "false": 13, "unknown": 13}
    scored = rows.for_scores()
    kinds = gather(scored, np.arange(scored.n), KEYS[: scored.n])["region_task"]
    assert np.bincount(kinds).tolist() == [14, 14, 40]
    # Without pairs, rows with an untrue text are neither trained on nor scored.
    _, rows = read(table, label="label", region_mixture="words=1")
    assert not gather(rows, example, KEYS[:3000])["alignment_weights"].any()
    assert rows.for_scores().n == 14
    lines = [line for i, line in enumerate(make_rows(truth=True)) if i % 3]
    with pytest.raises(UserError, match="label is true of no row"):
        read(
            write(tmp_path / "f.jsonl", lines), label="label", region_mixture="words=1"
        )


def test_an_evaluation_has_each_row_once_a_kind(table):
    _, rows = read(table, region_mixture="words=1,pairs=3")
    scored = rows.for_scores()
    assert scored.n == 2 * rows.n
    batch = gather(scored, np.arange(scored.n), KEYS[: scored.n])
    assert batch["region_task"].tolist() == [WORDS, PAIRS] * rows.n
    first = gather(rows, np.arange(rows.n))
    assert (batch["input_ids"][::2] == first["input_ids"]).all()
    assert (batch["region_boxes"][::2] == first["region_boxes"]).all()


def test_scores_of_groups_of_words(table):
    _, rows = read(table, word_groups="number:one|two|three,color:red|blue")
    one, red, circle = (ids[0] for ids in TOKENIZER.encode_batch(["one", "red", "it"]))
    outputs = {
        "word_ids": np.array([[one, red], [one, circle]]),
        "word_weights": np.float32([[1, 0], [1, 1]]),
        "word_nats": np.float32([[1, 5], [3, 2]]),
        "word_right": np.float32([[1, 1], [0, 1]]),
    }
    found = rows.score(outputs, np.arange(2))
    assert tuple(found) == rows.scores
    assert found["perplexity"] == pytest.approx(np.exp(2))
    numbers = [found[f"number_{what}"] for what in ("loss", "accuracy", "words")]
    assert numbers == [2, 0.5, 2]
    assert np.isnan(found["color_accuracy"]) and found["color_words"] == 0
    outputs["word_weights"] = np.zeros((2, 2), np.float32)  # no word was masked
    assert np.isnan(rows.score(outputs, np.arange(2))["perplexity"])


def test_a_word_of_byte_bpe_counts_within_texts_and_where_they_begin():
    """Once only words at the beginning of a text counted."""
    ids = {" one": [7], "one": [8], " two": [9], "two": [5, 6], "on": [10]}
    tokenizer = SimpleNamespace(
        vocab_size=12, unk_id=1, joins_with_space=True,
        encode_batch=lambda texts: [ids.get(text, [4, 4]) for text in texts],
    )  # fmt: skip
    found = group_ids([("number", ("one", "two"))], tokenizer)
    assert np.flatnonzero(found == 0).tolist() == [7, 8, 9]
    with pytest.raises(UserError, match="'on' is not one piece"):
        group_ids([("number", ("on",))], tokenizer)
