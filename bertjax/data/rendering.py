# SPDX-License-Identifier: Apache-2.0
"""Format rows for people: for a terminal, for a file, as a web page."""

import contextlib
import html
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from bertjax.data.batches import Inspected
from bertjax.data.tokenizers.tokenizer import byte_text

# What can happen to a token: its name, terminal color, and sign without colors.
FATES = {"masked": ("31", "{{{}}}"), "replaced": ("35", "~{}"), "kept": ("32", "={}")}
STAGES = ("gathered", "chosen", "corrupted")


class Shown(NamedTuple):
    """A token of a row: its `surface` before and after masking.

    fate: "" or a name of FATES; special: not part of the text; segment: the number of
    the packed sequence; part: 0 for A, 1 for B of a pair.
    """

    before: tuple[str, bool]
    after: tuple[str, bool]
    fate: str
    special: bool
    segment: int
    part: int


def row_stages(seen: Inspected, tokenizer: Any, row: int) -> dict[str, list[Shown]]:
    """Return the tokens of a row at each stage that is shown.

    Rows with a separate target are shown as gathered, input and target, whose tokens do
    not correspond one to one.
    """
    if seen.origin is not None:
        return dict.fromkeys(STAGES, show_row(seen, tokenizer, row))
    gathered, batch = seen.gathered, seen.batch
    return {
        "gathered": _plain(tokenizer, gathered, "input_ids", "", row),
        "input": _plain(tokenizer, batch, "input_ids", "", row, seen.predicted[row]),
        "target": _plain(tokenizer, batch, "lm_ids", "decoder_", row),
    }


def _plain(
    tokenizer: Any,
    arrays: Mapping[str, np.ndarray],
    name: str,
    side: str,
    row: int,
    chosen: np.ndarray | None = None,
) -> list[Shown]:
    """Return the real tokens of one side of a row, unchanged."""
    real = arrays[f"{side}attention_mask"][row]
    segments = arrays.get(f"{side}segment_ids", arrays[f"{side}attention_mask"])[row]
    special = set(tokenizer.special_ids.tolist()) - {tokenizer.unk_id}
    out = []
    for i in np.flatnonzero(real):
        token = int(arrays[name][row, i])
        piece = surface(tokenizer, token)
        fate = "masked" if chosen is not None and chosen[i] else ""
        out.append(Shown(piece, piece, fate, token in special, int(segments[i]), 0))
    return out


def show_row(seen: Inspected, tokenizer: Any, row: int) -> list[Shown]:
    """Return the real tokens of a row; choices follow one another."""
    batch = seen.batch
    after = batch["input_ids"][row].ravel()
    # A host half from outside the package may omit arrays its model does not read.
    types = batch.get("token_type_ids")
    parts = np.zeros(after.shape, int) if types is None else types[row].ravel()
    before = seen.gathered["input_ids"][row]
    before = (before[seen.origin[row]] if before.ndim == 1 else before).ravel()
    real = batch["attention_mask"][row].ravel() > 0
    chosen = seen.predicted[row].ravel()
    segments = batch.get("segment_ids", batch["attention_mask"])[row].ravel()
    special = set(tokenizer.special_ids.tolist()) - {tokenizer.unk_id}
    out = []
    for i in np.flatnonzero(real):
        old, new = int(before[i]), int(after[i])
        fate = ""
        if chosen[i]:
            is_mask = new == tokenizer.mask_id
            fate = "kept" if new == old else "masked" if is_mask else "replaced"
        was, now = surface(tokenizer, old), surface(tokenizer, new)
        of = int(segments[i]), int(parts[i])
        out.append(Shown(was, now, fate, old in special, *of))
    return out


def surface(tokenizer: Any, token: int) -> tuple[str, bool]:
    """Return the text of a piece and whether it is joined to the previous piece."""
    piece = tokenizer.pieces[token]
    if token in tokenizer.special_ids:
        return piece, False
    if tokenizer.kind == "wordpiece":
        return piece.removeprefix("##"), piece.startswith("##")
    if tokenizer.kind == "byte_bpe":
        try:
            text = _readable(piece)
        except KeyError:
            text = piece
        return text.strip(" ") or text, not text.startswith(" ")
    if tokenizer.kind in ("unigram", "bpe"):
        return piece.removeprefix("▁") or "▁", not piece.startswith("▁")
    return piece, False


def _readable(piece: str) -> str:
    """Return the text of a byte-level piece; bytes of incomplete characters as escapes.

    Raises KeyError like `byte_text`.
    """
    try:
        return byte_text(piece)
    except UnicodeDecodeError as part:
        return part.object.decode("utf-8", "backslashreplace")


def decode(tokenizer: Any, ids: np.ndarray) -> str:
    """Format ids [n] as one line of text, special tokens included."""
    special = set(map(int, tokenizer.special_ids))
    out: list[str] = []
    for is_special, run in groupby(ids.tolist(), special.__contains__):
        tokens = [*run]
        found = [surface(tokenizer, token) for token in tokens]
        if tokenizer.kind == "byte_bpe" and not is_special:
            # Decode the run as a whole: a character may take several pieces.
            with contextlib.suppress(KeyError):
                text = _readable("".join(tokenizer.pieces[t] for t in tokens))
                found = [(text.strip(" "), not text.startswith(" "))]
        for text, joined in found:
            out.append(("" if joined or not out else " ") + text)
    return visible("".join(out))


