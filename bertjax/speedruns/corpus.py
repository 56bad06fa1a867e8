# SPDX-License-Identifier: Apache-2.0
"""Build the text of the speedruns: ten million words of public files of known hash."""

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bertjax import UserError
from bertjax.storage import atomic, directories


class Part(NamedTuple):
    """A part of the text: a number of words of a file, and the hash of the result.

    spread: use an equal share of the words of each document, from its beginning;
    otherwise whole documents in the order of the file, with the last one cut.
    """

    name: str
    file: str
    words: int
    spread: bool
    sha256: str


PARTS = (
    Part(
        "wiki",
        "en_wiki/train-00.txt.gz",
        5_000_000,
        False,
        "7cce8088be9b2cb736fe66f87f8af562044de1824476699f62e28ac8f8fe3cea",
    ),
    Part(
        "novels",
        "novels/train.txt.gz",
        2_000_000,
        True,
        "93f0aa1b702a5ad9f62290d91ea4cbb3b46e69580c84470a604d06fe6c76512c",
    ),
    Part(
        "simple",
        "simple_en/train.txt.gz",
        2_000_000,
        True,
        "7c87560110f8b26ae9668e19851dd3472314088b2f8ec13846096c5bf907d246",
    ),
    Part(
        "service",
        "dialogue_sgd/train.jsonl.gz",
        400_000,
        False,
        "bcec11774a1f4040f123a72b1f9666586c6a73973d1012af7234866133f4fa66",
    ),
    Part(
        "meetings",
        "dialogue_icsi/train.jsonl.gz",
        400_000,
        False,
        "8a70fd422d01f815e506cb7d6151cc1bafe412a317e76bba26b1e95eb318e0d3",
    ),
    Part(
        "chat",
        "dialogue_irc/train.jsonl.gz",
        200_000,
        False,
        "928d88ba3f6dc9cb1183b4efb6db68230b2254eeebb348edc8f7f47611bf4834",
    ),
)
VALID = Part(
    "valid",
    "en_wiki/valid.txt.gz",
    200_000,
    True,
    "02847f0440219fe7331762e00372cfda9ff08aee5faa32aec551f4ca62a4255f",
)
PAIRS = "blimp/pairs.jsonl.gz"
PAIRS_SHA256 = "2002b01f679136731d655088d3ce48420caeb0dadc42e84c0f57c958c2310523"


def read_documents(path: Path) -> Iterator[list[str]]:
    """Yield documents as lists of lines: paragraphs, or the turns of a conversation.

    Text files have a blank line between documents; in .jsonl.gz files a line is
    {"turns": [{"text" or "utterance": ...}, ...]}.
    """
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        if path.name.endswith(".jsonl.gz"):
            for number, line in enumerate(file, 1):
                try:
                    turns = json.loads(line)["turns"]
                    turn_texts = (t.get("text") or t["utterance"] for t in turns)
                    lines = [" ".join(text.split()) for text in turn_texts]
                except (ValueError, LookupError, TypeError, AttributeError) as e:
                    raise ValueError(f"line {number} is no conversation") from e
                yield [line for line in lines if line]
            return
        document: list[str] = []
        for line in file:
            if line := line.strip():
                document.append(line)
            elif document:
                yield document
                document = []
        if document:
            yield document


def first_words(document: list[str], words: int) -> list[str]:
    """Return the first lines of a document, cut after `words` words."""
    taken = []
    for line in document:
        if words <= 0:
            break
        own = line.split()
        taken.append(line if len(own) <= words else " ".join(own[:words]))
        words -= len(own)
    return taken


def equal_shares(sizes: Sequence[int], words: int) -> list[int]:
    """Divide `words` equally among documents; shorter documents give all they have.

    >>> equal_shares([10, 2, 10], 15)
    [7, 2, 6]
    """
    left, cap = words, 0
    for number, size in enumerate(sorted(sizes)):
        cap = left // (len(sizes) - number)
        if size > cap:
            break
        left -= size
    shares = [min(size, cap) for size in sizes]
    spare = words - sum(shares)
    for number, size in enumerate(sizes):
        if spare and size > cap:
            shares[number] += 1
            spare -= 1
    return shares


def take(part: Part, folder: Path) -> str:
    """Return the text of a part. Raises UserError for a missing file."""
    try:
        documents = [*read_documents(folder / part.file)]
    except (OSError, EOFError, ValueError, zlib.error) as e:
        raise UserError(
            f"--data={folder}: {part.file} cannot be read: {e}; docs/speedrun.md says "
            "where the files come from"
        ) from e
    sizes = [sum(len(line.split()) for line in document) for document in documents]
    if sum(sizes) < part.words:
        raise UserError(
            f"--data={folder}: {part.file} has {sum(sizes):,} words, and "
            f"{part.name} needs {part.words:,}"
        )
    if part.spread:
        shares = equal_shares(sizes, part.words)
    else:
        before = itertools.accumulate(sizes, initial=0)
        shares = [max(0, part.words - words) for words in before]
    kept = (
        first_words(document, own)
        for document, own in zip(documents, shares, strict=False)
    )
    return "\n\n".join("\n".join(lines) for lines in kept if lines) + "\n"


def place(cache: Path) -> Path:
    """Return the directory of `cache` for the text, whether it exists or not."""
    key = hashlib.sha256("".join(part.sha256 for part in (*PARTS, VALID)).encode())
    return cache / f"speedrun-{key.hexdigest()[:16]}"


def make_corpus(folder: Path, target: Path, say: Callable[[str], None]) -> None:
    """Build the text in the directory `target` of `place`, unless it is there.

    It contains wiki.txt and the other parts, valid.txt and pairs.jsonl.gz. Text that
    was changed since it was built is built again. Raises UserError for files that are
    missing or have unknown hashes.
    """
    if target.is_dir():
        if is_whole(target):
            return
        say(f"{target} is damaged: the text is built again")
        directories.remove(target)

    def write(draft: Path) -> None:
        for part in (*PARTS, VALID):
            text = take(part, folder).encode()
            check_hash(f"{part.name} of {part.file}", text, part.sha256)
            atomic.write_file(draft / f"{part.name}.txt", text)
            say(f"{part.name}: {part.words:,} words")
        try:
            pairs = (folder / PAIRS).read_bytes()
        except OSError as e:
            raise UserError(f"--data={folder}: {PAIRS} cannot be read: {e}") from e
        check_hash(PAIRS, pairs, PAIRS_SHA256)
        atomic.write_file(draft / "pairs.jsonl.gz", pairs)

    directories.make_whole(target, write)


def is_whole(target: Path) -> bool:
    """Return whether the files of a text that was built have their hashes."""
    hashes = {f"{part.name}.txt": part.sha256 for part in (*PARTS, VALID)}
    hashes |= {"pairs.jsonl.gz": PAIRS_SHA256}
    try:
        return all(
            hashlib.sha256((target / name).read_bytes()).hexdigest() == known
            for name, known in hashes.items()
        )
    except OSError:
        return False


def check_hash(what: str, content: bytes, sha256: str) -> None:
    """Raise UserError if the content has another hash."""
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise UserError(
            f"--data: {what} has the SHA-256 {found}, not {sha256}: these are other "
            "files than those of the speedrun (docs/speedrun.md)"
        )
