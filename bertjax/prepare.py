# SPDX-License-Identifier: Apache-2.0
"""Turn text into token stores: python -m bertjax.prepare --config=...

Training does the same if the stores are missing. This command does it beforehand, also
on several machines that share data.cache (a disk or a bucket): each encodes one shard,

    python -m bertjax.prepare --config=... --shard=0/8      # to 7/8, in any order

and when all are done, one of them runs --merge=8. If a shard was killed, repeat its
command; it does the rest. The stores do not depend on the number of machines.

--similar=FILE writes the table of similar words for data.masking=macbert
(data.similar): for each word of data.train its nearest words by word2vec (pip install
'bertjax[similar]'), or those of a thesaurus, --synonyms=FILE.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from bertjax import UserError
from bertjax.assembly import command_line, prepared_text, validate
from bertjax.config import cli
from bertjax.config.flag_help import Flag
from bertjax.data.corpus.documents import Source
from bertjax.data.corpus.duplicates import report_corpus
from bertjax.data.corpus.files import keeping_hashes
from bertjax.data.masking import find_similar
from bertjax.data.masking.similar_words import NONE
from bertjax.data.token_store import prepare_data
from bertjax.data.token_store.cache import open_cache
from bertjax.data.token_store.store import Store
from bertjax.data.token_store.trained_tokenizer import read_documents
from bertjax.data.tokenizers.fertility import report_tokenizer
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.data.tokenizers.train_vocab import Sample
from bertjax.storage import atomic

FLAGS = {
    "shard": Flag("I/N: encode shard I of N, counted from 0"),
    "merge": Flag("N: merge N finished shards"),
    "report": Flag(
        "also report each component's size, its duplicates, and how well the "
        "vocabulary fits",
        False,
    ),
    "similar": Flag("FILE: write a table of similar words, for data.similar"),
    "synonyms": Flag("FILE: with --similar, take the words from this thesaurus"),
}


def read_shard(value: str) -> tuple[int, int]:
    """Parse "I/N".

    >>> read_shard("2/8")
    (2, 8)
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not index < count:
        raise UserError(f"--shard={value}: write I/N with I from 0 to N - 1, as in 0/8")
    return index, count


def report_stores(stores: Mapping[str, Store]) -> list[str]:
    """Return a table with one line per component."""
    keys = ("documents", "sentences", "tokens", "unknowns")
    rows = {name: [s.meta[key] for key in keys] for name, s in stores.items()}
    rows["total"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    width = max(map(len, rows))
    heads = (*keys[:3], "share", "unknown")
    lines = [" ".join([" " * width, *(f"{h:>13}" for h in heads)])]
    for name, (documents, sentences, tokens, unknowns) in rows.items():
        share, unknown = tokens / rows["total"][2], unknowns / tokens
        lines.append(
            f"{name:{width}} {documents:13,} {sentences:13,} {tokens:13,} "
            f"{share:13.3%} {unknown:13.3%}"
        )
    return lines


def report_text(
    tokenizer: Tokenizer, role: str, sources: Mapping[str, list[Source]], data: Any
) -> list[str]:
    """Report repeated text, and how the vocabulary fits the components.

    Reads the whole text again; `data` holds the config values data.*.
    """
    cache = os.fspath(open_cache(data.cache).root)
    with keeping_hashes(cache):
        for source in chain.from_iterable(sources.values()):
            source.fingerprint(cache)  # writes the files of made-up sources
    samples: dict[str, Sample] = {}
    documents = read_documents(role, sources, data.max_line_bytes, samples)
    lines = report_corpus((source, document) for _, source, document in documents)
    texts = {name: sample.texts for name, sample in samples.items()}
    lines.append("how the vocabulary fits a sample of the text:")
    return lines + [f"  {line}" for line in report_tokenizer(tokenizer, texts)]


def check_table(args: Any) -> Path | None:
    """Return the file of --similar, or None; refuse flags that do not go with it, and
    a thesaurus that cannot be read."""
    if args.similar is None:
        if args.synonyms is not None:
            raise UserError(f"--synonyms={args.synonyms} needs --similar=FILE to write")
        return None
    if args.shard is not None:
        raise UserError("--similar needs the whole text: give it with --merge")
    if args.synonyms is None:
        find_similar.import_word2vec()
    source = "--synonyms", args.synonyms
    out = atomic.check_out(args.similar, "--similar", source=source)
    if args.synonyms is not None:
        find_similar.read_synonyms(args.synonyms, f"--synonyms={args.synonyms}")
    return out


def write_similar(path: Path, synonyms: str | None, prepared: Any) -> None:
    """Write a table of similar words, from a thesaurus or from the training text."""
    tokenizer, stores = prepared.tokenizer, [*prepared.parts.values()]
    if synonyms is not None:
        listed = find_similar.read_synonyms(synonyms, f"--synonyms={synonyms}")
        words = find_similar.fitting_words(listed, tokenizer)
        origin = f"of {Path(synonyms).name}"
    else:
        words = find_similar.similar_by_text(stores, tokenizer)
        origin = "by word2vec"
    text = find_similar.format_words(words, origin)
    atomic.write_file(path, text, f"--similar={path}")
    print(f"similar {path} {len(words)} words")


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__)
    config = args.config
    table = check_table(args)
    if table:
        config.data.similar = NONE if config.data.masking == "macbert" else ""
    prepared_text.refuse_task(config)
    validate.check(config)
    if args.shard is not None and args.merge is not None:
        raise UserError("--shard and --merge: give one of them")
    if args.shard is not None and args.report:
        raise UserError("--report needs the whole text: give it with --merge")
    shard = None if args.shard is None else read_shard(args.shard)
    merge = args.merge
    if merge is not None and not re.fullmatch(r"0*[1-9]\d{0,8}", merge):
        raise UserError(f"--merge={merge}: write the number of shards, as in 8")
    prepared_text.check_inputs(config)
    given = prepared_text.inputs(config)

    if shard is not None:
        prepare_data.Work(given, None, cli.say).encode_shard(*shard)
        return 0
    if merge is not None:
        prepared = prepare_data.Work(given, None, cli.say).merge_shards(int(merge))
    else:
        prepared = prepare_data.prepare_data(say=cli.say, **given)
    prepared = prepared_text.settle(config, prepared)
    for role, stores in (("train", prepared.parts), ("valid", prepared.valid)):
        for name, store in stores.items():
            title = role if name == role else f"{role}/{name}"
            print(f"{title} {store.path} {store.content_hash}")
    if table:
        write_similar(table, args.synonyms, prepared)
    if args.report:
        inputs = prepare_data.check_inputs(**given)
        for role, stores, sources in (
            ("train", prepared.parts, inputs.train),
            ("valid", prepared.valid, inputs.valid),
        ):
            if stores:
                print(f"data.{role}:", *report_stores(stores), sep="\n")
                lines = report_text(prepared.tokenizer, role, sources, config.data)
                print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    cli.command(main)
