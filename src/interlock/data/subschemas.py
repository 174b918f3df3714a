"""Finds the subschemas that describe each place of some data. Every applicator of JSON Schema is followed.

A `Place` holds all subschemas that can apply to one value: those it is reached by, those they refer to, and each of
their alternatives and conditions. From a place one proceeds to a member, an element or the name of a member. No
alternative is ruled out by looking at the value, so a place can hold too many subschemas but never too few. Subschemas
below `not` describe values that are absent, and are kept separate (`negated`).

The same subschemas give the same place, so a recursive schema makes a finite graph, and each part of it is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any, cast
from urllib.parse import unquote

Json = dict[str, Any]
# A subschema, and whether it stands below `not`.
View = tuple[Any, bool]

_SAME_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_SAME_PLACE_NODES = ("if", "then", "else")
_SAME_PLACE_MAPS = ("dependentSchemas", "dependencies")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_REMEMBERED = 10_000
# Values, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})

PATH, URL, HOST, COMMAND = "path", "url", "host", "command"
_FORMATS: Mapping[str, str] = {
    "path": PATH, "file-path": PATH, "directory-path": PATH,
    "uri": URL, "url": URL, "iri": URL, "uri-reference": URL, "iri-reference": URL,
    "hostname": HOST, "idn-hostname": HOST, "ipv4": HOST, "ipv6": HOST,
}  # fmt: skip
# The extensions by which a schema marks the kind of a text, where no format does.
MARKS: Mapping[str, str] = {"x-path": PATH, "x-url": URL, "x-host": HOST, "x-command": COMMAND}


def kinds_of(part: Json) -> Iterator[str]:
    """Return the kinds of text that one subschema marks: path, url, host, command."""
    format_ = part.get("format")
    if isinstance(format_, str) and format_ in _FORMATS:
        yield _FORMATS[format_]
    for mark, kind in MARKS.items():
        if part.get(mark) is True:
            yield kind


class Place:
    """The subschemas that can describe one value."""

    def __init__(self, places: Places, views: Iterable[View]) -> None:
        self._places = places
        self._views = tuple(views)
        self._members: dict[str, Place] = {}
        self._elements: dict[int, Place] = {}

    @cached_property
    def parts(self) -> tuple[Json, ...]:
        """The subschemas that describe the value, except those below `not`."""
        return tuple(part for part, negated in self._views if not negated)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of text that are marked here."""
        return frozenset(kind for part in self.parts for kind in kinds_of(part))

    @cached_property
    def negated(self) -> frozenset[str]:
        """The kinds of text that are marked here below `not`: the value may, but need not, be of these kinds."""
        return frozenset(kind for part, negated in self._views if negated for kind in kinds_of(part)) - self.kinds

    @cached_property
    def types(self) -> frozenset[str]:
        """The JSON types that the subschemas name."""
        named: set[str] = set()
        for part in self.parts:
            types: Any = part.get("type")
            named.update([types] if isinstance(types, str) else cast("list[str]", types or []))
        return frozenset(named)

    def member(self, name: str) -> Place:
        """The place of an object's member."""
        if not self._views:
            return self
        place = self._members.get(name)
        if place is None:
            place = self._places.at(child for view in self._views for child in _members(view, name))
            # Other names come from callers and are unlimited, so they are not cached.
            if name in self._declared:
                self._members[name] = place
        return place

    def element(self, index: int) -> Place:
        """The place of an array's element."""
        if not self._views:
            return self
        index = min(index, self._listed)
        place = self._elements.get(index)
        if place is None:
            place = self._places.at(child for view in self._views for child in _elements(view, index))
            self._elements[index] = place
        return place

    @cached_property
    def names(self) -> Place:
        """The place of the names of an object's members."""
        return self._places.at((part["propertyNames"], soft) for part, soft in self._views if "propertyNames" in part)

    @cached_property
    def unmarked(self) -> frozenset[str]:
        """The declared members that are marked as no kind of text."""
        members = ((name, self.member(name)) for name in self._declared)
        return frozenset(name for name, place in members if not (place.kinds or place.negated))

    @cached_property
    def _declared(self) -> frozenset[str]:
        return frozenset(name for part, _ in self._views for name in _mapping(part.get("properties")))

    @cached_property
    def _listed(self) -> int:
        """The number of elements with a subschema of their own."""
        return max((len(_prefix(part)) for part, _ in self._views), default=0)


