# SPDX-License-Identifier: Apache-2.0
"""init_from: a run takes the encoder of another run, and its head if labels match."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bertjax import RunError, UserError, sweep, train
from bertjax.assembly import command_line, init_from
from bertjax.assembly.open_teacher import check_fit, open_teacher
from bertjax.checkpoints import manager
from bertjax.checkpoints.manager import Checkpoints
from bertjax.config import schema, serialize
from bertjax.data.tokenizers.export_tokenizer import make_json
from bertjax.data.tokenizers.extra_ids import add_extra_ids
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.interop import sentence_transformers
from bertjax.interop.hf_write import write_model
from bertjax.interop.sentence_transformers import Sentences
from bertjax.models.config import EncoderConfig
from bertjax.models.families import in_effect
from bertjax.objectives.make_objective import make_objective

CFG = EncoderConfig(
    vocab_size=20,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    max_position_embeddings=8,
)
NLI = ["entailment", "neutral", "contradiction"]


def parameters(labels, seed):
    objective, _ = make_objective(f"classify:classes={len(labels)}", CFG)
    return jax.jit(objective.init)(jax.random.key(seed))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(workdir, parameters) of a run finetuned on three classes."""
    path, params = tmp_path_factory.mktemp("first"), parameters(NLI, 1)
    saved = Checkpoints(path, 2, None)
    meta = {"config": schema.base().to_dict(), "tokenizer": "t", "tokens": 0}
    saved.save(1, {"params": params}, meta | {"task": {"labels": NLI}})
    saved.close()
    return path, params


@pytest.mark.parametrize(
    "labels, kept",
    [
        (NLI, True),
        (["entailment", "not_entailment"], False),
        (["a", "b", "c"], False),  # as many labels, with other names
        (NLI[::-1], False),  # the same labels in another order
    ],
)
def test_a_head_is_taken_with_its_labels(first, labels, kept):
    path, there = first
    asked, said = parameters(labels, 2), []
    tokenizer = SimpleNamespace(identity="t")
    taken = init_from.take(str(path), tokenizer, asked, said.append, {"labels": labels})
    jax.tree.map(np.testing.assert_array_equal, taken["encoder"], there["encoder"])
    assert ("classify" in taken) == kept
    others = "it has other labels, so the head is newly initialized"
    assert any(others in line for line in said) != kept
    assert any("initialized: classify/" in line for line in said) != kept
    if kept:
        jax.tree.map(np.testing.assert_array_equal, taken, there)


def test_pretraining_goes_on_with_model_and_vocabulary_of_a_run(trained, capsys):
    given = ["--config=bert.py:mini", f"--config.init_from={trained}"]
    config = command_line.parse(given).config
    assert config.data.vocab == str(trained / "tokenizer")
    sizes = in_effect(config.model.to_dict())
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (32, 2)
    assert "its architecture is used, not the config's (" in capsys.readouterr().err
    # Values from the command line stay.
    more = ["--config.data.vocab=own.txt", "--config.model.hidden_act=relu"]
    config = command_line.parse([*given, *more]).config
    assert (config.data.vocab, config.model.hidden_act) == ("own.txt", "relu")
    with pytest.raises(UserError, match=r"model\.size=small: the sizes are those of"):
        command_line.parse([*given, "--config.model.size=small"])
    # A directory that does not exist yet changes nothing.
    config.init_from = f"{trained}/none"
    init_from.follow_init_from(config)
    assert config.model.hidden_size == 32


@pytest.mark.parametrize("key", ["init_from", "teacher"])
def test_a_vocabulary_comes_with_its_lower_casing(trained, key, capsys):
    """Formerly the config file's data.lower_case stayed, and the run was refused with
    the advice to give the vocabulary that it had."""
    given = ["--config=t5.py:smoke", f"--config.{key}={trained}"]
    config = command_line.parse(given).config
    assert config.data.lower_case is True
    assert f"{trained}: data.lower_case=True is used" in capsys.readouterr().err
    stays = "--config.data.lower_case=False"
    config = command_line.parse([*given, stays]).config
    assert config.data.lower_case is False
    own = load_tokenizer(config.data.vocab, config.data.lower_case)
    words = "has data.lower_case=True, unlike .* --config.data.lower_case=True$"
    with pytest.raises(UserError, match=rf"^{key}=.*{words}"):
        if key == "teacher":
            check_fit(config, open_teacher(config, print), own, [])
        init_from.take(str(trained), own, {}, print, {})
    # What a config puts behind the vocabulary is no other vocabulary.
    own = add_extra_ids(load_tokenizer(config.data.vocab), 5)
    with pytest.raises(UserError, match=r"no embeddings of the 5 .*data\.extra_ids=5"):
        init_from.take(str(trained), own, {}, print, {})


