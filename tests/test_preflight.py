# SPDX-License-Identifier: Apache-2.0
"""preflight with the real TPU compiler (skipped where libtpu is absent) and without."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, refused

from bertjax import UserError, preflight
from bertjax.measuring import table

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is absent: pip install libtpu",
)
CONTRACT = {
    "topology",
    "devices",
    "fits",
    "hbm_gib",
    "hbm_gib_available",
    "estimated_step_ms",
    "estimated_tokens_per_second_per_chip",
    "estimated_mfu",
    "collectives",
    "largest_batch_per_device",
}
# As small as it gets: what takes time is the number of operations, not their size.
SMALL = [
    "--config=bert.py:tiny",
    "--config.objective=mlm",
    "--config.data.plan=full_sentences",
    "--config.model.num_hidden_layers=1",
    "--config.data.length=128",
]


@pytest.fixture
def run(command, tmp_path_factory):
    """Run preflight; what was compiled is kept for the session."""
    cache = tmp_path_factory.getbasetemp() / "tpu_programs"

    def go(*arguments, env=None):
        given = [*arguments, f"--config.data.cache={cache}"]
        return command("preflight", *given, env={"XLA_FLAGS": "", **(env or {})})

    return go


def read(result):
    """Return the one JSON object on stdout."""
    assert "Traceback" not in result.stderr, result.stderr[-4000:]
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_refusals_in_one_line(run):
    refused(run(*SMALL, "--topology=v5e-8"), "--topology=v5e-8", "v5e:2x4")
    refused(run("--config=bert.py:no_such_size"), "no_such_size")


def test_absent_compiler_in_one_line(run, tmp_path):
    # A module of this name that cannot be found shadows the installed one.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "f = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'libtpu' else f(n, *a)\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    refused(run(*SMALL, "--topology=v5e:2x4", env=env), "pip install libtpu")


@needs_libtpu
@pytest.mark.slow  # starts the compiler twice
def test_slices_that_do_not_exist_or_do_not_divide(run):
    refused(run(*SMALL, "--topology=v5e:3x3"), "v5e:3x3", "2x2 2x4 4x4")
    said = run(*SMALL, "--topology=v5e:2x4", "--config.batch_size=12")
    refused(said, "batch_size=12", "8")


@needs_libtpu
@pytest.mark.slow  # starts the compiler
def test_a_state_that_is_too_large_needs_no_compilation(run):
    result = run(
        "--config=bert.py:base",
        "--topology=v5e:2x2",
        "--json",
        "--config.model.hidden_size=16384",
        "--config.model.num_attention_heads=128",
        "--config.model.num_hidden_layers=4",
    )
    found = read(result)
    assert result.returncode == 2 and found["fits"] is False
    assert found.keys() >= CONTRACT and found["hbm_gib"] > found["hbm_gib_available"]
    assert "nothing is compiled" in result.stderr


@needs_libtpu
@pytest.mark.slow  # compiles, about a minute on two cores
def test_a_small_config_fits(run):
    result = run(*SMALL, "--topology=v5e:2x4", "--json", "--config.batch_size=64")
    found = read(result)
    assert result.returncode == 0 and found["fits"] is True
    assert found.keys() >= CONTRACT and found["devices"] == found["chips"] == 8
    assert 0 < found["hbm_gib"] < found["hbm_gib_available"] == 15.75
    assert 0 < found["estimated_mfu"] < 1 and found["estimated_step_ms"] > 0
    assert found["largest_batch_per_device"] > 8
    assert found["eval_fits"] and found["eval_hbm_gib"] < found["hbm_gib"]
    parts = sum(found["hbm_parts_gib"].values())
    assert parts == pytest.approx(found["hbm_gib"], rel=0.02)
    # Parameters are gathered in bf16 and gradients summed in bf16 or f32, once a step;
    # those of the word table twice, where it is looked up and where it is compared.
    whole = 8 * found["hbm_parts_gib"]["parameters"] * 2**30
    moved = sum(kind["bytes"] for kind in found["collectives"].values())
    assert (0.5 + 0.5) * whole < moved < (0.5 + 2) * whole
    # Without --json the same, for people, out of the cache.
    said = run(*SMALL, "--topology=v5e:2x4", "--config.batch_size=64")
    assert said.stdout.splitlines()[-1].startswith("fits: 64 rows of 128 tokens")
    assert "ESTIMATED" in said.stdout and "data.train is empty" in said.stdout


@needs_libtpu
@pytest.mark.slow  # four compilations that end early, about 40 seconds
def test_memory_alone_is_quick(run):
    """Beside the whole compilation: as much memory, but for the program's own."""
    arguments = [*SMALL, "--topology=v5e:2x4", "--json", "--config.batch_size=64"]
    quick = read(run(*arguments, "--quick"))
    assert quick["fits"] and quick["estimated_step_ms"] is None
    whole = read(run(*arguments))
    needed = whole["hbm_gib"] - whole["hbm_parts_gib"]["program"]
    assert quick["hbm_gib"] == pytest.approx(needed, rel=0.02)
    assert quick["largest_batch_per_device"] == whole["largest_batch_per_device"]


