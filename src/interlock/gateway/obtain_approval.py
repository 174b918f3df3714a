"""Obtain the approval of a call that needs one: a standing approval, an earlier decision, or a new ticket.

A ticket shows the reviewer what the call would do: the input without private values, and the tool's own preview. What
is needed to continue the call, after a crash or in another process, is stored with the ticket, encrypted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from interlock.approvals import mechanism, standing, tickets
from interlock.approvals.ticket import Shown, Ticket, chain_of, seal, ticket_id
from interlock.approvals.tickets import Channels
from interlock.authority.approval_gate import ASKING_TIER
from interlock.authority.facts import in_normal_form
from interlock.call.capability import Capability, Link, ToolGrant
from interlock.call.context import Caller
from interlock.call.phases import Call, Checked, Decision, Granted, Requested
from interlock.contract.manifest import Approval
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.canonical import decode, digest, encode
from interlock.data.schema import Json
from interlock.gateway import idempotency
from interlock.gateway.observe import Observer
from interlock.gateway.persistence.inputs import InputStore
from interlock.gateway.preview_diff import promised
from interlock.gateway.reviewer_view import ReviewerView
from interlock.settings import Settings
from interlock.store import records
from interlock.store.port import Store, Transaction
from interlock.store.sealing import Box
from interlock.telemetry.trace import Recording

_FOREVER_MS = 2**53
_PURPOSE = "ticket"


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search for an approval: an open ticket, or an approval, perhaps of an edited input."""

    ticket: Ticket | None = None
    edited: Json | None = None
    by: str = ""
    agreed: str | None = None  # digest of the edited input, after the hooks, when it was approved