class Places:
    """The places of one schema."""

    def __init__(self, document: Json) -> None:
        self._document = document
        self._known: dict[frozenset[tuple[int, bool]], Place] = {}

    @cached_property
    def root(self) -> Place:
        return self.at([(self._document, False)])

    @cached_property
    def blind(self) -> str | None:
        """Why going through the places may miss a mark of this schema; None if every mark is reached."""
        nodes = list(_nodes(self._document))
        if not any(_is_marked(node) for node in nodes):
            return None
        for node in nodes:
            for word in _REFERENCES:
                if isinstance(node.get(word), str) and not self._targets(word, node[word]):
                    return f"the reference `{node[word][:100]}` cannot be followed; write it as `#/…`"
            if node is not self._document and isinstance(node.get("$id"), str) and not node["$id"].startswith("#"):
                return "a schema inside it has an `$id` of its own; put it under `$defs` without one"
            inner = node.get("contentSchema")
            if inner is not None and any(
                _is_marked(one) or not one.keys().isdisjoint(_REFERENCES) for one in _nodes(inner)
            ):
                return "`contentSchema` says what a text holds once it is decoded, which no rule looks at"
        return None

    def checks(self, most: int) -> int:
        """Return how many subschemas one value is checked against at most, each as often as it is referred to.

        Counts up to `most + 1`, and nothing where there are no references. A schema of a few lines can double the
        number with each of them.
        """
        if not any(word in node for node in _nodes(self._document) for word in _REFERENCES):
            return 1
        return self._counted(sum, most)

    def chain(self, most: int) -> int:
        """Return how many subschemas lead to each other without a step into the value, at most. Counts up to `most`."""
        return self._counted(max, most)

    def _counted(self, together: Callable[[Iterable[int]], int], most: int) -> int:
        """Return the largest count of a subschema: 1, plus `together` (sum or max) of the counts of its parts."""
        counted: dict[int, int] = {}
        nodes = list(_nodes(self._document))
        waiting: list[tuple[Any, bool]] = [(node, False) for node in nodes]
        while waiting:
            node, expanded = waiting.pop()
            if not isinstance(node, dict) or (not expanded and id(cast("Json", node)) in counted):
                continue
            part = cast("Json", node)
            beside = [*self._same_place(part, everywhere=True), part.get("not")]
            if expanded:
                counted[id(part)] = min(most + 1, 1 + together([0, *(counted.get(id(one), 1) for one in beside)]))
            else:
                counted[id(part)] = 1  # what a circle of references adds
                waiting.append((part, True))
                waiting.extend((one, False) for one in beside)
        return max(counted.values(), default=1)

    def at(self, views: Iterable[View]) -> Place:
        """Return the place that these subschemas lead to."""
        views_: dict[tuple[int, bool], View] = {}
        waiting = list(views)
        while waiting:
            part, negated = waiting.pop()
            if not isinstance(part, dict) or (id(cast("Json", part)), negated) in views_:
                continue
            schema = cast("Json", part)
            views_[id(schema), negated] = (schema, negated)
            waiting.extend((one, negated) for one in self._same_place(schema))
            if "not" in schema:
                waiting.append((schema["not"], True))
        key = frozenset(views_)
        place = self._known.get(key)
        if place is None:
            place = Place(self, views_.values())
            if len(self._known) < _REMEMBERED:
                self._known[key] = place
        return place

    def _same_place(self, part: Json, *, everywhere: bool = False) -> Iterator[Any]:
        """Iterate over the subschemas that describe the same value. `everywhere`: also through an inner `$id`."""
        for word in _REFERENCES:
            if word in part:
                yield from self._targets(word, part[word]) or (self._inner(part[word]) if everywhere else ())
        for word in _SAME_PLACE_LISTS:
            yield from _sequence(part.get(word))
        for word in _SAME_PLACE_NODES:
            if word in part:
                yield part[word]
        for word in _SAME_PLACE_MAPS:
            yield from _mapping(part.get(word)).values()

    def _targets(self, word: str, ref: Any) -> list[Any]:
        """Return the possible targets of a reference; for a dynamic one, all of them."""
        if not isinstance(ref, str):
            return []
        own = self._document.get("$id")
        if isinstance(own, str) and own.rstrip("#") and ref.startswith(own.rstrip("#")):
            ref = ref[len(own.rstrip("#")) :] or "#"
        if not ref.startswith("#"):
            return []
        dynamic = self._anchors.get(ref[1:], []) if word != "$recursiveRef" else self._anchors.get("", [])
        if ref == "#":
            return [self._document, *dynamic]
        if not ref.startswith("#/"):
            return dynamic
        target = _pointed(self._document, ref[1:])
        if not isinstance(target, dict | bool):
            return []
        anchor = _mapping(target).get("$dynamicAnchor")
        return [target, *(self._anchors.get(anchor, []) if isinstance(anchor, str) else [])]

    def _inner(self, ref: Any) -> Iterator[Any]:
        """Iterate over what a reference may mean in the schemas that have an `$id` of their own."""
        pointer = str(ref).partition("#")[2]
        for node in self._named:
            yield _pointed(node, pointer if pointer.startswith("/") else "")

    @cached_property
    def _named(self) -> list[Json]:
        return [node for node in _nodes(self._document) if isinstance(node.get("$id"), str)]

    @cached_property
    def _anchors(self) -> dict[str, list[Any]]:
        anchors: dict[str, list[Any]] = {}
        for node in _nodes(self._document):
            for word in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(word), str):
                    anchors.setdefault(node[word], []).append(node)
            if isinstance(node.get("$id"), str) and node["$id"].startswith("#"):
                anchors.setdefault(node["$id"][1:], []).append(node)
            if node.get("$recursiveAnchor") is True:
                anchors.setdefault("", []).append(node)
        return anchors


