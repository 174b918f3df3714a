"""Has code inside write to a directory of the host on one back end, as whoever starts it, and do what it must not.

Prints what went wrong, or that nothing did.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

SOURCE = dedent(
    """
    import ctypes, fcntl, os, socket, subprocess, time

    def tried(function):
        try:
            function()
        except OSError as error:
            return type(error).__name__
        return "done"

    def writes(d):
        open(d + "/old", "a").write(" and new")
        os.mkdir(d + "/a")
        open(d + "/b", "w").write("b")
        os.rename(d + "/b", d + "/a/b")
        os.link(d + "/a/b", d + "/c")
        os.chmod(d + "/c", 0o640)
        os.remove(d + "/gone")
        subprocess.run(["sh", "-c", f"echo program > {d}/program"], check=True)
        return sorted(os.listdir(d))

    def reaches(d):
        beside = os.path.dirname(d) + "/beside"
        tries = {
            "beside": lambda: open(beside + "/x", "w"),
            "above": lambda: open(d + "/../x", "w"),
            "link to a directory": lambda: open(d + "/to_beside/x", "w"),
            "link to a file": lambda: open(d + "/to_file", "w"),
            "relative link": lambda: open(d + "/up/x", "w"),
            "link to the root": lambda: open(d + "/to_root/etc/x", "w"),
            "by its descriptor": lambda: open(f"/proc/self/fd/{os.open(d, os.O_RDONLY)}/../beside/x", "w"),
            "another root": lambda: open(f"/proc/1/root{beside}/x", "w"),
            "rename out": lambda: os.rename(d + "/old", os.path.dirname(d) + "/old"),
            "link from outside": lambda: os.link("/etc/passwd", d + "/passwd"),
            "the directory itself": lambda: os.rename(d, d + "2"),
            "its removal": lambda: os.rmdir(d),
            "inputs": lambda: open("/in/beside/x", "w"),
            "symbolic link": lambda: os.symlink("/etc", d + "/etc"),
            "fifo": lambda: os.mkfifo(d + "/fifo"),
            "device": lambda: os.mknod(d + "/null", 0o020666, os.makedev(1, 3)),
            "socket file": lambda: os.mknod(d + "/socket", 0o140666),
            "unix socket": lambda: socket.socket(socket.AF_UNIX).bind(d + "/bound"),
            "the host's socket": lambda: socket.socket(socket.AF_UNIX).connect(d + "/listening"),
            "chmod to setuid": lambda: os.chmod(d + "/old", 0o4755),
            "chmod to setgid": lambda: os.chmod(d + "/old", 0o2755),
            "made setuid": lambda: os.open(d + "/suid", os.O_CREAT | os.O_WRONLY, 0o4755),
            "nameless setuid": lambda: os.open(d, os.O_TMPFILE | os.O_RDWR, 0o4755),
            "another owner": lambda: os.chown(d + "/old", 1, 1),
            "lease": lambda: fcntl.fcntl(os.open(d + "/old", os.O_RDWR), 1024, fcntl.F_WRLCK),
        }
        return sorted(name for name, function in tries.items() if tried(function) == "done")

    def openat2(d):
        class How(ctypes.Structure):
            _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]
        how = How(os.O_CREAT | os.O_WRONLY, 0o4755, 0)
        C = ctypes.CDLL(None)
        return C.syscall(437, -100, (d + "/suid2").encode(), ctypes.byref(how), ctypes.sizeof(how)) >= 0

    def device(d):
        try:
            os.read(os.open(d + "/device", os.O_RDONLY | os.O_NONBLOCK), 1000)
        except OSError as error:
            return type(error).__name__
        return "read it"

    def large(d):
        with open(d + "/large", "wb", 0) as file:
            while True:
                file.write(bytes(1 << 20))

    def lingers(d):
        # The result is said by hand while other processes go on writing.
        for n in range(3):
            if os.fork() == 0:
                os.setsid()
                number = 0
                while True:
                    open(f"{d}/linger{n}", "w").write(str(number))
                    number += 1
        while not os.path.exists(d + "/linger0"):
            time.sleep(0.01)
        body = b'{"ok": true, "value": "said it"}'
        os.write(3, b"R" + len(body).to_bytes(4, "little") + body)
        os._exit(0)

    def waits(d):
        while True:
            open(f"{d}/waiting", "w").write("x")
    """
)


@contextmanager
def places() -> Generator[tuple[Path, Path]]:
    """A directory to write to, with links out of it, a socket and what cannot be reached; and the one beside it."""
    base = Path(tempfile.mkdtemp(dir="/var/tmp"))  # /tmp is every sandbox's own
    base.chmod(0o755)
    place, beside = base / "place", base / "beside"
    for one in (place, beside):
        one.mkdir()
    (beside / "file").write_text("untouched")
    (place / "old").write_text("old")
    (place / "gone").write_text("to be removed")
    (place / "to_beside").symlink_to(beside)
    (place / "to_file").symlink_to(beside / "file")
    (place / "up").symlink_to("../beside")
    (place / "to_root").symlink_to("/")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(place, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{here}/listening")
        os.close(here)
        listening.listen(8)
        if os.getuid() == 0:
            os.mknod(place / "device", 0o020666, os.makedev(1, 11))  # the kernel's messages
        yield place, beside
    shutil.rmtree(base)


async def write(backend: str) -> list[str]:
    """What did not go as it should."""
    from interlock.executors.sandbox.job import MIB, JobOutcome, Limits, Mount, PythonJob
    from interlock.executors.sandbox.pool import Host
    from interlock.executors.sandbox.supervisor import Sandbox
    from tests.support.sandboxes import ROOMY, bundles_left, groups_left, strays

    faults: list[str] = []
    host = Host(paths=tuple(path for path in sys.path if path.endswith(("site-packages", "src"))))
    opening = Sandbox.open(host=host, backends=(backend,), spares=1, allowance=ROOMY)
    with places() as (place, beside):
        async with await opening as sandbox:
            if sandbox.backend is None:
                return [str(await sandbox.describe())]
            mounts = (Mount(place, str(place), writable=True), Mount(beside, "/in/beside"))

            async def run(entry: str, given: tuple[Mount, ...] = mounts) -> JobOutcome:
                job = PythonJob(
                    source=SOURCE, entry=entry, arguments={"d": str(place)}, tier=1, mounts=given,
                    limits=Limits(wall_s=60.0, tmp_bytes=4 * MIB),
                )  # fmt: skip
                return await sandbox.run(job)

            def expect(holds: bool, what: object) -> None:
                if not holds:
                    faults.append(str(what))

            seen = await run("writes", (Mount(place, str(place)), mounts[1]))
            expect(seen.status == "error" and (place / "old").read_text() == "old", f"only looks: {seen}")
            done = await run("writes")
            expect(done.status == "ok" and {"a", "c", "old", "program"} <= set(done.value or ()), f"writes: {done}")
            expect((place / "old").read_text() == "old and new" and not (place / "gone").exists(), "what it wrote")
            owners = {(one.lstat().st_uid, one.lstat().st_gid) for one in place.rglob("*")}
            expect(owners == {(os.getuid(), os.getgid())}, f"owners: {owners}")
            before = sorted(place.rglob("*"))
            reached = await run("reaches")
            # gVisor has sockets of its own, which the host never sees.
            own = ["unix socket"] if backend == "gvisor" else []
            expect(reached.value in ([], own), f"reaches: {reached}")
            expect(sorted(place.rglob("*")) == before, f"made: {sorted(place.rglob('*'))}")
            expect([one.name for one in beside.iterdir()] == ["file"], f"beside: {list(beside.iterdir())}")
            expect((beside / "file").read_text() == "untouched", "the file that a link names")
            expect((place.parent / "x").exists() is False, "above")
            expect((await run("openat2")).value is False and not (place / "suid2").exists(), "openat2")
            if os.getuid() == 0:
                device = await run("device")
                expect(device.value in ("PermissionError", "FileNotFoundError", "OSError"), f"device: {device}")
            large = await run("large")
            expect(large.status in ("limit", "crashed", "error"), f"large: {large}")
            expect((place / "large").stat().st_size <= 4 * MIB, f"large: {(place / 'large').stat().st_size}")
            if backend != "gvisor":  # there the first process waits for nobody, and no frame can be said after it
                await run("lingers")
                last = {one: (one.stat().st_mtime_ns, one.read_text()) for one in place.glob("linger*")}
                await asyncio.sleep(0.05)
                expect(last == {one: (one.stat().st_mtime_ns, one.read_text()) for one in last}, "writes after its end")
            running = asyncio.ensure_future(run("waits"))
            while not (place / "waiting").exists() and not running.done():  # noqa: ASYNC110 - files tell nobody
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait({running})
            ended = (place / "waiting").stat().st_mtime_ns
            await asyncio.sleep(0.05)
            expect(running.cancelled() and (place / "waiting").stat().st_mtime_ns == ended, "writes when cancelled")
            # A directory in place of another is another.
            place.rename(place.with_name("moved"))
            place.mkdir()
            for name in ("old", "gone"):
                (place / name).write_text(name)
            replaced = await run("writes", (Mount(place, str(place), writable=True),))
            expect(replaced.status == "ok" and (place / "program").exists(), f"replaced: {replaced}")
    return faults + [f"left behind: {one}" for one in (*strays(), *groups_left(), *bundles_left())]


if __name__ == "__main__":
    # The interpreter may be another of the same version: of the test run's path only its packages are for it.
    sys.path.extend(one for one in sys.argv[2:] if one.endswith(("site-packages", "src")) or "lib/python" not in one)
    found = asyncio.run(write(sys.argv[1]))
    print("\n\n".join(found) or "nothing went wrong")
    raise SystemExit(bool(found))
