"""The processes of this machine, as anybody can look at them. Any of them may end while we look."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def told(name: str) -> Iterator[bytes]:
    """What the kernel tells of every process under one name: `cmdline`, `environ`."""
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        with suppress(OSError):
            yield path.read_bytes()


def below(pid: int) -> list[int]:
    """Every process a process has started, and what those have."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                children = [int(child) for child in Path(f"/proc/{one}/task/{task}/children").read_text().split()]
                waiting += children
                found += children
    return found


def called() -> bytes:
    """The arguments with which this process, and every one that it has started, were called."""
    lines: list[bytes] = []
    for pid in (os.getpid(), *below(os.getpid())):
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return b"\n".join(lines)
