# SPDX-License-Identifier: Apache-2.0
"""Turn a ConfigDict into frozen values: the encoder's config, phases, masking."""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.config import schema
from bertjax.data import phases
from bertjax.data.features import make_features as features
from bertjax.data.features.base import KEYS, Features, Settings, Spec
from bertjax.data.features.make_features import split_needs
from bertjax.data.masking import mask_rates
from bertjax.data.sequences.plan import row_specs
from bertjax.data.tokenizers import stream_vocab
from bertjax.data.tokenizers.stream_vocab import read_streams
from bertjax.models.config import DTYPES, EncoderConfig, read_id_streams
from bertjax.models.families import FAMILIES, in_effect
from bertjax.objectives import BEFORE, CAUSAL, parse, part_names
from bertjax.parallel.host_memory import cpu_has

SPELLED = {"num_hidden_layers", "hidden_size", "num_attention_heads"}


def dtype_of(name: str, backend: str) -> str:
    """Return the dtype that `name` stands for; auto and fast depend on the backend."""
    if name not in ("auto", "fast"):
        return name
    is_half = backend != "cpu" or (name == "fast" and cpu_multiplies_bfloat16())
    return "bfloat16" if is_half else "float32"


def cpu_multiplies_bfloat16(facts: str = "/proc/cpuinfo") -> bool:
    """Return whether this CPU has instructions for products of bfloat16."""
    return cpu_has("avx512_bf16", "amx_bf16", "bf16", facts=facts)


def encoder_config(
    config: ConfigDict, vocab_size: int, backend: str = "cpu"
) -> EncoderConfig:
    """Build the encoder's config; `vocab_size` is the tokenizer's.

    A larger model.vocab_size is padding, which is never predicted unless model.pieces
    counts it. `backend` (jax.default_backend()) decides what dtype="auto" and "fast"
    mean. Raises UserError.
    """
    given = {k: v for k, v in config.model.items() if v is not None}
    family = registry.pick("model.family", given.pop("family"), FAMILIES)
    name, size = given.pop("size", ""), {}
    # otherwise the shape is not a size of the family
    if name or not SPELLED <= given.keys():
        size = registry.pick("model.size", name, family.sizes)
    shape = {**family.fixed, **size, **given}
    shape.setdefault("intermediate_size", 4 * shape["hidden_size"])
    if shape.setdefault("vocab_size", vocab_size) < vocab_size:
        raise UserError(
            f"model.vocab_size={shape['vocab_size']} is smaller than the tokenizer's "
            f"{vocab_size} pieces: leave it empty, or give a larger one"
        )
    padded = shape["vocab_size"] > vocab_size
    if 0 < shape.setdefault("pieces", vocab_size if padded else 0) < vocab_size:
        raise UserError(
            f"model.pieces={shape['pieces']} is smaller than the tokenizer's "
            f"{vocab_size} pieces: leave it empty"
        )
    # A stream without a known size is written without a number;
    # EncoderConfig refuses it.
    sized = (f"{n}:{rows or ''}".rstrip(":") for n, rows in id_streams(config).items())
    shape["id_streams"] = ",".join(sized)
    learnt = {part.name for x in trained_objectives(config) for part in parse(x)}
    if learnt == {"clm"}:
        shape["is_decoder"] = True  # its tokens were trained with causal attention
    is_outside = any(map(registry.is_outside, learnt))
    if not (config.task.text or is_outside or "denoise" in learnt):
        shape["num_decoder_layers"] = 0  # none is trained, though init_from has one
    registry.pick("dtype", config.dtype, dict.fromkeys(("auto", "fast", *DTYPES)))
    dtype = dtype_of(config.dtype, backend)
    # A loop over the layers compiles in a minute and stores only matrix products.
    # Without the loop a step is a fifth faster (docs/benchmarks.md), but compile time
    # grows with the number of layers. On a CPU recomputing costs more than memory does.
    if backend != "cpu":
        unrolled = shape["num_hidden_layers"] <= 12
        defaults = {"unroll": 0 if unrolled else 1, "remat": "dots"}
        shape = defaults | {"max_logits_mb": 512} | shape
        shape.setdefault("attention", {"tpu": "tpu"}.get(backend, "gpu"))
    cfg = EncoderConfig(**shape, dtype=dtype)
    longest = max(config.data.length, *(p.length for p in wanted_phases(config)))
    if longest > cfg.max_length:
        key = "data.length" if longest == config.data.length else "phases: length"
        limit = f"model.max_position_embeddings={cfg.max_position_embeddings}"
        if cfg.position_offset:
            limit += f" less model.position_offset={cfg.position_offset}"
        raise UserError(f"{key}={longest} is more than {limit}")
    return cfg


