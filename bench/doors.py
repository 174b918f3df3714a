"""`doors`: the same call over every door and over the peers' servers, under load.

Every server is a process of one worker on one core, and asked for one thing (FastMCP for two); the load comes from
another core. Ours are what `interlock serve` starts: a real token, the default policy, a durable audit trail. The peers
govern nothing and record nothing. Servers take turns, in random order, so that whatever slows the machine for a while
slows all of them; and all of them are started anew for every round, as where the kernel happens to put a process makes
it up to a fifth slower or faster for as long as it lives. Figures are medians over the rounds. What an upstream's
backend costs is paid on the load's core, in the same way for ours and the peer's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import ours
from bench.measure import Plan, number, process_clock, times
from bench.payloads import PAYLOADS
from bench.report import Table, verdict
from interlock import Interlock
from interlock.data.canonical import digest
from interlock.registry import admission
from interlock.registry.admission import Evidence

Json = dict[str, Any]

LEVELS = (1, 32, 128)
ORDINARY_LEVEL = 32
LISTED = 500
TOOLS = Path(__file__).parent / "doors_tools.py"
KEY = "<KEY>"  # no token has it in it

REST, WRITE = "Interlock REST, read", "Interlock REST, durable write"
JSONRPC, MCP, GRPC = "Interlock JSON-RPC, read", "Interlock MCP modern, read", "Interlock gRPC, read"
SDK, FASTMCP, FASTMCP_LEGACY = "mcp SDK modern", "FastMCP modern", "FastMCP legacy"
FASTAPI, STARLETTE, GRPC_ECHO = "FastAPI echo", "Starlette echo", "grpc.aio echo"
PROXIED, PROXY = "Interlock REST, HTTP upstream", "Starlette + aiohttp proxy"
ASYNC, DEF, TRACED = "async @tool without flags", "plain def", "with a traceparent"
CONTEXT, KEYED = "with a Context", "write with a key"
MCP_HTTP, MCP_STDIO = "MCP upstream over HTTP", "MCP upstream over stdio"
FASTMCP_PROXY = "FastMCP's proxy of the same server"
LISTING, SDK_LISTING = f"Interlock MCP, {LISTED} tools", f"mcp SDK, {LISTED} tools"

OURS = (REST, WRITE, JSONRPC, MCP, GRPC, PROXIED)
# Ordinary calls, after the one that they are compared with.
OUR_ORDINARY = (MCP, ASYNC, DEF, TRACED, CONTEXT, KEYED, MCP_HTTP, MCP_STDIO)

MODERN, LEGACY = "2026-07-28", "2025-11-25"
_META = "io.modelcontextprotocol/"


@dataclass(frozen=True, slots=True)
class Goal:
    """How many times a peer's requests per second ours must reach at the most connections."""

    ours: str
    peer: str
    at_least: float


GOALS = (
    Goal(MCP, SDK, 5.0),
    Goal(MCP, FASTMCP, 15.0),
    Goal(MCP, FASTMCP_LEGACY, 15.0),
    Goal(REST, FASTAPI, 1.5),
    Goal(REST, STARLETTE, 0.75),
    Goal(PROXIED, PROXY, 0.7),
)
# Ordinary calls over MCP: how many times the CPU of the read that is declared for speed each of them may take; and how
# many microseconds, where the call is one of an upstream.
ORDINARY: Mapping[str, float] = {ASYNC: 1.5, DEF: 1.5, TRACED: 1.5, CONTEXT: 1.5, KEYED: 4.0}
UPSTREAMS: Mapping[str, float] = {MCP_HTTP: 600.0, MCP_STDIO: 600.0}
LATENCY = Goal(MCP, SDK, 1.5)
CHEAPER = Goal(LISTING, SDK_LISTING, 10.0)


