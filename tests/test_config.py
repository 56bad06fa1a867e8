# SPDX-License-Identifier: Apache-2.0
import importlib
import json
import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertjax import UserError, config, registry, train
from bertjax.assembly import command_line, resolve, validate
from bertjax.config import arguments, durations, recipes, schema, serialize
from bertjax.data.masking.masker import read_masker
from bertjax.data.phases import place_phases, steps_of
from bertjax.models.families import FAMILIES

SHIPPED = sorted(
    p.name
    for p in (Path(__file__).parents[1] / "configs").glob("*.py")
    if p.stem != "__init__"
)
FAMILY = {"gpt.py": "gpt2"}  # configs not named after their family
SIZES_OF = {
    n: FAMILIES.get(FAMILY.get(n, n.removesuffix(".py")), FAMILIES["bert"]).sizes
    for n in SHIPPED
}
for own in ("coke", "cuglm", "edges", "hybrid", "modern", "quickstart"):
    file = Path(__file__).parents[1] / f"configs/{own}.py"
    SIZES = runpy.run_path(str(file))["SIZES"]
    SIZES_OF[file.name] = {size: {"hidden_size": how[1]} for size, how in SIZES.items()}


def parse(*arguments, name="bert.py:smoke"):
    return command_line.parse([f"--config={name}", *arguments]).config


def steps(made, name, rows, total):
    """Convert a duration to steps of the first phase; rows: the size of its epoch."""
    first = place_phases(resolve.wanted_phases(made), 100, lambda phase: rows)[0]
    return steps_of(*durations.unit_of(made, name), first, total)


# ---------------------------------------------------------------- shipped configs
@pytest.mark.parametrize(
    "name, size", [(n, s) for n in SHIPPED for s in (*SIZES_OF[n], "smoke", "")]
)
def test_every_shipped_config_resolves(name, size):
    made = parse(name=f"{name}:{size}" if size else name)
    validate.check(made)
    cfg = resolve.encoder_config(made, 30_522)
    if size in SIZES_OF[name]:
        assert cfg.hidden_size == SIZES_OF[name][size]["hidden_size"]
    assert set(serialize.flatten(made)) == set(serialize.flatten(schema.base()))
    for duration in durations.durations(made):
        assert steps(made, duration, 10_000, 1000) >= 0
    assert (
        serialize.differences(serialize.from_json(serialize.to_json(made)), made) == []
    )


def test_the_scale_of_t5s_logits_follows_its_width():
    """Otherwise no Hugging Face family would have such a model to export to."""
    for more, scale in (
        (["hidden_size=64"], 64**-0.5),
        (["hidden_size=64", "logit_scale=0.5"], 0.5),
        (["num_hidden_layers=3"], 128**-0.5),
    ):
        flags = [f"--config.model.{one}" for one in more]
        made = parse(*flags, name="t5.py:tiny")
        assert resolve.encoder_config(made, 100).logit_scale == scale
    wide = parse("--config.model.hidden_size=64", name="t5.py:v1_1_mini")
    assert resolve.encoder_config(wide, 100).logit_scale == 0


@pytest.mark.parametrize(
    "flags, is_causal",
    [
        (["objective=clm"], True),
        (["objective=prefix"], False),
        (["objective=clm", "phases=percent=50 objective=mlm;"], False),
    ],
)
def test_what_learns_the_next_token_alone_sees_what_is_before_it(flags, is_causal):
    """The model is causal for every command that opens it, as it was in training."""
    made = parse(*(f"--config.{flag}" for flag in flags), name="bert.py:tiny")
    assert resolve.encoder_config(made, 100).is_decoder is is_causal


@pytest.mark.parametrize("name", SHIPPED)
def test_smoke_takes_seconds(name):
    made = parse(name=f"{name}:mini,smoke")
    assert made.total.steps <= 100
    assert made.batch_size * made.data.length <= 1024
    assert made.dtype == "float32"
    width = resolve.encoder_config(made, 1000).hidden_size
    assert width == SIZES_OF[name]["mini"]["hidden_size"]


