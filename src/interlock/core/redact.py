"""Redaction: what must not be seen is taken out before anything is written, sent or shown.

Three rules, in this order of strength:

1. A field that its schema marks `x-sensitivity`, or whose name is a known secret's, loses its whole value.
2. A field that its schema marks `x-disclose: SCOPE` carries personal data on purpose: it is shown to a caller who holds
   the scope and loses its whole value for everybody else.
3. Free text loses every match of the patterns (e-mail, SSN, card, phone, IPv4 and those configured).

A schema is compiled once into a graph of nodes, one per set of subschemas that can describe the same place, and data is
walked along it; without a schema the graph is a single node that describes anything. Most data holds nothing to remove,
so a glance comes first: are all keys known as harmless, and does the joined text of the strings match nothing?

INVARIANT: redaction either returns redacted data or raises E3304 without any of the content.
"""
# pyright: reportPrivateUsage=false
# The classes below share their internals; nothing outside this module sees them.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from functools import wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast
from uuid import UUID

from interlock.core.errors import Failure

__all__ = ["Redacted", "RedactionRules", "Redactor", "SchemaRedactor", "private_values", "safe_log", "safe_message"]

P = ParamSpec("P")
T = TypeVar("T")

REDACTED: Final = "[REDACTED]"
_EMAIL_MARKER: Final = "[EMAIL_REDACTED]"
_MESSAGE_LIMIT: Final = 2_000

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

# An address is found by its `@` and read to both sides, so that a long word is scanned once and not once per letter.
_DOMAIN: Final = re.compile(r"@[\w.-]+\.[^\W\d_]{2,}")
_LOCAL_BACKWARDS: Final = re.compile(r"[\w.%+-]+")

_HYPHEN: Final = "[-\u2010-\u2015]"
_SEP: Final = "[-\u2010-\u2015. \u00a0]"
_OVER_255: Final = r"2(?:5[6-9]|[6-9]\d)|[3-9]\d\d"

# What follows the first character of a match, which is a digit, `+` or `(` and is looked back at. One expression with a
# plain class in front lets the engine skip to the next digit; boundaries look at digits only, so that no replacement
# makes or breaks a neighbour (redaction is idempotent).
_NUMBERS: Final[Mapping[str, str]] = {
    "SSN": rf"(?<=\d)\d\d{_HYPHEN}\d\d{_HYPHEN}\d{{4}}",
    "CREDIT_CARD": r"(?<=\d)\d{3}[\s-]?\d{4}[\s-]?\d{4}[\s-]?\d{4}",
    "PHONE": (
        rf"(?<=\d)\d\d{_SEP}\d{{3}}{_SEP}\d{{4}}"
        rf"|(?<=\()\d{{3}}\){_SEP}?\d{{3}}{_SEP}?\d{{4}}"
        rf"|(?<=\+)1{_SEP}?\(?\d{{3}}\)?{_SEP}?\d{{3}}{_SEP}?\d{{4}}"
        # What stands right behind a number and is a find of its own is not more of the number.
        rf"|(?<=\+)\d(?:(?!{_SEP}(?:\d{{1,3}}(?:\.\d{{1,3}}){{3}}|\d{{3}}{_HYPHEN}\d\d{_HYPHEN}\d{{4}}))"
        rf"(?:{_SEP}|{_SEP}?[()]{_SEP}?)?\d){{7,14}}"
    ),
    "IP_ADDRESS": (rf"(?<=\d)(?!(?<=2)(?:5[6-9]|[6-9]\d)|(?<=[3-9])\d\d)\d{{0,2}}(?:\.(?!{_OVER_255})\d{{1,3}}){{3}}"),
}
# The strict setting also takes bare forms, at the price of false alarms (and does without the Luhn check).
_STRICT_TOO: Final[Mapping[str, str]] = {
    "PHONE": r"(?<=\d)\d\d[-.]?\d{3}[-.]?\d{4}",
    "IP_ADDRESS": r"(?<=\d)\d{0,2}(?:\.\d{1,3}){3}",
}
_MARKERS: Final[Mapping[str, str]] = {name: f"[{name}_REDACTED]" for name in _NUMBERS}

