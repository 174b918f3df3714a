"""Faults of a policy text: its types, its names, and the entities it names, checked against the tools that exist.

Cedar checks types against a schema. The shipped schema has one general action; `schema` adds one for each tool, with
the parameters of that tool, so that `context.arguments.amount` is known to be a number or to be missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.authority.cedar import HERE, INVOKE, Rule, parse
from interlock.authority.rule_warnings import cautions
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import properties_of, resolve_ref

if TYPE_CHECKING:
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a policy text: where, in which rule, and whether the text can be used nevertheless."""

    line: int
    rule: str
    message: str
    grave: bool = True


def concerned(text: str) -> Callable[[str, str], bool]:
    """Return a test, by address and manifest, for the tools that a text depends on.

    A rule depends on the arguments of the tools that it names. One that names none depends on tools that have an
    argument it reads. Of ten thousand tools, the others need not be read to check the text.
    """
    try:
        rules = parse(text)
    except Failure:
        return lambda address, manifest: False
    named = {name for rule in rules for kind, name in _entities(rule.est) if kind == "Action"}
    anywhere = [rule for rule in rules if not rule.scope[1] or ("Action", INVOKE) in rule.scope[1]]
    reads = {read for rule in anywhere for read in rule.reads if not read or read[0] == "arguments"}
    everything = any(len(read) < 2 for read in reads)
    names = [_quoted(read[1]) for read in reads if len(read) > 1]
    return lambda address, manifest: everything or address in named or any(name in manifest for name in names)


def check(
    text: str,
    contracts: Iterable[Contract],
    groups: Collection[str] | None = None,
    known: Iterable[str] | None = None,
) -> list[Fault]:
    """List all faults of a text, checked against the existing tools; raises nothing.

    If `contracts` are only those that the text is `concerned` with, `known` are the addresses of all tools.
    """
    try:
        rules = parse(text)
    except Failure as failure:
        line = re.search(r"line (\d+): (.*)", failure.message, re.DOTALL)
        return [Fault(int(line.group(1)), "", line.group(2)) if line else Fault(1, "", failure.message)]
    tools: dict[str, list[Contract]] = {}
    for contract in contracts:
        tools.setdefault(contract.address, []).append(contract)
    faults = [
        *_name_faults(rules),
        *_type_faults(text, rules, tools),
        *_reach_faults(rules, {*tools, *(known or ())}, groups),
        *_cautions(rules, tools),
    ]
    # A fault that follows from another one of the same rule comes after it.
    return sorted(faults, key=lambda fault: (fault.line, not fault.grave, fault.message.startswith("unable to")))


def _name_faults(rules: Sequence[Rule]) -> Iterator[Fault]:
    first: dict[str, Rule] = {}
    for rule in rules:
        if not rule.named:
            yield Fault(rule.line, rule.id, 'has no name; write @id("…") above it', grave=False)
        earlier = first.setdefault(rule.id, rule)
        if earlier is not rule:
            yield Fault(rule.line, rule.id, f"has the name of the rule on line {earlier.line}")


def _type_faults(text: str, rules: Sequence[Rule], tools: Mapping[str, Sequence[Contract]]) -> Iterator[Fault]:
    import cedarpy

    by_key = {rule.key: rule for rule in rules}
    # Reported once: a fault is found again for every tool and kind of caller that the rule may meet.
    reported: set[tuple[str, str]] = set()
    result = cedarpy.validate_policies(text, schema(tools))  # pyright: ignore[reportUnknownMemberType] - its types leave dicts open
    for error in result.errors:
        rule = by_key.get(error.policy_id)
        message = re.sub(r"^for policy `policy\d+`, ", "", error.error)
        same = (error.policy_id, re.sub(r'Action::"[^"]*"', "", message))
        if same not in reported:
            reported.add(same)
            yield Fault(rule.line if rule else 1, rule.id if rule else "", message)


def _reach_faults(rules: Sequence[Rule], tools: Collection[str], groups: Collection[str] | None) -> Iterator[Fault]:
    namespaces = {address.partition(".")[0] for address in tools}
    known: dict[str, Collection[str]] = {"Tool": tools, "Namespace": namespaces}
    if groups is not None:
        known["Group"] = groups
    for rule in rules:
        for kind, name in sorted(set(_entities(rule.est))):
            if kind in known and name not in known[kind]:
                yield Fault(rule.line, rule.id, f'names {kind}::"{name}", which does not exist', grave=False)


