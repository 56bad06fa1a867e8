# SPDX-License-Identifier: Apache-2.0
"""Reading the files that the compiler writes on its way, without a compiler."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertjax import RunError
from bertjax.measuring import memory_analysis

REPORT = "Memory Space: default (color=0)\nTotal bytes: 4096 (4.0KiB)\n"
TEXT = """\
HloModule jit_update, is_scheduled=true

ENTRY %main (p: f32[8]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-gather.1 = f32[64]{0} all-gather(%p), channel_id=1, dimensions={0}
}

"""
EARLY = {"fits": True, "needed": 4096}
EARLY |= {"collectives": {"all-gather": {"count": 1, "bytes": 256}}}
WHOLE = {"fits": True, "needed": 1, "collectives": {}}


def write(folder: Path, report: str, text: str) -> None:
    for pattern, said in (
        (memory_analysis.REPORT, report),
        (memory_analysis.TEXT, text),
    ):
        (folder / pattern.replace("*", "module_0000")).write_text(said)


@pytest.mark.parametrize(
    "report, text, found",
    [
        (REPORT, TEXT, EARLY),
        (REPORT, TEXT[:-40], None),  # not yet complete
        (REPORT, "", None),
        ("Bytes in all: 4096", TEXT, None),
    ],
)
def test_what_is_read_early(report, text, found, tmp_path):
    assert memory_analysis.read_early(tmp_path) is None
    write(tmp_path, report, text)
    assert memory_analysis.read_early(tmp_path) == found


@pytest.mark.parametrize(
    "report, found", [(REPORT, EARLY), ("of a new form", WHOLE)], ids=["known", "new"]
)
def test_an_unknown_report_is_not_waited_for(report, found, monkeypatch):
    """Then the result comes from the complete compilation, or an error if it failed."""

    class Process:
        """A process that writes reports, is alive twice, then ends with or without a
        result."""

        result = True

        def __init__(self, target, args, daemon):
            self.folder, self.seen = Path(args[-1]), 0

        def start(self):
            write(self.folder, report, TEXT)

        def is_alive(self):
            self.seen += 1
            if self.seen == 2 and self.result:
                (self.folder / memory_analysis.RESULT).write_text(json.dumps(WHOLE))
            return self.seen <= 2

        def kill(self):
            pass

        join = kill

    context = SimpleNamespace(Process=Process)
    monkeypatch.setattr(
        memory_analysis.multiprocessing, "get_context", lambda _: context
    )
    assert memory_analysis.compile_early(dict) == found
    Process.result = False
    if found is WHOLE:
        with pytest.raises(RunError, match="compiler failed"):
            memory_analysis.compile_early(dict)
