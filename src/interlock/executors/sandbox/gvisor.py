"""The back end with a kernel of its own: gVisor's `runsc` handles the call's system calls in a process of ours.

Every call is a container from an OCI bundle in a directory of its own: the same root as everywhere, no network, no
rights. The interpreter inside receives its request on the socket that is its standard input. The host's kernel sees
gVisor and never the code, so there is no filter of ours and no record of what the code tried: it just fails. Limits
apply to the container as a whole, with room for gVisor itself. Needs root, and starts in a good part of a second.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from interlock.data.schema import Json
from interlock.executors.sandbox import root
from interlock.executors.sandbox.cgroups import PREFIX, CgroupSlot
from interlock.executors.sandbox.child import Child, IsolationError, Shape
from interlock.executors.sandbox.confine import ENVIRONMENT
from interlock.executors.sandbox.job import MIB
from interlock.executors.sandbox.oneshot import OneShot, ended, why

_READY_S = 30.0
_ITS_OWN_MEMORY, _ITS_OWN_THREADS = 128 * MIB, 256
_BOOT = (
    "import json,os,sys;c=json.loads(os.read(0,1<<16));sys.path.extend(c['paths']);"
    "from interlock.executors.sandbox import alone;alone.serve_contained(c)"
)
# Waits to be put in its cgroup before it starts anything.
_HELD = 'kill -STOP $$; exec "$@"'


class Gvisor(OneShot):
    """Starts a container per call with `runsc`."""

    name = "gvisor"
    program = "runsc"

    def _start(self, program: str, shape: Shape) -> Child:
        if os.getuid() != 0:
            raise IsolationError("gVisor needs root")
        _sweep()
        bundle = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        (bundle / "rootfs").mkdir()
        self._write_bundle(bundle, shape)
        control, theirs = socket.socketpair()
        out, their_out = os.pipe2(os.O_CLOEXEC)
        err, their_err = os.pipe2(os.O_CLOEXEC)
        options = ("--root", str(bundle / "state"), "--network=none", "--ignore-cgroups", "--platform=ptrace")
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own words and configured paths
                ("/bin/sh", "-c", _HELD, "sh", program, *options, "run", "--bundle", str(bundle), bundle.name),
                stdin=theirs.fileno(),
                stdout=their_out,
                stderr=their_err,
                env={"PATH": ENVIRONMENT["PATH"]},
                cwd="/",
            )
        os.close(their_out)
        os.close(their_err)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        slot = None if self._cgroups is None else self._cgroups.take()
        over = os.pidfd_open(process.pid)
        child = Child(
            process.pid,
            os.dup(over),
            control,
            out,
            err,
            over,
            lambda: ended(process),
            lambda: self._remove(bundle, process, over, slot),
            slot=slot,
        )
        try:
            if slot is not None:
                limits = shape.limits
                slot.take(
                    process.pid,
                    replace(
                        limits,
                        memory_bytes=limits.memory_bytes + _ITS_OWN_MEMORY,
                        pids=limits.pids + _ITS_OWN_THREADS,
                    ),
                )
            os.kill(process.pid, signal.SIGCONT)
            control.settimeout(_READY_S)
            paths = [root.inside(path) for path in self._host.paths]
            config = {"paths": paths, "limits": asdict(shape.limits), "writes": shape.writes}
            control.send(json.dumps(config).encode())
            answer = control.recv(1)
        except OSError as error:
            child.drop()
            raise IsolationError(f"gVisor: {error}") from None
        if answer != b"R":
            child.kill()
            reason = why(err)
            child.drop()
            raise IsolationError(f"gVisor: {reason}")
        child.make_ready()
        return child

    def _remove(self, bundle: Path, process: subprocess.Popen[bytes], over: int, slot: CgroupSlot | None) -> None:
        self._release(process, over, slot)
        shutil.rmtree(bundle, ignore_errors=True)

    def _write_bundle(self, bundle: Path, shape: Shape) -> None:
        etc = bundle / "rootfs" / "etc"
        etc.mkdir()
        for name, content in root.OWN_ETC.items():
            (etc / name).write_text(content)
        for name in root.LINKED:
            path = Path("/", name)
            if path.is_symlink():
                (bundle / "rootfs" / name).symlink_to(path.readlink())
        (bundle / "config.json").write_text(json.dumps(self._config(shape)))

    def _config(self, shape: Shape) -> Json:
        bound = [(path, root.inside(path)) for path in root.outermost(self._host.readable)]
        bound += [(f"/{name}", f"/{name}") for name in root.LINKED if _is_directory(Path("/", name))]
        bound += [(f"/etc/{name}", f"/etc/{name}") for name in root.FROM_ETC if Path("/etc", name).exists()]
        bound += [(str(one.host), one.inside) for one in shape.mounts if not one.writable]
        writable = [(str(one.host), one.inside) for one in shape.mounts if one.writable]
        mounts: list[Json] = [
            {"destination": inside, "type": "bind", "source": host, "options": ["rbind", mode, "nosuid", "nodev"]}
            for mode, places in (("ro", bound), ("rw", writable))
            for host, inside in places
        ]
        # gVisor assigns a file to the user who makes it, and files in a writable mount must belong to root. Inside,
        # root has no capability and no kernel of the host's.
        user = 0 if writable else root.USER
        size = f"size={shape.limits.tmp_bytes}"
        mounts += [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": [size, "mode=1777"]},  # noqa: S108
        ]
        return {
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs", "readonly": True},
            "hostname": "sandbox",
            "process": {
                "terminal": False,
                "user": {"uid": user, "gid": user},
                "args": [self._host.python, "-I", "-S", "-c", _BOOT],
                "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
                "cwd": "/tmp",  # noqa: S108 - inside
                "capabilities": {},
                "noNewPrivileges": True,
            },
            "mounts": mounts,
            "linux": {"namespaces": [{"type": one} for one in ("pid", "ipc", "uts", "mount", "network")]},
        }


def _sweep() -> None:
    """Remove bundles of servers that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        if not Path("/proc", left.name.removeprefix(PREFIX).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
