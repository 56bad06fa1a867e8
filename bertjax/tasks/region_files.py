# SPDX-License-Identifier: Apache-2.0
"""The regions of images: from one npz file per image, or from lists of objects.

A file holds `features` [R, F] and `boxes` [R, 4] (x1, y1, x2, y2), as detectors make
them for LXMERT and UNITER, and optionally `classes`: numbers i [R] or probabilities f
[R, C]. Boxes are shares of the image's width and height, or pixels if the file also has
`image_w` and `image_h`.

Objects are those of Cornell NLVR (Suhr et al. 2017): `type`, `color`, `size`, `x_loc`,
`y_loc` in a scene of 100 x 100; or `box`, four numbers, instead of the last three. The
scenes of an image are side by side.
"""

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from bertjax import UserError
from bertjax.tasks.tables import Row

SIDE = 100.0  # width and height of a scene
SLACK = 0.1  # how far rounded boxes may lie outside of a scene
# The exceptions for files that are not npz, encrypted, or of unknown compression.
NOT_READ = (
    OSError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


class ImageRegions(NamedTuple):
    """The regions of an image: features f32 [r, F], boxes f32 [r, 4] in [0, 1], and
    classes i32 [r] or f32 [r, C], or None."""

    features: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray | None


class Images(Protocol):
    """Images by their numbers."""

    @property
    def sizes(self) -> np.ndarray:
        """The number of regions of each image: i64 [n]."""

    @property
    def identity(self) -> list[np.ndarray]:
        """The arrays that identify the images, for content hashes."""

    def load(self, number: int) -> ImageRegions:
        """Return the regions of an image."""


# ------------------------------------------------------------------------- objects
@dataclass(frozen=True, eq=False)
class Objects:
    """Images in memory, concatenated; image i has the regions [offsets[i],
    offsets[i + 1])."""

    regions: ImageRegions
    offsets: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def identity(self) -> list[np.ndarray]:
        return [self.offsets, *(x for x in self.regions if x is not None)]

    def load(self, number: int) -> ImageRegions:
        part = slice(*self.offsets[number : number + 2])
        features, boxes, classes = self.regions
        own = None if classes is None else classes[part]
        return ImageRegions(features[part], boxes[part], own)


class Thing(NamedTuple):
    """An object: its name ("#0099ff/circle"), size (a share of a scene) and box."""

    name: str
    size: float
    box: tuple[float, ...]


def find_names(rows: Sequence[Row], column: str) -> tuple[str, ...]:
    """Return the names of all objects of rows, "color/type", sorted."""
    things = (thing.name for row in rows for thing in read_things(row, column))
    return tuple(sorted(set(things)))


def read_things(row: Row, column: str) -> list[Thing]:
    """Read the objects of a cell: a list of scenes, or of the objects of one.

    Raises UserError that names the place.
    """
    value = row.cells[column]
    if not isinstance(value, list):
        raise UserError(
            f"{row.place}: {column} has to be a list of objects, or of lists of them, "
            f"and is {value!r:.60}"
        )
    scenes = value if value and all(isinstance(x, list) for x in value) else [value]
    return [
        _thing(thing, k, len(scenes), f"{row.place}: {column}")
        for k, scene in enumerate(scenes)
        for thing in scene
    ]


def _thing(value: Any, scene: int, scenes: int, place: str) -> Thing:
    try:
        name = f"{value['color']}/{value['type']}"
        if "box" in value:
            x1, y1, x2, y2 = map(float, value["box"])
            size = max(x2 - x1, y2 - y1)
        else:
            x1, y1, size = (float(value[key]) for key in ("x_loc", "y_loc", "size"))
            x2, y2 = x1 + size, y1 + size
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(
            f"{place}: an object has color, type, and size, x_loc, y_loc or a box of "
            f"four numbers, and this is {value!r:.80} ({type(e).__name__} {e})"
        ) from None
    if not (-SLACK <= x1 <= x2 <= SIDE + SLACK and -SLACK <= y1 <= y2 <= SIDE + SLACK):
        raise UserError(
            f"{place}: {value!r:.80} has no box from (x1, y1) to (x2, y2), in a scene "
            f"of {SIDE:g} x {SIDE:g}"
        )
    wide, high = SIDE * scenes, SIDE
    left = SIDE * scene
    box = (left + x1) / wide, y1 / high, (left + x2) / wide, y2 / high
    return Thing(name, size / SIDE, box)


def feature_size(names: Sequence[str]) -> int:
    """Return F for objects with these names: one feature per color and type, and one
    for the size."""
    return sum(map(len, _parts(names))) + 1


def _parts(names: Sequence[str]) -> tuple[list[str], list[str]]:
    colors, types = zip(*(name.rpartition("/")[::2] for name in names), strict=True)
    return sorted(set(colors)), sorted(set(types))


def make_objects(rows: Sequence[Row], column: str, names: Sequence[str]) -> Objects:
    """Make the images of rows; their classes are indices into `names`.

    Raises UserError for objects that are not among `names`.
    """
    number = {name: i for i, name in enumerate(names)}
    read = [read_things(row, column) for row in rows]
    for row, things in zip(rows, read, strict=True):
        if unknown := [thing.name for thing in things if thing.name not in number]:
            raise UserError(
                f"{row.place}: {column} has {unknown[0]!r}, which the training rows "
                f"have not: {', '.join(names)}"
            )
    every = [thing for things in read for thing in things]
    colors, types = _parts(names)
    pairs = [thing.name.rpartition("/")[::2] for thing in every]
    hot = np.zeros((len(every), feature_size(names)), np.float32)
    at = np.arange(len(every))
    hot[at, [colors.index(color) for color, _ in pairs]] = 1
    hot[at, [len(colors) + types.index(kind) for _, kind in pairs]] = 1
    hot[:, -1] = [thing.size for thing in every]
    boxes = np.array([thing.box for thing in every], np.float32).reshape(-1, 4)
    classes = np.array([number[thing.name] for thing in every], np.int32)
    offsets = np.cumsum([0, *map(len, read)], dtype=np.int64)
    return Objects(ImageRegions(hot, boxes, classes), offsets)


# ------------------------------------------------------------------------- npz files
@dataclass(frozen=True, eq=False)
class RegionFiles:
    """Images in one file each, which is read when needed.

    sizes: the regions of each. checksums: a CRC of each file's own. classes: their
    number; 0: files have no classes, or they are not read.
    """

    paths: tuple[Path, ...]
    sizes: np.ndarray
    checksums: np.ndarray
    classes: int

    @property
    def identity(self) -> list[np.ndarray]:
        return [self.sizes, self.checksums]

    def load(self, number: int) -> ImageRegions:
        """Read a file. Raises UserError if its arrays are invalid."""
        path = self.paths[number]
        try:
            with np.load(path) as file:
                named = {name: file[name] for name in file.files}
        except NOT_READ as e:
            raise UserError(f"{path}: is not an npz file ({e})") from None
        try:
            features = named["features"].astype(np.float32)
            boxes = named["boxes"].astype(np.float32)
            if "image_w" in named and "image_h" in named:
                w, h = float(named["image_w"]), float(named["image_h"])
                boxes = boxes / np.array([w, h, w, h], np.float32)
        except (TypeError, ValueError) as e:
            raise UserError(f"{path}: arrays have to be of numbers ({e})") from None
        if not np.isfinite(features).all():
            raise UserError(f"{path}: features are not all finite numbers")
        slack = SLACK / SIDE
        if not ((boxes >= -slack) & (boxes <= 1 + slack)).all():
            raise UserError(
                f"{path}: boxes have to be shares of the image, from 0 to 1, or pixels "
                "beside image_w and image_h"
            )
        if not (boxes[:, :2] <= boxes[:, 2:]).all():
            raise UserError(
                f"{path}: boxes have to be x1, y1, x2, y2, of which the last two are "
                "no less than the first two"
            )
        classes = named.get("classes") if self.classes else None
        if classes is not None and classes.ndim == 1:
            if not ((classes >= 0) & (classes < self.classes)).all():
                raise UserError(
                    f"{path}: classes have to be from 0 to {self.classes - 1} "
                    f"(task.region_classes={self.classes})"
                )
            classes = classes.astype(np.int32)
        elif classes is not None:
            classes = classes.astype(np.float32)
            sums = abs(classes.sum(1) - 1)
            if not ((classes >= 0).all() and (sums <= 1e-2).all()):
                raise UserError(f"{path}: classes [R, C] have to be probabilities")
        return ImageRegions(features, np.clip(boxes, 0, 1), classes)


def find_file(row: Row, column: str) -> Path:
    """Return the file that a cell names, relative to the table or absolute.

    The suffix .npz may be left out. Raises UserError if the cell is not a name.
    """
    value = row.cells[column]
    if not isinstance(value, str) or not value:
        raise UserError(
            f"{row.place}: {column} has to name an npz file, as the first row's does, "
            f"and is {value!r:.60}"
        )
    name = value if value.endswith(".npz") else f"{value}.npz"
    return Path(row.place.rpartition(":")[0]).parent / os.path.expanduser(name)


def open_files(paths: Sequence[Path], width: int, classes: int) -> RegionFiles:
    """Read the shapes of existing files. Raises UserError, naming the file, for shapes
    that do not fit `width` (task.region_size) and `classes`."""
    sizes, checksums, axes = [], [], 0
    for path in paths:
        shapes, checksum = _look(path)
        _check_shapes(path, shapes, width, classes)
        if classes and len(shapes["classes"]) != (axes or len(shapes["classes"])):
            raise UserError(
                f"{path}: classes are numbers in one file and probabilities in "
                f"another, {paths[0]}"
            )
        axes = len(shapes.get("classes", ()))
        sizes.append(shapes["features"][0])
        checksums.append(checksum)
    counts = np.array(sizes, np.int64)
    return RegionFiles(tuple(paths), counts, np.array(checksums), classes)


def _look(path: Path) -> tuple[Mapping[str, tuple[int, ...]], int]:
    """Return the shapes of a file's arrays, and one checksum of all of them."""
    shapes, checksum = {}, 0
    form = np.lib.format
    try:
        with zipfile.ZipFile(path) as file:
            for info in sorted(file.infolist(), key=lambda info: info.filename):
                checksum = zlib.crc32(f"{info.filename} {info.CRC}".encode(), checksum)
                with file.open(info) as member:
                    first = form.read_magic(member) == (1, 0)
                    read = form.read_array_header_1_0 if first else None
                    read = read or form.read_array_header_2_0
                    shapes[info.filename.removesuffix(".npy")] = read(member)[0]
    except NOT_READ as e:
        raise UserError(f"{path}: is not an npz file ({e})") from None
    return shapes, checksum


def _check_shapes(
    path: Path, shapes: Mapping[str, tuple[int, ...]], width: int, classes: int
) -> None:
    wanted = ("features", "boxes", *["classes"] * bool(classes))
    for name in wanted:
        if name not in shapes:
            raise UserError(f"{path}: has no {name}; it has {', '.join(shapes)}")
    features, boxes = shapes["features"], shapes["boxes"]
    if len(features) != 2 or features[1] != width:
        raise UserError(
            f"{path}: features have the shape {list(features)}, and "
            f"task.region_size={width} asks for [regions, {width}]"
        )
    if boxes != (features[0], 4):
        raise UserError(
            f"{path}: boxes have the shape {list(boxes)}, and have to have "
            f"[{features[0]}, 4]"
        )
    if classes and shapes["classes"] not in (features[:1], (features[0], classes)):
        raise UserError(
            f"{path}: classes have the shape {list(shapes['classes'])}, and "
            f"task.region_classes={classes} asks for [{features[0]}] or "
            f"[{features[0]}, {classes}]"
        )
