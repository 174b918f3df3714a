"""What is probed: one data directory, served over HTTP by this process and over stdio by those that clients start."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interlock import Interlock
from interlock.api.service import Service
from interlock.api.tokens import Tokens
from interlock.api.upstreams import Upstreams
from interlock.doors.server import Listening, serving

ROOT = Path(__file__).parents[2]
# Reads, so that no call needs a key or an approval: the table is about clients. The example asks nobody.
OVERLAY = {"defaults": {"mutation_class": "read_only"}} | {
    "tools": {one: {"examples": [{"who": "nobody"}]} for one in ("ask", "sample")}
}


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
            "command": [sys.executable, "-m", "tests.clients.upstream"],
            "cwd": str(ROOT),
            "protocol": "handshake",
        }
        await Upstreams(app, on_machine=True).add("asks", "mcp", config, by=app.caller, overlay=OVERLAY)
        issued = await Tokens(app).issue(by=app.caller, agent="client", tools=["*"])
        async with serving(Service(app), Listening(port=0, grpc_port=None)) as server:
            command = [str(Path(sys.executable).parent / "interlock"), "--home", str(home), "serve", "--stdio"]
            url = f"http://127.0.0.1:{server.port}/mcp"
            yield app, Target(url, issued["token"], command, str(folder / "begun"))
