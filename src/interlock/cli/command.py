"""The parts that all commands share: the data directory or server, the form of the answer, and error handling."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from interlock.cli.output import Output, Session, Unwritable, code_of

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.call.context import Caller
    from interlock.core.errors import Failure

F = TypeVar("F", bound=Callable[..., Any])


class LazyGroup(click.Group):
    """A group of commands whose modules are imported when they are asked for: `lazy` says where, as module:name.

    Help lists them as they stand there; in order of name if the group has other commands too.
    """

    def __init__(self, *args: object, lazy: dict[str, str], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType] - click's own arguments, passed on
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*self._lazy, *self.commands)) if self.commands else list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        where = self._lazy.get(cmd_name)
        if where is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = where.partition(":")
        found: click.Command = getattr(importlib.import_module(f"interlock.cli.{module}"), name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(name, known, n=1)
            meant = f" Did you mean '{near[0]}'?" if near else ""
            raise click.UsageError(f"No such command '{name}'.{meant}", ctx)
        return super().resolve_command(ctx, args)


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

    without_plugins()
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
        _log(session)
        work = body if session.server is None else _REMOTE.get(_origin(body))
        if work is None:
            words = _LOCAL_ONLY.get(_origin(body), "works on a data directory itself, and not through a server")
            where = "run it where the directory is, with --home, or without --server, INTERLOCK_SERVER and a login"
            raise click.UsageError(f"`{click.get_current_context().command_path}` {words}; {where}")
        out = Output(as_json=as_json, session=session)
        with contextlib.closing(out.stdout), out.reserved():
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
    """Set the reason that is shown when a command is refused with --server, in place of the general one."""

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


def without_plugins() -> None:
    """Let pydantic look for no plugins in this process: that reads the metadata of every installed package.

    Nor is the module loaded that would look for them: it loads what reads metadata, which takes 10 ms.
    """
    if os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__") == "__all__":
        loader: Any = ModuleType("pydantic.plugin._loader")
        loader.get_plugins = tuple  # none, as the module itself answers then
        sys.modules.setdefault(loader.__name__, loader)


def lean_vectors() -> None:
    """Load of the library for vectors what a search needs, in this process.

    The library under numpy starts no threads: a search uses none, and they cost 20 ms. Nor are the docstrings of numpy
    made, which takes 10 ms.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules.setdefault("numpy._typing", _TypesOfNumpy("numpy._typing"))


class _TypesOfNumpy(ModuleType):
    """Stands for the module with numpy's types, which takes 9 ms. Numpy itself takes one name of it, for annotations.

    Code that asks for another, as `numpy.typing` does first, gets the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.NDArray: Any = list

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        vars(self).pop("NDArray", None)
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.asynccontextmanager
async def opened(session: Session) -> AsyncGenerator[Interlock]:
    """Open the data directory. Modules of the working directory can be imported, after everything that is installed."""
    without_plugins()
    from interlock.api.interlock import Interlock

    with contextlib.suppress(FileNotFoundError):  # somebody has removed it; the data directory is elsewhere
        if "" not in sys.path and (working := os.getcwd()) not in sys.path:
            sys.path.append(working)
    async with Interlock.open(session.path) as app:
        yield app


def _guarded(out: Output, work: Callable[[], int]) -> int:
    try:
        code = work()
        sys.stdout.flush()  # what tools printed
        return code
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Unwritable as error:
        return code_of(error)
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
