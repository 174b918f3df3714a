"""Reads JSON and YAML files that people write, such as settings and policies.

Both formats leave undefined what a repeated name means, and the usual readers silently take the last one. A reviewer
who reads the first one would then be wrong. Here a name that an object has twice is a fault, reported with its line
like any other fault of form.

YAML is read by the core schema of YAML 1.2, which OpenAPI prescribes: `no`, `on`, `12:30` and dates are texts, and
`017` is seventeen. Names are texts as they are written, as in JSON. Of YAML 1.1, merging by `<<` is known.

JSON is read by a fast parser, which does not detect repeated names. Once the text is known to be valid, a scan does:
braces and brackets give the position, and a string with a colon behind it is a name.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import Any, cast

import orjson

from interlock.core.expressions import expression


class Malformed(ValueError):  # noqa: N818 - what the text is
    """A text that is not a document; the message says what is wrong and where."""


class Doubled(Malformed):
    """A document in which an object has a name twice."""

    def __init__(self, name: str, line: int) -> None:
        # A name may contain characters that break the line or control a terminal.
        shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name[:60])
        super().__init__(f"line {line}: `{shown}` appears twice")


def read_json(text: str | bytes) -> Any:
    """Read a JSON text in which no object has a name twice."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    _check_names(text if isinstance(text, str) else text.decode())
    return value


def _check_names(words: str) -> None:
    """Refuse valid JSON in which an object has a name twice."""
    within: list[set[str]] = []
    for match in _MARKS(words):
        mark = match[0]
        if mark in "{[":
            within.append(set())
        elif mark in "}]":
            within.pop()
        elif match[1] is not None:
            quoted = match[1]
            name: str = json.loads(quoted) if "\\" in quoted else quoted[1:-1]
            if name in within[-1]:
                raise Doubled(name, words.count("\n", 0, match.start()) + 1)
            within[-1].add(name)


# A name, any other string (whose braces are text), or a bracket.
_MARKS = expression(r"""("(?:[^"\\]|\\.)*")\s*:|"(?:[^"\\]|\\.)*"|[{}\[\]]""").finditer


def read_yaml(text: str | bytes) -> list[Any]:
    """Read the documents of a YAML text (JSON is YAML too) in which no mapping has a name twice."""
    import yaml

    loader: Any = None
    documents: list[Any] = []
    try:
        loader = _loader()(text)
        while loader.check_node():
            node = loader.get_node()
            _check_nodes(node)
            documents.append(loader.construct_document(node))
    except (LookupError, AttributeError):  # of the constructor of a tag, such as `!!bool maybe`
        raise Malformed("a value is not of the kind that its tag says") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise error if isinstance(error, Malformed) else Malformed(_reason(error)) from None
    finally:
        if loader is not None:
            loader.dispose()
    return documents


# The composer of libyaml calls itself once per level: a text of brackets alone would end the process.
_DEEPEST = 500


@cache
def _loader() -> Any:
    """The reader of YAML, which refuses a document that is too deep."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, first, form in _CORE:
        for character in first:
            resolvers.setdefault(character, []).append((_TAG + kind, re.compile(form)))
    resolvers[""] = [(f"{_TAG}null", re.compile(""))]

    class Loader(base):
        yaml_implicit_resolvers = resolvers
        depth = 0

        def descend_resolver(self, current_node: Any, current_index: Any) -> None:
            self.depth += 1
            if self.depth > _DEEPEST:
                raise Malformed(f"more than {_DEEPEST} levels of lists and mappings")
            super().descend_resolver(current_node, current_index)  # pyright: ignore[reportUnknownMemberType]

        def ascend_resolver(self) -> None:
            self.depth -= 1
            super().ascend_resolver()  # pyright: ignore[reportUnknownMemberType]

    def whole(_: Any, node: Any) -> int:
        text: str = node.value
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    Loader.add_constructor(f"{_TAG}int", whole)
    return Loader


_TAG = "tag:yaml.org,2002:"
_DIGITS = "0123456789"
# The plain scalars that are no text: their kind, the characters they may begin with, and their form, as in 10.3.2 of
# YAML 1.2.2. Merging is of YAML 1.1.
_CORE = (
    ("null", "~nN", r"(?:~|null|Null|NULL)\Z"),
    ("bool", "tTfF", r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    ("int", f"-+{_DIGITS}", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    ("float", f"-+.{_DIGITS}", r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)\Z"),
    ("float", "-+.", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"),
    ("merge", "<", r"<<\Z"),
)


_PLAIN = frozenset(f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float"))


def _check_nodes(root: Any) -> None:
    """Check a tree as it was written, and make texts of its names. A name merged by `<<` may be repeated once."""
    import yaml

    left, seen = [root], set[int]()
    while left:
        node = left.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            left.extend(node.value)
            continue
        names = set[str]()
        for at, (name, value) in enumerate(node.value):
            left += (name, value)
            if isinstance(name, yaml.ScalarNode):
                if name.value in names:
                    raise Doubled(name.value, name.start_mark.line + 1)
                names.add(name.value)
                if name.tag in _PLAIN:
                    # Another node: by an alias, this one may be a value elsewhere.
                    text = yaml.ScalarNode(f"{_TAG}str", name.value, name.start_mark, name.end_mark)
                    node.value[at] = (text, value)


def _reason(error: Exception) -> str:
    mark: Any = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', None) or type(error).__name__}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


_LARGEST, _SMALLEST = 2**64 - 1, -(2**63)


class Unfolded(Malformed):
    """A text with aliases that stand for far more values than the text has characters."""

    def __init__(self) -> None:
        super().__init__("the document unfolds into one that is too large; write it without aliases")


def plain(value: Any, *, most: int | None = None) -> Any:
    """Copy values that YAML or Python can hold and JSON cannot: names become text, dates too.

    A whole number beyond 64 bits becomes the nearest number that every reader of JSON takes, and what is no number at
    all becomes null. Unfolded if there are more than `most` values.
    """
    left = -1 if most is None else most

    def convert(one: Any) -> Any:
        nonlocal left
        if left == 0:
            raise Unfolded
        left -= 1
        match one:
            case dict():
                return {str(name): convert(part) for name, part in cast("dict[Any, Any]", one).items()}
            case list() | tuple():
                return [convert(part) for part in cast("list[Any]", one)]
            case None | str() | bool():
                return one
            case int():
                return one if _SMALLEST <= one <= _LARGEST else convert(_nearest(one))
            case float():
                return one if math.isfinite(one) else None
            case _:
                return str(one)

    return convert(value)


def _nearest(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf
