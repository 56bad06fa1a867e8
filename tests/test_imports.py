# SPDX-License-Identifier: Apache-2.0
"""Allowed imports between the rooms of docs/architecture.md, and their cost."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "bertjax"
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "tensorflow", "tensorflow_datasets"}
NO_JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}

# Room -> (parts of bertjax that it may import, third-party packages that it may not).
# Commands, the top-level files, may import anything; no room imports a command.
EVERYTHING = {"assembly", "checkpoints", "config", "data", "inference", "interop"}
EVERYTHING |= {"generation", "measuring"}
EVERYTHING |= {"models", "objectives", "parallel", "probing", "registry", "reporting"}
EVERYTHING |= {"scoring", "storage", "sweeps", "tasks", "training"}
ROOMS = {
    # The parts of every run, and the rooms that do not import jax at the top.
    "config": ({"config", "registry", "models.config", "models.families"}, HEAVY),
    "storage": ({"storage"}, HEAVY),
    "parallel": ({"parallel"}, HEAVY - {"jax"}),
    "models": ({"models", "parallel.sharding", "registry"}, HEAVY - {"jax", "flax"}),
    "objectives": (
        {"objectives", "models", "parallel.sharding", "registry"},
        HEAVY - {"jax"},
    ),
    "training": (
        {"training", "checkpoints", "parallel", "storage", "registry"},
        {"flax", "tensorflow", "tensorflow_datasets", "orbax"},
    ),
    "checkpoints": (
        {"checkpoints", "training.state", "training.frozen", "parallel"}
        | {"storage", "registry"},
        HEAVY - {"jax", "orbax"},
    ),
    "interop": (
        {"interop", "models.config", "registry", "storage"},
        HEAVY | {"torch", "transformers"},
    ),
    "interop/families": ({"interop.families", "interop.family", "registry"}, NO_JAX),
    "tasks": (
        {"tasks", "data", "objectives", "models.families", "registry", "storage"},
        NO_JAX,
    ),
    "tasks/types": ({"tasks", "data", "registry"}, NO_JAX),
    # The rooms that put the parts together, and those of single commands.
    "assembly": (EVERYTHING - {"sweeps", "scoring", "probing", "reporting"}, {"torch"}),
    "inference": (
        {"inference", "assembly", "config", "data", "generation", "interop"}
        | {"models", "objectives", "parallel.cpu_products", "parallel.host_memory"}
        | {"registry", "storage", "tasks"},
        HEAVY - {"jax"},
    ),
    "compression": (
        {"assembly", "compression", "config", "data", "interop", "models"}
        | {"objectives", "registry", "storage"},
        HEAVY - {"jax"},
    ),
    "generation": (EVERYTHING - {"reporting", "sweeps", "probing"}, HEAVY - {"jax"}),
    "sweeps": (EVERYTHING - {"reporting", "scoring", "probing"}, HEAVY - {"jax"}),
    "speedruns": ({"speedruns", "checkpoints.workdir", "storage"}, HEAVY - {"jax"}),
    "measuring": (
        EVERYTHING - {"reporting", "scoring"} | {"train"},
        HEAVY - {"jax"},
    ),
    "probing": (EVERYTHING - {"reporting"}, HEAVY - {"jax", "optax"}),
    "reporting": (EVERYTHING, HEAVY - {"jax"}),
    "scoring": (EVERYTHING - {"reporting"}, HEAVY - {"jax"}),
    "serving": (
        EVERYTHING - {"reporting", "probing", "sweeps", "measuring"} | {"serving"},
        HEAVY - {"jax"} | {"onnxscript", "torch", "transformers"},
    ),
    # Data is numpy. The rooms that prepare text, plan rows and mask them do not import
    # each other.
    "data": ({"data", "registry"}, NO_JAX),
    "data/corpus": (
        {"data.corpus", "data.tokenizers.tokenizer", "registry", "storage"},
        NO_JAX,
    ),
    "data/tokenizers": (
        {"data.tokenizers", "data.token_flags", "registry", "storage"},
        NO_JAX,
    ),
    "data/token_store": (
        {"data.token_store", "data.corpus", "data.tokenizers", "registry", "storage"}
        | {"data.token_flags"}
        | {f"data.{name}" for name in ("mixture", "progress")},
        NO_JAX,
    ),
    "data/sequences": (
        {"data.sequences", "data.counter_rng", "data.ragged", "storage", "registry"},
        NO_JAX,
    ),
    "data/features": (
        {"data.features", "data.masking", "data.counter_rng", "data.token_flags"}
        | {"data.ragged", "registry"},
        NO_JAX,
    ),
    "data/masking": (
        {"data.masking", "data.counter_rng", "data.ragged", "data.token_flags"}
        | {"data.progress", "registry"}
        | {"data.tokenizers.tokenizer", "data.tokenizers.vocab_files"},
        NO_JAX,
    ),
}
ALLOWED_FILES = {  # files that may import more than their room
    "interop/tf1.py": {"tensorflow"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """List (module, whether at the top) for each import of a file.

    `from bertjax import config` counts as bertjax.config, `from bertjax import
    UserError` as bertjax.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append((alias.name, top))
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append((name if is_module(name) else node.module, top))
    return found


