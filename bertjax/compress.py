# SPDX-License-Identifier: Apache-2.0
"""Make a trained model smaller: prune or quantize it, layer by layer.

python -m bertjax.compress --model=DIR --out=DIR --method=sparsegpt --text=FILES
... --sparsity=0.5         prune half of each matrix's weights; 2:4: two of every four
... --method=gptq --bits=4 --text=FILES      quantize to 8, 4 or 3 bits
... --method=magnitude, or rtn               reads no text
... --recover_minutes=10   then train it on --text with the dense model as teacher
... --table=FILE.md --evaluate="--what=mlm --text=FILES" --metric=mlm_loss
                           try a grid of methods, score each, write a Markdown table;
                           --method, --sparsity and --bits accept several, with commas

sparsegpt, wanda and magnitude prune; gptq, awq and rtn (round to nearest) quantize.
DIR is a workdir for all other commands, with float32 weights; its packed.safetensors
has the same weights in few bytes (docs/compression.md).
"""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bertjax import UserError, counted, registry
from bertjax.assembly import command_line
from bertjax.assembly import models as open_models
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.storage import atomic
from bertjax.training.signals import StopCommand, Stopped

FLAGS = {
    **shared("model", "step"),
    "out": Flag("the new workdir to write; with --table: where to keep the models"),
    "method": Flag("sparsegpt, wanda, magnitude, gptq, awq or rtn"),
    "sparsity": Flag("share of the weights to remove, or 2:4; default: 0.5"),
    "bits": Flag("bits per weight: 8, 4 or 3; default: 4"),
    "group_size": Flag("inputs per quantization grid; default: 128", kind=int, least=8),
    "embeddings": Flag(
        "embedding tables: 8 (bits), same (as the layers) or dense (unchanged)", "8"
    ),
    "text": Flag("calibration text: files or globs, separated by commas"),
    "rows": Flag("number of calibration rows", 128, least=1),
    "length": Flag(
        "tokens per row; default: 128, or as many as the model accepts",
        kind=int,
        least=8,
    ),
    "recover_minutes": Flag(
        "minutes of training afterwards, with the dense model as teacher",
        kind=float,
        least=0,
    ),
    "recover_steps": Flag(
        "training updates instead of minutes, which are reproducible", kind=int, least=0
    ),
    "recover_data": Flag(
        "for a finetuned model: rows of its task to recover on, instead of --text"
    ),
    "seed": Flag("seed of the recovery's rows and masks", 0, least=0),
    "table": Flag("try a grid of methods and write this Markdown table"),
    "evaluate": Flag("with --table: flags of bertjax.evaluate for each model"),
    "metric": Flag(
        "with --table: metrics to show, names from its JSON, separated by commas"
    ),
    **shared("weights", "json"),
}
OF_TABLE = ("evaluate", "metric")


def main(argv: Sequence[str]) -> int:
    try:
        return run(argv)
    except Stopped as e:
        return e.status


