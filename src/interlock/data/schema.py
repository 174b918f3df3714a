"""JSON Schema as tool contracts use it: closed by default, compiled once, with the facts that the lifecycle needs.

A contract holds a `Schema` for its input and one for its output. It contains the document and, compiled once: the
validator, the defaults to fill, the fields that only the runtime may set, and the fields that are sensitive. Remote
references are never fetched: a schema is data, and reading one must not open a connection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, TypeVar, cast

import orjson

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.nesting import levels, too_deep
from interlock.data.piece_schema import piece_of
from interlock.data.subschemas import Places

Json = dict[str, Any]
T = TypeVar("T")

# Validators write this in place of the offending value, so that no message carries it by accident.
MASK = "the value"

# The number of faults of one document that are explained. Explaining a fault costs far more than finding it.
MOST_ERRORS = 100

# Explaining takes time in the cube of this number, and cannot be interrupted: about 0.2 s for it.
_MOST_STEPS = 400

# raised by jsonschema_rs for values that JSON cannot represent
# Checking takes time in proportion, for each value, and cannot be interrupted.
_MOST_CHECKS = 5000
# Characters of what is wrong with a schema, which quotes it.
_LONGEST_FAULT = 250
_UNFIT = (ValueError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a document: where it is, what is wrong and what to do about it."""

    pointer: str
    message: str

    def __lt__(self, other: Fault) -> bool:
        """Faults are listed in the order of their places."""
        return (self.pointer, self.message) < (other.pointer, other.message)

    def document(self) -> Json:
        return {"pointer": self.pointer, "message": self.message}


# The words of a schema that bounds nothing but the type.
_PLAIN = frozenset({"type", "default", "description", "title", "examples"})
_TYPES = {"string": str, "integer": int, "boolean": bool, "number": float, "array": list, "object": dict}


