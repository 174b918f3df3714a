"""The back ends of the sandbox, and what calls in it leave on the host."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from interlock.executors.sandbox.allowance import Allowance
from interlock.executors.sandbox.cgroups import PREFIX, Cgroups
from interlock.executors.sandbox.job import GIB
from tests import processes
from tests.needs import missing, need

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


def bundles_left() -> list[Path]:
    """The temporary directories of sandboxes of this process."""
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.getpid()}-*"))


def groups_left(server: int | None = None) -> list[str]:
    """The cgroups of a server, of this process if none is named. Other servers' come and go while we look."""
    mine = f"{PREFIX}{os.getpid() if server is None else server}-"
    return [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names if name.startswith(mine)]


ORDINARY = 1000


def ordinary_python(user: int) -> str:
    """An interpreter that this user can start: the one that runs the tests may lie in somebody's home."""
    for python in (os.path.realpath(sys.executable), f"/usr/bin/python3.{sys.version_info.minor}"):
        tried = (
            subprocess.run([python, "-c", ""], user=user, group=user, check=False, cwd="/")
            if _there(python, user)
            else None
        )
        if tried is not None and tried.returncode == 0:
            return python
    return missing(f"no interpreter of this version can be started by user {user}")


def _there(python: str, user: int) -> bool:
    return user == os.getuid() or all(os.stat(one).st_mode & 0o001 for one in (python, *Path(python).parents))
