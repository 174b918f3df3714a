"""The process that every Python call is forked from: isolated, without rights, with the vetted modules loaded.

`launch` runs in a new interpreter with an empty environment. It leaves the host (namespaces, a root of its own, another
user, no capabilities) and becomes the first process of its own process namespace. From then on it does three things:
fork a child when the supervisor asks for one, hand its descriptor over, and report how it ended. The report travels on
a socket that no child ever holds: it is the evidence.

A child enters namespaces of its own and applies the remaining restrictions in a fixed order, see `_confine`. Then it
waits for its one request. Nothing that it runs is ever imported here, so no call can leave anything behind for the
next.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, cast

from interlock.executors.sandbox import filter as seccomp
from interlock.executors.sandbox import linux, root, runner
from interlock.executors.sandbox.confine import Bonds, address_space, confine, listen_inside

Json = dict[str, Any]

_INODES = 16_384
_SETUP_FAILED = 120
_DESCRIPTORS = 4
_OTHER = linux.NEWNS | linux.NEWPID | linux.NEWNET | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP


def launch(config: Json, control: socket.socket) -> None:
    """Leave the host and serve. Never returns."""
    try:
        _leave(config)
        _serve(config, control)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor must hear why nothing will run
        control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
    os._exit(1)


def _leave(config: Json) -> None:
    linux.die_with_parent()
    if os.getppid() != config["parent"]:
        os._exit(1)  # the parent ended before the death signal was set
    os.setsid()
    linux.close_from(3)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uid, gid = os.getuid(), os.getgid()
    # Files in a writable mount must belong to the server's user, whatever user the sandbox has.
    ids = linux.namespace_of_ids(uid, config["uid"]) if uid == 0 and _writable(config) else None
    spaces = linux.NEWNS | linux.NEWPID | linux.NEWIPC if config["open"] else _OTHER
    linux.unshare(spaces if uid == 0 else spaces | linux.NEWUSER)
    if uid != 0:
        linux.map_own_user(root.USER, uid, gid)
    first = os.fork()
    if first:
        # The launcher's only remaining task is to be the parent that the first process dies with.
        os.dup2(1, 0)
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    linux.die_with_parent()
    if config["open"]:
        root.stay()
        return
    socket.sethostname("sandbox")
    root.build(config["readable"], config["mounts"], metered=config["metered"], ids=ids)
    if ids is not None:
        os.close(ids)
    _find_again(config["paths"])
    if uid == 0:
        os.setgroups([])
        linux.drop_bounding_set()
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
        linux.set_dumpable(True)  # the change of user took our own /proc/self from us
        linux.die_with_parent()
    linux.drop_capabilities()
    linux.no_new_privileges()


def _writable(config: Json) -> tuple[str, ...]:
    return tuple(inside for _, inside, writable in config["mounts"] if writable)


def _find_again(paths: Sequence[str]) -> None:
    """Look for modules at their places inside, also for the rest of packages that were begun outside."""
    moved = {path: root.inside(path) for path in paths if root.inside(path) != path}
    if not moved:
        return
    sys.path[:] = [moved.get(path, path) for path in sys.path]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        places = getattr(module, "__path__", None)
        if isinstance(places, list):
            places[:] = [root.inside(place) for place in cast("list[str]", places)]


class _Zygote:
    """Shared by the children: the restrictions, prepared once, and the facts of this process."""

    def __init__(self, config: Json) -> None:
        self.open: bool = config["open"]
        # At tier 3 the host's files stay where they are; modules that are found in /tmp must not be hidden.
        self.lives_in_tmp = self.open and any(root.inside(path) != path for path in config["paths"])
        self.bonds = Bonds(
            metered=config["metered"],
            landlock=0 if self.open else linux.landlock_version(),
            programs={
                tier: seccomp.build(tier, metered=config["metered"], recording=True)
                for tier in ((3,) if self.open else (0, 1, 2))
            },
            address_space=address_space(),
            writable=() if self.open else _writable(config),
        )
        self.uid, self.gid = os.getuid(), os.getgid()
        # As root, tier 3 keeps the host's own user namespace, because files of every owner must be accessible.
        self.spaces = linux.NEWNS | linux.NEWPID | (0 if self.open and self.uid == 0 else linux.NEWUSER)
        self.null = os.open("/dev/null", os.O_RDWR)


def _serve(config: Json, control: socket.socket) -> None:
    for module in config["vetted"]:
        importlib.import_module(module)
    zygote = _Zygote(config)
    for _ in range(20):
        runner.warm()
    gc.collect()
    gc.disable()
    gc.freeze()
    control.send(json.dumps({"landlock": zygote.bonds.landlock}).encode())
    running: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != control.fileno():
                poll.unregister(descriptor)
                _report(descriptor, *running.pop(descriptor))
                continue
            request, handed, _, _ = socket.recv_fds(control, 1 << 16, 8)
            if not request:
                os._exit(0)  # the supervisor is gone, and every process ends with the first one
            born = _bear(zygote, json.loads(request), handed)
            if born is not None:
                running[born[0]] = born[1:]
                poll.register(born[0], select.POLLIN)


def _bear(zygote: _Zygote, spec: Json, handed: list[int]) -> tuple[int, int, socket.socket] | None:
    """Fork the requested child and hand out its descriptor, and that of its mounts."""
    theirs, out, err, evidence = handed
    status = socket.socket(fileno=evidence)
    try:
        pid, pidfd = linux.fork_into(zygote.spaces | (linux.NEWNET if spec["tier"] == 2 else 0))
    except OSError as error:
        status.send(json.dumps({"failed": str(error)}).encode())
        for descriptor in (theirs, out, err):
            os.close(descriptor)
        status.close()
        return None
    if pid == 0:
        control = socket.socket(fileno=theirs)
        try:
            control = _confine(zygote, spec, control, out, err)
            runner.serve(control)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - a bond that does not hold: nothing is run
            control.sendall(b"E" + f"{type(error).__name__}: {error}".encode()[:2000])
        os._exit(_SETUP_FAILED)
    for descriptor in (theirs, out, err):
        os.close(descriptor)
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    socket.send_fds(status, [b"{}"], [pidfd, mounts])
    os.close(mounts)
    return pidfd, pid, status


def _report(pidfd: int, pid: int, status: socket.socket) -> None:
    _, ended, used = os.wait4(pid, 0)
    os.close(pidfd)
    cpu_ns = int((used.ru_utime + used.ru_stime) * 1e9)
    try:
        evidence = {"status": ended, "cpu_ns": cpu_ns, "max_rss": used.ru_maxrss * 1024}
        status.send(json.dumps(evidence).encode())
    except OSError:
        pass  # the supervisor has ended
    status.close()


def _confine(zygote: _Zygote, spec: Json, control: socket.socket, out: int, err: int) -> socket.socket:
    """Leave the zygote for new namespaces, then apply every restriction. When this returns, anything may be run.

    A session of its own comes first: process groups cross process namespaces, and kill(0) would reach other calls.
    Mounts come while there still are capabilities, limits once the process has entered the cgroup it is given.
    """
    linux.die_with_parent()
    os.setsid()
    if zygote.spaces & linux.NEWUSER:
        linux.map_own_user(root.USER, zygote.uid, zygote.gid)
    size = f"size={spec['limits']['tmp_bytes']},nr_inodes={_INODES},mode=1777"
    if not zygote.lives_in_tmp:
        linux.mount("tmp", "/tmp", "tmpfs", linux.NOSUID | linux.NODEV, size)  # noqa: S108 - inside
    linux.mount("proc", "/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC, "subset=pid")
    for descriptor, standard in ((zygote.null, 0), (out, 1), (err, 2), (control.fileno(), 3)):
        os.dup2(descriptor, standard)
    control.detach()
    linux.close_from(4)
    control = socket.socket(fileno=3)
    inside = listen_inside() if spec["tier"] == 2 else None
    go, ways_in, _, _ = socket.recv_fds(control, 1, _DESCRIPTORS)
    if go != b"G":
        os._exit(0)
    for way_in in ways_in:
        os.write(way_in, b"0")  # whichever process writes it
        os.close(way_in)
    confine(zygote.bonds, spec["tier"], spec["limits"], control, inside)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Touch what every call touches now, while nothing waits for it.
    runner.warm()
    gc.enable()
    return control
