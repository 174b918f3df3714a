"""Tickets: calls that wait for a person's decision, and their outcome.

    PENDING ─► APPROVED ─► USED            a person agreed, and the call ran, once
       │          ├─────► LAPSED           agreed, but the call did not run before the ticket expired
       │          └─────► VOID             agreed, but the request changed, or the call may not run any more
       ├─────► DENIED                      a person said no
       ├─────► AUTO_DENIED                 nobody decided in time
       └─────► VOID                        the request changed, or its caller has withdrawn it

A ticket is bound to one caller, one tool version, one digest of the input that the reviewer saw, one policy and one
expiry. It is used at most once, in the same transaction that makes the call's intent durable. A row that says APPROVED
is not trusted alone: the journal must contain the record of who agreed, to exactly this, and none that ended it.

Everything here is a *unit* of the journal, or a part of one: it runs inside a transaction whose clock is the store's.
Expiry does not depend on a timer: an expired ticket is never used or resolved, and the first reader marks it.
`sweep` does the rest of what is due: marks, escalations, and the closing records of calls that will not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import orjson

from interlock.approvals.reviewers import behind, instead_of, is_alone, is_person, signature, speaks_for
from interlock.approvals.ticket import Sealed, from_row
from interlock.approvals.ticket_records import actors, add_closing, add_record
from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import facts, idempotency, ledger, notifications, records
from interlock.store import tickets as stored
from interlock.store.tickets import TicketRow

if TYPE_CHECKING:
    from interlock.approvals.reviewers import FourEyes
    from interlock.approvals.ticket import Ticket, TicketState
    from interlock.call.context import Caller
    from interlock.contract.standard.states import State
    from interlock.data.schema import Json
    from interlock.store.port import Reader, Transaction, Unit

Channels = Callable[[str], Sequence[str]]

_OPEN = ("PENDING", "APPROVED")
_SHORTEST = 4  # minimum length of a part of an id that identifies a ticket
_ASIDE = ("refused", "escalated")  # records of a ticket that do not change its state


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened by timeout, for listeners."""

    event: Literal["APPROVAL_ESCALATED", "APPROVAL_AUTO_DENIED", "APPROVAL_LAPSED"]
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Refused:
    """An attempt to resolve a ticket by somebody who may not. It is on record."""

    failure: Failure


# Requesting


def ask(
    wish: Ticket, channels: Channels, *, keyed: bool, timeout_ms: int, most: int = 100, collects: bool = False
) -> Unit[Ticket | None]:
    """Unit that finds the existing ticket of a call, or opens one; a wish without sealed parts only looks.

    The ticket expires after the timeout, or when its caller's authority ends (`expires_ms` of the wish) if that is
    earlier. Without an idempotency key, a ticket that has ended no longer belongs to the call; with `collects`, the
    next call with the same input is answered with its end, once. One requester has at most `most` waiting calls,
    because reviewers are people.
    """

    def unit(transaction: Transaction) -> Ticket | None:
        if wish.sealed is not None:
            _refuse_crowd(transaction, wish, most)
        ticket = latest(transaction, wish.scope)
        if ticket is not None:
            ticket = _aged(transaction, ticket)
        if ticket is not None and ticket.state in _OPEN:
            if ticket.same_wish(wish):
                return ticket
            if wish.sealed is None:
                return None
            _move(transaction, ticket, "VOID", act="voided", why="something else is asked for now")
            if ticket.call != wish.call:
                _close(transaction, ticket, "what was asked for changed before it ran")
        elif ticket is not None and (
            _still_answers(transaction, ticket, wish) if keyed else collects and _collect(transaction, ticket, wish)
        ):
            return ticket
        if wish.sealed is None:
            return None
        now = transaction.now_ms
        expires_ms = min(now + timeout_ms, wish.expires_ms)
        return _open(transaction, replace(wish, created_ms=now, expires_ms=expires_ms), channels)

    return unit


def _refuse_crowd(transaction: Transaction, wish: Ticket, most: int) -> None:
    waiting = stored.count_pending(transaction, wish.tenant, wish.requester, transaction.now_ms, wish.scope)
    if waiting >= most:
        raise Failure("E3003", f"{waiting} calls of {wish.requester} wait for a person already", retry_after_ms=60_000)


