"""Servers on one PostgreSQL store behind a load balancer, and callers that never stop."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from tests import warm
from tests.support.balancer import Balancer
from tests.support.cli import Cli, Ended
from tests.support.postgres import Server
from tests.thorough import THOROUGH

NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")
SERVE = ("serve", "--port", "0", "--no-grpc", "--no-token", "--json")
# Longer than any test: a second signal ends it.
DELAYED = (*SERVE, "--shutdown-delay", "3600")
_PATIENCE_S = 300.0
# Callers pause this long between a write and the next read. Without a pause they take the cores from the servers that
# start meanwhile, so that the same restarts last longer. A thorough run makes as many calls as it can.
PAUSE_S = 0.0 if THOROUGH else 0.05

TOOLS = '''
import asyncio
import itertools
import os
from typing import Annotated

from interlock import Effect, Field, Preview, tool

PLACE = {place!r}
# In a bad release one of so many calls fails.
FAILS = int(os.environ.get("CLUSTER_FAILS", 0))
calls = itertools.count(1)
Name = Annotated[str, Field(description="a name", examples=["a"])]


def fail_sometimes() -> None:
    if FAILS and next(calls) % FAILS == 1:
        raise RuntimeError("a bad release")


# The time limits hold on a busy machine too. A write with such a limit has to offer checkpoints.
@tool(version="1.0.0", mutation_class="read_only", namespace="cluster", timeout_s=60)
async def look(name: Name) -> str:
    """Look at something."""
    fail_sometimes()
    return name


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="cluster",
    effects=[Effect("entry:{{name}}", "CREATE")], timeout_s=60, checkpoints=["phase_complete"],
)
async def post(name: Name) -> str:
    """Make an entry, in a file that all servers share."""
    fail_sometimes()
    descriptor = os.open(os.path.join(PLACE, "entries"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (name + "\\n").encode())
    os.close(descriptor)
    return name


@tool(version="1.0.0", mutation_class="read_only", namespace="cluster", timeout_s=600)
async def wait(name: Name) -> str:
    """Say that it runs, and wait until it may end."""
    open(os.path.join(PLACE, name + ".runs"), "w").close()
    while name != "a" and not os.path.exists(os.path.join(PLACE, name + ".may-end")):  # the example ends at once
        await asyncio.sleep(0.01)
    return name


post.preview(lambda name: Preview(impact="an entry"))
post.compensate(lambda name: None)
'''


def run(cli: Cli, release: Sequence[str], *words: str) -> Ended:
    """Run a command of a release on a data directory; of this program without one."""
    if not release:
        return cli(*words)
    with warm.start((*release, *words), cli.environment, cli.path, python=True) as process:
        out, err = process.communicate(_PATIENCE_S)
        return Ended(process.wait(), out.decode(), err.decode())


def prepare(clis: Sequence[Cli], tools: Path, granted: str, settings: str = "", release: Sequence[str] = ()) -> str:
    """Make data directories that share a store, with the same settings and tools. Returns a token for those tools."""
    first = clis[0]
    first.home.mkdir(parents=True)
    (first.home / "settings.toml").write_text(settings)
    added = run(first, release, "tools", "add", str(tools))
    assert added.code == 0, added.err
    issued = run(first, release, "token", "issue", "--agent", "tester", "--tool", granted, "--ttl", "8h")
    assert issued.code == 0, issued.err
    for other in clis[1:]:
        shutil.copytree(first.home, other.home, ignore=NOT_COPIED)
    return issued.out.strip()


def address_of(process: warm.Started) -> str:
    """The base of the REST API of a server that is being started; empty if it does not start."""
    said = ""
    while line := process.stdout.readline().decode():
        said += line
        if line.endswith("}\n"):
            return json.loads(said).get("rest", "")  # or an error
    return ""


class Node:
    """A server on a data directory, which can be ended and started again. What it writes to stderr is in `log`."""

    def __init__(self, cli: Cli, words: Sequence[str] = SERVE) -> None:
        self.cli = cli
        self.log = cli.path.with_suffix(".stderr")
        self.rest = ""
        self._words = words
        self._process: warm.Started | None = None
        self._reader: threading.Thread | None = None

    @property
    def port(self) -> int:
        return urlsplit(self.rest).port or 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, release: Sequence[str] = (), **variables: str) -> bool:
        """Start the server. Whether it serves: one that does not has ended, and its log says why."""
        environment = {**self.cli.environment, **variables}
        self._process = process = warm.start((*release, *self._words), environment, self.cli.path, python=bool(release))
        self._reader = threading.Thread(target=self._copy, args=(process,), daemon=True)
        self._reader.start()
        self.rest = address_of(process)
        if not self.rest:
            self.end()
        return bool(self.rest)

    def _copy(self, process: warm.Started) -> None:
        with self.log.open("ab") as file:
            while line := process.stderr.readline():
                file.write(line)
                file.flush()

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until the server has ended by itself: its exit code."""
        assert self._process is not None
        return self._process.wait(_PATIENCE_S)

    def end(self) -> None:
        """Kill the server, if it still runs, and wait until it is gone."""
        process, self._process, self.rest = self._process, None, ""
        if process is None:
            return
        process.kill()
        process.wait()
        if self._reader is not None:
            self._reader.join()
        process.__exit__()


