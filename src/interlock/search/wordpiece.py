"""WordPiece, the way uncased BERT models cut text into the pieces of a vocabulary."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from interlock.core.expressions import expression

_LONGEST_WORD: Final = 100
_CACHED_WORDS: Final = 50_000
# Words and single signs of ASCII text, in lower case.
_WORDS: Final = expression(r"[a-z0-9]+|[!-/:-@\[-`{-~]")
_CJK: Final = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
_NO_CONTROLS: Final = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))


def _words(text: str) -> list[str]:
    """Words without accents, in lower case. Each punctuation mark and each Chinese character is a word."""
    spaced = "".join(map(_spaced, text))
    return "".join(c for c in unicodedata.normalize("NFD", spaced) if unicodedata.category(c) != "Mn").lower().split()


@lru_cache(maxsize=10_000)
def _spaced(character: str) -> str:
    """A character, with spaces around it if it is a word, or nothing for one that cannot be seen."""
    if character.isspace() and (character in "\t\n\r" or character >= " "):
        return " "
    kind, number = unicodedata.category(character), ord(character)
    if kind in ("Cc", "Cf", "Co", "Cs") or character == "\ufffd":
        return ""
    alone = kind[0] == "P" or (number < 128 and not character.isalnum()) or any(a <= number <= b for a, b in _CJK)
    return f" {character} " if alone else character


class WordPiece:
    """Cut text into pieces. `pieces` is the vocabulary in the order of its ids."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        self.unknown = self._ids.get("[UNK]")
        self._known: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, piece: str) -> int:
        return self._ids[piece]

    def ids(self, text: str, most: int) -> list[int]:
        """Return the ids of the first `most` pieces of a text; words that the vocabulary cannot spell are left out."""
        found: list[int] = []
        # Control characters are dropped, not taken for the end of a word.
        for word in _WORDS.findall(text.translate(_NO_CONTROLS).lower()) if text.isascii() else _words(text):
            cut = self._known.get(word)
            if cut is None:
                if len(self._known) >= _CACHED_WORDS:
                    self._known.clear()
                cut = self._known[word] = self._cut(word)
            found += cut
            if len(found) >= most:
                return found[:most]
        return found

    def _cut(self, word: str) -> tuple[int, ...]:
        """Cut a word into the longest pieces, from its beginning."""
        unknown = () if self.unknown is None else (self.unknown,)
        if len(word) > _LONGEST_WORD:
            return unknown
        ids: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                number = self._ids.get(prefix + word[start:end])
                if number is not None:
                    ids.append(number)
                    start = end
                    break
            else:
                return unknown
        return tuple(ids)
