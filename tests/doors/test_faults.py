"""Faults of the parts behind a call leave every door as an envelope that gives nothing away; the log has the rest."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from mcp import types

from interlock import Context, Effect, Failure, Hook, Preview, tool
from interlock.call.capability import ToolGrant
from interlock.core.errors import CODES
from interlock.doors.mcp.refusals import enveloped
from interlock.executors.sandbox.supervisor import Sandbox
from interlock.upstreams.manager import Upstreams
from tests import sample
from tests.support import forked, isolated_tools
from tests.support.answers import Heard
from tests.support.calls import admit
from tests.support.faults import (
    BEHIND,
    PLACE,
    SECRET,
    TRACEBACK,
    WORDS,
    failing,
    log_each_in_full,
    logged,
    raising,
    sound,
)
from tests.support.identities import did_of
from tests.support.upstreams import Scripted
from tests.support.upstreams import opened as far
from tests.support.wires import WIRES, Wires, opened, wired

Json = dict[str, Any]
Raised = Callable[[], Exception]
# An exception that nobody foresaw, and a failure whose words give everything away.
RAISED: dict[str, Raised] = {
    "unforeseen": lambda: RuntimeError(WORDS),
    "foreseen": lambda: Failure("E3411", TRACEBACK, details={"at": [PLACE], "pointer": PLACE, "why": WORDS}),
}


def _own_words() -> Exception:
    """A failure of a part that is Interlock's own, which quotes nobody and names a place."""
    return Failure("E3601", f"`{PLACE}` cannot be read", details={"at": [PLACE]})


@tool(version="1.0.0", mutation_class="read_only", namespace="f", permissions=["credentials:f/key"])
async def lent(ctx: Context, text: sample.Text) -> int:
    """Say how long a credential is."""
    return len(ctx.secret("f/key"))


@tool(version="1.0.0", mutation_class="write_reversible", namespace="f", effects=[Effect("box:{text}", "CREATE")])
async def put(ctx: Context, text: sample.Text) -> str:
    """Put something into a box."""
    ctx.effect(f"box:{text}", "CREATE", after=text)
    ctx.compensate_with(text=text)
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="f")
async def waits() -> str:
    """Wait for as long as it may."""
    await asyncio.Event().wait()
    return "never"


@put.preview
def _(text: str) -> Preview:
    return Preview()


@put.compensate
def _(text: str) -> None:
    raise RAISED[text]()


class Broken(Scripted):
    """A connector that fails in a way of its own."""

    raised: Raised | None = None

    async def call(self, call: Any) -> Any:
        if self.raised is not None:
            raise self.raised()
        return await super().call(call)


@asynccontextmanager
async def everything(home: Path) -> AsyncGenerator[tuple[Wires, Broken]]:
    """A server with a tool for each part that can break."""
    server = Broken()
    async with far(home, server) as (app, upstreams), wired(app) as wires:
        await _connected(upstreams, wires)
        await admit(app, lent, put, sample.add, isolated_tools.double)
        await app.secrets.set("f/key", "a-lent-value", by="test")
        log_each_in_full(wires)
        yield wires, server


async def _connected(upstreams: Upstreams, wires: Wires) -> None:
    await upstreams.add("far", "http", {"accept_hints": True}, by=wires.app.caller)


Break = Callable[[Wires, Broken, pytest.MonkeyPatch, Raised], object]


def _raising(raised: Raised) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise raised()

    return fail


def _connector(_: Wires, server: Broken, patch: pytest.MonkeyPatch, raised: Raised) -> None:
    patch.setattr(server, "raised", raised)


def _after(wires: Wires, _: Broken, __: pytest.MonkeyPatch, raised: Raised) -> None:
    wires.app.hook(Hook(id="after", when="post", tools="demo.add", run=_raising(raised)))


