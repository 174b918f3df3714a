"""Probe clients and write their table: `python -m tests.clients [CLIENT...]`. Without names, all are probed."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.clients import table
from tests.clients.target import opened


async def main(names: list[str]) -> None:
    rows = table.stated()
    with tempfile.TemporaryDirectory() as folder:
        async with opened(Path(folder)) as (app, target):
            for name in names or list(table.CLIENTS):
                for wire in table.WIRES:
                    rows[name, wire] = await table.row(app, target, name, wire)
                    known = [(name, wire) for name in table.CLIENTS for wire in table.WIRES]
                    table.write([rows[one] for one in known if one in rows])


asyncio.run(main(sys.argv[1:]))
