# SPDX-License-Identifier: Apache-2.0
"""Eight CPU devices, a small corpus, and a way to run the commands."""

import atexit
import importlib.util
import io
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No deadlines: a slow machine must not fail a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]
# Tests, as FILE::NAME, that compile for seconds while a similar test stays in
# `make test`. The NAME of a fixture stands for all tests of the file that use it.
SLOW = frozenset((ROOT / "tests/slow.txt").read_text(encoding="utf-8").splitlines())


def knows(flag: bytes) -> bool:
    """Return whether this jaxlib knows an XLA flag; an unknown flag ends the process.

    Search for the name between NUL bytes, as a C string of its own: a list of removed
    flags may have it inside a longer string.
    """
    written = b"\0" + flag + b"\0"
    (folder,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    for library in Path(folder).glob("libjax*.so"):
        with library.open("rb") as file:
            if mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(written) >= 0:
                return True
    return False


# Set before jax is imported. Tests mostly compile, so XLA optimizes little.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if knows(b"xla_cpu_opt_preset"):
    QUICK += " --xla_cpu_opt_preset=FAST_COMPILE"
if knows(b"xla_cpu_use_fusion_emitters"):  # JAX 0.10: without, 3 times as fast
    QUICK += " --xla_cpu_use_fusion_emitters=false"
ON_GPU = os.environ.get("BERTJAX_TESTS_ON_GPU", "")  # for tests/test_on_gpu.py only
os.environ["JAX_PLATFORMS"] = "cuda,cpu" if ON_GPU else "cpu"
if not ON_GPU:
    os.environ["XLA_FLAGS"] = f"{QUICK} --xla_force_host_platform_device_count=8"
# Tests and commands share one compilation cache. The workers of pytest-xdist inherit
# the folder through the environment.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    if config.getoption("--runslow"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --runslow")
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        file = name.partition("::")[0]
        names = {name, *(f"{file}::{fixture}" for fixture in item.fixturenames)}
        if "slow" in item.keywords or names & SLOW:
            item.add_marker(skip)


MOST_MAPS = 25_000  # Linux allows a process 65,530 (vm.max_map_count)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Clear jax's caches after a module that left too many compiled programs: each
    uses memory mappings, and a process that runs out of them dies silently."""
    yield
    maps = Path("/proc/self/maps")
    known = maps.read_bytes().count(b"\n") if maps.exists() else 0
    if "jax" in sys.modules and known > MOST_MAPS:
        sys.modules["jax"].clear_caches()


# ---------------------------------------------------------------- a corpus
@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train.txt and valid.txt: Python's help topics, dozens of kB."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("corpus")
    documents = []
    for _, text in sorted(topics.items()):
        paragraphs = re.split(r"\n\s*\n", text)
        prose = [" ".join(p.split()) for p in paragraphs if p.count(".") > 0]
        documents.append("\n".join(prose))
    documents = [d for d in documents if 500 < len(d) < 12_000]
    for name, part in (("train", documents[::2]), ("valid", documents[1:20:2])):
        (folder / f"{name}.txt").write_text("\n\n".join(part), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def vocabulary(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a WordPiece tokenizer of 1,000 pieces, trained on the corpus."""
    from bertjax.data.tokenizers.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    lines = (corpus / "train.txt").read_text(encoding="utf-8").splitlines()
    train_tokenizer(filter(None, lines), "wordpiece", 1000, True, folder)
    return folder


# ---------------------------------------------------------------- running commands
@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Environment of the commands: one CPU device and the session's compile cache."""
    return {
        **os.environ,
        "XLA_FLAGS": QUICK,
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


@pytest.fixture
def no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the code under test from handling signals, which pytest handles."""
    from bertjax.training.signals import StopSignal

    monkeypatch.setattr(StopSignal, "install", lambda self: None)


Pipe = Callable[[str | bytes], None]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """Return a function that makes its argument the standard input of this process."""

    def give(content: str | bytes) -> None:
        content = content.encode() if isinstance(content, str) else content
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


Command = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def fork_server(environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process with the commands' libraries already imported (fork_server.py)."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("fork_server.py")],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout.readline() == "ready\n"
    yield server
    server.stdin.close()
    server.wait()


@pytest.fixture(scope="session")
def command(
    environment: dict[str, str],
    fork_server: subprocess.Popen,
    tmp_path_factory: pytest.TempPathFactory,
) -> Command:
    """Run `python -m bertjax.NAME ARGUMENTS`; return its status and its output.

    The command runs in a fork of a process that has already imported the libraries. It
    starts as a new process if `before` (words before the command line) or `fresh` is
    given, or if `env` has variables of jax, which jax reads when it is imported.
    """
    folder = tmp_path_factory.mktemp("said")

    def start(line: list, env: dict[str, str]) -> subprocess.CompletedProcess:
        return subprocess.run(
            line,
            cwd=ROOT,
            env={**environment, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )

    def fork(
        name: str, arguments: list[str], env: dict[str, str]
    ) -> subprocess.CompletedProcess:
        said = {kind: folder / kind for kind in ("stdout", "stderr")}
        for path in said.values():
            path.write_bytes(b"")
        paths = {kind: str(path) for kind, path in said.items()}
        order = {"name": name, "arguments": arguments, "env": env, **paths}
        fork_server.stdin.write(json.dumps(order) + "\n")
        fork_server.stdin.flush()
        status = int(fork_server.stdout.readline())
        texts = {kind: path.read_text("utf-8") for kind, path in said.items()}
        return subprocess.CompletedProcess([name, *arguments], status, **texts)

    def run(
        name: str,
        *arguments: Any,
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
        fresh: bool = False,
    ) -> subprocess.CompletedProcess:
        words = [str(argument) for argument in arguments]
        env = env or {}
        of_jax = any(variable.startswith("JAX_") for variable in env)
        if not (fresh or before or of_jax):
            return fork(name, words, env)
        return start([*before, sys.executable, "-m", f"bertjax.{name}", *words], env)

    return run


@pytest.fixture(scope="session")
def arguments(
    corpus: Path, vocabulary: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Arguments of a run of 12 steps on the corpus, which takes seconds."""
    return [
        "--config=bert.py:smoke",
        f"--config.data.train={corpus / 'train.txt'}",
        f"--config.data.valid={corpus / 'valid.txt'}",
        f"--config.data.vocab={vocabulary}",
        f"--config.data.cache={tmp_path_factory.mktemp('stores')}",
        "--config.data.length=32",
        "--config.model.hidden_size=32",
        "--config.model.unroll=1",  # compiles faster
        "--config.total.steps=12",
        "--config.eval.every.steps=6",
        "--config.eval.examples=16",
        "--config.checkpoint.every.steps=4",
    ]


@pytest.fixture(scope="session")
def trained(
    command: Command, arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The workdir of the finished run of `arguments`. Tests that change it copy it."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    succeeded(command("train", *arguments, f"--workdir={workdir}"))
    return workdir


def succeeded(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Fail with a command's output unless it ended with status 0."""
    said = f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    assert result.returncode == 0, f"status {result.returncode}\n{said}"
    return result


def refused(result: subprocess.CompletedProcess, *words: str, status: int = 2) -> None:
    """Check the status, and that one line "error: ..." contains all `words`."""
    said = result.stdout + result.stderr
    assert result.returncode == status, f"status {result.returncode}\n{said[-4000:]}"
    assert "Traceback" not in said, said[-4000:]
    lines = [x for x in result.stderr.splitlines() if x.startswith("error:")]
    assert len(lines) == 1, said[-4000:]
    assert all(word in lines[0] for word in words), lines[0]


def read_rows(workdir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    text = (workdir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without the values that depend on the clock."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("perf/", "data/", "hosts/"))}
        for row in rows
    ]


def train_losses(workdir: Path) -> list[float]:
    """Return train/loss of each logged step."""
    return [r["train/loss"] for r in read_rows(workdir) if "train/loss" in r]


# ---------------------------------------------------------------- stand-ins
@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local directory that etils.epath uses for gs://bucket."""
    from etils.epath import backend, gpath

    class Bucket(backend._OsPathBackend):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name.startswith("_") or not callable(found):
                return found

            def local(*args, **kw):
                args = [
                    str(a).replace("gs://bucket", str(tmp_path / "bucket"))
                    if isinstance(a, str) or hasattr(a, "__fspath__")
                    else a
                    for a in args
                ]
                return found(*args, **kw)

            return local

    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Bucket())
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


# Options of EncoderConfig for encoders with different parameter trees.
ENCODERS = {
    "bert": {},
    "shared": dict(num_hidden_groups=2, embedding_size=8),
    "local": dict(
        position_embedding_type="rope",
        norm_position="pre",
        first_attention_norm=False,
        local_attention=4,
        global_attn_every_n_layers=2,
        mlp_type="glu",
    ),
}


def train_steps(
    objective: Any,
    mesh: Any,
    batches: Sequence[Any],
    accumulate: int = 1,
    freeze: str = "",
    teacher: Any = None,
    tables: Any = None,
) -> tuple[list[dict[str, Any]], Any]:
    """Train on batches as train.py does; return (rows of metrics, final parameters).

    freeze: optim.freeze; teacher: another model's parameters; tables: numpy arrays
    that the objective finds in params["tables"].
    """
    import jax

    from bertjax.assembly.train_step import fill_up
    from bertjax.parallel import feed
    from bertjax.parallel.feed import place_rows
    from bertjax.training import read_freeze
    from bertjax.training.frozen import frozen_sizes, join
    from bertjax.training.optim import make_optimizer
    from bertjax.training.schedules import make_schedule
    from bertjax.training.state import (
        init_sharded,
        plan_state,
        with_given,
        with_shardings,
    )
    from bertjax.training.step import make_train_step

    steps = len(batches)
    schedule = make_schedule("linear", 3e-3, steps // 5, steps)
    tx = make_optimizer(
        "adamw", schedule, wd=0.01, b1=0.9, b2=0.999, eps=1e-6, clip=1.0
    )

    def init() -> Any:
        return objective.init(jax.random.key(0))

    sizes = frozen_sizes(jax.eval_shape(init), read_freeze(freeze))
    how = dict(freeze=sizes)
    if teacher is not None:
        how["init_teacher"] = lambda: teacher
    more = {}
    if tables is not None:
        more["init_tables"] = lambda: fill_up(objective.tables, mesh.size)
    shapes, shardings = plan_state(init, tx, mesh, objective.shardings, **how, **more)
    state = init_sharded(init, tx, mesh, shardings, **how)
    if tables is not None:
        where = with_shardings(shapes.frozen["tables"], shardings.frozen["tables"])
        state = with_given(state, tables=place_rows(where, tables))
    update = make_train_step(
        objective.sums,
        objective.weights,
        objective.coefficients,
        tx,
        schedule,
        seed=1,
        accumulate=accumulate,
    )
    update = jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))
    rows = []
    sizes = [len(b["input_ids"]) for b in batches]
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
        for batch in feed.to_devices(iter(batches), mesh, sizes):
            state, metrics = update(state, batch)
            rows.append(metrics)
    assert update._cache_size() == 1, "compiled more than once"
    assert jax.tree.leaves(state)[0].sharding == jax.tree.leaves(shardings)[0]
    state = jax.device_get(state)
    return jax.device_get(rows), join(state.params, state.frozen)


# ---------------------------------------------------------------- a model
def fetched(function: Callable, **how: Any) -> Callable:
    """Compile a function and return its results as numpy arrays, so that a test that
    works on them compiles nothing more; how: keywords of jax.jit."""
    import jax

    compiled = jax.jit(function, **how)
    return lambda *given: jax.device_get(compiled(*given))


def tiny_encoder(vocab_size: int, length: int, **own: Any) -> Any:
    """Make the config of one layer of width 16, no dropout, which compiles quickly."""
    from bertjax.models.config import EncoderConfig

    given = dict(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        unroll=1,
    )
    return EncoderConfig(**given | own)
