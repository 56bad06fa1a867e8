# SPDX-License-Identifier: Apache-2.0
"""preflight with the real TPU compiler (skipped if libtpu is absent) and without."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, refused

from bertjax import UserError, preflight
from bertjax.measuring import estimates, estimates_table

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
# As few operations as possible: their number determines the time, not their size.
SMALL = [
    "--config=bert.py:tiny",
    "--config.objective=mlm",
    "--config.data.plan=full_sentences",
    "--config.model.num_hidden_layers=1",
    "--config.data.length=128",
]


@pytest.fixture
def run(command, tmp_path_factory):
    """Run preflight with a cache of compiled programs for the session."""
    cache = tmp_path_factory.getbasetemp() / "tpu_programs"

    def go(*arguments, env=None, fresh=False):
        given = [*arguments, f"--config.data.cache={cache}"]
        env = {"XLA_FLAGS": "", **(env or {})}
        return command("preflight", *given, env=env, fresh=fresh)

    return go


def read(result):
    """Return the only JSON object on stdout."""
    assert "Traceback" not in result.stderr, result.stderr[-4000:]
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_refusals_in_one_line(run):
    refused(run(*SMALL, "--topology=v5e-8"), "--topology=v5e-8", "v5e:2x4")
    refused(run("--config=bert.py:no_such_size"), "no_such_size")
    refused(run("--config=causalm.py:base"), "data.concept")
    with pytest.raises(UserError, match="shipped configs: leave --config out"):
        preflight.write_table(["--config=bert.py:mini", "--table=x.md"])


def test_absent_compiler_in_one_line(run, tmp_path):
    # sitecustomize makes the installed libtpu impossible to find.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "f = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'libtpu' else f(n, *a)\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run(*SMALL, "--topology=v5e:2x4", env=env, fresh=True)
    refused(done, "pip install libtpu")


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
    # Once per step, parameters are gathered in bf16 and gradients summed in bf16 or
    # f32; the gradients of the word table twice, for the input and for the logits.
    whole = 8 * found["hbm_parts_gib"]["parameters"] * 2**30
    moved = sum(kind["bytes"] for kind in found["collectives"].values())
    assert (0.5 + 0.5) * whole < moved < (0.5 + 2) * whole
    # Without --json it prints the same as text, from the cache.
    said = run(*SMALL, "--topology=v5e:2x4", "--config.batch_size=64")
    assert said.stdout.splitlines()[-1].startswith("fits: 64 rows of 128 tokens")
    assert "ESTIMATED" in said.stdout and "data.train is empty" in said.stdout


@needs_libtpu
@pytest.mark.slow  # four compilations that end early, about 40 seconds
def test_memory_alone_is_quick(run):
    """--quick finds the same memory as a whole compilation, without the program's."""
    # No other test compiles this batch size, so nothing comes from the cache.
    arguments = [*SMALL, "--topology=v5e:2x4", "--json", "--config.batch_size=128"]
    quick = read(run(*arguments, "--quick"))
    assert quick["fits"] and quick["estimated_step_ms"] is None
    whole = read(run(*arguments))
    needed = whole["hbm_gib"] - whole["hbm_parts_gib"]["program"]
    assert quick["collectives"] == whole["collectives"] != {}
    assert quick["hbm_gib"] == pytest.approx(needed, rel=0.02)
    assert quick["largest_batch_per_device"] == whole["largest_batch_per_device"]


@needs_libtpu
@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_its_compilation(number, environment, tmp_path):
    """It prints one line without the compiler's stack and leaves no process or file."""
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
    while not list(scratch.glob("tmp*/*")):  # until the compiler writes
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    if number == signal.SIGINT:  # a terminal signals the group
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
    """Return the processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            found += [folder] if os.getsid(int(folder.name)) == number else []
    return found


@needs_libtpu
@pytest.mark.slow  # a compilation that ends early
def test_fsdp_sends_parameters_in_halves_and_gradients_whole(estimate):
    """Parameters are gathered in bf16, those of layers forward and again backward;
    gradients are summed in f32."""
    width, layers = 512, 2
    flags = [*SMALL, "--config.mesh.data=1", "--config.mesh.fsdp=4"]
    flags += ["--config.batch_size=32", f"--config.model.hidden_size={width}"]
    flags += [f"--config.model.intermediate_size={4 * width}"]
    flags += [f"--config.model.num_hidden_layers={layers}", "--config.model.unroll=1"]
    found = estimate("v5e:2x2", *flags)
    sent = {kind: n["bytes"] for kind, n in found["collectives"].items()}
    kinds = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    assert sent.keys() == kinds
    number = found["hbm_parts_gib"]["parameters"] * 2**30  # bytes of a quarter, in f32
    gathered = 2 * (number + 12 * width**2 * layers)
    assert sent["all-gather"] == pytest.approx(gathered, rel=0.03)
    assert sent["reduce-scatter"] == pytest.approx(4 * number, rel=0.04)
    # The norms' gradients are all-reduced. The embeddings of 8 rows per device go out
    # in bf16 and back in f32.
    assert sent["all-reduce"] < 0.01 * number
    assert sent["all-to-all"] == pytest.approx(8 * 128 * width * (2 + 4), rel=0.05)


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
    """Estimated step time and memory are linear in the rows: R^2 >= 0.99.

    This needs a base model. A tiny model's activations stay in vector memory as long as
    they fit, so its line has a bend.
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


