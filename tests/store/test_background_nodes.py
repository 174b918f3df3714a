"""Background calls of three servers on one store: each tells of them and gives their results, also of a dead one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.bounds import PATIENCE_S, until
from tests.support.cli import Cli
from tests.support.cluster import SERVE, TOOLS, Node, prepare
from tests.support.postgres import Server

NODES = 3


class Three:
    """Three servers, and a token for their tools."""

    def __init__(self, place: Path, nodes: list[Node], token: str) -> None:
        self.place = place
        self.nodes = nodes
        self.bearer = {"authorization": f"Bearer {token}"}

    def narrowed(self, tool: str) -> dict[str, str]:
        """The bearer of a token of the same agent for one tool."""
        issued = self.nodes[1].cli("token", "issue", "--agent", "tester", "--tool", tool, "--ttl", "1h")
        assert issued.code == 0, issued.err
        return {"authorization": f"Bearer {issued.out.strip()}"}


@pytest.fixture(params=["sqlite", "postgres"])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Three]:
    (tmp_path / "cluster_tools.py").write_text(TOOLS.format(place=str(tmp_path)))
    if request.param == "sqlite":  # three servers on one data directory
        clis = [Cli(tmp_path / "0")]
    else:
        server: Server = request.getfixturevalue("postgres_server")
        address = server.new_schema()
        clis = [Cli(tmp_path / str(number), {"INTERLOCK_STORE": address}) for number in range(NODES)]
    token = prepare(clis, tmp_path / "cluster_tools.py", "cluster.*")
    nodes = [Node(clis[number % len(clis)], SERVE) for number in range(NODES)]
    try:
        for node in nodes:
            assert node.start(), node.log.read_text()
        yield Three(tmp_path, nodes, token)
    finally:
        for node in nodes:
            node.end()


async def start(web: httpx.AsyncClient, node: Node, tool: str, name: str, **more: str) -> str:
    sent = {"tool_id": f"cluster.{tool}", "parameters": {"name": name}, "execution_mode": "async", **more}
    answer = await web.post(f"{node.rest}/tools/invoke", json=sent)
    assert answer.status_code == 202, answer.text
    return answer.json()["invocation_id"]


async def fetch(web: httpx.AsyncClient, node: Node, call: str, **more: Any) -> Any:
    answer = await web.get(f"{node.rest}/calls/{call}", **more)
    return answer.status_code, answer.json()


async def test_a_background_call_is_followed_and_fetched_at_other_servers_also_when_its_own_is_dead(
    three: Three,
) -> None:
    first, second, third = three.nodes
    async with httpx.AsyncClient(headers=three.bearer, timeout=PATIENCE_S) as web:
        read = await start(web, first, "wait", "held")
        await until(lambda: _is(three.place / "held.runs"))
        assert (await fetch(web, second, read))[1]["status"] == "running"
        # Followed at the second server to its end, and its result is there then.
        stream = {"accept": "text/event-stream"}
        followed = asyncio.ensure_future(
            web.get(f"{second.rest}/calls/{read}/events", headers=stream, timeout=PATIENCE_S)
        )
        (three.place / "held.may-end").touch()
        assert '"held"' in (await followed).text
        code, told = await fetch(web, second, read)
        assert (code, told["result"]) == (200, "held")
        write = await start(web, first, "post", "made", idempotency_key="made")

        async def finished() -> bool:
            return (await fetch(web, second, write))[1]["status"] == "success"

        await until(finished)
        # A token that does not cover the tool reaches neither.
        other = three.narrowed("cluster.look")
        for call in (read, write):
            assert (await fetch(web, third, call, headers=other))[0] == 404
        assert (await fetch(web, third, write, headers=three.narrowed("cluster.post")))[0] == 200
        unfinished = await start(web, first, "wait", "never")
        await until(lambda: _is(three.place / "never.runs"))
        first.signal(signal.SIGKILL)
        first.end()
        for call, name in ((read, "held"), (write, "made")):
            code, told = await fetch(web, third, call)
            assert (code, told["result"]) == (200, name)

        async def reported() -> bool:
            return (await fetch(web, third, unfinished))[1]["status"] != "running"

        await until(reported)
        told = (await fetch(web, third, unfinished))[1]
        assert (told["state"], told["outcome"], told["error_code"]) == ("failed", "unknown", "E3409")
        assert told.get("result") is None


async def _is(path: Path) -> bool:
    return await asyncio.to_thread(path.exists)
