# SPDX-License-Identifier: Apache-2.0
"""The search for the largest batch, without a compiler."""

import json
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh

from bertjax import UserError
from bertjax.assembly import command_line, resolve, train_step
from bertjax.config import durations
from bertjax.data.features.base import Spec
from bertjax.measuring import (
    compile_steps,
    estimates,
    estimates_text,
    memory_analysis,
    synthetic_data,
)
from bertjax.measuring.memory_analysis import PROGRAM_BYTES
from bertjax.measuring.synthetic_data import Shape
from bertjax.models.encoder import count_params
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.chips import CHIPS

GIB = 2**30


class Fake:
    """A target that needs state + fixed + rows * slope GiB, and memory for its code."""

    topology = "v5e:2x4"
    parts = 8
    chip = CHIPS["TPU v5 lite"]

    def __init__(self, state: float, fixed: float, slope: float, accumulate: int = 1):
        self.state, self.fixed, self.slope = state, fixed, slope
        self.config = SimpleNamespace(accumulate=accumulate)
        self.objectives = {"": SimpleNamespace(whole_batch=None, group=1)}
        self.mesh = SimpleNamespace(devices=SimpleNamespace(size=8), shape={"data": 8})
        self.compiled: list[tuple[int, bool]] = []
        self.says: bool | None = True
        self.code = 0.1  # GiB
        self.evaluation = lambda objective: {"fits": True, "needed": 0}
        self.specs = lambda shape: {"mlm_weights": Spec((20,), "float32", loss=True)}

    def rows(self, shape: Shape) -> int:
        return shape.batch_size // self.config.accumulate // self.parts

    def state_parts(self) -> dict[str, int]:
        parameters = int(self.state * GIB / 3)
        return {"parameters": parameters, "optimizer": int(self.state * GIB * 2 / 3)}

    def memory(self, step: str, shape: Shape, program: int = PROGRAM_BYTES) -> dict:
        rows = self.rows(shape)
        need = self.state + self.fixed + rows * self.slope
        # The compiler makes a program that barely exceeds memory fit, by recomputing.
        refused = 0.9 * need > 15.75
        needed = int(min(need, 15.75) * GIB)
        fits = not refused and needed + program <= self.chip.hbm_bytes
        self.compiled.append((rows, fits))
        if refused:
            needed = self.says and int(0.9 * need * GIB)
        return {"fits": fits, "refused": refused, "needed": needed}

    def is_compiled(self, step: str, shape: Shape) -> bool:
        return False

    def facts(self, step: str, shape: Shape) -> dict:
        found = {"arguments": 0, "temporaries": self.memory(step, shape)["needed"]}
        found |= {"outputs": 0, "program": int(self.code * GIB)}
        fits = sum(found.values()) <= self.chip.hbm_bytes
        return {"fits": fits, **found}

    def search(self, batch_size: int) -> int:
        shape = Shape(batch_size, 128, (None,))
        facts = self.memory("train", shape)
        said: list[str] = []
        largest, self.is_limit = estimates.search_largest(
            self, shape, facts, said.append
        )
        return largest


@pytest.mark.parametrize("says", [True, None])
@pytest.mark.parametrize(
    "rows, slope", [(16, 0.02), (1, 0.3), (30, 0.4), (4, 3.0), (4096, 0.02)]
)
def test_the_largest_batch_is_one_that_was_compiled(rows, slope, says):
    target = Fake(state=1.0, fixed=0.5, slope=slope)
    target.says = says
    largest = target.search(8 * rows)
    assert (largest, True) in target.compiled
    # Of 15.75 GiB, half a GiB is reserved for the program's code.
    assert 0.95 * (15.25 - 1.5) / slope - 8 <= largest <= (15.25 - 1.5) / slope
    assert len(target.compiled) <= 1 + estimates.SEARCH_STEPS