def run(argv: Sequence[str]) -> int:
    """Run the command; raise UserError, and Stopped after a signal."""
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    if not args.model:
        raise UserError("--model is missing: what to compress")
    if args.table is not None:
        return write_table(args)
    for flag in OF_TABLE:
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag} needs --table=FILE: leave it out")
    if not args.out or not args.method:
        raise UserError("--out and --method are needed: see --help")
    from bertjax.assembly.save_model import check_target
    from bertjax.compression.methods import make_recipe, read_bits
    from bertjax.compression.write_model import write_small

    bits = None if args.bits is None else read_bits(args.bits)
    how = args.method, args.sparsity, bits, args.group_size, args.embeddings
    recipe = make_recipe(*how)
    check_target(args.out, f"--out={args.out}")
    begun = time.monotonic()
    *_, small = open_compressor(args, [recipe])(recipe)
    done = write_small(small, args.out)
    done["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(done) if args.json else "\n".join(describe(done)))
    return 0


def open_compressor(args: Any, recipes: Sequence[Any]) -> Any:
    """Open the model and read the texts once; return compress(recipe).

    compress yields the Small of a recipe and, with recovery, the recovered one.
    """
    calibrated = [r.method for r in recipes if r.calibrated]
    if calibrated and not args.text:
        raise UserError(f"--text is missing: {calibrated[0]} is calibrated on texts")
    from bertjax.compression import recover
    from bertjax.compression.compress_model import check_model

    recovery = recover.read_recovery(
        args.recover_minutes,
        args.recover_steps,
        args.recover_data,
        text=args.text or "",
        length=args.length,
        seed=args.seed,
    )
    reads = calibrated or (recovery and not recovery.rows)
    is_read = {"text": reads, "length": reads, "rows": calibrated, "seed": recovery}
    for name in (name for name in is_read if not is_read[name] and args[name].present):
        cli.say(f"--{name}={args[name].value} is not read by {recipes[0].method}")
    path = open_models.at_step(args.model, args.step)
    opened = open_models.open_model(path, "--model")
    opened.config.dtype = "float32"
    check_model(opened.cfg, f"--model={args.model}")
    if recovery:
        recover.check_recovery(opened, recovery)
        StopCommand().install()  # on a signal, remove the files written so far
    from bertjax.compression.calibration import read_calibration
    from bertjax.compression.write_model import make_small

    batches: list[Any] = []
    if calibrated:
        batches = read_calibration(opened, args.text, args.rows, args.length)

    def compress(recipe: Any) -> Iterator[Any]:
        rows = batches if recipe.calibrated else []
        yield (small := make_small(opened, recipe, rows, args.weights))
        if recovery:
            from bertjax.train import train

            how = recovery, train, path, args.weights
            yield recover.recover(small, *how)

    return compress


def describe(done: dict[str, Any]) -> list[str]:
    """Describe the result for people."""
    what = f"{done['sparsity']:.2%} of the layers' weights are 0"
    if done["bits"]:
        what = f"{done['bits']} bits, groups of {done['group_size']}"
    lines = [f"{done['out']} is written: {done['method']}, {what}"]
    if done["tokens"]:
        rows = counted(done["rows"], "row")
        lines.append(
            f"calibrated on {rows}, {done['tokens']:,} tokens; outputs of the matrices "
            f"lost {done['output_error']:.2%} of their squares"
        )
    if recovery := done.get("recovery"):
        losses = (
            f"{name} from {first:.4f} to {last:.4f}"
            for name, (first, last) in recovery["losses"].items()
        )
        lines.append(
            f"recovered in {counted(recovery['steps'], 'step')}, "
            f"{recovery['tokens']:,} tokens, by {recovery['objective']}: "
            f"{', '.join(losses)}"
        )
    share = done["bytes"] / done["bytes_dense"]
    lines.append(
        f"packed.safetensors has {done['bytes'] / 1e6:,.1f} MB, {share:.1%} of the "
        f"{done['bytes_dense'] / 1e6:,.1f} MB of all parameters in float32; "
        f"{done['seconds']:.0f} s"
    )
    return lines


def write_table(args: Any) -> int:
    """Compress by a grid of methods, score each model, write the table."""
    from bertjax.compression import grid_table

    out = atomic.check_out(args.table, "--table", ".md")
    if not args.evaluate or not args.metric:
        raise UserError("--table needs --evaluate=FLAGS and --metric=NAME: see --help")

    given = args.method, args.sparsity, args.bits, args.metric
    *lists, metrics = (registry.split_list(text or "") for text in given)
    recipes = grid_table.make_grid(*lists, args.group_size, args.embeddings)
    if args.out is not None:
        from bertjax.assembly.save_model import check_target

        check_target(args.out, f"--out={args.out}")
    compress = open_compressor(args, recipes)
    model = open_models.at_step(args.model, args.step)
    how = args.evaluate, metrics, args.out, cli.say, args.weights
    for rows in grid_table.run_grid(model, recipes, compress, *how):
        table = "\n".join(grid_table.markdown(rows))  # the rows so far
        atomic.write_file(out, f"{table}\n", f"--table={args.table}")
    print(json.dumps(rows) if args.json else table)
    return 0


if __name__ == "__main__":
    cli.command(main)
