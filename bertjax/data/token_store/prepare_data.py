# SPDX-License-Identifier: Apache-2.0
"""From config values to a tokenizer and token stores; train and prepare share this.

Either one process does all of it (`prepare_data`), or shards that share nothing but
data.cache do (`Work.encode_shard`, any number of them, in any order), after which one
process merges (`Work.merge_shards`). The stores are the same bit for bit. If shards
find no trained tokenizer, each trains it; all train on the same text and get the same
one. The first to finish stores it for all.
"""

import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from bertjax import UserError, registry
from bertjax.data.corpus.documents import Fields, Source
from bertjax.data.corpus.parsed_code import forget_parses, keep_parses
from bertjax.data.corpus.sources import named_sources, parse_sources, report_repeats
from bertjax.data.token_flags import MARKED
from bertjax.data.token_store.cache import Cache, open_cache
from bertjax.data.token_store.components import (
    Component,
    build_components,
    full_name,
    title,
)
from bertjax.data.token_store.encoding import Encoder
from bertjax.data.token_store.pieces import PARTS, Piece, encode_pieces
from bertjax.data.token_store.store import Store
from bertjax.data.token_store.streams import make_streams
from bertjax.data.token_store.trained_streams import add_vocabs
from bertjax.data.token_store.trained_tokenizer import REPORTED, trained_tokenizer
from bertjax.data.tokenizers import train_vocab
from bertjax.data.tokenizers.extra_ids import add_extra_ids
from bertjax.data.tokenizers.fertility import (
    CAPITALS,
    measure_tokenizer,
    report_capitals,
)
from bertjax.data.tokenizers.stream_vocab import read_streams
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bertjax.data.tokenizers.word_starts import make_marker, make_segmenter, read_marked

