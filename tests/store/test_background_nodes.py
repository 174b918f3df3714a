"""Background calls of three servers on one store: each tells of them and gives their results, also of a dead one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest

from interlock.contract.standard import ToolResult
from tests.support.bounds import PATIENCE_S, until
from tests.support.cluster import TOOLS, Node, Three, three_nodes
from tests.support.postgres import Server
from tests.support.task_client import TaskClient


@pytest.fixture(params=["sqlite", "postgres"])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Three]:
    server: Server | None = request.getfixturevalue("postgres_server") if request.param == "postgres" else None
    tools = TOOLS.format(place=str(tmp_path))
    with three_nodes(tmp_path, server, tools, "cluster.*", "mcp_task_after_s = 0.01\n") as three:
        yield three


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
        # A paused server on PostgreSQL is as good as dead when its lease has run out, and may come back after that. On
        # one machine the kernel knows that it lives.
        paused = first.cli.home != second.cli.home
        first.signal(signal.SIGSTOP if paused else signal.SIGKILL)
        for call, name in ((read, "held"), (write, "made")):
            code, told = await fetch(web, third, call)
            assert (code, told["result"]) == (200, name)

        # Each server looks at leases by itself.
        async def reported() -> bool:
            seen = [(await fetch(web, node, unfinished))[1]["status"] for node in (third, second)]
            return "running" not in seen

        await until(reported)
        ends = [(await fetch(web, third, unfinished))[1], (await fetch(web, second, unfinished))[1]]
        if paused:
            (three.place / "never.may-end").touch()
            first.signal(signal.SIGCONT)
            await asyncio.to_thread(first.wait)  # it finds that its lease is lost
        first.end()
        assert first.start(), first.log.read_text()
        ends += [(await fetch(web, node, unfinished))[1] for node in (first, second, third)]
        for told in ends:
            assert (told["state"], told["error_code"], told.get("outcome")) == ("failed", "E3404", None)
            ToolResult.parse(told["tool_result"])
            assert (told["tool_result"]["status"], told["tool_result"]["error"]) == ("failed", told["error"])
            assert told == ends[0]


async def test_a_task_is_followed_and_cancelled_at_other_servers_from_the_moment_its_client_has_it(
    three: Three,
) -> None:
    async with AsyncExitStack() as stack:

        async def client(node: Node) -> TaskClient:
            http = httpx2.AsyncClient(base_url=node.address, headers=three.bearer, timeout=PATIENCE_S)
            return TaskClient(await stack.enter_async_context(http))

        first, second, third = [await client(node) for node in three.nodes]
        task = await first.call("cluster-wait", {"name": "task"})
        assert (task["resultType"], task["status"]) == ("task", "working")
        for other in (second, third):
            assert (await other.get(task))["status"] == "working"
            refused = await other.request("tasks/update", {"taskId": task["taskId"], "inputResponses": {"q": {}}})
            assert refused["data"]["error_code"] == "E3411", refused
        (three.place / "task.may-end").touch()
        for each in (second, third, first):
            ended = await each.until(task, "completed")
            assert ended["result"]["structuredContent"] == {"result": "task"}
        dropped = await first.call("cluster-wait", {"name": "dropped"})
        assert (await second.request("tasks/cancel", {"taskId": dropped["taskId"]}))["resultType"] == "complete"
        for each in (third, first):
            await each.until(dropped, "cancelled")


async def _is(path: Path) -> bool:
    return await asyncio.to_thread(path.exists)
