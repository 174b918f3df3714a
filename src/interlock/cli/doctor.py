"""`interlock doctor`: is this machine, this home and this journal in order, and what to do where they are not."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from interlock.cli.command import Output, without_home
from interlock.cli.doctor_machine import ISOLATION, MACHINE, Check, Finding, Status

if TYPE_CHECKING:
    from interlock.authority.cedar import Rule
    from interlock.cli.render import Page
    from interlock.contract.contract import Contract
    from interlock.store.home import Home
    from interlock.store.inspection import Origin
    from interlock.store.last_head import SignedHead
    from interlock.store.port import Reader

LITTLE_DISK = 100 * 2**20
NO_DISK = 10 * 2**20
# A process that lives signs what it wrote within seconds.
UNSIGNED_MS = 60_000
# Clocks of processes and machines differ by moments.
BEHIND_MS = 60_000
# How long doctor goes on telling that the clock was set.
STEPS_SHOWN_MS = 30 * 86_400_000


@click.command()
@without_home
def doctor(out: Output, /) -> int:
    """Look at Python, SQLite, the home, the journal, what waits, the policy, the tools and the keys; change nothing.

    Tools are loaded as for a call, which runs their modules, and are not called. Every line says what was found and,
    where something is wrong, what to do. Exits 1 if something is broken.

    \b
    interlock doctor
    interlock --home /srv/interlock doctor --json
    """
    from interlock._version import __version__
    from interlock.store.home import Home

    home = Home(out.session.path)
    findings = examine(home)
    healthy = all(finding.status != "broken" for finding in findings)
    document = {
        "healthy": healthy,
        "version": __version__,
        "home": str(home.path),
        "findings": [asdict(finding) for finding in findings],
    }

    def show(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD, MAYBE

        marks = {"good": GOOD, "attention": MAYBE, "broken": BAD}
        for finding in findings:
            page.table([(marks[finding.status], finding.name.ljust(11), finding.what)])
            if finding.advice:
                page.table([(" ", " " * 11, f"→ {finding.advice}")])

    out.answer(document, show)
    return 0 if healthy else 1


def examine(home: Home, *, machine: bool = True) -> list[Finding]:
    """Everything that was found, in order; without `machine`, of the home alone."""
    checks = (*MACHINE, *CHECKS, *ISOLATION) if machine else CHECKS
    return [finding for check in checks for finding in _run(check, home)]


def _run(check: Callable[[Home], Iterator[Finding]], home: Home) -> Iterator[Finding]:
    from interlock.core.errors import Failure
    from interlock.store.connection import StoreError
    from interlock.store.home import no_room

    name = check.__name__.removeprefix("_check_").replace("_", " ")
    try:
        yield from check(home)
    except Failure as failure:
        yield Finding(name, "broken", f"{failure.code} {failure.in_full}", failure.resolution)
    except (OSError, StoreError) as error:
        if (full := no_room(error)) is not None:
            yield Finding(name, "broken", f"{full.code} {full.in_full}", full.resolution)
            return
        yield Finding(
            name, "broken", f"cannot be read: {error}", "make the data directory readable, or choose another one"
        )


def _check_home(home: Home) -> Iterator[Finding]:
    path = home.path
    if path.exists() and not path.is_dir():
        yield Finding("home", "broken", f"{path} is not a directory", "choose another data directory with --home")
        return
    nearest = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), Path("/"))
    writable = os.access(nearest, os.W_OK | os.X_OK)
    made = "" if path.exists() else ", made at first use"
    if not writable:
        yield Finding("home", "broken", f"{path} cannot be written", "make it writable, or choose another with --home")
        return
    yield Finding("home", "good", f"{path}{made}")
    if path.exists() and path.stat().st_mode & 0o077:
        yield Finding("home", "attention", "others on this machine may enter it", f"chmod 700 {path}")


def _check_disk(home: Home) -> Iterator[Finding]:
    import shutil

    nearest = next((parent for parent in (home.path, *home.path.absolute().parents) if parent.exists()), Path("/"))
    free = shutil.disk_usage(nearest).free
    status: Status = "good" if free >= LITTLE_DISK else "attention" if free >= NO_DISK else "broken"
    advice = "" if status == "good" else "free some space: without it no call can be recorded, and none will run"
    yield Finding("disk", status, f"{free / 2**30:.1f} GiB free", advice)


@contextlib.contextmanager
def _if_usable(home: Home) -> Generator[Reader | None]:
    """The database, or None where there is none or it cannot be used: that is told once, with the journal."""
    from interlock.core.errors import Failure
    from interlock.store.inspection import opened

    with contextlib.ExitStack() as stack:
        try:
            reader = None if home.new else stack.enter_context(opened(home))
        except Failure:
            reader = None
        yield reader


def _check_journal(home: Home) -> Iterator[Finding]:
    from interlock.core.errors import Failure
    from interlock.store import inspection, last_head, layout
    from interlock.store.home import SCHEMA_HEAD, refuse_behind

    if home.new:
        yield Finding("journal", "good", "none yet, made at first use")
        return
    anchored, last = home.last_anchor(), last_head.read(home)
    with inspection.opened(home) as reader:
        schema = str(inspection.schema(reader))
        if schema > SCHEMA_HEAD:
            raise Failure("E3805", f"the store has schema {schema}; this program knows up to {SCHEMA_HEAD}")
        yield _schema(home, schema)
        rows, tools = layout.count_records(reader), inspection.tool_count(reader)
        refuse_behind(reader, anchored)
        yield Finding("journal", "good", f"{rows:,} records, {tools:,} tools")
        yield from _rewritten(reader, last)
        yield from _layout(reader, rows)
        yield from _unsigned(home, reader)
        yield _clock(reader)
        yield from _open_calls(reader)
        if schema == SCHEMA_HEAD:
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


def _schema(home: Home, found: str) -> Finding:
    from interlock.store.home import SCHEMA_HEAD

    if found == SCHEMA_HEAD:
        return Finding("schema", "good", found)
    what = f"{found}, brought to {SCHEMA_HEAD} at the next start"
    if not (alive := home.alive()):
        return Finding("schema", "good", what)
    advice = f"stop {'it' if alive == 1 else 'them'} first: a home is not changed under a process that runs on it"
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

    from interlock.core.clock import Clock, iso
    from interlock.store import inspection

    through = inspection.anchored_through(reader)
    if through and not home.anchors.exists():
        advice = "restore it from a backup: without it, a journal that was cut back does not show"
        yield Finding("journal", "broken", "anchors.jsonl is missing, the second witness of its signed heads", advice)
    count, first = inspection.records_behind(reader, through)
    if first is None:
        return
    body = inspection.record(reader, first)
    if str(orjson.loads(body).get("timestamp", "")) < iso(Clock().now_ms() - UNSIGNED_MS):
        advice = "the next process signs what is there: run interlock tools list, then interlock audit verify"
        yield Finding("journal", "attention", f"not signed from record {first} on, {count:,} in all", advice)


def _clock(reader: Reader) -> Finding:
    """Whether this machine's time is behind what was written. Which of the two was wrong, nobody can tell."""
    from interlock.audit.chain import END_MS
    from interlock.core.clock import Clock, iso
    from interlock.core.formatting import span
    from interlock.store import inspection
    from interlock.store.timekeeping import steps

    now = Clock().now_ms()
    signed, body = inspection.signed_ms(reader, END_MS), inspection.newest_record(reader)
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
        said = orjson.loads(body)
        if said.get("act") == "alone.stated":
            what = f"{said['by']} may decide on their own calls: stated {said['timestamp']}"
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


