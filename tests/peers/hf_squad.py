# SPDX-License-Identifier: Apache-2.0
"""Time how bertjax and transformers' recipe make rows of SQuAD's questions, in turns.

taskset -c 0 python tests/peers/hf_squad.py --data=FILE.json --vocab=DIR \
    [--rounds=5] [--length=384] [--stride=128]

Both make the rows and the labels of all questions of the file, from its parsed JSON to
arrays in memory, with one thread. The peer is run_qa.py's prepare_train_features (the
fast tokenizer with return_overflowing_tokens, stride and offsets, padding to the
length) in calls of 1,000 questions, as datasets.map makes them, but without its files.
transformers' stride is the overlap of rows; it is chosen so that rows begin as far
apart as bertjax's. Prints how many rows, and rows with their labels, both have in
common, the CPU seconds of each round (other processes may use the core) and the ratio
of the medians. Needs transformers and bertjax in the same environment.
"""

import json
import os
import statistics
import sys
import time

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}

import numpy as np
import transformers as hf
from absl import flags

from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.tasks import squad_files, tables
from bertjax.tasks.task_rows import Form, Limits

CALL = 1000


def theirs(tokenizer, examples, length, overlap):
    """Return the arrays of run_qa.py's prepare_train_features, for all examples."""
    found = {"input_ids": [], "token_type_ids": [], "start": [], "end": []}
    for at in range(0, len(examples), CALL):
        some = examples[at : at + CALL]
        made = tokenizer(
            [e["question"].lstrip() for e in some],
            [e["context"] for e in some],
            truncation="only_second",
            max_length=length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )
        samples = made.pop("overflow_to_sample_mapping")
        for i, offsets in enumerate(made.pop("offset_mapping")):
            ids, sequence = made["input_ids"][i], made.sequence_ids(i)
            cls = ids.index(tokenizer.cls_token_id)
            answers = some[samples[i]]["answers"]
            begin, end = cls, cls
            if answers:
                first = answers[0]["answer_start"]
                last = first + len(answers[0]["text"])
                low = 0
                while sequence[low] != 1:
                    low += 1
                high = len(ids) - 1
                while sequence[high] != 1:
                    high -= 1
                if offsets[low][0] <= first and offsets[high][1] >= last:
                    while low < len(offsets) and offsets[low][0] <= first:
                        low += 1
                    while offsets[high][1] >= last:
                        high -= 1
                    begin, end = low - 1, high + 1
            found["start"].append(begin)
            found["end"].append(end)
        found["input_ids"] += made["input_ids"]
        found["token_type_ids"] += made["token_type_ids"]
    return {name: np.array(values, np.int32) for name, values in found.items()}


def ours(tokenizer, data, length, stride):
    """Return the arrays of all rows, made by bertjax CALL rows at a time."""
    asked = squad_files.questions_of(data, "the file")
    form = Form(("question",), "answers", (), 1, (), Limits(stride))
    windows = squad_files.featurize(asked, tokenizer, length, form)
    n = len(windows.question)
    parts = [
        windows.gather(np.arange(a, min(a + CALL, n)), length, tokenizer)
        for a in range(0, n, CALL)
    ]
    return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}


def main():
    flags.DEFINE_string("data", None, "a file of SQuAD's form", required=True)
    flags.DEFINE_string("vocab", None, "a folder with vocab.txt", required=True)
    flags.DEFINE_integer("rounds", 5, "")
    flags.DEFINE_integer("length", 384, "")
    flags.DEFINE_integer("stride", 128, "pieces from one row to the next")
    values = flags.FLAGS
    values(sys.argv)
    data = json.loads(tables.read_text(values.data))
    examples = [
        {**qa, "context": paragraph["context"]}
        for article in data["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]
    mine = load_tokenizer(values.vocab)
    other = hf.BertTokenizerFast(f"{values.vocab}/vocab.txt")
    length, seconds = values.length, {"ours": [], "transformers": []}

    def run(name):
        begun = time.process_time()
        if name == "ours":
            made = ours(mine, data, length, values.stride)
        else:
            # A row has space for length - 3 tokens (three are special) less the
            # question. transformers has one overlap for all rows: here the overlap
            # that is right for the median question.
            made = theirs(other, examples, length, overlap)
        seconds[name].append(time.process_time() - begun)
        return made

    sizes = [len(other.tokenize(e["question"])) for e in examples[:CALL]]
    overlap = length - 3 - int(statistics.median(sizes)) - values.stride
    one, two = run("ours"), run("transformers")  # warm up
    keys = {
        "input_ids": "input_ids",
        "start": "start_positions",
        "end": "end_positions",
    }
    two = {keys.get(name, name): values for name, values in two.items()}
    for what, names in ("rows", ["input_ids"]), ("rows with labels", keys.values()):
        a, b = (
            {*zip(*([x.tobytes() for x in made[n]] for n in names), strict=True)}
            for made in (one, two)
        )
        print(f"{what}: {len(a & b):,} in both, {len(a - b):,} in ours alone")
    for of in seconds.values():
        of.clear()
    for i in range(values.rounds):
        for name in [*seconds][:: 1 - 2 * (i % 2)]:
            made = run(name)
            rows = len(made["input_ids"])
            print(f"round {i}: {name} {seconds[name][-1]:.3f} s, {rows:,} rows")
    told = {name: statistics.median(of) for name, of in seconds.items()}
    ratios = [
        b / a for a, b in zip(seconds["ours"], seconds["transformers"], strict=True)
    ]
    print(
        f"{len(examples):,} questions, {values.rounds} rounds in turns: ours CPU "
        f"{told['ours']:.3f} s, transformers {hf.__version__} "
        f"{told['transformers']:.3f} s: {told['transformers'] / told['ours']:.2f} "
        f"times as long (rounds {min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
