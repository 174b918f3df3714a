"""JSON-RPC 2.0 to the letter, over the whole door."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.core.errors import CODES
from interlock.doors.jsonrpc import MAX_BATCH, JsonRpcDoor
from tests.support.batches import (
    OVERLAPPING,
    gates,
    others_would_have_begun,
    overlaps,
    prepare,
    release,
    running,
    shift,
)
from tests.support.calls import until
from tests.support.rest import World, serving

Json = dict[str, Any]
OPS_03 = pytest.mark.proves("OPS-03")
ADD = {"tool_id": "demo.add", "parameters": {"a": 2, "b": 3}}


class Wire:
    """The door, spoken to over HTTP."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(JsonRpcDoor(world.service)), base_url="http://interlock"
        )

    async def send(self, content: Any, by: str | None = "scout") -> httpx.Response:
        headers = {} if by is None else {"authorization": f"Bearer {self.world.tokens.get(by, by)}"}
        if isinstance(content, bytes):
            return await self._client.post("/rpc", content=content, headers=headers)
        return await self._client.post("/rpc", json=content, headers=headers)

    async def ask(self, method: str, params: Any = None, by: str | None = "scout", **more: Any) -> Json:
        request = {"jsonrpc": "2.0", "id": 1, "method": method, **more}
        answer = await self.send(request if params is None else {**request, "params": params}, by)
        assert answer.status_code == 200
        return answer.json()

    async def close(self) -> None:
        await self._client.aclose()


@pytest_asyncio.fixture
async def wire(home: Path) -> AsyncGenerator[Wire]:
    async with serving(home) as world:
        made = Wire(world)
        yield made
        await made.close()


def call(**more: Any) -> Json:
    return {"jsonrpc": "2.0", "method": "tools.invoke", "params": ADD, **more}


@OPS_03
@pytest.mark.parametrize("given_id", [1, 0, -7, "x", "", 1.5, None, 2**63 - 1])
async def test_an_id_comes_back_as_it_was_sent(wire: Wire, given_id: Any) -> None:
    answer = (await wire.send(call(id=given_id))).json()
    assert (answer["jsonrpc"], answer["id"]) == ("2.0", given_id)
    assert answer["result"]["structured_content"] == 5


@OPS_03
async def test_parameters_come_by_name_or_by_position(wire: Wire) -> None:
    named = await wire.ask("tools.invoke", ADD)
    placed = await wire.ask("tools.invoke", ["demo.add", {"a": 2, "b": 3}])
    assert named["result"]["structured_content"] == placed["result"]["structured_content"] == 5


@OPS_03
async def test_a_notification_is_carried_out_and_not_answered(wire: Wire) -> None:
    for content in (call(), [call(), call()], [call(), {"jsonrpc": "2.0", "method": "tools.list"}]):
        answer = await wire.send(content)
        assert (answer.status_code, answer.content) == (204, b"")
    assert len(wire.world.records("closed")) == 4
    assert (await wire.send(call(params={"tool_id": "no.such"}))).status_code == 204, "its failure is not answered"
    unknown, strange = {"jsonrpc": "2.0", "method": "nope"}, {**call(), "params": {"strange": 1}}
    for content in (unknown, strange, [unknown, strange]):
        answer = await wire.send(content)
        assert (answer.status_code, answer.content) == (204, b"")
    mixed = (await wire.send([unknown, {"jsonrpc": "2.0", "id": 7, "method": "nope"}])).json()
    assert [one["id"] for one in mixed] == [7]


