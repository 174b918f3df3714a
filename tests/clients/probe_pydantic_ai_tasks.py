"""The toolset of pydantic-ai, where `fastmcp-tasks` is installed."""

from __future__ import annotations

from typing import Any

from tests.clients.common import run
from tests.clients.probes import pydantic_ai
from tests.clients.target import Target


async def probe(target: dict[str, Any], wire: str) -> set[str]:
    return await pydantic_ai(Target(**target), wire)


if __name__ == "__main__":
    run(probe)
