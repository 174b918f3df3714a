"""The fields of a tool in the index, from its manifest. Fields that are marked as internal are not among it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from interlock.data.schema import Json, resolve_ref

if TYPE_CHECKING:
    from interlock.search.index import IndexedTool

# How much of a schema is looked at: values deep, parts, and choices of one part.
_DEEPEST: Final = 6
_MOST_PARTS: Final = 300
_MOST_CHOICES: Final = 50
# Keywords with a schema, and with several, of which a value has the form.
_ONE: Final = ("items", "additionalProperties", "contains")
_SEVERAL: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_MOST_SERVER_TEXT: Final = 500


def entry_of(tool: str, manifest: Json, origin: str = "", server_text: str = "") -> IndexedTool:
    """The entry of a tool in the index. `server_text` is what its upstream says about itself."""
    from interlock.search.index import IndexedTool

    names: dict[str, None] = {}
    texts: dict[str, None] = {}
    for name, part in _parts(manifest.get("parameters")):
        if name:
            names[name] = None
        texts |= dict.fromkeys(_texts(part))
    name = str(manifest.get("tool_id") or "")
    titles = [one for one in (manifest.get("name"), manifest.get("title")) if one and _plain(str(one)) != _plain(name)]
    upstream = origin.removeprefix("upstream:") if origin.startswith("upstream:") else None
    return IndexedTool(
        id=tool,
        name=name,
        description=str(manifest.get("description") or ""),
        parameters=list(names),
        parameter_texts=list(texts),
        server=" ".join(dict.fromkeys(one for one in (upstream, str(manifest.get("namespace") or "")) if one)),
        server_text=server_text[:_MOST_SERVER_TEXT],
        tags=[str(one) for one in (*titles, manifest.get("search_hint"), *(manifest.get("tags") or ())) if one],
    )


def _parts(schema: Any) -> Iterator[tuple[str, Json]]:
    """The fields of a schema by name, those of the top level first, and the parts of choices and lists without one.

    At most `_MOST_PARTS`. A definition that is referred to is looked at once.
    """
    root: Json = cast("Json", schema) if isinstance(schema, dict) else {}
    waiting: deque[tuple[str, Any, int]] = deque([("", root, 0)])
    seen: set[str] = set()
    most = _MOST_PARTS
    while waiting and most:
        name, part, depth = waiting.popleft()
        if not isinstance(part, dict):
            continue
        plain = cast("Json", part)
        reference: Any = plain.get("$ref")
        shown: Json = {**resolve_ref(root, plain), **plain}
        if shown.get("x-internal") is True:
            continue
        most -= 1
        if depth:
            yield name, shown
        if depth == _DEEPEST or (isinstance(reference, str) and reference in seen):
            continue
        if isinstance(reference, str):
            seen.add(reference)
        waiting.extend((one, inner, depth + 1) for one, inner in _inside(shown))


def _inside(part: Json) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, with the names of those that are fields."""
    properties: Any = part.get("properties")
    if isinstance(properties, dict):
        yield from cast("Json", properties).items()
    for word in _ONE:
        yield "", part.get(word)
    for word in _SEVERAL:
        several: Any = part.get(word)
        if isinstance(several, list):
            for one in cast("list[Any]", several):
                yield "", one


def _texts(part: Json) -> Iterable[str]:
    if isinstance(part.get("description"), str):
        yield part["description"]
    choices: Any = part.get("enum", [part.get("const")])
    if isinstance(choices, list):
        found = [str(one) for one in cast("list[Any]", choices)[:_MOST_CHOICES] if isinstance(one, str | int)]
        if found:
            yield " ".join(found)


def _plain(name: str) -> str:
    return "".join(one for one in name.lower() if one.isalnum())
