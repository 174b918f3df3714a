# pyright: basic, reportMissingImports=false
"""FastMCP's client, where `fastmcp-tasks` is installed."""

from __future__ import annotations

from typing import Any

import fastmcp_tasks  # noqa: F401 - with it, clients take tasks

from tests.clients.common import run
from tests.clients.probes import fastmcp
from tests.clients.target import Target


async def probe(target: dict[str, Any], wire: str) -> set[str]:
    return await fastmcp(Target(**target), wire)


if __name__ == "__main__":
    run(probe)
