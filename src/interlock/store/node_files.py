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
from typing import Any, cast

import orjson

from interlock._version import __version__
from interlock.core.record import NamedTuple
from interlock.store.home import Home
from interlock.store.schema_version import SCHEMA_HEAD

_PLAIN = ("policy.cedar", "principals.toml", "keys/secrets.key", "keys/cursor.key")


class Difference(NamedTuple):
    """A file that a process has in another form than this data directory."""

    file: str
    machine: str
    directory: str


def describe(home: Home) -> dict[str, Any]:
    """Describe a data directory for other processes: machine, path, version, file digests ("" if it is missing)."""
    where = {"machine": platform.node(), "directory": str(home.path.absolute())}
    return {**where, "version": __version__, "files": _digests(home)}


def differences(home: Home) -> list[Difference]:
    """The files of living processes that are not as in this data directory."""
    here = describe(home)
    found = {
        Difference(file, str(report.get("machine")), str(report.get("directory")))
        for _, report in home.signs_of_life()
        if (report.get("machine"), report.get("directory")) != (here["machine"], here["directory"])
        for file, digest in _files(report)
        if here["files"].get(file, digest) != digest
    }
    return sorted(found)


class Node(NamedTuple):
    """A data directory that processes use, and what they say that they run."""

    machine: str
    directory: str
    here: bool
    processes: int
    versions: tuple[str, ...]
    schemas: tuple[str, ...]
    # Whether a process of it was started with other settings than are in force by now.
    restart: bool
    files: dict[str, str]


def nodes(home: Home) -> list[Node]:
    """The data directories on a store: this one first, and each that a living process uses."""
    here = describe(home)
    reports: dict[tuple[str, str], list[dict[str, Any]]] = {(here["machine"], here["directory"]): []}
    for _, report in home.signs_of_life():
        if "directory" in report:
            reports.setdefault((str(report.get("machine")), str(report["directory"])), []).append(report)
    own, *others = reports.items()
    mine = Node(
        *own[0], True, home.alive() if home.near else len(own[1]), *_running([here, *own[1]]), files=here["files"]
    )
    return [
        mine,
        *(Node(*at, False, len(reported), *_running(reported), dict(_files(reported[-1]))) for at, reported in others),
    ]


def _running(reports: list[dict[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The versions of the processes of a directory, the schemas that they know, and whether one has to be restarted."""
    versions = {str(report["version"]) for report in reports if "version" in report}
    schemas = {str(report.get("schema", SCHEMA_HEAD)) for report in reports}
    return tuple(sorted(versions)), tuple(sorted(schemas)), any(report.get("restart") is True for report in reports)


def compare(nodes: list[Node]) -> dict[str, dict[str, list[str]]]:
    """Return what differs between nodes, by name: each value, with the data directories that have it."""
    names = {name for node in nodes for name in node.files}
    values = {name: [(node.files.get(name, ""), node) for node in nodes] for name in sorted(names)}
    values["version"] = [(version, node) for node in nodes for version in node.versions]
    values["schema"] = [(schema, node) for node in nodes for schema in node.schemas]
    different: dict[str, dict[str, list[str]]] = {}
    for name, pairs in values.items():
        if len({value for value, _ in pairs}) > 1:
            groups = different.setdefault(name, {})
            for value, node in pairs:
                groups.setdefault(value, []).append(f"{node.machine}:{node.directory}")
    return different


def _files(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    files = report.get("files")
    if isinstance(files, dict):
        yield from cast("dict[str, str]", files).items()


def _digests(home: Home) -> dict[str, str]:
    found = {name: _digest(_read(home, name)) for name in _PLAIN}
    found["settings.toml"] = _digest(common_settings(_read(home, "settings.toml")))
    # The public halves are in the names.
    issuer = sorted(path.name for path in (home.keys / "issuer").glob("*.pem"))
    return {**found, "keys/issuer": _digest(" ".join(issuer).encode())}


def _read(home: Home, name: str) -> bytes:
    if home.shared is not None and name in home.shared.files:
        return home.shared.files[name].encode()  # the file does not count
    try:
        return (home.path / name).read_bytes()
    except OSError:
        return b""


def common_settings(text: bytes) -> bytes:
    """The settings that all machines have to share, in one form, whatever their order and comments."""
    # The models of settings are loaded with it, which only stores of several machines need.
    from interlock.store.shared_settings import OF_A_MACHINE

    try:
        settings = tomllib.loads(text.decode())
    except ValueError:
        return text
    common = {name: value for name, value in settings.items() if name not in OF_A_MACHINE}
    return orjson.dumps(common, option=orjson.OPT_SORT_KEYS, default=str) if common else b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(b"interlock node file" + content).hexdigest()[:32] if content else ""
