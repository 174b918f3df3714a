"""Templates: how arguments are placed in an operation that was described by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.schema import Json
from interlock.upstreams.wire import to_json

_PLACEHOLDER = expression(r"\{([A-Za-z_*][\w.*-]*)\}")
REST = "{*}"


class Absent:
    """Marks an argument that was not given."""


ABSENT = Absent()


def placeholders(template: Any) -> set[str]:
    """Return the names that a template mentions."""
    if isinstance(template, str):
        return set(_PLACEHOLDER.findall(template))
    if isinstance(template, Mapping):
        values: Iterable[Any] = cast("Mapping[str, Any]", template).values()
    elif isinstance(template, list | tuple):
        values = cast("Sequence[Any]", template)
    else:
        return set()
    return {name for value in values for name in placeholders(value)}


def fill(template: Any, values: Json, rest: Json) -> Any:
    """Fill the placeholders of a template. `{name}` alone becomes the value itself, within a text its text; `{*}`
    becomes all other arguments. Absent arguments are left out.
    """
    if isinstance(template, str):
        if template == REST:
            return rest
        whole = _PLACEHOLDER.fullmatch(template)
        if whole:
            return values.get(whole[1], ABSENT)
        return _PLACEHOLDER.sub(lambda match: text_of(values.get(match[1], "")), template)
    if isinstance(template, Mapping):
        pairs = cast("Mapping[str, Any]", template)
        filled = {name: fill(part, values, rest) for name, part in pairs.items()}
        return {name: part for name, part in filled.items() if part is not ABSENT}
    if isinstance(template, list | tuple):
        parts = [fill(part, values, rest) for part in cast("Sequence[Any]", template)]
        return [part for part in parts if part is not ABSENT]
    return template


def text_of(value: Any) -> str:
    """Format a value for a text, a path or a query."""
    return value if isinstance(value, str) else to_json(value).decode()


def quoted(value: Any) -> str:
    """Percent-encode a value for an address, so that it is only data."""
    text = text_of(value)
    if text.isalnum() and text.isascii():
        return text
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise Failure("E3302", "an argument is a text that is not Unicode") from None
