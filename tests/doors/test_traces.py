"""Reading the trace of a call back, through every door: callers read their own, auditors those of their tenant."""

from __future__ import annotations

import json
import os
from asyncio import to_thread
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from tests import sample, warm
from tests.support.answers import Wish
from tests.support.upstream_servers import Answer, HttpServer
from tests.support.wires import DOORS, Wires, served

Json = dict[str, Any]
EVERY = (*DOORS, "cli")
STEPS = ["tool.invoke", "Validate", "Authorize", "Execute", "Verify", "Return"]
MINE, ALIEN, AUDITS, OF_OTHERS = "mine", "alien", "audits", "of-others"
_DID = "did:web:{}.example"


class Place(Wires):
    """A server that traces calls, and callers of it: two of one tenant, an auditor of it, and one of another tenant."""

    async def make_call(self, who: str = MINE) -> str:
        """Make a call and return its id."""
        return (await self.rows["rest"].heard(Wish("demo.add", {"a": 1, "b": 2}, token=who))).about["invocation_id"]

    async def read(self, door: str, call: str, who: str) -> Json | str:
        """The trace of a call as an endpoint gives it, or the code of the refusal."""
        if door == "cli":
            return await self._cli(call, self.tokens[who])
        return await self.rows[door].trace(call, who)

    async def _cli(self, call: str, token: str) -> Json | str:
        words = ["calls", "trace", call, "--url", self.base, "--token", token, "--json"]
        code, out, _ = await to_thread(warm.run, self.on_home(*words), os.environ, self.app.home.path)
        told: Json = json.loads(out)
        return told if code == 0 else told["error"]["error_code"]

    def on_home(self, *words: str) -> tuple[str, ...]:
        return ("--home", str(self.app.home.path), *words)


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Place]:
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        app.catalog.attach(sample.add)
        app.issuer_keys.init("EdDSA")
        tokens: dict[str, str] = {}
        for name, tenant, scopes in (
            (MINE, "acme", ()),
            (ALIEN, "acme", ()),
            (AUDITS, "acme", ("audit:read",)),
            (OF_OTHERS, "rival", ("audit:read",)),
        ):
            did = _DID.format(name)
            await app.identities.register(Identity(did=did, name=name, tenant=tenant), by="test")
            tokens[name] = await app.tokens.issue(subject=did, tools=[ToolGrant("*")], scopes=scopes, by=app.caller)
        async with served(app, tokens, Place) as place:
            yield place


@pytest.mark.proves("OBS-01")
async def test_through_every_door_callers_read_their_own_traces_and_auditors_those_of_their_tenant(home: Path) -> None:
    async with opened(home, trace_ratio=1.0) as place:
        call = await place.make_call()
        expected = await place.read("library", call, MINE)
        assert isinstance(expected, dict)
        assert (expected["invocation_id"], expected["complete"]) == (call, True)
        assert [span["name"] for span in expected["spans"]] == STEPS
        assert {span["trace_id"] for span in expected["spans"]} == {expected["trace_id"]}
        root = expected["spans"][0]["attributes"]
        assert (root["tool.invocation_id"], root["tool.id"], root["tool.status"]) == (call, "demo.add", "succeeded")
        assert {"tool.version", "tool.latency_ms", "tool.cost"} <= root.keys()
        for door in EVERY:
            assert await place.read(door, call, MINE) == expected, door
            assert await place.read(door, call, AUDITS) == expected, door
            assert await place.read(door, call, ALIEN) == "E3702", door
            assert await place.read(door, call, OF_OTHERS) == "E3702", door
        # Looking at the calls of others is on record.
        await place.app.journal.commit(lambda _: None)
        read = place.app.journal.reader.all("SELECT COUNT(*) FROM journal WHERE kind = 'audit.read'")
        assert read[0][0] == len(EVERY)


@pytest.mark.proves("OBS-01")
async def test_through_every_door_the_attempts_of_an_external_call_are_shown(home: Path) -> None:
    tool: Json = {
        "name": "look", "description": "Looks at the one thing there is.", "path": "/thing",
        "input_schema": {"type": "object", "properties": {}}, "output_schema": {"type": "object"},
    }  # fmt: skip
    async with HttpServer.open() as far, opened(home, trace_ratio=1.0) as place:
        config: Json = {"urls": [far.url], "tools": [tool], "allow_private": True}
        overlay = {"tools": {"look": {"mutation_class": "read_only"}}}
        await place.app.upstreams.add("svc", "http", config, by=place.app.caller, overlay=overlay)
        far.answers = [Answer(status=503), Answer()]
        result = await place.app.call("svc.look", {}, caller=await place.app.caller_of(place.tokens[MINE]))
        assert result.ok, result.error
        for door in EVERY:
            told = await place.read(door, result.invocation_id, MINE)
            assert isinstance(told, dict)
            attempts = [span for span in told["spans"] if span["name"] == "Attempt"]
            assert [one["status"] for one in attempts] == ["UPSTREAM_FAILURE", "OK"], door
            assert [one["attributes"]["external.attempt"] for one in attempts] == [1, 2]
            assert [one["attributes"]["http.response.status_code"] for one in attempts] == [503, 200]
            assert {one["attributes"]["server.address"] for one in attempts} == {"127.0.0.1"}
        words = ["calls", "trace", result.invocation_id, "--url", place.base, "--token", place.tokens[MINE]]
        code, out, _ = await to_thread(warm.run, place.on_home(*words), os.environ, place.app.home.path)
        assert (code, f"attempt 1 to 127.0.0.1:{far.port}, 503" in out.decode()) == (0, True)


@pytest.mark.supports("OBS-01")
async def test_of_a_call_that_was_not_traced_one_span_tells_what_is_on_record(home: Path) -> None:
    async with opened(home) as place:
        call = await place.make_call()
        told = [await place.read(door, call, MINE) for door in DOORS]
        assert all(one == told[0] for one in told)
        (first, *_) = told
        assert isinstance(first, dict)
        (span,) = first["spans"]
        assert (first["complete"], span["name"], span["status"]) == (False, "tool.invoke", "OK")
        assert span["attributes"]["tool.invocation_id"] == call
        assert span["attributes"]["tool.id"] == "demo.add"
        assert await place.read("library", "01ARZ3NDEKTSV4RRFFQ69G5FAV", MINE) == "E3702"


@pytest.mark.supports("OBS-01")
async def test_a_trace_shows_a_caller_only_the_calls_of_it_that_are_its_own(home: Path) -> None:
    async with opened(home, trace_ratio=1.0) as place:
        callers = {who: await place.app.caller_of(place.tokens[who]) for who in (MINE, ALIEN, AUDITS)}
        calls = {
            who: (await place.app.call("demo.add", a=1, caller=callers[who], trace_id="one-trace")).invocation_id
            for who in (MINE, ALIEN)
        }
        for who, seen in ((MINE, [MINE]), (ALIEN, [ALIEN]), (AUDITS, [MINE, ALIEN])):
            told = await place.service.calls.trace(calls[seen[0]], callers[who])
            roots = [one["attributes"]["tool.invocation_id"] for one in told["spans"] if one["name"] == "tool.invoke"]
            assert roots == [calls[one] for one in seen]