@pytest.mark.parametrize("code, fits", [(0.1, True), (0.4, False)])
def test_what_may_not_fit_with_its_code_is_compiled_to_the_end(code, fits):
    target = Fake(state=1.0, fixed=0.0, slope=0.9)
    target.code = code
    shape = Shape(8 * 16, 128, (None,))  # needs 15.4 GiB without code
    found = estimates.estimate(target, shape, lambda text: None, quick=True)
    assert found["hbm_gib"] == pytest.approx(15.4) and not found["fits"]
    assert found["eval_fits"] and found["largest_batch_per_device"] == 15
    results = {**found, "topology": "v5e:2x4", "accumulate": 1}
    unknown = {**results, "hbm_gib": None}  # a refusal without a figure
    assert estimates_text.verdict(unknown).startswith("does not fit")
    assert estimates_text.verdict(results).startswith("may not fit: 128 rows")
    found = estimates.estimate(target, shape, lambda text: None)
    assert found["hbm_gib"] == pytest.approx(15.4 + code) and found["fits"] == fits
    assert found["largest_batch_per_device"] == 15 + fits
    said = estimates_text.verdict({**results, **found})
    wanted = "fits: 128" if fits else "--config.accumulate=2 may"
    assert said.startswith(wanted) if fits else said.endswith(wanted)


def test_one_of_each_is_not_several():
    target = Fake(state=1.0, fixed=0.5, slope=12.0)
    phase = estimates.estimate(target, Shape(8, 128, (None,)), lambda text: None)
    about = {"topology": "v5e:1x1", "chips": 1, "devices": 1, "hosts": 1, "mesh": {}}
    about |= {"versions": {}, "batch_size": 1, "length": 128, "accumulate": 1}
    about |= {"total_steps": 1, "estimated_run_hours": 0.5, "tensorflow": ""}
    row = {"length": 128, "fill": 1.0, "predictions_per_row": 1.0, "slots_per_row": 1}
    about |= {"data": [row | {"rows_an_epoch": 1}]}
    one = {**phase, "objective": "mlm", "batch_size": 1, "rows_per_device": 1}
    one |= {"attention": "dense", "length": 128}
    said = "\n".join(estimates_text.describe({**phase, **about, "phases": [one]}))
    for words in (
        "1 chip, 1 device, 1 host; ", "1 row of 128 tokens, 1 row a device at once",
        "1 row at once", "1.0 of 1 position a row", "1 row an epoch", "makes 1 row per",
        "run: 1 step is 0.5 hours, ", "fits: 1 row of 128",
    ):  # fmt: skip
        assert words in said, said


def test_the_search_is_short_where_memory_hardly_grows():
    """Where the compiler recomputes more and more, all that is tried fits."""
    target = Fake(state=0.05, fixed=0.5, slope=0.04)

    def recomputing(step: str, shape: Shape, program: int = PROGRAM_BYTES) -> dict:
        need = 0.55 + 0.04 * target.rows(shape)
        target.compiled.append((target.rows(shape), True))
        needed = int(min(need, 14 + (need - 14) / 50) * GIB)
        return {"fits": True, "refused": False, "needed": needed}

    target.memory = recomputing
    assert target.search(8 * 64) * 128 == estimates.MOST_TOKENS
    assert len(target.compiled) <= 7 and not target.is_limit


def test_the_search_leaves_room_for_a_large_program():
    target = Fake(state=1.0, fixed=0.0, slope=0.5)
    shape = Shape(8 * 4, 128, (None,))
    target.code = 2.0
    found = estimates.estimate(target, shape, lambda text: None)
    # At most 25.5 rows fit; with half a GiB for the code it would be 28.5.
    assert 22 <= found["largest_batch_per_device"] <= 25


