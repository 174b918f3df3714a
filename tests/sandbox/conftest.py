"""Sandboxes for tests, and proof after every test that nothing of a call is left on the host."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from interlock.executors.sandbox import pool
from interlock.executors.sandbox.allowance import Allowance
from interlock.executors.sandbox.cgroups import PREFIX, Cgroups
from interlock.executors.sandbox.job import GIB
from interlock.executors.sandbox.supervisor import Sandbox
from tests import leaks, processes
from tests.needs import need
from tests.support.zygotes import Zygote

ROOMY = Allowance(cores=64, memory_bytes=64 * GIB)
PROGRAMS = {"bubblewrap": ("bwrap", "bubblewrap"), "gvisor": ("runsc", "runsc")}


def require(backend: str) -> None:
    """The back end's program must be there."""
    if backend in PROGRAMS:
        need(*PROGRAMS[backend])


def has_cgroups() -> bool:
    """Whether this host lets us make groups. Where it does not, tests assert what bounds a call instead."""
    try:
        Cgroups.open().close()
    except OSError:
        return False
    return True


@pytest_asyncio.fixture(scope="package", loop_scope="session", autouse=True)
async def sandboxes_leave_nothing_behind(own_places: tuple[Path, ...]) -> AsyncGenerator[None]:
    """The tests here are checked together, when the sandbox that they share is closed (see tests/leaks.py).

    Their zygotes are their own: tests look at when those start and end.
    """
    left = leaks.watch(own_places)  # on the loop of the session, which outlives the sandbox
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "Zygote", Zygote)
        yield
    leaks.fail(left())


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sandbox() -> AsyncGenerator[Sandbox]:
    """One for all tests here: what one test's calls leave behind, another would find."""
    os.environ["SECRET_TOKEN"] = "hunter2"
    async with await Sandbox.open(backends=("zygote",), spares=2, allowance=ROOMY) as opened:
        yield opened
    del os.environ["SECRET_TOKEN"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Generator[None]:
    """No process of a call, no mount and no temporary file stays behind."""
    mounts = _mounts()
    yield
    deadline = time.monotonic() + 10
    while (left := strays()) and time.monotonic() < deadline:
        time.sleep(0.01)  # a killed process takes the kernel a moment
    assert left == []
    assert _mounts() == mounts
    assert bundles_left() == []


# Zygotes, spare children, and the servers that tests share.
_TESTS_OWN = ("zygote.launch", "tests.warm", "interlock-redis-")


def strays() -> list[str]:
    """Processes below ours that are not those of the tests: what a call has left."""
    found: list[str] = []
    for pid in processes.below(os.getpid()):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and not any(ours in line for ours in _TESTS_OWN):
            found.append(line)
    return found


def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def bundles_left() -> list[Path]:
    """The temporary directories of sandboxes of this process."""
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.getpid()}-*"))


def groups_left(server: int | None = None) -> list[str]:
    """The cgroups of a server, of this process if none is named. Other servers' come and go while we look."""
    mine = f"{PREFIX}{os.getpid() if server is None else server}-"
    return [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names if name.startswith(mine)]
