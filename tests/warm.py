"""Commands as processes of their own that need not load the program anew: each is forked off one that has loaded it.

Most commands of the tests run in the process of the test (tests/support/in_process.py). Hundreds cannot: servers,
commands on a terminal, those that a signal ends. Loading is most of what each of them takes. The parent never opens
anything of Interlock's: what a command does, it does in a process, a directory and an environment of its own. It has
an empty database at hand, so that a new data directory needs no migration. What only a fresh interpreter heeds
(`PYTHON…` variables) cannot be tested this way and is refused; `tests.support.cli.INTERLOCK` starts one.

`run` waits for the end of a command. `start` does not, for servers and commands that a test sends signals to.

Each worker has such a process of its own. In a whole run they are forked off one, which is started while the tests are
collected (`Shared`); another one, forked off it, has loaded more, for the programs of `tests/support/forked.py`.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

import cedarpy
import pydantic
from cryptography.hazmat.primitives.asymmetric import ed25519

import interlock.cli
from interlock.core import expressions
from interlock.executors.sandbox.ladder import Rung
from interlock.gateway import isolation
from interlock.privacy.redact import RedactionRules, Redactor
from interlock.store import changes, migration
from tests.support import forked, postgres, surroundings

# What commands import when they need it, loaded once here. Each leaves the process with a single thread.
LOADED = (
    "cedarpy", "cryptography.hazmat.primitives.asymmetric.ed25519", "cryptography.hazmat.primitives.serialization",
    "cryptography.hazmat.primitives.ciphers.aead", "alembic.command",
    "alembic.runtime.migration", "sqlalchemy", "interlock.api.interlock", "interlock.api.scratch",
    "interlock.audit.chain", "interlock.audit.exported", "interlock.executors.sandbox.supervisor",
    "interlock.gateway.isolation", "interlock.registry.admission", "interlock.registry.retirement",
    "interlock.api.service", "interlock.trials", "interlock.upstreams.manager", "uvicorn", "interlock.doors.server",
    "interlock.doors.mcp.sdk", "interlock.doors.rest.api", "interlock.doors.jsonrpc", "interlock.http.connection",
    "interlock.audit.retention", "interlock.executors.confinement", "interlock.executors.isolated",
    "interlock.executors.remote", "interlock.store.administration", "interlock.store.at_rest",
    "interlock.api.tool_listing", "interlock.gateway.caller_tokens", "jwt", "encodings.ascii", "encodings.idna",
    "interlock.settings", "interlock.privacy.configured", "interlock.store.shared_settings",
    "interlock.registry.source", "interlock.demo_tools", "interlock.executors.program",
    "interlock.executors.sandboxed_function", "interlock.executors.sandbox.confine",
    "interlock.executors.sandbox.gvisor", "interlock.executors.sandbox.oneshot", "interlock.executors.sandbox.root",
    "interlock.audit.archive", "interlock.audit.backups", "interlock.store.copying", "interlock.api.connecting",
    "interlock.upstreams.openapi", "interlock.upstreams.http", "yaml", "click._textwrap",
    # Of commands that make calls, of those that look at stored data without one, and of `doctor`.
    "interlock.authority.blocked", "interlock.authority.policy_question", "interlock.authority.tokens",
    "interlock.gateway.reviewer_view", "interlock.upstreams.states",
    "interlock.api.wiring.authorizing", "interlock.api.wiring.executing", "interlock.api.wiring.gateway",
    "interlock.api.wiring.returning", "interlock.api.wiring.reviewing", "interlock.contract.source_text",
    "interlock.api.approvals_at_rest", "interlock.api.at_rest", "interlock.api.declared_tools",
    "interlock.api.drafts", "interlock.api.homes",
    "interlock.api.journal_files", "interlock.api.doctor.findings", "interlock.api.doctor.home",
    "interlock.api.doctor.journal", "interlock.api.doctor.keys", "interlock.api.doctor.machine",
    "interlock.api.doctor.policy", "interlock.api.doctor.tools", "interlock.api.config_check", "interlock.api.packages",
    "interlock.authority.policy_check", "interlock.authority.rule_warnings", "interlock.store.postgres.vectors",
    # Of searches.
    "interlock.api.tool_vectors", "interlock.search.index", "interlock.search.packaged", "numpy",
    # Of servers, but for gRPC: it reads what it shall log from the environment when it is loaded.
    "interlock.doors.operations", "interlock.doors.mcp.stdio", "anyio._backends._asyncio", "packaging.requirements",
    "uvloop", "google.protobuf.descriptor_pb2", "google.protobuf.json_format", "google.protobuf.struct_pb2",
    "google.rpc.error_details_pb2", "google.rpc.status_pb2",
    *postgres.LOADED,
)  # fmt: skip
PATIENCE_S = 150
# No descriptor that a test hands over has so high a number.
LEAST_DESCRIPTOR = 500

_one_at_a_time = threading.Lock()
# The modules of the tests, which a command has not loaded. They are looked for once: whoever looks at every name after
# a fork gets a copy of a thousand pages of memory.
_ours: list[str] = []


def run(
    words: Sequence[str], environment: Mapping[str, str], directory: Path, stdin: bytes = b"", *, merged: bool = False
) -> tuple[int, bytes, bytes]:
    """Run one command: its exit code, what it printed, and what it said on stderr unless both are merged."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        streams = (given.fileno(), out.fileno(), out.fileno() if merged else err.fileno())
        code = _ask(_task_of(words, environment, directory), streams)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def at_terminal(
    words: Sequence[str], environment: Mapping[str, str], directory: Path, columns: int = 100
) -> tuple[int, str]:
    """Run one command on a terminal of so many columns: its exit code, and all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    written = bytearray()

    def read() -> None:
        with suppress(OSError):  # nobody has the terminal open any more
            while piece := os.read(ours, 65_536):
                written.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        # The terminal itself says how large it is.
        heeded = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        code = _ask(_task_of(words, {**heeded, "TERM": "xterm"}, directory), (theirs, theirs, theirs))
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return code, written.decode().replace("\r\n", "\n")


class Started:
    """A command that was started, with the methods of `subprocess.Popen`. It is killed at the end of the block."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.wait(0) if self.returncode is not None or select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float = 60) -> int:
        """The exit code, minus the number of the signal where one ended the process."""
        if self.returncode is None:
            ready, _, _ = select.select([self._descriptor], [], [], timeout)
            assert ready, f"process {self.pid} still runs after {timeout} s"
            self.returncode = _ask({"reap": self.pid}, ())
        return self.returncode

    def communicate(self, timeout: float = 60) -> tuple[bytes, bytes]:
        """Close its stdin and wait for its end: what is left of what it printed and said on stderr."""
        _close(self.stdin)
        out, err = self.stdout.read(), self.stderr.read()
        self.wait(timeout)
        return out, err

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        os.close(self._descriptor)
        for stream in (self.stdin, self.stdout, self.stderr):
            _close(stream)


