# SPDX-License-Identifier: Apache-2.0
"""Extract prose from documentation: no code, tables, headings or markup."""

import inspect
import re

_FENCE = re.compile(r"\s*(```|~~~)")
_DROPPED = re.compile(
    r"\s*(>>>|\.\.\.( |$)|\$ |%|[|+]|@|#\s*(include|define)|[=\-~^*_#\"'`.:<>+ ]{3,}$"
    r"|\[!\[|!\[|<|:\w+:|\.\. \[)"
)
_DIRECTIVE = re.compile(r"\s*\.\. ?[\w-]*(::)?")
_KEPT_DIRECTIVE = re.compile(
    r"\s*\.\. (note|warning|versionadded|versionchanged|deprecated|tip|important"
    r"|seealso|caution)::\s*([\d.]+$)?"
)
_ITEM = re.compile(
    r"\s*([-*•+]|\(?\d{1,2}[.)]|\*{0,2}[`\w.]+`?\*{0,2}( ?\([^)]*\))?:)\s+(?=\S)"
)
_MARKUP = (
    (re.compile(r":[\w:+-]+:`[!~]?([^`<]*?)\s*(<[^`]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),
    (re.compile(r"!?\[([^\]\[]*)\]\([^)\s]*\)"), r"\1"),
    (re.compile(r"\[([^\]\[]*)\]\[[^\]]*\]"), r"\1"),
    (re.compile(r"`{1,3}([^`]*)`{1,3}_{0,2}"), r"\1"),
    (re.compile(r"\*\*([^*\s][^*]*)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])"), r"\1"),
    (re.compile(r"\s*[<(]?https?://[^\s>)]*[>)]?"), ""),
    (re.compile(r"\s*\[\d+\]_?"), ""),
    (re.compile(r"\\([*_`\\])"), r"\1"),
    (re.compile(r"::$"), ":"),
)
_PLAIN = re.compile(r"[(\"'“]*[A-Za-z]+(['’-][A-Za-z]+)*[.,;:!?)\"'”]*$")
_COMMON = re.compile(
    r"\b(the|a|an|of|is|are|to|in|this|that|be|for|and|or|with|it|if)\b"
)


def prose(text: str) -> list[str]:
    """Return the paragraphs of prose in a docstring or description.

    Code, doctests, tables, headings and markup are removed; wrapped lines are joined.

    >>> prose('''Return the ``sum`` of all the
    ...     numbers in a :class:`list`.
    ...
    ...     >>> total([1, 2])
    ...     3
    ...
    ...     Args:
    ...       numbers: The numbers that are to be added, in any order.''')
    ... # doctest: +NORMALIZE_WHITESPACE
    ['Return the sum of all the numbers in a list.',
     'The numbers that are to be added, in any order.']
    """
    paragraphs: list[list[str]] = [[]]
    fenced = output = False
    code_indent = -1  # indent of `::` or a directive whose indented block is dropped
    item_indent = -1  # least indent of text that belongs to the current list item
    for line in inspect.cleandoc(text).split("\n"):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if _FENCE.match(line):
            fenced = not fenced
            paragraphs.append([])
            continue
        if not stripped:
            output = False
            paragraphs.append([])
            continue
        if fenced or output:
            continue
        if code_indent >= 0:
            if indent > code_indent:
                continue
            code_indent = -1
        if stripped.startswith(">>>"):
            output = True
        if note := _KEPT_DIRECTIVE.match(line):
            line = line[note.end() :]
            paragraphs.append([])
        elif stripped.startswith(".."):
            if _DIRECTIVE.match(line):
                code_indent = indent
            paragraphs.append([])
            continue
        elif _DROPPED.match(line):
            # A heading is the line above its underline, and is dropped with it.
            if re.fullmatch(r"[=\-~^*]{3,}", stripped) and len(paragraphs[-1]) == 1:
                paragraphs.pop()
            paragraphs.append([])
            continue
        if item := _ITEM.match(line):
            paragraphs.append([])
            line = line[item.end() :]
            item_indent = indent + 1
        elif item_indent >= 0 and indent < item_indent:
            paragraphs.append([])  # the text of the item has ended
            item_indent = -1
        if line.strip():
            paragraphs[-1].append(line.strip())
        if stripped.endswith("::"):
            code_indent = indent
    return [p for p in map(_polish, paragraphs) if p]


def _polish(lines: list[str]) -> str:
    """Join the lines of a paragraph without markup; return "" if it is no prose."""
    text = " ".join(lines)
    for pattern, by in _MARKUP:
        text = pattern.sub(by, text)
    text = " ".join(text.split())
    words = text.split(" ")
    if len(words) < 6 or not _COMMON.search(text.lower()):
        return ""
    if not text[0].isupper() and text[0] not in "\"'(“":
        return ""
    if text[-1] not in ".!?:)\"'" and len(words) < 12:
        return ""
    plain = sum(1 for w in words if _PLAIN.match(w))
    if plain < 0.75 * len(words) or re.search(
        r"[{}\\=<>|]{2}|\w\(\)\.\w|[%$]\w+[%$]", text
    ):
        return ""
    return text if text.isprintable() else ""