class Asking:
    """Finds approvals, and opens tickets for calls that have none."""

    def __init__(
        self,
        *,
        journal: Store,
        look: Callable[[Granted], Awaitable[Json]],
        inputs: InputStore,
        observer: Observer,
        view: ReviewerView,
        settings: Settings,
        clock: Clock,
        box: Box,
        channels: Channels,
    ) -> None:
        self._journal = journal
        self._look = look
        self._observer = observer
        self._view = view
        self._settings = settings
        self._clock = clock
        self._box = box
        self._inputs = inputs
        self._channels = channels

    async def seek(self, checked: Checked, decision: Decision, look: Granted) -> Found:
        """Return an approval that the call can use, or its ticket; raises E3209 if the call was denied or timed out.

        `look` is a grant for the preview that a reviewer is shown.
        """
        call = checked
        call.move("awaiting_approval")
        if self._use_standing(checked):
            call.move("approved")
            return Found()
        ticket = await self._ticket(checked, decision, look)
        if ticket is None:
            call.move("approved")
            self._add_use(call, _refuse_used)
            return Found()
        call.extend().approval_outcome = ticket.outcome()
        no = tickets.rejection(ticket)
        if no is not None:
            raise no
        if ticket.state == "PENDING":
            # INVARIANT: a call keeps one id, however often it is sent while a person decides.
            call.id = ticket.call
            if isinstance(call.more.span, Recording):
                call.more.span.event("approval_requested", ticketId=ticket.id, group=ticket.approvers[-1])
            self._observer.emit("tool.permission.requested", call, **ticket.pending())
            return Found(ticket)
        call.move("approved")
        call.extend().approval = ticket.id
        seen = digest(self.opened(ticket).agreed_preview)
        call.extend().agreed = {"approvedBy": ticket.resolved_by, "previewDigest": seen}
        if ticket.state == "USED":
            # It ran, and its outcome is under its key. If the key is free by now, the approval is used up.
            self._add_use(call, _refuse_used)
            return Found()
        call.id = ticket.call
        self._add_use(call, lambda transaction: tickets.use(transaction, ticket, call.id))
        assert ticket.sealed is not None
        agreed = self.unsealed(ticket.sealed if ticket.edited is None else ticket.edited, ticket.id)
        # An edited input has a preview of its own, and the preview of the original input does not apply to it.
        call.extend().promised = {"promised": agreed["promised"]}
        if ticket.edited is None:
            return Found()
        return Found(edited=agreed["arguments"], by=ticket.resolved_by or "", agreed=agreed.get("agreed"))

    def _use_standing(self, checked: Checked) -> bool:
        call, tool = checked, checked.tool
        assert call.request.caller is not None
        if call.request.operation != "invoke":
            return False  # an approval of calls of a tool is none of undoing them
        if call.request.caller.passed_on:
            return False  # nor of requests that others pass on to the caller
        if tool.tier >= ASKING_TIER:
            return False  # every call with full access needs an approval of its own
        found = standing.find(
            self._journal.reader,
            tenant=call.request.caller.tenant,
            caller=call.request.caller.acting,
            tool=str(tool.contract.id),
            version=tool.contract.version,
            arguments=checked.input,
            now_ms=self._clock.now_ms(),
            normal=partial(in_normal_form, tool.contract),
        )
        if found is None:
            return False
        call.extend().approval = found.id
        call.extend().approval_outcome = mechanism.standing(found.id, found.granted_by)
        # Approved in advance, within bounds, without a preview.
        call.extend().agreed = {"approvedBy": found.granted_by, "previewDigest": None}
        self._add_use(call, lambda transaction: standing.use(transaction, found, call.id))
        return True

    def _add_use(self, call: Call, use: Callable[[Transaction], None]) -> None:
        call.extend().uses = [*(call.more.uses or ()), use]

    async def _ticket(self, checked: Checked, decision: Decision, look: Granted) -> Ticket | None:
        """Return the ticket of the call: the one it has, or a new one with a preview.

        None for a call that ran before it needed an approval: its outcome is stored under its idempotency key.
        """
        call, tool = checked, checked.tool
        approval = tool.contract.manifest.approval or self._settings.approval
        wish = self._wish(checked, decision, approval)
        ask = partial(
            tickets.ask,
            channels=self._channels,
            keyed=call.request.key is not None,
            timeout_ms=approval.timeout_seconds * 1000,
            most=self._settings.max_waiting,
        )
        found = await self._journal.commit(ask(wish))
        if found is not None:
            return found
        if call.request.key is not None and await self._journal.commit(
            lambda transaction: tickets.is_taken(transaction, wish.scope)
        ):
            return None
        preview = await self._look(look)
        # The predicted changes are encrypted too: a short value can be guessed from its digest.
        content = {**_content(checked, self._clock.monotonic()), "promised": promised(preview)}
        sealed = self.seal_up(encode(content), wish.id)
        shown = Shown(wish.params, self._view.preview(call, preview)).sealed(self._box, wish.id)
        wish = replace(wish, shown=shown, sealed=sealed)
        sent = await self._inputs.prepare(call, waits=True)

        def unit(transaction: Transaction) -> Ticket | None:
            withheld = self._inputs.withheld(transaction, call, sent)
            asked = ask(replace(wish, head={**wish.head, **withheld}))(transaction)
            if asked is not None and asked.id == wish.id:
                self._inputs.store(transaction, call, sent)
            return asked

        try:
            opened = await self._journal.commit(unit)
        finally:
            self._inputs.abandon(sent)
        assert opened is not None
        return opened

    def _wish(self, checked: Checked, decision: Decision, approval: Approval) -> Ticket:
        call, contract = checked, checked.tool.contract
        caller = call.request.caller
        assert caller is not None
        now_ms = self._clock.now_ms()
        capability = caller.capability
        head = records.head("pending", call, now_ms)
        head |= {"states": call.states[:-1], "phases": call.phases, "policy": decision.policy, "rules": decision.rules}
        head["decision"] = records.decided(decision, looking=False)
        if call.more.mutations:
            head["inputMutations"] = records.mutated(call)
        if call.more.hook_outputs:
            head["hookOutputs"] = call.more.hook_outputs
        if capability is not None and len(capability.links) > 1:
            head["onBehalfOf"] = [link.subject for link in capability.links[:-1]]
        return Ticket(
            id=ticket_id(now_ms, self._clock.random_bytes(8)),
            call=call.id,
            scope=idempotency.scope_for(call.request, contract, call.input_hash),
            tool=str(contract.id),
            version=contract.version,
            operation=call.request.operation,
            tenant=caller.tenant,
            caller=caller.id,
            requester=caller.acting,
            digest=digest(dict(checked.input)),
            policy=decision.policy,
            reason=decision.reason,
            chain=chain_of(approval),
            shown=Shown(self._view.input(call, checked.input), {}),
            head=head,
            sealed=None,
            # A ticket does not outlive the caller's token.
            expires_ms=_FOREVER_MS if capability is None else capability.leaf.expires * 1000,
        )

    def seal_up(self, content: bytes, ticket_id: str) -> bytes:
        return self._box.seal(content, purpose=_PURPOSE, about=ticket_id)

    def opened(self, ticket: Ticket) -> Ticket:
        """Return a ticket with its decrypted contents."""
        return ticket.opened(self._box)

    def seal_edit(self, ticket_id: str, shown: Json, names: list[str], preview: Json) -> bytes:
        """Return an edit by a reviewer as the store keeps it, encrypted."""
        return seal(self._box, ticket_id, "changed", {"params": shown, "names": names, "preview": preview})

    def unsealed(self, sealed: bytes, ticket_id: str) -> Json:
        return decode(self._box.open(sealed, purpose=_PURPOSE, about=ticket_id))