def _check_background(home: Home) -> Iterator[Finding]:
    """Background tasks that fail in processes that run on this home now, as each of them reports."""
    for process, told in home.signs_of_life():
        for task, failures, error in told.get("failing", ()):
            what = f"{task} failed {failures} times in a row in process {process}: {error}"
            advice = "read the log of that process; the task is tried again by itself, at least once a minute"
            yield Finding("background", "attention", what, advice)


def _check_policy(home: Home) -> Iterator[Finding]:
    from interlock.authority.cedar import DEFAULT, Rules, check
    from interlock.authority.policy import read_file
    from interlock.authority.principals import DEFAULT as DEFAULT_PRINCIPALS
    from interlock.authority.principals import Principals

    former = home.path / "policy.toml"
    if former.exists():
        what = "there is a policy.toml, which counts no more; nothing is allowed while it is there"
        yield Finding("policy", "broken", what, "move its rules to policy.cedar and its people to principals.toml")
        return
    # What a home is made with is there before its database.
    made = home.database.exists()
    text = read_file(home.policy) if made or home.policy.exists() else DEFAULT
    rules = Rules(text)
    which = "the default" if text == DEFAULT else str(home.policy)
    yield Finding("policy", "good", f"{which}; what no rule permits is denied ({rules.version})")
    for rule in rules.rules:
        yield Finding("", "good", _rule_words(rule))
    yield from _applied(home, text)
    people = Principals(read_file(home.principals) if made or home.principals.exists() else DEFAULT_PRINCIPALS)
    contracts, known, groups = _rules_speak_of(home, text)
    for fault in check(text, contracts, people.groups | groups, known):
        what = f"line {fault.line}, {fault.rule}: {fault.message}"
        status: Status = "broken" if fault.grave else "attention"
        yield Finding("policy", status, what, "correct the rule, then: interlock policy check")
    for entry in people.entries:
        holds = f"; holds {', '.join(entry.scopes)}" if entry.scopes else ""
        yield Finding("", "good", f"{entry.id} is in {', '.join(entry.groups) or 'no group'}{holds}")


