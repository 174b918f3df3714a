"""JSON and YAML that people write and programs obey.

Both formats leave open what it means to say the same thing twice, and the usual readers take the last word silently.
What a reviewer reads first is then not what counts. So here a name that an object has twice is a fault, told with its
line, like any other fault of form.

JSON is read by a quick parser, which cannot see it. Once the text is known to be valid, a scan finds out: braces and
brackets tell where it is, and a string with a colon behind it is a name.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson


class Malformed(ValueError):  # noqa: N818 - what the text is
    """A text that is not a document; the words say what is wrong and where."""


class Doubled(Malformed):
    """A document in which an object has a name twice."""

    def __init__(self, name: str, line: int) -> None:
        # A name may hold what would break the line, or draw on a terminal.
        shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name[:60])
        super().__init__(f"line {line}: `{shown}` is said twice")


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text in which everything is said once."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    _check_names(text if isinstance(text, str) else text.decode())
    return value


def _check_names(words: str) -> None:
    """Refuse valid JSON in which an object has a name twice."""
    within: list[set[str]] = []
    for found in _MARKS(words):
        mark = found[0]
        if mark in "{[":
            within.append(set())
        elif mark in "}]":
            within.pop()
        elif found[1] is not None:
            quoted = found[1]
            name: str = json.loads(quoted) if "\\" in quoted else quoted[1:-1]
            if name in within[-1]:
                raise Doubled(name, words.count("\n", 0, found.start()) + 1)
            within[-1].add(name)


# A name, any other string (whose braces are text), or a bracket.
_MARKS = re.compile(r"""("(?:[^"\\]|\\.)*")\s*:|"(?:[^"\\]|\\.)*"|[{}\[\]]""").finditer


def read_yaml(text: str | bytes) -> list[Any]:
    """The documents of a YAML text (JSON is YAML too) in which everything is said once."""
    import yaml

    loader: Any = None
    documents: list[Any] = []
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        while loader.check_node():
            node = loader.get_node()
            _check_nodes(node)
            documents.append(loader.construct_document(node))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise error if isinstance(error, Malformed) else Malformed(_reason(error)) from None
    finally:
        if loader is not None:
            loader.dispose()
    return documents


def _check_nodes(root: Any) -> None:
    """Look through a tree as it was written: what `<<` takes over may be said again, once."""
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
        names = set[tuple[str, str]]()
        for name, value in node.value:
            left += (name, value)
            if isinstance(name, yaml.ScalarNode):
                if (name.tag, name.value) in names:
                    raise Doubled(name.value, name.start_mark.line + 1)
                names.add((name.tag, name.value))


def _reason(error: Exception) -> str:
    mark: Any = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', None) or type(error).__name__}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