def test_read_arg():
    assert recipes.read_arg(None, "base") == ("base", False)
    assert recipes.read_arg("", "base") == ("base", False)
    assert recipes.read_arg("large", "base") == ("large", False)
    assert recipes.read_arg("smoke", "base") == ("tiny", True)
    assert recipes.read_arg("smoke,mini", "base") == ("mini", True)
    with pytest.raises(UserError, match="did you mean 'small'"):
        recipes.read_arg("smal", "base")
    with pytest.raises(UserError, match="ARG='mini,large' names 2 sizes: give one"):
        recipes.read_arg("mini,large", "base")


def test_a_config_by_path_and_from_another_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from bertjax import config as c\n"
        "def get_config(arg=None):\n"
        "    config = c.base()\n"
        "    config.batch_size = int(arg)\n"
        "    return config\n"
    )
    assert parse(name=f"{tmp_path / 'mine.py'}:24").batch_size == 24
    monkeypatch.chdir(tmp_path)
    assert parse(name="mine.py:16").batch_size == 16
    assert parse(name="bert.py:smoke").batch_size == 8


# ---------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    "given, own, others",
    [
        ("--config a.py --config.seed -3 --n 3", 3, 2),
        ("--config.data.packed --runner=DirectRunner", 1, 1),
        ("--config.data.packed -h --configs x", 1, 3),
    ],
)
def test_arguments_are_parted(given, own, others):
    found = arguments.split_arguments(given.split())
    assert [len(part) for part in found] == [own, others]
    # Commands that look for the config file find it in one form.
    assert ("--config a.py" in given) == ("--config=a.py" in found[0])


def test_overrides():
    values = command_line.parse(
        ["--config.batch_size=32", "--config", "bert.py:smoke", "--config.seed=1e6"]
    )
    assert (values.config.batch_size, values.config.seed) == (32, 1_000_000)
    assert json.loads(values.overrides) == {"batch_size": 32, "seed": 1_000_000}


def test_shares_may_be_fractions():
    made = parse("--config.optim.warmup.percent=0.5", "--config.eval.every.epochs=1")
    assert made.optim.warmup.percent == 0.5 and made.eval.every.epochs == 1.0


def test_a_mask_rate_of_the_config_file_can_be_taken_back():
    assert parse(name="modern.py:tiny").data.mask_rate == "0.3:0.15"
    assert parse("--config.data.mask_rate", "0.3:0.1").data.mask_rate == "0.3:0.1"
    for text in ("", "None"):
        made = parse(f"--config.data.mask_rate={text}", name="modern.py:tiny")
        assert made.data.mask_rate is None


@pytest.mark.parametrize("text", ["1e6", "1E6", "1.0e6", "1e+6", "1000000"])
def test_numbers_may_be_written_1e6(text):
    made = parse(f"--config.total.steps={text}")
    assert made.total.steps == 1_000_000 and isinstance(made.total.steps, int)
    assert parse(f"--config.total.tokens={text}").total.tokens == 1_000_000
    assert parse("--config.total.tokens", text).total.tokens == 1_000_000
    assert parse(f"--config.optim.lr={text}").optim.lr == 1_000_000.0


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--config.optim.lrr=1", ["--config.optim.lrr", "did you mean 'lr'?"]),
        ("--config.optim.b3=0.9", ["--config.optim.b3", "b1, b2, "]),
        (
            "--config.optm.lr=1",
            ["optm.lr", "did you mean --config.optim.lr=1?"],
        ),
        ("--config.total.step=1", ["total.step", "did you mean 'steps'?"]),
        ("--config.seed.x=1", ["--config.seed.x", "value"]),
        ("--config.batch_size=abc", ["batch_size", "abc"]),
        ("--config.batch_size=1.5", ["batch_size"]),
        ("--config.total.steps=1.5e0", ["total.steps"]),
        ("--config.optim.lr=fast", ["optim.lr"]),
        ("--nosuchflag=1", ["nosuchflag"]),
        ("loose", ["loose"]),
        ("--config=bret.py", ["bret.py", "bert.py"]),
        ("--config=finetune/clasify.py", ["did you mean 'finetune/classify.py'"]),
        ("--config=classify.py", ["did you mean 'finetune/classify.py'"]),
        ("--config=qa.py", ["did you mean 'finetune/qa.py'"]),
        ("--config=bert.py:bse", ["bse", "base"]),
    ],
)
def test_bad_arguments_get_one_line(argument, words):
    with pytest.raises(UserError) as caught:
        command_line.parse(["--config=bert.py:smoke", argument])
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_an_installed_package_has_its_own_configs(tmp_path, monkeypatch):
    """A folder configs/ beside it in site-packages belongs to another package."""
    own, others = tmp_path / "bertjax/configs", tmp_path / "configs"
    for folder, name in ((own, "bert.py"), (others, "other.py")):
        folder.mkdir(parents=True)
        (folder / name).write_text("")
    monkeypatch.setattr(arguments, "__file__", str(tmp_path / "bertjax/config/x.py"))
    assert arguments.find_config("bert.py:mini") == f"{own / 'bert.py'}:mini"
    with pytest.raises(UserError, match=r"known: bert\.py$"):
        arguments.find_config("other.py")


