"""Operations on approval tickets and standing approvals, limited to those that the caller may see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interlock.api.rights import same_place
from interlock.approvals.notify import undelivered
from interlock.approvals.standing import GROUP, Standing
from interlock.approvals.ticket import Ticket
from interlock.approvals.tickets import no_ticket
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.gateway import token_checks
from interlock.store import notifications
from interlock.store.port import Store

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.results import Result
    from interlock.contract.contract import Contract


class Approvals:
    """Approval tickets, the decisions on them, and standing approvals."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def tickets(self, *, by: Caller, every: bool = False) -> list[Json]:
        """Open tickets, oldest first; with `every`, all tickets, newest first. Only those that the caller may see."""
        found = await self._parts.approvals.list(every=every)
        return [_ticket_document(one) for one in found if await shows(self._parts, one, by)]

    async def ticket(self, ticket_id: str, *, by: Caller) -> Json:
        """One ticket, with the facts that a reviewer needs before deciding."""
        ticket = await self._ticket(ticket_id, by)
        late = await undelivered(self._parts.journal, ticket=ticket.id)
        return {
            **_ticket_document(ticket),
            "told": await notified_channels(self._parts.journal, ticket),
            "undelivered": [{"channel": one.channel, "attempts": one.attempts, "error": one.error} for one in late],
        }

    async def approve(
        self, ticket_id: str, *, by: Caller, comment: str = "", edit: Mapping[str, Any] | None = None
    ) -> Json:
        """Approve one call, once; with `edit`, with these arguments changed."""
        ticket = await self._mine(ticket_id, by)
        approved = await self._parts.approvals.approve(ticket.id, by=by, comment=comment, edit=edit)
        return _ticket_document(approved)

    async def deny(self, ticket_id: str, *, by: Caller, comment: str = "") -> Json:
        """Deny a call."""
        ticket = await self._mine(ticket_id, by)
        return _ticket_document(await self._parts.approvals.deny(ticket.id, by=by, comment=comment))

    async def waited_for(self, result: Result) -> tuple[Ticket, str]:
        """The ticket that a pending call waits for, and a line for a requester who may not decide on it alone."""
        ticket = await self._parts.approvals.show(result.metadata["pending"]["ticketId"])
        return ticket, await self._must_leave(ticket.requester)

    async def _must_leave(self, requester: str) -> str:
        """A line for the user of this machine, who may not decide on their own call unless they are alone there."""
        is_user = requester.startswith("local:")
        if not is_user or await self._parts.is_alone(Caller(id=requester)):
            return ""
        return (
            f"Somebody else than {requester} must do so. If {requester} is the only person on this machine, they say "
            "so once with `interlock approvals alone`, and then decide themselves.\n"
        )

    async def _ticket(self, ticket_id: str, by: Caller) -> Ticket:
        ticket = await self._mine(ticket_id, by)
        if not await shows(self._parts, ticket, by):
            raise no_ticket(ticket_id)
        return ticket

    async def _mine(self, ticket_id: str, by: Caller) -> Ticket:
        """A ticket of the caller's tenant, by its whole id. The review checks and records who decides on it."""
        ticket = await self._parts.approvals.show(ticket_id, by=by) if ticket_id.startswith("apr_") else None
        if ticket is None or ticket.id != ticket_id or not same_place(by, ticket.tenant):
            raise no_ticket(ticket_id)
        return ticket

    async def standing(self, *, by: Caller) -> list[Json]:
        """Standing approvals that the caller gave, or that apply to the caller."""
        found = await self._parts.standing_approvals.list()
        return [one.document() for one in found if await has_part(self._parts, one, by)]

    async def agree_in_advance(
        self,
        tool: str,
        *,
        by: Caller,
        caller: str,
        arguments: Mapping[str, Any],
        uses: int,
        lifetime_s: int,
        versions: str | None = None,
    ) -> Json:
        """Approve calls of one tool by one caller, or by a group (`group:NAME`), in advance, within bounds."""
        parts = self._parts
        who, tenant = await caller_meant(parts, caller, by)
        contract = await contract_meant(parts, tool, versions)
        takes: Json = contract.input.model_facing.get("properties") or {}
        if unknown := sorted(arguments.keys() - takes.keys()):
            words = ", ".join(takes) or "no arguments"
            raise Failure("E3004", f"{contract.ref} takes no `{unknown[0]}`; it takes {words}")
        standing = await parts.standing_approvals.grant(
            contract.address,
            by=by,
            caller=who,
            tenant=tenant,
            arguments=arguments,
            uses=uses,
            expires_ms=parts.clock.now_ms() + lifetime_s * 1000,
            versions=versions,
        )
        return standing.document()

    async def take_back(self, standing_id: str, *, by: Caller) -> Json:
        """Revoke a standing approval at once."""
        found = next((one for one in await self._parts.standing_approvals.list() if one.id == standing_id), None)
        if found is None or not await has_part(self._parts, found, by):
            raise Failure("E3702", f"no standing approval `{standing_id}`")
        return (await self._parts.standing_approvals.revoke(standing_id, by=by)).document()


