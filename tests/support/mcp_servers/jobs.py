"""A server whose tools are tasks: the extension `io.modelcontextprotocol/tasks`, which the SDK does not have.

It has the tools that the scenarios of the public conformance suite name, and `hold`, which ends when `release` is
called for the same name. Without the extension, in the handshake era too, tools answer when they are done.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import mcp_types as types
from mcp import MCPError
from mcp.server import Server
from mcp.server.stdio import stdio_server
from pydantic import Field
from starlette.applications import Starlette

TASKS = "io.modelcontextprotocol/tasks"
POLL_MS = 50
BREAKS_AFTER_S = 0.5  # so that a client gets the task before its end, on a busy machine too
Json = dict[str, Any]
_TEXT: Json = {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "greet": {"name": _TEXT},
    "slow_compute": {"seconds": {"type": "number"}, "label": _TEXT},
    "failing_job": {},
    "protocol_error_job": {},
    "confirm_delete": {"filename": _TEXT},
    "multi_input": {},
    "test_tool_with_task": {},
    "hold": {"name": _TEXT},
    "release": {"name": _TEXT},
}
AT_ONCE = ("greet", "release")


class TaskParams(types.RequestParams):
    task_id: str = Field(alias="taskId")
    input_responses: dict[str, Any] = Field(default_factory=dict[str, Any], alias="inputResponses")


class Job:
    """One task."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.message = ""
        self.open: dict[str, tuple[Any, asyncio.Future[Any]]] = {}
        self.work: asyncio.Future[str] | None = None

    async def ask(self, key: str, message: str, field: str) -> Any:
        schema = {"type": "object", "properties": {field: {"type": "string" if field == "name" else "boolean"}}}
        params = {"mode": "form", "message": message, "requestedSchema": schema}
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.open[key] = {"method": "elicitation/create", "params": params}, answer
        return await answer

    def state(self) -> dict[str, Any]:
        at = "2026-07-28T00:00:00Z"
        state: dict[str, Any] = {
            "taskId": self.name, "status": "working", "createdAt": at, "lastUpdatedAt": at, "ttlMs": 60_000,
            "pollIntervalMs": POLL_MS, **({"statusMessage": self.message} if self.message else {}),
        }  # fmt: skip
        assert self.work is not None
        if not self.work.done():
            asked = {key: question for key, (question, _) in self.open.items()}
            return {**state, "status": "input_required", "inputRequests": asked} if asked else state
        if self.work.cancelled():
            return {**state, "status": "cancelled"}
        error = self.work.exception()
        if isinstance(error, MCPError):
            return {**state, "status": "failed", "error": {"code": error.error.code, "message": error.error.message}}
        text = str(error) if error is not None else self.work.result()
        content = [{"type": "text", "text": text}]
        return {**state, "status": "completed", "result": {"content": content, "isError": error is not None}}


