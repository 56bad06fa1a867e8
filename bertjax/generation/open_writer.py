# SPDX-License-Identifier: Apache-2.0
"""Creates the writer of a loaded model, and decides how the model can write texts."""

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from bertjax import UserError, objectives
from bertjax.assembly import models, resolve
from bertjax.assembly.models import LoadedModel
from bertjax.config import cli
from bertjax.data.tokenizers.export_tokenizer import special_around
from bertjax.generation import blanks, dialogues, options, texts
from bertjax.generation.blanks import BlankModel
from bertjax.generation.options import Options, PromptError
from bertjax.generation.texts import Output, Prompt, Side, TextModel
from bertjax.inference.fill_blanks import masked_lm
from bertjax.scoring import sequence_scorers
from bertjax.tasks import prepare_task
from bertjax.tasks.task_rows import Form
from bertjax.tasks.task_type import get_task_type

Writer = TextModel | BlankModel


def pick_how(opened: LoadedModel, wanted: Options, where: str) -> str:
    """Return "left" or "unmask": --how, or the first way the model was trained for.

    where: the model, for messages. Raises UserError for a way for which it was not
    trained, for options that do not apply to it, and for models that write nothing.
    """
    options.check_options(wanted)
    if writes_targets(opened):
        if objectives.parse(opened.config.objective)[0].name == "rag":
            raise UserError(
                f"{where} was finetuned (objective=rag) to answer out of passages: "
                "bertjax.generate --index=DIR finds them, and bertjax.predict answers "
                "rows that have them"
            )
        why = f"was finetuned (objective={opened.config.objective}) to write a target"
        return options.check_how(wanted, ["left"], where, f"{why} from left to right")
    models.check_pretrained(opened, where)
    if dialogues.answers(opened):
        why = "answers conversations, from left to right"
        return options.check_how(wanted, ["left"], where, why)
    if is_seq2seq(opened):
        why = "is an encoder-decoder, which writes from left to right"
        return options.check_how(wanted, ["left"], where, why)
    learnt = resolve.trained_objectives(opened.config)
    ways = {"lm": "left", "pll": "unmask", "mntp": "unmask"}
    found = sequence_scorers.find_scorers(opened.cfg.is_decoder, learnt)
    able = list(dict.fromkeys(ways[name] for name in found if name in ways))
    never = {
        "left": "never predicts the next token",
        "unmask": "never fills masks where they stand",
    }
    why = f"has objective={learnt[0]}, which {never.get(wanted.how, '')}"
    how = options.check_how(wanted, able, where, why)
    if how == "unmask" and not opened.tokenizer.has_mask:
        raise UserError(f"{where} fills no blanks: its vocabulary has no mask token")
    return how


def writes_targets(opened: LoadedModel) -> bool:
    """Return whether a model was finetuned to write texts (tasks/types/seq2seq.py)."""
    return "task" in opened.meta and get_task_type(opened.config.objective).generates


def is_seq2seq(opened: LoadedModel) -> bool:
    """Return whether a model is an encoder-decoder."""
    return opened.cfg.num_decoder_layers > 0


def head_of(opened: LoadedModel) -> str:
    """Return the head that a model needs to write, or "".

    The head of an encoder-decoder, or of a model that was finetuned to write, may have
    no parameters, so it is not required.
    """
    return "" if is_seq2seq(opened) or writes_targets(opened) else "mlm"


def continues_prompt(writer: Writer) -> bool:
    """Return whether the texts continue the prompts, and are no texts of their own."""
    return isinstance(writer, TextModel) and writer.continues_prompt


def open_writer(opened: LoadedModel, how: str, params: Any) -> Writer:
    """Return the writer, with its parameters on the device; how: from `pick_how`."""
    if writes_targets(opened):
        return open_targets(opened, params)
    if is_seq2seq(opened):
        return open_seq2seq(opened, params)
    if dialogues.answers(opened):
        return open_dialogue(opened, masked_lm(params, opened.cfg))
    lm = sequence_scorers.make_language_model(opened, masked_lm(params, opened.cfg))
    return open_left(opened, lm) if how == "left" else open_blanks(lm)


