# SPDX-License-Identifier: Apache-2.0
"""Models in Python, as `bertjax.load` returns them, with the results of the commands.

The methods are thin: functions of inference/ and scoring/ do the work.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Number
from typing import Any, TypeVar

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.assembly import models, resolve
from bertjax.assembly.command_line import settle_config
from bertjax.assembly.models import LoadedModel
from bertjax.assembly.save_model import save_model
from bertjax.data.corpus.line_repair import check_utf8
from bertjax.data.progress import Progress
from bertjax.generation import open_writer
from bertjax.generation.options import Options
from bertjax.inference import embed_texts, fill_blanks, forward, predict_rows
from bertjax.scoring import sequence_scorers
from bertjax.scoring.pseudo_likelihoods import pick_variant
from bertjax.tasks import prepare_task

__all__ = ["Model", "fit"]

F = TypeVar("F", bound=Callable[..., Any])


def check_arguments(method: F) -> F:
    """Check numbers and paths, and name arguments, not flags, in error messages."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name, least in ("top_k", 1), ("batch_size", 1), ("max_length", 3):
            value = given.get(name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                raise UserError(f"{name}={value!r} must be a whole number from {least}")
        for name, kinds in ("dtype", str), ("normalize", bool | np.bool_):
            value = given.get(name)
            if value is not None and not isinstance(value, kinds):
                kind = "a name" if kinds is str else "True or False"
                raise UserError(f"{name}={value!r} must be {kind}")
        for name in given.keys() & {"path", "directory", "workdir"}:
            value = given[name]
            if not isinstance(value, str | os.PathLike) or not str(value).strip():
                raise UserError(f"{name}={value!r} must be a path")
        try:
            return method(*args, **kwargs)
        except UserError as e:  # its message names flags, which are arguments here
            text = re.sub(r"(?<!\S)--(?=\w+(?![\w-]))", "", str(e))
            raise UserError(text) from None

    return call  # type: ignore[return-value]


def check_texts(texts: Any) -> list[str]:
    """Return texts as a list. Raises UserError for one string, and for non-strings."""
    for text in (found := check_list(texts, "texts", "strings")):
        if not isinstance(text, str):
            raise UserError(f"texts: {text!r:.60} must be a string")
        check_utf8(text)
    return found


def check_list(values: Any, name: str, of: str) -> list[Any]:
    """Return the values of an argument as a list.

    Raises UserError for a single text or object, and for tables of pandas or polars:
    iterating over these gives the names of their columns.
    """
    if hasattr(values, "columns"):
        raise UserError(
            f"{name} is a table: give a column of it, such as df['text'].tolist(), or "
            "its rows as objects, df.to_dict('records')"
        )
    one = isinstance(values, str | bytes | Mapping) or getattr(values, "shape", 1) == ()
    if one or not isinstance(values, Iterable):
        raise UserError(f"{name}={values!r:.60} must be a list of {of}")
    return list(values)


def check_prompts(prompts: Any) -> list[Any]:
    """Return prompts (strings or objects of strings) as a list. Raises UserError."""
    found = check_list(prompts, "texts", "strings")
    for one in found:
        if not (isinstance(one, Mapping) and "turns" in one):
            check_texts(one.values() if isinstance(one, Mapping) else [one])
    return found


@check_arguments
def fit(config: Any, workdir: str, allow_config_change: bool) -> int:
    """Train as `bertjax.fit` describes."""
    from bertjax.train import train

    if not isinstance(config, ConfigDict):
        raise UserError(
            f"config is a {type(config).__name__}: give a ConfigDict, for instance "
            "bertjax.config.load_config('bert.py:mini')"
        )
    config = config.copy_and_resolve_references()
    settle_config(config, {})
    return train(config, workdir, overrides={}, allow_config_change=allow_config_change)


class Model(LoadedModel):
    """An open model.

    config: the ConfigDict of its training (an imported model's is made from its own
    files); cfg: the architecture, an EncoderConfig; tokenizer; meta: the checkpoint's
    metadata; params: the parameters, a tree of numpy arrays, read at first use. Every
    method computes in `dtype`, float32 by default.

    Texts are strings. Results for several texts are lists in the order of the texts.
    """

    weights: str = ""

    @classmethod
    @check_arguments
    def open(cls, path: str, dtype: str = "float32", weights: str = "") -> "Model":
        """Open whatever `--model` accepts. Raises UserError if it is not a model."""
        model = cls(*models.open_model(str(path), "path"))
        model.config.dtype = dtype
        model.weights = weights
        if weights:
            models.params_part(model.checkpoint, weights)
        return model

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """Parameters as numpy arrays: {"encoder": ..., a head's name: ...}.

        Layers are stacked on axis 0 (`models/stacked_layers.py`).
        """
        return self.read_params(weights=self.weights)

    @functools.cached_property
    def _placed(self) -> dict[str, Any]:
        return forward.place_params(self.params, self.cfg)

    @functools.cached_property
    def _masked_lm(self) -> tuple[dict[str, Any], Any]:
        models.check_masked_lm(self, "the model")
        return self._language_model

    @functools.cached_property
    def _language_model(self) -> tuple[dict[str, Any], Any]:
        models.check_pretrained(self, "the model")
        if self.cfg.has_head_parameters and "mlm" not in self.params:
            raise UserError(f"{self.checkpoint} has no masked-LM head")
        return fill_blanks.masked_lm(self.params, self.cfg)

    @functools.cached_property
    def _placed_language_model(self) -> dict[str, Any]:
        return forward.place_params(*self._language_model)

    @functools.cached_property
    def _finetuned(self) -> predict_rows.Finetuned:
        where = str(self.checkpoint)
        return predict_rows.open_finetuned(
            where, self.config.dtype, self.weights, "model", opened=self
        )

    def __repr__(self) -> str:
        cfg = self.cfg
        shape = f"{cfg.num_hidden_layers} layers of {cfg.hidden_size}"
        pieces = f"{self.tokenizer.vocab_size:,} pieces"
        return f"Model({str(self.checkpoint)!r}: {shape}, {pieces})"

    @check_arguments
    def fill_mask(self, texts: str | Sequence[str], top_k: int = 5) -> list[Any]:
        """Predict the blanks of texts: [MASK], or the tokenizer's own mask token.

        Returns for each text one list per blank, with the best guess first:
        {"token", "id", "probability", "sequence"}, like `masks` of
        `bertjax.fill_mask --json`. For a single string it returns the lists of that
        text. Raises UserError for a text without a blank.
        """
        several = check_texts([texts] if isinstance(texts, str) else texts)
        params, cfg = self._masked_lm
        rows = [fill_blanks.encode(self.tokenizer, t, cfg.max_length) for t in several]
        how = min(top_k, self.tokenizer.vocab_size), resolve.reads_before(self.config)
        fill = self._once(fill_blanks.make_filler, cfg, params, self.tokenizer, *how)
        found = []
        for ids in rows:
            masks = fill(ids)
            fill_blanks.add_sequences(self.tokenizer, ids, masks)
            found.append(masks)
        return found[0] if isinstance(texts, str) else found

    @check_arguments
    def embed(
        self,
        texts: Sequence[str],
        pooling: str | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        batch_size: int = 32,
    ) -> np.ndarray:
        """Return a vector per text, f32 [n, D], equal to those of `bertjax.embed`.

        pooling: "mean", "cls" or "last". If it or
        normalize is None, the model's own way.
        """
        options = self.weights, pooling, normalize, max_length
        embedder = self._once(embed_texts.make_embedder, self, "the model", *options)
        if not (texts := check_texts(texts)):
            return np.zeros((0, self.cfg.hidden_size), np.float32)
        return embedder.embed(texts, batch_size)[0]

    def _once(self, make: Any, *args: Any) -> Any:
        # Cached results hold parameters on the device, so keep only one of each kind.
        # Numbers may be numpy's, which are not ints.
        simple = str, Number, np.bool_, type(None)
        key = [arg for arg in args if isinstance(arg, simple)]
        if self._cached.get(make, (None,))[0] != key:
            self._cached[make] = key, make(*args)
        return self._cached[make][1]

    @functools.cached_property
    def _cached(self) -> dict[Any, tuple[list[Any], Any]]:
        return {}

    @check_arguments
    def make_batch(
        self, texts: Sequence[str], max_length: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return [CLS] text [SEP] of each text, padded, for the functions of `models`.

        input_ids       [CLS]  the  cat [SEP] [PAD]      i32 [n, L]
        attention_mask      1    1    1     1     0      i32 [n, L]

        max_length: longer texts are cut; None: as many tokens as the model accepts.
        """
        longest, tokenizer = max_length or self.cfg.max_length, self.tokenizer
        if longest > self.cfg.max_length:
            raise UserError(
                f"max_length={longest}: the model has {self.cfg.max_length} positions"
            )
        rows, _ = embed_texts.tokenize(tokenizer, check_texts(texts), longest)
        if not rows:
            raise UserError("texts is empty: there is no batch of no text")
        sizes = np.array([len(row) for row in rows])
        mask = np.arange(sizes.max()) < sizes[:, None]
        ids = np.full(mask.shape, tokenizer.pad_id, np.int32)
        ids[mask] = np.concatenate(rows)
        return {"input_ids": ids, "attention_mask": mask.astype(np.int32)}

    @check_arguments
    def hidden(self, texts: Sequence[str], batch_size: int = 32) -> list[np.ndarray]:
        """Return the last layer's hidden states of each text, f32 [length, D] each.

        Position 0 is [CLS], the last one [SEP]; longer texts are cut.
        """
        return self._run(
            forward.hidden_states, self._placed, self.cfg, texts, batch_size
        )

    @check_arguments
    def logits(self, texts: Sequence[str], batch_size: int = 8) -> list[np.ndarray]:
        """Return the masked LM's logits of each text, f32 [length, V] each.

        Texts may have blanks. The logits of a causal model and of masked
        next-token prediction at each position are for the next token. Raises
        UserError for a model without that head.
        """
        cfg = self._language_model[1]
        placed = self._placed_language_model
        return self._run(forward.mlm_logits, placed, cfg, texts, batch_size)

    def _run(
        self,
        readout: Any,
        placed: dict[str, Any],
        cfg: Any,
        texts: Sequence[str],
        batch_size: int,
    ) -> list[np.ndarray]:
        longest, tokenizer = cfg.max_length, self.tokenizer
        rows, _ = embed_texts.tokenize(tokenizer, check_texts(texts), longest)
        run = functools.partial(forward.make_forward(cfg, readout), placed)
        batches = forward.pad_batches(rows, tokenizer.pad_id, batch_size, longest)
        found: list[Any] = [None] * len(rows)
        with Progress("texts", len(rows), "texts") as progress:
            for which, values in forward.run_batches(batches, run, progress):
                for i, row in zip(which, values, strict=True):
                    found[i] = row[: len(rows[i])]
        return found

    @check_arguments
    def score(
        self,
        texts: Sequence[str],
        variant: str = "original",
        scorer: str | None = None,
    ) -> list[float | None]:
        """Return the log-likelihood of each text in nats, as `--what=pll` computes it.

        None for a text that is too long or has no token. scorer: "pll", the
        pseudo-log-likelihood (Salazar et al. 2020), "mntp", "lm" or "elbo"
        (docs/evaluation.md); None: the one that fits the model's objective. variant:
        for pll and mntp, "original" or "within_word" (Kauf and Ivanova 2023).
        """
        options = sequence_scorers.Options(variant=pick_variant(variant))
        models.refuse_answers(self, "the model")
        lm = sequence_scorers.make_language_model(self, self._language_model)
        learnt = lm.cfg.is_decoder, lm.learnt
        scorer = sequence_scorers.pick_scorer(scorer, *learnt, "--scorer", "the model")
        scores = sequence_scorers.score_texts(lm, check_texts(texts), scorer, options)
        return [one.score for one in scores]

    @check_arguments
    def generate(
        self, texts: Sequence[str | Mapping[str, str]], **options: Any
    ) -> list[list[dict[str, Any]]]:
        """Continue texts, or fill their blanks, as `bertjax.generate` does.

        texts: strings. A model that was finetuned to write targets also accepts objects
        by column, like `predict`; a dialogue model accepts conversations, {"turns":
        [{"speaker": ..., "text": ...}, ...]}.

        options: the command's flags: max_new_tokens, num_beams, temperature, how, order
        and others (generation/options.py).

        Returns for each text its outputs, {"text", "ids", "score"}; score is the sum of
        ln p of the written tokens. Raises UserError for options that the model does not
        use, and for texts that are too long.
        """
        if unknown := [name for name in options if name not in Options._fields]:
            raise registry.unknown("option", unknown[0], Options._fields)
        several, wanted = check_prompts(texts), Options(**options)
        how = open_writer.pick_how(self, wanted, "the model")
        writer = self._once(self._open_writer, how)
        written = open_writer.write(writer, several, wanted)
        return [[output._asdict() for output in outputs] for outputs in written]

    def _open_writer(self, how: str) -> open_writer.Writer:
        return open_writer.open_writer(self, how, self.params)

    @check_arguments
    def predict(
        self, rows: Sequence[str | Mapping[str, Any]], batch_size: int = 32
    ) -> list[dict[str, Any]]:
        """Answer rows with a finetuned model, as `bertjax.predict` does, in order.

        rows: objects by column, or strings if the model reads a single
        column. Raises UserError for a model that was not finetuned, and
        for rows without a needed column.
        """
        model = self._finetuned
        found = check_list(rows, "rows", "objects by column, or texts")
        if not all(isinstance(row, str | Mapping) for row in found):
            raise UserError("rows must be a list: an object by column, or a text, each")
        if not found:
            return []
        read = prepare_task.parse_objects(model.config, model.form, found, "rows")
        return list(predict_rows.answer(model, read, batch_size))

    @check_arguments
    def save(self, directory: str, format: str = "hf") -> None:
        """Write the model as a new directory: "hf" for transformers, or "bertjax".

        Raises UserError if the directory exists already.
        """
        save_model(
            str(directory), format, self, lambda: self.params, ("directory", "format")
        )
