# SPDX-License-Identifier: Apache-2.0
"""bertjax.convert, and other commands on Hugging Face directories."""

import json
import shutil

import pytest
from conftest import read_rows, refused, succeeded, train_losses
from safetensors.numpy import load_file

from bertjax import UserError, convert
from bertjax.assembly import command_line
from bertjax.assembly.save_model import check_target
from bertjax.checkpoints import workdir_kinds
from bertjax.checkpoints.manifest import newest_intact
from bertjax.storage import directories

TEXTS = ["The [MASK] is [MASK].", "A [MASK] of words."]


@pytest.fixture(scope="module")
def exported(command, trained, tmp_path_factory):
    """The trained run as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    done = command("convert", f"--from={trained}", f"--to={folder}", "--format=hf")
    succeeded(done)
    return folder


def blanks(command, model):
    done = succeeded(command("fill_mask", f"--model={model}", "--json", *TEXTS))
    rows = map(json.loads, done.stdout.splitlines())
    return [blank for row in rows for blank in row["masks"]]


def test_there_and_back(command, arguments, trained, exported, tmp_path):
    names = {p.name for p in exported.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"]
    there = tmp_path / "there"
    done = command("convert", f"--from={exported}", f"--to={there}")
    assert "30 parameters matched" in succeeded(done).stderr
    assert newest_intact(there, pytest.fail) == 0
    assert (
        workdir_kinds.kind(there) == workdir_kinds.CONVERTED
        and workdir_kinds.kind(trained) == workdir_kinds.RUN
    )
    more = [f"--workdir={there}", "--allow_config_change"]
    refused(command("train", *arguments, *more), "a converted model", "init_from")
    back = tmp_path / "back"
    succeeded(command("convert", f"--from={there}", f"--to={back}", "--format=hf"))
    a, b = (load_file(d / "model.safetensors") for d in (exported, back))
    assert a.keys() == b.keys()
    assert all(a[k].tobytes() == b[k].tobytes() for k in a)
    want = blanks(command, trained)
    assert len(want) == 3
    for model in (exported, there):
        for blank, guesses in zip(blanks(command, model), want, strict=True):
            assert [g["token"] for g in blank] == [g["token"] for g in guesses]
            assert [g["probability"] for g in blank] == pytest.approx(
                [g["probability"] for g in guesses], rel=1e-5
            )


def test_the_architecture_is_the_checkpoint_s(exported):
    """init_from sets the architecture, not the config file; dropout and settings of the
    computation stay those of the config."""

    def parsed(*more):
        given = ["--config=roberta.py", f"--config.init_from={exported}", *more]
        return command_line.parse(given).config.model

    model = parsed()
    assert (model.family, model.type_vocab_size) == ("bert", 2)
    assert (model.layer_norm_eps, model.hidden_size) == (1e-12, 32)
    assert model.attention is model.remat is model.unroll is None
    assert parsed("--config.model.type_vocab_size=0").type_vocab_size == 0
    more = "--config.model.hidden_dropout_prob=0.3", "--config.model.remat=full"
    assert (parsed(*more).hidden_dropout_prob, parsed(*more).remat) == (0.3, "full")
    with pytest.raises(UserError, match="size=tiny: the sizes are those of"):
        parsed("--config.model.size=tiny")


@pytest.mark.slow
def test_padding_of_the_vocabulary_is_left_out(command, arguments, tmp_path):
    padded, folder = tmp_path / "padded", tmp_path / "hf"
    more = ["--config.model.vocab_size=1024", f"--workdir={padded}"]
    succeeded(command("train", *arguments, *more))
    succeeded(command("convert", f"--from={padded}", f"--to={folder}", "--format=hf"))
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 1000
    words = "bert.embeddings.word_embeddings.weight"
    assert len(load_file(folder / "model.safetensors")[words]) == 1000
    want, found = blanks(command, padded), blanks(command, folder)
    for before, after in zip(want, found, strict=True):
        assert [g["token"] for g in after] == [g["token"] for g in before]
        for one, other in zip(before, after, strict=True):
            assert one["probability"] == pytest.approx(other["probability"], rel=1e-3)


@pytest.mark.slow
def test_evaluate(command, trained, exported, corpus):
    """An export has the run's predictions and losses, but no unigram model."""
    text = ["--what=mlm", f"--text={corpus / 'valid.txt'}", "--json"]
    ours = json.loads(
        succeeded(command("evaluate", f"--model={trained}", *text)).stdout
    )
    theirs = json.loads(
        succeeded(command("evaluate", f"--model={exported}", *text)).stdout
    )
    assert theirs["mlm_loss"] > 0
    assert "unigram_cross_entropy" not in theirs
    assert ours["predictions"] == theirs["predictions"]
    assert ours["mlm_loss"] == pytest.approx(theirs["mlm_loss"], rel=1e-4)
    refused(command("evaluate", f"--model={exported}"), "--text")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=1", "data=2 fsdp=2"])
