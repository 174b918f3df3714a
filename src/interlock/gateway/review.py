"""Review: list what waits for approval, approve or deny it, and continue what was approved.

Reviewers decide here, through the command line or an endpoint; no call can. Continuing an approved call is an ordinary
call with the same id: it passes all six phases again, with the authority that its caller has now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from interlock.approvals import standing, tickets
from interlock.approvals.reviewers import is_alone, is_person, state_alone
from interlock.approvals.standing import Standing
from interlock.approvals.ticket import Ticket
from interlock.approvals.tickets import Channels, Edit, Happening, Refused
from interlock.authority.approval_gate import ASKING_TIER
from interlock.call.context import Caller
from interlock.call.phases import Call, Request
from interlock.call.results import Result
from interlock.core.clock import Clock, new_id
from interlock.core.errors import Failure
from interlock.data.canonical import digest, encode
from interlock.data.schema import Json
from interlock.gateway import token_checks
from interlock.gateway.allowances import uses_of
from interlock.gateway.invoke import Gateway
from interlock.gateway.obtain_approval import Asking, stored_caller
from interlock.gateway.preview_diff import promised
from interlock.registry.catalog import Catalog
from interlock.settings import Settings
from interlock.store.port import Store, Transaction
from interlock.store.tickets import any_open

RETRY_S = 5.0


class Desk:
    """Tickets and standing approvals of one data directory."""

    def __init__(
        self,
        *,
        gateway: Gateway,
        asking: Asking,
        journal: Store,
        catalog: Catalog,
        settings: Settings,
        clock: Clock,
        channels: Channels,
        revive: Callable[[Caller], Awaitable[Caller]],
    ) -> None:
        self._gateway = gateway
        self._asking = asking
        self._view = gateway.reviewer_view
        self._journal = journal
        self._catalog = catalog
        self._settings = settings
        self._clock = clock
        self._channels = channels
        self._revive = revive
        # Approved calls that could not run just now, and when to try again.
        self._later: dict[str, float] = {}
        self._going: dict[str, asyncio.Future[Result]] = {}

    # Looking

    def list(self, *, every: bool = False) -> list[Ticket]:
        """Return the tickets that wait for a decision, oldest first; or every ticket, newest first."""
        return [self._asking.opened(ticket) for ticket in tickets.listing(self._journal.reader, every=every)]

    async def show(self, ticket_id: str, *, by: Caller | None = None) -> Ticket:
        """Return one ticket, by its id or the beginning of it. `by` only limits what a refusal says."""
        return self._asking.opened(tickets.load(self._journal.reader, ticket_id, by))

    # Deciding

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

    def is_alone(self, by: Caller) -> bool:
        """Whether a local person has stated that nobody else decides on this machine."""
        return is_alone(self._journal.reader, by)

    async def state_alone(self, *, by: Caller, alone: bool, reason: str) -> None:
        """Record that a local person decides alone on this machine, or no longer does."""
        if by.capability is not None or not is_person(by) or not by.id.startswith("local:"):
            raise Failure("E3206", "only a person at the command line of this machine can state that they are alone")
        await self._journal.commit(state_alone(by, alone=alone, reason=reason))

    async def withdraw(self, call_id: str, *, by: Caller) -> bool:
        """Withdraw a call that waits for approval, or was approved and has not run. False if there is none."""
        ticket = await self._journal.commit(tickets.withdraw(call_id, by.acting))
        if ticket is None:
            return False
        for event, facts in (("cancel_requested", {"answer": "canceled"}), ("canceled", {"error_code": "E3703"})):
            self._gateway.observer.mention(f"tool.invocation.{event}", call_id, ticket.ref, **facts)
        return True

    async def _resolve(self, ticket_id: str, by: Caller, *, approve: bool, **said: Any) -> Ticket:
        uses = uses_of(by.capability) if approve and by.capability is not None else ()
        said["comment"] = self._view.comment(said["comment"])
        four_eyes = self._settings.four_eyes
        unit = tickets.resolve(ticket_id, by, approve=approve, uses=uses, four_eyes=four_eyes, **said)
        found = self._asking.opened(_allowed(await self._journal.commit(unit)))
        self._gateway.observer.announce(f"approval.{found.state.lower()}", found.call, found.ref, **found.pending())
        return found

    async def _outside(self, ticket_id: str, by: Caller, edit: Mapping[str, Any]) -> Failure | None:
        """Return why a waiting call, as the reviewer would approve it, exceeds what their own token covers."""
        capability, ticket = by.capability, await self.show(ticket_id, by=by)
        if capability is None:
            return None
        try:
            contract = self._catalog.resolve(ticket.tool, ticket.version).contract
            token_checks.check_tool(capability, contract, self._settings.environment)
            token_checks.check_cost(capability, contract)
            if capability.bound and ticket.sealed is not None:
                request = self._waiting(ticket)
                merged = replace(request, arguments=_merged(request.arguments, edit))
                checked = await self._gateway.checked(merged)
                found = token_checks.resources_of(contract, checked.input)
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
        content = self._asking.unsealed(ticket.sealed, ticket.id)
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
        whole = {"arguments": arguments, "agreed": digest(agreed), "promised": promised(preview)}
        shown = self._view.input(call, agreed)
        changed = self._asking.seal_edit(ticket.id, shown, names, seen)
        return Edit(self._asking.seal_up(encode(whole), ticket.id), changed, digest(agreed), names)

    # In advance

    async def agree_in_advance(
        self,
        tool: str,
        *,
        by: Caller,
        caller: str,
        arguments: Mapping[str, Any],
        uses: int,
        expires_ms: int,
        versions: str | None = None,
        tenant: str | None = None,
    ) -> Standing:
        """Approve calls of one tool by one caller in advance, within bounds; without `versions`, of the present one.

        `tenant` is the caller's, if it is not that of the person who approves.
        """
        version = self._catalog.resolve(tool, versions)
        contract = version.contract
        if contract.manifest.tier >= ASKING_TIER:
            raise Failure(
                "E3004",
                f"{contract.ref} runs in sandbox tier {contract.manifest.tier}, with full access, so a person must"
                " agree to each of its calls; decide on their tickets one by one",
            )
        for fault in standing.range_faults(arguments, contract.input.part):
            raise Failure("E3004", fault)
        for name in self._view.private_arguments(contract, arguments):
            # INVARIANT: the patterns of standing approvals are stored readably, so they contain no private value.
            if not standing.is_open(arguments[name]):
                raise Failure(
                    "E3004",
                    f"`{name}` is private, and the patterns of standing approvals are kept readable",
                    resolution=f"leave `{name}` open with *, or decide on each call's ticket",
                )
        now_ms = self._clock.now_ms()
        wish = Standing(
            id=f"sta_{new_id(now_ms, self._clock.random_bytes(8))}",
            tenant=tenant or by.tenant,
            tool=str(contract.id),
            versions=versions or contract.version,
            arguments=dict(arguments),
            caller=caller,
            uses=uses,
            expires_ms=expires_ms,
            granted_by=by.acting,
        )
        approval = contract.manifest.approval or self._settings.approval
        groups = frozenset(step.group for step in approval.chain)
        used_up: Sequence[Callable[[Transaction], None]] = ()
        if by.capability is not None:
            token_checks.check_in_advance(
                by.capability, contract, wish.versions, wish.arguments, self._settings.environment
            )
            token_checks.check_cost(by.capability, contract, wish.uses)
            used_up = uses_of(by.capability, wish.uses)
        # A person who may not approve is told that first.
        unit = standing.grant(wish, by, groups, now_ms, used_up)
        required: list[str] = contract.input.model_facing.get("required") or []
        for name in required:
            if name not in arguments:
                raise Failure(
                    "E3004",
                    f"{contract.ref} is never called without `{name}`, and no pattern names it, so no call would be"
                    " covered",
                    resolution=f"add a pattern for `{name}`",
                )
        return await self._journal.commit(unit)

    def standing(self) -> list[Standing]:
        """Return every standing approval."""
        return standing.listing(self._journal.reader)

    async def take_back(self, standing_id: str, *, by: Caller) -> Standing:
        """End a standing approval now."""
        return await self._journal.commit(standing.revoke(standing_id, by))

    # Time

    async def sweep(self) -> list[Happening]:
        """Deny tickets that have timed out, and escalate those that wait too long."""
        if not any_open(self._journal.reader):
            return []
        happened = await self._journal.commit(tickets.sweep(self._channels))
        for one in happened:
            self._gateway.observer.announce(one.event, one.ticket.call, one.ticket.ref, **one.ticket.pending())
        return happened

    # Going on

    async def resume(self, ticket_id: str) -> Result:
        """Continue one call that was approved. Concurrent requests get the same answer."""
        ticket = await self.show(ticket_id)
        # INVARIANT: a call that continues keeps its id, so only one attempt runs at a time.
        going = self._going.get(ticket.id)
        if going is None:
            going = self._going[ticket.id] = asyncio.ensure_future(self._go_on(ticket))
            going.add_done_callback(lambda _: self._going.pop(ticket.id))
        return await asyncio.shield(going)

    async def _go_on(self, ticket: Ticket) -> Result:
        """Run the six phases of a call that waited, with the authority that its caller has now."""
        if ticket.state != "APPROVED" or ticket.sealed is None:
            raise tickets.rejection(ticket) or Failure(
                "E3411", f"ticket {ticket.id} is {ticket.state}, so there is nothing to go on with"
            )
        request = self._waiting(ticket)
        assert request.caller is not None
        try:
            result = await self._gateway.invoke(replace(request, caller=await self._revive(request.caller)))
        except Failure as failure:
            result = await self._gateway.decline(request, failure)
        if result.error is not None and not result.pending and not result.error.retryable:
            await self._journal.commit(tickets.give_up(ticket.id, result.error))
        return result

    def _waiting(self, ticket: Ticket) -> Request:
        """Return the request of a waiting call, as it was made."""
        assert ticket.sealed is not None
        content = self._asking.unsealed(ticket.sealed, ticket.id)
        asked = stored_caller(content.pop("caller"))
        del content["promised"]
        return Request(**content, id=ticket.call, caller=asked)

    async def resume_all(self) -> list[Result]:
        """Continue every call that was approved and has not run. One that cannot run now is tried again later."""
        results: list[Result] = []
        now = self._clock.monotonic()
        for ticket in tickets.approved(self._journal.reader):
            if self._later.get(ticket.id, 0.0) > now:
                continue
            try:
                result = await self.resume(ticket.id)
            except Failure:
                continue  # another process was quicker
            results.append(result)
            if result.error is not None and result.error.retryable:
                self._later[ticket.id] = now + max(RETRY_S, (result.error.retry_after_ms or 0) / 1000)
        return results


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


def _allowed(found: Ticket | Refused) -> Ticket:
    if isinstance(found, Refused):
        raise found.failure
    return found
