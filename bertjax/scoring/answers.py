# SPDX-License-Identifier: Apache-2.0
"""Score the answers of a dialogue model by how diverse they are.

The measures are distinct-1 and distinct-2 (Li et al. 2016, arXiv 1510.03055, section
5.2) of the answers to held-out conversations, beside those of the human answers. Both
fall as the number of answers grows, so compare equal numbers.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from bertjax import UserError, counted
from bertjax.assembly import models
from bertjax.config import cli
from bertjax.data.corpus.aligned_records import KNOWLEDGE, SPEAKER, TURNS
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.corpus.sources import named_sources, parse_sources
from bertjax.generation import dialogues, open_writer
from bertjax.generation.options import Options
from bertjax.scoring.scorer import Scores, scores_of_sets, text_to_score
from bertjax.tasks.text_metrics import SHARES, words_of

FLAGS = ("examples", "rank", "top_k")
Prompt = dict[str, Any]  # of bertjax.generate


def score(args: Any, path: str, flag: str) -> Scores:
    """Score a model's answers in the last turn of each conversation.

    It answers --examples=N conversations of --text or data.valid, spread
    evenly; 0 means all. An answer is decoded greedily; with --rank=N it is the
    likeliest of N drawn ones.
    """
    opened = models.open_model(path, flag)
    config = opened.config
    if not dialogues.answers(opened):
        raise UserError(
            f"--what=answers: {path} answers no conversations (objective="
            f"{config.objective})"
        )
    text, key = text_to_score(args, config)
    config.dtype = args.dtype
    most = config.eval.examples if args.examples is None else args.examples
    wanted = Options(rank=args.rank, top_k=args.top_k, batch_size=args.batch_size or 32)
    if args.rank and args.top_k is None:
        wanted = wanted._replace(temperature=1.0)  # otherwise nothing would be drawn
    how = open_writer.pick_how(opened, wanted, f"{flag}={path}")
    asked = {
        name: choose(opened, [*conversations(opened, part, key)], most, f"{key}={part}")
        for name, part in named_sources(text, key).items()
    }
    params = opened.read_params(open_writer.head_of(opened), args.weights)
    writer = open_writer.open_writer(opened, how, params)
    sets = {}
    for name, pairs in asked.items():
        prompts, right = zip(*pairs, strict=True)
        written = open_writer.write(writer, [*prompts], wanted, cli.say)
        texts = [outputs[0].text for outputs in written]
        sets[name] = diversity(texts, right)
    return scores_of_sets(sets, args, opened.meta)


def diversity(texts: list[str], right: tuple[str, ...]) -> dict[str, float]:
    """Return distinct-n and mean lengths in words of `texts` and the human answers."""
    found: dict[str, float] = {"answers": len(texts)}
    found |= {name: share(texts) for name, share in SHARES.items()}
    found["words"] = float(np.mean([len(words_of(text)) for text in texts]))
    found |= {f"people_{name}": share(right) for name, share in SHARES.items()}
    found["people_words"] = float(np.mean([len(words_of(text)) for text in right]))
    return found


def conversations(opened: Any, text: str, key: str) -> Iterator[tuple[Prompt, str]]:
    """Yield (all turns but the last, the last turn) of each conversation.

    Conversations of one turn are left out. Raises UserError for unreadable files.
    """
    data = opened.config.data
    fields = {"text_field": data.text_field, "layout": TURNS}
    for source in parse_sources(text, key, "valid", **fields):
        for document in source.documents(Counts(), data.max_line_bytes):
            speakers = [value[SPEAKER] for value in document.values or ()]
            lines = [*zip(speakers, document.paragraphs, strict=True)]
            turns = [
                {SPEAKER: str(who), "text": line}
                for who, line in lines
                if who != KNOWLEDGE
            ]
            if len(turns) < 2:
                continue
            last = turns.pop()
            prompt: Prompt = {TURNS: turns, SPEAKER: last[SPEAKER]}
            if known := [line for who, line in lines if who == KNOWLEDGE]:
                prompt["knowledge"] = known
            yield prompt, last["text"]


def fits(rows: dialogues.Conversations, prompt: Mapping[str, Any]) -> bool:
    """Return whether the last turn of a conversation has room in a row."""
    try:
        rows.lay_out_one(prompt)
    except UserError:
        return False
    return True


def choose(
    opened: Any, pairs: list[tuple[Prompt, str]], most: int, source: str
) -> list[tuple[Prompt, str]]:
    """Return up to `most` of the pairs, spread evenly; 0 means all.

    Pairs whose last turns do not fit into a row are dropped. If that drops all, the
    first pairs that fit are returned. Raises UserError if there are none.
    """
    n = min(most or len(pairs), len(pairs))
    rows = dialogues.Conversations(opened)
    chosen = [pairs[i * len(pairs) // n] for i in range(n)]
    found = [pair for pair in chosen if fits(rows, pair[0])]
    found = found or [*islice((pair for pair in pairs if fits(rows, pair[0])), n)]
    if not found:
        raise UserError(
            f"{source} has no conversation of two turns or more that fits into a row"
        )
    cli.say(
        f"{source}: {counted(len(found), 'conversation')} with an answer, of "
        f"{len(pairs):,}"
    )
    return found