def _close(stream: IO[bytes]) -> None:
    with suppress(BrokenPipeError):
        stream.close()


def start(
    words: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    *,
    pass_fds: Sequence[int] = (),
    python: bool = False,
) -> Started:
    """Start one command with pipes to its streams. It has each descriptor of `pass_fds` under the same number.

    With `python` the words are those of an interpreter: `-c CODE …` or `-m MODULE …`.
    """
    pipes = [os.pipe() for _ in range(3)]
    theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
    try:
        task = {**_task_of(words, environment, directory), "start": True, "python": python, "pass_fds": [*pass_fds]}
        pid = _ask(task, (*theirs, *pass_fds))
    finally:
        for one in theirs:
            os.close(one)
    return Started(pid, open(pipes[0][1], "wb"), open(pipes[1][0], "rb"), open(pipes[2][0], "rb"))


def serve_programs(listening: int) -> None:
    """Have a process that has loaded the program serve a socket (see tests/support/forked.py)."""
    if surroundings.shared_socket[0]:
        with _connected(_OF_PROGRAMS) as door:
            socket.send_fds(door, [os.getpid().to_bytes(8, "big")], [listening])
            door.recv(1)
    else:
        _ask({"start": True, "serve": os.getpid()}, (listening,))


_OF_COMMANDS, _OF_PROGRAMS = "", "-programs"


def _connected(end: str) -> socket.socket:
    """A connection with a process that is forked off a shared one for it."""
    door = socket.socket(socket.AF_UNIX)
    door.settimeout(PATIENCE_S)
    door.connect(f"\0{surroundings.shared_socket[0]}{end}")
    door.recv(8)  # the process is there
    return door


