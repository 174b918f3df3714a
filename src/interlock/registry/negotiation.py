"""Negotiation: whether a tool offers what an agent expects of its input.

The parts of an expectation are its fields. Those in `required` are the required parts and all others the optional
ones, among them `*`, the fields of any other name that `additionalProperties` describes. A part is offered if the tool
has the same field, taking at least the values expected, and accepts it together with the required parts.

Keywords of the tool that concern the whole object (`maxProperties`, `not`, ...) count as far as it can be proved that
they refuse every object with certain fields. An expectation that names no field cannot be counted in parts: it is
offered whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from enum import StrEnum
from typing import Any

from interlock.core.record import dataclass
from interlock.registry.containment import refuses, within
from interlock.registry.expansion import OPAQUE, Document, Node, expand, object_of

# Fields of any name that an expectation describes without naming them.
OTHERS = "*"
# Keywords beside which the fields of an expectation do not tell all of it.
_WHOLE = frozenset({"anyOf", "oneOf", "allOf", "enum", "const"})
# Each optional part is looked at together with all required ones, if there are no more than this.
_MOST_TOGETHER = 100


class CompatOutcome(StrEnum):
    FULL_MATCH = "FULL_MATCH"
    PARTIAL_MATCH = "PARTIAL_MATCH"
    INCOMPATIBLE = "INCOMPATIBLE"


@dataclass(frozen=True, slots=True)
class Negotiation:
    """Whether a tool offers what an agent expects, and the parts that it does not offer."""

    outcome: CompatOutcome
    missing: tuple[str, ...] = ()


def negotiate(expected: Document, offered: Document) -> Negotiation:
    """Compare what an agent expects with what a tool offers."""
    wanted, given = expand(expected), expand(offered)
    parts = _parts(wanted)
    if not parts:
        met = _expects_nothing(wanted) or within(given, wanted)
        return Negotiation(CompatOutcome.FULL_MATCH if met else CompatOutcome.INCOMPATIBLE)
    keywords = object_of(wanted)
    required = set[str](keywords.get("required", ()))
    missing = {name for name, part in parts.items() if not _has(given, name, part)}
    missing.update(_excluded(given, {name: part for name, part in parts.items() if name not in missing}, required))
    if not _offers_others(given, keywords, parts):
        missing.add(OTHERS)
    listed = tuple(name for name in {**parts, OTHERS: None} if name in missing)
    if required & missing or (keywords.keys() & _WHOLE and not within(given, wanted)):
        return Negotiation(CompatOutcome.INCOMPATIBLE, listed)
    return Negotiation(CompatOutcome.PARTIAL_MATCH if missing else CompatOutcome.FULL_MATCH, listed)


def _parts(wanted: Node) -> dict[str, Node | None]:
    """The fields that an expectation of an object names, each with what it may be; None where it does not say."""
    keywords = object_of(wanted)
    if keywords.get("type", "object") not in ("object", ["object"]):
        return {}
    others = _others(keywords)
    named: dict[str, Node | None] = dict(keywords.get("properties", {}))
    return named | {name: others for name in keywords.get("required", ()) if name not in named}


def _others(keywords: Mapping[str, Any]) -> Node | None:
    """The schema of the fields that are not named; None where it says nothing of them, or that there are none."""
    stated: Node = keywords.get("additionalProperties", True)
    return stated if stated and isinstance(stated, dict) else None


def _expects_nothing(wanted: Node) -> bool:
    """Whether an expectation that names no field is anything, or any object."""
    keywords = object_of(wanted)
    return (
        wanted is not False
        and keywords.keys() <= {"type", "properties", "required", "additionalProperties"}
        and keywords.get("type", "object") in ("object", ["object"])
        and keywords.get("additionalProperties", True) in (True, {})
    )


def _has(given: Node, name: str, part: Node | None) -> bool:
    """Whether a tool has a field, taking at least these values."""
    field: Node = object_of(given).get("properties", {}).get(name, False)
    return field is not False and (part is None or within(field, part))


def _excluded(given: Node, parts: Mapping[str, Node | None], required: Set[str]) -> Iterator[str]:
    """Those of the fields that a tool has, and refuses: alone, or together with the required ones."""
    fields: dict[str, Node] = {name: True if part is None else part for name, part in parts.items()}
    if not _forbids(given, fields):
        return
    alone = {name for name, part in fields.items() if _forbids(given, {name: part})}
    yield from alone
    needed = {name: part for name, part in fields.items() if name in required}
    if _forbids(given, needed):
        if not alone & needed.keys():
            yield from needed
    elif len(needed) <= _MOST_TOGETHER:
        optional = fields.keys() - needed.keys() - alone
        yield from (name for name in optional if _forbids(given, {**needed, name: fields[name]}))


def _forbids(schema: Node, fields: Mapping[str, Node]) -> bool:
    """Whether a schema surely refuses every object that has all of these fields. False may be: it cannot be decided."""
    keywords = object_of(schema)
    if schema is False or OPAQUE in keywords:
        return schema is False
    fields = {**dict.fromkeys(keywords.get("required", ()), True), **fields}
    declared, others = keywords.get("properties", {}), keywords.get("additionalProperties", True)
    dependent: Mapping[str, Node] = keywords.get("dependentSchemas", {})
    return (
        len(fields) > keywords.get("maxProperties", math.inf)
        or any(declared.get(name, others) is False for name in fields)
        or ("propertyNames" in keywords and any(refuses(keywords["propertyNames"], name) for name in fields))
        or any(_forbids(one, fields) for one in keywords.get("allOf", ()))
        or any(_forbids(one, fields) for name, one in dependent.items() if name in fields)
        or any(all(_forbids(one, fields) for one in keywords[key]) for key in ("anyOf", "oneOf") if key in keywords)
        or ("not" in keywords and within(keywords["not"], _every(fields)))
    )


def _every(fields: Mapping[str, Node]) -> Node:
    """The schema of every object that has these fields."""
    return {"type": "object", "properties": dict(fields), "required": sorted(fields)}


def _offers_others(given: Node, wanted: Mapping[str, Any], parts: Mapping[str, Node | None]) -> bool:
    """Whether a tool takes fields of any other name with the values expected, if any are."""
    others, offered = _others(wanted), object_of(given)
    if others is None:
        return True
    fields: Mapping[str, Node] = offered.get("properties", {})
    sent: Node = {
        "type": "object",
        "properties": {name: fields.get(name, False) for name in parts},
        "additionalProperties": others,
        **{key: offered[key] for key in ("required", "minProperties") if key in offered},
    }
    return within(given, sent)