def _cautions(rules: Sequence[Rule], tools: Mapping[str, Sequence[Contract]]) -> Iterator[Fault]:
    for rule in rules:
        if not rule.reads:
            continue
        met = (one for listed in tools.values() for one in listed if rule.compares and rule.may_be_about(one))
        for message in cautions(rule.effect, rule.est["conditions"], rule.compares, met):
            yield Fault(rule.line, rule.id, message, grave=False)


def _entities(node: Any) -> Iterator[tuple[str, str]]:
    """Every entity that a policy names."""
    if isinstance(node, dict):
        known = cast("Json", node)
        kind, name = known.get("type"), known.get("id")
        if isinstance(kind, str) and isinstance(name, str):
            yield kind, name
        for child in known.values():
            yield from _entities(child)
    elif isinstance(node, list):
        for child in cast("list[Any]", node):
            yield from _entities(child)


def schema(tools: Mapping[str, Sequence[Contract]]) -> str:
    """The shipped schema and one action per tool, with the tool's own parameters."""
    shipped = (HERE / "interlock.cedarschema").read_text()
    # The general action is the last declaration; each tool's is like it, except for the arguments.
    general = shipped[shipped.rindex("appliesTo {") :].rstrip()
    actions = [
        f'action {_quoted(address)} in ["{INVOKE}"] '
        + general.replace("arguments: {}", f"arguments: {_arguments(versions)}", 1)
        for address, versions in sorted(tools.items())
    ]
    return "\n".join([shipped, *actions])


def _arguments(versions: Sequence[Contract]) -> str:
    """Return a record of the parameters that all versions of a tool share."""
    attributes = [_attributes(one.input.document, one.input.document, dict(one.input.defaults), ()) for one in versions]
    shared: list[str] = []
    for name in sorted({name for one in attributes for name in one}):
        in_versions = [one.get(name) for one in attributes]
        types = {one[0] for one in in_versions if one is not None}
        if len(types) == 1:
            always = all(one is not None and one[1] for one in in_versions)
            shared.append(f"{_quoted(name)}{'' if always else '?'}: {types.pop()}")
    return f"{{{', '.join(shared)}}}"


def _attributes(
    node: Json, root: Json, defaults: Mapping[str, Any], above: tuple[str, ...]
) -> dict[str, tuple[str, bool]]:
    required: Any = node.get("required") or []
    attributes: dict[str, tuple[str, bool]] = {}
    for name, part in properties_of(node).items():
        kind, nullable = _type(part, root, above)
        if kind not in (None, "null") and name.isprintable():
            attributes[name] = (kind, (name in required or name in defaults) and not nullable)
    return attributes


_TYPES = {"string": "String", "integer": "Long", "boolean": "Bool", "number": "decimal"}


def _type(part: Json, root: Json, above: tuple[str, ...]) -> tuple[str | None, bool]:
    """Return the Cedar type of a JSON schema and whether null is allowed; None if Cedar has no such type."""
    ref = str(part.get("$ref", ""))
    if ref and ref in above:
        return None, False  # Cedar has no recursive types
    above = (*above, ref) if ref else above
    part = resolve_ref(root, part)
    choices: Any = part.get("anyOf") or part.get("oneOf")
    if isinstance(choices, list):
        kinds = [_type(cast("Json", one), root, above) for one in cast("list[Any]", choices) if isinstance(one, dict)]
        known = {kind for kind, _ in kinds if kind != "null"}
        return (known.pop() if len(known) == 1 else None), any(kind == "null" or empty for kind, empty in kinds)
    type_: Any = part.get("type")
    if isinstance(type_, list):
        rest = [one for one in cast("list[str]", type_) if one != "null"]
        kind = _type({**part, "type": rest[0]}, root, above)[0] if len(rest) == 1 else None
        return kind, "null" in type_
    if type_ is None and isinstance(values := part.get("enum", [part.get("const")]), list):
        texts = all(isinstance(value, str) for value in cast("list[Any]", values))
        return ("String" if texts else None), False
    if type_ == "array":
        inner = _type(cast("Json", part.get("items")), root, above)[0] if isinstance(part.get("items"), dict) else None
        return (None if inner in (None, "null") else f"Set<{inner}>"), False
    if type_ == "object":
        inside = _attributes(part, root, {}, above)
        listed = ", ".join(f"{_quoted(name)}{'' if must else '?'}: {kind}" for name, (kind, must) in inside.items())
        return f"{{{listed}}}", False
    return ("null" if type_ == "null" else _TYPES.get(str(type_))), False


def _quoted(name: str) -> str:
    return orjson.dumps(name).decode()
