# SPDX-License-Identifier: Apache-2.0
"""Rows of texts and the regions of their images, for pretraining (Chen et al. 2020,
UNITER, arXiv 1909.11740; Tan and Bansal 2019, LXMERT, arXiv 1908.07490).

A row is a text, the regions of an image, and its kind of prediction (`KINDS`), which is
drawn by shares: masked words given all regions, masked regions given all words, or
whether text and image belong together. So a masked word is never hidden together with
the region that it describes (UNITER, section 3.1). Half of the rows of the last kind
get the image of another row, drawn by the row's key. But if a column says whether the
text is true of its image, this is predicted instead, and rows with a text that is not
true are not masked.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.data import counter_rng
from bertjax.tasks import region_files, tables, text_rows
from bertjax.tasks.region_files import Images
from bertjax.tasks.region_settings import (
    KIND_NAMES,
    KINDS,
    OF_GROUPS,
    PAIRS,
    WORDS,
    RegionSettings,
    group_ids,
    read_settings,
)
from bertjax.tasks.tables import Row, Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, Ragged, min_mean_max
from bertjax.tasks.task_type import TaskType

OWN, OTHER = 0, 1  # alignment_labels, like nsp_labels
TRIES = 8  # draws of an image of another row
TRUTH = {"true": 1, "1": 1, "yes": 1, "false": 0, "0": 0, "no": 0, "": -1}
UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class TextRegions(text_rows.Texts):
    """Rows of texts and regions.

    images: all images; image: i64 [n], the number of each row's; wording: i64 [n],
    equal for equal texts; truth: i8 [n], 1 if the text is true of the image, 0 if not,
    -1 if unknown; kinds: i8 [n], the kind of each row in an evaluation; None: it is
    drawn; group: i8 [V], the group of words that an id is in, -1 for none.
    """

    images: Images
    image: np.ndarray
    wording: np.ndarray
    truth: np.ndarray
    group: np.ndarray
    kinds: np.ndarray | None = None

    @property
    def settings(self) -> RegionSettings:
        return RegionSettings(*(self.form.settings or ()))

    def arrays(self) -> list[np.ndarray | None]:
        own = [self.image, self.truth, self.kinds, *self.images.identity]
        return [*super().arrays(), *own]

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: the arrays of `Texts`, without labels; region_features f32
        [b, R, F], region_boxes f32 [b, R, 4], region_mask i32 [b, R] (1: a visible
        region), region_classes i32 [b, R] or f32 [b, R, C] if images have classes;
        region_task i32 [b], one of KINDS; alignment_labels i32 [b], OWN or OTHER, and
        alignment_weights f32 [b]. keys: None to draw nothing: all rows are pairs with
        their own image."""
        kinds = self._kinds(example, keys)
        image, labels, known = self._pair(example, keys, kinds)
        batch = super().gather(example, keys, specials)
        del batch["labels"]
        batch |= self._regions(image)
        learnt = self.settings.shares[PAIRS] > 0 and not self.settings.hide
        weights = (kinds == PAIRS) & known & learnt
        return batch | {
            "region_task": kinds.astype(np.int32),
            "alignment_labels": labels.astype(np.int32),
            "alignment_weights": weights.astype(np.float32),
        }

    def _kinds(self, example: np.ndarray, keys: Any) -> np.ndarray:
        """Return the kinds of rows, i64 [b]; rows with an untrue text are PAIRS."""
        if keys is None:
            return np.full(len(example), PAIRS)
        if self.kinds is not None:
            kinds = self.kinds[example].astype(np.int64)
        else:
            draw = counter_rng.uniform(counter_rng.fold(keys, "kind"), 0)
            ends = np.cumsum(self.settings.shares)[:-1]
            kinds = np.searchsorted(ends, draw, side="right")
        if self.settings.truth:
            kinds = np.where(self.truth[example] == 1, kinds, PAIRS)
        return kinds

    def _pair(
        self, example: np.ndarray, keys: Any, kinds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the image of each row, its alignment label, and whether that is known.

        Another row's image must have a different text, since an image may have several
        texts. A row keeps its own image if none of TRIES draws fits.
        """
        own, n = self.image[example], len(self.image)
        if self.settings.truth:
            truth = self.truth[example]
            return own, np.where(truth == 0, OTHER, OWN), truth != UNKNOWN
        every = np.ones(len(example), bool)
        if keys is None:
            return own, np.full(len(example), OWN), every
        key = counter_rng.fold(keys, "partner")
        tries = counter_rng.below(key[:, None], np.arange(1, TRIES + 1), n)
        fits = self.image[tries] != own[:, None]
        fits &= self.wording[tries] != self.wording[example][:, None]
        other = self.image[tries[np.arange(len(tries)), fits.argmax(axis=1)]]
        wanted = (kinds == PAIRS) & (counter_rng.uniform(key, 0) < 0.5)
        swapped = wanted & fits.any(axis=1)
        return np.where(swapped, other, own), np.where(swapped, OTHER, OWN), every

    def _regions(self, image: np.ndarray) -> Batch:
        """Make the arrays of the images' regions, at most R of each."""
        most = self.settings.most
        loaded = [self.images.load(int(i)) for i in image]
        shape = len(image), most
        first = loaded[0]
        batch = {
            "region_features": np.zeros((*shape, first.features.shape[1]), np.float32),
            "region_boxes": np.zeros((*shape, 4), np.float32),
            "region_mask": np.zeros(shape, np.int32),
        }
        if first.classes is not None:
            empty = (*shape, *first.classes.shape[1:])
            batch["region_classes"] = np.zeros(empty, first.classes.dtype)
        for row, (features, boxes, classes) in enumerate(loaded):
            size = min(len(features), most)
            batch["region_features"][row, :size] = features[:size]
            batch["region_boxes"][row, :size] = boxes[:size]
            batch["region_mask"][row, :size] = not self.settings.hide
            if classes is not None:
                batch["region_classes"][row, :size] = classes[:size]
        return batch

    def for_scores(self) -> "TextRegions":
        """Return each row once for each kind that has a share; rows with an untrue text
        only as pairs."""
        kinds = [kind for kind in KINDS if self.settings.shares[kind] > 0]
        at = np.repeat(np.arange(len(self.image)), len(kinds))
        kind = np.tile(np.array(kinds, np.int8), len(self.image))
        if self.settings.truth:
            kept = (self.truth[at] == 1) | (kind == PAIRS)
            at, kind = at[kept], kind[kept]
        (texts,) = self.texts
        text = Ragged.of([texts[i].tolist() for i in at.tolist()])
        own = {name: getattr(self, name)[at] for name in ("image", "wording", "truth")}
        return replace(self, texts=(text,), kinds=kind, **own)

    @property
    def scores(self) -> tuple[str, ...]:
        if not self.settings.shares[WORDS]:
            return ()
        return (*self.form.metrics, *self.settings.group_scores)

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Compute the perplexity of masked words and, for each group of words, the loss
        in nats, the accuracy and the number of masked words; NaN for none."""
        if not self.scores or "word_ids" not in outputs:
            return {}
        ids, weights, nats, right = (
            np.asarray(outputs[f"word_{name}"])
            for name in ("ids", "weights", "nats", "right")
        )
        found = {"perplexity": math.nan}
        if total := float(weights.sum()):
            loss = float((weights * nats).sum()) / total
            found["perplexity"] = math.exp(min(loss, 700.0))
        for k, (name, _) in enumerate(self.settings.groups):
            own = weights * (self.group[ids] == k)
            total = float(own.sum())
            values = [math.nan, math.nan, total]
            if total:
                values[:2] = [float((own * x).sum()) / total for x in (nats, right)]
            for what, value in zip(OF_GROUPS, values, strict=True):
                found[f"{name}_{what}"] = value
        return {name: found[name] for name in self.scores}

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"score"}: the probability that the text belongs to the image."""
        for row in text_rows.softmax(np.asarray(outputs["alignment_logits"])):
            yield {"score": float(row[OWN])}

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the text, the number of regions, and whether the image is its own."""
        yield from super().describe(row, example, tokenizer)
        kind = int(row["region_task"]) if "region_task" in row else None
        regions = f"{int(row['region_mask'].sum())}"
        if kind is None and (masked := int((row["region_weights"] > 0).sum())):
            regions += f", {masked} of them masked"
        yield "regions", regions
        if row["alignment_weights"] > 0:
            is_other = row["alignment_labels"] == OTHER
            yield "image", "another one" if is_other else "its own"

    def label_counts(self) -> dict[str, dict[str, float]]:
        sizes = self.images.sizes[self.image]
        counts = {"regions of an image": min_mean_max(sizes)}
        if self.settings.truth:
            names = {1: "true", 0: "false", UNKNOWN: "unknown"}
            of = {name: int((self.truth == k).sum()) for k, name in names.items()}
            counts["texts"] = {name: n for name, n in of.items() if n}
        return counts

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        more = self.images.sizes[self.image] - self.settings.most
        if cut := int((more > 0).sum()):
            yield (
                f"{cut:,} of {self.n:,} images have more than task.max_regions="
                f"{self.settings.most} regions: {int(more[more > 0].sum()):,} are left "
                "out"
            )


def find_labels(rows: Sequence[Row], form: Form) -> Form:
    """Return the form with the names of the training rows' objects as labels.

    If the rows name files, the form is returned unchanged.
    """
    if any(isinstance(row.cells[form.label], str) for row in rows):
        return form
    names = region_files.find_names(rows, form.label)
    if not names:
        raise UserError(f"task.regions={form.label}: the rows have no objects")
    return form._replace(labels=names)


def make_rows(
    rows: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> TextRegions:
    """Encode texts and find their regions.

    Labeled rows whose file does not exist are left out and reported. Raises UserError,
    naming the place, for invalid rows, and for rows to answer if the model was not
    trained on pairs.
    """
    settings = RegionSettings(*(form.settings or ()))
    if not labelled and KIND_NAMES[PAIRS] not in settings.kinds:
        raise UserError(
            "this model was not trained to match texts and images, which is what "
            "predict does: its task.region_mixture has no "
            f"{KIND_NAMES[PAIRS]}, or task.hide_regions is set"
        )
    for row in rows:  # for rows to answer, the column was not checked before
        if form.label not in row.cells:
            unknown = registry.unknown("task.regions", form.label, [*row.cells])
            raise UserError(f"{row.place}: {unknown}")
    images: Images
    if form.labels:
        images = region_files.make_objects(rows, form.label, form.labels)
        # Rows with equal objects share the first one's image, so that it is never
        # drawn as another row's.
        first: dict[str, int] = {}
        cells = (json.dumps(row.cells[form.label], sort_keys=True) for row in rows)
        image = np.array([first.setdefault(c, k) for k, c in enumerate(cells)])
    else:
        rows, images, image = _find_files(rows, form.label, settings, say, labelled)
    column = form.columns[0]
    texts = text_rows.encode_column(rows, column, tokenizer, say)
    if labelled and settings.truth:
        truth = [read_truth(row, settings.truth) for row in rows]
        if not settings.shares[PAIRS] and 1 not in truth:
            raise UserError(
                f"{rows[0].place}: {settings.truth} is true of no row, and others are "
                "pairs, of which task.region_mixture has none"
            )
    else:
        truth = [UNKNOWN] * len(rows)
    number: dict[str, int] = {}
    words = [number.setdefault(row.cells[column], len(number)) for row in rows]
    return TextRegions(
        form,
        texts.counts(tokenizer),
        (texts,),
        images=images,
        image=image,
        wording=np.array(words, np.int64),
        truth=np.array(truth, np.int8),
        group=group_ids(settings.groups, tokenizer),
    )


def _find_files(
    rows: Sequence[Row], column: str, settings: RegionSettings, say: Say, some: bool
) -> tuple[list[Row], region_files.RegionFiles, np.ndarray]:
    """Return the rows whose files exist, the files, and the number of each row's file.

    some: for labeled rows; those without a file are reported. Otherwise a missing file
    is an error, since every row needs an answer, and classes are not read, since
    answers do not need them. Raises UserError.
    """
    number: dict[Path, int] = {}
    kept, image, lacking = [], [], []
    for row in rows:
        path = region_files.find_file(row, column)
        if path in number or path.is_file():
            kept.append(row)
            image.append(number.setdefault(path, len(number)))
        else:
            lacking.append(row.place)
            if not some:
                raise UserError(f"{row.place}: {column}: {path} is not there")
    tables.report(say, lacking, "row", f" whose {column} is not a file, left out")
    if not kept:
        path = region_files.find_file(rows[0], column)
        raise UserError(f"{rows[0].place}: {path} is not there, and so are all others")
    classes = settings.classes if some else 0
    files = region_files.open_files([*number], settings.width, classes)
    return kept, files, np.array(image, np.int64)


def read_truth(row: Row, column: str) -> int:
    """Return 1 if the text is true of its image, 0 if false, UNKNOWN if empty.

    Raises UserError for another value.
    """
    if column not in row.cells:
        raise UserError(f"{row.place}: task.label={column}: there is no such column")
    value = text_rows.cell(row, column).lower()
    if value not in TRUTH:
        raise UserError(
            f"{row.place}: the {column} {value!r} is neither true nor false, nor null"
        )
    return TRUTH[value]


def head_options(task: ConfigDict, labels: Sequence[str]) -> dict[str, Any]:
    """Return the head's options: R, K, F, C and the kinds of rows.

    labels: the names of objects, which determine F and C; without them config.task
    does.
    """
    width, classes = task.region_size, task.region_classes
    if labels:
        width, classes = region_files.feature_size(labels), len(labels)
    most = task.max_regions
    masked = max(1, math.ceil(task.region_mask_rate * most - 1e-9))
    return {
        "regions": most,
        "masked": masked,
        "features": width,
        "classes": classes,
        "kinds": "/".join(read_settings(task).kinds),
    }


SETTINGS = (
    "regions",
    "max_regions",
    "region_size",
    "region_classes",
    "region_mixture",
    "region_mask_rate",
    "hide_regions",
    "word_groups",
)


def extra_scores(form: Form) -> tuple[str, ...]:
    """Return the metrics of groups of words, and of classes, which images may have."""
    classes = ("region_class_loss", "region_class_accuracy")
    return (*RegionSettings(*form.settings).group_scores, *classes)


TASK_TYPE = TaskType(
    find_labels=find_labels,
    make_rows=make_rows,
    metrics=("perplexity",),
    extra_scores=extra_scores,
    outputs=("alignment_logits",),
    file_names="FILE.jsonl",
    label_key="regions",
    columns={"text": "sentence", "regions": "scenes"},
    unused={"text_pair": "", "labels": "", "choices": ""},
    settings=SETTINGS,
    check=lambda config: read_settings(config.task),
    text_columns=1,
    head_options=head_options,
    form_settings=read_settings,
    masks=True,
)
