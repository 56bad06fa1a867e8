# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from bertjax import RunError, UserError
from bertjax.assembly import init_from, models
from bertjax.checkpoints import manifest


@pytest.fixture
def workdir(tmp_path):
    """A workdir with complete checkpoints 4, 8 and 12."""
    for step in (4, 8, 12):
        folder = tmp_path / "checkpoints" / str(step)
        (folder / "state" / "d").mkdir(parents=True)
        (folder / "state" / "d" / "data").write_bytes(bytes(range(200)) * step)
        (folder / "state" / "empty").write_bytes(b"")
        (folder / "meta.json").write_text(json.dumps({"step": step}))
        manifest.write_manifest(folder)
    return tmp_path


def cut(folder):
    path = folder / "state/d/data"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = folder / "state/d/data"
    data = bytearray(path.read_bytes())
    data[77] ^= 1
    path.write_bytes(data)


def lose(folder):
    (folder / "state/d/data").unlink()


def lose_meta(folder):
    (folder / "meta.json").unlink()


def lose_manifest(folder):
    (folder / "manifest.json").unlink()


def break_manifest(folder):
    (folder / "manifest.json").write_text("{")


def list_manifest(folder):
    (folder / "manifest.json").write_text("[1, 2]")


def empty(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


DAMAGES = {
    cut: "state/d/data has another checksum",
    flip: "state/d/data has another checksum",
    lose: "state/d/data is missing",
    lose_meta: "meta.json is missing",
    lose_manifest: "manifest is missing",
    break_manifest: "manifest cannot be read",
    list_manifest: "manifest cannot be read",
    empty: "manifest is missing",
}


def test_whole(workdir):
    said = []
    assert manifest.problem(workdir / "checkpoints/12") is None
    assert manifest.newest_intact(workdir, said.append) == 12
    assert not said and manifest.steps(workdir) == [4, 8, 12]
    sums = json.loads((workdir / "checkpoints/4/manifest.json").read_text())["sha256"]
    assert sorted(sums) == ["meta.json", "state/d/data", "state/empty"]


def test_a_file_too_many_is_no_damage(workdir):
    (workdir / "checkpoints/12/.DS_Store").write_text("x")
    assert manifest.problem(workdir / "checkpoints/12") is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_set_aside_and_kept(workdir, damage):
    newest = workdir / "checkpoints/12"
    damage(newest)
    assert DAMAGES[damage] in manifest.problem(newest)
    left = sorted(p.name for p in newest.rglob("*"))
    said = []
    assert manifest.newest_intact(workdir, said.append) == 8
    assert manifest.steps(workdir) == [4, 8]
    (line,) = said
    assert "checkpoints/12" in line and DAMAGES[damage] in line
    assert sorted(p.name for p in (workdir / "damaged/12").rglob("*")) == left


def test_the_same_step_is_damaged_twice(workdir):
    for _ in range(2):
        newest = workdir / "checkpoints/12"
        newest.mkdir(exist_ok=True)
        lose_manifest(newest) if (newest / "manifest.json").exists() else None
        assert manifest.newest_intact(workdir, lambda text: None) == 8
    assert len(list((workdir / "damaged").iterdir())) == 2


def test_none_left(workdir):
    for step in (4, 8, 12):
        flip(workdir / "checkpoints" / str(step))
    with pytest.raises(RunError, match="nothing was started"):
        manifest.newest_intact(workdir, lambda text: None)


def test_a_new_workdir(tmp_path):
    assert manifest.newest_intact(tmp_path, pytest.fail) is None
    assert manifest.newest_intact(tmp_path / "nosuch", pytest.fail) is None


def test_a_later_format(workdir):
    """A format too new to read is not damage, so the checkpoint must not be moved."""
    path = workdir / "checkpoints/12/manifest.json"
    said = {"format": manifest.FORMAT + 1, "files": {"state": "as it will be"}}
    said["checksum"] = manifest._own_checksum(said)
    path.write_text(json.dumps(said))
    for look in (manifest.newest_intact, lambda w, say: manifest.problem(path.parent)):
        with pytest.raises(UserError, match="later bertjax"):
            look(workdir, pytest.fail)
    assert manifest.steps(workdir) == [4, 8, 12]


def first_manifest(path):
    """Write a manifest in the first form, without a checksum of the manifest itself."""
    said = json.loads(path.read_text())
    del said["checksum"]
    said["format"] = 1
    path.write_text(json.dumps(said, indent=1))


def test_the_first_manifests_are_read(workdir):
    folder = workdir / "checkpoints/12"
    first_manifest(folder / "manifest.json")
    assert manifest.problem(folder) is None
    flip(folder)
    assert "another checksum" in manifest.problem(folder)


@pytest.mark.parametrize("first", [False, True])
def test_a_manifest_with_a_flipped_bit(workdir, first):
    """A flipped bit in any byte is damage, never a later version or a traceback."""
    folder = workdir / "checkpoints/4"
    path = folder / "manifest.json"
    if first:
        first_manifest(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in {1, at % 8}:
            path.write_bytes(
                whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
            )
            assert manifest.problem(folder), (at, bit)


def test_half_written_names_do_not_count(workdir):
    for name in ("saving-16", "deleting-4", "16.tmp"):
        (workdir / "checkpoints" / name).mkdir()
    assert manifest.steps(workdir) == [4, 8, 12]
    assert manifest.newest_intact(workdir, pytest.fail) == 12


def test_resolve(workdir):
    assert manifest.resolve(workdir) == (workdir, workdir / "checkpoints/12")
    named = workdir / "checkpoints/8"
    assert manifest.resolve(str(named)) == (workdir, named)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        manifest.resolve(workdir / "nosuch")


def test_the_best_is_said_where_it_is_not_the_newest(workdir):
    (workdir / "run.json").write_text('{"best": {"metric": "eval/v/loss"}}')
    for best, heard in ((8, 1), (12, 0)):
        rows = [{"step": s, "eval/v/loss": abs(s - best)} for s in (4, 8, 12)]
        (workdir / "metrics.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in rows)
        )
        said = []
        assert manifest.resolve(workdir, said.append)[1].name == str(best)
        assert len(said) == heard
        said.clear()
        assert init_from.check_init_from(str(workdir), said.append).name == str(best)
        assert len(said) == heard


def test_a_step_that_is_gone(workdir):
    assert models.at_step(str(workdir), 8) == f"{workdir}/checkpoints/8"
    with pytest.raises(UserError, match=r"--step=7: .* that step; there are 4, 8, 12$"):
        models.at_step(str(workdir), 7)
    with pytest.raises(UserError, match=r"--step=7: .* that step, nor another"):
        models.at_step(str(workdir / "checkpoints/8"), 7)


def test_a_relative_workdir_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert manifest.as_path("runs/x") == tmp_path / "runs" / "x"
    with pytest.raises(UserError, match="gs:/bucket/x: a bucket is written gs://"):
        manifest.as_path("gs:/bucket/x")


def test_a_second_start_does_not_begin_anew(tmp_path):
    (tmp_path / "damaged" / "8").mkdir(parents=True)
    with pytest.raises(RunError, match="damaged"):
        manifest.newest_intact(tmp_path, print)


@pytest.mark.parametrize("name", ["007", "²", "saving-3", "x"])
def test_junk_is_no_checkpoint(tmp_path, name):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "9").write_text("a file")
    assert manifest.steps(tmp_path) == []