@dataclass(frozen=True, slots=True)
class Served:
    """A server's process, and what it said when it was ready."""

    pid: int
    facts: Json

    @property
    def port(self) -> int:
        return int(self.facts.get("port") or self.facts["base_url"].rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked of a server, over and over."""

    name: str
    server: Served
    requests: Sequence[str] = ()
    grpc: Json | None = None

    def order(self, connections: int, seconds: float) -> Json:
        order: Json = {"wire": "http", "pid": self.server.pid, "port": self.server.port, **(self.grpc or {})}
        parts = [one.split(KEY) for one in self.requests]
        return {**order, "requests": parts, "connections": connections, "seconds": seconds}


@dataclass(frozen=True, slots=True)
class Found:
    """What the rounds found of one subject at one number of connections."""

    rates: list[float] = field(default_factory=list[float])
    cpu_us: list[float] = field(default_factory=list[float])
    shares: list[float] = field(default_factory=list[float])
    latencies_us: list[list[float]] = field(default_factory=list[list[float]])

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_us)

    @property
    def share(self) -> float:
        """How much of its core the server had."""
        return statistics.median(self.shares)

    def percentile(self, percentile: int) -> float:
        """Of each round, then the median over the rounds: a round in which all went fast has the most latencies."""
        rounds = [statistics.quantiles(one, n=100, method="inclusive") for one in self.latencies_us if len(one) > 1]
        return statistics.median(one[percentile - 1] for one in rounds)


Figures = Mapping[tuple[str, int], Found]


async def run(plan: Plan) -> list[Table]:
    return await asyncio.to_thread(_run, plan)


def _run(plan: Plan) -> list[Table]:
    rounds, seconds = (3, 0.4) if plan.quick else (5, 2.0)
    if plan.rows:
        return [_ordinary(_only(plan.rows, rounds, seconds))]
    calls, lists = defaultdict[tuple[str, int], Found](Found), defaultdict[tuple[str, int], Found](Found)
    ordinary = defaultdict[tuple[str, int], Found](Found)
    order = random.Random(1)
    for _ in range(rounds):
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-bench-")))
            load = stack.enter_context(start_load())
            _compare(load, _callers(stack, place), LEVELS, seconds, order, calls)
            _compare(load, _listers(stack, place), (1,), seconds, order, lists)
            subjects = _ordinary_callers(stack, place, (*OUR_ORDINARY, FASTMCP_PROXY))
            _compare(load, subjects, (ORDINARY_LEVEL,), seconds, order, ordinary)
    return [_under_load(calls), _alone(calls), _ordinary(ordinary), _lists(lists), _goals(calls, lists)]


def _only(rows: Sequence[str], rounds: int, seconds: float) -> Figures:
    """Measure some of the ordinary calls, beside the one that all of them are compared with."""
    known = (*OUR_ORDINARY, FASTMCP_PROXY)
    if not set(rows) <= set(known):
        raise SystemExit(f"rows of `doors`: {', '.join(known[1:])}")
    figures, order = defaultdict[tuple[str, int], Found](Found), random.Random(1)
    for _ in range(rounds):
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-bench-")))
            load = stack.enter_context(start_load())
            subjects = _ordinary_callers(stack, place, [name for name in known if name == MCP or name in rows])
            _compare(load, subjects, (ORDINARY_LEVEL,), seconds, order, figures)
    return figures


# Servers


@contextmanager
def _child(*command: str, core: int) -> Generator[subprocess.Popen[str]]:
    """A process on a core of its own, ended with the block."""
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(child.pid, {core})
    try:
        yield child
    finally:
        child.terminate()
        child.communicate()


def _cores() -> tuple[int, int]:
    """Where servers run, and where the load comes from."""
    available = sorted(os.sched_getaffinity(0))
    return available[0], available[-1]


def start_load() -> Any:
    """The process that asks, on the other core."""
    return _child(sys.executable, "-m", "bench.doors_load", core=_cores()[1])


def _peer(stack: ExitStack, name: str, argument: str = "", *, core: int | None = None) -> Served:
    command = (sys.executable, "-m", "bench.doors_peers", name, argument)
    child = stack.enter_context(_child(*command, core=_cores()[0] if core is None else core))
    assert child.stdout is not None
    return Served(child.pid, json.loads(child.stdout.readline()))


def _interlock(stack: ExitStack, home: Path, *arguments: str, program: Sequence[str] = ()) -> Served:
    options = ("--json", "--token", "--port", "0", "--grpc-port", "0", "--bare", *arguments)
    command = (*(program or _PROGRAM), "--home", str(home), "serve", *options)
    child = stack.enter_context(_child(*command, core=_cores()[0]))
    assert child.stdout is not None
    facts: Json = json.loads(child.stdout.readline())
    if "error" in facts:
        raise SystemExit(f"interlock serve: {facts['error']['message']}")
    return Served(child.pid, facts)


_PROGRAM = (str(Path(sys.executable).parent / "interlock"),)
_ARGUMENTS = {"account": "cash"}
_READ = {"tool_id": "ledger.balance", "parameters": _ARGUMENTS}
_PROXIED = {"tool_id": "shop.balance", "parameters": _ARGUMENTS}


def _callers(stack: ExitStack, place: Path) -> list[Subject]:
    backend = start_backend(stack)
    mine = our_callers(stack, place, backend)
    return [*mine, *_their_callers(stack, backend, str(mine[0].server.facts["token"]))]


def start_backend(stack: ExitStack) -> str:
    """What is proxied to, on the load's core; its address."""
    return f"http://127.0.0.1:{_peer(stack, 'backend', core=_cores()[1]).port}"


def our_callers(
    stack: ExitStack, place: Path, backend: str, names: Sequence[str] = OURS, program: Sequence[str] = ()
) -> list[Subject]:
    """A server of ours for each thing that is asked. `program` runs in the place of `interlock`."""
    return [_our_caller(stack, place / str(OURS.index(name)), backend, name, program) for name in names]


def _our_caller(stack: ExitStack, home: Path, backend: str, name: str, program: Sequence[str]) -> Subject:
    if name == PROXIED:
        _add_upstream(home, backend)
    server = _interlock(stack, home, "--tools", str(TOOLS), program=program)
    token = str(server.facts["token"])
    if name == GRPC:
        return Subject(name, server, grpc=_grpc(token) | {"port": int(str(server.facts["grpc"]).rpartition(":")[2])})
    write = {"tool_id": "ledger.post", "parameters": {"account": KEY, "cents": 1}, "idempotency_key": KEY}
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": _READ}
    asked = {
        REST: _post("/v1/tools/invoke", _READ, token),
        WRITE: _post("/v1/tools/invoke", write, token),
        JSONRPC: _post("/rpc", rpc, token),
        MCP: _mcp("tools/call", {"name": "ledger-balance", "arguments": _ARGUMENTS}, token),
        PROXIED: _post("/v1/tools/invoke", _PROXIED, token),
    }
    return Subject(name, server, [asked[name]])


def _their_callers(stack: ExitStack, backend: str, token: str) -> list[Subject]:
    """The peers, asked with a token as long as ours, for which they do not care."""
    call = {"name": "balance", "arguments": _ARGUMENTS}
    sdk, fastmcp = _peer(stack, "sdk"), _peer(stack, "fastmcp")
    return [
        Subject(SDK, sdk, [_mcp("tools/call", call, token)]),
        Subject(FASTMCP, fastmcp, [_mcp("tools/call", call, token)]),
        Subject(FASTMCP_LEGACY, fastmcp, [_mcp("tools/call", call, token, LEGACY)]),
        Subject(FASTAPI, _peer(stack, "fastapi"), [_post("/echo", _READ, token)]),
        Subject(STARLETTE, _peer(stack, "starlette"), [_post("/echo", _READ, token)]),
        Subject(GRPC_ECHO, _peer(stack, "grpc_echo"), grpc=_grpc(token)),
        Subject(PROXY, _peer(stack, "proxy", backend), [_post("/proxy", _PROXIED, token)]),
    ]


def _ordinary_callers(stack: ExitStack, place: Path, names: Sequence[str]) -> list[Subject]:
    """Ours, and FastMCP's proxy of the server that is one of our upstreams, if it is named."""
    behind = start_upstream(stack)
    mine = ordinary_callers(stack, place, behind, [name for name in names if name != FASTMCP_PROXY])
    if FASTMCP_PROXY not in names:
        return mine
    proxied = _mcp("tools/call", {"name": "balance", "arguments": _ARGUMENTS}, str(mine[0].server.facts["token"]))
    return [*mine, Subject(FASTMCP_PROXY, _peer(stack, "fastmcp_proxy", behind), [proxied])]


def start_upstream(stack: ExitStack) -> str:
    """The MCP server that is an upstream, on the load's core; its address."""
    return f"http://127.0.0.1:{_peer(stack, 'sdk', core=_cores()[1]).port}/mcp"


def ordinary_callers(
    stack: ExitStack, place: Path, behind: str, names: Sequence[str], program: Sequence[str] = ()
) -> list[Subject]:
    """The read that is declared for speed, and calls as most people make them, each asked of a server of its own."""
    asked = {
        MCP: ("ledger-balance", _ARGUMENTS, {}),
        ASYNC: ("ledger-looked_up", _ARGUMENTS, {}),
        DEF: ("ledger-looked_up_here", _ARGUMENTS, {}),
        TRACED: ("ledger-balance", _ARGUMENTS, {"traceparent": f"00-00000000{KEY}-b7ad6b7169203331-01"}),
        CONTEXT: ("ledger-looked_up_with_context", _ARGUMENTS, {}),
        KEYED: ("ledger-post", {"account": KEY, "cents": 1, "idempotency_key": KEY}, {}),
        MCP_HTTP: ("shop-balance", _ARGUMENTS, {}),
        MCP_STDIO: ("shop-balance", _ARGUMENTS, {}),
    }
    subjects: list[Subject] = []
    for turn, name in enumerate(names):
        tool, arguments, headers = asked[name]
        home = place / f"ordinary-{turn}"
        if name == MCP_HTTP:
            _add_mcp(home, "--allow-private", "shop", behind)
        elif name == MCP_STDIO:
            _add_mcp(home, "shop", "--", sys.executable, "-m", "bench.doors_peers", "sdk_stdio")
        server = _interlock(stack, home, "--tools", str(TOOLS), program=program)
        call = {"name": tool, "arguments": arguments}
        subjects.append(Subject(name, server, [_mcp("tools/call", call, str(server.facts["token"]), **headers)]))
    return subjects


def _add_mcp(home: Path, *arguments: str) -> None:
    command = (*_PROGRAM, "--home", str(home), "upstream", "add", "mcp", "--accept-hints", *arguments)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _add_upstream(home: Path, backend: str) -> None:
    account = {"type": "string", "description": "ledger account", "examples": ["cash"]}
    schema = {"type": "object", "properties": {"account": account}, "required": ["account"]}
    answer = {"type": "object", "properties": {"balance": {"type": "integer"}}, "required": ["balance"]}
    words = "Balance of one account, in cents."
    tool = {"name": "balance", "description": words, "path": "/balance", "input_schema": schema}
    config = home.with_suffix(".json")
    config.write_text(json.dumps({"urls": [backend], "tools": [{**tool, "output_schema": answer}]}))
    command = (*_PROGRAM, "--home", str(home), "upstream", "add", "http", "shop", str(config))
    subprocess.run((*command, "--accept-hints", "--allow-private"), check=True, stdout=subprocess.DEVNULL)


def _listers(stack: ExitStack, place: Path) -> list[Subject]:
    """Ours with many tools, and the SDK with the very same ones, as ours described them."""
    home = place / "many"
    asyncio.run(_fill(home))
    server = _interlock(stack, home)
    token, requests, tools = str(server.facts["token"]), list[str](), list[Json]()
    cursor: str | None = ""
    while cursor is not None:
        requests.append(_mcp("tools/list", {"cursor": cursor} if cursor else {}, token))
        page = _ask(server.port, requests[-1])["result"]
        tools += page["tools"]
        cursor = page.get("nextCursor")
    if len(tools) != LISTED:
        raise SystemExit(f"{len(tools)} tools were listed, not {LISTED}")
    described = place / "tools.json"
    described.write_text(json.dumps(tools))
    peer = _peer(stack, "sdk_list", str(described))
    return [Subject(LISTING, server, requests), Subject(SDK_LISTING, peer, [_mcp("tools/list", {}, token)])]


async def _fill(home: Path) -> None:
    """Publish copies of the payloads' tools. Nothing is bound to them: they are listed, not called."""
    manifests = [ours.declared(payload).manifest for payload in PAYLOADS]
    async with Interlock.open(home) as lock:
        for count in range(LISTED):
            manifest = manifests[count % len(manifests)].model_copy(update={"tool_id": f"copy_{count}"})
            content = digest(manifest.document())
            pretend = Evidence(content, True, "bench", "")
            lock.journal.post(admission.publish(manifest, content, "library:", pretend, "bench"))
        await lock.journal.drain()


# Requests


def _post(path: str, body: Json, token: str, **headers: str) -> str:
    """A request as bytes that need nothing more, but for a key where KEY stands (24 characters)."""
    text = json.dumps(body, separators=(",", ":"))
    length = len(text) + (text.count(KEY) * (24 - len(KEY)))
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost:8080",
        f"authorization: Bearer {token}",
        "content-type: application/json",
        f"content-length: {length}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", text])