@OPS_03
@pytest.mark.parametrize(
    ("content", "code", "answered"),
    [
        (b'{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', -32700, None),
        (b"", -32700, None),
        (b"\xff\xfe", -32700, None),
        (b"[" * 20_000, -32700, None),
        (b'[{"jsonrpc": "2.0", "method"', -32700, None),
        (b"[]", -32600, None),
        (b"1", -32600, None),
        (b"null", -32600, None),
        (b'{"jsonrpc": "2.0", "method": 1, "params": "bar"}', -32600, None),
        (b'{"jsonrpc": "1.0", "id": 5, "method": "tools.list"}', -32600, None),
        (b'{"id": 5, "method": "tools.list"}', -32600, None),
        (b'{"jsonrpc": "2.0", "id": {}, "method": "tools.list"}', -32600, None),
        (b'{"jsonrpc": "2.0", "id": true, "method": "tools.list"}', -32600, None),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "tools.list", "params": 7}', -32600, 5),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "foobar"}', -32601, 5),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "tools.invoke", "params": {}}', -32602, 5),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "tools.invoke", "params": {"tool_id": 3}}', -32602, 5),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "tools.invoke", "params": {"tool_id": "a", "x": 1}}', -32602, 5),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "tools.invoke", "params": {"tool_id": "a", "trace": "x"}}', -32602, 5),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "tools.list", "params": [null, 1, 2]}', -32602, 5),
        (b'{"jsonrpc": "2.0", "id": 5, "method": "tools.list", "params": {"limit": 0}}', -32602, 5),
    ],
)
async def test_faults_of_the_protocol_have_the_reserved_codes(
    wire: Wire, content: bytes, code: int, answered: Any
) -> None:
    answer = (await wire.send(content)).json()
    assert (answer["jsonrpc"], answer["id"], answer["error"]["code"]) == ("2.0", answered, code)
    assert "result" not in answer
    assert "Traceback" not in answer["error"]["message"]


@OPS_03
async def test_a_batch_answers_each_request_and_each_fault(wire: Wire) -> None:
    batch = [
        call(id="1"),
        call(),
        {"jsonrpc": "2.0", "method": "tools.list", "id": "2"},
        {"foo": "boo"},
        {"jsonrpc": "2.0", "method": "foo.get", "id": "5"},
        1,
        call(id="9", params={"tool_id": "no.such"}),
    ]
    answers: list[Json] = (await wire.send(batch)).json()
    told = {str(one["id"]) + str(at): one.get("error", {}).get("code") for at, one in enumerate(answers)}
    assert told == {"10": None, "21": None, "None2": -32600, "53": -32601, "None4": -32600, "95": -32004}
    too_many = (await wire.send([call(id=n) for n in range(MAX_BATCH + 1)])).json()
    assert too_many["error"]["code"] == -32600


def member(kind: str, number: int) -> Json:
    given: Json = {"tool_id": f"b.{kind}", "parameters": {"number": number}}
    if kind.startswith("write"):
        given["idempotency_key"] = f"k{number}"
    return {"jsonrpc": "2.0", "id": number, "method": "tools.invoke", "params": given}


@pytest.mark.proves("LIFE-17")
@pytest.mark.parametrize("kind", OVERLAPPING)
async def test_safe_calls_of_a_batch_run_at_the_same_time(wire: Wire, kind: str) -> None:
    await prepare(wire.world.app)
    assert "result" in await wire.ask("tools.list")  # the caller is known
    task = asyncio.create_task(wire.send([member(kind, number) for number in range(5)]))
    await until(lambda: len(running) == 5)
    for gate in gates.values():
        gate.set()
    answers: list[Json] = (await task).json()
    assert [one["result"]["structured_content"] for one in answers] == [0, 1, 2, 3, 4]


@pytest.mark.proves("LIFE-17")
@pytest.mark.parametrize("kind", ["write", "outside", "alone"])
async def test_unsafe_calls_of_a_batch_run_alone_and_answers_keep_the_order_of_requests(wire: Wire, kind: str) -> None:
    await prepare(wire.world.app)
    kinds = ["safe", kind, kind, "safe", "depends", "depends"]
    batch = [member(one, number) for number, one in enumerate(kinds)]
    task = asyncio.create_task(wire.send(batch))
    await release(list(range(len(kinds))), task.done)
    answers: list[Json] = (await task).json()
    assert [one["result"]["structured_content"] for one in answers] == list(range(len(kinds)))
    assert [number for _, number in overlaps] == list(range(len(kinds)))
    assert [set(others) for others, _ in overlaps[:4]] == [set()] * 4
    # The number 4 may overlap, as it is even, and 5 may not.
    assert overlaps[4][0] <= {3}
    assert overlaps[5][0] == set()


