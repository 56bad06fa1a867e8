# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories: read, written, and everything that can be wrong in one."""

import dataclasses
import itertools
import json
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bertjax import UserError
from bertjax.interop import (
    hf_read,
    hf_write,
    read_tensors,
    tensor_layout,
)
from bertjax.models.families import FAMILIES as OURS

# Files as transformers 5.23 writes them (testdata/make_hf_layouts.py).
LAYOUTS = json.loads(
    (Path(__file__).parents[1] / "testdata/hf_layouts.json").read_text()
)
ROLES = {"pad": 0, "unk": 4, "cls": 2, "sep": 3, "mask": 5}


def roles(name):
    return ROLES | {"pad": LAYOUTS[name]["config"]["pad_token_id"]}


def write(folder, name, prefix="", drop=(), change=None, **config):
    """Write a directory of random tensors and return them."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(7)
    made = {
        prefix + key: rng.normal(size=shape).astype(np.float32)
        for key, shape in LAYOUTS[name]["shapes"].items()
        if key not in drop
    }
    made = change(made) if change else made
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({**LAYOUTS[name]["config"], **config})
    )
    return made


def refused(folder, *words):
    with pytest.raises(UserError) as e:
        hf_read.open_model(folder, f"--from={folder}").params()
    said = str(e.value)
    assert "\n" not in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize("name", LAYOUTS)
def test_import_then_export_gives_the_same_bytes(name, tmp_path):
    given = write(tmp_path / "a", name)
    model = hf_read.open_model(tmp_path / "a", "x")
    assert not model.unexpected
    params = model.params()
    (tmp_path / "b").mkdir()
    family = model.family.model_type
    hf_write.write_model(tmp_path / "b", params, model.cfg, roles(name), family)
    modes = {p.stat().st_mode for p in (tmp_path / "b").iterdir()}
    assert len(modes) == 1  # all files have one mode
    back = load_file(tmp_path / "b/model.safetensors")
    assert back.keys() == given.keys()
    for key in given:
        assert back[key].tobytes() == given[key].tobytes(), key
    config = json.loads((tmp_path / "b/config.json").read_text())
    there = LAYOUTS[name]["config"]
    skipped = {"architectures"} if name == "electra_discriminator" else set()
    for key in config.keys() & there.keys() - skipped:
        assert config[key] == there[key], key
    assert OURS[family]  # a value of config.model.family


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_that_of_our_own_models(name, tmp_path):
    """Shapes and names equal those of parameters made by bertjax/models."""
    import jax

    from bertjax.models import encoder

    write(tmp_path / "a", name)
    model = hf_read.open_model(tmp_path / "a", "x")
    pooled = "encoder/pooler/kernel" in model.leaves
    cfg = dataclasses.replace(model.cfg, pooler=pooled)
    made = jax.eval_shape(lambda: encoder.init(jax.random.key(0), cfg))
    ours = {path: leaf.shape for path, leaf in tensor_layout.walk({"encoder": made})}
    there = {p: s for p, s in model.describe().items() if p.startswith("encoder/")}
    assert there == ours


def test_values_land_where_they_belong(tmp_path):
    given = write(tmp_path / "a", "modernbert")
    params = hf_read.open_model(tmp_path / "a", "x").params()
    layers = params["encoder"]["layers"]
    wqkv = given["model.layers.1.attn.Wqkv.weight"]
    key = layers["attention"]["key"]["kernel"][1]
    np.testing.assert_array_equal(key.reshape(8, 8), wqkv[8:16].T)
    gate = layers["mlp"]["gate"]["kernel"][2]
    np.testing.assert_array_equal(gate, given["model.layers.2.mlp.Wi.weight"][12:].T)
    norm = layers["attention"]["norm"]["scale"]
    assert norm.shape == (2, 8)  # the first layer has none
    np.testing.assert_array_equal(norm[0], given["model.layers.1.attn_norm.weight"])


def test_old_names_buffers_prefixes(tmp_path):
    def old(made):
        made = {k.removeprefix("bert."): v for k, v in made.items()}
        made = {
            k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): v
            for k, v in made.items()
        }
        made["embeddings.position_ids"] = np.arange(20)[None]
        made["cls.predictions.decoder.bias"] = made.pop("cls.predictions.bias")
        word = made["embeddings.word_embeddings.weight"]
        made["cls.predictions.decoder.weight"] = word.copy()
        return made

    write(tmp_path / "a", "bert")
    write(tmp_path / "b", "bert", change=old)
    a, b = (hf_read.open_model(tmp_path / n, n) for n in "ab")
    assert not b.unexpected and not b.missing
    for path in a.leaves:
        np.testing.assert_array_equal(a.read(path), b.read(path))


@pytest.mark.parametrize(
    "dtype, kind",
    [("F16", np.float16), ("F64", np.float64), ("BF16", ml_dtypes.bfloat16)],
)
def test_other_widths_become_float32(tmp_path, dtype, kind):
    cast = lambda made: {k: v.astype(kind) for k, v in made.items()}  # noqa: E731
    given = write(tmp_path / "a", "bert", change=cast)
    model = hf_read.open_model(tmp_path / "a", "x")
    assert {t.dtype for t in model.tensors.values()} == {dtype}
    word = model.read("encoder/embeddings/word")
    there = given["bert.embeddings.word_embeddings.weight"].astype(np.float32)
    np.testing.assert_array_equal(word, there)


def test_a_parameter_of_eight_bits_is_refused_by_name(tmp_path):
    word = "bert.embeddings.word_embeddings.weight"

    def change(made):
        return {**made, word: made[word].astype(np.int8)}

    write(tmp_path / "a", "bert", change=change)
    refused(tmp_path / "a", word.removeprefix("bert."), "of type I8")
    file = tmp_path / "a/model.safetensors"
    eight_bits = file.read_bytes().replace(b'"dtype":"I8"', b'"dtype":"F8_E4M3"')
    grown = int.from_bytes(eight_bits[:8], "little") + len("F8_E4M3") - len("I8")
    file.write_bytes(grown.to_bytes(8, "little") + eight_bits[8:])
    refused(tmp_path / "a", word.removeprefix("bert."), "of type F8_E4M3")


@pytest.mark.parametrize("transpose", [False, True])
def test_tensors_are_read_in_blocks(tmp_path, monkeypatch, transpose):
    """Only a block of rows is in memory at a time, besides the output."""
    given = np.arange(50 * 6, dtype=np.float32).reshape(50, 6)
    save_file({"x": given}, tmp_path / "model.safetensors")
    tensor = read_tensors.open_tensors(tmp_path, "here")["x"]
    monkeypatch.setattr(read_tensors, "BLOCK", 8 * 6)
    lengths, rows = [], type(tensor).rows
    monkeypatch.setattr(
        type(tensor),
        "rows",
        lambda self, begin, end: lengths.append(end - begin) or rows(self, begin, end),
    )
    out = np.full((6, 25) if transpose else (25, 6), np.nan, np.float32)
    tensor.fill(out, transpose, part=1, of=2)
    np.testing.assert_array_equal(out.T if transpose else out, given[25:])
    assert lengths == ([16, 9] if transpose else [8, 8, 8, 1])
    other = read_tensors.open_tensors(tmp_path, "here")["x"]
    assert read_tensors.are_equal(tensor, other)


def test_shards(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = write(whole, "bert")
    write(parts, "bert")
    (parts / "model.safetensors").unlink()
    names = sorted(given)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, keys in files.items():
        save_file({k: given[k] for k in keys}, parts / file)
    weights = {k: f for f, keys in files.items() for k in keys}
    index = parts / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    a, b = (hf_read.open_model(d, "x") for d in (whole, parts))
    for path in a.leaves:
        np.testing.assert_array_equal(a.read(path), b.read(path))
    for bad in ("../whole/model.safetensors", str(whole / "model.safetensors"), ".."):
        index.write_text(json.dumps({"weight_map": weights | {names[0]: bad}}))
        refused(parts, "leads out")
    (parts / "linked.safetensors").symlink_to(whole / "model.safetensors")
    index.write_text(
        json.dumps({"weight_map": weights | {names[0]: "linked.safetensors"}})
    )
    refused(parts, "leads out")
    index.write_text(json.dumps({"weight_map": weights | {names[0]: "no.safetensors"}}))
    refused(parts, "no.safetensors")
    index.write_text(json.dumps({"weight_map": [1]}))
    refused(parts, "weight_map")


def test_a_download_cache_links_into_its_blobs(tmp_path):
    write(tmp_path / "blobs", "bert")
    snapshot = tmp_path / "snapshots/abc"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert hf_read.open_model(snapshot, "x").heads == {"mlm", "nsp"}


def test_heads_may_be_missing(tmp_path):
    drop = [k for k in LAYOUTS["bert"]["shapes"] if "transform" in k or "pooler" in k]
    write(tmp_path / "a", "bert", drop=drop[:1])  # an incomplete head does not count
    model = hf_read.open_model(tmp_path / "a", "x")
    assert ("encoder/pooler/kernel" in model.missing) == ("pooler" in drop[0])
    write(tmp_path / "b", "bert", drop=["cls.predictions.transform.dense.bias"])
    model = hf_read.open_model(tmp_path / "b", "x")
    said = []
    model.report(said.append)  # convert and init_from report it
    assert model.heads == {"nsp"} and "missing" not in " ".join(said)
    assert "mlm/transform/bias" in model.missing
    assert "mlm" not in model.params()


def test_a_missing_encoder_tensor_is_an_error(tmp_path):
    lost = "bert.encoder.layer.2.output.dense.bias"
    write(tmp_path / "a", "bert", drop=[lost])
    refused(tmp_path / "a", lost.removeprefix("bert."))


@pytest.mark.parametrize(
    "config, words",
    [
        ({"model_type": "opt"}, ["opt", "bert"]),
        ({"model_type": None}, ["model_type"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"hidden_size": "8"}, ["hidden_size"]),
        ({"hidden_size": 4}, ["word_embeddings", "[40, 8]"]),
        ({"num_hidden_layers": 4}, ["encoder.layer.3"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"num_attention_heads": 3}, ["num_attention_heads"]),
        ({"hidden_act": "mish"}, ["mish", "gelu"]),
        ({"position_embedding_type": "relative_key"}, ["relative_key"]),
        ({"is_decoder": 1}, ["is_decoder=1 is no bool"]),
        ({"add_cross_attention": True}, ["add_cross_attention"]),
        ({"num_hidden_layers": 2}, ["does not have", "encoder.layer.2"]),
        ({"layer_norm_eps": -1.0}, [": layer_norm_eps=-1.0"]),
        ({"layer_norm_eps": 1e300}, ["layer_norm_eps"]),
        ({"layer_norm_eps": 10**400}, ["layer_norm_eps"]),
        ({"layer_norm_eps": float("nan")}, ["NaN"]),
        ({"initializer_range": float("-inf")}, ["-Infinity"]),
        ({"hidden_dropout_prob": 1.0}, ["hidden_dropout_prob"]),
    ],
)
def test_configs_that_make_no_model(tmp_path, config, words):
    write(tmp_path / "a", "bert", **config)
    refused(tmp_path / "a", *words)


def test_groups_that_transformers_rounds_otherwise_are_refused(tmp_path):
    """With 14 groups, layer 9 of 18 has group 6 in transformers and group 7 here."""
    write(tmp_path / "a", "albert", num_hidden_layers=18, num_hidden_groups=14)
    refused(tmp_path / "a", "num_hidden_groups=14 of 18 layers is not supported")


def test_layers_that_follow_no_rule_are_refused(tmp_path):
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    write(tmp_path / "a", "modernbert", layer_types=kinds)
    refused(tmp_path / "a", "layer_types")
    write(tmp_path / "a", "modernbert", layer_types="full_attention")
    refused(tmp_path / "a", "layer_types='full_attention'")
    # There are fewer layers than the distance of two global layers.
    write(tmp_path / "b", "modernbert", global_attn_every_n_layers=5)
    assert hf_read.open_model(tmp_path / "b", "x").cfg.global_attn_every_n_layers == 5


FULL, NEAR = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "config, words",
    [
        ({"rope_parameters": {FULL: {"type": "linear", "factor": 4.0}}}, ["linear"]),
        ({"rope_parameters": {NEAR: {"rope_type": "yarn"}}}, ["yarn"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_parameters"]),
        ({"rope_parameters": "none"}, ["rope_parameters"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["rope_scaling", "4.0"]),
        ({"rope_scaling": "linear"}, ["another kind"]),
        ({"rope_parameters": {FULL: {"rope_theta": 0}}}, ["rope_theta"]),
        ({"rope_parameters": {FULL: {"rope_theta": 10**400}}}, ["rope_theta"]),
        ({"rope_parameters": {FULL: {"rope_theta": "9"}}}, ["rope_theta"]),
        ({"rope_parameters": None, "local_rope_theta": 0.0}, ["rope_theta"]),
        ({"max_position_embeddings": 10**12}, ["max_position_embeddings"]),
        ({"local_attention": 0}, ["local_attention"]),
    ],
)
def test_rotations_and_windows_that_are_not_known(tmp_path, config, words):
    write(tmp_path / "a", "modernbert", **config)
    refused(tmp_path / "a", *words)


def test_rotations_that_say_nothing_new(tmp_path):
    plain = {"rope_parameters": {FULL: None}, "rope_scaling": {"rope_type": "default"}}
    write(tmp_path / "a", "modernbert", **plain)
    write(tmp_path / "b", "modernbert", rope_parameters=None, rope_scaling=None)
    a, b = (hf_read.open_model(tmp_path / name, "x").cfg for name in "ab")
    assert a == b and a.rope_theta == 160_000


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ],
)
def test_a_tied_decoder_of_another_type(tmp_path, own, other):
    def integers(made):
        return {**made, other: made[own].astype(np.int64)}

    write(tmp_path / "a", "bert", change=integers)
    refused(tmp_path / "a", other, "do not fit config.json", "of type I64")

    def scalar(made):
        return {**made, other: np.zeros((), np.float32)}

    write(tmp_path / "b", "bert", change=scalar)
    refused(tmp_path / "b", other, "differs from", "config.json ties them")


def test_a_decoder_of_its_own_that_config_ties(tmp_path):
    def other(made):
        word = made["bert.embeddings.word_embeddings.weight"]
        return {**made, "cls.predictions.decoder.weight": word + 1}

    write(tmp_path / "a", "bert", change=other)
    refused(tmp_path / "a", "decoder", "tie_word_embeddings")
    write(tmp_path / "b", "bert", change=other, tie_word_embeddings=False)
    model = hf_read.open_model(tmp_path / "b", "x")
    np.testing.assert_array_equal(
        model.read("mlm/decoder"), model.read("encoder/embeddings/word") + 1
    )


@pytest.mark.parametrize(
    "name, other, own",
    [
        ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("roberta", "lm_head.decoder.bias", "lm_head.bias"),
        ("albert", "predictions.decoder.bias", "predictions.bias"),
    ],
)
def test_a_decoder_of_its_own_has_a_bias_of_its_own(tmp_path, name, other, own):
    """transformers 5 adds the decoder's bias; with tied weights both are the same."""
    word = next(n for n in LAYOUTS[name]["shapes"] if "word_embeddings.weight" in n)

    def untie(made):
        weight = other.replace("bias", "weight")
        return {**made, weight: made[word] + 1, other: made[own] + 2}

    given = write(tmp_path / "a", name, change=untie, tie_word_embeddings=False)
    model = hf_read.open_model(tmp_path / "a", "x")
    np.testing.assert_array_equal(model.read("mlm/bias"), given[other])
    (tmp_path / "b").mkdir()
    family = model.family.model_type
    hf_write.write_model(tmp_path / "b", model.params(), model.cfg, roles(name), family)
    back = load_file(tmp_path / "b/model.safetensors")
    assert back.keys() == given.keys()
    np.testing.assert_array_equal(back[own], given[other])
    np.testing.assert_array_equal(back[other], given[other])

    def differ(made):
        return {**made, other: made[own] + 2}

    write(tmp_path / "c", name, change=differ)
    refused(tmp_path / "c", other, "tie_word_embeddings")


