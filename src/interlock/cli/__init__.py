"""The command line. Only click is imported here: `interlock --help` must answer at once."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Generator
from typing import Any

import click

from interlock._version import __version__
from interlock.cli.command import TOKEN, LazyGroup
from interlock.cli.output import Session, Unwritable, code_of, steady


class _Root(LazyGroup):
    """The group of all commands. It prints the envelope of a command that is not understood."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _ending_unwritten(), _envelope_of_usage():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        with _ending_unwritten(), _envelope_of_usage():
            return super().invoke(ctx)


@contextlib.contextmanager
def _ending_unwritten() -> Generator[None]:
    """If the output of click cannot be written, such as the help of a command, end with the code for that."""
    try:
        yield
    except Unwritable as error:
        sys.exit(code_of(error))


@contextlib.contextmanager
def _envelope_of_usage() -> Generator[None]:
    """If a command is not understood and JSON was asked for, stdout has an envelope as for any failure."""
    try:
        try:
            yield
        except click.NoSuchOption as error:
            raise _in_its_place(error) from None
    except click.UsageError as error:
        _print_envelope(error.format_message())
        raise


def _in_its_place(error: click.NoSuchOption) -> click.UsageError:
    """A refused option; where it is one of `interlock` itself, where to write it."""
    context, name = error.ctx, error.option_name
    own = {one for parameter in root.params for one in parameter.opts}
    if context is None or context.parent is None or name not in own:
        return error
    words = f"{name} stands before the command: interlock {name} …{context.command_path.removeprefix('interlock')}"
    return click.UsageError(words, context)


def _print_envelope(words: str) -> None:
    if "--json" not in sys.argv:
        return
    from interlock.cli.output import Output
    from interlock.core.errors import Failure

    out = Output(as_json=True, session=Session(home=None, verbose=False))
    with contextlib.closing(out.stdout):
        out.fail(Failure("E3004", words))


@click.group(
    cls=_Root,
    lazy={
        "demo": "demo:demo",
        "serve": "serve:serve",
        "login": "login:login",
        "logout": "login:logout",
        "tools": "tools:tools",
        "surface": "surface:surface",
        "dev": "dev:dev",
        "upstream": "upstream:upstream",
        "call": "call:call",
        "calls": "calls:calls",
        "approvals": "approvals:approvals",
        "token": "token:token",
        "keys": "keys:keys",
        "identities": "identities:identities",
        "policy": "policy:policy",
        "config": "config:config",
        "secrets": "secrets:secrets",
        "budgets": "budgets:budgets",
        "audit": "audit:audit",
        "backup": "backup:backup",
        "restore": "backup:restore",
        "archive": "archive:archive",
        "migrate": "migrate:migrate",
        "store": "store:store",
        "health": "health:health",
        "doctor": "doctor:doctor",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 it worked, 1 it was refused or failed, 2 the command was not understood, 141 nobody reads its"
    " output any more. The shell completes commands, options and names of tools after: eval"
    ' "$(_INTERLOCK_COMPLETE=bash_source interlock)"',
)
@click.option(
    "--home",
    envvar="INTERLOCK_HOME",
    type=click.Path(file_okay=False),
    help="The data directory: tools, journal, keys [env: INTERLOCK_HOME; default: the user's own].",
)
@click.option(
    "--server",
    envvar="INTERLOCK_SERVER",
    metavar="URL",
    help="A running server that carries the command out, instead of a data directory [env: INTERLOCK_SERVER].",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Act as the holder of the token in this file, instead of INTERLOCK_TOKEN.",
)
@click.option("--insecure-http", is_flag=True, help="Send the token to a --server elsewhere over plain HTTP.")
@click.option("--verbose", is_flag=True, help="Log what happens inside, and why what failed did, on stderr.")
@click.version_option(__version__, message="interlock %(version)s")
@click.pass_context
def root(
    context: click.Context,
    home: str | None,
    server: str | None,
    token_file: str | None,
    insecure_http: bool,
    verbose: bool,
) -> None:
    """Governed tools for AI agents: typed, authorized, run once, and provable afterwards.

    \b
    New here? interlock demo, or interlock serve
    Tools:    interlock dev my_tools.py
    A call:   interlock call demo.balance '{"account":"cash"}'
    Proof:    interlock audit verify
    A server: interlock login https://tools.example.com
    """
    if token_file is not None:
        # Every command takes the token from there, for a server as for a data directory.
        os.environ[TOKEN] = _token_in(token_file)
    if _is_stated(context, "home") and server:
        if _is_stated(context, "server"):
            raise click.UsageError("--home and --server exclude each other: say where the command is carried out")
        server = None  # what is said in the command counts more than the environment
    needs_login = TOKEN not in os.environ if server else not home
    if needs_login and context.invoked_subcommand not in ("login", "logout"):
        from interlock.cli.logins import stored_login

        login = stored_login()
        # INVARIANT: the token of a login is sent to its server and to no other.
        if login is not None and (server or login.server).rstrip("/") == login.server:
            server, insecure_http = login.server, insecure_http or login.insecure
            os.environ.setdefault(TOKEN, login.token)
    context.obj = Session(home=home, verbose=verbose, server=server or None, insecure=insecure_http)


def _is_stated(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _token_in(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read(65_536).strip()
    except (OSError, UnicodeDecodeError):
        raise click.UsageError(f"--token-file: `{path}` cannot be read as a token") from None
    if not text:
        raise click.UsageError(f"--token-file: `{path}` is empty")
    return text


def main() -> None:
    """The console script."""
    # Imported modules stay: collecting garbage while they are loaded takes 5 % of the time of a command, and no command
    # loads as many objects. A server sets thresholds of its own.
    gc.set_threshold(200_000, 50, 100)
    _steady_streams()
    garbled = [word for word in sys.argv[1:] if not _is_text(word)]
    if garbled:
        words = f"an argument is not valid UTF-8: {garbled[0]!r}"
        _print_envelope(words)
        click.echo(f"Error: {words}", err=True)
        sys.exit(2)
    try:
        root(prog_name="interlock")
    finally:
        # The process ends: looking for garbage in all that was loaded would take up to a seventh of a second more.
        gc.freeze()


def _steady_streams() -> None:
    """Streams that take every character, also where the caller closed them or set a narrow encoding."""
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            # Otherwise the database might get the number of a standard stream.
            os.open(os.devnull, os.O_RDWR)
            stream = open(descriptor, "r" if descriptor == 0 else "w", closefd=False)  # noqa: SIM115 - a standard stream
            setattr(sys, name, stream)
    sys.stdout, sys.stderr = steady(sys.stdout), steady(sys.stderr)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
