"""The inside of a call that another program isolated: confines itself further, then serves the one request.

Bubblewrap has made the namespaces and the root. As root it left us two capabilities, to change user; they are dropped
here.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from interlock.executors.sandbox import filter as seccomp
from interlock.executors.sandbox import linux, runner
from interlock.executors.sandbox.confine import Bonds, address_space, confine, limit_in_container

Json = dict[str, Any]


def become(config: Json, argv: list[str]) -> None:
    """Execute another program in a namespace where files of root in some directories belong to the
    user of the sandbox.
    """
    try:
        ids = linux.namespace_of_ids(0, config["uid"])
        linux.unshare(linux.NEWNS)
        linux.mount(None, "/", None, linux.REC | linux.PRIVATE)
        for directory in config["directories"]:
            linux.bind_writable(directory, directory, ids)
        os.execv(argv[0], argv)  # noqa: S606 - our own words and configured paths
    except OSError as error:
        os.write(2, str(error).encode())
        os._exit(1)


def serve(config: Json, control: socket.socket) -> None:
    try:
        os.dup2(control.detach(), 3)
        control = socket.socket(fileno=3)
        linux.close_from(4)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        if os.getuid() == 0:
            os.setgroups([])
            linux.drop_bounding_set()
            os.setresgid(config["uid"], config["uid"], config["uid"])
            os.setresuid(config["uid"], config["uid"], config["uid"])
            linux.set_dumpable(True)
        tier, metered = config["tier"], config["metered"]
        bonds = Bonds(
            metered=metered,
            landlock=linux.landlock_version(),
            programs={tier: seccomp.build(tier, metered=metered, recording=True)},
            address_space=address_space(),
            writable=tuple(config["writable"]),
        )
        confine(bonds, tier, config["limits"], control, None)
    except BaseException as error:  # noqa: BLE001 - a bond that does not hold: nothing is run
        control.sendall(b"E" + f"{type(error).__name__}: {error}".encode()[:2000])
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    runner.serve(control)
    os._exit(0)


class _Standard:
    """A socket behind a descriptor that supports no other operations."""

    def recv(self, size: int) -> bytes:
        return os.read(3, size)

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[os.write(3, data) :]


def serve_contained(config: Json) -> None:
    """The same where another kernel confines us: only the limits are set here."""
    os.dup2(0, 3)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    limit_in_container(config["limits"], writes=config["writes"])
    control = _Standard()
    control.sendall(b"R")
    runner.serve(control)
    os._exit(0)
