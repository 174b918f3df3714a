"""Files of a data directory that have to be the same on every machine of a store, and which machine has others.

The store is shared, but policy, principals, settings and keys are files of each data directory. Every process tells the
digests of its files with its sign of life. `interlock doctor` and `/ready` name files that differ; nothing is
refused for it, because a new policy reaches one machine before the other.
"""

from __future__ import annotations

import hashlib
import platform
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import orjson

from interlock.store.home import Home

# Settings of one machine: where things are there, and what it logs.
_OF_A_MACHINE = frozenset(
    {
        "store", "store_admin", "backup_to", "policy_token_file", "vault_token_file", "otlp_endpoint", "log_format",
        "log_level", "housekeeping",
    }
)  # fmt: skip
_PLAIN = ("policy.cedar", "principals.toml", "keys/secrets.key", "keys/cursor.key")


class Difference(NamedTuple):
    """A file that a process has in another form than this data directory."""

    file: str
    machine: str
    directory: str


def describe(home: Home) -> dict[str, Any]:
    """Describe a data directory for other processes: machine, path, and a digest per file ("" if it is missing)."""
    return {"machine": platform.node(), "directory": str(home.path.absolute()), "files": _digests(home)}


def differences(home: Home) -> list[Difference]:
    """The files of living processes that are not as in this data directory."""
    here = describe(home)
    found = {
        Difference(file, str(told.get("machine")), str(told.get("directory")))
        for _, told in home.signs_of_life()
        if (told.get("machine"), told.get("directory")) != (here["machine"], here["directory"])
        for file, digest in _files(told)
        if here["files"].get(file, digest) != digest
    }
    return sorted(found)


def _files(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    files = told.get("files")
    if isinstance(files, dict):
        yield from cast("dict[str, str]", files).items()


def _digests(home: Home) -> dict[str, str]:
    found = {name: _digest(_read(home, name)) for name in _PLAIN}
    found["settings.toml"] = _digest(_common_settings(_read(home, "settings.toml")))
    # The public halves are in the names.
    issuer = sorted(path.name for path in (home.keys / "issuer").glob("*.pem"))
    return {**found, "keys/issuer": _digest(" ".join(issuer).encode())}


def _read(home: Home, name: str) -> bytes:
    try:
        return (home.path / name).read_bytes()
    except OSError:
        return b""


def _common_settings(text: bytes) -> bytes:
    """The settings that all machines have to share, in one form, whatever their order and comments."""
    try:
        settings = tomllib.loads(text.decode())
    except ValueError:
        return text
    common = {name: value for name, value in settings.items() if name not in _OF_A_MACHINE}
    return orjson.dumps(common, option=orjson.OPT_SORT_KEYS, default=str) if common else b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(b"interlock node file" + content).hexdigest()[:32] if content else ""
