"""A question about a call in Cedar's terms: with the parts of the context that rules read, and its facts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.authority.approval_gate import reach, widest
from interlock.authority.blocked import blocked_path, reads_paths
from interlock.authority.cedar import Rule, Rules, RulesAnswer, Slice
from interlock.authority.facts import ALL, SETS, as_written, facts
from interlock.authority.policy_entities import NOTHING, entities_of, rules_near
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.authority.decisions import Question
    from interlock.data.schema import Json

_CLASS_RISK = {"read_only": 0, "write_reversible": 30, "write_irreversible": 70}


class CedarQuestion:
    """A caller and a tool in Cedar's terms, and what rules read of a call."""

    __slots__ = ("entities", "near", "request", "rules")

    def __init__(self, question: Question, rules: Rules, environment: str) -> None:
        self.request, self.entities = entities_of(question.caller, question.contract, environment)
        self.near = rules_near(question.caller, question.contract.address, rules)
        self.rules = rules.narrowed(self.near, self.entities, self.request)

    def context(self, question: Question) -> bytes:
        """Return the parts of the context that rules read, except `approved`, as sorted JSON.

        E3206 for unsupported values.
        """
        return _context_of(question, self.rules) if self.rules.reads else NOTHING

    def refused_path(self, question: Question, answer: RulesAnswer, context: bytes) -> str:
        """Return the path because of which the rules refuse a call, or ask about it."""
        if not any(map(reads_paths, self.rules.rules)):
            return ""
        paths = facts(question.contract, question.arguments, (), frozenset({"paths"}), self.rules.compared)["paths"]

        def holds(rule: Rule, alone: bytes) -> bool:
            return self.rules.holds(rule, self.entities, self.request, alone, approved=False) == "yes"

        path = blocked_path(self.rules.rules, answer, context, paths, holds)
        return as_written(question.contract, question.arguments, path, self.rules.compared)


def _context_of(question: Question, rules: Slice) -> bytes:
    parts = dict.fromkeys((*_FACTS, *_CONTEXT), None) if rules.parts is None else rules.parts
    context: Json = {}
    wanted = _FACTS & parts.keys()
    if wanted:
        context = facts(question.contract, question.arguments, parts.get("arguments"), wanted, rules.compared)
    for name in parts.keys() & _CONTEXT.keys():
        value, below = _CONTEXT[name](question), parts[name]
        if value is not None:
            context[name] = value if below is None else _only(value, below)
    try:
        return orjson.dumps(context, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        raise Failure("E3206", "the call holds text that is not valid") from None


def _only(value: Any, names: Collection[str]) -> Any:
    """Return the members that are read, so that a change of the others needs no new decision."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in cast("Json", value).items() if name in names}


def _time(question: Question) -> Json:
    at = datetime.fromtimestamp(question.now_ms // 1000, UTC)
    return {"hour": at.hour, "weekday": at.isoweekday(), "minute_of_day": at.hour * 60 + at.minute}


def _budgets(question: Question) -> Json:
    spent, left = (max(min(amount, 2**63 - 1), -(2**63)) for amount in question.budgets)
    return {"spent": spent, "left": left}


def _risk(question: Question) -> int:
    """0 to 100: what the tool may change, how far that reaches, and whether it leaves this machine."""
    mutation = question.contract.mutation
    far = 20 if mutation.writes and reach(widest(mutation.effects)) > reach("resource") else 0
    return _CLASS_RISK[mutation.mutation_class] + far + (10 if question.contract.manifest.external_io else 0)


_FACTS = frozenset({"arguments", *SETS, *ALL})
_CONTEXT: Mapping[str, Callable[[Question], Any]] = {
    "operation": lambda question: question.operation,
    "native": lambda question: question.native,
    "time": _time,
    "budgets": _budgets,
    "risk": _risk,
    "session": lambda question: question.session,
    "door": lambda question: question.door,
}
