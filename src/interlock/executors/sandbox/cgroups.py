"""Limits for a whole tree of processes, where the host allows them: cgroups, version 1 and 2.

Under the server's own groups we make one directory, and in it a slot per running child, which is reused. A slot bounds
memory, processes and processor share, and counts the kernel's reactions: that a process was killed for memory, or a
fork refused, is read here and nowhere else. Slots whose calls take long share a quarter of what one new call gets,
however many they are, so that a call that uses all it can get slows others little. They never get nothing: a stream of
new calls would keep them from running until their time is up. Without the right to make groups, `Cgroups.open` raises
the reason and the sandbox uses limits per process.

Directories carry the server's pid and start time: those of a server that was killed are removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from interlock.core.record import dataclass
from interlock.executors.sandbox.job import Limits

PREFIX = "interlock-sandbox-"
_PERIOD_US = 100_000
# Share of the processor while others want it too, in the units of version 1 and 2: the kernel's default, and the least.
_SHARES, _WEIGHT = (1024, 2), (100, 1)
_SHARE_OF_LONG = 4  # all long calls together get the default divided by this
_NEEDED, _WANTED = ("memory", "pids"), ("memory", "pids", "cpu")
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Counted:
    """Events of a slot's processes since the slot was taken, and their peak memory."""

    killed_for_memory: int
    forks_refused: int
    peak_bytes: int


