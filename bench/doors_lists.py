"""`tools/list` of servers with many tools: ours beside the SDK's, and a surface beside a small catalog.

Homes are filled once, before the rounds: ten thousand tools take a while.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import ours
from bench.doors_servers import Json, Served, Subject, ask, mcp, start_interlock, start_peer
from bench.payloads import PAYLOADS
from interlock import Interlock
from interlock.data.canonical import digest
from interlock.registry import admission
from interlock.registry.admission import TrialEvidence

LISTED = 500
SHOWN, CATALOG = 40, 10_000
# What a surface lists beside the pinned tools: search_tools, load_tools and read_result.
_META_TOOLS = 3
_AT_ONCE = 500

LISTING, SDK_LISTING = f"Interlock MCP, {LISTED} tools", f"mcp SDK, {LISTED} tools"
SMALL, SURFACE = f"Interlock MCP, {SHOWN} tools", f"a surface of {SHOWN} out of {CATALOG:,} tools"
LISTS = (LISTING, SDK_LISTING, SMALL, SURFACE)
# How many times the CPU of listing the small catalog the surface may take.
SURFACE_MOST = 1.2


def fill_homes(place: Path, names: Sequence[str] = LISTS) -> None:
    """Make the data directories of the servers that are named."""
    pinned = json.dumps([f"bench.copy_{count}" for count in range(SHOWN - _META_TOOLS)])
    for name, count, settings in (
        (LISTING, LISTED, 'surface = "all"\n'),
        (SMALL, SHOWN, ""),
        (SURFACE, CATALOG, f"[[surface_pinned]]\ntools = {pinned}\n"),
    ):
        if name in names:
            home = _home(place, name)
            home.mkdir()
            (home / "settings.toml").write_text(settings)
            asyncio.run(_fill(home, count))


def _home(place: Path, name: str) -> Path:
    return place / str(LISTS.index(name))


async def _fill(home: Path, tools: int) -> None:
    """Publish copies of the payloads' tools. Nothing is bound to them: they are listed, not called."""
    manifests = [ours.declared(payload).manifest for payload in PAYLOADS]
    async with Interlock.open(home) as app:
        for count in range(tools):
            manifest = manifests[count % len(manifests)].model_copy(update={"tool_id": f"copy_{count}"})
            content = digest(manifest.document())
            pretend = TrialEvidence(content, True, "bench", "")
            app.journal.post(admission.publish(manifest, content, "library:", pretend, "bench"))
            if count % _AT_ONCE == 0:
                await app.journal.drain()
        await app.journal.drain()


def listers(stack: ExitStack, place: Path, names: Sequence[str] = LISTS) -> list[Subject]:
    """A server for each list, and the SDK's with the very tools of ours, as ours described them."""
    subjects: list[Subject] = []
    for name, count in ((LISTING, LISTED), (SMALL, SHOWN), (SURFACE, SHOWN)):
        if name not in names:
            continue
        server = start_interlock(stack, _home(place, name))
        requests, tools = _pages(server)
        if len(tools) != count:
            raise SystemExit(f"{name}: {len(tools)} tools were listed, not {count}")
        subjects.append(Subject(name, server, requests))
        if name == LISTING:
            described = place / "tools.json"
            described.write_text(json.dumps(tools))
            peer = start_peer(stack, "sdk_list", str(described))
            subjects.append(Subject(SDK_LISTING, peer, [mcp("tools/list", {}, str(server.facts["token"]))]))
    return subjects


def _pages(server: Served) -> tuple[list[str], list[Json]]:
    """The requests for all pages of a list, and the tools on them."""
    token, requests, tools = str(server.facts["token"]), list[str](), list[Json]()
    cursor: str | None = ""
    while cursor is not None:
        requests.append(mcp("tools/list", {"cursor": cursor} if cursor else {}, token))
        page = ask(server.port, requests[-1])["result"]
        tools += page["tools"]
        cursor = page.get("nextCursor")
    return requests, tools
