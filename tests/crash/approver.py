"""Lives of tickets in forked children that are killed: at a labelled point, or after any number of steps.

A child asks for a call, has it approved, goes on with it, or lets time pass, as its script says. It tells over a pipe
what was acknowledged; what it had to say when it died is all that counts. Its clock is set, so that a machine can be
down for a day within a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from interlock import Caller, Interlock, Preview, tool
from interlock.call.context import Context
from interlock.contract.manifest import Effect
from interlock.gateway.execute import Execution
from interlock.store.transaction import Transaction
from interlock.store.writer import Writer
from interlock.testing import FakeClock
from tests.support.counter import Key, crash_here

ANN = "local:ann"
BEN = Caller(id="local:ben", groups=frozenset({"approvers"}))
BASE_MS = 1_800_000_000_000
CHANNELS = [{"name": "chat", "url": "json://127.0.0.1:9/x", "allow_private": True}]
ACTS = ("approved", "used", "escalated", "auto_denied", "lapsed")

LIFE = (
    "pending: before commit",
    "pending: after commit",
    "approved: before commit",
    "approved: after commit",
    "before execute",
    "used: before commit",
    "used: after commit",
    "before the effect",
    "after the effect",
    "closed: before commit",
    "closed: after commit",
)
ESCALATION = ("pending: after commit", "escalated: before commit", "escalated: after commit")
EXPIRY = (
    "pending: after commit",
    "approved: after commit",
    "auto_denied: before commit",
    "auto_denied: after commit",
    "lapsed: before commit",
    "lapsed: after commit",
)


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("line:{name}", "CREATE")])
async def stamp(ctx: Context, name: Key) -> str:
    """Write one line that stays, durably."""
    crash_here("before the effect")
    descriptor = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{name}\n".encode())
    os.fsync(descriptor)
    os.close(descriptor)
    ctx.effect(f"line:{name}", "CREATE", after=name)
    crash_here("after the effect")
    return name


@stamp.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


def opening(home: str, clock: FakeClock) -> Any:
    return Interlock.open(home, clock=clock.clock, caller=ANN, housekeeping=False, channels=CHANNELS)


def instrument() -> None:
    """Put a labelled point around every commit that moves a ticket, and before an approved call is executed."""
    apply, append, run = Writer._apply, Transaction.append, Execution.run  # pyright: ignore[reportPrivateUsage]

    def label(kind: str, body: bytes) -> str:
        return json.loads(body)["act"] if kind == "approval" else kind

    def watched(self: Writer, batch: list[Any]) -> Any:
        seen: list[str] = []

        def noted(self: Transaction, kind: str, call: str, body: bytes) -> None:
            append(self, kind, call, body)
            seen.append(label(kind, body))
            crash_here(f"{seen[-1]}: before commit")

        Transaction.append = noted
        try:
            done = apply(self, batch)
        finally:
            Transaction.append = append
        for one in seen:
            crash_here(f"{one}: after commit")
        return done

    async def looked_at(self: Execution, granted: Any, *, entered: bool = False) -> Any:
        crash_here("before execute")
        return await run(self, granted, entered=entered)

    Writer._apply = watched  # pyright: ignore[reportPrivateUsage]
    Execution.run = looked_at


async def live(home: str, names: list[str], script: list[str], say: Callable[[str], None]) -> None:
    """Lead calls through what the script says, all at once."""
    clock = FakeClock(BASE_MS, seed=f"{names[0]}-{script}")
    async with opening(home, clock) as app:
        app.catalog.attach(stamp)

        async def one(name: str) -> None:
            ticket = ""
            for act in script:
                if act == "ask":
                    result = await app.call("demo.stamp", name=name, key=name)
                    ticket = result.metadata["pending"]["ticketId"]
                elif act == "approve":
                    await app.approvals.approve(ticket, by=BEN)
                elif act == "resume":
                    assert (await app.approved_calls.resume(ticket)).ok
                else:
                    clock.advance(float(act))
                    await app.approvals.sweep()
                say(f"{name} {act}\n")

        await asyncio.gather(*map(one, names))


def in_child(home: str, names: list[str], script: list[str], *, crash_at: str, die_after: int = 0) -> list[str]:
    """Fork, run, die; what was acknowledged before that."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.environ["CRASH_AT"] = crash_at

        def say(line: str) -> None:
            os.write(writer, line.encode())

        try:
            asyncio.run(live(home, names, script, say))
        except BaseException:  # noqa: BLE001 - a fork has nobody above it to tell
            traceback.print_exc()
        os._exit(1)  # whoever was to be killed and comes here was not
    os.close(writer)
    said = b""
    while data := os.read(reader, 65_536):
        said += data
        if die_after and said.count(b"\n") >= die_after:
            os.kill(pid, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or die_after, f"nothing came to `{crash_at}`"
    return said.decode().splitlines()


SCRIPTS = {
    "life": (LIFE, ["ask", "approve", "resume"]),
    "escalation": (ESCALATION, ["ask", "3601"]),
    "expiry": (EXPIRY, ["ask", "86400"]),
}


def main() -> None:
    mode, home, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    instrument()
    chance = random.Random(count)
    for turn in range(count):
        if mode == "random":
            names = [f"r{turn}-{number}" for number in range(12)]
            after = chance.randint(1, 3 * len(names) - 2)
            said = in_child(home, names, ["ask", "approve", "resume"], crash_at="", die_after=after)
            print(json.dumps({"point": "random", "names": names, "said": said}), flush=True)
            continue
        points, script = SCRIPTS[mode]
        for number, point in enumerate(points):
            name = f"{mode}{turn}-{number}"
            wanted = (
                ["ask", "approve", "86400"] if point.startswith(("lapsed", "approved")) and mode == "expiry" else script
            )
            # Where a day passes, each point has a home of its own: the time of one home does not go back.
            place = shutil.copytree(home, f"{home}-{name}") if mode == "expiry" else home
            said = in_child(place, [name], wanted, crash_at=point)
            print(json.dumps({"point": point, "names": [name], "said": said, "home": place}), flush=True)


if __name__ == "__main__":
    from tests.crash import approver  # the tool was admitted under this name, not as part of a program

    approver.main()