# How each part is broken, the tool that needs it, and the codes of what its callers get: unforeseen and foreseen.
PARTS: dict[str, tuple[str, Json, Break, str, str]] = {
    "a hook after the call": ("demo.add", {"a": 1}, _after, "E3211", "E3211"),
    "the vault": (
        "f.lent", {"text": "a"}, lambda w, _, m, r: m.setattr(w.app.secrets, "fetch", _raising(r)), "E3000", "E3411",
    ),
    "the vault in its own words": (
        "f.lent", {"text": "a"}, lambda w, _, m, r: m.setattr(w.app.secrets, "fetch", _raising(r)), "E3000", "E3601",
    ),
    "a connector": ("far.look", {"text": "a"}, _connector, "E3401", "E3411"),
    "the sandbox": (
        "cell.double", {"n": 1}, lambda _, __, m, r: m.setattr(Sandbox, "run", _raising(r)), "E3401", "E3411",
    ),
}  # fmt: skip


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("part", PARTS)
async def test_a_fault_of_any_part_behind_a_call_is_an_envelope_at_every_door_and_the_log_says_what_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    name, given, breaks, *codes = PARTS[part]
    async with everything(home) as (wires, server):
        for how, code in zip(RAISED, codes, strict=True):
            raised = _own_words if code == "E3601" else RAISED[how]
            for door in ("library", *WIRES):
                with monkeypatch.context() as broken:
                    breaks(wires, server, broken, raised)
                    heard = await _asked(wires, door, name, given)
                wires.app.gateway.hooks.registered.clear()
                envelope = sound(heard, door)
                assert envelope["error_code"] == code, (door, how, envelope)
                assert logged(wires, caplog, envelope["traceId"]), (door, how)


async def _asked(wires: Wires, door: str, name: str, given: Json) -> Heard:
    if door != "library":
        return await wires.call(door, name, given)
    document = (await wires.app.call(name, given)).document()
    return Heard(str(document), "library", envelope=document["error"])


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", RAISED)
async def test_an_undoing_that_fails_is_an_envelope_and_the_log_says_what_it_was(
    home: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async with everything(home) as (wires, _):
        done = await wires.call("rest", "f.put", {"text": how}, key="k")
        path = f"/v1/calls/{done.about['invocation_id']}/undo"
        answer = await wires.http.post(path, json={"idempotency_key": "u"})
        by_rest = Heard(answer.text, answer.status_code, envelope=answer.json()["error"])
        here = await wires.app.call("f.put", {"text": how}, key="k2")
        document = (await wires.app.undo(here.invocation_id, key="u2")).document()
        in_process = Heard(str(document), "library", envelope=document["error"])
        for heard in (by_rest, in_process):
            envelope = sound(heard, "rest")
            assert envelope["error_code"] == ("E3401" if how == "unforeseen" else "E3411")
            assert logged(wires, caplog, envelope["traceId"])


# MCP over stdio

ROOT = Path(__file__).parents[2]

SERVER = """
import asyncio, sys, time
from interlock import Interlock
from interlock.api.service import Service
from interlock.core.seldom import Seldom
from interlock.doors.mcp import McpDoor
from interlock.privacy.redact import safe_log
from interlock.telemetry.logs import configure
from tests.support.faults import choosy, explodes, raising
from tests.doors.test_faults import waits
from tests.support.calls import admit
from tests.sample import add

async def main() -> None:
    async with Interlock.open(sys.argv[1], housekeeping=False) as app:
        configure("json", "warning", redact=lambda text: safe_log(app.authority.redactor, text))
        app.gateway.failure_log._seldom = Seldom(0.0, time.monotonic)
        await admit(app, add, explodes, choosy, waits)
        service = Service(app)
        service.tools.page = raising
        await McpDoor(service).run_stdio()

asyncio.run(main())
"""


def _said(home: Path, log: Path, *requests: Json | bytes) -> list[str]:
    """The lines that a server over stdio writes to a client that initializes and then sends these requests."""
    hello: Json = {
        "id": 0, "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
    }  # fmt: skip
    ready: Json = {"method": "notifications/initialized"}
    lines = [
        one if isinstance(one, bytes) else json.dumps({"jsonrpc": "2.0", **one}).encode()
        for one in (hello, ready, *requests)
    ]
    command = [*forked.python(), "-c", SERVER, str(home)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(b"\n".join(lines) + b"\n")
            server.stdin.flush()
            awaited = {one["id"] for one in (hello, *requests) if isinstance(one, dict)}
            said: list[str] = []
            while awaited:
                said.append(server.stdout.readline().decode())
                awaited.discard(orjson.loads(said[-1]).get("id"))
            # The client goes away while one more call runs.
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **_called(99, "f-waits")}).encode() + b"\n")
            return [*said, *server.communicate(timeout=60)[0].decode().splitlines()]
        finally:
            server.kill()


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (-32000, "Connection closed", "E3001"),
        (-32700, "Parse error: hunter2hunter2 is no JSON", "E3004"),
        (-32601, "Method not found", "E3004"),
    ],
)
def test_an_error_that_the_mcp_sdk_makes_itself_gets_the_envelope_and_another_keeps_its_own(
    code: int, words: str, expected: str
) -> None:
    bare = types.ErrorData(code=code, message=words)
    made = enveloped(bare)
    envelope = sound(Heard(made.model_dump_json(), "stdio", envelope=made.data), "rest")
    assert (made.code, envelope["error_code"]) == (code, expected)
    assert "hunter2" not in made.model_dump_json()
    assert enveloped(made) is made


