"""WordPiece, the way uncased BERT models cut text into the pieces of a vocabulary."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

_LONGEST_WORD: Final = 100
_CACHED_WORDS: Final = 50_000
_CJK: Final = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# A word, one sign, or one Chinese character.
_WORDS: Final = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+|[^\s\w]|_")


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
        plain = text.lower()
        if not plain.isascii():
            plain = "".join(c for c in unicodedata.normalize("NFD", plain) if unicodedata.category(c) != "Mn")
        for word in _WORDS.findall(plain):
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
