"""Amounts of one currency, the operator's choice, as whole millionths of it, so that sums are exact."""

from __future__ import annotations

from typing import Final

MILLION: Final = 1_000_000
# A larger amount does not fit the store's integers.
MAX_AMOUNT: Final = 1_000_000_000.0


def millionths(amount: float) -> int:
    """Convert an amount of currency to millionths, rounded to the nearest."""
    return round(amount * MILLION)
