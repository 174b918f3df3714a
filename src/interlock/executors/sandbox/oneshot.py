"""The back end for hosts that allow bubblewrap namespaces but not our own: one program start per call.

Distributions allow bubblewrap what they deny to others (a setuid bit, an AppArmor profile). It makes namespaces and
root, then starts an interpreter that applies the same restrictions as a zygote's child and serves one request. It costs
the start of an interpreter per call, and covers tiers 0 and 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from interlock.executors.sandbox import root
from interlock.executors.sandbox.cgroups import Cgroups, CgroupSlot
from interlock.executors.sandbox.child import Child, Ended, IsolationError, Shape
from interlock.executors.sandbox.pool import Host

_READY_S = 20.0
_USERS = 4096  # as root, calls have no user namespace of their own: each is another user, so that limits do not add up
_BOOT = (
    "import json,socket,sys;s=socket.socket(fileno=0);c=json.loads(s.recv(1<<16));sys.path.extend(c['paths']);"
    "from interlock.executors.sandbox import alone;alone.serve(c,s)"
)
# As root: translates the owners of files in some directories, for itself and what it becomes, then becomes bwrap.
_MAPPED = (
    "import json,sys;c=json.loads(sys.argv[1]);sys.path.extend(c['paths']);"
    "from interlock.executors.sandbox import alone;alone.become(c,sys.argv[2:])"
)
_PLAIN = ("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox")
_AS_ROOT = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP")


class OneShot:
    """A back end that starts a program for every call. The subclass defines which one."""

    name: ClassVar[str]
    program: ClassVar[str]
    tiers = frozenset((0, 1))

    def __init__(self, host: Host, cgroups: Cgroups | None) -> None:
        self._host = host
        self._cgroups = cgroups
        # INVARIANT: children die with the thread that started them, so these live as long as the back end.
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="interlock-oneshot")
        self._children: dict[int, Child] = {}
        self._turns = itertools.count()
        self._idle = asyncio.Event()

    async def take(self, shape: Shape) -> Child:
        program = shutil.which(self.program)
        if program is None:
            raise IsolationError(f"{self.name} is not installed")
        starting = asyncio.get_running_loop().run_in_executor(self._threads, self._start, program, shape)
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda made: made.exception() or self._threads.submit(made.result().drop))
            raise
        self._children[id(child)] = child
        return child

    def give_back(self, child: Child) -> None:
        del self._children[id(child)]
        self._threads.submit(child.drop)
        if not self._children:
            self._idle.set()

    async def close(self) -> None:
        self._idle.clear()
        for child in self._children.values():
            child.kill()
        if self._children:
            await self._idle.wait()
        await asyncio.to_thread(self._threads.shutdown)
        if self._cgroups is not None:
            await asyncio.to_thread(self._cgroups.close)

    @abstractmethod
    def _start(self, program: str, shape: Shape) -> Child:
        """Start a child, confined and waiting. Runs in a thread."""

    def _release(self, process: subprocess.Popen[bytes], over: int, slot: CgroupSlot | None) -> None:
        process.kill()
        process.wait()
        os.close(over)
        if slot is not None and self._cgroups is not None:
            self._cgroups.give(slot)


class Bubblewrap(OneShot):
    """Starts a process tree per call with `bwrap`."""

    name = "bubblewrap"
    program = "bwrap"

    def _start(self, program: str, shape: Shape) -> Child:
        """Start bwrap, put its first process in a cgroup, let it continue, and wait until it is confined. Runs in a
        thread.
        """
        user = self._host.uid + 1 + next(self._turns) % _USERS
        with contextlib.ExitStack() as theirs:
            control, their_control = socket.socketpair()
            theirs.enter_context(their_control)
            out, their_out = pipe(theirs, ours_reads=True)
            err, their_err = pipe(theirs, ours_reads=True)
            info, their_info = pipe(theirs, ours_reads=True)
            block, their_block = pipe(theirs, ours_reads=False)
            arguments = [*self._arguments(shape), "--info-fd", str(their_info), "--block-fd", str(their_block)]
            files = _etc(theirs)
            for name, descriptor in files.items():
                arguments += ["--perms", "0644", "--ro-bind-data", str(descriptor), f"/etc/{name}"]
            command = [*arguments, "--remount-ro", "/", "--", self._host.python, "-I", "-S", "-c", _BOOT]
            process = subprocess.Popen(  # noqa: S603 - our own words and configured paths
                [*self._mapping(shape, user), program, *command],
                stdin=their_control.fileno(),
                stdout=their_out,
                stderr=their_err,
                env={},
                cwd="/",
                pass_fds=(their_info, their_block, *files.values()),
            )
        slot = None
        try:
            with os.fdopen(info) as file:
                child_info = file.read()
            first = json.loads(child_info)["child-pid"] if child_info else _raise(why(err))
            pidfd = os.pidfd_open(first)
            slot = None if self._cgroups is None else self._cgroups.take()
            over = os.pidfd_open(process.pid)
            child = Child(
                first, pidfd, control, out, err, over,
                lambda: ended(process), lambda: self._release(process, over, slot), slot=slot,
            )  # fmt: skip
        except (OSError, ValueError, IsolationError) as error:
            process.kill()
            process.wait()
            os.close(block)
            control.close()
            os.close(out)
            os.close(err)
            raise IsolationError(f"bubblewrap: {error}") from None
        try:
            if slot is not None:
                slot.take(first, shape.limits)
            os.write(block, b"x")
            config = {
                "paths": [root.inside(path) for path in self._host.paths],
                "uid": user,
                "tier": shape.tier,
                "limits": asdict(shape.limits),
                "metered": slot is not None,
                "writable": [one.inside for one in shape.mounts if one.writable],
            }
            control.settimeout(_READY_S)
            control.send(json.dumps(config).encode())
            answer, handed, _, _ = socket.recv_fds(control, 4096, 1)
            if answer[:1] != b"R":
                _raise(answer[1:].decode(errors="replace") or why(err))
            child.refusals = handed[0]
        except (OSError, IsolationError) as error:
            child.kill()
            process.wait()
            reason = str(error) if isinstance(error, IsolationError) else why(err)
            child.drop()
            raise IsolationError(f"bubblewrap: {reason}") from None
        finally:
            os.close(block)
        child.make_ready()
        return child

    def _mapping(self, shape: Shape, user: int) -> list[str]:
        """The arguments before those of bwrap: as root, files in a writable mount must belong to root, not to this
        user.
        """
        directories = [str(one.host) for one in shape.mounts if one.writable]
        if not directories or os.getuid() != 0:
            return []
        config = json.dumps({"paths": self._host.paths, "directories": directories, "uid": user})
        return [self._host.python, "-I", "-S", "-c", _MAPPED, config]

    def _arguments(self, shape: Shape) -> list[str]:
        arguments = [
            *_PLAIN,
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-net",
            "--unshare-cgroup-try",
        ]
        if os.getuid() == 0:
            arguments += _AS_ROOT
        else:
            arguments += ["--unshare-user", "--uid", str(root.USER), "--gid", str(root.USER)]
        readable = root.outermost(self._host.readable)
        # Directories that bwrap makes on the way would be readable by its own user only.
        inside = (*map(root.inside, readable), "/etc/ssl/certs", *(one.inside for one in shape.mounts))
        above = {str(one) for path in inside for one in Path(path).parents}
        for path in sorted(above - {"/"}):
            arguments += ["--perms", "0755", "--dir", path]
        for path in readable:
            arguments += ["--ro-bind", path, root.inside(path)]
        for name in root.LINKED:
            path = Path("/", name)
            if path.is_symlink():
                arguments += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                arguments += ["--ro-bind", str(path), str(path)]
        for name in root.FROM_ETC:
            arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        arguments += ["--perms", "0755", "--dir", "/in"]
        for one in shape.mounts:
            arguments += ["--bind" if one.writable else "--ro-bind", str(one.host), one.inside]
        size = str(shape.limits.tmp_bytes)
        arguments += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/tmp"]  # noqa: S108
        if self._cgroups is None:
            # Mapped pages of /dev/zero belong to no process, so they would not be counted.
            arguments += ["--dev-bind", "/dev/null", "/dev/zero"]
        return [*arguments, "--chdir", "/tmp"]  # noqa: S108 - inside


def pipe(theirs: contextlib.ExitStack, *, ours_reads: bool) -> tuple[int, int]:
    """Make a pipe: our end, and theirs, which we close once it is handed over."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    ours, other = (reading, writing) if ours_reads else (writing, reading)
    theirs.callback(os.close, other)
    return ours, other


def _etc(theirs: contextlib.ExitStack) -> dict[str, int]:
    files: dict[str, int] = {}
    for name, content in root.OWN_ETC.items():
        descriptor = os.memfd_create(name)
        os.write(descriptor, content.encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        theirs.callback(os.close, descriptor)
        files[name] = descriptor
    return files


def _raise(reason: str) -> int:
    raise IsolationError(reason)


def why(err: int) -> str:
    """Read the error stream of a process that has just failed."""
    os.set_blocking(err, False)
    try:
        return os.read(err, 2000).decode(errors="replace").strip() or "it ended without a word"
    except OSError:
        return "it ended without a word"


def ended(process: subprocess.Popen[bytes]) -> Ended:
    """Return how bwrap ended, which is how its program did; it reports a death by signal as 128 plus the signal."""
    _, status, used = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    if code > 128:
        status = code - 128
    return Ended(status, int((used.ru_utime + used.ru_stime) * 1e9), used.ru_maxrss * 1024)
