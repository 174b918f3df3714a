"""Redaction: removes private content before anything is written, sent or shown.

Three rules, in this order of strength:

1. A field that its schema marks `x-sensitivity`, or whose name is a known secret's, loses its whole value.
2. A field that its schema marks `x-disclose: SCOPE` carries personal data on purpose: it is shown to a caller who holds
   the scope and loses its whole value for everybody else.
3. Free text loses every match of the patterns (e-mail, SSN, card, phone, IPv4 and those configured).

This module is the interface for the rest of the program. `patterns` knows what to look for in a text, `redact_schema`
where in data to look; both are below this module and neither knows the other. Most data contains nothing to remove, so
a quick test precedes the walk: are all keys known to be harmless, and does the joined text of the strings match
nothing?

INVARIANT: redaction either returns redacted data or raises E3304 without any of the content.
"""
# pyright: reportPrivateUsage=false
# The classes below share their internals; nothing outside this module sees them.

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar, cast

from interlock.core.credentials import REDACTED, SENSITIVE_NAMES, may_hold_credential, may_name_credential
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple, dataclass
from interlock.data.canonical import compiled
from interlock.privacy.patterns import REVIEW_LIMIT, Patterns, plain_name
from interlock.privacy.redact_schema import NO_SCHEMA, PLAIN, Graph, Walk, compile_graph

__all__ = [
    "REDACTED",
    "SENSITIVE_NAMES",
    "Redacted",
    "RedactionRules",
    "Redactor",
    "SchemaRedactor",
    "private_values",
    "property_names",
    "safe_log",
    "safe_message",
    "without_credentials",
]

P = ParamSpec("P")
T = TypeVar("T")

_KEYS_REMEMBERED: Final = 10_000
_NAMES: Final = expression(r"[\w-]+")


class Redacted(NamedTuple):
    """Redacted data, and the JSON pointers of what was removed."""

    value: Any
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RedactionRules:
    """The operator's additions: more patterns (name, regex, marker), more names, and the strict setting."""

    strict: bool = False
    extra_patterns: tuple[tuple[str, str, str], ...] = ()
    extra_names: tuple[str, ...] = ()


def _withholding(method: Callable[P, T]) -> Callable[P, T]:
    """Convert any exception inside into E3304 without any of the content."""

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
    """The compiled rules. Immutable, and shared by everything that writes, sends or shows data."""

    __slots__ = ("_harmless", "_mask", "_names", "_patterns", "rules")

    def __init__(self, rules: RedactionRules | None = None) -> None:
        self.rules: Final = rules or RedactionRules()
        names = (*SENSITIVE_NAMES, *self.rules.extra_names)
        self._patterns: Final = Patterns(strict=self.rules.strict, extra=self.rules.extra_patterns, names=names)
        self._mask: Final = self._patterns.mask
        self._names: Final = frozenset(map(plain_name, names))
        self._harmless: Final[set[str]] = set()  # keys seen before that are neither a sensitive name nor a match

    @_withholding
    def text(self, s: str) -> str:
        """Replace every match of the patterns in `s` by its marker."""
        return self._mask(s)

    @_withholding
    def value(self, data: Any) -> Redacted:
        """Redact data that no schema describes; returns the same object if nothing was removed."""
        return self._run(data, NO_SCHEMA, disclose=frozenset(), every=True, patterns=True)

    def has_credential(self, text: str) -> bool:
        """Whether a credential would be removed from a text. One that is too long to be searched counts as well."""
        # Most texts need no search.
        may = may_hold_credential(text) or may_name_credential(text, self._patterns.last_words)
        return (may or len(text) > REVIEW_LIMIT) and without_credentials(self, text) != text

    def names_secret(self, resource: str) -> bool:
        """Whether a part of a resource's name is the name of a secret, as in `session:api_key`."""
        return not self._names.isdisjoint(_NAMES.findall(plain_name(resource)))

    @_withholding
    def for_schema(self, schema: dict[str, Any], *, patterns: bool = True) -> SchemaRedactor:
        """Compile the redaction of everything that `schema` describes; done once per tool version."""
        names = any(map(self._is_secret, property_names(schema))) or _is_open(schema)
        return SchemaRedactor(self, compile_graph(schema, self._is_secret), patterns=patterns, names=names)

    def _run(
        self,
        data: Any,
        graph: Graph,
        *,
        disclose: frozenset[str],
        every: bool,
        patterns: bool,
        change: Callable[[str], str | None] | None = None,
    ) -> Redacted:
        """Redact data. `change` is applied to texts if `patterns` is set; by default it applies all patterns."""
        walk, value = self._walked(data, graph, disclose=disclose, every=every, patterns=patterns, change=change)
        return Redacted(data, ()) if walk is None else Redacted(value, walk.paths())

    def _walked(
        self,
        data: Any,
        graph: Graph,
        *,
        disclose: frozenset[str],
        every: bool,
        patterns: bool,
        change: Callable[[str], str | None] | None = None,
    ) -> tuple[Walk | None, Any]:
        """The walk over data and what it left of them; no walk where a glance shows that nothing is to be removed."""
        change = change or self._change
        texts: list[str] = []
        plain = compiled is not None and compiled.gathered(data, self._harmless, texts)
        if not plain:
            texts.clear()
            plain = self._glance((data,), texts.append)
        # No built-in pattern matches across a NUL; a configured one might.
        clean = not patterns or (plain and not self._patterns.extra and (not texts or change("\0".join(texts)) is None))
        if plain and not graph.guarded and clean:
            return None, data
        walk = Walk(
            change=_keep if clean else change,
            hide=self._hide,
            is_secret=self._is_secret,
            disclose=disclose,
            every=every,
        )
        return walk, walk.visit(data, graph.root, None)

    def _glance(self, values: Iterable[Any], add: Callable[[str], None]) -> bool:
        """Whether there are only harmless keys and JSON values; passes the strings to `add`."""
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
            elif kind not in PLAIN:
                return False
        return True

    def _is_harmless(self, key: Any) -> bool:
        if type(key) is not str or self._is_secret(key) or self._change(key) is not None:
            return False
        if len(key) <= 64 and len(self._harmless) < _KEYS_REMEMBERED:
            self._harmless.add(key)
        return True

    def _is_secret(self, name: str) -> bool:
        return plain_name(name) in self._names

    def _change(self, text: str) -> str | None:
        masked = self._mask(text)
        return None if masked == text else masked

    def _change_private(self, text: str) -> str | None:
        hidden = self._patterns.private(text)
        return None if hidden == text else hidden

    def _hide(self, value: Any) -> str:
        """The marker for a whole value: the pattern's own marker if the value as a whole is a match."""
        if isinstance(value, str) and (masked := self._mask(value)) in self._patterns.markers:
            return masked
        return REDACTED


