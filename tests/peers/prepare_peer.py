# SPDX-License-Identifier: Apache-2.0
"""Compare speed and memory of prepare with the tokenizers library alone.

    python tests/peers/prepare_peer.py VOCAB.TXT TEXT... [--repeat=N] [--skip-peer]

The peer is BertWordPieceTokenizer.encode_batch with all its threads, on sentences that
are already split and in its memory; its time has no reading, splitting or storing. For
bertjax the whole of prepare is timed, from the files to the synced store, on the same
sentences, one per line ("presplit"), and on the original text ("text"). Memory is the
sum of PSS over all processes of bertjax, sampled twice a second. Prints a JSON line.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OURS = """
import json, sys
from bertjax.data.token_store.prepare_data import prepare_data
if __name__ == "__main__":
    given = dict(valid="", tokenizer_kind="unigram", vocab_size=0, lower_case=None)
    prepare_data(**given, **json.loads(sys.argv[1]), say=lambda line: None)
"""
PEER = """
import sys, time
from tokenizers import BertWordPieceTokenizer
sentences = open(sys.argv[2], encoding="utf-8").read().split("\\n")
sentences = [s for s in sentences if s]
tokenizer = BertWordPieceTokenizer(sys.argv[1])
tokenizer.encode_batch(sentences[:1000], add_special_tokens=False)
started = time.perf_counter()
tokens = 0
for at in range(0, len(sentences), 100_000):
    batch = sentences[at : at + 100_000]
    found = tokenizer.encode_batch(batch, add_special_tokens=False)
    tokens += sum(len(e.ids) for e in found)
print(time.perf_counter() - started, tokens)
"""


def pss(process: int) -> int:
    """Return the memory (PSS, bytes) of a process and all its descendants."""
    total, todo = 0, [process]
    while todo:
        pid = todo.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(rollup.split("\nPss:")[1].split()[0]) << 10
            for task in os.listdir(f"/proc/{pid}/task"):
                below = Path(f"/proc/{pid}/task/{task}/children").read_text()
                todo += map(int, below.split())
        except (OSError, IndexError):
            continue
    return total


def ours(given: dict[str, str], script: Path) -> tuple[float, int]:
    """Run prepare in a new process; return (seconds, peak bytes)."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, script, json.dumps(given)])
    peak = 0
    while process.poll() is None:
        peak = max(peak, pss(process.pid))
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.perf_counter() - started, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vocab")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--repeat", type=int, default=1, help="the text, so often")
    parser.add_argument("--skip-peer", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()

    from bertjax.data.corpus.sentences import split_sentences

    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "ours.py").write_text(OURS)
        (here / "peer.py").write_text(PEER)
        with (
            open(here / "text.txt", "w", encoding="utf-8") as text,
            open(here / "presplit.txt", "w", encoding="utf-8") as presplit,
        ):
            for name in args.texts * args.repeat:
                opened = gzip.open if name.endswith(".gz") else open
                with opened(name, "rt", encoding="utf-8") as file:
                    for line in file:
                        text.write(line)
                        if not args.skip_peer:
                            presplit.write("\n".join(split_sentences(line)) + "\n")
                text.write("\n")
        size = os.path.getsize(here / "text.txt") / 1e6
        told: dict[str, float] = {"MB": round(size, 1), "cores": os.cpu_count() or 0}
        whats = ["text"] if args.skip_peer else ["text", "presplit"]
        seconds: dict[str, list[float]] = {}
        for number in range(args.rounds):
            for what in whats:
                given = {
                    "train": str(here / f"{what}.txt"),
                    "vocab": args.vocab,
                    "cache": str(here / f"{what}{number}"),
                }
                spent, peak = ours(given, here / "ours.py")
                seconds.setdefault(what, []).append(spent)
                key = f"{what}_peak_MB"
                told[key] = max(told.get(key, 0), round(peak / 1e6))
            if not args.skip_peer:
                command = [sys.executable, here / "peer.py", args.vocab]
                command += [str(here / "presplit.txt")]
                alone = subprocess.run(command, capture_output=True, check=True)
                seconds.setdefault("peer", []).append(float(alone.stdout.split()[0]))
        best = {what: min(spent) for what, spent in seconds.items()}
        told |= {f"{what}_seconds": round(s, 1) for what, s in best.items()}
        if "peer" in best:
            told |= {f"{w}_ratio": round(best["peer"] / best[w], 3) for w in whats}
        print(json.dumps(told))


if __name__ == "__main__":
    main()
