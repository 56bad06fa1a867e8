# SPDX-License-Identifier: Apache-2.0
"""Write texts: python -m bertjax.generate --model=DIR "prompt" ...

--how=left    continue each prompt from left to right, with a causal LM, a prefix LM or
              an encoder-decoder; the default for these models
--how=unmask  fill the blanks of a text, "The capital of [MASK] [MASK] is Paris.", with
              any masked LM or diffusion model; a text without a blank is continued by
              --max_new_tokens tokens

Tokens are chosen greedily or by --num_beams; with --temperature, --top_k or --top_p
they are drawn. --input has one prompt per line, or JSON lines {"prompt": ...}. --json
and --out write one object per prompt: {"prompt": ..., "outputs": [{"text": ...,
"ids": [...], "score": ...}]}.

A model finetuned with objective=seq2seq writes the target of each prompt, which may be
an object by column. A model of objective=dialogue writes the next turn of each
conversation, {"turns": [{"speaker": ..., "text": ...}, ...]}; if it is too long, the
oldest turns are left out.

With --index=DIR (bertjax.embed --index) a model of objective=rag answers questions from
the passages that it, or --retriever, finds; with --json each answer lists `passages`.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertjax import UserError, counted
from bertjax.assembly import command_line, models
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.data.corpus.line_repair import check_utf8, load_json
from bertjax.generation.options import Options, PromptError, check_options
from bertjax.inference.open_book import answer_from_index
from bertjax.measuring.results import peak_rss_mb
from bertjax.storage import atomic
from bertjax.tasks import tables
from bertjax.tasks.passage_index import PassageIndex

FLAGS = {
    **shared("model", "step"),
    "input": Flag("prompts, one per line, or JSON lines; - is standard input"),
    "out": Flag("write JSON lines, one per prompt; - is standard output", "-"),
    "max_new_tokens": Flag(
        "maximum number of new tokens; default: 64, or the target length", kind=int
    ),
    "num_beams": Flag("left: beams of beam search", kind=int),
    "length_penalty": Flag(
        "beam search: above 0 favors long texts, below 0 short ones", kind=float
    ),
    "early_stopping": Flag("beam search: false, true or never; see docs/generation.md"),
    "temperature": Flag(
        "sample with this temperature; 0: take the likeliest token", kind=float
    ),
    "top_k": Flag("sample from this many likeliest tokens only", kind=int),
    "top_p": Flag(
        "sample from the likeliest tokens of this total probability only", kind=float
    ),
    "repetition_penalty": Flag(
        "left: above 1 makes repeated tokens less likely", kind=float
    ),
    "num_return_sequences": Flag("texts per prompt", 1),
    "seed": Flag("seed of the sampling", 0),
    "prefix": Flag("left: text that every output must begin with"),
    "rank": Flag(
        "left: sample this many texts, return the likeliest per token", kind=int
    ),
    "stop": Flag("left: end the text at this string, which is not included", ()),
    "how": Flag("left or unmask; see above", ""),
    "order": Flag("unmask: order of filling: confidence, entropy, left or random"),
    "steps": Flag("unmask: model calls; default: one per token", kind=int),
    "gamma": Flag("unmask, order entropy: entropy bound per call, in nats", kind=float),
    "block": Flag(
        "unmask: blanks per block; blocks are filled from left to right", kind=int
    ),
    "remask": Flag("unmask: share of tokens masked again between calls", kind=float),
    **shared("index", "retriever", "passages"),
    **shared("batch_size", "dtype", "weights", "json"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False, words=True)
    if not args.model:
        raise UserError(
            "--model is missing: a workdir, or a directory of Hugging Face's"
        )
    if bool(args.words) == bool(args.input):
        both = "give one of them" if args.input else 'such as "The history of"'
        raise UserError(f"prompts on the command line, or --input=FILE: {both}")
    out = None
    if args.out != "-":
        out = atomic.check_out(args.out, "--out", source=("--input", args.input))
    for prompt in args.words:
        check_utf8(prompt)
    wanted = Options(**{name: getattr(args, name) for name in Options._fields})
    wanted = wanted._replace(stop=args.stop or None)
    check_options(wanted)
    read = read_prompts(args.input) if args.input else {}
    prompts = [*read.values()] if args.input else list(args.words)
    where = models.at_step(args.model, args.step)
    if args.index:
        return write_from_index(args, where, prompts, wanted, out)
    for name in ("retriever", "passages"):
        if getattr(args, name):
            raise UserError(f"--{name} needs --index=DIR, which is not given")
    model = models.open_model(where, "--model")
    model.config.dtype = args.dtype

    from bertjax.generation import open_writer

    how = open_writer.pick_how(model, wanted, f"--model={args.model}")
    params = model.read_params(open_writer.head_of(model), args.weights)
    writer = open_writer.open_writer(model, how, params)
    began = time.monotonic()
    try:
        written = open_writer.write(writer, prompts, wanted, cli.say)
    except PromptError as e:
        if not args.input:
            raise
        raise UserError(f"{[*read][e.number]}: {e}") from e
    cli.say(describe_cost(written, time.monotonic() - began))
    lines = [to_json(*pair) for pair in zip(prompts, written, strict=True)]
    if out:
        atomic.write_file(out, "".join(line + "\n" for line in lines), f"--out={out}")
    elif args.json:
        print("\n".join(lines), flush=True)
    else:
        for prompt, outputs in zip(prompts, written, strict=True):
            before = prompt if open_writer.continues_prompt(writer) else ""
            print(for_people(before, outputs), flush=True)
    return 0


def write_from_index(
    args: Any, where: str, prompts: list[Any], wanted: Options, out: Path | None
) -> int:
    """Answer prompts, which must be questions, from --index."""
    known = {"num_beams", "length_penalty", "batch_size"}
    usual = Options()
    for name in Options._fields:
        if name not in known and getattr(wanted, name) != getattr(usual, name):
            raise UserError(f"--{name} has no effect with --index")
    if texts := [prompt for prompt in prompts if not isinstance(prompt, str)]:
        raise UserError(f"--index: {texts[0]!r:.40} is not a question, which is a text")
    index = PassageIndex(args.index, "--index")
    asked = [{"question": prompt} for prompt in prompts]
    answers = list(answer_from_index(args, where, asked, index, writes=True))
    lines = [
        json.dumps(
            {
                "prompt": one["question"],
                "outputs": [{"text": one["text"], "score": one["score"]}],
                "passages": one["passages"],
            },
            ensure_ascii=False,
        )
        for one in answers
    ]
    if out:
        atomic.write_file(out, "".join(line + "\n" for line in lines), f"--out={out}")
    else:
        print("\n".join(lines if args.json else [one["text"] for one in answers]))
    return 0


def read_prompts(path: str) -> dict[str, Any]:
    """Return the prompts of a file, or of standard input (-), by FILE:LINE, in order.

    Prompts are texts; in JSON lines they may also be objects of texts, or
    conversations. Keys that are not read are reported. Raises UserError that names a
    line with no prompt, with an option as a key, or that is not UTF-8.
    """
    name = "standard input" if path == "-" else path
    lines = tables.read_lines(path, "--input")
    first = next(filter(str.strip, lines), "")
    if not (tables.is_json(path) or first.lstrip().startswith("{")):
        return {f"{name}:{number}": line for number, line in enumerate(lines, 1)}
    prompts, ignored = {}, Counter()
    for number, line in enumerate(lines, 1):
        place = f"{name}:{number}"
        if not line.strip():
            continue
        read = load_json(line, place)
        read = read if isinstance(read, dict) else {}
        prompt = read if "turns" in read else read.get("prompt")
        others = [key for key in read if key != "prompt" and prompt is not read]
        if option := next(filter(Options._fields.__contains__, others), None):
            raise UserError(
                f"{place}: {option} is an option for all prompts: give --{option}"
            )
        ignored.update(others)
        if isinstance(prompt, dict) and "turns" in prompt:
            # What is in the turns is checked when they are read.
            if not prompt["turns"] or not isinstance(prompt["turns"], list):
                raise UserError(f"{place}: `turns` is not a list with a turn")
            prompts[place] = prompt
            continue
        cells = prompt.values() if isinstance(prompt, dict) else [prompt]
        if not cells or not all(isinstance(cell, str) for cell in cells):
            raise UserError(
                f'{place} is not a JSON object {{"prompt": TEXT}}, nor a '
                'conversation, {"turns": [...]}'
            )
        prompts[place] = prompt
    for key, number in ignored.items():
        cli.say(f"{name}: {key!r} is not read ({counted(number, 'line')})")
    if not prompts:
        raise UserError(f"{name} has no prompts")
    return prompts


def to_json(prompt: Any, outputs: Sequence[Any]) -> str:
    """Return the JSON line of a prompt and its outputs."""
    found = [output._asdict() for output in outputs]
    return json.dumps({"prompt": prompt, "outputs": found}, ensure_ascii=False)


def for_people(prompt: str, outputs: Sequence[Any]) -> str:
    """Return a prompt's texts; if there are several, each after its score."""
    if len(outputs) == 1:
        return prompt + outputs[0].text
    return "\n".join(f"{one.score:9.3f}  {prompt}{one.text}" for one in outputs)


def describe_cost(written: Sequence[Sequence[Any]], seconds: float) -> str:
    """Report the number of tokens, the speed, and the peak memory."""
    import jax

    tokens = sum(len(one.ids) for outputs in written for one in outputs)
    texts = counted(sum(map(len, written)), "text")
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use", peak_rss_mb() * 1e6) / 1e6
    return (
        f"{texts} of {counted(tokens, 'token')} in {seconds:.1f} s, compiling included:"
        f" {tokens / seconds:,.0f} tokens/s; at most {peak:,.0f} MB"
    )


if __name__ == "__main__":
    cli.command(main)