def to_text(tokens: Sequence[Shown], stage: str, color: bool) -> str:
    """Format one stage of a row as one line.

    With colors, A and B and neighboring sequences differ, special tokens are dim, and
    chosen tokens stand out; without, {x} is masked, ~x is a random or similar piece, =x
    is unchanged.
    """
    out = []
    for t in tokens:
        text, joined = t.after if stage == "corrupted" else t.before
        text = visible(text)
        if t.fate and stage != "gathered":
            code, sign = FATES[t.fate] if stage == "corrupted" else ("1;4", "[{}]")
            text, codes = text if color else sign.format(text), [code]
        else:
            codes = ["2"] if t.special else []
            codes += ["36"] if (t.segment + t.part) % 2 == 0 else []
        if color and codes:
            text = f"\033[{';'.join(codes)}m{text}\033[0m"
        out.append(("" if joined or not out else " ") + text)
    return "".join(out)


def stream_text(ids: np.ndarray, names: Callable[[int], str]) -> str:
    """Format the ids of a row's real tokens [n] by name, with runs of one id joined.

    >>> stream_text(np.array([0, 2, 2, 2, 0]), {0: "-", 2: "ann"}.get)
    '- x1, ann x3, - x1'
    """
    runs = [(number, len([*run])) for number, run in groupby(ids.tolist())]
    return visible(", ".join(f"{names(number)} x{n}" for number, n in runs))


def visible(text: str) -> str:
    """Replace characters that would move a terminal's cursor."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


# ---------------------------------------------------------------- a page
_STYLE = """
:root{color-scheme:light dark;--line:#8884}
body{font:16px/1.6 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;
border-bottom:1px solid var(--line);vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.row{border:1px solid var(--line);border-radius:.4rem;padding:.6rem 1rem;margin:1rem 0}
.stage{display:grid;grid-template-columns:6rem 1fr;gap:.5rem;margin:.3rem 0}
.name{opacity:.6}.special{opacity:.45;font-size:.85em}
.odd{background:#3b82f61f}.even{background:#f59e0b1f}
.masked,.replaced,.kept{border-radius:.25rem;padding:0 .15rem;font-weight:600}
.masked{background:#ef444466}.replaced{background:#a855f766}.kept{background:#22c55e66}
sub{font-weight:400;opacity:.8}.bar{background:#3b82f6;height:.7rem;border-radius:.2rem}
"""


LEGEND = (
    "<p><span class=masked>masked</span> <span class=replaced>replaced</span> "
    "<span class=kept>kept</span>; the token that has to be found stands beside each. "
    "Backgrounds tell A from B and packed sequences apart."
)


def to_html(statistics: Mapping[str, Any], rows: Sequence[Any], legend: str) -> str:
    """Return one self-contained HTML page.

    rows: (heading, [(name, its line as HTML)]) of each row; legend: HTML before them.
    """
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Batches</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        "<h1>Batches</h1><h2>Statistics</h2><table>"
    ]
    for key, value in statistics.items():
        if key != "batch_sha256":
            parts.append(f"<tr><th>{key}<td class=n>{_cell(value)}")
    parts.append(f"</table><h2>Rows</h2>{legend}")
    for heading, lines in rows:
        parts.append(f"<div class=row><b>{html.escape(heading)}</b>")
        for name, line in lines:
            parts.append(
                f"<div class=stage><span class=name>{html.escape(name)}</span>"
                f"<span>{line}</span></div>"
            )
        parts.append("</div>")
    hashes = html.escape(json.dumps(statistics.get("batch_sha256", []), indent=0))
    parts.append(f"<details><summary>Hashes of the batches</summary><pre>{hashes}")
    return "\n".join([*parts, "</pre></details></html>\n"])


def stage_html(tokens: Sequence[Shown], stage: str) -> str:
    """Format one stage of a row as HTML."""
    return "".join(_token(t, stage) for t in tokens)


def _token(t: Shown, stage: str) -> str:
    text, joined = t.after if stage == "corrupted" else t.before
    text = html.escape(visible(text))
    kind = "odd" if (t.segment + t.part) % 2 else "even"
    kind += " special" if t.special else ""
    if t.fate and stage != "gathered":
        kind = t.fate
        if stage == "corrupted" and t.fate != "kept":
            text += f"<sub>{html.escape(visible(t.before[0]))}</sub>"
    return f"{'' if joined else ' '}<span class='{kind}'>{text}</span>"


def _cell(value: Any) -> str:
    if not isinstance(value, Mapping):
        text = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        return html.escape(text)
    if any(isinstance(v, Mapping) for v in value.values()):
        rows = [f"<tr><td>{html.escape(k)}<td>{_cell(v)}" for k, v in value.items()]
        return f"<table>{''.join(rows)}</table>"
    largest = max([v for v in value.values() if v], default=1)
    bars = [
        f"<tr><td>{html.escape(str(k))}<td class=n>{_cell(v)}<td style='width:12rem'>"
        f"<div class=bar style='width:{100 * v / largest:.1f}%'></div>"
        for k, v in value.items()
    ]
    return f"<table>{''.join(bars)}</table>" if bars else "none"
