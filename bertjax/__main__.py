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
    "prepare": "turn text into token stores beforehand, on one machine or several",
    "show": "look at the batches that a config makes",
    "evaluate": "score a model: held-out loss, sentences, retrieval, its task",
    "fill_mask": "guess the blanks of sentences",
    "generate": "write texts, or fill what is left open in them",
    "predict": "answer with a finetuned model: labels, scores, tags, answers",
    "embed": "make vectors of sentences",
    "speedrun": "train the best small encoder in a fixed time",
    "probe": "see what each layer knows",
    "compress": "prune or quantise a model after training",
    "convert": "read and write Hugging Face's directories",
    "report": "make one page of runs",
    "preflight": "see what a config costs on a TPU that is not there",
    "benchmark": "measure a config here",
}


def main() -> int:
    """Run the command that the command line names, and return its exit status."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name == "--version":
        print(__version__)
        return 0
    if name in ("--help", "-h", "help"):
        print("bertjax COMMAND [--FLAG=VALUE ...]; bertjax COMMAND --help says more\n")
        print("\n".join(f"  {known:10} {what}" for known, what in COMMANDS.items()))
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
