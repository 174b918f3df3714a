"""`verify`: how fast the chain is proven from the file alone."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench import journal
from bench.measure import Plan, number
from bench.report import Table
from interlock.store.home import Home

ROWS = 200_000


async def run(plan: Plan) -> list[Table]:
    if importlib.util.find_spec("interlock.audit.chain") is None:
        return [Table("Verification", note="left out: interlock.audit.chain is not there yet")]
    from interlock.audit.chain import verify

    rows = ROWS // 10 if plan.quick else ROWS
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as directory:
        home = Path(directory)
        await journal.prepare(home, rows)
        cpu_s = median(_cpu_s(verify, Home(home)) for _ in range(3))
    figures = (f"{rows:,}", f"{cpu_s * 1e3:,.0f}", f"{rows / cpu_s:,.0f}", number(cpu_s / rows * 1e6))
    return [Table("Verification", ("rows", "CPU ms", "rows/s", "CPU µs per row"), [figures])]


def _cpu_s(verify: Any, home: Home) -> float:
    began = time.process_time()
    found = verify(home)
    spent = time.process_time() - began
    if not found.intact:
        raise SystemExit(f"the filled journal does not verify: {found}")
    return spent