# many methods: one compiled schema; each method answers one question about it
class Schema:
    """A JSON Schema and everything compiled from it. Immutable after construction."""

    def __init__(self, document: Mapping[str, Any], *, closed: bool = False, shared: bool = False) -> None:
        """`shared` says that nobody changes the document, so that no copy of it is needed."""
        source = dict(document) if shared and not closed else copied(dict(document))
        self.document: Json = close(source) if closed else source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.document == other.document

    def __hash__(self) -> int:
        return hash(repr(self.document))

    def __repr__(self) -> str:
        return f"Schema({self.document!r})"

    @cached_property
    def validator(self) -> Any:
        """The compiled validator; formats are asserted, not merely annotations."""
        return compile_validator(self.document)

    @cached_property
    def piece(self) -> Schema:
        """The schema of a piece of such data: all of it, an element of a list, some members of an object, a piece of a
        text. It is this schema itself where so many choices would be too costly to check.
        """
        found = Schema(piece_of(self.document))
        try:
            return found if found.fits else self
        except Failure:
            return self

    @cached_property
    def fits(self) -> Any:
        """The validator's yes or no, for the fast path; raises for values that JSON cannot represent."""
        is_valid = compile_validator(_counting(self.document)).is_valid
        if not self._recursive:
            return is_valid
        # INVARIANT: a recursive schema never receives a value so deep that the validator's own stack would overflow.

        def fits(value: Any) -> bool:
            return not too_deep(value) and is_valid(value)

        return fits

    @cached_property
    def places(self) -> Places:
        """The subschemas that describe each place of the data."""
        return Places(self.document)

    @cached_property
    def _recursive(self) -> bool:
        return _refers_to_itself(self.document, self.document, (), set())

    @cached_property
    def _chain(self) -> int:
        """The most subschemas that lead to each other for one value."""
        return Places(self.document).chain(_MOST_STEPS)

    @property
    def properties(self) -> Json:
        return properties_of(self.document)

    @cached_property
    def defaults(self) -> tuple[tuple[str, Any], ...]:
        """Top-level properties to fill in when they are absent.

        A default that does not fit its own schema, as upstreams state some, is shown and never sent.
        """
        parts = {name: resolve_ref(self.document, part) for name, part in self.properties.items()}
        stated = ((name, part, part["default"]) for name, part in parts.items() if "default" in part)
        return tuple((name, default) for name, part, default in stated if self.takes(part, default))

    def takes(self, part: Json, value: Any) -> bool:
        """Whether a value fits a part of this schema."""
        if part.keys() <= _PLAIN and _TYPES.get(str(part.get("type"))) is value.__class__:
            return True
        shared = {word: self.document[word] for word in ("$schema", "$defs", "definitions") if word in self.document}
        return Schema({**part, **shared}).valid(value)

    @cached_property
    def internal(self) -> frozenset[str]:
        """Top-level fields that callers may neither see nor set."""
        return _internal(self.document, self.document)

    @cached_property
    def sensitive(self) -> frozenset[str]:
        """Names of fields marked x-sensitivity, at any depth."""
        return frozenset(
            name
            for node in walk(self.document)
            for name, part in properties_of(node).items()
            if "x-sensitivity" in resolve_ref(self.document, part)
        )

    @cached_property
    def has_sensitive(self) -> bool:
        """Whether anything anywhere in the schema is marked x-sensitivity."""
        return any("x-sensitivity" in node for node in walk(self.document))

    def is_sensitive(self, path: list[Any], part: Json) -> bool:
        """Whether the value at a path must not be quoted: it, a branch of its type or an enclosing value is marked."""
        if not self.has_sensitive:
            return False
        # A path that leads through a map or a choice has no part of its own: then the value is not quoted.
        unknown = not part and bool(path)
        return (
            unknown
            or any("x-sensitivity" in node for node in walk(part))
            or any(step in self.sensitive for step in path)
        )

    @cached_property
    def model_facing(self) -> Json:
        """The schema that discovery shows: without the fields that callers may not set, at any depth."""
        shown = copied(self.document)
        for node in walk(shown):
            for name in _unlisted(node, _internal(shown, node)):
                del node["properties"][name]
        return shown

    @cached_property
    def caller_facing(self) -> Json:
        """The schema that callers are checked against: nothing fits a hidden field, not even where any other name is
        allowed.
        """
        held = copied(self.document)
        for node in walk(held):
            for name in _unlisted(node, _internal(held, node)):
                node["properties"][name] = False
        return held

    @cached_property
    def hidden(self) -> frozenset[str]:
        """Names of the fields that callers may neither see nor set, at any depth."""
        return frozenset(name for node in walk(self.document) for name in _internal(self.document, node))

    @property
    def can_hide(self) -> bool:
        """Whether the hidden fields occur in no condition or alternative."""
        try:
            # Most schemas hide nothing, and writing one takes a fraction of the time of going through it.
            if b'"x-internal"' not in orjson.dumps(self.document):
                return True
        except TypeError:  # not JSON, or nested deeply
            pass
        return not any(_betrays(self.document, node) for node in walk(self.document))

    def valid(self, value: Any) -> bool:
        """Whether the value fits; a value that JSON cannot represent does not."""
        try:
            return cast("bool", self.fits(value))
        except _UNFIT:
            return False

    def errors(self, value: Any) -> list[Any]:
        """The validator's errors, only the first ones if there are very many; empty if and only if the value fits.

        None of their messages quotes the value.
        """
        try:
            if self._recursive and too_deep(value):
                return list(compile_validator(False).iter_errors(None))
            # INVARIANT: the stack and the time that explaining needs are limited to `_MOST_STEPS` nested subschemas.
            if self._chain * levels(value, _MOST_STEPS) > _MOST_STEPS:
                return [] if self.fits(value) else list(compile_validator(False).iter_errors(None))
            return list(islice(self.validator.iter_errors(value), MOST_ERRORS))
        except _UNFIT:
            return list(compile_validator(False).iter_errors(None))

    def part(self, path: list[Any]) -> Json:
        """Return the part of the schema that describes a path, as far as it can be followed."""
        node: Json = resolve_ref(self.document, self.document)
        for step in path:
            child: Any = node.get("items") if isinstance(step, int) else property_of(node, step)
            if not isinstance(child, dict):
                return {}
            node = resolve_ref(self.document, cast("Json", child))
        return node


def _refers_to_itself(root: Json, node: Json, trail: tuple[str, ...], cleared: set[str]) -> bool:
    """Whether following references can lead back to their start. Each reference is followed once."""
    for part in _parts_of(node):
        ref = part.get("$ref")
        if "$dynamicRef" in part or "$recursiveRef" in part or ref in trail or len(trail) > 50:
            return True
        if isinstance(ref, str) and ref not in cleared:
            target = resolve_ref(root, {"$ref": ref})
            # The validator does not follow a reference that cannot be followed here either, unless it is the schema
            # itself.
            if "$ref" in target:
                return True
            inner = {key: value for key, value in target.items() if key != "$defs"}
            if _refers_to_itself(root, inner, (*trail, ref), cleared):
                return True
            cleared.add(ref)
    return False