def _task_of(words: Sequence[str], environment: Mapping[str, str], directory: Path) -> dict[str, Any]:
    ours = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    unheeded = {name for name, value in environment.items() if name.startswith("PYTHON") and ours.get(name) != value}
    assert not unheeded, f"only a fresh interpreter heeds {', '.join(unheeded)}"
    kept = postgres.given()
    return {"words": [*words], "environment": {**environment, **kept}, "directory": str(directory)}


def _ask(task: dict[str, Any], streams: Sequence[int]) -> int:
    with _one_at_a_time:
        try:
            return _warm().ask(task, streams)
        except BaseException:
            # Whatever it was about to answer must not be taken for the answer to the next.
            _warm().kill()
            _warm.cache_clear()
            raise


@cache
def _warm() -> _Warm:
    warm = _Warm()
    atexit.register(warm.kill)
    return warm


class _Warm:
    """The process that commands are forked off, with a session of its own; it ends with whoever started it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if surroundings.shared_socket[0]:
            self._ours = _connected(_OF_COMMANDS)
            surroundings.shared_descriptors.add(self._ours.fileno())
            return
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(PATIENCE_S)
        with theirs:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                env=environment, cwd=Path(__file__).parents[1], pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip

    def ask(self, task: dict[str, Any], streams: Sequence[int]) -> int:
        """Hand over a task: the exit code of a command that was run or reaped, the id of one that was started."""
        sent = json.dumps(task).encode()
        head = [len(sent).to_bytes(8, "big")]
        if streams:
            socket.send_fds(self._ours, head, list(streams))
        else:
            self._ours.sendall(head[0])
        self._ours.sendall(sent)
        answer = self._ours.recv(8)
        if not answer:
            raise RuntimeError("the process that commands are forked off has ended")
        return int.from_bytes(answer, "big", signed=True)

    def kill(self) -> None:
        surroundings.shared_descriptors.discard(self._ours.fileno())
        self._ours.close()  # one that is forked off a shared process ends by itself then
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


class Shared:
    """The process that those of all workers are forked off. It ends with the one that has started it, or before."""

    def __init__(self) -> None:
        name = f"interlock-tests-{os.getpid()}-{os.urandom(4).hex()}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
        with _listening(name + _OF_COMMANDS) as commands, _listening(name + _OF_PROGRAMS) as programs:
            descriptors = commands.fileno(), programs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", *map(str, descriptors), str(os.getpid())],
                env=environment, cwd=Path(__file__).parents[1], pass_fds=descriptors, start_new_session=True,
            )  # fmt: skip
        surroundings.shared_socket[0] = name

    def end(self) -> None:
        surroundings.shared_socket[0] = ""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _listening(name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")
    listening.listen(128)
    return listening


def _forked_for_each(listening: socket.socket, owner: int) -> socket.socket:
    """The connection of a worker, in the process that is its own. This one ends with its owner."""
    watched = os.pidfd_open(owner)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        ready, _, _ = select.select([listening, watched], [], [])
        if watched in ready:
            os._exit(0)
        door, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            os.close(watched)
            door.sendall(os.getpid().to_bytes(8, "big"))
            return door
        door.close()


def _serve_shared(commands: int, programs: int, owner: int) -> socket.socket:
    """Fork processes off this one, and off another that has loaded more: the connection of one for commands."""
    if os.fork() == 0:
        os.close(commands)
        _serve_programs(programs, owner)
    os.close(programs)
    return _forked_for_each(socket.socket(fileno=commands), owner)


def _serve_programs(programs: int, owner: int) -> NoReturn:
    for name in forked.LOADED:
        importlib.import_module(name)
    gc.freeze()
    with _forked_for_each(socket.socket(fileno=programs), owner) as door:
        told, received, _, _ = socket.recv_fds(door, 8, 1)
        door.sendall(b".")
    forked.serve(received[0], int.from_bytes(told, "big"))


def _task(door: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next command, in the process that shall be it; nothing in the parent when nobody asks any more."""
    while True:
        head, streams, _, _ = socket.recv_fds(door, 8, 16)
        if not head:
            return None
        left, parts = int.from_bytes(head, "big"), list[bytes]()
        while left:
            part = door.recv(left)
            if not part:
                return None
            parts.append(part)
            left -= len(part)
        task: dict[str, Any] = json.loads(b"".join(parts))
        child = task.get("reap") or os.fork()
        if child == 0:
            return task, streams
        for stream in streams:
            os.close(stream)
        answer = child if "start" in task else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        door.sendall(answer.to_bytes(8, "big", signed=True))


