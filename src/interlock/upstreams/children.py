"""Programs that serve tools over their pipes: started, monitored, restarted, replaced, and always ended.

A `Child` is one process, leader of a group of its own. Whole lines go in and come out, under the limits of
`response_limits`; its stderr goes to a log that is rotated. It runs under a keeper (`keeper`): every process that it
started ends with it, also those that left its group, and all of them end when this process dies, however that happens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.upstreams.response_limits import Allowance, Intake, Lines

_log = logging.getLogger("interlock.upstreams")

# The environment variables that a child inherits; all others must be given to it.
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
MAX_UNREAD = 64 * 1024 * 1024
GRACE_S = 2.0
LOG_BYTES = 1024 * 1024
OLDER_LOGS = 3
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
            for number in range(OLDER_LOGS - 1, 0, -1):
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
