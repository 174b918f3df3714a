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
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.doors_lists import LISTING, LISTS, SDK_LISTING, SMALL, SURFACE, SURFACE_MOST, fill_homes, listers
from bench.doors_servers import (
    KEY,
    LEGACY,
    PROGRAM,
    Json,
    Subject,
    cores,
    mcp,
    measure,
    post,
    start_interlock,
    start_load,
    start_peer,
    wait_until_idle,
)
from bench.measure import Plan, number, times
from bench.report import Table, verdict

LEVELS = (1, 32, 128)
ORDINARY_LEVEL = 32
TOOLS = Path(__file__).parent / "doors_tools.py"

REST, WRITE = "Interlock REST, read", "Interlock REST, durable write"
JSONRPC, MCP, GRPC = "Interlock JSON-RPC, read", "Interlock MCP modern, read", "Interlock gRPC, read"
SDK, FASTMCP, FASTMCP_LEGACY = "mcp SDK modern", "FastMCP modern", "FastMCP legacy"
FASTAPI, STARLETTE, GRPC_ECHO = "FastAPI echo", "Starlette echo", "grpc.aio echo"
PROXIED, PROXY = "Interlock REST, HTTP upstream", "Starlette + aiohttp proxy"
ASYNC, DEF, TRACED = "async @tool without flags", "plain def", "with a traceparent"
CONTEXT, KEYED = "with a Context", "write with a key"
MCP_HTTP, MCP_STDIO = "MCP upstream over HTTP", "MCP upstream over stdio"
QUICK_HTTP, QUICK_STDIO = "quick MCP upstream over HTTP", "quick MCP upstream over stdio"
FASTMCP_PROXY = "FastMCP's proxy of the same server"

OURS = (REST, WRITE, JSONRPC, MCP, GRPC, PROXIED)
# Ordinary calls, after the one that they are compared with.
OUR_ORDINARY = (MCP, ASYNC, DEF, TRACED, CONTEXT, KEYED, MCP_HTTP, MCP_STDIO, QUICK_HTTP, QUICK_STDIO)


@dataclass(frozen=True, slots=True)
class Goal:
    """The multiple of a peer's requests per second that ours must reach at the most connections."""

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
UPSTREAMS: Mapping[str, float] = dict.fromkeys((MCP_HTTP, MCP_STDIO, QUICK_HTTP, QUICK_STDIO), 600.0)
# The peers that are upstreams, by the rows that call them.
_OVER_HTTP = {MCP_HTTP: "sdk", QUICK_HTTP: "quick_mcp", FASTMCP_PROXY: "sdk"}
_OVER_STDIO = {MCP_STDIO: "sdk_stdio", QUICK_STDIO: "quick_stdio"}
LATENCY = Goal(MCP, SDK, 1.5)
CHEAPER = Goal(LISTING, SDK_LISTING, 10.0)


@dataclass(frozen=True, slots=True)
class Found:
    """The findings of the rounds about one subject at one number of connections."""

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
        """The share of its core that the server had."""
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
    known = (*OUR_ORDINARY, FASTMCP_PROXY)
    if not set(plan.rows) <= {*known, SURFACE}:
        raise SystemExit(f"rows of `doors`: {', '.join((*known[1:], SURFACE))}")
    wanted = [name for name in known if name == MCP or name in (plan.rows or known)]
    listed = LISTS if not plan.rows else (SMALL, SURFACE) if SURFACE in plan.rows else ()
    calls, lists = defaultdict[tuple[str, int], Found](Found), defaultdict[tuple[str, int], Found](Found)
    ordinary = defaultdict[tuple[str, int], Found](Found)
    order = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as homes:
        fill_homes(Path(homes), listed)
        for _ in range(rounds):
            with ExitStack() as stack:
                place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-bench-")))
                load = stack.enter_context(start_load())
                if not plan.rows:
                    _compare(load, _callers(stack, place), LEVELS, seconds, order, calls)
                if listed:
                    _compare(load, listers(stack, Path(homes), listed), (1,), seconds, order, lists)
                if not plan.rows or set(wanted) & {*plan.rows}:
                    subjects = _ordinary_callers(stack, place, wanted)
                    _compare(load, subjects, (ORDINARY_LEVEL,), seconds, order, ordinary)
    tables = [_under_load(calls), _alone(calls)] if calls else []
    tables += [_ordinary(ordinary)] if ordinary else []
    tables += [_lists(lists)] if lists else []
    return [*tables, _goals(calls, lists)] if calls else tables