def _become(task: dict[str, Any], streams: list[int]) -> None:
    """Take on the streams, the directory, the environment and the words of a command."""
    # First out of the way: one may have the number that another shall have.
    moved = [fcntl.fcntl(stream, fcntl.F_DUPFD, 100) for stream in streams]
    for stream in streams:
        os.close(stream)
    for number, stream in zip((0, 1, 2, *task.get("pass_fds", ())), moved, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    # Whoever started it reads while it runs.
    at_once = 1 if "start" in task else -1
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a standard stream
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=at_once)  # noqa: SIM115 - a standard stream
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115 - a standard stream
    os.environ.clear()
    os.environ.update(task["environment"])
    time.tzset()
    os.chdir(task["directory"])
    sys.path[0] = task["directory"]
    postgres.use(os.environ)
    for name in _ours:
        del sys.modules[name]
    sys.argv = ["interlock", *task["words"]]


def _share_rungs(file: int) -> None:
    """Have commands find out once which ways of isolation work: trying each takes half a second of CPU.

    `file` holds what the first one found, by the path on which it looked for programs.
    """
    try_all = isolation.rungs

    async def rungs() -> Sequence[Rung]:
        known: dict[str, Any] = json.loads(os.pread(file, 1 << 20, 0) or b"{}")
        path = os.environ.get("PATH", "")
        if path not in known:
            found = await try_all()
            known[path] = [(one.backend, one.words, one.tiers, one.why_not, one.notes) for one in found]
            os.pwrite(file, json.dumps(known).encode(), 0)
        return [Rung(name, words, (*tiers,), why, (*notes,)) for name, words, tiers, why, notes in known[path]]

    isolation.rungs = rungs


def _run() -> int:
    try:
        interlock.cli.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def _end(code: int) -> NoReturn:
    """End as an interpreter does, but without taking apart every module that was loaded: that is most of a command."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _build() -> None:
    """Build what every command would build anew when it first uses it: models, records, patterns, keys, policies."""
    waiting = pydantic.BaseModel.__subclasses__()
    while waiting:
        model = waiting.pop()
        waiting += model.__subclasses__()
        if model.__module__.startswith("interlock."):
            model.model_rebuild(raise_errors=False)
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "interlock"]
    for record in {one for module in modules for one in vars(module).values() if isinstance(one, type)}:
        first = vars(record).get("__init__")
        if getattr(first, "__module__", "") == "interlock.core.record":
            with suppress(TypeError):  # it compiles the real one, which knows no such parameter
                record.__init__(None, **{"": None})
    lazy: type[Any] = type(expressions.expression(""))
    for pattern in [one for module in modules for one in vars(module).values() if isinstance(one, lazy)]:
        for method in ("match", "fullmatch", "search", "sub", "split", "findall", "finditer"):
            getattr(pattern, method)
    Redactor(RedactionRules())
    key = ed25519.Ed25519PrivateKey.generate()
    key.public_key().verify(key.sign(b""), b"")
    cedarpy.policies_to_json_str("permit (principal, action, resource);")


if __name__ == "__main__":
    for name in LOADED:
        importlib.import_module(name)
    for module in pkgutil.iter_modules(interlock.cli.__path__):
        if module.name != "__main__":
            importlib.import_module(f"interlock.cli.{module.name}")
    _build()
    # On a busy machine a store may not answer for a while.
    changes._PATIENCE_S = changes._PATIENCE_HERE_S = 60.0  # pyright: ignore[reportPrivateUsage]
    with tempfile.TemporaryDirectory() as place:
        migration.create(Path(place) / "empty.db")
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a thread would not be in the commands"
    _ours += [name for name in sys.modules if name.partition(".")[0] == "tests"]
    gc.freeze()  # or each command would look for garbage in all of this when it ends
    made = os.memfd_create("rungs")
    _share_rungs(fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR))
    os.close(made)
    given = [int(one) for one in sys.argv[1:]]
    with socket.socket(fileno=given[0]) if len(given) == 1 else _serve_shared(given[0], given[1], given[2]) as door:
        received = _task(door)
    if received is not None and "serve" in received[0]:
        forked.serve(received[1][0], received[0]["serve"])
    elif received is not None:
        _become(*received)
        _end(forked.run(received[0]["words"]) if received[0].get("python") else _run())
