"""Puts the files that a call left on this disk.

Their paths were chosen by a tool, and the directory may hold anything: so every step below it is taken from the one
above, through no link, and nothing that is there is written over.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.call.artifacts import Artifact
from interlock.core.errors import Failure

if TYPE_CHECKING:
    pass

_STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def check(contents: Mapping[Artifact, bytes]) -> dict[str, bytes]:
    """The content of each file, by its path. E3801 if one is not what the record of the call says."""
    for one, content in contents.items():
        if hashlib.sha256(content).hexdigest() != one.sha256:
            raise Failure("E3801", f"`{one.ref}` is not what the journal says it was; see interlock audit verify")
    return {one.path: content for one, content in contents.items()}


def save(files: Mapping[str, bytes], directory: Path) -> list[Path]:
    """Write files below a directory: all of them, or none if one is there already (E3410)."""
    strange = [path for path in files if not {"", ".", ".."}.isdisjoint(path.split("/"))]
    if strange:
        raise Failure("E3410", f"`{strange[0]}` leads out of the directory; nothing was written")
    taken = [path for path in files if os.path.lexists(directory / path)]
    if taken:
        words = f"`{directory / taken[0]}` is there already; nothing was written"
        raise Failure("E3410", words, resolution="choose another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            top = _held(stack, os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for path, content in files.items():
                _write(top, path.split("/"), content)
    except OSError as error:
        raise Failure("E3410", f"the files cannot be written to `{directory}`: {error.strerror}") from None
    return [directory / path for path in files]


def write_new(path: Path, content: bytes) -> None:
    """Write one file where there is none (E3410); nothing is left of one that cannot be written whole."""
    try:
        descriptor = os.open(path, _NEW, 0o666)
    except FileExistsError:
        words = f"`{path}` is there already; nothing was written"
        raise Failure("E3410", words, resolution="choose another name") from None
    except OSError as error:
        raise Failure("E3410", f"`{path}` cannot be written: {error.strerror}") from None
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise Failure("E3410", f"`{path}` cannot be written: {error.strerror}") from None


def _write(top: int, parts: list[str], content: bytes) -> None:
    with ExitStack() as stack:
        at = top
        for name in parts[:-1]:
            try:
                os.mkdir(name, dir_fd=at)
            except FileExistsError:
                pass  # if it is a directory; else the next line refuses it
            at = _held(stack, os.open(name, _STEP, dir_fd=at))
        with open(os.open(parts[-1], _NEW, 0o666, dir_fd=at), "wb") as file:
            file.write(content)


def _held(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor
