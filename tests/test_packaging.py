# SPDX-License-Identifier: Apache-2.0
"""The package's declarations, and the contents of a wheel."""

import ast
import fnmatch
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import bertjax

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
IGNORED = shutil.ignore_patterns("__pycache__", "testdata")
# Packages that several distributions share.
NAMESPACES = {"google.protobuf": "protobuf", "orbax.checkpoint": "orbax-checkpoint"}


def normalize(name: str) -> str:
    """Return a distribution's name in the form that PyPI compares (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(requirements: list[str]) -> set[str]:
    return {normalize(re.match(r"[\w.-]+", text)[0]) for text in requirements}


def package_files() -> Iterator[str]:
    """Yield the paths of the files that a wheel should have: bertjax/..."""
    for folder, package in (("bertjax", "bertjax"), ("configs", "bertjax/configs")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{package}/{path.relative_to(ROOT / folder).as_posix()}"


# ---------------------------------------------------------------- pyproject.toml
def test_the_packages_are_the_folders():
    folders = {os.path.dirname(f) for f in package_files() if f.endswith(".py")}
    assert SETUPTOOLS["packages"] == sorted(f.replace("/", ".") for f in folders)


def test_files_that_are_no_code_are_package_data():
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, globs in SETUPTOOLS["package-data"].items()
        for pattern in globs
    ]
    others = [f for f in package_files() if not f.endswith(".py")]
    assert "bertjax/py.typed" in others and "bertjax/reporting/page.css" in others
    left_out = [f for f in others if not any(fnmatch.fnmatch(f, p) for p in patterns)]
    assert not left_out


def third_party_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield (third-party module, whether the file imports it at the top)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            if module.partition(".")[0] not in {"bertjax", *sys.stdlib_module_names}:
                yield module, id(node) not in lazy


@functools.cache
def distributions_by_package() -> dict[str, set[str]]:
    table = metadata.packages_distributions()
    return {package: set(map(normalize, names)) for package, names in table.items()}


def providers(module: str) -> set[str]:
    """Return the distributions that have a module; its own name if not installed."""
    for namespace, distribution in NAMESPACES.items():
        if f"{module}.".startswith(f"{namespace}."):
            return {distribution}
    package = module.partition(".")[0]
    return distributions_by_package().get(package, {normalize(package)})


def test_what_is_imported_is_declared():
    """Top-level imports are declared in dependencies; imports in functions may also be
    in an extra other than test."""
    base = distributions(PROJECT["dependencies"])
    any_extra = set(base)
    for extra, requirements in PROJECT["optional-dependencies"].items():
        any_extra |= distributions(requirements if extra != "test" else [])
    imported, undeclared = set(), []
    for path in sorted([*ROOT.glob("bertjax/**/*.py"), *ROOT.glob("configs/**/*.py")]):
        for module, top in third_party_imports(path):
            imported |= providers(module)
            if not providers(module) & (base if top else any_extra):
                undeclared.append(f"{path.relative_to(ROOT)}: {module}")
    assert {"jax", "scipy", "absl-py", "orbax-checkpoint", "wandb"} <= imported
    assert not undeclared


def test_the_version_is_in_the_changelog():
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest[1] == bertjax.__version__


# ---------------------------------------------------------------- public names
def checked_modules() -> list[str]:
    """List the modules that mypy checks: the public surface."""
    files = []
    for name in PYPROJECT["tool"]["mypy"]["files"]:
        path = ROOT / name
        files += sorted(path.glob("*.py")) if path.is_dir() else [path]
    modules = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    rooms = {"bertjax.inference.__init__"}  # users import its modules
    return [m.removesuffix(".__init__") for m in modules if m not in rooms]


@pytest.mark.parametrize("name", checked_modules())
def test_public_modules_list_names_that_they_have(name):
    module = importlib.import_module(name)
    assert module.__all__ and len(set(module.__all__)) == len(module.__all__)
    assert not [public for public in module.__all__ if not hasattr(module, public)]


# ---------------------------------------------------------------- a wheel
@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built offline from a copy, as building writes into the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("bertjax", "configs", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=IGNORED)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--no-index", f"--wheel-dir={folder}"]
    subprocess.run([*pip, *options, str(source)], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_a_wheel_has_the_package_and_nothing_else(wheel):
    assert wheel.name.startswith(f"bertjax-{bertjax.__version__}-")
    names = zipfile.ZipFile(wheel).namelist()
    files = [n for n in names if ".dist-info/" not in n]
    assert sorted(files) == sorted(package_files())
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_an_installed_wheel_runs_outside_the_checkout(
    wheel, corpus, vocabulary, environment, tmp_path
):
    target, cwd = tmp_path / "target", tmp_path / "elsewhere"
    cwd.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, f"--target={target}", str(wheel)], check=True)
    env = {**environment, "PYTHONPATH": str(target)}

    def run(*args: str) -> str:
        command = [sys.executable, *args]
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    origin = run("-c", "import bertjax, bertjax.show; print(bertjax.show.__file__)")
    assert Path(origin.strip()) == target / "bertjax" / "show.py"
    assert run("-m", "bertjax", "--version").strip() == bertjax.__version__
    data = {"train": corpus / "train.txt", "valid": "", "vocab": vocabulary}
    data["cache"] = tmp_path / "cache"
    flags = [f"--config.data.{key}={value}" for key, value in data.items()]
    flags += ["--config=bert.py:smoke", "--batches=1", "--json", "--html=page.html"]
    (shown,) = run("-m", "bertjax.show", *flags).splitlines()
    (batch_hash,) = json.loads(shown)["batch_sha256"]
    assert len(batch_hash) == 64
    assert "<style" in (cwd / "page.html").read_text(encoding="utf-8")