# The numbers of the requests below for which the answer itself says all there is to say.
AT_FAULT = (6, 7, 8, 9)


def _called(number: int, name: str, **arguments: Any) -> Json:
    return {"id": number, "method": "tools/call", "params": {"name": name, "arguments": arguments}}


@pytest.mark.proves("CONTRACT-13")
def test_over_stdio_every_failure_is_an_envelope_and_the_log_says_what_it_was(home: Path, tmp_path: Path) -> None:
    requests: list[Json] = [
        _called(1, "c-explodes", how="foreseen"),
        _called(2, "c-explodes", how="unforeseen"),
        _called(3, "c-explodes", how="in its details"),
        _called(4, "c-explodes", how="as a pointer"),
        _called(5, "c-choosy", text="a"),
        _called(6, "demo-add", a="x"),
        _called(7, "demo-nothing"),
        {"id": 8, "method": "tools/nothing", "params": {}},
        {"id": 9, "method": "tools/list", "params": {"cursor": 7}},
        {"id": 10, "method": "tools/list", "params": {}},
        _called(11, "demo-add", a=1, b=2),
    ]
    log = tmp_path / "log"
    said = _said(home, log, b'{"password": "hunter2hunter2"', *requests)
    lines: list[Json] = [orjson.loads(one) for one in said]
    answers = {one["id"]: one for one in lines if one.get("id") is not None and one["id"] != 99}
    assert set(answers) == set(range(12)), said
    for one in lines:
        assert "error" not in one or one["error"]["data"]["errorCode"], one
    assert answers.pop(0)["result"]["protocolVersion"] == "2025-06-18"
    assert SECRET not in "".join(said)
    assert "hunter2" not in "".join(said)
    assert answers.pop(11)["result"]["structuredContent"] == {"result": 3}
    written = log.read_text()
    assert SECRET not in written
    assert "hunter2" not in written
    logged: list[Json] = [orjson.loads(line) for line in written.splitlines()]
    for number, answer in answers.items():
        error: Json = answer.get("error") or {}
        told = error["data"] if error else answer["result"]["_meta"]["interlock/error"]
        envelope = sound(Heard(orjson.dumps(answer).decode(), "stdio", envelope=told), "grpc" if error else "mcp")
        if number not in AT_FAULT:
            found = [one for one in logged if one["trace_id"] == envelope["traceId"]]
            assert any(PLACE in f"{one['message']} {one.get('error')}" for one in found), (number, found)


# gRPC

NAMES = {
    "code": "error_code", "error_code": "errorCode", "error_class": "error_class", "retryable": "retryable",
    "retry_after_ms": "retryAfterMs", "message": "humanMessage", "resolution": "resolution", "trace_id": "traceId",
    "native_error_ref": "native_error_ref", "policy_refs": "policy_refs", "evidence_refs": "evidence_refs",
    "recoverability": "recoverability", "schema_version": "schema_version",
}  # fmt: skip


@pytest.mark.proves("CONTRACT-13")
def test_the_typed_envelope_of_grpc_has_every_field_of_the_others_under_one_name() -> None:
    from interlock.doors.grpc.messages import envelope
    from interlock.doors.grpc.v1 import gateway_pb2 as wire

    failure = Failure(
        "E3504", "ask again later", details={"why": "busy"}, retry_after_ms=7000, native_error_ref="n-1",
        policy_refs=("p",), evidence_refs=("e",),
    )  # fmt: skip
    told = failure.envelope("t")
    typed = envelope(failure, "t")
    for theirs, ours in NAMES.items():
        value = getattr(typed, theirs)
        assert (list(value) if theirs.endswith("_refs") else value) == told[ours], theirs
    assert orjson.loads(typed.details_json) == {"why": "busy"}
    names = {field.name for field in wire.ErrorEnvelope.DESCRIPTOR.fields}
    assert names == {*NAMES, "details_json", "invocation_id", "shortened"}
    assert told.keys() == {*NAMES.values(), "message", "retry_after", "details"}


