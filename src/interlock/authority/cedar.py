"""Cedar: parses policy text to rules and evaluates them.

Theory of operation. A text is parsed once. Cedar looks at every policy on every question, so a question is put only to
the *slice* of rules whose scope can match the tool; tools with the same slice share one parsed set. For each slice it
is known which parts of the context its rules read: only those are computed, sent, and made part of a cache key.

A person's agreement is an attribute like any other: `context.approved`. A question is first asked with false. If the
answer is no, it is asked again with true; if that makes it a yes, a person's agreement is missing, and the outcome is
`ask`. That deny beats ask beats allow follows from Cedar's own "a forbid beats every permit".

Cedar skips a policy that fails during evaluation. INVARIANT: here any such failure denies, otherwise a forbid that
reads a missing attribute would allow what it guards.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import orjson

from interlock.authority.comparisons import comparisons, together
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple, dataclass

if TYPE_CHECKING:
    from cedarpy import Entities, PolicySet

    from interlock.authority.comparisons import Compared, Comparison
    from interlock.call.phases import Behavior
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json


class _Deferred(ModuleType):
    """A module that is executed when something of it is first used."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        if name.startswith("__") or spec is None or spec.loader is None:
            raise AttributeError(name)
        spec.loader.exec_module(self)
        return self.__dict__[name]


def _defer_syntax_tree() -> None:
    """Let cedarpy load the classes of its syntax tree on first use. They take longer than all the rest of it, and
    nothing here uses them.
    """
    package = None if "cedarpy" in sys.modules else importlib.util.find_spec("cedarpy")
    found = package and PathFinder.find_spec("cedarpy.pst", package.submodule_search_locations)
    if found is not None:
        tree = _Deferred(found.name)
        tree.__spec__, tree.__file__ = found, found.origin
        sys.modules[found.name] = tree


_defer_syntax_tree()

Effect = Literal["permit", "forbid"]
# An entity's type and id.
Uid = tuple[str, str]
# A part of the context: ("time", "hour"), ("arguments",) for all of them, () for everything.
Read = tuple[str, ...]

HERE = Path(__file__).parent
DEFAULT = (HERE / "default.cedar").read_text()
INVOKE = "tool.invoke"

_TOKEN = expression(r'"(?:\\.|[^"\\])*"|//[^\n]*|;', re.DOTALL)
_IGNORED = expression(r"(?:\s|//[^\n]*)*")
_APPROVED: Read = ("approved",)
# With at least this many rules it pays to find out once which of them can never apply to a caller and a tool.
MANY = 8
_NAMED = expression(r"`(policy\d+)`")


@dataclass(frozen=True, slots=True)
class Rule:
    """One policy of a text: its `@id`, its line, and the parts of the context that it reads."""

    key: str
    id: str
    named: bool
    effect: Effect
    line: int
    text: str
    est: Json
    reads: frozenset[Read]
    # Whether it mentions a person's agreement.
    asks: bool
    # Entities of which the request must be about one; None: any.
    scope: tuple[frozenset[Uid] | None, ...]
    # The texts that it compares arguments with.
    compares: tuple[Comparison, ...] = ()
    # Attributes of the tool that its conditions mention, beside what they read of the call; None: the tool itself.
    mentions: frozenset[str] | None = frozenset()

    def may_apply(self, about: frozenset[Uid]) -> bool:
        """Whether the rule's scope can match a request about these entities, or in them."""
        return all(named is None or not named.isdisjoint(about) for named in self.scope)

    def may_be_about(self, contract: Contract) -> bool:
        """Whether the rule's scope can match somebody's call of a tool."""
        return all(named is None or not named.isdisjoint(tool_uids(contract.address)) for named in self.scope[1:])


def tool_uids(address: str) -> tuple[Uid, ...]:
    """Return the entities that a call of a tool is about, or in."""
    return ("Action", address), ("Action", INVOKE), ("Tool", address), ("Namespace", address.partition(".")[0])