def _applied(home: Home, text: str) -> Iterator[Finding]:
    """Whether the policy in force is the one that was last applied. The file may be edited; nobody is named then."""
    import hashlib

    import orjson

    from interlock.store.inspection import policy_applied

    with _if_usable(home) as reader:
        body = None if reader is None else policy_applied(reader)
    applied = None if body is None else orjson.loads(body)
    if applied is not None and applied["after"] != hashlib.sha256(text.encode()).hexdigest():
        what = f"not what {applied['by']} applied at {applied['timestamp']}: the file was changed by hand"
        advice = "see what it says: interlock policy show; put one in force by name: interlock policy apply FILE"
        yield Finding("policy", "attention", what, advice)


def _rules_speak_of(home: Home, text: str) -> tuple[list[Contract], set[str], frozenset[str]]:
    """The contracts of the tools that rules depend on, the names of all tools, and the groups of known callers."""
    import orjson

    from interlock.authority.cedar import concerned
    from interlock.contract.contract import parse_contract
    from interlock.store import inspection

    contracts, known, matters = list["Contract"](), set[str](), concerned(text)
    with _if_usable(home) as reader:
        if reader is None:
            return contracts, known, frozenset()
        for address, manifest in inspection.manifests(reader):
            known.add(address)
            if matters(address, manifest):
                contracts.append(parse_contract(orjson.loads(manifest)))
        return contracts, known, inspection.groups(reader)


def _rule_words(rule: Rule) -> str:
    return f"{'a person decides' if rule.asks else rule.effect}: {rule.id}"


def _check_settings(home: Home) -> Iterator[Finding]:
    from interlock.settings import Settings, load_settings, nearest, variable

    settings = load_settings(home.settings)
    yield Finding("settings", "good", f"audit {settings.audit}; see settings.toml in the data directory")
    known = Settings.model_fields
    for name in sorted(name for name in os.environ if name.startswith("INTERLOCK_")):
        said = name.removeprefix("INTERLOCK_").lower()
        # Other variables are called so as well; what is as near as this is a slip of the pen.
        meant = None if said in known else nearest(said, known, alike=0.8)
        if meant is not None:
            what, advice = f"the variable {name} sets nothing", f"did you mean {variable(meant)}?"
            yield Finding("settings", "attention", what, advice)


def _check_tools(home: Home) -> Iterator[Finding]:
    from interlock.contract.declare import Tool
    from interlock.core.errors import Failure
    from interlock.registry.catalog import contract_digest
    from interlock.registry.source import reload
    from interlock.store.inspection import origins

    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    with _if_usable(home) as reader:
        if reader is None:
            return
        rows = origins(reader)
        changed = [_text_changed(home, reader, row) for row in rows]
    found: dict[str, dict[str, Tool[..., object]] | Failure] = {}
    good = 0
    for (address, version, origin, digest), another in zip(rows, changed, strict=True):
        if another:
            there = Failure("E3103", "it has changed")  # and is not loaded: that would execute it
        else:
            if origin not in found:
                try:
                    tools = reload(origin, home.manifests)
                    found[origin] = {f"{tool.manifest.address}@{tool.manifest.version}": tool for tool in tools}
                except Failure as failure:
                    found[origin] = failure
            there = found[origin]
        tool = None if isinstance(there, Failure) else there.get(f"{address}@{version}")
        if tool is not None and contract_digest(tool) == digest:
            good += 1
            continue
        said = "it has changed" if tool is not None else "it is no longer there"
        said = there.message if isinstance(there, Failure) else said
        advice = "put it back as it was admitted, or publish what is there as a new version: interlock tools add"
        yield Finding("tools", "broken", f"{address}@{version} cannot be called: {said}", advice)
    if good or not rows:
        yield Finding("tools", "good", f"{good} of {len(rows)} added from files and modules load as they were admitted")


