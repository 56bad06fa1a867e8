# SPDX-License-Identifier: Apache-2.0
"""Score texts by ln p of their tokens, with the methods that a model was trained for.

pll     each token given all others, hidden alone (pseudo_likelihoods.py); the decoder
        of an encoder-decoder writes it (rewritten.py)
mntp    the same, predicted from the position before the masked token
lm      each token given those before it
elbo    a bound of ln p by random masks (masked_bound.py)
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.assembly import models, resolve
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.inference import fill_blanks
from bertjax.interop.hf_read import Imported
from bertjax.objectives import BEFORE, CAUSAL, part_names
from bertjax.scoring import masked_bound, pseudo_likelihoods
from bertjax.scoring.token_rows import Row, Window, causal_row, make_row_scorer

DRAWS = 128  # masks per text for a bound


class LanguageModel(NamedTuple):
    """A model that gives tokens probabilities.

    learnt: the objectives of its phases, beginning with the config's. longest: the most
    tokens of text per row in training, special ones included; for an imported model,
    its positions. closed: whether [SEP] ended each row in training; False if unknown.
    """

    cfg: Any
    params: Any
    tokenizer: Any
    config: Any
    learnt: tuple[str, ...]
    longest: int
    closed: bool
    meta: Any

    @property
    def before(self) -> bool:
        """Whether masked tokens are predicted only from the position before them."""
        return resolve.reads_before(self.config)

    @property
    def causal(self) -> tuple[Any, bool]:
        """The architecture for causal attention as in training, and a flag.

        The flag tells whether attention_steps must make it causal, as for an encoder
        that was not trained by clm.
        """
        names = set().union(*map(part_names, self.learnt))
        if self.cfg.is_decoder or "clm" in names:
            return dataclasses.replace(self.cfg, is_decoder=True), False
        return self.cfg, True


class Options(NamedTuple):
    """Options of scorers; variant: for pll and mntp; draws, estimator: for elbo."""

    variant: str = "original"
    draws: int = DRAWS
    estimator: str = masked_bound.ANY_ORDER
    batch_size: int | None = None


DEFAULT = Options()
Score = Callable[[Sequence[Sequence[int]]], list[float]]


def make_pll(lm: LanguageModel, options: Options, before: bool = False) -> Score:
    """Build score(texts of ids) -> pseudo-log-likelihoods in nats."""
    if lm.cfg.num_decoder_layers:
        return make_rewritten(lm, options)
    more = options.variant, options.batch_size, before
    return pseudo_likelihoods.make_scorer(lm.cfg, lm.params, lm.tokenizer, *more)


def make_rewritten(lm: LanguageModel, options: Options) -> Score:
    """Build score(texts of ids) -> pseudo-log-likelihoods of an encoder-decoder."""
    from bertjax.scoring import rewritten  # needs jax

    spans = resolve.has_bare_texts(lm.config)
    if spans is None:
        raise UserError(
            f"--scorer=pll: how objective={lm.config.objective} hides a token is not "
            "known: it is of denoise's target=spans and target=text"
        )
    try:
        how = rewritten.hiding(lm.tokenizer, spans)
    except LookupError as e:
        raise UserError(f"--scorer=pll: the vocabulary has no {e.args[0]}") from e
    more = options.variant, options.batch_size
    return rewritten.make_scorer(lm.cfg, lm.params, lm.tokenizer, how, *more)


def make_lm(lm: LanguageModel, options: Options) -> Score:
    """Build score(texts of ids) -> ln p in nats of texts after the begin token."""
    (cfg, steps), begin = lm.causal, lm.tokenizer.cls_id
    size, pad = options.batch_size, lm.tokenizer.pad_id
    run = make_row_scorer(cfg, lm.params, pad, steps=steps, batch_size=size)

    def score(texts: Sequence[Sequence[int]]) -> list[float]:
        def make(i: int) -> Row:
            n = len(texts[i])
            return causal_row(np.array(texts[i]), Window(0, 0, n), begin)

        sizes = np.array([len(ids) for ids in texts], np.int64)
        return run(sizes, sizes, make).tolist()

    return score


def make_elbo(lm: LanguageModel, options: Options) -> Score:
    """Build score(texts of ids) -> bounds of ln p in nats."""
    bound = masked_bound.make_bounder(
        lm.cfg,
        lm.params,
        lm.tokenizer,
        draws=options.draws,
        estimator=options.estimator,
        before=lm.before,
        batch_size=options.batch_size,
    )

    def score(texts: Sequence[Sequence[int]]) -> list[float]:
        windows = [(np.array(ids), Window(0, 0, len(ids))) for ids in texts]
        return [one.value for one in bound(windows)]

    return score


SCORERS: dict[str, Callable[[LanguageModel, Options], Score]] = {
    "pll": make_pll,
    "lm": make_lm,
    "mntp": functools.partial(make_pll, before=True),
    "elbo": make_elbo,
}
# Scorer -> what a model must have been trained for, as the message denies it.
UNTRAINED_FOR = {
    "pll": "never fills masks where they stand",
    "lm": "never predicts the next token",
    "mntp": "never predicts a masked token from the place before it",
    "elbo": "never fills masks",
}
# Flags -> the scorers that read them.
READERS = {
    "variant": ("pll", "mntp"),
    "draws": ("elbo",),
    "estimator": ("elbo",),
}


def find_scorers(is_decoder: bool, learnt: Sequence[str]) -> list[str]:
    """Return the scorers for a model's objectives; the default one is first.

    >>> find_scorers(False, ["mlm+nsp"]), find_scorers(False, ["mntp*15+clm*1"])
    (['pll', 'elbo'], ['mntp', 'lm', 'elbo'])
    """
    found = []
    for objective in learnt:
        names = part_names(objective)
        if "denoise" in names:  # an encoder-decoder, which has no other objective
            return ["pll"]
        found += ["mntp"] if names & BEFORE else []
        if names - CAUSAL - BEFORE:  # all others fill masks in place
            found += ["elbo", "pll"] if "diffusion" in names else ["pll"]
        found += ["lm"] if names & (CAUSAL | BEFORE) else []
    masks = [] if set(found) <= {"lm"} else ["elbo"]
    return ["lm"] if is_decoder else [*dict.fromkeys(found + masks)]


def fills_masks(able: Sequence[str]) -> bool:
    """Return whether a model with these scorers predicts masked tokens."""
    return not {"pll", "mntp"}.isdisjoint(able)


def pick_scorer(
    name: str | None,
    is_decoder: bool,
    learnt: Sequence[str],
    what: str,
    whose: str,
) -> str:
    """Return the named scorer, or the default one, for a model.

    what: the flag that names it. Raises UserError that lists the possible ones.
    """
    able = find_scorers(is_decoder, learnt)
    if not name:
        return able[0]
    registry.pick("--scorer", name, SCORERS)
    if name not in able:
        raise never_trained(f"{what}={name}", name, able, learnt[0], whose)
    return name


def never_trained(
    given: str, scorer: str, able: Sequence[str], objective: str, whose: str
) -> UserError:
    """Build the error for a model that a scorer does not fit.

    given: the flag and its value; able: the scorers that fit.
    """
    what = given.partition("=")[0]
    known = ("pll", "lm", "elbo") if what == "--what" else SCORERS
    return UserError(
        f"{given}: {whose} has objective={objective}, which "
        f"{UNTRAINED_FOR[scorer]}: use "
        + " or ".join(f"{what}={one}" for one in able if one in known)
    )


def open_language_model(
    args: Any, path: str, flag: str, scorer: str | None, what: str
) -> tuple[str, LanguageModel]:
    """Return the scorer, by default that of the model's objective, and the model.

    what: the flag that names the scorer. Raises UserError for a model
    that it does not fit.
    """
    opened = models.open_model(path, flag)
    given = f"--what={args.what}: {path}", "without --what its task is scored"
    models.check_pretrained(opened, *given)
    models.refuse_answers(opened, given[0])
    opened.config.dtype = args.dtype
    learnt = resolve.trained_objectives(opened.config)
    name = pick_scorer(scorer, opened.cfg.is_decoder, learnt, what, path)
    if name != "lm" and not opened.cfg.num_decoder_layers:
        models.check_masked_lm(opened, *given)
    params = opened.read_params("mlm", args.weights)
    masked_lm = fill_blanks.masked_lm(params, opened.cfg)
    return name, make_language_model(opened, masked_lm)


def make_language_model(
    opened: models.LoadedModel, masked_lm: tuple[Any, Any]
) -> LanguageModel:
    """Combine an open model and its `fill_blanks.masked_lm`."""
    params, cfg = masked_lm
    config, tokenizer, longest = opened.config, opened.tokenizer, cfg.max_length
    own = not isinstance(opened.checkpoint, Imported)
    if own:
        longest = min(longest, longest_text(config, tokenizer))
    more = resolve.trained_objectives(config), longest, own, opened.meta
    return LanguageModel(cfg, params, tokenizer, config, *more)


def longest_text(config: Any, tokenizer: Any) -> int:
    """Return the most text tokens per row in any phase; copies do not count."""
    objectives = resolve.objectives_of(config)
    tables = make_tables(tokenizer, np.ones(tokenizer.vocab_size))
    return max(
        resolve.make_features(
            config,
            objectives[phase.objective or ""].needs,
            tokenizer,
            tables,
            phase.length,
            phase.mask_rate,
        ).raw
        for phase in resolve.wanted_phases(config)
    )


def read_options(args: Any, scorer: str) -> Options:
    """Read the flags of a scorer. Raises UserError for one that it does not read."""
    given = {name: getattr(args, name) for name in READERS}
    for name, readers in READERS.items():
        if given[name] is not None and scorer not in readers:
            raise UserError(
                f"--{name} has no effect with --scorer={scorer}: it is read with "
                f"--scorer={' or '.join(readers)}; leave it out"
            )
    return Options(
        variant=pseudo_likelihoods.pick_variant(given["variant"]),
        draws=masked_bound.pick_draws(given["draws"], DRAWS),
        estimator=masked_bound.pick_estimator(given["estimator"]),
        batch_size=args.batch_size,
    )


def score_texts(
    lm: LanguageModel,
    texts: Iterable[str],
    scorer: str,
    options: Options = DEFAULT,
) -> list[pseudo_likelihoods.Score]:
    """Score each text independently; see pseudo_likelihoods.score_texts."""
    score = SCORERS[scorer](lm, options)
    return pseudo_likelihoods.score_texts(lm.cfg, lm.tokenizer, list(texts), score)
