# SPDX-License-Identifier: Apache-2.0
"""GPT-2's directories, read and written: Conv1D, a tied head, one special token."""

import json

import heads_data as data
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_hf_read import roles

import bertjax
from bertjax import UserError, convert, fill_mask
from bertjax.assembly import resolve
from bertjax.config import schema
from bertjax.data.masking import vocab_tables
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.interop import hf_read, hf_write, read_tensors
from bertjax.models import encoder, heads
from bertjax.objectives import span

GOLDEN = json.loads((data.DATA / "hf_heads.json").read_text())
LAYOUTS = data.LAYOUTS
OURS = {"TokenClassification": "tag", "QuestionAnswering": "span"}
END = "<|endoftext|>"


def write(folder, name="gpt2", kind="LMHeadModel", change=None, **config):
    """Write a directory of drawn tensors and return them."""
    given = data.write(folder, name, kind, GOLDEN[name][kind]["shapes"], **config)
    if change:
        given = change(given)
        save_file(given, folder / "model.safetensors")
    return given


def with_tokenizer(folder, **config):
    """Add GPT-2's two tokenizer files to a model: 40 pieces without merges."""
    letters = [END, "Ġ", *"abcdefghijklmnopqrstuvwxyz.,!?0123456789"]
    vocab = {piece: i for i, piece in enumerate(letters[:40])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def logits(model, params):
    """Return a causal model's outputs for data.IDS, as transformers' class does."""
    batch = {"input_ids": data.IDS, "attention_mask": data.MASK}
    cfg = encoder.without_pooler(model.cfg)
    hidden = encoder.apply(params["encoder"], cfg, batch).hidden
    if "tag" in params:
        return heads.task_logits(params["tag"], cfg, hidden)
    if "span" in params:
        found = span.mask_padding(heads.task_logits(params["span"], cfg, hidden), batch)
        return jax.numpy.stack(found, axis=-1)
    word = params["encoder"]["embeddings"]["word"]
    return heads.mlm_logits(params["mlm"], word, cfg, hidden)


KINDS = [(name, kind) for name, kinds in data.CAUSAL.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_logits_are_those_of_transformers(name, kind, tmp_path):
    given = write(tmp_path / "a", name, kind)
    model = hf_read.open_model(tmp_path / "a", "x")
    assert not model.unexpected and not model.missing
    params = model.params()
    real = data.MASK[..., None] > 0
    wanted = np.array(GOLDEN[name][kind]["logits"], np.float32)
    found = np.where(real, logits(model, params), 0)
    np.testing.assert_allclose(found, np.where(real, wanted, 0), atol=1e-5)
    if kind in OURS:
        labels = data.LABELS if kind == "TokenClassification" else ()
        assert model.task == (OURS[kind], tuple(labels))
    else:
        assert model.heads == {"mlm"} and (params["mlm"] == {}) == (name == "gpt2")
    back = tmp_path / "b"
    back.mkdir()
    labels = model.task.labels if model.task else ()
    told = back, params, model.cfg, roles("gpt2"), "gpt2", model.raw
    hf_write.write_model(*told, labels=labels)
    made = load_file(back / "model.safetensors")
    assert made.keys() == given.keys()
    for key, tensor in given.items():
        assert made[key].tobytes() == tensor.tobytes(), key
    there, config = (
        data.config_of(name, kind),
        json.loads((back / "config.json").read_text()),
    )
    assert {key: config[key] for key in there} == there
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    file = back / "generation_config.json"
    assert (
        (json.loads(file.read_text()) == ids) if kind not in OURS else not file.exists()
    )


def test_columns_land_where_they_belong(tmp_path):
    """A Conv1D is [in, out]: query, key and value are blocks of columns, each divided
    into heads."""
    given = write(tmp_path)
    layers = hf_read.open_model(tmp_path, "x").params()["encoder"]["layers"]
    whole = given["transformer.h.1.attn.c_attn.weight"]
    for i, name in enumerate(("query", "key", "value")):
        part = layers["attention"][name]
        assert part["kernel"].shape == (3, 8, 2, 4)
        np.testing.assert_array_equal(
            part["kernel"][1].reshape(8, 8), whole[:, 8 * i : 8 * (i + 1)]
        )
        bias = given["transformer.h.1.attn.c_attn.bias"][8 * i : 8 * (i + 1)]
        np.testing.assert_array_equal(part["bias"][1].ravel(), bias)
    up = layers["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(up[2], given["transformer.h.2.mlp.c_fc.weight"])


@pytest.mark.parametrize("transpose", [False, True])
def test_columns_are_read_in_blocks(tmp_path, monkeypatch, transpose):
    given = np.arange(50 * 6, dtype=np.float32).reshape(50, 6)
    save_file({"x": given}, tmp_path / "model.safetensors")
    stored = read_tensors.open_tensors(tmp_path, "here")["x"]
    lengths, rows = [], type(stored).rows
    monkeypatch.setattr(read_tensors, "BLOCK", 8 * 6)
    monkeypatch.setattr(
        type(stored),
        "rows",
        lambda self, begin, end: lengths.append(end - begin) or rows(self, begin, end),
    )
    swapped = read_tensors.SwappedTensor.of(stored)
    out = np.full((50, 2) if transpose else (2, 50), np.nan, np.float32)
    swapped.fill(out, transpose, part=1, of=3)
    np.testing.assert_array_equal(out if transpose else out.T, given[:, 2:4])
    assert lengths == [8] * 6 + [2]
    np.testing.assert_array_equal(swapped.rows(1, 3), given[:, 1:3].T)
    assert swapped.shape == (6, 50) and swapped.shape_in_file((6, 50)) == [50, 6]


def test_files_without_the_prefix_and_with_buffers(tmp_path):
    """As in openai-community/gpt2; GPT2DoubleHeadsModel has one more head."""

    def bare(made):
        made = {k.removeprefix("transformer."): v for k, v in made.items()}
        made |= {f"h.{i}.attn.bias": np.ones((1, 1, 20, 20), "u1") for i in range(3)}
        made |= {f"h.{i}.attn.masked_bias": np.full((), -1e4, "f4") for i in range(3)}
        made["lm_head.weight"] = made["wte.weight"].copy()
        return made | {"multiple_choice_head.summary.bias": np.zeros(1, "f4")}

    write(tmp_path / "a")
    write(tmp_path / "b", change=bare, architectures=["GPT2Model"])
    a, b = (hf_read.open_model(tmp_path / n, n) for n in "ab")
    assert b.unexpected == ("multiple_choice_head.summary.bias",) and not b.missing
    assert [*a.leaves] == [*b.leaves] and b.heads == {"mlm"}
    for path in a.leaves:
        np.testing.assert_array_equal(a.read(path), b.read(path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer"]),
        ({"scale_attn_weights": False}, ["scale_attn_weights=False"]),
        ({"add_cross_attention": True}, ["add_cross_attention=True"]),
        ({"activation_function": "mish"}, ["activation_function", "mish"]),
        ({"n_inner": "wide"}, ["n_inner='wide'"]),
        ({"n_inner": 0}, ["n_inner=0"]),
        ({"n_inner": 20}, ["h.0.mlp.c_fc.weight [8, 32], not [8, 20]"]),
        ({"n_embd": None}, ["lacks n_embd"]),
        ({"n_layer": 4}, ["lacks h.3.attn.c_attn.weight"]),
        ({"architectures": ["GPT2ForSequenceClassification"]},
         ["GPT2ForSequenceClassification is not", "GPT2ForTokenClassification"]),
    ],
)  # fmt: skip
def test_what_is_refused(config, words, tmp_path):
    write(tmp_path, **config)
    with pytest.raises(UserError) as e:
        hf_read.open_model(tmp_path, "--from=a")
    said = str(e.value)
    assert said.startswith("--from=a") and "\n" not in said
    assert all(word in said for word in words), said


def test_options_that_compute_the_same(tmp_path):
    write(tmp_path / "a")
    plain = hf_read.open_model(tmp_path / "a", "x").cfg
    same = {"reorder_and_upcast_attn": True, "n_inner": 32, "use_cache": False}
    write(tmp_path / "b", **same, activation_function="gelu_pytorch_tanh")
    cfg = hf_read.open_model(tmp_path / "b", "x").cfg
    assert cfg.hidden_act == "gelu_pytorch_tanh"
    _, _, config = hf_write.choose_family(cfg, roles("gpt2"), "bert")
    assert (config["model_type"], config["n_inner"]) == ("gpt2", None)
    assert plain.hidden_act == "gelu_new" and plain.intermediate_size == 32


def test_there_and_back_with_its_tokenizer(tmp_path, capsys):
    given = write(tmp_path / "a", bos_token_id=0, eos_token_id=0, pad_token_id=None)
    with_tokenizer(tmp_path / "a")
    convert.main([f"--from={tmp_path / 'a'}", f"--to={tmp_path / 'w'}"])
    convert.main([f"--from={tmp_path / 'w'}", f"--to={tmp_path / 'b'}", "--format=hf"])
    assert "which counts" not in capsys.readouterr().err
    made = load_file(tmp_path / "b/model.safetensors")
    assert made.keys() == given.keys()
    assert all(made[key].tobytes() == given[key].tobytes() for key in given)
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors",
                     "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    opened = {name: bertjax.load(str(tmp_path / name)) for name in "awb"}
    assert {model.config.objective for model in opened.values()} == {"clm"}
    assert {model.config.model.family for model in opened.values()} == {"gpt2"}
    told = {name: model.logits(["ab c"])[0] for name, model in opened.items()}
    assert told["a"].shape == (6, 40)  # the text between two <|endoftext|>
    np.testing.assert_array_equal(told["w"], told["a"])
    np.testing.assert_array_equal(told["b"], told["a"])
    for model in opened.values():
        assert model.tokenizer.encode("ab c") == [2, 3, 1, 4]
        assert {*model.tokenizer.roles.values()} == {0}
        with pytest.raises(UserError, match="causal language model, which fills no"):
            model.fill_mask(["a"])
    with pytest.raises(UserError, match="causal language model, which fills no"):
        fill_mask.main([f"--model={tmp_path / 'w'}", "a"])
    told = json.loads((tmp_path / "b/tokenizer_config.json").read_text())
    assert told["bos_token"] == told["eos_token"] == told["pad_token"] == END
    assert not {"mask_token", "cls_token", "sep_token"} & told.keys()


def test_masked_objectives_need_a_mask(tmp_path):
    with_tokenizer(tmp_path, tokenizer_class="GPT2Tokenizer")
    config, tokenizer = schema.base(), load_tokenizer(tmp_path)
    config.data.vocab = "here"

    tables = vocab_tables.make_tables(tokenizer)

    def make(needs):
        given = config, frozenset({needs}), tokenizer, tables
        return resolve.make_features(*given, 32, None)

    assert "clm_ids" in make("clm").specs({})
    for needs in ("mlm", "mntp", "pmlm", "diffusion", "mntp*3+clm*1"):
        with pytest.raises(UserError, match=r"none \(data.vocab=here\)") as e:
            make(needs)
        assert "\n" not in str(e.value)


@pytest.mark.slow
def test_transformers_opens_what_we_write(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, n_embd=64, n_layer=3, n_head=4, n_positions=64)
    ends = dict(bos_token_id=0, eos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends))
    theirs.eval().save_pretrained(tmp_path / "a")
    with_tokenizer(tmp_path / "a")
    pickled = tmp_path / "p"
    pickled.mkdir()
    torch.save(theirs.state_dict(), pickled / "pytorch_model.bin")
    for name in ("config.json", "vocab.json", "merges.txt"):
        (pickled / name).write_bytes((tmp_path / "a" / name).read_bytes())
    ids = np.random.default_rng(0).integers(1, 40, (4, 64))
    with torch.inference_mode():
        wanted = theirs(torch.tensor(ids)).logits.numpy()
    for name in ("a", "p"):
        out = tmp_path / f"{name}.back"
        convert.main([f"--from={tmp_path / name}", f"--to={out}", "--format=hf"])
        again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert type(again).__name__ == "GPT2LMHeadModel"
        assert again.generation_config.eos_token_id == 0
        with torch.inference_mode():
            found = again(torch.tensor(ids)).logits.numpy()
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_a_run_of_our_own(command, corpus, tmp_path):
    """A run of configs/gpt.py exports as a GPT-2 with the same logits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from conftest import succeeded

    texts = [f"--config.data.{n}={corpus / f'{n}.txt'}" for n in ("train", "valid")]
    more = [f"--config.data.cache={tmp_path / 'stores'}", f"--workdir={tmp_path / 'w'}"]
    succeeded(command("train", "--config=gpt.py:smoke", *texts, *more))
    out = tmp_path / "hf"
    convert.main([f"--from={tmp_path / 'w'}", f"--to={out}", "--format=hf"])
    model = bertjax.load(str(tmp_path / "w"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "The value of a list is."
    ids = tokenizer(text)["input_ids"]
    assert ids == [model.tokenizer.cls_id, *model.tokenizer.encode(text)]
    assert tokenizer.eos_token_id == theirs.generation_config.eos_token_id
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits.numpy()[0]
    found = model.logits([text])[0]  # including [SEP]
    np.testing.assert_allclose(found[:-1], wanted, atol=1e-5)
