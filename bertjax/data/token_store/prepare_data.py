# SPDX-License-Identifier: Apache-2.0
"""From config values to a tokenizer and token stores; what train and prepare share.

One process does it (`prepare_data`), or shards that share nothing but data.cache do
(`Work.encode_shard`, any number of them, in any order), and then one process merges
(`Work.merge_shards`). The stores are the same bit for bit. Shards that find no trained
tokenizer each train it, from the same text and so the same one; the first to finish
is kept and used by all.
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

NAMED = 5  # pieces that a message names


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The config values of data.* that decide what is prepared.

    train, valid: the sources' strings, either may have named components; valid may be
    empty. vocab: the tokenizer's path; empty: `tokenizer_kind` with `vocab_size`
    pieces is trained on `train`, its components in shares of size^vocab_alpha or of
    vocab_weights; extra_ids sentinels are put behind either. streams: as data.streams;
    layout: of records (Fields).
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
        """Which words get marks of their own: {name of MARKED: value}."""
        return {name: getattr(self, name) for name in MARKED}

    @property
    def fields(self) -> Fields:
        """Which fields of records are read."""
        given = {name: getattr(self, name) for name in Fields._fields}
        return Fields(**given | {"streams": ",".join(read_streams(self.streams))})


class Inputs(NamedTuple):
    """What the config names, looked at; `tokenizer` is None where one is trained."""

    train: dict[str, list[Source]]
    valid: dict[str, list[Source]]
    tokenizer: Tokenizer | None


class Prepared(NamedTuple):
    """What training needs of its data.

    parts, valid: a store a component: the names given in data.train, else "train"
    (data.valid: "valid"); with data.group_field the values of the field, behind the
    component's name and a dot where that is given.
    """

    tokenizer: Tokenizer
    parts: dict[str, Store]
    valid: dict[str, Store]


def check_inputs(**given: Any) -> Inputs:
    """Look at every path and at the vocabulary, and build nothing.

    Takes the fields of `DataConfig`. Raises UserError, which names the config key.
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
    """Everything that is to be prepared: an encoder, and all components.

    given: the fields of `DataConfig`. tokenizer: of a run, whose data.valid alone is
    prepared; None: one is loaded or trained, and both texts are prepared.
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
        """Have code parsed once, though it is read several times."""
        if not sources:
            return
        # As pieces are, so that what a killed process leaves is removed in time.
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
        """Every piece; a number of shards deals them out in turn."""
        return [p for c in self.all for p in c.pieces]

    def encode_shard(self, index: int, count: int) -> None:
        """Encode the pieces of shard `index` of `count`: those whose number divides so.

        Finished pieces are not done again, whatever the number of shards was.
        """
        pieces = self.pieces()
        mine = pieces[index::count]
        with self.encoder:
            encode_pieces(self.encoder, mine, self.cache)
        numbers = f"{len(mine)} of {len(pieces)}"
        self.say(f"shard {index}/{count}: its {numbers} pieces are encoded")

    def merge_shards(self, count: int) -> Prepared:
        """Make the stores of the pieces that shards have encoded.

        Raises UserError where pieces are lacking: names them and the shards of `count`
        to run.
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
        """Encode what is lacking in `parts` (None: in the cache of this machine alone),
        merge, and open the stores."""
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
        """Say whether the head of a text has unknown words because of capitals."""
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
    """Load or train the tokenizer, build the stores, or reuse what lies in `cache`.

    Args:
      workers: processes (None: all cores); the result does not depend on it.
      say: is called with each line that people should read.
      given: the fields of `DataConfig`.

    Raises UserError where the user's input is at fault; nothing unfinished is left
    behind that could be taken for a store.
    """
    return Work(given, workers, say).finish()
