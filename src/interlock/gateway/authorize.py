"""Phase 3. The caller's authority covers the call, or a person must agree first, or the answer is no.

Several voices are heard, and the strictest wins: the token the caller came with, the scopes the tool requires, the
hooks, the policy, and the gate that no configuration can open. Caches are consulted only after the token was checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from interlock.approvals import mechanism
from interlock.approvals.ticket import Ticket
from interlock.authority.approval_gate import Gate, gate
from interlock.authority.facts import as_written
from interlock.authority.policy import Engine, Question
from interlock.authority.verifier import Verifier
from interlock.call.capability import Capability
from interlock.call.context import Caller
from interlock.call.phases import Call, Checked, Decision, Granted, Read, Requested
from interlock.call.prepared import Prepared
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.canonical import digest, private_copy
from interlock.data.schema import Json
from interlock.gateway import token_checks, validate
from interlock.gateway.allowances import Allowances
from interlock.gateway.hooks import Hooks, stricter
from interlock.gateway.inputs import difference
from interlock.gateway.observe import Observer
from interlock.gateway.obtain_approval import Asking
from interlock.settings import Settings

_MOST_COVERED = 50_000
# Up to what size of input the resources of a call are recorded for tokens that are bound to resources, and how many.
_LARGEST_NAMED = 16_384
_MOST_NAMED = 100
_LONGEST_PATH = 4096
_NO_BUDGET = (0, 0)


class Authorizer:
    """Decides, and seals what it grants."""

    def __init__(
        self,
        *,
        seal: object,
        engine: Engine,
        verifier: Verifier,
        asking: Asking,
        allowances: Allowances,
        observer: Observer,
        hooks: Hooks,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._hooks = hooks
        self._seal = seal
        self._engine = engine
        self._verifier = verifier
        self._asking = asking
        self._allowances = allowances
        self._loops = allowances.loops
        self._observer = observer
        self._environment = settings.environment
        self._gate = Gate.of(settings)
        self._clock = clock
        # Tokens and tools that were found to go together, and whether the token is bound to resources as well.
        self._covered: dict[tuple[str, str], bool] = {}

    async def authorize(self, checked: Checked) -> Granted | Ticket:
        """A grant, or the ticket that a person must decide on first; raises when the answer is no."""
        call, tool = checked, checked.tool
        caller = call.request.caller
        assert caller is not None
        call.phases.append("authorize")
        odd = self._loops.seen(caller, tool.ref, call.input_hash, call.started)
        if odd is not None:
            self._observer.alert("RUNAWAY_LOOP", call, what=odd)
        decision = self._plainly(checked, caller) or await self._decide(checked, caller)
        if decision.behavior == "ask" and not call.request.dry_run:
            look = self._grant(checked, looking=True)
            found = await self._asking.seek(checked, decision, look)
            call.seal = None
            if found.ticket is not None:
                return found.ticket
            if found.edited is not None:
                checked = await self._edited(checked, found.edited, found.by, found.agreed)
                # What the reviewer wrote is judged like anything else; only the agreement is not asked for twice.
                decision = await self._decide(checked, caller)
        elif (tool.writes or tool.tier) and not call.request.dry_run:
            call.extend().approval_outcome = mechanism.auto(decision)
        if self._allowances.needed(checked, caller):
            self._allowances.claim(checked, caller)
        return self._grant(checked, looking=call.request.dry_run)

    def _grant(self, checked: Checked, *, looking: bool) -> Granted:
        """Seal a call: from here on executors run it, or only its preview."""
        call: Call = checked
        if looking or call.more.looking:
            call.extend().looking = looking
        call.seal = self._seal
        return cast("Granted", call)

    def to_look(self, checked: Checked) -> Granted:
        """A grant that is good for nothing but a preview, which a reviewer wants to see before they agree."""
        return self._grant(checked, looking=True)

    def clear(self, read: Read) -> Decision | None:
        """Seal a plain read that fits its contract. None, and no seal, where anything has to be looked at closely."""
        caller, tool = read.caller, read.tool
        capability = caller.capability
        if capability is not None:
            if not self._verifier.is_sound(capability, read.started, read.started_ms):
                self._verifier.check(capability)
            if capability.constrained or self._covered.get((capability.digest, tool.digest)) is not False:
                return None
        decision = self._engine.plain(caller, tool.digest, read.started, read.started_ms)
        if decision is None or decision.behavior != "allow" or decision.obligations:
            return None
        read.decision, read.seal = decision, self._seal
        return decision

    def grant(self, read: Read) -> Granted:
        """The grant of a plain read that turned out not to be so plain."""
        assert read.decision is not None
        call: Call = read.requested()
        call.seal = read.seal
        return cast("Granted", call)

    def _plainly(self, checked: Checked, caller: Caller) -> Decision | None:
        """An allow that nothing about this very call can change. Nearly all reads end here."""
        requested = checked
        call, tool = requested, requested.tool
        if tool.writes or tool.tier or tool.required_scopes or tool.confined:
            return None
        if call.decision is not None or self._observer.heard(call):
            return None
        if caller.capability is not None:
            self._check_token(checked, caller.capability)
        decision = self._engine.plain(caller, tool.digest, call.started, call.started_ms)
        if decision is None or decision.behavior != "allow" or decision.obligations:
            return None
        call.decision = decision
        return decision

    async def _decide(self, checked: Checked, caller: Caller) -> Decision:
        """What all the voices together say; a deny is raised."""
        requested = checked
        call, tool, request = requested, requested.tool, requested.request
        if caller.capability is not None:
            self._check_token(checked, caller.capability)
        if tool.confined:
            try:
                token_checks.check_paths(tool, checked.input)
            except token_checks.BlockedPath as failure:
                self._block(checked, failure, "permissions")
                raise
        operation = "preview" if request.dry_run else request.operation
        question = Question(
            caller, tool.contract, tool.digest, checked.input, operation, request.session, request.door,
            None if request.native is None else str(request.native.get("operation_id", "")) or None,
            self._allowances.spent_and_left(call, caller) if self._allowances.active else _NO_BUDGET, call.started_ms,
        )  # fmt: skip
        decision = self._engine.cached(question)
        if decision is None:
            decision = await self._engine.decide(question)
        if tool.writes or tool.tier:
            asked = gate(decision, tool.contract, trust=caller.trust, settings=self._gate, tier=tool.tier)
            decision = asked or decision
        if call.decision is not None:
            # Whoever else spoke, a ticket is bound to the policy in force.
            decision = replace(stricter(call.decision, decision), policy=decision.policy)
        if tool.required_scopes and not caller.scopes.issuperset(tool.required_scopes):
            decision = _lacking(tool, caller, decision)
        if decision.behavior == "passthrough":
            decision = replace(decision, behavior="ask", reason="nobody settled it, so a person must")
        if decision.blocked_path is not None and not self._can_name(call, decision.blocked_path):
            decision = replace(decision, blocked_path=None)
        call.decision = decision
        if self._observer.heard(call):
            self._observer.emit("tool.permission.decided", call, behavior=decision.behavior, reason=decision.reason)
        if decision.obligations:
            self._fulfil(call, decision)
        if decision.behavior == "deny":
            raise Failure("E3206", f"{tool.ref} is not allowed: {decision.reason}", policy_refs=decision.rules)
        return decision

    def _check_token(self, checked: Checked, capability: Capability) -> None:
        """The token is good now, and every link of its chain covers this tool, version and resource."""
        tool = checked.tool
        self._verifier.check(capability)
        known = (capability.digest, tool.digest)
        bound = self._covered.get(known)
        if bound is None or capability.within is not None:
            token_checks.check_tool(capability, tool.contract, self._environment)
            bound = capability.bound
            if capability.within is None:  # what the call above was about says nothing of the token itself
                if len(self._covered) > _MOST_COVERED:
                    self._covered.clear()
                self._covered[known] = bound
        if bound:
            found = token_checks.resources_of(tool.contract, checked.input)
            self._note_resources(checked, found)
            try:
                token_checks.check_resources(capability, tool.contract, found)
            except token_checks.BlockedPath as failure:
                self._block(checked, failure, "token")
                raise
        elif tool.writes:
            self._note_resources(checked)

    def _block(self, checked: Checked, failure: token_checks.BlockedPath, source: str) -> None:
        """Have it recorded which path was refused, and by what."""
        call, contract = checked, checked.tool.contract
        path = as_written(contract, checked.input, failure.path)
        call.decision = Decision(
            behavior="deny",
            reason=failure.message,
            rules=(),
            policy="",
            source=source,
            blocked_path=path if self._can_name(call, path) else None,
        )

    def _can_name(self, call: Call, path: str) -> bool:
        """Whether a path may be recorded: it is as long as a path can be, and holds nothing private."""
        return len(path) <= _LONGEST_PATH and self._observer.resources(call, (path,)) is not None

    def _note_resources(self, checked: Checked, found: Sequence[str] | None = None) -> None:
        """Have the resources of a call recorded, so that tokens below this one see it only where they cover them.

        A call without them is there only for tokens that are not bound to resources.
        """
        call = checked
        if found is None and len(checked.model_input) <= _LARGEST_NAMED:
            try:
                found = token_checks.resources_of(checked.tool.contract, checked.input)
            except Failure:
                found = None  # this token is not bound to resources, so nothing is refused
        call.extend().resources = self._observer.resources(call, found) if found and len(found) <= _MOST_NAMED else None

    def _fulfil(self, call: Call, decision: Decision) -> None:
        for obligation in decision.obligations:
            if obligation == "alert":
                self._observer.alert("POLICY_ALERT", call, rules=list(decision.rules))

    async def _edited(self, checked: Checked, edited: Json, by: str, agreed: str | None) -> Checked:
        """The input as the reviewer left it: checked like the caller's own, with every difference on record.

        The hooks see it as they saw the caller's own input. `agreed` is the digest of what they made of it when the
        reviewer agreed.
        """
        requested = cast("Requested", checked)
        call, before = requested, checked.input
        told = len(call.more.mutations)
        arguments = validate.check_input(requested, private_copy(edited))
        del call.extend().mutations[told:]
        await self._check_meaning(checked, arguments)
        if self._hooks.registered:
            written, arguments = arguments, await self._hooks.before(requested, arguments, reviewer=by)
            if arguments != written:
                await self._check_meaning(checked, arguments)
        # INVARIANT: what runs is what the reviewer was shown.
        if agreed is not None and digest(arguments) != agreed:
            raise Failure(
                "E3211",
                "hooks make something else of the reviewer's input now than when the reviewer agreed to it",
                resolution="send the call again under a new key, so that a person decides anew",
            )
        # It is compared as a whole. What was converted or filled in of the reviewer's input is the reviewer's too.
        hooked = {change.pointer: change.source for change in call.more.mutations[told:]}
        changes = difference(f"reviewer:{by}", before, arguments)
        call.extend().mutations[told:] = [one._replace(source=hooked.get(one.pointer, one.source)) for one in changes]
        call.input = arguments
        return checked

    async def _check_meaning(self, checked: Checked, arguments: Json) -> None:
        requested = checked
        if requested.tool.has_checks:
            await validate.check_meaning(requested.tool, arguments, requested.deadline - self._clock.monotonic())


def _lacking(tool: Prepared, caller: Caller, decision: Decision) -> Decision:
    lacking = sorted(set(tool.required_scopes) - caller.scopes)
    words = f"missing scope {', '.join(lacking)}"
    return Decision(behavior="deny", reason=words, rules=(), policy=decision.policy, source="scopes")
