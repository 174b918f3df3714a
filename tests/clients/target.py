"""What is probed: one data directory, served over HTTP by this process and over stdio by those that clients start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interlock import Caller, Failure, Interlock
from interlock.api.service import Service
from interlock.api.tokens import Tokens
from interlock.api.upstreams import Upstreams
from interlock.doors.server import Listening, serving
from tests.support import forked, postgres

ROOT = Path(__file__).parents[2]
# Reads, so that no call needs a key or an approval: the table is about clients. The example asks nobody.
OVERLAY = {"defaults": {"mutation_class": "read_only"}} | {
    "tools": {one: {"examples": [{"who": "nobody"}]} for one in ("ask", "sample", "roots")}
}
ONLY_READS = {"tools": {"greet-later": {"mutation_class": "read_only", "examples": [{"name": "nobody"}]}}}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a client connects. Given to clients of other environments as JSON."""

    url: str
    token: str
    command: list[str]
    marker: str

    def document(self) -> dict[str, Any]:
        return asdict(self)


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[tuple[Interlock, Target]]:
    home = folder / "home"
    async with Interlock.open(home, housekeeping=False) as app:
        await app.add_from(str(Path(__file__).with_name("tools.py")))
        config = {
            "command": [*forked.python(), "-m", "tests.clients.upstream"],
            "cwd": str(ROOT),
            "protocol": "handshake",
        }
        await Upstreams(app, on_machine=True).add("asks", "mcp", config, by=app.caller, overlay=OVERLAY)
        command = [*forked.python(), "-m", "tests.clients.tasks_upstream"]
        relayed = {**config, "command": command, "protocol": "modern", "tasks": "relay"}
        await Upstreams(app, on_machine=True).add("jobs", "mcp", relayed, by=app.caller, overlay=ONLY_READS)
        issued = await Tokens(app).issue(by=app.caller, agent="client", tools=["*"])
        async with serving(Service(app), Listening(port=0, ports={})) as server:
            command = over_stdio(home)
            url = f"http://127.0.0.1:{server.port}/mcp"
            reviewing = asyncio.create_task(_agree_to_all(app))
            try:
                yield app, Target(url, issued["token"], command, str(folder / "begun"))
            finally:
                reviewing.cancel()
                await asyncio.gather(reviewing, return_exceptions=True)


def over_stdio(home: Path) -> list[str]:
    """The command of a server over stdio. A client hands on next to nothing of its environment."""
    stores = [f"{name}={value}" for name, value in postgres.given().items()]
    program = [*forked.python(), "-m", "interlock.cli", "--home", str(home), "serve", "--stdio"]
    return ["env", *stores, *program] if stores else program


async def _agree_to_all(app: Interlock) -> None:
    """A person who agrees to every call that waits, of this process or another on the data directory."""
    person = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
    while True:
        for ticket in await app.approvals.list():
            with suppress(Failure):  # the call may have gone on, or ended
                await app.approvals.approve(ticket.id, by=person)
        await asyncio.sleep(0.1)
