"""Bounds of arguments on the command line: read from options, and told in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.values import parse_json
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

Json = dict[str, Any]


def read_patterns(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, equals, pattern in (value.partition("=") for value in values):
        if not name or not equals:
            raise click.BadParameter("write NAME=PATTERN")
        found.setdefault(name, []).append(pattern)
    for name, several in found.items():
        if len(several) > 1 and set("*?") & set("".join(several)):
            raise click.BadParameter(
                f"`{name}` is named several times, for a set of values, and values have no * and ?"
            )
    return found


def read_ranges(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for value in values:
        match = _RANGE.fullmatch(value)
        try:
            number: Any = None if match is None else parse_json(match[3], "where", or_stdin=False)
        except click.UsageError:
            number = None
        if match is None or type(number) not in (int, float):
            raise click.BadParameter("write NAME<=NUMBER, or with >=, < or >")
        bounds, word = found.setdefault(match[1], {}), _WORDS[match[2]]
        if word in bounds:
            raise click.BadParameter(f"`{match[1]}{match[2]}` is said twice")
        bounds[word] = number
    return found


_RANGE = expression(r"\s*([^\s<>=]+)\s*(<=|>=|<|>)\s*([^\s<>=]+)\s*")
_WORDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


def read_eaches(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, list[str] | Json]:
    """Read the bounds of items: for each list its texts, as `--arg` has them, or the bounds of numbers."""
    numbers = tuple(value for value in values if _RANGE.fullmatch(value))
    others = tuple(value for value in values if value not in numbers)
    ranges, patterns = read_ranges(context, parameter, numbers), read_patterns(context, parameter, others)
    if twice := ranges.keys() & patterns.keys():
        raise click.BadParameter(f"`{min(twice)}` is bounded twice")
    return {**ranges, **patterns}


class TypedBounds(NamedTuple):
    """The bounds of arguments, as they were typed."""

    patterns: dict[str, list[str]]
    ranges: dict[str, Json]
    eaches: dict[str, list[str] | Json]
    texts: tuple[str, ...]
    values: tuple[str, ...]

    def check(self) -> TypedBounds:
        """Refuse an argument that has two bounds."""
        seen: set[str] = set()
        for names in self:
            if twice := seen & set(names):
                words = "--arg, --where, --each, --any-text and --any-value"
                raise click.UsageError(f"`{min(twice)}` is bounded twice: name it with one of {words}")
            seen |= set(names)
        return self


def arguments_within(schema: Json, bounds: TypedBounds, tool: str) -> Json:
    """The bounds as the tool's schema means them: a word is a text where it admits texts, and else JSON."""
    from interlock.contract.argument_bounds import ANY, as_value, for_each, read_word
    from interlock.core.errors import Failure

    properties: dict[str, Any] = schema.get("properties") or {}
    unknown = [name for names in bounds for name in names if name not in properties]
    if unknown:
        raise Failure("E3004", f"{tool} takes no `{unknown[0]}`; it takes {', '.join(properties) or 'no arguments'}")

    def pattern(name: str, given: list[str] | Json, of: Any) -> Any:
        if isinstance(given, dict):
            return given
        values: list[Any] = []
        for word in given:
            try:
                values.append(read_word(word, schema, of))
            except ValueError:
                values.append(parse_json(word, name, or_stdin=False))  # the error says what is wrong with it
        return as_value(values[0]) if len(values) == 1 else {"enum": values}

    def each(name: str, given: list[str] | Json) -> Json:
        return for_each(schema, properties[name], lambda items: pattern(name, given, items))

    return {
        **{name: pattern(name, texts, properties[name]) for name, texts in bounds.patterns.items()},
        **{name: each(name, given) for name, given in bounds.eaches.items()},
        **bounds.ranges,
        **{name: {"type": "string"} for name in bounds.texts},
        **{name: dict(ANY) for name in bounds.values},
    }


def bounds_in_words(arguments: Mapping[str, Any]) -> str:
    """The bounds of a standing approval, argument by argument."""
    return ", ".join(words for name, one in arguments.items() for words in _pattern(name, one)) or "no arguments"


def _pattern(name: str, pattern: Any) -> list[str]:
    """The bounds of an argument, as they were written."""
    from interlock.api.approval_documents import kind_of_bound
    from interlock.cli.render import value_text

    kind = kind_of_bound(pattern)
    if kind == "set":
        return [f"{name} one of {' '.join(map(value_text, pattern['enum']))}"]
    if kind == "each":
        return _pattern(f"each of {name}", pattern["items"])
    if kind in ("text", "any"):
        return [f"{name} any {'text' if kind == 'text' else 'value'}"]
    if kind == "pattern":
        return [f"{name}={value_text(pattern)}"]
    return [f"{name}{sign}{pattern[word]}" for sign, word in _WORDS.items() if word in pattern]
