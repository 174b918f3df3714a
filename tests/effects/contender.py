"""A process that contends for resources: `python -m tests.effects.contender HOME STORE INSTANCE hammer|hold …`."""

from __future__ import annotations

import asyncio
import os
import sys

from interlock.core.clock import Clock
from interlock.effects.locks import LockRequest, Locks
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.instance import Instance

PATIENCE_S = 60.0


async def hammer(locks: Locks, clock: Clock, marker: str, rounds: int) -> None:
    """Enter the critical section again and again; a second one inside finds the marker and dies of it."""
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(rounds):
        with await locks.hold("hammer", [LockRequest("account:cash")], clock.monotonic() + PATIENCE_S):
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            await asyncio.sleep(0)
            os.unlink(marker)
        await asyncio.sleep(0)


async def hold(locks: Locks, clock: Clock) -> None:
    """Take the resource and keep it until killed."""
    await locks.hold("holder", [LockRequest("account:cash")], clock.monotonic() + PATIENCE_S)
    print("held", flush=True)
    await asyncio.get_running_loop().create_future()


async def main(home: Home, instance: Instance, what: str, rest: list[str]) -> None:
    clock = Clock()
    locks = Locks(home, clock=clock, instance=instance)
    if what == "hold":
        await hold(locks, clock)
    await hammer(locks, clock, rest[0], int(rest[1]))
    locks.close()


if __name__ == "__main__":
    place = home_at(sys.argv[1], sys.argv[2])
    place.prepare()
    asyncio.run(main(place, place.instance(sys.argv[3]), sys.argv[4], sys.argv[5:]))
