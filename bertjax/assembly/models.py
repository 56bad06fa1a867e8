# SPDX-License-Identifier: Apache-2.0
"""Open models: workdirs, their checkpoints, and Hugging Face directories.

Nothing here imports jax until parameters are read.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.assembly import resolve
from bertjax.checkpoints import manifest, workdir, workdir_kinds
from bertjax.config import cli, schema, serialize
from bertjax.interop import (
    generation_config,
    hf_directories,
    hf_read,
    sentence_transformers,
)
from bertjax.interop.families import all_families
from bertjax.interop.generation_config import GenerationSettings
from bertjax.models.config import RUNTIME, EncoderConfig
from bertjax.models.families import FAMILIES, size_name
from bertjax.objectives import CAUSAL, parse
from bertjax.storage import directories
from bertjax.storage.atomic import is_remote
from bertjax.tasks import hf_task_config
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.tables import Say
from bertjax.tasks.task_type import get_task_type

__all__ = ["LoadedModel", "check_masked_lm", "open_model", "params_part", "read_params"]


class LoadedModel(NamedTuple):
    """An open model, before its parameters are read.

    config: the ConfigDict of its training. checkpoint: a directory, or an
    hf_read.Imported. meta: the checkpoint's metadata.
    """

    config: ConfigDict
    tokenizer: Any
    checkpoint: Any
    meta: dict[str, Any]

    @property
    def cfg(self) -> EncoderConfig:
        """The architecture of the encoder, with the dtype of `config`."""
        return resolve.encoder_config(self.config, self.tokenizer.vocab_size)

    @property
    def generation(self) -> GenerationSettings:
        """The ids that begin, end and pad generated texts.

        They came with the model, or are those of its tokenizer's special pieces.
        """
        theirs = self.meta.get("hf", {}).get("model_type", self.config.model.family)
        family = all_families().get(theirs)
        start = family.decoder_start if family else ""
        if self.has_bare_texts is not None:
            start = "pad" if self.has_bare_texts else "sep"
        given = generation_config.from_json(self.meta.get("generation", {}))
        return given.filled(generation_config.from_roles(self.tokenizer.roles, start))

    @property
    def has_bare_texts(self) -> bool | None:
        """See `resolve.has_bare_texts`; None for an imported model."""
        return None if "hf" in self.meta else resolve.has_bare_texts(self.config)

    def read_params(self, head: str = "", weights: str = "") -> Any:
        """See `read_params`. A masked-LM head without parameters is not requested."""
        if head == "mlm" and not self.cfg.has_head_parameters:
            head = ""
        return read_params(self.checkpoint, head, weights)


def at_step(path: str, step: int | None) -> str:
    """Return a workdir's checkpoint of a step, or the workdir if there is no step.

    Raises UserError if it has no checkpoint of that step.
    """
    if step is None or not manifest.as_path(path).is_dir():
        return path  # opening reports a path that is no directory
    saved = manifest.steps(manifest.as_path(path))
    if step not in saved:
        have = f"; there are {', '.join(map(str, saved))}" if saved else ", nor another"
        raise UserError(f"--step={step}: {path} has no checkpoint of that step{have}")
    return f"{path.rstrip('/')}/checkpoints/{step}"


def find_checkpoint(path: str, flag: str, say: Say) -> tuple[Any, Any]:
    """Return (workdir, checkpoint), or another library's (directory, None).

    Raises UserError naming `flag` if there is no intact one.
    """
    try:
        directory, checkpoint = manifest.resolve(path, say)
    except OSError:
        folder = manifest.as_path(path)
        if hf_directories.is_directory(folder):
            return folder, None
        why = workdir_kinds.why_no_checkpoint(folder, path)
        raise UserError(f"{flag}={path}: {why}") from None
    if wrong := manifest.problem(checkpoint):
        whole = manifest.newest_before(directory, int(checkpoint.name) - 1)
        instead = f": {directory}/checkpoints/{whole} is whole" if whole else ""
        raise UserError(
            f"{flag}={path}: checkpoints/{checkpoint.name}: {wrong}{instead}"
        )
    return directory, checkpoint


def open_model(path: str, flag: str, say: Say = cli.say) -> LoadedModel:
    """Open a workdir, a checkpoint, or another library's directory.

    A workdir opens its newest checkpoint, or the best one if the run kept that. Raises
    UserError naming `flag` if there is no intact one.
    """
    from bertjax.data.tokenizers.tokenizer import load_tokenizer

    directory, checkpoint = find_checkpoint(path, flag, say)
    if checkpoint is None:
        return open_directory(directory, flag, say)
    meta = manifest.read_meta(checkpoint)
    if "threshold" in meta.get("task", {}):
        # After a signal the interrupted evaluation was repeated, later
        # than the checkpoint.
        scores = workdir.scores_of(directory, meta["step"])
        found = (v for k, v in scores.items() if k.endswith("/threshold"))
        tasks.learn(meta, {"threshold": next(found, None)})
    tokenizer = directories.read_directory(directory / "tokenizer", load_tokenizer)
    if tokenizer.identity != meta["tokenizer"]:
        raise UserError(f"{directory}/tokenizer is not the one of {checkpoint}")
    config = serialize.from_json(json.dumps(meta["config"]), checkpoint)
    return LoadedModel(config, tokenizer, checkpoint, meta)


def open_directory(directory: Any, flag: str, say: Say = cli.say) -> LoadedModel:
    """Open another library's directory, like `open_model` for a workdir.

    Its `checkpoint` is an hf_read.Imported. Raises UserError.
    """
    from bertjax.data.tokenizers.export_tokenizer import separators_of
    from bertjax.data.tokenizers.tokenizer import load_tokenizer

    where = f"{flag}={directory}"
    if is_remote(directory):
        raise UserError(f"{where} is another library's: copy it to a disk first")
    model = hf_directories.open_model(Path(directory), where)
    folders = hf_directories.tokenizer_folders(directory)
    tokenizer, *same = [load_tokenizer(folder, key=flag) for folder in folders]
    if any(other.identity != tokenizer.identity for other in same):
        raise UserError(f"{where}: generator and discriminator differ in the tokenizer")
    hf_read.check_tokenizer(model, tokenizer, say)
    config = schema.base()
    known = "bart" if model.cfg.num_decoder_layers else "bert"
    family = model.family.model_type if model.family.model_type in FAMILIES else known
    keys = set(config.model) - {"family", "size", *RUNTIME}
    shape = {k: getattr(model.cfg, k) for k in keys if hasattr(model.cfg, k)}
    config.model.update({**shape, "family": family, "size": size_name(family, shape)})
    config.objective = "+".join(h for h in ("mlm", "nsp", "sop") if h in model.heads)
    if model.cfg.is_decoder or not config.objective:
        config.objective = "clm" if model.cfg.is_decoder else "mlm"
    if model.cfg.num_decoder_layers:
        config.objective = "denoise" + ":target=spans" * (family == "t5")
    if isinstance(model, hf_directories.Pair):
        config.objective = f"electra:generator={model.share:g}"
    if "+" not in config.objective:
        config.data.plan = "full_sentences"
    config.data.length = min(config.data.length, model.cfg.max_length)
    if model.task:
        limit = sentence_transformers.model_max_length(model.directory, where)
        longest = model.cfg.max_length
        tasks.fill_in_task(config, *model.task, longest=min(limit or longest, longest))
    model.report(say)
    meta = {"tokenizer": tokenizer.identity, "hf": model.raw}
    ids = generation_config.read_generation_config(model.directory, model.raw, where)
    meta["generation"] = ids.to_json()
    if model.task:
        between = separators_of(tokenizer) or tasks.separators(config)
        task = {"labels": list(model.task.labels), "separators": between}
        meta["task"] = task | hf_task_config.from_json(model.raw, config, where)
    meta["config"] = config.to_dict()  # from_json has added to it
    return LoadedModel(config, tokenizer, model, meta)


def same_ids(one: Any, other: Any) -> bool:
    """Return whether two tokenizers, of other files maybe, give texts the same ids."""
    return same_pieces(one, other) and one.lower_case == other.lower_case


def same_pieces(one: Any, other: Any) -> bool:
    """Return whether two tokenizers have the same ids, lower-casing aside."""
    first, second = ((t.kind, t.pieces, t.roles) for t in (one, other))
    return first == second


def lower_case_differs(where: str, theirs: Any) -> str:
    """Return the message for a model whose tokenizer `theirs` differs in lower-casing.

    where: names the model.
    """
    key = f"data.lower_case={theirs.lower_case}"
    return f"{where} has {key}, unlike this config: give --config.{key}"


def row_length(cfg: Any, length: int | None, usual: int = 128) -> int:
    """Return --length, the tokens of a row, or by default the usual or largest number.

    Raises UserError for more tokens than the model has positions.
    """
    longest = cfg.max_length
    length = length or min(usual, longest)
    if length > longest:
        raise UserError(
            f"--length={length} is too long: the model has {longest} positions"
        )
    return length


def params_part(checkpoint: Any, weights: str = "") -> str:
    """Return which part of a checkpoint's state to use: "params" or "ema".

    weights: "raw", "ema", or "" for the average if there is one, unless the run's
    config says otherwise (eval.ema). Raises UserError if "ema" is missing.
    """
    if weights:
        registry.pick("--weights", weights, dict.fromkeys(("raw", "ema")))
    averaged = False
    if weights != "raw" and not isinstance(checkpoint, hf_read.Imported):
        from bertjax.checkpoints.manager import has_average

        averaged = has_average(checkpoint)
    if weights == "ema" and not averaged:
        raise UserError(f"--weights=ema: {checkpoint} has no moving average")
    if averaged and not weights:
        recorded = manifest.read_meta(checkpoint)["config"]
        averaged = serialize.from_json(json.dumps(recorded)).eval.ema
    return "ema" if averaged else "params"


def check_pretrained(opened: LoadedModel, what: str, then: str = "") -> None:
    """Refuse a finetuned model, whose head replaced the masked-LM head.

    what: begins the message; then: what to do instead, by default the command that uses
    such models. Raises UserError.
    """
    if "task" in opened.meta:
        objective = opened.config.objective
        task_type = get_task_type(objective)
        command = "embed" if task_type.makes_vectors else "predict"
        why = "has no masked-LM head"
        if parse(objective)[0].name == "splade":
            why = "its masked-LM head was trained for term weights, not for predictions"
        elif task_type.token_head or task_type.masks:
            why = "its masked-LM head was trained for the rows of its task only"
        raise UserError(
            f"{what} was finetuned (objective={objective}) and {why}; "
            f"{then or f'bertjax.{command} uses such models'}"
        )


def check_masked_lm(opened: LoadedModel, what: str, then: str = "") -> None:
    """Refuse a model that fills no blanks, because it is finetuned or causal.

    what, then: as in `check_pretrained`. Raises UserError.
    """
    check_pretrained(opened, what, then)
    check_encoder(opened, what)
    if not opened.tokenizer.has_mask:
        raise UserError(f"{what} fills no blanks: its vocabulary has no mask token")


def check_encoder(opened: LoadedModel, what: str) -> None:
    """Refuse a model whose tokens never attend to later ones. Raises UserError."""
    refuse_answers(opened, what)
    if opened.cfg.is_decoder:
        raise UserError(f"{what} is a causal language model, which fills no blanks")
    if opened.cfg.num_decoder_layers:
        raise UserError(
            f"{what} is an encoder-decoder, which writes texts and fills no blanks"
        )
    names = resolve.names_of(opened.config)
    learnt = [parse(name or opened.config.objective) for name in names]
    if {part.name for parts in learnt for part in parts} <= CAUSAL:
        raise UserError(
            f"{what} was trained to predict the next token (objective="
            f"{opened.config.objective}), and fills no blanks"
        )


def refuse_answers(opened: LoadedModel, what: str) -> None:
    """Refuse a dialogue model, which knows only conversations. Raises UserError."""
    if opened.config.data.plan == "turns":
        raise UserError(
            f"{what} was trained to answer conversations only: bertjax.generate has it "
            "do so, and bertjax.evaluate without --what scores its answers"
        )


def read_params(checkpoint: Any, head: str = "", weights: str = "") -> Any:
    """Read the parameters that `open_model` found, as numpy arrays.

    weights: see params_part. Raises UserError if they lack the requested `head`.
    """
    part = params_part(checkpoint, weights)
    if isinstance(checkpoint, hf_read.Imported):
        params = checkpoint.params() | sentence_transformers.read_head(checkpoint)
    else:
        from bertjax.checkpoints.manager import restore_params

        params = restore_params(checkpoint, part=part)
    if head and head not in params:
        name = {"mlm": "masked-LM"}.get(head, head)
        raise UserError(f"{checkpoint} has no {name} head")
    return params
