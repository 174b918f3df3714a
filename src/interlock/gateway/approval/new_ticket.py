"""New tickets: what a reviewer must know about a call, and what is needed to continue the call.

A ticket shows the reviewer what the call would do: the input without private values, and the tool's own preview.
"""

from __future__ import annotations

from asyncio import Semaphore
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from interlock.approvals import tickets
from interlock.approvals.ticket import Shown, Ticket, chain_of, ticket_id
from interlock.data.canonical import digest
from interlock.gateway import idempotency
from interlock.gateway.approval.waiting_call import WaitingCalls, content_of
from interlock.gateway.preview_diff import predicted_changes
from interlock.store import records

if TYPE_CHECKING:
    from interlock.approvals.tickets import Channels
    from interlock.call.phases import Checked, Decision, Granted
    from interlock.contract.manifest import Approval
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.gateway.persistence.inputs import InputStore
    from interlock.gateway.reviewer_view import ReviewerView
    from interlock.settings import Settings
    from interlock.store.port import Store, Transaction
    from interlock.store.sealing import Box

_FOREVER_MS = 2**53
# How many tickets of one caller are written at a time. Each takes several writes, and others wait for those.
_AT_ONCE = 2


class NewTickets:
    """Finds the tickets of calls, and opens new ones."""

    def __init__(
        self,
        *,
        journal: Store,
        preview: Callable[[Granted], Awaitable[Json]],
        inputs: InputStore,
        view: ReviewerView,
        settings: Settings,
        clock: Clock,
        box: Box,
        waiting: WaitingCalls,
        channels: Channels,
    ) -> None:
        self._journal = journal
        self._preview = preview
        self._inputs = inputs
        self._view = view
        self._settings = settings
        self._clock = clock
        self._box = box
        self._waiting = waiting
        self._channels = channels
        self._writing: WeakValueDictionary[tuple[str, str], Semaphore] = WeakValueDictionary()

    async def find_or_open(self, checked: Checked, decision: Decision, to_preview: Granted) -> Ticket | None:
        """Return the ticket of the call: the one it has, or a new one with a preview.

        None for a call that ran before it needed an approval: its outcome is stored under its idempotency key.
        """
        call, tool = checked, checked.tool
        approval = tool.contract.manifest.approval or self._settings.approval
        ticket = self._unopened(checked, decision, approval)
        scope = idempotency.scope_for(call.request, tool.contract, call.input_hash, call.request.key, call.id)
        ask = partial(
            tickets.ask,
            channels=self._channels,
            keyed=call.request.own_key is not None,
            collects=tool.key_from != "caller",
            timeout_ms=approval.timeout_seconds * 1000,
            most=self._settings.max_waiting,
        )
        turn = self._turn_of(ticket)
        taken = partial(tickets.is_taken, scope=scope)
        async with turn:
            if call.request.own_key is None and call.request.key is not None and await self._journal.commit(taken):
                return None  # its ticket is found by its input, and may be that of another request
            found = await self._journal.commit(ask(ticket))
            if found is not None:
                return found
            if call.request.key is not None and await self._journal.commit(taken):
                return None
        preview = await self._preview(to_preview)
        # The predicted changes are encrypted too: a short value can be guessed from its digest.
        content = {**content_of(checked, self._clock.monotonic()), "promised": predicted_changes(preview)}
        sealed = self._waiting.seal(content, ticket.id)
        shown = Shown(ticket.params, self._view.preview(call, preview)).sealed(self._box, ticket.id)
        ticket = replace(ticket, shown=shown, sealed=sealed)
        sent = await self._inputs.prepare(call, waits=True)

        def unit(transaction: Transaction) -> Ticket | None:
            withheld = self._inputs.withheld(transaction, call, sent)
            asked = ask(replace(ticket, head={**ticket.head, **withheld}))(transaction)
            if asked is not None and asked.id == ticket.id:
                self._inputs.store(transaction, call, sent)
            return asked

        try:
            async with turn:
                opened = await self._journal.commit(unit)
        finally:
            self._inputs.abandon(sent)
        assert opened is not None
        return opened

    def _turn_of(self, ticket: Ticket) -> Semaphore:
        who = (ticket.tenant, ticket.caller)
        turn = self._writing.get(who)
        if turn is None:
            turn = self._writing[who] = Semaphore(_AT_ONCE)
        return turn

    def _unopened(self, checked: Checked, decision: Decision, approval: Approval) -> Ticket:
        call, contract = checked, checked.tool.contract
        caller = call.request.caller
        assert caller is not None
        now_ms = self._clock.now_ms()
        capability = caller.capability
        head = {**records.head(call, now_ms), "kind": "pending"}
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
            scope=idempotency.ticket_scope(call.request, contract, call.input_hash),
            tool=contract.address,
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
