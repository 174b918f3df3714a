"""The thorough run: `./dev test --thorough` sets INTERLOCK_THOROUGH=1, and property tests try many more examples.

A test that names its own number of examples gets `FACTOR` times as many, like those that take the profile's number.
Other tests look at `THOROUGH` to do more.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest

THOROUGH = os.environ.get("INTERLOCK_THOROUGH") == "1"
FACTOR = 20
# Where Hypothesis keeps the settings that a decorator gave to a test.
_GIVEN = "_hypothesis_internal_use_settings"


def multiply_examples(items: Iterable[pytest.Item]) -> None:
    """In a thorough run, give the tests with a number of their own `FACTOR` times as many examples."""
    if not THOROUGH:
        return
    done: set[Any] = set()
    for item in items:
        test: Any = getattr(item, "obj", None)
        test = getattr(test, "__func__", test)
        given: Any = getattr(test, _GIVEN, None)
        if given is None or test in done:
            continue
        done.add(test)
        if given.max_examples != hypothesis.settings().max_examples:
            setattr(test, _GIVEN, hypothesis.settings(given, max_examples=given.max_examples * FACTOR))


@contextmanager
def no_collection() -> Generator[None]:
    """Measure without the garbage collector: it walks whatever all tests before have made."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
