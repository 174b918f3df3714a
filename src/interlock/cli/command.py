"""The parts that all commands share: the data directory or server, the form of the answer, and error handling."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.call.context import Caller
    from interlock.cli.render import Page
    from interlock.core.errors import Failure
    from interlock.store.port import Reader

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Session:
    """The options before the name of the command."""

    home: str | None
    verbose: bool
    # The server that carries out commands, instead of this process on a data directory.
    server: str | None = None
    insecure: bool = False

    @property
    def path(self) -> Path:
        if self.home:
            return Path(self.home)
        import platformdirs

        return Path(platformdirs.user_data_dir("interlock"))


class Output:
    """Writes the answer of a command: a page for people, or one JSON document and nothing else on stdout."""

    def __init__(self, *, as_json: bool, session: Session) -> None:
        self.as_json = as_json
        self.session = session
        # A command that fails without a call has a trace of its own, under which --verbose logs why.
        self.trace_id = os.urandom(16).hex()
        self.stdout = open(os.dup(1), "wb")  # noqa: SIM115 - lives as long as the command

    def answer(self, document: Any, show: Callable[[Page], None]) -> None:
        """Write the answer, as JSON or as a page."""
        if self.as_json:
            self.write(document)
        else:
            show(self.page())

    def page(self, *, error: bool = False) -> Page:
        from interlock.cli.render import Page

        return Page(sys.stderr if error else sys.stdout)

    @property
    def shows_progress(self) -> bool:
        """Whether somebody sees progress: on a terminal, and not beside JSON, which programs read."""
        return not self.as_json and sys.stderr.isatty()

    def progress(self, words: str, percent: float | None = None) -> None:
        """Show progress on a terminal. Each text replaces the last one; an empty text clears the line."""
        if not self.shows_progress:
            return
        import shutil

        from interlock.cli.render import clean, progress_bar

        columns = shutil.get_terminal_size().columns
        bar = "" if percent is None else f"{progress_bar(percent)}  " if columns >= 60 else f"{percent:.0f} %  "
        text = clean(f"{bar}{words}").replace("\n", " ")
        sys.stderr.write(f"\r\x1b[K{text[: columns - 1]}")
        sys.stderr.flush()

    @contextlib.contextmanager
    def working(self, words: str) -> Generator[None]:
        """Show what takes long while it lasts, on a terminal."""
        self.progress(words)
        try:
            yield
        finally:
            self.progress("")

    def report(self, record: dict[str, Any]) -> None:
        """Show a progress record of a call."""
        percent: Any = record.get("percent")
        self.progress(str(record.get("message") or ""), percent if isinstance(percent, int | float) else 0.0)

    def write(self, document: Any) -> None:
        """One JSON document: on one line for programs, indented for people."""
        import json

        import orjson

        people = self.stdout.isatty()
        option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if people else 0)
        try:
            text = orjson.dumps(document, default=_as_json, option=option)
        except TypeError:  # a whole number beyond 64 bits
            text = json.dumps(document, default=_as_json, indent=2 if people else None).encode()
        if people:
            from interlock.cli.terminal import clean_json

            text = clean_json(text.decode()).encode()
        self.stdout.write(text + b"\n")
        self.stdout.flush()

    def fail(self, failure: Failure) -> None:
        """Write the failure of the command."""
        if self.as_json:
            # Shaped like any result, so that one reader serves both.
            self.write(
                {
                    "status": "failed",
                    "is_error": True,
                    "structured_content": None,
                    "invocation_id": None,
                    "error": failure.envelope(self.trace_id),
                    "metadata": {"replayed": False, "source": "synthetic"},
                }
            )
            return
        self.page(error=True).failure(failure, home=str(self.session.path))

    @contextlib.contextmanager
    def reserved(self) -> Generator[None]:
        """With JSON, redirect output of tools and their modules to stderr: stdout is for the answer."""
        if not self.as_json:
            yield
            return
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)


def _as_json(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else str(value)


def over_home(body: Callable[..., Awaitable[int]]) -> Callable[..., None]:
    """Make a command of a coroutine function on an open data directory. The holder of INTERLOCK_TOKEN is the caller.

    A command with its own --token option sets the caller itself. What answers it at rest is for the local user alone.
    """

    @functools.wraps(body)
    async def work(app: Interlock, out: Output, /, **given: Any) -> int:
        if "token" not in given:
            await acting(app, held_token())
        return await body(app, out, **given)

    return _looking(work, has_caller=True)


def looking(body: Callable[..., Awaitable[int]]) -> Callable[..., None]:
    """Make a command that only reads and has no caller: who can read the data directory's files may run it."""
    return _looking(body, has_caller=False)