async def contract_meant(parts: Parts, tool: str, versions: str | None) -> Contract:
    """The contract that a standing approval is checked against: the newest version in its range."""
    return (await parts.catalog.resolve(tool, versions)).contract


async def caller_meant(parts: Parts, who: str, by: Caller) -> tuple[str, str]:
    """The id and the tenant of a caller to approve calls of: an identity, a caller of `local` by any other id, or a
    group of the tenant, `group:NAME`.
    """
    if who.startswith(GROUP):
        groups = parts.policy.groups | {group for one in await parts.identities.all() for group in one.groups}
        if who.removeprefix(GROUP) not in groups:
            raise Failure("E3207", f"no caller is in the group `{who.removeprefix(GROUP)}`")
        return who, by.tenant
    known = await parts.identities.find(who, by.tenant)
    if known is not None and same_place(by, known.tenant):
        return known.did, known.tenant
    # INVARIANT: a caller that is not registered belongs to `local`; other tenants cannot approve its calls.
    if known is None and ":" in who and by.tenant == "local":
        return who, "local"
    raise Failure("E3207", f"nobody is known as `{who}`")


async def has_part(parts: Parts, standing: Standing, by: Caller) -> bool:
    """Whether a caller may see a standing approval: given by them, for them, or theirs to give."""
    if not same_place(by, standing.tenant) or not await _covers(parts, standing, by):
        return False
    return (
        by.acting == standing.granted_by
        or standing.is_for(by)
        or (by.tenant == "local" and bool(by.groups & await _approvers(parts, standing.tool)))
    )


async def _covers(parts: Parts, standing: Standing, by: Caller) -> bool:
    """Whether a token that is bound to resources covers everything that a standing approval allows."""
    if by.capability is None or not by.capability.bound:
        return True
    try:
        contract = (await parts.catalog.resolve(standing.tool, standing.versions)).contract
        environment = parts.settings.environment
        token_checks.check_in_advance(by.capability, contract, standing.versions, standing.arguments, environment)
    except Failure:
        return False
    return True


async def _approvers(parts: Parts, tool: str) -> set[str]:
    try:
        manifest = (await parts.catalog.resolve(tool)).contract.manifest
    except Failure:
        return set()  # no longer to be called
    return {step.group for step in (manifest.approval or parts.settings.approval).chain}


async def shows(parts: Parts, ticket: Ticket, by: Caller) -> bool:
    """Whether a caller may see a ticket: they requested it or may decide on it, and their token covers the call."""
    if not same_place(by, ticket.tenant):
        return False
    if by.acting not in (ticket.requester, ticket.caller) and not by.groups.intersection(ticket.approvers):
        return False
    facts: Json = {**ticket.head, "toolId": ticket.tool, "version": ticket.version}
    if ticket.changed is not None:
        facts.pop("resources", None)  # the reviewer may have named others
    return await parts.ownership.reaches(by, facts)


async def visible_ticket(parts: Parts, ticket_id: str, *, by: Caller | None) -> Ticket:
    """A ticket by its id or a part of it, for a caller who may see it (E3702); any, if `by` is None, for the owner of
    the data directory."""
    ticket = await parts.approvals.show(ticket_id, by=by)
    if by is not None and not await shows(parts, ticket, by):
        raise no_ticket(ticket_id)
    return ticket


async def notified_channels(journal: Store, ticket: Ticket) -> list[str]:
    """The channels by which people were notified of a ticket."""
    return await journal.read(lambda reader: notifications.sent_channels(reader, ticket.id))


def _ticket_document(ticket: Ticket) -> Json:
    return {
        **ticket.document(),
        "mutation_class": ticket.head.get("mutationClass"),
        "readable": _readable(ticket),
    }


def _readable(ticket: Ticket) -> list[str]:
    """The facts that a reviewer needs before deciding, one per line."""
    behalf = "" if ticket.requester == ticket.caller else f" for {ticket.caller}"
    undone = "cannot" if ticket.head.get("mutationClass") == "write_irreversible" else "can"
    lines = [f"{ticket.requester}{behalf} asks to {ticket.operation} {ticket.ref}: {ticket.reason}"]
    lines += [f"with {name} = {encode(value).decode()}" for name, value in ticket.params.items()]
    effects: list[Json] = ticket.preview.get("predicted_effects") or []
    for effect in effects:
        before, after = (encode(effect.get(name)).decode() for name in ("before", "after"))
        lines.append(f"it would {effect['operation']} {effect['resource']}, from {before} to {after}")
    conditions: dict[str, bool] = ticket.preview.get("preconditions") or {}
    lines += [f"{name}: {'holds' if holds else 'does not hold'}" for name, holds in conditions.items()]
    if impact := ticket.preview.get("impact"):
        lines.append(str(impact))
    return [*lines, f"it {undone} be undone"]