def _still_answers(transaction: Transaction, ended: Ticket, wish: Ticket) -> bool:
    """Whether an ended ticket still answers a call that is sent again under the same idempotency key."""
    if ended.state == "USED":
        # The outcome is stored under the idempotency key; once the key is free again, a call under it is a new one.
        return is_taken(transaction, ended.scope)
    return ended.state != "VOID" and ended.digest == wish.digest


def _collect(transaction: Transaction, ended: Ticket, wish: Ticket) -> bool:
    """Whether a call that is sent again learns what came of the call that waited, which nobody has told it yet."""
    if ended.state == "VOID" or ended.digest != wish.digest:
        return False
    if ended.state == "USED":
        row = idempotency.of_call(transaction, ended.call)
        if row is None or (row.state == "done" and row.expires_ms <= transaction.now_ms):
            return False
    return facts.put_once(transaction, f"{_COLLECTED}{ended.id}", str(transaction.now_ms))


def mark_collected(transaction: Transaction, ticket_id: str) -> None:
    """Note that a caller was told what came of a call that waited."""
    facts.put(transaction, f"{_COLLECTED}{ticket_id}", str(transaction.now_ms))


_COLLECTED = "collected:"


def is_taken(transaction: Transaction, scope: bytes) -> bool:
    """Whether a call was made under its idempotency key, and the key still holds its outcome."""
    row = idempotency.state(transaction, scope)
    return row is not None and not (row[0] == "done" and row[1] <= transaction.now_ms)


def latest(transaction: Transaction, scope: bytes) -> Ticket | None:
    """The newest ticket of a call."""
    row = stored.newest(transaction, scope)
    return None if row is None else from_row(row)


def load(reader: Reader, ticket_id: str, by: Caller | None = None) -> Ticket:
    """Load the ticket with this id, or the only one whose id begins or ends with it. E3702 if there is none, or
    several.

    A person (`by`) of another tenant than `local` does not learn that there are several.
    """
    row = stored.find(reader, ticket_id)
    if row is not None:
        return from_row(row)
    part = ticket_id.strip("#…. ").upper().removeprefix("APR_")
    # INVARIANT: search among all tickets. If only waiting ones were searched, a part of an id might later identify
    # another ticket than the one its reader saw.
    rows = [] if len(part) < _SHORTEST else stored.with_part(reader, part)
    if not rows or (len(rows) > 1 and by is not None and by.tenant != "local"):
        raise no_ticket(ticket_id)
    if len(rows) > 1:
        words = f"more than one ticket begins or ends with `{ticket_id}`"
        raise Failure("E3702", f"{words}; see interlock approvals list")
    return from_row(rows[0])


def no_ticket(ticket_id: str) -> Failure:
    """The error for an unknown id, and for a ticket that is not visible to the caller."""
    return Failure("E3702", f"no ticket has the id `{ticket_id}`; see interlock approvals list")


def listing(reader: Reader, *, every: bool = False) -> list[Ticket]:
    """List tickets that wait, oldest first; or all, newest first."""
    return list(map(from_row, stored.recent(reader) if every else stored.pending(reader)))


def of_call(reader: Reader, call: str) -> list[Ticket]:
    """The tickets of a call, oldest first."""
    return list(map(from_row, stored.of_call(reader, call)))


def approved(reader: Reader) -> list[Ticket]:
    """List tickets that were approved and not used yet."""
    return list(map(from_row, stored.approved(reader)))


def _open(transaction: Transaction, wish: Ticket, channels: Channels) -> Ticket:
    assert isinstance(wish.shown, Sealed)
    row = TicketRow(
        wish.id, wish.call, wish.scope, wish.tool, wish.version, wish.operation, wish.tenant, wish.caller,
        wish.requester, wish.digest, wish.policy, wish.reason, "PENDING", 0,
        _json([[step.group, step.after_ms] for step in wish.chain]), wish.shown.params, wish.shown.preview,
        _json(wish.head), wish.sealed, wish.created_ms, wish.expires_ms, None, None, None, None, None,
    )  # fmt: skip
    stored.insert(transaction, row)
    ticket = load(transaction, wish.id)
    pending = {**wish.head, "kind": "pending", "timestamp": iso(wish.created_ms), "approvalTicketId": wish.id}
    pending |= {"states": [*wish.head.get("states", ()), "awaiting_approval"], "authDecision": "REQUIRES_APPROVAL"}
    transaction.append("pending", wish.call, records.encode(pending))
    _notify(transaction, ticket, channels)
    return ticket