def test_a_config_is_loaded_from_python(tmp_path, monkeypatch):
    loaded = config.load_config("bert.py:smoke")
    command_line.settle_config(loaded, {})
    assert loaded.to_dict() == parse().to_dict()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(arg=4):\n    return ConfigDict({'arg': arg})\n"
    )
    names = "mine.py", "mine.py:a", "~/mine.py:b"
    assert [config.load_config(name).arg for name in names] == [4, "a", "b"]
    with pytest.raises(UserError, match=r"'bert\.pi'"):
        config.load_config("bert.pi")


def test_config_is_needed():
    for given in ([], ["--config.init_from=DIR"]):
        with pytest.raises(UserError, match="--config is missing"):
            command_line.parse(given)


# ---------------------------------------------------------------- durations
def test_a_unit_given_clears_the_others():
    made = parse("--config.total.epochs=2.5", "--config.optim.warmup.percent=10")
    assert made.total.to_dict() == dict(
        steps=None, epochs=2.5, examples=None, tokens=None, percent=None
    )
    assert made.optim.warmup.steps is None
    assert steps(made, "total", 320, 0) == 100  # batches of 8
    assert steps(made, "optim.warmup", 320, 100) == 10


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(steps=7), 7),
        (dict(examples=80), 10),
        (dict(examples=81), 11),
        (dict(tokens=8 * 64 * 5), 5),
        (dict(tokens=8 * 64 * 5 + 1), 6),
        (dict(epochs=1), 13),  # 100 examples in batches of 8
        (dict(epochs=0.08), 1),
        (dict(percent=10), 20),
        (dict(percent=0.1), 1),
        (dict(steps=0), 0),
    ],
)
def test_units(given, expected):
    made = parse()
    made.eval.every = durations.duration(**given)
    assert steps(made, "eval.every", 100, 200) == expected


def test_rounding_does_not_add_a_step():
    """Despite floating-point errors, as of 0.1 + 0.2, 30 percent of 1,000 is 300."""
    made = parse()
    for percent in range(1, 101):
        made.eval.every = durations.duration(percent=percent)
        assert steps(made, "eval.every", 1, 1000) == percent * 10


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["total.steps=5", "total.epochs=1"], "total needs one of .*steps and epochs"),
        (["total.steps=-5"], "total.steps=-5 must be at least 0"),
        (["total.epochs=nan"], "total.epochs=nan must be at least 0"),
        (["optim.warmup.percent=-1"], r"optim\.warmup\.percent"),
    ],
)
def test_bad_durations(arguments, word):
    with pytest.raises(UserError, match=word):
        parse(*(f"--config.{a}" for a in arguments))


@pytest.mark.parametrize(
    "unit, value, what",
    [
        ("steps", "a", "a whole number"), ("steps", 1.5, "a whole number"),
        ("tokens", None, "a whole number"), ("epochs", "", "a number"),
        ("examples", float("inf"), "a whole number"),
    ],
)  # fmt: skip
def test_what_is_no_number_of_a_unit(unit, value, what):
    with pytest.raises(
        UserError, match=rf"^duration\({unit}=.*\): this is not {what}$"
    ):
        durations.duration(**{unit: value})
    assert durations.duration(steps="5").steps == 5
    assert durations.duration(tokens=1e9).tokens == 10**9


