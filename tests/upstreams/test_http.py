"""HTTP services as upstreams: what reaches them, what comes of their answers, and what is never done twice."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import hypothesis
import orjson
import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from interlock import Interlock
from interlock.call.context import Caller
from interlock.contract.manifest import RetryPolicy
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams import openapi, wire
from interlock.upstreams.http_requests import HttpConfig, build
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.websocket_config import WebSocketConfig
from tests.support.http_upstreams import READ, WRITE, failure_of, upstream
from tests.support.upstream_servers import (
    TRACEPARENT,
    Answer,
    Got,
    HttpServer,
    Pauses,
    governed,
    json_answer,
    new_certificate,
    remote_call,
    services_of,
    tls_contexts,
)

_ANSWER: Json = {"responses": {"200": {"description": "", "content": {"application/json": {"schema": {}}}}}}
_ID: Json = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
# The same two operations, as a document describes them.
_READ_OF_DOCUMENT, _WRITE_OF_DOCUMENT = (
    one.native
    for one in openapi.read(
        {
            "openapi": "3.1.0",
            "info": {"title": "Things", "version": "1"},
            "paths": {"/things/{id}": {"get": {"parameters": [_ID], **_ANSWER}}, "/things": {"post": _ANSWER}},
        }
    ).tools
)
READS = pytest.mark.parametrize("read", [READ, _READ_OF_DOCUMENT], ids=["file", "document"])
WRITES = pytest.mark.parametrize("write", [WRITE, _WRITE_OF_DOCUMENT], ids=["file", "document"])


@pytest.mark.shows("HTTP, described by a file", "call")
@pytest.mark.proves("OBS-02")
@pytest.mark.proves("EXEC-09")
@pytest.mark.proves("LIFE-10")
async def test_a_request_carries_arguments_trace_deadline_key_and_credential() -> None:
    async with HttpServer.open() as server, upstream(server.url + "/v1", auth={"kind": "bearer", "secret": "T"}) as one:
        server.otherwise = lambda _: json_answer({"ok": True})
        assert await one.call(remote_call(READ, {"id": "a?b c", "page": 2}, credentials={"T": "s3cret"})) == {
            "ok": True
        }
        write = remote_call(WRITE, {"name": "x"}, credentials={"T": "s3cret"}, writes=True, key="k1", left_s=20)
        await one.call(write)
    read, wrote = server.got
    assert (read.method, read.path) == ("GET", "/v1/things/a%3Fb%20c?page=2")
    assert (read.headers["traceparent"], read.headers["tracestate"]) == (TRACEPARENT, "vendor=value")
    assert read.headers["authorization"] == "Bearer s3cret"
    assert 15_000 < int(read.headers["x-interlock-deadline-ms"]) <= 20_000
    assert "idempotency-key" not in read.headers
    assert (wrote.method, wrote.path, orjson.loads(wrote.body)) == ("POST", "/v1/things", {"name": "x"})
    assert wrote.headers["idempotency-key"]


IDENTITY = ("x-interlock-caller", "x-interlock-agent")


@pytest.mark.part_of(
    "AUTH-09",
    rest="upstreams that are not on one's own networks only with send_caller",
)
async def test_a_request_says_for_whom_it_is_made_and_no_argument_says_otherwise() -> None:
    forged = {**READ, "headers": {"X-Interlock-Caller": "{id}", "X-Other": "{id}"}}
    caller = Caller(id="did:web:example.org#é\n", agent="did:key:z6Mk")
    async with HttpServer.open() as server:
        async with upstream(server.url + "/v1") as one:
            await one.call(remote_call(forged, {"id": "root"}, caller=caller))
            await one.call(remote_call(READ, {"id": "7"}, caller=Caller(id="bob")))
        async with upstream(server.url + "/v1", send_caller=False) as one:
            await one.call(remote_call(forged, {"id": "root"}, caller=caller))
    first, second, silent = server.got
    assert [first.headers.get(name) for name in IDENTITY] == ["did:web:example.org#%C3%A9%0A", "did:key:z6Mk"]
    assert first.headers["x-other"] == "root"
    assert [second.headers.get(name) for name in IDENTITY] == ["bob", None]
    assert [silent.headers.get(name) for name in IDENTITY] == [None, None]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (HttpConfig.model_validate({"urls": ["https://api.example.com"]}), False),
        (HttpConfig.model_validate({"urls": ["https://api.example.com"], "send_caller": True}), True),
        (HttpConfig.model_validate({"urls": ["https://10.0.0.7"], "allow_private": True}), True),
        (
            HttpConfig.model_validate({"urls": ["https://10.0.0.7"], "allow_private": True, "send_caller": False}),
            False,
        ),
        (WebSocketConfig.model_validate({"urls": ["wss://feed.example.com"]}), False),
        (McpConfig.model_validate({"url": "https://mcp.example.com/mcp"}), False),
        (McpConfig.model_validate({"url": "https://mcp.example.com/mcp", "send_caller": True}), True),
        (McpConfig.model_validate({"url": "http://127.0.0.1:1/mcp", "allow_private": True}), True),
        (McpConfig.model_validate({"command": ["python"]}), True),
        (McpConfig.model_validate({"command": ["python"], "send_caller": False}), False),
    ],
)
def test_a_third_party_is_told_who_calls_only_where_an_operator_says_so(
    config: HttpConfig | WebSocketConfig | McpConfig, told: bool
) -> None:
    assert config.sends_caller is told
    if isinstance(config, McpConfig):
        return
    sent = wire.context_headers(remote_call(READ, caller=Caller(id="user:ann", agent="did:key:z6Mk")), config)
    assert {name for name in sent if name in IDENTITY} == (set(IDENTITY) if told else set())


async def test_the_key_an_upstream_sees_belongs_to_one_caller_and_tool() -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        calls: list[dict[str, Any]] = [
            {},
            {},
            {"tool": "upstream.thing@2.0.0"},
            {"caller": Caller(id="bob")},
            {"caller": Caller(id="ada", tenant="other")},
            {"tool": "upstream.other@1.0.0"},
        ]
        for facts in calls:
            await one.call(remote_call(WRITE, writes=True, key="k1", **facts))
    keys = [got.headers["idempotency-key"] for got in server.got]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 4


@pytest.mark.shows("OpenAPI", "credentials")
@pytest.mark.shows("HTTP, described by a file", "credentials")
@pytest.mark.parametrize(
    ("auth", "shown"),
    [
        ({"kind": "header", "secret": "T", "name": "X-Api-Key"}, ("x-api-key", "p&w")),
        ({"kind": "basic", "secret": "T", "user": "me"}, ("authorization", "Basic bWU6cCZ3")),
        ({"kind": "query", "secret": "T", "name": "api key"}, ("", "/things/7?api%20key=p%26w")),
    ],
)
@READS
async def test_a_credential_is_shown_as_configured(auth: Json, shown: tuple[str, str], read: Json) -> None:
    async with HttpServer.open() as server, upstream(server.url, auth=auth) as one:
        await one.call(remote_call(read, {"id": 7}, credentials={"T": "p&w"}))
    (got,) = server.got
    assert (got.headers[shown[0]] if shown[0] else got.path) == shown[1]


async def test_a_call_without_its_credential_is_not_sent() -> None:
    async with HttpServer.open() as server, upstream(server.url, auth={"kind": "bearer", "secret": "T"}) as one:
        assert (await failure_of(one)).code == "E3602"
    assert server.got == []


async def test_answers_become_values() -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.answers = [
            Answer(body=b'[1,"x"]', media="application/problem+json; charset=utf-8"),
            Answer(body="grüße".encode("latin-1"), media="text/plain; charset=iso-8859-1"),
            Answer(body=b"\x00\x01", media="image/png"),
            Answer(status=204, body=b""),
        ]
        values = [await one.call(remote_call(READ, {"id": 7})) for _ in range(4)]
    assert values == [[1, "x"], {"text": "grüße"}, {"base64": "AAE=", "mediaType": "image/png"}, None]


@pytest.mark.shows("OpenAPI", "errors")
@pytest.mark.shows("HTTP, described by a file", "errors")
@pytest.mark.parametrize(
    ("answer", "code", "pause"),
    [
        (Answer(status=429, headers={"retry-after": "7"}), "E3504", 7000),
        (Answer(status=429), "E3504", None),
        (Answer(status=503, headers={"retry-after": "2"}), "E3504", 2000),
        (Answer(status=503), "E3502", None),
        (Answer(status=500), "E3502", None),
        (Answer(status=504), "E3503", None),
        (Answer(status=408), "E3503", None),
        (Answer(status=404), "E3401", None),
        (Answer(status=0), "E3502", None),
        (Answer(cut=True), "E3502", None),
        (Answer(body=b"{nonsense"), "E3401", None),
    ],
)
@pytest.mark.proves("EXEC-09")
@READS
async def test_every_way_to_fail_has_its_code(answer: Answer, code: str, pause: int | None, read: Json) -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = lambda _: answer
        failure = await failure_of(one, read, attempts=1)
    assert (failure.code, failure.retry_after_ms) == (code, pause)
    assert (failure.details or {}).get("sent", True) is True
    assert len(server.got) == 1


async def test_a_date_says_when_to_come_back() -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        until = formatdate(time.time() + 3600, usegmt=True)
        server.otherwise = lambda _: Answer(status=429, headers={"retry-after": until})
        failure = await failure_of(one)
    assert 3_500_000 < (failure.retry_after_ms or 0) <= 3_600_000
    assert len(server.got) == 1  # waiting an hour would only find the deadline passed


async def test_a_refusing_upstream_was_not_asked(closed_port: Callable[[], int]) -> None:
    pauses = Pauses()
    async with upstream(f"http://127.0.0.1:{closed_port()}", pauses=pauses) as one:
        failure = await failure_of(one, writes=True)
        assert (failure.code, failure.details) == ("E3502", {"sent": False, "attempts": 3})
        assert len(pauses.taken) == 2  # nothing was sent, so even a write is tried again
        with pytest.raises(Failure) as caught:
            await one.probe()
    assert caught.value.code == "E3502"


@pytest.mark.shows("OpenAPI", "deadline")
@pytest.mark.shows("HTTP, described by a file", "deadline")
@pytest.mark.supports("EXEC-09")
@READS
async def test_a_slow_upstream_is_given_up_at_the_deadline(read: Json) -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = lambda _: Answer(hang=True)
        failure = await failure_of(one, read, left_s=0.2)
    assert failure.code == "E3503"


@pytest.mark.supports("IDEM-11")
@pytest.mark.parametrize(
    ("status", "named", "sent"), [(501, None, 1), (404, None, 1), (503, None, 2), (501, [501], 2), (503, [501], 1)]
)
async def test_a_read_is_sent_again_only_after_a_status_that_its_policy_names(
    status: int, named: list[int] | None, sent: int
) -> None:
    async with HttpServer.open() as server, upstream(server.url, pauses=Pauses()) as one:
        server.answers = [Answer(status=status), json_answer(5)]
        said: Json = {} if named is None else {"retry_on_status_codes": named}
        policy = RetryPolicy.model_validate({"max_attempts": 3, **said})
        call = remote_call(READ, {"id": 7}, retry=policy)
        if sent == 2:
            assert await one.call(call) == 5
        else:
            with pytest.raises(Failure):
                await one.call(call)
    assert len(server.got) == sent


@pytest.mark.shows("OpenAPI", "retries of reads")
@pytest.mark.shows("HTTP, described by a file", "retries of reads")
@pytest.mark.supports("IDEM-11")
@READS
async def test_a_read_is_sent_again_with_jitter_until_it_succeeds(read: Json) -> None:
    pauses = Pauses()
    async with HttpServer.open() as server, upstream(server.url, pauses=pauses) as one:
        server.answers = [Answer(status=502), Answer(status=429, headers={"retry-after": "3"}), json_answer(5)]
        assert await one.call(remote_call(read, {"id": 7})) == 5
    assert len(server.got) == 3
    assert 0 <= pauses.taken[0] <= 0.1
    assert pauses.taken[1] == 3.0


@pytest.mark.shows("OpenAPI", "no resent writes")
@pytest.mark.shows("HTTP, described by a file", "no resent writes")
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("answer", [Answer(status=503), Answer(status=0), Answer(cut=True), Answer(status=429)])
@WRITES
async def test_a_write_is_never_sent_twice(method: str, answer: Answer, write: Json) -> None:
    native = {**write, "method": method}
    async with HttpServer.open() as server, upstream(server.url) as one:
        await one.call(remote_call(native, writes=True, key="k0"))  # so that a kept connection is the one that breaks
        server.otherwise = lambda _: answer
        await failure_of(one, native, writes=True, key="k1")
    assert len(server.got) == 2
    assert server.connections == 1


async def test_a_write_under_a_key_is_sent_again_where_keys_are_honoured() -> None:
    async with HttpServer.open() as server, upstream(server.url, idempotent=True) as one:
        server.answers = [Answer(status=0), json_answer(1)]
        assert await one.call(remote_call(WRITE, writes=True, key="k1")) == 1
        assert server.got[0].headers["idempotency-key"] == server.got[1].headers["idempotency-key"]
        server.answers = [Answer(status=0)]
        await failure_of(one, WRITE, writes=True, key=None)
    assert len(server.got) == 3


async def test_the_next_endpoint_takes_over(closed_port: Callable[[], int]) -> None:
    async with HttpServer.open() as second, upstream(f"http://127.0.0.1:{closed_port()}", second.url) as one:
        await one.call(remote_call(WRITE, writes=True, key="k1"))
        await one.call(remote_call(READ, {"id": 7}, attempts=1))
    assert [got.method for got in second.got] == ["POST", "GET"]


async def test_an_endpoint_that_hangs_leaves_a_read_time_for_the_next_and_a_write_is_not_sent_there() -> None:
    async with HttpServer.open() as first, HttpServer.open() as second, upstream(first.url, second.url) as one:
        await one.call(remote_call(READ, {"id": 7}))
        first.otherwise = lambda _: Answer(hang=True)
        await one.call(remote_call(READ, {"id": 7}, left_s=2.0))
        assert (await failure_of(one, WRITE, writes=True, key="k1", left_s=1.0)).code == "E3503"
    assert [got.method for got in first.got] == ["GET", "GET", "POST"]
    assert [got.method for got in second.got] == ["GET"]


async def test_an_endpoint_that_keeps_failing_is_left_alone(tmp_path: Path) -> None:
    async with services_of(tmp_path) as services, HttpServer.open() as first, HttpServer.open() as second:
        first.otherwise = lambda _: Answer(status=500)
        async with upstream(first.url, second.url, services=services) as one:
            for _ in range(8):
                await one.call(remote_call(READ, {"id": 7}))
    assert len(first.got) == 5
    assert len(second.got) == 8


@pytest.mark.proves("EXEC-09")
async def test_the_pool_bounds_connections_over_many_calls(tmp_path: Path) -> None:
    certificate = new_certificate(tmp_path)
    async with (
        HttpServer.open(certificate.server_context) as server,
        upstream(server.url, max_connections=4, tls={"ca_file": str(certificate.cert_file)}) as one,
    ):
        await one.call(remote_call(READ, {"id": 0}))
        contexts = tls_contexts()
        for start in range(0, 500, 50):
            await asyncio.gather(*(one.call(remote_call(READ, {"id": start + n})) for n in range(50)))
        assert tls_contexts() == contexts
    assert len(server.got) == 501
    assert server.most_open <= 4
    assert server.connections <= 4


async def test_an_upstream_with_an_unknown_certificate_is_not_asked(tmp_path: Path) -> None:
    async with HttpServer.open(new_certificate(tmp_path).server_context) as server, upstream(server.url) as one:
        failure = await failure_of(one, attempts=1)
    assert (failure.code, failure.details) == ("E3502", {"sent": False})
    assert "certificate" in failure.message
    assert server.got == []


async def test_a_client_certificate_is_shown(tmp_path: Path) -> None:
    certificate = new_certificate(tmp_path)
    context = certificate.server_context
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate.cert_file)
    files = {
        "ca_file": str(certificate.cert_file),
        "cert_file": str(certificate.cert_file),
        "key_file": str(certificate.key_file),
    }
    async with HttpServer.open(context) as server, upstream(server.url, tls=files) as one:
        await one.call(remote_call(READ, {"id": 7}))
    assert len(server.got) == 1


@pytest.mark.shows("OpenAPI", "results bounded")
@pytest.mark.shows("HTTP, described by a file", "results bounded")
@READS
async def test_an_oversized_body_is_not_held(read: Json) -> None:
    async with HttpServer.open() as server, upstream(server.url, max_response_bytes=1000) as one:
        server.otherwise = lambda _: Answer(body=b'"' + b"x" * 100_000 + b'"')
        failure = await failure_of(one, read)
    assert failure.code == "E3416"
    assert len(server.got) == 1


@pytest.mark.proves("EXEC-09")
async def test_private_addresses_are_refused_unless_allowed() -> None:
    async with HttpServer.open() as server, upstream(server.url, allow_private=False) as one:
        failures = [await failure_of(one), await failure_of(one)]
        with pytest.raises(Failure) as caught:
            await one.probe()
    assert [failure.code for failure in (*failures, caught.value)] == ["E3406"] * 3
    assert server.connections == 0


async def test_metadata_addresses_are_refused_even_then() -> None:
    async with upstream("http://169.254.169.254") as one:
        assert (await failure_of(one)).code == "E3406"


async def test_a_name_that_changes_its_mind_is_judged_again_and_never_reached() -> None:
    asked: list[str] = []

    async def rebinding(host: str) -> Sequence[str]:
        asked.append(host)
        return ["93.184.216.34", "127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    async with HttpServer.open() as server:
        url = f"http://rebind.example:{server.port}"
        async with upstream(url, allow_private=False, resolve=rebinding) as one:
            codes = [(await failure_of(one)).code, (await failure_of(one)).code]
    assert codes == ["E3406", "E3406"]
    assert asked == ["rebind.example"] * 2
    assert server.connections == 0


async def test_the_connection_goes_to_the_judged_address_and_tls_checks_the_name(tmp_path: Path) -> None:
    async def here(host: str) -> Sequence[str]:
        assert host in ("service.example", "other.example")
        return ["127.0.0.1"]

    certificate = new_certificate(tmp_path)
    tls = {"ca_file": str(certificate.cert_file)}
    async with HttpServer.open(certificate.server_context) as server:
        async with upstream(f"https://service.example:{server.port}", resolve=here, tls=tls) as one:
            await one.call(remote_call(READ, {"id": 7}))
        async with upstream(f"https://other.example:{server.port}", resolve=here, tls=tls) as one:
            assert (await failure_of(one)).code == "E3502"
    assert [got.headers["host"] for got in server.got] == [f"service.example:{server.port}"]


async def test_redirects_to_other_hosts_are_not_followed() -> None:
    async with HttpServer.open() as server, HttpServer.open() as other, upstream(server.url) as one:
        for target in ("http://169.254.169.254/latest/meta-data", other.url, "//other.example/x"):
            server.answers = [Answer(status=302, headers={"location": target})]
            assert (await failure_of(one)).code == "E3406"
    assert len(server.got) == 3
    assert other.connections == 0


async def test_a_read_follows_a_redirect_on_its_own_host_and_a_write_none() -> None:
    def moved(got: Got) -> Answer:
        return Answer(status=307, headers={"location": "/new"}) if got.path != "/new" else json_answer("here")

    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = moved
        assert await one.call(remote_call(READ, {"id": 7})) == "here"
        assert (await failure_of(one, WRITE, writes=True)).code == "E3401"
        server.otherwise = lambda got: Answer(status=302, headers={"location": got.path})
        assert (await failure_of(one)).code == "E3401"


async def test_what_an_upstream_says_is_shown_without_credentials() -> None:
    async with (
        HttpServer.open() as server,
        upstream(server.url, auth={"kind": "query", "secret": "T", "name": "key"}) as one,
    ):
        server.otherwise = lambda got: Answer(status=401, media="text/plain", body=f"bad {got.path} p%w x".encode())
        failure = await failure_of(one, credentials={"T": "p%w"})
    shown = repr(failure.envelope("t"))
    assert failure.code == "E3401"
    assert not failure.retryable
    assert (failure.details or {})["status"] == 401
    assert "p%w" not in shown
    assert "p%25w" not in shown


async def test_what_one_caller_is_given_is_not_shown_for_another() -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        server.otherwise = lambda _: Answer(headers={"set-cookie": "session=ada"})
        await one.call(remote_call(READ, {"id": 7}))
        await one.call(remote_call(READ, {"id": 7}, caller=Caller(id="bob")))
    assert "cookie" not in server.got[1].headers


@pytest.mark.parametrize(
    "climbing", [".", "..", "../admin", "..\\admin", "%2e%2e%2fadmin", "a\r\nx: y", "//evil.example"]
)
async def test_no_argument_leaves_its_place_in_the_path(climbing: str) -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        assert (await failure_of(one, arguments={"id": climbing})).code == "E3305"
    assert server.got == []


async def test_no_argument_adds_a_header_or_replaces_one_of_ours() -> None:
    native = {**READ, "headers": {"X-Note": "{note}", "Host": "{note}", "Traceparent": "{note}"}}
    async with HttpServer.open() as server, upstream(server.url) as one:
        assert (await failure_of(one, native, arguments={"id": 1, "note": "a\r\nx-evil: 1"})).code == "E3305"
        await one.call(remote_call(native, {"id": 1, "note": "hello"}))
    (got,) = server.got
    assert got.headers["x-note"] == "hello"
    assert got.headers["traceparent"] == TRACEPARENT
    assert got.headers["host"] == f"127.0.0.1:{server.port}"


VALUES = st.one_of(st.text(), st.integers(-(2**63), 2**64 - 1), st.lists(st.text()))


@given(st.dictionaries(st.sampled_from(["id", "q", "n"]), VALUES))
def test_a_built_request_never_leaves_its_endpoint(given_arguments: Json) -> None:
    arguments: Json = {"id": "x", **given_arguments}
    try:
        request = build({**READ, "query": {"filter": "{q}"}}, arguments, "https://shop.example/v1")
    except Failure:
        hypothesis.assume(False)
        raise
    path, _, query = request.url.partition("?")
    assert path.startswith("https://shop.example/v1/things/")
    assert path.count("/") == 5
    assert all(letter.isalnum() or letter in "-._~%=&" for letter in query)


@pytest.mark.parametrize("value", [2**70, "\ud800", [2**70]])
@pytest.mark.parametrize("native", [READ, WRITE])
def test_what_cannot_be_written_down_is_not_sent(native: Json, value: Any) -> None:
    with pytest.raises(Failure) as caught:
        build(native, {"id": value}, "https://shop.example")
    assert caught.value.code == "E3302"


def test_a_body_is_laid_out_as_written() -> None:
    native: Json = {
        "method": "POST", "path": "/orders/{order}/lines", "query": {"dry": "{dry}"},
        "body": {"line": {"sku": "{sku}", "note": "for {who}", "gone": "{missing}"}, "more": "{*}"},
    }  # fmt: skip
    request = build(native, {"order": 5, "sku": ["a", 1], "who": "ada", "extra": True}, "http://shop.example")
    assert (request.method, request.url) == ("POST", "http://shop.example/orders/5/lines")
    assert orjson.loads(request.body or b"") == {
        "line": {"sku": ["a", 1], "note": "for ada"},
        "more": {"extra": True},
    }


@pytest.mark.shows("HTTP, described by a file", "discovery")
async def test_hand_written_tools_are_discovered_as_written() -> None:
    tool = {
        "name": "get_thing", "description": "Gets one thing by its number.", "path": "/things/{id}",
        "input_schema": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
        "output_schema": {"type": "object"},
    }  # fmt: skip
    async with HttpServer.open() as server, upstream(server.url, tools=[tool]) as one:
        (found,) = (await one.discover()).tools
        assert found.native == READ
        server.otherwise = lambda _: json_answer({"id": 7})
        assert await one.call(remote_call(dict(found.native), {"id": 7})) == {"id": 7}
        await one.probe()


PETS: Json = {
    "openapi": "3.1.0",
    "info": {"title": "Pets", "version": "1"},
    "paths": {
        "/pets/{id}": {
            "get": {
                "operationId": "getPet",
                "summary": "Gets one pet by its number.",
                "parameters": [
                    {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},
                    {"name": "tag", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
                    {"name": "X-Note", "in": "header", "schema": {"type": "string"}},
                ],
                "responses": {"200": {"content": {"application/json": {"schema": {"type": "object"}}}}},
            },
            "delete": {
                "operationId": "deletePet",
                "summary": "Deletes one pet by its number.",
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
                "responses": {"204": {"description": "gone"}},
            },
        },
        "/pets": {
            "post": {
                "operationId": "addPet",
                "summary": "Adds a pet and gives its name back.",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"type": "object", "properties": {"name": {}}}}},
                },
                "responses": {"201": {"content": {"text/plain": {"schema": {"type": "string"}}}}},
            },
            "get": {"operationId": "unsaid", "responses": {"200": {"description": "something"}}},
        },
    },
}


@pytest.mark.supports("EXEC-11")
@pytest.mark.parametrize("how", ["inline", "json", "yaml"])
async def test_operations_of_a_document_are_discovered_and_called_to_the_letter(how: str) -> None:
    def answer(got: Got) -> Answer:
        match got.method, got.path:
            case "GET", "/openapi":
                text = yaml.safe_dump(PETS).encode() if how == "yaml" else orjson.dumps(PETS)
                return Answer(body=text, media="application/yaml" if how == "yaml" else "application/json")
            case "POST", _:
                return Answer(status=201, body=b"Rex", media="text/plain")
            case "DELETE", _:
                return Answer(status=204, body=b"")
            case _:
                return json_answer({"id": "7"})

    async with HttpServer.open() as server:
        server.otherwise = answer
        document = PETS if how == "inline" else f"{server.url}/openapi"
        async with upstream(server.url + "/v1", openapi=document) as one:
            found = await one.discover()
            tools = {tool.name: tool for tool in found.tools}
            assert set(tools) == {"getPet", "deletePet", "addPet", "unsaid"}
            assert found.refused == []
            server.got.clear()
            arguments = {"id": "a b", "tag": ["x", "y&z"], "X-Note": "hello"}
            assert await one.call(remote_call(tools["getPet"].native, arguments)) == {"id": "7"}
            assert await one.call(remote_call(tools["addPet"].native, {"name": "Rex"}, writes=True)) == "Rex"
            assert await one.call(remote_call(tools["deletePet"].native, {"id": "7"}, writes=True)) is None
            assert (await failure_of(one, tools["getPet"].native, arguments={"id": ".."})).code == "E3305"
    assert [(got.method, got.path) for got in server.got] == [
        ("GET", "/v1/pets/a%20b?tag=x&tag=y%26z"),
        ("POST", "/v1/pets"),
        ("DELETE", "/v1/pets/7"),
    ]
    assert server.got[0].headers["x-note"] == "hello"
    assert orjson.loads(server.got[1].body) == {"name": "Rex"}
    assert all(got.headers["traceparent"] == TRACEPARENT for got in server.got)


async def test_the_path_of_the_documents_own_server_is_used_where_the_operator_gave_none() -> None:
    async with HttpServer.open() as server:
        document = {**PETS, "servers": [{"url": "https://elsewhere.example/x"}, {"url": "/api/v3"}]}
        for url in (server.url, server.url + "/mine"):
            async with upstream(url, openapi=document) as one:
                tools = {tool.name: tool for tool in (await one.discover()).tools}
                await one.call(remote_call(tools["getPet"].native, {"id": "7"}))
    assert [got.path for got in server.got] == ["/api/v3/pets/7", "/mine/pets/7"]


async def test_closing_ends_the_calls_that_are_under_way() -> None:
    async with HttpServer.open() as server, upstream(server.url) as one:
        arrived = asyncio.Event()

        def hang(_: Got) -> Answer:
            arrived.set()
            return Answer(hang=True)

        server.otherwise = hang
        waiting = asyncio.create_task(failure_of(one, WRITE, writes=True))
        await arrived.wait()
        await one.close()
        assert ((await waiting).code, len(server.got)) == ("E3502", 1)


@pytest.mark.proves("CONTRACT-07")
async def test_the_version_of_an_answers_data_is_the_entity_tag_of_the_service(tmp_path: Path) -> None:
    tool: Json = {
        "name": "look", "description": "Looks at the one thing there is.", "path": "/thing",
        "input_schema": {"type": "object", "properties": {"q": {"type": "string", "description": "What to see."}}},
        "output_schema": {"type": "object"},
    }  # fmt: skip
    overlay = {"tools": {"look": {"mutation_class": "read_only"}}}
    tags = {'"v7"': "v7", 'W/"v8"': 'W/"v8"', '"*"': '"*"', "x" * 300: None, "": None}
    async with HttpServer.open() as server, Interlock.open(tmp_path / "home", housekeeping=False) as app:
        config: Json = {"urls": [server.url], "tools": [tool], "allow_private": True}
        await app.upstreams.add("svc", "http", config, by=app.caller, overlay=overlay)
        for tag, version in tags.items():
            server.answers = [Answer(body=b'{"ok": true}', headers={"etag": tag} if tag else {})]
            result = await app.call("svc.look", {})
            assert result.ok, result.error
            assert result.envelope()["provenance"]["dataVersion"] == version


@pytest.mark.proves("EXEC-09")
async def test_behind_interlock_breaker_limit_credential_and_trace_apply(tmp_path: Path) -> None:
    tool: Json = {
        "name": "look", "description": "Looks at the one thing there is.", "path": "/thing",
        "input_schema": {"type": "object", "properties": {"q": {"type": "string", "description": "What to see."}}},
        "output_schema": {"type": "object"},
    }  # fmt: skip
    async with HttpServer.open() as server:

        def fail() -> None:
            server.otherwise = lambda _: Answer(status=500)

        config: Json = {"urls": [server.url], "tools": [tool]}
        trace = await governed(tmp_path, "http", config, tool="look", asked=lambda: len(server.got), fail=fail)
    assert server.got[0].headers["traceparent"].split("-")[1] == trace
    assert {got.headers["authorization"] for got in server.got} == {"Bearer s3cret"}


@pytest.mark.parametrize(
    "said",
    [
        {"urls": []},
        {"urls": ["http://a", "http://b", "http://c", "http://d"]},
        {"urls": ["ftp://a"]},
        {"urls": ["http://user:pw@a"]},
        {"urls": ["http://a"], "headers": {"Authorization": "Bearer x"}},
        {"urls": ["http://a"], "headers": {"X-Y": "a\r\nb"}},
        {"urls": ["http://a"], "tls": {"cert_file": "x"}},
        {"urls": ["http://a"], "auth": {"kind": "header", "secret": "T"}},
        {"urls": ["http://a"], "auth": {"kind": "bearer", "secret": "T"}},
        {"urls": ["http://a"], "misspelt": 1},
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(said: Json) -> None:
    with pytest.raises(pydantic.ValidationError):
        HttpConfig.model_validate(said)
