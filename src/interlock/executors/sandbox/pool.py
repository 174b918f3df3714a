"""Zygotes as the supervisor holds them, and the spare children that make a call cost less than a millisecond.

Starting a zygote takes a good part of a second, forking a child from it some milliseconds, most of them in the kernel:
namespaces, mounts, cgroups. None of that has to happen while a caller waits. For every shape that was called twice, a
few children are therefore ready, confined and idle; a call takes one, and another is made once the call is over. A
child serves one call. A zygote serves a bounded number of them, because its children share its memory layout and hash
seed.

All blocking work is done by a few named threads; the event loop only ever takes from a deque.

INVARIANT: zygotes are started by threads that live as long as the pool does. The parent-death signal that ends a child
is tied to the thread, not to the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import interlock
from interlock.contract.permissions import is_below, own_place
from interlock.core.record import dataclass
from interlock.executors.sandbox.cgroups import Cgroups, CgroupSlot
from interlock.executors.sandbox.child import Child, ChildEvidence, IsolationError, Shape
from interlock.executors.sandbox.job import Mount

PLAIN = ("collections", "datetime", "math", "re", "typing")
HEAVY = (*PLAIN, "asyncio", "decimal", "interlock.executors.function", "interlock.executors.sandbox.ready_tool")
USER = 231072  # a user that no account of the host has
THREADS = 4
SHAPES = 4
_START_S, _BEAR_S = 30.0, 10.0
# The interpreter's own arguments are visible to everybody; sensitive data goes over the socket.
BOOT = (
    "import json,socket,sys;s=socket.socket(fileno=0);c=json.loads(s.recv(1<<20));sys.path.extend(c['paths']);"
    "from interlock.executors.sandbox import zygote;zygote.launch(c,s)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The parts of this host that go into sandboxes: the interpreter, its module paths, and the user they run as."""

    python: str = field(default_factory=lambda: os.path.realpath(sys.executable))
    paths: tuple[str, ...] = field(default_factory=lambda: _import_paths())
    plain: tuple[str, ...] = PLAIN
    heavy: tuple[str, ...] = HEAVY
    uid: int = USER

    @property
    def readable(self) -> list[str]:
        """Directories that are bound into the root: programs, the interpreter's home, modules."""
        home = str(Path(self.python).parent.parent)
        # Of a checkout only our own package goes in, because it contains more than modules.
        packages = [path for path in self.paths if path != _source() or path in _installed()]
        return ["/usr", home, *packages, str(Path(_source()) / "interlock")]

    def unfit(self, mount: Mount) -> str | None:
        """Return why a directory cannot be mounted for writing; None if it can, or is only read."""
        if not mount.writable:
            return None
        place, real = f"`{mount.inside}` cannot be written to", str(mount.host)
        if not mount.host.is_dir():
            return f"{place}: it is not a directory of this host; make it first"
        if own_place(real) is not None or any(is_below(real, one) or is_below(one, real) for one in self.readable):
            return f"{place}: programs or modules that sandboxed tools run from are in it or above it"
        seen = mount.host.stat()
        if os.getuid() == 0 and (seen.st_uid, seen.st_gid) != (0, 0):
            return f"{place}: it does not belong to the server's user and group; change its owner"
        return None if os.access(mount.host, os.W_OK | os.X_OK) else f"{place}: the server's user cannot write there"


def _source() -> str:
    return str(Path(interlock.__file__).parent.resolve().parent)


def _installed() -> tuple[str, ...]:
    return tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("platlib", "purelib"))


def _import_paths() -> tuple[str, ...]:
    # INVARIANT: all of these are free of links, which lead nowhere inside, and so are their places there.
    return tuple(dict.fromkeys((*_installed(), _source())))