def _text_changed(home: Home, reader: Reader, row: Origin) -> bool:
    """Whether loading an isolated tool would execute another text than when it was admitted."""
    from interlock.registry.catalog import source_changed
    from interlock.store.inspection import admitted_manifest

    text = admitted_manifest(reader, row)
    return text is not None and source_changed(reader, row.digest, text, row.origin, home.manifests)


def _check_latency(home: Home) -> Iterator[Finding]:
    import orjson

    from interlock.contract.manifest import parse_manifest
    from interlock.registry.latency import differs, measure
    from interlock.store.inspection import active_manifests

    with _if_usable(home) as reader:
        if reader is None:
            return
        found = measure(reader)
        for address, version, text in active_manifests(reader) if found else ():
            timing = found.get(f"{address}@{version}")
            manifest = None if timing is None else parse_manifest(orjson.loads(text))
            wanted = None if timing is None or manifest is None else differs(manifest, timing)
            if timing is not None and manifest is not None and wanted is not None:
                what = f"{address}@{version} states {manifest.timeout_class}; of {timing.calls:,} calls 99 % took"
                advice = f"state timeout_class: {wanted} in its next version, or leave it out"
                yield Finding("latency", "attention", f"{what} at most {timing.p99_s * 1000:,.0f} ms", advice)


def _check_key(home: Home) -> Iterator[Finding]:
    from interlock.store.inspection import signing_key
    from interlock.store.signing import Signer

    with _if_usable(home) as reader:
        signed_by = None if reader is None else signing_key(reader)
    key = home.keys / "journal.ed25519"
    yield from _key("signing key", key, lambda: Signer(home.keys).check(signed_by), "none yet, made at first use")


def _check_issuer(home: Home) -> Iterator[Finding]:
    from interlock.authority.chains import SIGNED_BY
    from interlock.authority.keys import IssuerKeys
    from interlock.core.clock import Clock
    from interlock.core.errors import Failure
    from interlock.store import facts
    from interlock.store.inspection import at_head, revoked_keys

    issuer = IssuerKeys(home.keys / "issuer", clock=Clock())
    names = issuer.names()
    paths = sorted((home.keys / "issuer").glob("*.pem"))
    signed_by, retired = None, set[str]()
    with _if_usable(home) as reader:
        if reader is not None and at_head(reader):
            signed_by = facts.get(reader, SIGNED_BY)
            retired = revoked_keys(reader)
    try:
        issuer.check(signed_by, retired)
        if not paths:
            yield Finding("issuer keys", "good", "none yet, made with the first token")
    except Failure as failure:
        yield Finding("issuer keys", "broken", f"{failure.code} {failure.in_full}", failure.resolution)
    for path in paths:
        yield from _key("issuer keys", path, partial(issuer.load, path.name) if path.name in names else None)


def _check_secrets(home: Home) -> Iterator[Finding]:
    from interlock.settings import load_settings
    from interlock.store.inspection import at_head
    from interlock.store.sealing import Box, keys_in_use

    where = load_settings(home.settings).secrets_key
    key = home.keys / f"secrets.{'key' if where == 'file' else 'keyring'}"
    in_use = set[str]()
    with _if_usable(home) as reader:
        if reader is not None and at_head(reader):
            in_use = keys_in_use(reader)

    def check() -> None:
        from interlock.core.errors import Failure

        held = Box(home.keys, where=where).ids() if key.exists() else frozenset[str]()
        if lost := in_use - held:
            words = f"{len(lost)} of the keys that something is sealed under are not here"
            raise Failure("E3604", words, resolution="restore them from a backup: without them it cannot be read")

    yield from _key("secrets key", key, check, "none yet, made at first use")


def _key(name: str, key: Path, check: Callable[[], object] | None, absent: str = "") -> Iterator[Finding]:
    """Whether a key is its owner's alone, and good for what it is there for."""
    from interlock.core.errors import Failure

    try:
        if key.exists() and key.stat().st_mode & 0o077:
            yield Finding(name, "broken", "others on this machine can read it", f"chmod 600 {key}")
            return
        if check is not None:
            check()
    except Failure as failure:
        yield Finding(name, "broken", f"{failure.code} {failure.in_full}", failure.resolution)
        return
    yield Finding(name, "good", "in order, readable by its owner alone" if key.exists() else absent)


CHECKS: tuple[Check, ...] = (
    _check_home,
    _check_disk,
    _check_journal,
    _check_background,
    _check_policy,
    _check_settings,
    _check_tools,
    _check_latency,
    _check_key,
    _check_issuer,
    _check_secrets,
)
