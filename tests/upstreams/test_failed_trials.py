"""A tool of an adapter whose contract tests fail is refused like every tool, and the others of its upstream are not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import orjson
import pytest
from mcp.server.mcpserver import MCPServer

from interlock import Interlock
from interlock.api import scratch
from interlock.contract.recipes import ONLY_RUN
from interlock.core.clock import Clock
from interlock.data.schema import Json
from interlock.upstreams import repository
from interlock.upstreams.manager import Report
from interlock.upstreams.settlement import PROVE_EVERY_S
from tests.support.providers import PROVIDERS, TAKES, declared
from tests.support.upstream_servers import Answer, Asked, Got, HttpServer, ShopServer, json_answer, served
from tests.support.upstreams import MODULE


async def _refused(app: Interlock, report: Report, upstream: str, wrong: set[str], right: str) -> None:
    states = {one.name: (one.state, one.reason) for one in report.tools}
    assert states[right][0] == "admitted"
    for name in wrong:
        assert states[name][0] == "refused"
        assert "contract_tests_passing" in states[name][1] or "contract tests" in states[name][1], states[name]
        missing = await app.call(f"{upstream}.{name}", {"text": "a"})
        assert missing.error is not None
        assert missing.error.code == "E3101"


@pytest.mark.proves("EXEC-12")
async def test_a_langchain_tool_whose_contract_tests_fail_is_refused(tmp_path: Path) -> None:
    reads: Json = {"mutation_class": "read_only"}
    example: Json = {"examples": [{"text": "a"}]}
    overlay: Json = {
        "tools": {
            "shout": {**reads, **example},
            "crash": {**reads, **example},
            "late": {**reads, **example},
        }
    }
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        report = await app.upstreams.add("chain", "langchain", {"module": MODULE}, by=app.caller, overlay=overlay)
        await _refused(app, report, "chain", {"crash", "late"}, "shout")


@pytest.mark.proves("EXEC-12")
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_function_whose_contract_tests_fail_is_refused(tmp_path: Path, provider: str) -> None:
    said: Json = {"mutation_class": "read_only", "examples": [{"city": "Ulm"}], "result_schema": {"type": "string"}}
    answers = {"/right": json_answer("sunny"), "/unfit": json_answer(7), "/broken": Answer(status=400, body=b"{}")}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        server.otherwise = lambda got: answers[got.path]
        names = ("right", "unfit", "broken")
        config: Json = {
            "declarations": [declared(provider, name, TAKES) for name in names],  # pyright: ignore[reportArgumentType] - one of PROVIDERS
            "urls": [server.url],
            "allow_private": True,
        }
        overlay: Json = {"tools": dict.fromkeys(names, said)}
        report = await app.upstreams.add("fns", "functions", config, by=app.caller, overlay=overlay)
        await _refused(app, report, "fns", {"unfit", "broken"}, "right")


# How a service answers for a tool: it is away (429 or 503), good, or bad, which no later answer mends.
State = Literal["away", "good", "bad"]
States = Callable[[str], State]
NAMES = ("once", "proven", "disproven")
EXAMPLE: Json = {"mutation_class": "read_only", "examples": [{"city": "Ulm"}]}


@dataclass(frozen=True)
class Service:
    """An upstream with three tools: its configuration, the overlay, and its name for each of `NAMES`."""

    config: Json
    overlay: Json
    tools: dict[str, str]


@asynccontextmanager
async def by_http(kind: str, states: States, status: int) -> AsyncGenerator[Service]:
    def answer(got: Got) -> Answer:
        name = got.path.strip("/").partition("?")[0]
        if name not in NAMES:
            return Answer(status=404)  # a probe
        state = states(name)
        return Answer(status=status) if state == "away" else json_answer("sunny" if state == "good" else 7)

    async with HttpServer.open() as server:
        server.otherwise = answer
        config: Json = {"urls": [server.url], "allow_private": True}
        said = {**EXAMPLE, "result_schema": {"type": "string"}}
        if kind == "functions":
            config["declarations"] = [declared("anthropic", name, TAKES) for name in NAMES]
        else:
            config["openapi"] = {
                "openapi": "3.1.0",
                "info": {"title": "weather", "version": "1"},
                "paths": {f"/{name}": {"get": {
                    "operationId": name,
                    "parameters": [{"name": "city", "in": "query", "required": True, "schema": {"type": "string"}}],
                    "responses": {"200": {
                        "description": "", "content": {"application/json": {"schema": {"type": "string"}}},
                    }},
                }} for name in NAMES},
            }  # fmt: skip
        yield Service(config, {"tools": dict.fromkeys(NAMES, said)}, {name: name for name in NAMES})


@asynccontextmanager
async def by_mcp(states: States, status: int) -> AsyncGenerator[Service]:
    """A server of the MCP SDK, behind a proxy that is away."""
    server = MCPServer("weather")

    def tool(name: str) -> Callable[[str], str]:
        def look(city: str) -> str:
            if states(name) == "bad":
                raise ValueError(city)
            return "sunny"

        return look

    for name in NAMES:
        server.tool(name=name, description="The weather in a city.")(tool(name))
    inner = server.streamable_http_app()

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        heard: list[Any] = []
        if scope["type"] == "http" and scope["method"] == "POST":
            body, more = b"", True
            while more:
                heard.append(await receive())
                body, more = body + heard[-1].get("body", b""), heard[-1].get("more_body", False)
            asked = orjson.loads(body)
            if asked.get("method") == "tools/call" and states(asked["params"]["name"]) == "away":
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": b"{}"})
                return

        async def replayed() -> Any:
            return heard.pop(0) if heard else await receive()

        await inner(scope, replayed, send)

    async with served(proxy) as base:
        config: Json = {"url": f"{base}/mcp", "allow_private": True}
        yield Service(config, {"tools": dict.fromkeys(NAMES, EXAMPLE)}, {name: name for name in NAMES})


@asynccontextmanager
async def by_grpc(folder: Path, states: States, status: int) -> AsyncGenerator[Service]:
    methods = dict(zip(NAMES, ("Get", "Echo", "List"), strict=True))
    names = {method: name for name, method in methods.items()}
    away = grpc.StatusCode.RESOURCE_EXHAUSTED if status == 429 else grpc.StatusCode.UNAVAILABLE

    async def answer(asked: Asked, context: Any) -> Any:
        state = states(names[asked.method])
        if state != "good":
            await context.abort(away if state == "away" else grpc.StatusCode.INVALID_ARGUMENT, "no")
        return asked.message if asked.method == "Echo" else server.message("shop.common.Thing")(id=7)

    async with ShopServer.open(folder) as server:
        server.answer = answer
        arguments: dict[str, Json] = {"once": {}, "proven": {"text": "a"}, "disproven": {"thing_id": 1}}
        tools = {name: f"shop.v1.Shop.{method}" for name, method in methods.items()}
        said = {tools[name]: {"mutation_class": "read_only", "examples": [arguments[name]]} for name in NAMES}
        config: Json = {"targets": [f"127.0.0.1:{server.port}"], "plaintext": True, "allow_private": True}
        yield Service(config, {"tools": said}, tools)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("kind", ["functions", "openapi", "mcp", "grpc"])
async def test_an_upstream_that_does_not_answer_for_now_is_asked_again_then_admitted_and_proven_later(
    tmp_path: Path, kind: str, status: int
) -> None:
    away = {"once": 1, "proven": 999, "disproven": 999}  # how often each of them does not answer

    def states(name: str) -> State:
        away[name] -= 1
        return "away" if away[name] >= 0 else "bad" if name == "disproven" else "good"

    passed = 0.0
    clock = Clock(monotonic=lambda: time.monotonic() + passed)
    ways = {"mcp": lambda: by_mcp(states, status), "grpc": lambda: by_grpc(tmp_path, states, status)}
    service = ways.get(kind, lambda: by_http(kind, states, status))
    async with (
        service() as there,
        Interlock.open(tmp_path / "home", clock=clock, housekeeping=False) as app,
    ):
        report = await app.upstreams.add("it", kind, there.config, by=app.caller, overlay=there.overlay)
        found = {one.name: one for one in report.tools}
        tools = {name: found[own] for name, own in there.tools.items()}
        states_now = {name: (one.state, "not proven yet" in one.reason) for name, one in tools.items()}
        assert states_now == {
            "once": ("admitted", False),
            "proven": ("admitted", True),
            "disproven": ("admitted", True),
        }, {name: one.reason for name, one in tools.items()}
        again = await app.upstreams.refresh("it", by=app.caller)
        assert len(await unproven(app, "it")) == 2, "it still does not answer"
        for listed in (again.tools, await app.upstreams.offers("it")):
            waiting = {one.name for one in listed if "not proven yet" in one.reason}
            assert waiting == {there.tools["proven"], there.tools["disproven"]}
        away |= {"proven": 0, "disproven": 0}
        await app.gateway.services.answers("it")  # the breaker lets calls through again
        if status == 429:
            await app.upstreams.refresh("it", by=app.caller)
        else:  # what runs in the background does the same
            passed = PROVE_EVERY_S
            assert await app.upstreams.probe("it") == "available"
        assert await unproven(app, "it") == []
        arguments: Json = there.overlay["tools"][there.tools["proven"]]["examples"][0]
        good = await app.call(tools["proven"].address, arguments)
        assert good.error is None
        bad = await app.call(tools["disproven"].address, {"thing_id": 1} if kind == "grpc" else arguments)
        assert bad.error is not None
        assert bad.error.code == "E3210"
        assert "contract tests failed" in bad.error.message


async def unproven(app: Interlock, upstream: str = "fns") -> list[tuple[str, str, str]]:
    return await app.journal.read(lambda reader: repository.unproven(reader, upstream))


@pytest.mark.parametrize("endpoints", [1, 2])
async def test_trials_that_fail_do_not_keep_healthy_tools_of_the_upstream_out(tmp_path: Path, endpoints: int) -> None:
    """Breakers count failures of calls. Trials of other tools, with inputs nobody sent, say nothing about these."""
    said: Json = {"mutation_class": "read_only", "examples": [{"city": "Ulm"}], "result_schema": {"type": "string"}}
    broken = [f"broken{number}" for number in range(6)]

    def answer(got: Any) -> Answer:
        return Answer(status=500, body=b"{}") if "broken" in got.path else json_answer("sunny")

    async with (
        HttpServer.open() as server,
        HttpServer.open() as other,
        Interlock.open(tmp_path, housekeeping=False) as app,
    ):
        server.otherwise = other.otherwise = answer
        write: Json = {
            "mutation_class": "write_reversible",
            "undo": {"tool": "healthy", "arguments": {"city": "/input/city"}, "example": {"city": "Ulm"}},
            "result_schema": {"type": "string"},
        }
        config: Json = {
            "declarations": [declared("anthropic", name, TAKES) for name in (*broken, "healthy", "write")],
            "urls": [server.url, other.url][:endpoints],
            "allow_private": True,
        }
        overlay: Json = {"tools": {**dict.fromkeys((*broken, "healthy"), said), "write": write}}
        report = await app.upstreams.add("fns", "functions", config, by=app.caller, overlay=overlay)
        states = {one.name: (one.state, one.reason) for one in report.tools}
        assert states["healthy"] == ("admitted", ""), states
        assert states["write"] == ("admitted", ONLY_RUN), states
        assert [one for one in broken if "not proven yet" not in states[one][1]] == []
        assert {one.state for one in app.gateway.services.snapshot() if one.name == "fns"} <= {"closed"}
        assert (await app.call("fns.healthy", {"city": "Ulm"})).value == "sunny"
        assert (await app.call("fns.write", {"city": "Ulm"}, key="one")).value == "sunny"


async def test_an_upstream_that_lists_its_tools_and_answers_no_call_is_given_up_after_some_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "MOST_LOST_S", 0.0)
    said: Json = {"mutation_class": "read_only", "examples": [{"city": "Ulm"}], "result_schema": {"type": "string"}}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        server.otherwise = lambda got: Answer(status=500, body=b"{}")
        names = ("first", "second")
        config: Json = {
            "declarations": [declared("anthropic", name, TAKES) for name in names],
            "urls": [server.url],
            "allow_private": True,
        }
        overlay: Json = {"tools": dict.fromkeys(names, said)}
        report = await app.upstreams.add("fns", "functions", config, by=app.caller, overlay=overlay)
        assert [one.state for one in report.tools] == ["admitted", "admitted"]
        assert ["not tried" in one.reason for one in report.tools] == [False, True]
        assert len(await unproven(app)) == 2, "both are tried again"
