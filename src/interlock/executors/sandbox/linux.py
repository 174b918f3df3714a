"""System calls for isolation that Python does not offer: namespaces, mounts, capabilities, Landlock, seccomp.

Everything here raises OSError with the name of the call that failed, so that a host that denies one says which. The
tables cover x86_64 and aarch64; on any other machine looking up a number fails, and nothing is run.

`fork_into` is the one delicate function: a raw clone3 without Python's knowledge would leave the interpreter's and the
C library's idea of the thread wrong. The interpreter is told before and after, as its own fork does, and the kernel
writes the new thread id where the C library keeps it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from collections.abc import Iterable
from typing import Any

from interlock.core.record import dataclass
from interlock.executors.sandbox import syscalls

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_PIDFD, _CHILD_CLEARTID, _CHILD_SETTID, _SIGCHLD = 0x1000, 0x00200000, 0x01000000, 17

RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
BIND, REC, PRIVATE = 4096, 16384, 1 << 18
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _AT_EMPTY_PATH = -100, 0x8000, 0x1000
_CLONE_TREE, _FROM_DESCRIPTOR, _MAP_IDS = 1, 4, 0x100000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_PR_SET_NO_NEW_PRIVS, _PR_GET_TID_ADDRESS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 40, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_SIGKILL = 9

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# Through PyDLL a call keeps the interpreter's lock, which a fork must hold.
_locked: Any = ctypes.PyDLL(None, use_errno=True)
_locked.syscall.restype = ctypes.c_long


def number(name: str) -> int:
    """The number of a system call on this machine."""
    table = syscalls.NUMBERS.get(platform.machine())
    if table is None:
        raise OSError(38, f"the sandbox has no system call table for {platform.machine()}")
    return table[name]


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _call(name: str, *arguments: Any) -> int:
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number(name)), *given), name)


def _prctl(option: int, first: int = 0, second: int = 0) -> int:
    zero = ctypes.c_ulong(0)
    result = _libc.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), zero, zero)
    return _checked(result, f"prctl {option}")


def die_with_parent() -> None:
    """End when the thread that started this process ends. A change of user clears it: repeat it afterwards."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def set_dumpable(dumpable: bool) -> None:
    """Set whether this process's entries under /proc belong to its own user."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Drop every capability, now and for programs executed later."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    drop_bounding_set()
    _call("capset", struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), ctypes.create_string_buffer(24))


def drop_bounding_set() -> None:
    capability, zero = 0, ctypes.c_ulong(0)
    while _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), zero, zero, zero) == 0:
        capability += 1


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def close_from(lowest: int) -> None:
    _call("close_range", lowest, 0xFFFFFFFF, 0)


def _path(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    result = _libc.mount(_path(source), _path(target), _path(kind), ctypes.c_ulong(flags), _path(data))
    _checked(result, f"mount {kind or 'bind'} on {target}")


def detach(target: str) -> None:
    _checked(_libc.umount2(_path(target), _DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _call("pivot_root", ctypes.c_char_p(_path(new)), ctypes.c_char_p(_path(old)))


def restrict_mount(target: str, attributes: int, *, recursive: bool = True) -> None:
    """Add attributes (RDONLY, NOSUID…) to a mount, and to every mount below it."""
    request = struct.pack("<QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _call("mount_setattr", _AT_FDCWD, ctypes.c_char_p(_path(target)), flags, request, len(request))


def bind_writable(source: str, target: str, ids: int | None) -> None:
    """Mount a directory, and what is mounted below it, writable at another place.

    `ids`: a user namespace (see `namespace_of_ids`) by which the owners of files are translated.
    """
    tree = _call("open_tree", _AT_FDCWD, ctypes.c_char_p(_path(source)), _CLONE_TREE | os.O_CLOEXEC | _AT_RECURSIVE)
    try:
        mapped = 0 if ids is None else _MAP_IDS
        request = struct.pack("<QQQQ", NOSUID | NODEV | mapped, 0, 0, ids or 0)
        flags = _AT_EMPTY_PATH | _AT_RECURSIVE
        _call("mount_setattr", tree, ctypes.c_char_p(b""), flags, request, len(request))
        moved = ctypes.c_char_p(_path(target))
        _call("move_mount", tree, ctypes.c_char_p(b""), _AT_FDCWD, moved, _FROM_DESCRIPTOR)
    finally:
        os.close(tree)


def namespace_of_ids(stored: int, used: int) -> int:
    """Return a user namespace that translates one id: files of `stored` belong to `used`. One thread only.

    Needs root, and the process namespace that /proc shows.
    """
    ready, say_ready = os.pipe()
    go, say_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            unshare(NEWUSER)
            os.write(say_ready, b"x")
            os.close(say_go)
            os.read(go, 1)
        finally:
            os._exit(0)
    os.close(say_ready)
    try:
        if not os.read(ready, 1):
            raise OSError(1, "a user namespace for the owners of files cannot be made")
        for file in ("uid_map", "gid_map"):
            descriptor = os.open(f"/proc/{pid}/{file}", os.O_WRONLY)
            try:
                os.write(descriptor, f"{stored} {used} 1\n".encode())
            finally:
                os.close(descriptor)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for one in (ready, go, say_go):
            os.close(one)
        os.waitpid(pid, 0)


def map_own_user(inner: int, outer_uid: int, outer_gid: int) -> None:
    """Map one id into this new user namespace: the one that made the namespace."""
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner} {outer_uid} 1\n"),
        ("gid_map", f"{inner} {outer_gid} 1\n"),
    ):
        descriptor = os.open(f"/proc/self/{file}", os.O_WRONLY)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def fork_into(flags: int) -> tuple[int, int]:
    """Fork into new namespaces: (pid, pidfd) for the parent, (0, -1) for the child. One thread only."""
    pidfd, tid = ctypes.c_int(-1), ctypes.c_ulong(0)
    _prctl(_PR_GET_TID_ADDRESS, ctypes.addressof(tid))
    flags |= _PIDFD | _CHILD_SETTID | _CHILD_CLEARTID
    request = struct.pack("<11Q", flags, ctypes.addressof(pidfd), tid.value, 0, _SIGCHLD, 0, 0, 0, 0, 0, 0)
    clone3, size = ctypes.c_long(number("clone3")), ctypes.c_long(len(request))
    interpreter: Any = ctypes.pythonapi
    interpreter.PyOS_BeforeFork()
    pid: int = _locked.syscall(clone3, request, size)
    if pid == 0:
        interpreter.PyOS_AfterFork_Child()
        return 0, -1
    error = ctypes.get_errno()
    interpreter.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, f"clone3 {flags:#x}: {os.strerror(error)}")
    return pid, pidfd.value


# Landlock. Rights were added with versions of its interface: one that this kernel does not know must not be requested.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = {2: 1 << 13, 3: _TRUNCATE, 5: _IOCTL_DEV}
_BELOW_PATH, _ON_PORT, _CONNECT = 1, 2, 2
_BIND_AND_CONNECT, _SCOPED = 3, 3


def landlock_version() -> int:
    """The version of Landlock's interface; 0 if the kernel has none."""
    nothing, zero, version = None, ctypes.c_long(0), ctypes.c_long(1)
    version_: int = _libc.syscall(ctypes.c_long(number("landlock_create_ruleset")), nothing, zero, version)
    return max(version_, 0)


