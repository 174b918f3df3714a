"""The code inside the sandbox: takes one request, runs what it names, reports the result, and ends.

Everything before this module is trusted; everything after the request is read may be hostile, and shares this process.
Nothing here is a guard. The guards are in place already, and the supervisor trusts nothing that is reported here.
"""

from __future__ import annotations

import base64
import errno
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import select
import signal
import stat
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

from interlock.executors.sandbox import frames, linux
from interlock.executors.sandbox.line import DESCRIPTOR, Control, Line, exactly

Json = dict[str, Any]
Emit = Callable[[bytes, bytes], None]


FILES, SECRETS = "/tmp/out", "/tmp/.secrets"  # noqa: S108 - inside, private to the call
_MESSAGE_LENGTH = 2000
_LOADED = "interlock_tools."
_OUT_OF_MEMORY = b'{"ok":false,"error":{"type":"MemoryError","message":"out of memory"}}'


def serve(control: Control) -> None:
    """Wait for the request, run it, answer. After it returns the process ends."""
    head = exactly(control, frames.HEAD_SIZE)
    if head is None:
        return
    body = exactly(control, frames.head(head)[1])
    if body is None:
        return
    request: Json = json.loads(body)
    os.environ.update(request["env"])

    line = Line(control)
    try:
        if request["files"]:
            os.mkdir(FILES)
            os.environ["INTERLOCK_OUT"] = FILES
        answer = _program(request, line) if "argv" in request else _python(request, line)
        if request["files"]:
            _send_files(line.emit, request["files"])
        result = json.dumps(answer, allow_nan=False).encode()
    except MemoryError:
        result = _OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - the edge of the sandbox: whatever it is, it is told
        result = json.dumps({"ok": False, "error": _described(error)}).encode()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:  # noqa: BLE001, S110 - the code may have put anything in their place
        pass
    line.emit(frames.RESULT, result)


def _described(error: BaseException) -> Json:
    traceback.print_exception(error, limit=-8)
    document: Json = {"type": _text(type(error).__name__), "message": _text(str(error))}
    if isinstance(error, OSError) and error.errno is not None:
        document["errno"] = error.errno
    if hasattr(error, "row") and hasattr(error, "retryable"):
        document |= {"code": getattr(error, "code", None), "retryable": getattr(error, "retryable", False)}
    return document


def _text(text: str) -> str:
    """Make a text sendable: the name of a file, and so a message about it, need not be valid Unicode."""
    return text[:_MESSAGE_LENGTH].encode(errors="replace").decode()


# Programs


def _program(request: Json, line: Line) -> Json:
    # INVARIANT: a program cannot write into the memory of the process that reports how it ended.
    linux.set_dumpable(False)
    os.chdir(request["cwd"])
    if request["secrets"]:
        os.mkdir(SECRETS, 0o700)
        for name, value in request["secrets"].items():
            with open(f"{SECRETS}/{name}", "xb") as file:
                file.write(base64.b64decode(value))
    source = os.open("/tmp/.stdin", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)  # noqa: S108 - inside
    os.unlink("/tmp/.stdin")  # noqa: S108
    with open(source, "wb", closefd=False) as file:
        file.write(base64.b64decode(request["stdin"]))
    os.lseek(source, 0, os.SEEK_SET)
    ends, signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(signalled)
    signal.signal(signal.SIGCHLD, _woken)
    program = os.posix_spawnp(
        request["argv"][0],
        request["argv"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_CLOSE, 3)],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ],
    )
    os.close(source)
    return {"ok": True, "exit": os.waitstatus_to_exitcode(_ended(program, ends, line))}


def _woken(_: int, __: object) -> None:
    """Handle the end of a child: `_ended` is woken, and looks."""


def _ended(program: int, ends: int, line: Line) -> int:
    """Wait for the end of a program and return its status. When its call is over, the program gets SIGTERM, once."""
    poll = select.poll()
    poll.register(ends, select.POLLIN)
    poll.register(DESCRIPTOR, select.POLLIN)
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            return status
        if ended:
            continue  # orphans become children of the first process of the namespace
        for descriptor, _ in poll.poll():
            if descriptor == ends:
                os.read(ends, 1 << 12)
            elif line.aborted():
                poll.unregister(DESCRIPTOR)
                os.kill(program, signal.SIGTERM)


