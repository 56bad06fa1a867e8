# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from conftest import succeeded

from bertjax import UserError, benchmark
from bertjax.assembly import command_line
from bertjax.measuring import (
    alternate,
    measurements,
    results,
    synthetic_data,
)

CONTRACT = {
    "tokens_per_second",
    "step_ms",
    "compile_seconds",
    "peak_rss_mb",
    "flops_per_token",
}
SMOKE = ["--config=bert.py:smoke", "--config.data.train=", "--json", "--rounds=2"]
SMOKE.append("--config.model.num_hidden_layers=1")  # compiles faster

# A peer that reports made-up times instead of computing.
PEER = """
import json, sys
shape = json.loads(sys.argv[1])
speak = lambda reply: print(json.dumps(reply), flush=True)
print("libraries may say things here")
late = "--late" in sys.argv[2:]
speak({"tokens": shape["batch_size"] * shape["length"], "compile_seconds": 0.5 + late})
for line in sys.stdin:
    speak({"seconds": {"masking": 1000.0 * int(line)}, "peak_rss_mb": 1e6})
"""


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(results, "ROUND_SECONDS", 0.02)


@pytest.fixture
def cores():
    """Restore this process's cores, which a comparison changes."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def run(capsys, *argv):
    assert benchmark.main([*SMOKE, *argv]) == 0
    return json.loads(capsys.readouterr().out)


def config_of(*argv):
    return command_line.parse([*SMOKE, *argv], benchmark.FLAGS).config


def test_step_needs_no_data(capsys):
    found = run(capsys, "--what=step", "--config.model.vocab_size=4000")
    assert CONTRACT <= found.keys()
    assert found["step_ms_min"] <= found["step_ms"] <= found["step_ms_max"]
    per_step = 8 * 64 / found["tokens_per_second"]
    assert per_step == pytest.approx(found["step_ms"] / 1e3)
    assert found["parameters"] > 750_000  # 512,000 of them: the word table
    assert found["step_flops"] == 8 * 64 * found["flops_per_token"]
    assert found["dtype"] == "float32" and found["temporary_mb"] > 0
    assert found["attention"] == "xla"
    # Parameters and two moments are split over the devices.
    held = found["arguments_mb"] * found["devices"]
    assert held > 12e-6 * found["parameters"]
    device = found["tokens_per_second"] / found["devices"]
    assert found["tokens_per_second_per_device"] == pytest.approx(device)


def test_input_counts_masking_apart(capsys):
    found = run(capsys, "--what=input")
    assert CONTRACT <= found.keys()
    for name, of in (("step_ms", ""), ("masking_ms", "masking_")):
        speed = found[f"{of}tokens_per_second"]
        assert speed == pytest.approx(8 * 64 / (found[name] / 1e3))


@pytest.mark.slow  # compiles two steps
def test_packing_counts_real_tokens(capsys, corpus, vocabulary, tmp_path):
    found = run(
        capsys,
        "--what=packing",
        f"--config.data.train={corpus / 'train.txt'}",
        f"--config.data.vocab={vocabulary}",
        f"--config.data.cache={tmp_path}",
        "--config.data.length=128",
    )
    assert CONTRACT <= found.keys()
    assert 0.5 < found["fill_padded"] < found["fill"] <= 1
    gain = found["fill"] / found["fill_padded"]
    assert found["ratio_min"] <= found["ratio"] <= found["ratio_max"]
    assert found["ratio_min"] < gain * found["padded_ms"] / found["step_ms_min"] * 1.01
    with pytest.raises(UserError, match=r"data\.train is empty"):
        benchmark.main([*SMOKE, "--what=packing"])


@pytest.mark.parametrize("plan", ["full_sentences", "document"])
def test_plans_of_made_up_lengths(capsys, plan):
    found = run(
        capsys,
        "--what=plan",
        "--sequences=20000",
        f"--config.data.plan={plan}",
        "--config.data.packed=True",
        "--config.objective=mlm",
    )
    assert 0.5 * 20_000 < found["sequences"] < 3 * 20_000
    assert found["rows"] <= found["sequences"]


def test_fill_mask_has_two_lengths(capsys):
    found = run(capsys, "--what=fill_mask", "--config.model.vocab_size=300")
    assert CONTRACT <= found.keys()
    assert found["latency_32_ms"] > 0
    assert found["latency_128_ms"] == pytest.approx(found["step_ms"])


def test_the_file_of_a_peer(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    assert alternate.split("~/peer.py --a='b c'") == ["/h/peer.py", "--a=b c"]


def test_a_peer_takes_turns(capsys, tmp_path, cores):
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    found = run(capsys, "--what=input", f"--peer={peer} --late")
    assert found["peer"]["compile_seconds"] == 1.5
    assert found["peer"]["step_ms"] == 1e6  # so slow that a round is one step
    assert found["ratio_min"] <= found["ratio"] <= found["ratio_max"]
    assert found["ratio"] > 1000
    assert found["peak_rss_ratio"] < 1
    assert found["first_step_ratio"] > 1


def test_peers_that_fail(tmp_path, cores):
    with pytest.raises(UserError, match="no such file"):
        benchmark.main([*SMOKE, f"--peer={tmp_path / 'none.py'}"])
    peer = tmp_path / "peer.py"
    peer.write_text("raise SystemExit(3)")
    with pytest.raises(UserError, match="status 3"):
        benchmark.main([*SMOKE, "--what=input", f"--peer={peer}"])
    peer.write_text(f"{PEER}    raise SystemExit(4)")  # after its first answer
    with pytest.raises(UserError, match="status 4"):
        benchmark.main([*SMOKE, "--what=input", f"--peer={peer}"])


def test_sequences_are_of_plans():
    with pytest.raises(UserError, match="--sequences needs --what=plan, and this is"):
        benchmark.main([*SMOKE, "--what=step", "--sequences=9"])


def test_unknown_what():
    with pytest.raises(UserError, match=r"--what.*step"):
        benchmark.main([*SMOKE, "--what=stepp"])


def made_up(config, needs=frozenset({"mlm", "nsp"})):
    """Make a synthetic batch from a vocabulary of 100 pieces."""
    objective = types.SimpleNamespace(needs=needs, labels=lambda rows, length: {})
    shape = synthetic_data.Shape(config.batch_size, config.data.length, (None,))
    return synthetic_data.synthetic_batch(config, objective, shape, 100)


def test_a_vocabulary_without_text_is_counted(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    config = config_of(f"--config.data.vocab={tmp_path}/vocab.txt")
    assert synthetic_data.expected_vocab_size(config) == len(pieces)
    config.data.extra_ids = 3
    assert synthetic_data.expected_vocab_size(config) == len(pieces) + 3
    config.data.vocab = f"{tmp_path}/nosuch.txt"
    with pytest.raises(UserError, match="no such file"):
        synthetic_data.expected_vocab_size(config)


@pytest.mark.slow
def test_made_up_vocabularies_have_the_size_that_a_run_would_have():
    size = "--config.model.hidden_size=64"
    config = config_of("--config.data.vocab_size=700", size)
    assert synthetic_data.expected_vocab_size(config) == 700
    parameters = measurements.measure_step(config).facts["parameters"]
    config.model.vocab_size = 800
    assert synthetic_data.expected_vocab_size(config) == 800
    more = measurements.measure_step(config).facts["parameters"] - parameters
    assert more == 100 * (config.model.hidden_size + 1)  # per piece a row and a bias


def test_synthetic_batch_fits_the_objective():
    config = config_of()
    batch = made_up(config)
    ids, at = batch["input_ids"], batch["mlm_positions"]
    assert ids.shape == (8, 64) and at.shape == (8, 10)
    assert ids.max() < 100 and (batch["attention_mask"] == 1).all()
    assert (batch["mlm_weights"] == 1).all() and batch["mlm_ids"].min() >= 5
    assert all(np.diff(row).min() > 0 for row in at)
    assert 0 < batch["nsp_labels"].sum() < 8


@pytest.mark.parametrize("most, n", [(None, 4), (3, 3), (1, 1)])
def test_synthetic_packed_rows(most, n):
    config = config_of("--config.data.packed=True", "--config.objective=mlm+sop")
    config.data.max_segments = most
    batch = made_up(config, frozenset({"mlm", "sop"}))
    slots = most or 4
    assert batch["cls_positions"].shape == batch["sop_labels"].shape == (8, slots)
    real = batch["attention_mask"][0] > 0
    segments, positions = batch["segment_ids"][0][real], batch["position_ids"][0][real]
    assert segments.min() == 1 and segments.max() == n
    starts = np.flatnonzero(np.diff(segments, prepend=0))
    assert batch["cls_weights"][0].sum() == n
    assert batch["cls_positions"][0, :n].tolist() == starts.tolist()
    assert (positions[starts] == 0).all() and positions.max() < 64 // n + 2
    assert batch["attention_mask"].mean() >= 1 - n / 64


def test_of_phases_the_longest_is_measured():
    config = config_of()
    assert synthetic_data.one_phase(config) is config
    config.phases = "percent=90 length=32 batch_size=16; length=64 mask_rate=0.3"
    one = synthetic_data.one_phase(config)
    assert (one.batch_size, one.data.length, one.data.mask_rate) == (8, 64, 0.3)
    assert not one.phases and config.phases and one.objective == config.objective
    config.phases = "percent=90 objective=clm; length=32"
    assert synthetic_data.one_phase(config).objective == "clm"


@pytest.mark.slow  # compiles a step for each case
@pytest.mark.parametrize(
    "given, rows, segments",
    [
        (("--config.data.packed=True",), (8, 64), True),
        (("--config.phases=percent=9 length=32; length=16 batch_size=16",), (8, 32), 0),
        (("--config=finetune/choose.py:smoke", "--config.task.choices=a,b,c"),
         (8, 3, 128), 0),
    ],
)  # fmt: skip
def test_steps_of_other_rows(capsys, monkeypatch, given, rows, segments):
    seen, real = [], measurements.compile_step

    def watch(config, batches, vocab_size):
        seen.extend(batches)
        return real(config, batches, vocab_size)

    monkeypatch.setattr(measurements, "compile_step", watch)
    found = run(capsys, "--what=step", *given)
    assert seen[0]["input_ids"].shape == rows
    assert ("segment_ids" in seen[0]) == bool(segments)
    per_step = np.prod(rows) / found["tokens_per_second"]
    assert per_step == pytest.approx(found["step_ms"] / 1e3)


def test_pacer_counts_steady_steps(monkeypatch, capsys):
    """SETTLE rows after a pause do not count; `wait` is the mean over the others."""
    clock = iter([0.0, 1.0, 2.0, 10.0, 12.0, 15.0])
    monkeypatch.setattr(alternate.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n1\n"))
    paced = alternate.Pacer(None, 0)
    monkeypatch.setattr(paced, "rest", lambda: None)
    monkeypatch.setattr(alternate.Pacer, "facts", {"tokens": 1}, raising=False)
    for step in range(1, 7):
        paced.write({"step": step, "data/wait_seconds": 0.1 * step})
    ready, reply = map(json.loads, capsys.readouterr().out.splitlines())
    assert ready == {"tokens": 1}
    assert reply["seconds"]["step"] == pytest.approx((15 - 10) / 2)
    assert reply["seconds"]["wait"] == pytest.approx(0.55)


def test_importing_bertjax_loads_nothing_heavy():
    code = "import sys, bertjax; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    for name in ("jax", "flax", "numpy", "tensorflow", "optax", "absl"):
        assert f"'{name}'" not in done.stdout


@pytest.mark.slow  # trains
def test_the_loop_is_that_of_train(command, corpus, vocabulary):
    files = [f"data.train={corpus / 'train.txt'}", f"data.vocab={vocabulary}"]
    given = ["--what=loop", *(f"--config.{file}" for file in files)]
    found = json.loads(succeeded(command("benchmark", *SMOKE, *given)).stdout)
    assert CONTRACT | {"ratio"} <= found.keys()
