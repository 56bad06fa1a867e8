# SPDX-License-Identifier: Apache-2.0
"""Fill blanks: python -m bertjax.fill_mask --model=DIR "The [MASK] is here." ...

For each blank it prints a line of guesses, the best first; a piece that continues the
word before it begins with ##. The last line is the text with the best guesses filled
in. With --json it prints one object per text: text and masks, which has one list per
blank of guesses with token (the piece as in the vocabulary), id, probability, and
sequence, the text with this one blank filled.
"""

import json
from collections.abc import Sequence

from bertjax import UserError
from bertjax.assembly import command_line, models
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared

FLAGS = {
    **shared("model"),
    "top_k": Flag("predictions per blank", 5, least=1),
    **shared("dtype", "weights", "json"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False, words=True)
    if not args.model:
        raise UserError(
            "--model is missing: a workdir, or a directory of Hugging Face's"
        )
    if not args.words:
        raise UserError("no text: give sentences with blanks, such as 'A [MASK].'")
    model = models.open_model(args.model, "--model")
    model.config.dtype = args.dtype

    from bertjax.inference.fill_blanks import fill_texts, readable_piece

    tokenizer, flag = model.tokenizer, f"--model={args.model}"
    filled = fill_texts(model, args.words, args.top_k, args.weights, flag)
    for text, (ids, masks) in zip(args.words, filled, strict=True):
        if args.json:
            print(json.dumps({"text": text, "masks": masks}), flush=True)
            continue
        print(text)
        for blank in masks:
            pairs = ((readable_piece(tokenizer, g["id"]), g) for g in blank)
            guesses = (f"{piece} {g['probability']:.3f}" for piece, g in pairs)
            print("  " + "   ".join(guesses))
        best = iter(blank[0]["id"] for blank in masks)
        words = [next(best) if t == tokenizer.mask_id else t for t in ids[1:-1]]
        print("  =", tokenizer.decode(words), flush=True)
    return 0


if __name__ == "__main__":
    cli.command(main)
