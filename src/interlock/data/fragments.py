"""Text that becomes part of another language: contracts declare it with `x-fragment`, and this module checks it.

Nearly all text is data, is bound or encoded where it is used, and passes unchanged, whatever it looks like. A few tools
must accept a piece of SQL, of a command, of HTML, of a path or of a URL. Their contracts declare it, and for each of
these languages this module defines what such a piece may contain. A text that could reach beyond the place where it is
inserted is refused (E3305). Nothing is ever removed or rewritten: a text passes whole, or not at all.

    sql     one expression or name, with nothing that begins, ends or comments out a statement
    shell   one plain word
    html    text with the tags of formatted prose, each written out in full; links to http, https and mailto
    path    a relative path that stays below its starting directory
    url     a path, query or part of one, that stays on its host
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast
from urllib.parse import unquote

from interlock.core.expressions import expression
from interlock.data.schema import Fault, Json, Schema, pointer
from interlock.data.subschemas import Place

Language = Literal["sql", "shell", "html", "path", "url"]

_CONTROL = expression(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DEEPEST = 100


def declares_fragments(schema: Schema) -> bool:
    """Whether a schema declares any fragment."""
    return _declares(schema.document)


def _declares(node: Any) -> bool:
    if isinstance(node, list):
        return any(_declares(one) for one in cast("list[Any]", node))
    if not isinstance(node, dict):
        return False
    part = cast("Json", node)
    return part.get("x-fragment") in LANGUAGES or any(_declares(one) for one in part.values())


def attacks(schema: Schema, value: Any) -> list[Fault]:
    """List every declared fragment in a value that contains an attack, with the reason; the text is not quoted."""
    return sorted(set(_attacks(schema.places.root, value, [])))


def _attacks(place: Place, value: Any, path: list[Any]) -> Iterator[Fault]:
    if len(path) > _DEEPEST:
        return
    # INVARIANT: a value that several schemas describe is checked against each of them.
    if isinstance(value, str):
        for language in {part["x-fragment"] for part in place.parts if part.get("x-fragment") in LANGUAGES}:
            why = LANGUAGES[language](value)
            if why is not None:
                yield Fault(pointer(path), f"{why}; a piece of {language} may not have that")
    elif isinstance(value, dict):
        for name, item in cast("Json", value).items():
            yield from _attacks(place.names, name, path)
            yield from _attacks(place.member(name), item, [*path, name])
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _attacks(place.element(index), item, [*path, index])


# ── one function per language: why a text is not a mere piece of it, or None ─────────────────────────────────────────

# Quoted text contains nothing that would have a meaning within other quotes.
_QUOTED = expression(r"'[\w\s.,:@%+/!?-]*'|\"[\w\s.-]*\"")
_STATEMENT = expression(
    r"\b(?:select|union|insert|update|delete|replace|merge|drop|alter|create|truncate|grant|revoke|exec|execute|call"
    r"|attach|detach|pragma|vacuum|copy|load|declare|set|begin|commit|rollback|into|outfile|dumpfile|waitfor|sleep"
    r"|pg_sleep|benchmark|load_file|load_extension|xp_\w+|sp_\w+)\b",
    re.IGNORECASE,
)
_ALWAYS = expression(r"\b(?:or|and|xor)\b|\|\||&&", re.IGNORECASE)


def _sql(text: str) -> str | None:
    if _CONTROL.search(text):
        return "it has control characters"
    bare = _QUOTED.sub("''", text)
    if "'" in bare.replace("''", "") or '"' in bare or "\\" in bare or "`" in bare:
        return "it has quotes around more than words, or an escape"
    if ";" in bare or "--" in bare or "/*" in bare or "*/" in bare or "#" in bare:
        return "it ends a statement or begins a comment"
    if _STATEMENT.search(bare):
        return "it has the words of a statement"
    if _ALWAYS.search(bare):
        return "it joins conditions"
    if bare.count("(") != bare.count(")") or re.search(r"\)[^(]*\(", bare):
        return "its brackets do not match"
    return None


_WORD = expression(r"[A-Za-z0-9_@%+=:,./\-]+\Z")


def _shell(text: str) -> str | None:
    if not _WORD.match(text):
        return "it is not one plain word"
    return "it begins like an option" if text.startswith("-") else None


_TAG = expression(
    r"</?(?:p|br|hr|b|i|u|s|em|strong|small|sub|sup|code|pre|kbd|blockquote|q|ul|ol|li|dl|dt|dd|h[1-6]|table|thead"
    r"|tbody|tr|th|td|span|a)(?:\s+(?:title|lang|href)=\"([^\"<>]*)\")*\s*/?>",
    re.IGNORECASE,
)
_HREF = expression(r"href=\"([^\"]*)\"", re.IGNORECASE)
_LINK = expression(r"(?:https?://[^/\\]|mailto:|[/#?](?![/\\])|[A-Za-z0-9_.~-]+(?:[/?#]|\Z))", re.IGNORECASE)


def _html(text: str) -> str | None:
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
        return "it has control characters"
    for tag in _TAG.finditer(text):
        for link in _HREF.findall(tag[0]):
            if "&" in link.split("?")[0] or not _LINK.match(link):
                return "it has a link that is neither http, https, mailto nor relative"
    return "it has more than the tags of plain prose" if "<" in _TAG.sub("", text) else None


def _decoded(text: str) -> str | None:
    """Decode the text completely, as the last decoder would see it; None if decoding does not end."""
    for _ in range(5):
        plain = unquote(text, errors="replace")
        if plain == text:
            return plain
        text = plain
    return None


def _path(text: str) -> str | None:
    plain = _decoded(text)
    if plain is None or _CONTROL.search(plain) or "\\" in plain:
        return "it has control characters, backslashes or more encoding than a name needs"
    if plain.startswith(("/", "~")) or re.match(r"[A-Za-z]:", plain):
        return "it does not begin where it is put"
    return "it leads up" if ".." in plain.split("/") else None


def _url(text: str) -> str | None:
    plain = _decoded(text)
    if plain is None or _CONTROL.search(plain) or "\\" in plain or re.search(r"\s", plain):
        return "it has blanks, control characters, backslashes or too much encoding"
    if "//" in plain or "@" in plain or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", plain):
        return "it names a scheme, a host or somebody"
    if "#" in plain:
        return "it ends the address"
    return "it leads up" if ".." in re.split(r"[/?&=;]", plain) else None


LANGUAGES: Mapping[Language, Callable[[str], str | None]] = {
    "sql": _sql,
    "shell": _shell,
    "html": _html,
    "path": _path,
    "url": _url,
}
