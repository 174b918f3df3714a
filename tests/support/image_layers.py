"""The layers of a container image, file by file, and where each file comes from.

What has no origin that is named here must not be in an image: whatever its name is, nobody meant it to be there.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}")
# Records that the system's package manager and the account of the service leave behind.
_SYSTEM = re.compile(
    r"var/lib/dpkg/(status|status-old|available|lock|lock-frontend|triggers/.*|info/.*|diversions.*|statoverride.*"
    r"|alternatives/.*)|var/lib/apt/extended_states|etc/ld\.so\.cache|var/cache/ldconfig/aux-cache"
    r"|var/cache/debconf/[a-z]+\.dat(-old)?|var/lib/systemd/.*"
    r"|etc/(passwd|group|shadow|gshadow|subuid|subgid)-?"
)
# Names of what a layer removes from those below it.
_REMOVED = ".wh."
_MERGED = re.compile(r"^(lib|lib64|bin|sbin)/")
_ENVIRONMENT = re.compile(r"pyvenv\.cfg|bin/(python[\d.]*|activate(\.\w+)?|Activate\.ps1)|lib64")


class File(NamedTuple):
    """A file of a layer. Directories and removals are none."""

    path: str
    mode: int
    owner: int
    link: bool
    content: bytes


def layers(archive: Path) -> list[list[File]]:
    """The files of each layer of an image that was saved as a docker archive, the base first."""
    with tarfile.open(archive) as whole:
        (manifest,) = json.loads(_read(whole, "manifest.json"))
        return [list(_files(_read(whole, name))) for name in manifest["Layers"]]


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    found = archive.extractfile(archive.getmember(name))
    assert found is not None, name
    return found.read()


def _files(layer: bytes) -> Iterator[File]:
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            path = str(PurePosixPath(member.name))
            if not member.isdir() and not PurePosixPath(path).name.startswith(_REMOVED):
                link = member.issym() or member.islnk()
                yield File(path, member.mode, member.uid, link, content.read() if content else b"")


def of_packages(root: Path) -> frozenset[str]:
    """The files of the installed packages of Debian."""
    lists = (root / "var/lib/dpkg/info").glob("*.list")
    return frozenset(_merged(line.lstrip("/")) for one in lists for line in one.read_text().splitlines())


def _merged(path: str) -> str:
    return _MERGED.sub(r"usr/\1/", path)


def distributions(environment: Path) -> dict[str, dict[str, str]]:
    """The files of each distribution of an environment below its root, with the digests that it has for them."""
    found: dict[str, dict[str, str]] = {}
    for record in environment.rglob("*.dist-info/RECORD"):
        place = record.parent.parent
        name = canonicalize_name(record.parent.name.split("-")[0])
        found[name] = {
            str((place / path).resolve().relative_to(environment.resolve())): digest.removeprefix("sha256=")
            for path, digest, _ in csv.reader(record.read_text().splitlines())
        }
    return found


def without_origin(files: list[File], packages: frozenset[str], environment: str, known: dict[str, str]) -> list[str]:
    """The files of a layer that came with no package, no distribution, and not with the account of the service.

    `known` has the files of the distributions in the environment, with their digests. A file that differs from what its
    distribution says has no origin.
    """
    found: list[str] = []
    for one in files:
        inside = one.path.removeprefix(f"{environment}/")
        if inside != one.path:
            digest = known.get(inside)
            if digest is None:
                fits = _ENVIRONMENT.fullmatch(inside) is not None
            else:
                fits = digest in ("", _digest(one.content))
        else:
            fits = _merged(one.path) in packages or _SYSTEM.fullmatch(one.path) is not None
            # What an engine mounts a file on, and a lock of the accounts.
            fits = fits or (one.path.startswith("etc/") and not one.content and not one.link)
        if not fits:
            found.append(one.path)
    return found


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def needed(environment: Path, name: str) -> set[str]:
    """The distributions that one needs, itself among them, of those in an environment."""
    paths = [str(one) for one in environment.glob("lib/python*/site-packages")]
    there = {canonicalize_name(one.name): one for one in metadata.distributions(path=paths)}
    found, waiting = set[tuple[str, str]](), [(canonicalize_name(name), "")]
    while waiting:
        one = waiting.pop()
        if one in found or one[0] not in there:
            continue
        found.add(one)
        for line in there[one[0]].requires or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": one[1]}):
                waiting += [(canonicalize_name(wanted.name), extra) for extra in ("", *wanted.extras)]
    return {each for each, _ in found}
