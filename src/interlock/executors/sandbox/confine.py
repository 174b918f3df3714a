"""The restrictions that a process applies to itself, in its namespaces and before it runs anything it was given."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from typing import Any

from interlock.core.record import dataclass
from interlock.executors.sandbox import linux
from interlock.executors.sandbox.filter import no_messages, plain_files

Json = dict[str, Any]

PROXY = ("127.0.0.1", 3128)
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108
_THROUGH_PROXY = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), f"http://{PROXY[0]}:{PROXY[1]}"
)
_PROCESSES = 65_536
_OPEN_FILES = 256
_STACK = 8 << 20
_SIGNALS = 1024
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41


@dataclass(frozen=True, slots=True, kw_only=True)
class Bonds:
    """Restrictions that are the same for every process of one maker: prepared once, applied to many."""

    metered: bool
    landlock: int
    programs: dict[int, bytes]
    address_space: int
    writable: tuple[str, ...] = ()  # directories of the host, by their places inside


def address_space() -> int:
    """The memory that this process has mapped so far: a memory limit must leave room for it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def confine(bonds: Bonds, tier: int, limits: Json, control: socket.socket, inside: socket.socket | None) -> None:
    """Apply every restriction to this process, and hand out the descriptor that reports refused system calls.

    Landlock comes before capabilities are dropped, because it needs one of them or the promise never to gain any; the
    filter comes last, because it forbids all of this.
    """
    _limit(bonds, limits)
    os.chdir("/tmp")  # noqa: S108 - inside
    linux.no_new_privileges()
    if bonds.landlock:
        ports = () if inside is None else (PROXY[1],)
        writable = ("/tmp", "/dev/null", *bonds.writable)  # noqa: S108 - inside
        linux.landlock(bonds.landlock, readable=("/",), writable=writable, ports=ports)
    linux.drop_capabilities()
    refusals = linux.load_filter(bonds.programs[tier], listening=True)
    handed = [refusals] if inside is None else [refusals, inside.fileno()]
    socket.send_fds(control, [b"R"], handed)
    if not bonds.metered:
        linux.add_filter(no_messages())
    if bonds.writable:
        linux.add_filter(plain_files())
    if inside is not None:
        inside.detach()
    linux.close_from(4)
    os.environ.update(ENVIRONMENT if inside is None else ENVIRONMENT | _THROUGH_PROXY)


def _limit(bonds: Bonds, limits: Json) -> None:
    memory: int = limits["memory_bytes"]
    # With a cgroup this limit only has to stop the impossible; without one it is the limit.
    headroom = memory if bonds.metered else 64 << 20
    for kind, most in (
        # One byte is no core either, and unlike zero it keeps the kernel from piping one to a program of the host.
        (resource.RLIMIT_CORE, 1),
        (resource.RLIMIT_FSIZE, limits["tmp_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        # The kernel counts these per user, and for some back ends all calls are one user: a cgroup counts per call.
        (resource.RLIMIT_NPROC, _PROCESSES if bonds.metered else limits["pids"]),
        (resource.RLIMIT_AS, bonds.address_space + memory + headroom),
        (resource.RLIMIT_STACK, _STACK),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        # Queued signals and timers: the kernel counts them per user, and a server without root is that user too.
        (resource.RLIMIT_SIGPENDING, _SIGNALS),
    ):
        _, hard = resource.getrlimit(kind)
        lower = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (lower, lower))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    if not bonds.metered:
        # Without a share of the processor: some of the processors, and not the same for every call.
        cores = sorted(os.sched_getaffinity(0), key=lambda _: os.urandom(1))
        os.sched_setaffinity(0, cores[: max(1, round(limits["cpu_cores"]))])
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def limit_in_container(limits: Json, *, writes: bool) -> None:
    """Apply the limits that gVisor enforces for each process; the container as a whole has its own."""
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["tmp_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_NPROC, limits["pids"]),
        (resource.RLIMIT_AS, address_space() + limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
    ):
        resource.setrlimit(kind, (most, most))
    if writes:
        linux.no_new_privileges()
        linux.add_filter(plain_files())


def listen_inside() -> socket.socket:
    """Bring up the loopback of this otherwise empty network, and listen where the proxy will answer."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    fcntl.ioctl(listener, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP_RUNNING))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(PROXY)
    listener.listen(64)
    return listener