class Three:
    """Three servers, and a token for their tools."""

    def __init__(self, place: Path, nodes: list[Node], token: str) -> None:
        self.place = place
        self.nodes = nodes
        self.token = token
        self.bearer = {"authorization": f"Bearer {token}"}

    def narrowed(self, tool: str) -> dict[str, str]:
        """The bearer of a token of the same agent for one tool."""
        issued = self.nodes[1].cli("token", "issue", "--agent", "tester", "--tool", tool, "--ttl", "1h")
        assert issued.code == 0, issued.err
        return {"authorization": f"Bearer {issued.out.strip()}"}


@contextmanager
def three_nodes(place: Path, server: Server | None, tools: str, granted: str, settings: str = "") -> Generator[Three]:
    """Serve tools from three data directories on one schema of a server, or three times from one on SQLite."""
    (place / "cluster_tools.py").write_text(tools)
    if server is None:
        clis = [Cli(place / "0")]
    else:
        address = server.new_schema()
        clis = [Cli(place / str(number), {"INTERLOCK_STORE": address}) for number in range(3)]
    token = prepare(clis, place / "cluster_tools.py", granted, settings)
    nodes = [Node(clis[number % len(clis)], SERVE) for number in range(3)]
    try:
        for node in nodes:
            assert node.start(), node.log.read_text()
        yield Three(place, nodes, token)
    finally:
        for node in nodes:
            node.end()


class Cluster:
    """Servers that can be replaced one by one. `release` is the words that run a command of a release."""

    def __init__(self, place: Path, address: str, count: int, release: Sequence[str] = ()) -> None:
        self.place = place
        (place / "cluster_tools.py").write_text(TOOLS.format(place=str(place)))
        self.clis = [Cli(place / str(number), {"INTERLOCK_STORE": address}) for number in range(count)]
        token = prepare(self.clis, place / "cluster_tools.py", "cluster.*", release=release)
        self.bearer = {"authorization": f"Bearer {token}"}
        self._stack = ExitStack()

    def entries(self) -> Counter[str]:
        path = self.place / "entries"
        return Counter(path.read_text().splitlines() if path.exists() else ())

    def start(self, number: int, release: Sequence[str] = (), **variables: str) -> Node:
        """Start a server on one of the data directories."""
        node = Node(self.clis[number], DELAYED)
        self._stack.callback(node.end)
        assert node.start(release, **variables), node.log.read_text()
        return node

    async def replace(self, balancer: Balancer, node: Node, release: Sequence[str] = (), **variables: str) -> Node:
        """Stop a server as a rolling update does, with a call in flight that ends last, and start another instead.

        The call in flight goes to the server itself, because the balancer would choose any.
        """
        name = f"held-{node.port}"
        async with httpx.AsyncClient(headers=self.bearer, timeout=_PATIENCE_S) as client:
            sent = {"tool_id": "cluster.wait", "parameters": {"name": name}}
            base = f"http://127.0.0.1:{node.port}"
            held = asyncio.create_task(client.post(f"{base}/v1/tools/invoke", json=sent))
            await _until((self.place / f"{name}.runs").exists)
            node.signal(signal.SIGTERM)
            await balancer.until(lambda: node.port not in balancer.ready)
            # It still serves: those who have not heard of it get an answer, and are asked to go.
            late = await client.get(f"{base}/ready")
            assert (late.status_code, late.headers["connection"]) == (503, "close")
            # Streams stay open until the server ends; their clients listen at another one then.
            await balancer.until(lambda: balancer.open[node.port] == balancer.streams[node.port])
            node.signal(signal.SIGTERM)
            await _until(lambda: not _listens(node.port))
            assert not held.done()
            (self.place / f"{name}.may-end").touch()
            assert (await held).json()["result"] == name
        assert await asyncio.to_thread(node.wait) == 0
        await balancer.remove(node.port)
        number = self.clis.index(node.cli)
        fresh = await asyncio.to_thread(self.start, number, release, **variables)
        balancer.add(fresh.port)
        await balancer.until(lambda: fresh.port in balancer.ready)
        return fresh

    def close(self) -> None:
        self._stack.close()