def _grpc(token: str) -> Json:
    return {"wire": "grpc", "token": token, "tool": "ledger.balance", "arguments": _ARGUMENTS}


def _mcp(method: str, params: Json, token: str, version: str = MODERN, **more: str) -> str:
    headers = {"accept": "application/json, text/event-stream", "mcp_protocol_version": version, **more}
    if version == MODERN:
        client = {"name": "bench", "version": "1"}
        meta = {"protocolVersion": version, "clientCapabilities": dict[str, Any](), "clientInfo": client}
        params = {"_meta": {f"{_META}{name}": value for name, value in meta.items()}, **params}
        headers |= {"mcp_method": method, **({"mcp_name": params["name"]} if "name" in params else {})}
    return _post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, token, **headers)


def _ask(port: int, request: str) -> Json:
    head, _, body = request.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    url = f"http://127.0.0.1:{port}{first.split()[1]}"
    headers = dict(line.split(": ", 1) for line in lines)
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as answer:
        return json.loads(answer.read())


# Measuring


def _compare(
    load: subprocess.Popen[str],
    subjects: Sequence[Subject],
    levels: Iterable[int],
    seconds: float,
    order: random.Random,
    figures: dict[tuple[str, int], Found],
) -> None:
    """One round: every subject at every level once, in any order. What is found is added to the figures."""
    turns = [(subject, level) for subject in subjects for level in levels]
    for subject in subjects:
        _wait_until_idle(subject.server.pid)  # it still loads modules when it already answers
        measure(load, subject, max(levels), seconds / 4)  # warms it up, and refuses what does not answer
    for subject, level in turns:
        figures[subject.name, level]  # in the order of the tables
    for subject, level in order.sample(turns, len(turns)):
        outcome = measure(load, subject, level, seconds)
        found = figures[subject.name, level]
        found.rates.append(outcome["laps"] / outcome["wall_s"])
        found.cpu_us.append(outcome["cpu_s"] / outcome["laps"] * 1e6)
        found.shares.append(outcome["cpu_s"] / outcome["wall_s"])
        found.latencies_us.append(outcome["latencies_us"])