# Python


def _python(request: Json, line: Line) -> Json:
    # Below a name of its own: a tool may have the name of its package, or of a module that it imports.
    name = _LOADED + os.path.basename(request["filename"]).removesuffix(".py")
    sys.meta_path.insert(0, _Imports(name, request["imports"], request["modules"], request["package"]))
    module = types.ModuleType(name)
    module.__package__ = request["package"]
    module.__file__ = request["filename"]
    sys.modules[name] = module
    exec(compile(request["source"], request["filename"], "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    path, _, handler = request["entry"].partition(":")
    entry: Any = module
    for part in path.split("."):
        entry = getattr(entry, part)
    answer = _call(entry.handlers[handler] if handler else entry, request, line)
    if handler == "preview":
        answer["value"] = _previewed(answer["value"])
    return answer


def _previewed(answer: Any) -> Json:
    from interlock.call.context import previewed

    preview = previewed(answer)
    changes = [
        {"resource": one.resource, "operation": one.operation, "before": one.before, "after": one.after}
        for one in preview.effects
    ]
    return {"effects": changes, "preconditions": dict(preview.preconditions), "impact": preview.impact}


class _Nobody:
    """The other end of a line that nothing is sent over."""

    def recv(self, bufsize: int, /) -> bytes:
        return b""

    def sendall(self, data: bytes, /) -> None:
        pass


def warm() -> None:
    """Run an empty request, so that memory and caches are warm."""
    source = "def main(x):\n  try:\n    return {'a': [x + 1, 's%d' % x]}\n  except Exception:\n    raise\n"
    document: Json = {
        "filename": "warm.py",
        "imports": [],
        "modules": {},
        "package": "",
        "source": source,
        "entry": "main",
        "arguments": {"x": 1},
    }
    request = json.loads(json.dumps(document))
    answer = _python(request, Line(_Nobody()))
    frames.head(frames.frame(frames.RESULT, json.dumps(answer).encode())[: frames.HEAD_SIZE])
    del sys.modules[f"{_LOADED}warm"]
    sys.meta_path.pop(0)
    sys.stdout.flush()


def _call(entry: Any, request: Json, line: Line) -> Json:
    function, arguments, takes_context, dump = _bound(entry, request["arguments"])
    if takes_context is None and not inspect.iscoroutinefunction(function):
        value = function(**arguments)
        return {"ok": True, "value": value if dump is None else dump(value), "reports": {}}

    import asyncio

    return asyncio.run(_call_on_loop(function, arguments, takes_context, dump, request, line))


async def _call_on_loop(
    function: Callable[..., Any],
    arguments: Json,
    takes_context: str | None,
    dump: Callable[[Any], Any] | None,
    request: Json,
    line: Line,
) -> Json:
    context = None
    if takes_context is not None:
        context = arguments[takes_context] = _context(request, line)
    value = function(**arguments)
    if inspect.isawaitable(value):
        _cancel_when_over(line)
        value = await value
    reports = {} if context is None else await _reports(context)
    return {"ok": True, "value": value if dump is None else dump(value), "reports": reports}


def _cancel_when_over(line: Line) -> None:
    """Have the current task cancelled when the call is over."""
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def look() -> None:
        if line.aborted():
            loop.remove_reader(DESCRIPTOR)
            task.cancel()

    loop.add_reader(DESCRIPTOR, look)


def _bound(entry: Any, arguments: Json) -> tuple[Callable[..., Any], Json, str | None, Callable[[Any], Any] | None]:
    """Return the function, its arguments in its own types, the name of its context parameter, and how to dump its
    result.
    """
    if all(hasattr(entry, name) for name in ("arguments", "function", "handlers", "dump")):  # a declared tool
        from interlock.executors.function import bind

        return entry.function, dict(bind(entry, arguments)), entry.context, entry.dump
    if not getattr(entry, "__annotations__", None):
        return entry, dict(arguments), None, None
    from interlock.call.context import Context
    from interlock.contract.hints import convert

    hints = inspect.get_annotations(entry, eval_str=True)
    context = next((name for name, hint in hints.items() if hint is Context), None)
    return entry, dict(convert(entry, arguments)), context, None


def _context(request: Json, line: Line) -> Any:
    from pathlib import Path

    from interlock.call.context import Caller, Context
    from interlock.core.clock import Deadline
    from interlock.core.errors import Failure

    call, secrets = request["call"], request["secrets"]
    caller = call.get("caller", {"id": "sandbox"})

    def secret(name: str) -> str:
        if name not in secrets:
            raise Failure("E3602", f"no credential `{name}` was lent to this call")
        return base64.b64decode(secrets[name]).decode()

    save, emit = _saver(request, line), line.emit

    async def save_waiting(label: str, state: Any) -> None:
        save(label, state)

    async def child(*_: Any, **__: Any) -> Any:
        raise Failure("E3109", "a sandboxed tool cannot call other tools; chain them instead")

    class Inside(Context):
        @property
        def cancelled(self) -> bool:
            return line.aborted() or super().cancelled

    return Inside(
        invocation_id=call.get("invocation_id", ""),
        caller=Caller(**caller | {"scopes": frozenset(caller.get("scopes", ()))}),
        deadline=Deadline(at=time.monotonic() + request["wall_s"]),
        monotonic=time.monotonic,
        session=call.get("session", {}),
        key=call.get("key"),
        dry_run=call.get("dry_run", False),
        trace_id=call.get("trace_id", ""),
        native=call.get("native"),
        trace=lambda: call.get("trace_headers", {}),
        on_progress=lambda facts: emit(frames.PROGRESS, json.dumps(facts).encode()),
        on_partial=lambda part: emit(frames.PARTIAL, json.dumps(part).encode()),
        child=child,
        hide=lambda text: text,
        secret=secret,
        task=call.get("task", ""),
        save=save_waiting,
        save_blocking=save,
        out=Path(FILES) if request["files"] else None,
    )


def _saver(request: Json, line: Line) -> Callable[[str, Any], None]:
    """Make the function that saves checkpoints: outside, while the code waits here. Invalid ones are refused here
    already.
    """
    from interlock.call.checkpoints import check_label, not_offered, refuse_more, written
    from interlock.core.errors import Failure

    bounds = request["checkpoints"]
    numbers = iter(range(1, 1 if bounds is None else bounds[0] + 1))
    turn = threading.Lock()

    def save(label: str, state: Any) -> None:
        if bounds is None:
            raise not_offered("this tool")
        check_label(label)
        text, _ = written(state, bounds[1])
        with turn:
            number = next(numbers, None)
            if number is None:
                raise refuse_more(bounds[0])
            head = json.dumps({"number": number, "label": label}).encode()
            answer = line.ask(frames.CHECKPOINT, head + b"\n" + text)
        if answer.get("number") != number or "code" in answer:
            raise Failure(answer.get("code", "E3902"), answer.get("message"))

    return save


async def _reports(context: Any) -> Json:
    """Collect the reports of the tool. Attested facts are observed here, where the tool's files are."""
    observed: list[Json] = []
    for one in context.attestations:
        seen = one.observe()
        seen = await seen if inspect.isawaitable(seen) else seen
        observed.append({"what": one.what, "claimed": one.claimed, "observed": seen})
    attached = context.attaching()
    return {
        "changes": [
            {"resource": one.resource, "operation": one.operation, "before": one.before, "after": one.after}
            for one in context.changes
        ],
        "attestations": observed,
        "compensation": context.compensation,
        "modifiers": context.modifiers,
        "cost": {part: getattr(context.costs, part) for part in _cost_parts()},
        "session": dict(context.session),
        "content": attached.content,
        "views": attached.views,
        "handoffs": attached.handoffs,
        "provenance": attached.provenance,
    }


def _cost_parts() -> Sequence[str]:
    from interlock.call.cost import CALL_PARTS

    return CALL_PARTS


class _Text(importlib.abc.InspectLoader):
    """Loads the modules that came with the request."""

    def __init__(self, modules: dict[str, tuple[str, bool]]) -> None:
        self._modules = modules

    def get_source(self, fullname: str) -> str:
        return self._modules[fullname][0]

    def is_package(self, fullname: str) -> bool:
        return self._modules[fullname][1]


class _Imports(importlib.abc.MetaPathFinder):
    """Finds the modules that came with the tool, and refuses it others that are not among its dependencies.

    Refused are modules that are neither Python's own, nor vetted, nor named by the tool: a rule about dependencies, so
    that a tool's list is complete; what a module could do is bounded elsewhere. The imports of a dependency are not
    restricted. Of the tool's own package nothing is loaded that did not come with it, because it was not admitted.
    """

    def __init__(self, tool: str, allowed: Sequence[str], modules: dict[str, tuple[str, bool]], package: str) -> None:
        self._tools = {tool, *modules}
        self._allowed = {*allowed, "interlock", "pydantic"}
        self._modules = modules
        own = {name for name, (_, is_package) in modules.items() if is_package} | {package.partition(".")[0]}
        self._own = tuple(f"{name}." for name in own - {"", "interlock"})
        self._loader = _Text(modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._modules:
            return importlib.machinery.ModuleSpec(
                fullname, self._loader, is_package=self._modules[fullname][1], origin=f"{fullname}.py"
            )
        if f"{fullname}.".startswith(self._own):
            raise ModuleNotFoundError(f"`{fullname}` did not come with this tool", name=fullname)
        top = fullname.partition(".")[0]
        known = top in self._allowed or top in sys.stdlib_module_names or top in sys.modules
        if not known and self._asked_by_tool():
            raise ModuleNotFoundError(f"`{fullname}` is not among the dependencies of this tool", name=fullname)
        return None

    def _asked_by_tool(self) -> bool:
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while frame.f_globals.get("__name__", "").startswith("importlib") and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_globals.get("__name__") in self._tools


# Files


class UnreadableFile(Exception):  # noqa: N818 - told to callers by its name
    """The tool produced a file that not even its owner may read."""


def _send_files(emit: Emit, most: int) -> None:
    """Send the output directory, file by file, each up to `most` bytes. No links are followed.

    The supervisor enforces the limits: it ends the call at the first frame that exceeds them.
    """
    directory = _opened(FILES, os.O_DIRECTORY, None)
    if directory is not None:
        _send_directory(emit, most, directory, "", 1)


def _send_directory(emit: Emit, most: int, directory: int, above: str, depth: int) -> None:
    try:
        with os.scandir(directory) as entries:
            entries_ = sorted(entries, key=lambda entry: entry.name)
        for entry in entries_:
            path = above + entry.name
            if entry.is_dir(follow_symlinks=False):
                below = _opened(entry.name, os.O_DIRECTORY, directory)
                if below is not None and depth < frames.DEEPEST_PATH:
                    _send_directory(emit, most, below, f"{path}/", depth + 1)
                elif below is not None:
                    os.close(below)
                    emit(frames.FILE, json.dumps(f"{path}/").encode() + b"\n")
            elif entry.is_file(follow_symlinks=False):
                _send_file(emit, most, _opened(entry.name, 0, directory), path)
    finally:
        os.close(directory)


def _send_file(emit: Emit, most: int, descriptor: int | None, path: str) -> None:
    if descriptor is None:
        return
    with open(descriptor, "rb", buffering=0) as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            content = bytearray()
            while len(content) < most and (more := file.read(min(most - len(content), 1 << 20))):
                content += more
            emit(frames.FILE, json.dumps(path).encode() + b"\n" + content)


def _opened(name: str, kind: int, directory: int | None) -> int | None:
    """Open an entry; None if it is gone or has been replaced by something else."""
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | kind, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            return None
        raise UnreadableFile(name) from error
