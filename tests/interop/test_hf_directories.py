# SPDX-License-Identifier: Apache-2.0
"""ELECTRA's two models as one: Google's checkpoints and Hugging Face directories."""

import json

import pytest
from originals import (
    D,
    V,
    electra,
    opened,
    refused,
    same_leaves,
    write,
    write_pair,
)
from safetensors.numpy import load_file

from bertjax import convert, fill_mask
from bertjax.assembly import command_line, models, resolve
from bertjax.interop.tensor_layout import walk


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The same pair of models in both forms."""
    folder = tmp_path_factory.mktemp("pairs")
    write(folder / "tf", "electra_small", electra().tf)
    (folder / "tf/checkpoint").write_text('model_checkpoint_path: "electra_small"\n')
    write_pair(folder / "hf")
    return folder


def test_a_pair_is_one_model_of_the_electra_objective(pairs):
    import jax

    from bertjax.objectives.make_objective import make_objective

    ours, theirs = opened(pairs / "tf"), opened(pairs / "hf")
    assert ours.heads == {"generator", "mlm", "rtd"} and not ours.unexpected
    assert ours.cfg.hidden_act == "gelu"  # google-research/electra: exact gelu
    same_leaves(ours, theirs)
    assert ours.cfg == theirs.cfg and ours.generator.cfg == theirs.generator.cfg
    for name in ("tf", "hf"):
        config, _, model, _ = models.open_model(str(pairs / name), "--model")
        assert config.objective == "electra:generator=0.5"
        args = ["--config=electra.py:smoke", "--config.data.length=16"]
        args += [f"--config.init_from={pairs / name}"]
        run = command_line.parse(args).config
        assert run.objective == "electra:generator=0.5"
        objective, _ = make_objective(run.objective, resolve.encoder_config(run, V))
        made = jax.eval_shape(objective.init, jax.random.key(0))
        leaves = jax.tree_util.tree_leaves_with_path(made)
        shapes = {"/".join(k.key for k in path): leaf.shape for path, leaf in leaves}
        assert shapes == model.describe()
        assert {p: x.shape for p, x in walk(model.params())} == shapes


def test_a_pair_fills_blanks_and_goes_there_and_back(pairs, tmp_path, capsys):
    def fill(model):
        fill_mask.main([f"--model={model}", "--json", "w1 [MASK] w3"])
        return capsys.readouterr().out

    a, b = tmp_path / "a", tmp_path / "b"
    convert.main([f"--from={pairs / 'tf'}", f"--to={tmp_path / 'workdir'}"])
    convert.main([f"--from={tmp_path / 'workdir'}", f"--to={a}", "--format=hf"])
    convert.main([f"--from={a}", f"--to={b}", "--format=hf"])
    for half in ("generator", "discriminator"):
        files = [d / half / "model.safetensors" for d in (pairs / "hf", a, b)]
        given, *made = map(load_file, files)
        for there in made:
            assert there.keys() == given.keys()
            assert all(there[k].tobytes() == given[k].tobytes() for k in given)
    assert json.loads(fill(pairs / "tf"))["masks"] == json.loads(fill(a))["masks"]


def test_what_is_no_pair_is_refused(tmp_path):
    word = "electra.embeddings.word_embeddings.weight"

    def other(parts):
        parts["generator"][word][3, 2] += 1

    def headless(parts):
        del parts["generator"]["generator_lm_head.bias"]

    refused(write_pair(tmp_path / "a", other), "embeddings/word", "not supported")
    refused(write_pair(tmp_path / "b", headless), "generator has no mlm head")
    heads = write_pair(tmp_path / "c", num_attention_heads=2)
    refused(heads, "num_attention_heads=2", "only 1")
    pieces = write_pair(tmp_path / "d")
    file = pieces / "generator/vocab.txt"
    file.write_text(file.read_text().replace("w7", "W7"))
    refused(pieces, "differ in the tokenizer")

    untied = electra()
    untied.embeddings("generator", D // 2)
    del untied.tf["generator/embeddings_project/kernel"]
    del untied.tf["generator/embeddings_project/bias"]
    head = "generator_predictions/"
    untied.head("generator_predictions", "", "", "", D // 2, D // 2)
    assert untied.tf[f"{head}dense/kernel"].shape == (D // 2, D // 2)
    folder = write(tmp_path / "e", "electra", untied.tf)
    refused(folder, "embeddings/word", "not supported")


def test_one_half_alone_is_a_model(tmp_path):
    """A discriminator alone can be opened, as after finetuning."""
    tensors = {k: v for k, v in electra().tf.items() if k.startswith("electra/")}
    model = opened(write(tmp_path / "tf", "model.ckpt-9", tensors))
    assert (model.heads, model.family.model_type) == (frozenset(), "electra")
    assert model.cfg.num_attention_heads == 1
