"""What hostile code tries, and how each attempt must end, whatever back end runs it and whoever the server is."""
# ruff: noqa: E501 - the table keeps an attack to a line

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from interlock.data.schema import Json
from interlock.executors.sandbox import linux
from interlock.executors.sandbox.job import MIB, Job, JobOutcome, Limits, Mount, ProgramJob, PythonJob, Status
from interlock.executors.sandbox.supervisor import Sandbox

# What is not about time has plenty of it: on a busy machine a call may have a small share of the processor.
LIMITS = Limits(memory_bytes=96 * MIB, cpu_s=2, wall_s=60.0, pids=16, tmp_bytes=8 * MIB)

_CALLS = (
    "ptrace", "process_vm_readv", "unshare", "mount", "bpf", "keyctl", "open_by_handle_at", "setns", "pidfd_getfd",
    "userfaultfd", "perf_event_open", "chroot", "seccomp", "pivot_root", "shmget", "init_module", "clone",
)  # fmt: skip

_IN_ITS_OWN_KERNEL = (
    "host directories",
    "devices",
    "a refusal that is caught",
    "descriptors",
    "namespaces",
    "system calls",
    "signals and timers that the server's user has to share",
)

PRELUDE = f"""
import ctypes, errno, json, os, signal, socket, sys, time
C = ctypes.CDLL(None, use_errno=True)
NUMBERS = { ({name: linux.number(name) for name in _CALLS})!r}
def call(name, *arguments):
    result = C.syscall(ctypes.c_long(NUMBERS[name]), *[ctypes.c_long(one) for one in arguments])
    return errno.errorcode[ctypes.get_errno()] if result < 0 else "done"
def tried(function):
    try:
        function()
    except BaseException as error:
        return type(error).__name__
    return "done"
"""


@dataclass(frozen=True, slots=True)
class Attack:
    """Code, the ways in which it may end, and what must hold of how it ended."""

    name: str
    body: str | tuple[str, ...]
    ends: tuple[Status, ...]
    holds: Callable[[JobOutcome], bool] = lambda _: True
    limits: Limits = LIMITS
    mounts: tuple[Mount, ...] = ()

    @property
    def job(self) -> Job:
        said: Json = {"limits": self.limits, "mounts": self.mounts, "tier": 1 if self.mounts else 0}
        if isinstance(self.body, tuple):
            return ProgramJob(argv=self.body, **said)
        lines = "\n".join(f"    {line}" for line in self.body.strip().splitlines())
        return PythonJob(source=f"{PRELUDE}\ndef main():\n{lines}\n", entry="main", **said)

    async def fault(self, sandbox: Sandbox) -> str | None:
        """Run it; in words, what is wrong with how it ended."""
        outcome = await sandbox.run(self.job, exit_evidence=True)
        if sandbox.backend == "gvisor":
            # Another kernel has other words, and a device or namespace made in it is nobody's: only success matters.
            harmless = self.name in _IN_ITS_OWN_KERNEL or ("ok" in self.ends and self.holds(outcome))
            return None if outcome.status != "ok" or harmless else f"{self.name}: {outcome}"
        if outcome.status not in self.ends:
            return f"{self.name}: ended as {outcome.status}, not {' or '.join(self.ends)}: {outcome}"
        return None if self.holds(outcome) else f"{self.name}: {outcome}"


def _every(*allowed: str) -> Callable[[JobOutcome], bool]:
    def holds(outcome: JobOutcome) -> bool:
        value: Any = outcome.value
        return all(one in allowed for one in value)

    return holds


def _equals(value: Any) -> Callable[[JobOutcome], bool]:
    return lambda outcome: outcome.value == value


def _short(wall_s: float) -> Limits:
    return Limits(memory_bytes=96 * MIB, cpu_s=20, wall_s=wall_s, pids=16, tmp_bytes=8 * MIB)


def _left(**files: bytes) -> Callable[[JobOutcome], bool]:
    return lambda outcome: {one.path: one.content for one in outcome.files} == files


