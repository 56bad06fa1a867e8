# SPDX-License-Identifier: Apache-2.0
"""Run the commands: `python -m bertjax NAME` or `bertjax NAME` runs bertjax.NAME."""

import os
import runpy
import sys

from bertjax import UserError, __version__, registry

COMMANDS = {
    "train": "pretrain or finetune a model; the same command again resumes",
    "sweep": "finetune with many seeds and learning rates at once",
    "glue": "finetune on all tasks of GLUE",
    "prepare": "tokenize text in advance, on one machine or several",
    "show": "show the batches of a config",
    "evaluate": "score a model: held-out loss, sentences, retrieval, its task",
    "fill_mask": "fill the blanks of sentences",
    "generate": "generate texts, or fill blanks in any order",
    "predict": "predict with a finetuned model: labels, scores, tags, answers",
    "embed": "compute vectors of sentences",
    "speedrun": "train the best small encoder in a fixed time",
    "probe": "probe what each layer encodes",
    "compress": "prune or quantize a model after training",
    "convert": "convert models: Hugging Face, ONNX, StableHLO",
    "report": "write an HTML page about runs",
    "preflight": "compile a config for a TPU without having one",
    "benchmark": "measure the speed of a config on this machine",
}


def main() -> int:
    """Run the command that the command line names, and return its exit status."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name == "--version":
        print(__version__)
        return 0
    if name in ("--help", "-h", "help"):
        lines = (f"  {known:10} {what}" for known, what in COMMANDS.items())
        head = "bertjax COMMAND [--FLAG=VALUE ...]; bertjax COMMAND --help says more\n"
        try:
            print("\n".join([head, *lines]), flush=True)
        except BrokenPipeError:  # the reader, such as head, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    try:
        registry.pick("the command", name, COMMANDS)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    sys.argv = [sys.argv[0], *rest]
    if os.getcwd() not in sys.path:
        # As with python -m, so that the user's own maskers and heads are found.
        sys.path.insert(0, os.getcwd())
    runpy.run_module(f"bertjax.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
