"""Review: list what waits for approval, approve it or deny it.

Reviewers decide here, through the command line or an endpoint; no call can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.approvals import tickets
from interlock.approvals.reviewers import can_be_alone, is_alone, state_alone
from interlock.approvals.standing import end_own
from interlock.approvals.tickets import Channels, Edit, Happening, Refused
from interlock.authority.facts import resources_of
from interlock.call.phases import Call, Request
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.gateway import token_checks
from interlock.gateway.allowances import uses_of
from interlock.gateway.approval.sweep import sweep
from interlock.gateway.approval.waiting_call import WaitingCalls, stored_caller
from interlock.gateway.preview_diff import predicted_changes

if TYPE_CHECKING:
    from interlock.approvals.ticket import Ticket
    from interlock.call.context import Caller
    from interlock.gateway.invoke import Gateway
    from interlock.registry.catalog import Catalog
    from interlock.settings import Settings
    from interlock.store.port import Store, Transaction


class Reviews:
    """The tickets of one data directory, and the decisions on them."""

    def __init__(
        self,
        *,
        gateway: Gateway,
        waiting: WaitingCalls,
        journal: Store,
        catalog: Catalog,
        settings: Settings,
        channels: Channels,
    ) -> None:
        self._gateway = gateway
        self._view = gateway.reviewer_view
        self._waiting = waiting
        self._journal = journal
        self._catalog = catalog
        self._settings = settings
        self._channels = channels

    async def list(self, *, every: bool = False) -> list[Ticket]:
        """Return the tickets that wait for a decision, oldest first; or every ticket, newest first."""
        found = await self._journal.read(lambda reader: tickets.listing(reader, every=every))
        return [self._waiting.open(ticket) for ticket in found]

    async def show(self, ticket_id: str, *, by: Caller | None = None) -> Ticket:
        """Return one ticket, by its id or the beginning of it. `by` only limits what a refusal says."""
        return self._waiting.open(await self._journal.read(lambda reader: tickets.load(reader, ticket_id, by)))

    async def approve(
        self, ticket_id: str, *, by: Caller, comment: str = "", edit: Mapping[str, Any] | None = None
    ) -> Ticket:
        """Approve one call. With `edit`, that call with these arguments changed; None removes an argument."""
        # A person's own token limits what they can approve, and approving is a use of it.
        outside = await self._outside(ticket_id, by, edit or {})
        changed = None if edit is None else await self._edit(ticket_id, by, edit, outside)
        return await self._resolve(ticket_id, by, approve=True, comment=comment, edit=changed, outside=outside)

    async def deny(self, ticket_id: str, *, by: Caller, comment: str = "") -> Ticket:
        """Deny one call. Everybody who may approve it may deny it, however narrow their token is."""
        await self.show(ticket_id, by=by)  # a ticket that cannot be decrypted cannot be decided on
        return await self._resolve(ticket_id, by, approve=False, comment=comment)

    async def withdraw(self, call_id: str, *, by: Caller) -> bool:
        """Withdraw a call that waits for approval, or was approved and has not run. False if there is none."""
        ticket = await self._journal.commit(tickets.withdraw(call_id, by.acting))
        if ticket is None:
            return False
        self._gateway.observer.mention("tool.invocation.cancel_requested", call_id, ticket.ref, answer="canceled")
        return True

    async def sweep(self) -> list[Happening]:
        """Deny tickets that have timed out, and escalate those that wait too long."""
        return await sweep(self._journal, self._channels, self._gateway.observer)

    async def is_alone(self, by: Caller) -> bool:
        """Whether a local person has stated that nobody else decides on this machine."""
        return await self._journal.read(lambda reader: is_alone(reader, by))

    async def must_leave(self, by: Caller) -> bool:
        """Whether this is a local person who has to leave decisions on their own calls to others."""
        return can_be_alone(by) and not await self.is_alone(by)

    async def state_alone(self, *, by: Caller, alone: bool, reason: str) -> list[str]:
        """Record that a local person decides alone on this machine, or no longer does.

        Returns the standing approvals of their own calls that end with that.
        """
        if not can_be_alone(by):
            raise Failure("E3206", "only a person at the command line of this machine can state that they are alone")

        def unit(transaction: Transaction) -> list[str]:
            state_alone(by, alone=alone, reason=reason)(transaction)
            return [] if alone else end_own(transaction, by)

        return await self._journal.commit(unit)

    async def _resolve(self, ticket_id: str, by: Caller, *, approve: bool, **decision: Any) -> Ticket:
        uses = uses_of(by.capability) if approve and by.capability is not None else ()
        decision["comment"] = self._view.comment(decision["comment"])
        four_eyes = self._settings.four_eyes
        unit = tickets.resolve(ticket_id, by, approve=approve, uses=uses, four_eyes=four_eyes, **decision)
        found = self._waiting.open(_allowed(await self._journal.commit(unit)))
        self._gateway.observer.announce(f"approval.{found.state.lower()}", found.call, found.ref, **found.pending())
        return found

    async def _outside(self, ticket_id: str, by: Caller, edit: Mapping[str, Any]) -> Failure | None:
        """Return why a waiting call, as the reviewer would approve it, exceeds what their own token covers."""
        capability, ticket = by.capability, await self.show(ticket_id, by=by)
        if capability is None:
            return None
        try:
            contract = (await self._catalog.resolve(ticket.tool, ticket.version)).contract
            token_checks.check_tool(capability, contract, self._settings.environment)
            token_checks.check_cost(capability, contract)
            if capability.bound and ticket.sealed is not None:
                request = self._waiting.request(ticket)
                merged = replace(request, arguments=_merged(request.arguments, edit))
                checked = await self._gateway.checked(merged)
                found = resources_of(contract, checked.input)
                token_checks.check_resources(capability, contract, found)
        except Failure as failure:
            return failure
        return None

    async def _edit(self, ticket_id: str, by: Caller, edit: Mapping[str, Any], outside: Failure | None) -> Edit:
        """Return the input as the reviewer edits it, checked and previewed like any input before it is approved."""
        # INVARIANT: only a person who may decide learns what a check says about a private input.
        four_eyes = self._settings.four_eyes
        ticket = _allowed(await self._journal.commit(tickets.consider(ticket_id, by, outside, four_eyes)))
        if ticket.operation != "invoke":
            raise Failure("E3411", "what an undo does follows from the call it undoes; agree to it as it is or deny it")
        assert ticket.sealed is not None
        content = self._waiting.unseal(ticket.sealed, ticket.id)
        arguments = _merged(content["arguments"], edit)
        caller = stored_caller(content["caller"])
        key = content["key"]
        # Events of hooks that run on the edit are those of the waiting call.
        request = Request(
            tool=ticket.tool, version=ticket.version, arguments=arguments, caller=caller, key=key, id=ticket.call
        )
        # INVARIANT: nobody approves what they were not shown; a call without a preview is not approved.
        checked = await self._gateway.checked(request)
        # The preview runs under an id of its own: somebody else may agree meanwhile, and the call itself may run.
        checked.id = self._gateway.with_id(request).id or ""
        call, agreed = checked, checked.input
        was: Json = content["arguments"]
        names = [name for name in sorted(was.keys() | arguments.keys()) if was.get(name) != arguments.get(name)]
        _refuse_overruled(call, names)
        preview, seen = await self._gateway.foresee(checked)
        whole = {"arguments": arguments, "agreed": digest(agreed), "promised": predicted_changes(preview)}
        shown = self._view.input(call, agreed)
        changed = self._waiting.seal_edit(ticket.id, shown, names, seen)
        return Edit(self._waiting.seal(whole, ticket.id), changed, digest(agreed), names)


def _merged(arguments: Mapping[str, Any], edit: Mapping[str, Any]) -> Json:
    """Return arguments with some changed; None removes one."""
    merged = {**arguments, **edit}
    return {name: value for name, value in merged.items() if not (value is None and name in edit)}


def _refuse_overruled(call: Call, names: Sequence[str]) -> None:
    """Refuse (E3211) an edit if a hook changes the very arguments that the reviewer wrote."""
    for change in call.more.mutations:
        kind, _, hook = change.source.partition(":")
        name = change.pointer.removeprefix("/").split("/")[0].replace("~1", "/").replace("~0", "~")
        if kind == "hook" and name in names:
            raise Failure(
                "E3211",
                f"hook `{hook}` changes `{name}`, which your edit sets, so what would run is not what you wrote",
                resolution=f"write `{name}` in a form that the hook keeps, leave it as it was, or deny the call",
            )


def _allowed(looked_up: Ticket | Refused) -> Ticket:
    if isinstance(looked_up, Refused):
        raise looked_up.failure
    return looked_up
