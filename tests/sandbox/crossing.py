"""Has everything that code inside can report cross the boundary on one back end, as whoever starts it.

Prints what went wrong, or that nothing did.
"""

from __future__ import annotations

import asyncio
import sys
from textwrap import dedent
from typing import Any

# Async and plain, with threads beside them, and with more than fits into the socket at once.
SOURCE = dedent(
    """
    import threading

    from interlock.call.context import Context
    from interlock.core.errors import Failure


    async def awaits(ctx: Context):
        ctx.progress("begun", percent=0)
        await ctx.checkpoint("first", {"at": 1})
        ctx.partial("one")
        await ctx.checkpoint("second", ["x" * 200_000])
        ctx.progress("done", percent=100)
        codes = []
        for label, state in (("a b", 1), ("kind", {1, 2}), ("large", "x" * 300_000), ("store", 1)):
            try:
                await ctx.checkpoint(label, state)
            except Failure as failure:
                codes.append(failure.code)
        return codes


    def blocks(ctx: Context):
        ctx.progress("begun", percent=0)
        ctx.checkpoint_blocking("first", {"at": 1})
        ctx.partial("one")
        ctx.checkpoint_blocking("second", ["x" * 200_000])
        ctx.progress("done", percent=100)

        def save(number):
            for turn in range(4):
                ctx.checkpoint_blocking(f"{number}-{turn}", number)

        threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return "all saved"


    def waits(ctx: Context):
        ctx.checkpoint_blocking("waiting", {})
        threading.Event().wait()
    """
)
REPORTS: list[Any] = [
    ("progress", "begun"), ("checkpoint", "first", {"at": 1}), ("partial", "one"),
    ("checkpoint", "second", ["x" * 200_000]), ("progress", "done"),
]  # fmt: skip


async def cross(backend: str) -> list[str]:
    """What did not cross as it should."""
    from interlock.call.checkpoints import Bounds
    from interlock.core.errors import Failure
    from interlock.executors.sandbox.job import JobOutcome, Limits, PythonJob
    from interlock.executors.sandbox.pool import Host
    from interlock.executors.sandbox.supervisor import Sandbox
    from tests.support.sandboxes import ROOMY, bundles_left, groups_left, strays

    faults: list[str] = []
    host = Host(paths=tuple(path for path in sys.path if path.endswith(("site-packages", "src"))))
    async with await Sandbox.open(host=host, backends=(backend,), spares=1, allowance=ROOMY) as sandbox:
        if sandbox.backend is None:
            return [str(await sandbox.describe())]

        async def run(entry: str, stop: asyncio.Event | None = None) -> tuple[JobOutcome, list[Any]]:
            told: list[Any] = []

            async def save(label: str, state: Any) -> None:
                await asyncio.sleep(0)
                if label == "store":
                    raise Failure("E3902", "the disk is full")
                told.append(("checkpoint", label, state))
                if stop is not None:
                    stop.set()

            job = PythonJob(source=SOURCE, entry=entry, checkpoints=Bounds(18, 250_000), limits=Limits(wall_s=60.0))
            outcome = await sandbox.run(
                job,
                on_progress=lambda facts: told.append(("progress", facts["message"])),
                on_partial=lambda part: told.append(("partial", part)),
                on_checkpoint=save,
                cancelled=stop,
            )
            return outcome, told

        outcome, told = await run("awaits")
        if outcome.value != ["E3308", "E3906", "E3407", "E3902"] or told != REPORTS:
            faults.append(f"awaits: {outcome} {str(told)[:300]}")
        outcome, told = await run("blocks")
        first, crowd = told[: len(REPORTS)], told[len(REPORTS) :]
        each = [[label for _, label, state in crowd if state == number] for number in range(4)]
        if first != REPORTS or each != [[f"{number}-{turn}" for turn in range(4)] for number in range(4)]:
            faults.append(f"blocks: {outcome} {str(told)[:300]}")
        outcome, told = await run("waits", asyncio.Event())
        if outcome.status != "killed" or told != [("checkpoint", "waiting", {})]:
            faults.append(f"waits: {outcome} {told}")
    return faults + [f"left behind: {one}" for one in (*strays(), *groups_left(), *bundles_left())]


if __name__ == "__main__":
    # The interpreter may be another of the same version: of the test run's path only its packages are for it.
    sys.path.extend(one for one in sys.argv[2:] if one.endswith(("site-packages", "src")) or "lib/python" not in one)
    found = asyncio.run(cross(sys.argv[1]))
    print("\n\n".join(found) or "everything crossed")
    raise SystemExit(bool(found))