class Jobs:
    """The tools. `log` has what happened to tasks."""

    def __init__(self) -> None:
        self.tasks: dict[str, Job] = {}
        self.log: list[str] = []
        self._numbers = itertools.count(1)
        self._held: dict[str, asyncio.Event] = {}

    def held(self, name: str) -> asyncio.Event:
        return self._held.setdefault(name, asyncio.Event())

    async def list(self, ctx: Any, params: Any) -> types.ListToolsResult:
        listed = [
            types.Tool(name=name, description="Do a job.", input_schema={"type": "object", "properties": takes})
            for name, takes in TOOLS.items()
        ]
        return types.ListToolsResult(tools=listed)

    async def call(self, ctx: Any, params: types.CallToolRequestParams) -> Any:
        given, able = params.arguments or {}, takes_tasks(ctx)
        job = Job(f"job-{next(self._numbers)}")
        if params.name == "test_tool_with_task" and not params.input_responses:
            form = types.ElicitRequestFormParams(
                message="Who?", requested_schema={"type": "object", "properties": {"name": _TEXT}}
            )
            asked: Any = {"user_name": types.ElicitRequest(params=form)}
            return types.InputRequiredResult(input_requests=asked, request_state="who")
        if params.name == "test_tool_with_task":
            (told,) = (params.input_responses or {}).values()
            content: Json = getattr(told, "content", None) or {}
            given = {"name": content.get("name")}
        if params.name == "failing_job" and not able:
            needed: Json = {"requiredCapabilities": {"extensions": {TASKS: {}}}}
            raise MCPError(-32021, "failing_job is a task", needed)
        work = self._work(params.name, given, job)
        if not able or params.name in AT_ONCE:
            try:
                text, failed = await work, False
            except RuntimeError as error:
                text, failed = str(error), True
            return types.CallToolResult(content=[types.TextContent(text=text)], is_error=failed)
        job.work = asyncio.ensure_future(work)
        job.work.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.tasks[job.name] = job
        self.log.append(f"created {params.name}")
        return {**job.state(), "resultType": "task"}

    async def _work(self, tool: str, given: dict[str, Any], job: Job) -> str:
        match tool:
            case "slow_compute":
                await asyncio.sleep(given["seconds"])
                return f"computed {given.get('label')}"
            case "failing_job":
                await asyncio.sleep(BREAKS_AFTER_S)
                raise RuntimeError("the job failed")
            case "protocol_error_job":
                await asyncio.sleep(BREAKS_AFTER_S)
                raise MCPError(-32603, "the server broke")
            case "confirm_delete":
                await job.ask("sure", f"Delete {given['filename']}?", "confirm")
                return "deleted"
            case "multi_input":
                asked = [job.ask(f"q{number}", f"Question {number}?", "name") for number in (1, 2)]
                told: list[Json] = await asyncio.gather(*asked)
                return " and ".join(str(one["content"]["name"]) for one in told)
            case "hold":
                job.message = f"holding {given['name']}"
                await self.held(given["name"]).wait()
                return f"released {given['name']}"
            case "release":
                self.held(given["name"]).set()
                return "done"
            case _:
                return f"Hello, {given.get('name')}!"

    def _known(self, params: TaskParams) -> Job:
        job = self.tasks.get(params.task_id)
        if job is None:
            raise MCPError(types.INVALID_PARAMS, "no such task")
        return job

    async def get(self, ctx: Any, params: TaskParams) -> Any:
        assert takes_tasks(ctx)
        return self._known(params).state()

    async def update(self, ctx: Any, params: TaskParams) -> Any:
        assert takes_tasks(ctx)
        job = self._known(params)
        for key, answer in params.input_responses.items():
            self.log.append(f"answered {key}")
            job.open.pop(key)[1].set_result(answer)
        return {}

    async def cancel(self, ctx: Any, params: TaskParams) -> Any:
        assert takes_tasks(ctx)
        job = self._known(params)
        assert job.work is not None
        if job.work.cancel():
            self.log.append("cancelled")
        return {}


def takes_tasks(ctx: Any) -> bool:
    """Whether the client of a request takes a task for an answer."""
    params: Json = ctx.params or {}
    meta: Json = params.get("_meta") or {}
    able: Json = meta.get("io.modelcontextprotocol/clientCapabilities") or {}
    return TASKS in (able.get("extensions") or {})


def server(jobs: Jobs) -> Server[Any]:
    made: Server[Any] = Server("jobs", version="1", on_list_tools=jobs.list, on_call_tool=jobs.call)
    made.extensions = {TASKS: {}}
    handlers: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
        "tasks/get": jobs.get,
        "tasks/update": jobs.update,
        "tasks/cancel": jobs.cancel,
    }
    for method, handler in handlers.items():
        made.add_request_handler(method, TaskParams, handler)
    return made


def app(jobs: Jobs) -> Starlette:
    return server(jobs).streamable_http_app(stateless_http=False, json_response=False)


async def stdio(jobs: Jobs) -> None:
    """Serve over stdin and stdout."""
    one = server(jobs)
    async with stdio_server() as (incoming, outgoing):
        await one.run(incoming, outgoing, one.create_initialization_options())


if __name__ == "__main__":
    anyio.run(stdio, Jobs())
