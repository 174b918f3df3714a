"""The checks of `interlock doctor` that concern the journal: its records, its clock, and what waits in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interlock.api.doctor.database import check_database
from interlock.api.doctor.findings import Finding, Status

if TYPE_CHECKING:
    from interlock.store.home import Home
    from interlock.store.last_head import SignedHead
    from interlock.store.port import Reader

# A process that lives signs what it wrote within seconds.
UNSIGNED_MS = 60_000
# Clocks of processes and machines differ by moments.
BEHIND_MS = 60_000
# How long doctor goes on telling that the clock was set.
STEPS_SHOWN_MS = 30 * 86_400_000


def check_journal(home: Home) -> Iterator[Finding]:
    from interlock.store import inspection, last_head, layout
    from interlock.store.home import refuse_behind
    from interlock.store.schema_version import is_known, schema_of

    if home.new:
        yield Finding("journal", "good", "none yet, made at first use")
        return
    anchored, last = home.last_anchor(), last_head.read(home)
    with inspection.opened(home) as reader:
        known = is_known(reader)
        yield from check_database(home, reader)
        yield _schema(home, str(schema_of(reader)))
        rows, tools = layout.count_records(reader), inspection.tool_count(reader)
        refuse_behind(reader, anchored)
        yield Finding("journal", "good", f"{rows:,} records, {tools:,} tools")
        yield from _rewritten(reader, last)
        yield from _layout(reader, rows)
        yield from _unsigned(home, reader)
        yield _clock(home, reader)
        yield from _open_calls(reader)
        if known:
            yield from _tickets(reader)
            yield from _alone(reader)
            yield from _breakers(reader)
            yield from _payloads(reader)


def _payloads(reader: Reader) -> Iterator[Finding]:
    """Tell the large results and files that cannot be read because a part of them is missing."""
    from interlock.store.payloads import incomplete

    for ref in incomplete(reader):
        what = f"a part of {ref} is missing, so it cannot be read"
        yield Finding(
            "payloads", "broken", what, "keep a copy as evidence, then restore the data directory from a backup"
        )


def _breakers(reader: Reader) -> Iterator[Finding]:
    """Tell the services that are left alone because their calls fail, whether they are upstreams or not."""
    from interlock.store.inspection import open_breakers

    for service, state, reason in open_breakers(reader):
        what = f"the breaker of {service} is {state.replace('_', ' ')}: {reason}"
        yield Finding("services", "attention", what, "it is tried again by itself; see: interlock upstream list")


def _rewritten(reader: Reader, last: SignedHead | None) -> Iterator[Finding]:
    """Whether a process would open this journal, as far as its last signed head and its unsigned end are concerned."""
    from interlock.core.errors import Failure
    from interlock.store import last_head

    try:
        last_head.refuse_rewritten(reader, last_head.ends(reader, last))
    except Failure as failure:
        yield Finding("journal", "broken", f"{failure.code} {failure.in_full}", failure.resolution)


def _schema(home: Home, revision: str) -> Finding:
    from interlock.store.schema_version import SCHEMA_HEAD

    if revision == SCHEMA_HEAD:
        return Finding("schema", "good", revision)
    if revision > SCHEMA_HEAD:
        return Finding(
            "schema", "good", f"{revision}, of a newer version; this one knows {SCHEMA_HEAD} and can work on it"
        )
    what = f"{revision}, brought to {SCHEMA_HEAD} at the next start"
    if not (alive := home.alive()):
        return Finding("schema", "good", what)
    advice = f"stop {'it' if alive == 1 else 'them'} first: a data directory is not migrated under a running process"
    return Finding("schema", "attention", f"{what}; running on this data directory now: {alive}", advice)


def _layout(reader: Reader, rows: int) -> Iterator[Finding]:
    """Tables of the journal that differ from the schema. `audit verify` checks the records themselves."""
    from interlock.store.layout import count_by_call, departures

    wrong = list(departures(reader))
    if not wrong and count_by_call(reader) != rows:
        wrong = ["the index `journal_call` does not list every record"]
    for what in wrong:
        yield Finding("journal", "broken", what, "keep a copy as evidence, then see more: interlock audit verify")


def _unsigned(home: Home, reader: Reader) -> Iterator[Finding]:
    """The end of the journal that nobody has signed, where that is not because it was written just now."""
    import orjson

    from interlock.core.clock import iso
    from interlock.store import inspection

    through = inspection.anchored_through(reader)
    if through and not home.anchors.exists():
        advice = "restore it from a backup: without it, a journal that was cut back does not show"
        yield Finding("journal", "broken", "anchors.jsonl is missing, the second witness of its signed heads", advice)
    count, first = inspection.records_behind(reader, through)
    if first is None:
        return
    body = inspection.record(reader, first)
    if str(orjson.loads(body).get("timestamp", "")) < iso(home.now_ms(reader) - UNSIGNED_MS):
        advice = "the next process signs what is there: run interlock tools list, then interlock audit verify"
        yield Finding("journal", "attention", f"not signed from record {first} on, {count:,} in all", advice)


def _clock(home: Home, reader: Reader) -> Finding:
    """Whether this machine's time is behind what was written. Which of the two was wrong, nobody can tell."""
    from interlock.core.clock import END_MS, Clock, iso
    from interlock.core.formatting import span
    from interlock.store import inspection, verify_reads
    from interlock.store.timekeeping import steps

    now, own = home.now_ms(reader), Clock().now_ms()
    if abs(own - now) > BEHIND_MS:  # where machines share a store
        how = "ahead of" if own > now else "behind"
        advice = "let a time server set it. Calls, keys and approvals go by the clock of the server, but logs do not"
        return Finding("clock", "attention", f"{span(abs(own - now))} {how} the clock of the database server", advice)
    signed, body = inspection.signed_ms(reader, END_MS), verify_reads.newest_body(reader)
    newest, what = max((signed or 0, "signed head"), (_made_ms(body or b""), "record"))
    stepped = [step for step in steps(reader) if step.after_ms > now - STEPS_SHOWN_MS]
    if newest - now <= BEHIND_MS and not stepped:
        return Finding("clock", "good", iso(now))
    if newest - now <= BEHIND_MS:
        before_ms, after_ms = stepped[-1]
        advice = (
            "find out what set it, and let a time server set it slowly. Keys that were in use then block (E3411) until"
            " their window has passed for certain"
        )
        what = f"the clock was set forward by {span(after_ms - before_ms)}, from {iso(before_ms)} to {iso(after_ms)}"
        return Finding("clock", "attention", what, advice)
    advice = (
        "set the clock of this machine: while it is behind, tokens are good for longer than they should be. If it is"
        " right, it was ahead before: until it has caught up, keys, tickets and limits go by the store's own time"
    )
    return Finding("clock", "attention", f"{span(newest - now)} behind the newest {what}, of {iso(newest)}", advice)