def test_room_is_left_for_code_that_is_not_known(tmp_path, monkeypatch):
    """The size of the code is known only after a complete compilation."""
    monkeypatch.setattr(compile_steps.Target, "chip", CHIPS["TPU v5 lite"])
    config = command_line.parse(["--config=bert.py:smoke"]).config
    config.model.attention = "xla"
    for needed, fits, refused in (
        (15.2, True, False),
        (15.5, False, False),
        (15.8, False, True),
    ):
        early = {"fits": True, "needed": int(needed * GIB), "collectives": {}}
        monkeypatch.setattr(
            memory_analysis, "compile_early", lambda *_, early=early: early
        )
        config.data.cache = str(tmp_path / str(needed))
        target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
        shape = target.shapes()[0]
        found = target.memory("train", shape)
        assert found == {**early, "fits": fits, "refused": refused}
        (kept,) = target.cache.glob("*.memory.json")
        old = {k: v for k, v in early.items() if k != "collectives"}
        kept.write_text(json.dumps(old))  # as an older version wrote it
        assert target.memory("train", shape) == found
        whole = {"fits": True, "arguments": 0, "temporaries": early["needed"]}
        whole |= {"outputs": 0, "program": GIB // 10, "collectives": {}}
        monkeypatch.setattr(
            memory_analysis, "compile_lowered", lambda *_, w=whole: dict(w)
        )
        assert target.facts("train", shape)["fits"] == (needed < 15.6)
        found = target.memory("train", shape)
        assert found == {**early, "fits": needed < 15.6, "refused": refused}


def test_the_search_ends_where_so_many_rows_fit():
    target = Fake(state=1.0, fixed=0.5, slope=1e-4)
    assert target.search(8 * 8) * 128 == estimates.MOST_TOKENS
    assert len(target.compiled) <= 3 and not target.is_limit


def test_more_rows_may_fit_only_if_the_search_found_no_limit():
    for slope, rows, is_limit in (
        (0.005, 2**12, True),  # a larger batch was refused
        (0.0134, 1024, True),  # these rows fill the memory
        (1e-4, 2**12, False),
    ):
        target = Fake(state=1.0, fixed=0.5, slope=slope)
        shape = Shape(8 * rows, 128, (None,))
        found = estimates.estimate(target, shape, lambda text: None, quick=True)
        found |= {"attention": "dense"}
        values = dict(estimates_text.phase_values(found))
        assert found["largest_batch_per_device"] * 128 >= estimates.MOST_TOKENS
        assert found["largest_batch_is_limit"] == is_limit
        assert ("or more" in values["largest batch per device"]) != is_limit


def test_not_even_a_row():
    target = Fake(state=1.0, fixed=0.5, slope=20.0)
    assert target.search(8 * 4) == 0


def test_fewest_micro_batches_that_fit():
    target = Fake(state=1.0, fixed=0.0, slope=0.1)
    largest = target.search(8 * 1024)
    shape = Shape(8 * 1024, 128, (None,))
    assert 128 <= largest < 256
    assert estimates.accumulate_to_fit(target, shape, largest) == 8
    assert estimates.accumulate_to_fit(target, shape, 0) is None


def test_nothing_is_compiled_where_the_state_alone_is_too_large():
    target = Fake(state=40.0, fixed=0.0, slope=0.1)
    found = estimates.estimate(target, Shape(256, 128, (None,)), lambda text: None)
    assert not found["fits"] and target.compiled == []
    assert found["hbm_gib"] == pytest.approx(40, rel=1e-6)
    assert found["largest_batch_per_device"] == 0 and found["estimated_mfu"] is None


def test_windows_count_the_keys_they_see():
    cfg = SimpleNamespace(
        local_attention=128, is_global=(True, False, False, False), is_decoder=False
    )
    assert estimates.share_of_keys(cfg, 1024) == (1024 + 3 * 129) / 4 / 1024
    assert estimates.share_of_keys(cfg, 64) == 1
    cfg.is_decoder = True
    assert estimates.share_of_keys(cfg, 64) == 65 / 2 / 64


@pytest.mark.parametrize(
    "said, gib",
    [
        ("required for HLO temporaries (18.50G) exceeds available HBM (15.75G).", 18.5),
        ("Ran out of memory in memory space hbm. Used 512.00M of 15.75G hbm.", 0.5),
        ("Ran out of memory.", None),
    ],
)
def test_the_compiler_says_how_much_it_needs(said, gib):
    assert memory_analysis.needed_bytes(said) == (gib and gib * GIB)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("needs", [{"mlm"}, {"mlm", "nsp"}])
def test_batches_have_the_arrays_that_the_pipeline_makes(packed, needs, tmp_path):
    from bertjax.assembly import batches
    from bertjax.measuring.synthetic_data import synthetic_text

    config = command_line.parse(["--config=bert.py:smoke"]).config
    config.data.packed = packed
    config.data.plan = "pairs" if "nsp" in needs else "full_sentences"
    config.objective = "+".join(sorted(needs))
    config.data.cache, config.model.attention = str(tmp_path), "xla"
    tokenizer, store = synthetic_text(1000)
    tables = batches.make_tables(config, tokenizer, store.counts)
    run = batches.make_run(
        config, {"": frozenset(needs)}, tokenizer, {"train": store}, tables
    )
    stage = run.data.stages[0]
    target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
    specs = target.arrays(Shape(stage.batch_size, stage.length, (None,)))
    assert {k: (v.shape, v.dtype) for k, v in stage.batch(0).items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }


@pytest.mark.parametrize("name", ["classify", "regress", "tag", "span"])
def test_labels_of_tasks_are_made_up(name):
    config = command_line.parse(["--config=finetune/classify.py:smoke"]).config
    config.objective = name
    objective, _ = make_objective(name, resolve.encoder_config(config, 1000))
    shape = Shape(8, 64, (None,))
    batch = synthetic_data.synthetic_batch(config, objective, shape, 1000)
    params = jax.eval_shape(objective.init, jax.random.key(0))
    assert jax.eval_shape(objective.sums, params, batch, None).keys() == {
        f"{name}_loss"
    }


def test_what_is_compiled_is_what_will_run():
    """This includes calls of several updates, and evaluations with their own length and
    mask rate."""
    config = command_line.parse(["--config=bert.py:smoke"]).config
    config.batch_size, config.accumulate, config.steps_per_call = 8, 2, 3
    config.data.length, config.phases = 64, "steps=30 length=32; length=48"
    config.eval.mask_rate, config.model.attention = 0.5, "xla"
    config.model.num_hidden_layers = 1
    target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
    longest, _ = target.shapes()
    batch = target.lower("train", longest).args_info[0][1]
    assert batch["input_ids"].shape == (3, 8, 48) and batch["count"].shape == ()
    batch = target.lower("eval", target.eval_shape).args_info[0][1]
    assert batch["input_ids"].shape == (4, 64)
    assert batch["mlm_positions"].shape == (4, 32) and "stop" not in batch
    target.hosts = 2  # each may get a signal
    for step, shape in (("train", longest), ("eval", target.eval_shape)):
        batch = target.lower(step, shape).args_info[0][1]
        assert batch["stop"].shape == (1,)


def test_phases_are_measured_by_their_own_objectives():
    config = command_line.parse(["--config=bert.py:smoke"]).config
    config.phases, config.objective = "steps=9 objective=clm; length=32", "mlm"
    config.data.plan, config.model.num_hidden_layers = "full_sentences", 1
    config.model.attention = "xla"
    target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
    shapes = target.shapes()
    assert [(s.length, s.objective) for s in shapes] == [(64, "clm"), (32, "")]
    for shape, name in zip(shapes, ("clm", "mlm"), strict=True):
        assert f"train/{name}_loss" in target.lower("train", shape).out_info[1]
        assert f"{name}_loss" in target.lower("eval", shape).out_info


@pytest.mark.parametrize(
    "length, name", [(92, "fused"), (128, "xla (not fused: rows of")]
)
def test_attention_is_over_words_and_regions(length, name):
    config = command_line.parse(["--config=regions.py:smoke"]).config
    config.data.length, config.task.max_regions = length, 36
    config = synthetic_data.with_row_sizes(config)
    target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
    (shape,) = target.shapes()
    assert target.attention(shape).startswith(name)


def test_an_evaluation_of_a_task_keeps_what_the_model_says():
    columns = ["--config.task.text=text", "--config.task.label=label"]
    config = command_line.parse(
        ["--config=finetune/classify.py:smoke", *columns]
    ).config
    config.model.attention = "xla"
    target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
    said = target.lower("eval", target.eval_shape).out_info
    assert len(jax.tree.leaves(said["outputs"])) > 0


def test_a_phase_of_one_rate_is_measured_where_the_config_has_a_ramp():
    """The config's rate is text, 0.3:0.15, the phase's a number: once a TypeError."""
    phases = "--config.phases=steps=3 length=32 mask_rate=0.05; length=16"
    config = command_line.parse(["--config=modern.py:smoke", phases]).config
    assert synthetic_data.one_phase(config).data.mask_rate == 0.05


@pytest.mark.parametrize("columns, n", [("a,b,c", 3), ("list", 0)])
def test_choices_are_counted_by_their_columns(columns, n):
    config = command_line.parse(["--config=finetune/choose.py:smoke"]).config
    config.task.text, config.task.choices, config.task.label = "q", columns, "label"
    config.model.attention = "xla"
    found = synthetic_data.with_row_sizes(config, [{"sequences_per_row": 5}])
    assert found.objective == "choose:choices=5"
    config = synthetic_data.with_row_sizes(config)
    assert config.objective == f"choose:choices={n}"
    target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
    shape = target.eval_shape
    if not n:
        with pytest.raises(UserError, match=r"task\.choices"):
            target.lower("eval", shape)
        return
    assert target.tokens(shape) == shape.batch_size * 3 * shape.length
    said = target.lower("eval", shape).out_info
    assert said["outputs"]["scores"].shape == (shape.batch_size, 3)


def test_what_was_compiled_is_kept_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = command_line.parse(["--config=bert.py:smoke"]).config
    config.model.attention = "xla"
    for given, wanted in (
        ("gs://bucket/cache", tmp_path / ".cache" / "bertjax" / "compiled"),
        (str(tmp_path / "own"), tmp_path / "own" / "compiled"),
    ):
        config.data.cache = given
        target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
        assert target.cache == wanted


def test_what_is_frozen_is_counted_without_moments():
    """Frozen are a teacher, in the dtype of the computation, and parts of the model."""
    config = command_line.parse(["--config=distilbert.py:smoke"]).config
    config.model.attention, config.dtype = "xla", "bfloat16"

    def parts(freeze):
        config.optim.freeze = freeze
        target = compile_steps.Target(config, 1000, "here", jax.devices()[:1])
        return target.state_parts(), target.objective

    alone, objective = parts("")
    teacher = jax.eval_shape(objective.init_teacher, jax.random.key(0))
    assert teacher["encoder"]["layers"]["mlp"]["up"]["bias"].shape[0] == 2
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(teacher))
    assert alone["frozen"] == size < 4 * count_params(teacher)
    some, _ = parts("encoder/embeddings/.*")
    moved = some["frozen"] - alone["frozen"]
    assert moved == alone["parameters"] - some["parameters"] > 4 * 1000 * 128
    assert alone["optimizer"] - some["optimizer"] == 2 * moved


