# SPDX-License-Identifier: Apache-2.0
"""Texts and regions for tests: rows with objects, files, a tokenizer of few words."""

import json
from types import SimpleNamespace

import numpy as np

from bertjax.assembly import resolve
from bertjax.config.schema import base
from bertjax.data.batches import Batches
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.data.mixture import make_mixture
from bertjax.tasks import prepare_task
from bertjax.tasks.task_type import get_task_type

WORDS = "there is one two three a red blue circle square left of it and"
WORDS = (*WORDS.split(),)
V = 5 + len(WORDS)


class Tokenizer(SimpleNamespace):
    """A tokenizer with one piece per word."""

    def encode_batch(self, texts):
        known = {word: 5 + i for i, word in enumerate(WORDS)}
        return [[known.get(word, 1) for word in text.split()] for text in texts]


TOKENIZER = Tokenizer(
    vocab_size=V, pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4, has_mask=True,
    special_ids=np.arange(5), replacement_ids=np.arange(5, V, dtype=np.int32),
    word_starts=np.ones(V, bool), joins_with_space=False,
)  # fmt: skip


def make_thing(draw):
    x, y = draw.integers(0, 70, 2).tolist()
    names = {
        "type": ("circle", "square")[draw.integers(2)],
        "color": ["Red", "Blue"][draw.integers(2)],
    }
    return {**names, "size": 30, "x_loc": x, "y_loc": y}


def make_rows(n=40, seed=0, truth=False):
    """Return n rows, each with its own text and 1 to 6 objects in two scenes."""
    draw = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        sizes = draw.integers(1, 4), draw.integers(0, 4)
        scenes = [[make_thing(draw) for _ in range(size)] for size in sizes]
        text = " ".join(draw.choice(WORDS, draw.integers(4, 9)))
        more = {"label": ("true", "false", None)[i % 3]} if truth else {}
        rows.append({"sentence": text, "scenes": scenes, **more})
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_image(path, regions, width=5, seed=0, **arrays):
    """Write an npz file of `regions` regions; arrays replace its own (None: omit)."""
    draw = np.random.default_rng(seed)
    corner = draw.random((regions, 2)) / 2
    own = {
        "features": draw.random((regions, width)).astype(np.float32),
        "boxes": np.hstack([corner, corner + 0.4]).astype(np.float32),
    }
    np.savez(path, **{k: v for k, v in (own | arrays).items() if v is not None})


def make_config(**keys):
    """Return a config of the objective `regions`; keys: keys of config.task."""
    config = base()
    config.objective = "regions"
    config.task.update(keys)
    prepare_task.settle(config)
    return config


def read(path, said=None, labelled=True, labels=(), **keys):
    """Return (config, rows) of a file; said: a list that receives the messages."""
    config = make_config(**keys)
    task_type, form = get_task_type("regions"), prepare_task.make_form(config)
    say = (lambda text: None) if said is None else said.append
    prepare_task.check_task(config)
    examples = task_type.read(str(path), "data.train", form.keys(), say)
    found = task_type.find_labels(examples, form)
    form = form._replace(labels=labels) if labels else found
    rows = task_type.make_rows(examples, form, TOKENIZER, labelled, say)
    return config, rows


def make_batches(config, rows, length=12, batch_size=16, seed=3, scored=False):
    """Make the batches of rows, as a run or (scored) an evaluation makes them."""
    plan = (rows.for_scores() if scored else rows).plan(length)
    needs, tables = frozenset({"regions", "labels"}), make_tables(TOKENIZER)
    how = config, needs, TOKENIZER, tables, length, config.data.mask_rate
    half = resolve.make_features(*how)
    mixed = make_mixture({"train": plan.n})
    return Batches((plan,), mixed, half, TOKENIZER, batch_size, seed)