def _notify(transaction: Transaction, ticket: Ticket, channels: Channels) -> None:
    """Queue notifications for the current step's approvers: one per step and channel.

    The message itself is built when it is sent, so nothing of the call is stored in clear text.
    """
    for channel in channels(ticket.chain[ticket.step].group):
        notifications.insert_due(transaction, ticket.id, ticket.step, channel, transaction.now_ms)


def message(ticket: Ticket, step: int) -> Json:
    """Build the message for the approvers of a step."""
    return {
        "ticket": ticket.id, "group": ticket.chain[step].group, "step": step, "tool": ticket.ref,
        "caller": ticket.caller, "requester": ticket.requester, "reason": ticket.reason, "params": ticket.params,
        "impact": ticket.preview.get("impact", ""), "expires_at": iso(ticket.expires_ms),
    }  # fmt: skip


# Deciding


@dataclass(frozen=True, slots=True)
class Edit:
    """An input as edited by a reviewer, sealed: whole, and its displayable part; and the names they changed."""

    sealed: bytes
    changed: bytes
    digest: str
    names: list[str]


def consider(
    ticket_id: str, by: Caller, outside: Failure | None = None, four_eyes: FourEyes = "irreversible"
) -> Unit[Ticket | Refused]:
    """Unit that hands a ticket to a person for a decision. A person who may not decide is refused, and that is on
    record too.

    `outside` is the reason why the person's own token does not cover it.
    """

    def unit(transaction: Transaction) -> Ticket | Refused:
        ticket = _aged(transaction, load(transaction, ticket_id, by))
        if not speaks_for(by, ticket.tenant):
            # INVARIANT: nobody learns of another tenant's tickets, not even that they exist.
            add_record(
                transaction, ticket, "refused", **signature(by),
                why=f"the ticket belongs to {ticket.tenant}, and {by.id} does not",
            )  # fmt: skip
            return Refused(no_ticket(ticket_id))
        failure = _own(transaction, ticket, by, four_eyes) or _may_not(ticket, by) or outside
        return ticket if failure is None else _refused(transaction, ticket, by, failure)

    return unit


def resolve(
    ticket_id: str,
    by: Caller,
    *,
    approve: bool,
    comment: str,
    edit: Edit | None = None,
    outside: Failure | None = None,
    four_eyes: FourEyes = "irreversible",
    uses: Sequence[Callable[[Transaction], None]] = (),
) -> Unit[Ticket | Refused]:
    """Unit in which a person approves or denies.

    `uses` are run in the same transaction to use up what the decision consumes: all of them, or none if one is
    refused.
    """

    def unit(transaction: Transaction) -> Ticket | Refused:
        ticket = consider(ticket_id, by, outside, four_eyes)(transaction)
        if isinstance(ticket, Refused):
            return ticket
        try:
            transaction.apart(_run_all, transaction, uses)
        except Failure as failure:
            return _refused(transaction, ticket, by, failure)
        state: TicketState = "APPROVED" if approve else "DENIED"
        facts: Json = {**signature(by), "comment": comment, **ticket.terms(), "expiresAt": iso(ticket.expires_ms)}
        if {by.id, by.acting} & {ticket.requester, *behind(ticket.head, ticket.caller, four_eyes)}:
            facts["alone"] = True  # nobody else was there to decide, by their own statement
        if edit is not None:
            # The edited input is stored with the ticket, sealed.
            facts |= {"user_modified": True, "edited": {"sha256": edit.digest}, "editedArguments": edit.names}
        sealed, changed = (None, None) if edit is None else (edit.sealed, edit.changed)
        now_ms = transaction.now_ms
        stored.resolve(
            transaction, ticket.id, at_ms=now_ms, by=by.acting, comment=comment, edited=sealed, changed=changed
        )
        _move(transaction, ticket, state, act=state.lower(), **facts)
        if not approve:
            _close(transaction, ticket, f"{by.acting} said no")
        return load(transaction, ticket.id)

    return unit


