"""Named signals with a severity. All alerts go to the log and to registered listeners.

Resources are monitored the same way. The owner of something that can be used up (a queue, a pool, memory) reports how
full it is. At 80 % an alert is fired, once, and again only after the level had fallen below 70 %, so that operators
have time to act.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from interlock.core.record import record

_log = logging.getLogger("interlock.alerts")

Severity = Literal["info", "warning", "critical"]

FULL = 0.8
_EASED = 0.7
LOOK_EVERY_S = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")

# The complete list of signals. A name that is missing here is fired as a warning, and a test finds it.
SIGNALS: Mapping[str, Severity] = {
    # A tool does not keep to its contract.
    "TOOL_OUTPUT_SCHEMA_VIOLATION": "warning",
    "TOOL_OUTPUT_CORRUPTION": "critical",
    "OUTPUT_SCHEMA_VIOLATION": "warning",
    "SIDE_EFFECT_INCONSISTENCY": "critical",
    "MUTATION_CLASS_VIOLATION": "critical",
    "UNDECLARED_EFFECT": "critical",
    "WRITE_TOOL_NO_MUTATION": "info",
    "PREVIEW_MISMATCH": "warning",
    "SANDBOX_VIOLATION": "critical",
    "TOOL_FAILING": "warning",
    "INVALID_TOOL_SCHEMA": "warning",
    # A call or another operation could not be brought to an end.
    "OUTCOME_UNKNOWN": "critical",
    "RETRY_BUDGET_EXHAUSTED": "warning",
    "TOOL_THREAD_HUNG": "warning",
    "ROLLBACK_FAILED": "critical",
    "saga_compensation_failure": "critical",
    # Somebody exceeds their limits or lacks a permission.
    "IDENTITY_REFUSED": "warning",
    "RUNAWAY_LOOP": "warning",
    "BUDGET_OVERRUN": "warning",
    "POLICY_ALERT": "warning",
    "LIMIT_NEAR": "critical",
    # The machine's clock was set by more than clocks drift.
    "CLOCK_STEPPED": "critical",
    # Decisions of people, and decisions by timeout.
    "approval.approved": "info",
    "approval.denied": "info",
    "APPROVAL_ESCALATED": "warning",
    "APPROVAL_AUTO_DENIED": "warning",
    "APPROVAL_LAPSED": "info",
    "CHANNEL_FAILING": "warning",
    # Versions that approach their removal.
    "DEPRECATION_MIGRATION_PROGRESS": "info",
    "DEPRECATION_MIGRATION_COMPLETE": "info",
    "DEPRECATION_REMOVAL_BLOCKED": "warning",
    "TOOL_VERSION_REMOVED": "info",
    # This process and its data directory.
    "BACKGROUND_TASK_FAILED": "critical",
    "STORE_UNWRITABLE": "critical",
    "KEY_EXPOSED": "critical",
    # Upstream systems.
    "SERVICE_BREAKER": "warning",
    "UPSTREAM_UNAVAILABLE": "critical",
    "UPSTREAM_FAILED": "critical",
    "UPSTREAM_AVAILABLE": "info",
    "TOOL_DEFINITION_CHANGED": "critical",
    "TOOL_DISPROVEN": "critical",
}
_LEVEL = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


@record
class Alert:
    """One fired signal."""

    name: str
    severity: Severity
    tool: str = ""
    invocation_id: str = ""
    trace_id: str = ""
    facts: Mapping[str, Any]


class Alerts:
    """Receives all alerts. `listeners` are called with every alert."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.listeners: list[Callable[[Alert], None]] = []
        self._limits: dict[str, Callable[[], float | None]] = {}
        self._full: set[str] = set()
        self.due = monotonic()

    def fire(
        self, name: str, *, tool: str = "", invocation_id: str = "", trace_id: str = "", facts: Mapping[str, Any]
    ) -> Severity:
        """Fire a signal and return its severity."""
        severity = SIGNALS.get(name, "warning")
        alert = Alert(
            name=name, severity=severity, tool=tool, invocation_id=invocation_id, trace_id=trace_id, facts=facts
        )
        about = _about(tool, invocation_id, facts)
        change = f"was {facts['from']}, is {facts['to']}" if "from" in facts and "to" in facts else ""
        words = ": ".join(filter(None, (name, about, change, str(facts.get("reason") or ""))))
        extra = {"trace_id": trace_id, "invocation_id": invocation_id, "signal": name, "severity": severity}
        _log.log(_LEVEL[severity], "%s", words, extra=extra)
        for listener in self.listeners:
            try:
                listener(alert)
            except BaseException:  # noqa: BLE001 - a listener is other people's code; even its SystemExit is its own
                _log.exception("a listener failed")
        return severity

    # Limits

    def watch(self, limit: str, used: Callable[[], float | None]) -> None:
        """Monitor something that can be used up: `used` returns the share in use, or None if it is unknown."""
        self._limits[limit] = used

    def look(self) -> None:
        """Check every limit. Called by the caller that finds a check `due`."""
        self.due = self._monotonic() + LOOK_EVERY_S
        for limit, used in self.levels().items():
            if used >= FULL and limit not in self._full:
                self._full.add(limit)
                self.fire("LIMIT_NEAR", tool=limit, facts={"limit": limit, "used": round(used, 3)})
            elif used < _EASED:
                self._full.discard(limit)

    def levels(self) -> dict[str, float]:
        """The share in use of each limit, where its owner can report it."""
        levels = ((limit, _ask(used)) for limit, used in self._limits.items())
        return {limit: share for limit, share in levels if share is not None}


def _about(tool: str, invocation_id: str, facts: Mapping[str, Any]) -> str:
    """Describe the subject of a signal: a tool and its call or, without a call, the system or task that it names."""
    if invocation_id:
        return f"{tool} in call {invocation_id}" if tool else invocation_id
    owner = next((f"{kind} {facts[kind]}" for kind in ("upstream", "service", "task") if facts.get(kind)), "")
    return " of ".join(filter(None, (tool, owner)))


def _ask(used: Callable[[], float | None]) -> float | None:
    try:
        return used()
    except Exception:  # noqa: BLE001 - other people's code, asked while somebody's call is being closed
        _log.exception("the use of a limit could not be measured")
        return None


class Memory:
    """The share of the available memory that this process uses. Linux only; None elsewhere."""

    def __init__(self) -> None:
        self._limit = _memory_limit()

    def __call__(self) -> float | None:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return None if self._limit is None else pages * _PAGE / self._limit


def _memory_limit() -> int | None:
    """Return the memory limit of the control group, or the memory of the machine."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].splitlines()[0].strip("/")
        for path in (Path("/sys/fs/cgroup", group, "memory.max"), Path("/sys/fs/cgroup/memory.max")):
            if path.exists() and (text := path.read_text().strip()).isdigit():
                return int(text)
        return int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