@pytest.mark.parametrize("name", ["warmup", "decay", "average"])
def test_more_than_the_whole_run(name):
    """The message gives percent, the unit that was set."""
    made = command_line.parse(["--config=bert.py:mini"]).config
    made.optim.schedule = "wsd"
    made.optim[name] = durations.duration(percent=150)
    with pytest.raises(UserError, match=rf"optim\.{name}\.percent=150 is more than "):
        validate.check(made)


def test_percent_of_nothing():
    made = parse("--config.total.percent=50")
    with pytest.raises(UserError, match="no meaning"):
        validate.check(made)


def test_a_number_without_a_unit_is_refused_in_python(tmp_path):
    """The message says what to write; a dict of one unit is a duration."""
    made = config.load_config("bert.py:smoke").copy_and_resolve_references()
    units = ", or .epochs, .examples, .tokens, .percent for .steps"
    for section, key in ((made, "total"), (made.log, "every"), (made.optim, "warmup")):
        with pytest.raises(UserError) as caught:
            section[key] = 100
        said = f"{key} = 100 has no unit: write {key}.steps = 100{units}"
        assert str(caught.value) == said
    made.total, made.eval.every = {"tokens": 1e9}, dict(epochs=0.5)
    assert durations.unit_of(made, "total") == ("tokens", 10**9)
    assert durations.unit_of(made, "eval.every") == ("epochs", 0.5)
    with pytest.raises(UserError, match="did you mean 'steps'"):
        made.total = {"step": 3}
    file = tmp_path / "mine.py"
    file.write_text(
        "from bertjax import config as c\n"
        "def get_config():\n"
        "    config = c.base()\n"
        "    config.total = 100\n"
        "    return config\n"
    )
    with pytest.raises(UserError, match=r"mine\.py:4: total = 100 has no unit: write"):
        command_line.parse([f"--config={file}"])


# ---------------------------------------------------------------- what differs
def test_differences():
    a = parse()
    b = parse("--config.optim.lr=0.5", "--config.total.epochs=1")
    assert serialize.differences(a, a.copy_and_resolve_references()) == []
    lines = serialize.differences(a, b)
    assert [x.split(":")[0] for x in lines] == [
        "optim.lr",
        "total.epochs",
        "total.steps",
    ]
    assert lines[0].endswith("-> 0.5")


@pytest.mark.parametrize(
    "argument",
    [
        "log.every.steps=3",
        "log.writers=jsonl",
        "eval.every.epochs=1",
        "checkpoint.keep_last=9",
        "checkpoint.every.percent=1",
        "mesh.fsdp=2",
        "data.engine=tf",
        "data.cache=/elsewhere",
        "data.train=other.txt",
        "data.valid=other.txt",
        "data.vocab=other.txt",
        "data.entities=other.tsv",
        "task.index=elsewhere",
    ],
)
def test_what_is_never_compared(argument):
    assert serialize.differences(parse(), parse(f"--config.{argument}")) == []


@pytest.mark.parametrize(
    "argument",
    [
        "seed=1",
        "batch_size=16",
        "accumulate=2",
        "dtype=bfloat16",
        "data.length=32",
        "data.lower_case=True",
        "data.mask_rate=0.2",
        "model.hidden_size=64",
        "optim.warmup.steps=1",
        "eval.examples=8",
        "init_from=elsewhere",
    ],
)
def test_what_is_compared(argument):
    (line,) = serialize.differences(parse(), parse(f"--config.{argument}"))
    assert line.startswith(f"{argument.split('=')[0]}: ")