def _looking(body: Callable[..., Awaitable[int]], *, has_caller: bool) -> Callable[..., None]:

    @functools.wraps(body)
    def run(out: Output, /, **given: Any) -> int:
        read = _AT_REST.get(_origin(body))
        if read is not None and given.get("token") is None and not (has_caller and held_token() is not None):
            with reader_of(out.session) as reader:
                if reader is not None and (code := read(reader, out, **_without_token(given))) is not None:
                    return code

        import asyncio

        async def work() -> int:
            async with opened(out.session) as app:
                try:
                    return await body(app, out, **given)
                except asyncio.CancelledError:
                    # Ctrl-C. The user may believe that nothing happened, so the outcome of unfinished writes is shown.
                    if (left := await _left_behind(app)) is None:
                        raise
                    out.fail(left)
                    return 1

        return asyncio.run(work())

    return without_home(run)


def reading(body: Callable[..., int]) -> Callable[..., None]:
    """Make a command that only reads the database and has no caller: who can read the files may run it.

    The data directory is opened first only if something has to be put in order, such as calls of a process that died.
    """

    @functools.wraps(body)
    def run(out: Output, /, **given: Any) -> int:
        with reader_of(out.session) as reader:
            if reader is not None:
                return body(reader, out, **given)

        async def work() -> int:
            from interlock.api import homes

            async with opened(out.session):
                with homes.reading(out.session.path) as reader:
                    return body(reader, out, **given)

        import asyncio

        return asyncio.run(work())

    return without_home(run)


# The functions that answer commands from the database alone, by the functions that run them on an open data directory.
_AT_REST: dict[Callable[..., Any], Callable[..., int | None]] = {}


def at_rest(read: Callable[..., int | None]) -> Callable[[F], F]:
    """Let a command that only reads be answered from the database alone: `read(reader, out, …)` gets its arguments.

    That takes a quarter of the time. The data directory is opened as ever if something has to be put in order first, if
    a token is given, and if `read` returns None.
    """

    def mark(command: F) -> F:
        _AT_REST[_origin(command)] = read
        return command

    return mark


def _without_token(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "token"}


@contextlib.contextmanager
def reader_of(session: Session) -> Generator[Reader | None]:
    """The database of a data directory that need not be opened to be read; None if it has to be."""
    from interlock.api.homes import reader_at_rest

    _without_plugins()
    with contextlib.ExitStack() as within:
        yield reader_at_rest(session.path, within)


async def _left_behind(app: Interlock) -> Failure | None:
    """The outcome of the writes of this process, which is being interrupted; None if there are none."""
    from interlock.api.homes import left_behind
    from interlock.core.errors import CODES, Failure

    left = await left_behind(app)
    if not left:
        return None
    unknown = [one for one in left if one.unknown]
    if not unknown:
        ended = ", ".join(f"{one.tool} (interlock calls show {one.call})" for one in left)
        return Failure("E3703", f"interrupted, after this had ended: {ended}", resolution="look at what became of it")
    doubts = ", ".join(one.tool for one in unknown)
    settle = "; ".join(f"interlock calls reconcile {one.call}" for one in unknown)
    return Failure(
        "E3703",
        f"interrupted: whether {doubts} took effect is unknown; look, then settle it with: {settle}",
        details={"outcome": "unknown", "invocation_ids": [one.call for one in unknown]},
        resolution=CODES["E3409"].resolution,
        unsettled=True,
    )


