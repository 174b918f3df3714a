"""Bounds on the amount of data that is processed: bytes, values and the length of texts.

Parsing, checking, redacting and encoding take time in proportion to their input, on the event loop that all calls
share. The bounds are therefore checked first:

    documents   the values of a JSON text are counted in its bytes, before a parser makes objects of them
    requests    the same; a body of N bytes cannot hold more than N / 2 values, so small ones are free
    results     the size in JSON is estimated before anything else looks at a result
    texts       are cut before patterns are searched in them or control characters are removed
    numbers     a whole number has at most 308 digits, so that it is finite as a double: longer ones take time in the
                square of their length, at each place where they are read or written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, Final, cast

import orjson

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.canonical import compiled, longest_run, may_hold_long_number

MARGIN: Final = 1024
LONGEST_NAME: Final = 600
# Characters of a result that its preview shows at most.
PREVIEW_CHARS: Final = 1000
# About the most that is parsed in 50 ms, whatever the values are.
MOST_VALUES: Final = 100_000
# The same for requests: every endpoint parses them on the event loop, and the slowest one visits each value repeatedly.
MOST_REQUEST_VALUES: Final = 25_000
# Control characters, and characters that change direction or are invisible. Tabs and line ends stay.
_UNSAFE = expression(
    "\x1b\\[[0-?]{0,32}[ -/]{0,8}[@-~]|"
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f"
    "\ud800-\udfff]"
)
LONGEST_NUMBER: Final = 308
_BACKSLASHES = expression(rb"\\*")
# Outside of strings: fractions and exponents are skipped; what is left with this many digits is a whole number.
_WHOLE = expression(rb"\.[0-9]+|[eE][+-]?[0-9]+|([0-9]{309,})")
# The largest double as a whole number has one digit more. The canonical form writes whole doubles like that.
_LARGEST = b"%d" % int(sys.float_info.max)
_WINDOW = 65_536
_DEEPEST = 1024
# Results above this size are checked, redacted and encoded on a thread, not on the event loop.
LARGE: Final = 1 << 18
# The same for inputs. Checking one against its schema costs more per byte if each value has to be converted.
LARGE_INPUT: Final = 1 << 14
# Inputs that the compiled walk does not handle are processed by Python on the event loop up to this size only.
SMALL_INPUT: Final = 1 << 12


# Documents from outside


class TooManyValues(Exception):  # noqa: N818 - a finding about the other side
    """A document has more values than is allowed."""


def is_longer(encoded: bytes, most: int) -> bool:
    """Whether a text in UTF-8 has more than so many characters. A character has one to four bytes."""
    size = len(encoded)
    return size > most and (size > 4 * most or len(encoded.decode()) > most)


def preview_chars(max_inline: int) -> int:
    """Return how many characters the preview of a result shows that is longer than `max_inline`: a part, never all."""
    return min(PREVIEW_CHARS, max_inline // 2)


def plain_text(text: str, most: int) -> str:
    """Return at most `most` characters of a text, without characters that control a terminal or mislead a reader.

    The text is cut first, so a text of any length costs no more than one of `most` characters.
    """
    return _UNSAFE.sub("", text[:most])


def parse(body: bytes, most: int = MOST_VALUES) -> Any:
    """Parse a JSON document with at most `most` values. ValueError if it is not strict JSON.

    Strict: valid Unicode only, no surrogates, no NaN, no number that is infinite as a double, at most 1,024 levels.
    Whole numbers keep their value, however long they are.
    """
    if more_values(body, most):
        raise TooManyValues
    return exactly(body)


def exactly(text: bytes) -> Any:
    """Parse JSON text with every whole number exact; ValueError if it is not strict JSON."""
    if not may_hold_long_number(text):
        return orjson.loads(text)
    # orjson parses a number of more than 64 bits as the nearest double, so here it only checks the text: Python's own
    # parser accepts more than JSON. Parse hooks for each number would take ten times as long as both.
    orjson.loads(text)
    if long_number(text):
        raise ValueError("a number is too long")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def long_number(data: bytes | bytearray) -> bool:
    """Whether JSON text contains a whole number of more than 308 digits that is infinite as a double.

    Parses nothing; small texts cost nothing.
    """
    if len(data) <= LONGEST_NUMBER or longest_run(data, LONGEST_NUMBER + 1) <= LONGEST_NUMBER:
        return False
    # Without escapes, every second part between quotes is a string.
    outside = b'"'.join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return any(_too_long(match[1]) for match in _WHOLE.finditer(outside) if match[1] is not None)


def _too_long(digits: bytes) -> bool:
    """Whether a whole number of more than 308 digits is infinite as a double."""
    return len(digits) > len(_LARGEST) or digits > _LARGEST


def more_values(data: bytes | bytearray, limit: int) -> bool:
    """Whether a JSON text may hold more than `limit` values. Takes time in proportion to the text, and no memory."""
    if len(data) < 2 * limit:
        return False  # each value but the first takes at least two bytes including a punctuation mark
    if compiled is not None:
        return compiled.marks(data) >= limit
    return _marks(data, limit) >= limit


def _marks(data: bytes | bytearray, most: int) -> int:
    """Count the commas and opening brackets outside of strings; stops at `most`. Examines the text in windows.

    A call into C blocks all other threads, so each call gets a bounded amount.
    """
    # Strings may hold any number of them. Without escapes, every second part between quotes is a string.
    count, inside, start = 0, 0, 0
    while start < len(data) and count < most:
        end = start + _WINDOW
        if data[end - 1 : end] == b"\\" and (run := _BACKSLASHES.match(data, end)) is not None:
            end = run.end() + 1  # an escape is not cut in two
        parts = data[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        inside ^= (len(parts) - 1) & 1
        start = end
    return count


# Requests


def check_values(text: bytes | bytearray, most: int) -> None:
    """Refuse (E3004) a JSON text with more values than `most`, or with a number that is too long.

    Nothing is parsed; small texts cost nothing.
    """
    if len(text) <= LONGEST_NUMBER and len(text) < 2 * most:
        return
    if more_values(text, most):
        raise too_many(most)
    if long_number(text):
        raise Failure(
            "E3004",
            f"a number in the request has more than {LONGEST_NUMBER} digits",
            details={"mostDigits": LONGEST_NUMBER},
            resolution="send a number of that length as text",
        )


def too_many(most: int) -> Failure:
    """Make the refusal of a request with too many values."""
    return Failure(
        "E3004",
        f"the request holds more than {most:,} values",
        details={"mostValues": most},
        resolution="send fewer values per request: in several calls, or as one text; an operator can raise max_values",
    )


# Results


def size_of(value: Any, most: int, steps: int = 1 << 62) -> int:
    """Estimate the number of bytes that a value takes as JSON, from below. Stops above `most`.

    Data that is not plain and has more than `steps` values counts as larger than `most`.

    Plain JSON data is measured by the compiled walk. Models and dataclasses count with their fields; objects of other
    classes hardly count, because their JSON form is only known once they are written.
    """
    size = -1 if compiled is None else compiled.measured(value, most)
    return size if size >= 0 else _measured(value, most, steps)


def _measured(value: Any, most: int, steps: int) -> int:
    size = 0
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting and size <= most:
        if (steps := steps - 1) < 0:
            return most + 1
        one, depth = waiting.pop()
        if isinstance(one, str | bytes | bytearray):
            size += len(one) + 2
        elif isinstance(one, int):
            size += 1 + one.bit_length() // 30 * 9
        elif depth > _DEEPEST:
            break  # more levels than JSON data may have; the encoder reports that
        else:
            held = _held(one)
            size += 1 + len(held)
            if size <= most:
                waiting += [(item, depth + 1) for item in held]
    return size


def _held(one: Any) -> list[Any]:
    """Return the values that an object consists of; the names of members count as well."""
    if isinstance(one, dict):
        members = cast("dict[Any, Any]", one)
        return [*members, *members.values()]
    if isinstance(one, list | tuple | set | frozenset):
        return list(cast("Iterable[Any]", one))
    if isinstance(one, type):
        return []
    if hasattr(one, "__pydantic_fields__"):
        return list(cast("dict[str, Any]", vars(one)).values())
    return [getattr(one, name) for name in getattr(one, "__dataclass_fields__", ())]


def result_too_large(ref: str, most: int, *, writes: bool) -> Failure:
    """Make the refusal of a result. The result is unread; the effect of a write stands, and the failure says so."""
    done = " The call was carried out and is not run again; only its result is withheld." if writes else ""
    return Failure(
        "E3416",
        f"{ref} returned more than {most:,} bytes, which is the limit for its results.{done}",
        details={"mostBytes": most, "executed": writes},
        resolution="ask for less, or page through it; max_result_bytes of the tool or of the settings is the limit",
        retryable=False,
    )


# Texts


def cut(text: str, most: int) -> tuple[str, int]:
    """Cut a text, with `MARGIN` characters to spare; also returns the number of characters left out.

    A credential that is cut in two may no longer be recognised. After the search, `trim` drops the margin.
    """
    if len(text) <= most + MARGIN:
        return text, 0
    return text[: most + MARGIN], len(text) - most


def trim(text: str, left_out: int) -> str:
    """Drop the margin of a text that was cut, and append how much is missing."""
    return f"{text[:-MARGIN]}… [{left_out:,} more characters are not shown]" if left_out else text


class Shortener:
    """Copies JSON data with bounds on all its texts and values together. Marks each place where something is left out.

    For data that a person or a log reads. The copy of data within the bounds is equal to it, down to 100 levels.
    """

    def __init__(self, *, characters: int = 1 << 16, values: int = 2000, longest: int = 1 << 16) -> None:
        self._characters = characters
        self._longest = longest
        self._values = values

    def shorten(self, value: Any, level: int = 0) -> Any:
        """Copy as much of the data as there is room left for."""
        self._values -= 1
        if isinstance(value, str):
            most = min(max(self._characters, 64), self._longest)
            self._characters -= min(len(value), most)
            return value if len(value) <= most else f"{value[:most]}… [{len(value) - most:,} more characters]"
        if isinstance(value, dict | list | tuple) and level >= 100:
            return "… deeper levels are not shown"
        if isinstance(value, dict):
            return self._members(cast("dict[Any, Any]", value), level + 1)
        if isinstance(value, list | tuple):
            return self._items(cast("list[Any]", value), level + 1)
        return value

    def _members(self, members: dict[Any, Any], level: int) -> dict[Any, Any]:
        short: dict[Any, Any] = {}
        for name, item in members.items():
            if self._values <= 0:
                short["…"] = f"{len(members) - len(short):,} more members are not shown"
                break
            short[self.shorten(name) if isinstance(name, str) else name] = self.shorten(item, level)
        return short

    def _items(self, items: list[Any], level: int) -> list[Any]:
        short: list[Any] = []
        for item in items:
            if self._values <= 0:
                short.append(f"… {len(items) - len(short):,} more items are not shown")
                break
            short.append(self.shorten(item, level))
        return short


def check_unicode(what: str, *texts: str) -> None:
    """Refuse (E3004) texts that cannot be encoded: half of a character (a lone surrogate) is none."""
    for text in texts:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                words = "send valid Unicode: one character is written as half of a pair (a lone surrogate)"
                raise Failure("E3004", f"{what} must be valid Unicode", resolution=words) from None
