# SPDX-License-Identifier: Apache-2.0
"""What a config needs and takes on a slice: each phase, its text, its libraries."""

import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax.assembly import batches as run_batches
from bertjax.assembly import prepared_text, resolve, train_step
from bertjax.measuring import compile_steps, estimates, topologies
from bertjax.measuring.synthetic_data import with_choices
from bertjax.objectives.base import make_objective

# Of each phase so many batches are read, and of each at most so many rows.
SAMPLE_BATCHES, SAMPLE_ROWS = 4, 256


def estimate_config(
    config: ConfigDict,
    topology: str,
    say: Callable[[str], None],
    quick: bool = False,
    search: bool = True,
) -> dict[str, Any]:
    """Return what `preflight --json` prints: the phase that needs most memory, and all.

    quick, search: see estimates.estimate.
    Raises UserError when the config and the topology do not go together.
    """
    if config.data.train:
        prepared_text.check_inputs(config)
    devices = topologies.find_devices(topology)
    vocab_size, text = sample_text(config, say)
    config = with_choices(config, text)
    target = compile_steps.Target(config, vocab_size, topology, devices)
    if not target.objective.flops:
        say(train_step.NO_MFU.format(config.objective))
    phases = [
        {"attention": target.attention(shape)}
        | estimates.estimate(target, shape, say, quick, search)
        for shape in target.shapes()
    ]
    largest = max(phases, key=lambda phase: (not phase["fits"], phase["hbm_gib"] or 0))
    return {
        "topology": topology,
        "devices": len(devices),
        "chips": len(devices) // target.chip.devices,
        "hosts": target.hosts,
        "mesh": dict(target.mesh.shape),
        "accumulate": config.accumulate,
        **largest,
        "phases": phases,
        "data": text,
        "tensorflow": describe_tensorflow(config),
        "versions": compile_steps.versions(),
    }


def sample_text(
    config: ConfigDict, say: Callable[[str], None]
) -> tuple[int, list[dict[str, Any]] | None]:
    """Return the vocabulary's size, and for each phase how full rows of data.train are.

    Without data.train the size is the config's own, and None takes the phases' place.
    """
    if not config.data.train:
        return config.model.vocab_size or config.data.vocab_size, None
    tokenizer, parts, *_ = prepared_text.prepare(config, say)
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    needs = make_objective(config.objective, cfg)[0].needs
    counts = prepared_text.count_tokens(parts)
    tables = run_batches.make_tables(config, tokenizer, counts)
    run = run_batches.make_run(config, needs, tokenizer, parts, tables)
    phases = []
    for stage in run.course.stages:
        batches = [
            stage.batch(stage.start + i, slice(0, SAMPLE_ROWS))
            for i in range(SAMPLE_BATCHES)
        ]
        rows = sum(len(b["input_ids"]) for b in batches)
        slots = sum(b["input_ids"].size for b in batches)
        tokens = sum(int(b["attention_mask"].sum()) for b in batches)
        predicted = sum(int((b["mlm_weights"] > 0).sum()) for b in batches if stage.P)
        phases.append(
            {
                "start": stage.start,
                "length": stage.length,
                "batch_size": stage.batch_size,
                "rows_an_epoch": stage.n,
                "sequences_per_row": slots // (rows * stage.length),
                "fill": tokens / slots,
                "slots_per_row": stage.P,
                "predictions_per_row": predicted / rows,
            }
        )
    return tokenizer.vocab_size, phases


def describe_tensorflow(config: ConfigDict) -> str:
    """Say whether TensorFlow, which stays unimported, might take the accelerator."""
    if importlib.util.find_spec("tensorflow") is None:
        return "not installed"
    engine = "" if config.data.engine == "tf" else ", and data.engine does not load it"
    verdicts = {
        "tensorflow-cpu": "{} knows no accelerator",
        "tensorflow-tpu": "WARNING: {} takes the TPU: install tensorflow-cpu" + engine,
        "tensorflow": "{}: GPUs are hidden from it" + engine,
    }
    for name, verdict in verdicts.items():
        try:
            return verdict.format(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return f"a build of its own: WARNING, it may take the accelerator{engine}"
