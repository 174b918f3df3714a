"""The file system of sandboxed code: programs and libraries, read-only, and nothing else of the host.

A small tmpfs becomes the root. It contains, at their own paths, the directories that hold programs and modules; the
inputs of the call below `/in`; the directories that it may write to, at their own paths; five harmless devices; and an
`/etc` with the few files that libraries look for. Then the host's tree is detached and the root is made read-only.
`/tmp` is empty here: every call mounts its own over it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from interlock.executors.sandbox import linux

USER = 1000  # the one user there is inside

LINKED = ("bin", "sbin", "lib", "lib32", "lib64")
FROM_ETC = ("ld.so.cache", "alternatives", "localtime", "ssl/certs", "ssl/openssl.cnf")
OWN_ETC = {
    "passwd": f"tool:x:{USER}:{USER}::/tmp:/bin/sh\n",
    "group": f"tool:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "shm": "/tmp",  # noqa: S108 - inside
}
_HOST, _STAGE = "/host", "/tmp"  # noqa: S108 - a mount point that every system has; hidden only in this namespace


def inside(path: str) -> str:
    """Return where a directory of the host is found inside: at its own path, unless the call's own files are there."""
    return f"/opt/host{path}" if path == "/tmp" or path.startswith("/tmp/") else path  # noqa: S108


def build(readable: Sequence[str], mounts: Sequence[tuple[str, str, bool]], *, metered: bool, ids: int | None) -> None:
    """Make and enter the root. Needs a mount namespace of its own and the right to mount in it.

    `mounts`: paths of the host, where each is found inside, and whether it is writable. `ids`: translates the owners of
    files in writable ones. `metered`: memory is counted by a cgroup. Without one there is no `/dev/zero`, because its
    mapped pages belong to no process.
    """
    os.umask(0o022)
    linux.mount(None, "/", None, linux.REC | linux.PRIVATE)
    linux.mount("sandbox", _STAGE, "tmpfs", linux.NOSUID | linux.NODEV, "size=1m,nr_inodes=1k,mode=755")
    os.mkdir(_STAGE + _HOST)
    linux.pivot_root(_STAGE, _STAGE + _HOST)
    os.chdir("/")
    for path in outermost(readable):
        _bind(path, inside(path))
    for name in LINKED:
        _link_or_bind("/" + name)
    _fill_etc()
    _fill_dev(_DEVICES if metered else tuple(one for one in _DEVICES if one != "zero"))
    for host, wanted, writable in mounts:
        if writable:
            os.makedirs(wanted, exist_ok=True)
            linux.bind_writable(_HOST + host, wanted, ids)
        else:
            _bind(host, wanted)
    for directory in ("/in", "/proc", "/tmp"):  # noqa: S108 - inside
        os.makedirs(directory, exist_ok=True)
    # The kernel lets an ordinary user mount a new /proc only while a whole one is visible.
    linux.mount("proc", "/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC)
    linux.detach(_HOST)
    os.rmdir(_HOST)
    linux.restrict_mount("/", linux.RDONLY | linux.NOSUID, recursive=False)


def stay() -> None:
    """Keep the host's files, as tier 3 allows; only processes are isolated."""
    linux.mount(None, "/", None, linux.REC | linux.PRIVATE)
    linux.mount("proc", "/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC)


def outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that lie in none of the others."""
    outer: list[str] = []
    for path in sorted(set(paths)):
        if not any(path == one or path.startswith(one.rstrip("/") + "/") for one in outer):
            outer.append(path)
    return outer


def _bind(host: str, inside: str) -> None:
    source = _HOST + host
    if os.path.isdir(source):
        os.makedirs(inside, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o444))
    linux.mount(source, inside, None, linux.BIND | linux.REC)
    linux.restrict_mount(inside, linux.RDONLY | linux.NOSUID | linux.NODEV)


def _link_or_bind(path: str) -> None:
    source = _HOST + path
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
    elif os.path.isdir(source):
        _bind(path, path)


def _fill_etc() -> None:
    os.makedirs("/etc", exist_ok=True)
    for name in FROM_ETC:
        if os.path.exists(f"{_HOST}/etc/{name}"):
            _bind(f"/etc/{name}", f"/etc/{name}")
    for name, content in OWN_ETC.items():
        with open(f"/etc/{name}", "w") as file:
            file.write(content)


def _fill_dev(devices: Sequence[str]) -> None:
    os.makedirs("/dev", exist_ok=True)
    for name in devices:
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        linux.mount(f"{_HOST}/dev/{name}", f"/dev/{name}", None, linux.BIND)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{name}")
