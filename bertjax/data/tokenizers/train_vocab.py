# SPDX-License-Identifier: Apache-2.0
"""Train a vocabulary on text; the same text gives the same one every time."""

import io
import json
import re
from collections import Counter
from collections.abc import Iterable

from bertjax import UserError, registry
from bertjax.data.tokenizers import backends, tokenizer_files
from bertjax.data.tokenizers.plain_ids import SPECIAL

SAMPLE_CHARACTERS = 10_000_000  # twice as many save only 0.2% of the tokens
TEXT_CHARACTERS = 4_000  # sentencepiece skips longer lines, so they are cut
ALPHABET = 1_000  # letters in a WordPiece vocabulary, as recommended for BERT
# BERT's tokenizer treats each of these as a word, so that none has a form with ##; at
# most half of the vocabulary is filled with them.
_HAN = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ceaf"
    "\U0002f800-\U0002fa1f]"
)
LEAST = 16  # pieces; how many more a text needs is known only after it is read
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


class Sample:
    """Every k-th text added, where k is the smallest power of two that fits.

    Its memory is bounded by `characters`, and it needs no random numbers.
    """

    def __init__(self, characters: float = SAMPLE_CHARACTERS) -> None:
        self.characters = characters
        self.texts: list[str] = []
        self.stride = 1
        self.number = self.size = 0

    def add(self, text: str) -> bool:
        """Add a text to the sample, or skip it; return whether it was added."""
        kept = self.number % self.stride == 0
        self.number += 1
        if kept:
            self.texts.append(text)
            self.size += len(text)
            while self.size > self.characters and len(self.texts) > 1:
                self.thin()
        return kept

    def thin(self) -> None:
        """Drop every other text, and add half as many of the following ones."""
        self.texts = self.texts[::2]
        self.stride *= 2
        self.size = sum(map(len, self.texts))


def sample(texts: Iterable[str], characters: int = SAMPLE_CHARACTERS) -> list[str]:
    """Return a sample of texts, with long ones cut.

    >>> sample(["aa", "bb", "cc", "dd", "ee"], characters=6)
    ['aa', 'cc', 'ee']
    """
    chosen = Sample(characters)
    for text in texts:
        for start in range(0, len(text), TEXT_CHARACTERS):
            chosen.add(text[start : start + TEXT_CHARACTERS])
    return chosen.texts


def train(
    texts: Iterable[str], kind: str, vocab_size: int, lower_case: bool
) -> dict[str, bytes]:
    """Train a vocabulary; return the tokenizer's files (see `Tokenizer.files`).

    Raises UserError for an unknown kind, no text, or too small a `vocab_size`.
    """
    maker = registry.pick("data.tokenizer", kind, MAKERS)
    chosen = sample(t for t in texts if t.strip())
    if not chosen:
        raise UserError("data.train: there is no text to train a tokenizer on")
    return maker(chosen, kind, vocab_size, lower_case)


def _too_small(vocab_size: int, least: int) -> UserError:
    return UserError(
        f"data.vocab_size={vocab_size} is too small for the characters of "
        f"data.train; the least is {least}"
    )


def _sentencepiece(
    texts: list[str], kind: str, vocab_size: int, lower_case: bool
) -> dict[str, bytes]:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            normalization_rule_name="nmt_nfkc_cf" if lower_case else "nmt_nfkc",
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece="[PAD]",
            unk_piece="[UNK]",
            bos_piece="[CLS]",
            eos_piece="[SEP]",
            control_symbols=["[MASK]"],
            hard_vocab_limit=False,  # a small corpus yields fewer pieces
            max_sentence_length=8 * TEXT_CHARACTERS,  # bytes
            # A tenth of the library's default is as good for small vocabularies and
            # takes half the time.
            seed_sentencepiece_size=max(100_000, 12 * vocab_size),
            num_threads=4,  # fixed, since sums of floats depend on the division of work
            minloglevel=2,
        )
    except RuntimeError as e:
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(e))
        if needed:
            raise _too_small(vocab_size, int(needed[1])) from None
        reason = str(e).rpartition("] ")[2] or str(e)
        raise UserError(f"data.vocab_size={vocab_size}: {reason}") from None
    return {"spiece.model": model.getvalue()}


def _wordpiece(
    texts: list[str], kind: str, vocab_size: int, lower_case: bool
) -> dict[str, bytes]:
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = backends.wordpiece_engine(["[UNK]"], "[UNK]", lower_case).tokenizer
    seen: Counter[str] = Counter()
    for text in texts:
        seen.update(tokenizer.normalizer.normalize_str(text))
    ranked = sorted(seen, key=lambda c: (-seen[c], c))
    letters = [c for c in ranked if not c.isspace() and not _HAN.match(c)][:ALPHABET]
    han = [c for c in ranked if _HAN.match(c)][: vocab_size // 2]
    alphabet = sorted(letters + han)
    # The trainer numbers "##x" in the order of a hash map, which differs between
    # processes, and breaks ties by number. Passing them as special fixes the order.
    inner = ["##" + c for c in sorted(letters)]
    least = len(SPECIAL) + len(alphabet) + len(inner)
    if vocab_size < least:
        raise _too_small(vocab_size, least)
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL, *inner],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    return {"vocab.txt": ("\n".join(pieces) + "\n").encode()}


def _byte_bpe(
    texts: list[str], kind: str, vocab_size: int, lower_case: bool
) -> dict[str, bytes]:
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    least = len(ROBERTA_SPECIAL) + 256
    if vocab_size < least:
        raise _too_small(vocab_size, least)
    tokenizer = backends.byte_bpe_engine(["<unk>"], [], "<unk>", lower_case).tokenizer
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=ROBERTA_SPECIAL,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokenizer_files.byte_bpe_files(pieces, model["merges"])


MAKERS = {
    "unigram": _sentencepiece,
    "bpe": _sentencepiece,
    "wordpiece": _wordpiece,
    "byte_bpe": _byte_bpe,
}