def id_streams(config: ConfigDict) -> dict[str, int]:
    """Return the streams that a model embeds besides words: {name: table rows}.

    A stream of data.streams has as many rows as it may have values, and 2 more. Raises
    UserError for fewer.
    """
    written = in_effect(config.model)["id_streams"] or ""
    caps, sized = read_streams(config.data.streams), {}
    for name, rows in read_id_streams(written).items():
        ids = stream_vocab.FIRST + caps[name] if name in caps else 0
        if 0 < rows < ids:
            raise UserError(
                f"model.id_streams={written}: {name} has {ids} ids, no value and "
                f"unknown ones included (data.streams={config.data.streams})"
            )
        sized[name] = rows or ids
    return sized


def max_positions(config: ConfigDict) -> int:
    """Return the longest sequence that the model has positions for."""
    shape = in_effect(config.model)
    return shape["max_position_embeddings"] - shape["position_offset"]


def embedded_streams(config: ConfigDict) -> frozenset[str]:
    """Return the streams of data.streams that the model embeds."""
    own = read_streams(config.data.streams).keys()
    return frozenset(own & id_streams(config).keys())


def check_id_streams(config: ConfigDict, half: Features) -> None:
    """Refuse streams of model.id_streams that batches do not have. Raises UserError."""
    if not (names := id_streams(config)):
        return
    gathered = row_specs(half.raw, None, None, half.streams)
    arrays = half.specs({name: Spec(*spec) for name, spec in gathered.items()})
    for name in names:
        if f"{name}_ids" not in arrays:
            raise UserError(
                f"model.id_streams={name}: rows of objective="
                f"{config.objective} have no {name}_ids: name a stream of data.streams"
            )


def wanted_phases(config: ConfigDict) -> list[phases.Wanted]:
    """Parse config.phases; without it, there is one phase of the config's values."""
    data = config.data
    return phases.parse_phases(
        config.phases, config.batch_size, data.length, data.mask_rate
    )


def objectives_of(config: ConfigDict, teacher: Any = None) -> dict[str, Any]:
    """Build the objectives of the phases for a model with a vocabulary of one piece.

    Returns {name in phases: Objective}; "" is the config's own, and the
    last. Raises UserError.
    """
    from bertjax.objectives.make_objective import make_objective  # needs jax

    cfg = encoder_config(config, 1)
    objectives = {}
    for name in names_of(config):
        own = name or config.objective
        objectives[name] = make_objective(own, cfg, teacher=teacher)[0]
        check_plan(config, objectives[name].needs, own)
    return objectives


def token_ids(config: ConfigDict, tokenizer: Any = None) -> Any:
    """Return the TokenIds of a tokenizer, or stand-ins for None.

    A stream without a known vocabulary gets as many ids as data.streams allows.
    """
    from bertjax.objectives.base import NO_TOKENIZER, TokenIds  # needs jax

    caps = read_streams(config.data.streams)
    sizes = {name: stream_vocab.FIRST + cap for name, cap in caps.items()}
    ids = NO_TOKENIZER
    if tokenizer is not None:
        ids, known = TokenIds.of(tokenizer), stream_vocab.streams_of(tokenizer)
        sizes |= {name: known[name].size for name in caps if name in known}
    return dataclasses.replace(ids, streams=tuple(sorted(sizes.items())))


def trained_objectives(config: ConfigDict) -> tuple[str, ...]:
    """Return the objectives of a run's phases; the last, the config's, is first."""
    phases = wanted_phases(config)
    return (config.objective, *(p.objective for p in phases if p.objective))


def reads_before(config: ConfigDict) -> bool:
    """Return whether a model predicts a masked token from the position before it.

    The first of its objectives that fills masks decides.
    """
    for objective in trained_objectives(config):
        names = part_names(objective)
        if names - CAUSAL:
            return not names.isdisjoint(BEFORE)
    return False


def has_bare_texts(config: ConfigDict) -> bool | None:
    """Return whether an encoder-decoder was trained on texts in T5's form.

    In that form no [CLS] begins them, and the decoder starts with padding, not [SEP]
    (data/features/spans.py and noise.py). None: the objective leaves it to the family.
    """
    denoise = [part for part in parse(config.objective) if part.name == "denoise"]
    target = denoise[0].options.get("target", "text") if denoise else None
    return {"spans": True, "text": False}.get(target)