def test_a_config_may_not_be_a_link(tmp_path):
    write(tmp_path / "a", "bert")
    (tmp_path / "a/config.json").rename(tmp_path / "config.json")
    (tmp_path / "a/config.json").symlink_to(tmp_path / "config.json")
    refused(tmp_path / "a", "config.json is a link")


def test_damaged_files(tmp_path):
    folder = tmp_path / "a"
    write(folder, "bert")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content, word in [
        (whole[:1000], "model.safetensors"),
        (whole[:-1], "cut short"),
        (b"", "cut short"),
        (b"\xff" * 8 + whole[8:], "cut short"),
        (b"\x02\0\0\0\0\0\0\0[]", "header"),
        (b"PK\x03\x04" + bytes(2000), "no safetensors file"),
        (whole.replace(b'"F32"', b'"F99"', 1), "F99"),
        (whole.replace(b'"F32"', b'"F16"', 1), "invalid shape, data type"),
    ]:
        file.write_bytes(content)
        refused(folder, word)
    file.unlink()
    refused(folder, "model.safetensors")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json")


def tokenizer(**change):
    given = dict(
        vocab_size=40,
        roles=ROLES,
        pieces=[f"w{i}" for i in range(40)],
        kind="wordpiece",
        lower_case=True,
    )
    return types.SimpleNamespace(**{**given, **change})


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    write(tmp_path / "a", "bert")
    model = types.SimpleNamespace(**vars(hf_read.open_model(tmp_path / "a", "x")))
    hf_read.check_tokenizer(model, tokenizer())
    # The table has padding rows.
    hf_read.check_tokenizer(model, tokenizer(vocab_size=33))
    for change, word in [
        (dict(vocab_size=41), "41 pieces"),
        (dict(pieces=["The"] * 40), "do_lower_case"),
    ]:
        with pytest.raises(UserError, match=word):
            hf_read.check_tokenizer(model, tokenizer(**change))
    said = []
    hf_read.check_tokenizer(model, tokenizer(roles=ROLES | {"pad": 1}), said.append)
    assert len(said) == 1 and "pad_token_id=0, the tokenizer's w1 is 1" in said[0]
    cased = {"lower_case": False, "vocab_size": 2198}
    words = ["".join(w) for w in itertools.product("abcdefghijklm", repeat=3)]
    # The third is like bert-base-chinese, where a tenth of the pieces are words.
    for pieces, rows in [(words[:900], 900), ([*words, "I"], 2198), (words, 21_000)]:
        model.cfg = types.SimpleNamespace(vocab_size=rows, position_offset=0)
        given = cased | {"pieces": pieces, "vocab_size": rows}
        hf_read.check_tokenizer(model, tokenizer(**given))
    with pytest.raises(UserError, match=r"2,197 .*: do_lower_case should be true"):
        model.cfg.vocab_size = 2199
        hf_read.check_tokenizer(model, tokenizer(pieces=["<S>", *words], **cased))
    write(tmp_path / "b", "roberta")
    model = hf_read.open_model(tmp_path / "b", "x")
    hf_read.check_tokenizer(
        model, tokenizer(roles=ROLES | {"pad": 1, "cls": 9}), said.append
    )
    assert "bos_token_id=2" in said[1]
    with pytest.raises(UserError, match="pad_token_id=1"):
        hf_read.check_tokenizer(model, tokenizer(roles=ROLES | {"pad": 3, "cls": 9}))