_FILES = replace(LIMITS, files=3)
_REFUSED = ("PermissionError", "OSError", "FileNotFoundError", "IsADirectoryError", "NotADirectoryError")
_OUTSIDE = ("/root/.ssh", "/home", "/etc/shadow", "/var", "/run", "/sys", "/boot", "/srv", "/proc/kcore/x")
_CALLED: dict[str, tuple[Any, ...]] = {
    "ptrace": (16, 1, 0, 0),
    "process_vm_readv": (1, 0, 0, 0, 0, 0),
    "pidfd_getfd": (0, 0, 0),
    "unshare": (0x10000000,),
    "mount": (0, 0, 0, 0, 0),
    "setns": (0, 0),
    "bpf": (0, 0, 0),
    "keyctl": (0, -3, 0),
    "open_by_handle_at": (-100, 0, 0),
    "userfaultfd": (1,),
    "perf_event_open": (0, 0, 0, 0, 0),
    "chroot": (0,),
    "seccomp": (1, 0, 0),
    "pivot_root": (0, 0),
    "shmget": (0, 4096, 0o1600),
    "init_module": (0, 0, 0),
    "clone": (0x10000011, 0, 0, 0, 0),
}


def _all_recorded(outcome: JobOutcome) -> bool:
    value: Json = outcome.value
    return set(value.values()) <= {"EPERM", "EACCES"} and set(_CALLED) <= set(outcome.violations)


NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")


def namespaces() -> Json:
    """The namespaces that this process is in."""
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}


def _all_its_own(outcome: JobOutcome) -> bool:
    """Whether no namespace is the server's own.

    Without a namespace for users (bubblewrap, started by root) it is a user that nobody else is.
    """
    ours = namespaces()
    user, its = outcome.value
    shared = {name for name in ours if its[name] == ours[name]}
    return not shared or (shared == {"user"} and user >= 65_536)


_ON_ITSELF = """for it in /proc/$$/exe $(command -v sh) /proc/self/exe
do
    (echo x >> $it) && echo changed $it
    rm -f $it && echo removed $it
    chmod u+w $it && echo opened $it
done
exit 0"""

