"""Files that a call produces: as they left the sandbox, and as callers receive them.

A sandboxed tool whose manifest allows it writes files into a directory of its own. When the call succeeds they are
stored like results too large to be sent: by reference, for the caller who made the call, for as long as payloads are
kept. The result contains the path, size and hash of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.data.schema import Json

_MARK = "."


@dataclass(frozen=True, slots=True)
class File:
    """A file as the call left it: its path within the output directory, and its content."""

    path: str
    content: bytes = field(repr=False)

    @property
    def size(self) -> int:
        return len(self.content)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A stored file, and the reference under which the caller can read it."""

    path: str
    sha256: str
    size: int
    ref: str

    def document(self) -> Json:
        return {"path": self.path, "sha256": self.sha256, "size": self.size, "ref": self.ref}


def refer(call: str, files: Iterable[File], shown: Callable[[str], str]) -> tuple[Artifact, ...]:
    """Make references to the files of a call. A path is shown as `shown` returns it; two that look the same are
    numbered.
    """
    artifacts: dict[str, Artifact] = {}
    for number, file in enumerate(files, 1):
        path = shown(file.path)
        while path in artifacts:
            path += f"{_MARK}{number}"
        artifacts[path] = Artifact(path, file.sha256, file.size, f"payload:{call}{_MARK}{number}")
    return tuple(artifacts.values())


def recalled(documents: Sequence[Any]) -> tuple[Artifact, ...]:
    """Read artifacts from their stored form."""
    return tuple(Artifact(one["path"], one["sha256"], one["size"], one["ref"]) for one in documents)


def is_file(ref: str) -> bool:
    """Whether a payload is a file, and not a result as JSON."""
    return _MARK in ref
