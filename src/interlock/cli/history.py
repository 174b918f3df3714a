"""The story of a call in sentences, and its records as a server tells them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.api.history import History, HistoryEntry, in_order, tickets_in
from interlock.core.errors import CODES, Failure

if TYPE_CHECKING:
    from interlock.api.types import Ticket
    from interlock.cli.remote import Server

Json = dict[str, Any]

_RULING = {"ALLOW": "allowed", "DENY": "denied", "REQUIRES_APPROVAL": "asked for a person's approval of"}
_DOORS = {"cli": "the command line", "library": "a Python program", "dev": "a session of interlock dev"}


def approval_steps(history: History) -> Iterator[tuple[str, str]]:
    """The approval requests and decisions of a call, each with its time."""
    for entry in history.entries:
        record = entry.record
        if entry.kind == "pending":
            yield entry.at, f"a person was asked to agree: ticket {record.get('approvalTicketId')}"
        elif entry.kind == "approval":
            words = _ACTS.get(record["act"], str(record["act"])).format_map(_RecordWords(record))
            yield entry.at, words + _remarks(record)


class _RecordWords(dict[str, Any]):
    """A record's fields for filling in, with a word for what it does not say."""

    def __missing__(self, name: str) -> str:
        return "somebody" if name == "by" else "?"


_ACTS = {
    "notified": "word went out by {channel}",
    "notification_failed": "word did not get through by {channel}: {error}",
    "notification_dropped": "word by {channel} was no longer needed",
    "escalated": "nobody had decided, so {group} were asked too",
    "refused": "{by} tried to decide and was refused: {why}",
    "approved": "{by} agreed",
    "denied": "{by} said no",
    "auto_denied": "nobody decided in time, so the answer was no",
    "lapsed": "it was agreed to, but not run in time",
    "voided": "the ticket became void: {why}",
    "used": "the agreement was used up",
    "standing.granted": "{by} agreed in advance to {uses} such calls, until {expiresAt}",
    "standing.used": "one use of that was taken",
    "standing.revoked": "{by} took that back",
}


def _remarks(record: Json) -> str:
    edited = ""
    if record.get("user_modified"):
        names: list[str] | None = record.get("editedArguments")
        # A record of an older version holds the values themselves.
        what = f"to {_value(record['edited'])}" if names is None else f"({', '.join(names)})"
        edited = f", with the input changed {what}"
    comment = f": {record['comment']}" if record.get("comment") else ""
    return edited + comment


# At a server


async def history_at(server: Server, call_id: str, *, with_previews: bool = False) -> History:
    """Every record of a call that the holder of the token may read; E3702 if there is none.

    With previews, also what reviewers were shown, of the tickets that the holder may see.
    """
    from interlock.cli.remote import part

    entries = await _records(server, call_id)
    if not entries:
        await server.get(f"/v1/calls/{part(call_id)}")  # says that there is none
        raise Failure("E3702", f"no record of `{call_id}` in this journal")
    tickets = tickets_in(entries)
    for ticket in tickets:
        entries += await _records(server, ticket)
    asked = await _seen(server, tickets) if with_previews else []
    return History(
        call_id,
        in_order(call_id, entries),
        {ticket.id: ticket.preview for ticket in asked},
        {ticket.id: ticket.agreed_preview for ticket in asked if ticket.changed is not None},
    )


async def _records(server: Server, about: str) -> list[HistoryEntry]:
    """Every record of a call or a ticket."""
    found: list[HistoryEntry] = []
    after: int | None = 0
    while after is not None:
        told = await server.get("/v1/audit/records", call=about, after=after)
        found += [HistoryEntry(one["seq"], one["hash"], one["record"]) for one in told["records"]]
        after = told["after"]
    return found