def test_families_for_encoders_of_our_own(tmp_path):
    write(tmp_path / "a", "bert")
    cfg = hf_read.open_model(tmp_path / "a", "x").cfg
    plain = dataclasses.replace(cfg, type_vocab_size=0)
    family, wanted, _ = hf_write.choose_family(plain, ROLES, "bert")
    assert (family.model_type, wanted.type_vocab_size) == ("bert", 1)
    family, _, _ = hf_write.choose_family(plain, ROLES, "distilbert")
    assert family.model_type == "distilbert"
    offset = dataclasses.replace(cfg, position_offset=2, classifier_activation="gelu")
    family, _, config = hf_write.choose_family(offset, ROLES | {"pad": 1}, "bert")
    assert (family.model_type, config["pad_token_id"]) == ("roberta", 1)
    told = (
        r"no family .*; the nearest, bert, has model\.position_embedding_type=absolute$"
    )
    with pytest.raises(UserError, match=told):
        none = dataclasses.replace(cfg, position_embedding_type="none")
        hf_write.choose_family(none, ROLES, "bert")


def with_padding(folder, model, pad):
    """Write a model for a tokenizer with another padding id."""
    folder.mkdir()
    given = folder, model.params(), model.cfg, ROLES | {"pad": pad}
    hf_write.write_model(*given, model.family.model_type)
    return hf_read.open_model(folder, "x")


