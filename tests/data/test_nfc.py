"""NFC is Unicode's, and its cost grows with the length of a text only."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from interlock.data import nfc
from interlock.data.canonical import canonical

MARKS = "\u0301\u0316\u0327\u0344\u05b0\u0e48\u0f71\u0f72\u0f73\u0f75\u0f81\u3099\U0001d165\U0001e944"
STARTERS = "aeo\u00e9\u1e69\u1100\u1161\u11a8\uac00\u0915\u093c\u09c7\u09be\u0e01\u4e2d\U0001d157\U000105d2"
texts = st.lists(st.text(MARKS, max_size=80) | st.text(STARTERS, max_size=5) | st.text(max_size=3), max_size=6).map(
    "".join
)

pytestmark = pytest.mark.usefixtures("either_way")


@given(text=texts)
@example(text="a" + "\u0301\u0316" * 40)
@example(text="\u0f73" * 40)
def test_a_text_is_normalised_as_unicode_says(text: str) -> None:
    expected = unicodedata.normalize("NFC", text)
    assert nfc.nfc(text) == expected
    assert nfc.is_nfc(text) == (text == expected)
    assert canonical([text]) == canonical([expected])


@given(text=texts, pad=st.integers(0, 40))
def test_a_long_text_is_normalised_in_pieces_with_the_same_result(text: str, pad: int) -> None:
    # Three pieces. Of marks alone, the library takes a time that is quadratic in their number.
    long = ("x" * pad + text) * (50_000 // (len(text) + pad + 1))
    assert nfc.nfc(long) == unicodedata.normalize("NFC", long)


def test_no_character_that_can_be_reordered_or_combined_is_missing_from_the_ranges() -> None:
    loose = re.compile(f"[{nfc._LOOSE}]")  # pyright: ignore[reportPrivateUsage]
    mark = re.compile(nfc._long_run().pattern.split("{")[0])  # pyright: ignore[reportPrivateUsage]
    for one in map(chr, range(0x110000)):
        composed = unicodedata.decomposition(one)
        first = unicodedata.normalize("NFD", one)[0] if composed else one
        if unicodedata.combining(first):
            assert loose.match(one), f"U+{ord(one):04X}"
            assert mark.match(one), f"U+{ord(one):04X}"
        if composed and not composed.startswith("<"):
            for second in composed.split()[1:]:
                assert loose.match(chr(int(second, 16))), f"U+{second} can be combined with what comes before it"


@pytest.mark.parametrize("run", ["\u0301\u0316", "\u0316\u0301", "\u0f73"])
def test_a_long_run_of_marks_reaches_the_standard_library_sorted(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes a time quadratic in the number of marks that are out of order."""
    real = unicodedata.normalize

    def watched(form: Any, text: str) -> str:
        order = [unicodedata.combining(one) for one in text]
        steps = sum(1 for one, after in pairwise(order) if one > after > 0)
        assert steps <= nfc.LONG_RUN
        return real(form, text)

    marked = "e" + run * 20_000
    monkeypatch.setattr(unicodedata, "normalize", watched)
    monkeypatch.setattr(unicodedata, "is_normalized", lambda form, text: watched(form, text) == text)  # pyright: ignore[reportUnknownLambdaType,reportUnknownArgumentType]
    assert len(nfc.nfc(marked)) >= len(marked) - 1
    assert not nfc.is_nfc(marked)


def test_the_canonical_form_of_a_million_unordered_marks_is_written() -> None:
    """Sorted by insertion this would take an hour."""
    form = canonical({"text": "e" + "\u0301\u0316" * 250_000}).decode()
    assert form.count("\u0316") == 250_000
    assert form.count("\u0301") + form.count("\u00e9") == 250_000