@needs_libtpu
@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_its_compilation(number, environment, tmp_path):
    """One line without the compiler's stack; nothing is left to run or on the disk."""
    given = [*SMALL, "--topology=v5e:2x4", f"--config.data.cache={tmp_path / 'kept'}"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "bertjax.preflight", *given],
        env=environment | {"TMPDIR": str(scratch), "XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not list(scratch.glob("tmp*/*")):  # the compiler has begun to write
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    if number == signal.SIGINT:  # as a terminal does
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == {signal.SIGKILL: -9}.get(number, 128 + number)
    if number != signal.SIGKILL:
        assert said.splitlines()[1:] == [f"stopped by {number.name}"], said
    while list(scratch.iterdir()) or in_session(process.pid):
        assert time.monotonic() < until
        time.sleep(0.1)


def in_session(number):
    """List the processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            found += [folder] if os.getsid(int(folder.name)) == number else []
    return found


@needs_libtpu
@pytest.mark.slow
def test_a_batch_that_does_not_fit(run):
    arguments = [*SMALL, "--topology=v5e:2x2", "--config.batch_size=1048576", "--json"]
    result = run(*arguments)
    found = read(result)
    assert result.returncode == 2 and found["fits"] is False
    assert found["estimated_step_ms"] is None and found["accumulate_to_fit"] > 1
    assert 0 < found["largest_batch_per_device"] < 2**18


@needs_libtpu
@pytest.mark.slow  # three compilations of a minute each
def test_a_step_takes_time_and_memory_by_its_rows(run):
    """Step time is a straight line in the rows, R^2 >= 0.99 by the estimate.

    Of a base model: what a tiny one keeps lies in vector memory as long as there is
    room, so that its line has a bend.
    """
    import numpy as np

    rows = np.array([8, 16, 32])
    base = ["--config=bert.py:base", "--config.objective=mlm"]
    base += ["--config.model.unroll=1", "--topology=v5e:2x4", "--json"]
    found = [read(run(*base, f"--config.batch_size={8 * n}")) for n in rows]
    for key in ("estimated_step_ms", "hbm_gib"):
        values = np.array([f[key] for f in found])
        line = np.polyval(np.polyfit(rows, values, 1), rows)
        left = ((values - line) ** 2).sum() / ((values - values.mean()) ** 2).sum()
        assert 1 - left >= 0.99, (key, values)


@pytest.mark.parametrize("name", ["bert.py:base", "bert.py:large", "roberta.py:base"])
def test_state_falls_with_fsdp(name, tmp_path):
    """Parameters and moments of a device fall as 1 / mesh.fsdp, by the shardings.

    What is not split (norms, biases) is less than a hundredth.
    """
    from jax.sharding import AbstractMesh

    from bertjax import config as c
    from bertjax import updates
    from bertjax.measuring.compiled import TOTAL, WARMUP, shard_bytes
    from bertjax.objectives.base import make_objective

    config = c.parse([f"--config={name}"]).config
    cfg = c.encoder_config(config, config.data.vocab_size, backend="tpu")
    objective, _ = make_objective(config.objective, cfg)
    whole = None
    for n in (1, 4, 16, 64, 256):
        mesh = AbstractMesh((1, n, 1), ("data", "fsdp", "tensor"))
        update = updates.make_update(config, objective, mesh, WARMUP, TOTAL)
        for part in ("params", "opt_state"):
            size = shard_bytes(
                getattr(update.shapes, part), getattr(update.shardings, part)
            )
            whole = {**(whole or {}), part: (whole or {}).get(part, size)}
            ideal = whole[part] / n
            assert ideal <= size * 1.0001 and size <= ideal + 0.01 * whole[part]


def test_every_shipped_config_has_a_slice():
    folder = ROOT / "configs"
    files = {p for p in folder.rglob("*.py") if p.name != "__init__.py"}
    names = {p.relative_to(folder).as_posix() for p in files}
    assert {name.split(":")[0] for name in table.FITS} == names
    assert table.FLAGS.keys() | table.MULTISLICE.keys() <= table.FITS.keys()


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", table.FITS)
def test_every_shipped_config_fits_somewhere(name, command):
    """What was compiled before is looked up in the user's own cache."""
    config = table.shipped(name)
    arguments = [f"--config={name}", f"--topology={table.FITS[name]}", "--json"]
    arguments += table.FLAGS.get(name, ())
    arguments += ["--quick", "--config.data.train=", "--config.data.valid="]
    found = read(command("preflight", *arguments, env={"XLA_FLAGS": ""}))
    if not found["fits"]:
        arguments += [f"--config.accumulate={found['accumulate_to_fit']}"]
        found = read(command("preflight", *arguments, env={"XLA_FLAGS": ""}))
    assert found["fits"], found
    assert found["batch_size"] == config.batch_size


# preflight --quick without the search for the largest batch.
QUICK = """
import json, sys
from bertjax.measuring import topologies
topologies.prepare()
from bertjax import config, preflight
topology, *flags = sys.argv[1:]
made = config.parse(flags).config
say = lambda text: print(text, file=sys.stderr)
print(json.dumps(preflight.preflight(made, topology, say, quick=True, search=False)))
"""


@pytest.fixture
def estimate(environment, tmp_path_factory):
    """Estimate the memory of a config: dict."""
    cache = tmp_path_factory.getbasetemp() / "tpu_programs"

    def go(topology, *flags):
        given = [*flags, f"--config.data.cache={cache}"]
        done = subprocess.run(
            [sys.executable, "-c", QUICK, topology, *given],
            env=environment | {"XLA_FLAGS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        return read(done)

    return go


@needs_libtpu
@pytest.mark.slow  # two compilations that end early, as each of the next
def test_two_slices(estimate):
    found = estimate("2xv5e:2x4", *SMALL, "--config.batch_size=64")
    assert found["fits"] and found["devices"] == 16 and found["hosts"] == 4
    assert found["rows_per_device"] == 4


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("bert.py:large", "batch_size=256", "data.length=512"),
        ("bert.py:base", "batch_size=8", "data.length=8192", "objective=mlm",
         "model.family=modernbert", "data.plan=full_sentences"),
    ],
)  # fmt: skip
def test_long_rows_fit_eight_small_chips(estimate, flags):
    """bert-large, 32 rows of 512 a chip; ModernBERT, a row of 8,192."""
    name, *rest = flags
    given = [f"--config={name}", *(f"--config.{flag}" for flag in rest)]
    assert estimate("v5e:2x4", *given)["fits"]


@needs_libtpu
@pytest.mark.slow
def test_a_step_needs_little_beside_its_state(estimate):
    """BERT-base, 32 rows of 128 a chip: at most 0.6 of transformers' Flax model's.

    That takes 1.96 GiB of temporaries (docs/benchmarks.md).
    """
    flags = ["--config=bert.py:base", "--config.objective=mlm"]
    flags += ["--config.model.vocab_size=30522", "--config.data.plan=full_sentences"]
    flags += ["--config.model.attention_probs_dropout_prob=0"]
    found = estimate("v5e:2x4", *flags)
    assert (found["batch_size"], found["length"]) == (256, 128)
    parts = found["hbm_parts_gib"]
    rest = parts["temporaries"] if "temporaries" in parts else parts["activations"]
    assert rest <= 0.6 * 1.96


def test_the_table_has_times_of_one_slice_and_parts_what_does_not_fit(
    tmp_path, monkeypatch
):
    seen = []

    def fake(config, topology, say, quick, search):
        rows = config.batch_size // config.accumulate
        seen.append((config.batch_size, topology, config.accumulate, quick))
        assert not search
        phase = {
            "batch_size": config.batch_size,
            "length": config.data.length,
            "rows_per_device": rows // 8,
            "fits": rows <= 1024,
            "hbm_gib": rows / 64,
            "hbm_gib_available": 15.75,
            "estimated_step_ms": None if quick else 12.34,
            "estimated_tokens_per_second_per_chip": None if quick else 5678.9,
            "estimated_mfu": None if quick else 0.456,
        }
        return {
            "topology": topology,
            "accumulate": config.accumulate,
            "versions": {"jax": "0", "libtpu": "1"},
            **phase,
            "phases": [phase],
        }

    monkeypatch.setattr(
        table, "FITS", {"bert.py:mini": "v5e:2x4", "roberta.py:base": "v5e:16x16"}
    )
    page = tmp_path / "page.md"
    table.write(str(page), "v5e:2x4", False, fake, lambda text: None)
    text = page.read_text()
    assert (
        "| bert.py:mini | v5e:2x4 | 256 x 128 | 1 | yes | 4.00 of 15.75 | 12.3" in text
    )
    assert "| 8192 x 512 | 8 | yes | 16.00 of 15.75 |  |" in text
    assert seen == [
        (256, "v5e:2x4", 1, True),
        (256, "v5e:2x4", 1, False),
        (8192, "v5e:2x4", 1, True),
        (8192, "v5e:2x4", 8, True),
    ]
    assert "measurements" in text and "libtpu 1" in text
    assert "Missing" not in text

    def broken_off(config, topology, *given, **more):
        if topology == "v5e:16x16":
            raise KeyboardInterrupt
        return fake(config, topology, *given, **more)

    with pytest.raises(KeyboardInterrupt):
        table.write(str(page), None, True, broken_off, lambda text: None)
    text = page.read_text()
    assert text.count("bert.py:mini | v5e:2x4 |") == 1
    said = "not compiled yet: roberta.py:base on v5e:16x16, v5e:2x4, v4:2x2x1"
    assert said in " ".join(text.split())


def test_tensorflow_is_looked_at_without_loading_it():
    from bertjax import config as c

    before = "tensorflow" in sys.modules
    said = preflight.tensorflow_grabs(c.parse(["--config=bert.py:mini"]).config)
    assert said and ("tensorflow" in sys.modules) == before


def test_rows_of_several_texts_are_looked_at(tmp_path):
    from bertjax import config as c

    table = tmp_path / "table.csv"
    table.write_text("q,x,y,right\na b,c,d,0\na,b c d,d,1\n")
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"])
    )
    given = {"data.train": table, "data.vocab": vocab, "data.cache": tmp_path}
    given |= {"task.text": "q", "task.choices": "x,y", "task.label": "right"}
    flags = [f"--config.{key}={value}" for key, value in given.items()]
    config = c.parse(["--config=finetune/choose.py:smoke", *flags]).config
    size, (facts,) = preflight.look_at_text(config, print)
    assert (size, facts["sequences_per_row"]) == (9, 2)
    # [CLS] q [SEP] choice [SEP], of the two rows over and over.
    assert facts["fill"] * facts["length"] == pytest.approx((6 + 6 + 7 + 5) / 4)


def test_the_table_of_a_slice_that_is_none_is_refused(tmp_path):
    page = tmp_path / "page.md"
    with pytest.raises(UserError, match="v9:2x2 is none of"):
        table.write(str(page), "v9:2x2", True, None, print)
    assert not page.exists()
