"""Tasks over MCP: long calls of clients that take tasks, and upstreams that answer with tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx2
import pytest
import pytest_asyncio

from interlock import Context, Field, Interlock, tool
from interlock.api.service import Service
from interlock.doors.mcp import McpDoor
from tests.support.calls import admit, records, until, use_policy
from tests.support.mcp import AGENT, OTHER, REVIEWER, Person, World, prepare, serving, text
from tests.support.mcp_servers import jobs as jobs_server
from tests.support.mcp_servers.jobs import TASKS, TOOLS, Jobs
from tests.support.task_client import MODERN, TaskClient
from tests.support.task_extension import TasksExtension

DOOR = pytest.mark.proves("OPS-02")
pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
PATIENCE_S = 60
Name = Annotated[str, Field(description="a name", examples=["x"])]
RELEASED: dict[str, asyncio.Event] = {}
BEGUN: list[str] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="slow", timeout_class="long_running", restart_safe=True)
async def held(ctx: Context, name: Name) -> str:
    """Wait until it is released."""
    ctx.progress(f"holding {name}")
    BEGUN.append(name)
    await RELEASED[name].wait()
    return f"released {name}"


@asynccontextmanager
async def client(world: World, subject: str = AGENT) -> AsyncGenerator[TaskClient]:
    headers = {"authorization": f"Bearer {await world.token(subject=subject)}"}
    async with httpx2.AsyncClient(base_url=world.base, headers=headers, timeout=PATIENCE_S) as http:
        yield TaskClient(http)


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[World]:
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        await prepare(app)
        await admit(app, held)
        door = McpDoor(Service(app))
        async with door.lifespan(), serving(door) as port:
            yield World(app, home, door, port)


@pytest_asyncio.fixture
async def world(home: Path) -> AsyncGenerator[World]:
    async with opened(home, mcp_task_after_s=0.01) as made:
        yield made


# Long calls as tasks


@DOOR
async def test_a_long_call_becomes_a_task_whose_result_is_asked_for_later(world: World) -> None:
    RELEASED["a"] = asyncio.Event()
    async with client(world) as mine, client(world, OTHER) as other:
        task = await mine.call("slow-held", {"name": "a"})
        assert (task["resultType"], task["status"]) == ("task", "working")
        async with asyncio.timeout(PATIENCE_S):
            while (state := await mine.get(task)).get("statusMessage") != "holding a":
                assert (state["resultType"], state["status"]) == ("complete", "working")
        assert state["createdAt"] <= state["lastUpdatedAt"]
        # Nobody else's, and no other id.
        for who, one in ((other, task), (mine, {"taskId": "01JC0000000000000000000000"})):
            for method in ("tasks/get", "tasks/update", "tasks/cancel"):
                assert (await who.request(method, {"taskId": one["taskId"]}))["code"] == -32602
        RELEASED["a"].set()
        ended = await mine.until(task, "completed")
        assert ended["result"]["structuredContent"] == {"result": "released a"}
        assert ended["result"]["_meta"]["interlock/call"]["id"] == task["taskId"]
        # An end is an end; asking again does not change it.
        assert await mine.request("tasks/cancel", {"taskId": task["taskId"]}) == await mine.request(
            "tasks/update", {"taskId": task["taskId"], "inputResponses": {}}
        )
        assert (await mine.get(task))["status"] == "completed"
    (closed,) = records(world.app, task["taskId"], "closed")
    assert closed["status"] == "SUCCESS"


@DOOR
async def test_the_client_of_the_sdk_follows_a_long_call_that_became_a_task(world: World) -> None:
    """With an extension of its own: the SDK takes extensions, and brings none for tasks."""
    RELEASED["a"], tasks = asyncio.Event(), TasksExtension()
    async with world.client(MODERN, extensions=[tasks]) as sdk:
        calling = asyncio.ensure_future(sdk.call_tool("slow-held", {"name": "a"}))
        await until(lambda: "working" in tasks.seen)
        RELEASED["a"].set()
        assert (await calling).structured_content == {"result": "released a"}
    assert tasks.seen[-1] == "completed"


@DOOR
async def test_another_process_knows_how_a_task_ended_and_its_result(world: World) -> None:
    RELEASED["a"] = asyncio.Event()
    async with client(world) as mine:
        task = await mine.call("slow-held", {"name": "a"})
        RELEASED["a"].set()
        await mine.until(task, "completed")
    door = McpDoor(Service(world.app))
    async with door.lifespan(), serving(door) as port, client(World(world.app, world.home, door, port)) as mine:
        known = await mine.until(task, "completed")
        async with asyncio.timeout(PATIENCE_S):
            while known["result"]["content"][0]["text"] != "released a":  # the result is stored after the record
                known = await mine.get(task)
    assert known["result"]["isError"] is False


@DOOR
async def test_a_task_is_cancelled_on_record(world: World) -> None:
    RELEASED["a"] = asyncio.Event()
    async with client(world) as mine:
        task = await mine.call("slow-held", {"name": "a"})
        acknowledged = await mine.request("tasks/cancel", {"taskId": task["taskId"]})
        assert (acknowledged["resultType"], "status" in acknowledged) == ("complete", False)
        assert "result" not in await mine.until(task, "cancelled")
    (closed,) = records(world.app, task["taskId"], "closed")
    assert closed["error_code"] == "E3703"


@DOOR
async def test_only_clients_that_declare_tasks_in_the_modern_era_get_and_ask_for_them(world: World) -> None:
    RELEASED["a"] = asyncio.Event()
    async with client(world) as mine, world.client("legacy") as old:
        task = await mine.call("slow-held", {"name": "a"})
        incapable: Any = ({}, {"extensions": {}}, {"elicitation": {}})
        for able in incapable:
            refused = await mine.request("tasks/get", {"taskId": task["taskId"]}, able=able)
            assert refused["code"] == -32021
            assert refused["data"]["requiredCapabilities"] == {"extensions": {TASKS: {}}}
        other = await mine.request("tasks/get", {"taskId": task["taskId"]}, **{"mcp-name": "other"})
        assert other["code"] == -32020
        assert (await mine.request("tasks/list", {}))["code"] == -32601
        RELEASED["a"].set()
        await mine.until(task, "completed")
        waited = await mine.call("slow-held", {"name": "a"}, able={"elicitation": {}})
        assert waited["structuredContent"] == {"result": "released a"}
        assert text(await old.call_tool("slow-held", {"name": "a"})) == "released a"


@DOOR
async def test_a_caller_with_enough_background_calls_waits_for_further_ones(home: Path) -> None:
    RELEASED.update(a=asyncio.Event(), b=asyncio.Event())
    async with opened(home, mcp_task_after_s=0.01, max_background_per_caller=1) as world, client(world) as mine:
        task = await mine.call("slow-held", {"name": "a"})
        waiting = asyncio.ensure_future(mine.call("slow-held", {"name": "b"}))
        await until(lambda: BEGUN[-1] == "b")
        RELEASED["b"].set()
        assert (await waiting)["structuredContent"] == {"result": "released b"}
        RELEASED["a"].set()
        await mine.until(task, "completed")


# Upstreams that answer with tasks


class Flaky:
    """An application that is not there for a moment, for polls of tasks."""

    def __init__(self, app: Any, lost: int = 0) -> None:
        self._app = app
        self.lost = lost

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.lost and (b"mcp-method", b"tasks/get") in scope.get("headers", ()):
            self.lost -= 1
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)


@asynccontextmanager
async def upstream(world: World, *, lost: int = 0, **config: Any) -> AsyncGenerator[Jobs]:
    """The server with tasks, as the upstream `jobs`; both agents may call its tools."""
    jobs = Jobs()
    await use_policy(world.app, "permit(principal, action, resource);\n")
    app = jobs_server.app(jobs)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app.router.lifespan_context(app))
        port = await stack.enter_async_context(serving(Flaky(app, lost)))
        place = {"url": f"http://127.0.0.1:{port}/mcp", "allow_private": True, "protocol": "modern", **config}
        overlay = {"defaults": {"idempotency": "each"}}
        report = await world.app.upstreams.add("jobs", "mcp", place, by=world.app.caller, overlay=overlay)
        assert report.count("admitted") == len(TOOLS)
        until_ms = world.app.clock.now_ms() + 600_000
        for name, takes in TOOLS.items():
            arguments: Any = {one: "n-*" if kind["type"] == "string" else 1 for one, kind in takes.items()}
            await world.app.standing_approvals.grant(
                f"jobs.{name}", by=REVIEWER, caller=AGENT, arguments=arguments, uses=99, expires_ms=until_ms
            )
        stack.push_async_callback(world.app.upstreams.connections.get("jobs").close)
        yield jobs


@DOOR
@pytest.mark.parametrize("lost", [0, 2])
async def test_a_client_without_tasks_gets_the_result_of_an_upstreams_task_and_its_messages(
    world: World, lost: int
) -> None:
    heard: list[str | None] = []

    async with upstream(world, lost=lost) as jobs, world.client("legacy") as old:

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            heard.append(message)
            if message == "holding n-a":
                jobs.held("n-a").set()

        result = await old.call_tool("jobs-hold", {"name": "n-a"}, progress_callback=hear)
        assert text(result) == "released n-a"
        assert "holding n-a" in heard
        failed = await old.call_tool("jobs-failing_job", {})
        assert (failed.is_error, text(failed)) == (True, "the job failed")
        broken = await old.call_tool("jobs-protocol_error_job", {})
        assert broken.is_error
        assert "the server broke" in text(broken)
        assert jobs.log == ["created hold", "created failing_job", "created protocol_error_job"]


@DOOR
async def test_a_client_with_tasks_gets_a_task_as_soon_as_the_upstream_has_made_one(home: Path) -> None:
    async with opened(home) as world, upstream(world) as jobs, client(world) as mine:
        task = await mine.call("jobs-hold", {"name": "n-a"})
        assert task["resultType"] == "task"
        await mine.request("tasks/cancel", {"taskId": task["taskId"]})
        await mine.until(task, "cancelled")
        await until(lambda: jobs.log[-1:] == ["cancelled"])
        broken = await mine.call("jobs-protocol_error_job", {})
        failed = await mine.until(broken, "failed") if "taskId" in broken else None
        assert failed is None or (failed["error"]["code"], "result" in failed) == (-32603, False)
        assert (await mine.call("jobs-greet", {"name": "n-a"}))["content"][0]["text"] == "Hello, n-a!"


@DOOR
async def test_the_questions_of_a_task_are_those_of_the_task_that_its_client_has(home: Path) -> None:
    async with opened(home) as world, upstream(world) as jobs, client(world) as mine:
        task = await mine.call("jobs-multi_input", {})
        while len(asked := (await mine.until(task, "input_required"))["inputRequests"]) < 2:
            continue
        assert [one["params"]["message"] for one in asked.values()] == ["Question 1?", "Question 2?"]
        wrong: Any = {"taskId": task["taskId"], "inputResponses": {next(iter(asked)): {"roots": []}}}
        assert (await mine.request("tasks/update", wrong))["code"] == -32602
        for number, key in enumerate(asked):
            open_ = (await mine.until(task, "input_required"))["inputRequests"]
            assert list(open_) == list(asked)[number:]
            answer = {"action": "accept", "content": {"name": f"answer {number}"}}
            answers = {key: answer, "never-asked": answer}
            await mine.request("tasks/update", {"taskId": task["taskId"], "inputResponses": answers})
        ended = await mine.until(task, "completed")
        assert ended["result"]["content"][0]["text"] == "answer 0 and answer 1"
        assert jobs.log == ["created multi_input", "answered q1", "answered q2"]


@DOOR
async def test_the_questions_of_a_task_reach_a_client_that_is_asked_in_the_middle_of_its_call(world: World) -> None:
    person = Person()
    async with upstream(world) as jobs:
        async with world.client("legacy", **person.options) as old:
            assert text(await old.call_tool("jobs-confirm_delete", {"filename": "n-a"})) == "deleted"
        assert (person.asked, jobs.log[-1]) == (["Delete n-a?"], "answered sure")
        async with world.client("legacy") as alone:
            failed = await alone.call_tool("jobs-confirm_delete", {"filename": "n-b"})
        assert failed.is_error
        assert "E3411" in text(failed)
        assert "did not declare `elicitation`" in text(failed)
        await until(lambda: jobs.log[-1] == "cancelled")


@DOOR
async def test_whoever_gives_up_on_a_call_cancels_the_upstreams_task(world: World) -> None:
    async with upstream(world) as jobs, world.client("legacy") as old:
        calling = asyncio.ensure_future(old.call_tool("jobs-hold", {"name": "n-a"}))
        await until(lambda: jobs.log == ["created hold"])
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await until(lambda: jobs.log[-1] == "cancelled")


@DOOR
async def test_with_relayed_tasks_the_upstream_decides_by_what_the_client_of_each_call_declares(world: World) -> None:
    async with upstream(world, tasks="relay") as jobs, client(world) as mine, world.client("legacy") as old:
        task = await mine.call("jobs-hold", {"name": "n-a"})
        assert task["resultType"] == "task"
        jobs.held("n-a").set()
        await mine.until(task, "completed")
        assert jobs.log == ["created hold"]
        # A client without tasks: the server answers at the end of the work, or refuses if it makes nothing but tasks.
        jobs.held("n-b").set()
        assert text(await old.call_tool("jobs-hold", {"name": "n-b"})) == "released n-b"
        key = {"idempotency-key": "once"}
        refused = await mine.call("jobs-failing_job", {}, able={}, **key)
        assert (refused["code"], refused["data"]) == (-32021, {"requiredCapabilities": {"extensions": {TASKS: {}}}})
        assert jobs.log == ["created hold"]
        # Nothing ran, so the key is free for a client that takes tasks.
        begun = await mine.call("jobs-failing_job", {}, **key)
        ended = (await mine.until(begun, "completed"))["result"] if "taskId" in begun else begun
        assert (ended["isError"], jobs.log[-1]) == (True, "created failing_job")
    assert [one.get("error_code") for one in records(world.app)].count("E3411") == 1