def test_a_dry_run_ends_in_the_run_s_error(arguments, trained, tmp_path, capsys):
    """It compares the shapes, and reads no parameters."""
    given = [*arguments, f"--config.init_from={trained}", "--dry_run"]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(manager, "restore_params", None)
        assert train.main(given) == 0
    assert "parameters matched" in capsys.readouterr().err
    with pytest.raises(UserError) as caught:
        train.main([*given, "--config.model.num_hidden_layers=1"])
    said = f"init_from={trained}/checkpoints/12: encoder/layers/attention/key/bias has "
    assert str(caught.value) == f"{said}shape (2, 2, 16) there, (1, 2, 16) here"


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("becomes", ["electra", "mlm", "mlm+nsp"])
def test_a_masked_lm_becomes_electras_discriminator_and_the_other_way(
    tmp_path, becomes, share
):
    """Formerly an ELECTRA pair was refused: its masked-LM head is its generator's."""

    def drawn(name, seed):
        objective, _ = make_objective(name, CFG)
        return jax.jit(objective.init)(jax.random.key(seed))

    pair, said = f"electra:generator={share}", []
    first, becomes = ("mlm", pair) if becomes == "electra" else (pair, becomes)
    there, asked = drawn(first, 1), drawn(becomes, 2)
    saved = Checkpoints(tmp_path, 2, None)
    meta = {"config": schema.base().to_dict(), "tokenizer": "t", "tokens": 0}
    saved.save(1, {"params": there}, meta)
    saved.close()
    tokenizer = SimpleNamespace(identity="t")
    taken = init_from.take(str(tmp_path), tokenizer, asked, said.append, {})
    jax.tree.map(np.testing.assert_array_equal, taken, {"encoder": there["encoder"]})
    new = "generator" if first == "mlm" else "head for masked tokens"
    assert any(f"the {new} is newly initialized" in line for line in said)


def test_pretraining_keeps_how_vectors_of_sentences_are_made(tmp_path):
    """From a sentence-transformers directory or a workdir made from one; a task has its
    own way."""
    theirs, ours, config = tmp_path / "hf", tmp_path / "run", schema.base()
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    how = Sentences("cls", normalize=True, longest=7)
    sentence_transformers.write(theirs, how, width=8, longest=9)
    saved = Checkpoints(ours, 2, None)
    meta = {"config": config.to_dict(), "tokenizer": "t", "tokens": 0}
    meta["sentences"] = dataclasses.asdict(how)
    saved.save(1, {"params": {"a": np.zeros(1)}}, meta)
    saved.close()
    for path in (theirs, ours):
        config.init_from = str(path)
        assert init_from.kept_sentences(config) == {"sentences": meta["sentences"]}
    config.update(init_from="", teacher=str(theirs), init_layers="even")
    assert init_from.kept_sentences(config) == {"sentences": meta["sentences"]}
    config.task.text = "sentence"
    assert init_from.kept_sentences(config) == {}
    config.task.text = ""
    # Sparse vectors depend on a head that pretraining changes.
    config.init_from = str(theirs)
    sentence_transformers.write(theirs, Sentences(kind="sparse"), width=8, longest=9)
    assert init_from.kept_sentences(config) == {}
    sentence_transformers.write(theirs, Sentences("Dense"), width=8, longest=9)
    assert init_from.kept_sentences(config) == {}
    (theirs / "modules.json").write_text("{")
    with pytest.raises(
        UserError, match=r"init_from=.*/hf: modules\.json is not a list"
    ):
        init_from.kept_sentences(config)
    config.init_from = f"{theirs}/none"
    assert init_from.kept_sentences(config) == {}
    # Not a sentence model: the tokenizer's length is only the model's.
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text("{}")
    (tmp_path / "plain/tokenizer_config.json").write_text('{"model_max_length": 12}')
    config.init_from = str(tmp_path / "plain")
    assert init_from.kept_sentences(config) == {}