def _wait_until_idle(pid: int) -> None:
    """Wait until a process has used next to no CPU for a quarter of a second."""
    clock = process_clock(pid)
    deadline = time.monotonic() + _IDLE_WITHIN_S
    while time.monotonic() < deadline:
        began = time.clock_gettime(clock)
        time.sleep(0.25)
        if time.clock_gettime(clock) - began < 0.01:
            return
    raise SystemExit(f"a server (process {pid}) was not idle within {_IDLE_WITHIN_S:.0f} s of its start")


_IDLE_WITHIN_S = 60.0


def measure(load: subprocess.Popen[str], subject: Subject, connections: int, seconds: float) -> Json:
    """Have a server asked for so long; how often it answered, and what that took."""
    assert load.stdin is not None
    assert load.stdout is not None
    load.stdin.write(json.dumps(subject.order(connections, seconds)) + "\n")
    load.stdin.flush()
    outcome: Json = json.loads(load.stdout.readline())
    if "failed" in outcome:
        raise SystemExit(f"{subject.name} at {connections} connections: {outcome['failed']}")
    return outcome


# Tables


def _names(figures: Figures) -> list[str]:
    return list(dict.fromkeys(name for name, _ in figures))


def _under_load(figures: Figures) -> Table:
    rows = [
        (
            name,
            *(number(figures[name, level].rate) for level in LEVELS),
            *(number(figures[name, level].cpu) for level in LEVELS),
            f"{figures[name, LEVELS[-1]].share:.0%}",
        )
        for name in _names(figures)
    ]
    columns = ("", *(f"{level}: r/s" for level in LEVELS), *(f"{level}: CPU µs" for level in LEVELS), "core")
    note = (
        f"Requests per second at {', '.join(map(str, LEVELS))} connections, the server's CPU for each of them, and how "
        f"much of its core it had at {LEVELS[-1]}: on a quiet machine all of it, unless it waits for a disk, a backend "
        "or the load. gRPC: so many calls at once on one connection."
    )
    return Table("Doors under load", columns, rows, note)


