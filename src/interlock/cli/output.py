"""The answer of a command: a page for people, or one JSON document."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from interlock.cli.render import Page
    from interlock.core.errors import Failure

# The exit code of a program whose reader closed the pipe: 128 + SIGPIPE, as shells tell it.
PIPE_CLOSED = 141


class Unwritable(OSError):  # noqa: N818 - named for what a stream is
    """A standard stream cannot be written: its reader has gone, or its disk is full."""


class _Raw(io.FileIO):
    """A standard stream that tells its failures apart from those of other files."""

    def write(self, data: Buffer, /) -> int:
        if not memoryview(data):
            return 0  # click tries in this way whether a stream takes bytes, and takes no failure seriously
        try:
            return super().write(data)
        except OSError as error:
            # What is left in buffers goes nowhere: it would fail again when the process ends, and be told then.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise Unwritable(error.errno, error.strerror) from None


def steady(stream: TextIO) -> TextIO:
    """A standard stream in place of `stream`, which takes every character; Unwritable where it cannot be written."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = _Raw(stream.fileno(), "wb", closefd=False)
    at_once = stream.write_through  # PYTHONUNBUFFERED
    return io.TextIOWrapper(
        cast("IO[bytes]", raw) if at_once else io.BufferedWriter(raw), encoding=stream.encoding, errors="replace",
        line_buffering=stream.line_buffering, write_through=at_once,
    )  # fmt: skip


def code_of(error: Unwritable) -> int:
    """The exit code of a command whose output cannot be written. Only a reader who has gone is not told why."""
    if error.errno == errno.EPIPE:
        return PIPE_CLOSED
    words = f"the output cannot be written: {error.strerror or type(error).__name__}"
    with contextlib.suppress(Unwritable):
        sys.stderr.write(f"Error: {words}. Write it elsewhere, or make room; the command may have taken effect.\n")
        sys.stderr.flush()
    return 1


class Session:
    """The options before the name of the command."""

    def __init__(self, *, home: str | None, verbose: bool, server: str | None = None, insecure: bool = False) -> None:
        """`server` carries out commands, instead of this process on a data directory."""
        self.home: Final = home
        self.verbose: Final = verbose
        self.server: Final = server
        self.insecure: Final = insecure

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
        self.stdout = io.BufferedWriter(_Raw(os.dup(1), "wb"))

    def answer(self, document: Any, show: Callable[[Page], None]) -> None:
        """Write the answer, as JSON or as a page."""
        if self.as_json:
            self.write(document)
        else:
            show(self.page())

    def answer_indented(self, document: Any, shown: Any = None) -> int:
        """Write the answer, as JSON for people as well. They are shown `shown`, where it is given: a part of it."""
        import json

        import click

        part = document if shown is None else shown
        self.answer(document, lambda _: click.echo(json.dumps(part, indent=2, ensure_ascii=False)))
        return 0

    def done(self, document: Any, words: str, *, right: str = "") -> None:
        """Answer with a document, of which a person is shown the words that say what was done."""

        def show(page: Page) -> None:
            from interlock.cli.render import GOOD

            page.line(GOOD, f" {words}", right=right)

        self.answer(document, show)

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