def without_home(body: Callable[..., int]) -> Callable[..., None]:
    """Make a command of a function that needs no open data directory. Adds --json and error handling."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
    @click.pass_obj
    @functools.wraps(body)
    def run(session: Session, /, *, as_json: bool, **given: Any) -> None:
        out = Output(as_json=as_json, session=session)
        _log(session)
        work = body if session.server is None else _REMOTE.get(_origin(body))
        if work is None:
            words = _LOCAL_ONLY.get(_origin(body), "works on a data directory itself, and not through a server")
            where = "run it where the directory is, with --home, or without --server, INTERLOCK_SERVER and a login"
            raise click.UsageError(f"`{click.get_current_context().command_path}` {words}; {where}")
        with out.reserved():
            code = _guarded(out, lambda: work(out, **given))
        _leave(code)

    return run


# The functions that run commands at a server, by the functions that run them here.
_REMOTE: dict[Callable[..., Any], Callable[..., int]] = {}


def _origin(body: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it was written, under its decorators."""
    while (inner := getattr(body, "__wrapped__", None)) is not None:
        body = inner
    return body


def at_server(ask: Callable[..., Awaitable[int]]) -> Callable[[F], F]:
    """Let a command run at a server: `ask(server, out, …)` gets the arguments of the command.

    Commands without it are refused with --server (exit code 2).
    """

    def asked(out: Output, /, token: str | None = None, **given: Any) -> int:
        import asyncio

        from interlock.cli.remote import Server

        assert out.session.server is not None
        server = Server(out.session.server, token or held_token(), insecure=out.session.insecure)
        return asyncio.run(_heard(ask(server, out, **given)))

    def mark(command: F) -> F:
        _REMOTE[_origin(command)] = asked
        return command

    return mark


# The words of refusals of commands that must not run at a server, by their functions.
_LOCAL_ONLY: dict[Callable[..., Any], str] = {}


def local_only(words: str) -> Callable[[F], F]:
    """Say why a command is refused with --server, where more than the work on a data directory speaks against it."""

    def mark(command: F) -> F:
        _LOCAL_ONLY[_origin(command)] = words
        return command

    return mark


def runs_at_server(command: click.Command) -> bool:
    """Whether a command can be used with --server."""
    return command.callback is not None and _origin(command.callback) in _REMOTE


async def _heard(work: Awaitable[int]) -> int:
    return await work


def anywhere(command: F) -> F:
    """Let a command run locally although a server is named: it uses neither server nor data directory."""
    body = _origin(command)
    _REMOTE[body] = body
    return command