def _alone(figures: Figures) -> Table:
    rows = [
        (name, number(figures[name, 1].percentile(50)), number(figures[name, 1].percentile(99)))
        for name in _names(figures)
    ]
    return Table("Doors: a lone caller", ("", "p50 µs", "p99 µs"), rows)


def _ordinary(figures: Figures) -> Table:
    tuned = figures[MCP, ORDINARY_LEVEL].cpu
    rows: list[tuple[str, ...]] = []
    for (name, _), found in figures.items():
        times_most, us_most = ORDINARY.get(name), UPSTREAMS.get(name)
        aim = "" if times_most is None else f"<= {times_most:g}x"
        met = "" if times_most is None else verdict(found.cpu <= times_most * tuned)
        if us_most is not None:
            aim, met = f"<= {us_most:g} µs", verdict(found.cpu <= us_most)
        rows.append((name, number(found.rate), number(found.cpu), times(found.cpu / tuned), aim, met))
    note = (
        "Every call over MCP. Each `traceparent` is another one, so that no head comes twice. The upstreams are the "
        "low-level server of the SDK, whose own CPU is not counted. FastMCP's proxy governs and records nothing."
    )
    columns = ("", "r/s", "CPU µs", "of the first", "aim", "")
    return Table(f"Doors: ordinary calls, {ORDINARY_LEVEL} connections", columns, rows, note)


