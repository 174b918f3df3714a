"""Two processes with data directories of their own on one PostgreSQL store, of which one follows the shared policy."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests import warm
from tests.support.cli import Cli
from tests.support.postgres import Server

PATIENCE_S = 120.0
FORBID = '@id("no-balance")\nforbid (principal, action == Action::"demo.balance", resource);\n'


async def until(reached: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for something that another process does."""
    began = time.monotonic()
    while not await reached():
        assert time.monotonic() - began < PATIENCE_S, what
        await asyncio.sleep(0.02)


@pytest.mark.part_of(
    "OPS-06",
    rest="numbers of parts that are not built; an address of a chat service that is a credential as a whole",
)
async def test_a_machine_that_follows_decides_by_a_policy_that_another_pushed(
    tmp_path: Path, postgres_server: Server
) -> None:
    store = {"INTERLOCK_STORE": postgres_server.new_schema()}
    first, follower = Cli(tmp_path / "first", store), Cli(tmp_path / "follower", store)
    first.home.mkdir(parents=True)
    (first.home / "settings.toml").write_text("payload_days = 30\n")

    async def run(cli: Cli, *words: str) -> str:
        ended = await asyncio.to_thread(cli, *words)
        assert ended.code == 0, ended.err
        return ended.out

    await run(first, "tools", "add", "interlock.demo_tools")
    token = (await run(first, "token", "issue", "--agent", "tester", "--tool", "demo.*", "--ttl", "1h")).strip()
    await run(first, "config", "push")
    await run(first, "config", "pull", str(tmp_path / "new"))
    policy = tmp_path / "new" / "policy.cedar"
    policy.write_text(policy.read_text() + FORBID)
    # Keys are all that it gets from elsewhere.
    shutil.copytree(first.home / "keys", follower.home / "keys")
    (follower.home / "settings.toml").write_text("shared_config = true\n")
    words = ("serve", "--port", "0", "--no-grpc", "--no-token", "--json")
    with warm.start(words, follower.environment, follower.path) as process:
        said = ""
        while not said.endswith("}\n"):
            line = (await asyncio.to_thread(process.stdout.readline)).decode()
            assert line, process.communicate()[1].decode()
            said += line
        rest = json.loads(said)["rest"]
        async with httpx.AsyncClient(timeout=PATIENCE_S, headers={"authorization": f"Bearer {token}"}) as web:

            async def answered(status: int) -> bool:
                sent = {"tool_id": "demo.balance", "parameters": {"account": "cash"}}
                return (await web.post(f"{rest}/tools/invoke", json=sent)).status_code == status

            assert await answered(200)
            shown = json.loads(await run(follower, "config", "show", "payload_days", "--json"))["settings"][0]
            assert (shown["value"], shown["source"]) == (30, "shared version 1")
            await run(first, "config", "push", "--from", str(policy.parent), "--instead-of", "1")
            await until(lambda: answered(403), "a policy that forbids, at the machine that follows")

            async def named() -> bool:
                told = (await asyncio.to_thread(first, "config", "diff", "--json")).json
                assert told["shared"]["different"].keys() == {"policy.cedar"}
                return told["differences"].keys() == {"policy.cedar"}

            await until(named, "that it has another policy than the machine that does not follow")
            await run(first, "config", "rollback", "1")
            await until(lambda: answered(200), "the policy before, at the machine that follows")

            (tmp_path / "new" / "settings.toml").write_text("payload_days = 31\n")
            policy.write_text(policy.read_text().removesuffix(FORBID))
            await run(first, "config", "push", "--from", str(policy.parent), "--instead-of", "3")

            async def to_restart() -> bool:
                ended = await asyncio.to_thread(first, "config", "diff")
                assert ended.code == 1
                words = f"{follower.home} runs with settings that were changed since: restart it"
                return words in " ".join(ended.out.split())

            await until(to_restart, "that the machine that follows runs with the settings before")