def _made_ms(body: bytes) -> int:
    """When a record was made, 0 for one that does not say so."""
    from datetime import datetime

    import orjson

    try:
        return round(datetime.fromisoformat(orjson.loads(body)["timestamp"]).timestamp() * 1000)
    except (ValueError, TypeError, KeyError):
        return 0


def _open_calls(reader: Reader) -> Iterator[Finding]:
    from interlock.store.inspection import key_states

    counts = key_states(reader)
    running, unknown = counts.get("executing", 0), counts.get("unknown", 0)
    advice = "look whether they took effect, then settle them: interlock calls reconcile" if unknown else ""
    status: Status = "attention" if unknown else "good"
    yield Finding("calls", status, f"{running} open, {unknown} with unknown outcome", advice)


def _alone(reader: Reader) -> Iterator[Finding]:
    """Tell who decides on their own calls, by their own statement."""
    import orjson

    from interlock.store.inspection import statements_of_lone_deciders

    for body in statements_of_lone_deciders(reader):
        record = orjson.loads(body)
        if record.get("act") == "alone.stated":
            what = f"{record['by']} may decide on their own calls: stated {record['timestamp']}"
            yield Finding("approvals", "good", what, "to end it: interlock approvals alone --end")


def _tickets(reader: Reader) -> Iterator[Finding]:
    from interlock.store import inspection

    counts = inspection.ticket_states(reader)
    waiting, approved = counts.get("PENDING", 0), counts.get("APPROVED", 0)
    advice = "see what they would do: interlock approvals list" if waiting else ""
    if approved:
        advice = "; ".join(filter(None, (advice, "go on with what was approved: interlock calls resume")))
    status: Status = "attention" if waiting or approved else "good"
    yield Finding("approvals", status, f"{waiting} wait for a person, {approved} approved and not run yet", advice)
    for channel, count, error in inspection.undelivered(reader):
        advice = "correct the channel in settings.toml, and inform the approvers another way meanwhile"
        yield Finding("notify", "attention", f"{count} not delivered by `{channel}`: {error}", advice)