def test_what_config_json_says_beside_sizes_is_exported_again(tmp_path):
    """From a directory or a run that began from one, except keys about its files."""
    theirs, ours, config = tmp_path / "hf", tmp_path / "run", schema.base()
    roles = dict(pad=0, unk=1, cls=2, sep=3, mask=4)
    objective, cfg = make_objective("mlm", CFG)
    params = jax.device_get(jax.jit(objective.init)(jax.random.key(0)))
    own = {"model_type": "bert", "classifier_dropout": 0.3}
    theirs.mkdir()
    write_model(theirs, params, cfg, roles, raw=own | {"_name_or_path": "x"})
    config.init_from = str(theirs)
    kept = init_from.kept_hf_config(config)
    assert own.items() <= kept["hf_config"].items()
    assert kept["hf_config"].keys().isdisjoint({"architectures", "_name_or_path"})
    saved = Checkpoints(ours, 2, None)
    meta = {"config": config.to_dict(), "tokenizer": "t", "tokens": 0, **kept}
    saved.save(1, {"params": {"a": np.zeros(1)}}, meta)
    saved.close()
    config.init_from = str(ours)
    assert init_from.kept_hf_config(config) == kept
    config.init_from = ""
    assert init_from.kept_hf_config(config) == {}
    write_model(theirs, params, cfg, roles, raw=kept["hf_config"], tensors=False)
    written = json.loads((theirs / "config.json").read_text())
    assert written["classifier_dropout"] == 0.3 and "architectures" in written


def test_a_run_goes_on_without_what_it_began_from_but_for_its_vocabulary(tmp_path):
    """Without the vocabulary it would train a tokenizer and report changed text."""
    (tmp_path / "run/checkpoints/1").mkdir(parents=True)
    given = ["--config=bert.py:smoke", f"--config.init_from={tmp_path / 'gone'}"]
    for vocab, words in (
        ("", "gone: no such directory; the run in .*, saved at step 1, reads"),
        ("ids:9", "no checkpoint of .* is whole"),
    ):
        made = command_line.parse([*given, f"--config.data.vocab={vocab}"]).config
        made.data.train = made.data.valid = str(tmp_path / "text.txt")
        (tmp_path / "text.txt").write_text("4 5 6\n")
        with pytest.raises((UserError, RunError), match=words):
            train.train(made, str(tmp_path / "run"))
    # Its shape is that of init_from, not of the config file.
    (tmp_path / "run/checkpoints/1").mkdir()
    made.model.hidden_size = 72
    (tmp_path / "run/config.json").write_text(serialize.to_json(made))
    made.model.hidden_size = 64
    with pytest.raises(UserError, match="gone: no such directory; the run in "):
        train.train(made, str(tmp_path / "run"))
    (tmp_path / "gone").mkdir()
    with pytest.raises(UserError, match=r"model\.hidden_size: 72 -> 64; take"):
        train.train(made, str(tmp_path / "run"))


def test_a_run_that_goes_on_keeps_its_tokenizer(vocabulary, tmp_path):
    """Even if the teacher or init_from has other tokenizer files with the same ids."""
    run, exported = tmp_path / "run", tmp_path / "hf"
    load_tokenizer(vocabulary).save(run / "tokenizer")
    exported.mkdir()
    whole = json.dumps(make_json(load_tokenizer(vocabulary), token_types=True))
    (exported / "config.json").write_text('{"model_type": "bert"}')
    pieces = (run / "tokenizer/vocab.txt").read_text()
    config = schema.base()
    for key in ("teacher", "init_from"):
        config.update(teacher="", init_from="")
        config[key] = config.data.vocab = str(exported)
        (exported / "vocab.txt").unlink(missing_ok=True)
        (exported / "tokenizer.json").write_text(whole)
        init_from.keep_vocabulary(config, run)
        assert config.data.vocab == str(run / "tokenizer")
        config.data.vocab = str(exported)
        (exported / "tokenizer.json").unlink()
        (exported / "vocab.txt").write_text(pieces + "another\n")
        init_from.keep_vocabulary(config, run)
        assert config.data.vocab == str(exported)
        config[key] = str(tmp_path / "gone")
        init_from.keep_vocabulary(config, run)
        assert config.data.vocab == str(exported)


def test_a_sweep_says_that_what_it_began_from_is_gone(tmp_path):
    """It does not mistake the directory for a model's name on huggingface.co."""
    path = tmp_path / "swept"
    (path / "members").mkdir(parents=True)
    given = ["--config=finetune/classify.py:smoke", "--config.init_from=gone"]
    given += ["--config.task.text=text", "--config.data.valid=rows.csv"]
    for what in (
        r"gone: no such directory; a sweep under way in \S* reads its [^;]*$",
        r"gone: no such directory; the sweep in \S*, done at step 0, reads ",
    ):
        with pytest.raises(UserError, match=what):
            sweep.run(given, 1, [], None, path)
        (path / "sweep.json").write_text("{}")