class RulesAnswer(NamedTuple):
    """The answer of the rules: the outcome, the rules that decided, and evaluation errors."""

    behavior: Behavior
    rules: tuple[str, ...]
    errors: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        if self.errors:
            return self.errors[0]
        return f"rule {', '.join(self.rules)}" if self.rules else "no rule allows it"


class Slice:
    """The rules that can apply to a tool, parsed together, and what they read."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.reads: frozenset[Read] = frozenset(read for rule in rules for read in rule.reads)
        # The parts of the context that the rules read: first name to the names below it, or to None for all of it.
        # `parts` itself is None if the rules read the whole context.
        self.parts: Mapping[str, frozenset[str] | None] | None = None if () in self.reads else _parts(self.reads)
        self.compared: Compared = together(one for rule in rules for one in rule.compares)
        self._set = _policy_set({rule.key: rule.est for rule in rules})
        self._names = {rule.key: rule.id for rule in rules}

    @cached_property
    def at_best(self) -> Slice:
        """The same rules for the call that they treat best: of those that read the call, the permits always hold."""
        if not self.reads:
            return self
        return Slice([_always(rule) for rule in self.rules if rule.effect == "permit" or not rule.reads])

    @cached_property
    def mentions(self) -> frozenset[str] | None:
        """Attributes of the tool on which the outcome depends, beside the call; None if on the tool itself."""
        found: frozenset[str] = frozenset()
        for rule in self.rules:
            if rule.mentions is None:
                return None
            found |= rule.mentions
        return found

    def ask(self, entities: Entities, request: Json, context: bytes) -> RulesAnswer:
        """The outcome for a request. `context` is JSON without `approved`."""
        first = self._evaluate(entities, request, context, approved=False)
        if first.errors or first.behavior == "allow":
            return first
        second = self._evaluate(entities, request, context, approved=True)
        if second.errors or second.behavior == "deny":
            return second if second.errors or second.rules else first
        # The rules that an approval lifts; if none forbids the call, the rules that permit it with an approval.
        return RulesAnswer("ask", first.rules or second.rules)

    def _evaluate(self, entities: Entities, request: Json, context: bytes, *, approved: bool) -> RulesAnswer:
        import cedarpy

        comma = "" if context == b"{}" else ","
        text = f'{{"approved":{"true" if approved else "false"}{comma}{context[1:].decode()}'
        question = {**request, "context": text}
        result = cedarpy.is_authorized(question, self._set, entities)  # pyright: ignore[reportUnknownMemberType] - its types leave dicts open
        keys: Sequence[str] = sorted(result.diagnostics.reasons, key=_position)
        errors = tuple(sorted(_NAMED.sub(self._name, error) for error in result.diagnostics.errors))
        names = tuple(self._names[key] for key in keys)
        return RulesAnswer("allow" if result.allowed and not errors else "deny", names, errors)

    def silent(self, entities: Entities, request: Json) -> frozenset[str]:
        """Return the rules that read nothing of a call and do not hold for this caller and tool, so they never will."""
        import cedarpy

        if self._fixed is None:
            return frozenset()
        keys, as_permits = self._fixed
        diagnostics = cedarpy.is_authorized({**request, "context": "{}"}, as_permits, entities).diagnostics  # pyright: ignore[reportUnknownMemberType] - as below
        return frozenset() if diagnostics.errors else keys - frozenset(diagnostics.reasons)

    @cached_property
    def _fixed(self) -> tuple[frozenset[str], PolicySet] | None:
        """Convert the rules that read nothing of a call to permits: every one that holds is then named as a reason."""
        fixed = [rule for rule in self.rules if not rule.reads and not rule.asks]
        if len(fixed) < MANY:
            return None
        return frozenset(rule.key for rule in fixed), _policy_set({rule.key: _as_permit(rule).est for rule in fixed})

    def _name(self, match: re.Match[str]) -> str:
        return f"`{self._names.get(match.group(1), match.group(1))}`"

    def holds(self, rule: Rule, entities: Entities, request: Json, context: bytes, *, approved: bool) -> str:
        """Whether one rule's scope and conditions are met: yes, no, or the error."""
        alone = Slice([_as_permit(rule)])
        answer = alone._evaluate(entities, request, context, approved=approved)
        return answer.errors[0] if answer.errors else "yes" if answer.behavior == "allow" else "no"


