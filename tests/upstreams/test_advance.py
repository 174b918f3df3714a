"""Agreeing in advance to calls of an upstream: the command is in the message that says that a person is asked."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from pathlib import Path

import orjson

from interlock import Interlock
from interlock.data.schema import Json
from tests.support import forked
from tests.support.identities import did_of
from tests.support.wires import Wires, wired

ROOT = Path(__file__).parents[2]


async def cli(home: Path, *words: str) -> str:
    """Run a command as the person at this machine."""
    environment = {**os.environ, "INTERLOCK_HOME": str(home)}
    process = await asyncio.create_subprocess_exec(
        *forked.python(), "-m", "interlock.cli", *words, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def add(wires: Wires, text: str) -> Json:
    """A call of an MCP client, as its answer tells it."""
    params = {"name": "notes-add", "arguments": {"text": text}, "_meta": {}}
    return orjson.loads(await wires.mcp("tools/call", params, modern=True))["result"]


async def test_the_command_that_agrees_in_advance_is_offered_typed_listed_and_bounded(home: Path) -> None:
    file = home.parent / "notes.txt"
    async with Interlock.open(home, housekeeping=False) as app, wired(app) as wires:
        command = [*forked.python(), "-m", "tests.support.mcp_servers.notes", str(file)]
        config: Json = {"command": command, "cwd": str(ROOT)}
        overlay: Json = {"defaults": {"idempotency": "each"}}
        await app.upstreams.add("notes", "mcp", config, by=app.caller, overlay=overlay)
        told: str = (await add(wires, "/srv/notes/a b"))["content"][0]["text"]
        found = re.search(r"in advance, they type: `interlock (.*)`", told)
        assert found is not None, told
        assert "'text=/srv/notes/*'" in found[1]
        await cli(home, *shlex.split(found[1]))
        for text, done in (("/srv/notes/b", True), ("/srv/notes/../keys", False), ("/srv/other", False)):
            answer = await add(wires, text)
            assert ("interlock/pending" in answer["_meta"]) is not done, answer
        # A set of values; a further one is not covered.
        who = ("--caller", did_of("bot"))
        bounds = ("--arg", "text=milk", "--arg", "text=bread", "--uses", "5", "--expires", "1d")
        assert "one of milk bread" in await cli(home, "approvals", "grant", "notes.add", *who, *bounds)
        for text, done in (("milk", True), ("bread", True), ("beer", False)):
            assert ("interlock/pending" in (await add(wires, text))["_meta"]) is not done
        explained = await cli(home, "policy", "explain", did_of("bot"), "notes.add", '{"text": "milk"}')
        assert explained.count("agreed to in advance by") == 2
        assert explained.count("does not cover this call") == 1
        assert "3 of 5 uses left" in explained
        assert "this call is made without asking" in explained
        assert "a person approves this call" not in explained
        other = await cli(home, "policy", "explain", did_of("bot"), "notes.add", '{"text": "beer"}')
        assert "a person approves this call" in other
        assert file.read_text() == "/srv/notes/b\nmilk\nbread\n"
