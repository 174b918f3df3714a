"""A process that waits to serve one call, as the supervisor holds it, whichever back end made it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import field
from typing import Protocol

from interlock.core.record import dataclass
from interlock.executors.sandbox.cgroups import CgroupSlot
from interlock.executors.sandbox.job import Job, Limits, Mount, PythonJob, Tier

_SOON_S, _GONE_S, _LOOK_S = 0.01, 5.0, 0.002
_HEAVY = ("interlock", "pydantic", "async")


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties that must be known before a process is made.

    Calls of one shape can use one another's spare processes.
    """

    tier: Tier
    mounts: tuple[Mount, ...]
    limits: Limits
    heavy: bool  # its source seems to need modules that take a good part of a second to import, if not imported yet

    @classmethod
    def of(cls, job: Job) -> Shape:
        texts = [job.source, *(text for text, _ in job.modules.values())] if isinstance(job, PythonJob) else []
        heavy = any(word in text for text in texts for word in _HEAVY)
        return cls(job.tier, job.mounts, job.limits, heavy)

    @property
    def writes(self) -> bool:
        """Whether it can change files of the host."""
        return any(one.writable for one in self.mounts)

    @property
    def key(self) -> tuple[object, ...]:
        return self.tier, self.mounts, self.limits.confining, self.heavy


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process, reported by the process that waited for it."""

    status: int | None
    cpu_ns: int | None = None
    max_rss: int | None = None


class IsolationError(Exception):
    """Isolation could not be set up. Nothing was run."""


@dataclass(slots=True)
class Child:
    """Our ends of a child process. `over` becomes readable when it has ended, and `ended` then says how.

    `all` watches every end at once, so that the event loop watches one descriptor per call, not five.
    """

    pid: int
    pidfd: int
    control: socket.socket
    out: int
    err: int
    over: int
    ended: Callable[[], Ended]
    release: Callable[[], None]
    refusals: int | None = None
    inside: socket.socket | None = None
    slot: CgroupSlot | None = None
    all: select.epoll = field(init=False)

    def __post_init__(self) -> None:
        self.all = select.epoll()

    def make_ready(self) -> None:
        """From now on only the event loop uses it."""
        self.control.setblocking(False)  # this also ends the time limit of blocking reads
        for one in (self.out, self.err):
            os.set_blocking(one, False)
        for one in (self.control.fileno(), self.out, self.err, self.over, self.refusals):
            if one is not None:
                self.all.register(one, select.EPOLLIN)

    def listen_again(self) -> None:
        """Watch the control socket again."""
        self.all.register(self.control.fileno(), select.EPOLLIN)

    @property
    def lives(self) -> bool:
        return not self._ended_within(0)

    def _ended_within(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def kill(self) -> None:
        """Kill the process and, since it is the first of its namespace, everything it ever started."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def gone(self) -> None:
        """Kill it, and wait until nothing that it started runs any more. The kernel takes milliseconds."""
        self.kill()
        self.hurry()
        over = asyncio.get_running_loop().time() + _GONE_S
        while not (self._ended_within(0) and (self.slot is None or self.slot.deserted)):
            if asyncio.get_running_loop().time() > over:
                break
            await asyncio.sleep(_LOOK_S)

    def hurry(self) -> None:
        """Let a killed process end without waiting for its share of the processor."""
        if self.slot is not None:
            self.slot.hurry()

    def drop(self) -> None:
        """Make sure that it has ended, then release everything. Blocks for as long as the kernel takes."""
        self.kill()
        if not self._ended_within(_SOON_S):
            self.hurry()
            self._ended_within(_GONE_S)
        self.all.close()
        self.release()
        self.control.close()
        if self.inside is not None:
            self.inside.close()
        for descriptor in (self.pidfd, self.out, self.err, self.refusals):
            if descriptor is not None:
                os.close(descriptor)


class Backend(Protocol):
    """Makes children. There are two: a zygote that forks them, and programs that start them one by one."""

    @property
    def name(self) -> str: ...

    @property
    def tiers(self) -> frozenset[int]: ...

    async def take(self, shape: Shape) -> Child: ...

    def give_back(self, child: Child) -> None: ...

    async def close(self) -> None: ...


class ChildEvidence:
    """The zygote's message about a child's end, and the child's mounts, which are released last.

    Unmounting is the slow part of an end, and the last holder has to wait for it. That must be us, after the message
    was read: if it were the zygote, all its next children would wait too.
    """

    def __init__(self, source: socket.socket, mounts: int) -> None:
        self._source = source
        self._mounts = mounts

    def ended(self) -> Ended:
        """The end of the child; None if the zygote itself is gone."""
        try:
            data = self._source.recv(4096)
        except OSError:
            data = b""
        if not data:
            return Ended(None)
        report = json.loads(data)
        return Ended(report["status"], report["cpu_ns"], report["max_rss"])

    def close(self) -> None:
        self._source.close()
        os.close(self._mounts)