def test_continued_pretraining(command, arguments, trained, exported, tmp_path, mesh):
    """Sizes and vocabulary come from init_from; the loss continues at its level."""
    axes = [f"--config.mesh.{m}" for m in mesh.split()]
    given = [a for a in arguments if "model." not in a and "vocab" not in a]
    workdir = tmp_path / "run"
    more = [f"--config.init_from={exported}", f"--workdir={workdir}"]
    count = "4" if "fsdp" in mesh else "1"
    run = [*given, "--config.total.steps=3", *axes, *more]
    done = succeeded(command("train", *run, env={"JAX_NUM_CPU_DEVICES": count}))
    assert "30 parameters matched" in done.stderr
    assert train_losses(workdir)[0] < train_losses(trained)[1]
    again = command("train", *run, env={"JAX_NUM_CPU_DEVICES": count})
    assert "is done" in succeeded(again).stderr
    assert read_rows(workdir)
    folder = tmp_path / "hf"
    succeeded(command("convert", f"--from={workdir}", f"--to={folder}", "--format=hf"))


def test_refusals_leave_nothing(command, trained, exported, tmp_path):
    def broken(name, change):
        folder = tmp_path / name
        shutil.copytree(exported, folder)
        change(folder)
        return folder

    def edit(file, old, new):
        def change(folder):
            text = (folder / file).read_text("utf-8")
            assert old in text
            (folder / file).write_text(text.replace(old, new), "utf-8")

        return change

    for name, change, words in [
        ("cut", lambda d: (d / "model.safetensors").write_bytes(b"x" * 99), ["cut"]),
        ("gone", lambda d: (d / "model.safetensors").unlink(), ["model.safetensors"]),
        ("json", lambda d: (d / "config.json").write_text("{"), ["config.json"]),
        ("type", edit("config.json", '"bert"', '"opt"'), ["opt", "roberta"]),
        ("mask", edit("tokenizer.json", "[MASK]", "[MUSK]"), ["mask"]),
    ]:
        out = tmp_path / "out"
        with pytest.raises(UserError) as e:
            convert.main([f"--from={broken(name, change)}", f"--to={out}"])
        assert all(w in str(e.value) for w in words), e.value
        assert "\n" not in str(e.value)
        assert not out.exists()
        assert not list(tmp_path.glob(".unfinished*"))
    for flags, word in [
        (["--to=x"], "--from"),
        ([f"--from={trained}", f"--to={tmp_path / 'w'}"], "--format=hf"),
        ([f"--from={exported}", f"--to={tmp_path}"], "exists"),
        ([f"--from={exported}", "--to=/proc/x/y"], "cannot be written"),
        ([f"--from={exported}", "--to=/"], "exists"),
        ([f"--from={exported}", "--to=gs://b/x"], "to=gs://b/x: .* this machine"),
        ([f"--from={tmp_path / 'no'}", "--to=x"], "no such directory"),
        ([f"--from={exported / 'config.json'}", "--to=x"], "a file, no directory"),
        ([f"--from={tmp_path}", "--to=x"], r"no config\.json"),
        ([f"--from={exported}", "--to=x", "--format=tflite"], "tflite"),
    ]:
        with pytest.raises(UserError, match=word):
            convert.main(flags)
    assert not (tmp_path / "w").exists()


def test_a_directory_behind_a_url_is_to_be_copied_first(bucket, tmp_path):
    (bucket / "hf").mkdir()
    (bucket / "hf/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"--from=gs://bucket/hf .* copy it to a disk"):
        convert.main(["--from=gs://bucket/hf", f"--to={tmp_path / 'out'}"])


def test_where_to_write(tmp_path):
    """Links are followed; a failure leaves nothing, not even new parent directories."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    target = check_target(str(tmp_path / "link"), "--to=link")
    directories.make_whole(target, lambda into: (into / "a").write_text("x"))
    assert (tmp_path / "empty/a").read_text() == "x"
    with pytest.raises(UserError, match="exists already"):
        check_target(str(tmp_path / "link"), "--to=link")

    def fail(into):
        raise OSError("disk full")

    with pytest.raises(UserError, match="disk full"):
        directories.make_whole(tmp_path / "new/parents/x", fail)
    directories.make_whole(tmp_path / "other/parents/x", lambda into: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "link", "other"]
    assert (tmp_path / "other/parents/x").is_dir()