@pytest.mark.proves("LIFE-17", "OBS-10")
async def test_a_tool_decides_by_the_input_that_hooks_leave_and_is_told_under_its_id(wire: Wire) -> None:
    app = wire.world.app
    await prepare(app)
    await app.journal.changes.look()  # that there are new tools is told before anybody listens
    assert "result" in await wire.ask("tools.list")  # the caller is known
    seen, heard = shift(app, 1), list[str]()
    app.listen(lambda event: heard.append(event.invocation_id))
    task = asyncio.create_task(wire.send([member("depends", number) for number in (0, 2, 4)]))
    await until(lambda: running == {1})
    await others_would_have_begun()
    assert seen == [0], "by the input as it was sent, all three would run now"
    await release([1, 3, 5], task.done)
    answers: list[Json] = (await task).json()
    assert [one["result"]["structured_content"] for one in answers] == [1, 3, 5]
    assert overlaps == [(frozenset(), number) for number in (1, 3, 5)]
    assert seen == [0, 2, 4]
    assert set(heard) == {one["result"]["invocation_id"] for one in answers}


@pytest.mark.proves("LIFE-17")
async def test_context_modifiers_of_calls_that_overlapped_are_refused(wire: Wire) -> None:
    await prepare(wire.world.app)
    assert "result" in await wire.ask("tools.list")  # the caller is known

    def change(number: int) -> Json:
        return call(id=number, params={"tool_id": "b.modifies", "parameters": {"text": "a"}})

    for batch, refused in (
        ([change(1), change(2)], True),
        ([change(1)], False),
        ([change(1), member("alone", 9)], False),
    ):
        task = asyncio.create_task(wire.send(batch))
        await release([9], task.done)
        told = [one["result"]["metadata"] for one in (await task).json() if one["id"] != 9]
        assert [one.get("context_modifiers") for one in told] == [None if refused else {"topic": "a"}] * len(told)
        assert ["CONTEXT_MODIFIERS_REFUSED" in one.get("warnings", []) for one in told] == [refused] * len(told)


@OPS_03
async def test_the_envelope_in_data_is_the_one_that_rest_gives(wire: Wire) -> None:
    wanted: tuple[Json, ...] = (
        {"tool_id": "demo.add", "parameters": {"a": "x"}},
        {"tool_id": "no.such", "parameters": {}},
    )
    for parameters in wanted:
        rpc = (await wire.ask("tools.invoke", parameters))["error"]
        rest = (await wire.world.post("/v1/tools/invoke", parameters)).json()["error"]
        assert rpc["code"] == CODES[rest["error_code"]].jsonrpc
        assert rpc["message"] == rest["message"]
        assert {**rpc["data"], "traceId": ""} == {**rest, "traceId": ""}


@OPS_03
@pytest.mark.supports("AUTH-01")
async def test_who_is_not_known_is_told_so(wire: Wire) -> None:
    for by, code in ((None, "E3212"), ("nonsense", "E3203")):
        error = (await wire.ask("tools.list", by=by))["error"]
        assert (error["code"], error["data"]["error_code"]) == (-32001, code)


@OPS_03
async def test_a_call_waits_for_a_person_and_goes_on(wire: Wire) -> None:
    wanted = {"tool_id": "demo.send", "parameters": {"to": "ann"}, "idempotency_key": "k1"}
    pending = (await wire.ask("tools.invoke", wanted))["result"]
    assert pending["status"] == "awaiting_approval"
    assert " --arg to=ann --uses 10 " in pending["pending"]["agreeInAdvance"]
    call_id, ticket = pending["invocation_id"], pending["pending"]["ticketId"]
    assert (await wire.ask("calls.status", {"invocation_id": call_id}))["result"]["status"] == "awaiting_approval"
    assert "error" in await wire.ask("approvals.approve", {"ticket_id": ticket}), "an agent never decides"
    assert "error" in await wire.ask("approvals.approve", {"ticket_id": ticket}, by="alice"), "nor who it is for"
    listed = (await wire.ask("approvals.list", by="boss"))["result"]["approvals"]
    assert [one["id"] for one in listed] == [ticket]
    shown = (await wire.ask("approvals.show", [ticket], by="boss"))["result"]
    assert shown["status"] == "PENDING"
    approved = (await wire.ask("approvals.approve", {"ticket_id": ticket, "comment": "fine"}, by="boss"))["result"]
    assert approved["status"] == "APPROVED"
    done = (await wire.ask("calls.resume", [call_id]))["result"]
    assert (done["invocation_id"], done["status"]) == (call_id, "succeeded")
    again = (await wire.ask("tools.invoke", {**wanted, "idempotency_key": "k2"}))["result"]["pending"]["ticketId"]
    denied = (await wire.ask("approvals.deny", {"ticket_id": again, "comment": "no"}, by="boss"))["result"]
    assert denied["status"] == "DENIED"


