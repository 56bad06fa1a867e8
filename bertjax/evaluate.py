# SPDX-License-Identifier: Apache-2.0
"""Score a masked LM on text: python -m bertjax.evaluate --workdir=DIR

--what=mlm    held-out loss of models that are compared: rows and masks are the same for
              all of one tokenizer, whatever they were trained with. Full sentences, one
              sequence a row, --length=128 tokens; 15% of them by BERT's rule, or
              --rates=0.15,0.3; --mask_unit=word masks whole words. Beside it the
              unigram cross-entropy: what guessing every token by its frequency in the
              training text costs. Of data.valid or --text all rows, or --examples=N
--what=pll    pseudo-log-likelihood of each line of --text; --variant=within_word
--what=pairs  minimal pairs, JSON lines as BLiMP has them
--what=retrieval   how well vectors (bertjax.embed) find the passages that answer
              queries: --text=FOLDER in BEIR's layout, or a table of pairs with the
              columns query and positive, or --columns=QUERY,POSITIVE
--what=sts    how well the cosine of two texts' vectors agrees with people's scores:
              --text=TABLE with the columns sentence1, sentence2 and score, or
              --columns=TEXT,TEXT_PAIR and --label=SCORE (numbers: no first line)

Without --what a model is scored as its training scores it, on data.valid or --text:
by its objective's losses, rows and masks as its config has them, --examples=N of them,
by default as many of data.valid as its config says (eval.examples) and all of --text; a
finetuned model by its task's metrics, --text being a table as it learnt from, or with
the columns --columns=TEXT[,TEXT_PAIR] and --label=LABEL; of multiple choice
--columns=TEXT[+QUESTION][,CHOICE...].
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError, fill_mask, registry
from bertjax.assembly import command_line, models, resolve
from bertjax.config import cli
from bertjax.data.corpus.line_files import FileSource
from bertjax.data.masking.presets import UNITS
from bertjax.interop.hf_read import Imported
from bertjax.scoring import print_scores
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import find_task_type, get_task_type


def define_flags(values: flags.FlagValues) -> None:
    string = flags.DEFINE_string
    string("model", None, "", flag_values=values)
    string("workdir", None, "", flag_values=values)
    flags.DEFINE_integer("step", None, "", flag_values=values)
    string(
        "text",
        None,
        "files to score instead of data.valid: globs, with commas, or named",
        flag_values=values,
    )
    string(
        "what", None, "mlm, pll, pairs, retrieval or sts; see above", flag_values=values
    )
    string("rates", None, "mlm: mask rates, with commas", flag_values=values)
    string("mask_unit", None, "mlm: token or word", flag_values=values)
    string(
        "variant", None, "pll and pairs: original, or within_word", flag_values=values
    )
    string("columns", None, "names of the texts' columns", flag_values=values)
    string("label", None, "name of the label's column", flag_values=values)
    flags.DEFINE_integer(
        "length", None, "mlm: tokens of a sequence", lower_bound=3, flag_values=values
    )
    flags.DEFINE_integer(
        "examples", None, "rows at most; 0 is all", lower_bound=0, flag_values=values
    )
    flags.DEFINE_integer("batch_size", None, "", lower_bound=1, flag_values=values)
    string("dtype", "float32", "", flag_values=values)
    string("weights", "", "", flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)


# What refines each --what; None: without it.
REFINES = {
    None: ("examples", "columns", "label"),
    "mlm": ("rates", "length", "mask_unit", "examples"),
    "pll": ("variant",),
    "pairs": ("variant",),
    "retrieval": ("columns",),
    "sts": ("columns", "label"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, define_flags, needs_config=False)
    known = {"mlm": evaluate_mlm, "pll": evaluate_pll, "pairs": evaluate_pairs}
    known |= {"retrieval": evaluate_retrieval, "sts": evaluate_sts}
    evaluate = evaluate_own
    if args.what is not None:
        evaluate = registry.pick("--what", args.what, known)
    check_refinements(args)
    if args.workdir and args.model:
        raise UserError("--workdir and --model: one model at a time")
    flag = "--workdir" if args.workdir else "--model"
    where = args.workdir or args.model
    if not where:
        raise UserError("--workdir or --model is missing: what to evaluate")
    return evaluate(args, models.at_step(where, args.step), flag)


def check_refinements(args: Any) -> None:
    """Refuse a flag that says nothing to what is asked for."""
    for what, names in REFINES.items():
        for name in names:
            if getattr(args, name) is not None and name not in REFINES[args.what]:
                to = f"to --what={args.what}" if args.what else f"without --what={what}"
                raise UserError(f"--{name} says nothing {to}")


def evaluate_own(args: Any, where: str, flag: str) -> int:
    """Print what a model's own training would: its objective's losses, or a task's."""
    opened = config, _, checkpoint, meta = models.open_model(where, flag)
    if "task" in meta:
        if args.examples is not None:
            raise UserError("--examples says nothing to a finetuned model")
        if not get_task_type(config.objective).makes_vectors:
            return evaluate_task(args, where, flag, opened)
        where = str(checkpoint)
    task_type = find_task_type(config.objective)
    retrieves = task_type is not None and task_type.makes_vectors
    for name in ("label",) if retrieves else ("columns", "label"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} names columns of a finetuned model's table")
    if retrieves:
        return evaluate_retrieval(args, where, flag)
    if args.examples is not None or args.text:
        config.eval.examples = args.examples or 0
    head = "mlm" if "mlm" in config.objective.split("+") else ""
    return evaluate_rows(args, opened, head)