# Servers


_ARGUMENTS = {"account": "cash"}
_READ = {"tool_id": "ledger.balance", "parameters": _ARGUMENTS}
_PROXIED = {"tool_id": "shop.balance", "parameters": _ARGUMENTS}


def _callers(stack: ExitStack, place: Path) -> list[Subject]:
    backend = start_backend(stack)
    mine = our_callers(stack, place, backend)
    return [*mine, *_their_callers(stack, backend, str(mine[0].server.facts["token"]))]


def start_backend(stack: ExitStack) -> str:
    """Start the server behind the proxy, on the load's core; its address."""
    return f"http://127.0.0.1:{start_peer(stack, 'backend', core=cores()[1]).port}"


def our_callers(
    stack: ExitStack, place: Path, backend: str, names: Sequence[str] = OURS, program: Sequence[str] = ()
) -> list[Subject]:
    """A server of ours for each thing that is asked. `program` runs in the place of `interlock`."""
    return [_our_caller(stack, place / str(OURS.index(name)), backend, name, program) for name in names]


def _our_caller(stack: ExitStack, home: Path, backend: str, name: str, program: Sequence[str]) -> Subject:
    if name == PROXIED:
        _add_upstream(home, backend)
    server = start_interlock(stack, home, "--tools", str(TOOLS), program=program)
    token = str(server.facts["token"])
    if name == GRPC:
        return Subject(name, server, grpc=_grpc(token) | {"port": int(str(server.facts["grpc"]).rpartition(":")[2])})
    write = {"tool_id": "ledger.post", "parameters": {"account": KEY, "cents": 1}, "idempotency_key": KEY}
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": _READ}
    asked = {
        REST: post("/v1/tools/invoke", _READ, token),
        WRITE: post("/v1/tools/invoke", write, token),
        JSONRPC: post("/rpc", rpc, token),
        MCP: mcp("tools/call", {"name": "ledger-balance", "arguments": _ARGUMENTS}, token),
        PROXIED: post("/v1/tools/invoke", _PROXIED, token),
    }
    return Subject(name, server, [asked[name]])


def _their_callers(stack: ExitStack, backend: str, token: str) -> list[Subject]:
    """The peers, asked with a token as long as ours, for which they do not care."""
    call = {"name": "balance", "arguments": _ARGUMENTS}
    sdk, fastmcp = start_peer(stack, "sdk"), start_peer(stack, "fastmcp")
    return [
        Subject(SDK, sdk, [mcp("tools/call", call, token)]),
        Subject(FASTMCP, fastmcp, [mcp("tools/call", call, token)]),
        Subject(FASTMCP_LEGACY, fastmcp, [mcp("tools/call", call, token, LEGACY)]),
        Subject(FASTAPI, start_peer(stack, "fastapi"), [post("/echo", _READ, token)]),
        Subject(STARLETTE, start_peer(stack, "starlette"), [post("/echo", _READ, token)]),
        Subject(GRPC_ECHO, start_peer(stack, "grpc_echo"), grpc=_grpc(token)),
        Subject(PROXY, start_peer(stack, "proxy", backend), [post("/proxy", _PROXIED, token)]),
    ]


def _ordinary_callers(stack: ExitStack, place: Path, names: Sequence[str]) -> list[Subject]:
    """Ours, and FastMCP's proxy of the server that is one of our upstreams, if it is named."""
    behind = start_upstreams(stack, names)
    mine = ordinary_callers(stack, place, behind, [name for name in names if name != FASTMCP_PROXY])
    if FASTMCP_PROXY not in names:
        return mine
    proxied = mcp("tools/call", {"name": "balance", "arguments": _ARGUMENTS}, str(mine[0].server.facts["token"]))
    return [*mine, Subject(FASTMCP_PROXY, start_peer(stack, "fastmcp_proxy", behind["sdk"]), [proxied])]


def start_upstreams(stack: ExitStack, names: Sequence[str]) -> dict[str, str]:
    """The MCP servers that are upstreams over HTTP, on the load's core; their addresses."""
    peers = sorted({_OVER_HTTP[name] for name in names if name in _OVER_HTTP})
    return {peer: f"http://127.0.0.1:{start_peer(stack, peer, core=cores()[1]).port}/mcp" for peer in peers}


