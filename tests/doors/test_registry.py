"""Versions that come to their end, services that are left alone and limits that are kept: the same at every door."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from interlock import Caller, Interlock, tool
from interlock.api.service import Service
from interlock.authority.secrets import Credential, SecretSource
from interlock.call.capability import ToolGrant
from interlock.core.errors import Failure
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.registry.retirement import deprecate
from interlock.testing import FakeClock
from tests import sample
from tests.support.answers import Wish
from tests.support.calls import admit
from tests.support.endpoints import ERAS, register_people
from tests.support.identities import did_of
from tests.support.private import person
from tests.support.rest import COMPLETE
from tests.support.upstream_servers import Answer, HttpServer
from tests.support.versions import GUIDE, versioned
from tests.support.wires import DOORS, SdkWires, served

Json = dict[str, Any]


@dataclass(frozen=True)
class Heard:
    """What a client heard of a call: of the version that ran what it gave and what is said of its end; or the error."""

    value: Any = None
    deprecation: Json | None = None
    code: str | None = None
    error_code: str | None = None
    retry_after_ms: int | None = None
    details: Any = None


class Clients(SdkWires):
    """A client of every door, that is told of versions and of the details of errors."""

    async def ask(
        self, door: str, tool: str, arguments: Json | None = None, *, version: str | None = None, token: str = "full"
    ) -> Heard:
        told = await self.rows[door].call(Wish(tool, arguments or {}, version=version, token=token))
        if told.error is None:
            return Heard(told.data, told.deprecation)
        retry_after_ms, details = told.envelope.get("retryAfterMs"), told.envelope.get("details")
        return Heard(None, None, *told.error[:2], retry_after_ms, details or None)

    async def discover(self, **asked: Any) -> wire.DiscoverResponse:
        return await self.stub.Discover(wire.DiscoverRequest(**asked), metadata=self.metadata("full"))


@asynccontextmanager
async def opened(home: Path, clock: FakeClock | None = None, **settings: Any) -> AsyncGenerator[Clients]:
    """A place with all its doors open, and a client of each."""
    time_ = None if clock is None else clock.clock
    async with Interlock.open(home, clock=time_, housekeeping=False, **settings) as app:
        if not app.issuer_keys.all():
            app.issuer_keys.init("EdDSA")
            await register_people(app)
        async with served(app, {}, Clients) as clients:
            await issue(clients, "full", "*")
            yield clients


async def issue(clients: Clients, name: str, tools: str, **more: Any) -> None:
    app = clients.app
    clients.tokens[name] = await app.tokens.issue(
        subject=did_of("bot"), tools=[ToolGrant(tools)], by=app.caller, **more
    )


# Versions


@pytest.mark.supports("LIFE-03")
@pytest.mark.proves("REG-05")
async def test_a_deprecated_version_says_until_when_and_is_then_refused_at_every_door(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path, clock) as clients:
        app = clients.app
        for version in ("1.0.0", "2.0.0"):
            await app.add(versioned(version))
        notice = await app.journal.commit(
            deprecate("demo.answer", "2.0.0", by="ann", successor="demo.answer@1.0.0", migration_guide=GUIDE)
        )
        await app.catalog.forget()
        told = notice.document()
        assert {told["removalDate"], told["successor"], told["migrationGuide"]} >= {"demo.answer@1.0.0", GUIDE}
        for door in DOORS:
            assert await clients.ask(door, "demo.answer", version="2.0.0") == Heard("2.0.0", told), door
            assert await clients.ask(door, "demo.answer") == Heard("1.0.0"), door
            assert await clients.ask(door, "demo.answer", version="LATEST") == Heard("1.0.0"), door

        clock.advance((notice.removal_ms - clock.now_ms) / 1000)
        await issue(clients, "full", "*")  # the other one has long expired
        for door in DOORS:
            gone = await clients.ask(door, "demo.answer", version="2.0.0")
            assert (gone.code, gone.details) == ("E3104", {"deprecation": told}), door
            assert await clients.ask(door, "demo.answer") == Heard("1.0.0"), door
        assert Failure("E3104").row.http == 410


@pytest.mark.proves("REG-03")
async def test_what_is_registered_over_rest_stays_as_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path) as clients:
        await issue(clients, "operator", "*", scopes=("tools:admin",))

        async def register(**edits: Any) -> httpx.Response:
            manifest = {**COMPLETE, **edits}
            return await clients.http.post("/v1/tools/register", json=manifest, headers=clients.bearer("operator"))

        assert (await register(version="2.0.0")).status_code == 201
        before = await clients.app.catalog.rows()
        assert (await register(version="2.0.0")).status_code == 201
        assert await clients.app.catalog.rows() == before
        other = await register(version="2.0.0", result_schema={"type": "object"})
        assert (other.status_code, other.json()["error"]["error_code"]) == (409, "E3103")
        assert await clients.app.catalog.rows() == before
        assert (await register(version="1.1.1")).status_code == 201
        (listed,) = (await clients.http.get("/v1/tools", headers=clients.bearer("full"))).json()["tools"]
        assert listed["version"] == "2.0.0"


@pytest.mark.proves("REG-03")
async def test_each_agent_has_its_own_version_of_a_tool_and_a_new_one_changes_nothing_for_them(tmp_path: Path) -> None:
    async with opened(tmp_path) as clients:
        app = clients.app
        for name, versions in (("first", "^1.0.0"), ("second", "^2.0.0")):
            clients.tokens[name] = await app.tokens.issue(
                subject=did_of("bot"), tools=[ToolGrant("demo.answer", versions)], by=app.caller
            )
        # Each is published alone, in any order, while both agents are at work.
        for published, second in (("1.1.0", None), ("2.0.0", "2.0.0"), ("1.0.0", "2.0.0"), ("3.0.0", "2.0.0")):
            await app.add(versioned(published))
            for door in DOORS:
                assert await clients.ask(door, "demo.answer", version="^1.0.0", token="first") == Heard("1.1.0"), door
                found = await clients.ask(door, "demo.answer", version="^2.0.0", token="second")
                assert found.value == second, door


# What an agent expects


def takes(*required: str, **parts: str) -> Json:
    return {"type": "object", "properties": {n: {"type": kind} for n, kind in parts.items()}, "required": [*required]}


@pytest.mark.proves("REG-13")
async def test_a_tool_that_is_not_what_an_agent_expects_is_kept_off_its_surface(tmp_path: Path) -> None:
    expected = {
        "demo.note": takes("text", text="string"),
        "demo.add": takes("a", a="integer", c="integer"),
        "demo.shout": takes("text", "loudness", text="string", loudness="integer"),
    }
    usable = ["demo.add", "demo.echo", "demo.note"]
    async with opened(tmp_path) as clients:
        await admit(clients.app, note, sample.add, sample.echo, sample.shout)
        headers = clients.bearer("full")
        answer: Json = (
            await clients.http.post("/v1/tools/negotiate", json={"expected": expected}, headers=headers)
        ).json()
        assert [(one["tool_id"], one["outcome"], one["missing"]) for one in answer["matches"]] == [
            ("demo.note", "FULL_MATCH", []),
            ("demo.add", "PARTIAL_MATCH", ["c"]),
            ("demo.shout", "INCOMPATIBLE", ["loudness"]),
        ]
        assert [one["tool_id"] for one in answer["tools"]] == ["demo.note", "demo.add"]

        async def rpc(method: str, **params: Any) -> Json:
            request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await clients.http.post("/rpc", json=request, headers=headers)).json()

        listed = (await rpc("tools.list", expected=expected))["result"]
        assert [one["tool_id"] for one in listed["tools"]] == usable
        assert (await rpc("tools.negotiate", expected=expected))["result"]["matches"] == answer["matches"]
        caller = await clients.app.caller_of(clients.tokens["full"])
        surface = Service(clients.app).tools
        assert [one.row.address for one in await surface.visible(caller, expected)] == usable
        assert [one.row.address for one in await surface.visible(caller)] == [*usable, "demo.shout"]
        for door in ERAS:
            async with clients.session(door) as client:
                listed = await client.list_tools(meta={"interlock/expects": expected})
                assert [one.name for one in listed.tools] == [name.replace(".", "-") for name in usable], door

        text = json.dumps(expected)
        listed = await clients.http.get("/v1/tools", params={"expected": text}, headers=headers)
        assert [one["tool_id"] for one in listed.json()["tools"]] == usable
        discovered = await clients.discover(expected_json=text.encode())
        assert [one.tool_id for one in discovered.tools] == usable

        wrong = {"demo.note": {"type": "nonsense"}}
        assert (await rpc("tools.list", expected=wrong))["error"]["data"]["error_code"] == "E3004"
        assert (await rpc("tools.search", query="a note", expected=wrong))["error"]["data"]["error_code"] == "E3004"
        for sent in (json.dumps(wrong), "[]", "{", '{"demo.note": {"type": "object"}, "more', "{} {}", "null"):
            refused = await clients.http.get("/v1/tools", params={"expected": sent}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["error_code"]) == (400, "E3004"), sent
            with pytest.raises(grpc.aio.AioRpcError, match="expected"):
                await clients.discover(expected_json=sent.encode())
        assert (await rpc("tools.list", expected=[]))["error"]["code"] == -32602
        nobody = await clients.http.post("/v1/tools/negotiate", json={"expected": {"no.such": {}}}, headers=headers)
        assert (nobody.status_code, nobody.json()["error"]["error_code"]) == (404, "E3101")


@pytest.mark.proves("REG-13")
async def test_pages_and_searches_have_no_tool_that_is_not_what_an_agent_expects(tmp_path: Path) -> None:
    expected = {"demo.shout": takes("loudness", loudness="integer"), "demo.add": takes("a", a="integer", c="integer")}
    text = json.dumps(expected)
    usable = ["demo.add", "demo.echo", "demo.note"]
    async with opened(tmp_path) as clients:
        await admit(clients.app, note, sample.add, sample.echo, sample.shout)
        headers = clients.bearer("full")

        async def rest(**params: Any) -> Json:
            return (await clients.http.get("/v1/tools", params=params, headers=headers)).json()

        async def rpc(method: str, **params: Any) -> Json:
            request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await clients.http.post("/rpc", json=request, headers=headers)).json()["result"]

        over: dict[str, list[str]] = {"rest": [], "grpc": []}
        page = await rest(limit=1, expected=text)
        while True:
            over["rest"] += [one["tool_id"] for one in page["tools"]]
            if page["cursor"] is None:
                break
            page = await rest(limit=1, expected=text, cursor=page["cursor"])
        discovered = await clients.discover(page_size=1, expected_json=text.encode())
        while True:
            over["grpc"] += [one.tool_id for one in discovered.tools]
            if not discovered.next_page_token:
                break
            more = discovered.next_page_token
            discovered = await clients.discover(page_size=1, expected_json=text.encode(), page_token=more)
        assert over == {"rest": usable, "grpc": usable}

        query = "shout a text"
        whole = [one["tool_id"] for one in (await rest(q=query))["tools"]]
        assert whole[0] == "demo.shout"
        assert len(whole) > 1
        for limit in (1, 10):
            discovered = await clients.discover(query=query, page_size=limit, expected_json=text.encode())
            found: dict[str, list[Json]] = {
                "rest": (await rest(q=query, limit=limit, expected=text))["tools"],
                "jsonrpc": (await rpc("tools.search", query=query, limit=limit, expected=expected))["tools"],
                "grpc": [{"tool_id": one.tool_id} for one in discovered.tools],
            }
            for door, tools in found.items():
                assert [one["tool_id"] for one in tools] == whole[1 : 1 + limit], door


# Services


class Counted:
    """Lends what another source has, and counts how often it was asked."""

    def __init__(self, source: SecretSource) -> None:
        self._source = source
        self.asked = 0

    async def fetch(self, name: str, lifetime_s: float | None = None) -> Credential:
        self.asked += 1
        return await self._source.fetch(name, lifetime_s)

    async def rest(self, name: str, slot: str, ms: int) -> None:
        await self._source.rest(name, slot, ms)

    async def release(self, credential: Credential) -> None:
        await self._source.release(credential)

    async def close(self) -> None:
        await self._source.close()


@asynccontextmanager
async def bank(home: Path, **settings: Any) -> AsyncGenerator[tuple[Clients, HttpServer, Counted]]:
    """A place whose one tool asks a service, with a credential."""
    async with HttpServer.open() as server, opened(home, **settings) as clients:
        server.otherwise = lambda _: Answer(body=b'{"rate": 1}')
        app = clients.app
        await app.secrets.set("bank/token", "s3cret", by=app.caller.id)
        lent = Counted(app.secrets)
        app.lend_from(lent)
        described: Json = {
            "name": "rate", "method": "GET", "path": "/rate", "description": "The rate of a currency.",
            "input_schema": {"type": "object", "properties": {"of": {"type": "string", "description": "which"}}},
            "output_schema": {"type": "object", "properties": {"rate": {"type": "number"}}},
        }  # fmt: skip
        config: Json = {
            "urls": [server.url], "tools": [described], "allow_private": True,
            "auth": {"kind": "bearer", "secret": "bank/token"},
        }  # fmt: skip
        overlay = {"tools": {"rate": {"mutation_class": "read_only"}}}
        report = await app.upstreams.add("bank", "http", config, by=app.caller, overlay=overlay)
        assert [one.state for one in report.tools] == ["admitted"], report.tools
        yield clients, server, lent


@pytest.mark.proves("RESIL-04")
async def test_a_service_that_failed_five_times_is_asked_by_no_door(tmp_path: Path) -> None:
    async with bank(tmp_path) as (clients, server, lent):
        server.otherwise = lambda _: Answer(500)
        for door in DOORS[:5]:
            assert (await clients.ask(door, "bank.rate")).code == "E3502"
        asked, lent_before = len(server.got), lent.asked
        for door in DOORS:
            refused = await clients.ask(door, "bank.rate")
            assert refused.code == "E3501", door
            assert refused.retry_after_ms is not None
            assert 0 < refused.retry_after_ms <= 60_000
        assert (len(server.got), lent.asked) == (asked, lent_before)
        assert Failure("E3501").row.http == 503

        took, worked = list[float](), list[float]()
        for _ in range(30):
            began, began_work = time.perf_counter(), time.process_time()
            result = await clients.app.call("bank.rate", {})
            took.append(time.perf_counter() - began)
            worked.append(time.process_time() - began_work)
            assert result.error is not None
        # What else the machine does meanwhile is not the point: the least time, and the usual time of the processor.
        if clients.app.home.near:  # to a server it is farther
            assert min(took) < 0.010
            assert median(worked) < 0.010
        assert len(server.got) == asked


@pytest.mark.proves("RESIL-04")
async def test_nothing_that_callers_do_opens_a_breaker(tmp_path: Path) -> None:
    async with bank(tmp_path) as (clients, server, _):
        await issue(clients, "narrow", "demo.*")
        app = clients.app
        for number in range(100):
            door = DOORS[number % 4]
            assert (await clients.ask(door, "bank.rate", {"of": 5})).error_code == "INVALID_INPUT"
        for door in DOORS:
            assert (await clients.ask(door, "bank.rate", {"of": 5})).error_code == "INVALID_INPUT"
            assert (await clients.ask(door, "bank.rate", token="narrow")).error_code == "AUTHORIZATION_DENIED"
        server.otherwise = lambda _: Answer(hang=True)
        for _ in range(6):
            late = await app.call("bank.rate", {}, timeout_s=0.02)
            assert late.error is not None
            assert late.error.code in ("E3402", "E3503")
        for _ in range(6):
            before = len(server.got)
            given_up = asyncio.create_task(app.call("bank.rate", {}))
            async with asyncio.timeout(60):
                while len(server.got) == before:  # noqa: ASYNC110 - there is nothing to be told by
                    await asyncio.sleep(0.001)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
        assert {(one.state, one.failures) for one in app.gateway.services.snapshot()} <= {("closed", 0)}
        server.otherwise = lambda _: Answer(body=b'{"rate": 1}')
        for door in DOORS:
            assert (await clients.ask(door, "bank.rate")).value == {"rate": 1}, door


REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
HANGS = [
    pytest.param(1, False, id="one endpoint"),
    pytest.param(2, False, id="a read at the last of several endpoints"),
    pytest.param(2, True, id="a write at several endpoints"),
]


@pytest.mark.proves("RESIL-04")
@pytest.mark.parametrize(("endpoints", "writes"), HANGS)
@pytest.mark.parametrize("own", [False, True], ids=["the contract's time", "the caller's own time"])
async def test_a_service_that_hangs_until_the_contracts_time_is_up_opens_its_breakers(
    tmp_path: Path, endpoints: int, writes: bool, own: bool
) -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(HttpServer.open()) for _ in range(endpoints)]
        clients = await stack.enter_async_context(opened(tmp_path))
        app = clients.app
        described: Json = {
            "name": "rate", "method": "POST" if writes else "GET", "path": "/rate", "description": "A rate of today.",
            "input_schema": {"type": "object", "properties": {"of": {"type": "string", "description": "which"}}},
            "output_schema": {"type": "object", "properties": {"rate": {"type": "number"}}},
        }  # fmt: skip
        config: Json = {"urls": [one.url for one in servers], "tools": [described], "allow_private": True}
        kind = "write_irreversible" if writes else "read_only"
        overlay: Json = {"tools": {"rate": {"mutation_class": kind, "timeout_default": 2}}}
        if writes:
            overlay["tools"]["rate"]["effects"] = [{"resource": "rate:{of}", "operation": "UPDATE"}]
        report = await app.upstreams.add("bank", "http", config, by=app.caller, overlay=overlay)
        assert [one.state for one in report.tools] == ["admitted"], report.tools
        for server in servers:
            server.got.clear()
            server.otherwise = lambda _: Answer(hang=True)

        async def ask(number: int) -> str:
            given, key = {"of": f"c{number}"}, f"k{number}" if writes else None
            if writes:
                waiting = await app.call("bank.rate", given, key=key)
                await app.approvals.approve(waiting.metadata["pending"]["ticketId"], by=REVIEWER)
            result = await app.call("bank.rate", given, key=key, timeout_s=0.3 if own else None)
            assert result.error is not None
            return result.error.code

        codes = set(await asyncio.gather(*map(ask, range(5))))
        assert codes <= {"E3402", "E3502", "E3503"}, codes
        asked = [len(server.got) for server in servers]
        await app.journal.changes.caught_up()
        states = {one.service: one.state for one in app.gateway.services.snapshot()}
        hung = "closed" if own else "open"
        assert states["bank"] == hung
        if endpoints > 1:
            # With a store on a server, the caller's own time may be over before anything was asked.
            unasked = "closed" if own and not app.home.near else "unasked"
            assert states.get(f"bank {servers[0].url}", unasked) == hung
            # A write that may have arrived is sent to no other endpoint.
            assert states.get(f"bank {servers[1].url}", "unasked") == ("unasked" if writes else hung)
        if not own:
            assert await ask(5) == "E3501"
            assert [len(server.got) for server in servers] == asked


# Private fields


@pytest.mark.proves("VALID-04")
async def test_at_every_door_the_scope_of_the_token_opens_its_field_and_no_other(tmp_path: Path) -> None:
    async with opened(tmp_path) as clients:
        await admit(clients.app, person)
        await issue(clients, "reader", "*", scopes=("pii:read",))
        kept = {"name": "Ann", "note": "call [PHONE_REDACTED], soon", "password": "[REDACTED]"}
        for door in DOORS:
            hidden = await clients.ask(door, "r.person", {"text": "soon"})
            assert hidden.value == {**kept, "mail": "[EMAIL_REDACTED]"}, door
            shown = await clients.ask(door, "r.person", {"text": "soon"}, token="reader")
            assert shown.value == {**kept, "mail": "ann@example.org"}, door


# Limits


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def note(text: sample.Text) -> str:
    """Say a text again."""
    return text


LIMITED = pytest.mark.proves("RESIL-05")


@LIMITED
async def test_a_limit_is_kept_and_told_of_at_every_door(tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(tmp_path, clock, rate_limits=[{"per": "tool", "limit": 1, "window_s": 10}]) as clients:
        await admit(clients.app, note)
        for first in ("rest", "mcp-modern"):
            assert (await clients.ask(first, "demo.note", {"text": "a"})).value == "a"
            clock.advance(4)
            for door in DOORS:
                refused = await clients.ask(door, "demo.note", {"text": "a"})
                assert (refused.code, refused.error_code) == ("E3003", "RATE_LIMITED"), door
                assert refused.retry_after_ms == 6000, door
            clock.advance(6)


@LIMITED
async def test_what_a_service_asks_for_is_told_at_every_door_and_kept(tmp_path: Path) -> None:
    async with bank(tmp_path) as (clients, server, _):
        server.otherwise = lambda _: Answer(429, headers={"retry-after": "60"})
        first = await clients.ask("rest", "bank.rate")
        assert (first.code, first.error_code) == ("E3504", "RATE_LIMITED")
        await clients.app.journal.drain()
        asked = len(server.got)
        for door in DOORS:
            waiting = await clients.ask(door, "bank.rate")
            assert (waiting.code, waiting.error_code) == ("E3504", "RATE_LIMITED"), door
            assert waiting.retry_after_ms is not None
            assert 0 < waiting.retry_after_ms <= 60_000
        assert len(server.got) == asked
