"""A question to the policy in Cedar's terms: the principal, the tool, and the parts of the context that rules read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.authority.approval_gate import reach, widest
from interlock.authority.blocked import blocked_path, reads_paths
from interlock.authority.cedar import INVOKE, Rule, Rules, RulesAnswer, Slice, Uid
from interlock.authority.facts import ALL, SETS, as_written, facts
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from cedarpy import Entities

    from interlock.authority.decisions import Question
    from interlock.call.context import Caller
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json

NOTHING = b"{}"

_KINDS = {"human": "User", "agent": "Agent", "service": "Service"}
_CLASS_RISK = {"read_only": 0, "write_reversible": 30, "write_irreversible": 70}


class CedarQuestion:
    """A caller and a tool in Cedar's terms."""

    __slots__ = ("entities", "near", "request", "rules")

    def __init__(self, question: Question, rules: Rules, environment: str) -> None:
        self.request, self.entities = entities_of(question.caller, question.contract, environment)
        self.near = rules_near(question.caller, question.contract.address, rules)
        self.rules = rules.narrowed(self.near, self.entities, self.request)


def _principal(caller: Caller) -> Uid:
    # An agent without a stated kind is an agent, whatever its user is.
    kind = "agent" if caller.agent is not None and caller.kind == "human" else caller.kind
    return _KINDS[kind], caller.acting


def rules_near(caller: Caller, address: str, rules: Rules) -> Slice:
    """Return the rules that can apply when a caller calls a tool."""
    return rules.slice(_principal(caller), (("Group", group) for group in caller.groups), address)


def entities_of(caller: Caller, contract: Contract, environment: str) -> tuple[Json, Entities]:
    """Return the request, except for its context, and the entities it names."""
    import cedarpy

    kind, name = _principal(caller)
    address, manifest = contract.address, contract.manifest
    request = {
        "principal": {"type": kind, "id": name},
        "action": {"type": "Action", "id": address},
        "resource": {"type": "Tool", "id": address},
    }
    principal = {
        "id": caller.acting,
        "trust": caller.trust,
        "tenant": caller.tenant,
        "scopes": sorted(caller.scopes),
        "on_behalf_of": caller.id,
    }
    tool = {
        "address": address,
        "name": contract.id.name,
        "version": contract.version,
        "namespace": contract.id.namespace,
        "mutation_class": contract.mutation.mutation_class,
        "tier": 0 if manifest.sandbox is None else manifest.tier,
        "tags": sorted(manifest.tags),
        "environment": environment,
        "permissions": sorted(contract.auth.required_permissions),
        "scope": widest(contract.mutation.effects),
        "external_io": manifest.external_io,
    }
    groups = [{"type": "Group", "id": group} for group in sorted(caller.groups)]
    entities = [
        {"uid": request["principal"], "attrs": principal, "parents": groups},
        {"uid": request["action"], "attrs": {}, "parents": [{"type": "Action", "id": INVOKE}]},
        {"uid": request["resource"], "attrs": tool, "parents": [{"type": "Namespace", "id": contract.id.namespace}]},
    ]
    try:
        text = orjson.dumps(entities).decode()
        return request, cedarpy.Entities.from_json_str(text)  # pyright: ignore[reportUnknownMemberType] - its types leave dicts open
    except (TypeError, ValueError):
        raise Failure("E3206", "the caller's name or the tool's is not valid text") from None


def context_of(question: Question, rules: Slice) -> bytes:
    """Return the parts of the context that rules read, except `approved`, as sorted JSON.

    E3206 for unsupported values.
    """
    if not rules.reads:
        return NOTHING
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


def refused_path(question: Question, prepared: CedarQuestion, answer: RulesAnswer, context: bytes) -> str:
    """Return the path because of which the rules refuse a call, or ask about it."""
    if not any(map(reads_paths, prepared.rules.rules)):
        return ""
    paths = facts(question.contract, question.arguments, (), frozenset({"paths"}), prepared.rules.compared)["paths"]

    def holds(rule: Rule, alone: bytes) -> bool:
        return prepared.rules.holds(rule, prepared.entities, prepared.request, alone, approved=False) == "yes"

    path = blocked_path(prepared.rules.rules, answer, context, paths, holds)
    return as_written(question.contract, question.arguments, path, prepared.rules.compared)
