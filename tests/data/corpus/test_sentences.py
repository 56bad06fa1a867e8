# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax.data.corpus.sentences import _FULL_STOPS, RULE, split_sentences

# One paragraph per case; | marks the places where it has to be split.
CASES = """
Mr. Smith met Dr. Jones at St. Mary's.|They left.
See e.g. Knuth, i.e. the book, vs. others, cf. Section 3.|It is long.
He moved to the U.S. in 1990.|The U.S. Government paid.
It was sold in the U.S.|The price was low.
J. R. R. Tolkien wrote it.|C. S. Lewis did not.
It costs $3.50, or 1,000.25 in all.|Version 2.0.1 is out.
See Fig. 3 and No. 5, p. 12, vol. IV, Eq. (2).|No.|He said so on Jan. 3.|No.|I did not.
Apples, pears, etc. are fruit.|Nuts etc.|Python is not.
Well... maybe.|Well...|He did not know.|Hm… so.|Ah…|Then he did.
He said "Stop!"|Then she ran.|"Why?" he asked.|(She knew.)|“Go.”|‘No.’|Done?!|Yes.
He met George W. Bush of Acme Inc. in May.|Acme Inc.|It was there.
It opened at 5 p.m. on Monday.|It closed at 6 p.m.|Then all slept.
1. Introduction is first.|2. Methods come next.|It was 1990.|25 came.
The end.[1]|The next.[2][3]|Last.
"Go!" — he cried.|Wait . . . what?|Is it so?|¿Qué?|¡Sí!
Run a.py or use foo.bar now.|Go to example.com.|Fine.
By H. P. Lovecraft, H. A. Roe and A. A. Milne.|I. M. Pei built it.|P. D. James wrote.
He earned a B.A. in English.|She left.
Mr. and Mrs. J. F. Kennedy were in Washington, D.C.|No.
Am 3. Oktober war es z. B. kalt.|Er ging im Jahr 1990.|Oktober war schön.
А. С. Пушкин написал это.|Он родился в 1990 г. в Москве.|Потом уехал.
Πού πας;|Πάω σπίτι.|Καλά; ναι;|«Ναι;»|Όχι.
ذهبت إلى البيت.|هل أنت هنا؟|نعم.
یہ کتاب ہے۔|کیا آپ آئیں گے؟|ہاں۔
Ես գնում եմ տուն։|Ինչպե՞ս ես։|Լավ։
Ես գնում եմ տուն:|Ինչպե՞ս ես:|Նա ասաց. «Լավ»:|Եւ գնաց:|(Այո):|Ոչ. Այո:|Ժամը 5: Լավ:
ሰላም ነው።|እንዴት ነህ፧|ደህና ነኝ።
यह एक किताब है।|वह एक कलम है।|क्या आप आएंगे?|हाँ॥
ကျွန်တော် စာဖတ်သည်။|သူ အိပ်သည်၊ ပြီးတော့။
ខ្ញុំចូលចិត្តអានសៀវភៅ។|គាត់ចូលចិត្តដើរលេង៕
""".strip().splitlines()
WHOLE = [
    ("他來了。她走了！“真的嗎？”他", ["他來了。", "她走了！", "“真的嗎？”", "他"]),
    ("他來了。她走了！ “真的嗎？”他問", ["他來了。", "她走了！", "“真的嗎？”", "他問"]),
    ("「そうだ。」と言った。終わり。", ["「そうだ。」と言った。", "終わり。"]),
    ("သူ အိပ်သည်။သူ စားသည်။", ["သူ အိပ်သည်။", "သူ စားသည်။"]),
    ("«ខ្ញុំ។»គាត់៕", ["«ខ្ញុំ។»", "គាត់៕"]),
    (
        "我们去了北京……然后回家。价格是3.5元。",
        ["我们去了北京……然后回家。", "价格是3.5元。"],
    ),
    ("ฉันชอบกินข้าว เธอชอบกินปลา", ["ฉันชอบกินข้าว เธอชอบกินปลา"]),
    ("𑄝𑄬𑄇𑄴𑅁𑄝𑄬𑄇𑄴; 𑄝𑅁", ["𑄝𑄬𑄇𑄴𑅁", "𑄝𑄬𑄇𑄴; 𑄝𑅁"]),
    ("यह है। वह था। ", ["यह है।", "वह था।"]),
    ("", []),
    (" \t ", []),
    ("no stop at all", ["no stop at all"]),
    ("...", ["..."]),
]


@pytest.mark.parametrize("case", CASES)
def test_english(case):
    expected = case.split("|")
    assert split_sentences(" ".join(expected)) == expected


@pytest.mark.parametrize("text,expected", WHOLE)
def test_other_scripts_and_edges(text, expected):
    assert split_sentences(text) == expected


PIECES = [
    *"ab AZ.!?…\"'”)([1 \t\n。！」と，",
    "Mr.",
    "U.S.",
    "The ",
    "etc. ",
    "1. ",
    "α;",
    "။",
    "»",
]


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
def test_nothing_is_lost(text):
    sentences = split_sentences(text)
    whole = " ".join(text.split())
    for sentence in sentences:
        assert sentence and sentence == sentence.strip()
        assert whole.startswith(sentence)
        rest = whole[len(sentence) :]
        # Sentences may only touch after a CJK full stop.
        touching = rest and not rest.startswith(" ")
        assert not touching or set(sentence) & set(_FULL_STOPS)
        whole = rest.removeprefix(" ")
    assert whole == ""


def test_long_runs_take_linear_time():
    for run in ("α;", "။", ".", '."', ". ", "(", "A.", "!?", "。", "a. "):
        split_sentences(run * 200_000)


def test_the_rule_has_a_version():
    assert RULE == "rule-3"
