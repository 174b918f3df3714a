"""The child processes of this process."""

from __future__ import annotations

import os
import select
from collections.abc import Generator
from pathlib import Path

import pytest


def children() -> set[int]:
    """The processes this one has, dead or alive."""
    while True:
        try:
            threads = Path("/proc/self/task").iterdir()
            return {int(pid) for thread in threads for pid in (thread / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            """A thread ended meanwhile and left its children to another, read already perhaps: look again."""


@pytest.fixture(autouse=True)
def no_process_is_left() -> Generator[None]:
    before = children()
    yield
    assert children() <= before


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Whether a process ends in that time; exact, without looking again and again."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)
