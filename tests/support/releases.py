"""The releases of this program, from the history of the repository."""

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
# Each release, oldest first: its tag and its commit. A clone may lack tags, so the commits are listed here
# (docs/explanation/test-tiers.md says how a release is made).
RELEASES = {
    "v0.1.0rc1": "c9440e49bacad18210be4dc260aecbc69449c7aa",
}
# A commit to take in place of the newest release.
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


def first(place: Path) -> Release:
    """The first release, unpacked to a directory."""
    return _release(*next(iter(RELEASES.items())), place)


def newest(place: Path) -> Release:
    """The newest release, unpacked to a directory, or the commit that was chosen in its place."""
    if chosen := os.environ.get(CHOSEN):
        return _release(chosen, chosen, place)
    return _release(*[*RELEASES.items()][-1], place)


def _release(name: str, commit: str, place: Path) -> Release:
    source = unpack(commit, place)
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


def tags() -> dict[str, str]:
    """The commits of the tags of releases that this clone has."""
    listed = _git("for-each-ref", "--format=%(refname:short) %(*objectname) %(objectname)", "refs/tags/v[0-9]*")
    # An annotated tag is an object of its own, so the commit that it is for comes first.
    return {words[0]: words[1] for words in (line.split() for line in listed.decode().splitlines())}


def _git(*words: str) -> bytes:
    """What git prints; nothing where it fails."""
    ended = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, check=False)
    return b"" if ended.returncode else ended.stdout
