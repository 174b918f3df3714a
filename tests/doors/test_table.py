"""The table of endpoints: an endpoint is a module and a row."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import orjson
import pydantic
import pytest
from click.testing import CliRunner

from interlock.api.service import Ask, Service
from interlock.audit.invocations import invocation_of
from interlock.call import endpoints
from interlock.call.endpoints import ENDPOINTS, Endpoint, addresses
from interlock.cli import serve
from interlock.core.errors import Failure
from interlock.doors.door import Door, Key
from interlock.doors.listening import Listening
from interlock.http.asgi import Scope, header
from interlock.http.route import Reply, Route
from interlock.settings import Settings
from tests.support.calls import SIX, records
from tests.support.servers import LOOPBACK, place


class Line:
    """One call in one line: the tool and its input as JSON, apart by a blank."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, line: str, authorization: str | None, door: str) -> dict[str, Any]:
        tool, _, given = line.partition(" ")
        try:
            caller = await self._service.authenticate(authorization)
            ask = Ask(tool, orjson.loads(given), native={"line": "7"})
            result = await self._service.calls.invoke(ask, caller, door=door)
        except Failure as failure:
            return {"code": failure.code}
        error = result.error
        facts = {"code": None, "message": None} if error is None else {"code": error.code, "message": error.message}
        return {"value": result.value, "id": result.invocation_id, **facts}


class Loaded(Route):
    """Answers `GET /line?…`, where the line is the query."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def prepare(self, head: Scope) -> Reply:
        line = bytes(head["query_string"]).decode().replace("%20", " ").replace("%22", '"')
        return Reply(200, orjson.dumps(await self._line.answer(line, header(head, b"authorization"), "lines")))


class OverHttp(Door):
    """An endpoint on the server's port, loaded when it is first wanted."""

    loaded_later = (("GET", "/line"),)

    def __init__(self, service: Service) -> None:
        self._line = Line(service)
        self.closed = False

    def routes(self) -> Mapping[Key, Route]:
        return {("GET", "/line/about"): About()}

    async def load(self) -> Route:
        return Loaded(self._line)

    async def close(self) -> None:
        self.closed = True


class About(Route):
    async def prepare(self, head: Scope) -> Reply:
        return Reply(200, b'{"one": "call in one line"}')


class OverTcp(Door):
    """An endpoint with a port of its own: a token, then lines."""

    def __init__(self, service: Service) -> None:
        self._line = Line(service)
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        token = (await reader.readline()).decode().strip()
        while line := (await reader.readline()).decode().strip():
            writer.write(orjson.dumps(await self._line.answer(line, token, "tcp")) + b"\n")
            await writer.drain()
        writer.close()


LINES = Endpoint(
    "lines",
    "Lines",
    "/line",
    pages={"about": ("About", "/line/about")},
    lists_tools=True,
    key_example="order-17 in front of the line",
    native=("lines", "line"),
)
TCP = Endpoint("tcp", "TCP", port=8082)


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> list[Door]:
    made: list[Door] = []
    rows: dict[str, Endpoint] = {}
    for name, kind, row in (
        ("lines", OverHttp, LINES),
        ("tcp", OverTcp, TCP),
    ):

        def open_door(service: Service, listening: Listening, kind: type[OverHttp | OverTcp] = kind) -> Door:
            made.append(kind(service))
            return made[-1]

        module = ModuleType(name)
        vars(module)["open_door"] = open_door
        monkeypatch.setitem(sys.modules, name, module)
        rows[name] = row
    monkeypatch.setattr(endpoints, "ENDPOINTS", {**ENDPOINTS, **rows})
    return made


