"""Sockets of the host in a mounted directory cannot be reached, and memory is bounded where no cgroup counts it."""

from __future__ import annotations

import os
import socket
import textwrap
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from interlock.executors.sandbox.job import MIB, Limits, Mount, PythonJob, Tier
from interlock.executors.sandbox.supervisor import Sandbox
from tests.needs import missing
from tests.support.sandboxes import ROOMY

ON_SESSION = pytest.mark.asyncio(loop_scope="session")

REACH = textwrap.dedent(
    """
    import array, os, socket

    def tried(function):
        try:
            function()
        except OSError as error:
            return type(error).__name__
        return "done"

    def rights(one, place):
        descriptors = array.array("i", [1])
        one.sendmsg([b"rights"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)], 0, place)

    def main():
        seen = {}
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            for place in ("/in/place/datagrams", "/in/place/stream", "/in/place/packets"):
                name = f"{int(kind)} {place} "
                def pair():
                    return socket.socketpair(socket.AF_UNIX, kind)[0]
                seen[name + "sendto"] = tried(lambda: pair().sendto(b"pair", place))
                seen[name + "rights"] = tried(lambda: rights(pair(), place))
                seen[name + "reconnect"] = tried(lambda: pair().connect(place))
                def one():
                    return socket.socket(socket.AF_UNIX, kind)
                seen[name + "connect"] = tried(lambda: one().connect(place))
                seen[name + "send"] = tried(lambda: one().sendto(b"socket", place))
        seen["fifo"] = tried(lambda: os.write(os.open("/in/place/fifo", os.O_WRONLY | os.O_NONBLOCK), b"x"))
        return seen
    """
)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[Path, list[socket.socket], int]]:
    """A directory with sockets of every kind, and a fifo, that anybody may use, and the host at the other end."""
    place = tmp_path / "place"
    place.mkdir()
    kinds = {"datagrams": socket.SOCK_DGRAM, "stream": socket.SOCK_STREAM, "packets": socket.SOCK_SEQPACKET}
    waiting: list[socket.socket] = []
    for name, kind in kinds.items():
        one = socket.socket(socket.AF_UNIX, kind)
        one.bind(str(place / name))
        one.setblocking(False)
        if kind != socket.SOCK_DGRAM:
            one.listen(64)
        (place / name).chmod(0o777)
        waiting.append(one)
    os.mkfifo(place / "fifo", 0o777)
    (place / "fifo").chmod(0o777)
    for directory in (place, *list(place.parents)[:3]):
        directory.chmod(0o755)
    fifo = os.open(place / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    yield place, waiting, fifo
    for one in waiting:
        one.close()
    os.close(fifo)


@pytest.mark.supports("EXEC-03")
@pytest.mark.parametrize("tier", [1, 2])
@ON_SESSION
async def test_sockets_in_a_mounted_directory_are_out_of_reach(
    sandbox: Sandbox, host: tuple[Path, list[socket.socket], int], tier: Tier
) -> None:
    place, (datagrams, *listening), fifo = host
    job = PythonJob(source=REACH, entry="main", tier=tier, mounts=(Mount(place, "/in/place"),))
    outcome = await sandbox.run(job)
    with pytest.raises(BlockingIOError):
        datagrams.recv(100)
    for one in listening:
        with pytest.raises(BlockingIOError):
            one.accept()
    assert os.read(fifo, 100) == b""
    assert outcome.status == "ok"
    # A pair of packets takes an address and ignores it: what is sent goes to the other end of the pair.
    assert {name for name, end in outcome.value.items() if end == "done"} <= {
        f"{int(socket.SOCK_SEQPACKET)} /in/place/{name} {way}"
        for name in ("datagrams", "stream", "packets")
        for way in ("sendto", "rights")
    }


@ON_SESSION
async def test_a_pair_of_sockets_works_within_the_call(sandbox: Sandbox) -> None:
    source = """
    import asyncio, socket
    def main():
        one, other = socket.socketpair()
        one.sendall(b"hello")
        async def wait(): return await asyncio.to_thread(lambda: other.recv(10).decode())
        return asyncio.run(wait())
    """
    outcome = await sandbox.run(PythonJob(source=textwrap.dedent(source), entry="main"))
    assert (outcome.status, outcome.value) == ("ok", "hello")


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["zygote", "bubblewrap"])
async def uncounted(request: pytest.FixtureRequest) -> AsyncGenerator[Sandbox]:
    """A sandbox on a host that gives us no cgroups."""
    async with await Sandbox.open(backends=(request.param,), cgroups=False, spares=1, allowance=ROOMY) as opened:
        if opened.backend is None:
            missing(f"{request.param} does not isolate here: {await opened.describe()}")
        yield opened