def _parts_of(node: Json) -> Iterator[Json]:
    """Every object in a schema that may be a subschema, those in an allOf, a condition or a definition included."""
    waiting: list[Any] = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            part = cast("Json", one)
            yield part
            waiting.extend(part.values())
        elif isinstance(one, list):
            waiting.extend(cast("list[Any]", one))


def _internal(root: Json, node: Json) -> frozenset[str]:
    parts = properties_of(node).items()
    return frozenset(name for name, part in parts if resolve_ref(root, part).get("x-internal") is True)


def _betrays(root: Json, node: Json, above: frozenset[str] = frozenset()) -> bool:
    """Whether a schema's branches name a hidden field, or contain one where `walk` does not reach."""
    hidden = above | _internal(root, node)
    for word in ("allOf", "anyOf", "oneOf", "if", "then", "else", "not"):
        rule_value: Any = node.get(word)
        for branch in cast("list[Any]", rule_value if isinstance(rule_value, list) else [rule_value]):
            if not isinstance(branch, dict):
                continue
            one = cast("Json", branch)
            named = {*one.get("required", ()), *one.get("properties", ())}
            apart = word not in _CHILD_LISTS and any(_internal(root, inner) for inner in walk(one))
            if apart or not hidden.isdisjoint(named) or _betrays(root, one, hidden):
                return True
    return False


def _unlisted(node: Json, hidden: frozenset[str]) -> frozenset[str]:
    """Return the hidden fields of a schema after removing them from its rules."""
    if not hidden:
        return hidden
    if isinstance(node.get("required"), list):
        node["required"] = [name for name in node["required"] if name not in hidden]
    for rule in ("dependentRequired", "dependentSchemas"):
        if isinstance(node.get(rule), dict):
            rules = {name: then for name, then in cast("Json", node[rule]).items() if name not in hidden}
            node[rule] = {
                name: [one for one in cast("list[Any]", then) if one not in hidden] if isinstance(then, list) else then
                for name, then in rules.items()
            }
    return hidden


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"remote references are not fetched: {uri}")


def copied(value: T) -> T:
    """A copy of JSON data. It takes a fraction of the time of `copy.deepcopy`, which notes every part that it meets."""
    made: Any = value
    if isinstance(value, dict):
        made = {name: copied(part) for name, part in cast("Json", value).items()}
    elif isinstance(value, list):
        made = [copied(part) for part in cast("list[Any]", value)]
    return made


def compile_validator(document: Mapping[str, Any] | bool) -> Any:
    """Compile a validator with formats on, draft 2020-12 unless the document names another; a bad schema is E3105."""
    import jsonschema_rs  # on first use: showing a schema takes no validator

    try:
        named = isinstance(document, Mapping) and "$schema" in document
        make = jsonschema_rs.validator_for if named else jsonschema_rs.Draft202012Validator
        source = dict(document) if isinstance(document, Mapping) else document
        made = make(source, validate_formats=True, mask=MASK, retriever=_refuse_remote)
    except jsonschema_rs.ValidationError as error:
        at = pointer(error.instance_path) or "/"
        raise Failure(
            "E3105", f"not a valid JSON Schema: {error.message[:_LONGEST_FAULT]} at {at[:_LONGEST_FAULT]}"
        ) from None
    except (*_UNFIT, jsonschema_rs.ReferencingError) as error:
        raise Failure("E3105", f"not a valid JSON Schema: {str(error)[:_LONGEST_FAULT]}") from None
    if isinstance(source, dict) and not _is_affordable(source):
        words = f"its references have one value checked against more than {_MOST_CHECKS:,} subschemas"
        raise Failure("E3105", f"not a usable JSON Schema: {words}")
    return made


def require_schema(document: Mapping[str, Any]) -> None:
    """Refuse what `compile_validator` refuses (E3105). A schema that was accepted before is known by its digest."""
    try:
        _accepted(_Digested(dict(document)))
    except TypeError:  # not JSON, so it has no digest
        compile_validator(document)


