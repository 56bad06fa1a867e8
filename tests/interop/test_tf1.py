# SPDX-License-Identifier: Apache-2.0
"""Google's TensorFlow 1 checkpoints of BERT and ALBERT, and errors in them."""

import json

import numpy as np
import pytest
from originals import (
    SPECIAL,
    VOCABULARY,
    D,
    E,
    V,
    albert,
    bert,
    opened,
    refused,
    same_leaves,
    save,
    write,
    write_bert,
    write_hf,
)
from safetensors.numpy import load_file

from bertjax import convert
from bertjax.assembly import models
from bertjax.interop import hf_read


# ---------------------------------------------------------------- one model
def test_bert(tmp_path):
    made = bert()
    ours = opened(write_bert(tmp_path / "tf", made.tf))
    write_hf(tmp_path / "hf", made.hf, "bert", hidden_act="gelu_new")
    theirs = hf_read.open_model(tmp_path / "hf", "x")
    same_leaves(ours, theirs)
    assert (ours.cfg, ours.heads) == (theirs.cfg, {"mlm", "nsp"})
    assert not ours.missing and not ours.unexpected
    # In google-research/bert gelu is the tanh approximation.
    assert (ours.cfg.hidden_act, ours.cfg.layer_norm_eps) == ("gelu_new", 1e-12)


def test_albert(tmp_path):
    import sentencepiece

    made, more = albert(), {"embedding_size": E, "num_hidden_groups": 1}
    name = "albert_config.json"
    folder = write(tmp_path / "tf", "model.ckpt-best", made.tf, name, **more)
    more["hidden_act"] = "gelu_new"
    write_hf(tmp_path / "hf", made.hf, "albert", **more)
    ours, theirs = opened(folder), hf_read.open_model(tmp_path / "hf", "x")
    same_leaves(ours, theirs)
    assert (ours.cfg, ours.heads) == (theirs.cfg, {"mlm", "sop"})
    (folder / "vocab.txt").unlink()
    with (folder / "30k-clean.model").open("wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on a mat", "he was here"] * 9),
            model_writer=f,
            vocab_size=V,
            hard_vocab_limit=False,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            minloglevel=2,
        )
    _, tokenizer, *_ = models.open_model(str(folder), "--model")
    assert tokenizer.lower_case  # ALBERT's normalization
    assert tokenizer.encode("The Cát") == tokenizer.encode("the cat")


def test_there_and_back(tmp_path):
    made = bert()
    folder = write_bert(tmp_path / "tf", made.tf)
    convert.main([f"--from={folder}", f"--to={tmp_path / 'hf'}", "--format=hf"])
    back = load_file(tmp_path / "hf/model.safetensors")
    assert back.keys() == made.hf.keys()
    assert all(back[k].tobytes() == made.hf[k].tobytes() for k in back)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["hidden_act"] == "gelu_new"
    assert config["architectures"] == ["BertForPreTraining"]


@pytest.mark.parametrize("capitals, lower", [(0, True), (3, True), (20, False)])
def test_the_vocabulary_tells_whether_it_is_lower_cased(tmp_path, capitals, lower):
    folder = write_bert(tmp_path / "tf")
    words = [w.upper() if i < capitals else w for i, w in enumerate(VOCABULARY[5:])]
    text = "\n".join(SPECIAL + words) + "\n"
    (folder / "vocab.txt").write_text(text)
    assert models.open_model(str(folder), "--model")[1].lower_case is lower
    said = json.dumps({"do_lower_case": False})
    (folder / "tokenizer_config.json").write_text(said)
    assert not models.open_model(str(folder), "--model")[1].lower_case


def test_heads_that_are_not_there_or_not_known_are_said(tmp_path, capsys):
    tensors = {k: v for k, v in bert().tf.items() if not k.startswith("cls/pred")}
    tensors |= {"output_weights": np.zeros((3, D), np.float32)}
    opened = models.open_model(str(write_bert(tmp_path / "tf", tensors)), "--model")
    assert "mlm/transform/kernel" in opened.checkpoint.missing  # reported by convert
    said = capsys.readouterr().err
    assert "in the files, not used: output_weights\n" in said


# ---------------------------------------------------------------- errors
def test_bad_checkpoints_are_refused(tmp_path):
    def bad(name, tensors=None, **more):
        return write_bert(tmp_path / name, tensors, **more)

    def cut(name, ending, size):
        folder = bad(name)
        (file,) = folder.glob(f"*{ending}")
        file.write_bytes(file.read_bytes()[:size])
        return folder

    made = bert().tf
    word = "bert/embeddings/word_embeddings"
    inner = "bert/encoder/layer_1/intermediate/dense/kernel"
    refused(cut("index", ".index", 99), "bert_model.ckpt.index cannot be read")
    refused(cut("empty", ".index", 0), "bert_model.ckpt.index cannot be read")
    refused(cut("data", "-00001", 5000), "bert_model.ckpt.data-*", "5,000 bytes")
    refused(cut("none", "-00001", 0), "bert_model.ckpt.data-*")
    lacks = bad("lacks", {k: v for k, v in made.items() if k != word})
    refused(lacks, f"lacks {word}")
    shape = bad("shape", made | {inner: np.zeros((D, 25), np.float32)})
    refused(shape, f"{inner} [16, 25], not [16, 24]", "bert_config.json")
    adapter = "bert/encoder/layer_0/adapter/kernel"
    refused(bad("more", made | {adapter: np.zeros((2, 2), np.float32)}), adapter)
    refused(bad("layers", num_hidden_layers=1), "layer_1", "does not know")
    refused(bad("type", made | {word: np.zeros((V, D), np.int32)}), "of type int32")
    refused(bad("act", hidden_act="tanh"), "bert_config.json", "tanh")

    folder = bad("vocabulary")
    (folder / "vocab.txt").unlink()
    refused(folder, "no tokenizer", "vocab.txt")
    folder = bad("sizes")
    (folder / "bert_config.json").unlink()
    refused(folder, "electra/embeddings/word_embeddings", "bert_config.json")
    folder = bad("bytes")
    (file,) = folder.glob("*.data-*")
    content = bytearray(file.read_bytes())
    content[::500] = bytes(b ^ 255 for b in content[::500])
    file.write_bytes(content)
    refused(folder, "cannot be read", "hecksum")
    folder = bad("alone")
    for file in folder.glob("bert_model.ckpt*"):
        file.unlink()
    refused(folder, "holds no checkpoint")


def test_one_of_several_checkpoints_is_named(tmp_path):
    folder = write_bert(tmp_path / "tf")
    other = bert().tf
    other["cls/predictions/output_bias"] += 1
    save(folder, "model.ckpt-20", other)
    refused(folder, "2 checkpoints (bert_model.ckpt, model.ckpt-20)", "`checkpoint`")
    state = folder / "checkpoint"
    state.write_text('model_checkpoint_path: "gone"\n')
    refused(folder, "2 checkpoints")
    state.write_text(
        'model_checkpoint_path: "/tmp/run/model.ckpt-20"\n'
        'all_model_checkpoint_paths: "/tmp/run/bert_model.ckpt"\n'
    )
    got = opened(folder).read("mlm/bias")
    np.testing.assert_array_equal(got, other["cls/predictions/output_bias"])
