"""The program that sends the messages of one channel with apprise. `services` starts it as a separate process.

Plugins of apprise read answers of any size, use the environment and files of the user, and may never return. They
therefore run here: with an empty environment, limits on memory, files and time, and no connection to an address that
the server has not allowed. The server can end the process at any time.

It reads and writes one JSON object per line:

    <- {"path": […], "url": "…", "private": false, "limit_s": 40}
    -> {"ready": true}                         false: no service of apprise has such a URL
    <- {"title": "…", "text": "…"}
    -> {"lookup": "host"}                      as often as a plugin resolves a name or connects
    <- {"addresses": ["…"]}                    none: it has no address, or one that is not allowed
    -> {"sent": true}

Only the server resolves names, and connections go to the addresses that it returned. This file imports nothing of the
package, so that it starts quickly.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

MEMORY_BYTES = 256 << 20
OPEN_FILES = 64


class Wire:
    """The two pipes to the server."""

    def __init__(self, incoming: IO[str], outgoing: IO[str]) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._lock = threading.Lock()
        self.sending = False

    def read(self) -> dict[str, Any] | None:
        line = self._incoming.readline()
        return cast("dict[str, Any]", json.loads(line)) if line else None

    def write(self, message: dict[str, Any]) -> None:
        self._outgoing.write(json.dumps(message) + "\n")
        self._outgoing.flush()

    def addresses(self, host: str) -> list[str]:
        """Ask the server for the addresses of a host. OSError if there are none that may be connected to."""
        with self._lock:
            if not self.sending:
                raise OSError("no message is being sent")
            self.write({"lookup": host})
            answer = self.read()
        if not answer or not answer["addresses"]:
            raise socket.gaierror(socket.EAI_NONAME, "no address that may be connected to")
        return answer["addresses"]


def bound() -> None:
    """Limit the resources of this process."""
    limits = {"DATA": MEMORY_BYTES, "NOFILE": OPEN_FILES, "CORE": 0, "FSIZE": 0}
    for name, limit in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        except (AttributeError, OSError, ValueError):
            pass  # a platform without this limit


def guard(addresses: Callable[[str], list[str]], *, private: bool) -> None:
    """Let no socket connect or send to an address that was not allowed."""
    allowed: set[str] = set()
    system_lookup = socket.getaddrinfo

    def resolve(host: str) -> list[str]:
        resolved = addresses(host)
        allowed.update(resolved)
        return resolved

    def getaddrinfo(host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:  # noqa: A002 - as the library has it
        if host is None:
            return system_lookup(host, port, family, type, proto, flags)
        infos: list[Any] = []
        for address in resolve(host.decode() if isinstance(host, bytes) else host):
            try:
                infos += system_lookup(address, port, family, type, proto, flags | socket.AI_NUMERICHOST)
            except socket.gaierror:
                continue  # of another family than was asked for
        if not infos:
            raise socket.gaierror(socket.EAI_NONAME, "no address of this family")
        return infos

    def checked(of: socket.socket, address: Any) -> Any:
        if of.family not in (socket.AF_INET, socket.AF_INET6):
            if private:
                return address
            raise PermissionError("sockets of this machine need allow_private")
        host, *rest = address
        return address if host in allowed else (resolve(host)[0], *rest)

    base = cast("Any", socket.socket.__mro__[1])  # the class in C that does the work

    def connect(of: socket.socket, address: Any, /) -> None:
        base.connect(of, checked(of, address))

    def connect_ex(of: socket.socket, address: Any, /) -> int:
        return base.connect_ex(of, checked(of, address))

    def sendto(of: socket.socket, data: Any, *rest: Any) -> int:
        *flags, address = rest
        return base.sendto(of, data, *flags, checked(of, address))

    # Set on the class itself: sockets with TLS derive from it, and libraries have imported it by name.
    patched: Any = socket.socket
    patched.connect, patched.connect_ex, patched.sendto = connect, connect_ex, sendto

    def gethostbyname(host: str) -> str:
        return resolve(host)[0]

    library: Any = socket
    library.getaddrinfo, library.gethostbyname = getaddrinfo, gethostbyname


def _load_plugins(scheme: str) -> None:
    """Load the plugins of apprise that declare a scheme. Loading all 213 takes half a second of processor time.

    Where none declares it, the URL may be one that a service hands out (https://hooks.slack.com/…): apprise then asks
    every plugin, and loads them all itself, as it does where no directory can be made.
    """
    from apprise.manager_plugins import NotificationManager

    plugins = cast("Any", NotificationManager)()
    declares = re.compile(rf"""protocol\s*=\s*(?:\([^)]*)?["']{re.escape(scheme)}["']""".encode())
    sources = [*Path(plugins.module_path).glob("[a-z]*.py"), *Path(plugins.module_path).glob("[a-z]*/*.py")]
    names = {path.relative_to(plugins.module_path).parts[0] for path in sources if declares.search(path.read_bytes())}
    try:
        # apprise imports the plugins that the entries of a directory are named after. The place is given: to find one,
        # `tempfile` writes a file to each, and this process may write none.
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            for name in names:
                (Path(directory) / name).touch()
            if names:
                plugins.load_modules(path=directory, name=plugins.module_name_prefix)
    except OSError:
        return


def open_url(url: str) -> Any:
    """Set up apprise for one URL: nothing read from or written to disk, no redirects. None if no service matches."""
    import apprise as library

    apprise = cast("Any", library)  # its own types are incomplete
    asset = apprise.AppriseAsset(
        storage_mode="memory",
        service_timeout=0,  # no thread of its own; the server ends this process
        app_id="Interlock",
        async_mode=False,
        http_redirects=False,
        pgp_autogen=False,
        pem_autogen=False,
    )
    _load_plugins(url.partition("://")[0].lower())
    service = apprise.Apprise.instantiate(url, asset=asset)
    if service is None:
        return None
    service.redirects = False  # whatever the URL says
    opened = apprise.Apprise(asset=asset)
    opened.add(service)
    return opened


def serve(wire: Wire) -> None:
    """Open the URL and send messages until the server closes its end."""
    order = wire.read()
    if order is None:
        return
    sys.path[:] = order["path"]
    signal.alarm(order["limit_s"])
    service = open_url(order["url"])
    guard(wire.addresses, private=order["private"])
    wire.write({"ready": service is not None})
    while service is not None and (message := wire.read()):
        signal.alarm(order["limit_s"])  # in case the server died; the default action ends this process
        wire.sending = True
        try:
            sent = bool(service.notify(message["text"], message["title"], "warning", "text"))
        except Exception:  # noqa: BLE001 - a plugin's fault or its memory limit; its words may hold the address
            sent = False
        wire.sending = False
        wire.write({"sent": sent})


def main() -> None:
    """Keep the two pipes, close everything that a plugin could print to, and serve."""
    wire = Wire(os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # output of a plugin may contain the address
        os.dup2(nothing, descriptor)
    logging.disable()
    bound()
    serve(wire)


if __name__ == "__main__":
    main()
