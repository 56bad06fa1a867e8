# SPDX-License-Identifier: Apache-2.0
"""The table of shipped configs, without a compiler."""

import pytest
from conftest import ROOT

from bertjax import UserError
from bertjax.measuring import estimates_table


def test_every_shipped_config_has_a_slice():
    folder = ROOT / "configs"
    files = {p for p in folder.rglob("*.py") if p.name != "__init__.py"}
    names = {p.relative_to(folder).as_posix() for p in files}
    assert {name.split(":")[0] for name in estimates_table.FITS} == names
    assert (
        estimates_table.FLAGS.keys() | estimates_table.MULTISLICE.keys()
        <= estimates_table.FITS.keys()
    )


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
            "hbm_parts_gib": {"activations": 1} if quick else {"program": 0.123},
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
            "estimated_run_hours": None if quick else 5.625,
        }

    monkeypatch.setattr(
        estimates_table,
        "FITS",
        {"bert.py:mini": "v5e:2x4", "roberta.py:base": "v5e:16x16"},
    )
    monkeypatch.setattr(estimates_table, "estimate_config", fake)
    page = tmp_path / "page.md"
    estimates_table.write(str(page), "v5e:2x4", False, lambda text: None)
    text = page.read_text()
    assert (
        "| bert.py:mini | v5e:2x4 | 256 x 128 | 1 | yes | 4.00 of 15.75 | 12.3" in text
        and "| 0.456 | 5.62 |" in text
    )
    assert "| 8192 x 512 | 8 | yes | 16.00 of 15.75 |  |" in text
    assert seen == [
        (256, "v5e:2x4", 1, True),
        (256, "v5e:2x4", 1, False),
        (8192, "v5e:2x4", 1, True),
        (8192, "v5e:2x4", 8, True),
    ]
    head = " ".join(text.split())
    assert f"`python -m bertjax.preflight --table={page} --topology=v5e:2x4`" in head
    assert "no measurements" in head and "libtpu 1" in head and "Missing" not in head
    assert "program's code (0.12 to 0.12 GiB in the former) is to be added" in head
    assert "if 0.5 GiB are left for it" in head

    def broken_off(config, topology, *given, **more):
        if topology == "v5e:16x16":
            raise KeyboardInterrupt
        return fake(config, topology, *given, **more)

    monkeypatch.setattr(estimates_table, "estimate_config", broken_off)
    with pytest.raises(KeyboardInterrupt):
        estimates_table.write(str(page), None, True, lambda text: None)
    text = page.read_text()
    assert text.count("bert.py:mini | v5e:2x4 |") == 1
    said = "not compiled yet: roberta.py:base on v5e:16x16, v5e:2x4, v4:2x2x1"
    assert said in " ".join(text.split())


def test_the_table_of_a_slice_that_is_none_is_refused(tmp_path):
    page = tmp_path / "page.md"
    with pytest.raises(UserError, match="v9:2x2 is none of"):
        estimates_table.write(str(page), "v9:2x2", True, print)
    assert not page.exists()