def _refuse_used(_: Transaction) -> None:
    raise Failure("E3410", "the approval was used; send the call again to ask for a new one", retry_after_ms=10)


def _content(requested: Requested, now: float) -> Json:
    """Return everything that is needed to continue a call in another process."""
    request = requested.request
    assert request.caller is not None
    return {
        "tool": request.tool,
        "version": requested.tool.contract.version,
        "arguments": decode(requested.model_input),
        "key": request.key,
        "session": request.session,
        "trace_id": requested.trace_id,
        # The time spent waiting does not count against the deadline.
        "timeout_s": max(0.001, requested.deadline - now),
        "operation": request.operation,
        "native": None if request.native is None else dict(request.native),
        "parent": request.parent,
        "door": request.door,
        "task": request.task,
        "caller": _caller_document(request.caller),
    }


def _caller_document(caller: Caller) -> Json:
    facts: Json = {
        "id": caller.id, "tenant": caller.tenant, "agent": caller.agent, "scopes": sorted(caller.scopes),
        "kind": caller.kind, "trust": caller.trust, "groups": sorted(caller.groups), "capability": None,
        "passed_on": caller.passed_on,
    }  # fmt: skip
    capability = caller.capability
    if capability is not None:
        links = [
            {
                "jti": link.jti, "subject": link.subject, "scopes": sorted(link.scopes),
                "tools": [[grant.tool, grant.versions] for grant in link.tools], "not_before": link.not_before,
                "expires": link.expires, "resources": link.resources, "constraints": dict(link.constraints),
            }
            for link in capability.links
        ]  # fmt: skip
        facts["capability"] = {
            "digest": capability.digest, "issuer": capability.issuer, "links": links, "keys": capability.keys,
            "within": capability.within,
        }  # fmt: skip
    return facts


def stored_caller(facts: Json) -> Caller:
    """Return the caller of a call that waited, as they were when they made it."""
    found: Json | None = facts["capability"]
    capability = None
    if found is not None:
        links = tuple(_stored_link(link) for link in found["links"])
        within = found.get("within")
        capability = Capability(
            digest=found["digest"], issuer=found["issuer"], links=links, keys=tuple(found["keys"]),
            within=None if within is None else tuple(within),
        )  # fmt: skip
    return Caller(
        id=facts["id"], tenant=facts["tenant"], agent=facts["agent"], scopes=frozenset(facts["scopes"]),
        kind=facts["kind"], trust=facts["trust"], groups=frozenset(facts["groups"]), capability=capability,
        passed_on=facts.get("passed_on", False),
    )  # fmt: skip


def _stored_link(facts: Json) -> Link:
    return Link(
        jti=facts["jti"],
        subject=facts["subject"],
        scopes=frozenset(facts["scopes"]),
        tools=tuple(ToolGrant(tool, versions) for tool, versions in facts["tools"]),
        not_before=facts["not_before"],
        expires=facts["expires"],
        resources=None if facts["resources"] is None else tuple(facts["resources"]),
        constraints=facts["constraints"],
    )
