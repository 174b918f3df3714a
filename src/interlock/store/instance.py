"""Signs of life: a process that works on a data directory holds a lock file, which the kernel releases when it dies."""

from __future__ import annotations

import fcntl
import os
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

# The number of signs of life of dead processes that a starting process removes.
_SWEPT_AT_ONCE = 10_000


class InstanceHome(Protocol):
    """The parts of a data directory that a process uses which shows that it lives."""

    @property
    def instances(self) -> Path:
        """The directory with the signs of life."""
        ...

    @property
    def sandbox(self) -> Path:
        """The lock of the sandboxes on this machine."""
        ...

    def runs(self, owner: str) -> bool:
        """Whether the process with this instance id lives."""
        ...


class Instance:
    """This process's sign of life: a lock file that the kernel releases when the process dies, however it dies."""

    # Whether others have taken this process for dead while it lived. The kernel knows better.
    lost = False

    def __init__(self, home: InstanceHome, instance_id: str) -> None:
        self.id = instance_id
        self.home = home
        self._file = _hold(home.instances / f"{instance_id}.lock")
        _sweep(home.instances)

    def alive(self, owner: str) -> bool:
        """Whether the process that wrote this owner id still lives."""
        return owner == self.id or self.home.runs(owner)

    def end_with_lease(self) -> None:
        """Do nothing: the lock file is released by the kernel, so no process that lives is ever taken for dead."""

    def report(self, document: dict[str, Any]) -> None:
        """Write how this process is into its sign of life, for others on this home to read: `Home.signs_of_life`."""
        try:
            text = orjson.dumps(document)
            os.pwrite(self._file.fileno(), text, 0)
            os.ftruncate(self._file.fileno(), len(text))
        except OSError:
            pass  # other parts report a full disk

    def close(self) -> None:
        (self.home.instances / f"{self.id}.lock").unlink(missing_ok=True)
        self._file.close()


def _hold(path: Path) -> IO[str]:
    """Make and lock a sign of life. Nobody else holds it, but a process that looks has it for a moment."""
    while True:
        file = open(path, "w")  # noqa: SIM115 - held for life
        fcntl.flock(file, fcntl.LOCK_EX)
        # INVARIANT: what is locked is what the name leads to. Somebody may have swept it away before it was locked.
        if _leads_to(path, file):
            return file
        file.close()


def _sweep(instances: Path) -> None:
    """Remove the signs of life of processes that have died; they could not do it themselves."""
    for path in islice(instances.glob("*.lock"), _SWEPT_AT_ONCE):
        try:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _leads_to(path, file):
                    path.unlink()
        except OSError:
            continue  # it lives, or is another user's, or somebody else removes it


def _leads_to(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def held(path: Path) -> bool:
    """Whether the process whose sign of life this is still lives."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True  # what another user runs cannot be looked at; nobody is taken for dead without proof
    except FileNotFoundError:
        pass  # it has closed, maybe just now
    return False