def evaluate_mlm(args: Any, where: str, flag: str) -> int:
    """Print held-out losses on the rows and masks that all models are compared on."""
    from bertjax.scoring.scoring_rows import take_common_rows

    rates = read_rates(args.rates) if args.rates is not None else ()
    opened = config, tokenizer, *_ = models.open_model(where, flag)
    then = "without --what its task is scored"
    models.check_masked_lm(opened, f"--what=mlm: {where}", then)
    unit = args.mask_unit or "token"
    registry.pick("--mask_unit", unit, UNITS)
    longest = resolve.encoder_config(config, tokenizer.vocab_size).max_length
    if args.length is not None and args.length > longest:
        raise UserError(f"--length={args.length}: the model has {longest} positions")
    take_common_rows(config, args.length or min(128, longest), unit)
    config.eval.examples = args.examples or 0
    return evaluate_rows(args, opened, "mlm", rates)


def evaluate_rows(
    args: Any, opened: models.Opened, head: str, rates: Sequence[float] = ()
) -> int:
    """Print the scores of rows and masks as a config has them, at each mask rate.

    head: which the model must have. Raises UserError where it has not, or no text is.
    """
    from bertjax.data.corpus.sources import named_sources, parse_sources
    from bertjax.scoring import mlm_loss, scoring_rows

    config, tokenizer, checkpoint, meta = opened
    config.dtype = args.dtype
    if args.text:
        for part in named_sources(args.text, "--text").values():
            parse_sources(part, "--text", "valid")  # whose messages name the flag
        config.data.valid = args.text
        config.data.group_field = ""  # the text has what names the flag gives it
    if not config.data.valid:
        raise UserError("data.valid is empty in this run's config: give --text=FILES")
    params = models.read_params(checkpoint, head, args.weights)
    counts = None
    # Of an imported model nobody knows what it was trained on.
    if not isinstance(checkpoint, Imported):
        file = checkpoint.parents[1] / "unigram.npy"
        if file.exists():
            with file.open("rb") as f:
                counts = np.load(f)
    found = mlm_loss.evaluate(config, tokenizer, params, counts, args.batch_size, rates)
    about = scoring_rows.tell(config, "own" if args.what is None else "common")
    if args.json:
        told = {
            name: {"rates": scores} if rates else next(iter(scores.values()))
            for name, scores in found.items()
        }
        whose = print_scores.about(args.workdir or args.model, meta)
        print_scores.print_json(whose | {"layout": about}, told)
        return 0
    which = about.pop("name")
    print(f"layout {which}:", "; ".join(f"{k} {v}" for k, v in about.items()))
    for name, scores in found.items():
        for rate, values in scores.items():
            rows, every = values.pop("rows"), values.pop("all_rows")
            at = f", {rate:.0%} masked" if rates else ""
            print(
                f"{name}{print_scores.at_step(meta)}, {rows:,} of {every:,} rows{at}:"
            )
            print_scores.say_values(values)
    return 0


