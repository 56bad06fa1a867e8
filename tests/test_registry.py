# SPDX-License-Identifier: Apache-2.0
"""Options of what a config names: "name:option=value,option=value"."""

import pytest

from bertjax import UserError
from bertjax.registry import parse_options


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
