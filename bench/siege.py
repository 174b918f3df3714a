"""Measures how long an honest caller waits beside a hostile one of each kind, and alone in the same minutes.

Each kind is tried in several rounds. Before each round the honest caller is measured alone, so that a machine whose
speed changes during the run changes both numbers.

The server, the honest caller and the hostile caller have a process each. The hostile one has the lowest priority, so
that what it costs to be hostile is not counted. The hostile caller over stdio talks to a server of its own on the same
home, with the usual priority: they share its database.

The home lies in memory where there is a file system for that, because the pauses of a shared disk are longer than
anything that is measured here. SIEGE_DIR names another directory. SIEGE=gRPC tries only the kinds whose name holds that
text.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import grpc
import grpc.aio
import httpx
import orjson
import uvloop

from bench.measure import Plan, number, times
from bench.report import Table, verdict
from interlock import Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.core.collector import exempt_loaded_modules
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from interlock.doors.server import Listening, serving

GOAL = 3.0
ROUNDS = 3
HONEST_S, QUICK_S = 4.0, 1.0
PAUSE_S = 0.005
# A hostile caller is on another machine and takes no processor time from the server. Here it has the lowest priority.
_ELSEWHERE = 19
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


@tool(
    version="1.0.0", mutation_class="write_irreversible", namespace="siege", effects=[Effect("mail:{text}", "CREATE")]
)
async def send(ctx: Context, text: Text) -> int:
    """Something that a person must agree to."""
    ctx.effect(f"mail:{text}", "CREATE")
    return len(text)


@send.preview
def _(text: str) -> Preview:
    return Preview(impact=f"a mail of {len(text)} characters")


TOOLS = (count, fail, hang, produce, send)
# A server over stdio on the same home.
STDIO = """
import asyncio, sys
from bench.siege import TOOLS
from interlock import Interlock
from interlock.core.collector import collect_seldom, exempt_loaded_modules
from interlock.doors.mcp import McpDoor
from interlock.api.service import Service

async def main() -> None:
    async with Interlock.open(sys.argv[1], housekeeping=False) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        collect_seldom()
        exempt_loaded_modules()
        await McpDoor(Service(app)).run_stdio()

asyncio.run(main())
"""


class Target(NamedTuple):
    """The address of a server."""

    port: int
    grpc_port: int
    home: str


class Siege:
    """A server, an honest caller and what a hostile one needs."""

    def __init__(self, target: Target, token: str, client: httpx.AsyncClient) -> None:
        self.target = target
        self.token = token
        self.headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self.client = client
        self._channel: grpc.aio.Channel | None = None
        self._stdio: asyncio.subprocess.Process | None = None
        self._sent = 0

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
        await self._connect(self.target.port, b"")

    async def grpc_connections(self) -> None:
        """Many HTTP/2 connections without a call."""
        await self._connect(self.target.grpc_port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")

    async def _connect(self, port: int, said: bytes) -> None:
        opened: list[asyncio.StreamWriter] = []
        try:
            opened += [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(200)]
            for writer in opened:
                writer.write(said)
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

    # Over gRPC

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.target.grpc_port}")
        return self._channel

    async def grpc_calls(self) -> None:
        """Twenty calls at once, each with many values."""
        raw = orjson.dumps({"values": [1] * 20_000})
        request = wire.InvokeRequest(tool_id="siege.count", arguments_json=raw)
        bearer = (("authorization", f"Bearer {self.token}"),)
        calls = [GatewayStub(self.channel).Invoke(request, metadata=bearer) for _ in range(20)]
        await asyncio.gather(*calls, return_exceptions=True)

    async def grpc_headers(self) -> None:
        """RPCs without a token and without a message."""
        method = cast("Any", self.channel).stream_stream("/interlock.v1.Gateway/Invoke")
        begun = [method() for _ in range(200)]
        await asyncio.gather(*(one.code() for one in begun))

    # Over stdio

    async def stdio(self) -> None:
        """A hundred calls written at once; their answers are read when all are written."""
        if self._stdio is None:
            environment = {**os.environ, "INTERLOCK_TOKEN": self.token}
            self._stdio = await asyncio.create_subprocess_exec(
                sys.executable, "-c", STDIO, self.target.home,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment, limit=1 << 24,
            )  # fmt: skip
            hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            await self._say("initialize", hello, 1)
        arguments = {"name": "siege-count", "arguments": {"values": [1] * 900}}
        await self._say("tools/call", arguments, 100)

    async def _say(self, method: str, params: dict[str, Any], times_: int) -> None:
        assert self._stdio is not None
        assert self._stdio.stdin is not None
        assert self._stdio.stdout is not None
        for _ in range(times_):
            self._sent += 1
            said = {"jsonrpc": "2.0", "id": self._sent, "method": method, "params": params}
            self._stdio.stdin.write(orjson.dumps(said) + b"\n")
        await self._stdio.stdin.drain()
        for _ in range(times_):
            assert await self._stdio.stdout.readline(), "the server over stdio has ended"

    # By tickets

    async def tickets(self) -> None:
        """Twenty calls at once that each wait for a person; those that came to wait are withdrawn."""
        keys = [os.urandom(8).hex() for _ in range(20)]
        asked = [{"tool_id": "siege.send", "parameters": {"text": key}, "idempotency_key": key} for key in keys]
        posts = (self.client.post("/v1/tools/invoke", json=one, headers=self.headers) for one in asked)
        for answer in await asyncio.gather(*posts):
            if answer.status_code == 202:
                await self.client.post(f"/v1/calls/{answer.json()['invocation_id']}/cancel", headers=self.headers)

    async def tickets_above_the_bound(self) -> None:
        """Calls that would wait for a person, of a caller for whom enough wait already."""
        key = os.urandom(8).hex()
        body = {"tool_id": "siege.send", "parameters": {"text": key}, "idempotency_key": key}
        await self.client.post("/v1/tools/invoke", json=body, headers=self.headers)


KINDS: dict[str, Hostile] = {
    "two million values": Siege.values,
    "90,000 values": Siege.values_within_the_bound,
    "a batch of 100": Siege.batch,
    "an error of 3 MB": Siege.long_error,
    "results of 5 MB": Siege.large_result,
    "functions that hang": Siege.hanging_function,
    "silent connections": Siege.connections,
    "dropped MCP sessions": Siege.sessions,
    "gRPC calls of 20,000 values": Siege.grpc_calls,
    "gRPC silent connections": Siege.grpc_connections,
    "gRPC headers alone": Siege.grpc_headers,
    "calls over stdio": Siege.stdio,
    "tickets, withdrawn": Siege.tickets,
    "tickets above the bound": Siege.tickets_above_the_bound,
}


async def run(plan: Plan) -> list[Table]:
    wanted = os.environ.get("SIEGE", "")
    seconds = QUICK_S if plan == Plan.of(quick=True) else HONEST_S
    async with AsyncExitStack() as stack:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        home = stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("SIEGE_DIR", memory)))
        target, tokens = await stack.enter_async_context(_served(home))
        base = f"http://127.0.0.1:{target.port}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=60))
        honest = Siege(target, tokens[0], client)
        await _honest(honest, 0.5)
        rows: list[tuple[str, list[float], list[float]]] = []
        for name in (one for one in KINDS if wanted in one):
            alone: list[float] = []
            beside: list[float] = []
            for _ in range(ROUNDS):
                alone += await _honest(honest, seconds / 2)
                async with _attacked(name, target, tokens[1]):
                    beside += await _honest(honest, seconds)
                await _honest(honest, 1.0)  # what the attack left behind ends
            rows.append((name, sorted(alone), sorted(beside)))
        return [_table(rows)]


@asynccontextmanager
async def _served(home: str) -> AsyncGenerator[tuple[Target, list[str]]]:
    """A server in a process of its own: where it is, and the tokens of the honest and of the hostile caller."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(home, theirs), daemon=True)
    process.start()
    try:
        yield await asyncio.to_thread(ours.recv)
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