HOARD = """
import array, ctypes, mmap, os, socket, time
C = ctypes.CDLL(None, use_errno=True)
C.mmap.restype = ctypes.c_void_p
C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
SIZE = 32 << 20
kept = []

def hide(flags, descriptor, protection=3):
    # Fill a mapping, then let go of its pages without letting go of what is in them.
    place = C.mmap(None, SIZE, protection, flags, descriptor, 0)
    if place in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    for page in range(0, SIZE, 4096):
        if protection & 2:
            ctypes.memset(place + page, 1, 1)
        else:
            ctypes.string_at(place + page, 1)
    C.madvise(place, SIZE, 4)

def spread(function, most):
    # In many processes, for each has bounds of its own. They hold what they have until the call is ended.
    for _ in range(most):
        if os.fork() == 0:
            try:
                function()
            finally:
                time.sleep(60)
    time.sleep(60)
    return "held it"

def anonymous():
    hide(0x21, -1)
    return spread(lambda: [hide(0x21, -1) for _ in range(4)], 8)

def zeroes():
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    hide(0x01, descriptor, 1)
    return spread(lambda: [hide(0x01, descriptor, 1) for _ in range(4)], 8)

def fill(one):
    one.setblocking(False)
    try:
        while True:
            one.send(b"x" * 65536)
    except BlockingIOError:
        pass

def sockets():
    def many():
        while True:
            one, other = socket.socketpair()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            fill(one), fill(other)
            kept.extend((one, other))
    return spread(many, 8)

def in_flight():
    carrier, end = socket.socketpair()
    one, other = socket.socketpair()
    fill(one)
    carrier.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [one.fileno(), other.fileno()]))])
    return "sent it"

def pipes():
    import fcntl
    def many():
        while True:
            reading, writing = os.pipe()
            fcntl.fcntl(writing, 1031, 1 << 20)
            os.set_blocking(writing, False)
            os.write(writing, b"x" * (1 << 20))
            kept.append((reading, writing))
    reading, writing = os.pipe()
    fcntl.fcntl(writing, 1031, 1 << 20)
    return spread(many, 8)

def processes():
    def fat():
        kept.append(bytearray(os.urandom(1 << 20)) * 40)
    return spread(fat, 8)

def files_and_pages():
    with open("/tmp/a", "wb") as file:
        for _ in range(60):
            file.write(os.urandom(1 << 20))
    kept.append(bytearray(os.urandom(1 << 20)) * 60)
    time.sleep(60)
    return "held it"
"""
# Refused where it cannot be counted, ended where it is counted.
_REFUSED, _ENDED = ("error",), ("memory",)


@pytest.mark.supports("EXEC-04")
@pytest.mark.parametrize(
    ("entry", "ends"),
    [
        ("anonymous", _REFUSED),
        ("zeroes", _REFUSED),
        ("in_flight", _REFUSED),
        ("pipes", _REFUSED),
        ("sockets", _ENDED),
        ("processes", _ENDED),
        ("files_and_pages", _ENDED),
    ],
)
@ON_SESSION
async def test_memory_is_bounded_without_cgroups(uncounted: Sandbox, entry: str, ends: tuple[str, ...]) -> None:
    limits = Limits(memory_bytes=96 * MIB, wall_s=50.0, pids=16, tmp_bytes=80 * MIB)
    outcome = await uncounted.run(PythonJob(source=HOARD, entry=entry, limits=limits))
    assert outcome.status in ends, outcome


@ON_SESSION
async def test_an_ordinary_call_is_within_its_bound_without_cgroups(uncounted: Sandbox) -> None:
    source = """
    import asyncio, os, subprocess, tempfile
    def main():
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * (1 << 20))
        async def wait(): return await asyncio.to_thread(lambda: len(bytearray(8 << 20)))
        return [asyncio.run(wait()), subprocess.run(["echo", "a"], capture_output=True).stdout.decode()]
    """
    limits = Limits(memory_bytes=96 * MIB, wall_s=50.0, pids=16)
    outcome = await uncounted.run(PythonJob(source=textwrap.dedent(source), entry="main", limits=limits))
    assert (outcome.status, outcome.value) == ("ok", [8 << 20, "a\n"])