@lru_cache(maxsize=5000)
def _accepted(one: _Digested) -> None:
    schema, one.schema = one.schema, None
    compile_validator(schema or {})


class _Digested:
    """A schema that is known again by its digest. The schema itself is kept no longer than its checks are counted."""

    __slots__ = ("digest", "schema")

    def __init__(self, schema: Json) -> None:
        self.schema: Json | None = schema
        self.digest = hashlib.sha256(orjson.dumps(schema)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Digested) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def _is_affordable(schema: Json) -> bool:
    """Whether one value is checked against a number of subschemas that is not excessive.

    Several parts of admission check one schema, and counting its checks takes longer than compiling it.
    """
    try:
        return _counted(_Digested(schema))
    except TypeError:  # not JSON, so it has no digest
        return Places(schema).checks(_MOST_CHECKS) <= _MOST_CHECKS


@lru_cache(maxsize=5000)
def _counted(one: _Digested) -> bool:
    schema, one.schema = one.schema, None
    return Places(schema or {}).checks(_MOST_CHECKS) <= _MOST_CHECKS


def close(schema: Json, *, free_form: bool = True) -> Json:
    """Close every object schema that does not state whether undeclared properties are allowed.

    Without `free_form`, those inside that declare no property stay open: what they take is for somebody else to judge.
    """
    for node in walk(schema):
        is_object = "properties" in node or node.get("type") == "object"
        if not free_form and not node.get("properties") and node is not schema:
            continue
        # A schema with an allOf also sees the properties of its parts, so closing it would refuse them.
        stated = node.keys() & {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf"}
        if is_object and not stated:
            node.setdefault("properties", {})  # the validator then names the undeclared members
            node["additionalProperties"] = False
    return schema


def _same_names(required: Any, properties: Json) -> bool:
    return isinstance(required, list) and sorted(map(repr, cast("list[Any]", required))) == sorted(
        map(repr, properties)
    )


def _counting(document: Json) -> Json:
    """Rewrite a schema so that the same values fit in less time: counting members is faster than looking for each.

    If an object may only have the members that are required, it has them all if their number is right.
    """
    same = copied(document)
    for node in walk(same):
        if node.get("additionalProperties") is False and not node.keys() & {"patternProperties", "minProperties"}:
            may = cast("Json", node["properties"]) if isinstance(node.get("properties"), dict) else {}
            if may and _same_names(node.get("required"), may):
                del node["required"]
                node["minProperties"] = len(may)
    return same


_CHILD_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_CHILD_LISTS = ("anyOf", "oneOf", "prefixItems")
_CHILD_NODES = ("items", "additionalProperties", "contains", "propertyNames")


def walk(schema: Any) -> Iterator[Json]:
    """Iterate over every subschema that describes data on its own: not the parts of an allOf, nor conditions."""
    if not isinstance(schema, dict):
        return
    node = cast("Json", schema)
    yield node
    for key in _CHILD_MAPS:
        children = node.get(key)
        if isinstance(children, dict):
            for child in cast("Json", children).values():
                yield from walk(child)
    for key in _CHILD_LISTS:
        children = node.get(key)
        if isinstance(children, list):
            for child in cast("list[Any]", children):
                yield from walk(child)
    for key in _CHILD_NODES:
        yield from walk(node.get(key))


def resolve_ref(root: Json, node: Json) -> Json:
    """Follow local `$ref`s; a reference that cannot be followed is returned unchanged."""
    seen: set[str] = set()
    while isinstance(ref := node.get("$ref"), str) and ref.startswith("#/") and ref not in seen:
        seen.add(ref)
        target: Any = root
        for step in ref[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            target = cast("Json", target).get(name) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            return node
        node = {**cast("Json", target), **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def properties_of(node: Json) -> dict[str, Json]:
    """Return the properties that a schema lists, except those given as plain true or false."""
    properties: Any = node.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: cast("Json", part) for name, part in cast("Json", properties).items() if isinstance(part, dict)}


def property_of(node: Json, name: str) -> Json | None:
    """Return one of the properties that a schema lists, however many there are; None as in `properties_of`."""
    properties: Any = node.get("properties")
    part: Any = cast("Json", properties).get(name) if isinstance(properties, dict) else None
    return cast("Json", part) if isinstance(part, dict) else None


def pointer(path: Any) -> str:
    """Format a path as RFC 6901."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