def test_models_are_compared_by_what_is_in_effect():
    """A run of an imported model can resume, whatever size was recorded for it."""
    old, new = parse(), parse()
    shape = dict(num_hidden_layers=6, hidden_size=384, num_attention_heads=12)
    for made, size in ((old, "tiny"), (new, "")):
        made.model.update(shape | {"intermediate_size": 1536, "size": size})
    assert serialize.differences(old, new) == []
    assert resolve.encoder_config(new, 9).num_hidden_layers == 6
    # A size given by name and the same shape spelled out are equal.
    named, spelled = parse(name="bert.py:mini"), parse(name="bert.py:base")
    spelled.model.update(dict(num_hidden_layers=4, hidden_size=256))
    spelled.model.num_attention_heads = 4
    assert serialize.differences(named, spelled) == []
    (line,) = serialize.differences(named, parse(name="bert.py:tiny"))
    assert line == "model.size: mini -> tiny"
    # Two shapes without a name are still compared.
    small, large = parse(name="bert.py:small"), parse(name="bert.py:medium")
    for made in (small, large):
        made.model.hidden_size = 64
    large.model.remat = "full"  # not compared
    (line,) = serialize.differences(small, large)
    assert line == "model.num_hidden_layers: 4 -> 8"


@pytest.mark.parametrize(
    "schedule, of_today",
    [("wsd", 0.5), ("polynomial", 1.0), ("linear", 1.0), ("cosine", 1.0)],
)
def test_runs_from_before_wsd_had_a_power_go_on(schedule, of_today):
    """They recorded power 1.0, which wsd ignored: it decayed by the square root."""
    flag = f"--config.optim.schedule={schedule}"
    new = parse(flag)
    old = new.to_dict()
    del old["optim"]["average"]
    old["optim"]["power"] = 1.0
    back = serialize.from_json(json.dumps(old))
    assert serialize.differences(back, new) == []
    power = schema.power_in_effect(schedule, back.optim.power)
    assert power == schema.power_in_effect(schedule, new.optim.power) == of_today
    # A power of 1.0 that is given differs, and is read back unchanged.
    if schedule == "wsd":
        linear = parse(flag, "--config.optim.power=1.0")
        assert serialize.differences(back, linear) == ["optim.power: 0.5 -> 1.0"]
        again = serialize.from_json(serialize.to_json(linear))
        assert again.optim.power == 1.0


def test_a_model_without_a_size_spells_it_out():
    made = parse("--config.model.size=")
    with pytest.raises(UserError, match=r"model\.size"):
        resolve.encoder_config(made, 9)


# ---------------------------------------------------------------- checks
@pytest.mark.parametrize(
    "argument, word",
    [
        ("objective=mlmn", "objective='mlmn' is unknown; did you mean 'mlm'"),
        ("objective=base", "objective='base'"),
        ("objective=no.such.module", "no module"),
        ("data.engine=spark", r"data\.engine='spark'"),
        ("data.length=4", r"data\.length=4"),
        ("data.length=4096", r"model\.max_position_embeddings=512"),
        ("batch_size=0", "batch_size=0"),
        ("total.epochs=0", r"total\.epochs=0\.0: a run needs at least one step"),
        ("total.steps=0", r"total\.steps=0: a run"),
        ("accumulate=0", "accumulate=0"),
        ("checkpoint.keep_last=1", r"checkpoint\.keep_last=1"),
        ("checkpoint.every.steps=0", r"checkpoint\.every\.steps=0: it is at least"),
        ("eval.every.percent=0", r"eval\.every\.percent=0.*without data\.valid"),
        ("data.max_line_bytes=0", r"data\.max_line_bytes"),
        (
            "data.vocab_size=3e8",
            r"data\.vocab_size=300000000 must be from 16 to 16777216",
        ),
        ("data.max_segments=0", r"data\.max_segments=0 must be from 1"),
        ("data.max_segments=9", r"data\.max_segments=9 .* without data\.packed"),
        ("data.weights=a=1 --config.data.alpha=0.3", "data.weights and data.alpha"),
        ("data.max_predictions=0", r"data\.max_predictions=0"),
        ("data.max_predictions=65", r"data\.max_predictions=65"),
        ("dtype=float16", "known: auto, bfloat16, fast, float32"),
        ("model.size=bsae", "did you mean 'base'"),
        ("model.num_attention_heads=3", "num_attention_heads=3"),
        ("model.hidden_act=softmax", "hidden_act"),
        ("log.writers=tensorbord", "did you mean 'tensorboard'"),
        ("data.masking=brt", r"data\.masking='brt'.*did you mean 'bert'"),
        ("data.plan=pair", r"data\.plan='pair'.*did you mean 'pairs'"),
        ("data.mask_unit=words", r"data\.mask_unit"),
        ("data.mask_rate=1.5", r"data\.mask_rate"),
        ("optim.name=adamv", "did you mean 'adamw'"),
        ("optim.schedule=cosin", r"optim\.schedule='cosin'.*did you mean 'cosine'"),
    ],
)
def test_wrong_values_are_seen_without_data(argument, word):
    made = parse(*f"--config.{argument}".split())
    with pytest.raises(UserError, match=word):
        validate.check(made)


