"""Values on the command line that need more than a type of click: spans of time, and JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    pass


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
