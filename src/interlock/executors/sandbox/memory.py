"""The memory of a call where no cgroup counts it: read from /proc, for the whole tree of its processes.

It includes the pages of its processes, those that were swapped out, its own file system, and the buffers behind its
pipes and sockets. The fill of a buffer is not visible from outside, so every pipe and socket is counted as full. The
filter keeps a call from holding memory in any other way: no shared memory without a file, no larger pipes, no
descriptors in flight (see `filter.build`).
"""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from pathlib import Path

from interlock.core.record import NamedTuple

_KIB = 1024
_TMP = "/tmp"  # noqa: S108 - the call's own, and the host's to tell it from
_PIPE = 64 * _KIB
_SOCKET = 208 * _KIB
_FULL = 2  # a socket may hold twice its limit, because the limit is about data and this is about memory


class _Held(NamedTuple):
    """Bytes of one process: its own pages and those swapped out; pages of files in memory."""

    own: int
    shared: int


def of_tree(pid: int, most: int) -> int:
    """Return the memory of a process and all that it started, in bytes. Orphans count too, because it is their first
    process.

    Pages that a fork shares count once for each process. Only if that sum exceeds the limit are proportional shares
    read, for which the kernel has to walk the pages.
    """
    tree = _tree(pid)
    buffers, files = _buffers(tree), _files(pid)
    held = [_status(one) for one in tree]
    total = buffers + _together(held, files)
    return total if total <= most else buffers + _together([_share(one) for one in tree], files)


def _together(held: list[_Held], files: int) -> int:
    # A mapped page of the call's file system is in both sums.
    return sum(one.own for one in held) + max(files, sum(one.shared for one in held))


def _tree(pid: int) -> list[int]:
    tree, waiting = [pid], [pid]
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{one}/task").iterdir():
                children = [int(child) for child in (thread / "children").read_text().split()]
                tree += children
                waiting += children
    return tree


def _status(pid: int) -> _Held:
    facts = _facts(f"/proc/{pid}/status")
    own = facts.get("RssAnon", facts.get("VmRSS", 0)) + facts.get("VmSwap", 0)
    return _Held(own, facts.get("RssShmem", 0))


def _share(pid: int) -> _Held:
    facts = _facts(f"/proc/{pid}/smaps_rollup")
    if "Pss_Anon" not in facts:
        return _status(pid)
    return _Held(facts["Pss_Anon"] + facts.get("SwapPss", 0), facts.get("Pss_Shmem", 0))


def _facts(path: str) -> dict[str, int]:
    """Return the lines of a file in /proc that contain an amount in kB, in bytes."""
    try:
        with open(path) as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) == 3 and words[2] == "kB"}


def _buffers(tree: list[int]) -> int:
    names: set[str] = set()
    for pid in tree:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    names.add(os.readlink(entry.path))
    sockets = sum(one.startswith("socket:") for one in names)
    pipes = sum(one.startswith("pipe:") for one in names)
    return pipes * _PIPE + sockets * _socket_bytes()


@lru_cache(maxsize=1)
def _socket_bytes() -> int:
    try:
        return _FULL * int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):
        return _FULL * _SOCKET


def _files(pid: int) -> int:
    """Return the size of the file system that a call has to itself, if it has one."""
    root = f"/proc/{pid}/root"
    own = root + _TMP
    try:
        if os.stat(own).st_dev in (os.stat(root).st_dev, os.stat(_TMP).st_dev):
            return 0
        facts = os.statvfs(own)
    except OSError:
        return 0
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
