# SPDX-License-Identifier: Apache-2.0
"""The command `bertjax`, and --help, which lists every flag that a command reads."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

from bertjax import __main__ as commands

WITH_CONFIG = {"train", "sweep", "glue", "prepare", "show", "preflight", "benchmark"}


def test_every_command_is_listed(capsys, monkeypatch):
    files = (ROOT / "bertjax").glob("*.py")
    there = {p.stem for p in files if "    cli.command(main)" in p.read_text()}
    assert there == set(commands.COMMANDS)
    monkeypatch.setattr(sys, "argv", ["bertjax"])
    assert commands.main() == 0
    for line, name in zip(
        capsys.readouterr().out.splitlines()[2:], commands.COMMANDS, strict=True
    ):
        assert line.split()[0] == name and len(line) < 80


def reads(name):
    """Return the names of the flags that a command reads as args.NAME."""
    files = [ROOT / f"bertjax/{name}.py"]
    if name == "evaluate":
        files += (ROOT / "bertjax/scoring").glob("*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    fields = (node for node in nodes if isinstance(node, ast.Attribute))
    found = {x.attr for x in fields if getattr(x.value, "id", "") == "args"}
    return found - {"config", "overrides", "words"}


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_lists_every_flag(name, capsys):
    module = importlib.import_module(f"bertjax.{name}")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(module.__doc__.strip())
    assert all(len(line) <= 88 for line in said.splitlines())
    listed = said.partition("\nflags:\n")[2]
    assert reads(name) <= module.FLAGS.keys()
    for flag, (about, *_) in module.FLAGS.items():
        assert re.search(rf"^  --{flag}(=| |$)", listed, re.MULTILINE), flag
        assert about.split()[0] in listed, flag
    assert "repeat this option" not in listed  # absl's words
    assert ("--config.KEY=VALUE" in listed) == (name in WITH_CONFIG)


def test_a_command_by_the_script(monkeypatch, capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"bertjax": "bertjax.__main__:main"}
    monkeypatch.setattr(sys, "argv", ["bertjax", "fill_mask", "--help"])
    with pytest.raises(SystemExit):
        commands.main()
    assert "--top_k=5" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bertjax", "evalute"])
    assert commands.main() == 2
    assert "did you mean 'evaluate'?" in capsys.readouterr().err


def test_the_list_imports_nothing_large():
    code = "import runpy, sys; sys.argv = ['bertjax']\n"
    code += "try: runpy.run_module('bertjax', run_name='__main__', alter_sys=True)\n"
    code += "except SystemExit as e: assert not e.code\n"
    code += "print(*{'jax', 'numpy', 'absl'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "fill_mask" in done.stdout and done.stdout.splitlines()[-1] == ""
    bad = subprocess.run(
        [sys.executable, "-m", "bertjax", "fill_mask", "--model=no-such-model", "a"],
        capture_output=True,
        text=True,
    )
    assert bad.returncode == 2 and bad.stderr.startswith("error: --model=no-such-model")


def test_the_list_may_be_read_in_part():
    """bertjax | head -1: whoever reads closes the pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bertjax"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0
