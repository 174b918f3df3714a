"""Recommendations from calls: tools that are used together, and tools that others of the same group use.

What fewer than so many other callers did is left out. Those who ask do not count: they know what they did themselves,
so with them a minimum of three would tell of two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

from interlock.core.record import dataclass

# Calls of one caller that are no farther apart than this belong together.
TOGETHER_S: Final = 1800
MOST: Final = 10
LEAST_CALLERS: Final = 3

Reason = Literal["together", "group"]


@dataclass(frozen=True, slots=True)
class Used:
    """A call: by whom, of what, when in seconds. In the order of time."""

    caller: str
    tool: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A tool, and how many different callers speak for it."""

    tool: str
    reason: Reason
    callers: int
    why: str

    def document(self) -> dict[str, Any]:
        return {"tool": self.tool, "reason": self.reason, "callers": self.callers, "why": self.why}


def used_together(calls: Sequence[Used]) -> dict[tuple[str, str], set[str]]:
    """The callers who called both tools of a pair within half an hour. Names of a pair are in order."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    recent: dict[str, dict[str, float]] = defaultdict(dict)
    for one in calls:
        mine = recent[one.caller]
        for tool, at_s in list(mine.items()):
            if one.at_s - at_s > TOGETHER_S:
                del mine[tool]
            elif tool != one.tool:
                found[min(tool, one.tool), max(tool, one.tool)].add(one.caller)
        mine[one.tool] = one.at_s
    return dict(found)


def recommend(
    calls: Sequence[Used],
    caller: str,
    *,
    tool: str | None,
    peers: Mapping[str, Collection[str]],
    visible: Collection[str],
    least: int = LEAST_CALLERS,
) -> list[Recommendation]:
    """Tools for a caller, those that most callers speak for first.

    With a `tool`: what is used together with it. Otherwise: what is used together with the caller's own tools, and what
    their peers use; `peers` has the groups that each of them shares with the caller. Tools that the caller uses already
    are left out then. Only visible ones are named.
    """
    mine = {one.tool for one in calls if one.caller == caller}
    anchors = {tool} if tool is not None else mine & set(visible)
    known = anchors if tool is not None else mine
    found: dict[str, Recommendation] = {}
    for (first, second), users in sorted(used_together(calls).items()):
        callers = users - {caller}
        for anchor, other in ((first, second), (second, first)):
            if anchor in anchors and other in visible and other not in known and len(callers) >= least:
                _keep(found, Recommendation(other, "together", len(callers), f"used together with {anchor}"))
    if tool is None:
        for group in sorted({group for groups in peers.values() for group in groups}):
            by_tool: dict[str, set[str]] = defaultdict(set)
            for one in calls:
                if one.caller != caller and group in peers.get(one.caller, ()):
                    by_tool[one.tool].add(one.caller)
            for other, callers in sorted(by_tool.items()):
                if other in visible and other not in known and len(callers) >= least:
                    _keep(found, Recommendation(other, "group", len(callers), f"used by others of {group}"))
    return sorted(found.values(), key=lambda one: (-one.callers, one.tool))[:MOST]


def _keep(recommendations: dict[str, Recommendation], one: Recommendation) -> None:
    known = recommendations.get(one.tool)
    if known is None or one.callers > known.callers:
        recommendations[one.tool] = one
