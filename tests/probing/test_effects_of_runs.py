# SPDX-License-Identifier: Apache-2.0
"""CausaLM from text to effect, on templates with a known causal model.

A text has a quality c (the treated concept), a manner z (the control) and words without
meaning. In the pretraining texts c and z are independent; in the labeled texts c
correlates with z, and P(y | c, z) = 0.15 + 0.3 c + 0.4 z.
"""

import json

import numpy as np
import pytest

import bertjax
from bertjax import config, probe

QUALITY = [["dull", "grey", "pale"], ["bright", "vivid", "keen"]]
MANNER = [["slowly", "late"], ["soon", "fast"]]
REST = [f"w{i}" for i in range(40)]
EFFECT, BY_MANNER = 0.3, 0.4
LIKELY = 0.8  # P(c = z) in the labeled texts


def write_text(rng, c, z):
    words = [
        *rng.choice(REST, 6),
        *rng.choice(QUALITY[c], 2),
        *rng.choice(MANNER[z], 2),
    ]
    return " ".join(rng.permutation(words))


def write_rows(path, rng, n):
    """Write n texts with exact shares, so that effects have no sampling error."""
    lines = ["text\ty\tc\tz"]
    for c, z in np.ndindex(2, 2):
        size = round(n / 2 * (LIKELY if c == z else 1 - LIKELY))
        positive = round(size * (0.15 + EFFECT * c + BY_MANNER * z))
        lines += [
            f"{write_text(rng, c, z)}\t{int(i < positive)}\t{c}\t{z}"
            for i in range(size)
        ]
    path.write_text("\n".join(lines) + "\n")


def train(folder, name, objective, b1=0.9):
    made = config.make_smoke(config.load_config("bert.py:tiny"))
    made.objective = objective
    data, model = made.data, made.model
    data.train, data.valid = str(folder / "text.txt"), ""
    data.vocab, data.cache = str(folder / "vocab.txt"), str(folder / "cache")
    data.plan, data.length = "document", 16
    data.concept = "words:" + ",".join(QUALITY[1])
    data.control = "words:" + ",".join(MANNER[1])
    model.hidden_size, model.num_attention_heads, model.intermediate_size = 32, 2, 64
    model.hidden_dropout_prob = model.attention_probs_dropout_prob = 0.0
    made.batch_size, made.total = 64, config.duration(steps=800)
    made.optim.lr, made.optim.warmup = 2e-3, config.duration(steps=30)
    made.optim.b1 = b1
    # The head that predicts the concept must not train more slowly than the encoder.
    made.optim.rates = "heads:5"
    made.log.every = made.checkpoint.every = config.duration(steps=800)
    return bertjax.fit(made, folder / name)


@pytest.mark.slow  # two runs, half a minute of processor time in all
def test_the_known_effect_is_found(tmp_path, capsys):
    rng = np.random.default_rng(0)
    texts = (write_text(rng, rng.integers(2), rng.integers(2)) for _ in range(3000))
    (tmp_path / "text.txt").write_text("\n\n".join(texts) + "\n")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [*REST, *(w for pair in (*QUALITY, *MANNER) for w in pair)]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    pairs = "\n".join(map(" ".join, zip(*QUALITY, strict=True)))
    (tmp_path / "pairs.txt").write_text(pairs)
    write_rows(tmp_path / "train.tsv", rng, 6000)
    write_rows(tmp_path / "valid.tsv", rng, 3000)
    train(tmp_path, "factual", "mlm")
    heads = "concept:of=texts,gamma=3+control:of=texts,weight=0.3"
    train(tmp_path, "treated", f"mlm+{heads}", b1=0.5)
    capsys.readouterr()
    given = {"model": "factual", "treated": "treated", "swap": "pairs.txt"}
    given |= {"train": "train.tsv", "valid": "valid.tsv"}
    flags = [f"--{name}={tmp_path / file}" for name, file in given.items()]
    flags += ["--text=text", "--label=y", "--concept=c", "--control=z"]
    assert probe.main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    concept, control = found["probes"]["concept"], found["probes"]["control"]
    # The treated model predicts the concept no better than the control does.
    assert concept["factual"]["value"] > 0.99
    assert concept["by_control"] == pytest.approx(LIKELY)
    assert concept["treated"]["value"] < LIKELY + 0.03
    assert control["factual"]["value"] > 0.98 and control["treated"]["value"] > 0.98
    # The classifier's true effect, from its answers to counterfactual texts.
    gap = found["swap_gap"]
    known = gap["factual_effect"]["1"]["value"]
    assert known == pytest.approx(EFFECT, rel=0.2)
    assert gap["treated"]["value"] < 0.25 * gap["factual"]["value"]
    treate = EFFECT * 2 * LIKELY * (1 - LIKELY)
    assert found["treate"]["value"] == pytest.approx(treate, rel=0.1)
    assert found["effect"]["1"]["value"] == pytest.approx(known, rel=0.1)
    # The conditional expectation includes the control's effect.
    conexp = found["conexp"]["1"]
    assert conexp["value"] - conexp["ci95"] > 1.4 * known
    assert probe.main(flags) == 0
    told = capsys.readouterr().out
    assert "TReATE" in told and "1 against 0:" in told and "by_control 0.800" in told
