"""`soak`: one server, a hundred thousand requests by every door and of every outcome, and its memory all the while.

Whatever a caller may choose is different each time: names, versions, keys, sessions, tokens, hosts, trace ids, ids of
calls. So a cache or a count that is kept by any of them, and never let go, shows as memory that grows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Plan
from bench.report import Table, verdict

Json = dict[str, Any]

REQUESTS, QUICK = 100_000, 10_000
CONNECTIONS = 32
TOOLS = Path(__file__).parent / "doors_tools.py"
SAMPLES = 10
# Caches that are meant to fill are full by then; from there on memory may breathe, but not grow.
WARM = 0.5
GROWTH_BELOW = 1.05

_MODERN = "2026-07-28"
_MCP = "io.modelcontextprotocol/"


@dataclass(frozen=True, slots=True)
class Served:
    """A server in a process of its own."""

    pid: int
    port: int
    grpc: str
    token: str

    def rss_kib(self) -> int:
        """The memory that it has now."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@dataclass(frozen=True, slots=True)
class Soaked:
    """The server's memory in KiB, after so many requests each time, and how often it answered what."""

    rss: list[tuple[int, int]]
    answers: Counter[str]

    @property
    def growth(self) -> float:
        """The last half's memory against what there was when it began."""
        warm = [kib for at, kib in self.rss if at >= WARM * self.rss[-1][0]]
        return warm[-1] / warm[0]


async def run(plan: Plan) -> list[Table]:
    async with served() as server:
        soaked = await soak(server, QUICK if plan.quick else REQUESTS)
    rows = [(f"{at:,}", f"{kib / 1024:.1f}", "", "") for at, kib in soaked.rss]
    growth = f"{soaked.growth:.3f}x"
    rows.append(("second half", growth, f"<= {GROWTH_BELOW}x", verdict(soaked.growth <= GROWTH_BELOW)))
    told = ", ".join(f"{name}: {count:,}" for name, count in sorted(soaked.answers.items()))
    return [Table("Memory under load", ("requests", "RSS MiB", "goal", ""), rows, f"answers {told}")]


@asynccontextmanager
async def served() -> AsyncGenerator[Served]:
    """`interlock serve` on an empty home, with tools that compute nothing."""
    with tempfile.TemporaryDirectory() as home:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "interlock.cli", "--home", home, "serve", "--port", "0", "--grpc-port", "0", "--json",
            "--token", "--tools", str(TOOLS), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            facts: Json = json.loads(await process.stdout.readline())
            yield Served(process.pid, int(facts["base_url"].rpartition(":")[2]), facts["grpc"], facts["token"])
        finally:
            process.terminate()
            await process.wait()


