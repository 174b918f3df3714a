"""Watches one call: feeds it, reads its frames, counts its use, ends it when necessary, and judges the outcome.

There are five descriptors and a timer, all on the event loop. Reports of the code arrive as frames; its output as two
bounded streams; forbidden system calls as refusals, answered here; its end as evidence from the zygote. A call is ended
by us for exactly one reason, the first that arises.

Code that can hear it is told when its call is cancelled or has run out of time, and has a moment to clean up before it
is killed (`grace_s`). The call is over then: nothing that comes from the code is taken any more, and its network is
closed.

By default a success is answered as soon as it is reported, and the process is killed at that moment: nothing that it
could still do has an effect. Every failure, and every call whose caller wants the figures, waits for the evidence.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import field
from functools import lru_cache
from typing import Any

from interlock.call.artifacts import File
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.bounds import plain_text
from interlock.data.schema import Json
from interlock.executors.sandbox import filter as seccomp
from interlock.executors.sandbox import frames, linux, memory, reports, syscalls
from interlock.executors.sandbox.cgroups import CgroupSlot
from interlock.executors.sandbox.child import Child, Ended
from interlock.executors.sandbox.job import Job, JobOutcome, PythonJob, Status, request_of
from interlock.executors.sandbox.judging import RunEvidence, judge

Report = Callable[[Any], None]
# Saves a checkpoint under its label; a Failure says why not.
Save = Callable[[str, Any], Awaitable[None]]
_log = logging.getLogger("interlock.sandbox")

_CHUNK = 1 << 16
# The work of one turn of the loop, in bytes of frames; a small frame counts as a larger one, because it costs as much.
_TURN, _LEAST_WORK = 1 << 16, 1 << 10
_MOST_REFUSALS, _LONGEST_REFUSAL = 1000, 300
_MOST_REFUSED_FORKS = 16
_BEGUN_S, _LOOK_EVERY_S = 0.02, 0.05
_LOOPBACK = (b"\x7f", bytes(15) + b"\x01")


@dataclass(slots=True)
class _Stream:
    """Output of the code, stored up to its limit."""

    descriptor: int
    most: int
    stored: bytearray = field(default_factory=bytearray)

    def read(self) -> bool | None:
        """Read what is available: False at the end of the stream, None if nothing is available now."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return None
        self.stored += data[: self.most + 1 - len(self.stored)]
        return bool(data)

    @property
    def full(self) -> bool:
        return len(self.stored) > self.most

    def drained(self) -> bytes:
        while not self.full and self.read():
            pass
        return bytes(self.stored[: self.most])


