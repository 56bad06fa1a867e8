# SPDX-License-Identifier: Apache-2.0
"""Score a model: python -m bertjax.evaluate --workdir=DIR

--what=mlm    held-out loss, to compare models: rows and masks are the same for all
              models with one tokenizer, however they were trained. Full sentences, one
              sequence per row, --length=128 tokens; 15% masked by BERT's rule, or
              --rates=0.15,0.3; --mask_unit=word masks whole words. Also prints the
              unigram cross-entropy, the cost of guessing tokens by their frequency in
              the training text. Scores all rows of data.valid or --text, or
              --examples=N. --mask_weights=FILE writes weights for data.mask_weights of
              another run, which then masks most what was guessed wrong here; give that
              run's training text as --text
--what=lm     log-likelihood of the documents of data.valid or --text by a causal model,
              in nats per token and bits per character and byte. Longer documents are
              scored in windows of --length tokens, which start --stride tokens apart
              (half of it); --characters=N scores only the beginning of each
--what=elbo   a bound of the same by a model that fills masks, with --draws=16 masks per
              window; --estimator=any_order or continuous
--what=pll    pseudo-log-likelihood of each line of --text; --variant=within_word
--what=pairs  minimal pairs, JSON lines in BLiMP's format
              For pll and pairs --scorer=pll, lm, mntp or elbo selects how to score
              sentences; the default fits the model's objective
--what=retrieval   how well vectors (bertjax.embed) find the passages that answer
              queries: --text=FOLDER in BEIR's layout, or a table of pairs with the
              columns query and positive, or --columns=QUERY,POSITIVE;
              --precision=int8,binary also scores smaller vectors. --rerank=MODEL
              orders the first --depth=20 by a cross-encoder. --mine=FILE.jsonl writes
              hard negatives for a run with data.train=FILE.jsonl: per pair
              --negatives=8 whose score is at most 1 - --margin=0.05 times that of the
              right passage, and with --rerank the cross-encoder's scores
--what=sts    how well the cosine of two texts' vectors agrees with human scores:
              --text=TABLE with the columns sentence1, sentence2 and score, or
              --columns=TEXT,TEXT_PAIR and --label=SCORE (column numbers for a table
              without a header)
--what=answers  distinct-1 and distinct-2 of a dialogue model's answers in the last turn
              of each conversation of data.valid or --text, beside the human ones. They
              are decoded greedily, or with --rank=N are the likeliest of N answers that
              are drawn among --top_k tokens

Without --what a model is scored on data.valid or --text as its training scores it. A
pretrained model gets the losses of its objective, with rows and masks as in its config,
for --examples=N rows; the default is eval.examples for data.valid, and all of --text. A
finetuned model gets the metrics of its task; --text is a table like its training data,
or one with --columns=TEXT[,TEXT_PAIR] and --label=LABEL (multiple choice:
--columns=TEXT[+QUESTION][,CHOICE...]).
"""

import json
from collections.abc import Sequence

from bertjax import UserError, registry
from bertjax.assembly import command_line, models
from bertjax.checkpoints.workdir import finite
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.parallel.host_memory import keep_freed_memory
from bertjax.scoring import own
from bertjax.scoring.scorer import load_scorer, scorer_names

FLAGS = {
    **shared("model", "workdir", "step"),
    "text": Flag("files or globs to score instead of data.valid, separated by commas"),
    "what": Flag("mlm, lm, elbo, pll, pairs, retrieval, sts or answers; see above"),
    "scorer": Flag("pll, pairs: how sentences are scored: pll, lm, mntp or elbo"),
    "rates": Flag("mlm: mask rates, separated by commas"),
    "mask_unit": Flag("mlm: mask single tokens (token) or whole words (word)"),
    "mask_weights": Flag("mlm: write this file, for data.mask_weights of a run"),
    "variant": Flag("scorers pll and mntp: original or within_word"),
    "begin": Flag("lm: token before each text: cls or none"),
    "stride": Flag("lm, elbo: tokens between the starts of windows", kind=int, least=1),
    "characters": Flag("lm, elbo: maximum characters per document", kind=int, least=1),
    "draws": Flag("elbo: draws of masks per text", kind=int, least=1),
    "estimator": Flag("elbo: any_order or continuous"),
    "precision": Flag("retrieval: also score vectors as int8, binary or float32"),
    "rerank": Flag("retrieval: a cross-encoder that reranks the results"),
    "depth": Flag("retrieval: passages per query to rerank", kind=int, least=2),
    "mine": Flag("retrieval: write this .jsonl of pairs with hard negatives"),
    "negatives": Flag("retrieval: maximum negatives per mined pair", kind=int, least=1),
    "margin": Flag(
        "retrieval: how much lower a negative must score; see above",
        kind=float,
        least=0,
        most=1,
    ),
    "rank": Flag(
        "answers: number of samples, of which the likeliest is scored",
        kind=int,
        least=1,
    ),
    "top_k": Flag("answers: sample from this many likeliest tokens", kind=int, least=1),
    "columns": Flag("names of the text columns"),
    "label": Flag("name of the label column"),
    "length": Flag("mlm, lm, elbo: tokens per sequence", kind=int, least=3),
    "examples": Flag("maximum number of rows or documents; 0: all", kind=int, least=0),
    "batch_size": Flag("rows per batch", kind=int, least=1),
    **shared("dtype", "weights", "json"),
}


# Flags that all scorers read.
SHARED = {"model", "workdir", "step", "text", "what"}
SHARED |= {"batch_size", "dtype", "weights", "json"}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    keep_freed_memory()
    scorer = own if args.what is None else load_scorer(args.what)
    for name in FLAGS:
        if name in SHARED or getattr(args, name) is None or name in scorer.FLAGS:
            continue
        readers = [x for x in scorer_names() if name in load_scorer(x).FLAGS]
        ways = [f"with --what={x}" for x in readers]
        ways += ["without --what"] * (name in own.FLAGS)
        given = f"with --what={args.what}" if args.what else "without --what"
        raise UserError(
            f"--{name} has no effect {given}: it is read {' or '.join(ways)}; "
            "leave it out"
        )
    if args.workdir and args.model:
        raise UserError("--workdir and --model are both given: give one of them")
    flag = "--workdir" if args.workdir else "--model"
    path = args.workdir or args.model
    if not path:
        raise UserError("--workdir or --model is missing: what to evaluate")
    scores = scorer.score(args, models.at_step(path, args.step), flag)
    registry.check_result("--what", scorer, "score", scores)
    if args.json:
        print("\n".join(json.dumps(finite(one)) for one in scores.objects))
        for note in scores.notes:
            cli.say(note)
    else:
        print("\n".join(scores.lines))
    return 0


if __name__ == "__main__":
    cli.command(main)
