"""The last stage of a selection: whether the caller may make the call that was chosen.

    authorization   the token, the policy and the approval gate, as for a call that is made
    safety          operations in the parameters that destroy much at once
    cost            budgets per call, session, task, caller and tenant that have no room for what the call costs
    rate            limits on calls in a window that ends now

The strictest answer counts. Nothing is used up: the call itself passes all phases again when it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import orjson

from interlock.api.policy import arguments_of
from interlock.call.phases import Request
from interlock.call.prepared import ToolFacts
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.threads import WALKS
from interlock.resilience import limits
from interlock.selection.dangers import dangers

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.gateway.judge import CallCheck
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


class SelectionGate:
    """The gate for one call. `look` decides what needs no transaction; `decide` completes it within one."""

    def __init__(self, parts: Parts, version: Version, caller: Caller, session: str, task: str) -> None:
        self._parts = parts
        self._version = version
        self._caller = caller
        self._session = session
        self._task = task
        self._findings: list[Finding] = []
        # None where the call cannot be made at all.
        self._call: CallCheck | None = None

    async def look(self, arguments: Json, door: str) -> None:
        """Check authorization and safety."""
        self._findings = [await self._authorization(arguments, door), await WALKS.run(self._safety, arguments)]

    def decide(self, transaction: Transaction) -> GateVerdict:
        """Check cost and rate, and return the strictest answer of all. Writes nothing."""
        findings = [*self._findings]
        if self._call is not None:
            if findings[0].answer != "DENY":
                findings[0] = self._token(self._call, transaction) or findings[0]
            findings.append(_room("cost", "budget", self._call.cost, transaction))
            findings.append(_room("rate", "limit", self._call.rate, transaction))
        worst = max(findings, key=lambda one: _RANK[one.answer])
        approval = self._version.contract.manifest.approval or self._parts.settings.approval
        timeout_s = approval.timeout_seconds if worst.answer == "REQUIRE_APPROVAL" else None
        return GateVerdict(worst.answer, worst.reason, worst.check, timeout_s, tuple(findings))

    async def _authorization(self, arguments: Json, door: str) -> Finding:
        try:
            self._call = await self._checked(arguments, door)
            decision = await self._call.decide()
        except Failure as failure:
            return Finding("authorization", "DENY", failure.message)
        return Finding("authorization", _ANSWERS.get(decision.behavior, "REQUIRE_APPROVAL"), decision.reason)

    async def _checked(self, arguments: Json, door: str) -> CallCheck:
        parts, caller = self._parts, self._caller
        address, number = self._version.row.address, self._version.contract.version
        # While a model chose, the version may have been retired or put in quarantine.
        version = await parts.catalog.resolve(address, number, caller.capability, caller)
        parts.quarantine.check(version.row.digest, version.contract.ref, parts.clock.monotonic())
        request = Request(address, arguments, caller, version=number, session=self._session, task=self._task, door=door)
        filled = arguments_of(version.contract, arguments)
        return parts.check_of(request, ToolFacts(version.contract, version.row.digest), filled)

    @staticmethod
    def _token(call: CallCheck, transaction: Transaction) -> Finding | None:
        """Return a finding where the token of the caller is used up."""
        try:
            call.token(transaction)
        except Failure as failure:
            return Finding("authorization", "DENY", failure.message)
        return None

    def _safety(self, arguments: Json) -> Finding:
        found = dangers(arguments)
        if not found:
            return Finding("safety", "ALLOW", "no dangerous operation was found")
        answer: Answer = "DENY" if self._parts.settings.selection_dangers == "deny" else "REQUIRE_APPROVAL"
        return Finding("safety", answer, f"the parameters hold {', '.join(found)}")


def _room(check: Check, bound: str, look: Callable[[Transaction], bool], transaction: Transaction) -> Finding:
    """Return the finding of a check that knows whether any bound covers the call."""
    try:
        return Finding(check, "ALLOW", f"every {bound} has room" if look(transaction) else f"there is no {bound}")
    except Failure as failure:
        return Finding(check, "DENY", failure.message)


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