def is_module(name: str) -> bool:
    """Return whether a dotted name is a module or package of bertjax."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def room_of(path: Path) -> str:
    """Return the folder of a file: "" for commands, "data/plans" for a nested room."""
    folder = path.relative_to(PACKAGE).parent.as_posix()
    return "" if folder == "." else folder


def violations(path: Path) -> list[str]:
    """List the imports of a file that its room does not allow."""
    room = room_of(path)
    if room not in ROOMS:
        return []
    ours, banned = ROOMS[room]
    banned = banned - ALLOWED_FILES.get(path.relative_to(PACKAGE).as_posix(), set())
    found = []
    for name, top in imports(path):
        head, _, rest = name.partition(".")
        if head == "bertjax":
            # Every room may import the root package: UserError and the version.
            if rest and not any(rest == o or rest.startswith(f"{o}.") for o in ours):
                found.append(name)
        elif head in banned or (
            room.startswith("data")
            and top
            and head in ("tensorflow", "tensorflow_datasets")
        ):
            found.append(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_keep_to_the_rooms(path):
    assert violations(path) == []


def test_every_package_is_a_known_room():
    rooms = {room_of(p) for p in FILES} - {"", "configs"}
    assert rooms == set(ROOMS)


def test_a_violation_is_seen(tmp_path, monkeypatch):
    package = tmp_path / "bertjax"
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", package)
    for room, text in {
        "data": "from bertjax.models import encoder\nimport tensorflow as tf\n",
        "parallel": "def f():\n    from bertjax import registry\n",
        "models": "from bertjax import UserError\nimport orbax.checkpoint\n",
    }.items():
        (package / room).mkdir(parents=True)
        (package / room / "x.py").write_text(text)
    (package / "registry.py").write_text("")
    (package / "models/encoder.py").write_text("")
    seen = {p.parent.name: violations(p) for p in package.glob("*/x.py")}
    assert seen["data"] == ["bertjax.models.encoder", "tensorflow"]
    assert seen["parallel"] == ["bertjax.registry"]
    assert seen["models"] == ["orbax.checkpoint"]


def test_no_drawer_for_odds_and_ends():
    assert not [p for p in FILES if p.stem in ("utils", "util", "common", "helpers")]


def test_flax_stays_in_models():
    for path in FILES:
        if room_of(path) != "models":
            assert not [n for n, _ in imports(path) if n.split(".")[0] == "flax"], path


@pytest.mark.parametrize(
    "module, absent",
    [
        ("bertjax", HEAVY | {"numpy", "absl", "torch", "transformers"}),
        ("bertjax.registry", HEAVY),
        ("bertjax.config", HEAVY),
        ("bertjax.checkpoints.manifest", HEAVY),
        ("bertjax.data.batches", HEAVY),
        (
            "bertjax.data.token_store.prepare_data",
            HEAVY | {"tokenizers", "sentencepiece"},
        ),
        ("bertjax.train", HEAVY),
        ("bertjax.report", HEAVY | {"matplotlib"}),
    ],
)
def test_importing_is_cheap(module, absent):
    code = f"import sys, {module}; print(*sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