def _listens(port: int) -> bool:
    with socket.socket() as knocking:
        return knocking.connect_ex(("127.0.0.1", port)) == 0


async def _until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not reached():  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.01)


class Load:
    """What became of the calls of all callers. `wires` counts the calls that succeeded by how they were made."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.reads = 0
        self.wires: Counter[str] = Counter()
        self.failed: list[Any] = []
        self.ended = False


class Wire(Protocol):
    """One way to make calls. Returns what a call failed with, None if it succeeded."""

    async def __call__(self, tool: str, name: str, key: str | None) -> object: ...


@asynccontextmanager
async def rest_wire(cluster: Cluster, port: int, *, closing: bool) -> AsyncGenerator[Wire]:
    """REST, over one connection or over one for each call."""
    headers = {**cluster.bearer, **({"connection": "close"} if closing else {})}
    async with httpx.AsyncClient(headers=headers, timeout=_PATIENCE_S) as client:

        async def call(tool: str, name: str, key: str | None) -> object:
            keyed = {} if key is None else {"idempotency_key": key}
            sent = {"tool_id": f"cluster.{tool}", "parameters": {"name": name}, **keyed}
            try:
                answer = await client.post(f"http://127.0.0.1:{port}/v1/tools/invoke", json=sent)
            except httpx.HTTPError as error:
                return f"{name}: {error!r}"
            return None if answer.status_code == 200 else answer.json()

        yield call


@asynccontextmanager
async def mcp_wire(cluster: Cluster, port: int, mode: str, *, closing: bool = False) -> AsyncGenerator[Wire]:
    """A client of the MCP SDK that stays for as long as the block lasts. `legacy` has a session."""
    headers = {**cluster.bearer, **({"connection": "close"} if closing else {})}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=_PATIENCE_S))
        transport = streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=http)
        client = Client(transport, mode=mode, read_timeout_seconds=_PATIENCE_S)
        await stack.enter_async_context(client)

        async def call(tool: str, name: str, key: str | None) -> object:
            keyed = {} if key is None else {"idempotency_key": key}
            try:
                result = await client.call_tool(f"cluster-{tool}", {"name": name, **keyed})
            except (MCPError, httpx2.HTTPError) as error:
                return f"{name}: {error!r}"
            return (name, result) if result.is_error else None

        yield call


# Half of the load is REST, half is MCP of both eras. Half of the callers keep their connections.
WIRES: dict[str, Callable[[Cluster, int], AbstractAsyncContextManager[Wire]]] = {
    "REST": partial(rest_wire, closing=False),
    "REST, connections closed": partial(rest_wire, closing=True),
    "REST again": partial(rest_wire, closing=False),
    "MCP handshake": partial(mcp_wire, mode="legacy"),
    "MCP handshake, connections closed": partial(mcp_wire, mode="legacy", closing=True),
    "MCP 2026-07-28": partial(mcp_wire, mode="2026-07-28"),
}


@asynccontextmanager
async def load(
    cluster: Cluster, port: int, prefix: str, wires: Collection[str] = frozenset(WIRES)
) -> AsyncGenerator[Load]:
    """Read and write over REST and MCP for as long as the block lasts."""
    told = Load()

    async def work(number: int, wire: str) -> None:
        async with WIRES[wire](cluster, port) as call:

            async def succeeds(tool: str, name: str, key: str | None = None) -> bool:
                failed = await call(tool, name, key)
                if failed is not None:
                    told.failed.append(failed)
                told.wires[wire] += failed is None
                return failed is None

            step = 0
            while not told.ended or not step:  # at least once, however soon the block ends
                step += 1
                name = f"{prefix}-{number}-{step}"
                told.reads += await succeeds("look", name)
                if await succeeds("post", name, key=name):
                    told.done.append(name)
                await asyncio.sleep(PAUSE_S)

    workers = [asyncio.create_task(work(number, wire)) for number, wire in enumerate(sorted(wires))]
    try:
        yield told
    finally:
        told.ended = True
        await asyncio.gather(*workers)
    assert set(told.wires) == set(wires)
