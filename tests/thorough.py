"""How many examples property tests try: few in the normal run, many where `./dev test --thorough` runs them.

`./dev test --thorough` sets INTERLOCK_THOROUGH=1. A property test that names its own number of examples, or takes the
profile's, tries a part of them in the normal run (`SHARE`) and `FACTOR` times as many in a thorough one. Other tests
look at `THOROUGH` to do more.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

THOROUGH = os.environ.get("INTERLOCK_THOROUGH") == "1"
FACTOR = 20
SHARE = 8
LEAST = 10  # a test that names fewer examples than these tries all of them in the normal run
# Fails a test for the time that drawing examples takes: on a busy machine, or where a table has to be made first, any.
TIMED = hypothesis.HealthCheck.too_slow
# Where Hypothesis keeps the settings that a decorator gave to a test.
_GIVEN = "_hypothesis_internal_use_settings"


def examples(named: int) -> int:
    """How many examples a property test tries in this run, of the number that it names."""
    return named * FACTOR if THOROUGH else max(min(named, LEAST), named // SHARE)


def scale_examples(items: Iterable[pytest.Item]) -> None:
    """Give the tests with a number of their own as many examples as this run tries, and all of them their time."""
    done: set[Any] = set()
    for item in items:
        test: Any = getattr(item, "obj", None)
        test = getattr(test, "__func__", test)
        machine: Any = getattr(item, "cls", None)
        if isinstance(getattr(machine, "settings", None), hypothesis.settings):
            test, name = machine, "settings"  # a test case of a state machine
        else:
            name = _GIVEN
        given: Any = getattr(test, name, None)
        if given is None or test in done:
            continue
        done.add(test)
        # A test that suppresses checks names them all, and not this one.
        suppressed = [*given.suppress_health_check, TIMED]
        own = given.max_examples != hypothesis.settings().max_examples
        count = examples(given.max_examples) if own else given.max_examples
        setattr(test, name, hypothesis.settings(given, max_examples=count, suppress_health_check=suppressed))


def without_constants_of_the_source() -> None:
    """Let Hypothesis draw no examples from the constants in the modules that are loaded.

    It parses all of them for that, which takes seconds in each process, and the examples of a test would depend on the
    modules that the tests before it happened to load. A thorough run draws from them.
    """
    inside: Any = providers  # there is no setting for it
    none = inside._local_constants
    inside._get_local_constants = lambda: none


@contextmanager
def no_collection() -> Generator[None]:
    """Work without the garbage collector: it walks whatever all tests before have made."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