def evaluate_task(args: Any, where: str, flag: str, opened: models.Opened) -> int:
    """Print a finetuned model's metrics, on all rows of each validation set."""
    from bertjax import predict
    from bertjax.data.corpus.sources import named_sources
    from bertjax.tasks.task_rows import check_label

    for name in ("columns", "label"):
        if args[name].value == "":
            raise UserError(f"--{name}= names no column")
    model = predict.open_finetuned(
        where, args.dtype, args.weights, flag, args.columns or "", opened
    )
    if args.label:
        model = model._replace(form=model.form._replace(label=args.label))
    columns = model.form.keys(flags=True)
    check_label(columns)
    if not args.text and not model.config.data.valid:
        raise UserError("data.valid is empty in this model's config: give --text=FILES")
    task_type = get_task_type(model.config.objective)
    key = "--text" if args.text else "data.valid"
    found = {}
    for name, part in named_sources(args.text or model.config.data.valid, key).items():
        read = task_type.read(part, key, columns, cli.say)
        made = task_type.make_rows(read, model.form, model.tokenizer, True, cli.say)
        rows = made.plan(model.config.data.length)
        cli.say(f"{name.lstrip('-')}: {rows.read_as(model.tokenizer)}")
        outputs = predict.predict(model, rows, args.batch_size or 32)
        every = np.arange(rows.n)
        values = {**rows.score(outputs, every), **rows.parts(outputs, every)}
        found[name.lstrip("-")] = values
    return print_scores.say_found(
        found, args.workdir or args.model, opened[-1], args.json
    )


def evaluate_retrieval(args: Any, where: str, flag: str) -> int:
    """Print how well a model's vectors find the passages that answer queries.

    Vectors are compared by their angle, or as the model was made for.
    """
    from bertjax import embed
    from bertjax.data.corpus.sources import named_sources, split_sources
    from bertjax.scoring.retrieval_scores import score
    from bertjax.tasks import passages

    model = embed.open_embedder(where, flag, args.dtype, args.weights)
    named, text, key = passages.COLUMNS, args.text, "--text"
    task_type = find_task_type(model.config.objective)
    if task_type and task_type.makes_vectors:
        named = tasks.make_form(model.config).keys()
        if not text:
            text, key = model.config.data.valid, "data.valid"
    columns = dict(zip(passages.FLAGS, named.values(), strict=True))
    if args.columns is not None:
        names = split_sources(args.columns)
        if len(names) != 2:
            raise UserError(
                f"--columns={args.columns}: of pairs two columns, QUERY,POSITIVE"
            )
        columns |= zip(passages.FLAGS, names, strict=False)
    if not text:
        raise UserError("--what=retrieval searches --text=FOLDER, in BEIR's layout")
    found = {}
    for name, part in named_sources(text, key).items():
        read = passages.read_collections(part, key, columns, cli.say)
        values = score(model, passages.join(read), args.batch_size or 32, cli.say)
        found[name.lstrip("-")] = values
    return print_scores.say_found(
        found, args.workdir or args.model, model.meta, args.json
    )


def evaluate_sts(args: Any, where: str, flag: str) -> int:
    """Print how well the likeness of vectors agrees with people's scores of pairs."""
    from bertjax import embed
    from bertjax.data.corpus.sources import named_sources, split_sources
    from bertjax.scoring import sts

    if not args.text:
        raise UserError("--what=sts scores the pairs of --text=FILE, a table")
    columns = dict(sts.COLUMNS)
    if args.columns is not None:
        names = split_sources(args.columns)
        if len(names) != 2:
            raise UserError(
                f"--columns={args.columns}: of sentence similarity two columns, "
                "TEXT,TEXT_PAIR; --label=SCORE names the third"
            )
        columns |= zip(columns, names, strict=False)
    if args.label is not None:
        columns["--label"] = args.label
    named = named_sources(args.text, "--text").items()
    read = {n: sts.read_pairs(part, "--text", columns, cli.say) for n, part in named}
    model = embed.open_embedder(where, flag, args.dtype, args.weights)
    found = {
        name.lstrip("-"): sts.score(model, pairs, args.batch_size or 32, cli.say)
        for name, pairs in read.items()
    }
    return print_scores.say_found(
        found, args.workdir or args.model, model.meta, args.json
    )