async def _seen(server: Server, ids: Iterable[str]) -> list[Ticket]:
    """Those of the tickets that the holder of the token may see."""
    from interlock.api.approval_documents import ticket_of
    from interlock.cli.remote import part

    found: list[Ticket] = []
    for one in sorted(ids):
        try:
            found.append(ticket_of(await server.get(f"/v1/approvals/{part(one)}")))
        except Failure as failure:
            if failure.code != "E3702":
                raise
    return found


def explain(history: History) -> list[str]:
    """The story of a call: who asked, for whom, under which rule, who agreed to what, what changed, how it ended."""
    return [sentence for part in (_asked, _decided, _agreed, _ran, _changed, _ended) for sentence in part(history)]


def _asked(history: History) -> Iterator[str]:
    facts = history.facts
    door = _DOORS.get(str(facts.get("door")), str(facts.get("door") or "an unnamed endpoint"))
    what = {"preview": "a preview of ", "compensate": "the undoing of an earlier call of "}
    purpose = what.get(str(facts.get("operation")), "")
    at = history.entries[0].at
    yield f"{facts.get('callerId') or 'Somebody unknown'} asked for {purpose}{history.tool} at {at}, through {door}."
    if facts.get("agentId"):
        yield f"The agent {facts['agentId']} spoke for them."
    elif facts.get("callerId"):
        yield "No agent stood between: the caller asked on their own behalf."
    if facts.get("parent"):
        yield f"It came out of call {facts['parent']}."
    if facts.get("idempotencyKey"):
        session = f" in session {facts['session']}" if facts.get("session") else ""
        key = "Its key, the client's own identity of the request," if facts.get("keyFrom") else "The caller's key"
        yield f"{key} was {facts['idempotencyKey']}{session}."
    if facts.get("resendProtection") == "none":
        yield "It had no idempotency key: nothing protected it from being done again if the request was sent again."
    if facts.get("inputHash"):
        yield f"The input is on record by its hash, sha256 {facts['inputHash']}."
    for change in cast("list[Json]", facts.get("inputMutations") or []):
        kind, _, who = str(change.get("source")).partition(":")
        changer = f"The reviewer {who}" if kind == "reviewer" else "Interlock"
        source = "" if kind == "reviewer" else f" ({change.get('source')})"
        yield f"{changer} changed the input at {change.get('pointer')}{source}."
    for output in cast("list[Json]", facts.get("hookOutputs") or []):
        from interlock.cli.render import hook_words

        words = hook_words(output)
        if words is not None and output["output"] != "updated_input":
            yield f"The hook {output['hook']} ({output['phase']}): {words}."


def _decided(history: History) -> Iterator[str]:
    facts = history.facts
    ruling = facts.get("authDecision")
    if ruling is None:
        yield "It was never put to the policy."
        return
    if ruling == "DENY" and not facts.get("policy"):
        yield "It was refused before the policy was asked."
        return
    rules: list[str] = facts.get("rules") or []
    under = f" by rule {', '.join(rules)}" if rules else ""
    policy = f"Policy {facts['policy']}" if facts.get("policy") else "The policy"
    yield f"{policy} {_RULING.get(str(ruling), str(ruling))} it{under}."


def _agreed(history: History) -> Iterator[str]:
    for at, words in approval_steps(history):
        yield f"At {at} {words}."
    if outcome := history.facts.get("approval"):
        yield _mechanism(outcome)
    for ticket, preview in history.previews.items():
        yield f"On ticket {ticket} a reviewer could see the input, and that it would {_foreseen(preview)}."
        if ticket in history.edits:
            yield f"Of the input as they changed it they were shown that it would {_foreseen(history.edits[ticket])}."
    for difference in cast("list[str]", history.facts.get("previewDifferences") or []):
        yield f"It did not keep to what the reviewer was shown: {difference}."


