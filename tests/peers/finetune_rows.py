# SPDX-License-Identifier: Apache-2.0
"""Draw the samples of docs/results.md, and compute the difference of two sides.

python tests/peers/finetune_rows.py sample train.tsv.gz 8000 OUT.tsv
    the N rows under the header whose SHA-1 is lowest
python tests/peers/finetune_rows.py articles squad.json.gz 16 TRAIN.json DEV.json
    the N articles whose titles' SHA-1 is lowest, and the others
python tests/peers/finetune_rows.py differ WORKDIR/sweep.json PEER.json
    medians, deviations, and the difference of the means with its 95% interval
    (Welch 1947); hf_finetune.py writes PEER.json
"""

import gzip
import hashlib
import json
import math
import statistics
import sys

from scipy.special import stdtrit


def sha1(text):
    return hashlib.sha1(text.encode()).hexdigest()


def read(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rt") as file:
        return file.read()


def sample(source, count, target):
    header, *rows = read(source).rstrip("\n").split("\n")
    with open(target, "w") as file:
        for row in [header, *sorted(rows, key=sha1)[: int(count)]]:
            print(row, file=file)


def articles(source, count, train, dev):
    found = json.loads(read(source))
    ordered = sorted(found["data"], key=lambda article: sha1(article["title"]))
    parts = {train: ordered[: int(count)], dev: ordered[int(count) :]}
    for path, part in parts.items():
        with open(path, "w") as file:
            json.dump(found | {"data": part}, file)


def differ(ours, theirs):
    last = [json.loads(read(path))["runs"] for path in (ours, theirs)]
    known = "step", "seed", "lr", "valid", "skipped", "tokens"
    for metric in [k for k in last[0][0] if k not in known and k in last[1][0]]:
        a, b = ([row[metric] for row in rows] for rows in last)
        told = (
            f"{statistics.median(x):.3f}, {statistics.stdev(x):.3f}" for x in (a, b)
        )
        between, half = welch(a, b)
        print(f"{metric}: {' | '.join(told)} | {between:.3f} ± {half:.3f}")


def welch(a, b, level=0.95):
    """Return the difference of the means and half the width of its interval."""
    shares = [statistics.variance(x) / len(x) for x in (a, b)]
    error = sum(shares)
    between = statistics.fmean(a) - statistics.fmean(b)
    if not error:
        return between, 0.0
    freedom = error**2 / sum(
        s**2 / (len(x) - 1) for s, x in zip(shares, (a, b), strict=True)
    )
    return between, math.sqrt(error) * stdtrit(freedom, (1 + level) / 2)


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    {"sample": sample, "articles": articles, "differ": differ}[what](*given)
