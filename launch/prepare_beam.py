# SPDX-License-Identifier: Apache-2.0
"""Prepare text with Apache Beam: the pieces of bertjax.prepare, on any runner.

    pip install 'bertjax[beam]'
    python launch/prepare_beam.py --config=bert.py --config.data.train='corpus/*.txt'

It accepts a config and its keys, like bertjax.prepare, and Beam's own flags; without
any of these it runs here (DirectRunner). On Google Cloud Dataflow, text and cache are
in buckets, and the workers need this package:

    pip install 'apache-beam[gcp]' gcsfs
    python launch/prepare_beam.py --config=bert.py \\
      --config.data.train='gs://my-bucket/corpus/*.txt' \\
      --config.data.vocab=vocab.txt --config.data.cache=gs://my-bucket/cache \\
      --runner=DataflowRunner --project=my-project --region=europe-west4 \\
      --temp_location=gs://my-bucket/tmp --setup_file=./setup.py \\
      --max_num_workers=64 --number_of_worker_harness_threads=1

The tokenizer is loaded or trained here and sent along. Pieces and stores that are
already in the cache are kept, so repeat a pipeline that failed; training with the same
data.cache finds the stores.
"""

import sys
from collections.abc import Iterable, Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from bertjax import RunError, UserError, prepare
from bertjax.assembly import command_line, prepared_text, validate
from bertjax.config import arguments, cli
from bertjax.data.token_store import prepare_data
from bertjax.data.token_store.cache import Cache, open_cache
from bertjax.data.token_store.components import Component
from bertjax.data.token_store.encoding import Encoder
from bertjax.data.token_store.pieces import Piece, encode_piece


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Worker(beam.DoFn):
    """Base of both steps: holds the encoder, and opens the cache on this machine."""

    def __init__(self, encoder: Encoder, cache: Cache) -> None:
        self.encoder = encoder
        self.where = cache.url or str(cache.root)

    def setup(self) -> None:
        self.cache = open_cache(self.where)


class EncodePiece(_Worker):
    """Encode a piece into the cache, and yield its name there."""

    def process(self, piece: Piece) -> Iterable[str]:
        encode_piece(self.encoder, piece, self.cache)
        yield piece.target


class MergeComponent(_Worker):
    """Merge a component once every piece is `done`, and yield its store's name."""

    def process(self, component: Component, done: Iterable[str]) -> Iterable[str]:
        component.merge(self.encoder, self.cache, self.cache, say)
        yield component.target


def check_options(words: Sequence[str]) -> None:
    """Refuse flags of bertjax.prepare, which Beam would ignore. Raises UserError."""
    for word in words:
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("-") and name in prepare.FLAGS:
            raise UserError(f"--{name} is of bertjax.prepare: leave it out")


def main(argv: Sequence[str]) -> int:
    own, others = arguments.split_arguments(argv)
    check_options(others)
    config = command_line.parse(own).config
    prepared_text.refuse_task(config)
    validate.check(config)
    prepared_text.check_inputs(config)
    options = PipelineOptions(others)
    work = prepare_data.Work(prepared_text.inputs(config), 1, say)
    lacking = [x for x in work.all if not work.cache.has(x.target)]
    has = work.cache.has
    pieces = [p for x in lacking for p in x.pieces if not has(p.target)]
    say(f"{len(pieces)} pieces to encode, {len(lacking)} stores to make")
    with beam.Pipeline(options=options) as pipeline:
        done = (
            pipeline
            | "pieces" >> beam.Create(pieces)
            | "spread" >> beam.Reshuffle()
            | "encode" >> beam.ParDo(EncodePiece(work.encoder, work.cache))
        )
        (
            pipeline
            | "components" >> beam.Create(lacking)
            | "spread components" >> beam.Reshuffle()
            | "merge"
            >> beam.ParDo(
                MergeComponent(work.encoder, work.cache), beam.pvalue.AsIter(done)
            )
        )
    for component in work.all:
        if not work.cache.has(component.target):
            raise RunError(f"{component.label}: not all pieces are there; repeat this")
        print(f"{component.label} {work.cache.where(component.target)}")
    return 0


if __name__ == "__main__":
    cli.command(main)
