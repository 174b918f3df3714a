"""WebSocket services as upstreams: answers find their calls, connections their callers, and nothing is done twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.testing import FakeClock
from interlock.upstreams.websocket import WebSocketUpstream
from interlock.upstreams.websocket_config import WebSocketConfig
from tests.support.upstream_servers import (
    TRACEPARENT,
    Pauses,
    SocketServer,
    Tap,
    governed,
    new_certificate,
    remote_call,
    services_of,
    tls_contexts,
)

SILENT: Json = {"name": "x", "description": "y", "input_schema": {"type": "object"}}
ECHO: Json = {"protocol": "websocket", "method": "echo", "result": "result", "error": "error"}


@asynccontextmanager
async def upstream(*urls: str, **said: Any) -> AsyncGenerator[WebSocketUpstream]:
    more: dict[str, Any] = {"clock": Clock(), "sleep": Pauses()}
    more |= {name: said.pop(name) for name in ("resolve", "clock", "sleep", "services") if name in said}
    config = WebSocketConfig.model_validate({"urls": list(urls), "allow_private": True, **said})
    one = WebSocketUpstream("feed", config, **more)
    try:
        yield one
    finally:
        await one.close()


async def failure_of(one: WebSocketUpstream, native: Json = ECHO, **facts: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        await one.call(remote_call(native, **facts))
    return caught.value


@pytest.mark.shows("WebSocket", "call")
@pytest.mark.proves("OBS-02")
@pytest.mark.part_of(
    "AUTH-09",
    rest="upstreams that are not on one's own networks only with send_caller",
)
@pytest.mark.proves("EXEC-09")
@pytest.mark.supports("LIFE-10")
async def test_a_message_carries_arguments_trace_deadline_and_key() -> None:
    async with SocketServer.open() as server, upstream(server.url, auth={"kind": "bearer", "secret": "T"}) as one:
        facts: Json = {"credentials": {"T": "s3cret"}, "writes": True, "key": "k1", "left_s": 20}
        assert await one.call(remote_call(ECHO, {"a": 1}, **facts)) == {"a": 1}
        assert (await failure_of(one)).code == "E3602"
    (message,) = server.heard
    meta = message.pop("meta")
    assert message == {"jsonrpc": "2.0", "id": 1, "method": "echo", "params": {"a": 1}}
    assert (meta["traceparent"], meta["tracestate"]) == (TRACEPARENT, "vendor=value")
    assert 15_000 < meta["deadlineMs"] <= 20_000
    assert meta["idempotencyKey"]
    assert meta["x-interlock-caller"] == "ada"
    assert [shaken["authorization"] for shaken in server.handshakes] == ["Bearer s3cret"]


@pytest.mark.shows("WebSocket", "discovery")
async def test_a_written_message_is_filled_and_its_answer_taken_apart() -> None:
    tool = {
        "name": "quote", "description": "Gives the price of one symbol.", "input_schema": {"type": "object"},
        "send": {"op": "quote", "rid": "{id}", "symbols": ["{symbol}"], "more": "{*}"}, "result": "data.price",
        "error": "fault",
    }  # fmt: skip

    async def answer(message: Json, _: Any) -> list[Any]:
        if message["symbols"] == ["none"]:
            return [{"re": {"rid": message["rid"]}, "fault": {"code": 7, "text": "no such thing, s3cret"}}]
        return [{"re": {"rid": str(message["rid"])}, "data": {"price": 12.5}}]

    async with (
        SocketServer.open() as server,
        upstream(server.url, tools=[tool], id_field="re.rid", context="") as one,
    ):
        server.answer = answer
        (found,) = (await one.discover()).tools
        assert await one.call(remote_call(found.native, {"symbol": "X", "n": 1})) == 12.5
        failure = await failure_of(one, found.native, arguments={"symbol": "none"}, credentials={"T": "s3cret"})
    assert server.heard[0] == {"op": "quote", "rid": 1, "symbols": ["X"], "more": {"n": 1}}
    assert (failure.code, failure.retryable) == ("E3401", False)
    assert "no such thing" in failure.message
    assert "s3cret" not in repr(failure.envelope("t"))
    assert len(server.heard) == 2


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(20)), noise=st.sets(st.integers(0, 19)))
async def test_answers_out_of_order_and_among_noise_find_their_calls(order: list[int], noise: set[int]) -> None:
    async with SocketServer.open() as server, upstream(server.url) as one:
        all_here = asyncio.Event()

        async def answer(message: Json, connection: Any) -> list[Any]:
            if len(server.heard) == len(order) and not all_here.is_set():
                all_here.set()
                by_number = {heard["params"]["n"]: heard for heard in server.heard}
                out: list[Any] = []
                for n in order:
                    if n in noise:
                        out += [{"jsonrpc": "2.0", "method": "event"}, "not json", {"id": 9999, "result": "stray"}, [3]]
                    out.append({"id": by_number[n]["id"], "result": n})
                return out
            return []

        server.answer = answer
        values = await asyncio.gather(*(one.call(remote_call(ECHO, {"n": n})) for n in range(20)))
    assert values == list(range(20))


@pytest.mark.proves("EXEC-09")
async def test_connections_stay_within_the_pool_over_many_calls(tmp_path: Path) -> None:
    certificate = new_certificate(tmp_path)
    tls = {"ca_file": str(certificate.cert_file)}
    async with (
        SocketServer.open(certificate.server_context) as server,
        upstream(server.url, tls=tls, max_connections=3, calls_per_connection=10) as one,
    ):
        await one.call(remote_call(ECHO, {"n": -1}))
        contexts = tls_contexts()
        for start in range(0, 500, 50):
            calls = (one.call(remote_call(ECHO, {"n": start + n})) for n in range(50))
            assert [value["n"] for value in await asyncio.gather(*calls)] == list(range(start, start + 50))
        assert tls_contexts() == contexts
    assert len(server.heard) == 501
    assert len(server.handshakes) == server.most_open == 3


@pytest.mark.shows("WebSocket", "credentials")
async def test_a_connection_serves_only_those_who_hold_its_credential() -> None:
    said: Json = {"auth": {"kind": "query", "secret": "T", "name": "token"}, "max_connections": 2}
    async with SocketServer.open() as server, upstream(server.url, **said) as one:
        for secret in ("a", "b", "a", "c", "a&b"):
            await one.call(remote_call(ECHO, credentials={"T": secret}))
        assert [path.partition("?")[2] for path in server.paths] == ["token=a", "token=b", "token=c", "token=a%26b"]
        assert server.most_open == 2
        held = asyncio.Event()

        async def hold(message: Json, _: Any) -> list[Any]:
            await held.wait()
            return [{"id": message["id"], "result": 1}]

        server.answer = hold
        async with asyncio.TaskGroup() as group:
            for secret in ("a", "c"):
                group.create_task(one.call(remote_call(ECHO, credentials={"T": secret})))
            await server.has_heard(7)
            failure = await failure_of(one, credentials={"T": "d"}, attempts=1)
            held.set()
    assert (failure.code, failure.details) == ("E3502", {"sent": False})


@pytest.mark.shows("WebSocket", "no resent writes")
@pytest.mark.proves("EXEC-09")
@pytest.mark.supports("CONTRACT-14")
async def test_a_broken_connection_fails_every_call_on_it_and_no_write_is_sent_again() -> None:
    async with (
        SocketServer.open() as server,
        Tap.open(server.port) as tap,
        upstream(f"ws://127.0.0.1:{tap.port}") as one,
    ):
        echo = server.answer

        async def nothing(_: Json, __: Any) -> list[Any]:
            return []

        server.answer = nothing
        calls = [asyncio.create_task(failure_of(one, writes=True, key=f"k{n}")) for n in range(10)]
        await server.has_heard(10)
        server.answer = echo
        tap.cut()
        failures = await asyncio.gather(*calls)
        assert {(failure.code, (failure.details or {})["sent"]) for failure in failures} == {("E3502", True)}
        assert len(server.heard) == 10
        assert await one.call(remote_call(ECHO, {"n": 1})) == {"n": 1}  # over a new connection
    assert tap.connections == 2


async def test_closing_ends_the_calls_that_are_under_way() -> None:
    async with SocketServer.open() as server, upstream(server.url) as one:

        async def nothing(_: Json, __: Any) -> list[Any]:
            return []

        server.answer = nothing
        waiting = asyncio.create_task(failure_of(one, writes=True))
        await server.has_heard(1)
        await one.close()
        assert ((await waiting).code, len(server.heard)) == ("E3502", 1)


@pytest.mark.shows("WebSocket", "retries of reads")
async def test_a_read_on_a_broken_connection_is_sent_again() -> None:
    async with SocketServer.open() as server, upstream(server.url) as one:
        echo = server.answer

        async def cut(_: Json, connection: Any) -> list[Any]:
            server.answer = echo
            connection.transport.abort()
            return []

        server.answer = cut
        assert await one.call(remote_call(ECHO, {"n": 1})) == {"n": 1}
    assert len(server.heard) == 2


@pytest.mark.shows("WebSocket", "deadline")
@pytest.mark.supports("EXEC-09")
async def test_a_slow_answer_is_given_up_and_dropped_when_it_comes() -> None:
    async with SocketServer.open() as server, upstream(server.url) as one:
        late: list[Json] = []

        async def slow(message: Json, _: Any) -> list[Any]:
            if message["params"].get("slow"):
                late.append({"id": message["id"], "result": "late"})
                return []
            return [*late, {"id": message["id"], "result": "now"}]

        server.answer = slow
        await one.call(remote_call(ECHO))
        assert (await failure_of(one, arguments={"slow": True}, left_s=1.0)).code == "E3503"
        assert await one.call(remote_call(ECHO)) == "now"
    assert len(server.handshakes) == 1


@pytest.mark.shows("WebSocket", "results bounded")
async def test_an_oversized_answer_breaks_the_connection_and_is_not_held() -> None:
    async with SocketServer.open() as server, upstream(server.url, max_response_bytes=1000) as one:

        async def large(message: Json, _: Any) -> list[Any]:
            return [{"id": message["id"], "result": "x" * 10_000}]

        server.answer = large
        failure = await failure_of(one)
        assert failure.code == "E3416"
        assert "max_response_bytes" in failure.message
    assert len(server.handshakes) == 1, "it is not asked again"


async def test_a_request_that_the_service_finds_too_large_says_so() -> None:
    async with SocketServer.open(max_size=1000) as server, upstream(server.url) as one:
        failure = await failure_of(one, arguments={"text": "x" * 10_000})
    assert failure.code == "E3401"
    assert "1009" in failure.message


@pytest.mark.shows("WebSocket", "errors")
@pytest.mark.parametrize(
    ("status", "headers", "code", "pause"),
    [
        (429, {"Retry-After": "60"}, "E3504", 60_000),
        (503, {"Retry-After": "60"}, "E3504", 60_000),
        (401, {}, "E3401", None),
        (302, {"Location": "ws://169.254.169.254/"}, "E3406", None),
        (302, {"Location": "/elsewhere"}, "E3406", None),
    ],
)
@pytest.mark.proves("EXEC-09")
async def test_a_refused_handshake_has_its_code(
    status: int, headers: dict[str, str], code: str, pause: int | None
) -> None:
    async with SocketServer.open() as server, upstream(server.url) as one:
        server.refuse = (status, headers)
        failure = await failure_of(one, writes=True, attempts=1)
        if code != "E3406":
            await one.probe()  # it says no, so it is there
    assert (failure.code, failure.retry_after_ms) == (code, pause)


async def test_a_service_that_is_away_is_tried_again_with_growing_pauses_and_calls_fail_at_once_meanwhile() -> None:
    fake = FakeClock()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        fake.advance(seconds)

    async with SocketServer.open() as server:
        server.refuse = (500, {})
        async with upstream(server.url, clock=fake.clock, sleep=sleep) as one:
            timed: Json = {"monotonic": fake.clock.monotonic, "deadline": 1e9, "writes": True}
            failure = await failure_of(one, attempts=4, **timed)
            assert (failure.code, (failure.details or {})["sent"]) == ("E3502", False)
            assert len(server.handshakes) == 4  # nothing was sent, so even a write is tried again
            assert len(pauses) == 3
            at_once = await failure_of(one, attempts=1, **timed)
            assert (at_once.retry_after_ms or 0) > 0
            assert len(server.handshakes) == 4
            server.refuse = None
            fake.advance(60)
            assert await one.call(remote_call(ECHO, {"n": 1}, **timed)) == {"n": 1}


@pytest.mark.proves("OPS-15")
async def test_a_service_that_refuses_is_left_alone_and_the_next_one_is_asked(
    tmp_path: Path, closed_port: Callable[[], int]
) -> None:
    nobody = f"ws://127.0.0.1:{closed_port()}"
    async with services_of(tmp_path) as services, SocketServer.open() as server:
        async with upstream(nobody, server.url, services=services) as one:
            for number in range(8):
                assert await one.call(remote_call(ECHO, {"n": number})) == {"n": number}
        assert {state.service: state.state for state in services.snapshot()}[f"feed {nobody}"] == "open"
    assert len(server.heard) == 8


async def test_a_refusing_service_was_not_asked_and_the_next_one_is(closed_port: Callable[[], int]) -> None:
    nobody = f"ws://127.0.0.1:{closed_port()}"
    async with SocketServer.open() as server, upstream(nobody, server.url) as one:
        assert await one.call(remote_call(ECHO, {"n": 1}, writes=True, key="k")) == {"n": 1}
    async with upstream(nobody) as one:
        with pytest.raises(Failure) as caught:
            await one.probe()
    assert caught.value.code == "E3502"
    assert len(server.heard) == 1


@pytest.mark.proves("EXEC-09")
async def test_addresses_that_may_not_be_reached_are_not() -> None:
    async def rebinding(_: str) -> Sequence[str]:
        return ["93.184.216.34", "127.0.0.1"]

    async with SocketServer.open() as server:
        async with upstream(server.url, allow_private=False) as one:
            literal = await failure_of(one)
        async with upstream(f"ws://rebind.example:{server.port}", allow_private=False, resolve=rebinding) as one:
            name = await failure_of(one)
    async with upstream("ws://169.254.169.254") as one:
        metadata = await failure_of(one)
    assert [failure.code for failure in (literal, name, metadata)] == ["E3406"] * 3
    assert server.handshakes == []


async def test_tls_checks_the_name_although_the_address_was_judged(tmp_path: Path) -> None:
    async def here(_: str) -> Sequence[str]:
        return ["127.0.0.1"]

    certificate = new_certificate(tmp_path)
    said: Json = {"tls": {"ca_file": str(certificate.cert_file)}, "resolve": here}
    async with SocketServer.open(certificate.server_context) as server:
        async with upstream(f"wss://service.example:{server.port}", **said) as one:
            await one.call(remote_call(ECHO))
            await one.probe()
        async with upstream(f"wss://other.example:{server.port}", **said) as one:
            assert (await failure_of(one, attempts=1)).code == "E3502"
    assert len(server.handshakes) == 1


@pytest.mark.proves("EXEC-09")
async def test_behind_interlock_breaker_limit_credential_and_trace_apply(tmp_path: Path) -> None:
    tool: Json = {
        "name": "look", "description": "Looks at the one thing there is.", "method": "look",
        "input_schema": {"type": "object", "properties": {"q": {"type": "string", "description": "What to see."}}},
        "output_schema": {"type": "object"},
    }  # fmt: skip
    async with SocketServer.open() as server:

        async def cut(_: Json, connection: Any) -> list[Any]:
            connection.transport.abort()
            return []

        def fail() -> None:
            server.answer = cut

        config: Json = {"urls": [server.url], "tools": [tool]}
        trace = await governed(tmp_path, "websocket", config, tool="look", asked=lambda: len(server.heard), fail=fail)
    assert server.heard[0]["meta"]["traceparent"].split("-")[1] == trace
    assert {shaken["authorization"] for shaken in server.handshakes} == {"Bearer s3cret"}


@pytest.mark.parametrize(
    "said",
    [
        {"urls": []},
        {"urls": ["http://a"]},
        {"urls": ["ws://a"], "auth": {"kind": "bearer", "secret": "T"}},
        {"urls": ["wss://a"], "tools": [{"name": "x", "description": "y", "input_schema": {"type": "object"}}]},
        {"urls": ["wss://a"], "tools": [{**SILENT, "send": {"a": 1}}]},
        {"urls": ["wss://a"], "tools": [{**SILENT, "send": {"a": "{id}"}, "method": "m"}]},
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(said: Json) -> None:
    with pytest.raises(pydantic.ValidationError):
        WebSocketConfig.model_validate(said)