class Zygote:
    """One zygote process. Blocking: used from the pool's threads."""

    def __init__(self, host: Host, shape: Shape, cgroups: Cgroups | None) -> None:
        self._cgroups = cgroups
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._living = 0
        self._retired = False
        self._broken = False
        self.borne = 0
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own words
                (host.python, "-I", "-S", "-c", BOOT),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
            )
        config = {
            "parent": os.getpid(),
            "open": shape.tier == 3,
            "paths": host.paths,
            "readable": host.readable,
            "mounts": [(str(one.host), one.inside, one.writable) for one in shape.mounts],
            "uid": host.uid,
            "vetted": host.heavy if shape.heavy else host.plain,
            "metered": cgroups is not None,
        }
        self._control.settimeout(_START_S)
        answer: dict[str, Any]
        try:
            self._control.send(json.dumps(config).encode())
            answer = json.loads(self._control.recv(1 << 16) or b'{"failed": "the zygote ended before it was ready"}')
        except OSError as error:
            answer = {"failed": f"the zygote did not start: {error}"}
        if "failed" in answer:
            self._close()
            raise IsolationError(answer["failed"])
        self.landlock: int = answer["landlock"]

    @property
    def alive(self) -> bool:
        return not self._broken and self._process.poll() is None

    def bear(self, shape: Shape) -> Child:
        """Fork a child, confined and waiting. Raises IsolationError if any restriction does not hold."""
        with self._lock:
            self.borne += 1
            self._living += 1
        control, theirs = socket.socketpair()
        evidence, reporting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, their_out = os.pipe2(os.O_CLOEXEC)
        err, their_err = os.pipe2(os.O_CLOEXEC)
        handed: list[int] = []
        try:
            control.settimeout(_BEAR_S)
            evidence.settimeout(_BEAR_S)
            spec = json.dumps({"tier": shape.tier, "limits": asdict(shape.limits)}).encode()
            socket.send_fds(self._control, [spec], [theirs.fileno(), their_out, their_err, reporting.fileno()])
            for one in (theirs, reporting, their_out, their_err):
                _close(one)
            answer, handed, _, _ = socket.recv_fds(evidence, 4096, 2)
            if len(handed) != 2:
                raise _refusal(answer)
            slot = None if self._cgroups is None else self._cgroups.take()
        except (OSError, IsolationError) as error:
            for one in (theirs, reporting, control, evidence, out, err, *handed):
                _close(one)
            self._broken = self._broken or isinstance(error, OSError)
            self._left(None)
            raise IsolationError(str(error)) from None
        pidfd, mounts = handed
        end = ChildEvidence(evidence, mounts)
        release = partial(self._released, end, slot)
        child = Child(_pid_of(pidfd), pidfd, control, out, err, evidence.fileno(), end.ended, release, slot=slot)
        try:
            self._settle(child, shape)
        except (OSError, IsolationError) as error:
            child.drop()
            raise IsolationError(str(error)) from None
        evidence.setblocking(False)
        child.make_ready()
        return child

    def _settle(self, child: Child, shape: Shape) -> None:
        """Let the child enter its cgroup and continue, and take what it hands out."""
        ways_in = [] if child.slot is None else child.slot.offer(child.pid, shape.limits)
        socket.send_fds(child.control, [b"G"], ways_in)
        for one in ways_in:
            os.close(one)
        answer, handed, _, _ = socket.recv_fds(child.control, 4096, 2)
        if answer[:1] != b"R":
            raise IsolationError(answer[1:].decode(errors="replace") or "the child ended while it was confined")
        child.refusals = handed[0]
        if len(handed) > 1:
            child.inside = socket.socket(fileno=handed[1])
        if child.slot is not None and child.slot.deserted:
            raise IsolationError("the child did not enter its cgroup")

    def _released(self, evidence: ChildEvidence, slot: CgroupSlot | None) -> None:
        evidence.close()
        self._left(slot)

    def _left(self, slot: CgroupSlot | None) -> None:
        if slot is not None and self._cgroups is not None:
            self._cgroups.give(slot)
        with self._lock:
            self._living -= 1
            last = self._retired and self._living == 0
        if last:
            self._close()

    def retire(self) -> None:
        """Fork no more; end when the last child has gone."""
        with self._lock:
            last = not self._retired and self._living == 0
            self._retired = True
        if last:
            self._close()

    def _close(self) -> None:
        self._control.close()
        try:
            self._process.wait(_BEAR_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _close(one: socket.socket | int) -> None:
    if isinstance(one, int):
        with contextlib.suppress(OSError):
            os.close(one)
    else:
        one.close()


def _refusal(answer: bytes) -> Exception:
    """Convert a failed fork: the zygote said so, we have no room for its descriptors, or it is gone."""
    if not answer:
        return ConnectionResetError("the zygote ended")
    return IsolationError(json.loads(answer).get("failed", "the server has too many open files"))


def _pid_of(pidfd: int) -> int:
    """Return the pid in our namespace: the zygote counts in its own."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise IsolationError("the child cannot be seen from here")


@dataclass(slots=True)
class _Ready:
    """The spare children of one shape, and the waiting calls."""

    shape: Shape
    calls: int = 0
    children: deque[Child] = field(default_factory=deque[Child])
    waiting: deque[asyncio.Future[Child]] = field(default_factory=deque["asyncio.Future[Child]"])
    coming: int = 0


class Zygotes:
    """The back end that forks. Keeps spares for the shapes used last, and a zygote for every set of
    inputs among them.
    """

    name = "zygote"
    tiers = frozenset((0, 1, 2, 3))

    def __init__(self, host: Host, cgroups: Cgroups | None, *, spares: int, recycle_after: int) -> None:
        self.cgroups = cgroups
        self._host = host
        self._spares = spares
        self._recycle_after = recycle_after
        # Two pools, so that no call waits for a new child behind the end of another's tree.
        self._births = ThreadPoolExecutor(THREADS, thread_name_prefix="interlock-sandbox-birth")
        self._ends = ThreadPoolExecutor(THREADS, thread_name_prefix="interlock-sandbox-end")
        self._ready: OrderedDict[object, _Ready] = OrderedDict()
        self._zygotes: dict[object, Zygote] = {}
        self._starting: dict[object, threading.Lock] = {}
        self._busy: dict[int, tuple[Child, Shape]] = {}
        self._making: set[asyncio.Future[Child]] = set()
        self._idle = asyncio.Event()
        self._closed = False

    async def take(self, shape: Shape) -> Child:
        if self._closed:
            raise IsolationError("the sandbox is closed")
        ready = self._ready.setdefault(shape.key, _Ready(shape))
        self._ready.move_to_end(shape.key)
        ready.calls += 1
        self._forget_old_shapes()
        child = next((one for one in _drained(ready.children) if self._lives(one)), None) or await self._awaited(ready)
        self._busy[id(child)] = (child, shape)
        return child

    def _lives(self, spare: Child) -> bool:
        """Whether a spare is still alive: it ends with its zygote, whatever ended that."""
        if spare.lives:
            return True
        self._ends.submit(spare.drop)
        return False

    async def _awaited(self, ready: _Ready) -> Child:
        waiter: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        ready.waiting.append(waiter)
        self._fill(ready)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                ready.children.append(waiter.result())
            raise

    def give_back(self, child: Child) -> None:
        """Release the child of a finished call and make another."""
        _, shape = self._busy.pop(id(child))
        self._ends.submit(child.drop)
        if self._closed:
            if not self._busy:
                self._idle.set()
        elif shape.key in self._ready:
            self._fill(self._ready[shape.key])

    def _fill(self, ready: _Ready) -> None:
        """Start as many children as are waited for and missing.

        A shape has spares from its second call on: most commands, and each probe of the isolation, make one.
        """
        loop = asyncio.get_running_loop()
        spares = self._spares if ready.calls > 1 else 0
        while len(ready.children) + ready.coming < spares + len(ready.waiting):
            ready.coming += 1
            made = loop.run_in_executor(self._births, self._make, ready.shape)
            self._making.add(made)
            made.add_done_callback(partial(self._arrived, ready))

    def _arrived(self, ready: _Ready, made: asyncio.Future[Child]) -> None:
        self._making.discard(made)
        ready.coming -= 1
        waiter = next((one for one in _drained(ready.waiting) if not one.done()), None)
        error = made.exception() or (IsolationError("the sandbox is closed") if self._closed else None)
        if error is not None and waiter is not None:
            waiter.set_exception(error)
        if made.exception() is not None:
            return
        if waiter is not None and not self._closed:
            waiter.set_result(made.result())
        elif self._closed or self._ready.get(ready.shape.key) is not ready:
            self._ends.submit(made.result().drop)
        else:
            ready.children.append(made.result())

    def _make(self, shape: Shape) -> Child:
        """Fork a child from the zygote of its kind, in a thread. A zygote that has died is replaced, once."""
        zygote = self._zygote(shape)
        try:
            return zygote.bear(shape)
        except IsolationError:
            if zygote.alive:
                raise
            return self._zygote(shape).bear(shape)

    def _zygote(self, shape: Shape) -> Zygote:
        kind = _kind(shape)
        with self._starting.setdefault(kind, threading.Lock()):
            zygote = self._zygotes.get(kind)
            if zygote is None or not zygote.alive or zygote.borne >= self._recycle_after:
                new = Zygote(self._host, shape, self.cgroups)
                self._zygotes[kind] = new
                if zygote is not None:
                    zygote.retire()
                return new
            return zygote

    def _forget_old_shapes(self) -> None:
        while len(self._ready) > SHAPES:
            _, old = self._ready.popitem(last=False)
            for child in _drained(old.children):
                self._ends.submit(child.drop)
            kind = _kind(old.shape)
            if kind in self._zygotes and all(_kind(one.shape) != kind for one in self._ready.values()):
                self._ends.submit(self._zygotes.pop(kind).retire)

    async def close(self) -> None:
        """End everything, including running calls."""
        self._closed = True
        if self._making:
            await asyncio.wait(self._making)
        await asyncio.sleep(0)  # let waiting calls take their child now; the last arrivals are stored
        for child, _ in self._busy.values():
            child.kill()
        if self._busy:
            await self._idle.wait()
        for ready in self._ready.values():
            for child in _drained(ready.children):
                self._ends.submit(child.drop)
        # Threads last: a zygote ends with the thread that started it, and a child needs its zygote to be waited for.
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        for zygote in self._zygotes.values():
            self._ends.submit(zygote.retire)
        self._ends.shutdown(wait=True)
        self._births.shutdown(wait=True)
        if self.cgroups is not None:
            self.cgroups.close()


def _kind(shape: Shape) -> object:
    """Return the kind of zygote that a shape needs: its view of the host and its imports are fixed when the zygote
    starts.
    """
    return shape.mounts, shape.tier == 3, shape.heavy


T = TypeVar("T")


def _drained(queue: deque[T]) -> Iterator[T]:
    while queue:
        yield queue.popleft()
