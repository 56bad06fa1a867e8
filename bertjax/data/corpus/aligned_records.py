# SPDX-License-Identifier: Apache-2.0
"""Records with values for their sentences or tokens besides the text.

There are three forms, as JSON lines:

  sentences and a value each   {"sentences": ["Hi.", "Yes?"], "speaker": ["ann", "bob"]}
  text and ranges in it        {"text": "String s;", "type": [[7, 8, "String"]]}
  conversations                {"turns": [{"speaker": "ann", "text": "Hi."}, ...],
                                "knowledge": "..."}

A range is [start, end, value], in characters of the record's text. With `sentences`, a
stream may also have a list of ranges per sentence. With `text`, each line is a
sentence. Values are strings, numbers, or null for no value.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from bertjax import UserError
from bertjax.data.corpus import documents
from bertjax.data.corpus.documents import Document, Fields
from bertjax.data.corpus.line_repair import clean, decode

SPEAKER = "speaker"  # the field with the speaker of a turn
TURNS = "turns"  # the layout of conversations, and their field
KNOWLEDGE = 0  # the speaker number of knowledge; real speakers begin with 1
Where = Callable[[], str]
Range = tuple[int, int, str]
Values = dict[str, Any]


def make_document(
    record: Mapping[str, Any], fields: Fields, where: Where, counter: Counter[str]
) -> Document:
    """Convert a record to a document with values; `where()` begins the messages.

    In a conversation each turn is a sentence. Speakers are numbered 1, 2, ... in the
    order in which they first speak; knowledge comes first, with speaker 0. Turns
    without a speaker alternate between two speakers.

    >>> record = {"turns": [{"speaker": "ann", "text": "Hi."}, {"speaker": "bob",
    ...     "text": "Yes?"}], "knowledge": "Bob is here."}
    >>> document = make_document(record, Fields(layout="turns"), str, Counter())
    >>> document.paragraphs
    ['Bob is here.', 'Hi.', 'Yes?']
    >>> [value["speaker"] for value in document.values]
    [0, 1, 2]

    Raises UserError for a field that is missing or of another kind.
    """
    plain = fields._replace(streams="", layout="")
    whole = documents.make_document(
        {**record, fields.text_field: None}, plain, where, counter
    )
    names = [name for name in fields.streams.split(",") if name]
    if fields.layout == TURNS:
        pairs = _turns(record, fields, names, where)
    elif "sentences" in record:
        pairs = _sentences(record, names, where)
    else:
        pairs = _lines(record, fields.text_field, names, where)
    paragraphs, values = [], []
    for text, own in pairs:
        text, own = _cleaned(text, own, counter)
        if text:
            paragraphs.append(text)
            values.append(own)
    return whole._replace(paragraphs=paragraphs, values=values)


def _turns(
    record: Mapping[str, Any], fields: Fields, names: list[str], where: Where
) -> Iterator[tuple[str, Values]]:
    turns, known = _field(record, TURNS, where), record.get("knowledge")
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        raise UserError(f"{where()}: `turns` is not a list of objects")
    known = [known] if isinstance(known, str) else known or []
    if not isinstance(known, list):
        raise UserError(f"{where()}: `knowledge` is neither a text nor a list of them")
    nothing: Values = dict.fromkeys(names)
    for text in known:
        yield _string(text, "knowledge", where), {**nothing, SPEAKER: KNOWLEDGE}
    speakers: dict[Any, int] = {}
    for number, turn in enumerate(turns):
        name = read_value(turn.get(SPEAKER), SPEAKER, where)
        name = number % 2 if name is None else name
        own: Values = {SPEAKER: speakers.setdefault(name, len(speakers) + 1)}
        for stream in names:
            own[stream] = read_value(_field(turn, stream, where, "turn"), stream, where)
        documents.refuse_missing(
            {fields.text_field: "data.text_field"},
            turn,
            f"{where()}, turn {number + 1}",
        )
        text = turn[fields.text_field]
        yield _string(text, fields.text_field, where), own


def _sentences(
    record: Mapping[str, Any], names: list[str], where: Where
) -> Iterator[tuple[str, Values]]:
    sentences = record["sentences"]
    if not isinstance(sentences, list):
        raise UserError(f"{where()}: `sentences` is not a list")
    streams = {name: _field(record, name, where) for name in names}
    for name, values in streams.items():
        if not isinstance(values, list) or len(values) != len(sentences):
            raise UserError(
                f"{where()}: `{name}` is not a list with a value for each of the "
                f"{len(sentences)} sentences"
            )
    for number, text in enumerate(sentences):
        text = _string(text, "sentences", where)
        own: Values = {}
        for name, values in streams.items():
            value = values[number]
            if isinstance(value, list):
                own[name] = _ranges(value, len(text), name, where)
            else:
                own[name] = read_value(value, name, where)
        yield text, own


def _lines(
    record: Mapping[str, Any], text_field: str, names: list[str], where: Where
) -> Iterator[tuple[str, Values]]:
    """Cut a text into lines, and cut ranges at the ends of the lines."""
    text = _string(_field(record, text_field, where), text_field, where)
    streams = {
        name: sorted(_ranges(_field(record, name, where), len(text), name, where))
        for name in names
    }
    done, start = dict.fromkeys(names, 0), 0
    going_on: dict[str, list[Range]] = {name: [] for name in names}  # past the line
    for line in text.split("\n"):
        end, own = start + len(line), {}
        for name, ranges in streams.items():
            here = going_on[name]
            while done[name] < len(ranges) and ranges[done[name]][0] < end:
                here.append(ranges[done[name]])
                done[name] += 1
            own[name] = tuple(
                (max(first - start, 0), min(last, end) - start, value)
                for first, last, value in here
                if last > start
            )
            going_on[name] = [one for one in here if one[1] > end]
        yield line, own
        start = end + 1


def _cleaned(text: str, own: Values, counter: Counter[str]) -> tuple[str, Values]:
    """Clean a sentence, and move its ranges along with their characters."""
    ranged = {name: value for name, value in own.items() if isinstance(value, tuple)}
    if not any(ranged.values()):
        return " ".join(clean(text, counter).split("\n")).strip(), own
    edges = {0, len(text)}
    for ranges in ranged.values():
        for first, last, _ in ranges:
            edges |= {first, last}
    # Clean the text piece by piece, so that the new place of each edge is known.
    order, parts, moved = sorted(edges), [], {0: 0}
    for first, last in pairwise(order):
        parts.append(clean(text[first:last], counter).replace("\n", " "))
        moved[last] = moved[first] + len(parts[-1])
    whole = "".join(parts)
    left, text = len(whole) - len(whole.lstrip()), whole.strip()
    places = {edge: min(max(at - left, 0), len(text)) for edge, at in moved.items()}
    for name, ranges in ranged.items():
        spans = ((places[a], places[b], value) for a, b, value in ranges)
        own = {**own, name: tuple(span for span in spans if span[0] < span[1])}
    return text, own


def _field(
    record: Mapping[str, Any], name: str, where: Where, noun: str = "record"
) -> Any:
    if name not in record:
        fields = ", ".join(f"`{key}`" for key in record) or "none"
        raise UserError(
            f"{where()}: the {noun} has no field `{name}`; there are: {fields}"
        )
    return record[name]


def _string(value: Any, field: str, where: Where) -> str:
    if isinstance(value, bytes):
        value = decode(value, Counter())
    return documents.check_text(value, field, where)


def read_value(value: Any, name: str, where: Where) -> str | None:
    """Return a value as one line of text, or None for no value. Raises UserError."""
    if value is not None and not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise UserError(f"{where()}: a value of `{name}` is not text but {kind}")
    return None if value is None else " ".join(str(value).split()) or None


def _ranges(value: Any, size: int, name: str, where: Where) -> tuple[Range, ...]:
    found = []
    for one in value if isinstance(value, list) else [value]:
        if not (isinstance(one, list) and len(one) == 3):
            raise UserError(f"{where()}: `{name}` is not a list of [start, end, value]")
        first, last, own = one
        if not (type(first) is type(last) is int and 0 <= first < last <= size):
            raise UserError(
                f"{where()}: `{name}` has the range {first!r} to {last!r}, and there "
                f"are {size} characters"
            )
        if (own := read_value(own, name, where)) is not None:
            found.append((first, last, own))
    return tuple(found)