def landlock(version: int, *, readable: Iterable[str], writable: Iterable[str], ports: Iterable[int]) -> None:
    """Confine this process's file access to paths, its TCP connections to ports, its signals to its own domain."""
    rights = _FIRST_RIGHTS
    for since, right in _LATER_RIGHTS.items():
        rights |= right if version >= since else 0
    attributes = struct.pack("<QQQ", rights, _BIND_AND_CONNECT, _SCOPED)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    rules = _call("landlock_create_ruleset", attributes, len(attributes), 0)
    for paths, allowed in ((readable, _READING), (writable, rights)):
        for path in paths:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            of_path = allowed if os.path.isdir(path) else allowed & _OF_A_FILE
            _call("landlock_add_rule", rules, _BELOW_PATH, struct.pack("<Qi", of_path & rights, descriptor), 0)
            os.close(descriptor)
    if version >= 4:
        for port in ports:
            _call("landlock_add_rule", rules, _ON_PORT, struct.pack("<QQ", _CONNECT, port), 0)
    _call("landlock_restrict_self", rules, 0)
    os.close(rules)


_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def load_filter(program: bytes, *, listening: bool) -> int:
    """Apply a seccomp program to this process, for good. Returns the descriptor that reports refused calls."""
    code = ctypes.create_string_buffer(program, len(program))
    given = _Program(len(program) // 8, ctypes.addressof(code))
    return _call("seccomp", _SET_MODE_FILTER, _NEW_LISTENER if listening else 0, ctypes.byref(given))


def add_filter(program: bytes) -> None:
    """Apply one more seccomp program to this process. Unlike `load_filter` it works under our own."""
    code = ctypes.create_string_buffer(program, len(program))
    given = _Program(len(program) // 8, ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(given))


@dataclass(frozen=True, slots=True)
class WaitingSyscall:
    """A system call that waits for an answer."""

    id: int
    pid: int
    number: int
    arguments: tuple[int, ...]


def hear_refusal(listener: int) -> WaitingSyscall | None:
    """Return the next system call that waits; None if its process is gone."""
    buffer = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except OSError:
        return None
    notification, pid, _flags, called = struct.unpack_from("<QIIi", buffer)
    return WaitingSyscall(notification, pid, called, struct.unpack_from("<6Q", buffer, 32))


def answer_refusal(listener: int, notification: int, error: int) -> None:
    """Let the waiting system call fail with this error; with 0, let it continue."""
    try:
        fcntl.ioctl(listener, _ANSWER, struct.pack("<QqiI", notification, 0, -error, 0 if error else 1))
    except OSError:
        pass  # its process was killed meanwhile