class Rules:
    """A policy text, parsed. Raises E3205 with what is wrong and on which line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.version = f"local:{self.digest[:16]}"
        self.rules = parse(text)
        self._slices: dict[tuple[str, ...], Slice] = {}
        # The tools and namespaces that some rule is about.
        self._about = frozenset(named for rule in self.rules for part in rule.scope[1:] for named in part or ())
        # Each rule under the entities that one part of its scope names, or under None.
        self._index: dict[Uid | None, list[Rule]] = {}
        for rule in self.rules:
            principal, action, resource = rule.scope
            for named in action or resource or principal or (None,):
                self._index.setdefault(named, []).append(rule)

    def kind(self, address: str) -> tuple[str, str]:
        """The facts of a tool that the scopes of rules compare: tools of one kind have the same rules."""
        namespace = address.partition(".")[0]
        alone = ("Action", address) in self._about or ("Tool", address) in self._about
        return address if alone else "", namespace if ("Namespace", namespace) in self._about else ""

    def slice(self, principal: Uid, groups: Iterable[Uid], address: str) -> Slice:
        """The rules that can apply when a principal calls a tool."""
        about = frozenset((principal, *groups, *tool_uids(address)))
        near = {rule.key: rule for named in (None, *about) for rule in self._index.get(named, ())}
        rules = sorted((rule for rule in near.values() if rule.may_apply(about)), key=lambda rule: _position(rule.key))
        return self._slice(rules)

    def narrowed(self, within: Slice, entities: Entities, request: Json) -> Slice:
        """Return the rules of a slice that may still apply to a caller and a tool, whatever the call."""
        silent = within.silent(entities, request)
        return within if not silent else self._slice([rule for rule in within.rules if rule.key not in silent])

    def _slice(self, rules: Sequence[Rule]) -> Slice:
        keys = tuple(rule.key for rule in rules)
        cached = self._slices.get(keys)
        if cached is None:
            if len(self._slices) > 1000:
                self._slices.clear()
            cached = self._slices[keys] = Slice(rules)
        return cached

    def rule(self, name: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.id == name), None)


# Parsing


class Statement(NamedTuple):
    line: int
    text: str


def statements(text: str) -> Iterator[Statement]:
    """Split a text into its policies, each with its first line. A `;` in a string or a comment ends nothing."""
    ends = [token.end() for token in _TOKEN.finditer(text) if token.group() == ";"]
    line, counted = 1, 0
    for start, end in zip((0, *ends), (*ends, len(text)), strict=True):
        ignored = _IGNORED.match(text, start, end)
        begin = ignored.end() if ignored is not None else start
        if begin == end:
            continue
        line, counted = line + text.count("\n", counted, begin), begin
        yield Statement(line, text[begin:end].rstrip())


# Cached, because each data directory in which a tool is tried has the same policy. Rules do not change.
@lru_cache(maxsize=4)
def parse(text: str) -> tuple[Rule, ...]:
    """Parse a policy text. E3205 with what is wrong and on which line."""
    import cedarpy

    listed = list(statements(text))
    try:
        document: Json = orjson.loads(cedarpy.policies_to_json_str(text))
    except ValueError as error:
        line, why = _first_fault(listed, str(error))
        raise Failure("E3205", f"the policy cannot be used: line {line}: {why}", details={"line": line}) from None
    if document["templates"]:
        line = listed[min(map(_position, document["templates"]))].line
        words = f"the policy cannot be used: line {line}: a template decides nothing; name the principal"
        raise Failure("E3205", words, details={"line": line})
    policies: dict[str, Json] = document["staticPolicies"]
    return tuple(_rule(key, policies[key], listed[_position(key)]) for key in sorted(policies, key=_position))


def _first_fault(listed: Sequence[Statement], otherwise: str) -> tuple[int, str]:
    import cedarpy

    for statement in listed:
        try:
            cedarpy.PolicySet.from_str(statement.text)
        except ValueError as error:
            return statement.line, str(error).splitlines()[0]
    return 1, otherwise.splitlines()[0]


def _rule(key: str, est: Json, statement: Statement) -> Rule:
    rule_id: str | None = est.get("annotations", {}).get("id")
    parts = frozenset(_reads(est["conditions"], "context"))
    reads, asks = parts - {_APPROVED}, _APPROVED in parts or () in parts
    ofs = frozenset(_reads(est["conditions"], "resource"))
    itself = () in ofs or next(_reads(est["conditions"], "action"), None) is not None
    mentions = None if itself else frozenset(first for first, *_ in ofs)
    scope = (_scope(est["principal"]), _scope(est["action"]), _scope(est["resource"]))
    compares = tuple(comparisons(est["conditions"]))
    name, named, effect = rule_id or key, bool(rule_id), est["effect"]
    return Rule(key, name, named, effect, statement.line, statement.text, est, reads, asks, scope, compares, mentions)


def _scope(part: Json) -> frozenset[Uid] | None:
    """Return the entities that a part of a rule's scope names. Any other form may match anything."""
    within: Json = part.get("in") or part
    named: list[Json] = within.get("entities") or ([within["entity"]] if "entity" in within else [])
    return frozenset((one["type"], one["id"]) for one in named) or None


