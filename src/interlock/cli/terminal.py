"""Styled text, and the stream that it is written to: colours on a terminal, plain text elsewhere.

Every command that shows a page loads this module, so it needs next to nothing but the standard library.

INVARIANT: no control character in the pieces of a text reaches the stream, except tabs and ends of lines.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from typing import IO

from interlock.core.expressions import expression

# Control characters and marks that reorder text: a tool's output must not be able to draw on its reader's terminal.
_UNSAFE = expression("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CODES = {
    "bold": "1", "dim": "2", "italic": "3", "red": "31", "green": "32", "yellow": "33", "cyan": "36",
}  # fmt: skip
# Categories of characters that take no column: accents that are drawn over another character, and marks of direction.
_NO_COLUMN = frozenset(("Mn", "Me", "Cf"))
_IN_ONE_LINE = str.maketrans("\n\t", "  ")
# The width of a terminal that does not know it.
_COLUMNS = 80


def clean(text: str) -> str:
    """Text that is safe to show on a terminal, with what is not safe made visible."""
    return text if text.isprintable() else _UNSAFE.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def clean_json(text: str) -> str:
    """The same for a JSON text, with JSON escapes, so that it still parses to the same value."""
    return text if text.isprintable() else _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def cell_len(text: str) -> int:
    """The columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in _NO_COLUMN:
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


class Text:
    """A text of pieces that have a style each, such as `bold red`."""

    __slots__ = ("_pieces", "style")

    def __init__(self, plain: str = "", style: str = "") -> None:
        self._pieces: list[tuple[str, str]] = [(clean(plain), style)] if plain else []
        self.style = style

    @classmethod
    def assemble(cls, parts: Iterable[Text]) -> Text:
        made = cls()
        for part in parts:
            made.append_text(part)
        return made

    def __str__(self) -> str:
        return self.plain

    @property
    def plain(self) -> str:
        return "".join(piece for piece, _ in self._pieces)

    @property
    def cell_len(self) -> int:
        return cell_len(self.plain)

    def append(self, plain: str, style: str = "") -> Text:
        if plain:
            self._pieces.append((clean(plain), style))
        return self

    def append_text(self, other: Text) -> Text:
        self._pieces += other._pieces
        return self

    def in_one_line(self) -> Text:
        """The text with spaces in place of tabs and ends of lines."""
        if self.plain.isprintable():
            return self
        made = Text(style=self.style)
        made._pieces = [(plain.translate(_IN_ONE_LINE), style) for plain, style in self._pieces]
        return made

    def rstrip(self) -> None:
        """Remove white space at the end."""
        while self._pieces:
            plain, style = self._pieces.pop()
            if left := plain.rstrip():
                self._pieces.append((left, style))
                return

    def divide(self, offsets: Iterable[int]) -> list[Text]:
        """The parts between offsets, in order."""
        bounds = [0, *offsets, len(self.plain)]
        return [self._part(begin, end) for begin, end in pairwise(bounds)]

    def _part(self, begin: int, end: int) -> Text:
        part, at = Text(style=self.style), 0
        for plain, style in self._pieces:
            part.append(plain[max(0, begin - at) : max(0, end - at)], style)
            at += len(plain)
        return part

    def ansi(self) -> str:
        """The text with the escape sequences of its styles."""
        styled: list[str] = []
        for plain, style in self._pieces:
            codes = ";".join(_CODES[word] for word in style.split())
            styled.append(f"\x1b[{codes}m{plain}\x1b[0m" if codes else plain)
        return "".join(styled)


class Console:
    """A stream that texts are written to, one or more lines each."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.is_terminal = stream.isatty()
        self._coloured = self._shows_colours()

    def _shows_colours(self) -> bool:
        """By the usual variables (https://no-color.org, https://force-color.org), or else on a terminal that can."""
        if os.environ.get("NO_COLOR"):
            return False
        able = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
        return bool(os.environ.get("FORCE_COLOR")) or (self.is_terminal and able)

    @property
    def width(self) -> int:
        """The columns that COLUMNS says, or those of the terminal."""
        stated = os.environ.get("COLUMNS", "")
        if stated.isdecimal() and int(stated) > 0:
            return int(stated)
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        except (OSError, ValueError):
            return _COLUMNS

    def print(self, text: Text | str) -> None:
        """Write a text and end the line."""
        if isinstance(text, str):
            text = Text(text)
        self._stream.write(f"{text.ansi() if self._coloured else text.plain}\n")
        self._stream.flush()
