"""Phase 3. Decide whether the caller may make the call: yes, no, or only after a person has approved it.

The strictest of several decisions counts: the token of the caller, the scopes that the tool requires, the hooks, the
policy, and the approval gate that no configuration can open. Caches are consulted only after the token was checked.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from interlock.approvals import mechanism
from interlock.approvals.ticket import Ticket
from interlock.authority.policy import Engine
from interlock.call.context import Caller
from interlock.call.phases import Call, Checked, Decision, FastRead, Granted
from interlock.core.errors import Failure
from interlock.gateway.allowances import Allowances, heeds_suspension
from interlock.gateway.approval.edited_input import EditedInputs
from interlock.gateway.approval.obtain import ApprovalRequests
from interlock.gateway.judge import Judge

if TYPE_CHECKING:
    from interlock.authority.verifier import Verifier
    from interlock.gateway.observe import Observer

_log = logging.getLogger("interlock.gateway")


class Authorizer:
    """Decides about calls. Only this class sets the grant that executors require."""

    def __init__(
        self,
        *,
        grant: object,
        engine: Engine,
        verifier: Verifier,
        approvals: ApprovalRequests,
        allowances: Allowances,
        observer: Observer,
        judge: Judge,
        edited: EditedInputs,
    ) -> None:
        self._grant = grant
        self._engine = engine
        self._verifier = verifier
        self._approvals = approvals
        self._allowances = allowances
        self._loops = allowances.loops
        self._observer = observer
        self._judge = judge
        self._tokens = judge.tokens
        self._covered = judge.tokens.covered
        self._edited = edited

    async def authorize(self, checked: Checked) -> Granted | Ticket:
        """Return a granted call, or the ticket that a person must decide on first. A refusal is raised."""
        call, tool = checked, checked.tool
        caller = call.request.caller
        assert caller is not None
        call.phases.append("authorize")
        more = call.more
        odd = self._loops.seen(caller, tool.ref, call.input_hash, call.started)
        if odd is not None:
            self._observer.alert("RUNAWAY_LOOP", call, what=odd)
        decision = None if tool.writes else self._decision_for_every_call(checked, caller)
        if decision is None:
            decision = await self._decide(checked, caller)
        if decision.behavior == "ask" and not call.request.dry_run:
            found = await self._approvals.obtain(checked, decision, self.to_look(checked))
            call.grant = None
            if found.ticket is not None:
                return found.ticket
            if found.edited is not None:
                checked = await self._edited.apply(checked, found.edited, found.by, found.agreed)
                # The input of the reviewer needs a decision like any other; only the approval is not requested twice.
                decision = await self._decide(checked, caller)
        elif (tool.writes or tool.tier) and not call.request.dry_run:
            more.approval_outcome = mechanism.auto(decision)
        if (
            self._allowances.active
            or (tool.service is not None and heeds_suspension(checked))
            or (caller.capability is not None and caller.capability.constrained)
        ):
            self._allowances.add_uses(checked, caller)
        # Granted: from here on executors run it, or only its preview.
        more.looking = call.request.dry_run
        call.grant = self._grant
        return cast("Granted", checked)

    def check_again(self, granted: Granted) -> None:
        """Check that the token of a call that waited after it was granted is still valid."""
        caller = granted.request.caller
        if caller is not None and caller.capability is not None:
            self._verifier.check(caller.capability)

    def to_look(self, checked: Checked) -> Granted:
        """Grant only the preview of a call, for a reviewer who decides on it."""
        call: Call = checked
        call.more.looking = True
        call.grant = self._grant
        return cast("Granted", call)

    def grant_read(self, read: FastRead) -> Decision | None:
        """Grant a fast-path read that fits its contract. None, and no grant, if the regular phases must decide."""
        caller, tool = read.caller, read.tool
        capability = caller.capability
        if capability is not None:
            if not self._verifier.is_sound(capability, read.started, read.started_ms):
                self._verifier.check(capability)
            if capability.constrained or self._covered.get((capability.digest, tool.digest)) is not False:
                return None
        decision = self._engine.cached_for_every_call(caller, tool.digest, read.started, read.started_ms)
        if decision is None or decision.behavior != "allow" or decision.obligations:
            return None
        read.decision, read.grant = decision, self._grant
        return decision

    def as_granted(self, read: FastRead) -> Granted:
        """Return a fast-path read as a granted call, to continue it in the regular phases."""
        call: Call = read.requested()
        call.grant = read.grant
        return cast("Granted", call)

    def _decision_for_every_call(self, checked: Checked, caller: Caller) -> Decision | None:
        """Return a decision that allows the call whatever its input is; None if there is none. Most reads end here."""
        requested = checked
        call, tool = requested, requested.tool
        if tool.tier or tool.required_scopes or tool.confined:
            return None
        if call.decision is not None or self._observer.has_listeners(call):
            return None
        if caller.capability is not None:
            self._tokens.check(checked, caller.capability)
        decision = self._engine.cached_for_every_call(caller, tool.digest, call.started, call.started_ms)
        if decision is None or decision.behavior != "allow" or decision.obligations:
            return None
        call.decision = decision
        return decision

    async def _decide(self, checked: Checked, caller: Caller) -> Decision:
        """Combine all decisions about the call. A deny is raised."""
        call, decision = checked, await self._judge.decide(checked, caller)
        call.decision = decision
        if self._observer.audience:
            self._observer.emit("tool.permission.decided", call, behavior=decision.behavior, reason=decision.reason)
        if decision.obligations:
            self._fulfil(call, decision)
        if decision.behavior == "deny":
            raise Failure("E3206", f"{call.ref} is not allowed: {decision.reason}", policy_refs=decision.rules)
        return decision

    def _fulfil(self, call: Call, decision: Decision) -> None:
        for obligation in decision.obligations:
            if obligation == "alert":
                self._observer.alert("POLICY_ALERT", call, rules=list(decision.rules))
            elif obligation == "log":
                # At the level of an alert, so that no usual setting of the log leaves it out.
                extra = {"trace_id": call.trace_id, "invocation_id": call.id}
                text = f"{call.ref} in call {call.id}: {decision.behavior}"
                _log.warning("the policy engine asks for a log entry: %s", text, extra=extra)
