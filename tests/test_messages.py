# SPDX-License-Identifier: Apache-2.0
"""Messages to a user who made a mistake: what is wrong, where, and what to do."""

import pytest

from bertjax import (
    UserError,
    convert,
    counted,
    embed,
    fill_mask,
    predict,
    prepare,
    probe,
    registry,
    show,
    sweep,
    train,
)
from bertjax.assembly import command_line, workdirs
from bertjax.checkpoints import workdir_kinds
from bertjax.config import serialize

pytestmark = pytest.mark.usefixtures("no_listener")
SMOKE = "--config=bert.py:smoke"
TASK = (
    "--config=finetune/classify.py:smoke",
    "--config.task.text=text",
    "--config.task.label=label",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current directory of the test, with a model's file, a run and a table."""
    monkeypatch.chdir(tmp_path)
    for folder in ("hf", "deberta", "run/checkpoints/12"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "hf/model.safetensors").write_bytes(b"")
    (tmp_path / "deberta/config.json").write_text('{"model_type": "deberta-v2"}')
    (tmp_path / "run/checkpoints/12/meta.json").write_text("{}")
    (tmp_path / "run/config.json").write_text("{}")
    (tmp_path / "one.tsv").write_text("a\nb\n")
    return tmp_path


def learn(*arguments):
    return train.main([*arguments, "--workdir=w"])


def fill(model):
    return fill_mask.main([f"--model={model}", "A [MASK]."])


CASES = {
    "a duration": (
        lambda: learn(SMOKE, "--config.total=3"),
        "--config.total=3: write --config.total.steps=3, or .epochs, .examples",
    ),
    "a group": (
        lambda: learn(SMOKE, "--config.optim=lamb"),
        "--config.optim=lamb: optim is a group of keys: write --config.optim.name=lamb",
    ),
    "no rows": (
        lambda: learn(*TASK),
        "data.train is empty: give labelled rows, FILE.tsv, .csv or .jsonl: "
        "--config.data.train=FILE and --config.data.valid=FILE",
    ),
    "no triples": (
        lambda: learn("--config=coke.py"),
        "data.train is empty: give triples, FILE.tsv: --config.data.train=FILE",
    ),
    "no conversations": (
        lambda: learn("--config=plato.py:mini"),
        "data.train is empty: give conversations, for instance --config.data.train=",
    ),
    "another name": (
        lambda: learn(SMOKE, "--config.learning_rate=3"),
        "--config.learning_rate is unknown; did you mean --config.optim.lr=3?",
    ),
    "another name in its group": (
        lambda: learn(SMOKE, "--config.optim.learning_rate=3"),
        "--config.optim.learning_rate is unknown; did you mean --config.optim.lr=3?",
    ),
    "no group": (
        lambda: learn(SMOKE, "--config.lr=3"),
        "--config.lr is unknown; did you mean --config.optim.lr=3?",
    ),
    "a duration in no group": (
        lambda: learn(SMOKE, "--config.warmup=3"),
        "--config.warmup is unknown; did you mean --config.optim.warmup.steps=3, or "
        ".epochs, .examples, .tokens, .percent for .steps?",
    ),
    "a key of a value": (
        lambda: learn(SMOKE, "--config.optim.lr.max=3"),
        "--config.optim.lr.max is unknown: optim.lr is a single value, without keys",
    ),
    "no config": (
        lambda: learn(SMOKE, "--epochs=3"),
        "--epochs is unknown; did you mean --config.total.epochs=3?",
    ),
    "a plain number of steps": (
        lambda: learn(SMOKE, "--steps=3"),
        "--steps is unknown; did you mean --config.total.steps=3?",
    ),
    "another meaning": (
        lambda: learn(SMOKE, "--warmup_ratio=0.1"),
        "--warmup_ratio is unknown; did you mean --config.optim.warmup.percent? (a ",
    ),
    "a flag's other name": (
        lambda: learn(SMOKE, "--output_dir=x"),
        "--output_dir is unknown; did you mean --workdir=x?",
    ),
    "no config to name": (
        lambda: fill_mask.main(["--model=x", "--max_length=3", "A [MASK]."]),
        "--max_length is unknown; known: dtype, json, model, top_k, weights",
    ),
    "not a whole number": (
        lambda: learn(SMOKE, "--config.batch_size=3.5"),
        "--config.batch_size=3.5: '3.5' is not a whole number",
    ),
    "no finite number": (
        lambda: learn(SMOKE, "--config.model.layer_norm_eps=inf"),
        "model.layer_norm_eps=inf is not a finite number",
    ),
    "no finite number of a flag": (
        lambda: probe.main(["--model=x", "--lr=inf"]),
        "--lr=inf is not a finite number",
    ),
    "a model to begin with": (
        lambda: learn(SMOKE, "--model=dir"),
        "--model is unknown; did you mean --config.init_from=dir?",
    ),
    "too small": (
        lambda: embed.main(["--model=x", "--text=x", "--out=x.npy", "--max_length=2"]),
        "--max_length=2: 2 is not an integer >= 3",
    ),
    "classes without columns": (
        lambda: show.main([TASK[0], "--config.data.train=one.tsv"]),
        "objective='classify' learns from labelled rows: name their columns, task.text",
    ),
    "no number of a flag": (
        lambda: fill_mask.main(["--model=x", "--top_k=few", "A [MASK]."]),
        "--top_k=few: 'few' is not a whole number: predictions per blank",
    ),
    "a list of seeds": (
        lambda: sweep.main([TASK[0], "--workdir=x", "--seeds=1,2"]),
        "--seeds=1,2: '1,2' is not a whole number: runs per learning rate",
    ),
    "a model of the hub": (
        lambda: fill("bert-base-uncased"),
        "--model=bert-base-uncased: no such directory, and nothing is downloaded: a "
        "model of huggingface.co is fetched by `hf download bert-base-uncased "
        "--local-dir DIR`; then give DIR",
    ),
    "init_from the hub": (
        lambda: learn(*TASK, "--config.data.train=x", "--config.init_from=a/b"),
        "init_from=a/b: no such directory, and nothing is downloaded: a model of",
    ),
    "its file": (lambda: fill("hf/model.safetensors"), "no directory: give the one"),
    "another family": (
        lambda: fill("deberta"),
        "deberta: models with model_type='deberta-v2' cannot be read; those "
        "that can: albert, bart, bert, ",
    ),
    "a flag near --config": (
        lambda: learn("--confg=bert.py:smoke"),
        "--confg is unknown; did you mean 'config'? known: allow_config_change, config",
    ),
    "no config near": (
        lambda: learn("--config=nope.py"),
        "--config='nope.py' is unknown; known: albert.py",
    ),
    "no place": (
        lambda: train.main([SMOKE, "--workdir=/proc/x"]),
        "--workdir=/proc/x cannot be written: nothing can be made in /proc",
    ),
    "no place for answers": (
        lambda: predict.main(["--model=run", "--input=one.tsv", "--out=/proc/x"]),
        "--out=/proc/x cannot be written: nothing can be made in /proc",
    ),
    "no place for a model": (
        lambda: convert.main(["--from=hf", "--to=/proc/x/y"]),
        "--to=/proc/x/y cannot be written: nothing can be made in /proc",
    ),
    "no place for an index": (
        lambda: embed.main(["--model=hf", "--text=one.tsv", "--index=/proc/x"]),
        "--index=/proc/x cannot be written: nothing can be made in /proc",
    ),
    "no thesaurus": (
        lambda: prepare.main([SMOKE, "--similar=new.txt", "--synonyms=missing.txt"]),
        "--synonyms=missing.txt: cannot be read",
    ),
    "a text and no file": (
        lambda: embed.main(["--model=x", "--text=" + "a text " * 50, "--out=x.npy"]),
        " is no path here: File name too long",
    ),
    "a text and no config": (
        lambda: learn("--config=" + "a text " * 50),
        "is unknown; known: albert.py",
    ),
    "no home": (
        lambda: train.main([SMOKE, "--workdir=~nobody-here/x"]),
        "~nobody-here/x: there is no directory ~nobody-here: give the whole path",
    ),
    "no home of a vocabulary": (
        lambda: learn(SMOKE, "--config.data.vocab=~nobody-here/vocab.txt"),
        "~nobody-here/vocab.txt: there is no directory ~nobody-here: give the whole",
    ),
    "its checkpoints": (
        lambda: convert.main(["--from=run/checkpoints", "--to=x"]),
        "these are the checkpoints of a run: give the run, ",
    ),
    "one column": (
        lambda: tables("task.text"),
        "one.tsv: task.text=4: the table has 1 column (between tabs; .csv: commas)",
    ),
    "one column to answer": (
        lambda: tables("--columns: TEXT"),
        "(between tabs; .csv: commas); --columns=1 reads the first",
    ),
}


def tables(key):
    from bertjax.tasks import tables

    return tables.read_rows("one.tsv", "data.train", {key: "4"})


@pytest.mark.parametrize("name", CASES)
def test_one_plain_line(name, place, capsys):
    """The mistake is reported before anything is prepared or written."""
    run, words = CASES[name]
    with pytest.raises(UserError) as caught:
        run()
    said = str(caught.value)
    assert words in said and "\n" not in said
    assert not (place / "w").exists() and "tokens" not in capsys.readouterr().err


def test_another_config(tmp_path):
    """The message lists the differences from the workdir's config, at most five."""
    made = command_line.parse([SMOKE]).config
    (tmp_path / "config.json").write_text(serialize.to_json(made))
    made.seed = 3
    with pytest.raises(UserError, match=r"another config: seed: 0 -> 3; take another"):
        workdirs.check_workdir(tmp_path, made, allow_change=False)
    made.batch_size, made.accumulate, made.data.length = 16, 2, 32
    made.data.alpha, made.optim.lr, made.optim.wd = 0.5, 1.0, 0.5
    with pytest.raises(UserError) as caught:
        workdirs.check_workdir(tmp_path, made, allow_change=False)
    assert str(caught.value).endswith(
        "another config: accumulate: 1 -> 2; batch_size: 8 -> 16; data.alpha: None -> "
        "0.5; data.length: 64 -> 32; optim.lr: 0.001 -> 1.0; and 2 more; take another "
        "workdir, or --allow_config_change to continue this one"
    )
    workdirs.check_workdir(tmp_path, made, allow_change=True)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_what_may_be_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for given, may in {
        "bert-base-uncased": True,
        "org/name-1.5": True,
        "runs/mine": False,
        "./x": False,
        "/a/b": False,
        "a/b/c": False,
    }.items():
        said = workdir_kinds.why_no_checkpoint(tmp_path / given, given)
        assert ("hf download" in said) == may, given


def test_only_near_names_are_meant():
    for name, known, meant in (
        ("lrr", ["lr", "eps"], "did you mean 'lr'"),
        ("clasify", ["classify", "tag"], "did you mean 'classify'"),
        ("nope.py", ["roberta.py", "bert.py"], ""),
        ("deberta", ["roberta", "albert"], ""),
    ):
        said = registry.hint(name, known)
        assert meant in said and ("did you" in said) == bool(meant)


def test_one_thing_and_more():
    assert counted(1, "tag") == "1 tag" and counted(0, "tag") == "0 tags"
    assert counted(2000, "query", "queries") == "2,000 queries"