class SchemaRedactor:
    """The redaction of one schema: `apply` for results, `for_sinks` for whatever is written or sent."""

    __slots__ = ("_graph", "_patterns", "_redactor", "guarded", "trivial")

    def __init__(self, redactor: Redactor, graph: Graph, *, patterns: bool, names: bool) -> None:
        self._redactor: Final = redactor
        self._graph: Final = graph
        self._patterns: Final = patterns
        self.trivial: Final = graph.trivial
        # Whether the schema has room for private values: by a mark, by a name, or by allowing unnamed members.
        self.guarded: Final = graph.guarded or names

    @_withholding
    def apply(self, data: Any, *, disclose: frozenset[str] = frozenset()) -> Redacted:
        """Redact a result that passed its schema, for a caller who holds the scopes `disclose`."""
        if self.trivial:
            return Redacted(data, ())
        return self._redactor._run(data, self._graph, disclose=disclose, every=False, patterns=self._patterns)

    @_withholding
    def for_sinks(self, data: Any) -> Redacted:
        """Redact for records, events, logs and tickets: no scope discloses anything, patterns check every string."""
        return self._redactor._run(data, self._graph, disclose=frozenset(), every=True, patterns=True)

    @_withholding
    def for_people(self, data: Any) -> Redacted:
        """Redact for a person who must decide about it: names and addresses stay, fields marked private are removed."""
        return self._redactor._run(data, self._graph, disclose=frozenset(), every=True, patterns=False)

    @_withholding
    def for_deciding(self, data: Any) -> Redacted:
        """Redact for a policy engine: fields marked or named private and all credentials are removed,
        addresses stay.
        """
        change = self._redactor._change_private
        return self._redactor._run(data, self._graph, disclose=frozenset(), every=True, patterns=True, change=change)


@_withholding
def without_credentials(redactor: Redactor, text: str) -> str:
    """Remove credentials from a text for a person who must decide about it."""
    return redactor._patterns.without_credentials(text)


@_withholding
def safe_message(redactor: Redactor, text: str) -> str:
    """Clean an error message for a model: no stack trace, host path, credential or personal data."""
    return redactor._patterns.message(text)


@_withholding
def safe_log(redactor: Redactor, text: str) -> str:
    """Clean a line for operators: stack traces and paths stay, credentials and personal data are removed."""
    return redactor._patterns.log(text)


@_withholding
def private_values(schema: SchemaRedactor, data: Any, *, for_people: bool = False) -> list[str]:
    """Collect the private texts in some data, longest first, so that they can be searched for elsewhere."""
    nobody = frozenset[str]()
    walk, _ = schema._redactor._walked(data, schema._graph, disclose=nobody, every=True, patterns=not for_people)
    found = set[str]() if walk is None else {text for text in _texts(walk.values) if len(text) >= 4}
    return sorted(found, key=len, reverse=True)


def _texts(value: Any) -> Iterable[str]:
    """Every text and number in some data, as text."""
    if isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _texts(item)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _is_open(schema: Any) -> bool:
    """Whether data that fits a schema can have members that the schema does not name."""
    if isinstance(schema, dict):
        members = cast("dict[str, Any]", schema)
        type_ = members.get("type")
        kinds = cast("list[Any]", type_) if isinstance(type_, list) else [type_]
        if "object" in kinds and members.get("additionalProperties") is not False:
            return True
        if type_ is None and not members.keys() & _SAYS_WHAT_IT_IS:
            return True
        inner = [*members.get("properties", {}).values(), *members.get("$defs", {}).values()]
        inner += [members[name] for name in ("items", "not", "if", "then", "else", "contains") if name in members]
        inner += [one for name in ("anyOf", "oneOf", "allOf", "prefixItems") for one in members.get(name, ())]
        return any(map(_is_open, inner))
    return schema is True


_SAYS_WHAT_IT_IS: Final = frozenset({"enum", "const", "$ref", "anyOf", "oneOf", "allOf"})


def property_names(schema: Any) -> Iterable[str]:
    """Every property that a schema names, at any depth."""
    if isinstance(schema, dict):
        members = cast("dict[str, Any]", schema)
        properties = members.get("properties")
        if isinstance(properties, dict):
            yield from cast("dict[str, Any]", properties)
        for child in members.values():
            yield from property_names(child)
    elif isinstance(schema, list):
        for child in cast("list[Any]", schema):
            yield from property_names(child)


def _keep(_: str) -> None:
    return None