@pytest.mark.parametrize(
    "given, word",
    [
        (
            "name=muon bias_correction=False",
            "False is not used by.*only by adamw, lamb: leave",
        ),
        ("name=adafactor b1=0.8", r"b1=0\.8 is not.*name=adafactor.*optim\.b1=0\.9$"),
        ("name=adafactor eps=1e-8", r"optim\.eps=1e-08"),
        ("power=2.0", r"optim\.power=2\.0 is not used .*schedule=linear.*polyn"),
        (
            "schedule=cosine decay.percent=20",
            r"optim\.decay\.percent=20\.0.*only by wsd",
        ),
        ("schedule=polynomial decay.steps=9", r"optim\.decay\.steps=9"),
    ],
)
def test_settings_that_optimizer_or_schedule_do_not_read(given, word):
    with pytest.raises(UserError, match=word):
        validate.check(parse(*(f"--config.optim.{x}" for x in given.split())))


@pytest.mark.parametrize(
    "name, given",
    [
        ("modern.py:smoke", "optim.name=lamb optim.schedule=constant"),
        ("diffusion.py:smoke", "optim.name=adafactor"),
        ("macbert.py:smoke", "data.masking=bert"),
        ("macbert.py:smoke", "objective=clm"),
        ("bart.py:smoke", "objective=diffusion model.num_decoder_layers=0"),
        ("hybrid.py:smoke", "objective=clm"),
    ],
)
def test_what_a_recipe_sets_is_taken_back_as_the_message_says(name, given):
    """Formerly the advice led to another refusal, or to leave out a key not given."""
    arguments = [f"--config.{x}" for x in given.split()]
    halves = [SimpleNamespace(keys=frozenset())]
    while True:
        config = parse(*arguments, name=name)
        try:
            validate.check(config)
            if "objective" in given:
                resolve.check_keys(config, halves)
            return
        except UserError as e:
            (more,) = re.findall(r"give (--config\.[\w.]+=\S*)$", str(e))
        assert more not in arguments
        arguments.append(more)


@pytest.mark.parametrize(
    "given",
    [
        "name=adafactor wd=0.1 b1=0.9",  # given, at its default
        "name=stableadamw b1=0.8 b2=0.98 eps=1e-8 clip=0",
        "name=lamb bias_correction=False",
        "schedule=polynomial power=2.0",
        "schedule=wsd decay.steps=9",
        "schedule=wsd decay.steps=9 power=1.2",
        "schedule=linear power=1.0",
    ],
)
def test_settings_that_they_do_read(given):
    validate.check(parse(*(f"--config.optim.{x}" for x in given.split())))


def test_an_objective_and_a_plan_that_do_not_go_together():
    made = parse("--config.data.plan=full_sentences")
    with pytest.raises(UserError, match=r"needs sentence pairs.*not 'full_sentences'"):
        resolve.check_plan(made, frozenset({"mlm", "nsp"}))
    resolve.check_plan(made, frozenset({"mlm"}))
    more = "--config.objective=mlm", "--config.phases=steps=4 objective=mlm+nsp;"
    made = parse("--config.data.plan=full_sentences", *more)
    with pytest.raises(UserError, match=r"^objective='mlm\+nsp' needs sentence pairs"):
        resolve.objectives_of(made)  # the phase's objective


