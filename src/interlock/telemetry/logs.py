"""The log: standard logging, one line per event, each with its trace and call where they are known.

A module logs as any Python module does and adds what it knows with `extra={"trace_id": …, "invocation_id": …}`.
Messages are redacted by the code that knows the call; the formatter redacts again, because libraries log too.

While credentials are in use, log records are created without them, whichever logger and handler is used; `withhold`
sets how long. Values given as `extra` reach a record later and are the responsibility of handlers that show them; the
handlers here show only `_KNOWN`.
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

# The attributes of a record that a line shows besides time, level, logger and message.
_KNOWN = ("trace_id", "invocation_id", "signal", "severity")


class _Lines(logging.Formatter):
    """Formats redacted lines, with the ids of the trace and the call where they are known."""

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
        known = ((name, getattr(record, name, None)) for name in _KNOWN)
        return {name: str(value) for name, value in known if value}


class JsonLines(_Lines):
    """One JSON object per line."""

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
    """Escape text that is not valid Unicode: a line must be written whatever it contains."""
    return {name: value and value.encode("utf-8", "backslashreplace").decode() for name, value in line.items()}


def configure(form: LogFormat, level: LogLevel, *, redact: Redact, stream: TextIO | None = None) -> Callable[[], None]:
    """Write everything that this process logs, redacted, to a stream; stderr if none is given.

    `level` applies to Interlock itself; libraries are logged from warnings on. Returns a function that undoes it.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(redact) if form == "json" else TextLines(redact))
    root, ours = logging.getLogger(), logging.getLogger("interlock")
    before, others = (ours.level, ours.propagate, list(ours.handlers)), list(root.handlers)
    root.handlers[:] = [handler]
    ours.setLevel(level.upper())
    # A command keeps its log to itself; from now on it is written, once.
    ours.handlers[:], ours.propagate = [], True

    def undo() -> None:
        root.handlers[:] = others
        level, ours.propagate, ours.handlers[:] = before
        ours.setLevel(level)

    return undo


# Credentials in use


class _Loans:
    """The texts that no log record of this process may show at the moment.

    Without any, records are created as usual.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer may log at any moment, also while this thread holds the lock.
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
            # If another factory was installed after ours, it still calls ours, which then passes records through.
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
        return ()  # no longer valid


def _scrub(record: logging.LogRecord, forms: Forms) -> None:
    """Remove secrets from a record: its message, the arguments of the message, its exception and all other texts."""
    fields = {name: value for name, value in vars(record).items() if isinstance(value, str)}
    try:
        fields |= {"msg": record.getMessage(), "args": repr(record.args)}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exc_text"] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
    except Exception:  # noqa: BLE001 - it asks other people's objects for their text
        # INVARIANT: the logging package prints a record that it cannot format as it is, so every record must be
        # formattable.
        shown, changed = {"msg": "a record could not be written"}, True
    else:
        shown, changed = scrub(fields, forms, fields.keys())
    if changed:
        vars(record).update(shown, args=(), exc_info=None)


_loans = _Loans()


def withhold(texts: Callable[[], Iterable[str]]) -> Callable[[], None]:
    """Keep texts, and every form of them, out of all log records of this process. Returns a function that ends it."""
    loan = object()
    _loans.add(loan, texts)
    return lambda: _loans.remove(loan)
