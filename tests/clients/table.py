"""The table of MCP clients and features: made by probing, compared with the page, and written to it.

`python -m tests.clients` probes all clients and writes the page. The tests compare it row by row.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

from interlock import Interlock
from tests.clients.common import FEATURES, PATIENCE_S
from tests.clients.probe_inspector import inspector
from tests.clients.probes import PROBES, Probe
from tests.clients.target import ROOT, Target
from tests.support.calls import records
from tests.support.frameworks import libraries_python
from tests.support.mcp_servers.real import environment

PAGE = ROOT / "docs" / "explanation" / "mcp-clients.md"
WIRES = ("stdio", "http")
_BEGIN, _END = "<!-- table -->\n", "<!-- end of table -->\n"
HEADER = [f"| Client | over | {' | '.join(FEATURES)} |", f"|---|---|{':-:|' * len(FEATURES)}"]


def _outside(module: str, name: str) -> Probe:
    """A probe that runs in another environment, as a program."""

    async def probe(target: Target, wire: str) -> set[str]:
        made = libraries_python if name == "integrations" else lambda: str(environment(name) / "bin" / "python")
        python = await asyncio.to_thread(made)
        command = [python, "-m", f"tests.clients.{module}", json.dumps(target.document()), wire]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        running = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1, cwd=ROOT, env=env)
        said, complaint = await running.communicate()
        assert running.returncode == 0, complaint.decode()[-4000:]
        return set(json.loads(said))

    return probe


# Clients that need another environment than the one of the tests.
OUTSIDE: Mapping[str, Probe] = {
    "FastMCP 4 with fastmcp-tasks": _outside("probe_fastmcp_tasks", "integrations"),
    "pydantic-ai 2 with fastmcp-tasks": _outside("probe_pydantic_ai_tasks", "integrations"),
    "MCP SDK 1": _outside("probe_sdk1", "clients"),
    "langchain-mcp-adapters 0.3": _outside("probe_langchain", "clients"),
    "OpenAI Agents SDK": _outside("probe_openai_agents", "integrations"),
    "MCP Inspector 2 (command line)": inspector,
}
CLIENTS: Mapping[str, Probe] = {**PROBES, **OUTSIDE}


async def row(app: Interlock, target: Target, name: str, wire: str) -> str:
    """Probe one client over one wire; its row of the table."""
    folder, before = Path(target.marker).parent, len(_hung(app))
    begun = len(list(folder.glob("begun-*")))
    worked = await CLIENTS[name](target, wire)
    if len(list(folder.glob("begun-*"))) > begun:
        async with asyncio.timeout(PATIENCE_S):
            while len(_hung(app)) == before:  # noqa: ASYNC110 - another process may write the record
                await asyncio.sleep(0.05)
        worked |= {"cancel"} if _hung(app)[-1] == "canceled" else set()
    return _written(name, wire, worked)


def _written(name: str, wire: str, worked: set[str]) -> str:
    cells = ["✓" if feature in worked else "–" for feature in FEATURES]
    return f"| {name} | {'HTTP' if wire == 'http' else wire} | {' | '.join(cells)} |"


def _hung(app: Interlock) -> list[str]:
    return [one["states"][-1] for one in records(app) if one["toolId"] == "probe.hang"]


def lines() -> list[str]:
    """The table of the page, with its header."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].splitlines()


def stated() -> dict[tuple[str, str], str]:
    """The rows of the page, by client and wire."""
    found: dict[tuple[str, str], str] = {}
    for line in lines()[len(HEADER) :]:
        _, name, wire, *_ = (cell.strip() for cell in line.split("|"))
        found[name, wire.lower()] = line
    return found


def write(rows: list[str]) -> None:
    """Put the rows into the page."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(before + _BEGIN + "".join(f"{one}\n" for one in [*HEADER, *rows]) + _END + after)
