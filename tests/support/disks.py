"""A disk that is full."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import missing


@contextmanager
def full_disk(home: Path, largest: int | None = None) -> Generator[None]:
    """No file of this process may grow beyond what it is: the kernel refuses writes as a full disk would."""
    import signal

    largest = largest or max(path.stat().st_size for path in home.iterdir() if path.is_file())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def small_disk(place: Path, mebibytes: int) -> Generator[None]:
    """A directory is a file system of its own meanwhile, in memory, which is soon full. Only root may make one."""
    size = f"size={mebibytes}m"
    made = subprocess.run(("mount", "-t", "tmpfs", "-o", size, "tmpfs", place), capture_output=True, check=False)
    if made.returncode:
        missing(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", place), check=True)
