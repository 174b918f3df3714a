"""Costs that must not grow: the same calls in a small and in a large home, taking turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.measure import Figure, times
from bench.report import Table, verdict

FLAT_WITHIN = 1.25


def table(
    title: str, unit: str, sizes: tuple[int, int], ways: Sequence[str], figures: Mapping[str, Figure], note: str = ""
) -> Table:
    """One row per way to call: the cost in the small home, in the large one, and whether it stayed flat."""
    rows: list[tuple[str, ...]] = []
    for way in ways:
        small, large = (figures[name(way, size)] for size in sizes)
        ratio = large.us / small.us
        slices = f"{small.calls:,} / {large.calls:,}"
        rows.append(
            (way, str(small), str(large), slices, f"<= {FLAT_WITHIN}x", times(ratio), verdict(ratio <= FLAT_WITHIN))
        )
    columns = ("CPU µs per call", *(f"{size:,} {unit}" for size in sizes), "calls/slice", "goal", "growth", "")
    return Table(title, columns, rows, note)


def name(way: str, size: int) -> str:
    return f"{way}, {size}"