# The outlines of those forms: with digits as 0 and separators as - every match but an address shows one of these, and
# looking for fixed bytes costs a fraction of the expression.
_OUTLINES: Final = (b"000-00-0000", b"000-000-0000", b"0000-0000")
_COMMON_TO_OUTLINES: Final = b"00-0000"
_BARE_CARD: Final = b"0" * 16
_TO_OUTLINE: Final = bytes(
    48 if chr(c).isdigit() else c if chr(c) in "()+" else 45 if chr(c) in "-. \t\n\r\f\v\x1c\x1d\x1e\x1f?" else 0
    for c in range(256)
)
_MAY_BE_ADDRESS: Final = re.compile(r"\.\d{1,3}\.\d{1,3}\.\d", re.ASCII)

# JSON scalars and the values that every serializer here turns into one; anything else is not data we can vouch for.
_SCALARS: Final = (int, float, type(None), datetime, date, time, Decimal, UUID)
_PLAIN: Final = frozenset({int, float, bool, type(None)})

# Formats that name a way to show a text, not what it holds.
_FREE_FORMATS: Final = frozenset(
    {"text", "textarea", "markdown", "html", "multiline", "multi-line", "password", "byte", "binary"}
)
_NODE_LIMIT: Final = 10_000
_KEYS_REMEMBERED: Final = 10_000

# A place in the data: the place around it and the key or index, `None` at the root.
_Path = tuple[Any, "str | int"] | None


class Redacted(NamedTuple):
    """Data without what was removed, and the JSON pointers of what was."""

    value: Any
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RedactionRules:
    """What an operator may add: more patterns (name, regex, marker), more names, and the strict setting."""

    strict: bool = False
    extra_patterns: tuple[tuple[str, str, str], ...] = ()
    extra_names: tuple[str, ...] = ()


