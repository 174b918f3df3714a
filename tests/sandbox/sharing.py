"""Tools that use parts of an allowance, and a process that holds one."""

from __future__ import annotations

import time

from interlock import Caller, Context, Interlock, tool


@tool(version="1.0.0", mutation_class="read_only", namespace="sharing", sandbox=True, memory="6Gi", timeout_s=120)
def large() -> str:
    """Use much memory."""
    return "much"


@tool(version="1.0.0", mutation_class="read_only", namespace="sharing", sandbox=True, memory="6Gi", timeout_s=900)
def hold(ctx: Context) -> str:
    """Use much memory until the end."""
    ctx.progress("running")
    time.sleep(800)
    return "ended"


async def admit(app: Interlock) -> None:
    from tests.support.calls import admit

    await admit(app, large, hold)


async def main(home: str) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app)

        def heard(facts: dict[str, object]) -> None:
            if facts.get("message") == "running":
                print("running", flush=True)

        await app.call("sharing.hold", caller=Caller(id="agent:sharing"), on_progress=heard)