def _run_all(transaction: Transaction, uses: Sequence[Callable[[Transaction], None]]) -> None:
    for use in uses:
        use(transaction)


def _refused(transaction: Transaction, ticket: Ticket, by: Caller, failure: Failure) -> Refused:
    add_record(transaction, ticket, "refused", **signature(by), why=failure.message)
    return Refused(failure)


def _own(transaction: Transaction, ticket: Ticket, by: Caller, four_eyes: FourEyes) -> Failure | None:
    """Refuse a person who would decide on their own call, unless they have stated that they are alone."""
    is_requester = ticket.requester in (by.id, by.acting)
    if not is_person(by) or not (is_requester or {by.id, by.acting} & behind(ticket.head, ticket.caller, four_eyes)):
        return None
    if is_alone(transaction, by):
        return None
    why = "asked for this call" if is_requester else "is one of those on whose behalf this call was asked for"
    return Failure(
        "E3206",
        f"{by.id} {why}, so somebody else must decide on it",
        resolution=instead_of(by),
    )


def _may_not(ticket: Ticket, by: Caller) -> Failure | None:
    # INVARIANT: only a person in a notified group may decide.
    if not is_person(by):
        return Failure("E3206", "only a person can decide on a ticket; an agent never can")
    if not by.groups.intersection(ticket.approvers):
        groups = " or ".join(ticket.approvers)
        return Failure("E3206", f"{by.id} is not among those who were asked; a member of {groups} can decide")
    if ticket.state == "PENDING":
        return None
    when = "" if ticket.resolved_ms is None else f" at {iso(ticket.resolved_ms)}"
    words = {
        "AUTO_DENIED": "nobody decided in time, so it was denied",
        "VOID": "it is void: the call was changed or taken back",
    }
    reason = words.get(ticket.state, f"it is {ticket.state} already")
    return Failure("E3411", f"ticket {ticket.id} cannot be decided on any more: {reason}{when}")


# Using


def use(transaction: Transaction, wish: Ticket, call: str) -> None:
    """Use up an approval inside the transaction that makes the call's intent durable. Raises if there is none."""
    ticket = load(transaction, wish.id)
    # INVARIANT: an approval is used once, before it expires, for exactly what was approved.
    if ticket.state != "APPROVED" or transaction.now_ms >= ticket.expires_ms or not ticket.same_wish(wish):
        raise _as_aged(transaction, ticket).rejection() or Failure(
            "E3410", f"ticket {ticket.id} is {ticket.state}; ask again", retry_after_ms=10
        )
    if not _on_record(transaction, ticket):
        words = f"the journal does not say that anybody agreed to ticket {ticket.id}, whatever its row says"
        raise Failure("E3209", f"{ticket.ref} was not approved: {words}; see interlock audit explain {ticket.call}")
    _move(transaction, ticket, "USED", act="used", used_by=call)


def _on_record(transaction: Transaction, ticket: Ticket) -> bool:
    """Whether the journal's last record of a ticket is an approval that matches its row."""
    approvals = (one for one in transaction.newest("approval", ticket.call) if one.get("approvalTicketId") == ticket.id)
    last = next((one for one in approvals if one.get("act") not in _ASIDE), None)
    row = {
        **ticket.terms(), "act": "approved", "by": ticket.resolved_by, "expiresAt": iso(ticket.expires_ms),
        "user_modified": True if ticket.edited is not None else None,
    }  # fmt: skip
    return last is not None and all(last.get(name) == value for name, value in row.items())


def pass_over(transaction: Transaction, scope: bytes, call: str) -> None:
    """Void the open or approved ticket of a call that now runs without using it.

    INVARIANT: an approved request runs once. A standing approval, or a rule that no longer asks, may let a call run
    while its ticket is open; if the ticket were approved later, the call would run again as soon as its idempotency key
    is forgotten.
    """
    for ticket in map(from_row, stored.open_in_scope(transaction, scope)):
        _move(transaction, ticket, "VOID", act="voided", why="the call runs without it")
        if ticket.call != call:
            _close(transaction, ticket, "it was sent again, and ran without anybody being asked")