NAMED = 5  # pieces that a message names at most


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The config values of data.* that decide what is prepared.

    train, valid: the sources as strings; both may have named components, and valid may
    be empty. vocab: the path of the tokenizer; if it is empty, a `tokenizer_kind` with
    `vocab_size` pieces is trained on `train`, whose components get shares of
    size^vocab_alpha or of vocab_weights. extra_ids: the number of sentinels that are
    added to either. streams: as data.streams; layout: the layout of records (Fields).
    """

    train: str
    valid: str
    vocab: str
    tokenizer_kind: str
    vocab_size: int
    lower_case: bool | None
    cache: str
    max_line_bytes: int = 64 << 20
    text_field: str = "text"
    group_field: str = ""
    entity_field: str = ""
    code_field: str = ""
    streams: str = ""
    layout: str = ""
    segmenter: str = ""
    concept: str = ""
    control: str = ""
    vocab_alpha: float | None = None
    vocab_weights: dict[str, float] | None = None
    extra_ids: int = 0

    @property
    def marked(self) -> dict[str, str]:
        """The words that get marks of their own: {name of MARKED: value}."""
        return {name: getattr(self, name) for name in MARKED}

    @property
    def fields(self) -> Fields:
        """The fields of records that are read."""
        given = {name: getattr(self, name) for name in Fields._fields}
        return Fields(**given | {"streams": ",".join(read_streams(self.streams))})


class Inputs(NamedTuple):
    """The checked inputs of a config; `tokenizer` is None if one has to be trained."""

    train: dict[str, list[Source]]
    valid: dict[str, list[Source]]
    tokenizer: Tokenizer | None


class Prepared(NamedTuple):
    """The tokenizer and the stores that training needs.

    parts, valid: one store per component. Components have the names given in
    data.train, otherwise "train" (data.valid: "valid"). With data.group_field there is
    one store per value of the field, named by the value, after the component's name and
    a dot if that was given.
    """

    tokenizer: Tokenizer
    parts: dict[str, Store]
    valid: dict[str, Store]


def check_inputs(**given: Any) -> Inputs:
    """Check every path and the vocabulary, without building anything.

    The arguments are the fields of `DataConfig`. Raises UserError, which names the
    config key.
    """
    config = DataConfig(**given)
    train = _sources(config, "train")
    if not train:
        raise UserError("data.train: names no text")
    valid = _sources(config, "valid")
    segmenter = make_segmenter(config.segmenter)
    read_marked(config.marked, segmenter, bool(config.entity_field))
    if config.vocab:
        tokenizer = load_tokenizer(config.vocab, config.lower_case)
    else:
        tokenizer = None
        registry.pick("data.tokenizer", config.tokenizer_kind, train_vocab.MAKERS)
    open_cache(config.cache)
    return Inputs(train, valid, tokenizer)


def _sources(config: DataConfig, role: str) -> dict[str, list[Source]]:
    key = f"data.{role}"
    named = named_sources(getattr(config, role), key)
    fields = config.fields._asdict()
    return {n: parse_sources(v, key, role, **fields) for n, v in named.items()}


class Work:
    """Everything to prepare: an encoder, and all components.

    given: the fields of `DataConfig`. tokenizer: that of a run; then only data.valid is
    prepared. None: one is loaded or trained, and both texts are prepared.
    """

    def __init__(
        self,
        given: dict[str, Any],
        workers: int | None,
        say: Callable[[str], None],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        config = DataConfig(**given)
        inputs = check_inputs(**given) if tokenizer is None else None
        self.cache, self.say = open_cache(config.cache), say
        with self.cache.sharing_hashes():
            if inputs is not None:
                every = [*chain.from_iterable(inputs.train.values())]
                if inputs.tokenizer is None or config.streams:
                    self._keep_parses([s for s in every if s.is_code])
                tokenizer = inputs.tokenizer or trained_tokenizer(
                    inputs.train, self.cache, config, say
                )
                tokenizer = add_extra_ids(tokenizer, config.extra_ids)
                tokenizer = add_vocabs(tokenizer, every, self.cache, config, say)
                sources = {"train": inputs.train, "valid": inputs.valid}
                for role, named in sources.items():
                    for own in named.values():
                        report_repeats((s.name for s in own), f"data.{role}", say)
            else:
                sources = {"valid": _sources(config, "valid")}
            entities = bool(config.entity_field)
            marked = config.marked
            marker = make_marker(tokenizer, config.segmenter, entities, marked)
            streams = make_streams(tokenizer, config.streams, config.layout)
            self.encoder = Encoder(tokenizer, marker, workers, streams)
            self.all = [
                Component(name, own, self.encoder, self.cache, config, role, say)
                for role, named in sources.items()
                for name, own in named.items()
            ]

    def _keep_parses(self, sources: list[Source]) -> None:
        """Have code parsed only once, although it is read several times."""
        if not sources:
            return
        # Named like pieces, so that the rest of a killed process is removed some day.
        folder = self.cache.root / f"{PARTS}code-{uuid.uuid4().hex[:16]}"
        folder.mkdir(parents=True)
        if not (path := keep_parses(folder)):
            folder.rmdir()
            return
        for source in sources:
            source.parses = path

        def forget() -> None:
            forget_parses(path)
            folder.rmdir()

        weakref.finalize(self, forget)

    def pieces(self) -> list[Piece]:
        """Return every piece; shards take them in turn."""
        return [p for c in self.all for p in c.pieces]

    def encode_shard(self, index: int, count: int) -> None:
        """Encode the pieces of shard `index` of `count`: every count-th piece.

        Finished pieces are not encoded again, even if the number of shards has changed.
        """
        pieces = self.pieces()
        mine = pieces[index::count]
        with self.encoder:
            encode_pieces(self.encoder, mine, self.cache)
        numbers = f"{len(mine)} of {len(pieces)}"
        self.say(f"shard {index}/{count}: its {numbers} pieces are encoded")

    def merge_shards(self, count: int) -> Prepared:
        """Create the stores from the pieces that shards have encoded.

        If pieces are missing, raises UserError, which names them and the shards of
        `count` to run.
        """
        has, pieces = self.cache.has, self.pieces()
        lacking = {
            str(piece): number
            for number, piece in enumerate(pieces)
            if not has(piece.store) and not has(piece.target)
        }
        if lacking:
            shards = sorted({n % count for n in lacking.values()})
            run = ", ".join(f"{i}/{count}" for i in shards[:NAMED])
            run += " ..." if len(shards) > NAMED else ""
            names = "; ".join(list(lacking)[:NAMED])
            more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
            raise UserError(
                f"--merge={count}: {len(lacking)} of {len(pieces)} pieces are not "
                f"there, run --shard={run} first ({names}{more})"
            )
        return self.finish(self.cache)

    def finish(self, parts: Cache | None = None) -> Prepared:
        """Encode the pieces that `parts` lacks, merge them, and open the stores.

        parts: None means only this machine's cache.
        """
        parts = parts or Cache(self.cache.root)
        with self.encoder as encoder:
            built = build_components(self.all, encoder, self.cache, parts, self.say)
        named: dict[str, dict[str, Store]] = {"train": {}, "valid": {}}
        for component, stores in zip(self.all, built, strict=True):
            role = component.role
            if any(store.unknown_share >= CAPITALS for store in stores.values()):
                self._report_capitals(component)
            for group, store in stores.items():
                name = full_name(role, component.label, group)
                if name in named[role]:
                    raise UserError(f"data.{role}: two parts have the name {name}")
                if role == "valid" and f"{name}/".startswith("train/"):
                    raise UserError(f"data.valid: `{name}` is a name of training text")
                named[role][name] = store
        return Prepared(self.encoder.tokenizer, named["train"], named["valid"])

    def _report_capitals(self, component: Component) -> None:
        """Report whether capitals make words at the start of a text unknown."""
        texts: list[str] = []
        size = 0
        for text in component.paragraphs():
            texts.append(text[:REPORTED])
            size += len(text)
            if size >= REPORTED:
                break
        fit = measure_tokenizer(self.encoder.tokenizer, texts)
        for line in report_capitals(title(component.role, component.label), fit):
            self.say(line)


def prepare_data(
    *, workers: int | None = None, say: Callable[[str], None] = print, **given: Any
) -> Prepared:
    """Load or train the tokenizer, and build the stores or reuse those in `cache`.

    Args:
      workers: processes (None: all cores); the result does not depend on it.
      say: is called with each line that people should read.
      given: the fields of `DataConfig`.

    Raises UserError if the user's input is wrong; unfinished work is never left behind
    in a form that could be taken for a store.
    """
    return Work(given, workers, say).finish()
