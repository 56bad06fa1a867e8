# SPDX-License-Identifier: Apache-2.0
"""Answer with a finetuned model: python -m bertjax.predict --model=DIR --input=FILE|-

The input is a table with the columns that the model was finetuned on, without the
label, or --columns=TEXT[,TEXT_PAIR]. It is TSV, CSV or JSON lines; standard input and
pipes are TSV, or JSON lines if they begin with a brace. An imported model that does not
name its column reads `text`. A model with one text column, or of tags, also reads bare
lines, one text or sentence per line: FILE.txt and, with --format=text, any file and
standard input. The output has one JSON object per row, in order: label, score (its
probability) and the probabilities of all labels, or value.

Multiple choice: the columns are --columns=TEXT[+QUESTION][,CHOICE...], one per choice,
or one that holds a list of them (`choices` if the model does not name it).

Tags: the input is CoNLL's columns (.bio, .conll), JSON lines with tokens, or one
sentence per line (.txt, standard input; a text with a tab in it is columns unless
--format=text is given). The output has tokens, tags and the tags' scores
(probabilities) for each sentence.

Questions: the input is SQuAD's JSON, or JSON lines with question and context. The
output has id, answer, its score and null_score, the score of no answer, for each
question. The answer is "" if null_score exceeds score by more than --threshold. The
default is the best threshold on the validation set (0 without one) if the model was
trained with unanswerable questions; other models answer every question.

With --index=DIR (bertjax.embed --index) it answers questions from a collection. The
input is one question per line, JSON lines or a table with question, or SQuAD's JSON. A
model of vectors returns the nearest passages (ctxs: id, title, text, score), from
which objective=read trains. A model of objective=read finds passages, or has
--retriever find them, and returns answer, score and the passages. Another index gives
other answers without training.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bertjax import UserError, registry
from bertjax.assembly import command_line, models
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.data.corpus.sources import expand_paths
from bertjax.inference.open_book import answer_from_index
from bertjax.inference.predict_rows import answer, open_finetuned
from bertjax.parallel.host_memory import keep_freed_memory
from bertjax.storage import atomic
from bertjax.tasks import tables
from bertjax.tasks.open_questions import parse_questions
from bertjax.tasks.passage_index import PassageIndex
from bertjax.tasks.task_type import TaskType, get_task_type

FLAGS = {
    **shared("model"),
    "input": Flag("rows to predict; - is standard input"),
    "out": Flag("write JSON lines, one per row; - is standard output", "-"),
    "format": Flag("text: read one text per line, whatever the file's name"),
    **shared("step"),
    "columns": Flag("names of the columns, if they differ from those of training", ""),
    **shared("batch_size", "dtype", "weights", "index", "retriever", "passages"),
    "threshold": Flag(
        'questions: how much better "no answer" must score to win', kind=float
    ),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    keep_freed_memory()
    if not args.model or not args.input:
        raise UserError("--model and --input are needed: see --help")
    out = None
    if args.out != "-":
        out = atomic.check_out(args.out, "--out", source=("--input", args.input))
        if out.suffix.lower() in (".csv", ".tsv"):
            raise UserError(f"--out={args.out}: JSON lines are written: name a .jsonl")
    where = models.at_step(args.model, args.step)
    if args.index:
        write(out, answers_from_index(args, where), args.out)
        return 0
    for name in ("retriever", "passages"):
        if getattr(args, name):
            raise UserError(f"--{name} needs --index=DIR, which is not given")
    model = open_finetuned(where, args.dtype, args.weights, columns=args.columns)
    task_type = get_task_type(model.config.objective)
    if args.threshold is not None:
        if not task_type.has_threshold:
            raise UserError(
                f"--threshold={args.threshold} is for models of questions: leave it out"
            )
        model = model._replace(threshold=args.threshold)
    columns = model.form.keys(labelled=False, flags=True)
    read = read_input(args.input, columns, task_type, args.format)
    answers = answer(model, read, args.batch_size)
    write(out, answers, args.out)
    return 0


def write(out: Path | None, answers: Iterable[dict[str, Any]], name: str) -> None:
    """Write JSON lines to a file, or to standard output if there is none."""
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in answers)
    if out is None:
        sys.stdout.write(lines)
    else:
        atomic.write_file(out, lines, f"--out={name}")


def answers_from_index(args: Any, where: str) -> Iterable[dict[str, Any]]:
    """Answer the questions of --input from --index."""
    for name in ("threshold", "columns", "format"):
        if getattr(args, name) not in (None, ""):
            raise UserError(f"--{name} has no effect with --index")
    index = PassageIndex(args.index, "--index")
    questions: list[dict[str, Any]] = []
    if args.input == "-":
        texts = [(tables.decode(sys.stdin.buffer.read(), "standard input"), "-")]
    else:
        paths = expand_paths(args.input, "--input", pattern="FILE")
        texts = [(tables.read_text(path), path) for path in paths]
    for text, name in texts:
        questions += parse_questions(text, name, cli.say)
    if not questions:
        raise UserError(f"--input={args.input}: there are no questions")
    return answer_from_index(args, where, questions, index)


def read_input(
    name: str, columns: dict[str, str], task_type: TaskType, form: str | None = None
) -> Sequence[Any]:
    """Read the examples of a file, a pipe or standard input. Raises UserError.

    form: "text" if each line is a text; None: as the file's name implies.
    """
    if form is not None:
        registry.pick("--format", form, {"text": ""})
        if task_type.parse_lines is None or len(columns) > 1:
            raise UserError(
                f"--format=text: lines of text have one column; this model's rows have "
                f"{', '.join(columns.values())}: give {task_type.file_names}"
            )
    path, parse = Path(os.path.expanduser(name)), task_type.parse
    if name == "-" or (os.path.exists(path) and path.is_fifo()):  # or a list of files
        source = "standard input" if name == "-" else name
        content = sys.stdin.buffer.read() if name == "-" else path.read_bytes()
        parts = [(tables.decode(content, source), source)]
    elif form is None:
        return task_type.read(name, "--input", columns, cli.say)
    else:
        paths = expand_paths(name, "--input", pattern="FILE")
        parts = [(tables.read_text(path), path) for path in paths]
    if form is not None:
        parse = task_type.parse_lines
    try:
        found = [parse(text, at, columns, cli.say) for text, at in parts if text]
    except UserError as e:
        (text, _), *_ = parts
        bare = form is None and "\t" not in text and text.lstrip()[:1] != "{"
        if not bare or task_type.parse_lines is None or len(columns) > 1:
            raise
        raise UserError(f"{e}; --format=text reads one text per line") from e
    read = [row for part in found for row in part] if form else next(iter(found), [])
    if not read:
        raise UserError(f"--input={name}: there are no rows")
    return read


if __name__ == "__main__":
    cli.command(main)