@OPS_03
async def test_a_call_in_the_background_is_followed_and_cancelled(wire: Wire) -> None:
    started = (await wire.ask("tools.invoke", {**ADD, "execution_mode": "async"}))["result"]
    await wire.world.service.calls.close()
    status = (await wire.ask("calls.status", [started["invocation_id"]]))["result"]
    assert (status["status"], status["result"]["structured_content"]) == ("succeeded", 5)
    assert (await wire.ask("calls.cancel", [started["invocation_id"]]))["result"] == {"answer": "finished"}
    other = await wire.ask("calls.status", [started["invocation_id"]], by="boss")
    assert other["error"]["data"]["error_code"] == "E3702", "a call is its caller's affair"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
_frame = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | _json,
        "id": _json,
        "method": st.sampled_from(["tools.list", "tools.invoke", "calls.status", "approvals.approve"]) | _json,
        "params": _json,
    },
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.binary(max_size=200) | _frame | st.lists(_frame, max_size=3))
async def test_whatever_is_sent_is_answered_in_form(wire: Wire, content: Any) -> None:
    answer = await wire.send(content)
    assert answer.status_code in (200, 204)
    answered: Any = answer.json() if answer.status_code == 200 else []
    for one in cast("list[Json]", answered if isinstance(answered, list) else [answered]):
        assert one["jsonrpc"] == "2.0"
        assert ("result" in one) != ("error" in one)
        assert one.get("error", {}).get("data", {}).get("error_code") != "E3000"


async def test_only_posts_within_bounds_are_read(wire: Wire) -> None:
    answer = await wire.send(b"[" + b" " * (5 << 20) + b"]")
    assert (answer.status_code, answer.json()["error"]["error_code"]) == (413, "E3309")


async def test_an_auditor_sees_calls_of_others_and_touches_none(wire: Wire) -> None:
    started = (await wire.ask("tools.invoke", {**ADD, "execution_mode": "async"}))["result"]["invocation_id"]
    await wire.world.service.calls.close()
    assert (await wire.ask("calls.status", [started], by="root"))["result"]["tool_id"] == "demo.add"
    for method in ("calls.cancel", "calls.resume"):
        assert (await wire.ask(method, [started], by="root"))["error"]["data"]["error_code"] == "E3702"


async def test_the_page_tells_of_every_method_and_its_parameters(wire: Wire) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/jsonrpc.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    told: dict[str, list[str]] = {}
    for methods, parameters in rows:
        lists = parameters.split(";") if ";" in parameters else [parameters]
        for method, names in zip(re.findall("`([^`]+)`", methods), lists, strict=True):
            told[method] = re.findall("`([^`]+)`", names)
    assert len(told) == 20
    for method, names in told.items():
        # One parameter too many, and the refusal lists those that there are.
        error = (await wire.ask(method, {"strange": 1}))["error"]
        known = error["message"].partition(" takes ")[2]
        assert (error["code"], [one for one in known.split(", ") if one]) == (-32602, names), method
    assert (await wire.ask("nope"))["error"]["code"] == -32601


@OPS_03
async def test_a_fault_of_the_door_itself_has_the_reserved_code_and_tells_nobody_why(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.world.service.calls, "status", None)
    answer = await wire.ask("calls.status", {"invocation_id": "x"})
    assert answer["error"]["code"] == -32603
    assert answer["error"]["data"]["error_code"] == "E3000"
    assert "NoneType" not in str(answer)
    assert (await wire.ask("tools.invoke", ADD))["result"]["structured_content"] == 5