def test_model_sizes_follow_and_override():
    made = parse("--config.model.hidden_size=96", "--config.model.num_hidden_layers=1")
    cfg = resolve.encoder_config(made, 1000)
    assert (cfg.hidden_size, cfg.num_hidden_layers, cfg.head_dim) == (96, 1, 48)
    assert (cfg.intermediate_size, cfg.vocab_size) == (384, 1000)
    made.model.vocab_size = 1024  # padding
    assert resolve.encoder_config(made, 1000).vocab_size == 1024
    made.model.vocab_size = 999
    with pytest.raises(UserError, match="999 is smaller than the tokenizer's 1000"):
        resolve.encoder_config(made, 1000)


@pytest.mark.parametrize(
    "objective, layers",
    [("mlm", 0), ("mlm+sop", 0), ("clm", 0), ("electra", 0), ("denoise", 2)],
)
def test_only_what_trains_a_decoder_has_one(objective, layers):
    """A masked LM that went on from a BART was an encoder-decoder to all commands, and
    filled no blanks."""
    made = parse(
        f"--config.objective={objective}", "--config.model.num_decoder_layers=2"
    )
    assert resolve.encoder_config(made, 1000).num_decoder_layers == layers


def test_dtype_by_backend():
    made = parse(name="bert.py:tiny")
    assert resolve.encoder_config(made, 9, "cpu").dtype == "float32"
    assert resolve.encoder_config(made, 9, "tpu").dtype == "bfloat16"


def test_a_config_of_an_earlier_version_keeps_its_values():
    old = json.loads(serialize.to_json(parse("--config.optim.lr=0.25")))
    del old["optim"]["schedule"], old["deterministic"]
    made = serialize.from_json(json.dumps(old))
    assert made.optim.lr == 0.25 and made.optim.schedule == "linear"


def test_what_a_recipe_says_of_masks_can_be_taken_back():
    """With an objective that masks nothing, "" resets a masking key to its default."""
    nothing = [SimpleNamespace(keys=frozenset())]
    config = parse("--config.objective=clm", "--config.data.mask_unit=word")
    with pytest.raises(UserError, match=r"give --config\.data\.mask_unit=$"):
        resolve.check_keys(config, nothing)
    keys = "mask_unit mask_lengths corruption replacement mask_rate"
    config = parse(*(f"--config.data.{key}=" for key in keys.split()))
    resolve.check_keys(config, nothing)
    validate.check(config)
    assert read_masker(config.data) == read_masker(parse().data)
    config.data.max_predictions = 3  # no flag resets it
    with pytest.raises(UserError, match=r"objective=mlm.*: leave it out$"):
        resolve.check_keys(config, nothing)


