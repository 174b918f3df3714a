"""Runs calls in forked children and kills them: at a labelled point, or at any moment.

Imports everything once and forks without threads, so that a kill costs milliseconds. A child tells over a pipe which
calls were acknowledged; what it had to say when it died is all that counts.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from interlock import Interlock
from interlock.gateway.authorize import Authorizer
from interlock.gateway.execute import Execution
from interlock.gateway.finish import Finisher
from interlock.gateway.request import Requests
from interlock.gateway.validate import Validator
from interlock.gateway.verify import ResultVerifier
from interlock.store.homes import home_at
from interlock.store.transaction import Transaction
from interlock.store.writer import Writer
from tests.support import stores
from tests.support.counter import crash_here, mark
from tests.support.postgres import LOADED

PHASES: dict[str, tuple[type, str]] = {
    "request": (Requests, "read"),
    "validate": (Validator, "validate"),
    "authorize": (Authorizer, "authorize"),
    "execute": (Execution, "run"),
    "verify": (ResultVerifier, "verify"),
    "return": (Finisher, "succeed"),
}
READY = "ready"
POINTS = (
    *(f"{when} {phase}" for phase in PHASES for when in ("before", "after")),
    "before the effect",
    "after the effect",
    "intent: before commit",
    "intent: after commit",
    "closing: before commit",
    "closing: after commit",
)


def instrument() -> None:
    """Put a labelled point before and after every phase and around every commit that holds an intent or a closing."""
    for phase, (owner, name) in PHASES.items():
        setattr(owner, name, _around(phase, getattr(owner, name)))
    apply = Writer._apply  # pyright: ignore[reportPrivateUsage]

    def watched(self: Writer, batch: list[Any]) -> Any:
        kinds: set[str] = set()
        append = Transaction.append

        def noted(self: Transaction, kind: str, call: str, body: bytes) -> None:
            kinds.add(kind)
            append(self, kind, call, body)
            if kind in ("intent", "closed"):
                crash_here(f"{'intent' if kind == 'intent' else 'closing'}: before commit")

        Transaction.append = noted
        try:
            done = apply(self, batch)
        finally:
            Transaction.append = append
        if "intent" in kinds:
            crash_here("intent: after commit")
        if "closed" in kinds:
            crash_here("closing: after commit")
        return done

    Writer._apply = watched  # pyright: ignore[reportPrivateUsage]


def _around(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        async def waited(self: Any, step: Any, *given: Any, **named: Any) -> Any:
            crash_here(f"before {phase}")
            made = await method(self, step, *given, **named)
            crash_here(f"after {phase}")
            return made

        return waited

    def direct(self: Any, step: Any, *given: Any, **named: Any) -> Any:
        crash_here(f"before {phase}")
        made = method(self, step, *given, **named)
        crash_here(f"after {phase}")
        return made

    return direct


async def run_calls(home: str, names: list[str], say: Callable[[str], None], together: bool) -> None:
    async with Interlock.open(home) as app:
        app.catalog.attach(mark)

        say(f"{READY}\n")

        async def one(name: str) -> None:
            result = await app.call("demo.mark", {"name": name}, key=f"key-{name}", session=name)
            say(f"{name} {'ok' if result.ok else result.error and result.error.code}\n")

        if together:
            await asyncio.gather(*(one(name) for name in names))
        else:
            for name in names:
                await one(name)


class Turn(NamedTuple):
    """What a child acknowledged, and whether it was killed after that or ended by itself."""

    acknowledged: dict[str, str]
    killed: bool


def in_child(home: str, names: list[str], *, crash_at: str, die_after_s: float, together: bool) -> Turn:
    """Fork, run, die."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.environ["CRASH_AT"] = crash_at

        def say(line: str) -> None:
            os.write(writer, line.encode())

        asyncio.run(run_calls(home, names, say, together))
        os._exit(0)
    os.close(writer)
    until: float | None = None
    said = b""
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        ready, _, _ = select.select([reader], [], [], left)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            until = None
            continue
        data = os.read(reader, 65536)
        if not data:
            break
        said += data
        # Counted from when its home is open or, one call after the other, from the first answer: on a busy machine the
        # kill would come before it each time.
        if die_after_s and until is None and said.count(b"\n") > (0 if together else 1):
            until, die_after_s = time.monotonic() + die_after_s, 0
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    stores.bury(home_at(home))  # or the next one would wait for its locks until its lease has run out
    acknowledged = dict(line.split(" ", 1) for line in said.decode().splitlines() if line != READY)
    return Turn(acknowledged, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)


def tell(point: str, names: list[str], turn: Turn) -> None:
    print(json.dumps({"point": point, "names": names, **turn._asdict()}), flush=True)


def timed(home: str, calls: int, together: bool) -> float:
    """How long the calls of one turn take when nothing kills them, without opening and closing the home."""
    taken_s: list[float] = []
    for count in (0, calls):
        names = [f"whole-{together}-{number}" for number in range(count)]
        began = time.monotonic()
        turn = in_child(home, names, crash_at="", die_after_s=0, together=together)
        taken_s.append(time.monotonic() - began)
        tell("none", names, turn)
    return max(taken_s[1] - taken_s[0], 0.02)


def main() -> None:
    # Once, here; the children inherit it.
    for name in ("cedarpy", *(LOADED if "INTERLOCK_STORE" in os.environ else ())):
        importlib.import_module(name)

    mode, home, count, calls = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    instrument()
    chance = random.Random(count)
    if mode == "points":
        for turn in range(count):
            for number, point in enumerate(POINTS):
                name = f"p{turn}-{number}"
                tell(point, [name], in_child(home, [name], crash_at=point, die_after_s=0, together=False))
    else:
        # Kills are spread over the time that the calls take here and now: one turn of each kind runs to its end first.
        whole_s = {together: timed(home, calls, together) for together in (True, False)}
        for number in range(count):
            names = [f"r{number}-{call}" for call in range(calls)]
            together = number % 2 == 0
            die_after_s = chance.uniform(0.02, 1.0) * whole_s[together]
            tell("random", names, in_child(home, names, crash_at="", die_after_s=die_after_s, together=together))


if __name__ == "__main__":
    main()
