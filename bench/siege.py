"""How long an honest caller waits beside a hostile one of each kind, against its wait alone in the same run.

The server and the honest caller share a process; the hostile caller has its own, so that what it costs to be hostile is
not counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson

from bench.measure import Plan, number, times
from bench.report import Table, verdict
from interlock import Failure, Field, Interlock, tool
from interlock.authority.identities import Identity
from interlock.core.capability import ToolGrant
from interlock.doors.server import Listening, serving
from interlock.service import Service

GOAL = 3.0
HONEST_S, QUICK_S = 8.0, 2.0
PAUSE_S = 0.005
Hostile = Callable[["Siege"], Awaitable[None]]
Values = Annotated[list[Any], Field(description="values", examples=[[1]])]
Text = Annotated[str, Field(description="a text", examples=["a"])]
reads = tool(version="1.0.0", mutation_class="read_only", namespace="siege")


@reads
async def count(values: Values) -> int:
    """Count values."""
    return len(values)


@reads
async def fail(text: Text) -> int:
    """Fail at length."""
    if len(text) > 1:
        raise Failure("E3401", text)
    return 1


@reads
def hang(text: Text) -> int:
    """Go on after the call was cut off."""
    if len(text) > 1:
        time.sleep(5)
    return len(text)


@reads
async def produce(size: Annotated[int, Field(description="a size", examples=[1])]) -> str:
    """A large result."""
    return "x" * size


class Siege:
    """A server, an honest caller and what a hostile one needs."""

    def __init__(self, port: int, headers: dict[str, str], client: httpx.AsyncClient) -> None:
        self.port = port
        self.headers = headers
        self.client = client

    async def invoke(self, name: str, **arguments: Any) -> None:
        body = orjson.dumps({"tool_id": f"siege.{name}", "parameters": arguments, "timeout_ms": 500})
        await self.client.post("/v1/tools/invoke", content=body, headers=self.headers)

    async def values(self) -> None:
        await self.invoke("count", values=[1] * 2_000_000)

    async def values_within_the_bound(self) -> None:
        await self.invoke("count", values=[1] * 90_000)

    async def batch(self) -> None:
        one = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke"}
        one |= {"params": {"tool_id": "siege.count", "parameters": {"values": [1] * 900}}}
        await self.client.post("/rpc", content=orjson.dumps([one] * 100), headers=self.headers)

    async def long_error(self) -> None:
        await self.invoke("fail", text="a@b.c 1-" * 400_000)

    async def large_result(self) -> None:
        await self.invoke("produce", size=5_000_000)

    async def hanging_function(self) -> None:
        await self.invoke("hang", text="for long")

    async def connections(self) -> None:
        """Many connections that say nothing."""
        opened: list[asyncio.StreamWriter] = []
        try:
            opened += [(await asyncio.open_connection("127.0.0.1", self.port))[1] for _ in range(200)]
            await asyncio.sleep(0.2)
        finally:
            for writer in opened:
                writer.close()

    async def sessions(self) -> None:
        """MCP sessions that are opened and dropped."""
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        said = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello})
        accept = {"accept": "application/json, text/event-stream"}
        await self.client.post("/mcp", content=said, headers={**self.headers, **accept})


KINDS: dict[str, Hostile] = {
    "two million values": Siege.values,
    "90,000 values": Siege.values_within_the_bound,
    "a batch of 100": Siege.batch,
    "an error of 3 MB": Siege.long_error,
    "results of 5 MB": Siege.large_result,
    "functions that hang": Siege.hanging_function,
    "silent connections": Siege.connections,
    "dropped MCP sessions": Siege.sessions,
}


async def run(plan: Plan) -> list[Table]:
    seconds = QUICK_S if plan == Plan.of(quick=True) else HONEST_S
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lock = await stack.enter_async_context(Interlock.open(home, housekeeping=False))
        await lock.add(count, fail, hang, produce)
        lock.issuer_keys.init("EdDSA")
        tokens: list[str] = []
        for name in ("honest", "hostile"):
            await lock.identities.register(Identity(did=f"did:web:{name}.example", name=name), by="bench")
            grants = [ToolGrant("siege.*")]
            tokens.append(await lock.tokens.issue(subject=f"did:web:{name}.example", tools=grants, by=lock.caller))
        server = await stack.enter_async_context(serving(Service(lock), Listening(port=0, grpc_port=None)))
        await server.warm()
        base = f"http://127.0.0.1:{server.port}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=60))
        kind = {"content-type": "application/json"}
        headers, theirs = [{"authorization": f"Bearer {token}", **kind} for token in tokens]
        honest = Siege(server.port, headers, client)
        await _honest(honest, 0.5)
        alone = await _honest(honest, seconds)
        rows: list[tuple[str, list[float]]] = [("alone", alone)]
        spawn = multiprocessing.get_context("spawn")
        for name in KINDS:
            ready = spawn.Event()
            process = spawn.Process(target=_attack, args=(name, server.port, theirs, ready), daemon=True)
            process.start()
            await asyncio.to_thread(ready.wait, 60)
            rows.append((name, await _honest(honest, seconds)))
            process.kill()
            await asyncio.to_thread(process.join)
            await _honest(honest, 1.0)  # what it left behind ends
        return [_table(rows)]


def _attack(name: str, port: int, headers: dict[str, str], ready: Any) -> None:
    """A hostile caller, until it is killed."""

    async def attack() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            hostile = Siege(port, headers, client)
            while True:
                with suppress(httpx.HTTPError, OSError):
                    await KINDS[name](hostile)
                ready.set()

    asyncio.run(attack())


async def _honest(caller: Siege, seconds: float) -> list[float]:
    """How long small reads take, in ms."""
    body = orjson.dumps({"tool_id": "siege.count", "parameters": {"values": [1]}})
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        answer = await caller.client.post("/v1/tools/invoke", content=body, headers=caller.headers)
        assert answer.status_code == 200, answer.text
        found.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(PAUSE_S)
    return sorted(found)


def _table(rows: list[tuple[str, list[float]]]) -> Table:
    alone = _p99(rows[0][1])
    told = [
        (name, str(len(found)), number(found[len(found) // 2]), number(_p99(found)), times(_p99(found) / alone),
         "" if name == "alone" else verdict(_p99(found) / alone <= GOAL))
        for name, found in rows
    ]  # fmt: skip
    return Table(
        "Siege: an honest caller beside a hostile one",
        ("beside", "reads", "p50 ms", "p99 ms", "p99 against alone", f"goal <= {GOAL:g}x"),
        told,
    )


def _p99(found: list[float]) -> float:
    return found[min(len(found) - 1, len(found) * 99 // 100)]
