"""Removes secrets from everything that leaves a call, in whatever form they were written.

A secret is searched for as it is and in the encodings it may have passed through: percent encoding, JSON escapes,
base64 at any offset. Long secrets are also searched for with all gaps removed from them and from the text, so that line
breaks and indentation make no difference. Each line of a secret of several lines is a secret by itself. A removed
secret leaves a marker, so that nobody mistakes the rest for the whole.

The cost is one search of the text for each form. It is bounded by the number of secrets and of their lines, and zero
where there are no secrets.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast
from urllib.parse import quote, quote_plus

from interlock.core.credentials import REDACTED
from interlock.core.errors import Failure
from interlock.core.expressions import expression

SHORT = 4
# The minimum length of a line that counts as a secret by itself, and the maximum number of such lines (the longest).
LINE, LINES = 8, 200
# Shorter secrets would be found across the words of unrelated sentences.
BROKEN = 16


class Forms:
    """Every form in which some secrets are searched for.

    The forms are secrets too and are not stored beyond the call.
    """

    __slots__ = ("broken", "plain", "whole")

    def __init__(self, secrets: Iterable[str]) -> None:
        self.whole = frozenset(secrets)
        long = [secret for secret in self.whole if len(secret) >= SHORT]
        plain = {form for secret in long for form in _forms(secret)}
        plain.update(form for line in _lines(long) for form in _escaped(line))
        broken = {bare for form in plain if len(bare := _without_gaps(form)) >= BROKEN}
        self.plain = _in_order(plain)
        self.broken = _in_order(broken)

    def shown_in(self, text: str, *, beside_marks: bool = False) -> bool:
        """Whether a text contains a secret; `beside_marks` is for text whose markers must not count."""
        bare = _without_gaps(text) if len(text) >= BROKEN else ""
        return any(form in text for form in self.plain if not (beside_marks and form in REDACTED)) or any(
            form in bare for form in self.broken if not (beside_marks and form in REDACTED)
        )


def scrub(value: Any, secrets: Sequence[str] | Forms, keep: Collection[str] = ()) -> tuple[Any, bool]:
    """Replace secrets in the strings, keys and numbers of JSON-like data. Also returns whether there were any.

    Keys in `keep` are left unchanged: they are known beforehand, so they reveal nothing.

    Secrets are found in plain form, in base64 (also within longer base64), URL-quoted, JSON-escaped and in hex, on one
    line or several. Those of fewer than four characters would be found everywhere; they only count as whole values.
    """
    if not secrets:
        return value, False
    scrubber = _Scrubber(secrets if isinstance(secrets, Forms) else Forms(secrets), keep)
    try:
        scrubbed = scrubber.visit(value)
    except RecursionError:
        raise Failure("E3304") from None
    return (scrubbed, True) if scrubber.changed else (value, False)


def holds(contents: Iterable[bytes], secrets: Sequence[str]) -> bool:
    """Whether any of some bytes contain a secret, in the forms that `scrub` knows or in UTF-16."""
    if not secrets:
        return False
    forms = Forms(secrets)
    whole = {_raw(secret) for secret in forms.whole}
    plain, broken = [_raw(form) for form in forms.plain], [_raw(form) for form in forms.broken]
    wide = [one for one in forms.whole if len(one) >= SHORT]
    wide += _lines(wide)
    plain += [one.encode(code, errors="surrogatepass") for one in wide for code in ("utf-16-le", "utf-16-be")]
    for content in contents:
        if content in whole or any(form in content for form in plain):
            return True
        bare = content.translate(None, b" \t\r\n\v\f")
        bare = _GAP_IN_BYTES.sub(b"", bare) if b"\\" in bare else bare
        if any(form in bare for form in broken):
            return True
    return False


def scrubbed_at(before: Any, after: Any, at: tuple[str | int, ...] = ()) -> Iterator[str]:
    """Return the JSON pointers of what scrubbing changed."""
    if isinstance(before, dict) and isinstance(after, dict):
        members = zip(cast("dict[Any, Any]", before).items(), cast("dict[Any, Any]", after).items(), strict=True)
        for (name, old), (shown, new) in members:
            if name != shown:
                from interlock.data.schema import pointer

                yield pointer((*at, shown))
            else:
                yield from scrubbed_at(old, new, (*at, shown))
    elif isinstance(before, list | tuple) and isinstance(after, list):
        for index, (old, new) in enumerate(zip(cast("list[Any]", before), cast("list[Any]", after), strict=True)):
            yield from scrubbed_at(old, new, (*at, index))
    elif before != after:
        from interlock.data.schema import pointer

        yield pointer(at)


class _Scrubber:
    """Searches one value for one set of secrets."""

    def __init__(self, forms: Forms, keep: Collection[str]) -> None:
        self._forms = forms
        self._keep = keep
        self.changed = False

    def visit(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return self._members(cast("dict[Any, Any]", value))
        if isinstance(value, list | tuple):
            return [self.visit(item) for item in cast("Sequence[Any]", value)]
        if isinstance(value, int | float) and str(value) in self._forms.whole:
            self.changed = True
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
        forms = self._forms
        if text in forms.whole:
            self.changed = True
            return REDACTED
        if not forms.shown_in(text):
            return text
        self.changed = True
        for form in forms.plain:
            text = text.replace(form, REDACTED)
        text = _mark_broken(text, forms.broken)
        # INVARIANT: a text that still shows a form, because parts joined around a marker, is withheld whole.
        return REDACTED if forms.shown_in(text, beside_marks=True) else text


def _in_order(forms: Iterable[str]) -> list[str]:
    """Order the forms: those that occur in the marker itself first, before there are markers; then the
    longest first.
    """
    return sorted(forms, key=lambda form: (form not in REDACTED, -len(form)))


# Lines and gaps

_BREAKS = expression(r"(?:[\r\n]|\\{1,8}[rn])+")
_ARMOUR = expression(r"-----(?:BEGIN|END) [A-Z0-9 ]+-----")
# Characters that encoders insert without meaning: escaped line breaks, and the backslash before a slash.
_GAP = expression(r"\\{1,8}(?:[rnt]|(?=/))")
_GAP_IN_BYTES = expression(_GAP.pattern.encode())


def _lines(secrets: Iterable[str]) -> list[str]:
    """Return the lines of secrets with several lines, also if the breaks are escaped. The frame of a PEM key is no
    secret.
    """
    found = {
        line.strip()
        for secret in secrets
        if len(lines := _BREAKS.split(secret)) > 1
        for line in lines
        if len(line.strip()) >= LINE and not _ARMOUR.fullmatch(line.strip())
    }
    return sorted(found, key=len, reverse=True)[:LINES]


def _without_gaps(text: str) -> str:
    bare = "".join(text.split())
    return _GAP.sub("", bare) if "\\" in bare else bare


def _mark_broken(text: str, forms: Iterable[str]) -> str:
    """Insert markers where a text without its gaps shows a form."""
    places = [at for at, character in enumerate(text) if not character.isspace()]
    bare = "".join(text[at] for at in places)
    gaps = {at for gap in _GAP.finditer(bare) for at in range(*gap.span())}
    places = [place for at, place in enumerate(places) if at not in gaps]
    bare = _GAP.sub("", bare)
    spans = sorted(
        (places[match.start()], places[match.end() - 1] + 1)
        for form in forms
        for match in re.finditer(re.escape(form), bare)
    )
    parts: list[str] = []
    done = 0
    for begin, end in spans:
        if begin >= done:
            parts += (text[done:begin], REDACTED)
        done = max(done, end)
    return "".join((*parts, text[done:]))


# Encodings


def _forms(secret: str) -> set[str]:
    """Return every form in which a secret is searched for."""
    raw = _raw(secret)
    quoted = {quote(raw, safe=""), quote(raw), quote_plus(raw)}
    return {
        *_escaped(secret),
        raw.hex(),
        raw.hex().upper(),
        *quoted,
        *(_PERCENT.sub(lambda match: match[0].lower(), one) for one in quoted),
        *_base64(raw),
    }


def _escaped(secret: str) -> set[str]:
    """Return a secret as it is and as the various JSON encoders escape it."""
    escaped = json.dumps(secret)[1:-1]
    forms = {
        secret,
        escaped,
        _ESCAPE.sub(lambda match: f"\\u{match[1].upper()}", escaped),
        json.dumps(secret, ensure_ascii=False)[1:-1],
    }
    return forms | {form.replace("/", "\\/") for form in forms}


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


_PERCENT = expression(r"%[0-9A-F]{2}")
_ESCAPE = expression(r"\\u([0-9a-f]{4})")


def _base64(raw: bytes) -> Iterator[str]:
    """Return the bytes in base64: alone, and the letters that they alone determine at each of three offsets."""
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        alone = encode(raw).decode()
        yield alone
        yield alone.rstrip("=")
        for before, first in ((0, 0), (1, 2), (2, 3)):
            yield encode(bytes(before) + raw).decode()[first : (before + len(raw)) * 8 // 6]