def _pointed(target: Any, pointer: str) -> Any:
    """Return the value that a JSON pointer leads to; None if there is none."""
    for step in unquote(pointer[1:]).split("/") if pointer else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdigit() and int(name) < len(cast("list[Any]", target)):
            target = cast("list[Any]", target)[int(name)]
        else:
            target = _mapping(target).get(name)
    return target


def _is_marked(node: Json) -> bool:
    return "x-fragment" in node or next(kinds_of(node), None) is not None


def _nodes(node: Any) -> Iterator[Json]:
    """Iterate over every object of a schema, wherever it stands, except for data."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            schema = cast("Json", one)
            yield schema
            # A property can be called `default`; then its value is an object.
            waiting.extend(one for word, one in schema.items() if word not in _DATA or _mapping(one))
        elif isinstance(one, list):
            waiting.extend(cast("list[Any]", one))


def _members(view: View, name: str) -> Iterator[View]:
    part, negated = view
    known = False
    listed = _mapping(part.get("properties"))
    if name in listed:
        known = True
        yield listed[name], negated
    for pattern, child in _mapping(part.get("patternProperties")).items():
        if _matches(pattern, name):
            known = True
            yield child, negated
    if not known:
        for word in ("additionalProperties", "unevaluatedProperties"):
            if word in part:
                yield part[word], negated


def _elements(view: View, index: int) -> Iterator[View]:
    part, negated = view
    prefix = _prefix(part)
    if index < len(prefix):
        yield prefix[index], negated
    else:
        # If `items` is a list it is the prefix, and `additionalItems` describes the rest.
        for word in ("items", "additionalItems", "unevaluatedItems"):
            if isinstance(part.get(word), dict):
                yield part[word], negated
    if "contains" in part:
        yield part["contains"], negated


def _prefix(part: Json) -> list[Any]:
    return _sequence(part.get("prefixItems")) or _sequence(part.get("items"))


@lru_cache(maxsize=1000)
def _expression(pattern: str) -> Any:
    import jsonschema_rs  # on first use, as in data/schema.py

    try:
        return jsonschema_rs.Draft202012Validator({"pattern": pattern}).is_valid
    except (ValueError, jsonschema_rs.ValidationError):
        return None


def _matches(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern, by the validator that also checks data against it. If in doubt, it does."""
    fits = _expression(pattern)
    try:
        return fits is None or fits(name)
    except ValueError:
        return True


def _mapping(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _sequence(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
