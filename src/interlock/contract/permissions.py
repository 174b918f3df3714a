"""Required permissions: each has one meaning, worked out once from a tool's manifest.

| permission               | meaning                                                                             |
|--------------------------|-------------------------------------------------------------------------------------|
| `filesystem:read:PATH`   | PATH and what lies below it: mounted at `/in/PATH` in a sandbox; paths in arguments |
|                          | must lie there                                                                      |
| `filesystem:write:PATH`  | as above, and files below it may change: mounted writable at PATH in a sandbox      |
| `network:URL`            | one host and port, through the egress proxy of a sandbox                            |
| `database:ENGINE:MODE`   | the credential `database/ENGINE/MODE`, and whether a watched database may change    |
| `credential:NAME`        | a lease of that credential; `credentials:NAME` is the same                          |

A permission says what a tool may use. Other parts of the manifest that say the same (`sandbox.reads`,
`network_policy`) hold as well: a tool gets what both allow where both speak.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Literal
from urllib.parse import urlsplit

from interlock.core.expressions import expression
from interlock.core.record import dataclass

Mode = Literal["read", "write"]
FAMILIES = ("filesystem", "network", "database", "credential")
# Databases whose changes a watcher can detect, and those that need no credential.
WATCHED_ENGINES = ("sqlite", "postgres")
WITHOUT_CREDENTIAL = ("sqlite",)

_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_ENGINE = expression(r"[a-z][a-z0-9_]{0,62}\Z")
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = expression(rf"(\*\.)?({_LABEL}\.)*{_LABEL}\Z", re.ASCII)
_ADDRESS = expression(r"[0-9a-f:.]+\Z")


@dataclass(frozen=True, slots=True)
class Permission:
    """One parsed permission. `target` is a path, `host:port`, an engine or the name of a credential."""

    family: Literal["filesystem", "network", "database", "credential"]
    target: str
    mode: Mode = "read"

    @property
    def resource(self) -> str:
        """The resource that a token with resources must cover for a caller to use this permission."""
        match self.family:
            case "filesystem":
                return f"file:{self.target}/*"
            case "network":
                return f"host:{self.target}"
            case "database":
                return f"database:{self.target}:{self.mode}"
            case "credential":
                return f"credential:{self.target}"

    def includes(self, other: Permission) -> bool:
        """Whether this permission includes everything that another one allows."""
        if self.family != other.family or (self.mode, other.mode) == ("read", "write"):
            return False
        return self.target == other.target or (self.family == "filesystem" and is_below(other.target, self.target))


def read(text: str) -> Permission:
    """Parse a permission; ValueError with the fault."""
    family, _, rest = text.partition(":")
    match family:
        case "filesystem":
            mode, _, path = rest.partition(":")
            return Permission("filesystem", _path(path), _mode(mode, "filesystem:read:/srv/data"))
        case "network":
            return Permission("network", _host_and_port(rest))
        case "database":
            engine, _, mode = rest.partition(":")
            if not _ENGINE.match(engine):
                raise ValueError(f"`{engine}` is not the name of a database engine: write database:postgres:read")
            return Permission("database", engine, _mode(mode, f"database:{engine}:read"))
        case "credential" | "credentials":
            return Permission("credential", rest)
        case _:
            raise ValueError(f"the family `{family}` is not known; known are {', '.join(FAMILIES)}")


def _mode(mode: str, example: str) -> Mode:
    if mode not in ("read", "write"):
        raise ValueError(f"the mode `{mode}` is neither read nor write: write {example}")
    return mode


def _path(path: str) -> str:
    normal = posixpath.normpath(path) if path.startswith("/") else ""
    if not normal or normal in ("/", "//") or path.rstrip("/") != normal:
        raise ValueError(f"`{path}` is not the absolute path of a file or directory, written without `.` and `..`")
    if set(path) & set("*?[\\\0"):
        raise ValueError(f"`{path}` holds a wildcard; a path stands for all that lies below it")
    return normal


def _host_and_port(text: str) -> str:
    example = "write network:https://api.example.com"
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", url.port or _PORTS.get(url.scheme)
    except ValueError:
        raise ValueError(f"`{text}` is not a URL: {example}") from None
    if not url.scheme or not (_HOST.match(host) or (":" in host and _ADDRESS.match(host))):
        raise ValueError(f"`{text}` is not a URL with a host: {example}")
    if port is None:
        raise ValueError(f"`{text}` has no port, and {url.scheme} has none of its own: write it out")
    if url.path not in ("", "/") or url.query or url.fragment or "@" in url.netloc:
        raise ValueError(f"`{text}` says more than a host and port, which is all that egress rules see: {example}")
    return f"{host}:{port}"


def names_host(domain: str, host: str) -> bool:
    """Whether a listed domain, with `*.` or without, covers a host."""
    return host.endswith(domain[1:].lower()) if domain.startswith("*.") else domain.lower() == host


def is_below(path: str, root: str) -> bool:
    """Whether a path is a root or lies below it. Both are in normal form."""
    return path == root or path.startswith(root.rstrip("/") + "/")


# Directories of the sandbox itself: no directory of the host is mounted there.
_OWN_PLACES = (
    "/bin", "/dev", "/etc", "/in", "/lib", "/lib32", "/lib64", "/opt/host", "/proc", "/sbin", "/sys", "/usr",
    "/tmp",  # noqa: S108 - every call has its own
)  # fmt: skip


def own_place(path: str) -> str | None:
    """Return the sandbox directory that a path lies in or above; None if it lies beside all of them."""
    return next((one for one in _OWN_PLACES if is_below(path, one) or is_below(one, path)), None)


@dataclass(frozen=True, slots=True)
class Permissions:
    """Everything that a tool may use according to its permissions."""

    listed: tuple[Permission, ...] = ()
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hosts: tuple[tuple[str, int], ...] = ()
    databases: Mapping[str, Mode] = field(default_factory=dict[str, Mode])
    credentials: tuple[str, ...] = ()

    @property
    def only_readable(self) -> tuple[str, ...]:
        """The paths that may be read and not written to."""
        return tuple(path for path in self.readable if path not in self.writable)


NOTHING = Permissions()


def permissions_of(texts: Iterable[str] | None) -> Permissions:
    """Read the permissions of a manifest. An unreadable one allows nothing: admission refuses it."""
    permissions = [one for text in texts or () if (one := _readable(text)) is not None]
    if not permissions:
        return NOTHING
    outer = outermost(permissions)
    of = {family: [one for one in outer if one.family == family] for family in FAMILIES}
    databases: dict[str, Mode] = {one.target: one.mode for one in of["database"]}
    lent = [one.target for one in of["credential"]]
    lent += [f"database/{engine}/{mode}" for engine, mode in databases.items() if engine not in WITHOUT_CREDENTIAL]
    return Permissions(
        listed=outer,
        readable=tuple(one.target for one in of["filesystem"]),
        writable=tuple(one.target for one in of["filesystem"] if one.mode == "write"),
        hosts=tuple((host, int(port)) for host, _, port in (one.target.rpartition(":") for one in of["network"])),
        databases=databases,
        credentials=tuple(lent),
    )


def _readable(text: str) -> Permission | None:
    try:
        return read(text)
    except ValueError:
        return None


def outermost(permissions: Iterable[Permission]) -> tuple[Permission, ...]:
    """Return the permissions that no other one includes, each once, in the order in which they are listed."""
    listed = list(dict.fromkeys(permissions))
    return tuple(one for one in listed if not any(other != one and other.includes(one) for other in listed))


def faults(texts: Iterable[str]) -> Iterator[str]:
    """List the faults that prevent permissions from being admitted."""
    for text in texts:
        try:
            read(text)
        except ValueError as error:
            yield f"`{text}`: {error}"


def warnings(texts: Iterable[str]) -> Iterator[str]:
    """List warnings for an author about permissions that are admitted."""
    seen: list[tuple[str, Permission]] = []
    for text in texts:
        one = _readable(text)
        if one is None:
            continue
        for other, known in seen:
            if known.includes(one):
                yield f"the permission `{text}` is part of `{other}`"
            elif one.includes(known):
                yield f"the permission `{other}` is part of `{text}`"
        seen.append((text, one))
        if one.family == "database" and one.target not in WATCHED_ENGINES:
            yield f"no watcher sees changes in {one.target}: `{text}` is held to its mode by its credential alone"
