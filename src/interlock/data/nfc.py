"""Unicode NFC in time proportional to the length of a text.

`unicodedata.normalize` sorts a run of combining marks by insertion: a text of 256 kB that consists of marks takes 11
seconds, during which no other thread runs. Long runs of marks are therefore sorted here first, and long texts are
normalised piece by piece, cut where no two characters can be combined.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from interlock.core.expressions import expression

# Includes all characters that have a combining class or that can be combined with the character before them. Letters of
# several scripts are included too: the expression is coarse so that it is fast. `_walk.c` has the same ranges.
_LOOSE = "\u0300-\u036f\u0483-\u1dff\u20d0-\u20ff\u2cef-\u33ff\ua66f-\uabff\ufb1e-\ufe2f\U00010000-\U0010ffff"
LONG_RUN = 32
_MAY_BE_LONG = expression(f"[{_LOOSE}]{{{LONG_RUN + 1}}}")
_SAFE_CUT = expression(f"[^{_LOOSE}]")
_PIECE = 1 << 14


def nfc(text: str) -> str:
    """Normalise a text to NFC."""
    if text.isascii():
        return text
    if _MAY_BE_LONG.search(text) is not None:
        text = _long_run().sub(_sorted, text)
    return "".join(unicodedata.normalize("NFC", piece) for piece in _pieces(text))


def is_nfc(text: str) -> bool:
    """Whether a text is in NFC."""
    if text.isascii():
        return True
    if _MAY_BE_LONG.search(text) is not None:
        # Every part of a text in NFC is in NFC.
        for run in _long_run().finditer(text):
            if unicodedata.normalize("NFC", _sorted(run)) != run[0]:
                return False
    return all(unicodedata.is_normalized("NFC", piece) for piece in _pieces(text))


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > 2 * _PIECE and (cut := _SAFE_CUT.search(text, start + _PIECE)) is not None:
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


# Not marks themselves, but they decompose into marks only.
_STAND_FOR_MARKS = "\u0f73\u0f75\u0f81"
_BEYOND_BMP = "\U00010000-\U0001ffff"


@lru_cache(maxsize=1)
def _long_run() -> re.Pattern[str]:
    """Match runs of marks. Beyond the BMP it is coarse again, because each listed character would cost time."""
    marks = "".join(one for one in map(chr, range(0x300, 0x10000)) if unicodedata.combining(one))
    return re.compile(f"[{marks}{_STAND_FOR_MARKS}{_BEYOND_BMP}]{{{LONG_RUN + 1},}}")


def _sorted(run: re.Match[str]) -> str:
    """Decompose the characters and sort each run of marks in Unicode's canonical order."""
    decomposed = "".join(unicodedata.normalize("NFD", one) for one in run[0])
    runs = groupby(decomposed, lambda one: unicodedata.combining(one) != 0)
    return "".join(one for _, several in runs for one in sorted(several, key=unicodedata.combining))