def _position(key: str) -> int:
    return int(key.removeprefix("policy"))


def _reads(node: Any, var: str) -> Iterator[Read]:
    """Yield every part of the context, or of another variable, that an expression mentions, at most two names deep."""
    if isinstance(node, dict):
        chain = _chain(cast("Json", node), var)
        if chain is not None:
            yield chain[:2]
            return
        for child in cast("Json", node).values():
            yield from _reads(child, var)
    elif isinstance(node, list):
        for child in cast("list[Any]", node):
            yield from _reads(child, var)


def _chain(node: Json, var: str) -> Read | None:
    """The names in `context.a.b` or `context.a has b`; None for any other expression."""
    if node.get("Var") == var:
        return ()
    step: Any = node.get(".", node.get("has"))
    if len(node) != 1 or not isinstance(step, dict) or not isinstance(cast("Json", step).get("left"), dict):
        return None
    left, name = _chain(cast("Json", step)["left"], var), cast("Json", step).get("attr")
    if left is None:
        return None
    return (*left, name) if isinstance(name, str) else left


def _parts(reads: Iterable[Read]) -> dict[str, frozenset[str] | None]:
    parts: dict[str, frozenset[str] | None] = {}
    for first, *below in sorted(reads):
        known = parts.get(first, frozenset())
        parts[first] = None if known is None or not below else known | {below[0]}
    return parts


def _policy_set(policies: Mapping[str, Json]) -> PolicySet:
    import cedarpy

    document: Json = {"staticPolicies": policies, "templates": {}, "templateLinks": []}
    return cedarpy.PolicySet.from_json_str(orjson.dumps(document).decode())


def _as_permit(rule: Rule) -> Rule:
    est = {**rule.est, "effect": "permit"}
    return replace(rule, effect="permit", est=est)


def _always(rule: Rule) -> Rule:
    """A rule without its conditions, if they read the call."""
    if not rule.reads:
        return rule
    est: Json = {**rule.est, "conditions": []}
    return replace(rule, est=est, reads=frozenset(), asks=False, compares=(), mentions=frozenset())
