"""The REST door as clients meet it: HTTP in and out of the whole application, over real tools and tokens."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Annotated, Any

import httpx
import orjson
import pytest

from interlock import Effect, Field, Preview, tool
from interlock.audit.exported import verify_export
from interlock.core.errors import Failure
from interlock.doors.rest import invoke_route
from interlock.doors.rest.answers import of_failure
from tests import sample
from tests.support.calls import admit, until
from tests.support.disks import full_disk
from tests.support.identities import did_of as did
from tests.support.rest import BARE, COMPLETE, World, refused, until_ended
from tests.support.rest import world as world
from tests.support.upstream_servers import HttpServer

Json = dict[str, Any]


# The seed's flows


@pytest.mark.supports("OPS-01")
async def test_a_tool_is_registered_and_echoes_what_the_holder_of_a_token_sends(world: World) -> None:
    registered = await world.post("/v1/tools/register", COMPLETE, "root")
    assert (registered.status_code, registered.json()["tool_id"]) == (201, "default.echo_tool")

    issued = await world.post("/v1/tokens/issue", {"agent": "caller", "tools": ["default.echo_tool"]}, "root")
    assert issued.status_code == 201
    answer = await world.invoke(
        "echo_tool", {"message": "Hello World"}, issued.json()["token"], tool_version="1.0.0", execution_mode="sync"
    )
    body = answer.json()
    assert answer.status_code == 200
    assert (body["status"], body["result"]) == ("success", {"echoed": "Hello World"})
    assert body["execution_time_ms"] >= 0
    (closed,) = [one for one in world.records("closed") if one["call"] == body["invocation_id"]]
    assert (closed["door"], closed["agentId"] is not None, closed["traceId"]) == ("rest", True, body["trace_id"])
    assert "tool.offered" in {record["event"] for record in world.records("registry")}


@pytest.mark.supports("OPS-01")
async def test_a_bare_manifest_is_refused_with_every_gap_it_has(world: World) -> None:
    envelope = refused(await world.post("/v1/tools/register", BARE, "root"), 422, "E3105")
    told = " ".join(f"{fault['pointer']} {fault['message']}" for fault in envelope["details"]["faults"])
    gaps = (
        "provider",
        "protocol",
        "mutation_class",
        "idempotency",
        "observability",
        "required_permissions",
        "/execution",
    )
    assert [gap for gap in gaps if gap not in told] == []
    assert "description" in told


@pytest.mark.supports("OPS-01")
@pytest.mark.proves("AUTH-02")
async def test_a_token_that_does_not_name_the_tool_is_refused_with_e3204_in_the_detail(world: World) -> None:
    for tools in (("demo.shout",), ()):
        nothing = await world.token("scout", user="alice", tools=tools)
        response = await world.invoke("demo.add", {"a": 1}, nothing)
        refused(response, 403, "E3204")
        assert "E3204" in response.json()["detail"]
        assert response.json()["invocation_id"] in {record["call"] for record in world.records("closed")}


ELSEWHERE: tuple[Json, ...] = (
    {"target": "os:system"},
    {"target": "subprocess:run"},
    {"target": "tests.doors.test_rest:asyncio.run"},
    {"target": "tests.doors.test_rest:refused"},
    {"target": "secret.py:run"},
    {"target": "../../place/secret.py:run"},
    {"target": "a_module_nobody_has:run"},
    {"target": "tests.support.rest:echo_tool", "handlers": {"check": "os:system"}},
    {"target": "tests.support.rest:echo_tool", "handlers": {"check": "tests.doors.test_rest:hashlib.new"}},
    {"kind": "upstream", "target": "bank", "native": {"name": "pay"}},
)


async def test_a_manifest_makes_nothing_run_that_was_no_tool_before(world: World) -> None:
    program = {"kind": "program", "target": "cat", "argv": ["cat", "/in/keys"]}
    for execution in ELSEWHERE:
        refused(await world.post("/v1/tools/register", {**COMPLETE, "execution": execution}, "root"), 422, "E3105")
    for sandbox in ({"tier": 1, "reads": {"keys": str(world.app.home.keys)}}, {"tier": 3}):
        manifest = {**COMPLETE, "execution": program, "sandbox": sandbox}
        refused(await world.post("/v1/tools/register", manifest, "root"), 422, "E3105")
    borrowing = {**COMPLETE, "required_permissions": ["credentials:bank"]}
    refused(await world.post("/v1/tools/register", borrowing, "root"), 403, "E3206")
    assert not any(row.address == "default.echo_tool" for row in await world.app.catalog.rows())


# Calling


@pytest.mark.supports("OBS-02")
async def test_a_call_carries_its_callers_trace_in_and_out(world: World) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    body = {"tool_id": "demo.add", "parameters": {"a": 1}}
    for path, sent in (("/v1/tools/invoke", body), ("/v1/tokens/inspect", {"token": "x"})):
        answer = await world.post(path, sent, headers=headers)
        assert answer.headers["x-trace-id"] == trace
        assert answer.headers["traceresponse"].startswith(f"00-{trace}-")
    assert (await world.post("/v1/tools/invoke", body)).headers["x-trace-id"] != trace
    # One that cannot be read is nobody's trace.
    assert (await world.post("/v1/tools/invoke", body, headers={"traceparent": "nonsense"})).status_code == 200


async def test_a_key_sent_twice_runs_once_whether_in_the_body_or_in_the_header(world: World) -> None:
    body = {"tool_id": "demo.increment", "parameters": {"name": "a"}}
    first = await world.post("/v1/tools/invoke", {**body, "idempotency_key": "k"})
    again = await world.post("/v1/tools/invoke", body, headers={"idempotency-key": "k"})
    assert (first.json()["replayed"], again.json()["replayed"], sample.world.runs) == (False, True, 1)
    assert first.json()["result"] == again.json()["result"] == 1
    both = await world.post("/v1/tools/invoke", {**body, "idempotency_key": "k"}, headers={"idempotency-key": "other"})
    refused(both, 400, "E3004")
    refused(await world.post("/v1/tools/invoke", body), 400, "E3307")


async def test_a_dry_run_says_what_would_happen_and_does_nothing(world: World) -> None:
    answer = await world.invoke("demo.increment", {"name": "a"}, dry_run=True)
    assert (answer.status_code, answer.json()["source"], sample.world.runs) == (200, "preview", 0)


async def test_a_client_that_takes_events_hears_of_progress_before_the_answer(world: World) -> None:
    accept = {"accept": "text/event-stream"}
    body: Json = {"tool_id": "demo.stepwise", "parameters": {"steps": 3}}
    sample.world.gate = asyncio.Event()
    sample.world.gate.set()
    response = await world.post("/v1/tools/invoke", body, headers=accept)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
    frames = [frame.splitlines() for frame in response.text.strip().split("\n\n") if not frame.startswith(":")]
    events = [(name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))) for name, data in frames]
    *progress, (last, answer) = events
    assert {name for name, _ in progress} == {"progress"}
    assert progress[-1][1]["message"]
    assert (last, answer["status"]) == ("answer", 200)
    plain = (await world.post("/v1/tools/invoke", body)).json()
    assert (answer["body"].keys(), answer["body"]["result"]) == (plain.keys(), plain["result"])

    bad: Json = {"tool_id": "demo.stepwise", "parameters": {"steps": "many"}}
    for sent, status, code in ((bad, 400, "E3301"), ({**bad, "tool_id": "demo.nowhere"}, 404, "E3101")):
        refusal = (await world.post("/v1/tools/invoke", sent, headers=accept)).text
        told = orjson.loads(refusal.split("data: ", 1)[1])
        assert (told["status"], told["body"]["error"]["error_code"]) == (status, code)
    refused(await world.post("/v1/tools/invoke", {"tool": "x"}, headers=accept), 400, "E3004")


@pytest.mark.supports("OPS-01")
async def test_a_call_in_the_background_is_followed_step_by_step_to_its_end(world: World) -> None:
    sample.world.gate = asyncio.Event()
    started = await world.invoke("demo.stepwise", {"steps": 3}, execution_mode="async")
    body = started.json()
    assert (started.status_code, body["status"], started.headers["location"]) == (202, "running", body["poll"])
    assert (await world.get(body["poll"])).json()["status"] == "running"

    heard = asyncio.create_task(world.get(body["events"]))
    await until(lambda: bool(world.app.gateway.observer.followers))
    sample.world.gate.set()
    stream = (await heard).text
    frames = [dict(line.split(": ", 1) for line in frame.splitlines()) for frame in stream.strip().split("\n\n")]
    events = [orjson.loads(frame["data"]) for frame in frames]
    assert [int(frame["id"]) for frame in frames] == list(range(1, len(frames) + 1))
    assert [frame["event"] for frame in frames] == [event["event_class"] for event in events]
    told = [event["data"]["message"] for event in events if event["event_class"] == "tool.invocation.progress"]
    assert told[-3:] == ["step 1", "step 2", "step 3"]
    assert (events[-1]["event_class"], events[-1]["status"]) == ("tool.invocation.status", "succeeded")

    ended = (await world.get(body["poll"])).json()
    assert (ended["status"], ended["state"], ended["result"]) == ("success", "succeeded", 3)
    # A stream on what has ended says how, and ends.
    assert (await world.get(body["events"])).text.count("data: ") == 1
    # To anybody else there is no such call.
    refused(await world.get(body["poll"], "boss"), 404, "E3702")
    refused(await world.get(body["events"], "boss"), 404, "E3702")
    refused(await world.post(f"{body['poll']}/cancel", by="boss"), 404, "E3702")


JUMPS = pytest.mark.sqlite_only("the clock jumps, and what cannot wait is refused until the server was asked")


@pytest.mark.parametrize("how", ["revoked", pytest.param("expired", marks=JUMPS)])
async def test_a_stream_ends_when_its_token_does(world: World, how: str) -> None:
    sample.world.gate = asyncio.Event()
    token = await world.token("scout", user="alice")
    body = (await world.invoke("demo.stepwise", {"steps": 3}, token, execution_mode="async")).json()
    heard = asyncio.create_task(world.get(body["events"], token))
    await until(lambda: bool(world.app.gateway.observer.followers))
    if how == "revoked":
        await world.app.tokens.revoke(token, reason="lost", by=world.app.caller)
    else:
        world.clock.advance(7200)
    sample.world.gate.set()
    *_, last = (await heard).text.strip().split("\n\n")
    name, data = last.splitlines()
    assert (name, orjson.loads(data.partition(": ")[2])["error_code"]) == ("event: error", "E3201")
    assert "tool.invocation.status" not in heard.result().text
    assert "step 1" not in heard.result().text


@pytest.mark.supports("OPS-01")
async def test_a_call_in_the_background_can_be_cancelled(world: World) -> None:
    sample.world.gate = asyncio.Event()
    body = (await world.invoke("demo.stepwise", {"steps": 1}, execution_mode="async")).json()
    await until(lambda: sample.world.runs)
    cancelled = await world.post(f"{body['poll']}/cancel")
    assert cancelled.json() == {"invocation_id": body["invocation_id"], "outcome": "canceled"}
    ended = await until_ended(world, body["poll"])
    assert (ended["status"], ended["error"]["error_code"]) == ("cancelled", "E3703")
    assert (await world.post(f"{body['poll']}/cancel")).json()["outcome"] == "finished"


async def test_a_call_that_failed_in_the_background_says_why(world: World) -> None:
    body = (await world.invoke("demo.nothing", {}, execution_mode="async")).json()
    ended = await until_ended(world, body["poll"])
    assert (ended["status"], ended["detail"][:5]) == ("error", "E3101")


async def test_a_large_result_is_kept_and_fetched_by_its_caller_alone(world: World) -> None:
    body = (await world.invoke("demo.wordy", {"text": "long "})).json()
    assert (body["result"], body["preview"][:5]) == (None, "long ")
    whole = await world.get(f"/v1/payloads/{body['payload_ref']}")
    assert whole.json() == "long " * 100
    refused(await world.get(f"/v1/payloads/{body['payload_ref']}", "boss"), 404, "E3702")
    refused(await world.get("/v1/payloads/undo:1"), 404, "E3702")


async def test_a_write_is_undone_by_whoever_made_it_and_nobody_else(world: World) -> None:
    made = (await world.invoke("demo.increment", {"name": "a", "by": 3}, idempotency_key="k")).json()
    path = f"/v1/calls/{made['invocation_id']}/undo"
    refused(await world.post(path, {"idempotency_key": "u"}, "boss"), 404, "E3702")
    assert sample.world.counters == {"a": 3}
    undone = await world.post(path, {"idempotency_key": "u"})
    assert (undone.status_code, sample.world.counters) == (200, {"a": 0})
    refused(await world.post("/v1/calls/nothing/undo", {"idempotency_key": "u"}), 404, "E3702")


async def test_failures_of_tools_and_gateway_say_nothing_of_what_is_inside(world: World) -> None:
    response = await world.invoke("demo.broken", {"text": "hunter2"})
    refused(response, 500, "E3401")
    assert response.json()["tool_result"]["summary"] == "demo.broken@1.0.0 failed: RuntimeError"
    assert "secret" not in response.text
    assert "hunter2" not in response.text
    world.service.tools.page = None  # type: ignore[assignment] # what nobody foresaw
    unforeseen = await world.get("/v1/tools")
    envelope = refused(unforeseen, 500, "E3000")
    assert envelope["message"] == "something went wrong inside Interlock"
    world.service.calls.invoke = None  # type: ignore[assignment]
    refused(await world.invoke("demo.add", {"a": 1}), 500, "E3000")


# Malformed requests


MALFORMED = (
    b"", b"{", b"[]", b'"x"', b"null", b"\xff", b"[" * 5000, b'{"tool_id": NaN}',
    b'{}', b'{"tool_id": ""}', b'{"tool_id": 1}', b'{"tool_id": null}', b'{"tool_id": "demo.add", "tool": 1}',
    b'{"tool_id": "demo.add", "parameters": []}', b'{"tool_id": "demo.add", "timeout_ms": 0}',
    b'{"tool_id": "demo.add", "timeout_ms": true}', b'{"tool_id": "demo.add", "timeout_ms": 1.5}',
    b'{"tool_id": "demo.add", "execution_mode": "later"}', b'{"tool_id": "demo.add", "dry_run": 1}',
    b'{"tool_id": "demo.add", "idempotency_key": 7}',
)  # fmt: skip


@pytest.mark.supports("OPS-01")
async def test_a_malformed_call_is_e3004_and_nothing_else(world: World) -> None:
    sent = {"content-type": "application/json"}
    for body in MALFORMED:
        refused(await world.ask("POST", "/v1/tools/invoke", content=body, headers=sent), 400, "E3004")
        if body != b"{}":
            response = await world.ask("POST", "/v1/approvals/apr_x/deny", content=body, headers=sent)
            refused(response, 400, "E3004")


@pytest.mark.supports("OPS-01")
async def test_other_malformed_requests_are_e3004_too(world: World) -> None:
    plain = {"content-type": "text/plain"}
    for path in ("/v1/tools/invoke", "/v1/tokens/inspect"):
        refused(await world.ask("POST", path, content=b"{}", headers=plain), 400, "E3004")
    refused(await world.get("/v1/tools", limit=0), 400, "E3004")
    refused(await world.get("/v1/tools", nobody="knows"), 400, "E3004")
    refused(await world.post("/v1/tokens/inspect", {"token": "x", "more": 1}), 400, "E3004")
    refused(await world.post("/v1/tokens/issue", {"agent": "x", "ttl_s": "60"}, "root"), 400, "E3004")
    refused(await world.get("/v1/nothing"), 404, "E3004")
    refused(await world.get("/nothing", None), 404, "E3004")
    refused(await world.get("/v1/tools/"), 404, "E3004")
    wrong = await world.ask("DELETE", "/v1/policy")
    refused(wrong, 405, "E3004")
    assert wrong.headers["allow"]
    refused(await world.ask("PUT", "/v1/tools/invoke"), 405, "E3004")


async def test_a_body_larger_than_the_bound_is_refused_before_anything_reads_it(world: World) -> None:
    large = b" " * (5 << 20)
    for path in ("/v1/tools/invoke", "/v1/tokens/inspect"):
        refused(await world.ask("POST", path, content=large), 413, "E3309")


async def test_whole_numbers_of_any_size_arrive_as_they_were_sent(world: World) -> None:
    body = b'{"tool_id": "demo.echo", "parameters": {"value": [123456789012345678901234567890, 0.1]}}'
    response = await world.ask("POST", "/v1/tools/invoke", content=body, headers={"content-type": "application/json"})
    assert b'"result":[123456789012345678901234567890,0.1]' in response.content


# Who asks


@pytest.mark.supports("AUTH-01")
async def test_without_a_good_token_nothing_but_health_and_the_document_is_served(world: World) -> None:
    document = (await world.get("/openapi.json", None)).json()
    asked: set[str] = set()
    for path, methods in document["paths"].items():
        if path in ("/health", "/ready"):
            continue
        for method in methods:
            url = path.replace("{", "").replace("}", "")
            # An empty body fits few operations: who asks is settled before the body is looked at.
            response = await world.ask(method.upper(), url, None, json={})
            refused(response, 401, "E3212")
            assert response.headers["www-authenticate"].startswith("Bearer")
            refused(await world.ask(method.upper(), url, "a.b.c", json={}), 401, "E3203")
            asked.add(f"{method} {path}")
    assert {"post /v1/tools/invoke", "post /v1/tools/register", "get /v1/tools", "post /v1/tokens/issue"} <= asked
    refused(await world.ask("GET", "/v1/tools", None, headers={"authorization": "Basic eA=="}), 401, "E3203")
    world.clock.advance(7200)
    refused(await world.get("/v1/tools"), 401, "E3201")
    refused(await world.invoke("demo.add", {"a": 1}), 401, "E3201")


@pytest.mark.supports("OPS-01")
async def test_tools_are_listed_page_by_page_and_only_those_the_token_names(world: World) -> None:
    seen: list[str] = []
    cursor: Json = {}
    while True:
        body = (await world.get("/v1/tools", limit=4, **cursor)).json()
        seen += [one["tool_id"] for one in body["tools"]]
        if body["cursor"] is None:
            break
        cursor = {"cursor": body["cursor"]}
    assert seen == sorted(set(seen))
    assert {"demo.add", "demo.send", "demo.wordy"} <= {*seen}

    narrow = await world.token("scout", user="alice", tools=("demo.add", "demo.shout@^1.0.0"))
    assert [one["tool_id"] for one in (await world.get("/v1/tools", narrow)).json()["tools"]] == [
        "demo.add",
        "demo.shout",
    ]
    found = (await world.get("/v1/tools", narrow, q="whole numbers")).json()["tools"]
    assert [one["tool_id"] for one in found] == ["demo.add"]
    refused(await world.get("/v1/tools/demo.send", narrow), 404, "E3101")
    refused(await world.get("/v1/tools/demo.send/versions", narrow), 404, "E3101")


async def test_a_tool_shows_its_contract_and_not_what_runs_it(world: World) -> None:
    shown = await world.get("/v1/tools/demo.add", version="^1.0.0")
    body = shown.json()
    assert (body["tool_id"], body["mutation_class"], body["state"]) == ("demo.add", "read_only", "active")
    assert body["parameters"]["required"] == ["a"]
    assert "execution" not in body
    versions = (await world.get("/v1/tools/demo.add/versions")).json()["versions"]
    assert [one["version"] for one in versions] == ["1.0.0"]
    refused(await world.get("/v1/tools/demo.add", version="^2.0.0"), 404, "E3102")


async def test_a_version_is_deprecated_and_every_answer_says_so(world: World) -> None:
    body = {"version": "1.0.0", "successor": "demo.shout", "days": 30}
    refused(await world.post("/v1/tools/demo.add/deprecate", body), 403, "E3206")
    done = await world.post("/v1/tools/demo.add/deprecate", body, "root")
    assert (done.status_code, done.json()["state"]) == (200, "deprecated")
    called = (await world.invoke("demo.add", {"a": 1})).json()
    assert called["deprecation"]["successor"] == "demo.shout"
    again = {"version": "1.0.0", "successor": "demo.nope", "amend": True}
    refused(await world.post("/v1/tools/demo.add/deprecate", again, "root"), 400, "E3004")
    done = await world.post("/v1/tools/demo.add/deprecate", again | {"anyway": True}, "root")
    assert done.json()["deprecation"] == called["deprecation"] | {"successor": "demo.nope"}


# Approvals


@pytest.mark.supports("OPS-01")
async def test_a_pending_call_is_approved_by_another_person_and_resumed(world: World) -> None:
    asked = await world.invoke("demo.send", {"to": "press"}, idempotency_key="m")
    body = asked.json()
    assert (asked.status_code, body["status"], sample.world.runs) == (202, "pending", 0)
    assert body["pending"]["code"] == "APPROVAL_REQUIRED"
    assert body["pending"]["agreeInAdvance"].startswith("interlock approvals grant demo.send --caller ")
    ticket = body["pending"]["pollEndpoint"]
    assert (await world.get(body["poll"])).json()["status"] == "pending"

    # Neither whoever asked, nor the person it is for, nor any agent decides; nobody else even sees it.
    for who in ("scout", "alice", "root"):
        refused(await world.post(f"{ticket}/approve", by=who), 403, "E3206")
    refused(await world.get(ticket, "root"), 404, "E3702")
    refused(await world.post(body["resume"]), 412, "E3411")
    assert sample.world.runs == 0

    assert [one["id"] for one in (await world.get("/v1/approvals", "boss")).json()["tickets"]] == [
        ticket.rpartition("/")[2]
    ]
    assert (await world.get("/v1/approvals", "root")).json()["tickets"] == []
    shown = (await world.get(ticket, "boss")).json()
    assert shown["params"] == {"to": "press"}
    assert "press would get a mail" in shown["readable"]
    assert "it cannot be undone" in shown["readable"]

    agreed = await world.post(f"{ticket}/approve", {"comment": "us first", "edit": {"to": "desk"}}, "boss")
    assert (agreed.status_code, agreed.json()["status"]) == (200, "APPROVED")
    went_on = await world.post(body["resume"])
    assert (went_on.status_code, went_on.json()["result"], sample.world.runs) == (200, "desk", 1)
    assert went_on.json()["invocation_id"] == body["invocation_id"]
    again = await world.post(f"{ticket}/approve", by="boss")
    refused(again, 412, "E3411")


async def test_a_denied_call_is_refused_with_the_reason(world: World) -> None:
    body = (await world.invoke("demo.send", {"to": "press"}, idempotency_key="m")).json()
    ticket = body["pending"]["pollEndpoint"]
    assert (await world.post(f"{ticket}/deny", {"comment": "not today"}, "boss")).json()["status"] == "DENIED"
    envelope = refused(await world.post(body["resume"]), 403, "E3209")
    assert "not today" in envelope["message"]
    every = (await world.get("/v1/approvals", "boss", all="true")).json()["tickets"]
    assert [one["status"] for one in every] == ["DENIED"]
    refused(await world.post("/v1/approvals/apr_nothing/approve", by="boss"), 404, "E3702")
    refused(await world.post("/v1/tools/resume/nothing"), 404, "E3702")


async def test_a_person_agrees_in_advance_and_takes_it_back(world: World) -> None:
    grant = {"tool": "demo.send", "caller": did("alice"), "arguments": {"to": "*desk"}, "uses": 2, "expires_in_s": 60}
    refused(await world.post("/v1/approvals/standing", grant, "scout"), 403, "E3206")
    refused(await world.post("/v1/approvals/standing", {**grant, "arguments": {"to": "*"}}, "boss"), 400, "E3004")
    refused(await world.post("/v1/approvals/standing", {**grant, "arguments": {"from": "x"}}, "boss"), 400, "E3004")
    refused(await world.post("/v1/approvals/standing", {**grant, "caller": "nobody"}, "boss"), 404, "E3207")
    made = await world.post("/v1/approvals/standing", {**grant, "caller": "scout"}, "boss")
    assert made.status_code == 201
    listed = (await world.get("/v1/approvals/standing", "boss")).json()["standing"]
    assert [one["id"] for one in listed] == [made.json()["id"]]
    assert (await world.get("/v1/approvals/standing", "root")).json()["standing"] == []
    path = f"/v1/approvals/standing/{made.json()['id']}"
    refused(await world.ask("DELETE", path, "root"), 404, "E3702")
    assert (await world.ask("DELETE", path, "boss")).json()["revoked"] is True


@pytest.mark.proves("HITL-09")
async def test_nothing_is_agreed_to_in_advance_without_every_bound(world: World) -> None:
    grant = {"tool": "demo.send", "caller": "scout", "arguments": {"to": "desk"}, "uses": 2, "expires_in_s": 60}
    for missing in grant:
        left = {name: value for name, value in grant.items() if name != missing}
        refused(await world.post("/v1/approvals/standing", left, "boss"), 400, "E3004")
    refused(await world.post("/v1/approvals/standing", {**grant, "arguments": {}}, "boss"), 400, "E3004")
    assert (await world.get("/v1/approvals/standing", "boss")).json()["standing"] == []
    assert await world.app.standing_approvals.list() == []


async def test_a_number_is_agreed_to_in_advance_within_bounds(world: World) -> None:
    def grant(**arguments: Any) -> Json:
        return {"tool": "demo.increment", "caller": "scout", "arguments": arguments, "uses": 2, "expires_in_s": 60}

    path = "/v1/approvals/standing"
    for wrong in ({"maximum": "5"}, {"maximum": True}, {"minimum": 3, "exclusiveMaximum": 2}):
        refused(await world.post(path, grant(name="a", by=wrong), "boss"), 400, "E3004")
    refused(await world.post(path, grant(name={"maximum": 5}, by=1), "boss"), 400, "E3004")
    made = await world.post(path, grant(name="a", by={"minimum": 1, "maximum": 2**70}), "boss")
    assert (made.status_code, made.json()["arguments"]["by"]) == (201, {"minimum": 1, "maximum": 2**70})
    # Whose token is bound to resources agrees to what is written in full, and to no range.
    bound = await world.token("boss", resources=["counter:a"])
    refused(await world.post(path, grant(name="a", by={"maximum": 5}), bound), 403, "E3206")


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("stage:all", "UPDATE")])
async def stage(
    files: Annotated[list[str], Field(description="which files", examples=[["a.py"]])],
    options: Annotated[dict[str, Any] | None, Field(description="how", examples=[{"depth": 1}])] = None,
) -> str:
    """Stage files."""
    return " ".join(files)


@stage.preview
async def _(files: list[str], options: Any) -> Preview:
    return Preview(impact=f"{len(files)} files would be staged")


async def test_items_of_a_list_are_agreed_to_in_advance_each_within_a_bound(world: World) -> None:
    await admit(world.app, stage)

    def grant(**arguments: Any) -> Json:
        return {"tool": "demo.stage", "caller": "scout", "arguments": arguments, "uses": 2, "expires_in_s": 60}

    path, each, anything = "/v1/approvals/standing", {"items": "/srv/*"}, {"x-any": True}
    refused(await world.post(path, grant(files={"items": "*"}, options=anything), "boss"), 400, "E3004")
    refused(await world.post(path, grant(files=each, options=each), "boss"), 400, "E3004")
    made = await world.post(path, grant(files=each, options=anything), "boss")
    assert (made.status_code, made.json()["arguments"]) == (201, {"files": each, "options": anything}), made.text
    # Whose token is bound to resources agrees to what is written in full.
    bound = await world.token("boss", resources=["stage:all"])
    refused(await world.post(path, grant(files=each), bound), 403, "E3206")
    refused(await world.post(path, grant(files=["a"], options=anything), bound), 403, "E3206")
    sent: list[Json] = [
        {"files": ["/srv/a", "/srv/b"], "options": {"depth": 2}},
        {"files": ["/srv/a", "/srv/../b"]},
        {"files": []},
    ]
    asked = [await world.invoke("demo.stage", one, "scout", idempotency_key=f"k{at}") for at, one in enumerate(sent)]
    assert [one.status_code for one in asked] == [200, 202, 202], [one.text for one in asked]


# Tokens, policy, audit


async def test_tokens_are_issued_below_ones_own_passed_on_looked_at_and_revoked(world: World) -> None:
    refused(await world.post("/v1/tokens/issue", {"agent": "x"}), 403, "E3206")
    refused(await world.post("/v1/tokens/issue", {"agent": "x", "person": "y"}, "root"), 400, "E3004")
    refused(await world.post("/v1/tokens/issue", {"agent": "x", "scopes": ["pii:read"]}, "root"), 403, "E3206")
    issued = await world.post(
        "/v1/tokens/issue",
        {"agent": "newcomer", "for": "alice", "tools": ["demo.*@^1.0.0"], "ttl_s": 600, "constraints": {"max_uses": 5}},
        "root",
    )
    token = issued.json()["token"]
    assert (issued.status_code, [one["name"] for one in issued.json()["chain"]]) == (201, ["root", "alice", "newcomer"])
    assert issued.json()["registered"] == ["newcomer"]
    assert (await world.invoke("demo.add", {"a": 1}, token)).status_code == 200

    # Holding a token is the right to pass it on, narrower, to somebody who is known.
    passed = await world.post("/v1/tokens/delegate", {"to": "scout", "tools": ["demo.add@^1.0.0"], "ttl_s": 60}, token)
    assert (passed.status_code, passed.json()["registered"]) == (201, []), passed.text
    narrow = passed.json()["token"]
    assert (await world.invoke("demo.add", {"a": 1}, narrow)).status_code == 200
    refused(await world.invoke("demo.shout", {"text": "x"}, narrow), 403, "E3204")
    refused(await world.post("/v1/tokens/delegate", {"to": "scout", "tools": ["mail.*"]}, token), 403, "E3206")
    refused(await world.post("/v1/tokens/delegate", {"to": "nobody"}, token), 404, "E3207")

    looked = await world.post("/v1/tokens/inspect", {"token": narrow})
    assert (looked.json()["valid"], len(looked.json()["chain"])) == (True, 4)
    refused(await world.post("/v1/tokens/revoke", {"ref": token, "reason": "done"}), 403, "E3206")
    assert (await world.post("/v1/tokens/revoke", {"ref": token, "reason": "done"}, "root")).status_code == 200
    refused(await world.invoke("demo.add", {"a": 1}, narrow), 401, "E3201")
    assert token not in orjson.dumps(world.records("authority")).decode()


async def test_a_manifest_that_says_one_thing_twice_is_refused_with_its_line(world: World) -> None:
    body = orjson.dumps(COMPLETE)[:-1] + b',\n"mutation_class": "read_only"}'
    sent = {"content-type": "application/json"}
    envelope = refused(await world.ask("POST", "/v1/tools/register", "root", content=body, headers=sent), 400, "E3004")
    assert "line 2: `mutation_class` appears twice" in envelope["message"]


async def test_an_explanation_says_when_a_person_is_asked_although_no_rule_says_so(world: World) -> None:
    everybody = '@id("all")\npermit (principal, action, resource);\n'
    assert (await world.ask("PUT", "/v1/policy", "root", json={"text": everybody})).status_code == 200
    world.clock.advance(5)
    question = {"principal": "scout", "tool": "demo.send", "arguments": {"to": "x"}}
    explained = (await world.post("/v1/policy/explain", question, "root")).json()
    assert explained["behavior"] == "ask"
    assert "needs a person" in explained["gate"]
    case = {"principal": "scout", "tool": "demo.send", "arguments": {"to": "x"}, "expect": "ask"}
    (tested,) = (await world.post("/v1/policy/test", {"cases": [case]}, "root")).json()["cases"]
    assert (tested["answer"], tested["passed"]) == (explained["behavior"], True), "both give the same word"
    assert (await world.invoke("demo.send", {"to": "x"}, idempotency_key="k")).status_code == 202
    looked = await world.post("/v1/policy/explain", question | {"operation": "preview"}, "root")
    assert looked.json()["gate"] is None


async def test_cached_decisions_are_dropped_by_an_administrator_only(world: World) -> None:
    refused(await world.post("/v1/policy/forget", {}), 403, "E3206")
    faulty: list[Json] = [{"subjects": []}, {"subjects": [""]}, {"subjects": "scout"}, {"everybody": True}]
    for wrong in faulty:
        refused(await world.post("/v1/policy/forget", wrong, "root"), 400, "E3004")
    named = await world.post("/v1/policy/forget", {"subjects": ["scout", "alice", "scout"]}, "root")
    assert named.json() == {"forgotten": True, "subjects": ["alice", "scout"]}
    assert (await world.post("/v1/policy/forget", {}, "root")).json() == {"forgotten": True, "subjects": None}
    acts = [one for one in world.records("authority") if one["act"] == "policy.forgotten"]
    assert [(one["by"], one["subjects"]) for one in acts] == [(did("root"), ["alice", "scout"]), (did("root"), None)]


async def test_the_policy_is_read_checked_explained_and_replaced(world: World) -> None:
    refused(await world.get("/v1/policy"), 403, "E3206")
    shown = (await world.get("/v1/policy", "root")).json()
    assert shown["text"] == world.app.home.policy.read_text()
    checked = await world.post("/v1/policy/check", {"text": "permit (principal"}, "root")
    assert checked.json()["usable"] is False
    question = {"principal": "scout", "tool": "demo.send", "arguments": {"to": "x"}}
    explained = (await world.post("/v1/policy/explain", question, "root")).json()
    assert (explained["behavior"], explained["gate"]) == ("ask", None)
    assert explained["considered"][0].keys() == {"id", "effect", "line", "text", "holds", "holds_when_approved"}

    nobody = '@id("nobody")\nforbid (principal, action, resource);\n'
    refused(await world.ask("PUT", "/v1/policy", json={"text": nobody}), 403, "E3206")
    refused(await world.ask("PUT", "/v1/policy", "root", json={"text": "permit"}), 400, "E3004")
    stale = {"text": nobody, "instead_of": hashlib.sha256(b"another").hexdigest()}
    refused(await world.ask("PUT", "/v1/policy", "root", json=stale), 409, "E3410")
    applied = await world.ask("PUT", "/v1/policy", "root", json={"text": nobody, "instead_of": shown["digest"]})
    assert applied.json()["applied"] is True
    world.clock.advance(5)
    refused(await world.invoke("demo.add", {"a": 1}), 403, "E3206")
    (record,) = [one for one in world.records("authority") if one["act"] == "policy.applied"]
    assert record["by"] == did("root")


@pytest.mark.supports("OPS-01")
async def test_the_journal_is_read_by_those_who_may_and_that_is_on_record(world: World) -> None:
    call = (await world.invoke("demo.add", {"a": 1})).json()["invocation_id"]
    refused(await world.get("/v1/audit/records"), 403, "E3206")
    refused(await world.get("/v1/audit/verify"), 403, "E3206")
    refused(await world.get("/v1/audit/export"), 403, "E3206")
    assert world.records("audit.read") == []

    found = (await world.get("/v1/audit/records", "root", call=call)).json()
    assert [one["record"]["kind"] for one in found["records"]] == ["closed"]
    (read,) = world.records("audit.read")
    assert (read["by"], read["door"], read["sought"]) == (did("root"), "rest", {"call": call})
    verdict = (await world.get("/v1/audit/verify", "root")).json()
    assert (verdict["intact"], verdict["faults"]) == (True, [])
    exported = (await world.get("/v1/audit/export", "root")).content
    assert verify_export(exported.splitlines(keepends=True)).intact
    lines = exported.splitlines()
    head = bytes(32)
    for line in lines:
        entry: Json = orjson.loads(line)
        body = line[line.index(b'"record":') + 9 : -1]
        head = hashlib.sha256(head + entry["seq"].to_bytes(8, "big") + body).digest()
        assert entry["hash"] == head.hex()
    assert [one["what"] for one in world.records("audit.read")] == ["records", "verify", "export"]


# Upstreams


async def test_upstreams_are_listed_refreshed_and_removed_by_those_who_may(world: World) -> None:
    tools = [
        {
            "name": "rate", "description": "Rate of one currency.", "method": "POST", "path": "/echo",
            "input_schema": {
                "type": "object",
                "properties": {"of": {"type": "string", "description": "currency", "examples": ["CHF"]}},
                "required": ["of"],
            },
            "output_schema": {"type": "object"},
        }
    ]  # fmt: skip
    async with HttpServer.open() as server:
        config: Json = {"urls": [server.url], "tools": tools, "allow_private": True}
        await world.app.upstreams.add("bank", "http", config, by=world.app.caller)
        refused(await world.get("/v1/upstreams"), 403, "E3206")
        (listed,) = (await world.get("/v1/upstreams", "root")).json()["upstreams"]
        assert (listed["name"], listed["state"], [one["name"] for one in listed["tools"]]) == (
            "bank", "available", ["rate"],
        )  # fmt: skip
        assert (listed["tools"][0]["mutation_class"], listed["tools"][0]["why"]) == (
            "write_irreversible", "unknown, so treated as irreversible",
        )  # fmt: skip
        assert (await world.get("/ready", None)).json()["dependencies"]["upstreams"] == "healthy"
        refused(await world.get("/v1/upstreams/bank"), 403, "E3206")
        refused(await world.post("/v1/upstreams/bank/probe"), 403, "E3206")
        refused(await world.get("/v1/upstreams/nobody", "root"), 404, "E3101")
        probed = (await world.post("/v1/upstreams/bank/probe", by="root")).json()
        assert probed == {"name": "bank", "state": "available", "reason": ""}
        renamed = {"tools": {"rate": {"title": "A rate"}}}
        assert (await world.post("/v1/upstreams/bank/refresh", {"overlay": renamed}, "root")).json()["tools"][0][
            "state"
        ] == "changed"
        shown = (await world.get("/v1/upstreams/bank", "root")).json()
        assert [one["state"] for one in shown["services"]] == ["closed"] * len(shown["services"])
        (tool,) = shown["tools"]
        assert tool["changes"] == {"title": ["rate", "A rate"]}
        looked = {"reason": "a better title", "shown": {"rate": tool["seen"]}}
        assert (await world.post("/v1/upstreams/bank/accept", looked, "root")).json()["tools"][0]["state"] == "admitted"
        assert (await world.post("/v1/upstreams/bank/refresh", by="root")).json()["upstream"] == "bank"
        refused(await world.post("/v1/upstreams/bank/refresh", {"overlay": {"nobody": 1}}, "root"), 422, "E3105")
        refused(await world.post("/v1/upstreams/bank/accept", {"reason": "x", "tools": ["rate"]}, "root"), 404, "E3101")
        refused(await world.post("/v1/upstreams/bank/accept", {"reason": "looked"}, "scout"), 403, "E3206")
        assert (await world.ask("DELETE", "/v1/upstreams/bank", "root")).json() == {"removed": "bank"}
        refused(await world.ask("DELETE", "/v1/upstreams/bank", "root"), 404, "E3101")
        refused(await world.post("/v1/upstreams/bank/refresh", by="root"), 404, "E3101")


async def test_through_a_door_no_upstream_reaches_into_the_machine(world: World) -> None:
    reaching: tuple[tuple[str, Json], ...] = (
        ("mcp", {"command": ["sh", "-c", "true"]}),
        ("mcp", {"url": "https://127.0.0.1:9/mcp", "allow_private": True}),
        ("http", {"urls": ["https://example.org"], "tls": {"ca_file": "/etc/passwd"}}),
        ("http", {"urls": ["https://example.org"], "auth": {"kind": "bearer", "secret": "bank"}}),
    )
    for kind, config in reaching:
        asked = await world.post("/v1/upstreams", {"name": "bank", "kind": kind, "config": config}, "root")
        refused(asked, 403, "E3206")
    module = {"name": "bank", "kind": "langchain", "config": {"module": "os"}}
    refused(await world.post("/v1/upstreams", module, "root"), 400, "E3004")
    # Without leave, an address inside is not reached either.
    inside = {"name": "bank", "kind": "mcp", "config": {"url": "http://127.0.0.1:9/mcp"}}
    assert (await world.post("/v1/upstreams", inside, "root")).status_code >= 400
    refused(await world.post("/v1/upstreams", inside), 403, "E3206")
    assert (await world.get("/v1/upstreams", "root")).json() == {"upstreams": [], "services": []}


# Health


@pytest.mark.proves("OPS-10")
async def test_health_and_readiness_need_no_token_and_follow_the_store(world: World) -> None:
    alive = await world.get("/health", None)
    assert (alive.status_code, alive.json()["status"]) == (200, "healthy")
    ready = await world.get("/ready", None)
    assert (ready.status_code, ready.json()["status"]) == (200, "healthy")
    assert ready.json()["dependencies"]["store"] == ready.json()["dependencies"]["signer"] == "healthy"

    await world.app.journal.close()
    world.clock.advance(1)
    gone = await world.get("/ready", None)
    assert (gone.status_code, gone.json()["dependencies"]["store"]) == (503, "down")
    assert (await world.get("/health", None)).status_code == 200


async def test_readiness_follows_the_policy_whose_change_is_told_in_the_log_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "interlock.policy")
    path = world.app.home.policy
    good = path.read_text()

    async def ready() -> tuple[int, str]:
        world.clock.advance(1)
        answer = await world.get("/ready", None)
        refusals = [await world.invoke("demo.add", {"a": number}) for number in range(2)]
        assert {"E3205" in one.text for one in refusals} == {answer.status_code == 503}
        return answer.status_code, answer.json()["dependencies"]["policy"]

    def told() -> list[tuple[str, str]]:
        found = [(line.levelname, line.getMessage()) for line in caplog.records if line.name == "interlock.policy"]
        caplog.clear()
        return found

    assert (await ready(), told()) == ((200, "healthy"), [])
    path.unlink()
    assert await ready() == await ready() == (503, "down")
    ((level, words),) = told()
    assert level == "ERROR"
    assert words.startswith("the policy cannot be used: policy.cedar is missing from the data directory")
    path.write_text("permit (principal, action, resorce);")
    assert await ready() == await ready() == (503, "down")
    ((level, words),) = told()
    assert level == "ERROR"
    assert words.startswith("the policy cannot be used: ")
    path.write_text(good)
    assert await ready() == await ready() == (200, "healthy")
    assert told() == [("WARNING", "the policy can be used again")]


@pytest.mark.sqlite_only("the disk of the data directory is full")
async def test_readiness_finds_a_full_disk_with_a_write_that_leaves_nothing_and_is_seldom(world: World) -> None:
    async def store() -> tuple[int, str]:
        world.clock.advance(1)
        answer = await world.get("/ready", None)
        return answer.status_code, answer.json()["dependencies"]["store"]

    read = world.app.journal.reader.all
    before = read("SELECT count(*) FROM journal")
    written: set[str] = set()
    for _ in range(10):
        assert await store() == (200, "healthy")
        written |= {value for (value,) in read("SELECT value FROM fact WHERE name = 'ready_ms'")}
    assert 1 < len(written) <= 4
    with full_disk(world.app.home.path):
        for _ in range(400):
            if await store() == (503, "down"):
                break
        assert await store() == (503, "down")
        unwritten = await world.invoke("demo.add", {"a": 1})
        assert (unwritten.status_code, unwritten.json()["detail"][:5]) in ((503, "E3801"), (503, "E3803"))
    assert read("SELECT count(*) FROM journal") == before
    world.clock.advance(10)
    assert await store() == (200, "healthy")


# The invoke route by itself


def test_what_may_be_tried_again_says_when() -> None:
    reply = of_failure(Failure("E3003", "too many", retry_after_ms=1500), "t")
    assert (reply.status, reply.headers) == (429, ((b"retry-after", b"2"),))


async def test_the_invoke_route_answers_as_the_whole_application_does(world: World) -> None:
    route = invoke_route(world.service, most=300)
    transport = httpx.ASGITransport(route)
    async with httpx.AsyncClient(transport=transport, base_url="http://interlock", timeout=60) as client:
        headers = {"authorization": f"Bearer {world.tokens['scout']}"}
        body = {"tool_id": "demo.add", "parameters": {"a": 2}}
        answer = await client.post("/v1/tools/invoke", json=body, headers=headers)
        assert (answer.status_code, answer.json()["result"]) == (200, 7)
        long = {"tool_id": "demo.shout", "parameters": {"text": "x" * 300}}
        refused(await client.post("/v1/tools/invoke", json=long, headers=headers), 413, "E3309")
    assert route.matches({"path": "/v1/tools/invoke", "method": "POST"})
    assert not route.matches({"path": "/v1/tools/invoke", "method": "GET"})
    assert not route.matches({"path": "/v1/tools", "method": "POST"})
