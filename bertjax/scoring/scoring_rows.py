# SPDX-License-Identifier: Apache-2.0
"""The rows and masks that all models of one tokenizer are compared on."""

from typing import Any

# What of config.data decides rows and masks, beside their length. Spelt out, so that
# no change of a default changes what models are compared on.
COMMON = dict(
    plan="full_sentences",
    packed=False,
    max_segments=None,
    masking="bert",
    mask_unit="token",
    mask_rate=None,
    mask_lengths=None,
    corruption="0.8,0.1,0.1",
    replacement="uniform",
    similar="",
    max_predictions=None,
    paper_compat=False,
)


def take_common_rows(config: Any, length: int, mask_unit: str) -> None:
    """Give a run's config the common rows and masks, and the objective that reads them.

    Whatever its objective, phases, plan and masking were, two configs with one text and
    tokenizer then make the same batches (build.make_eval_batches).
    """
    config.objective, config.phases = "mlm", ""
    config.eval.mask_rate = None
    config.data.update(COMMON | {"length": length, "mask_unit": mask_unit})


def tell(config: Any, name: str) -> dict[str, Any]:
    """Say what rows and masks a config makes: what it leaves empty is left out.

    name: "common", or "own" where they are as the run was trained. The rate is said
    with the scores: an evaluation may have its own.
    """
    keys = [key for key in ("length", *COMMON) if key != "mask_rate"]
    told = {key: config.data[key] for key in keys}
    return {"name": name} | {k: v for k, v in told.items() if v or k == "packed"}