# Approvals, tokens and the journal


async def _audits(wires: Wires) -> None:
    """Go on with a token that may read the journal and issue tokens."""
    app, scopes = wires.app, ("audit:read", "tokens:issue")
    wires.bear(await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], scopes=scopes, by=app.caller))


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", [raising, failing])
@pytest.mark.parametrize("part", BEHIND)
async def test_a_fault_in_approvals_tokens_and_audit_is_an_envelope_and_the_log_says_what_it_was(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, how: Any
) -> None:
    broken, requests, methods = BEHIND[part]
    code = "E3000" if how is raising else "E3801"
    async with opened(home) as wires:
        await _audits(wires)
        for owner, name in broken(wires):
            monkeypatch.setattr(owner, name, how)
        for method, path, body in requests:
            answer = await wires.http.request(method, path, json=body)
            envelope = sound(Heard(answer.text, answer.status_code, envelope=answer.json()["error"]), "rest")
            assert (envelope["error_code"], answer.status_code) == (code, CODES[code].http), (path, answer.text)
            assert logged(wires, caplog, envelope["traceId"]), path
        for name in methods:
            given = {} if name.endswith("list") else {"ticket_id": "apr_01ARZ3NDEKTSV4RRFFQ69G5FAV"}
            text = await wires.rpc_text(name, given)
            envelope = sound(Heard(text, 0, envelope=orjson.loads(text)["error"]["data"]), "rest")
            assert envelope["error_code"] == code, (name, text)
            assert logged(wires, caplog, envelope["traceId"]), name


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", [raising, failing])
@pytest.mark.parametrize("part", ["approvals", "tokens"])
async def test_a_fault_in_approvals_or_tokens_during_a_call_is_an_envelope_at_every_door(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, how: Any
) -> None:
    code = "E3000" if how is raising else "E3801"
    async with opened(home) as wires:
        await admit(wires.app, sample.send)
        log_each_in_full(wires)
        owner, name = (
            (wires.app.gateway._authorizer._approvals, "obtain")  # pyright: ignore[reportPrivateUsage]
            if part == "approvals"
            else (wires.app.tokens.verifier, "check")
        )
        monkeypatch.setattr(owner, name, how)
        for door in WIRES if part == "approvals" else ("rest", "jsonrpc", "grpc"):
            envelope = sound(await wires.call(door, "demo.send", {"to": "ann"}, key=f"key-of-{door}"), door)
            assert envelope["error_code"] == code, (door, envelope)
            assert logged(wires, caplog, envelope["traceId"]), door


# Streams


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", [raising, failing])
@pytest.mark.parametrize("path", ["/v1/events", "/v1/calls/{call}/events", "/v1/audit/export"])
async def test_a_stream_that_fails_midway_ends_with_an_envelope(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, how: Any
) -> None:
    async with opened(home) as wires:
        await _audits(wires)
        await admit(wires.app, sample.add)
        call = (await wires.call("rest", "demo.add", {"a": 1})).about["invocation_id"]

        async def torn(*_: Any, **__: Any) -> AsyncGenerator[Any]:
            yield {"/v1/audit/export": b'{"seq": 1}\n'}.get(path, (1, {"event_class": "tool.declared"}))
            how()

        async def begun(*_: Any, **__: Any) -> Any:
            return torn()

        service = wires.service
        monkeypatch.setattr(service.events, "follow", begun)
        monkeypatch.setattr(service.calls, "follow", torn)
        monkeypatch.setattr(service.audit, "export", begun)
        answer = await wires.http.get(path.format(call=call))
        assert answer.status_code == 200
        if path == "/v1/audit/export":
            first, last = answer.text.splitlines()
            envelope: Json = orjson.loads(last)["error"]
            assert orjson.loads(first) == {"seq": 1}
        else:
            first, last = answer.text.strip().split("\n\n")
            kind, data = last.split("\n")
            assert kind == "event: error"
            envelope = orjson.loads(data.removeprefix("data: "))
            assert "event: tool.declared" in first
        envelope = sound(Heard(answer.text, 200, envelope=envelope), "rest")
        assert envelope["error_code"] == ("E3000" if how is raising else "E3801")
        assert logged(wires, caplog, envelope["traceId"])