def _lists(figures: Figures) -> Table:
    rows = [(name, number(found.cpu), number(found.percentile(50))) for (name, _), found in figures.items()]
    note = "The same tools; ours are asked for page by page, and all pages are counted."
    return Table(f"Doors: tools/list with {LISTED} tools", ("", "CPU µs", "p50 µs"), rows, note)


def _goals(calls: Figures, lists: Figures) -> Table:
    rows: list[tuple[str, ...]] = []

    def judge(goal: Goal, what: str, ratio: float, cpu: float, *, holds: bool) -> None:
        words = f"{goal.ours.removeprefix('Interlock ')} against {goal.peer}"
        rows.append((words, what, f">= {goal.at_least:g}x", times(ratio), times(cpu), verdict(holds)))

    most = LEVELS[-1]
    for goal in GOALS:
        mine, peer = calls[goal.ours, most], calls[goal.peer, most]
        rate, cpu = mine.rate / peer.rate, peer.cpu / mine.cpu
        judge(goal, f"requests/s, {most}", rate, cpu, holds=min(rate, cpu) >= goal.at_least)
    mine, peer = calls[LATENCY.ours, 1], calls[LATENCY.peer, 1]
    ratio = peer.percentile(50) / mine.percentile(50)
    judge(LATENCY, "p50, lone caller", ratio, peer.cpu / mine.cpu, holds=ratio >= LATENCY.at_least)
    mine, peer = lists[CHEAPER.ours, 1], lists[CHEAPER.peer, 1]
    cpu = peer.cpu / mine.cpu
    judge(CHEAPER, "CPU", cpu, cpu, holds=cpu >= CHEAPER.at_least)
    columns = ("", "figure", "goal", "measured", "CPU", "")
    note = (
        "A goal in requests/s is met only if CPU per request says so too: on a busy machine, luck decides the former."
    )
    return Table("Goals: times better than the peer", columns, rows, note)
