# SPDX-License-Identifier: Apache-2.0
"""Summarize runs on one page: python -m bertjax.report WORKDIR ... --out=FILE.html

    [--fill="The [MASK] is here."]  guesses for blanks, from every kept checkpoint
    [--sentence="The cat sat."]     guesses for each token when masked, and attention
    [--probes=FILE.json]            results of bertjax.probe --out=FILE.json, by layer
    [--scores=FILE.json]            results of bertjax.evaluate --json, as tables
    [--png=DIR]                     also each chart as a picture (needs matplotlib)

The page is one file that needs no network. --fill, --sentence, --probes and --scores
can be repeated; guesses are computed on one device in float32.
"""

from collections.abc import Sequence

from bertjax import UserError, counted
from bertjax.assembly import command_line
from bertjax.config import cli
from bertjax.config.flag_help import Flag
from bertjax.probing.probe_table import check_plot
from bertjax.reporting import charts, page, read_runs, score_files
from bertjax.storage import atomic
from bertjax.storage.paths import expand

FLAGS = {
    "out": Flag("the HTML page to write"),
    "png": Flag("also write each chart as a picture into this folder"),
    "fill": Flag("a text with blanks, to be filled by every stored checkpoint", ()),
    "sentence": Flag("a text: show predictions for each token and the attention", ()),
    "probes": Flag("a file written by bertjax.probe --out", ()),
    "scores": Flag("a file with the output of bertjax.evaluate --json", ()),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False, words=True)
    if not args.words:
        raise UserError("no run: give one workdir or several")
    if not args.out:
        raise UserError("--out is missing: the page to write, --out=FILE.html")
    out = atomic.check_out(args.out, "--out")
    for flag in ("probes", "scores"):
        for name in args[flag].value:
            atomic.check_out(args.out, "--out", source=(f"--{flag}", name))
    folder = expand(args.png, "--png") if args.png else None
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--png={args.png} is a file: pictures go to a directory")
        check_plot()
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        cli.say(line)

    runs = read_runs.read_runs(args.words, note)
    probes = [score_files.read_probe(name) for name in args.probes]
    scores = [(name, score_files.read_scores(name)) for name in args.scores]
    blanks, views = [], []
    if args.fill or args.sentence:
        from bertjax.reporting import predictions  # needs jax

        blanks = predictions.fill_blanks(runs, args.fill, note)
        views = predictions.view_sentences(runs, args.sentence, note)
    # A directory's name may not be valid text.
    text = page.write_page(runs, notes, blanks, views, probes, scores)
    atomic.write_file(out, text.encode(errors="replace"), f"--out={args.out}")
    cli.say(f"{out}: {', '.join(run.name for run in runs)}")
    if folder is not None:
        count = 0
        for name, picture in charts.draw(runs, probes):
            atomic.write_file(folder / name, picture, f"--png={args.png}")
            count += 1
        cli.say(f"{folder}: {counted(count, 'picture')}")
    return 0


if __name__ == "__main__":
    cli.command(main)
