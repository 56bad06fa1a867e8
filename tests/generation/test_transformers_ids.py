# SPDX-License-Identifier: Apache-2.0
"""Ids that transformers' generate writes with small models: stored ids and, if torch is
installed, computed ones."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import small_models as small

from bertjax.generation import texts
from bertjax.generation.decode import Ends
from bertjax.generation.open_writer import place_decoder
from bertjax.generation.options import Options
from bertjax.interop import hf_read

GOLDEN = json.loads((small.DATA / "generation_golden.json").read_text())


class Ids:
    """A tokenizer whose pieces are numbers."""

    special_ids = np.zeros(0, np.int32)
    cls_id = unk_id = -1
    vocab_size = 1000  # more than any model has

    def encode_with_masks(self, text):
        return [*map(int, text.split())]

    def decode(self, ids):
        return " ".join(map(str, ids))


def open_small(folder, name, **options):
    small.write(folder, name)
    model = hf_read.open_model(folder, "x")
    start = (small.START[name],) if name in small.START else None
    return texts.TextModel(
        *place_decoder(model.cfg, model.params()),
        Ids(),
        functools.partial(texts.Side().lay_out, Ids().encode_with_masks),
        Ends(small.ENDS[name], **options),
        most=20,
        start=start,
    )


def write(model, prompts, batch_size=64, **options):
    """Return the ids that are generated after the prompts, in order."""
    if "early_stopping" in options:
        options["early_stopping"] = str(options["early_stopping"]).lower()
    beams = options.get("num_beams", 1)
    wanted = Options(
        max_new_tokens=small.NEW,
        num_return_sequences=min(beams, 2),
        batch_size=batch_size,
        **options,
    )
    lines = [" ".join(map(str, prompt)) for prompt in prompts]
    found = texts.write_texts(model, lines, wanted)
    return [one.ids for outputs in found for one in outputs]


@pytest.mark.parametrize("name", small.NAMES)
def test_ids_are_those_of_transformers(name, tmp_path):
    """transformers ran each prompt alone; here they share a batch, padded."""
    model = open_small(tmp_path, name)
    for setting, options in small.settings_of(name).items():
        found = write(model, small.draw_prompts(), **options)
        assert found == GOLDEN[name][setting], setting


def test_a_batch_of_one_and_other_shapes_give_the_same(tmp_path):
    model = open_small(tmp_path, "gpt2")
    prompts = small.draw_prompts(8)
    drawn = dict(temperature=1.0, top_k=20, seed=5)
    together = write(model, prompts, **drawn)
    assert write(model, prompts, batch_size=3, **drawn) == together
    assert write(model, prompts[:1], **drawn) == together[:1]


def test_a_prefix_counts_as_the_prompt(tmp_path):
    """Formerly the length penalty counted the prefix, and other texts were the best."""
    model, prefix = open_small(tmp_path, "gpt2"), [11, 12, 13, 14, 15]
    begun = " ".join(map(str, prefix))
    prompts = small.draw_prompts(40, seed=3)
    longer = [[*prompt, *prefix] for prompt in prompts]
    for how in ({"num_beams": 4, "length_penalty": 2.0}, {"rank": 6, "temperature": 1}):
        found = write(model, prompts, prefix=begun, **how)
        assert found == [[*prefix, *ids] for ids in write(model, longer, **how)]


def test_ids_of_no_piece_are_no_text():
    """T5's embeddings have more rows than SentencePiece can decode."""
    tokenizer = SimpleNamespace(
        special_ids=np.array([0, 1]), unk_id=-1, vocab_size=9,
        decode=lambda ids: "".join("01abcdefg"[i] for i in ids),
    )  # fmt: skip
    model = texts.TextModel(None, None, tokenizer, list, Ends((1,), 0), 64, start=(0,))
    row = texts.Row(np.array([2]), np.array([0]), [])
    ids, log_probs = np.array([3, 11, 4, 1]), np.full(4, -0.5, np.float32)
    found = texts.finish(model, row, ids, log_probs, ())
    assert found == ("bc", [3, 11, 4, 1], -2)


@pytest.mark.slow
@pytest.mark.parametrize("name", small.NAMES)
def test_many_prompts_beside_transformers(name, tmp_path):
    torch, t = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = open_small(tmp_path, name, forced=3)
    kind = t.AutoModelForSeq2SeqLM if name in small.START else t.AutoModelForCausalLM
    other = kind.from_pretrained(tmp_path).eval()
    other.generation_config = t.GenerationConfig(
        pad_token_id=0,
        eos_token_id=[*small.ENDS[name]],
        forced_eos_token_id=3,
        decoder_start_token_id=small.START.get(name),
    )
    prompts = small.draw_prompts(200, seed=9)
    for options in ({}, {"num_beams": 4, "length_penalty": 1.5}):
        found = write(model, prompts, **options)[:: 2 if options else 1]
        others = 0
        for prompt, ids in zip(prompts, found, strict=True):
            told = torch.tensor([prompt])
            with torch.inference_mode():
                row = other.generate(
                    told,
                    attention_mask=torch.ones_like(told),
                    max_new_tokens=small.NEW,
                    do_sample=False,
                    **options,
                )[0].tolist()
            begun = 1 if name in small.START else len(prompt)
            others += ids != row[begun : begun + len(ids)]
        assert others <= 2  # tokens of equal probability, up to rounding