# many methods: one state machine per sandboxed call; one method per kind of frame, over the same fields
class Watch:
    """One call in one child."""

    def __init__(
        self,
        child: Child,
        job: Job,
        *,
        exit_evidence: bool,
        on_progress: Report | None,
        on_partial: Report | None,
        on_checkpoint: Save | None,
        refused: list[str],
        hang_up: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._child = child
        self._job = job
        self._exit_evidence = exit_evidence
        self._on_progress = on_progress
        self._on_partial = on_partial
        self._on_checkpoint = on_checkpoint
        self._refused = refused
        self._hang_up = hang_up
        self._hanging_up: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._streams = [_Stream(one, job.limits.output_bytes) for one in (child.out, child.err)]
        self._bounds = job.checkpoints if isinstance(job, PythonJob) else None
        self._reader = reports.reader_for(job)
        self._silenced = self._paused = self._left = False
        self._checkpoints = 0
        self._saving: asyncio.Task[None] | None = None
        self._unsent = memoryview(request_of(job))
        self._result: Json | None = None
        self._answered = False
        self._files: dict[str, File] = {}
        self._files_size = 0
        self._violations: dict[str, None] = {}
        self._ended_by_us: tuple[Status, str] | None = None
        self._failure: Failure | None = None
        self._ended = Ended(None)
        self._refusals = 0
        self._handlers: dict[int, Callable[[], object]] = {
            child.control.fileno(): self._hear,
            child.over: self._gone,
            child.out: lambda: self._read(self._streams[0]),
            child.err: lambda: self._read(self._streams[1]),
            -1 if child.refusals is None else child.refusals: self._refuse,
        }

    async def outcome(self, cancelled: asyncio.Event | None) -> JobOutcome:
        """Wait for the end of the call. Raises the failure of a listener who refuses what the code reports."""
        started = time.perf_counter_ns()
        timers = [self._loop.call_later(self._job.limits.wall_s, self._cut_off, "timeout")]
        watching = None if cancelled is None else self._loop.create_task(self._until(cancelled))
        watched = self._child.all.fileno()
        self._loop.add_reader(watched, self._watch)
        self._send()
        if self._child.slot is None:
            self._look(timers)
        else:
            timers.append(self._loop.call_later(_BEGUN_S, self._settle_down, self._child.slot, timers))
        try:
            await self._end_of_call()
            if self._saving is not None:
                # It came before the end, so it is saved before the end is reported. Nothing else is read any more.
                self._loop.remove_reader(watched)
                self._child.kill()
                await asyncio.wait({self._saving})
        finally:
            self._finish()
            self._child.kill()
            if self._saving is not None:
                self._saving.cancel()
            for timer in (*timers, *(() if self._grace is None else (self._grace,))):
                timer.cancel()
            if watching is not None:
                watching.cancel()
            self._loop.remove_reader(watched)
            self._loop.remove_writer(self._child.control.fileno())
            if self._hanging_up is not None:
                await asyncio.wait({self._hanging_up})
        if self._failure is not None:
            raise self._failure
        return self._judged(time.perf_counter_ns() - started)

    async def _end_of_call(self) -> None:
        """Wait for the end. A call that is cut off meanwhile has a moment to clean up."""
        try:
            await self._over
        except asyncio.CancelledError:
            self._over = self._loop.create_future()
            if self._cut_off("killed"):
                await asyncio.wait({self._over}, timeout=self._job.grace_s)
            raise

    def _watch(self) -> None:
        """Process everything that has arrived. The end comes last: frames sent before it must have been read."""
        ready = self._child.all.poll(0)
        for descriptor, event in sorted(ready, key=lambda one: one[0] == self._child.over):
            if descriptor == self._child.refusals and not event & select.EPOLLIN:
                # There is nobody left to refuse. Reporting it again and again would keep the processor from the process
                # that is ending.
                self._ignore(descriptor)
            else:
                self._handlers[descriptor]()

    def _ignore(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            self._child.all.unregister(descriptor)

    async def _until(self, cancelled: asyncio.Event) -> None:
        await cancelled.wait()
        self._cut_off("killed")

    def _cut_off(self, status: Status) -> bool:
        """End the call: its time is up, or nobody needs its result. Returns whether the code may clean up first.

        INVARIANT: what the code reports from now on is dropped, and it can reach nothing outside the sandbox.
        """
        if self._grace is not None:
            return True  # it has been told
        told = self._job.grace_s > 0 and not self._unsent and self._result is None and self._ended_by_us is None
        if not told or self._silenced or self._left:
            self._end(status, "")
            return False
        self._ended_by_us = (status, "")
        self._silenced = True
        self._ignore(self._child.control.fileno())
        self._unsent = memoryview(frames.frame(frames.ABORT, b""))
        self._send()
        if self._hang_up is not None:
            self._hanging_up = self._loop.create_task(self._hang_up())
        self._grace = self._loop.call_later(self._job.grace_s, self._end, status, "")
        return True

    def _end(self, status: Status, why: str) -> None:
        """End the call, for the first reason that arises."""
        if self._ended_by_us is None:
            self._ended_by_us = (status, why)
        self._child.kill()
        self._child.hurry()

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._child.control.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")  # it is gone; the evidence will say how
        if self._unsent:
            self._loop.add_writer(self._child.control.fileno(), self._send)
        else:
            self._loop.remove_writer(self._child.control.fileno())

    def _gone(self) -> None:
        self._ignore(self._child.over)
        self._ended = self._child.ended()
        self._left = True
        if not self._paused:
            self._hear()

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    # Frames of the code

    def _hear(self) -> None:
        """Process some frames, and the rest in later turns of the loop, so that others have a turn in between.

        While frames are left, nothing more is received, so the code inside has to wait too.
        """
        if self._over.done():
            return
        more = False
        try:
            more = not self._silenced and self._take_some()
        except frames.TooMuch as what:
            self._silence("limit", str(what))
        except frames.Malformed as what:
            self._silence("no_result", str(what))
        except Failure as failure:  # what it reports is not allowed by its contract
            self._failure = failure
            self._silence("no_result", "")
        except Exception:  # noqa: BLE001 - a loop's edge: a listener failed, and the call must end
            _log.exception("the reports of a sandboxed call could not be passed on")
            self._silence("no_result", "")
        if more:
            if not self._paused:
                self._paused = True
                self._ignore(self._child.control.fileno())
            self._loop.call_soon(self._hear)
            return
        if self._paused and not self._silenced:
            self._child.listen_again()
        self._paused = False
        if self._left:
            self._finish()

    def _take_some(self) -> bool:
        """Process frames up to the bound of one turn; returns whether there may be more. A frame that has begun is
        finished.
        """
        work = 0
        while work < _TURN:
            frame = self._reader.next()
            if frame is not None:
                work += max(len(frame[1]), _LEAST_WORK)
                self._take(*frame)
                continue
            try:
                data = self._child.control.recv(_CHUNK)
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:
                self._silenced = True
                self._ignore(self._child.control.fileno())
                return False
            self._reader.add(data)
            work += len(data) // 4
        return not self._over.done()

    def _silence(self, status: Status, why: str) -> None:
        """Read nothing more from the code, and end it."""
        self._silenced = True
        self._ignore(self._child.control.fileno())
        self._end(status, why)

    def _take(self, kind: bytes, body: bytes) -> None:
        if self._result is not None:
            raise frames.Malformed
        if kind == frames.FILE:
            self._take_file(reports.file(body, self._job.limits))
        elif kind == frames.CHECKPOINT:
            self._take_checkpoint(*reports.checkpoint(body))
        elif kind == frames.PARTIAL:
            part = reports.document(body)
            if self._on_partial is not None:
                self._on_partial(part)
        elif kind == frames.PROGRESS:
            facts = reports.progress(body)
            if self._on_progress is not None:
                self._on_progress(facts)
        else:
            self._take_result(reports.result(body, self._job))

    def _take_result(self, result: Json) -> None:
        self._result = result
        if not self._exit_evidence and self._ended_by_us is None and result["ok"] and not result.get("exit"):
            self._answered = True
            self._finish()

    def _take_file(self, file: File) -> None:
        """Accept a file, within the limits for all files of the call together."""
        limits = self._job.limits
        if file.path in self._files:
            raise frames.Malformed
        if len(self._files) >= limits.files:
            raise frames.TooMuch(f"{limits.files} files")
        self._files_size += file.size
        if self._files_size > limits.output_bytes:
            raise frames.TooMuch("the size of its files")
        self._files[file.path] = file

    def _take_checkpoint(self, number: int, label: str, state: Any) -> None:
        """Save a checkpoint, one at a time and up to the limit. Code that does not wait for an answer is ended."""
        if self._on_checkpoint is None or self._bounds is None or self._saving is not None:
            raise frames.Malformed
        if number != self._checkpoints + 1:
            raise frames.Malformed
        if self._checkpoints == self._bounds.number:
            raise frames.TooMuch(f"{self._bounds.number} checkpoints")
        self._checkpoints += 1
        self._saving = self._loop.create_task(self._save(self._on_checkpoint, label, state))

    async def _save(self, save: Save, label: str, state: Any) -> None:
        answer: Json = {"number": self._checkpoints}
        try:
            await save(label, state)
        except Failure as failure:
            answer |= {"code": failure.code, "message": failure.message}
        except Exception:  # noqa: BLE001 - an executor's edge: whatever broke, who waits inside is told
            _log.exception("a checkpoint could not be saved")
            answer["code"] = "E3902"
        self._saving = None
        self._unsent = memoryview(bytes(self._unsent) + frames.frame(frames.ANSWER, json.dumps(answer).encode()))
        self._send()

    def _read(self, stream: _Stream) -> None:
        if stream.read() is False:
            self._ignore(stream.descriptor)
        elif stream.full:
            self._end("limit", "output size")

    # Attempts of the code

    def _refuse(self) -> None:
        listener = self._child.refusals
        refusal = None if listener is None else linux.hear_refusal(listener)
        if listener is None or refusal is None:
            return
        name = _call_names().get(refusal.number, str(refusal.number))
        if name == "connect" and self._child.inside is not None:
            destination = _destination(refusal)
            if destination is None:
                linux.answer_refusal(listener, refusal.id, 0)
                return
            name = f"connect {destination}"
        self._violations.setdefault(name)
        self._refusals += 1
        if self._refusals >= _MOST_REFUSALS:
            self._end("limit", "refused system calls")
        linux.answer_refusal(listener, refusal.id, errno.EACCES if name.split()[0] in seccomp.NETWORK else errno.EPERM)

    def _look(self, timers: list[asyncio.TimerHandle]) -> None:
        """Check the memory of the tree periodically, because without a cgroup nothing else bounds it."""
        most = self._job.limits.memory_bytes
        if memory.of_tree(self._child.pid, most) > most:
            self._end("memory", "memory")
        elif not self._over.done():
            timers[1:] = [self._loop.call_later(_LOOK_EVERY_S, self._look, timers)]

    def _settle_down(self, slot: CgroupSlot, timers: list[asyncio.TimerHandle]) -> None:
        """Mark the call as a long one: short calls need not wait for it from now on.

        A call that keeps forking where it is refused would hold the kernel's locks against every other fork.
        """
        slot.yield_to_others()
        if slot.forks_refused >= _MOST_REFUSED_FORKS:
            self._end("limit", "processes")
        elif not self._over.done():
            timers[1:] = [self._loop.call_later(_LOOK_EVERY_S, self._settle_down, slot, timers)]

    def _judged(self, wall_ns: int) -> JobOutcome:
        slot, result = self._child.slot, self._result or {}
        stdout, stderr = (stream.drained() for stream in self._streams)
        refused = (f"egress {plain_text(one, _LONGEST_REFUSAL)}" for one in self._refused[:_MOST_REFUSALS])
        violations = (*self._violations, *refused)
        evidence = RunEvidence(
            ended_by_us=self._ended_by_us,
            ended=self._ended,
            counted=None if slot is None or self._answered else slot.counted(),
            violations=violations,
            result=self._result,
            cpu_s=self._job.limits.cpu_s,
        )
        status, why = judge(evidence)
        code, ended = result.get("exit"), self._ended
        if code is None and ended.status is not None:
            code = os.waitstatus_to_exitcode(ended.status)
        peak = evidence.counted.peak_bytes if evidence.counted is not None else 0
        return JobOutcome(
            status=status,
            why=why,
            value=result.get("value") if status == "ok" else None,
            error=None if status == "ok" else result.get("error"),
            reports=result.get("reports", {}),
            stdout=stdout,
            stderr=stderr,
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            cpu_ns=ended.cpu_ns,
            max_rss=peak or ended.max_rss,
            wall_ns=wall_ns,
            violations=violations,
            files=tuple(self._files.values()) if status == "ok" else (),
        )


@lru_cache(maxsize=1)
def _call_names() -> dict[int, str]:
    return {number: name for name, number in syscalls.NUMBERS[os.uname().machine].items()}


def _destination(refusal: linux.WaitingSyscall) -> str | None:
    """Return the target of a connection, or None if it is within the call's own network.

    Only the class depends on it.
    """
    try:
        with open(f"/proc/{refusal.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(refusal.arguments[1])
            address = memory.read(min(refusal.arguments[2], 28))
        (family,) = struct.unpack_from("<H", address)
        (port,) = struct.unpack_from("!H", address, 2)
        packed = address[8:24] if family == socket.AF_INET6 else address[4:8]
        if packed.startswith(_LOOPBACK):
            return None
        return f"{socket.inet_ntop(family, packed)} port {port}"
    except (OSError, ValueError, struct.error):
        return "somewhere"
