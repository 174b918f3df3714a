"""Whatever leaves the process for a call has a span: each attempt at an upstream, each request through the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from interlock import Interlock, Sandboxing, tool
from interlock.contract.manifest import NetworkPolicy
from interlock.data.schema import Json
from interlock.executors import egress
from interlock.executors.egress import EgressPolicy
from interlock.telemetry import w3c
from interlock.telemetry.trace import MOST_OUTBOUND
from tests.support.calls import publish
from tests.support.traced import Traced, Tree, traced
from tests.support.upstream_servers import Answer, Asked, Got, HttpServer, ShopServer
from tests.telemetry import reaching

SECRET = "hunter2hunter2"
LOOK: Json = {
    "name": "look", "description": "Looks at the one thing there is.", "path": "/thing", "query": {"q": "{q}"},
    "input_schema": {"type": "object", "properties": {"q": {"type": "string", "description": "What to see."}}},
    "output_schema": {"type": "object"},
}  # fmt: skip


async def connected(one: Traced, urls: list[str]) -> None:
    """Add an upstream whose one tool is a read, for which there are up to three attempts."""
    overlay = {"tools": {"look": {"mutation_class": "read_only"}}}
    config: Json = {"urls": urls, "tools": [LOOK], "allow_private": True}
    await one.app.upstreams.add("svc", "http", config, by=one.app.caller, overlay=overlay)
    one.take()


def external(tree: Tree) -> Tree:
    (found,) = tree["Execute"].children
    assert found.span.name == "External"
    return found


def text_of(tree: Tree) -> str:
    return tree.span.to_json() + "".join(text_of(child) for child in tree.children)


def ids_sent(server: HttpServer) -> list[str]:
    places = [w3c.read(got.headers["traceparent"]) for got in server.got]
    return [place.span_id for place in places if place is not None]


def span_id(tree: Tree) -> str:
    assert tree.span.context is not None
    return f"{tree.span.context.span_id:016x}"


@pytest.mark.part_of(
    "OBS-01",
    rest="requests that an in-process tool makes itself, and those of one call beyond 128, have no span; calls that are"
    " not sampled and calls whose process dies have one span, made from the record",
)
async def test_each_attempt_of_an_external_call_has_a_span_and_the_upstream_hangs_under_its_own(home: Path) -> None:
    async with HttpServer.open() as server, traced(home) as one:
        await connected(one, [server.url])
        server.answers = [Answer(status=503, body=SECRET.encode()), Answer(status=500), Answer(body=b'{"ok": true}')]
        assert (await one.app.call("svc.look", q=SECRET)).ok
        (tree,) = one.trees()
    call = external(tree)
    assert tree.shape[1][2] == (
        "Execute", [("External", ["Attempt!UPSTREAM_FAILURE", "Attempt!UPSTREAM_FAILURE", "Attempt"])],
    )  # fmt: skip
    assert call.attributes["upstream"] == "svc"
    assert [child.attributes["external.attempt"] for child in call.children] == [1, 2, 3]
    assert [child.attributes["http.response.status_code"] for child in call.children] == [503, 500, 200]
    assert [child.attributes.get("error.code") for child in call.children] == ["E3502", "E3502", None]
    for child in call.children:
        assert (child.attributes["server.address"], child.attributes["server.port"]) == ("127.0.0.1", server.port)
        assert child.attributes["external.latency_ms"] >= 0
        assert child.attributes["tool.id"] == "svc.look"
    # Each request told the upstream the attempt that it belongs to.
    assert [got.path for got in server.got] == [f"/thing?q={SECRET}"] * 3
    assert ids_sent(server) == [span_id(child) for child in call.children]
    assert SECRET not in text_of(tree)


@pytest.mark.supports("OBS-01")
async def test_each_endpoint_that_is_tried_is_an_attempt_of_its_own(home: Path, closed_port: Callable[[], int]) -> None:
    async with HttpServer.open() as server, traced(home) as one:
        nobody = closed_port()
        await connected(one, [f"http://127.0.0.1:{nobody}", server.url])
        assert (await one.app.call("svc.look")).ok
        (tree,) = one.trees()
    first, second = external(tree).children
    assert (first.shape, second.shape) == ("Attempt!UPSTREAM_FAILURE", "Attempt")
    assert [child.attributes["server.port"] for child in (first, second)] == [nobody, server.port]
    assert [child.attributes["external.attempt"] for child in (first, second)] == [1, 2]
    assert "http.response.status_code" not in first.attributes


@pytest.mark.supports("OBS-01")
async def test_the_status_of_a_grpc_attempt_is_told(home: Path, tmp_path: Path) -> None:
    async def refuse(_: Asked, context: Any) -> Any:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"not {SECRET}")

    async with ShopServer.open(tmp_path) as server, traced(home) as one:
        config: Json = {"targets": [f"127.0.0.1:{server.port}"], "plaintext": True, "allow_private": True}
        overlay = {"tools": {"shop.v1.Shop.Get": {"mutation_class": "read_only"}}}
        report = await one.app.upstreams.add("shop", "grpc", config, by=one.app.caller, overlay=overlay)
        address = next(tool.address for tool in report.tools if tool.name == "shop.v1.Shop.Get")
        one.take()
        server.answer = refuse
        assert not (await one.app.call(address, {})).ok
        (tree,) = one.trees()
    (attempt,) = external(tree).children
    assert attempt.attributes["rpc.response.status_code"] == "FAILED_PRECONDITION"
    assert SECRET not in text_of(tree)


@pytest.mark.proves("OBS-01")
@pytest.mark.parametrize("ending", ["cancelled", "late"])
async def test_the_span_of_an_attempt_ends_when_it_is_cut_off(home: Path, ending: str) -> None:
    async with HttpServer.open() as server, traced(home) as one:
        await connected(one, [server.url])
        arrived = asyncio.Event()

        def hang(_: Got) -> Answer:
            arrived.set()
            return Answer(hang=True)

        server.otherwise = hang
        request = one.app.gateway.with_id(one.app.request("svc.look", timeout_s=1.5 if ending == "late" else None))
        task = asyncio.create_task(one.app.gateway.invoke(request))
        await arrived.wait()
        if ending == "cancelled":
            assert await one.app.cancel(request.id or "") == "canceled"
        assert not (await task).ok
        (tree,) = one.trees()
        assert one.tracer.open == 0
    expected = "CANCELED" if ending == "cancelled" else "DEADLINE_EXCEEDED"
    *before, last = attempts = external(tree).children
    assert all(attempt.shape == f"Attempt!{expected}" for attempt in before)
    # The connector and the gateway both end the last attempt at the call's deadline; either may be the first.
    assert last.shape in {f"Attempt!{expected}", *(["Attempt!UPSTREAM_FAILURE"] if ending == "late" else [])}
    assert external(tree).span.status.description is not None
    for attempt in attempts:
        assert (attempt.span.start_time or 0) <= (attempt.span.end_time or 0) <= (tree.span.end_time or 0)


async def test_an_attempt_that_used_up_its_own_time_is_late_and_not_cancelled(home: Path) -> None:
    async with HttpServer.open() as server, traced(home) as one:
        await connected(one, [server.url])
        succeeded = False
        while not succeeded:  # on a busy machine the second attempt may be late as well
            one.take()
            server.answers = [Answer(hang=True), Answer()]
            succeeded = (await one.app.call("svc.look", timeout_s=4)).ok
        (tree,) = one.trees()
    assert [child.shape for child in external(tree).children] == ["Attempt!DEADLINE_EXCEEDED", "Attempt"]


# Requests of sandboxed tools


@asynccontextmanager
async def fetching(
    home: Path, port: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncGenerator[tuple[Traced, Interlock]]:
    """An Interlock with a sandboxed tool that may reach one port of this machine."""
    # The one thing a test on one machine cannot have: a public address. Everything else is as it is.
    monkeypatch.setattr(egress, "EgressPolicy", partial(EgressPolicy, allow_private=True))
    listed = {"allowed_domains": ["localhost", f"{SECRET}.localhost"], "allowed_ports": [port]}
    async with traced(home, egress=listed, **settings) as one:
        network = NetworkPolicy.model_validate(listed)
        declare = tool(
            version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=Sandboxing(tier=2), network=network,
            timeout_s=120,
        )  # fmt: skip
        reach = declare(reaching.reach)
        await one.app.journal.commit(publish(reach))
        one.app.catalog.attach(reach)
        yield one, one.app


@pytest.mark.proves("OBS-01")
async def test_each_request_of_a_sandboxed_tool_through_the_proxy_has_a_span(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with HttpServer.open() as server, fetching(home, server.port, monkeypatch) as (one, app):
        server.answers = [Answer(status=200), Answer(status=404)]
        url = f"http://localhost:{server.port}/private-path?token={SECRET}"
        assert (await app.call("cell.reach", url=url, times=2, password=SECRET)).unwrap() == [200, 404]
        (tree,) = one.trees()
    first, second = tree["Execute"].children
    assert (first.shape, second.shape) == ("External", "External")
    assert [child.attributes["http.response.status_code"] for child in (first, second)] == [200, 404]
    for child in (first, second):
        facts = child.attributes
        assert (facts["server.address"], facts["server.port"]) == ("localhost", server.port)
        assert (facts["http.request.method"], facts["tool.id"]) == ("GET", "cell.reach")
        assert facts["external.latency_ms"] >= 0
        assert facts["http.request.size"] > 0 < facts["http.response.size"]
    assert SECRET not in text_of(tree)
    assert "private-path" not in text_of(tree)


async def test_a_request_that_the_proxy_refuses_has_a_span_that_says_so_and_tells_nothing_private(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with HttpServer.open() as server, fetching(home, server.port, monkeypatch) as (one, app):
        for host in ("elsewhere.example", f"{SECRET}.example"):
            refused = await app.call("cell.reach", url=f"http://{host}:{server.port}/", password=SECRET)
            assert refused.error is not None
            assert refused.error.code == "E3406"
        trees = one.trees()
    for tree, host in zip(trees, ("elsewhere.example", "[redacted].example"), strict=True):
        (request,) = tree["Execute"].children
        assert request.shape == "External!AUTHORIZATION_DENIED"
        assert request.attributes["server.address"].lower() == host
        assert request.attributes["error.code"] == "E3406"
        assert SECRET not in text_of(tree)


@pytest.mark.proves("OBS-01")
async def test_the_span_of_a_request_ends_when_its_tool_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with HttpServer.open() as server, fetching(home, server.port, monkeypatch) as (one, app):
        arrived = asyncio.Event()

        def hang(_: Got) -> Answer:
            arrived.set()
            return Answer(hang=True)

        server.otherwise = hang
        request = app.gateway.with_id(app.request("cell.reach", {"url": f"http://localhost:{server.port}/"}))
        task = asyncio.create_task(app.gateway.invoke(request))
        await arrived.wait()
        assert await app.cancel(request.id or "") == "canceled"
        assert not (await task).ok
        (tree,) = one.trees()
        assert one.tracer.open == 0
    (asked,) = tree["Execute"].children
    assert asked.shape == "External!CANCELED"
    assert (asked.span.start_time or 0) <= (asked.span.end_time or 0) <= (tree.span.end_time or 0)


async def test_the_spans_of_one_call_are_bounded_and_those_left_out_are_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = 7
    async with HttpServer.open() as server, fetching(home, server.port, monkeypatch) as (one, app):
        url = f"http://localhost:{server.port}/"
        assert len((await app.call("cell.reach", url=url, times=MOST_OUTBOUND + more)).unwrap()) == len(server.got)
        (tree,) = one.trees()
        kept = one.tracer.of(tree.attributes["tool.invocation_id"], app.caller)
        assert kept == []
    assert len(server.got) == MOST_OUTBOUND + more
    assert len(tree["Execute"].children) == MOST_OUTBOUND
    assert tree.attributes["external.dropped"] == more
