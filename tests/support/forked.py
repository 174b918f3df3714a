"""Python programs as processes of their own that need not load everything anew: each is forked off one that has.

A program that uses the MCP SDK or Interlock takes a second of CPU to start, and hundreds of them run in the tests.
`[*python(), "-m", MODULE, …]` is a command like `[sys.executable, "-m", MODULE, …]`, and `-c CODE` works as well. It
may be handed to whatever starts commands: it has the streams, the directory, the environment and the exit code of the
program, and passes SIGTERM, SIGINT and SIGHUP on to it. It cannot take its place where a test kills the process or
looks at it from outside, because the program is not the process that was started; there `sys.executable` is right.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.support import postgres

LAUNCH = Path(__file__).with_name("launch.py")
ROOT = Path(__file__).parents[2]
# What the programs import beside what commands do, loaded once. Each leaves the process with a single thread.
LOADED = (
    "mcp.server.mcpserver",
    "mcp.server.stdio",
    "mcp_types",
    "starlette.applications",
    "interlock.doors.mcp.stdio",
    "anyio._backends._asyncio",
    # Programs that use a module of the tests.
    "hypothesis",
    "pytest_asyncio",
)


@cache
def python() -> tuple[str, ...]:
    """The beginning of a command, in the place of `sys.executable`."""
    from tests import warm  # which hands its process over to `serve`

    directory = tempfile.mkdtemp(prefix="fork", dir="/tmp")
    place = f"{directory}/door"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(128)
        warm.serve_programs(listening.fileno())

    def end() -> None:
        Path(place).unlink()
        Path(directory).rmdir()

    atexit.register(end)
    return sys.executable, "-I", "-S", str(LAUNCH), place


def serve(descriptor: int, owner: int) -> NoReturn:
    """Fork programs off this process until its owner, another process, has ended."""
    os.setsid()
    for name in LOADED:
        importlib.import_module(name)
    sys.path.append(str(ROOT))
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a thread would not be in the programs"
    gc.freeze()
    with socket.socket(fileno=descriptor) as listening:
        door = _next(listening, os.pidfd_open(owner))
    with door:
        words = _become(door)
    _end(run(words))


def _next(listening: socket.socket, owner: int) -> socket.socket:
    """The connection of the next program, in the process that shall be it."""
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([listening, owner, *running], [], [])
        if owner in ready:
            os._exit(0)
        for descriptor in running.keys() & ready:
            pid, door = running.pop(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with door, suppress(OSError):  # nobody listens any more if the command was killed
                door.sendall(code.to_bytes(8, "big", signed=True))
            os.close(descriptor)
        if listening not in ready:
            continue
        door, _ = listening.accept()
        pid = os.fork()
        if pid == 0:
            os.close(owner)
            for descriptor, (_, other) in running.items():
                os.close(descriptor)
                other.close()
            return door
        with suppress(OSError):
            door.sendall(pid.to_bytes(8, "big"))
        running[os.pidfd_open(pid)] = pid, door


def _become(door: socket.socket) -> list[str]:
    """Take on the streams, the directory and the environment of a program: its words."""
    head, streams, _, _ = socket.recv_fds(door, 8, 3)
    left, parts = int.from_bytes(head, "big"), list[bytes]()
    while left:
        part = door.recv(left)
        if not part:
            os._exit(1)
        parts.append(part)
        left -= len(part)
    task: dict[str, Any] = json.loads(b"".join(parts))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a standard stream
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - a standard stream
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115 - a standard stream
    os.environ.clear()
    os.environ.update(task["environment"])
    time.tzset()
    os.chdir(task["directory"])
    sys.path[0] = task["directory"]
    postgres.use(os.environ)
    os.setsid()
    return task["words"]


def run(words: list[str]) -> int:
    """Run a program in this process as an interpreter with these words would: its exit code."""
    way, what, *arguments = words
    try:
        if way == "-m":
            sys.argv = [what, *arguments]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            assert way == "-c", way
            sys.argv = ["-c", *arguments]
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except KeyboardInterrupt:
        return 130
    except BaseException:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End as an interpreter does, but without taking apart every module that was loaded."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)
