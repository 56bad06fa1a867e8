# SPDX-License-Identifier: Apache-2.0
"""Data sets of TensorFlow Datasets on this machine."""

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bertjax import UserError
from bertjax.data.corpus.documents import Document, Source, refuse_missing
from bertjax.data.corpus.line_repair import Counts

WRITTEN = re.compile(r"tfds:([^:\[\]]+)(?::(\d+\.\d+\.\d+))?:([^:].*)")


def open_split(name: str, keys: Mapping[str, str]) -> tuple[Any, str]:
    """Open "tfds:name:split" and return its builder and the split.

    keys: {feature that the split must have: the config key that names it}. Raises
    UserError.
    """
    match = WRITTEN.fullmatch(name)
    if not match:
        raise UserError(f"{name}: write tfds:name[/config][:version]:split")
    data_set, version, split = match.groups()
    try:
        import tensorflow_datasets as tfds
    except ImportError as err:
        raise UserError(
            f"{name}: needs tensorflow and tensorflow_datasets ({err})"
        ) from None
    full = f"{data_set}:{version}" if version else data_set
    try:
        builder = tfds.builder(full, try_gcs=False)
        builder.info.splits[split]
    except tfds.core.DatasetNotFoundError:
        known = tfds.list_builders()
        near = difflib.get_close_matches(data_set.partition("/")[0], known, n=1)
        question = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"{name}: not on this machine, no data set of that name{question}"
        ) from None
    except Exception as err:  # tfds raises errors of many kinds
        reason = " ".join(str(err).split())
        reason = reason if len(reason) <= 100 else reason[:100] + "..."
        raise UserError(
            f"{name}: not on this machine; tensorflow_datasets' download_and_prepare() "
            f"gets it ({reason})"
        ) from None
    refuse_missing(keys, sorted(builder.info.features or {}), name, "feature")
    return builder, split


def read_split(
    builder: Any, split: Any, features: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Yield the examples of a split, in the order of the files, as plain values."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    # The accelerator is for jax alone. RuntimeError: tensorflow has already started.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    decoders = tfds.decode.PartialDecoding(dict.fromkeys(features, True))
    data = builder.as_dataset(split=split, shuffle_files=False, decoders=decoders)
    for example in tfds.as_numpy(data):
        yield {name: as_plain(value) for name, value in example.items()}


def as_plain(value: Any) -> Any:
    """Return an array, or lists of unequal lengths, as lists; a scalar as it is."""
    for name in ("tolist", "to_list"):  # of numpy, of TensorFlow's RaggedTensor
        if hasattr(value, name):
            return getattr(value, name)()
    return value


@dataclass
class TfdsSource(Source):
    """A split, or part `start` of `end` even parts of it; nothing is downloaded."""

    def _open(self) -> tuple[Any, str]:
        return open_split(self.name, self.fields.keys())

    def fingerprint(self, cache_dir: str, say: Callable[[str], None] = print) -> str:
        """Return name, version, split and number of examples and bytes."""
        builder, split = self._open()
        info = builder.info
        size = info.splits[split].num_examples
        identity = f"tfds:{info.full_name}:{split}:{size}:{int(info.dataset_size)}"
        return identity + self.fields.suffix()

    def split(self, piece_bytes: int) -> list[Source]:
        """Cut into even ranges of examples of about `piece_bytes` each."""
        builder, split = self._open()
        splits = builder.info.splits
        examples = sum(s.num_examples for s in splits.values())
        mean = sum(s.num_bytes for s in splits.values()) / max(examples, 1)
        number = splits[split].num_examples
        pieces = max(1, min(number, round(number * mean / piece_bytes)))
        return [replace(self, start=i, end=pieces) for i in range(pieces)]

    def read(self, counts: Counts, max_line_bytes: int) -> Iterator[Document]:
        builder, split = self._open()
        if self.end is not None:
            import tensorflow_datasets as tfds

            split = tfds.even_splits(split, self.end)[self.start]
        for record in read_split(builder, split, self.fields.keys()):
            yield self.make(record, lambda: self.name, counts)
