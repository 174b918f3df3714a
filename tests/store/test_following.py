"""Four data directories on one PostgreSQL store, of which three follow the shared policy."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests import warm
from tests.support.bounds import PATIENCE_S, lag_of, until, within_a_second
from tests.support.cli import Cli
from tests.support.cluster import SERVE, address_of
from tests.support.postgres import Server

NODES = 3
FORBID = '@id("no-balance")\nforbid (principal, action == Action::"demo.balance", resource);\n'


@pytest.mark.part_of(
    "OPS-06",
    rest="numbers of parts that are not built",
)
async def test_a_machine_that_follows_decides_by_a_policy_that_another_pushed(
    tmp_path: Path, postgres_server: Server
) -> None:
    store = {"INTERLOCK_STORE": postgres_server.new_schema()}
    first = Cli(tmp_path / "first", store)
    followers = [Cli(tmp_path / f"follower{number}", store) for number in range(NODES)]
    follower = followers[0]
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
    for one in followers:
        # Keys are all that it gets from elsewhere.
        shutil.copytree(first.home / "keys", one.home / "keys")
        (one.home / "settings.toml").write_text("shared_config = true\n")
    with ExitStack() as stack:
        started = [stack.enter_context(warm.start(SERVE, one.environment, one.path)) for one in followers]
        rests = await asyncio.gather(*(asyncio.to_thread(address_of, process) for process in started))
        assert all(rests)
        async with httpx.AsyncClient(timeout=PATIENCE_S, headers={"authorization": f"Bearer {token}"}) as web:

            async def answered(rest: str, status: int) -> bool:
                sent = {"tool_id": "demo.balance", "parameters": {"account": "cash"}}
                return (await web.post(f"{rest}/tools/invoke", json=sent)).status_code == status

            async def lag(status: int, what: str) -> float:
                return max(await asyncio.gather(*(lag_of(partial(answered, rest, status), what) for rest in rests)))

            assert all([await answered(rest, 200) for rest in rests])
            shown = json.loads(await run(follower, "config", "show", "payload_days", "--json"))["settings"][0]
            assert (shown["value"], shown["source"]) == (30, "shared version 1")

            async def push(number: int) -> float:
                if number:
                    await run(first, "config", "rollback", "1")
                    await lag(200, "the policy before, at the machines that follow")
                await run(first, "config", "push", "--from", str(policy.parent), "--instead-of", str(1 + 2 * number))
                return await lag(403, "a policy that forbids, at the machines that follow")

            await within_a_second(push)
            version = json.loads(await run(first, "config", "history", "--json"))["versions"][0]["version"]

            async def named() -> bool:
                told = (await asyncio.to_thread(first, "config", "diff", "--json")).json
                assert told["shared"]["different"].keys() == {"policy.cedar"}
                return told["differences"].keys() == {"policy.cedar"}

            await until(named, "that it has another policy than the machine that does not follow")
            await run(first, "config", "rollback", "1")
            await lag(200, "the policy before, at the machines that follow")

            (tmp_path / "new" / "settings.toml").write_text("payload_days = 31\n")
            policy.write_text(policy.read_text().removesuffix(FORBID))
            await run(first, "config", "push", "--from", str(policy.parent), "--instead-of", str(version + 1))

            async def to_restart() -> bool:
                ended = await asyncio.to_thread(first, "config", "diff")
                assert ended.code == 1
                words = f"{follower.home} runs with settings that were changed since: restart it"
                return words in " ".join(ended.out.split())

            await until(to_restart, "that the machine that follows runs with the settings before")