def ordinary_callers(
    stack: ExitStack, place: Path, behind: Mapping[str, str], names: Sequence[str], program: Sequence[str] = ()
) -> list[Subject]:
    """The read that is declared for speed, and calls as most people make them, each asked of a server of its own."""
    asked = {
        MCP: ("ledger-balance", _ARGUMENTS, {}),
        ASYNC: ("ledger-looked_up", _ARGUMENTS, {}),
        DEF: ("ledger-looked_up_here", _ARGUMENTS, {}),
        TRACED: ("ledger-balance", _ARGUMENTS, {"traceparent": f"00-00000000{KEY}-b7ad6b7169203331-01"}),
        CONTEXT: ("ledger-looked_up_with_context", _ARGUMENTS, {}),
        KEYED: ("ledger-post", {"account": KEY, "cents": 1, "idempotency_key": KEY}, {}),
        **dict.fromkeys(UPSTREAMS, ("shop-balance", _ARGUMENTS, {})),
    }
    subjects: list[Subject] = []
    for turn, name in enumerate(names):
        tool, arguments, headers = asked[name]
        home = place / f"ordinary-{turn}"
        if name in _OVER_HTTP:
            _add_mcp(home, "--allow-private", "shop", behind[_OVER_HTTP[name]])
        elif name in _OVER_STDIO:
            command = (sys.executable, "-m", "bench.doors_peers", _OVER_STDIO[name], str(cores()[1]))
            _add_mcp(home, "shop", "--", *command)
        server = start_interlock(stack, home, "--tools", str(TOOLS), program=program)
        call = {"name": tool, "arguments": arguments}
        subjects.append(Subject(name, server, [mcp("tools/call", call, str(server.facts["token"]), **headers)]))
    return subjects


def _add_mcp(home: Path, *arguments: str) -> None:
    command = (*PROGRAM, "--home", str(home), "upstream", "add", "mcp", "--accept-hints", *arguments)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _add_upstream(home: Path, backend: str) -> None:
    account = {"type": "string", "description": "ledger account", "examples": ["cash"]}
    schema = {"type": "object", "properties": {"account": account}, "required": ["account"]}
    answer = {"type": "object", "properties": {"balance": {"type": "integer"}}, "required": ["balance"]}
    words = "Balance of one account, in cents."
    tool = {"name": "balance", "description": words, "path": "/balance", "input_schema": schema}
    config = home.with_suffix(".json")
    config.write_text(json.dumps({"urls": [backend], "tools": [{**tool, "output_schema": answer}]}))
    command = (*PROGRAM, "--home", str(home), "upstream", "add", "http", "shop", str(config))
    subprocess.run((*command, "--accept-hints", "--allow-private"), check=True, stdout=subprocess.DEVNULL)


def _grpc(token: str) -> Json:
    return {"wire": "grpc", "token": token, "tool": "ledger.balance", "arguments": _ARGUMENTS}


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
        wait_until_idle(subject.server.pid)  # it still loads modules when it already answers
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
        "low-level server of the SDK and one that answers several times as fast; their own CPU is not counted. "
        "FastMCP's proxy, of the SDK's server, governs and records nothing."
    )
    columns = ("", "r/s", "CPU µs", "of the first", "aim", "")
    return Table(f"Doors: ordinary calls, {ORDINARY_LEVEL} connections", columns, rows, note)


def _lists(figures: Figures) -> Table:
    rows: list[tuple[str, ...]] = []
    for (name, _), found in figures.items():
        aim = met = ratio = ""
        if name == SURFACE:
            share = found.cpu / figures[SMALL, 1].cpu
            aim, ratio, met = f"<= {SURFACE_MOST:g}x", times(share), verdict(share <= SURFACE_MOST)
        rows.append((name, number(found.cpu), number(found.percentile(50)), ratio, aim, met))
    note = (
        "The SDK lists the same tools as ours. Long lists are asked for page by page, and all pages are counted. A "
        "surface is compared with a catalog of as many tools as it lists."
    )
    columns = ("", "CPU µs", "p50 µs", "of the small one", "aim", "")
    return Table("Doors: tools/list", columns, rows, note)


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
