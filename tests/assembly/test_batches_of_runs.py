# SPDX-License-Identifier: Apache-2.0
"""From a config to batches: which keys must not affect which batches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bertjax import UserError
from bertjax.assembly import batches as run_batches
from bertjax.assembly import command_line, prepared_text, resolve
from bertjax.data.batch_statistics import Statistics
from bertjax.data.batches import batch_sha256
from bertjax.data.features.base import KEYS


def quiet(text: str) -> None:
    pass


def configured(corpus, vocabulary, tmp_path, *more):
    return command_line.parse(
        [
            "--config=bert.py:smoke",
            f"--config.data.train={corpus / 'train.txt'}",
            f"--config.data.valid={corpus / 'valid.txt'}",
            f"--config.data.vocab={vocabulary}",
            f"--config.data.cache={tmp_path}",
            *(f"--config.{m}" for m in more),
        ]
    ).config


@pytest.mark.parametrize(
    "more",
    [
        ["objective=mlm+nsp"],
        ["objective=mlm+sop", "data.packed=True"],
        ["objective=mlm", "data.plan=document", "data.packed=True"],
    ],
)
def test_every_run_is_scored_on_the_same_rows(corpus, vocabulary, tmp_path, more):
    """They do not depend on its seed, phases and batch size."""
    hashes = set()
    for other in ([], ["seed=7"], ["phases=steps=3 length=32; mask_rate=0.4"]):
        config = configured(corpus, vocabulary, tmp_path, *more, *other)
        prepared = prepared_text.prepare(config, quiet)
        needs = frozenset(config.objective.split("+"))
        tables = run_batches.make_tables(config, prepared.tokenizer, None)
        batches = run_batches.make_eval_batches(
            config, needs, prepared.tokenizer, "valid", prepared.valid["valid"], tables
        )
        first = next(batches.eval_batches(8))
        hashes.add((batches.n, batch_sha256(first)))
    assert len(hashes) == 1


def test_the_order_of_components_does_not_matter(corpus, vocabulary, tmp_path):
    hashes = []
    for names in ("a={0},b={1}", "b={1},a={0}"):
        train = names.format(corpus / "train.txt", corpus / "valid.txt")
        config = configured(
            corpus, vocabulary, tmp_path, "data.valid=", f"data.train={train}",
            "data.alpha=0.5",
        )  # fmt: skip
        prepared = prepared_text.prepare(config, quiet)
        tables = run_batches.make_tables(config, prepared.tokenizer, None)
        needs = {"": frozenset({"mlm"})}
        run = run_batches.make_run(
            config, needs, prepared.tokenizer, prepared.parts, tables
        )
        hashes.append([batch_sha256(run.data.batch(step)) for step in range(3)])
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("more", "components", "what"),
    [
        ([], 1, "unpacked pairs"),
        (["data.packed=True"], 1, ""),
        (["data.short_seq_prob=0"], 1, ""),
        (["objective=mlm", "data.plan=document"], 1, ""),
        (["objective=mlm", "data.plan=document"], 2, "a mixture"),
    ],
)
def test_a_run_whose_rows_would_be_others_does_not_go_on(
    corpus, vocabulary, tmp_path, more, components, what
):
    config = configured(corpus, vocabulary, tmp_path, *more)
    parts = dict.fromkeys("ab"[:components])
    prepared_text.check_rows(config, parts, "old", prepared_text.ROW_RULES)
    if not what:
        prepared_text.check_rows(config, parts, "old", 1)
        return
    with pytest.raises(UserError, match=f"--workdir=old was begun by .* of {what}"):
        prepared_text.check_rows(config, parts, "old", 1)


@pytest.mark.parametrize("key", ["alpha", "vocab_alpha"])
def test_one_component_is_no_mixture(key, corpus, vocabulary, tmp_path):
    given = f"data.{key}=0.5"
    config = configured(corpus, vocabulary, tmp_path, "data.valid=", given)
    with pytest.raises(UserError, match=rf"{given}: data\.train has one component"):
        prepared_text.check_inputs(config)
    config.data.group_field = "lang"  # its values are not known yet
    with pytest.raises(UserError, match="plain text, which has no fields"):
        prepared_text.check_inputs(config)


def made_run(config, needs, **more):
    prepared = prepared_text.prepare(config, quiet)
    tables = run_batches.make_tables(config, prepared.tokenizer, None)
    how = prepared.tokenizer, prepared.parts, tables
    return run_batches.make_run(config, needs, *how, **more)


@pytest.mark.parametrize("objective", ["nsp", "sop"])
def test_masking_where_nothing_is_masked(objective, corpus, vocabulary, tmp_path):
    """A masking option is refused if no host half masks rows."""
    more = f"objective={objective}", "data.masking=roberta"
    config = configured(corpus, vocabulary, tmp_path, *more)
    needs = frozenset({objective})
    with pytest.raises(
        UserError, match=f"masking=roberta has no effect .*={objective}: leave"
    ):
        made_run(config, needs)
    config.data.masking = "bert"
    made_run(config, needs)


def test_a_run_that_was_begun_with_keys_that_say_nothing_goes_on(
    corpus, vocabulary, tmp_path
):
    needs = {name: frozenset({name or "mlm"}) for name in ("", "clm")}
    settings = "data.plan=full_sentences", "total.steps=6"

    def phased(rate):
        phases = f"phases=steps=3 objective=clm{rate};"
        return configured(corpus, vocabulary, tmp_path, *settings, phases)

    first, last = made_run(phased(""), needs).phases
    config = phased(" mask_rate=0.3")
    with pytest.raises(UserError, match=r"^phases: mask_rate=0\.3 has no effect"):
        made_run(config, needs)
    begun = (replace(first, mask_rate=0.3), last)
    assert made_run(config, needs, past=begun, at=2).phases == begun


def test_mask_rates_where_nothing_is_masked(corpus, vocabulary, tmp_path):
    masks, other = SimpleNamespace(keys=KEYS), SimpleNamespace(keys=frozenset())
    how = corpus, vocabulary, tmp_path
    config = configured(*how, "phases=steps=3 objective=clm; mask_rate=0.2")
    resolve.check_keys(config, [other, masks])
    config = configured(*how, "phases=steps=3 objective=clm mask_rate=0.3;")
    with pytest.raises(UserError, match=r"^phases: mask_rate=0\.3 .* objective=clm"):
        resolve.check_keys(config, [other, masks])
    config = configured(*how, "objective=clm", "eval.mask_rate=0.3")
    resolve.check_keys(config, [masks])
    with pytest.raises(UserError, match=r"^eval\.mask_rate=0\.3 .* objective=clm"):
        resolve.check_keys(config, [other])


def test_names_that_only_the_text_tells(corpus, vocabulary, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(
            f'{{"text": "Some words here.", "lang": "{x}"}}\n' for x in ("en", "sw")
        )
    )
    grouped = [f"data.train={file}", "data.group_field=lang", "data.valid="]
    config = configured(
        corpus, vocabulary, tmp_path, *grouped, "data.weights=en=1,de=1"
    )
    with pytest.raises(UserError, match="'de' is unknown"):
        prepared_text.prepare(config, quiet)
    other = tmp_path / "b.jsonl"
    other.write_text('{"text": "Some words here.", "lang": "en"}\n')
    grouped[-1] = f"data.valid={other}"
    config = configured(corpus, vocabulary, tmp_path, *grouped, "data.alpha=0.3")
    with pytest.raises(UserError, match="no text for sw"):
        prepared_text.prepare(config, quiet)
    other.write_text('{"text": "Some words here.", "lang": "train"}\n')
    config = configured(corpus, vocabulary, tmp_path, *grouped)
    with pytest.raises(UserError, match="`train` is a name"):
        prepared_text.prepare(config, quiet)


def test_a_text_without_pairs_is_named(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    (tmp_path / "x.txt").write_text("a b.\nb a.\nb b.\n")
    (tmp_path / "y.txt").write_text("a b.\n\nb a.\n")
    given = {"train": f"*={tmp_path}/[xy].txt", "vocab": f"{tmp_path}/vocab.txt"}
    given |= {"cache": f"{tmp_path}/cache", "plan": "pairs", "valid": ""}
    flags = [f"--config.data.{key}={value}" for key, value in given.items()]
    config = command_line.parse(["--config=bert.py:smoke", *flags]).config
    parts = prepared_text.prepare(config, quiet).parts
    with pytest.raises(UserError, match=r"^the text `y`: no chunk of 128 tokens"):
        run_batches.make_plans(config, run_batches.RowForm(128, "sop"), parts)


def test_rows_are_planned_with_what_the_host_half_leaves_for_text(
    corpus, vocabulary, tmp_path
):
    """Half of the slots are copies; plan, batches and counts cover only the text."""
    config = configured(corpus, vocabulary, tmp_path, "data.plan=full_sentences")
    prepared = prepared_text.prepare(config, quiet)
    tables = run_batches.make_tables(config, prepared.tokenizer, None)
    needs, tokenizer = frozenset({"lab.copies"}), prepared.tokenizer
    run = run_batches.make_run(config, {"": needs}, tokenizer, prepared.parts, tables)
    valid = run_batches.make_eval_batches(
        config, needs, tokenizer, "valid", prepared.valid["valid"], tables
    )
    text, stage = config.data.length // 2, run.data.at(0)
    assert {stage.plans[0].length, valid.plans[0].length} == {text}
    *_, last = valid.eval_batches(valid.n - 1)
    for batch in (run.data.batch(0), {k: last[k] for k in stage.specs}):
        shapes = {name: array.shape[1:] for name, array in batch.items()}
        assert shapes == {name: spec.shape for name, spec in stage.specs.items()}
        ids = batch["input_ids"]
        assert (ids[:, :text] == ids[:, text:]).all()
    assert last["mlm_norm"].sum() == last["mlm_weights"].sum() == 1  # 1 is no filler
    assert stage.P == 1  # mlm_norm is not a prediction
    statistics = Statistics(prepared.tokenizer, ("train",))
    statistics.add(stage.inspect(0), "")
    counted = statistics.results()
    real = run.data.batch(0)["attention_mask"][:, :text]
    assert counted["tokens"] == real.sum() and counted["fill"] == real.mean() / 2


def test_one_is_not_several(monkeypatch, corpus, vocabulary, tmp_path):
    skipped = {"conversations of a single turn": 1, "oldest turns of contexts": 1}
    skipped |= {"turns whose context does not fit": 2, "tokens of answers": 0}
    plan = SimpleNamespace(skipped=skipped)
    monkeypatch.setattr(run_batches, "make_plan", lambda *_, **__: plan)
    config, said = configured(corpus, vocabulary, tmp_path), []
    form = run_batches.RowForm(32)
    run_batches.make_plans(config, form, {"a": None}, said.append)
    assert said == [
        "a: 1 conversation of a single turn left out of the plan",
        "a: 1 oldest turn of contexts left out of the plan",
        "a: 2 turns whose context does not fit left out of the plan",
    ]


def test_a_run_has_as_many_steps_when_it_goes_on(corpus, vocabulary, tmp_path):
    """Percents of fewer steps end earlier, but a phase that has begun does not move."""
    more = "objective=mlm", "total.tokens=8500", "phases=percent=50 batch_size=16;"
    config = configured(corpus, vocabulary, tmp_path, *more, "batch_size=2")
    prepared = prepared_text.prepare(config, quiet)
    tables = run_batches.make_tables(config, prepared.tokenizer, None)
    how = config, frozenset({"mlm"}), prepared.tokenizer, prepared.parts, tables
    whole = run_batches.make_run(*how)
    for at in range(1, whole.total):
        known = run_batches.make_run(*how, whole.phases, at, whole.total)
        assert (known.total, known.phases) == (whole.total, whole.phases)
    anew = run_batches.make_run(*how, whole.phases, whole.total)
    assert anew.total < whole.total
