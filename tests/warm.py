"""Commands as processes of their own that need not load the program anew: each is forked off one that has loaded it.

Hundreds of commands run in the tests, and loading is most of what each of them takes. The parent never opens anything
of Interlock's: what a command does, it does in a process, a directory and an environment of its own. What only a fresh
interpreter heeds (`PYTHON…` variables) cannot be tested this way and is refused; `tests.cli.conftest.INTERLOCK` starts
one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import interlock.cli

# What commands import when they need it, loaded once here. Each leaves the process with a single thread.
LOADED = (
    "cedarpy", "cryptography.hazmat.primitives.asymmetric.ed25519", "cryptography.hazmat.primitives.serialization",
    "cryptography.hazmat.primitives.ciphers.aead", "rich.table", "semantic_version", "alembic.command",
    "alembic.runtime.migration", "sqlalchemy", "interlock.api.interlock", "interlock.api.scratch",
    "interlock.audit.chain", "interlock.audit.exported", "interlock.executors.sandbox.supervisor",
    "interlock.gateway.isolation", "interlock.registry.admission", "interlock.registry.retirement",
    "interlock.api.service", "interlock.trials", "interlock.upstreams.manager",
)  # fmt: skip
PATIENCE_S = 150

_one_at_a_time = threading.Lock()


def run(
    words: Sequence[str], environment: Mapping[str, str], directory: Path, stdin: bytes = b"", *, merged: bool = False
) -> tuple[int, bytes, bytes]:
    """Run one command: its exit code, what it printed, and what it said on stderr unless both are merged."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    unheeded = {name for name, value in environment.items() if name.startswith("PYTHON") and ours.get(name) != value}
    assert not unheeded, f"only a fresh interpreter heeds {', '.join(unheeded)}"
    with _one_at_a_time:
        try:
            return _warm().run(words, environment, directory, stdin, merged=merged)
        except BaseException:
            # Whatever it was about to answer must not be taken for the answer to the next.
            _warm().kill()
            _warm.cache_clear()
            raise


@cache
def _warm() -> _Warm:
    warm = _Warm()
    atexit.register(warm.kill)
    return warm


class _Warm:
    """The process that commands are forked off, with a session of its own; it ends with whoever started it."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(PATIENCE_S)
        with theirs:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                env=environment, cwd=Path(__file__).parents[1], pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], directory: Path, stdin: bytes, *, merged: bool
    ) -> tuple[int, bytes, bytes]:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            task = json.dumps({"words": [*words], "environment": {**environment}, "directory": str(directory)}).encode()
            streams = [given.fileno(), out.fileno(), out.fileno() if merged else err.fileno()]
            socket.send_fds(self._ours, [len(task).to_bytes(8, "big")], streams)
            self._ours.sendall(task)
            ended = self._ours.recv(8)
            if not ended:
                raise RuntimeError(f"the process that commands are forked off has ended: {self._process.wait()}")
            out.seek(0)
            err.seek(0)
            return int.from_bytes(ended, "big", signed=True), out.read(), err.read()

    def kill(self) -> None:
        self._ours.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


def _task(door: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next command, in the process that shall be it; nothing in the parent when nobody asks any more."""
    while True:
        head, streams, _, _ = socket.recv_fds(door, 8, 3)
        if not head:
            return None
        left, parts = int.from_bytes(head, "big"), list[bytes]()
        while left:
            part = door.recv(left)
            if not part:
                return None
            parts.append(part)
            left -= len(part)
        child = os.fork()
        if child == 0:
            return json.loads(b"".join(parts)), streams
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        door.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def _become(task: dict[str, Any], streams: list[int]) -> None:
    """Take on the streams, the directory, the environment and the words of a command."""
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
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.argv = ["interlock", *task["words"]]


def _run() -> int:
    try:
        interlock.cli.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def _end(code: int) -> NoReturn:
    """End as an interpreter does, but without taking apart every module that was loaded: that is most of a command."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    for name in LOADED:
        importlib.import_module(name)
    for module in pkgutil.iter_modules(interlock.cli.__path__):
        if module.name != "__main__":
            importlib.import_module(f"interlock.cli.{module.name}")
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a thread would not be in the commands"
    gc.freeze()  # or each command would look for garbage in all of this when it ends
    with socket.socket(fileno=int(sys.argv[1])) as door:
        received = _task(door)
    if received is not None:
        _become(*received)
        _end(_run())
