"""Reads what an untrusted side sent: bounded before it is parsed, cut before it is cleaned.

Parsing and cleaning cost time in proportion to what they are given, on the event loop that all calls share. So the
bounds come first: a document's values are counted in its bytes, and a text is cut to what anybody will ever see of it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

# About the most that is parsed in 50 ms, whatever the values are.
MOST_VALUES = 100_000
# Control characters, and characters that change direction or cannot be seen. Tabs and line ends stay.
_UNSAFE = re.compile(
    "\x1b\\[[0-?]{0,32}[ -/]{0,8}[@-~]|"
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f"
    "\ud800-\udfff]"
)
_DIGITS = bytes(48 if 48 <= one <= 57 else 32 for one in range(256))
_LONG_NUMBER = b"0" * 19
_WINDOW = 65_536


class TooManyValues(Exception):  # noqa: N818 - a finding about the other side
    """A document has more values than is allowed."""


def plain_text(text: str, most: int) -> str:
    """At most `most` characters of a text, without what could steer a terminal or mislead a reader.

    The cut comes first. A text of any length costs no more than one of `most` characters.
    """
    return _UNSAFE.sub("", text[:most])


def parse(body: bytes, most: int = MOST_VALUES) -> Any:
    """A JSON document with at most `most` values. ValueError where it is not strict JSON.

    Strict: valid Unicode only, no surrogates, no NaN, no number that is infinite as a double, at most 1,024 levels.
    Whole numbers keep their value, however long they are.
    """
    if more_values(body, most):
        raise TooManyValues
    value = orjson.loads(body)
    if len(body) >= len(_LONG_NUMBER) and _LONG_NUMBER in body.translate(_DIGITS):
        # orjson would give a number of more than 64 bits as the nearest double.
        value = json.loads(body.decode())
    return value


def more_values(data: bytes, limit: int) -> bool:
    """Whether a JSON text may hold more than `limit` values. Takes time in proportion to the text, and no memory."""
    if len(data) // 2 < limit:
        return False  # each value but the first takes two bytes at least
    if data.count(b",") + data.count(b"[") + data.count(b"{") < limit:
        return False
    # Texts may hold any number of commas and brackets. Without escapes, every second part between quotes is a text.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, inside = 1, 0
    for start in range(0, len(plain), _WINDOW):
        parts = plain[start : start + _WINDOW].split(b'"')
        outside = b"".join(parts[inside::2])
        count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if count > limit:
            return True
        inside ^= (len(parts) - 1) & 1
    return False
