"""The last stage of a selection: whether the caller may make the call that was chosen.

    authorization   the token, the policy and the approval gate, as for a call that is made
    safety          operations in the parameters that destroy much at once
    cost            budgets per call, session, task, caller and tenant that have no room for what the call costs
    rate            limits on calls in a window that ends now

The strictest answer counts. Nothing is used up: the call itself passes all phases again when it is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

import orjson

from interlock.api.policy import asked_all_the_same, question_of
from interlock.authority import budgets
from interlock.core.amounts import millionths
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.threads import WALKS
from interlock.gateway import token_checks
from interlock.resilience import limits
from interlock.selection.dangers import dangers

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.registry.version import Version
    from interlock.store.port import Transaction

Answer = Literal["ALLOW", "REQUIRE_APPROVAL", "DENY"]
Check = Literal["authorization", "safety", "cost", "rate"]
_MINUTE_MS: Final = 60_000
_RANK: Final[dict[Answer, int]] = {"ALLOW": 0, "REQUIRE_APPROVAL": 1, "DENY": 2}
_ANSWERS: Final[dict[str, Answer]] = {"allow": "ALLOW", "deny": "DENY"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check."""

    check: Check
    answer: Answer
    reason: str

    def document(self) -> Json:
        return {"check": self.check, "answer": self.answer, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """The answer of the gate. A call that needs approval is denied if nobody gives it within `timeout_s`."""

    answer: Answer
    reason: str
    check: Check
    timeout_s: int | None
    findings: tuple[Finding, ...]

    def document(self) -> Json:
        return {
            "answer": self.answer,
            "reason": self.reason,
            "check": self.check,
            "timeout_s": self.timeout_s,
            "findings": [one.document() for one in self.findings],
        }


class Gate:
    """The gate for one call. `look` decides what needs no transaction; `decide` completes it within one."""

    def __init__(self, parts: Parts, version: Version, caller: Caller, session: str, task: str) -> None:
        self._parts = parts
        self._version = version
        self._caller = caller
        self._session = session
        self._task = task
        self._findings: list[Finding] = []

    async def look(self, arguments: Json, door: str) -> None:
        """Check authorization and safety."""
        self._findings = [await self._authorization(arguments, door), await WALKS.run(self._safety, arguments)]

    def decide(self, transaction: Transaction) -> GateVerdict:
        """Check cost and rate, and return the strictest answer of all. Writes nothing."""
        findings = (*self._findings, self._cost(transaction), self._rate(transaction))
        worst = max(findings, key=lambda one: _RANK[one.answer])
        approval = self._version.contract.manifest.approval or self._parts.settings.approval
        timeout_s = approval.timeout_seconds if worst.answer == "REQUIRE_APPROVAL" else None
        return GateVerdict(worst.answer, worst.reason, worst.check, timeout_s, findings)

    async def _authorization(self, arguments: Json, door: str) -> Finding:
        parts, caller, contract = self._parts, self._caller, self._version.contract
        try:
            if caller.capability is not None:
                parts.tokens.verifier.check(caller.capability)
                token_checks.check_tool(caller.capability, contract, parts.settings.environment)
            asked = await question_of(parts, caller, contract.ref, arguments, "invoke", door)
            question = replace(asked, session=self._session)
            decision = await parts.engine.decide(question)
        except Failure as failure:
            return Finding("authorization", "DENY", failure.message)
        decision = asked_all_the_same(parts, question, decision) or decision
        return Finding("authorization", _ANSWERS.get(decision.behavior, "REQUIRE_APPROVAL"), decision.reason)

    def _safety(self, arguments: Json) -> Finding:
        found = dangers(arguments)
        if not found:
            return Finding("safety", "ALLOW", "no dangerous operation was found")
        answer: Answer = "DENY" if self._parts.settings.selection_dangers == "deny" else "REQUIRE_APPROVAL"
        return Finding("safety", answer, f"the parameters hold {', '.join(found)}")

    def _cost(self, transaction: Transaction) -> Finding:
        contract = self._version.contract
        allowances = budgets.budget_keys(
            list(self._parts.settings.budgets),
            caller=self._caller,
            session=self._session,
            task=self._task,
            tool=contract.address,
            now_ms=transaction.now_ms,
        )
        try:
            budgets.check(transaction, allowances, millionths(contract.manifest.estimated_cost or 0.0))
        except Failure as failure:
            return Finding("cost", "DENY", failure.message)
        return Finding("cost", "ALLOW", "every budget has room" if allowances else "there is no budget")

    def _rate(self, transaction: Transaction) -> Finding:
        contract = self._version.contract
        service = contract.manifest.external_service
        services = () if service is None else (service,)
        rules = self._parts.settings.rate_limits
        buckets = limits.buckets(rules, caller=self._caller, tool=contract.address, services=services)
        try:
            limits.check(transaction, buckets)
            limits.check_suspended(transaction, services)
        except Failure as failure:
            return Finding("rate", "DENY", failure.message)
        return Finding("rate", "ALLOW", "every limit has room" if buckets else "there is no limit")


async def admit_model(parts: Parts, caller: Caller) -> None:
    """Count a selection by the model of the settings; E3003 if the caller has made too many in the last minute."""
    most = parts.settings.selection_model_per_minute
    key = orjson.dumps(["selection", caller.tenant, caller.id]).decode()
    bucket = limits.Bucket(key, most, _MINUTE_MS, f"{most} selections by a model per caller in a minute")
    await parts.journal.commit(lambda transaction: limits.admit(transaction, (bucket,)))


def parameter_faults(version: Version, parameters: Json) -> list[str]:
    """The reasons why parameters are no valid input of a tool."""
    from interlock.data.coerce import coerce
    from interlock.data.explain import input_faults
    from interlock.data.schema import Schema

    schema = Schema(version.contract.input.caller_facing)
    found = input_faults(schema, coerce(schema, parameters).value)
    return [f"{one.pointer.lstrip('/') or 'input'}: {one.message}" for one in found]
