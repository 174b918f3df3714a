"""What calls through every door leave behind, and what they do not: one record each, and nothing private anywhere."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, cast

import orjson
import pytest
import pytest_asyncio
from pydantic import BaseModel

from interlock import Caller, Context, Effect, Failure, Field, Hook, HookResult, Interlock, Preview, tool
from interlock.authority.identities import Identity
from interlock.privacy.patterns import Patterns
from interlock.privacy.redact import Redactor
from interlock.telemetry.trace import Span
from interlock.testing import FakeClock
from tests import processes, sample
from tests.support.answers import Heard, Wish
from tests.support.calls import FIELDS, admit
from tests.support.identities import did_of
from tests.support.lifecycles import Place, opened
from tests.support.mail import PASSWORD as MAIL_PASSWORD
from tests.support.mail import SmtpServer
from tests.support.stores import everything_in
from tests.support.webhooks import SECRET, Receiver
from tests.support.wires import DOORS, WIRES, Wires, wired

Json = dict[str, Any]
API_KEY, PASSWORD = "sk-secret123456", "supersecret"
CHANNELS = [{"name": "chat", "url": "json://127.0.0.1:9/{secret}", "secret": "chat", "allow_private": True}]
Private = Annotated[
    str, Field(description="for nobody else", examples=["x"], json_schema_extra={"x-sensitivity": "pii"})
]
Coded = Annotated[
    str,
    Field(
        description="for nobody else, of one form", examples=["n-1"], pattern="^[a-zA-Z0-9-]+$",
        json_schema_extra={"x-sensitivity": "confidential"},
    ),
]  # fmt: skip
Key = Annotated[str, Field(description="a key of some service", examples=["k"])]
How = Annotated[str, Field(description="how it ends", examples=["well"])]


@pytest_asyncio.fixture
async def place(home: Path) -> AsyncGenerator[Place]:
    async with opened(home) as made:
        yield made


# One record for each


class Case(BaseModel):
    """A call, and what its record says."""

    tool: str
    arguments: Json
    status: str = "SUCCESS"
    error: str | None = None
    decision: str | None = "ALLOW"
    operation: str = "invoke"
    source: str = "compute"
    changes: Json = {}
    version: str | None = "1.0.0"
    mutation_class: str | None = "read_only"
    summary: Json | None = None
    keyed: bool = False
    dry_run: bool = False

    def wish(self, door: str) -> Wish:
        key = f"k-{door}" if self.keyed else None
        return Wish(self.tool, self.arguments, key=key, dry_run=self.dry_run)


CASES: Mapping[str, Case] = {
    "read": Case(tool="demo.add", arguments={"a": 1, "b": 2}, summary={"type": "integer", "bytes": 1}),
    "write": Case(
        tool="demo.increment", arguments={"name": "a"}, keyed=True, changes={"counter:a": "UPDATE"},
        mutation_class="write_reversible", summary={"type": "integer", "bytes": 1},
    ),
    "replayed": Case(
        tool="demo.increment", arguments={"name": "a"}, keyed=True, source="replay", mutation_class="write_reversible"
    ),
    "dry run": Case(
        tool="demo.increment", arguments={"name": "a"}, dry_run=True, operation="preview", source="preview",
        mutation_class="write_reversible", summary={"type": "object", "keys": 3, "bytes": 118},
    ),
    "unknown": Case(
        tool="demo.nothing", arguments={}, status="ERROR", error="TOOL_NOT_FOUND", decision=None, version=None,
        mutation_class=None,
    ),
    "invalid": Case(
        tool="demo.add", arguments={"a": "many"}, status="ERROR", error="INVALID_INPUT", decision=None
    ),
    "denied": Case(
        tool="demo.shout", arguments={"text": "x"}, status="ERROR", error="AUTHORIZATION_DENIED", decision="DENY"
    ),
    "failed": Case(
        tool="demo.unsteady", arguments={"name": "a"}, status="ERROR", error="EXECUTION_FAILED", keyed=True,
        mutation_class="write_reversible",
    ),
    "timed out": Case(
        tool="life.overruns", arguments={}, status="TIMEOUT", error="DEADLINE_EXCEEDED"
    ),
}  # fmt: skip


@pytest.mark.proves("AUDIT-01")
@pytest.mark.proves("AUDIT-02")
async def test_through_every_door_each_outcome_leaves_one_record_with_every_field(place: Place) -> None:
    place.app.hook(Hook(id="no", when="pre", tools="demo.shout", run=lambda _: HookResult(permission="deny")))
    hashes: dict[str, set[str]] = {}
    traces: set[str] = set()
    made = len(place.records("closed"))
    for door in DOORS:
        for name, case in CASES.items():
            sample.flaky.failures = [ValueError("it failed")]
            before = _now_ms()
            await place.rows[door].call(case.wish(door))
            record = await place.last("closed")
            made += 1
            assert len(place.records("closed")) == made, (door, name)
            assert record.keys() >= FIELDS, (door, name)
            said = (record["status"], record["errorCode"], record["operation"], record["source"])
            source = "synthetic" if name == "timed out" else case.source
            assert said == (case.status, case.error, case.operation, source), (door, name)
            assert record["authDecision"] == case.decision, (door, name)
            assert (record["callerId"], record["agentId"]) == (did_of("ann"), did_of("bot"))
            assert {one["resource"]: one["operation"] for one in record["sideEffects"]} == case.changes
            said = (record["toolId"], record["version"], record["mutationClass"], record["outputSummary"])
            assert said == (case.tool, case.version, case.mutation_class, case.summary), (door, name)
            assert record["approvalTicketId"] is None
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["timestamp"])
            assert before <= datetime.fromisoformat(record["timestamp"]).timestamp() * 1000 <= _now_ms() + 1
            assert 0 <= record["latencyMs"] <= _now_ms() - before + 1
            assert re.fullmatch("[0-9a-f]{32}", record["traceId"])
            assert record["inputHash"] == hashlib.sha256(orjson.dumps(case.arguments)).hexdigest()
            traces.add(record["traceId"])
            hashes.setdefault(name, set()).add(record["inputHash"])
    assert {len(found) for found in hashes.values()} == {1}
    assert len(traces) == len(DOORS) * len(CASES)


def _now_ms() -> int:
    return int(time.time() * 1000)


@pytest.mark.proves("AUDIT-01")
async def test_through_every_door_a_call_that_a_person_decided_on_closes_once_under_its_ticket(place: Place) -> None:
    reviewer = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
    for door in DOORS:
        for decision in ("approve", "deny"):
            key = f"{door}-{decision}"
            pending = await place.rows[door].pending(Wish("life.mail", {"to": key}, key=key))
            ticket, asked = pending["ticketId"], await place.last("pending")
            assert (asked["approvalTicketId"], asked["authDecision"]) == (ticket, "REQUIRES_APPROVAL")
            assert not [one for one in place.records("closed") if one["call"] == asked["call"]], "it has not ended"
            if decision == "approve":
                await place.app.approvals.approve(ticket, by=reviewer)
                assert (await place.app.approved_calls.resume(ticket)).ok
            else:
                await place.app.approvals.deny(ticket, by=reviewer)
            await place.last()
            (closed,) = [one for one in place.records("closed") if one["call"] == asked["call"]]
            assert closed.keys() >= FIELDS, (door, decision)
            said = (closed["approvalTicketId"], closed["status"], closed["errorCode"], closed["toolId"])
            ended = ("SUCCESS", None) if decision == "approve" else ("ERROR", "AUTHORIZATION_DENIED")
            assert said == (ticket, *ended, "life.mail"), (door, decision)
            assert closed["authDecision"] == ("REQUIRES_APPROVAL" if decision == "approve" else "DENY")
            assert (closed["callerId"], closed["agentId"]) == (did_of("ann"), did_of("bot"))
            assert closed["sideEffects"] == (
                [{"resource": f"mail:{key}", "operation": "CREATE"}] if decision == "approve" else []
            )


# Who reads


@pytest.mark.proves("AUDIT-03")
async def test_what_others_called_is_seen_with_the_scope_alone_and_seeing_it_is_on_record(place: Place) -> None:
    app = place.app
    await place.rows["rest"].call(Wish("demo.add", {"a": 1}))
    call = (await place.last())["call"]
    await app.identities.register(Identity(did=did_of("eve"), name="eve", kind="human"), by="test")
    for scopes, seen in ((), False), (("audit:read",), True):
        token = await app.tokens.issue(subject=did_of("eve"), scopes=scopes, by=app.caller)
        bearer = {"authorization": f"Bearer {token}"}
        asked = {"jsonrpc": "2.0", "id": 1, "method": "calls.status", "params": [call]}
        told = [
            "result" in (await place.http.post("/rpc", json=asked, headers=bearer)).json(),
            (await place.http.get(f"/v1/calls/{call}", headers=bearer)).status_code == 200,
            (await place.http.get("/v1/audit/records", headers=bearer)).status_code == 200,
            (await place.http.get("/v1/audit/export", headers=bearer)).status_code == 200,
        ]
        assert told == [seen] * 4
    await app.journal.drain()
    read = place.records("audit.read")
    assert [(one["by"], one["what"]) for one in read] == [
        (did_of("eve"), what) for what in ("call", "call", "records", "export")
    ]


# Where it comes from


@pytest.mark.proves("LIFE-19")
async def test_every_door_says_of_a_success_where_it_comes_from_and_what_it_took(sinks: tuple[Wires, Sinks]) -> None:
    wires, _ = sinks
    for door in WIRES:
        for key in (door, door):  # and so does a replay
            told = await wires.call(door, "priv.note", {"slot": "a", "note": "n", "how": "well"}, key=key)
            source, execution = told.about["provenance"], told.about["execution"]
            assert (source["source"], source["version"]) == ("priv.note", "1.0.0"), door
            assert source["executedAt"] <= source["retrievedAt"]
            assert min(execution["latencyMs"], execution["cost"]) >= 0


# Nothing private


class Kept(BaseModel):
    """What a tool of these tests gives back."""

    slot: str
    note: Private


@tool(version="1.0.0", mutation_class="write_reversible", namespace="priv", effects=[Effect("note:{slot}", "UPDATE")])
async def note(ctx: Context, slot: sample.Name, note: Coded, how: How) -> Kept:
    """Keep a private note, and say so wherever it can be said."""
    ctx.log.warning("keeping %s", note)
    ctx.progress(f"keeping {note}", percent=50)
    ctx.partial(Kept(slot=slot, note=note).model_dump())
    ctx.effect(f"note:{slot}", "UPDATE", before=None, after={"note": note})
    if how == "fail":
        raise Failure("E3401", f"cannot keep {note}", details={"with": note})
    if how == "crash":
        raise ValueError(f"cannot keep {note}")
    return Kept(slot=slot, note=note)


@note.preview
def _(slot: str, note: str, how: str) -> Preview:
    return Preview(impact=f"{note} would be kept")


@note.compensate
async def _(result: Kept) -> None:
    return None


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="priv", effects=[Effect("post:{slot}", "CREATE")])
async def post(slot: sample.Name, note: Coded) -> str:
    """Post a private note; a person must agree."""
    return slot


@post.preview
async def _(slot: str, note: str) -> Preview:
    return Preview(impact=f"{note} would be posted to {slot}")


@tool(version="1.0.0", mutation_class="write_reversible", namespace="priv", effects=[Effect("vault:{slot}", "UPDATE")])
async def vault(ctx: Context, slot: sample.Name, api_key: Key, password: Key) -> dict[str, str]:
    """Use credentials that came as arguments, and let them out in every way there is."""
    ctx.log.warning("using %s and %s", api_key, password)
    ctx.progress(f"using {password}")
    ctx.effect(f"vault:{slot}", "UPDATE", before=password, after=api_key)
    if slot == "fail":
        raise Failure("E3502", f"{api_key} was refused", details={"password": password})
    return {"api_key": api_key, "said": f"{password} works"}


@vault.preview
def _(slot: str, api_key: str, password: str) -> Preview:
    return Preview(impact=f"{api_key} would be used")


@vault.compensate
async def _(result: dict[str, str]) -> None:
    return None


class Sinks:
    """Everything that anything of a call is written or sent to."""

    def __init__(self, app: Interlock, log: pytest.LogCaptureFixture) -> None:
        self._app = app
        self._log = log
        self._events: list[str] = []
        self._spans: list[Span] = []
        self.wire: list[str] = []
        app.listen(lambda event: self._events.append(str(event.document())))
        tracer = app.gateway.telemetry.tracer
        assert tracer is not None
        tracer.sinks.append(self._spans.extend)

    async def texts(self) -> dict[str, str]:
        app = self._app
        await app.journal.drain()
        return {
            "answers": "\n".join(self.wire),
            "events": "\n".join(self._events),
            "log": self._log.text,
            "traces": str(self._spans),
            "metrics": (await app.gateway.telemetry.metrics.render()).decode(),
            "processes": processes.called().decode("latin-1"),
            "written": (await asyncio.to_thread(everything_in, app.home)).decode("latin-1"),
        }

    async def holding(self, *canaries: str) -> list[str]:
        texts = await self.texts()
        return [f"{canary} in {name}" for canary in canaries for name, text in texts.items() if canary in text]


@pytest_asyncio.fixture
async def sinks(home: Path, caplog: pytest.LogCaptureFixture) -> AsyncGenerator[tuple[Wires, Sinks]]:
    caplog.set_level("DEBUG", logger="interlock")
    given: Json = {"housekeeping": False, "trace_ratio": 1.0, "channels": CHANNELS}
    async with Interlock.open(home, **given) as app:
        await admit(app, note, post, vault)
        async with wired(app) as wires:
            yield wires, Sinks(app, caplog)


@pytest.mark.supports("VALID-04")
@pytest.mark.proves("AUDIT-06", "CONTRACT-06")
async def test_a_private_field_reaches_no_sink_through_any_door_however_the_call_ends(
    sinks: tuple[Wires, Sinks],
) -> None:
    wires, found = sinks
    wires.app.hook(Hook(id="no", when="pre", tools="priv.note", run=_denies))
    canaries: list[str] = []
    for number, door in enumerate(WIRES):
        for how in ("well", "fail", "crash", "deny", "invalid"):
            canary = f"Quux{number}{how}7731"
            canaries.append(canary)
            given = {"slot": "a", "note": f"{canary} !" if how == "invalid" else canary, "how": how}
            told = await wires.call(door, "priv.note", given, key=f"{how}-{number}")
            found.wire.append(told.text)
            if how == "well":
                assert told.data == {"slot": "a", "note": "[REDACTED]"}, door
                assert _redaction_state(door, told) == {"redacted": True, "paths": ["/note"]}, door
            else:
                assert told.failure["error_code"] == {"invalid": "E3301", "deny": "E3206"}.get(how, "E3401"), door
        canary = f"Quux{number}gated7731"
        canaries.append(canary)
        pending = (await wires.call(door, "priv.post", {"slot": door, "note": canary}, key=f"gated-{door}")).text
        assert "APPROVAL_REQUIRED" in pending, door
        found.wire.append(pending)
    shown = await wires.app.call("priv.note", {"slot": "a", "note": canaries[0], "how": "well"}, key="shown")
    assert shown.document()["redaction_state"] == {"redacted": True, "paths": ["/note"]}
    # A ticket may be sealed in its row, so it is looked at as reviewers see it.
    tickets = wires.app.journal.reader.all("SELECT id FROM ticket")
    assert len(tickets) == len(WIRES)
    for (ticket,) in tickets:
        found.wire.append(str((await wires.app.approvals.show(ticket)).document()))
    assert await found.holding(*canaries) == []
    texts = await found.texts()
    assert "[REDACTED]" in texts["answers"]
    assert "tool.result.redacted" in texts["events"]
    assert "priv.note" in texts["traces"]
    assert "priv_note" in texts["metrics"] or "priv.note" in texts["metrics"]
    assert "keeping [REDACTED]" in texts["log"]
    assert wires.app.journal.reader.all("SELECT COUNT(*) FROM notification") == [(len(WIRES),)]


def _redaction_state(door: str, heard: Heard) -> Json:
    """What a wire says of what was removed from a result."""
    return (
        orjson.loads(heard.text)["result"]["redaction_state"] if door == "jsonrpc" else heard.about["redaction_state"]
    )


@pytest.mark.proves("AUDIT-06")
@pytest.mark.parametrize("door", WIRES)
async def test_a_result_from_which_nothing_was_removed_says_so(sinks: tuple[Wires, Sinks], door: str) -> None:
    wires, _ = sinks
    await admit(wires.app, sample.add)
    told = await wires.call(door, "demo.add", {"a": 1, "b": 2})
    assert _redaction_state(door, told) == {"redacted": False, "paths": []}


@pytest.mark.proves("AUDIT-06")
@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
async def test_no_channel_of_any_kind_receives_a_private_field_at_any_step(home: Path, tmp_path: Path) -> None:
    smtp, clock = SmtpServer(), FakeClock()
    (tmp_path / "password").write_text(MAIL_PASSWORD)
    (tmp_path / "hook").write_text(SECRET)
    async with smtp.running(), Receiver.open() as hook, Receiver.open() as chat:
        mail = f"mailto://postmaster:{{secret}}@127.0.0.1:{smtp.port}?from=interlock@example.org&to=desk@example.org"
        channels: list[Json] = [
            {"name": "mail", "url": mail, "secret_file": str(tmp_path / "password"), "allow_private": True},
            {"name": "hook", "webhook": hook.url, "secret_file": str(tmp_path / "hook"), "allow_private": True},
            {"name": "chat", "url": f"json://127.0.0.1:{chat.port}/inbox", "allow_private": True},
        ]
        chain = [{"group": "approvers"}, {"group": "managers", "after_seconds": 60}]
        given: Json = {"channels": channels, "approval": {"timeout_seconds": 300, "chain": chain}}
        async with Interlock.open(home, clock=clock.clock, housekeeping=False, **given) as app:
            await admit(app, post)
            assert (await app.call("priv.post", {"slot": "a", "note": "Quux7731"}, key="k")).pending
            await app.courier.deliver_due()
            clock.advance(61)
            await app.approvals.sweep()
            await app.courier.deliver_due()
        received = {
            "mail": [one.get_body(("plain",)).get_content() for _, _, one in smtp.mail],  # pyright: ignore[reportOptionalMemberAccess]
            "hook": [one.body.decode() for one in hook.got],
            "chat": [one.body.decode() for one in chat.got],
        }
        for channel, messages in received.items():
            assert len(messages) == 2, channel
            for message in messages:
                assert "priv.post" in message, channel
                assert "[REDACTED] would be posted to a" in message, channel
                assert "Quux7731" not in message, channel
        whole = [
            *map(bytes, (one.as_bytes() for _, _, one in smtp.mail)),
            *(one.body for one in (*hook.got, *chat.got)),
        ]
        assert all(b"Quux7731" not in one and base64.b64encode(b"Quux7731")[:10] not in one for one in whole)


def _denies(seen: Any) -> HookResult | None:
    return HookResult(permission="deny") if seen.input["how"] == "deny" else None


def _of(*names: str) -> Callable[[Any], bool]:
    """Whether something is data with just these members."""
    return lambda data: isinstance(data, dict) and cast("Json", data).keys() == set(names)


# What cannot be redacted: the sink it is on the way to, the tool, how that ends, and where the fault is.
FAULTS: dict[str, tuple[str, str, type, str, Callable[[Any], bool]]] = {
    "result": ("priv.note", "well", Redactor, "_walked", _of("slot", "note")),
    "input, for all that a call says": ("priv.note", "well", Redactor, "_walked", _of("slot", "note", "how")),
    "input of a call that fails": ("priv.note", "fail", Redactor, "_walked", _of("slot", "note", "how")),
    "input of a call that crashes": ("priv.note", "crash", Redactor, "_walked", _of("slot", "note", "how")),
    "input of a call that is denied": ("priv.note", "deny", Redactor, "_walked", _of("slot", "note", "how")),
    "progress event": ("priv.note", "well", Redactor, "_walked", _of("message", "percent")),
    "error details": ("priv.note", "fail", Redactor, "_walked", _of("with")),
    "error message": ("priv.note", "fail", Patterns, "message", lambda _: True),
    "log": ("priv.note", "well", Patterns, "log", lambda _: True),
    "change on record": ("priv.note", "well", Redactor, "_walked", _of("note")),
    "ticket": ("priv.post", "", Redactor, "_walked", _of("slot", "note")),
    "preview in a ticket": ("priv.post", "", Patterns, "without_credentials", lambda text: "posted" in text),
}


@pytest.mark.proves("AUDIT-06")
@pytest.mark.parametrize("what", FAULTS)
async def test_what_cannot_be_redacted_is_withheld_from_every_sink_at_every_door(
    sinks: tuple[Wires, Sinks], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    wires, found = sinks
    tool, how, owner, method, meant = FAULTS[what]
    whole, faults = getattr(owner, method), 0
    wires.app.hook(Hook(id="no", when="pre", tools="priv.note", run=_denies))

    def broken(self: Any, data: Any, *given: Any, **named: Any) -> Any:
        nonlocal faults
        if not meant(data):
            return whole(self, data, *given, **named)
        faults += 1
        raise ValueError("Quux-broken-7731")

    monkeypatch.setattr(owner, method, broken)
    for door in WIRES:
        faults = 0
        given = {"slot": "a", "note": "Quux-broken-7731", **({"how": how} if how else {})}
        told = await wires.call(door, tool, given, key=door)
        found.wire.append(told.text)
        assert told.failure["error_code"] == "E3304", door
        assert faults, door
    assert await found.holding("Quux-broken-7731") == []
    assert wires.app.journal.reader.all("SELECT COUNT(*) FROM ticket") == [(0,)]
    assert wires.app.journal.reader.all("SELECT COUNT(*) FROM notification") == [(0,)]


@pytest.mark.proves("AUDIT-07")
async def test_credentials_that_came_as_arguments_are_nowhere_whichever_door_they_came_by(
    sinks: tuple[Wires, Sinks],
) -> None:
    wires, found = sinks
    for door in WIRES:
        for slot in ("a", "fail"):
            given = {"slot": slot, "api_key": API_KEY, "password": PASSWORD}
            told = await wires.call(door, "priv.vault", given, key=f"{slot}-{door}")
            found.wire.append(told.text)
        wrong = await wires.call(door, "priv.vault", {**given, "slot": 7, "more": PASSWORD}, key=f"x-{door}")
        found.wire.append(wrong.text)
        assert wrong.failure["error_code"] == "E3301"
    assert await found.holding(API_KEY, PASSWORD) == []
    texts = await found.texts()
    for sink in ("answers", "events", "log"):
        assert "[REDACTED]" in texts[sink], sink