# preflight --quick without the search for the largest batch.
QUICK = """
import json, sys
from bertjax.measuring import topologies
topologies.prepare()
from bertjax.assembly import command_line
from bertjax.measuring.estimates import estimate_config
topology, *flags = sys.argv[1:]
config = command_line.parse(flags).config
say = lambda text: print(text, file=sys.stderr)
print(json.dumps(estimate_config(config, topology, say, quick=True, search=False)))
"""


@pytest.fixture
def estimate(environment, tmp_path_factory):
    """Return a function that estimates the memory of a config, as a dict."""
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
@pytest.mark.slow
@pytest.mark.parametrize("name", estimates_table.FITS)
def test_every_shipped_config_fits_somewhere(name, estimate, command):
    """The search for the largest batch is left out where the config fits as it is."""
    config = estimates_table.shipped(name)
    topology, flags = estimates_table.FITS[name], [f"--config={name}"]
    flags += [*estimates_table.FLAGS.get(name, ())]
    flags += ["--config.data.train=", "--config.data.valid="]
    found = estimate(topology, *flags)
    if not found["fits"]:
        whole = [*flags, f"--topology={topology}", "--quick", "--json"]
        parts = read(command("preflight", *whole, env={"XLA_FLAGS": ""}))
        flags += [f"--config.accumulate={parts['accumulate_to_fit']}"]
        found = estimate(topology, *flags)
    assert found["fits"], found
    assert found["batch_size"] == config.batch_size


@needs_libtpu
@pytest.mark.slow  # two compilations that end early, as in the tests below
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
    """bert-large fits with 32 rows of 512 per chip, ModernBERT with one of 8,192."""
    name, *rest = flags
    given = [f"--config={name}", *(f"--config.{flag}" for flag in rest)]
    assert estimate("v5e:2x4", *given)["fits"]


@needs_libtpu
@pytest.mark.slow
def test_a_step_needs_little_beside_its_state(estimate):
    """BERT-base with 32 rows of 128 per chip needs at most 0.62 of the temporaries of
    transformers' Flax model, which are 1.96 GiB (docs/benchmarks.md)."""
    flags = ["--config=bert.py:base", "--config.objective=mlm"]
    flags += ["--config.model.vocab_size=30522", "--config.data.plan=full_sentences"]
    flags += ["--config.model.attention_probs_dropout_prob=0"]
    found = estimate("v5e:2x4", *flags)
    assert (found["batch_size"], found["length"]) == (256, 128)
    parts = found["hbm_parts_gib"]
    rest = parts["temporaries"] if "temporaries" in parts else parts["activations"]
    assert rest <= 0.62 * 1.96


@pytest.mark.parametrize(
    "installed, engine, said",
    [
        ("tensorflow-cpu", "tf", "tensorflow-cpu 2.20 knows no accelerator"),
        (
            "tensorflow-tpu",
            "tf",
            "WARNING: tensorflow-tpu 2.20 takes the TPU: install tensorflow-cpu",
        ),
        (
            "tensorflow",
            "python",
            "tensorflow 2.20: GPUs are hidden from it, and data.engine does not load "
            "it",
        ),
        (None, "tf", "a build of its own: WARNING, it may take the accelerator"),
        ("nothing", "tf", "not installed"),
    ],
)
def test_tensorflow_is_looked_at_without_loading_it(
    installed, engine, said, monkeypatch
):
    def version(name):
        if name != installed:
            raise metadata.PackageNotFoundError(name)
        return "2.20"

    config = SimpleNamespace(data=SimpleNamespace(engine=engine))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if installed == "nothing" else 1
    )
    monkeypatch.setattr(metadata, "version", version)
    before = "tensorflow" in sys.modules
    assert estimates.describe_tensorflow(config) == said
    assert ("tensorflow" in sys.modules) == before


def test_rows_of_several_texts_are_looked_at(tmp_path):
    import numpy as np

    from bertjax.assembly import command_line
    from bertjax.tasks import passage_index
    from bertjax.tasks.passage_index import Passage

    table = tmp_path / "table.csv"
    table.write_text("q,x,y,right\na b,c,d,0\na,b c d,d,1\n")
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"])
    )
    given = {"data.train": table, "data.vocab": vocab, "data.cache": tmp_path}
    given |= {"task.text": "q", "task.choices": "x,y", "task.label": "right"}
    flags = [f"--config.{key}={value}" for key, value in given.items()]
    config = command_line.parse(["--config=finetune/choose.py:smoke", *flags]).config
    size, (facts,) = estimates.sample_text(config, print)
    assert (size, facts["sequences_per_row"]) == (9, 2)
    # Each choice is [CLS] q [SEP] choice [SEP]; the two rows are repeated.
    assert facts["fill"] * facts["length"] == pytest.approx((6 + 6 + 7 + 5) / 4)
    asked, index = tmp_path / "asked.jsonl", tmp_path / "index"
    asked.write_text('{"question": "a b", "answers": ["c"]}\n')
    index.mkdir()
    passage_index.write_passages(index, [Passage("0", "", "a b c d")])
    np.save(index / "vectors.npy", np.ones((1, 128), np.float32))
    passage_index.seal(index, {"width": 128})
    given = {"data.train": asked, "data.vocab": vocab, "data.cache": tmp_path}
    given |= {"task.index": index, "task.passages": 1}
    flags = [f"--config.{key}={value}" for key, value in given.items()]
    config = command_line.parse(["--config=finetune/rag.py:smoke", *flags]).config
    _, (facts,) = estimates.sample_text(config, print)
    assert facts["sequences_per_row"] == 1
