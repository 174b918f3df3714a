"""Files of a data directory that have to be the same on every machine of a store, and which machine has others.

The store is shared, but policy, principals, settings and keys are files of each data directory, and so are the code of
hooks, the key sets of other issuers, manifests of Python functions and trained routers. Every process tells the digests
of its files with its sign of life. `interlock doctor` and `/ready` name files that differ; nothing is refused for it,
because a new policy reaches one machine before the other.

INVARIANT: describing raises nothing, whatever the files hold: the thread that renews a lease does it every few seconds.
"""

from __future__ import annotations

import hashlib
import platform
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
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
    where = {"machine": platform.node(), "directory": _directory(home)}
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
    settings = _read(home, "settings.toml")
    found["settings.toml"] = _digest(common_settings(settings))
    # The public halves are in the names.
    issuer = sorted(path.name for path in _in(home.keys / "issuer", "*.pem"))
    found["keys/issuer"] = _digest(_words(" ".join(issuer)).encode())
    found["manifests"] = _digest_of_all(_in(home.manifests, "*"), _manifest_digest)
    found["selection"] = _digest_of_all(_in(home.path / "selection", "router-*"), _file_digest)
    return {**{name: _cached(path, _file_digest) for name, path in _named(home, settings)}, **found}


def _directory(home: Home) -> str:
    try:
        return _words(str(home.path.absolute()))
    except OSError:  # the working directory was removed
        return _words(str(home.path))


def _in(directory: Path, pattern: str) -> list[Path]:
    """The files of a directory; none where it cannot be read."""
    try:
        return list(directory.glob(pattern))
    except OSError:
        return []


def _words(name: str) -> str:
    """A name of a file as text that can be encoded: the bytes of another encoding than UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def _named(home: Home, settings: bytes) -> Iterator[tuple[str, Path | None]]:
    """The files that settings name: code of hooks and of the counter of tokens, and key sets of other issuers."""
    try:
        stated = tomllib.loads(settings.decode())
    except (ValueError, RecursionError):
        return
    runs = [*_members(stated.get("hooks"), "run"), stated.get("counter")]
    for where in (run.rpartition(":")[0] for run in runs if isinstance(run, str)):
        if where.endswith(".py"):
            yield where, home.path / where
        elif where:
            yield where, _module(where)
    for jwks in _members(stated.get("trusted_issuers"), "jwks"):
        if "://" not in jwks:
            yield jwks, home.named(jwks)


def _module(name: str) -> Path | None:
    from interlock.contract.pinned_source import module_file  # few settings name a module

    try:
        located = module_file(name)
    except (ImportError, OSError, RuntimeError, ValueError):
        return None
    return None if located is None else located[0]


def _members(entries: Any, name: str) -> Iterator[str]:
    """The texts of one name in a list of tables."""
    for entry in cast("list[Any]", entries) if isinstance(entries, list) else ():
        text = cast("dict[str, Any]", entry).get(name) if isinstance(entry, dict) else None
        if isinstance(text, str) and text:
            yield text


def _digest_of_all(paths: Iterable[Path], digest_of: Callable[..., str]) -> str:
    """One digest of some files of a directory, with their names; empty if there are none."""
    found = {path.name: _cached(path, digest_of) for path in paths if not path.name.startswith(".")}
    return _digest(_words(" ".join(f"{name} {digest}" for name, digest in sorted(found.items()) if digest)).encode())


def _cached(path: Path | None, digest_of: Callable[..., str]) -> str:
    """The digest of a file, which is read again when it was changed; empty if it cannot be read."""
    try:
        status = None if path is None else path.stat()
        # A pipe or a device would let the reader wait.
        if path is None or status is None or not stat.S_ISREG(status.st_mode):
            return ""
        return digest_of(path, (status.st_mtime_ns, status.st_size, status.st_ino))
    except (OSError, ValueError):
        return ""


@lru_cache(maxsize=1024)
def _file_digest(path: Path, seen: tuple[int, ...]) -> str:
    return _digest(path.read_bytes())


@lru_cache(maxsize=1024)
def _manifest_digest(path: Path, seen: tuple[int, ...]) -> str:
    """The digest of a manifest that each machine needs as a file; empty for one of which all is in the store.

    Manifests that come through an endpoint are JSON. Others were put here by hand, and always count.
    """
    from interlock.contract.executors import kind_of

    content = path.read_bytes()
    try:
        document: Any = orjson.loads(content)
        needed = document.get("sandbox") is None and kind_of(document["execution"].get("kind", "function")).in_process
    except (ValueError, AttributeError, LookupError, TypeError):
        needed = True  # it is no manifest that the store could have
    return _digest(content) if needed else ""


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
        common = {name: value for name, value in settings.items() if name not in OF_A_MACHINE}
        return orjson.dumps(common, option=orjson.OPT_SORT_KEYS, default=str) if common else b""
    except (ValueError, TypeError, RecursionError):  # no TOML, a number of more than 64 bits, or too deep
        return text


def _digest(content: bytes) -> str:
    return hashlib.sha256(b"interlock node file" + content).hexdigest()[:32] if content else ""
