"""Patterns for private content in free text: personal data, credentials, and paths of the host in messages.

This module contains every expression that is searched for in text, its replacement, and the search functions; the
forms of credentials are those of `core.credentials`. It knows nothing of data, positions of fields or schemas:
`redact_schema` walks those, and `redact` combines the two.

Most texts contain nothing to remove, so each search is preceded by a cheap test: an `@` for addresses, the outline of a
number for numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Final

from interlock.core.credentials import (
    CREDENTIALS,
    REDACTED,
    SENSITIVE_NAMES,
    last_words,
    may_hold_credential,
    may_name_credential,
    spoken_names,
)
from interlock.core.expressions import expression
from interlock.data.bounds import cut, trim

_EMAIL_MARKER: Final = "[EMAIL_REDACTED]"
LONGEST_MESSAGE: Final = 2_000
# Of longer texts only the beginning is searched, and shown.
_MESSAGE_SEARCHED: Final = 8_000
_LOG_LIMIT: Final = 16_000
REVIEW_LIMIT: Final = 32_000


def plain_name(name: str) -> str:
    """Normalise a name for comparison: without case and without the characters that join its words."""
    return name.replace("_", "").replace("-", "").lower()


_PLAIN_SECRETS: Final = frozenset(map(plain_name, SENSITIVE_NAMES))


def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret, by the built-in names."""
    return plain_name(name) in _PLAIN_SECRETS


# An address is found by its `@` and read in both directions, so that a long word is scanned once and not once per
# letter.
_DOMAIN: Final = expression(r"@[\w.-]+\.[^\W\d_]{2,}")
_DOMAIN_CHARACTERS: Final = expression(r"@[\w.-]+")
_LOCAL_BACKWARDS: Final = expression(r"[\w.%+-]+")

_HYPHEN: Final = "[-\u2010-\u2015]"
_SEP: Final = "[-\u2010-\u2015. \u00a0]"
_OVER_255: Final = r"2(?:5[6-9]|[6-9]\d)|[3-9]\d\d"

# The rest of a match after its first character, which is a digit, `+` or `(` and is checked by lookbehind. One
# expression with a plain class in front lets the engine skip to the next digit; boundaries look at digits only, so that
# no replacement makes or breaks a neighbouring match (redaction is idempotent).
_NUMBERS: Final[Mapping[str, str]] = {
    "SSN": rf"(?<=\d)\d\d{_HYPHEN}\d\d{_HYPHEN}\d{{4}}",
    "CREDIT_CARD": r"(?<=\d)\d{3}[\s-]?\d{4}[\s-]?\d{4}[\s-]?\d{4}",
    "PHONE": (
        rf"(?<=\d)\d\d{_SEP}\d{{3}}{_SEP}\d{{4}}"
        rf"|(?<=\()\d{{3}}\){_SEP}?\d{{3}}{_SEP}?\d{{4}}"
        rf"|(?<=\+)1{_SEP}?\(?\d{{3}}\)?{_SEP}?\d{{3}}{_SEP}?\d{{4}}"
        # A separate match right behind a number is not a part of the number.
        rf"|(?<=\+)\d(?:(?!{_SEP}(?:\d{{1,3}}(?:\.\d{{1,3}}){{3}}|\d{{3}}{_HYPHEN}\d\d{_HYPHEN}\d{{4}}))"
        rf"(?:{_SEP}|{_SEP}?[()]{_SEP}?)?\d){{7,14}}"
    ),
    "IP_ADDRESS": (rf"(?<=\d)(?!(?<=2)(?:5[6-9]|[6-9]\d)|(?<=[3-9])\d\d)\d{{0,2}}(?:\.(?!{_OVER_255})\d{{1,3}}){{3}}"),
}
# The strict setting also matches bare forms, at the price of false positives (and without the Luhn check).
_STRICT_TOO: Final[Mapping[str, str]] = {
    "PHONE": r"(?<=\d)\d\d[-.]?\d{3}[-.]?\d{4}",
    "IP_ADDRESS": r"(?<=\d)\d{0,2}(?:\.\d{1,3}){3}",
}
_MARKERS: Final[Mapping[str, str]] = {name: f"[{name}_REDACTED]" for name in _NUMBERS}

# Outlines of those forms: with digits as 0 and separators as -, every match except an address shows one of these, and
# searching fixed bytes costs a fraction of the expression.
_OUTLINES: Final = (b"000-00-0000", b"000-000-0000", b"0000-0000")
_COMMON_TO_OUTLINES: Final = b"00-0000"
_BARE_CARD: Final = b"0" * 16
_TO_OUTLINE: Final = bytes(
    48 if chr(c).isdigit() else c if chr(c) in "()+" else 45 if chr(c) in "-. \t\n\r\f\v\x1c\x1d\x1e\x1f?" else 0
    for c in range(256)
)
_WINDOW: Final = 65_536
_REACH: Final = 256
_MAY_BE_ADDRESS: Final = expression(r"\.\d{1,3}\.\d{1,3}\.\d", re.ASCII)