async def test_a_module_and_a_row_are_a_new_endpoint(home: Path, doors: list[Door]) -> None:
    async with place(home, LOOPBACK) as here, httpx.AsyncClient(base_url=here.base, timeout=60) as client:
        assert (await client.get("/line/about")).json() == {"one": "call in one line"}
        told = (await client.get('/line?demo.add {"a":2,"b":3}', headers=here.bearer)).json()
        assert told["value"] == 5
        (record,) = records(here.app, told["id"])
        assert (record["phases"], record["door"]) == (SIX, "lines")
        stranger = await client.get('/line?demo.add {"a":2,"b":3}')
        assert stranger.json() == {"code": "E3212"}
        foreign = await client.get("/line", headers={"host": "evil.example"})
        assert foreign.status_code == 403, "every endpoint is behind the gate"

        reader, writer = await asyncio.open_connection("127.0.0.1", here.server.ports["tcp"])
        writer.write(f'{here.bearer["authorization"]}\ndemo.add {{"a":4,"b":3}}\ndemo.add {{"a":"x"}}\n\n'.encode())
        answers = [orjson.loads(line) for line in (await reader.read()).splitlines()]
        assert [(one["value"], one["code"]) for one in answers] == [(7, None), (None, "E3301")]
        writer.close()
        await writer.wait_closed()

        told_by_serve = {one.name: one.url for one in addresses(here.base, "localhost", here.server.ports)}
        assert told_by_serve["lines"] == f"{here.base}/line"
        assert told_by_serve["about"] == f"{here.base}/line/about"
        assert told_by_serve["tcp"] == f"localhost:{here.server.ports['tcp']}"
        assert told_by_serve["grpc"] is None, "left out by this server"
    assert [one.closed for one in doors if isinstance(one, OverHttp)] == [True]


@pytest.mark.usefixtures("doors")
async def test_the_rest_of_the_program_reads_the_row_of_an_endpoint(home: Path) -> None:
    """Surfaces, advice on idempotency keys, the ids of clients and the options of `serve` come from the table."""
    surface: dict[str, Any] = {"surface": "search", "surface_doors": ("lines",)}
    async with place(home, LOOPBACK, **surface) as here, httpx.AsyncClient(base_url=here.base, timeout=60) as client:

        async def ask(line: str) -> dict[str, Any]:
            return (await client.get(f"/line?{line}", headers=here.bearer)).json()

        assert (await ask('demo.add {"a":2}'))["code"] == "E3107", "it is not loaded"
        names = [one["tool_id"] for one in (await client.get("/v1/tools", headers=here.bearer)).json()["tools"]]
        assert "demo.add" in names, "the setting names one endpoint alone"
        await client.post("/v1/tools/load", json={"names": ["demo.increment"]}, headers=here.bearer)
        refused = await ask('demo.increment {"name":"x"}')
        assert refused["code"] == "E3307"
        assert "say order-17 in front of the line" in refused["message"]
        invocation = invocation_of(records(here.app, refused["id"]))
        assert invocation is not None
        mapping = {"schema_version": "0.2.0", "kind": "lines", "method": "line", "line": "7"}
        assert mapping in invocation["external_mappings"]


@pytest.mark.usefixtures("doors")
def test_serve_has_options_for_the_port_of_an_endpoint() -> None:
    spec = importlib.util.spec_from_file_location("fresh_serve", serve.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    shown = " ".join(CliRunner().invoke(fresh.serve, ["--help"]).output.split())
    assert "For all but gRPC, TCP; 0 takes any." in shown
    assert "For TCP; 0 takes any. [default: 8082; 0<=x<=65535] --no-tcp Do not serve TCP." in shown


@pytest.mark.usefixtures("doors")
def test_a_setting_that_names_endpoints_knows_those_of_the_table() -> None:
    with pytest.raises(pydantic.ValidationError, match="Input should be 'mcp', 'rest', 'jsonrpc', 'grpc' or 'lines'"):
        Settings.model_validate({"surface_doors": ["tcp"]})


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_row_names_a_module_that_opens_its_door(name: str) -> None:
    assert callable(importlib.import_module(ENDPOINTS[name].module).open_door)
