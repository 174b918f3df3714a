"""Named signals with a severity, and the one place they all go to: the log, and whoever asked to be told.

Infrastructure is watched the same way. Whoever owns something that can be used up (a queue, a pool, memory) says how
full it is; at four fifths an alert is fired, once, and again only after it had fallen below seven tenths: whoever is
warned must have time to act.
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

# What is told by name. Nothing else is: a name that is not here is fired as a warning and found by a test.
SIGNALS: Mapping[str, Severity] = {
    # A tool is not what it says it is.
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
    # Something could not be brought to an end.
    "OUTCOME_UNKNOWN": "critical",
    "RETRY_BUDGET_EXHAUSTED": "warning",
    "TOOL_THREAD_HUNG": "warning",
    "ROLLBACK_FAILED": "critical",
    "saga_compensation_failure": "critical",
    # Somebody uses more than they should, or has no right to use anything.
    "IDENTITY_REFUSED": "warning",
    "RUNAWAY_LOOP": "warning",
    "BUDGET_OVERRUN": "warning",
    "POLICY_ALERT": "warning",
    "LIMIT_NEAR": "critical",
    # The machine's clock was set, by more than clocks drift.
    "CLOCK_STEPPED": "critical",
    # What people decided on, and what time decided for them.
    "approval.approved": "info",
    "approval.denied": "info",
    "APPROVAL_ESCALATED": "warning",
    "APPROVAL_AUTO_DENIED": "warning",
    "APPROVAL_LAPSED": "info",
    "CHANNEL_FAILING": "warning",
    # Versions that come to their end.
    "DEPRECATION_MIGRATION_PROGRESS": "info",
    "DEPRECATION_MIGRATION_COMPLETE": "info",
    "DEPRECATION_REMOVAL_BLOCKED": "warning",
    "TOOL_VERSION_REMOVED": "info",
    # This process and its home.
    "BACKGROUND_TASK_FAILED": "critical",
    "STORE_UNWRITABLE": "critical",
    "KEY_EXPOSED": "critical",
    # Systems that others run.
    "SERVICE_BREAKER": "warning",
    "UPSTREAM_UNAVAILABLE": "critical",
    "UPSTREAM_FAILED": "critical",
    "UPSTREAM_AVAILABLE": "info",
    "TOOL_DEFINITION_CHANGED": "critical",
}
_LEVEL = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


@record
class Alert:
    """One signal, as it was fired."""

    name: str
    severity: Severity
    tool: str = ""
    invocation_id: str = ""
    trace_id: str = ""
    facts: Mapping[str, Any]


class Alerts:
    """The sink. `listeners` are told of every alert; what they make of it is their own affair."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.listeners: list[Callable[[Alert], None]] = []
        self._limits: dict[str, Callable[[], float | None]] = {}
        self._full: set[str] = set()
        self.due = monotonic()

    def fire(
        self, name: str, *, tool: str = "", invocation_id: str = "", trace_id: str = "", facts: Mapping[str, Any]
    ) -> Severity:
        """Tell of a signal. How grave it is."""
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
        """Keep an eye on something that can be used up: `used` says which share is, None when it cannot tell."""
        self._limits[limit] = used

    def look(self) -> None:
        """Look at every limit. Whoever comes by when it is `due` does."""
        self.due = self._monotonic() + LOOK_EVERY_S
        for limit, used in self.levels().items():
            if used >= FULL and limit not in self._full:
                self._full.add(limit)
                self.fire("LIMIT_NEAR", tool=limit, facts={"limit": limit, "used": round(used, 3)})
            elif used < _EASED:
                self._full.discard(limit)

    def levels(self) -> dict[str, float]:
        """How much of each limit is used, as far as its owner can tell."""
        found = ((limit, _ask(used)) for limit, used in self._limits.items())
        return {limit: share for limit, share in found if share is not None}


def _about(tool: str, invocation_id: str, facts: Mapping[str, Any]) -> str:
    """What a signal is about: a tool, a call of it; or, where no call is, the system or the task that it names."""
    if invocation_id:
        return f"{tool} in call {invocation_id}" if tool else invocation_id
    owner = next((f"{kind} {facts[kind]}" for kind in ("upstream", "service", "task") if facts.get(kind)), "")
    return " of ".join(filter(None, (tool, owner)))


def _ask(used: Callable[[], float | None]) -> float | None:
    try:
        return used()
    except Exception:  # noqa: BLE001 - other people's code, asked while somebody's call is being closed
        _log.exception("how full a limit is could not be told")
        return None


class Memory:
    """Which share of the memory it may have this process uses. Linux only; elsewhere nobody can tell."""

    def __init__(self) -> None:
        self._limit = _memory_limit()

    def __call__(self) -> float | None:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return None if self._limit is None else pages * _PAGE / self._limit


def _memory_limit() -> int | None:
    """The memory of the control group, or of the machine."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].splitlines()[0].strip("/")
        for path in (Path("/sys/fs/cgroup", group, "memory.max"), Path("/sys/fs/cgroup/memory.max")):
            if path.exists() and (text := path.read_text().strip()).isdigit():
                return int(text)
        return int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
