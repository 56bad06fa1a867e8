# SPDX-License-Identifier: Apache-2.0
"""Texts by the command and in Python are the same; both refuse the same input."""

import json
import os
import threading

import pytest

import bertjax
from bertjax import UserError, generate

TEXTS = ["The [MASK] is [MASK].", "A word"]


def test_the_command_and_python_write_the_same(trained, tmp_path, capsys):
    model = bertjax.load(str(trained))
    written = model.generate(TEXTS, max_new_tokens=3, order="left")
    given = [f"--model={trained}", "--max_new_tokens=3", "--order=left"]
    assert generate.main([*given, "--json", *TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == TEXTS
    assert [line["outputs"] for line in lines] == written
    assert all("[MASK]" not in one["text"] for [one] in written)
    assert len(written[1][0]["ids"]) == len(model.tokenizer.encode(TEXTS[1])) + 3
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in TEXTS))
    out = tmp_path / "out.jsonl"
    generate.main([*given, f"--input={prompts}", f"--out={out}"])
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_beam": 2}, r"option='num_beam' .*did you mean 'num_beams'"),
        ({"how": "left"}, r"^how=left: .* use how=unmask"),
        ({"num_beams": 0}, r"^num_beams=0 must be a whole number from 1$"),
        ({"seed": 2**32}, r"^seed=4294967296 must .* from 0 to 4294967295$"),
        ({"temperature": "hot"}, r"^temperature='hot' must"),
        ({"stop": ["."]}, r"^stop has no effect with how=unmask"),
        ({"stop": [5]}, r"^stop=\[5\] must be strings"),
        ({"prefix": 5}, r"^prefix=5 must be a string"),
    ],
)
def test_what_is_refused(trained, options, words):
    with pytest.raises(UserError, match=words):
        bertjax.load(str(trained)).generate(["A word"], **options)


def test_blanks_of_other_models_and_bad_lines(trained, tmp_path):
    with pytest.raises(UserError, match=r"<mask> is not a blank .* write \[MASK\]"):
        bertjax.load(str(trained)).generate(["A <mask>"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2 is not a JSON object"):
        generate.main([f"--model={trained}", f"--input={bad}"])
    bad.write_text('{"prompt": "a"}\n"turns"\n')  # a JSON string, not an object
    with pytest.raises(UserError, match=r"bad\.jsonl:2 is not a JSON object"):
        generate.main([f"--model={trained}", f"--input={bad}"])
    bad.write_text('{"prompt": "a"}\n{"prompt": "b", "seed": 3}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2: seed .* give --seed$"):
        generate.main([f"--model={trained}", f"--input={bad}"])
    bad.write_text("\n")
    with pytest.raises(UserError, match=r"bad\.jsonl has no prompts$"):
        generate.main([f"--model={trained}", f"--input={bad}"])


def test_a_prompt_at_fault_is_named_by_its_line(trained, tmp_path):
    """Formerly only its first characters were shown."""
    given = [f"--model={trained}", "--max_new_tokens=3"]
    for name, form, line in (("a.txt", "{}", 3), ("b.jsonl", '{{"prompt": "{}"}}', 4)):
        prompts = tmp_path / name
        texts = ["A word", "", "a " * 999] if line == 3 else ["A", "B", "a " * 999]
        lines = [form.format(text) + "\n" for text in texts]
        lines.insert(1, "\n" * (line - 3))
        prompts.write_text("".join(lines))
        with pytest.raises(UserError, match=rf"{name}:{line}: 'a a .* more than"):
            generate.main([*given, f"--input={prompts}"])
    with pytest.raises(UserError, match=r"^'a a .* has \d+ tokens"):
        generate.main([*given, "a " * 999])


def test_keys_that_are_not_read_are_reported(tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    lines = (
        '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 2}\n{"turns": ["c"], "x": 1}\n'
    )
    prompts.write_text(lines)
    found = generate.read_prompts(str(prompts))
    assert list(found) == [f"{prompts}:{number}" for number in (1, 2, 3)]
    assert capsys.readouterr().err == f"{prompts}: 'id' is not read (2 lines)\n"


def test_what_is_not_utf8_is_refused(trained, tmp_path):
    """Invalid bytes on the command line (surrogates in Python) and in JSON escapes."""
    for given in (["caf\udce9"], ["a", "--prefix=\udce9"], ["a", "--stop=\udce9"]):
        with pytest.raises(UserError, match=r"udce9' is not UTF-8"):
            generate.main([f"--model={trained}", *given])
    bad = tmp_path / "bad.jsonl"
    for line in ('{"prompt": "a \\ud800"}', '{"turns": [{"text": "\\ud800"}]}'):
        bad.write_text(line + "\n")
        with pytest.raises(UserError, match=r"bad\.jsonl:1: is not UTF-8"):
            generate.main([f"--model={trained}", f"--input={bad}"])


def test_prompts_of_a_pipe(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_text, args=("A word\r\n\nB\n",))
    writer.start()
    assert [*generate.read_prompts(str(fifo)).values()] == ["A word", "", "B"]
    writer.join()
    (tmp_path / "turns.jsonl").write_text('{"prompt": "A"}\n{"turns": []}\n')
    with pytest.raises(UserError, match=r"turns\.jsonl:2: `turns` is not a list with"):
        generate.read_prompts(str(tmp_path / "turns.jsonl"))
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    with pytest.raises(UserError, match=r"list\.jsonl:1 is not a JSON object"):
        generate.read_prompts(str(tmp_path / "list.jsonl"))
    with pytest.raises(UserError, match=f"^--input={tmp_path} cannot be read: Is a"):
        generate.read_prompts(str(tmp_path))


def test_prompts_are_not_replaced(trained, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A word\n")
    given = [f"--model={trained}", f"--input={prompts}", f"--out={prompts}"]
    with pytest.raises(UserError, match="is --input, which it would replace"):
        generate.main(given)
    assert prompts.read_text() == "A word\n"