def open_left(opened: LoadedModel, lm: sequence_scorers.LanguageModel) -> TextModel:
    """Return the writer of a causal or prefix LM.

    Its rows begin with [CLS], as in training and in transformers' tokenizers, unless
    that token is also the end of texts, as in GPT-2.
    """
    from bertjax.generation.decode import Ends

    cfg, has_steps = lm.causal
    tokenizer, ids = lm.tokenizer, opened.generation
    names = set().union(*map(objectives.part_names, lm.learnt))
    begin = () if tokenizer.cls_id == tokenizer.sep_id else (tokenizer.cls_id,)
    pad = tokenizer.pad_id if ids.pad_token_id is None else ids.pad_token_id
    encode = tokenizer.encode_with_masks
    if "cuglm" in names:
        encode = functools.partial(encode_lines, tokenizer)
    return TextModel(
        *place_decoder(cfg, lm.params),
        tokenizer,
        functools.partial(Side(begin).lay_out, encode),
        Ends(ids.eos_token_id, pad),
        cfg.max_length,
        context=has_steps and "prefix" in names,
        causal_steps=has_steps and "prefix" not in names,
    )


def encode_lines(tokenizer: Any, text: str) -> list[int]:
    """Encode code as models of code read it in training (data/corpus/code_names.py).

    Each line is encoded separately, without line ends and indentation.
    """
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return [*chain.from_iterable(map(tokenizer.encode_with_masks, filter(None, lines)))]


def open_dialogue(opened: LoadedModel, placed: tuple[Any, Any]) -> TextModel:
    """Return the writer of a model that answers conversations.

    placed: its parameters, and its EncoderConfig. Raises UserError for a model in which
    new tokens could not have the positions of answers.
    """
    from bertjax.generation.decode import Ends
    from bertjax.models.incremental import has_table_alone

    params, cfg = placed
    if not has_table_alone(cfg):
        raise UserError(
            f"{opened.checkpoint} writes no answers, though it can be evaluated: "
            "positions of answers are read in a table alone (model."
            "position_embedding_type=absolute, without windows and relative positions)"
        )
    tokenizer, rows = opened.tokenizer, dialogues.Conversations(opened)
    return TextModel(
        *place_decoder(cfg, params),
        tokenizer,
        Side().lay_out,
        Ends((tokenizer.sep_id,), tokenizer.pad_id),
        rows.length,
        target=rows.target - 1,
        arrange=rows.lay_out,
    )


def open_seq2seq(opened: LoadedModel, params: Any) -> TextModel:
    """Return the writer of an encoder-decoder, whose encoder reads the prompts."""
    from bertjax.generation.decode import Ends

    cfg, tokenizer, ids = opened.cfg, opened.tokenizer, opened.generation
    if ids.decoder_start_token_id is None:
        raise UserError(f"{opened.checkpoint} does not say what its texts begin with")
    first, side = ids.forced_bos_token_id, find_side(opened)
    pad = tokenizer.pad_id if ids.pad_token_id is None else ids.pad_token_id
    return TextModel(
        *place_decoder(cfg, params),
        tokenizer,
        functools.partial(side.lay_out, tokenizer.encode_with_masks),
        Ends(ids.eos_token_id, pad, ids.forced_eos_token_id),
        cfg.max_length,
        start=(ids.decoder_start_token_id, *(() if first is None else (first,))),
        # Texts that the decoder was trained on begin like those of the encoder.
        begin=side.before if first is None else (),
    )


def open_targets(opened: LoadedModel, params: Any) -> TextModel:
    """Return the writer of a model that was finetuned to write targets.

    Its rows, and the tokens that begin and end a text, are those of its task, as in
    inference/predict_rows.py.
    """
    from bertjax.generation.decode import Ends

    cfg, tokenizer = opened.cfg, opened.tokenizer
    form = prepare_task.saved_form(opened.config, opened.meta)
    targets = prepare_task.targets_of(opened.config)
    start, begin = None, ()
    if targets.place == "decoder":
        start = (tokenizer.pad_id if targets.bare else tokenizer.sep_id,)
        begin = () if targets.bare else (tokenizer.cls_id,)
    length = min(opened.config.data.length, cfg.max_length)
    return TextModel(
        *place_decoder(cfg, params),
        tokenizer,
        functools.partial(lay_out_texts, opened, form, length),
        Ends((tokenizer.sep_id,), tokenizer.pad_id),
        cfg.max_length,
        start=start,
        context=targets.place == "prefix",
        target=targets.width,
        begin=begin,
    )