_TRACEBACK: Final = expression(r"[ |+]*(?:Exception Group )?Traceback \(most recent call last\)")
_FRAME: Final = expression(r"[ \t]*File \"[^\"\n]{0,4096}\", line \d+(?:, in [^\s,]+)?")
# A web address is matched before the rest and kept, so that its path is not taken for one of the host's.
_PLACES: Final = expression(
    r"(?i:file)://\S*|\b[A-Za-z][A-Za-z0-9+.-]{1,15}:///\S*"
    r"|(?P<url>\b[A-Za-z][A-Za-z0-9+.-]{1,15}://[^\s\"'`<>]*)"
    r"|(?<=[\"'`])~?/[^\"'`\n/]+/[^\"'`\n]+"
    r"|(?<![\w/])~?/[^\s/\"'`<>|:;,()\[\]{}]+/[^\s\"'`<>|:;,()\[\]{}]+"
    r"|(?<![A-Za-z])[A-Za-z]:(?:\\(?:[^\\/:*?\"'<>|\r\n]+\\)*|/)[^\s:*?\"'<>|,;]*"
    r"|\\\\[\w.$-]+\\[^\s:*?\"'<>|,;]+"
)


_DIGIT: Final = expression("[0-9]")


class Patterns:
    """The compiled expressions of one set of rules; immutable."""

    __slots__ = ("_spoken", "_strict", "extra", "last_words", "markers")

    def __init__(self, *, strict: bool, extra: Iterable[tuple[str, str, str]], names: Sequence[str]) -> None:
        self._strict: Final = strict
        self._spoken: Final = _spoken_secrets(tuple(names))
        self.last_words: Final = last_words(names)
        self.extra: Final = tuple((re.compile(regex), marker) for _, regex, marker in extra)
        self.markers: Final = frozenset(
            {REDACTED, _EMAIL_MARKER, *_MARKERS.values(), *(marker for _, marker in self.extra)}
        )

    def mask(self, text: str) -> str:
        """Replace every match of the patterns by its marker."""
        for regex, marker in self.extra:
            text = self._mask_extra(text, regex, marker)
        if "@" in text:
            text = _mask_emails(text)
        if _DIGIT.search(text) is not None:
            text = self._mask_numbers(text)
        return text

    def message(self, text: str) -> str:
        """Clean a text for a model: no stack trace, host path, credential or personal data."""
        text, left_out = cut(text, _MESSAGE_SEARCHED)
        # Looking for a character first is many times faster than a search for the whole pattern.
        if "Traceback" in text and (trace := _TRACEBACK.search(text)):
            text, left_out = text[: trace.start()], 0
        text = self._hide_credentials(text)
        if "File" in text:
            text = _FRAME.sub("", text)
        if "/" in text or "\\" in text:
            text = _PLACES.sub(lambda match: match[0] if match["url"] else "[path]", text)
        return trim(self.mask(text), left_out).strip()[:LONGEST_MESSAGE]

    def log(self, text: str) -> str:
        """Clean a text for operators: stack traces and paths stay, credentials and personal data are removed."""
        text, left_out = cut(text, _LOG_LIMIT)
        return trim(self.mask(self._hide_credentials(text)), left_out)

    def without_credentials(self, text: str) -> str:
        """Remove credentials from a text for a person who must decide about it; personal data stays."""
        if len(text) <= REVIEW_LIMIT:
            return self._hide_credentials(text)
        text, left_out = cut(text, REVIEW_LIMIT)
        return trim(self._hide_credentials(text), left_out)

    def private(self, text: str) -> str:
        """Remove credentials and matches of configured patterns; other personal data stays."""
        text = self._hide_credentials(text)
        for regex, marker in self.extra:
            text = self._mask_extra(text, regex, marker)
        return text

    def _hide_credentials(self, text: str) -> str:
        if may_hold_credential(text):
            text = CREDENTIALS.sub(REDACTED, text)
        return self._spoken.sub(rf"\1\2{REDACTED}", text) if may_name_credential(text, self.last_words) else text

    def _mask_extra(self, text: str, regex: re.Pattern[str], marker: str) -> str:
        # A configured pattern may match the text of a marker; existing markers are left unchanged.
        any_marker = "|".join(map(re.escape, sorted(filter(None, self.markers), key=len, reverse=True)))
        return "".join(
            piece if piece in self.markers else regex.sub(lambda match: marker if match[0] else "", piece)
            for piece in re.split(f"({any_marker})", text)
        )

    def _mask_numbers(self, text: str) -> str:
        if not self._strict and not _may_hold_number(text):
            return text
        search = _in_windows(_numbers(strict=self._strict))
        out: list[str] = []
        done = 0
        match = search(text, 0)
        while match:
            start, end = match.span()
            name = match.lastgroup or ""
            if name == "CREDIT_CARD" and not self._strict and not _luhn(match[0]):
                end = start + 1  # the real number may begin at the candidate's second group
            else:
                out += (text[done:start], _MARKERS[name])
                done = end
            match = search(text, end)
        return "".join((*out, text[done:])) if out else text


