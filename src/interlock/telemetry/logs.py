"""The log: standard logging, one line to an event, each with the trace and the call it belongs to where one is known.

A module logs as any Python module does and says what it knows with `extra={"trace_id": …, "invocation_id": …}`. What is
told was redacted by whoever knows the call; the formatter redacts once more, because libraries log too.

While credentials are on loan, records are made without them: whoever logs, by whichever logger, and whoever handles the
record. `withhold` says for how long. What is given as `extra` comes to a record later and is the business of handlers
that show it; the ones here show none but `_KNOWN`.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal, TextIO

import orjson

from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.privacy.scrub import Forms, scrub

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Redact = Callable[[str], str]

# What a line says of its origin, besides time, level, logger and message.
_KNOWN = ("trace_id", "invocation_id", "signal", "severity")


class _Lines(logging.Formatter):
    """Redacted lines. A call's traces and ids are added where they are known."""

    def __init__(self, redact: Redact) -> None:
        super().__init__()
        self._redact = redact

    def _message(self, record: logging.LogRecord) -> str:
        return self._redact(record.getMessage())

    def _error(self, record: logging.LogRecord) -> str:
        if not record.exc_info or record.exc_info[1] is None:
            return self._redact(record.exc_text or "")
        return self._redact("".join(traceback.format_exception(record.exc_info[1])))

    def _known(self, record: logging.LogRecord) -> dict[str, str]:
        found = ((name, getattr(record, name, None)) for name in _KNOWN)
        return {name: str(value) for name, value in found if value}


class JsonLines(_Lines):
    """One JSON object to a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": iso(int(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
            "trace_id": None,
            "invocation_id": None,
            **self._known(record),
        }
        error = self._error(record)
        if error:
            line["error"] = error
        return orjson.dumps(_encodable(line)).decode()


class TextLines(_Lines):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        known = "".join(f" {name}={value}" for name, value in self._known(record).items())
        head = f"{iso(int(record.created * 1000))} {record.levelname.lower():7} {record.name}: "
        error = self._error(record)
        return f"{head}{self._message(record)}{known}" + (f"\n{error.rstrip()}" if error else "")


def _encodable(line: dict[str, Any]) -> dict[str, Any]:
    """Text that is not valid Unicode is spelt out: a line must be written whatever is in it."""
    return {name: value and value.encode("utf-8", "backslashreplace").decode() for name, value in line.items()}


def configure(form: LogFormat, level: LogLevel, *, redact: Redact, stream: TextIO | None = None) -> Callable[[], None]:
    """Write all that is logged in this process, redacted, to a stream; stderr if none is given.

    `level` is for what Interlock itself has to say; libraries are heard when they warn. Returns the way to undo it.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(redact) if form == "json" else TextLines(redact))
    root, ours = logging.getLogger(), logging.getLogger("interlock")
    before, others = (ours.level, ours.propagate, list(ours.handlers)), list(root.handlers)
    root.handlers[:] = [handler]
    ours.setLevel(level.upper())
    # A command keeps what is logged to itself; from now on it is written, once.
    ours.handlers[:], ours.propagate = [], True

    def undo() -> None:
        root.handlers[:] = others
        level, ours.propagate, ours.handlers[:] = before
        ours.setLevel(level)

    return undo


# What is on loan


class _Loans:
    """The texts that no record of this process may show at the moment. Without any, records are made as ever."""

    def __init__(self) -> None:
        # A finalizer may log at any moment, also while this thread is here.
        self._lock = threading.RLock()
        self._lent: dict[object, Callable[[], Iterable[str]]] = {}
        self._forms: Forms | None = None
        self._make: Callable[..., logging.LogRecord] = logging.LogRecord

    def add(self, loan: object, texts: Callable[[], Iterable[str]]) -> None:
        with self._lock:
            if not self._lent and logging.getLogRecordFactory() != self._record:
                self._make = logging.getLogRecordFactory()
                logging.setLogRecordFactory(self._record)
            self._lent[loan] = texts
            self._forms = None

    def remove(self, loan: object) -> None:
        with self._lock:
            self._lent.pop(loan, None)
            self._forms = None
            # Somebody who has come in between keeps us: then we are passed through.
            if not self._lent and logging.getLogRecordFactory() == self._record:
                logging.setLogRecordFactory(self._make)

    def _record(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        with self._lock:
            if self._forms is None and self._lent:
                self._forms = Forms(text for texts in self._lent.values() for text in _still(texts))
            forms = self._forms
        if forms is not None:
            _scrub(record, forms)
        return record


def _still(texts: Callable[[], Iterable[str]]) -> Iterable[str]:
    try:
        return texts()
    except Failure:
        return ()  # void since a moment ago


def _scrub(record: logging.LogRecord, forms: Forms) -> None:
    """Take secrets out of a record: its message, what the message is made of, its error and whatever else is text."""
    fields = {name: value for name, value in vars(record).items() if isinstance(value, str)}
    try:
        fields |= {"msg": record.getMessage(), "args": repr(record.args)}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exc_text"] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
    except Exception:  # noqa: BLE001 - it asks other people's objects for their text
        # INVARIANT: the logging package shows a record that it cannot write as it is, so there must be none.
        shown, found = {"msg": "a record could not be written"}, True
    else:
        shown, found = scrub(fields, forms, fields.keys())
    if found:
        vars(record).update(shown, args=(), exc_info=None)


_loans = _Loans()


def withhold(texts: Callable[[], Iterable[str]]) -> Callable[[], None]:
    """Keep texts, and every form of them, out of all log records of this process; returns the way to end it."""
    loan = object()
    _loans.add(loan, texts)
    return lambda: _loans.remove(loan)
