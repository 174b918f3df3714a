"""Bounds on how much of a value is looked at: the number of values in a request, and the length of texts people read.

A request of four megabytes may hold two million values, and every later step walks all of them on the event loop. So
the values are counted first. Counting is free for small bodies: a body of N bytes cannot hold more than N / 2 values.

Texts that are only shown (messages, logs, tickets) are cut before patterns are searched in them: the search is the
expensive part.
"""

from __future__ import annotations

from typing import Any, Final, cast

from interlock.core.errors import Failure

MARGIN: Final = 1024
MOST_VALUES: Final = 100_000


def may_exceed(body: bytes, most: int) -> bool:
    """Whether a JSON text may hold more values than `most`, judged by its length and its punctuation.

    Punctuation inside texts counts too, so True is only a reason to count exactly.
    """
    return len(body) > 2 * most and body.count(b",") + body.count(b"[") + body.count(b"{") >= most


def exceeds(value: Any, most: int) -> bool:
    """Whether JSON data holds more values than `most`. Stops counting there."""
    count = 1
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if one.__class__ is dict:
            count += len(one)
            waiting += one.values()
        elif one.__class__ is list or one.__class__ is tuple:
            count += len(one)
            waiting += one
        if count > most:
            return True
    return False


def check_values(value: Any, size: int, most: int) -> None:
    """Refuse (E3004) data with more values than `most`. `size` is the length of its JSON text in bytes."""
    if size > 2 * most and exceeds(value, most):
        raise too_many(most)


def too_many(most: int) -> Failure:
    """The refusal of a request with too many values."""
    return Failure(
        "E3004",
        f"the request holds more than {most:,} values",
        details={"mostValues": most},
        resolution="send fewer values per request: in several calls, or as one text; an operator can raise max_values",
    )


def cut(text: str, most: int) -> tuple[str, int]:
    """The beginning of a text with `MARGIN` characters to spare, and how many characters were left out.

    What is cut in two at the end may no longer be recognised as a credential. Whoever searches the piece drops the
    margin afterwards with `trim`.
    """
    if len(text) <= most + MARGIN:
        return text, 0
    return text[: most + MARGIN], len(text) - most


def trim(text: str, left_out: int) -> str:
    """Drop the margin of a text that was cut, and say how much is missing."""
    return f"{text[:-MARGIN]}… [{left_out:,} more characters are not shown]" if left_out else text


class Shortener:
    """Copies JSON data with bounds on all its texts and values together. Marks each place where something is left out.

    For data that a person or a log reads. The copy of data within the bounds is equal to it.
    """

    def __init__(self, *, characters: int = 1 << 16, values: int = 2000) -> None:
        self._characters = characters
        self._values = values

    def shorten(self, value: Any) -> Any:
        """The data, as much of it as there is room left for."""
        self._values -= 1
        if isinstance(value, str):
            most = max(self._characters, 64)
            self._characters -= min(len(value), most)
            return value if len(value) <= most else f"{value[:most]}… [{len(value) - most:,} more characters]"
        if isinstance(value, dict):
            return self._members(cast("dict[Any, Any]", value))
        if isinstance(value, list | tuple):
            return self._items(cast("list[Any]", value))
        return value

    def _members(self, members: dict[Any, Any]) -> dict[Any, Any]:
        short: dict[Any, Any] = {}
        for name, item in members.items():
            if self._values <= 0:
                short["…"] = f"{len(members) - len(short):,} more members are not shown"
                break
            short[self.shorten(name) if isinstance(name, str) else name] = self.shorten(item)
        return short

    def _items(self, items: list[Any]) -> list[Any]:
        short: list[Any] = []
        for item in items:
            if self._values <= 0:
                short.append(f"… {len(items) - len(short):,} more items are not shown")
                break
            short.append(self.shorten(item))
        return short
