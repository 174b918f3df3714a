"""Timeout classes: their limits, and the class and limits that follow from what a manifest states.

Works on the stored document of a manifest, so that a contract can be shown without loading the models of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from interlock.core.record import dataclass

TimeoutClass = Literal["interactive", "standard", "long_running", "async"]

# The longest duration of a call of each class. Async work is bounded by the tool's own timeout_max.
CLASS_MAX_S: Mapping[TimeoutClass, float] = {
    "interactive": 0.5,
    "standard": 5.0,
    "long_running": 300.0,
    "async": 86_400.0,
}
# The timeout_default of a manifest that states none, and the longest that one may state.
DEFAULT_S = 30
LONGEST_S = 7200


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutPolicy:
    """The default and the maximum duration of a call."""

    timeout_class: TimeoutClass
    default_s: float
    max_s: float


def infer_class(timeout_s: float) -> TimeoutClass:
    """Return the smallest class that holds a timeout."""
    if timeout_s <= CLASS_MAX_S["interactive"]:
        return "interactive"
    if timeout_s <= CLASS_MAX_S["standard"]:
        return "standard"
    return "long_running" if timeout_s <= CLASS_MAX_S["long_running"] else "async"


def class_for_latency(p99_s: float, *, external_io: bool, checkpointable: bool) -> TimeoutClass:
    """Return the class that measured behaviour requires. Restart-safe counts as checkpointable."""
    if p99_s < CLASS_MAX_S["interactive"] and not external_io:
        return "interactive"
    if p99_s < CLASS_MAX_S["standard"]:
        return "standard"
    return "long_running" if p99_s < CLASS_MAX_S["long_running"] and checkpointable else "async"


def stated_policy(document: Mapping[str, Any]) -> TimeoutPolicy:
    """Read class and limits from the document of a manifest."""
    stated: TimeoutClass | None = document.get("timeout_class")
    longest_stated: int | None = document.get("timeout_max")
    default_s: float = document.get("timeout_default", DEFAULT_S)
    if stated is not None and "timeout_default" not in document:
        default_s = min(CLASS_MAX_S[stated], float(LONGEST_S), float(longest_stated or LONGEST_S))
    timeout_class = stated or infer_class(default_s)
    longest = CLASS_MAX_S[timeout_class]
    max_s = min(float(longest_stated or (LONGEST_S if timeout_class == "async" else longest)), longest)
    return TimeoutPolicy(timeout_class=timeout_class, default_s=default_s, max_s=max(default_s, max_s))
