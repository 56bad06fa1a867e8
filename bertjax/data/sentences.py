# SPDX-License-Identifier: Apache-2.0
"""Split paragraphs into sentences by rule: English prose, CJK, and scripts like them.

A sentence ends at . ! ? … and what closes behind it (quotes, brackets, footnote
numbers) before a space, unless the text goes on in lower case or with punctuation, or
the full stop belongs to an abbreviation, an initial or a list number. The full stops
of Chinese and Japanese end one without a space.
"""

import re

RULE = "rule-1"  # name and version; stores record it, any change takes a new one


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations that something always follows.
_TITLES = _words(
    "Mr Mrs Ms Mx Dr Drs Prof Rev Revd Hon Pres Gov Sen Rep Amb Capt Cpt Cmdr Cdr "
    "Gen Lt Maj Sgt Cpl Pvt Adm Brig Msgr Mgr Fr St Ste Mt Ft Mme Mlle Messrs Supt "
    "Det Insp Col Thm Lem Tab e.g i.e eg ie cf viz vs v ca approx resp incl esp al "
    "ibid a.k.a w.r.t"
)
# Abbreviations only before a number or a label: "No. 5", but "No. He left."
_COUNTED = _words(
    "No no Nos nos Nr nr p pp P PP Vol vol Vols vols Fig fig Figs figs Eq eq Eqs "
    "eqs Sec sec Secs secs Ch ch Chap chap Art art Op op Ref ref Refs refs Ex ex "
    "Def Prop Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec b d c r fl ver"
)
# Abbreviations that may end a sentence; then a frequent first word tells.
_EITHER = _words(
    "Inc Ltd Co Corp Cos Bros Jr Sr Esq Ave Blvd Rd Univ Dept Assn Mfg Intl Natl Ed "
    "ed Eds eds Trans trans Ph.D M.D B.A M.A B.Sc M.Sc Ph sq ft lb oz"
)
_STARTERS = _words(
    "The This That These Those There Then Thus They Their He His She Her It Its We "
    "Our You Your I My In On At As By For From To Of With Without After Before "
    "During Since Until Under Over When Where While Which Who What Why How If "
    "Although Though Because However But And Or Nor So Yet Also A An Another Any "
    "All Both Each Either Every Few Many Most Much Several Some Such No Not None "
    "Now Here Once One Two Three Later Today Instead Moreover Furthermore Meanwhile "
    "Nevertheless Therefore Hence According Among Between Despite Following Other "
    "Others"
)
_STOPS = ".!?…؟۔।॥։።"
_CLOSERS = "\"'”’»›)\\]}"
_END = re.compile(
    # The look-behind keeps a run of a million dots linear.
    rf"(?<![{_STOPS}])([{_STOPS}]+)[{_CLOSERS}]*(?:\[\d+\])* "
    r"|[。！？｡]+[”’」』】）》〉）\"')\]]* ?"
)
_NEXT = re.compile(r"[\"'“‘”’«‹(\[{¿¡*_–—-]* ?")
_NO_START = frozenset(".!?…,;:)]}%/=" + "，、；：。！？）」』】》")
_QUOTING = frozenset("とっなのはがでに")  # what goes on after 」 in Japanese
_WORD = re.compile(r"\w*")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")
_OPENERS = "\"'“‘«‹([{*_"


def split_sentences(paragraph: str) -> list[str]:
    """Split a paragraph into its sentences; none is empty.

    Nothing is lost: the sentences joined by single spaces are the paragraph with its
    runs of white space collapsed, but for the boundaries behind a CJK full stop, where
    the paragraph may have no space to join by.

    >>> split_sentences('Dr. No paid $3.50. "Why?" he asked. J. R. Roe left. 好。是！')
    ['Dr. No paid $3.50.', '"Why?" he asked.', 'J. R. Roe left.', '好。', '是！']
    """
    text = " ".join(paragraph.split())
    sentences = []
    start = 0
    for found in _END.finditer(text):
        end = found.end()
        if end < len(text) and _is_end(text, start, found):
            sentences.append(text[start:end].rstrip(" "))
            start = end
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def _is_end(text: str, start: int, found: re.Match[str]) -> bool:
    """Decide whether the sentence from `start` ends at the candidate."""
    end = found.end()
    if text[end] in _NO_START:
        return False
    stop = found[1]
    if stop is None:  # a CJK full stop
        return not (text[end - 1] in "」』" and text[end] in _QUOTING)
    at = _NEXT.match(text, end).end()
    first = text[at : at + 1]
    if first.islower():
        return False
    if stop != ".":
        return True
    dot = found.start()
    word_at = max(text.rfind(" ", start, dot) + 1, start)
    word = text[word_at:dot].lstrip(_OPENERS)
    if not word or len(word) > 10:
        return True
    if word in _TITLES:
        return False
    if word in _COUNTED:
        label = text[at : at + 2]
        return not (first.isdigit() or (label.isalpha() and label.isupper()))
    if word.isdecimal():
        return word_at != start or len(word) > 3  # "1. Introduction"
    initial = len(word) == 1 and word.isupper()
    if initial or word in _EITHER or _DOTTED.fullmatch(word):
        return _WORD.match(text, at)[0] in _STARTERS
    return True
