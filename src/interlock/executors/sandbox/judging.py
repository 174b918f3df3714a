"""The outcome of a call in the sandbox, judged by the facts about its run."""

from __future__ import annotations

import errno
import os
import signal

from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.executors.sandbox import filter as seccomp
from interlock.executors.sandbox.cgroups import Counted
from interlock.executors.sandbox.child import Ended
from interlock.executors.sandbox.job import Status

_STORAGE_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """The facts about a call that is over. Only `result` comes from the code, in the form of `reports.result`."""

    ended_by_us: tuple[Status, str] | None = None
    ended: Ended
    counted: Counted | None = None
    violations: tuple[str, ...] = ()
    result: Json | None = None
    cpu_s: int = 0


def judge(evidence: RunEvidence) -> tuple[Status, str]:
    """Determine how a call ended, and the name of the limit if one was reached.

    INVARIANT: `ok` needs a result, no reason of ours to end the call, and no death by a signal or for memory.
    """
    if evidence.ended_by_us is not None:
        return evidence.ended_by_us
    counted, result, status = evidence.counted, evidence.result, evidence.ended.status
    if counted is not None and counted.killed_for_memory:
        return "memory", "memory"
    if status is None and result is None:
        return "crashed", "its process was lost"
    if status is not None and os.WIFSIGNALED(status):
        died_of, spent_s = os.WTERMSIG(status), (evidence.ended.cpu_ns or 0) / 1e9
        # The first process of a namespace does not receive the warning signal; the kernel kills it a second later.
        if died_of == signal.SIGXCPU or (died_of == signal.SIGKILL and spent_s >= evidence.cpu_s - 0.5):
            return "limit", "processor time"
        return "crashed", f"signal {died_of}"
    if result is not None and result.get("ok") is True:
        code: int = result.get("exit", 0)
        return ("ok", "") if code == 0 else _failed_program(code, evidence)
    if _reached_for_network(evidence):
        return "network", ""
    if result is None:
        return "no_result", ""
    return _failed_python(result, counted)


def _failed_program(code: int, evidence: RunEvidence) -> tuple[Status, str]:
    if _reached_for_network(evidence):
        return "network", ""
    if evidence.counted is not None and evidence.counted.forks_refused:
        return "limit", "processes"
    if code == -signal.SIGXCPU:
        return "limit", "processor time"
    if code == -signal.SIGXFSZ:
        return "limit", "storage"
    return ("error", "") if code > 0 else ("crashed", f"signal {-code}")


def _failed_python(result: Json, counted: Counted | None) -> tuple[Status, str]:
    error: Json = result["error"]
    if error.get("type") == "MemoryError":
        return "memory", "memory"
    if error.get("errno") in _STORAGE_FULL:
        return "limit", "storage"
    if (counted is not None and counted.forks_refused) or error.get("errno") == errno.EAGAIN:
        return "limit", "processes"
    return "error", ""


def _reached_for_network(evidence: RunEvidence) -> bool:
    return any(one.partition(" ")[0] in seccomp.NETWORK or one.startswith("egress ") for one in evidence.violations)
