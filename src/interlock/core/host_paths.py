"""Removes paths of this machine from texts that leave it: messages and details of failures contain none.

A path counts as one of this machine if it begins with a directory that exists at the root of a file system here, or
usually does. A JSON pointer (`/parameters/0`) and a route (`/v1/calls`) are therefore left unchanged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from interlock.core.expressions import expression

MARK = "[path]"

_USUAL = frozenset((
    "Applications", "Library", "System", "Users", "Volumes", "bin", "boot", "dev", "etc", "home", "lib", "lib64",
    "media", "mnt", "nix", "opt", "private", "proc", "root", "run", "sbin", "snap", "srv", "sys", "tmp", "usr", "var",
))  # fmt: skip
# Members of details that contain a JSON pointer, not a path.
_POINTERS = frozenset({"pointer", "pointers"})


@cache  # on first use: most commands tell of no failure
def _path() -> re.Pattern[str]:
    try:
        here = {name for name in os.listdir("/") if os.path.isdir(f"/{name}")}
    except OSError:
        here = set[str]()
    names = "|".join(sorted(map(re.escape, _USUAL | here), key=len, reverse=True))
    plain = r"(?:[^\s'\"`,;:)\]}>|]|:(?!\s|\Z))*"
    return re.compile(
        rf"(?<=['\"`])/+(?:{names})/[^'\"`\n]*(?=['\"`])"  # quoted: spaces belong to the path
        rf"|(?:(?<![\w./:~-])|(?<=file:)|(?<=:///))/+(?:{names})/{plain}"
        rf"|(?:(?<![\w./])|(?<=://))~[\w-]*/{plain}"
        rf"|(?<!\w)[A-Za-z]:[\\/](?![\\/]){plain}"
    )


_TRACEBACK = expression(r"\s*Traceback \(most recent call last\).*\Z", re.DOTALL)
_FRAME = expression(r"\s*File \"[^\"\n]*\", line \d+(?:, in \S+)?")


def without_paths(text: str) -> str:
    """Remove paths of this machine and stack traces from a text."""
    if "/" not in text and "\\" not in text and "Traceback" not in text:
        return text
    if "Traceback" in text or ", line " in text:
        text = _FRAME.sub("", _TRACEBACK.sub("", text))
    return _path().sub(MARK, text)


def without_paths_in(value: Any) -> Any:
    """Remove paths of this machine from all texts in some data; returns the same object if there were none.

    Members called `pointer` are left unchanged, because `/etc/0` may be a place in an input. In failures that tools and
    upstreams raise, the gateway removes paths from those too.
    """
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, Mapping):
        members = cast("Mapping[Any, Any]", value)
        cleaned = {
            without_paths(name) if isinstance(name, str) else name: one if name in _POINTERS else without_paths_in(one)
            for name, one in members.items()
        }
        same = all(name in members and one is members[name] for name, one in cleaned.items())
        return members if same else cleaned
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        items_cleaned = [without_paths_in(one) for one in items]
        return items if all(one is before for one, before in zip(items_cleaned, items, strict=True)) else items_cleaned
    return value
