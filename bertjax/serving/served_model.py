# SPDX-License-Identifier: Apache-2.0
"""Define a served model: one function of parameters and a batch.

Both formats are made from it, and their files are compared with it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bertjax import UserError
from bertjax.assembly import resolve
from bertjax.assembly.models import LoadedModel, check_masked_lm
from bertjax.inference.embed_texts import settle_sentences
from bertjax.inference.fill_blanks import masked_lm
from bertjax.interop.sentence_transformers import Sentences, of_passages
from bertjax.models.config import EncoderConfig
from bertjax.objectives import part_names
from bertjax.tasks.task_type import get_task_type

BLANKS = "mlm_positions"
Run = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
# Our heads -> the usual names of their tasks.
TASKS = {
    "classify": "text-classification",
    "regress": "text-classification",
    "tag": "token-classification",
    "span": "question-answering",
}


class ServedModel(NamedTuple):
    """A model to be served; nothing is traced yet.

    task: its name on Hugging Face's hub. run(params, batch) -> {name: f32 array}, where
    the batch has `inputs`, i32 [B, L], and optionally mlm_positions [B, P]; outputs:
    the names of the results. params: numpy arrays, with layers stacked or as from
    `unstack`. cfg: the encoder's. longest: tokens of a text. sentences: how vectors are
    computed, if it serves vectors.
    """

    task: str
    run: Run
    params: dict[str, Any]
    cfg: EncoderConfig
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    labels: tuple[str, ...]
    longest: int
    sentences: Sentences | None = None

    def unstacked(self) -> dict[str, Any]:
        """Return the parameters with a separate array for each layer."""
        import jax
        import numpy as np

        from bertjax.models import stacked_layers

        layers = stacked_layers.unstack(self.params["encoder"], self.cfg)
        return jax.tree.map(np.asarray, {**self.params, "encoder": layers})


def make_served(
    model: LoadedModel, where: str, weights: str = "", vectors: bool = False
) -> ServedModel:
    """Return the served function of an open model, in float32.

    A finetuned model returns the logits of its task. A masked LM returns logits, at
    blanks or at all tokens. Other models, and any with `vectors`, return sentence
    vectors. where: begins messages. Raises UserError for a model that generates texts,
    or whose head is not known here.
    """
    cfg, meta = model.cfg, model.meta
    if cfg.is_decoder or cfg.num_decoder_layers:
        kind = "an encoder-decoder" if cfg.num_decoder_layers else "a decoder"
        raise UserError(f"{where} is {kind}, which writes texts: encoders are served")
    if cfg.id_streams:
        raise UserError(
            f"{where} embeds ids beside words (model.id_streams={cfg.id_streams}), "
            "which inputs of served models do not have"
        )
    model.config.dtype = "float32"
    model.config.model.attention = "xla"  # a kernel would run on one platform only
    task_type = get_task_type(model.config.objective) if "task" in meta else None
    if task_type and not task_type.makes_vectors and not vectors:
        return _of_task(model, where, weights)
    params = model.read_params(weights=weights)
    has_head = "mlm" in params or (
        "mlm" in part_names(model.config.objective) and not cfg.has_head_parameters
    )
    if has_head and not task_type and not vectors:
        return _of_blanks(model, params, where)
    return _of_sentences(model, params, where)


def _inputs(cfg: EncoderConfig) -> tuple[str, ...]:
    types = ("token_type_ids",) if cfg.type_vocab_size > 1 else ()
    return ("input_ids", "attention_mask", *types)


def _parts(params: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the parameters in use, without a pooler and other heads."""
    kept = {name: params[name] for name in ("encoder", *names) if name in params}
    encoder = {k: part for k, part in kept["encoder"].items() if k != "pooler"}
    return {**kept, "encoder": encoder}


def _of_blanks(model: LoadedModel, params: Any, where: str) -> ServedModel:
    """Serve a masked LM: `logits` f32 [B, L, V], or [B, P, V] at mlm_positions."""
    from bertjax.inference import forward
    from bertjax.models import encoder

    check_masked_lm(model, where)
    if resolve.reads_before(model.config):
        raise UserError(
            f"{where} predicts a masked token from the place before it (objective="
            f"{model.config.objective}), and those who run fill-mask look where it "
            "stands: --vectors serves its vectors"
        )
    params, cfg = masked_lm(params, model.cfg)

    def run(params: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        encoded = encoder.apply(params["encoder"], cfg, batch, at=batch.get(BLANKS))
        return {"logits": forward.mlm_logits(params, cfg, encoded.hidden, batch)}

    names = _inputs(cfg), ("logits",)
    own = _parts(params, "mlm")
    return ServedModel("fill-mask", run, own, cfg, *names, (), cfg.max_length)


def _of_sentences(model: LoadedModel, params: Any, where: str) -> ServedModel:
    """Serve `sentence_embedding` f32 [B, D] and `last_hidden_state` f32 [B, L, D]."""
    from bertjax.inference import forward
    from bertjax.models import encoder

    how = settle_sentences(model, where)
    how = of_passages(how, model.config, model.meta)
    if how.kind != "dense":
        raise UserError(
            f"{where}: its vectors are {how.kind}, and vectors of other kinds than "
            "dense are not served: --format=hf writes them for sentence-transformers"
        )
    cfg = encoder.without_pooler(model.cfg)

    def run(params: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        hidden = encoder.apply(params["encoder"], cfg, batch).hidden
        options = how.pooling, how.normalize
        vectors = forward.pooled_vectors(params, cfg, hidden, batch, *options)
        return {"sentence_embedding": vectors, "last_hidden_state": hidden}

    names = _inputs(cfg), ("sentence_embedding", "last_hidden_state")
    own = _parts(params)
    task = "sentence-similarity"
    return ServedModel(task, run, own, cfg, *names, (), how.longest, how)


def _of_task(model: LoadedModel, where: str, weights: str) -> ServedModel:
    """Serve a finetuned model.

    Outputs: `logits` f32 [B, C] of a text or [B, L, C] of tokens, or `start_logits` and
    `end_logits` f32 [B, L].
    """
    from bertjax.models import encoder, heads
    from bertjax.objectives import span
    from bertjax.objectives.make_objective import make_objective
    from bertjax.tasks.prepare_task import with_head_options

    name = model.config.objective.partition(":")[0]
    if name not in TASKS:
        known = ", ".join(TASKS)
        raise UserError(
            f"{where} was finetuned with objective={model.config.objective}, which is "
            f"not served: known are {known} and models of vectors"
        )
    labels = tuple(model.meta["task"]["labels"])
    whole = with_head_options(model.config, labels)
    _, cfg = make_objective(whole, model.cfg)
    is_of_tokens, is_span = name in ("tag", "span"), name == "span"

    def run(params: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        encoded = encoder.apply(params["encoder"], cfg, batch)
        seen = encoded.hidden if is_of_tokens else encoded.pooled
        logits = heads.task_logits(params[name], cfg, seen)
        return span.outputs(logits, dict(batch)) if is_span else {"logits": logits}

    params = model.read_params(name, weights)
    own = {key: params[key] for key in ("encoder", name)}
    outputs = ("start_logits", "end_logits") if is_span else ("logits",)
    longest = min(model.config.data.length, cfg.max_length)
    names = _inputs(cfg), outputs
    return ServedModel(TASKS[name], run, own, cfg, *names, labels, longest)