async def soak(server: Served, requests: int) -> Soaked:
    """Send so many requests, and look at the server's memory now and then."""
    rss: list[tuple[int, int]] = []
    answers: Counter[str] = Counter()
    asked = Asked(server)
    for part in range(SAMPLES):
        todo = iter(range(requests * part // SAMPLES, requests * (part + 1) // SAMPLES))
        await asyncio.gather(*(_client(asked, todo, answers) for _ in range(CONNECTIONS)), _grpc(server, answers))
        rss.append((requests * (part + 1) // SAMPLES, server.rss_kib()))
    return Soaked(rss, answers)


async def _client(asked: Asked, todo: Iterator[int], answers: Counter[str]) -> None:
    """One connection, on which requests go out for as long as there are any."""
    reader, writer = await asyncio.open_connection("127.0.0.1", asked.server.port)
    for number in todo:
        writer.write(asked.request(number))
        status, body = await _answer(reader)
        answers[status] += 1
        if status == "500":
            raise SystemExit(f"the server failed: {body[:300]!r}")
        if status == "202":
            await _follow(asked, json.loads(body)["invocation_id"])
    writer.close()
    await writer.wait_closed()


async def _follow(asked: Asked, call: str) -> None:
    """Read a background call's events to their end, on a connection that is then let go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", asked.server.port)
    writer.write(asked.get(f"/v1/calls/{call}/events", "connection: close\r\n"))
    await reader.read()
    writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = head.split(b" ", 2)[1].decode()
    _, _, length = head.partition(b"content-length:")
    if length:
        return status, await reader.readexactly(int(length.split(b"\r\n", 1)[0]))
    body = b""
    if b"chunked" in head:
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return status, body


async def _grpc(server: Served, answers: Counter[str]) -> None:
    """A few calls by gRPC, on a channel that is then let go."""
    import grpc.aio

    from interlock.doors.grpc.v1 import gateway_pb2 as wire
    from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub

    metadata = (("authorization", f"Bearer {server.token}"),)
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        stub: Any = GatewayStub(channel)

        async def call(tool: str) -> None:
            try:
                await stub.Invoke(
                    wire.InvokeRequest(tool_id=tool, arguments_json=b'{"account":"cash"}'), metadata=metadata
                )
                answers["OK"] += 1
            except grpc.aio.AioRpcError as error:
                answers[error.code().name] += 1

        await asyncio.gather(*(call(tool) for tool in ("ledger.balance", "no.such") * 10))


class Asked:
    """The requests there are, each with something in it that none before it had."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self._choice = random.Random(1)
        self._fresh = itertools.count()
        balance: Json = {"tool_id": "ledger.balance", "parameters": {"account": "cash"}}
        post: Json = {"tool_id": "ledger.post", "parameters": {"account": "cash", "cents": 1}}
        self._kinds: list[tuple[int, Callable[[str], bytes]]] = [
            (30, lambda one: self._invoke({**balance, "session_id": one, "task": one})),
            (8, lambda one: self._invoke({**post, "idempotency_key": one})),
            (3, lambda one: self._invoke({**balance, "execution_mode": "async"})),
            (4, lambda one: self._invoke({**balance, "tool_id": f"no.{one}"})),
            (4, lambda one: self._invoke({**balance, "tool_version": f">=0.0.{one.lstrip('x')}"})),
            (4, lambda one: self._invoke({**balance, "parameters": {one: one}})),
            (2, lambda one: self._post("/v1/tools/invoke", f'{{"{one}"'.encode())),
            (3, lambda one: self.get("/v1/tools", f"authorization: Bearer a.{one}.b\r\n", known=False)),
            (3, lambda one: self.get(f"/v1/tools?q={one}")),
            (3, lambda one: self.get(f"/v1/calls/{one}")),
            (2, lambda one: self.get(f"/{one}", f"traceparent: 00-{one[1:]:0>32}-{one[1:]:0>16}-01\r\n")),
            (8, lambda one: self._rpc("tools.invoke", {**balance, "session_id": one}, one)),
            (3, lambda one: self._rpc("calls.status", {"invocation_id": one}, one)),
            (2, lambda one: self._rpc(one, {}, one)),
            (
                12,
                lambda one: self._mcp("tools/call", {"name": "ledger-balance", "arguments": {"account": "cash"}}, one),
            ),
            (4, lambda one: self._mcp("tools/list", {}, one)),
            (3, lambda one: self._mcp("tools/call", {"name": one, "arguments": {}}, one)),
            (1, lambda one: self._mcp("resources/read", {"uri": f"payload:{one}"}, one)),
        ]

    def request(self, number: int) -> bytes:
        """Any one of them."""
        (kind,) = self._choice.choices([make for _, make in self._kinds], [often for often, _ in self._kinds])
        return kind(f"x{number}")

    def get(self, path: str, headers: str = "", *, known: bool = True) -> bytes:
        return self._head("GET", path, headers, known=known) + b"\r\n"

    def _head(self, method: str, path: str, headers: str, *, known: bool = True) -> bytes:
        bearer = f"authorization: Bearer {self.server.token}\r\n" if known else ""
        host = f"host: 127.0.0.1:{next(self._fresh) % 60_000}\r\n"
        return f"{method} {path} HTTP/1.1\r\n{host}{bearer}{headers}".encode()

    def _post(self, path: str, body: bytes, headers: str = "") -> bytes:
        sized = f"{headers}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return self._head("POST", path, sized) + body

    def _invoke(self, body: Json) -> bytes:
        return self._post("/v1/tools/invoke", json.dumps(body).encode())

    def _rpc(self, method: str, params: Json, one: str) -> bytes:
        return self._post(
            "/rpc", json.dumps({"jsonrpc": "2.0", "id": one, "method": method, "params": params}).encode()
        )

    def _mcp(self, method: str, params: Json, one: str) -> bytes:
        meta = {
            f"{_MCP}protocolVersion": _MODERN,
            f"{_MCP}clientCapabilities": {},
            f"{_MCP}clientInfo": {"name": one, "version": "1"},
        }
        body = {"jsonrpc": "2.0", "id": one, "method": method, "params": {**params, "_meta": meta}}
        said = params.get("name") or params.get("uri")
        name = f"mcp-name: {said}\r\n" if said else ""
        accepts = f"accept: application/json, text/event-stream, x/{one}\r\n"
        headers = f"mcp-protocol-version: {_MODERN}\r\nmcp-method: {method}\r\n{name}{accepts}"
        return self._post("/mcp", json.dumps(body).encode(), headers)