def _mechanism(outcome: Json) -> str:
    """The mechanism that decided, with the rule or person behind it."""
    by = f" of {outcome['by']}" if outcome.get("by") else ""
    behind = {
        "auto": f"by rule {outcome.get('rule')}; no person was asked",
        "standing": f"by the standing approval {outcome.get('rule')}{by}",
        "human_review": f"by {outcome.get('by')}, on ticket {outcome.get('ticketId')}",
        "timeout": f"by time: {outcome.get('rule')} (ticket {outcome.get('ticketId')})",
    }.get(str(outcome.get("mechanism")), str(outcome.get("rule") or outcome.get("by")))
    return f"It was {outcome.get('outcome')} through {outcome.get('mechanism')}, {behind}."


def _foreseen(preview: Json) -> str:
    effects: list[Json] = preview.get("predicted_effects") or []
    would = ", ".join(f"{one['operation']} {one['resource']}" for one in effects) or "change nothing it could name"
    return would + (f" ({preview['impact']})" if preview.get("impact") else "")


def _ran(history: History) -> Iterator[str]:
    intent, closed = history.last("intent"), history.last("closed")
    predicted: list[Json] = intent.get("predicted") or []
    if intent:
        might = ", ".join(f"{one['operation']} {one['resource']}" for one in predicted) or "change something"
        yield f"Before it ran, the journal noted that it might {might}."
    if closed.get("replayOf"):
        yield f"It did not run: it had run before as call {closed['replayOf']}, and that result was given again."


def _changed(history: History) -> Iterator[str]:
    mutations = history.all("mutation")
    for one in mutations:
        values = f" from {_value(one.get('previousValue'))} to {_value(one.get('newValue'))}"
        yield f"It changed {one.get('affectedResource')} ({one.get('mutationType')}){values}."
    closed = history.last("closed")
    reported: list[Json] = closed.get("sideEffects") or []
    if not mutations and reported:
        listing = ", ".join(f"{one['operation']} {one['resource']}" for one in reported)
        yield f"It reported: {listing}."
    if closed and not mutations and not reported:
        unknown = closed.get("outcome") == "unknown"
        yield "Whether it changed anything, the journal cannot say." if unknown else "It reported no change."


def _ended(history: History) -> Iterator[str]:
    closed = history.last("closed")
    if not closed:
        yield _UNENDED.get(history.state, "The journal has no record of its end: it is still running, or was cut off.")
    elif closed.get("error_code"):
        yield _refusal(closed)
    else:
        took = closed.get("latencyMs")
        yield f"It succeeded after {took} ms." if took is not None else "It succeeded."
    for one in cast("list[Json]", closed.get("artifacts") or []):
        yield f"It left the file {one['path']} ({one['size']} bytes, sha256 {one['sha256']})."
    if closed.get("compensation"):
        if closed.get("door") == "dev":
            yield f"It can be undone in the session that made it: undo {history.call} YOUR-KEY."
        else:
            yield f"It can be undone: interlock calls undo {history.call} --key YOUR-KEY."
    if history.last("late"):
        yield "It ended after all, later than anyone waited for it."
    for settled in history.all("settled"):
        word = "it happened" if settled.get("happened") else "it did not happen"
        yield f"{settled.get('by')} settled it at {settled.get('timestamp')}: {word}."


_UNENDED = {
    "awaiting_approval": "It waits for a person to decide; nothing has run.",
    "approved, not gone on with yet": "It was agreed to and has not run yet.",
}


def _refusal(closed: Mapping[str, Any]) -> str:
    code = str(closed["error_code"])
    title = CODES[code].title if code in CODES else "unknown code"
    phases: list[str] = closed.get("phases") or []
    ran = "execute" in phases or closed.get("outcome") == "unknown"
    where = "" if ran or len(phases) < 2 else f" in the {phases[-2]} phase, before anything ran"
    return f"It ended in {closed.get('errorCode')} ({code}: {title}){where}."


def _value(value: Any) -> str:
    if isinstance(value, dict) and cast("Json", value).keys() == {"sealed", "sha256"}:
        return "a private value, kept sealed"
    return "nothing" if value is None else orjson.dumps(value).decode()