@pytest.mark.parametrize("name", ["bert.py:base", "bert.py:large", "roberta.py:base"])
def test_state_falls_with_fsdp(name):
    """Parameters and moments per device fall as 1 / mesh.fsdp, by the shardings.

    This holds for sharded leaves; norms and biases, which are replicated, are less than
    a hundredth of the state.
    """
    config = command_line.parse([f"--config={name}"]).config
    cfg = resolve.encoder_config(config, config.data.vocab_size, backend="tpu")
    objective, _ = make_objective(config.objective, cfg)
    whole: dict[str, int] = {}
    for n in (1, 4, 16, 64, 256):
        mesh = AbstractMesh((1, n, 1), ("data", "fsdp", "tensor"))
        steps = train_step.ENDLESS
        update = train_step.make_update(config, objective, mesh, *steps)
        for part in ("params", "opt_state"):
            shapes = jax.tree.leaves(getattr(update.shapes, part))
            places = jax.tree.leaves(getattr(update.shardings, part))
            leaves = list(zip(shapes, places, strict=True))
            size = compile_steps.shard_bytes(*zip(*leaves, strict=True))
            entire = [
                leaf.size * leaf.dtype.itemsize
                for leaf, where in leaves
                if where.shard_shape(leaf.shape) == leaf.shape
            ]
            total = whole.setdefault(part, size)
            if n > 1:
                assert sum(entire) < 0.01 * total
                ideal = (total - sum(entire)) / n
                assert size - sum(entire) == pytest.approx(ideal, rel=0.01)


@pytest.mark.parametrize(
    "total, phases, text, steps",
    [
        ({"steps": 1_000}, 1, None, 1_000),
        ({"examples": 3_200}, 1, None, 100),
        ({"tokens": 409_600}, 1, None, 100),
        ({"epochs": 2.0}, 1, [{"rows_an_epoch": 480}], 30),
        ({"epochs": 2.0}, 1, None, None),
        ({"steps": 1_000}, 2, None, None),
    ],
)
def test_the_hours_of_a_run_are_told_where_they_are_known(total, phases, text, steps):
    config = command_line.parse(["--config=bert.py:tiny"]).config
    config.total = durations.duration(**total)
    phase = {"batch_size": 32, "length": 128, "estimated_step_ms": 36.0}
    found = estimates.run_estimate(config, [phase] * phases, text)
    hours = None if steps is None else steps * 36 / 3.6e6
    assert found == {"total_steps": steps, "estimated_run_hours": hours}
    unknown = [{**phase, "estimated_step_ms": None}] * phases
    assert estimates.run_estimate(config, unknown, text)["estimated_run_hours"] is None
    config.budget_minutes = 10.0
    assert set(estimates.run_estimate(config, [phase], text).values()) == {None}