def evaluate_pll(args: Any, where: str, flag: str) -> int:
    """Print pseudo-log-likelihoods: of each line with --json, else of all."""
    from bertjax.scoring import pll, totals
    from bertjax.scoring.read_lines import read_lines

    variant = pick_variant(args.variant)
    if not args.text:
        raise UserError("--what=pll scores the lines of --text=FILES")
    lines = list(read_lines(args.text))
    if records := [line.file for line in lines if FileSource(line.file).is_json]:
        raise UserError(f"--text={records[0]}: JSON; --what=pll scores lines of text")
    told = [line for line in lines if line.text.strip()]
    if not told:
        raise UserError(f"--text={args.text}: every line is empty")
    cfg, params, tokenizer, meta = open_masked_lm(args, where, flag)
    scores = pll.score_texts(
        cfg, params, tokenizer, [x.text for x in told], variant, args.batch_size
    )
    whose = print_scores.about(args.workdir or args.model, meta)
    rows = [
        {**whose, "file": x.file, "line": x.number, "text": x.text, **score._asdict()}
        for x, score in zip(told, scores, strict=True)
    ]
    summary = totals.total(rows)
    if not summary["lines"]:
        raise UserError(
            f"--text={args.text}: no line can be scored: {summary['too_long']:,} have "
            f"more than the model's {cfg.max_length - 2} tokens, "
            f"{summary['no_tokens']:,} none"
        )
    summary["empty_lines"] = len(lines) - len(told)
    if args.json:
        print("\n".join(map(json.dumps, rows)))
        cli.say("; ".join(f"{key} {value:,.6g}" for key, value in summary.items()))
    else:
        print_scores.say_values(summary)
    return 0


def evaluate_pairs(args: Any, where: str, flag: str) -> int:
    """Print how often the good sentence of a minimal pair is likelier."""
    from bertjax.scoring import minimal_pairs, pll
    from bertjax.scoring.read_lines import read_lines

    variant = pick_variant(args.variant)
    if not args.text:
        raise UserError("--what=pairs compares the pairs of --text=FILE, JSON lines")
    read, empty = minimal_pairs.read_pairs(read_lines(args.text))
    cfg, params, tokenizer, meta = open_masked_lm(args, where, flag)
    texts = [sentence for pair in read for sentence in pair.sentences]
    minimal_pairs.refuse_empty(read, tokenizer.encode_batch(texts))
    scores = [
        s.score
        for s in pll.score_texts(
            cfg, params, tokenizer, texts, variant, args.batch_size
        )
    ]
    found = minimal_pairs.compare(read, scores[::2], scores[1::2])
    if args.json:
        about = print_scores.about(args.workdir or args.model, meta)
        about |= {"variant": variant, "empty_lines": empty}
        print(json.dumps(about | found))
        return 0
    print("\n".join(minimal_pairs.table(found)))
    if empty:
        print(f"empty lines: {empty:,}")
    return 0


def read_rates(text: str) -> tuple[float, ...]:
    """Return the mask rates of --rates, a comma list."""
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    fine = rates and all(0 < rate <= 1 for rate in rates)
    if not fine or len({*rates}) < len(rates):
        raise UserError(
            f"--rates={text}: different shares above 0 and at most 1, such as "
            "--rates=0.15,0.3"
        )
    return rates


def pick_variant(name: str | None) -> str:
    """Return what to hide beside a token: nothing unless `name` says otherwise."""
    from bertjax.scoring.pll import VARIANTS

    registry.pick("--variant", name or "original", VARIANTS)
    return name or "original"


def open_masked_lm(args: Any, where: str, flag: str) -> tuple[Any, Any, Any, Any]:
    """Return (cfg, parameters, tokenizer, what the checkpoint says of itself)."""
    opened = config, tokenizer, checkpoint, meta = models.open_model(where, flag)
    then = "without --what its task is scored"
    models.check_masked_lm(opened, f"--what={args.what}: {where}", then)
    config.dtype = args.dtype
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    return *fill_mask.read_params(checkpoint, cfg, args.weights), tokenizer, meta


if __name__ == "__main__":
    cli.command(main)
