"""Numbers as people read them."""

from __future__ import annotations

import pytest

from interlock.core.formatting import quantity, span, wait


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (0, "0 s"), (-5, "0 s"), (250, "250 ms"), (999.9, "999 ms"), (1000, "1 s"), (55_324, "55 s"), (60_000, "1 min"),
        (90_500, "1 min 30 s"), (86_340_000, "23 h 59 min"), (90_061_000, "1 d 1 h"), (86_400_000, "1 d"),
    ],
)  # fmt: skip
def test_a_span_is_told_in_its_two_largest_units(ms: float, words: str) -> None:
    assert span(ms) == words


@pytest.mark.parametrize(("ms", "words"), [(250, "250 ms"), (1000, "1 s"), (55_324, "56 s"), (59_999, "1 min")])
def test_a_time_to_wait_is_never_told_too_short(ms: int, words: str) -> None:
    assert wait(ms) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1e-06, "0.000001"),
        (0.5, "0.5"),
        (0, "0"),
        (1, "1"),
        (100, "100"),
        (2_500_000, "2500000"),
        (1e12, "1" + "0" * 12),
    ],
)
def test_an_amount_is_told_in_full(value: float, words: str) -> None:
    assert quantity(value) == words