@pytest.mark.parametrize("pad", [0, 7])
def test_positions_begin_after_our_own_padding(tmp_path, pad):
    """RoBERTa's positions begin after the padding id, which is 0 in our own
    vocabularies and 1 in RoBERTa's."""
    write(tmp_path / "a", "roberta")
    a = hf_read.open_model(tmp_path / "a", "x")
    b = with_padding(tmp_path / "b", a, pad)
    assert b.raw["pad_token_id"] == pad and b.cfg.position_offset == pad + 1
    assert b.cfg.max_length == a.cfg.max_length and [*b.leaves] == [*a.leaves]
    for path in a.leaves:
        ours, theirs = a.read(path), b.read(path)
        if path == "encoder/embeddings/position":
            ours, theirs = ours[2:], theirs[pad + 1 :]
        np.testing.assert_array_equal(ours, theirs, err_msg=path)


@pytest.mark.slow
def test_transformers_counts_positions_from_our_own_padding(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "a", "roberta")
    model = hf_read.open_model(tmp_path / "a", "x")
    ids = np.array([[2, 9, 10, 11, 3], [2, 12, 3, 1, 1]])
    wanted = None
    for pad in (1, 0, 7):  # 1 as in the file
        folder = tmp_path / f"b{pad}"
        with_padding(folder, model, pad)
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
        batch = np.where(ids == 1, pad, ids), (ids != 1).astype(np.int64)
        with torch.inference_mode():
            found = theirs(*map(torch.tensor, batch)).logits.numpy()[ids != 1]
        wanted = found if wanted is None else wanted
        np.testing.assert_allclose(found, wanted, atol=1e-5)
