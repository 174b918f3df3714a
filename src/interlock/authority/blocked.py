"""Finds the path because of which the rules refused a call, for the decision on record."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.authority.cedar import Rule, RulesAnswer
from interlock.authority.normalize import ancestors
from interlock.data.subschemas import PATH

if TYPE_CHECKING:
    from interlock.data.schema import Json

# Whether one rule holds in a context.
Holds = Callable[[Rule, bytes], bool]

_SETS = ("paths", "all_paths")
# The number of pairs of a rule and a path that are tried. Only refused calls pay for it.
_MOST_TRIED = 32


def reads_paths(rule: Rule) -> bool:
    """Whether a rule reads the paths of a call."""
    return any(not read or read[0] in _SETS for read in rule.reads) or any(_by_path(rule))


def blocked_path(
    rules: Sequence[Rule], answer: RulesAnswer, context: bytes, paths: Collection[str], holds: Holds
) -> str:
    """Return the path that a rule forbids or asks about, or that no rule on paths allows; "" if there is none.

    `paths` are those of the call, each with its ancestors. A path is tried by evaluating a call with that path alone.
    """
    concerned = [rule for rule in rules if reads_paths(rule) and rule.effect == "forbid" and rule.id in answer.rules]
    if not concerned and not answer.rules and answer.behavior == "deny":
        concerned = [rule for rule in rules if reads_paths(rule) and rule.effect == "permit"]
    if answer.errors or not concerned:
        return ""
    document: Json = orjson.loads(context)
    for rule, path in islice(_pairs(concerned, paths), _MOST_TRIED):
        alone = {**document, **dict.fromkeys(document.keys() & set(_SETS), sorted(ancestors(path)))}
        if holds(rule, orjson.dumps(alone)) == (rule.effect == "forbid"):
            return path
    named = (_value(document.get("arguments"), names) for rule in concerned for names in _by_path(rule))
    return next((value for value in named if value.startswith("/")), "")


def _pairs(rules: Sequence[Rule], paths: Collection[str]) -> Iterator[tuple[Rule, str]]:
    """Yield every rule that reads the sets of paths with every path that is not an ancestor of another."""
    above = {os.path.dirname(path) for path in paths if path != "/"}
    for rule in rules:
        if any(not read or read[0] in _SETS for read in rule.reads):
            yield from ((rule, path) for path in sorted(paths) if path not in above)


def _by_path(rule: Rule) -> Iterator[tuple[str, ...]]:
    """Yield the names of the arguments that a rule compares with a path."""
    return (one.names for one in rule.compares if PATH in one.readings)


def _value(value: Any, names: tuple[str, ...]) -> str:
    for name in names:
        value = cast("Json", value).get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
