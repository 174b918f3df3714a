"""Taking secrets out of what leaves a call, in whatever form they were written.

A secret is looked for as it is and as it would be if it were encoded on the way: percent signs, JSON escapes, base64 at
any offset. What it leaves behind is a mark, so that nobody mistakes the rest for the whole.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast
from urllib.parse import quote, quote_plus

from interlock.core.errors import Failure
from interlock.core.patterns import REDACTED
from interlock.core.schema import pointer

SHORT = 4


def scrub(value: Any, secrets: Sequence[str], keep: Collection[str] = ()) -> tuple[Any, bool]:
    """Replace secrets in the strings, keys and numbers of JSON-like data; whether there were any is the second answer.

    Keys that are in `keep` stay: they are known beforehand, so they give nothing away.

    Found plain, in base64 (also within longer base64), URL-quoted, JSON-escaped and in hex. Those of fewer than four
    characters would be found everywhere; they count as whole values only.
    """
    if not secrets:
        return value, False
    scrubber = _Scrubber(secrets, keep)
    try:
        scrubbed = scrubber.visit(value)
    except RecursionError:
        raise Failure("E3304") from None
    return (scrubbed, True) if scrubber.found else (value, False)


def scrubbed_at(before: Any, after: Any, at: tuple[str | int, ...] = ()) -> Iterator[str]:
    """The JSON pointers of what scrubbing changed."""
    if isinstance(before, dict) and isinstance(after, dict):
        members = zip(cast("dict[Any, Any]", before).items(), cast("dict[Any, Any]", after).items(), strict=True)
        for (name, old), (shown, new) in members:
            if name != shown:
                yield pointer((*at, shown))
            else:
                yield from scrubbed_at(old, new, (*at, shown))
    elif isinstance(before, list | tuple) and isinstance(after, list):
        for index, (old, new) in enumerate(zip(cast("list[Any]", before), cast("list[Any]", after), strict=True)):
            yield from scrubbed_at(old, new, (*at, index))
    elif before != after:
        yield pointer(at)


class _Scrubber:
    """Looks for one set of secrets. Nothing here is remembered past the call: the forms are secrets as well."""

    def __init__(self, secrets: Sequence[str], keep: Collection[str]) -> None:
        self._keep = keep
        self._whole = frozenset(secrets)
        forms = {form for secret in self._whole if len(secret) >= SHORT for form in _forms(secret)}
        # What could be found in the marker itself is replaced before there are markers; otherwise the longest first.
        self._forms = sorted(forms, key=lambda form: (form not in REDACTED, -len(form)))
        self.found = False

    def visit(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return self._members(cast("dict[Any, Any]", value))
        if isinstance(value, list | tuple):
            return [self.visit(item) for item in cast("Sequence[Any]", value)]
        if isinstance(value, int | float) and str(value) in self._whole:
            self.found = True
            return REDACTED
        return value

    def _members(self, members: dict[Any, Any]) -> dict[Any, Any]:
        scrubbed: dict[Any, Any] = {}
        for key, item in members.items():
            name = unique = key if key in self._keep else self.visit(key)
            while unique in scrubbed:  # two keys that were secrets must not become one
                unique = f"{name} {len(scrubbed)}"
            scrubbed[unique] = self.visit(item)
        return scrubbed

    def _text(self, text: str) -> str:
        if text not in self._whole and not any(form in text for form in self._forms):
            return text
        self.found = True
        if text in self._whole:
            return REDACTED
        for form in self._forms:
            text = text.replace(form, REDACTED)
        # INVARIANT: what still shows a form, because it grew together around a marker, is withheld whole.
        return REDACTED if any(form in text for form in self._forms if form not in REDACTED) else text


def _forms(secret: str) -> set[str]:
    """Every way in which a secret is looked for."""
    raw = secret.encode(errors="surrogatepass")
    quoted = {quote(raw, safe=""), quote(raw), quote_plus(raw)}
    escaped = json.dumps(secret)[1:-1]
    return {
        secret,
        raw.hex(),
        raw.hex().upper(),
        *quoted,
        *(_PERCENT.sub(lambda match: match[0].lower(), one) for one in quoted),
        escaped,
        _ESCAPE.sub(lambda match: f"\\u{match[1].upper()}", escaped),
        json.dumps(secret, ensure_ascii=False)[1:-1],
        *_base64(raw),
    }


_PERCENT = re.compile(r"%[0-9A-F]{2}")
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")


def _base64(raw: bytes) -> Iterator[str]:
    """The bytes in base64: alone, and the letters that they alone decide at each of three places within more."""
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        alone = encode(raw).decode()
        yield alone
        yield alone.rstrip("=")
        for before, first in ((0, 0), (1, 2), (2, 3)):
            yield encode(bytes(before) + raw).decode()[first : (before + len(raw)) * 8 // 6]
