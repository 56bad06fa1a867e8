# SPDX-License-Identifier: Apache-2.0
"""T5, BART and mBART of Hugging Face: read, written, their logits, and refusals."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import seq2seq_data as data
from safetensors.numpy import load_file

from bertjax import UserError
from bertjax.interop import hf_read, hf_write
from bertjax.interop.families import t5
from bertjax.interop.generation_config import FILE, read_generation_config
from bertjax.interop.tensor_layout import leaves, unflatten, walk
from bertjax.models import decoder, encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.models.families import FAMILIES

GOLDEN = data.layouts()
T5 = {"pad": 0, "unk": 2, "cls": 1, "sep": 1, "mask": 1}
BART = {"pad": 1, "unk": 3, "cls": 0, "sep": 2, "mask": 39}


def roles(name):
    return T5 if name.startswith("t5") else BART


def write(folder, name="t5", change=None, **config):
    told = {**GOLDEN[name]["config"], **config}
    return data.write(folder, told, GOLDEN[name]["shapes"], change)


def read_back(folder, model, name, **more):
    """Write a model; return its tensors and the contents of both JSON files."""
    folder.mkdir()
    told = folder, model.params(), model.cfg, roles(name), model.family.model_type
    hf_write.write_model(*told, **more)
    files = [json.loads((folder / n).read_text()) for n in ("config.json", FILE)]
    return load_file(folder / "model.safetensors"), *files


@functools.partial(jax.jit, static_argnums=0)
def logits(cfg, params, batch):
    memory = decoder.encode(params, cfg, batch)
    hidden = decoder.apply(params, cfg, batch, memory)
    word = params["encoder"]["embeddings"]["word"]
    return heads.mlm_logits(params["mlm"], word, cfg, hidden)


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_transformers(name, tmp_path):
    write(tmp_path, name)
    model = hf_read.open_model(tmp_path, "x")
    assert not model.unexpected and not model.missing and model.heads == {"mlm"}
    cfg = dataclasses.replace(model.cfg, unroll=1)  # compiles faster
    found = np.asarray(logits(cfg, model.params(), data.BATCH))
    wanted = np.reshape(np.array(GOLDEN[name]["logits"], np.float32), found.shape)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("name", GOLDEN)
def test_there_and_back(name, tmp_path):
    given = write(tmp_path / "a", name)
    model = hf_read.open_model(tmp_path / "a", "x")
    ids = read_generation_config(tmp_path / "a", model.raw, "x")
    told = dict(raw=model.raw, generation=ids)
    made, config, generation = read_back(tmp_path / "b", model, name, **told)
    assert made.keys() == given.keys()
    assert all(made[key].tobytes() == given[key].tobytes() for key in given)
    there = dict(GOLDEN[name]["config"])
    if "lm_head.weight" in given:  # transformers 5 still says tied
        there["tie_word_embeddings"] = False
    assert {key: config[key] for key in there} == there
    assert generation["decoder_start_token_id"] == there["decoder_start_token_id"]
    again = hf_read.open_model(tmp_path / "b", "x")
    assert again.cfg == model.cfg
    first, second = (dict(walk(m.params())) for m in (model, again))
    assert all(first[path].tobytes() == second[path].tobytes() for path in first)


@pytest.mark.parametrize("name", GOLDEN)
def test_our_leaves_are_those_that_are_initialised(name, tmp_path):
    write(tmp_path, name)
    model = hf_read.open_model(tmp_path, "x")

    def init(rng):
        stacks = {"encoder": encoder.init(rng, model.cfg)}
        stacks["decoder"] = decoder.init(rng, model.cfg)
        return stacks

    drawn = {p: x.shape for p, x in walk(jax.eval_shape(init, jax.random.key(0)))}
    stacks = ("encoder/", "decoder/")
    assert drawn == {p: s for p, s in model.describe().items() if p.startswith(stacks)}


def test_a_model_of_our_own(tmp_path):
    """It has no earlier config.json, and the ids of its own tokenizer."""
    write(tmp_path / "a")
    cfg = hf_read.open_model(tmp_path / "a", "x").cfg
    odd = dict(attention_probs_dropout_prob=0.0, max_position_embeddings=512)
    cfg = dataclasses.replace(cfg, **odd, hidden_act="gelu", mlp_type="glu")
    made = {
        path: np.full(leaf.shape, 0.5, np.float32)
        for path, leaf in leaves(t5.FAMILY, cfg).items()
    }
    params = unflatten(made.items()) | {"mlm": {}}
    own = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    hf_write.write_model(tmp_path, params, cfg, own, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "t5" and config["n_positions"] == 512
    assert config["architectures"] == ["T5ForConditionalGeneration"]
    # gated-gelu means gelu_new in transformers, which computes dense_act_fn.
    said = config["feed_forward_proj"], config["dense_act_fn"]
    assert said == ("gated-gelu", "gelu")
    ids = {"decoder_start_token_id": 0, "eos_token_id": 3, "pad_token_id": 0}
    assert {key: config[key] for key in ids} == ids
    assert json.loads((tmp_path / FILE).read_text()) == {**ids, "bos_token_id": 2}
    assert hf_read.open_model(tmp_path, "x").cfg == cfg


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_every_size_of_ours_is_one_there(family):
    own = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    for size in FAMILIES[family].sizes.values():
        width = {"intermediate_size": 4 * size["hidden_size"]}
        cfg = EncoderConfig(
            vocab_size=99, **{**width, **FAMILIES[family].fixed, **size}
        )
        found, written, _ = hf_write.choose_family(cfg, own, "bert")
        assert found.model_type == family and written == cfg


def test_bart_of_our_own_forces_nothing(tmp_path):
    write(tmp_path / "a", "bart")
    model = hf_read.open_model(tmp_path / "a", "x")
    _, config, generation = read_back(tmp_path / "b", model, "bart")
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    assert generation == {**ids, "decoder_start_token_id": 2}
    assert config["forced_eos_token_id"] is None  # transformers' default is an id


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_other_names_of_the_words(name, tmp_path):
    """In released files both stacks have the word table, and T5 has one more table."""
    prefix = "model." if name == "bart" else ""
    cross = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def released(made):
        word = made[f"{prefix}shared.weight"]
        for stack in ("encoder", "decoder"):
            made[f"{prefix}{stack}.embed_tokens.weight"] = word.copy()
        made["lm_head.weight"] = word.copy()
        return made | ({cross: np.zeros((6, 2), "f4")} if name == "t5" else {})

    write(tmp_path / "a", name)
    write(tmp_path / "b", name, released)
    a, b = (hf_read.open_model(tmp_path / n, "x") for n in "ab")
    assert a.cfg == b.cfg and not b.unexpected and [*a.leaves] == [*b.leaves]
    for path in a.leaves:
        np.testing.assert_array_equal(a.read(path), b.read(path))

    def differs(made):
        made = released(made)
        made[f"{prefix}encoder.embed_tokens.weight"][3] += 1
        return made

    write(tmp_path / "c", name, differs)
    with pytest.raises(UserError, match=r"encoder\.embed_tokens\.weight differs"):
        hf_read.open_model(tmp_path / "c", "x")


def test_bart_as_it_was_released_has_no_bias(tmp_path):
    def bare(made):
        del made["final_logits_bias"]
        return {key.removeprefix("model."): value for key, value in made.items()}

    write(tmp_path / "a", "bart", bare, architectures=["BartModel"])
    model = hf_read.open_model(tmp_path / "a", "x")
    assert model.heads == {"mlm"} and not model.missing
    np.testing.assert_array_equal(model.params()["mlm"]["bias"], np.zeros(40))
    made, config, _ = read_back(tmp_path / "b", model, "bart")
    assert made["final_logits_bias"].shape == (1, 40)
    assert config["architectures"] == ["BartForConditionalGeneration"]


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("t5", {"d_kv": 8}, "d_kv=8 with num_heads=2 and d_model=8 (heads here are "),
        ("t5", {"feed_forward_proj": "double-relu"}, "feed_forward_proj='double-relu'"),
        ("t5", {"dense_act_fn": "mish"}, "mish"),
        ("t5", {"num_decoder_layers": 0}, "num_decoder_layers=0"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder=False"),
        ("t5", {"is_decoder": True}, "is_decoder=True"),
        ("t5", {"num_layers": 2}, "layers that config.json does not have: "),
        ("t5", {"num_decoder_layers": 3}, "lacks decoder.block.2.layer.0"),
        ("t5", {"relative_attention_num_buckets": 8}, "[6, 2], not [8, 2]"),
        ("t5", {"d_model": None}, "lacks d_model"),
        ("t5", {"num_heads": "2"}, "num_heads='2' is no int"),
        ("t5", {"architectures": ["T5ForTokenClassification"]},
         "T5ForTokenClassification is not supported; of t5 these heads of tasks"),
        ("bart", {"scale_embedding": True}, "scale_embedding=True is not supported"),
        ("bart", {"decoder_attention_heads": 4},
         "encoder_attention_heads=2 with decoder_attention_heads=4 is not supported"),
        ("bart", {"decoder_ffn_dim": 16}, "encoder_ffn_dim=12 with decoder_ffn_dim=16"),
        ("bart", {"decoder_layers": 3}, "lacks decoder.layers.2.self_attn.q_proj.weig"),
        ("bart", {"max_position_embeddings": 22}, "[22, 8], not [24, 8]"),
        ("mbart", {"scale_embedding": True}, "scale_embedding=True is not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(name, config, words, tmp_path):
    write(tmp_path, name, **config)
    with pytest.raises(UserError) as e:
        hf_read.open_model(tmp_path, "--from=a")
    said = str(e.value)
    assert said.startswith("--from=a") and "\n" not in said and words in said, said


def test_options_that_no_encoder_decoder_there_has(tmp_path):
    write(tmp_path, "bart")
    cfg = hf_read.open_model(tmp_path, "x").cfg
    for option in (
        dict(attention_bias=False),
        dict(position_offset=0),
        dict(logit_scale=0.5),
        dict(final_norm=True),
        dict(qk_norm=True),
    ):
        with pytest.raises(UserError, match="--format=hf"):
            odd = dataclasses.replace(cfg, **option)
            hf_write.choose_family(odd, BART, "bart")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5_v1.1", "t5_v1.1_tied", "bart", "exact_gelu"])
def test_transformers_opens_what_we_write(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # dense_act_fn has an activation that feed_forward_proj cannot express.
    more = {"dense_act_fn": "gelu"} if name == "exact_gelu" else {}
    name = "t5_v1.1" if more else name
    write(tmp_path / "a", name, **more)
    model = hf_read.open_model(tmp_path / "a", "x")
    read_back(tmp_path / "b", model, name)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "b").eval()
    batch = {k: torch.tensor(v, dtype=torch.long) for k, v in data.BATCH.items()}
    with torch.inference_mode():
        wanted = theirs(**batch).logits.numpy()
        ids = theirs.generate(batch["input_ids"], max_new_tokens=4)
    found = logits(model.cfg, model.params(), data.BATCH)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert ids[0, 0] == theirs.generation_config.decoder_start_token_id