def give_up(ticket_id: str, failure: Failure) -> Unit[None]:
    """Unit that voids an approval whose call was refused for good when it was resumed."""

    def unit(transaction: Transaction) -> None:
        ticket = _aged(transaction, load(transaction, ticket_id))
        if ticket.state != "APPROVED":
            return
        _move(transaction, ticket, "VOID", act="voided", why=f"{failure.code} {failure.message}")
        if not ledger.is_closed(transaction, ticket.call):
            _close(transaction, ticket, failure.message)

    return unit


def withdraw(call: str, by: str) -> Unit[Ticket | None]:
    """Unit that withdraws a call which waits for a person, or was approved and has not run. None if there is none."""

    def unit(transaction: Transaction) -> Ticket | None:
        row = stored.open_of_call(transaction, call)
        ticket = None if row is None else _aged(transaction, from_row(row))
        if ticket is None or ticket.state not in _OPEN:
            return None
        _move(transaction, ticket, "VOID", act="withdrawn", by=by)
        body = records.plain("cancel", call, transaction.now_ms, **actors(ticket), answer="canceled", by=by)
        transaction.append("cancel", call, body)
        _close(transaction, ticket, f"{by} took it back", "E3703", "canceled")
        return load(transaction, ticket.id)

    return unit


# Time


def sweep(channels: Channels) -> Unit[list[Happening]]:
    """Unit that does what is due: expiry first, then escalation, each step once."""

    def unit(transaction: Transaction) -> list[Happening]:
        happened: list[Happening] = []
        for ticket in map(from_row, stored.open_tickets(transaction)):
            aged = _aged(transaction, ticket)
            if aged.state != ticket.state:
                event = "APPROVAL_AUTO_DENIED" if aged.state == "AUTO_DENIED" else "APPROVAL_LAPSED"
                happened.append(Happening(event, aged))
                continue
            while ticket.state == "PENDING" and _next_step_due(ticket, transaction.now_ms):
                ticket = _escalated(transaction, ticket, channels)
                happened.append(Happening("APPROVAL_ESCALATED", ticket))
        return happened

    return unit


def _next_step_due(ticket: Ticket, now_ms: int) -> bool:
    following = ticket.step + 1
    return following < len(ticket.chain) and now_ms > ticket.created_ms + ticket.chain[following].after_ms


def _escalated(transaction: Transaction, ticket: Ticket, channels: Channels) -> Ticket:
    stored.escalate(transaction, ticket.id)
    further = load(transaction, ticket.id)
    add_record(transaction, further, "escalated", step=further.step, group=further.chain[further.step].group)
    _notify(transaction, further, channels)
    return further


def _as_aged(transaction: Transaction, ticket: Ticket) -> Ticket:
    """The ticket in its state at the present time, without writing it."""
    if ticket.state not in _OPEN or transaction.now_ms < ticket.expires_ms:
        return ticket
    return replace(ticket, state="AUTO_DENIED" if ticket.state == "PENDING" else "LAPSED")


def _aged(transaction: Transaction, ticket: Ticket) -> Ticket:
    """The ticket in its state at the present time, written to the store."""
    aged = _as_aged(transaction, ticket)
    if aged.state == ticket.state:
        return ticket
    _move(transaction, ticket, aged.state, act=aged.state.lower())
    _close(transaction, ticket, "nobody decided in time" if aged.state == "AUTO_DENIED" else "it was not run in time")
    return load(transaction, ticket.id)


# Helpers


def _move(transaction: Transaction, ticket: Ticket, state: TicketState, *, act: str, **facts: Any) -> None:
    # The sealed parts are no longer needed; the fact that the input was edited stays.
    moved = stored.move(transaction, ticket.id, ticket.state, state, wipe=state not in _OPEN)
    assert moved
    add_record(transaction, ticket, act, **facts)


def _close(transaction: Transaction, ticket: Ticket, why: str, code: str = "E3209", state: State = "denied") -> None:
    """Write the closing record of a call that will not run."""
    add_closing(transaction, ticket, load(transaction, ticket.id).outcome(), why, code, state)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
