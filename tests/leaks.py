"""Finds what a test leaves behind: tasks, threads, child processes, file descriptors and files.

Each kind is listed before and after a test. Whatever is new gets a bounded time to end, because a thread or a
process that was asked to stop takes a moment on a busy machine. What is still there then fails the test.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import surroundings, zygotes

ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0

# Threads that libraries start once per process and keep until it ends, by the beginning of their names.
LIBRARY_THREADS = {
    "asyncio_": "the default executor of a loop that a wider fixture owns",
    "interlock-check": "a pool of the process, shared by all homes, that runs the `def` handlers of tools",
    "interlock-input": "one thread of the process, shared by all homes, that walks over large inputs",
    "interlock-walk": "two threads of the process, shared by all homes, that walk over large data",
    "interlock-definition": "one thread of the process, shared by all homes, that reads the definitions of tools",
    "interlock-lookup": "threads of the process that look up names",
    "interlock-ready": "threads of the process that check whether the server is ready",
    "interlock-disk": "threads of the process that read and write files and databases",
    "interlock-intake": "two threads of the process, shared by all links, that parse large answers of upstreams",
    zygotes.THREAD: "starts the zygotes that tests share",
}
# gRPC keeps a thread of this name and a pair of sockets for as long as any of its objects is alive.
GRPC_POLLER = "(_poll_wrapper)"
# Processes that tests start once and share, by a part of their command. Each has one socket in this process.
SHARED_PROCESSES = {"-m tests.warm": "commands are forked off it (tests/warm.py)"}
# Tasks that libraries keep on a loop until it ends, by the names of their coroutines.
LIBRARY_TASKS = {"_shutdown_watcher": "sse-starlette's, one per loop"}
# Descriptors that libraries open once per process, by the beginning of what they point to.
LIBRARY_FILES = {
    "/dev/": "devices hold nothing of a test",
    "anon_inode:": "event polls of loops and libraries; a loop that leaks shows by its socket pair",
}
# Fixtures that check tests together, when the last of them has ended. A home or a sandbox that several tests share
# keeps processes ready for the next call, and makes new ones while any of these tests runs.
TOGETHER = frozenset({"module_leaves_nothing_behind", "sandboxes_leave_nothing_behind"})


def _threads() -> dict[str, object]:
    return {
        f"thread {one.name} ({one.ident})": one
        for one in threading.enumerate()
        if one.is_alive() and not one.name.startswith(tuple(LIBRARY_THREADS)) and GRPC_POLLER not in one.name
    }


def _children() -> dict[str, object]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # there is none: one question to the kernel instead of one for each thread
    found: dict[str, object] = {}
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            for pid in _read(f"/proc/self/task/{task}/children").split():
                # No part of the name: a process that was started just now may not have its command yet.
                command = _read(f"/proc/{pid.decode()}/cmdline").replace(b"\0", b" ").decode(errors="replace")
                found[f"process {pid.decode()}"] = command[:100] or "(ended, but nobody waited for it)"
    return found


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _descriptors() -> dict[str, object]:
    found: dict[str, object] = {}
    for number in os.listdir("/proc/self/fd"):
        if int(number) in surroundings.shared_descriptors:
            continue
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith(tuple(LIBRARY_FILES)):
                found[f"descriptor {number}: {target}"] = None
    return found


def _files(places: tuple[Path, ...]) -> dict[str, object]:
    found: dict[str, object] = {}
    for place in places:
        with suppress(OSError):
            for name in os.listdir(place):
                if not name.startswith(".") and name != "__pycache__":
                    found[f"file {place}/{name}"] = None
    return found


def watch(places: tuple[Path, ...]) -> Callable[[], list[str]]:
    """Note what there is now; the returned function names what is new, after waiting for it to end."""
    look: list[Callable[[], dict[str, object]]] = [_threads, _children, _descriptors, lambda: _files(places)]
    before = [set(one()) for one in look]

    def new() -> list[str]:
        found = sorted(
            f"{name}: {told}" if isinstance(told, str) else name
            for one, known in zip(look, before, strict=True)
            for name, told in one().items()
            if name not in known
        )
        sockets = [name for name in found if ": socket:[" in name]
        ours = (*SHARED_PROCESSES, *(f"process {pid}:" for pid in zygotes.kept()))
        shared = [name for name in found if name.startswith("process ") and any(one in name for one in ours)]
        kept = 2 * sum(GRPC_POLLER in one.name for one in threading.enumerate()) + len(shared)
        spared = {*shared, *sockets[:kept]}
        return [name for name in found if name not in spared]

    def left() -> list[str]:
        if not new():
            return []
        gc.collect()  # an object that holds a descriptor in a cycle is garbage, not a leak
        end = time.monotonic() + PATIENCE_S
        pause = 0.001
        while (found := new()) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(pause * 2, 0.2)
        return found

    return left


async def tasks_left(before: set[asyncio.Task[object]]) -> list[str]:
    """Name the tasks of this loop that are new and do not end in time."""
    own = asyncio.current_task()

    def new() -> set[asyncio.Task[object]]:
        started = (task for task in asyncio.all_tasks() if task not in before and task is not own)
        return {task for task in started if getattr(task.get_coro(), "__name__", "") not in LIBRARY_TASKS}

    end = time.monotonic() + PATIENCE_S
    while (found := new()) and time.monotonic() < end:
        await asyncio.wait(found, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
    return sorted(f"task {task.get_name()}: {task.get_coro()}" for task in found)


def together(item: pytest.Item) -> bool:
    """Whether a fixture checks the test together with others."""
    return isinstance(item, pytest.Function) and not TOGETHER.isdisjoint(item.fixturenames)


def check(places: tuple[Path, ...]) -> Iterator[None]:
    """Fail if anything that appears between the two halves of a fixture stays."""
    left = watch(places)
    yield
    fail(left())


def fail(left: list[str]) -> None:
    """Fail the test with everything that it left."""
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


def own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ...]]:
    """Give this process a directory of its own for temporary files, in which nothing may stay."""
    import tempfile

    tmp_path_factory.getbasetemp()  # pytest's own directories stay where they are
    around = surroundings.memory() or "/tmp"
    with tempfile.TemporaryDirectory(prefix="il", dir=around) as place, pytest.MonkeyPatch.context() as patch:
        Path(place).chmod(0o711)  # servers that run as another user keep their files below it
        patch.setenv("TMPDIR", place)
        patch.setattr(tempfile, "tempdir", place)
        yield (Path(place), ROOT)
