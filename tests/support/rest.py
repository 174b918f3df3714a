"""The REST API over a data directory, with an operator, two people and an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import pytest_asyncio

from interlock import Context, Field, Interlock, tool
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.core.errors import CODES
from interlock.doors.rest import rest_app
from interlock.testing import FakeClock
from tests import sample
from tests.sample import TOOLS
from tests.support.calls import admit, turn
from tests.support.identities import did_of as did

Json = dict[str, Any]


@tool(
    version="1.0.0", mutation_class="read_only", namespace="demo", timeout_class="long_running",
    checkpoints=["phase_complete"],
)  # fmt: skip
async def crawl(ctx: Context, steps: sample.Number) -> int:
    """Go step by step, and wait half way until the test lets it go on."""
    for step in range(steps):
        await ctx.checkpoint("phase_complete" if step else "begun", {"step": step, "mail": "ann@example.org"})
        if step == 1 and sample.world.gate is not None:
            await sample.world.gate.wait()
    return steps


EVERYTHING = ("tools:admin", "tokens:issue", "policy:read", "policy:admin", "audit:read", "upstreams:admin")
MESSAGE = Annotated[str, Field(description="what to send back", examples=["Hello World"])]
# As the seed has it: without mutation class, idempotency, descriptions and all else that admission asks for.
BARE: Json = {
    "tool_id": "echo_tool",
    "version": "1.0.0",
    "name": "Echo Tool",
    "description": "Echoes input back",
    "parameters": {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]},
    "result_schema": {"type": "object", "properties": {"echoed": {"type": "string"}}},
}
COMPLETE: Json = {
    **BARE,
    "provider": "local",
    "protocol": "native",
    "mutation_class": "read_only",
    "parameters": {
        "type": "object",
        "properties": {"message": {"type": "string", "description": "what to send back", "examples": ["Hello World"]}},
        "required": ["message"],
    },
    "result_schema": {"type": "object", "properties": {"echoed": {"type": "string"}}, "required": ["echoed"]},
    "required_permissions": [],
    "idempotency": {},
    "observability": {},
    "timeout_class": "standard",
    "execution": {"target": "tests.support.rest:echo_tool"},
}


@tool(version="1.0.0", mutation_class="read_only", namespace="unused")
def echo_tool(message: MESSAGE) -> dict[str, str]:
    """Echo the input back to whoever sent it."""
    return {"echoed": message}


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def stepwise(ctx: Context, steps: sample.Number) -> int:
    """Report each step, once the test lets it."""
    sample.world.runs += 1
    if sample.world.gate is not None:
        await sample.world.gate.wait()
    for step in range(steps):
        ctx.progress(f"step {step + 1}", percent=100 * (step + 1) / steps)
    return steps


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", max_inline_chars=100)
def wordy(text: sample.Text) -> str:
    """Say the same text a hundred times."""
    return text * 100


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
def broken(text: sample.Text) -> str:
    """Fail with something that nobody else should read."""
    raise RuntimeError(f"in /srv/secret/place: {text}")


@dataclass
class World:
    """A served home, and whoever calls on it."""

    app: Interlock
    service: Service
    client: httpx.AsyncClient
    clock: FakeClock
    tokens: dict[str, str] = field(default_factory=dict[str, str])

    async def identity(self, name: str, kind: Any, **facts: Any) -> Identity:
        return await self.app.identities.register(Identity(did=did(name), name=name, kind=kind, **facts), by="test")

    async def token(self, name: str, *, user: str | None = None, tools: tuple[str, ...] = ("*",), **given: Any) -> str:
        grants = [ToolGrant(*one.split("@")) if "@" in one else ToolGrant(one) for one in tools]
        behalf = None if user is None else did(user)
        return await self.app.tokens.issue(subject=did(name), user=behalf, tools=grants, by=self.app.caller, **given)

    async def ask(self, method: str, path: str, by: str | None = "scout", **options: Any) -> httpx.Response:
        headers: Json = dict(options.pop("headers", {}))
        if by is not None:
            headers["authorization"] = f"Bearer {self.tokens.get(by, by)}"
        return await self.client.request(method, path, headers=headers, **options)

    async def get(self, path: str, by: str | None = "scout", **query: Any) -> httpx.Response:
        return await self.ask("GET", path, by, params=query)

    async def post(self, path: str, body: Any = None, by: str | None = "scout", **options: Any) -> httpx.Response:
        return await self.ask("POST", path, by, json={} if body is None else body, **options)

    async def invoke(self, tool_id: str, parameters: Json, by: str | None = "scout", **more: Any) -> httpx.Response:
        return await self.post("/v1/tools/invoke", {"tool_id": tool_id, "parameters": parameters, **more}, by)

    def records(self, kind: str) -> list[Json]:
        rows = self.app.journal.reader.all("SELECT body FROM journal WHERE kind = ? ORDER BY seq", (kind,))
        return [orjson.loads(body) for (body,) in rows]


@asynccontextmanager
async def serving(home: Path) -> AsyncGenerator[World]:
    """The application over a home, with an operator, two people and an agent that acts for one of them."""
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        await admit(app, stepwise, wordy, broken)
        app.issuer_keys.init("EdDSA")
        service = Service(app)
        transport = httpx.ASGITransport(rest_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://interlock", timeout=60) as client:
            world = World(app, service, client, clock)
            await world.identity("alice", "human")
            await world.identity("boss", "human", groups=frozenset({"approvers"}))
            await world.identity("root", "human")
            await world.identity("scout", "agent", trust=80, groups=frozenset({"approvers"}))
            world.tokens = {
                "alice": await world.token("alice"),
                "boss": await world.token("boss"),
                "root": await world.token("root", scopes=EVERYTHING),
                "scout": await world.token("scout", user="alice", scopes=("a:read",)),
            }
            yield world
            await service.close()


@pytest_asyncio.fixture
async def world(home: Path) -> AsyncGenerator[World]:
    async with serving(home) as made:
        yield made


def refused(response: httpx.Response, status: int, code: str) -> Json:
    """A refusal of the one form there is, with the table's facts; its envelope."""
    assert response.status_code == status, response.text
    body: Json = response.json()
    row = CODES[code]
    envelope: Json = body["error"]
    assert body["detail"].startswith(f"{code}: ")
    assert (envelope["error_code"], envelope["errorCode"]) == (code, row.error_code.value)
    assert response.headers["x-trace-id"] == envelope["traceId"]
    assert response.headers["content-type"] == "application/json"
    return envelope


async def until_ended(world: World, poll: str) -> Json:
    async with asyncio.timeout(60):
        told: Json = {"status": "running"}
        while told["status"] == "running":
            await turn()
            told = (await world.get(poll)).json()
    return told
