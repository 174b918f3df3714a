"""The forms of credentials in texts, and their removal from the messages and details of failures.

A credential is found by its own form (`sk-…`, a JWT, a PEM block, the user of a URL) or by the name in front of it
(`password=…`). `privacy.patterns` uses the same forms for the texts of tools and removes more than this module does.
Here texts are mostly Interlock's own and speak of fields, permissions and headers by name, and those stay: `token: must
be a string`, `credentials:maps`, `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, cast

from interlock.core.expressions import expression

REDACTED: Final = "[REDACTED]"

SENSITIVE_NAMES: Final = (
    "password",
    "secret",
    "token",
    "apiKey",
    "api_key",
    "accessToken",
    "refresh_token",
    "private_key",
    "credit_card",
    "ssn",
    "social_security",
)
# Words that precede a credential in messages only, in addition to the sensitive field names.
_SPOKEN_NAMES: Final = ("passwd", "pwd", "passphrase", "authorization", "credential", "credentials", "cookie")

# Each expression either matches or gives up within a bounded distance.
CREDENTIALS: Final = expression(
    r"-----BEGIN [A-Z0-9 ]{0,40}-----.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)"
    r"|(?<=://)[^\s/]{1,256}(?=@)"
    r"|(?i:\bbearer\s+[^\s,;\"']+)"
    r"|\b(?:sk|rk|pk)[-_][\w-]{6,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{8,}"
    r"|\b(?:gh[a-z]_|github_pat_|glpat-)[\w-]{6,}"
    r"|\bxox[a-z]-[\w-]+"
    r"|\bAIza[\w-]{20,}"
    r"|\beyJ[\w-]{8,}(?:\.[\w-]+)*",
    re.DOTALL,
)
# Every credential except a bearer token contains one of these, and searching fixed text costs a fraction of the
# expression.
_IN_CREDENTIALS: Final = (
    "-----BEGIN ", "://", "k-", "k_", "AKIA", "ASIA", "gh", "github_pat_", "glpat-", "xox", "AIza", "eyJ"
)  # fmt: skip


def may_hold_credential(text: str) -> bool:
    """Whether a search for `CREDENTIALS` can find anything."""
    return any(map(text.__contains__, _IN_CREDENTIALS)) or "bearer" in text.lower()


def spoken_names(names: Iterable[str]) -> str:
    """An expression for these names, and for the words that precede a credential, in every spelling."""
    forms = {"[-_ ]?".join(map(re.escape, _words(name))) for name in (*names, *_SPOKEN_NAMES)}
    return "|".join(sorted(forms, key=len, reverse=True))


def _words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[-_]", " ", name).lower().split()


def last_words(names: Iterable[str]) -> frozenset[str]:
    """The words that these names, and those that precede a credential, end in."""
    words = frozenset(" ".join(_words(name)).rpartition(" ")[2] for name in (*names, *_SPOKEN_NAMES))
    return words if all(map(str.isascii, words)) else frozenset(("",))


_LAST_WORDS: Final = last_words(SENSITIVE_NAMES)


def may_name_credential(text: str, words: Iterable[str] = _LAST_WORDS) -> bool:
    """Whether a search for a name that ends in one of these words, and for what follows it, can find anything.

    Most texts contain none of the words. Of letters outside ASCII only the search itself knows which are the same.
    """
    return ("=" in text or ":" in text) and (not text.isascii() or any(map(text.lower().__contains__, words)))


@cache
def _names() -> re.Pattern[str]:
    return re.compile(spoken_names(SENSITIVE_NAMES), re.IGNORECASE)


@cache
def _spoken() -> re.Pattern[str]:
    """The search for a credential behind its name. Compiled on first use: most processes never need it.

    After a colon stands a credential only if it is quoted or looks like one, because a message may go on there.
    """
    names = _names().pattern
    quoted = r"""\\?"[^"]*"?|\\?'[^']*'?"""
    # Few letters begin a name, and a look at one letter costs a fraction of trying all names.
    first = "".join(sorted({name[0] for name in names.split("|")}))
    return re.compile(
        rf"(?=[{first}])(?:((?:{names})\\?[\"']?[ \t]*=>?[ \t]*)(?:(?:basic|bearer|token)[ \t]+)?(?:{quoted}|[^\s`]+)"
        rf"|((?:{names})\\?[\"']?[ \t]*:[ \t]*)(?:{quoted}|(?:basic|token)[ \t]+[^\s`]{{6,}})"
        rf"|((?!(?:token|secret|credentials?):\S)(?:{names})\\?[\"']?[ \t]*:[ \t]*)(?=[^\s`]{{0,64}}\d)[^\s`]{{6,}})",
        re.IGNORECASE,
    )


# The length of `pwd=x`; every other form is longer.
_SHORTEST: Final = 5
_A_WORD: Final = expression(r"(?:(?i:bearer)\s{1,8}\W?[A-Za-z]{0,15}\W{0,8}|(?:sk|rk|pk)[-_][A-Za-z_-]+)\Z")


def _hide(match: re.Match[str]) -> str:
    # `Bearer TOKEN` and a field called `pk_customer` are words, not credentials.
    return match[0] if _A_WORD.match(match[0]) else REDACTED


def _hide_spoken(match: re.Match[str]) -> str:
    return f"{match[1] or match[2] or match[3]}{REDACTED}"


def holds_credential(text: str) -> bool:
    """Whether a text has the form of a credential, or has one in it."""
    return may_hold_credential(text) and CREDENTIALS.sub(_hide, text) != text


def without_credentials(text: str) -> str:
    """Remove credentials from a text of a failure; the same text if there were none."""
    if len(text) < _SHORTEST:
        return text
    if may_hold_credential(text):
        text = CREDENTIALS.sub(_hide, text)
    return _spoken().sub(_hide_spoken, text) if may_name_credential(text) else text


def without_credentials_in(value: Any) -> Any:
    """Remove credentials from all texts in some data; returns the same object if there were none.

    A text under the name of a secret (`password`) is removed whole.
    """
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        members = cast("Mapping[Any, Any]", value)
        cleaned = {
            without_credentials(name) if isinstance(name, str) else name: _member(name, one)
            for name, one in members.items()
        }
        same = len(cleaned) == len(members) and all(
            name in members and one is members[name] for name, one in cleaned.items()
        )
        return members if same else cleaned
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        items_cleaned = [without_credentials_in(one) for one in items]
        return items if all(one is before for one, before in zip(items_cleaned, items, strict=True)) else items_cleaned
    return value


def _member(name: Any, value: Any) -> Any:
    if isinstance(value, str) and value and isinstance(name, str) and _names().fullmatch(name):
        return value if value == REDACTED else REDACTED
    return without_credentials_in(value)