def _without_plugins() -> None:
    """Let pydantic look for no plugins in this process: that reads the metadata of every installed package."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


@contextlib.asynccontextmanager
async def opened(session: Session) -> AsyncGenerator[Interlock]:
    """Open the data directory. Modules of the working directory can be imported, after everything that is installed."""
    _without_plugins()
    from interlock.api.interlock import Interlock

    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    async with Interlock.open(session.path) as app:
        yield app


def _guarded(out: Output, work: Callable[[], int]) -> int:
    try:
        return work()
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if out.session.verbose:
            import logging

            logging.getLogger("interlock.cli").exception("the command failed", extra={"trace_id": out.trace_id})
        from interlock.api.homes import failure_of

        out.fail(failure_of(error))
        return 1


def _log(session: Session) -> None:
    import logging

    logger = logging.getLogger("interlock")
    logger.propagate = False
    if not session.verbose:
        logger.addHandler(logging.NullHandler())
        return
    from interlock.privacy.redact import RedactionRules, Redactor, safe_log
    from interlock.telemetry.logs import TextLines

    redactor = Redactor(RedactionRules())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines(lambda text: safe_log(redactor, text)))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)


def _leave(code: int) -> NoReturn:
    """Exit with a code, without waiting for the thread of a tool that was cancelled and still runs."""
    if any(thread.name.startswith("interlock-tool") and thread.is_alive() for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def require(caller: Caller, scope: str, what: str) -> None:
    """Refuse (E3206) an operation on the data directory if the caller does not hold its scope."""
    from interlock.api.rights import require_here

    require_here(caller, scope, what)


def refuse_token(what: str) -> None:
    """Refuse (E3206) an operation that only the owner of the data directory may do, if a token is set."""
    if held_token() is not None:
        from interlock.core.errors import Failure

        words = f"{TOKEN} is set, and {what} is not done by a token: unset it to act as yourself"
        raise Failure("E3206", words, resolution=f"run it as: env -u {TOKEN} interlock …")


TOKEN = "INTERLOCK_TOKEN"  # noqa: S105 - the name of a variable


def as_holder(command: F) -> F:
    """Add --token: its holder is the caller, instead of the local user."""
    words = f"Act as the holder of this token [env: {TOKEN}; default: you]."
    return click.option("--token", envvar=TOKEN, metavar="TOKEN", help=words)(command)


async def acting(app: Interlock, token: str | None) -> Caller:
    """Make the holder of a token the caller from now on; without a token, the local user."""
    held = held_token() if token is None else token
    if held is not None:
        app.act_as(await app.caller_of(held))
    return app.caller


def held_token() -> str | None:
    """The token in the environment; None where the variable is not set. An empty one is refused (E3203).

    A script that failed to get its token must not act as the owner of the data directory.
    """
    held = os.environ.get(TOKEN)
    if held is not None and not held.strip():
        from interlock.core.errors import Failure

        words = f"{TOKEN} is set but empty, so the caller is unknown; set it to a token, or unset it to act as yourself"
        raise Failure("E3203", words, resolution=f"set {TOKEN} to a token, or run: env -u {TOKEN} interlock …")
    return held


_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def parse_span(_: click.Context, __: click.Parameter, value: str) -> int:
    """A time such as 90m, in milliseconds."""
    number, unit = value[:-1], value[-1:]
    if not (number.isascii() and number.isdecimal() and len(number) < 7 and unit in _UNITS_MS and int(number)):
        raise click.BadParameter("write a number and a unit: 30d, 12h, 90m")
    return int(number) * _UNITS_MS[unit]


def parse_json(text: str, what: str, *, or_stdin: bool = True) -> Any:
    """JSON from the command line, or from stdin for `-`; other text is a usage error that names its source."""
    from interlock.data.canonical import decode
    from interlock.data.documents import Malformed, read_json

    from_stdin = or_stdin and text == "-"
    raw = _read_stdin(what) if from_stdin else text.encode()
    try:
        read_json(raw)
        return decode(raw)  # whole numbers as they are, however long
    except ValueError as error:
        source = "stdin" if from_stdin else "the text given"
        why = str(error) if isinstance(error, Malformed) else "a number in it is too long"
        raise click.UsageError(f"{what}: {source} is unusable: {why}") from None


MOST_STDIN = 64 << 20


def _read_stdin(what: str) -> bytes:
    """Read all of stdin, within a bound: it may be a device that never ends."""
    try:
        raw = sys.stdin.buffer.read(MOST_STDIN + 1)
    except OSError:
        raise click.UsageError(f"{what}: stdin cannot be read") from None
    if len(raw) > MOST_STDIN:
        raise click.UsageError(f"{what}: stdin holds more than {MOST_STDIN >> 20} MiB")
    return raw


NOT_GIVEN = object()


def json_value(_: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """An option or argument in JSON, read before anything is opened: a typing error creates no data directory."""
    return NOT_GIVEN if value is None else parse_json(value, str(parameter.name))