@cache
def _numbers(*, strict: bool) -> Callable[..., re.Match[str] | None]:
    """Make the search for the next number. Compiled on first use, because that takes longer than starting Python."""
    forms = {
        name: f"{form}|{_STRICT_TOO[name]}" if strict and name in _STRICT_TOO else form
        for name, form in _NUMBERS.items()
    }
    any_of = "|".join(f"(?P<{name}>{form})" for name, form in forms.items())
    # The classes are plain sets of ASCII: the engine skips text without them far faster than with `\d`.
    return re.compile(rf"[0-9+(](?<!\d\d)(?:{any_of})(?!\d)".replace(r"\d", "[0-9]")).search


def _in_windows(search: Callable[..., re.Match[str] | None]) -> Callable[[str, int], re.Match[str] | None]:
    """Wrap a search so that it looks at one window of a long text after the other.

    A call into C blocks all other threads, so each call gets a bounded amount of text. A match, including its
    lookahead, is never longer than `_REACH`; a match that ends that close to the end of its window is searched for
    again.
    """

    def first_match(text: str, start: int) -> re.Match[str] | None:
        end = start + _WINDOW
        while end < len(text):
            match = search(text, start, end)
            if match and match.end() <= end - _REACH:
                return match
            start, end = match.start() if match else end - _REACH, end + _WINDOW
        return search(text, start)

    return first_match


def _may_hold_number(text: str) -> bool:
    if len(text) <= _WINDOW:
        return _may_hold_number_at_once(text)
    return any(
        _may_hold_number_at_once(text[start : start + _WINDOW + _REACH]) for start in range(0, len(text), _WINDOW)
    )


def _may_hold_number_at_once(text: str) -> bool:
    # Every character beyond ASCII becomes `?`, which counts as a separator: a few of them are.
    outline = text.encode("ascii", "replace").translate(_TO_OUTLINE)
    return (
        (_COMMON_TO_OUTLINES in outline and any(map(outline.__contains__, _OUTLINES)))
        or _BARE_CARD in outline
        or ("(" in text and b"(000)" in outline)
        or ("+" in text and b"+0" in outline)
        or _MAY_BE_ADDRESS.search(text) is not None
    )


_DOUBLED: Final = str.maketrans("0123456789", "0246813579")  # twice the digit, its own digits added up


def _luhn(number: str) -> bool:
    digits = "".join(filter(str.isdigit, number))[::-1]
    return (sum(map(int, digits[::2])) + sum(map(int, digits[1::2].translate(_DOUBLED)))) % 10 == 0


def _domains(text: str) -> Iterable[re.Match[str]]:
    """Find every `@` with the domain behind it, in windows as `_in_windows` does.

    A domain has any length. Where one may continue behind its window, the next window begins with its `@`, or is
    larger.
    """
    start, size = 0, _WINDOW
    while start < len(text):
        done, end = start, start + size
        at = -1
        for domain in _DOMAIN.finditer(text, start, end):
            if end < len(text) and _ends_at(text, domain.start(), end):
                at = domain.start()
                break
            yield domain
            done = domain.end()
        else:
            at = text.rfind("@", done, end) if end < len(text) else -1
        start, size = (end, _WINDOW) if at < 0 else (at, 2 * size if at == start else _WINDOW)


def _ends_at(text: str, at: int, end: int) -> bool:
    """Whether the characters of the domain at `at` reach the end of the window. What follows may then be part of it."""
    characters = _DOMAIN_CHARACTERS.match(text, at, end)
    return characters is not None and characters.end() == end


def _mask_emails(text: str) -> str:
    out: list[str] = []
    done = floor = 0
    for domain in _domains(text):
        at = domain.start()
        local = _LOCAL_BACKWARDS.match(text[floor:at][::-1])
        floor = at + 1
        if out and at == done:
            # The local part was taken for the end of the domain before it: the addresses run into one another.
            done = floor = domain.end()
        elif local:
            out += (text[done : at - local.end()], _EMAIL_MARKER)
            done = floor = domain.end()
    return "".join((*out, text[done:])) if out else text


@lru_cache(maxsize=16)  # every data directory that is opened asks, nearly always for the same names
def _spoken_secrets(names: tuple[str, ...]) -> re.Pattern[str]:
    """`password=…`, `"api_key": "…"` and the like, for every sensitive name."""
    becomes = r"""\\?["']?[ \t]*(?::|=>?)[ \t]*"""
    value = r"""(?:(?:basic|bearer|token)[ \t]+)?(?:\[REDACTED\]|\\?"[^"]*"?|\\?'[^']*'?|\S+)"""
    return expression(f"({spoken_names(names)})({becomes}){value}", re.IGNORECASE)