ATTACKS = (
    # Files
    Attack("shadow", "return open('/etc/shadow').read()", ("error",), lambda one: b"root:" not in one.stderr),
    Attack("passwd of the host", "return open('/etc/passwd').read().count(':')", ("ok",), _equals(6)),
    Attack("host directories", f"return [p for p in {_OUTSIDE!r} if os.path.exists(p)]", ("ok",), _equals([])),
    Attack(
        "writes outside /tmp",
        "paths = ('/x', '/usr/x', '/etc/passwd', '/dev/x', '/in/x', '/proc/sys/kernel/core_pattern', os.__file__, "
        "'/proc/self/uid_map', json.__file__)\n"
        "return [tried(lambda p=p: open(p, 'wb', 0).write(b'x')) for p in paths]",
        ("ok",),
        _every(*_REFUSED),
    ),
    Attack(
        "its own code and the runner's",
        "import interlock\nd = os.path.dirname(interlock.__file__)\n"
        "return [tried(lambda: open(d + '/__init__.py', 'a')), tried(lambda: os.unlink(d + '/__init__.py')),"
        " tried(lambda: os.rename(d, '/tmp/d')), tried(lambda: os.chmod(d, 0o777))]",
        ("ok",),
        _every(*_REFUSED),
    ),
    Attack(
        "its own source",  # which is no file at all
        "return [os.path.exists(call.__code__.co_filename),"
        " *(tried(lambda p=p: open(p, 'r+b')) for p in ('/proc/self/exe', sys.executable, os.__file__))]",
        ("ok",),
        lambda one: one.value[0] is False and set(one.value[1:]) <= {*_REFUSED},
    ),
    Attack(
        "a program's own file",
        ("sh", "-c", _ON_ITSELF),
        ("ok",),
        lambda one: one.stdout == b"" and one.stderr.count(b"sh:") >= 3,
    ),
    Attack(
        "symbolic and hard links",
        "os.symlink('/etc/passwd', '/tmp/a'); os.symlink('/proc/1/root/usr/x', '/tmp/b')\n"
        "os.symlink('/proc/self/root/../../../etc/shadow', '/tmp/c')\n"
        "return [tried(lambda: open('/tmp/a', 'w')), tried(lambda: open('/tmp/b', 'w')), "
        "tried(lambda: open('/tmp/c')), tried(lambda: os.link('/etc/passwd', '/tmp/d')),"
        " tried(lambda: open('/tmp/../../../../etc/shadow'))]",
        ("ok",),
        _every(*_REFUSED),
    ),
    Attack(
        "devices",
        "return [tried(lambda: os.mknod('/tmp/sda', 0o060660, os.makedev(8, 0))), tried(lambda: open('/dev/sda')),"
        " tried(lambda: open('/dev/mem')), tried(lambda: open('/dev/kmsg'))]",
        ("ok",),
        _every(*_REFUSED),
    ),
    Attack(
        "inputs that it may only read",
        "a, b = '/in/file', '/in/files/attacks.py'\n"
        "return [open(a).read() == open(b).read() != '', *(tried(lambda p=p: open(p, 'ab')) for p in (a, b, '/in/files/x')),"
        " tried(lambda: os.unlink(b)), tried(lambda: os.rename(b, '/in/files/x')), tried(lambda: os.chmod(a, 0o777))]",
        ("ok",),
        lambda one: one.value[0] is True and set(one.value[1:]) <= {*_REFUSED},
        mounts=(Mount(Path(__file__), "/in/file"), Mount(Path(__file__).parent, "/in/files")),
    ),
    # Files that it leaves
    Attack(
        "what is left by code",
        "os.makedirs('/tmp/out/a'); open('/tmp/out/a/b', 'wb').write(bytes(range(256))); open('/tmp/out/c', 'w').close()\n"
        "return os.environ['INTERLOCK_OUT']",
        ("ok",),
        _left(**{"a/b": bytes(range(256)), "c": b""}),
        limits=_FILES,
    ),
    Attack(
        "what is left by a program",
        ("sh", "-c", "cp /in/file $INTERLOCK_OUT/it; ln -s /etc/passwd out/x; mkfifo out/y; ln -s / out/z"),
        ("ok",),
        _left(it=Path(__file__).read_bytes()),
        limits=_FILES,
        mounts=(Mount(Path(__file__), "/in/file"),),
    ),
    Attack("a link in place of the directory", "os.rmdir('/tmp/out'); os.symlink('/etc', '/tmp/out')", ("ok",), _left(), limits=_FILES),
    Attack("more files than it may leave", "for i in range(5000): open(f'/tmp/out/{i}', 'w').close()", ("limit",), _left(), limits=_FILES),
    Attack("larger files than it may leave", "open('/tmp/out/a', 'wb').truncate(4 << 20)", ("limit",), _left(), limits=_FILES),
    Attack(
        "files too deep",
        "for _ in range(60):\n    os.chdir('/tmp/out' if _ == 0 else 'd'); os.mkdir('d')",
        ("limit",),
        _left(),
        limits=_FILES,
    ),
    Attack("a name that is no text", "open(b'/tmp/out/\\xff', 'w').close()", ("no_result",), _left(), limits=_FILES),
    Attack("a name of two lines", "open('/tmp/out/a\\nb', 'w').close()", ("no_result",), _left(), limits=_FILES),
    Attack("a file that was not asked for", "os.write(3, b'F\\x05\\x00\\x00\\x00\"a\"\\nx'); time.sleep(60)", ("no_result",), _left()),
    # Network
    Attack("a connection", "socket.create_connection(('1.1.1.1', 80), 1)", ("network",)),
    Attack("the server's own port", "socket.socket().connect(('127.0.0.1', 22))", ("network",)),
    Attack("raw packets", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", ("network",)),
    Attack("virtual sockets", "socket.socket(40, socket.SOCK_STREAM)", ("network",)),
    Attack("a name", "socket.getaddrinfo('example.com', 80)", ("error", "network")),
    Attack(
        "a refusal that is caught",
        "tried(socket.socket)\nreturn 1",
        ("ok",),
        lambda one: one.violations == ("socket",) and one.value == 1,
    ),
    Attack("refusals without end", "while True: tried(socket.socket)", ("limit",)),
    # Processes
    Attack(
        "a fork bomb",
        "while True:\n    try:\n        if os.fork() == 0: continue\n    except OSError: time.sleep(60)",
        ("limit", "timeout"),
        limits=_short(1.0),
    ),
    Attack("as many as there can be", "while True:\n    if os.fork() == 0: time.sleep(60)", ("limit",)),
    Attack("a fork bomb in a shell", ("sh", "-c", "f() { f | f & }; (f) & exec sleep 60"), ("limit", "timeout"), limits=_short(1.0)),
    Attack(
        "signals to everybody",
        "hit = []\nfor p in (*range(2, 400), os.getppid()):\n    try:\n        os.kill(p, 9); hit.append(p)\n"
        "    except OSError: pass\nreturn [one for one in hit if one > 20]",
        ("ok", "crashed"),
        lambda one: not one.value,
    ),
    Attack("a signal to the group", "signal.signal(15, signal.SIG_IGN); os.kill(0, 15)\nreturn 1", ("ok",), _equals(1)),
    Attack("other processes", "return [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 20]", ("ok",), _equals([])),
    Attack(
        "descriptors",
        "found = []\nfor f in os.listdir('/proc/self/fd'):\n    try: found.append(os.readlink('/proc/self/fd/' + f))\n"
        "    except OSError: pass\n"
        "return [one for one in found if not one.startswith(('pipe:', 'socket:', '/dev/null', '/proc/'))]",
        ("ok",),
        _equals([]),
    ),
    Attack(
        "the environment",
        "seen = str(dict(os.environ)) + open('/proc/self/environ').read() + str(tried(lambda: open('/proc/1/environ')))\n"
        "return 'hunter2' in seen",
        ("ok",),
        _equals(False),
    ),
    # The kernel
    Attack(
        "namespaces",
        f"return os.getuid(), {{name: os.readlink('/proc/self/ns/' + name) for name in {NAMESPACES!r}}}",
        ("ok",),
        _all_its_own,
    ),
    Attack(
        "system calls",
        f"return {{name: call(name, *arguments) for name, arguments in {_CALLED!r}.items()}}",
        ("ok",),
        _all_recorded,
    ),
    Attack(
        "privileges",
        "import resource\nfacts = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "limits = [tried(lambda r=r: resource.setrlimit(getattr(resource, r), (-1, -1)))"
        " for r in ('RLIMIT_NPROC', 'RLIMIT_AS', 'RLIMIT_NOFILE', 'RLIMIT_CPU')]\n"
        "capabilities = [int(facts['Cap' + set], 16) for set in ('Eff', 'Prm', 'Inh', 'Bnd', 'Amb')]\n"
        "return [capabilities, int(facts['NoNewPrivs']), int(facts['Seccomp']), os.getuid() == 0,"
        " tried(lambda: os.setuid(0)) == 'done', limits.count('done')]",
        ("ok",),
        _equals([[0, 0, 0, 0, 0], 1, 2, False, False, 0]),
    ),
    Attack(
        "another user",
        ("sh", "-c", "su -c 'id -u' && echo su worked; sudo -n id -u && echo sudo worked; echo; id -u; id -g"),
        ("ok",),
        lambda one: b"worked" not in one.stdout and b"0" not in one.stdout.split(),
    ),
    # Memory
    Attack("one large block", "b = bytearray(4 << 30)\nreturn len(b)", ("memory",)),
    Attack("more and more", "kept = []\nwhile True: kept.append(os.urandom(1 << 20))", ("memory",)),
    Attack(
        "memory of many processes",
        "for _ in range(10):\n    if os.fork() == 0:\n        b = bytearray(os.urandom(1 << 20)) * 40; time.sleep(60)\n"
        "time.sleep(5)\nreturn 'lived'",
        ("memory",),
    ),
    Attack(
        "files in memory",
        "fd = os.memfd_create('x')\nfor _ in range(512): os.write(fd, b'x' * (1 << 20))\nreturn 'wrote it'",
        ("memory", "limit", "error"),
    ),
    # Time
    Attack("spinning", "while True: pass", ("timeout",), limits=_short(0.5)),
    Attack("spinning past the processor's limit", "while True: pass", ("limit",), limits=Limits(cpu_s=1, wall_s=150.0)),
    Attack(
        "ignored signals",
        "for s in range(1, 32):\n    tried(lambda s=s: signal.signal(s, signal.SIG_IGN))\ntime.sleep(100)",
        ("timeout",),
        limits=_short(0.5),
    ),
    Attack(
        "stopped processes",
        "p = os.fork()\nif p == 0:\n    os.setsid(); time.sleep(100)\nos.kill(p, signal.SIGSTOP); time.sleep(100)",
        ("timeout",),
        limits=_short(0.5),
    ),
    Attack(
        "signals and timers that the server's user has to share",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [34])\nn = 0\n"
        "while C.sigqueue(os.getpid(), 34, 0) == 0 and n < 5000: n += 1\nreturn n",
        ("ok",),
        lambda one: one.value <= 1024,
    ),
    # Storage and output
    Attack("a full disk", "for i in range(64): open(f'/tmp/{i}', 'wb', 0).write(b'x' * (1 << 20))", ("limit",)),
    Attack("a full table of files", "for i in range(10**6): open(f'/tmp/{i}', 'w').close()", ("limit", "memory", "timeout")),
    Attack("output without end", "while True: os.write(1, b'x' * 65536)", ("limit",), lambda one: len(one.stdout) <= MIB),
    Attack("errors without end", "while True: os.write(2, b'x' * 65536)", ("limit",), lambda one: len(one.stderr) <= MIB),
    Attack("a large result", "return 'x' * (10 << 20)", ("limit",)),
    # Crashes and lies
    Attack("a null pointer", "ctypes.string_at(0)", ("crashed",), lambda one: one.signal == 11),
    Attack("an abort", "os.abort()", ("crashed",)),
    Attack("a crashing program", ("sh", "-c", "kill -SEGV $$"), ("crashed",), lambda one: one.signal == 11),
    Attack("a recursion without end", "sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nf(0)", ("crashed", "memory", "error")),
    Attack("leaving without a result", "os._exit(0)", ("no_result",)),
    Attack("leaving with a code", "os._exit(3)", ("no_result",), lambda one: one.exit_code == 3),
    Attack("a frame of another kind", "os.write(3, b'\\xff\\xff\\xff\\xff\\xff{}'); time.sleep(60)", ("no_result",)),
    Attack("a frame too long", "os.write(3, b'R\\xff\\xff\\xff\\xff{}'); time.sleep(60)", ("limit",)),
    Attack("half a frame", "os.write(3, b'R\\x09\\x00\\x00\\x00{}'); os._exit(0)", ("no_result",)),
    Attack("a result that is no document", "os.write(3, b'R\\x02\\x00\\x00\\x00[]'); time.sleep(60)", ("no_result",)),
    Attack("a success and then a crash", "os.write(3, b'R\\x0b\\x00\\x00\\x00{\"ok\":true}'); ctypes.string_at(0)", ("crashed",)),
    Attack("a result too deep", "os.write(3, b'R\\x80\\x84\\x1e\\x00' + b'[' * 2000000); time.sleep(60)", ("limit",)),
    Attack("exiting the interpreter", "sys.exit(0)", ("error",)),
    Attack(
        "a daemon",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 100); time.sleep(300)\n"
        "    os._exit(0)\nreturn 'left it'",
        ("ok",),
    ),
)  # fmt: skip
