"""The words of a text as the index counts them: split, lower case, without accents, stemmed, without stop words."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import unicodedata
from functools import lru_cache
from importlib.machinery import ModuleSpec
from typing import Any, Final

from interlock.core.expressions import expression

_LONGEST_WORD: Final = 40
_CACHED_WORDS: Final = 50_000

_CJK: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_PIECES: Final = expression(rf"[{_CJK}]+|[^\W\d_{_CJK}]+|\d+")
_HUMPS: Final = expression(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[^A-Z]+|[A-Z]+")
_SENTENCES: Final = expression(r"(?<=[.!?;\n。！？；])\s*|\s+(?:and then|then|finally|afterwards)\s+", re.IGNORECASE)

STOP_WORDS: Final = frozenset(
    """
    a about above after again all also am an and any are as at be because been before being below between both but by
    can could did do does doing down during each else every few for from further had has have having he her here hers
    him his how i if in into is it its itself just let lets like ll may me might more most my need no nor not now of off
    on once one only or other our out over own per please s same she should so some such t tell than that the their them
    then there these they this those through to too under until up us use used user using ve very via want was we were
    what when where which while who whom why will with within without would you your
    """.split()  # noqa: SIM905 - read as a text
)


def _english() -> Any:
    """The stemmer of English. The package would load those of 33 languages, which takes as long as a short search."""
    found = importlib.util.find_spec("snowballstemmer")
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError("snowballstemmer is not installed", name="snowballstemmer")
    spec = ModuleSpec("_interlock_snowball", None, is_package=True)
    spec.submodule_search_locations = list(found.submodule_search_locations)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{spec.name}.english_stemmer").EnglishStemmer()


_stemmer = _english()


@lru_cache(maxsize=_CACHED_WORDS)
def _stem(word: str) -> str:
    return str(_stemmer.stemWord(word))


def _plain(word: str) -> str:
    """Lower case, without accents."""
    lower = word.lower()
    if lower.isascii():
        return lower
    return "".join(c for c in unicodedata.normalize("NFKD", lower) if not unicodedata.combining(c))


def split(text: str) -> list[str]:
    """Split a text or an identifier into its words: `getHTTPStatus_v2` is get, HTTP, Status, v, 2."""
    words: list[str] = []
    for piece in _PIECES.findall(text):
        if piece.islower() or not piece.isascii():
            words.append(piece)
        else:
            words += _HUMPS.findall(piece)
    return words


def terms(text: str) -> list[str]:
    """Return the terms of a text in order. Chinese, Japanese and Korean text, without spaces, is cut into pairs."""
    found: list[str] = []
    for word in split(text):
        if "\u3040" <= word[0] <= "\ud7af" or "\uf900" <= word[0] <= "\ufaff":
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
            continue
        plain = _plain(word)[:_LONGEST_WORD]
        if plain not in STOP_WORDS:
            found.append(_stem(plain))
    return found


def sentences(text: str, most: int = 6) -> list[str]:
    """Return the sentences of a request, at least three words each, if there is more than one."""
    parts = [part.strip() for part in _SENTENCES.split(text) if part and part.strip()]
    long = [part for part in parts if len(part.split()) >= 3 or (not part.isascii() and len(part) >= 6)]
    return long[:most] if len(long) > 1 else []