def test_flags_of_xla(monkeypatch):
    """Flags that the environment has stay."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    resolve.set_flags(parse())
    assert os.environ["XLA_FLAGS"] == "--xla_a=1"
    resolve.set_flags(parse("--config.deterministic=True"))
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_deterministic_ops=true"


# ---------------------------------------------------------------- names
def test_registry():
    assert registry.pick("k", "b", {"a": 1, "b": 2}) == 2
    with pytest.raises(UserError, match="k='x' is unknown; known: a, b"):
        registry.pick("k", "x", {"a": 1, "b": 2})
    assert registry.check_module("objective", "mlm", "bertjax.objectives") == (
        "bertjax.objectives.mlm"
    )
    assert registry.check_module("objective", "json.tool", "bertjax.objectives") == (
        "json.tool"
    )
    module = importlib.import_module("bertjax.data.features.retromae")
    with pytest.raises(UserError, match=r"'x' is unknown; known: none$"):
        registry.make("k", module, "make_features", {"x": 1}, None)
    for name in ("nosuch.tool", "json.nosuch", "..", "json."):
        with pytest.raises(UserError, match="no module"):
            registry.check_module("objective", name, "bertjax.objectives")


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=-1",
        "optim.lr=nan",
        "optim.b1=2",
        "optim.eps=0",
        "guard.factor=0.5",
        "data.short_seq_prob=7",
        "eval.examples=-5",
        "seed=99999999999999999999999",
        "batch_size=999999999999",
        "model.layer_norm_eps=-1",
        "total.epochs=inf",
        "log.writers=os.path",
    ],
)
def test_senseless_values_are_refused(override):
    name = override.split("=")[0]
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        validate.check(
            command_line.parse(["--config=bert.py:mini", f"--config.{override}"]).config
        )


@pytest.mark.parametrize(
    "text, words",
    [
        ("def get_config(:\n", "SyntaxError"),
        ("def get_config():\n    return {}['a']\n", "broken.py:2: KeyError: 'a'"),
        ("import nosuchmodule\n", r"^\S+/broken.py:1: ModuleNotFound.*nosuchmodule"),
        (
            "def get_config():\n    return half(0)\ndef half(x):\n    return 1 / x\n",
            r"^\S+/broken.py:4: ZeroDivisionError: division by zero$",
        ),
        (
            "def get_config():\n    return int('x')\n",
            r"^\S+/broken.py:2: ValueError: invalid literal .* 'x'$",
        ),
        (
            "from ml_collections import ConfigDict\n"
            "def get_config():\n    return ConfigDict({'seed': 1})\n",
            "lacks",
        ),
        (
            "from bertjax import config as c\ndef get_config():\n"
            "    return c.duration(stps=3)\n",
            r"broken\.py:3: duration='stps' is unknown",
        ),
        (
            "from bertjax import config as c\ndef get_config():\n"
            "    config = c.base()\n    config.seed = None\n    return config\n",
            r"broken\.py: seed is None; its default is 0",
        ),
        (
            "from bertjax import config as c\ndef get_config():\n"
            "    config = c.base()\n    config.data.trian = 'x'\n    return config\n",
            r"broken\.py: key='data\.trian' is unknown; did you mean 'data\.train'\?",
        ),
    ],
)
def test_a_broken_config_file_is_one_line(tmp_path, text, words):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        validate.check(command_line.parse([f"--config={tmp_path}/broken.py"]).config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", [[], ["--config.seed=1"], ["--workdir=x"]])
@pytest.mark.parametrize(
    "text, words",
    [
        ("x = 1\n", "the file does not define get_config"),
        (
            "def get_config():\n    return 3\n",
            "get_config must return a ConfigDict, and returned 3",
        ),
        (
            "def get_config():\n    return None\n",
            "get_config must return a ConfigDict, and returned None",
        ),
        (
            "def get_config(arg):\n    return arg\n",
            "get_config: missing a required argument: 'arg'",
        ),
    ],
)
def test_what_gives_no_config_is_refused_by_its_file(
    tmp_path, monkeypatch, text, words, more
):
    # config_flags loads all files into this one module, which keeps old get_config's.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    file = tmp_path / "mine.py"
    file.write_text(text)
    for load in (
        lambda: command_line.parse([f"--config={file}", *more], train.FLAGS),
        lambda: config.load_config(str(file)),
    ):
        with pytest.raises(UserError) as refused:
            load()
        assert str(refused.value) == f"--config={file}: {words}"


def test_a_config_in_a_folder_that_is_not_there():
    with pytest.raises(
        UserError, match=r"^--config=nodir/x\.py: there is no such file$"
    ):
        arguments.find_config("nodir/x.py:mini")
    with pytest.raises(UserError, match=r"^--config=bert is not a .* mean bert\.py\?$"):
        arguments.find_config("bert:mini")
    with pytest.raises(UserError, match=r"did you mean 'finetune/classify\.py'"):
        arguments.find_config("finetune/clasify.py")


def test_a_model_of_a_later_version_is_refused():
    """Without its new model key it would be another model. Other new keys are reported
    as differences."""
    later = parse().to_dict()
    later["optim"]["new"] = 1
    (told,) = serialize.differences(serialize.from_json(json.dumps(later)), parse())
    assert told.startswith("optim.new: 1")
    later["model"]["new_norm"] = True
    with pytest.raises(UserError, match=r"^run/0: model\.new_norm is not known to"):
        serialize.from_json(json.dumps(later), "run/0")
