# SPDX-License-Identifier: Apache-2.0
"""The best run of a finished sweep, written as a workdir beside sweep.json."""

import json
from pathlib import Path
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax.assembly import prepared_text, workdirs
from bertjax.checkpoints import manifest, workdir, workdir_kinds
from bertjax.checkpoints.best import GREATER
from bertjax.checkpoints.manager import Checkpoints
from bertjax.config import cli, serialize
from bertjax.models.encoder import count_params
from bertjax.storage.atomic import write_file
from bertjax.tasks import prepare_task as tasks


def write_best_run(
    config: ConfigDict,
    path: Path,
    found: dict[str, Any],
    params: Any,
    prepared: Any,
    overrides: dict[str, Any],
    devices: dict[str, Any],
) -> None:
    """Write the best run as a workdir, and last sweep.json, which says it is done.

    devices: what run.json says of them.
    """
    config = config.copy_and_resolve_references()
    best, metric = found["best"], found["metric"]
    config.seed, config.optim.lr = best["seed"], best["lr"]
    facts: dict[str, Any] = {"stores": found["facts"]["stores"]}
    facts |= {GREATER: found[GREATER]}
    if found["at"] == "best":  # as train says it
        name = f"eval/{best['valid']}/{metric}"
        facts["best"] = {"metric": name, "step": best["step"], "value": best[metric]}
    sizes = {"parameters": count_params(params), "total_steps": found["steps"]}
    workdir.begin(
        path,
        {
            "config.json": serialize.to_json(config),
            "overrides.json": json.dumps(overrides),
        },
        facts | devices | sizes,
        prepared.tokenizer.save,
        prepared_text.count_tokens(prepared.parts),
    )
    workdirs.write_findings(path, prepared, cli.say)
    if best["step"] not in manifest.steps(path):  # else killed just after it
        meta = {"config": config.to_dict(), "tokenizer": prepared.tokenizer.identity}
        meta |= {"runs": found["facts"]["runs"]}  # by which a sweep knows its own
        meta |= facts | tasks.facts(config, prepared.parts)
        meta |= {"tokens": best.get("tokens", 0)}
        tasks.learn(meta, best)
        saved = Checkpoints(path, 2, None)
        saved.save(best["step"], {"params": params}, meta)
        saved.close()
    write_file(path / workdir_kinds.RESULTS, json.dumps(found, indent=1) + "\n")
