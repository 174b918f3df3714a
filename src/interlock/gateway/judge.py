"""Decides about calls, whether they are made or not: their token, the policy, the approval gate, required scopes.

Authorize acts on what it says, for calls that are made. A `CallCheck` asks it, and the allowances, about a call that is
not: nothing is recorded, reported or used up. The pre-hooks do not run for that, because they may do anything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from interlock.authority.approval_gate import Gate, gate
from interlock.authority.policy import Engine, Question
from interlock.call.phases import Call, Checked, Decision, stricter
from interlock.core.clock import new_id
from interlock.gateway.allowances import check_uses

if TYPE_CHECKING:
    from interlock.authority.verifier import Verifier
    from interlock.call.context import Caller
    from interlock.call.phases import Request
    from interlock.call.prepared import Prepared, ToolFacts
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.gateway.allowances import Allowances
    from interlock.gateway.caller_tokens import CallerTokens
    from interlock.gateway.redaction import CallRedaction
    from interlock.settings import Settings
    from interlock.store.port import Transaction

_NO_BUDGET = (0, 0)
_MOST_GATES = 10_000


class Judge:
    """Decides about calls. It grants nothing."""

    def __init__(
        self,
        *,
        engine: Engine,
        verifier: Verifier,
        redaction: CallRedaction,
        allowances: Allowances,
        settings: Settings,
    ) -> None:
        self._engine = engine
        self._verifier = verifier
        self._redaction = redaction
        self._allowances = allowances
        self._environment = settings.environment
        self._gate = Gate.of(settings)
        self._gates: dict[tuple[Decision, str, int], Decision] = {}

    @cached_property
    def tokens(self) -> CallerTokens:
        """The checks of callers' tokens. Most commands are given without one."""
        from interlock.gateway.caller_tokens import CallerTokens

        return CallerTokens(self._verifier, self._redaction, self._environment)

    async def decide(self, checked: Checked, caller: Caller, *, whole: bool = True) -> Decision:
        """Check that the caller's token covers the call, and that the tool may use the paths in its input. Return the
        strictest of the decisions about the call; nothing comes of it yet.

        If its input is not `whole`, nothing is said about the resources and paths in it.
        """
        requested = checked
        if caller.capability is not None:
            if whole:
                self.tokens.check(checked, caller.capability)
            else:
                self.tokens.check_tool(requested.tool, caller.capability)
        if whole and requested.tool.confined:
            self.tokens.check_paths(checked)
        call, tool = requested, requested.tool
        decision = None
        if call.decision is None:  # otherwise time may have passed since the call began
            decision = self._engine.cached_for_every_call(caller, tool.digest, call.started, call.started_ms)
        if decision is None:
            question = await self._question(checked, caller)
            decision = self._engine.cached(question)
            if decision is None:
                decision = await self._engine.decide(question)
        if tool.writes or tool.tier:
            # What the approval gate adds is the same for every call of a tool.
            gated = self._gates.get((decision, tool.digest, caller.trust))
            decision = gated or self._gated(decision, tool, caller.trust)
        if call.decision is not None:
            # A ticket is bound to the policy in force, also if something else decided.
            decision = replace(stricter(call.decision, decision), policy=decision.policy)
        if tool.required_scopes and not caller.scopes.issuperset(tool.required_scopes):
            decision = _lacking(tool, caller, decision)
        if decision.behavior == "passthrough":
            decision = replace(decision, behavior="ask", reason="nobody settled it, so a person must")
        if decision.blocked_path is not None and not self.tokens.can_name(call, decision.blocked_path):
            decision = replace(decision, blocked_path=None)
        return decision

    def _gated(self, decision: Decision, tool: Prepared, trust: int) -> Decision:
        """Return the decision with what the approval gate adds to it, and remember it."""
        if len(self._gates) > _MOST_GATES:
            self._gates.clear()
        asked = gate(decision, tool.contract, trust=trust, settings=self._gate, tier=tool.tier)
        gated = self._gates[decision, tool.digest, trust] = asked or decision
        return gated

    async def _question(self, checked: Checked, caller: Caller) -> Question:
        """Return the question to the engine: everything that a rule may read of a call."""
        tool, request = checked.tool, checked.request
        return Question(
            caller, tool.contract, tool.digest, checked.input, "preview" if request.dry_run else request.operation,
            request.session, request.door,
            None if request.native is None else str(request.native.get("operation_id", "")) or None,
            await self._allowances.spent_and_left(checked, caller) if self._allowances.active else _NO_BUDGET,
            checked.started_ms,
        )  # fmt: skip


def _lacking(tool: Prepared, caller: Caller, decision: Decision) -> Decision:
    lacking = sorted(set(tool.required_scopes) - caller.scopes)
    words = f"missing scope {', '.join(lacking)}"
    return Decision(behavior="deny", reason=words, rules=(), policy=decision.policy, source="scopes")


class CallCheck:
    """A call that is not made, and its checks. Each of them raises the failure of a call that would be refused.

    `arguments` are converted and have their defaults. While some are missing, nothing is said about the resources and
    paths that the call will name.
    """

    def __init__(
        self, judge: Judge, allowances: Allowances, request: Request, tool: ToolFacts, arguments: Json, clock: Clock
    ) -> None:
        assert request.caller is not None
        now_ms = clock.now_ms()
        call = Call(new_id(now_ms, clock.random_bytes(8)), "", now_ms, clock.monotonic(), request)
        call.extend()
        call.tool, call.input = cast("Prepared", tool), arguments  # nothing here reads more of it
        self._call = cast("Checked", call)
        self._caller = request.caller
        self._judge = judge
        self._allowances = allowances
        self._whole = arguments.keys() >= set(tool.contract.input.document.get("required", ()))

    async def decide(self) -> Decision:
        """Return the decision about the call, which may be a deny."""
        return await self._judge.decide(self._call, self._caller, whole=self._whole)

    def token(self, transaction: Transaction) -> None:
        """Check that the token of the caller has a use left."""
        if self._caller.capability is not None:
            check_uses(transaction, self._caller.capability)

    def cost(self, transaction: Transaction) -> bool:
        """Check that every budget has room. Return whether there is one."""
        return self._allowances.check_budgets(transaction, self._call, self._caller)

    def rate(self, transaction: Transaction) -> bool:
        """Check that every rate limit has room. Return whether there is one."""
        return self._allowances.check_rate(transaction, self._call, self._caller)
