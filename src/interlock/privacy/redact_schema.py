"""The places that redaction visits: a schema compiled into a graph of places, and the walk of data along it.

This module handles the shape of data: which places a schema marks, where the schema already states the content of a
string, and how data is copied only where something is removed. It does not know what is removed from a text: the caller
passes `change` and `hide`.

A schema is compiled once into a graph of nodes, one per set of subschemas that can describe the same place; the same
subschemas give the same node, so a recursive schema is a cyclic graph. Without a schema the graph is a single node that
describes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final, cast
from uuid import UUID

from interlock.core.record import NamedTuple

# JSON scalars and values that every serializer here converts to one; any other type is refused.
_SCALARS: Final = (int, float, type(None), datetime, date, time, Decimal, UUID)
PLAIN: Final = frozenset({int, float, bool, type(None)})

# Formats that describe how a text is displayed, not what it contains.
_FREE_FORMATS: Final = frozenset(
    {"text", "textarea", "markdown", "html", "multiline", "multi-line", "password", "byte", "binary"}
)
_NODE_LIMIT: Final = 10_000

# A place in the data: the enclosing place and the key or index, `None` at the root.
_Path = tuple[Any, "str | int"] | None


class Node:
    """The redaction rules for one place in the data."""

    __slots__ = ("items", "keys_stated", "marked", "prefix", "props", "rest", "scopes", "stated")

    def __init__(self, *, stated: bool = False) -> None:
        self.marked = False  # x-sensitivity
        self.scopes: frozenset[str] = frozenset()  # x-disclose
        self.stated = stated  # the schema states the content of a string here, so patterns do not apply
        self.keys_stated = stated
        self.props: dict[str, Node] = {}
        self.rest: Node = self
        self.prefix: tuple[Node, ...] = ()
        self.items: Node = self


class Graph(NamedTuple):
    """The nodes of one schema, by their root."""

    root: Node
    guarded: bool  # some field is marked
    trivial: bool  # nothing that fits the schema can hold anything to remove


_ANYTHING: Final = Node()
_DISCLOSED: Final = Node(stated=True)
NO_SCHEMA: Final = Graph(_ANYTHING, guarded=False, trivial=False)


class Walk:
    """One pass over data along the nodes; `change` returns the replacement of a text, or `None` to leave it.

    `hide` returns the marker for a whole value.
    """

    __slots__ = ("change", "disclose", "every", "hide", "is_secret", "removed", "values")

    def __init__(
        self,
        *,
        change: Callable[[str], str | None],
        hide: Callable[[Any], str],
        is_secret: Callable[[str], bool],
        disclose: frozenset[str],
        every: bool,
    ) -> None:
        self.change = change
        self.hide = hide
        self.is_secret = is_secret
        self.disclose = disclose
        self.every = every  # check every string, even where the schema states its content
        self.removed: list[_Path] = []
        self.values: list[Any] = []  # the private values themselves; names that match a pattern are among them

    def paths(self) -> tuple[str, ...]:
        """The JSON pointers of what was removed."""
        return tuple(dict.fromkeys(map(_pointer, self.removed)))

    def visit(self, value: Any, node: Node, path: _Path, named: bool = False) -> Any:
        """Return the value as it may be seen; the same object if nothing was removed from it."""
        if (named or node.marked or node.scopes) and not (node.scopes and node.scopes <= self.disclose):
            return self._hide(value, path, by_name_alone=not (node.marked or node.scopes))
        if isinstance(value, str):
            if node.stated and not self.every:
                return value
            masked = self.change(value)
            if masked is None:
                return value
            self.removed.append(path)
            self.values.append(value)
            return masked
        if isinstance(value, dict):
            return self._members(cast("dict[Any, Any]", value), node, path)
        if isinstance(value, list | tuple):
            return self._elements(cast("list[Any]", value), node, path)
        if not isinstance(value, _SCALARS):
            raise TypeError("not data")
        return value

    def _hide(self, value: Any, path: _Path, *, by_name_alone: bool) -> Any:
        # A null secret is no secret, nor is a flag that happens to be called `token`; a marked flag is.
        if value is None or (by_name_alone and isinstance(value, bool)):
            return value
        marker = self.hide(value)
        if value == marker:
            return value
        self.removed.append(path)
        self.values.append(value)
        return marker

    def _members(self, data: dict[Any, Any], node: Node, path: _Path) -> dict[Any, Any]:
        visit, change, is_secret, known = self.visit, self.change, self.is_secret, node.props.get
        look_at_keys = self.every or not node.keys_stated
        out: dict[Any, Any] | None = None
        renamed: dict[Any, str] = {}
        taken: set[str] = set()
        for key, value in data.items():
            name, child = key, known(key)
            if child is None:
                child = node.rest
                if look_at_keys and isinstance(key, str) and (masked := change(key)) is not None:
                    name = renamed[key] = _unused(masked, data, taken)
                    self.removed.append((path, name))
                    self.values.append(key)
            named = isinstance(key, str) and is_secret(key)
            if type(value) in PLAIN and not (named or child.marked or child.scopes):
                continue
            new = visit(value, child, (path, name), named)
            if new is not value:
                out = dict(data) if out is None else out
                out[key] = new
        if renamed:
            return {renamed.get(key, key): value for key, value in (out or data).items()}
        return data if out is None else out

    def _elements(self, data: list[Any] | tuple[Any, ...], node: Node, path: _Path) -> Any:
        visit, prefix, items = self.visit, node.prefix, node.items
        out: list[Any] | None = None
        for index, value in enumerate(data):
            child = prefix[index] if index < len(prefix) else items
            if type(value) in PLAIN and not (child.marked or child.scopes):
                continue
            new = visit(value, child, (path, index))
            if new is not value:
                out = list(data) if out is None else out
                out[index] = new
        if out is None:
            return data
        return tuple(out) if isinstance(data, tuple) else out


# What a schema states about the strings, objects or arrays in its place. Where all of several schemas apply, the lowest
# of their values counts; where one of several applies, the highest.
_NONE_HERE, _STATED, _FREE = 0, 1, 2


def _closed_object(schema: dict[str, Any]) -> bool:
    closed = schema.get("additionalProperties") is False or schema.get("unevaluatedProperties") is False
    return closed and not schema.get("patternProperties")


_TYPES: Final[Mapping[str, type]] = {"string": str, "object": dict, "array": list}
_STATES_CONTENT: Final[Mapping[str, Callable[[dict[str, Any]], bool]]] = {
    "string": lambda schema: "pattern" in schema or schema.get("format", "text") not in _FREE_FORMATS,
    "object": _closed_object,
    "array": lambda schema: "items" in schema,
}


def compile_graph(schema: dict[str, Any], is_secret: Callable[[str], bool]) -> Graph:
    """Compile the graph of everything that `schema` describes; refuses a schema with references it cannot follow."""
    return _Compiler(schema, is_secret).graph()


class _Compiler:
    """Turns one JSON Schema into nodes.

    The same subschemas give the same node, so recursion in the schema becomes a cycle among the nodes.
    """

    def __init__(self, schema: dict[str, Any], is_secret: Callable[[str], bool]) -> None:
        self._schema = schema
        self._is_secret = is_secret
        self._nodes: dict[tuple[frozenset[int], bool], Node] = {}
        self._verdicts: dict[tuple[int, str], int] = {}
        self._loud = {_ANYTHING, _DISCLOSED}  # nodes that may have something to remove
        self._beneath: dict[Node, list[Node]] = {}  # the nodes that can occur beneath a node

    def graph(self) -> Graph:
        root = self._node([self._schema], disclosed=False)
        guarded = any(node.marked or node.scopes for node in self._nodes.values())
        seen: set[Node] = set()
        waiting = [root]
        while waiting and self._loud.isdisjoint(waiting):
            seen.update(waiting)
            waiting = [child for node in waiting for child in self._beneath[node] if child not in seen]
        return Graph(root, guarded=guarded, trivial=not waiting)

    def _node(self, schemas: list[Any], *, disclosed: bool) -> Node:
        key = (frozenset(map(id, schemas)), disclosed)
        if key in self._nodes:
            return self._nodes[key]
        if len(self._nodes) >= _NODE_LIMIT:
            raise ValueError("schema too large")
        node = self._nodes[key] = Node()
        parts = self._parts(schemas)
        node.marked = any(part.get("x-sensitivity") not in (None, False) for part in parts)
        node.scopes = frozenset(str(part["x-disclose"]) for part in parts if "x-disclose" in part)
        # Only callers with the scope see a disclosed field, so patterns do not apply beneath it.
        disclosed = disclosed or bool(node.scopes)
        strings, objects, arrays = (max(self._verdict(schema, kind) for schema in schemas) for kind in _STATES_CONTENT)
        node.stated = disclosed or strings == _STATED
        self._add_members(node, parts, disclosed)
        self._add_elements(node, parts, disclosed)
        if (
            node.marked
            or node.scopes
            or (strings == _FREE and not disclosed)
            or _FREE in (objects, arrays)
            or (objects and any(map(self._is_secret, node.props)))
        ):
            self._loud.add(node)
        beneath = [*node.props.values()] if objects else []
        self._beneath[node] = [*beneath, *node.prefix, node.items] if arrays else beneath
        return node

    def _add_members(self, node: Node, parts: list[dict[str, Any]], disclosed: bool) -> None:
        names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
        for name in names:
            node.props[name] = self._node([s for part in parts for s in _for_name(part, name)], disclosed=disclosed)
        # All undeclared members share one node: a mark on any pattern or rest applies to all of them.
        rest = [s for part in parts for s in _for_others(part)]
        node.rest = self._node(rest, disclosed=disclosed) if rest else _anything(disclosed)
        names_of = [part["propertyNames"] for part in parts if "propertyNames" in part]
        node.keys_stated = disclosed or any(self._verdict(schema, "string") == _STATED for schema in names_of)

    def _add_elements(self, node: Node, parts: list[dict[str, Any]], disclosed: bool) -> None:
        length = max((len(_prefix(part)) for part in parts), default=0)
        node.prefix = tuple(
            self._node([s for part in parts for s in _for_index(part, index)], disclosed=disclosed)
            for index in range(length)
        )
        items = [s for part in parts for s in _for_items(part)]
        node.items = self._node(items, disclosed=disclosed) if items else _anything(disclosed)

    def _parts(self, schemas: list[Any]) -> list[dict[str, Any]]:
        """Every subschema that may describe the same place as one of `schemas`."""
        parts: dict[int, dict[str, Any]] = {}
        waiting = list(schemas)
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(cast("object", schema)) in parts:
                continue
            part = cast("dict[str, Any]", schema)
            parts[id(part)] = part
            waiting += self._referred(part)
            for word in ("allOf", "anyOf", "oneOf"):
                waiting += part.get(word, ())
            waiting += [part[word] for word in ("if", "then", "else") if word in part]
            waiting += part.get("dependentSchemas", {}).values()
        return list(parts.values())

    def _verdict(self, schema: Any, kind: str) -> int:
        if not isinstance(schema, dict):
            return _NONE_HERE if schema is False else _FREE
        schema = cast("dict[str, Any]", schema)
        key = (id(schema), kind)
        if key not in self._verdicts:
            self._verdicts[key] = _FREE  # met again in a cycle, it adds nothing
            facts = [_own_verdict(schema, kind)]
            facts += [self._verdict(s, kind) for s in (*self._referred(schema), *schema.get("allOf", ()))]
            for word in ("anyOf", "oneOf"):
                if schema.get(word):
                    facts.append(max(self._verdict(s, kind) for s in schema[word]))
            self._verdicts[key] = min(facts)
        return self._verdicts[key]

    def _referred(self, schema: dict[str, Any]) -> list[Any]:
        return [self._resolve(schema[word]) for word in ("$ref", "$dynamicRef") if word in schema]

    def _resolve(self, ref: str) -> Any:
        # A reference that cannot be followed may hide a mark, so the schema is refused.
        if ref != "#" and not ref.startswith("#/"):
            raise ValueError("reference leaves the schema")
        target: Any = self._schema
        for step in ref[2:].split("/") if len(ref) > 1 else ():
            step = step.replace("~1", "/").replace("~0", "~")
            target = cast("Any", target[int(step)] if isinstance(target, list) else target[step])
        return target


def _own_verdict(schema: dict[str, Any], kind: str) -> int:
    types = schema.get("type", kind)
    if kind != types and kind not in ([types] if isinstance(types, str) else types):
        return _NONE_HERE
    if "enum" in schema or "const" in schema:
        listed = schema.get("enum", [schema.get("const")])
        return _STATED if any(isinstance(value, _TYPES[kind]) for value in listed) else _NONE_HERE
    return _STATED if _STATES_CONTENT[kind](schema) else _FREE


def _anything(disclosed: bool) -> Node:
    return _DISCLOSED if disclosed else _ANYTHING


def _admits(part: dict[str, Any], kind: str, *words: str) -> bool:
    types = part.get("type", ())
    return kind in ([types] if isinstance(types, str) else types) or any(word in part for word in words)


_REST: Final = ("additionalProperties", "unevaluatedProperties")


def _for_name(part: dict[str, Any], name: str) -> Iterable[Any]:
    declared = part.get("properties", {})
    if name in declared:
        return (declared[name],)
    return tuple(part[word] for word in _REST if isinstance(part.get(word), dict))


def _for_others(part: dict[str, Any]) -> Iterable[Any]:
    rest = [part[word] for word in _REST if word in part]
    if not rest and _admits(part, "object", "properties", "patternProperties"):
        rest = [True]
    return (*part.get("patternProperties", {}).values(), *(s for s in rest if s is not False))


def _prefix(part: dict[str, Any]) -> list[Any]:
    older = part.get("items")  # before draft 2020-12, `items` held the positions
    return cast("list[Any]", older) if isinstance(older, list) else part.get("prefixItems", [])


def _for_index(part: dict[str, Any], index: int) -> Iterable[Any]:
    prefix = _prefix(part)
    return (prefix[index],) if index < len(prefix) else _for_items(part)


def _for_items(part: dict[str, Any]) -> Iterable[Any]:
    words = ("items", "additionalItems", "unevaluatedItems")
    rest = [part[word] for word in words if word in part and not isinstance(part[word], list)]
    if not rest and _admits(part, "array", "prefixItems", "items"):
        rest = [True]
    return (*([part["contains"]] if "contains" in part else ()), *(s for s in rest if s is not False))


def _unused(name: str, data: Mapping[Any, Any], taken: set[str]) -> str:
    """Return `name`, numbered if another key has it already: two addresses as keys must stay two members."""
    free, number = name, len(taken) + 1
    while free in data or free in taken:
        free, number = f"{name}_{number}", number + 1
    taken.add(free)
    return free


def _pointer(path: _Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append("/" + str(step).replace("~", "~0").replace("/", "~1"))
    return "".join(reversed(steps))
