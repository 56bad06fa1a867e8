# SPDX-License-Identifier: Apache-2.0
"""Split paragraphs into sentences by rule: English prose, CJK, and all other scripts.

A sentence ends at . ! ? … and any closing marks after it (quotes, brackets, footnote
numbers) before a space, unless the text continues in lower case or with punctuation, or
the full stop belongs to an abbreviation, an initial or a list number. The full stops of
Chinese, Japanese, Burmese, Khmer and others end a sentence without a space; Unicode 17
(UAX #29, Sentence_Terminal) defines which characters are full stops.

Thai and Lao have no full stops: there each line is a sentence. docs/data.md explains
why no library does this.
"""

import re

RULE = "rule-3"  # name and version, recorded in stores; any change needs a new one


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations that never end a sentence.
_TITLES = _words(
    "Mr Mrs Ms Mx Dr Drs Prof Rev Revd Hon Pres Gov Sen Rep Amb Capt Cpt Cmdr Cdr "
    "Gen Lt Maj Sgt Cpl Pvt Adm Brig Msgr Mgr Fr St Ste Mt Ft Mme Mlle Messrs Supt "
    "Det Insp Col bapt Vs Thm Lem Tab e.g i.e eg ie cf viz vs v ca approx resp incl "
    "esp al ibid a.k.a w.r.t"
)
# Abbreviations only before a number or a label: "No. 5", but "No. He left."
_COUNTED = _words(
    "No no Nos nos Nr nr p pp PP Vol vol Vols vols Fig fig Figs figs Eq eq Eqs "
    "eqs Sec sec Secs secs Ch ch Chap chap Art art Op op Ref ref Refs refs Ex ex "
    "Def Prop Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec b d c r fl ver"
)
# Abbreviations that may end a sentence: it ends if a frequent first word follows.
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
_MONTHS = _words(  # these follow the number of a day in German, Danish, Norwegian
    "Januar Jänner Februar März April Mai Juni Juli August September Oktober November "
    "Dezember"
)
_STOPS = ".!?…\u2024‼‽⁇⁈⁉؝؞؟۔।॥։።፧፨꯫"  # these need a space after them
# Sentence_Terminal without those above, the Burmese comma (U+104A) and SignWriting:
# these need no space.
_FULL_STOPS = (
    "。！？｡．︒︕︖﹒﹖﹗။។៕܀܁܂߹࠷࠹࠽࠾᙮᜵᜶᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᭽᭾᰻᰼᱾᱿⳹⳺⳻⸮⸼⹓⹔꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱"
)
_RARE_STOPS = (  # those beyond U+FFFF
    "𐩖𐩗𐽕𐽖𐽗𐽘𐽙𐾆𐾇𐾈𐾉𑁇𑁈𑂾𑂿𑃀𑃁𑅁𑅂𑅃𑇅𑇆𑇍𑇞𑇟𑈸𑈹𑈻𑈼𑊩𑑋𑑌𑗂𑗃𑗉𑗊𑗋𑗌𑗍𑗎𑗏𑗐𑗑𑗒𑗓𑗔𑗕𑗖𑗗𑙁𑙂𑜼𑜽𑜾𑥄𑥆𑩂𑩃𑪛𑪜𑱁𑱂𑻷𑻸𑽃𑽄𖩮𖩯𖫵𖬷𖬸𖭄𖺘𛲟"
)
_CLOSERS = "\"'”’»›)\\]}"


def _end(stops: str, full_stops: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return a pattern for the places where an end may be, and one that matches there.

    Searching with the first takes a fifth of the time of a search with the second.
    """
    return re.compile(f"[{stops}{full_stops}]"), re.compile(
        # The look-behind keeps the time for a run of a million dots linear.
        rf"(?<![{stops}])([{stops}]+)[{_CLOSERS}]*(?:\[\d+\])* "
        rf"|[{full_stops}]+[”’»›」』】）》〉）\"')\]]* ?"
    )


_END = _end(_STOPS, _FULL_STOPS)
# In Greek the semicolon is the question mark; in Armenian the full stop is often typed
# as a colon, and a dot is no full stop. These patterns take three times as long.
_ARMENIAN = rf"[\u0531-\u0588\ufb13-\ufb17][{_CLOSERS}]*"
_RARE = re.compile(
    f"[\u0370-\u03ff\u1f00-\u1fff];|{_ARMENIAN}: |[\U00010000-\U0001ffff]"
)
_END_RARE = _end(_STOPS + ";:", _FULL_STOPS + _RARE_STOPS)
_ARMENIAN_BEFORE = re.compile(_ARMENIAN + "$")
_NEXT = re.compile(r"[\"'“‘”’«‹(\[{¿¡*_–—-]* ?")
_NO_START = frozenset(".!?…,;:)]}%/=" + "，、；：。！？）」』】》")
_QUOTING = frozenset("とっなのはがでに")  # a sentence continues with these after 」
_WORD = re.compile(r"\w*")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")
_OPENERS = "\"'“‘«‹([{*_"


def split_sentences(paragraph: str) -> list[str]:
    """Split a paragraph into its sentences; none is empty.

    Nothing is lost: the sentences joined by single spaces are the paragraph with its
    runs of white space collapsed, except at the boundaries after a CJK full stop, where
    the paragraph may have no space.

    >>> split_sentences('Dr. No paid $3.50. "Why?" he asked. J. R. Roe left. 好。是！')
    ['Dr. No paid $3.50.', '"Why?" he asked.', 'J. R. Roe left.', '好。', '是！']
    """
    text = " ".join(paragraph.split())
    sentences = []
    start = done = 0
    rare = not text.isascii() and _RARE.search(text)
    place, end = _END_RARE if rare else _END
    for at in map(re.Match.start, place.finditer(text)):
        if at >= done and (match := end.match(text, at)):
            done = match.end()
            if done < len(text) and _is_end(text, start, match):
                sentences.append(text[start:done].rstrip(" "))
                start = done
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def _is_end(text: str, start: int, match: re.Match[str]) -> bool:
    """Decide whether the sentence from `start` ends at the candidate."""
    end = match.end()
    if text[end] in _NO_START:
        return False
    stop = match[1]
    if stop is None:  # a CJK full stop
        return not (text[end - 1] in "」』" and text[end] in _QUOTING)
    at = _NEXT.match(text, end).end()
    first = text[at : at + 1]
    if first.islower():
        return False
    if stop == ";":
        return "\u0370" <= text[match.start() - 1] <= "\u1fff"
    dot = match.start()
    if ":" in stop or (stop == "." and not text.isascii()):
        armenian = _ARMENIAN_BEFORE.search(text, max(start, dot - 9), dot)
        if bool(armenian) == (stop == "."):
            return False
    if stop != ".":
        return True
    word_at = max(text.rfind(" ", start, dot) + 1, start)
    word = text[word_at:dot].lstrip(_OPENERS)
    if not word or len(word) > 10:
        return True
    if word in _TITLES:
        return False
    following = _WORD.match(text, at)[0]
    if word in _COUNTED:
        label = text[at : at + 2]
        return not (first.isdigit() or (label.isalpha() and label.isupper()))
    if word.isdecimal():
        if len(word) < 3 and following in _MONTHS:
            return False
        return word_at != start or len(word) > 3  # "1. Introduction"
    initial = len(word) == 1 and (word.isupper() or word == "z")  # German "z. B."
    if initial or word in _EITHER or _DOTTED.fullmatch(word):
        is_initial = len(following) == 1 and text.startswith(".", at + 1)  # "H. A. Roe"
        return following in _STARTERS and not is_initial
    return True
