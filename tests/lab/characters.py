# SPDX-License-Identifier: Apache-2.0
"""A scorer from outside the package: counts the letters of each line."""

from bertjax.scoring.lines import read_lines
from bertjax.scoring.scorer import Scores

FLAGS = ("label",)


def score(args, path, flag):
    lines = [line.text for line in read_lines(args.text)]
    letters = [sum(map(str.isalpha, line)) for line in lines]
    objects = [{"model": path, args.label or "letters": n} for n in letters]
    return Scores(objects, [f"{flag}: {sum(letters)} letters"], ["counted"])