def names_of(config: ConfigDict) -> list[str]:
    """Return the names of the phases' objectives; "", the config's, comes last."""
    return sorted({p.objective for p in wanted_phases(config)} | {""}, reverse=True)


def make_features(
    config: ConfigDict,
    needs: frozenset[str],
    tokenizer: Any,
    tables: Any,
    length: int,
    mask_rate: Any,
    rates: tuple[Any, ...] = (),
    is_evaluation: bool = False,
) -> Features:
    """Build the host half that an objective needs; without one, rows stay as they are.

    mask_rate: that of the phase; rates: those of all phases with its shape, by default
    that one alone. Raises UserError.
    """
    needed = split_needs(needs)
    rates = rates or (mask_rate,)
    rows = 1 if is_evaluation else config.accumulate
    settings = Settings(
        config, tokenizer, tables, length, mask_rate, rates, rows,
        id_streams(config), embedded_streams(config), max_positions(config),
    )  # fmt: skip
    half = (
        Features(settings)
        if needed.features is None
        else features.make_features(needed.features, settings)
    )
    check_id_streams(config, half)
    return half


def check_keys(config: ConfigDict, halves: Iterable[Features]) -> None:
    """Refuse keys that no phase's host half uses, and unused mask rates of phases.

    Raises UserError.
    """
    pairs = [*zip(wanted_phases(config), halves, strict=True)]
    read = frozenset().union(*(half.keys for _, half in pairs))
    for phase, half in pairs:
        own = phase.mask_rate != config.data.mask_rate
        if own and "mask_rate" not in half.keys:
            raise UserError(
                f"phases: mask_rate={phase.mask_rate} has no effect with objective="
                f"{phase.objective or config.objective}: leave it out"
            )
    if config.eval.mask_rate is not None and "mask_rate" not in read:
        raise UserError(
            f"eval.mask_rate={config.eval.mask_rate} has no effect with objective="
            f"{config.objective}: leave it out"
        )
    defaults = schema.base().data
    for key in sorted(KEYS - read):
        if (value := config.data[key]) not in (defaults[key], ""):
            usual = "" if defaults[key] is None else defaults[key]
            # A whole number cannot be given as empty.
            instead = f", or where the config file has it give --config.data.{key}="
            raise UserError(
                f"data.{key}={value} has no effect with objective={config.objective}: "
                "leave it out" + f"{instead}{usual}" * (key != "max_predictions")
            )


def eval_mask_rate(config: ConfigDict) -> float | None:
    """Return the mask rate of evaluations; of a ramp, the last rate."""
    rate = config.eval.mask_rate
    return mask_rates.last(config.data.mask_rate if rate is None else rate)


def check_plan(config: ConfigDict, needs: frozenset[str], objective: str = "") -> None:
    """Refuse an objective that needs what the plan cannot provide.

    objective: that of a phase; "": the config's. Raises UserError.
    """
    objective = objective or config.objective
    labelled = bool(config.task.text)
    needed = split_needs(needs)
    if needed.labels and not labelled:
        raise UserError(
            f"{objective=} learns from labelled rows: name their columns, task.text "
            "and task.label"
        )
    if labelled and not needed.labels:
        raise UserError(
            f"{objective=} learns from running text, not from the "
            f"rows of a table: leave task.text={config.task.text} out"
        )
    answers = (needed.features or "").partition(":")[0] == "dialogue"
    is_outside = registry.is_outside(needed.features or "")
    if answers != (config.data.plan == "turns") and not is_outside:
        wanted = "turns" if answers else "full_sentences, or objective=dialogue"
        raise UserError(
            f"objective={objective} and data.plan={config.data.plan}: rows of turns go "
            f"with objective=dialogue; give data.plan={wanted}"
        )
    if needed.pair_rule and config.data.plan != "pairs":
        raise UserError(
            f"{objective=} needs sentence pairs: give "
            f"data.plan=pairs, not {config.data.plan!r}"
        )


def set_flags(config: ConfigDict) -> None:
    """Add the XLA_FLAGS that `deterministic` needs, before a device is used."""
    if config.deterministic:
        chosen = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{chosen} --xla_gpu_deterministic_ops=true"
