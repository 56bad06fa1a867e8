# SPDX-License-Identifier: Apache-2.0
"""Options of parts that a config names: "name:option=value,option=value"."""

import math
import re
import sys
import types

import pytest

from bertjax import UserError
from bertjax.registry import RETURNS, load, make, parse_options


@pytest.mark.parametrize(
    "text, options",
    [
        ("mlm", {}),
        ("mlm:", {}),
        ("a.b:n=3", {"n": 3}),
        ("a.b:n=-3,x=0.5,y=1e-3", {"n": -3, "x": 0.5, "y": 1e-3}),
        ("a.b:on=true,off=False", {"on": True, "off": False}),
        ("a.b: kind = word , file=/x:y/z=1", {"kind": "word", "file": "/x:y/z=1"}),
    ],
)
def test_options_have_the_types_that_they_are_written_in(text, options):
    name, parsed = parse_options(text)
    assert name == text.partition(":")[0] and parsed == options
    assert [*map(type, parsed.values())] == [*map(type, options.values())]


@pytest.mark.parametrize("option", ["rate", "rate=", "=0.2"])
def test_an_option_without_a_value_is_refused_by_the_key_that_holds_it(option):
    with pytest.raises(UserError, match=f"^data.masking='m:a=1,{option}': '{option}'"):
        parse_options(f"m:a=1,{option}", "data.masking")


@pytest.mark.parametrize("name", ["my_lab.plug", "my_lab"])
@pytest.mark.parametrize(
    "text, reason",
    [
        ("\ndef f(:\n", "SyntaxError: invalid syntax"),
        ("import os\nimport no_such_module_x\n", "ModuleNotFoundError: No module"),
        ("\n1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_is_refused_by_its_line(
    tmp_path, monkeypatch, name, text, reason
):
    """Also if the package of the module fails."""
    folder = tmp_path / "my_lab"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "plug.py").write_text("")
    file = folder / ("plug.py" if name == "my_lab.plug" else "__init__.py")
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("my_lab", "my_lab.plug"):  # also undone after the test
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
    with pytest.raises(UserError) as refused:
        load("optim.name", "my_lab.plug", "")
    message = str(refused.value)
    assert message.startswith("optim.name='my_lab.plug' cannot be imported: " + reason)
    assert message.endswith(f"({file}, line 2)")


def plug_in(**functions):
    """Return a module my_lab.plug that defines these functions."""
    module = types.ModuleType("my_lab.plug")
    vars(module).update(functions)
    return module


def test_a_default_that_is_a_whole_number_takes_numbers_and_no_text():
    module = plug_in(make_plug=lambda cycles=3: (cycles, type(cycles)))
    for value in (2, 1.0, 2.5, True):
        found = make("optim.name", module, "make_plug", {"cycles": value})
        assert found == (value, type(value))
    with pytest.raises(UserError, match=r"my_lab\.plug: cycles=x is not a number$"):
        make("optim.name", module, "make_plug", {"cycles": "x"})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_values_of_options_are_finite_but_for_texts_and_infinite_defaults(value):
    def make_plug(z_loss=0.0, cycles=3, margin: float | None = None, name="x"):
        return name

    module = plug_in(make_plug=make_plug)
    for name in ("z_loss", "cycles", "margin"):
        _, options = parse_options(f"my_lab.plug:{name}={value}")
        wanted = f"my_lab.plug: {name}={options[name]} is not a finite number"
        with pytest.raises(UserError, match=wanted):
            make("objective", module, "make_plug", options)
    number = float(value)
    assert make("objective", module, "make_plug", {"name": number}) == str(number)
    module = plug_in(make_plug=lambda clip=math.inf: clip)
    assert make("objective", module, "make_plug", {"clip": math.inf}) == math.inf


def test_a_plug_in_that_fails_is_refused_by_its_line():
    module = plug_in(make_plug=lambda every=3: 1 / every)
    assert make("data.masking", module, "make_plug", {}) == 1 / 3
    words = r"^KEY: my_lab\.plug\.make_plug: ZeroDivisionError: .* line \d+\)$"
    with pytest.raises(UserError, match=words):
        make("KEY", module, "make_plug", {"every": 0})


@pytest.mark.parametrize("function", RETURNS)
def test_a_plug_in_that_returns_another_thing_is_refused(function):
    what = re.escape(f"KEY: my_lab.plug.{function} must return {RETURNS[function][0]}")
    for wrong in (None, 3, [3], (3, 4)):
        module = plug_in(**{function: lambda wrong=wrong: wrong})
        with pytest.raises(UserError, match=what) as refused:
            make("KEY", module, function, {})
        assert str(refused.value).endswith(f", and returned {wrong}")


def test_an_option_without_a_default_must_be_given():
    module = plug_in(make_plug=lambda rate: rate)
    with pytest.raises(
        UserError, match=r"^KEY: my_lab\.plug\.make_plug: missing .*'rate'"
    ):
        make("KEY", module, "make_plug", {})
    assert make("KEY", module, "make_plug", {"rate": 2}) == 2