class CgroupSlot:
    """The limits of one child."""

    def __init__(self, directories: Mapping[str, Path], unified: bool, yielding: set[CgroupSlot]) -> None:
        self._of = directories
        self._unified = unified
        self._kills_before = self._refused_before = 0
        self._yielding = yielding
        self._weight = self._whole = (_WEIGHT if unified else _SHARES)[0]

    def take(self, pid: int, limits: Limits) -> None:
        """Set the limits and put a process under them."""
        self._limit(limits)
        for directory in dict.fromkeys(self._of.values()):
            _write(directory / "cgroup.procs", pid)

    def offer(self, pid: int, limits: Limits) -> list[int]:
        """Like `take`, but the process enters by itself: by writing a zero into each of these descriptors.

        To be moved there by another process takes a lock against every fork on the host: some milliseconds, and among
        processes that fork endlessly, seconds. Version 2 has no other way.
        """
        if self._unified:
            self.take(pid, limits)
            return []
        self._limit(limits)
        return [os.open(one / "tasks", os.O_WRONLY | os.O_CLOEXEC) for one in dict.fromkeys(self._of.values())]

    def _limit(self, limits: Limits) -> None:
        memory, pids = self._of["memory"], self._of["pids"]
        if self._unified:
            _write(memory / "memory.max", limits.memory_bytes)
            _write_if_there(memory / "memory.swap.max", 0)
            _write(memory / "memory.oom.group", 1)
        else:
            _write(memory / "memory.limit_in_bytes", limits.memory_bytes)
            _write_if_there(memory / "memory.max_usage_in_bytes", 0)
        _write(pids / "pids.max", limits.pids)
        self._share(max(1000, int(limits.cpu_cores * _PERIOD_US)))
        self._kills_before, self._refused_before = self._kills(), self._refused()

    def _share(self, quota_us: int | None) -> None:
        """Set the processor quota per period, or none, and restore a whole share."""
        if "cpu" not in self._of:
            return
        cpu = self._of["cpu"]
        if self._unified:
            _write_if_there(cpu / "cpu.max", f"{quota_us or 'max'} {_PERIOD_US}")
        else:
            _write(cpu / "cpu.cfs_period_us", _PERIOD_US)
            _write(cpu / "cpu.cfs_quota_us", quota_us or -1)
        self._yielding.discard(self)
        self._weigh(self._whole)

    def _weigh(self, weight: int) -> None:
        if weight != self._weight:
            name = "cpu.weight" if self._unified else "cpu.shares"
            _write(self._of["cpu"] / name, weight)
            self._weight = weight

    def yield_to_others(self) -> None:
        """From now on leave most of the processor to calls that have just begun. Calling it again resets the count."""
        if "cpu" in self._of:
            self._yielding.add(self)
            least = (_WEIGHT if self._unified else _SHARES)[1]
            with contextlib.suppress(OSError):
                self._weigh(max(least, self._whole // (_SHARE_OF_LONG * len(self._yielding))))

    def hurry(self) -> None:
        """Let killed processes end at once: until then they hold locks that others wait for."""
        with contextlib.suppress(OSError):
            self._share(None)

    @property
    def deserted(self) -> bool:
        """Whether no process is left. A killed tree is counted until the kernel has removed the last of it."""
        return int(_read(self._of["pids"] / "pids.current")) == 0

    @property
    def forks_refused(self) -> int:
        """Since the slot was taken."""
        return self._refused() - self._refused_before

    def counted(self) -> Counted:
        peak = "memory.peak" if self._unified else "memory.max_usage_in_bytes"
        try:
            peak_bytes = int(_read(self._of["memory"] / peak))
        except FileNotFoundError:
            peak_bytes = 0
        return Counted(self._kills() - self._kills_before, self.forks_refused, peak_bytes)

    def _kills(self) -> int:
        return _field(self._of["memory"] / ("memory.events" if self._unified else "memory.oom_control"), "oom_kill")

    def _refused(self) -> int:
        return _field(self._of["pids"] / "pids.events", "max")


class Cgroups:
    """The slots of one server. Its methods may be called from any thread."""

    @classmethod
    def open(cls) -> Cgroups:
        """Create the groups of this server. Raises OSError with the reason if groups cannot be made."""
        unified, parents = _own_groups()
        for parent in parents.values():
            _sweep(parent)
        return cls(unified, parents)

    def __init__(self, unified: bool, parents: Mapping[str, Path]) -> None:
        self._unified = unified
        name = f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self._roots = {controller: parent / name for controller, parent in parents.items()}
        self._free: list[CgroupSlot] = []
        self._made = 0
        self._yielding: set[CgroupSlot] = set()
        self._lock = threading.Lock()
        try:
            for directory in dict.fromkeys(self._roots.values()):
                directory.mkdir()
                if unified:
                    _write(directory / "cgroup.subtree_control", " ".join(f"+{one}" for one in self._roots))
            self.give(self.take())
        except OSError:
            self.close()
            raise

    def take(self) -> CgroupSlot:
        with self._lock:
            for slot in self._free:
                if slot.deserted:
                    self._free.remove(slot)
                    return slot
            self._made += 1
            name = str(self._made)
        directories = {controller: root / name for controller, root in self._roots.items()}
        for directory in dict.fromkeys(directories.values()):
            directory.mkdir()
        return CgroupSlot(directories, self._unified, self._yielding)

    def give(self, slot: CgroupSlot) -> None:
        self._yielding.discard(slot)
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        for directory in self._roots.values():
            _remove(directory)


def _own_groups() -> tuple[bool, dict[str, Path]]:
    """Return our own groups by controller, and whether they are one tree (version 2) or several."""
    own = {names: path for _, names, path in (line.split(":", 2) for line in _lines("/proc/self/cgroup"))}
    by_controller = {name: path for names, path in own.items() for name in names.split(",")}
    mounts = [line.split()[1:4] for line in _lines("/proc/self/mounts") if " cgroup" in line]
    groups: dict[str, Path] = {}
    for point, kind, options in mounts:
        for controller in set(options.split(",")) & set(_WANTED) if kind == "cgroup" else ():
            if controller in by_controller:
                groups[controller] = _below(point, by_controller[controller])
    if all(controller in groups for controller in _NEEDED):
        return False, groups
    for point, kind, _ in mounts:
        if kind == "cgroup2":
            return True, _delegated(_below(point, own.get("", "/")))
    raise OSError("this host has no cgroups for memory and processes")


def _below(point: str, path: str) -> Path:
    inside = Path(point) / path.lstrip("/")
    return inside if inside.is_dir() else Path(point)


def _delegated(group: Path) -> dict[str, Path]:
    """Version 2: delegate the controllers to groups below ours. A group that does so may hold no process itself."""
    offered = set((group / "cgroup.controllers").read_text().split())
    missing = set(_NEEDED) - offered
    if missing:
        raise OSError(f"the server's cgroup was not given the {' and '.join(sorted(missing))} controller")
    wanted = [one for one in _WANTED if one in offered]
    controllers = " ".join(f"+{one}" for one in wanted)
    try:
        _write(group / "cgroup.subtree_control", controllers)
    except OSError:
        if (group / "cgroup.procs").read_text().split() != [str(os.getpid())]:
            raise
        leaf = group / "interlock-server"
        leaf.mkdir(exist_ok=True)
        _write(leaf / "cgroup.procs", os.getpid())
        _write(group / "cgroup.subtree_control", controllers)
    return dict.fromkeys(wanted, group)


def _sweep(parent: Path) -> None:
    for directory in parent.glob(f"{PREFIX}*"):
        pid, _, rest = directory.name.removeprefix(PREFIX).partition("-")
        if not pid.isdigit() or rest.partition("-")[0] != _started(int(pid)):
            _remove(directory)


def _remove(directory: Path) -> None:
    # A group outlives the last of its processes by a moment.
    for _ in range(100):
        with contextlib.suppress(OSError):
            for slot in directory.iterdir() if directory.is_dir() else ():
                if slot.is_dir():
                    slot.rmdir()
            directory.rmdir()
        if not directory.is_dir():
            return
        time.sleep(0.01)


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _lines(path: str) -> Iterator[str]:
    return iter(Path(path).read_text().splitlines())


def _field(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode()
    finally:
        os.close(descriptor)


def _write(path: Path, value: object) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _write_if_there(path: Path, value: object) -> None:
    with contextlib.suppress(OSError):
        _write(path, value)
