"""Releases of this program, from the history of the repository: the newest tag, or the commit that RELEASE names."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from tests.needs import missing

ROOT = Path(__file__).parents[2]
# What a release is tagged with, such as v0.1.0 (docs/explanation/test-tiers.md).
TAGS = "v[0-9]*"
# A commit to take in place of the newest tag.
CHOSEN = "INTERLOCK_TEST_RELEASE"

# Modules of this program may be loaded already, so that the other one gets an interpreter of its own.
_PROGRAM = """
import os
import sys

os.environ["PYTHONPATH"] = os.pathsep.join(one for one in ({source!r}, os.environ.get("PYTHONPATH")) if one)
os.execv(sys.executable, [sys.executable, "-m", "interlock.cli", *sys.argv[1:]])
"""


class Release(NamedTuple):
    """The program of a release: the words with which an interpreter runs its command line, and its schema."""

    name: str
    words: tuple[str, ...]
    schema: str


def newest(place: Path) -> Release | None:
    """The newest release before this program, unpacked to a directory; None while nothing was released."""
    name = os.environ.get(CHOSEN) or _git("describe", "--tags", "--abbrev=0", "--match", TAGS).decode().strip()
    if not name:
        return None
    source = unpack(name, place)
    found = re.search(
        r'^SCHEMA_HEAD = "(\d+)"', (source / "interlock/store/schema_version.py").read_text(), re.MULTILINE
    )
    assert found is not None
    return Release(name, ("-c", _PROGRAM.format(source=str(source))), found[1])


def unpack(commit: str, place: Path) -> Path:
    """Write the sources of a commit to a directory. Returns the one to import from."""
    packed = _git("archive", commit, "src")
    if not packed:
        missing("the history of the repository is not here")
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(place, filter="data")
    return place / "src"


def _git(*words: str) -> bytes:
    """What git prints; nothing where it fails."""
    ended = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, check=False)
    return b"" if ended.returncode else ended.stdout
