"""Regular expressions that are compiled on first use."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest

import interlock
from interlock.core.expressions import expression


def test_an_expression_does_what_a_compiled_one_does() -> None:
    words, digits = expression(r"(?P<word>[a-z]+)", re.IGNORECASE), expression(rb"\d+")
    found = words.match("Ab1")
    assert found is not None
    assert (found["word"], words.sub("-", "a1b2"), words.pattern, words.groups) == ("Ab", "-1-2", "(?P<word>[a-z]+)", 1)
    assert digits.findall(b"1 22") == [b"1", b"22"]
    assert words.flags & re.IGNORECASE
    assert [found[0] for found in words.finditer("a b")] == ["a", "b"]


def test_it_is_compiled_when_it_is_used() -> None:
    wrong = expression("(")
    with pytest.raises(re.error):
        wrong.match("")


def _expressions() -> Iterator[tuple[str, object]]:
    for module in pkgutil.walk_packages(interlock.__path__, "interlock."):
        if not module.name.endswith("__main__") and ".migrations" not in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if type(value) is type(expression("")):
                    yield f"{module.name}.{name}", value


def test_every_expression_of_the_package_compiles() -> None:
    found = dict(_expressions())
    assert len(found) > 150
    for name, value in found.items():
        assert repr(value).startswith("re.compile("), name