def _withholding(method: Callable[P, T]) -> Callable[P, T]:
    """Turn whatever goes wrong inside into E3304 that carries nothing of the content."""

    @wraps(method)
    def withheld(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception:  # noqa: BLE001 - any fault at all must withhold, including too deep nesting
            failure = Failure("E3304")
        # Raised outside the handler: the cause may quote the content and must not travel as its context.
        raise failure

    return withheld


class Redactor:
    """The rules, compiled. Immutable, and shared by everything that writes, sends or shows."""

    __slots__ = ("_extra", "_harmless", "_markers", "_names", "_numbers", "_spoken", "_strict", "rules")

    def __init__(self, rules: RedactionRules | None = None) -> None:
        self.rules: Final = rules or RedactionRules()
        self._strict: Final = self.rules.strict
        self._numbers: Final = re.compile(_numbers(strict=self._strict))
        self._extra: Final = tuple((re.compile(regex), marker) for _, regex, marker in self.rules.extra_patterns)
        self._markers: Final = frozenset(
            {REDACTED, _EMAIL_MARKER, *_MARKERS.values(), *(marker for _, marker in self._extra)}
        )
        names = (*SENSITIVE_NAMES, *self.rules.extra_names)
        self._names: Final = frozenset(map(_plain_name, names))
        self._harmless: Final[set[str]] = set()  # keys seen before: neither a sensitive name nor a match
        self._spoken: Final = _spoken_secrets(names)

    @_withholding
    def text(self, s: str) -> str:
        """Replace every match of the patterns in `s` by its marker."""
        return self._mask(s)

    @_withholding
    def value(self, data: Any) -> Redacted:
        """Redact data that no schema describes; the same object comes back when nothing was removed."""
        return self._run(data, _NO_SCHEMA, disclose=frozenset(), every=True, patterns=True)

    @_withholding
    def for_schema(self, schema: dict[str, Any], *, patterns: bool = True) -> SchemaRedactor:
        """Compile the redaction of everything that `schema` describes; once per tool version."""
        return SchemaRedactor(self, _Compiler(schema, self._is_secret).graph(), patterns=patterns)

    def _run(self, data: Any, graph: _Graph, *, disclose: frozenset[str], every: bool, patterns: bool) -> Redacted:
        texts: list[str] = []
        plain = self._glance((data,), texts.append)
        # No pattern of ours reaches over a NUL; one that was configured might.
        clean = plain and not self._extra and self._change("\0".join(texts)) is None
        if plain and not graph.guarded and (clean or not patterns):
            return Redacted(data, ())
        walk = _Walk(self, _keep if clean or not patterns else self._change, disclose, every)
        value = walk.visit(data, graph.root, None)
        return Redacted(value, tuple(dict.fromkeys(map(_pointer, walk.found))))

    def _glance(self, values: Iterable[Any], add: Callable[[str], None]) -> bool:
        """Whether there are harmless keys and JSON values only; hands the strings met to `add`."""
        for value in values:
            kind = type(value)  # pyright: ignore[reportUnknownVariableType] - of anything at all
            if kind is str:
                add(value)
            elif kind is dict:
                if not (value.keys() <= self._harmless or all(map(self._is_harmless, value))):
                    return False
                if not self._glance(value.values(), add):
                    return False
            elif kind is list or kind is tuple:
                if not self._glance(value, add):
                    return False
            elif kind not in _PLAIN:
                return False
        return True

    def _is_harmless(self, key: Any) -> bool:
        if type(key) is not str or self._is_secret(key) or self._change(key) is not None:
            return False
        if len(key) <= 64 and len(self._harmless) < _KEYS_REMEMBERED:
            self._harmless.add(key)
        return True

    def _is_secret(self, name: str) -> bool:
        return _plain_name(name) in self._names

    def _change(self, text: str) -> str | None:
        masked = self._mask(text)
        return None if masked == text else masked

    def _hide(self, value: Any) -> str:
        """The marker that stands for a whole value: the pattern's own where the value is a match and nothing else."""
        if isinstance(value, str) and (masked := self._mask(value)) in self._markers:
            return masked
        return REDACTED

    def _mask(self, text: str) -> str:
        for regex, marker in self._extra:
            text = self._mask_extra(text, regex, marker)
        if "@" in text:
            text = _mask_emails(text)
        if any(map(text.__contains__, "0123456789")):
            text = self._mask_numbers(text)
        return text

    def _mask_extra(self, text: str, regex: re.Pattern[str], marker: str) -> str:
        # A configured pattern may match the words of a marker; what is a marker already stays one.
        any_marker = "|".join(map(re.escape, sorted(filter(None, self._markers), key=len, reverse=True)))
        return "".join(
            piece if piece in self._markers else regex.sub(lambda found: marker if found[0] else "", piece)
            for piece in re.split(f"({any_marker})", text)
        )

    def _mask_numbers(self, text: str) -> str:
        if not self._strict and not _may_hold_number(text):
            return text
        search = self._numbers.search
        out: list[str] = []
        done = 0
        found = search(text)
        while found:
            start, end = found.span()
            name = found.lastgroup or ""
            if name == "CREDIT_CARD" and not self._strict and not _luhn(found[0]):
                end = start + 1  # the real number may begin at the candidate's second group
            else:
                out += (text[done:start], _MARKERS[name])
                done = end
            found = search(text, end)
        return "".join((*out, text[done:])) if out else text


class SchemaRedactor:
    """One schema's redaction: `apply` for results, `for_sinks` for whatever is written or sent."""

    __slots__ = ("_graph", "_patterns", "_redactor", "trivial")

    def __init__(self, redactor: Redactor, graph: _Graph, *, patterns: bool) -> None:
        self._redactor: Final = redactor
        self._graph: Final = graph
        self._patterns: Final = patterns
        self.trivial: Final = graph.trivial

    @_withholding
    def apply(self, data: Any, *, disclose: frozenset[str] = frozenset()) -> Redacted:
        """Redact a result that passed its schema, for a caller who holds the scopes `disclose`."""
        if self.trivial:
            return Redacted(data, ())
        return self._redactor._run(data, self._graph, disclose=disclose, every=False, patterns=self._patterns)

    @_withholding
    def for_sinks(self, data: Any) -> Redacted:
        """Redact for records, events, logs and tickets: no scope opens anything, patterns look at every string."""
        return self._redactor._run(data, self._graph, disclose=frozenset(), every=True, patterns=True)


class _Node:
    """What the schema says about one place in the data."""

    __slots__ = ("items", "keys_said", "marked", "prefix", "props", "rest", "said", "scopes")

    def __init__(self, *, said: bool = False) -> None:
        self.marked = False  # x-sensitivity
        self.scopes: frozenset[str] = frozenset()  # x-disclose
        self.said = said  # the schema says what a string here holds: patterns keep away
        self.keys_said = said
        self.props: dict[str, _Node] = {}
        self.rest: _Node = self
        self.prefix: tuple[_Node, ...] = ()
        self.items: _Node = self


class _Graph(NamedTuple):
    """The nodes of one schema, by their root."""

    root: _Node
    guarded: bool  # some field is marked
    trivial: bool  # nothing that fits the schema can hold anything to remove


_ANYTHING: Final = _Node()
_DISCLOSED: Final = _Node(said=True)
_NO_SCHEMA: Final = _Graph(_ANYTHING, guarded=False, trivial=False)


class _Walk:
    """One pass over data along the nodes; `change` gives a text's replacement, or `None` to leave it."""

    __slots__ = ("change", "disclose", "every", "found", "redactor")

    def __init__(
        self, redactor: Redactor, change: Callable[[str], str | None], disclose: frozenset[str], every: bool
    ) -> None:
        self.redactor = redactor
        self.change = change
        self.disclose = disclose
        self.every = every  # every string is looked at, whatever the schema says it holds
        self.found: list[_Path] = []

    def visit(self, value: Any, node: _Node, path: _Path, named: bool = False) -> Any:
        """The value as it may be seen; the same object when nothing was removed from it."""
        if (named or node.marked or node.scopes) and not (node.scopes and node.scopes <= self.disclose):
            return self._hide(value, path, by_name_alone=not (node.marked or node.scopes))
        if isinstance(value, str):
            if node.said and not self.every:
                return value
            masked = self.change(value)
            if masked is None:
                return value
            self.found.append(path)
            return masked
        if isinstance(value, dict):
            return self._members(cast("dict[Any, Any]", value), node, path)
        if isinstance(value, list | tuple):
            return self._elements(cast("list[Any]", value), node, path)
        if not isinstance(value, _SCALARS):
            raise TypeError("not data")
        return value

    def _hide(self, value: Any, path: _Path, *, by_name_alone: bool) -> Any:
        # An absent secret is no secret, nor is a flag that happens to be called `token`; a marked flag is.
        if value is None or (by_name_alone and isinstance(value, bool)):
            return value
        marker = self.redactor._hide(value)
        if value == marker:
            return value
        self.found.append(path)
        return marker

    def _members(self, data: dict[Any, Any], node: _Node, path: _Path) -> dict[Any, Any]:
        visit, change, is_secret, known = self.visit, self.change, self.redactor._is_secret, node.props.get
        look_at_keys = self.every or not node.keys_said
        out: dict[Any, Any] | None = None
        renamed: dict[Any, str] = {}
        taken: set[str] = set()
        for key, value in data.items():
            name, child = key, known(key)
            if child is None:
                child = node.rest
                if look_at_keys and isinstance(key, str) and (masked := change(key)) is not None:
                    name = renamed[key] = _unused(masked, data, taken)
                    self.found.append((path, name))
            named = isinstance(key, str) and is_secret(key)
            if type(value) in _PLAIN and not (named or child.marked or child.scopes):
                continue
            new = visit(value, child, (path, name), named)
            if new is not value:
                out = dict(data) if out is None else out
                out[key] = new
        if renamed:
            return {renamed.get(key, key): value for key, value in (out or data).items()}
        return data if out is None else out

    def _elements(self, data: list[Any] | tuple[Any, ...], node: _Node, path: _Path) -> Any:
        visit, prefix, items = self.visit, node.prefix, node.items
        out: list[Any] | None = None
        for index, value in enumerate(data):
            child = prefix[index] if index < len(prefix) else items
            if type(value) in _PLAIN and not (child.marked or child.scopes):
                continue
            new = visit(value, child, (path, index))
            if new is not value:
                out = list(data) if out is None else out
                out[index] = new
        if out is None:
            return data
        return tuple(out) if isinstance(data, tuple) else out


# What a schema says about the strings, objects or arrays in its place. All of several schemas hold: the least of their
# verdicts; one of several holds: the greatest.
_NONE_HERE, _SAID, _FREE = 0, 1, 2


def _closed_object(schema: dict[str, Any]) -> bool:
    closed = schema.get("additionalProperties") is False or schema.get("unevaluatedProperties") is False
    return closed and not schema.get("patternProperties")


_TYPES: Final[Mapping[str, type]] = {"string": str, "object": dict, "array": list}
_SAYS: Final[Mapping[str, Callable[[dict[str, Any]], bool]]] = {
    "string": lambda schema: "pattern" in schema or schema.get("format", "text") not in _FREE_FORMATS,
    "object": _closed_object,
    "array": lambda schema: "items" in schema,
}


class _Compiler:
    """Turns one JSON Schema into nodes.

    The same subschemas give the same node, so recursion in the schema becomes a cycle among the nodes.
    """

    def __init__(self, schema: dict[str, Any], is_secret: Callable[[str], bool]) -> None:
        self._schema = schema
        self._is_secret = is_secret
        self._nodes: dict[tuple[frozenset[int], bool], _Node] = {}
        self._verdicts: dict[tuple[int, str], int] = {}
        self._loud = {_ANYTHING, _DISCLOSED}  # nodes with room for something to remove
        self._beneath: dict[_Node, list[_Node]] = {}  # what data that fits the schema can hold beneath a node

    def graph(self) -> _Graph:
        root = self._node([self._schema], disclosed=False)
        guarded = any(node.marked or node.scopes for node in self._nodes.values())
        seen: set[_Node] = set()
        waiting = [root]
        while waiting and self._loud.isdisjoint(waiting):
            seen.update(waiting)
            waiting = [child for node in waiting for child in self._beneath[node] if child not in seen]
        return _Graph(root, guarded=guarded, trivial=not waiting)

    def _node(self, schemas: list[Any], *, disclosed: bool) -> _Node:
        key = (frozenset(map(id, schemas)), disclosed)
        if key in self._nodes:
            return self._nodes[key]
        if len(self._nodes) >= _NODE_LIMIT:
            raise ValueError("schema too large")
        node = self._nodes[key] = _Node()
        parts = self._parts(schemas)
        node.marked = any(part.get("x-sensitivity") not in (None, False) for part in parts)
        node.scopes = frozenset(str(part["x-disclose"]) for part in parts if "x-disclose" in part)
        # Beneath a disclosed field nobody without its scope arrives: patterns keep away from all of it.
        disclosed = disclosed or bool(node.scopes)
        strings, objects, arrays = (max(self._verdict(schema, kind) for schema in schemas) for kind in _SAYS)
        node.said = disclosed or strings == _SAID
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

    def _add_members(self, node: _Node, parts: list[dict[str, Any]], disclosed: bool) -> None:
        names = dict.fromkeys(name for part in parts for name in part.get("properties", ()))
        for name in names:
            node.props[name] = self._node([s for part in parts for s in _for_name(part, name)], disclosed=disclosed)
        # All undeclared members share one node: a mark on any pattern or rest holds for every one of them.
        rest = [s for part in parts for s in _for_others(part)]
        node.rest = self._node(rest, disclosed=disclosed) if rest else _anything(disclosed)
        names_of = [part["propertyNames"] for part in parts if "propertyNames" in part]
        node.keys_said = disclosed or any(self._verdict(schema, "string") == _SAID for schema in names_of)

    def _add_elements(self, node: _Node, parts: list[dict[str, Any]], disclosed: bool) -> None:
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
            self._verdicts[key] = _FREE  # met again on the way round a cycle it adds nothing
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
        # A reference we cannot follow may hide a mark: the schema is refused rather than half understood.
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
        return _SAID if any(isinstance(value, _TYPES[kind]) for value in listed) else _NONE_HERE
    return _SAID if _SAYS[kind](schema) else _FREE


def _anything(disclosed: bool) -> _Node:
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
    older = part.get("items")  # before draft 2020-12 the positions stood in `items`
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


def _numbers(*, strict: bool) -> str:
    forms = {
        name: f"{form}|{_STRICT_TOO[name]}" if strict and name in _STRICT_TOO else form
        for name, form in _NUMBERS.items()
    }
    any_of = "|".join(f"(?P<{name}>{form})" for name, form in forms.items())
    # The classes are plain sets of ASCII: the engine skips over text that holds none of them far faster than over `\d`.
    return rf"[0-9+(](?<!\d\d)(?:{any_of})(?!\d)".replace(r"\d", "[0-9]")


def _plain_name(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _keep(_: str) -> None:
    return None


def _may_hold_number(text: str) -> bool:
    # Every character beyond ASCII becomes `?`, which counts as a separator: a few of them are.
    outline = text.encode("ascii", "replace").translate(_TO_OUTLINE)
    return (
        (_COMMON_TO_OUTLINES in outline and any(map(outline.__contains__, _OUTLINES)))
        or _BARE_CARD in outline
        or ("(" in text and b"(000)" in outline)
        or ("+" in text and b"+0" in outline)
        or _MAY_BE_ADDRESS.search(text) is not None
    )


_DOUBLED: Final = str.maketrans("0123456789", "0246813579")  # twice the digit, its own digits added up


def _luhn(number: str) -> bool:
    digits = "".join(filter(str.isdigit, number))[::-1]
    return (sum(map(int, digits[::2])) + sum(map(int, digits[1::2].translate(_DOUBLED)))) % 10 == 0


def _mask_emails(text: str) -> str:
    out: list[str] = []
    done = floor = 0
    for domain in _DOMAIN.finditer(text):
        at = domain.start()
        local = _LOCAL_BACKWARDS.match(text[floor:at][::-1])
        floor = at + 1
        if local:
            out += (text[done : at - local.end()], _EMAIL_MARKER)
            done = floor = domain.end()
    return "".join((*out, text[done:])) if out else text


def _unused(name: str, data: Mapping[Any, Any], taken: set[str]) -> str:
    """`name`, numbered when another key has it already: two addresses as keys must stay two members."""
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


# Credentials as they stand in messages. Each expression either matches or gives up within a bounded distance.
_CREDENTIALS: Final = re.compile(
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
# Words that stand before a credential in messages only; the sensitive field names come on top.
_SPOKEN_NAMES: Final = ("passwd", "pwd", "passphrase", "authorization", "credential", "credentials", "cookie")
_TRACEBACK: Final = re.compile(r"[ |+]*(?:Exception Group )?Traceback \(most recent call last\)")
_FRAME: Final = re.compile(r"[ \t]*File \"[^\"\n]{0,4096}\", line \d+(?:, in [^\s,]+)?")
# A web address is matched before the rest and kept, so that its path is not taken for one of the host's.
_PLACES: Final = re.compile(
    r"(?i:file)://\S*|\b[A-Za-z][A-Za-z0-9+.-]{1,15}:///\S*"
    r"|(?P<url>\b[A-Za-z][A-Za-z0-9+.-]{1,15}://[^\s\"'`<>]*)"
    r"|(?<=[\"'`])~?/[^\"'`\n/]+/[^\"'`\n]+"
    r"|(?<![\w/])~?/[^\s/\"'`<>|:;,()\[\]{}]+/[^\s\"'`<>|:;,()\[\]{}]+"
    r"|(?<![A-Za-z])[A-Za-z]:(?:\\(?:[^\\/:*?\"'<>|\r\n]+\\)*|/)[^\s:*?\"'<>|,;]*"
    r"|\\\\[\w.$-]+\\[^\s:*?\"'<>|,;]+"
)


@_withholding
def safe_message(redactor: Redactor, text: str) -> str:
    """An error message that a model may read: no stack trace, host path, credential or personal data."""
    if trace := _TRACEBACK.search(text):
        text = text[: trace.start()]
    text = _CREDENTIALS.sub(REDACTED, text)
    text = redactor._spoken.sub(rf"\1\2{REDACTED}", text)
    text = _PLACES.sub(lambda found: found[0] if found["url"] else "[path]", _FRAME.sub("", text))
    return redactor._mask(text).strip()[:_MESSAGE_LIMIT]


@_withholding
def safe_log(redactor: Redactor, text: str) -> str:
    """A line for operators: stack traces and paths stay, credentials and personal data do not."""
    return redactor._mask(redactor._spoken.sub(rf"\1\2{REDACTED}", _CREDENTIALS.sub(REDACTED, text)))


def private_values(schema: SchemaRedactor, data: Any) -> list[str]:
    """The texts in some data that must not be written down, longest first, so that they can be looked for elsewhere."""
    found: set[str] = set()
    for path in schema.for_sinks(data).paths:
        value: Any = data
        for step in path.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            value = value[int(name) if value.__class__ in (list, tuple) else name]
        if isinstance(value, str) and len(value) >= 4:
            found.add(value)
    return sorted(found, key=len, reverse=True)


def _spoken_secrets(names: Iterable[str]) -> re.Pattern[str]:
    """`password=…`, `"api_key": "…"` and the like, for every sensitive name."""
    forms = sorted({_spoken_form(name) for name in (*names, *_SPOKEN_NAMES)}, key=len, reverse=True)
    becomes = r"""\\?["']?[ \t]*(?::|=>?)[ \t]*"""
    value = r"""(?:(?:basic|bearer|token)[ \t]+)?(?:\[REDACTED\]|\\?"[^"]*"?|\\?'[^']*'?|\S+)"""
    return re.compile(f"({'|'.join(forms)})({becomes}){value}", re.IGNORECASE)


def _spoken_form(name: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[-_]", " ", name).lower().split()
    return "[-_ ]?".join(map(re.escape, words))
