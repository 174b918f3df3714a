"""Runs every attack at once on one back end, as whoever starts it. Prints what went wrong, or that nothing did.

`siege.py BACKEND FIRST STEP PATHS`: every STEP-th attack, from the one with number FIRST.
"""

from __future__ import annotations

import asyncio
import sys


async def siege(backend: str, first: int, step: int) -> int:
    from interlock.executors.sandbox.pool import Host
    from interlock.executors.sandbox.supervisor import Sandbox
    from tests.sandbox.attacks import ATTACKS, Attack
    from tests.support.sandboxes import ROOMY, bundles_left, groups_left, strays

    packages = tuple(path for path in sys.path if path.endswith(("site-packages", "src")))
    host = Host(paths=packages)
    async with await Sandbox.open(host=host, backends=(backend,), spares=2, allowance=ROOMY) as sandbox:
        if sandbox.backend is None:
            print(await sandbox.describe())
            return 1
        free = asyncio.Semaphore(4)

        async def one(attack: Attack) -> str | None:
            async with free:
                return await attack.fault(sandbox)

        faults = [fault for fault in await asyncio.gather(*map(one, ATTACKS[first::step])) if fault]
    faults += [f"left behind: {one}" for one in (*strays(), *groups_left(), *bundles_left())]
    print("\n\n".join(faults) or "every attack failed")
    return bool(faults)


if __name__ == "__main__":
    # The interpreter may be another of the same version: of the test run's path only its packages are for it.
    sys.path.extend(one for one in sys.argv[4:] if one.endswith(("site-packages", "src")) or "lib/python" not in one)
    raise SystemExit(asyncio.run(siege(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