def _serve(home: str, told: Any) -> None:
    async def serve() -> None:
        async with Interlock.open(Path(home), housekeeping=False) as app:
            await app.add(*TOOLS)
            app.issuer_keys.init("EdDSA")
            tokens: list[str] = []
            for name in ("honest", "hostile"):
                await app.identities.register(Identity(did=f"did:web:{name}.example", name=name), by="bench")
                grants = [ToolGrant("siege.*")]
                tokens.append(await app.tokens.issue(subject=f"did:web:{name}.example", tools=grants, by=app.caller))
            async with serving(Service(app), Listening(port=0, ports={"grpc": 0})) as server:
                await server.warm()
                exempt_loaded_modules()
                told.send((Target(server.port, server.ports["grpc"], home), tokens))
                await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `interlock serve` has it
        runner.run(serve())


@asynccontextmanager
async def _attacked(name: str, target: Target, token: str) -> AsyncGenerator[None]:
    """A hostile caller in a process of its own, which has sent its first requests."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=_attack, args=(name, target, token, ready), daemon=True)
    process.start()
    try:
        await asyncio.to_thread(ready.wait, 60)
        yield
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


def _attack(name: str, target: Target, token: str, ready: Any) -> None:
    """A hostile caller, until it is killed."""
    if KINDS[name] is not Siege.stdio:  # whose server is no part of it
        os.nice(_ELSEWHERE)

    async def attack() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{target.port}", timeout=60) as client:
            hostile = Siege(target, token, client)
            while True:
                with suppress(httpx.HTTPError, grpc.aio.AioRpcError, OSError):
                    await KINDS[name](hostile)
                ready.set()

    asyncio.run(attack())


async def _honest(caller: Siege, seconds: float) -> list[float]:
    """The times of small reads, in ms."""
    body = orjson.dumps({"tool_id": "siege.count", "parameters": {"values": [1]}})
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        answer = await caller.client.post("/v1/tools/invoke", content=body, headers=caller.headers)
        assert answer.status_code == 200, answer.text
        found.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(PAUSE_S)
    return found


def _table(rows: list[tuple[str, list[float], list[float]]]) -> Table:
    told = [
        (name, str(len(beside)), number(_p99(alone)), number(beside[len(beside) // 2]), number(_p99(beside)),
         times(_p99(beside) / _p99(alone)), verdict(_p99(beside) / _p99(alone) <= GOAL))
        for name, alone, beside in rows
    ]  # fmt: skip
    return Table(
        "Siege: an honest caller beside a hostile one",
        ("beside", "reads", "p99 alone, ms", "p50 ms", "p99 ms", "p99 against alone", f"goal <= {GOAL:g}x"),
        told,
    )


def _p99(found: list[float]) -> float:
    return found[min(len(found) - 1, len(found) * 99 // 100)]
