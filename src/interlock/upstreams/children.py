"""Programs that serve tools over their pipes: started, monitored, restarted, replaced, and always ended.

A `Child` is one process, leader of a group of its own. Whole lines go in and come out, under the limits of
`response_limits`; its stderr goes to a log that is rotated. It runs under a keeper (`keeper`): every process that it
started ends with it, also those that left its group, and all of them end when this process dies, however that happens.

A `Supervisor` keeps one instance of anything that can be started and can end: started when first needed, restarted when
it ends, with growing pauses, during which calls fail at once. One that ends within ten seconds of its start has failed;
after ten unsuccessful restarts it is given up, an alert is raised, and calls fail at once until it is replaced. A
replacement is up before the one it replaces is asked to finish.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.upstreams.response_limits import Allowance, Intake, Lines

_log = logging.getLogger("interlock.upstreams")

# The environment variables that a child inherits; all others must be given to it.
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
MAX_UNREAD = 64 * 1024 * 1024
GRACE_S = 2.0
WAITED_OUT_S = 1.0
LOG_BYTES = 1024 * 1024
LOGS_KEPT = 3
LAST_WORDS = 2000
# A program that writes more than this to its stderr is made to wait, so that its log does not use up our time.
LOG_BYTES_PER_S = 4 * 1024 * 1024
_LOG_PART = 32 * 1024

# Started as a program of its own: code that runs between fork and exec in a process with threads may never get to exec.
_KEEPER = str(Path(__file__).with_name("keeper.py"))
KEEPER_S = 1.0


class Crashed(Failure):
    """The process ended by itself before it was usable. It can be started again."""


class Log:
    """A log file without the registered secrets and of bounded size; a few older files are kept."""

    def __init__(self, path: Path, secrets: Sequence[str] = (), limit: int = LOG_BYTES) -> None:
        self._path = path
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._longest = max(map(len, self._secrets), default=1)
        self._limit = limit
        self._rest = b""
        self.last_words = b""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, data: bytes) -> None:
        """Write some output. Whole lines reach the file, and of endless ones everything that cannot be a part of a
        secret.
        """
        text = self._rest + data
        for secret in self._secrets:
            text = text.replace(secret, b"[redacted]")
        lines, _, self._rest = text.rpartition(b"\n")
        if len(self._rest) > self._limit:
            lines, self._rest = text[: -self._longest], text[-self._longest :]
        if lines:
            self.last_words = (self.last_words + lines + b"\n")[-LAST_WORDS:]
            self._append(lines + b"\n")

    def close(self) -> None:
        if self._rest:
            self.write(b"\n")

    def _append(self, lines: bytes) -> None:
        if self._path.exists() and self._path.stat().st_size + len(lines) > self._limit:
            for number in range(LOGS_KEPT - 1, 0, -1):
                older = self._numbered(number)
                if older.exists():
                    older.replace(self._numbered(number + 1))
            self._path.replace(self._numbered(1))
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(lines[-self._limit :])

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


@dataclass(frozen=True, slots=True)
class Program:
    """The program to run. `secret` values are part of the environment and of no log."""

    command: Sequence[str]
    env: Mapping[str, str]
    secret: Mapping[str, str]
    cwd: str | None = None
    log: Path | None = None

    def environment(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return {**inherited, **self.env, **self.secret}

    def check(self) -> None:
        """Refuse (E3108) a program that does not exist; this is clearer than an entry in a log."""
        name = self.command[0]
        where = os.path.join(self.cwd or "", name) if os.sep in name else name
        if shutil.which(where, path=self.environment().get("PATH")) is None:
            words, advice = f"the program `{name}` cannot be found or run", "install it, or give its whole path"
            raise Failure("E3108", words, details={"sent": False}, resolution=advice)
        if self.cwd is not None and not os.path.isdir(self.cwd):
            words, advice = "the directory the program should run in does not exist", f"make it: {self.cwd}"
            raise Failure("E3108", words, details={"sent": False}, resolution=advice)


class Ear(Protocol):
    """Receives the output of a child, under limits."""

    @property
    def intake(self) -> Intake: ...

    @property
    def allowance(self) -> Allowance: ...

    def hear(self, line: bytes) -> asyncio.Future[Any] | None:
        """Receive a line. The next one waits for the future."""
        ...

    def oversize(self, ends: bytes) -> None:
        """Receive the beginning and the end of a line that is over the limit."""
        ...


class Child(asyncio.SubprocessProtocol):
    """One running process. `ended` states how it ended, once its last line has been processed."""

    def __init__(self, program: Program, ear: Ear) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._lines = Lines(
            ear.intake,
            ear.allowance,
            hear=ear.hear,
            oversize=ear.oversize,
            flood=lambda: self.kill("it sent far more than it was asked for, or a line without an end"),
            flow=lambda paused: self._flow(1, paused),
        )
        self._reason = ""
        self._log = None if program.log is None else Log(program.log, tuple(program.secret.values()))
        self._exited = asyncio.Event()
        self._silent = False
        self._transport: asyncio.SubprocessTransport | None = None

    @classmethod
    async def start(cls, program: Program, ear: Ear) -> Child:
        """Start it. `ear` receives every line it writes."""
        program.check()
        loop = asyncio.get_running_loop()
        try:
            _, child = await loop.subprocess_exec(
                lambda: cls(program, ear),
                *(sys.executable, "-I", "-S", _KEEPER, str(os.getpid()), *program.command),
                env=program.environment(),
                cwd=program.cwd,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise Failure(
                "E3502", f"the program cannot be started: {type(error).__name__}", details={"sent": False}
            ) from None
        return child

    @property
    def pid(self) -> int:
        """The pid of the keeper, which is also the id of the program's group."""
        assert self._transport is not None
        return self._transport.get_pid()

    def send(self, line: bytes) -> None:
        """Write one line. Raises E3502 if nothing reads it, Crashed if that is because the process has ended."""
        assert self._transport is not None
        pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))
        if self.ended.done() or self._exited.is_set() or pipe.is_closing():
            raise Crashed("E3502", "the upstream's process has ended", details={"sent": False})
        if pipe.get_write_buffer_size() > MAX_UNREAD:
            raise Failure("E3502", "the upstream does not read what it is sent", details={"sent": False})
        pipe.write(line + b"\n")

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """End it and its group: end of input, then SIGTERM, then SIGKILL."""
        assert self._transport is not None
        pipe = self._transport.get_pipe_transport(0)
        if pipe is not None:
            pipe.close()
        if not await self._gone(grace_s):
            self._signal(signal.SIGTERM)
            if not await self._gone(grace_s):
                self.kill()
        await self._exited.wait()
        await asyncio.shield(self.ended)

    async def _gone(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._exited.wait()
        except TimeoutError:
            return False
        return True

    def kill(self, reason: str = "") -> None:
        """End it now; the waiting calls receive the reason."""
        self._reason = self._reason or reason
        if self._exited.is_set():
            return
        try:
            os.kill(self.pid, signal.SIGUSR1)  # its keeper then kills everything below it
        except ProcessLookupError:
            return
        asyncio.get_running_loop().call_later(KEEPER_S, self._kill_group)

    def _kill_group(self) -> None:
        """Kill the keeper too, in case it is blocked."""
        if not self._exited.is_set():
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # no process of that group is left

    # Callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self._lines.feed(data)
        elif self._log is not None:
            self._log.write(data)
            if len(data) >= _LOG_PART:
                self._flow(2, True)
                asyncio.get_running_loop().call_later(len(data) / LOG_BYTES_PER_S, self._flow, 2, False)

    def _flow(self, fd: int, paused: bool) -> None:
        """Pause or resume reading from a pipe."""
        assert self._transport is not None
        pipe = cast("asyncio.ReadTransport | None", self._transport.get_pipe_transport(fd))
        if pipe is not None and not pipe.is_closing():
            (pipe.pause_reading if paused else pipe.resume_reading)()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._silent = True
            if self._exited.is_set():
                self._end()
            else:
                # A server that has closed its output is finished; it may still end by itself.
                asyncio.get_running_loop().call_later(GRACE_S, self.kill)

    def process_exited(self) -> None:
        self._exited.set()
        # INVARIANT: no process of the group outlives its leader; the leader's last output is still processed.
        self._signal(signal.SIGKILL)
        if self._silent:
            self._end()
        else:
            asyncio.get_running_loop().call_later(1.0, self._end)

    def _end(self) -> None:
        if self.ended.done():
            return
        if not self._lines.idle:
            self._lines.when_idle = self._end  # its last output is still processed
            return
        assert self._transport is not None
        code = self._transport.get_returncode()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        if self._log is not None:
            self._log.close()
            if self._log.last_words:
                last_words = "".join(
                    c for c in self._log.last_words.decode(errors="replace") if c.isprintable() or c == "\n"
                )
                _log.debug("an upstream's process ended (%s); its last words on stderr:\n%s", how, last_words.rstrip())
        self._transport.close()
        self.ended.set_result(f"the upstream's process was ended: {self._reason}" if self._reason else _ended(how))


def _ended(how: str) -> str:
    return f"the upstream's process ended: {how}"


class Supervised(Protocol):
    """Something that a supervisor keeps running: it reports its end and its number of users, and can
    be asked to end.
    """

    @property
    def ended(self) -> asyncio.Future[str]: ...

    @property
    def busy(self) -> int: ...

    def close(self, drain_s: float = 0.0) -> Coroutine[Any, Any, None]: ...


T = TypeVar("T", bound=Supervised)

State = Literal["idle", "starting", "up", "failed", "closed"]


@dataclass(frozen=True, slots=True)
class Restarts:
    """Limits and pauses of restarts."""

    limit: int = 10
    healthy_s: float = 10.0
    pause_s: float = 0.1
    longest_s: float = 30.0

    def pause(self, failures: int) -> float:
        """Return the pause before the next start. One that had stayed up is restarted at once."""
        return 0.0 if failures == 0 else min(self.longest_s, self.pause_s * 2 ** (failures - 1))


class Supervisor(Generic[T]):
    """Keeps one T running. Without `restarts` it is started again only when it is next needed."""

    def __init__(
        self,
        start: Callable[[], Awaitable[T]],
        *,
        clock: Clock,
        restarts: Restarts | None = None,
        alert: Callable[[str], None] | None = None,
        name: str = "",
    ) -> None:
        self._name = name
        self.restarted = 0
        self.reason = ""
        self.used = clock.monotonic()
        self._start = start
        self._clock = clock
        self._restarts = restarts
        self._alert = alert
        self._current: T | None = None
        self._since = 0.0
        self._failures = 0
        self._gave_up = False
        self._closed = False
        self._paused_until: float | None = None
        self._hurry = asyncio.Event()
        self._bringing: asyncio.Task[None] | None = None
        self._attempt: asyncio.Future[T | Failure] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        if self._closed:
            return "closed"
        if self._gave_up:
            return "failed"
        if self._current is not None:
            return "up"
        return "idle" if self._bringing is None else "starting"

    @property
    def current(self) -> T | None:
        return self._current

    @property
    def busy(self) -> int:
        return 0 if self._current is None else self._current.busy

    async def get(self, within_s: float) -> T:
        """Return the running instance, started if need be; a short pause before its start is waited out.

        Raises E3502 if the start under way does not succeed, or is not due for long.
        """
        self.used = self._clock.monotonic()
        if self._current is not None:
            return self._current
        if self._closed or self._gave_up:
            raise Failure("E3502", self.reason or "the upstream is closed", details={"sent": False})
        if self._paused_until is not None and (left_s := self._paused_until - self._clock.monotonic()) > WAITED_OUT_S:
            raise self._pausing(left_s)
        if self._bringing is None:
            self._bring_up()
        assert self._attempt is not None
        done, _ = await asyncio.wait({self._attempt}, timeout=within_s)
        if not done:
            raise Failure("E3502", "the upstream did not start in time", details={"sent": False})
        outcome = done.pop().result()
        if isinstance(outcome, Failure):
            raise outcome
        return outcome

    def _pausing(self, left_s: float) -> Failure:
        """The failure for calls during a pause that is too long to wait: it says when to try again."""
        words = f"the upstream keeps ending, and is left alone for a moment before it is started again; {self.reason}"
        details = {"sent": False, "left_alone": True}
        return Failure("E3502", words, details=details, retry_after_ms=ceil(left_s * 1000))

    def discard(self, useless: T) -> None:
        """Drop an instance that is no longer usable, whether it has ended or not."""
        if useless is self._current:
            self._current = None
            self._end(useless)

    async def replace(self, drain_s: float, within_s: float = 60.0) -> None:
        """Start another instance, then let the old one finish its work and end it.

        This also gives an instance that was given up another chance.
        """
        self._gave_up, self._failures, self.reason = False, 0, ""
        old = self._current
        if old is None:
            self._paused_until = None
            self._hurry.set()
            await self.get(within_s)
            return
        fresh = await self._start()
        if self._current is not old or self._closed:
            await fresh.close()  # the old one ended meanwhile and has a successor already
            return
        self._adopt(fresh)
        await old.close(drain_s)

    async def close(self, drain_s: float = 0.0) -> None:
        """End it for good."""
        self._closed = True
        if self._bringing is not None:
            self._bringing.cancel()
            await asyncio.wait({self._bringing})
            _settle(self._attempt, Failure("E3502", "the upstream is closed", details={"sent": False}))
        current, self._current = self._current, None
        if current is not None:
            await current.close(drain_s)
        await asyncio.gather(*self._leaving)

    def _adopt(self, started: T) -> None:
        self._current = started
        self._since = self._clock.monotonic()
        started.ended.add_done_callback(lambda _: self._lost(started))

    def _lost(self, gone: T) -> None:
        if gone is not self._current or self._closed:
            return  # replaced or closed: its end was intended
        self._current = None
        self._end(gone)
        if self._restarts is not None and self._may_restart(gone.ended.result(), self._since):
            self._bring_up(again=True)

    def _end(self, gone: T) -> None:
        leaving = asyncio.create_task(gone.close())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _may_restart(self, reason: str, since: float) -> bool:
        """Count an end, and give up on an instance that has ended too soon too often."""
        assert self._restarts is not None
        soon = self._clock.monotonic() - since < self._restarts.healthy_s
        self._failures = self._failures + 1 if soon else 0
        self.reason = reason
        _log.warning("%s: %s", self._name or "an upstream", reason)
        if self._failures <= self._restarts.limit:
            return True
        self._gave_up = True
        self.reason = f"the upstream was started {self._restarts.limit} times again and did not stay up; {reason}"
        if self._alert is not None:
            self._alert(self.reason)
        return False

    def _bring_up(self, *, again: bool = False) -> None:
        self._attempt = asyncio.get_running_loop().create_future()
        self._bringing = asyncio.create_task(self._start_until_up(again))

    async def _pause(self, pause_s: float) -> None:
        self._hurry.clear()
        self._paused_until = self._clock.monotonic() + pause_s if pause_s else None
        try:
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        except TimeoutError:
            pass  # nobody waited for it
        finally:
            self._paused_until = None

    async def _start_until_up(self, again: bool) -> None:
        while True:
            if again:
                assert self._restarts is not None
                self.restarted += 1
                await self._pause(self._restarts.pause(self._failures))
            since = self._clock.monotonic()
            try:
                started = await self._start()
            except Failure as failure:
                again = (
                    isinstance(failure, Crashed)
                    and self._restarts is not None
                    and self._may_restart(failure.message, since)
                )
                attempt, self._attempt = self._attempt, asyncio.get_running_loop().create_future()
                if not again:
                    self._bringing = None
                _settle(attempt, failure)
                if not again:
                    return
            except Exception as error:  # noqa: BLE001 - a fault of this program must not leave callers waiting
                _log.exception("%s could not be started", self._name or "an upstream")
                self._bringing = None
                words = f"the upstream could not be started: {type(error).__name__}"
                _settle(self._attempt, Failure("E3502", words, details={"sent": False}))
                return
            else:
                self._bringing = None
                self._adopt(started)
                _settle(self._attempt, started)
                return


def _settle(attempt: asyncio.Future[T | Failure] | None, outcome: T | Failure) -> None:
    if attempt is not None and not attempt.done():
        attempt.set_result(outcome)
