"""Commands in the process of the test: a command that is forked off another process takes 30 ms of CPU more.

A command takes over what belongs to the whole process: the standard streams, the environment, the working directory and
the search path for modules. `run` gives all of it back, and forgets the modules that the command has loaded from the
directory of the test. What stays are modules of Interlock and of libraries, and the threads that they share, for which
tests/leaks.py looks as after any other call.

`fits` says which commands run here. One that changes the process for good (a server), or that is to be interrupted,
needs a process of its own, and so does one beside an event loop: it runs a loop itself, and the loop of the test and
all other threads would meet the environment and the streams of the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import interlock.cli
from interlock.executors.sandbox.ladder import Rung
from interlock.gateway import isolation
from tests.support import postgres

ROOT = Path(__file__).parents[2]
# They serve, watch or start others, until a signal ends them.
OF_ITS_OWN = frozenset({"serve", "dev", "demo", "watch"})
# Modules from these places are the same for every command.
_SHARED = tuple(
    f"{place}{os.sep}" for place in {str(ROOT), sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def fits(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command can run in this process, at this moment."""
    if threading.current_thread() is not threading.main_thread() or asyncio._get_running_loop() is not None:
        return False
    unheeded = any(environment.get(name) != os.environ.get(name) for name in environment if name.startswith("PYTHON"))
    return not unheeded and OF_ITS_OWN.isdisjoint(words)


def run(
    words: Sequence[str], environment: Mapping[str, str], directory: Path, stdin: bytes = b""
) -> tuple[int, bytes, bytes]:
    """Run one command: its exit code, what it printed, and what it said on stderr."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        with (
            _streams(given.fileno(), out.fileno(), err.fileno()),
            _surroundings({**environment, **postgres.given()}, directory),
            _modules(directory),
            _logging(),
            _interpreter(["interlock", *words]),
        ):
            code = contextvars.copy_context().run(_run)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def _run() -> int:
    try:
        interlock.cli.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


@contextlib.contextmanager
def _streams(*descriptors: int) -> Generator[None]:
    """Have the standard streams of this process lead to these descriptors."""
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in range(3)]
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        with (
            open(0, encoding="utf-8", closefd=False) as sys.stdin,
            open(1, "w", encoding="utf-8", closefd=False) as sys.stdout,
            open(2, "w", encoding="utf-8", closefd=False, buffering=1) as sys.stderr,
        ):
            yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextlib.contextmanager
def _surroundings(environment: Mapping[str, str], directory: Path) -> Generator[None]:
    """Have this process the environment, the working directory and the search path of a command."""
    before, place, path = dict(os.environ), os.getcwd(), sys.path[:]
    _be_in(environment, directory)
    sys.path[:] = [str(directory), *(one for one in path if one not in ("", str(ROOT), str(directory)))]
    try:
        yield
    finally:
        sys.path[:] = path
        _be_in(before, place)


def _be_in(environment: Mapping[str, str], directory: str | Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(directory)


@contextlib.contextmanager
def _modules(directory: Path) -> Generator[None]:
    """Forget the modules that were loaded from elsewhere than the program and its libraries."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in [one for one in sys.modules if one not in before]:
            if not _is_shared(sys.modules[name]):
                del sys.modules[name]
        for place in [one for one in sys.path_importer_cache if one.startswith(str(directory))]:
            del sys.path_importer_cache[place]


def _is_shared(module: Any) -> bool:
    places = [place for place in (getattr(module, "__file__", None), *getattr(module, "__path__", ())) if place]
    return all(str(place).startswith(_SHARED) for place in places)


@contextlib.contextmanager
def _logging() -> Generator[None]:
    """Give the loggers back as they were: a command sets where its own messages go."""
    loggers = [logging.getLogger(), logging.getLogger("interlock")]
    before = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]
    try:
        yield
    finally:
        for one, handlers, level, propagate in before:
            one.handlers[:], one.propagate = handlers, propagate
            one.setLevel(level)


@contextlib.contextmanager
def _interpreter(words: list[str]) -> Generator[None]:
    """Have the interpreter the arguments of a command, which sets up signals and garbage collection for itself.

    At its end it does what pays because the process ends: it keeps all objects, and does not wait for threads of tools.
    """
    threshold, heard = gc.get_threshold(), [(one, signal.getsignal(one)) for one in _SIGNALS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr("interlock.cli.command._leave", sys.exit)
        patch.setattr(isolation, "rungs", _known_rungs)
        try:
            yield
        finally:
            gc.set_threshold(*threshold)
            for number, handler in heard:
                signal.signal(number, handler)


# The ways of isolation that work, by the path on which programs were looked for: each takes half a second to try.
_rungs: dict[str, Sequence[Rung]] = {}
_try_rungs: Callable[[], Any] = isolation.rungs


async def _known_rungs() -> Sequence[Rung]:
    path = os.environ.get("PATH", "")
    if path not in _rungs:
        _rungs[path] = await _try_rungs()
    return _rungs[path]
