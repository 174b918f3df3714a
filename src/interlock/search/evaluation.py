"""Scores of a ranking of tools, given the tools that a task needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import log2


def ndcg(ranked: Sequence[str], needed: Sequence[Collection[str]], most: int = 10) -> float:
    """Return the normalized discounted cumulative gain of the first `most` tools.

    Each element of `needed` is a group of tools of which one is enough: the first counts, others of the group do not.
    """
    gain, left = 0.0, list(needed)
    for place, tool in enumerate(ranked[:most]):
        group = next((one for one in left if tool in one), None)
        if group is not None:
            left.remove(group)
            gain += 1 / log2(place + 2)
    return gain / sum(1 / log2(place + 2) for place in range(min(most, len(needed))))


def recall(results: Collection[str], needed: Sequence[Collection[str]]) -> float:
    """Return the part of the groups of which at least one tool was found."""
    return sum(1 for group in needed if any(tool in results for tool in group)) / len(needed)
