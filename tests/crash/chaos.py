"""`./dev chaos`: callers write to three nodes on one PostgreSQL store and one Redis while all that can fail does.

Every call has an idempotency key. A caller that gets no answer, or is told to, sends the call again with its key, to
any node. The truth is a log of effects outside the store, which the tools write. At the end all nodes are up, every
call is asked for once more, and then:

- an acknowledged call has its effect (`lost`), and no call has it twice (`doubled`);
- a call that was refused has no effect (`refused with an effect`);
- a call that is neither acknowledged nor refused is one that `interlock calls reconcile` lists (`unreported`), and it
  lists no other (`wrongly reported`);
- calls that lock one account were never inside together (`overlapping`), whether they were acknowledged or not; in the
  short form, which takes leases away before they run out, that holds for acknowledged calls;
- no more was paid than the budget allows (`overspent`);
- every node gets the messages of Redis again (`without Redis`);
- every call has an answer in the end (`unsettled`);
- `interlock audit verify` passes on every data directory.

`--save` writes the table of a run that kept all this to docs/explanation/test-tiers.md.

Of a run that fails, the directory has what nodes wrote to stderr, the exported journal (`journal.jsonl`), and the
faults and answers in order (`history`). What that tells of the first violations is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import os
import platform
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from tests.crash.fleet import FAULTS, Fleet, FleetNode, fleet
from tests.support import surroundings

CALLERS = 24
ACCOUNTS = 8
# How long one answer is awaited, and how long after the last fault all calls have to be settled.
ANSWER_S = 20.0
PATIENCE_S = 600.0
# Answers after which a caller sends the call again: the store cannot be used, or the call is running.
AGAIN = {"E3801", "E3803", "E3408"}
UNKNOWN = "E3409"
KILL = "nodes killed"
# Each of the other faults happens once for so many kills.
KILLS_PER_FAULT = 10
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "test-tiers.md"
BEGIN, END = "<!-- begin: the table of ./dev chaos --save -->\n", "<!-- end -->\n"


@dataclass(slots=True)
class Sent:
    """A call, and what its caller was told: `acknowledged`, `unknown`, the code of an error, or nothing yet."""

    name: str
    tool: str
    parameters: dict[str, str]
    told: str = ""


@dataclass(slots=True)
class Found:
    """What a run ended with. `violations` are all zero, and `verified` holds, where everything is as promised."""

    seed: int
    calls: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    told: Counter[str] = field(default_factory=Counter[str])
    unanswered: int = 0
    violations: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    verified: bool = False
    seconds: float = 0.0
    history: list[str] = field(default_factory=list[str])

    @property
    def kept(self) -> bool:
        return self.verified and not any(self.violations.values())

    def rows(self) -> list[tuple[str, int | str]]:
        refused = {code: count for code, count in self.told.items() if code not in ("acknowledged", "unknown", "")}
        return [
            ("seed", self.seed),
            ("calls", self.calls),
            *((kind, self.faults[kind]) for kind in FAULTS),
            ("answers that did not come", self.unanswered),
            ("acknowledged", self.told["acknowledged"]),
            ("unknown, and reported", self.told["unknown"] - len(self.violations["unreported"])),
            *((f"refused, {code}", count) for code, count in sorted(refused.items())),
            *((name, len(names)) for name, names in self.violations.items()),
            ("audit verify", "passes" if self.verified else "FAILS"),
            ("seconds", round(self.seconds)),
        ]

    def table(self) -> str:
        rows = self.rows()
        wide = max(len(name) for name, _ in rows)
        lines = [
            f"{name:<{wide}}  {value:>10,}" if isinstance(value, int) else f"{name:<{wide}}  {value:>10}"
            for name, value in rows
        ]
        for name, names in self.violations.items():
            lines += [f"{name}: {one}" for one in names[:20]]
        for one in {one: None for names in self.violations.values() for one in names[:3]}:
            lines += [f"{one}:", *(line for line in self.history if one.split(":")[0] in line.split())]
        return "\n".join(lines)

    def section(self, commit: str) -> str:
        """The table for the documentation, with what it was measured on."""
        rows = [
            f"| {name} | {value:,} |" if isinstance(value, int) else f"| {name} | {value} |"
            for name, value in self.rows()
        ]
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        heading = f"`./dev chaos` on {datetime.now(UTC):%Y-%m-%d}, {machine}, commit {commit}:"
        return "\n".join((heading, "", "| | |", "|---|---:|", *rows, ""))


class Callers:
    """Sends calls to a fleet, each until its caller knows what became of it."""

    def __init__(self, fleet: Fleet, seed: int, calls: int) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)
        self.calls = calls
        self.sent: list[Sent] = []
        # Calls are begun up to here, so that they do not all end before the last fault.
        self.allowed = 0
        self.unanswered = 0
        self._again: list[tuple[float, int, Sent]] = []
        self._numbers = itertools.count()
        # Calls whose caller waits for an answer.
        self.open: set[str] = set()
        limits = httpx.Limits(max_connections=2 * CALLERS)
        self._web = httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_S, pool=None), limits=limits)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._caller())

    async def ask_again(self) -> None:
        """Ask for every call that was not refused once more. Nobody may be told something else than before."""
        for call in self.sent:
            if call.told in ("acknowledged", "unknown"):
                self._later(call, 0.0)
                self.open.add(call.name)
        await self.run()

    async def close(self) -> None:
        await self._web.aclose()

    async def _caller(self) -> None:
        while True:
            call = self._next()
            if call is not None:
                await self._send(call)
            elif len(self.sent) >= self.calls and not self.open:
                return
            else:
                await asyncio.sleep(0.01)

    def _next(self) -> Sent | None:
        if self._again and self._again[0][0] <= time.monotonic():
            return heapq.heappop(self._again)[2]
        if len(self.sent) >= min(self.allowed, self.calls):
            return None
        number = len(self.sent)
        name, kind = f"call-{number}", self._random.random()
        parameters = {"name": name}
        if kind < 0.2:
            parameters["account"] = f"a{self._random.randrange(ACCOUNTS)}"
        call = Sent(name, "move" if kind < 0.2 else "pay" if kind < 0.3 else "post", parameters)
        self.sent.append(call)
        self.open.add(call.name)
        return call

    def _later(self, call: Sent, after_s: float) -> None:
        heapq.heappush(self._again, (time.monotonic() + after_s, next(self._numbers), call))

    async def _send(self, call: Sent) -> None:
        told = await self._ask(call)
        if told:
            # A call that was acknowledged stays so. One that is unknown may turn out to have been settled.
            if call.told == "acknowledged" and told != "acknowledged":
                told = f"acknowledged, then {told}"
            call.told = told
            self.open.discard(call.name)
        else:
            self._later(call, self._random.uniform(0.2, 2.0))

    async def _ask(self, call: Sent) -> str:
        """What a node tells about a call; empty where it is to be asked again."""
        node: FleetNode = self._random.choice(self._fleet.nodes)
        if not node.rest:
            return ""
        sent = {"tool_id": f"fleet.{call.tool}", "parameters": call.parameters, "idempotency_key": call.name}
        rest = node.rest
        node.in_flight += 1
        try:
            answer = await self._web.post(
                f"{rest}/tools/invoke", json=sent, headers={"authorization": f"Bearer {self._fleet.token}"}
            )
            told: Any = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            self._fleet.note(f"{call.name} ({call.tool}) at node {node.number}: {type(error).__name__}")
            self.unanswered += 1
            return ""
        finally:
            node.in_flight -= 1
        code = "acknowledged" if answer.status_code == 200 else told["error"]["error_code"]
        self._fleet.note(f"{call.name} ({call.tool}) at node {node.number}: {code}")
        if code == "E3801" and "taken for dead" in str(told):
            await self._fleet.replace(node, rest)
        return "" if code in AGAIN else "unknown" if code == UNKNOWN else code


async def run(place: Path, *, calls: int, kills: int, seed: int, minutes: float = 0.0, short: bool = False) -> Found:
    """Make so many calls while so many nodes are killed, and the other faults happen: what was found at the end.

    A `short` run does not wait for the leases of nodes that were killed, and prints nothing.
    """
    began = time.monotonic()
    budget = max(1, calls // 20)
    settings = f'[[budgets]]\nper = "tenant"\nlimit = {budget}\ntools = "fleet.pay"\n'
    async with fleet(place, settings, seed, hastened=short) as nodes:
        callers = Callers(nodes, seed, calls)
        try:
            with suppress(TimeoutError):  # then calls are unsettled
                async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
                    group.create_task(callers.run())
                    await _strike(nodes, callers, seed, kills, began + 60 * minutes if minutes else None, short)
                    limit.reschedule(asyncio.get_running_loop().time() + PATIENCE_S)
                async with asyncio.timeout(PATIENCE_S):
                    await callers.ask_again()
        finally:
            await callers.close()
            (place / "history").write_text("\n".join(nodes.history))
        found = Found(seed, len(callers.sent), nodes.happened, unanswered=callers.unanswered, history=nodes.history)
        await _judge(nodes, callers, budget, found, short)
        if not found.kept:
            await asyncio.to_thread(nodes.nodes[0].cli, "audit", "export", "--out", str(place / "journal.jsonl"))
        found.seconds = time.monotonic() - began
        return found


async def _strike(nodes: Fleet, callers: Callers, seed: int, kills: int, until: float | None, short: bool) -> None:
    """Let all faults happen, spread over the calls. Those that take long go on beside the others."""
    order = random.Random(seed)
    others = [kind for kind in FAULTS if kind != KILL]
    kinds = [KILL] * kills + others * max(1, kills // KILLS_PER_FAULT)
    order.shuffle(kinds)
    share = callers.calls / len(kinds)
    async with asyncio.TaskGroup() as group:
        for number, kind in enumerate(kinds):
            if until is not None and time.monotonic() > until:
                callers.calls = len(callers.sent)
                break
            callers.allowed = int((number + 2) * share)
            begun = int((number + order.random()) * share)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while len(callers.sent) < min(callers.calls, begun):  # noqa: ASYNC110 - callers run meanwhile
                        await asyncio.sleep(0.005)
            except TimeoutError:  # no caller gets an answer any more
                callers.calls = len(callers.sent)
                break
            striking = group.create_task(nodes.strike(kind))
            if kind == KILL:
                await striking
            if not short and number % 20 == 19:
                print(f"{number + 1:>6} of {len(kinds)} faults, {len(callers.sent):>6} calls", file=sys.stderr)
        callers.allowed = callers.calls
    for node in nodes.nodes:
        node.set_clock(0)


async def _judge(nodes: Fleet, callers: Callers, budget: int, found: Found, short: bool) -> None:
    sent = callers.sent
    clis = [node.cli for node in nodes.nodes]
    listed: Any = await asyncio.to_thread(clis[0].ask, "calls", "reconcile")
    reported = {one["key"] for one in listed["unknown"]}
    verified = [await asyncio.to_thread(cli, "audit", "verify") for cli in clis]
    found.verified = all(ended.code == 0 for ended in verified)
    for ended in verified:
        if ended.code:
            print(ended.out, ended.err, file=sys.stderr)
    found.told = Counter(call.told for call in sent)
    effects = Counter(nodes.lines("effects"))
    acknowledged = {call.name for call in sent if call.told == "acknowledged"}
    unknown = {call.name for call in sent if call.told == "unknown"}
    refused = {call.name: call.told for call in sent if call.name not in acknowledged | unknown and call.told}
    paid = [name for call in sent if call.tool == "pay" and effects[name := call.name]]
    found.violations = {
        "lost": sorted(acknowledged - effects.keys()),
        "doubled": sorted(name for name, count in effects.items() if count > 1),
        "refused with an effect": [f"{name}: {told}" for name, told in refused.items() if effects[name]],
        "unreported": sorted(unknown - reported),
        "wrongly reported": sorted(reported - unknown),
        "overlapping": _overlapping(nodes.lines("turns"), acknowledged if short else None),
        "overspent": paid[budget:],
        "without Redis": await _without_redis(nodes),
        "unsettled": sorted(callers.open),
    }


async def _without_redis(nodes: Fleet) -> list[str]:
    """The nodes that have found no way back to Redis."""
    missing = {f"node {node.number}": node.rest.removesuffix("/v1") for node in nodes.nodes}
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S / 10), httpx.AsyncClient() as web:
            while missing:
                for name, address in list(missing.items()):
                    answer = await web.get(f"{address}/ready")
                    if answer.json()["dependencies"]["redis"] != "down":
                        del missing[name]
                await asyncio.sleep(0.05)
    return list(missing)


def _overlapping(turns: list[str], among: set[str] | None) -> list[str]:
    """Calls that were alone with an account while another one was."""
    found: list[str] = []
    ended: dict[str, int] = {}
    for account, name, began_ns, ended_ns in sorted((line.split() for line in turns), key=lambda turn: int(turn[2])):
        if among is None or name in among:
            if int(began_ns) < ended.get(account, 0):
                found.append(name)
            ended[account] = max(ended.get(account, 0), int(ended_ns))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="./dev chaos", description="Fail in every way while callers write, and count."
    )
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=200, help="how often a node is killed; other faults in proportion")
    parser.add_argument("--seed", type=int, help="of a run to repeat; chosen by chance otherwise")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no more calls after this time")
    parser.add_argument("--save", action="store_true", help="write the table to docs/explanation/test-tiers.md")
    arguments = parser.parse_args()
    surroundings.settle()
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    place = Path(tempfile.mkdtemp(prefix="interlock-chaos-", dir=surroundings.memory() or None))
    commit = _sources()
    print(f"seed {seed}, commit {commit}, in {place}", flush=True)
    chosen = {"calls": arguments.calls, "kills": arguments.kills, "minutes": arguments.minutes}
    found = asyncio.run(run(place, seed=seed, **chosen))
    print(found.table())
    changed = commit != _sources()
    if changed:
        print(f"the sources have changed during this run, to {_sources()}: run it from a clone that nobody works in")
    if not found.kept:
        print(f"the data directories, history, journal, effects and stderr of the nodes are in {place}")
        sys.exit(1)
    shutil.rmtree(place)
    if arguments.save:
        if changed or "-dirty" in commit:
            sys.exit("not saved: the table would name a commit that was not what ran")
        save(found.section(commit))


def save(section: str, page: Path = PAGE) -> None:
    """Write the table of a run in place of the one that the page has."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    page.write_text(f"{before}{begin}\n{section}\n{end}{after}")


def _sources() -> str:
    """The commit that is checked out, and whether files of the program or of the tests differ from it."""
    git = ("git", "-C", str(Path(__file__).parents[2]))
    words = (*git, "rev-parse", "--short=12", "HEAD")
    commit = subprocess.run(words, capture_output=True, check=False, text=True).stdout.strip()
    words = (*git, "status", "--porcelain", "--", "src", "tests")
    differs = subprocess.run(words, capture_output=True, check=False, text=True).stdout.strip()
    return f"{commit}{'-dirty' if differs else ''}" if commit else "unknown-dirty"


if __name__ == "__main__":
    main()