def lay_out_texts(
    opened: LoadedModel, form: Form, length: int, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """Return the ids of prompts in rows of a task, at most as long as in training.

    Reports how many are cut. Raises UserError for a prompt that lacks a column.
    """
    if not prompts:
        return []
    first, *second = form.columns
    for number, prompt in enumerate(prompts if second else ()):
        if isinstance(prompt, str):
            row = "".join(f', "{column}": ...' for column in second)
            raise PromptError(
                f"{prompt[:40]!r} is one text, and the model reads {first} and "
                f'{second[0]}: give JSON lines {{"prompt": {{"{first}": ...{row}}}}}',
                number,
            )
    task_type = get_task_type(opened.config.objective)
    read = prepare_task.parse_objects(opened.config, form, prompts, "prompts")
    rows = task_type.make_rows(read, form, opened.tokenizer, False, cli.say)
    rows = rows.plan(length)
    for note in rows.notes():
        cli.say(note)
    batch = rows.gather(np.arange(rows.n), None, opened.tokenizer)
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[real > 0].tolist() for ids, real in pairs]


def find_side(opened: LoadedModel) -> Side:
    """Return the special tokens around an encoder's text.

    For a model that was trained here these are those of its rows. Otherwise they are
    those that its tokenizer.json adds. Otherwise they are those of transformers'
    classes: </s> after a T5 text, none if the vocabulary has a single special token,
    [CLS] and [SEP] around all others.
    """
    tokenizer, is_bare = opened.tokenizer, opened.has_bare_texts
    cls_id, sep_id = tokenizer.cls_id, tokenizer.sep_id
    if is_bare is None:
        if around := special_around(tokenizer):
            return Side(*map(tuple, around))
        if cls_id == sep_id:
            return Side()
        is_bare = opened.config.model.family == "t5"
    return Side(() if is_bare else (cls_id,), (sep_id,))


def place_decoder(cfg: Any, params: Any) -> tuple[Any, Any]:
    """Return the decoder of a model, and its parameters on the device."""
    import jax

    from bertjax.models import incremental

    return cached_decoder(cfg), jax.device_put(incremental.unstack_layers(params, cfg))


@functools.lru_cache(maxsize=8)
def cached_decoder(cfg: Any) -> Any:
    """Return the same decoder for equal configs, so that its programs are reused."""
    from bertjax.models.incremental import make_decoder

    return make_decoder(cfg)


def open_blanks(lm: sequence_scorers.LanguageModel) -> BlankModel:
    """Return the writer of a model that fills blanks."""
    from bertjax.inference import forward

    parts = objectives.parse(lm.learnt[0])
    blocks = (p.options.get("block", 0) for p in parts if p.name == "diffusion")
    return BlankModel(
        lm.cfg,
        forward.place_params(lm.params, lm.cfg),
        lm.tokenizer,
        lm.before,
        int(next(blocks, 0)),
    )


def write(
    writer: Writer,
    prompts: Sequence[Prompt],
    wanted: Options,
    say: Callable[[str], None] = lambda text: None,
) -> list[list[Output]]:
    """Continue prompts, or fill their blanks; return each prompt's outputs, in order.

    say: is called with the number of model calls if blanks are filled. Raises
    PromptError for a prompt that is too long, and for a prompt with columns if the
    model was not finetuned on such rows.
    """
    target = writer.target if isinstance(writer, TextModel) else None
    alone = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not target and len(alone) < len(prompts):
        raise PromptError(
            "a prompt has columns, as models have that were finetuned with "
            "objective=seq2seq: give this one a text",
            next(i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)),
        )
    if isinstance(writer, BlankModel):
        return blanks.fill_texts(writer, alone, wanted, say)
    if wanted.max_new_tokens is None and target:
        wanted = wanted._replace(max_new_tokens=target)
    if writer.arrange is not None and wanted.new_tokens > target:
        raise UserError(
            f"--max_new_tokens={wanted.new_tokens}: answers have {target} tokens at "
            f"most (data.target_length less 1)"
        )
    return texts.write_texts(writer, prompts, wanted)
