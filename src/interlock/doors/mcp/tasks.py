"""Tasks: the extension `io.modelcontextprotocol/tasks` of 2026-07-28.

A client that declares it in a request may get a handle (`resultType: "task"`) instead of the result of a call, and asks
for the result later. A task is a background call of the service, under the id of the call: its limits, its owner, its
record and its end are the same as over REST. A call becomes a task if it takes longer than `mcp_task_after_s`, or if
its upstream makes a task of it.

    tasks/get       the state of the call, with its questions to the client or, at the end, its result
    tasks/update    answers to questions; those to questions that are not open are ignored
    tasks/cancel    cancels the call, on record; nothing happens if it has ended

The call runs in one process. Others on the same store know its state, its end and its result, and can cancel it. They
do not know its questions, and refuse answers to them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import decode_header_value
from mcp_types.jsonrpc import HEADER_MISMATCH
from pydantic import Field

from interlock.api.service import Service
from interlock.call.context import Caller
from interlock.call.mcp import INVALID_PARAMS, META, MISSING_CAPABILITY, TASKS
from interlock.call.results import Result
from interlock.core.clock import begun_ms, iso
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.data.untrusted import members
from interlock.doors.mcp.calling import (
    DOOR,
    Calling,
    Fault,
    RunningCall,
    Wanted,
    no_trace,
)
from interlock.doors.mcp.context import Context, meta, named
from interlock.doors.mcp.modern import MODERN

if TYPE_CHECKING:
    from interlock.doors.mcp.suspended_call import SuspendedCall

# How long a task is said to be there, and how often a client should ask.
TTL_MS = 3_600_000
POLL_MS = 1000
_DONE: Json = {"resultType": "complete"}


class TaskParams(types.RequestParams):
    """The parameters of requests about a task."""

    task_id: str = Field(alias="taskId")
    input_responses: dict[str, Any] = Field(default_factory=dict[str, Any], alias="inputResponses")


def takes_tasks(ctx: Context) -> bool:
    """Whether the client of a request takes a task for an answer."""
    declared = members(meta(ctx).get(f"{META}clientCapabilities")).get("extensions")
    return ctx.protocol_version == MODERN and TASKS in members(declared)


def _check(ctx: Context, task_id: str) -> None:
    """Refuse a request about a task that its client may not send in this form."""
    if ctx.protocol_version != MODERN:
        raise MCPError(types.METHOD_NOT_FOUND, "Method not found")
    if not takes_tasks(ctx):
        failure = Failure("E3004", f"the client must declare the extension `{TASKS}` in every request about tasks")
        needed: Json = {"requiredCapabilities": {"extensions": {TASKS: {}}}}
        raise MCPError(MISSING_CAPABILITY, failure.message, {**needed, **failure.envelope(no_trace())})
    # A client has to send this header over HTTP. FastMCP does not, and a body alone leads nobody astray.
    header = None if ctx.request is None else ctx.request.headers.get("mcp-name")
    if header is not None and decode_header_value(header) != task_id:
        raise MCPError(HEADER_MISMATCH, "mcp-name header does not match the request body's 'taskId' parameter")
    named(task_id)


class Tasks:
    """The calls of clients that take tasks."""

    def __init__(self, service: Service, calling: Calling) -> None:
        self._service = service
        self._calling = calling
        self.after_s = service.app.settings.mcp_task_after_s
        self._running: dict[str, SuspendedCall] = {}

    def handlers(self, who: Callable[[Context], Awaitable[Caller]]) -> Iterator[tuple[str, type[TaskParams], Any]]:
        """Each method with the type of its parameters and its handler. `who` returns the caller of a request."""
        methods: dict[str, Callable[[TaskParams, Caller], Awaitable[Json]]] = {
            "tasks/get": lambda params, caller: self.get(params.task_id, caller),
            "tasks/update": lambda params, caller: self.update(params.task_id, params.input_responses, caller),
            "tasks/cancel": lambda params, caller: self.cancel(params.task_id, caller),
        }
        for method, answer in methods.items():
            yield method, TaskParams, partial(self._answer, who, answer)

    @staticmethod
    async def _answer(
        who: Callable[[Context], Awaitable[Caller]],
        answer: Callable[[TaskParams, Caller], Awaitable[Json]],
        ctx: Context,
        params: TaskParams,
    ) -> Json:
        _check(ctx, params.task_id)
        return await answer(params, await who(ctx))

    async def create(self, suspended: SuspendedCall, caller: Caller) -> Json | None:
        """Make a task of a call. None if that is impossible, as for a caller with enough of them."""
        call = suspended.call
        assert isinstance(call, RunningCall)
        assert call.ask is not None
        try:
            await self._service.calls.adopt(call.id, call.ask, caller, DOOR, call.task)
        except Failure:
            return None
        suspended.news = None
        if not call.task.done():
            self._running[call.id] = suspended
            call.task.add_done_callback(lambda _: self._running.pop(call.id, None))
        return {**_task(call.id, "working", suspended.message, suspended.changed_ms), "resultType": "task"}

    async def get(self, task_id: str, caller: Caller) -> Json:
        """The state of a task. Raises Fault if the caller has none of that id."""
        suspended = self._running.get(task_id)
        if suspended is not None and suspended.belongs_to(caller):
            asked, progress = suspended.questions(), (suspended.message, suspended.changed_ms)
            if asked:
                return {**_task(task_id, "input_required", *progress), "inputRequests": asked, **_DONE}
            return {**_task(task_id, "working", *progress), **_DONE}
        try:
            result = await self._service.calls.result(task_id, caller)
            if result is None:
                return await self._on_record(task_id, caller)
        except Failure as failure:
            raise _unknown(failure) from None
        return {**await self._ended(task_id, result), **_DONE}

    async def _ended(self, task_id: str, result: Result) -> Json:
        failure, at_ms = result.error, result.created_ms
        if result.state == "canceled":
            return _task(task_id, "cancelled", "" if failure is None else failure.message, at_ms)
        try:
            _raise_error_of_protocol(result)
            answer = await self._calling.answer(Wanted(result.tool, {}, {}), result)
        except Fault as fault:
            error = {"code": fault.code, "message": fault.message, **({"data": fault.data} if fault.data else {})}
            return {**_task(task_id, "failed", fault.message, at_ms), "error": error}
        return {**_task(task_id, "completed", "", at_ms), "result": answer}

    async def _on_record(self, task_id: str, caller: Caller) -> Json:
        """The state of a task by the journal."""
        document = await self._service.calls.find(task_id, caller, own=True)
        match document["status"]:
            case "running" | "awaiting_approval" as status:
                return {**_task(task_id, "working", status.replace("_", " ")), **_DONE}
            case "canceled":
                return {**_task(task_id, "cancelled"), **_DONE}
            case state:
                failure = await self._service.calls.outcome(task_id, caller)
                if failure is not None:
                    return {**await self._ended(task_id, failure), **_DONE}
                words = f"The call ended as `{state}`. Its result is not kept: see `interlock calls show {task_id}`."
                answer = {"content": [{"type": "text", "text": words}], "isError": False, **_DONE}
                return {**_task(task_id, "completed"), "result": answer, **_DONE}

    async def update(self, task_id: str, responses: Json, caller: Caller) -> Json:
        """Deliver answers to the questions of a task."""
        suspended = self._running.get(task_id)
        if suspended is not None and suspended.belongs_to(caller):
            suspended.answer(responses)
            return _DONE
        state = await self.get(task_id, caller)
        if responses and state["status"] == "working" and self._service.calls.background.task(task_id) is None:
            advice = "send requests about this task to the server that called the tool"
            failure = Failure("E3411", "another server on the store runs this task", resolution=advice)
            raise Fault(failure.row.jsonrpc, failure.message, failure.envelope(no_trace()))
        return _DONE

    async def cancel(self, task_id: str, caller: Caller) -> Json:
        """Cancel the call of a task, on record."""
        try:
            await self._service.calls.cancel(task_id, caller)
        except Failure as failure:
            raise _unknown(failure) from None
        return _DONE


def _task(task_id: str, status: str, message: str = "", at_ms: int = 0) -> Json:
    began_ms = begun_ms(task_id) or 0
    status_message = {"statusMessage": message} if message else {}
    times = {"createdAt": iso(began_ms), "lastUpdatedAt": iso(max(began_ms, at_ms))}
    return {"taskId": task_id, "status": status, **status_message, **times, "ttlMs": TTL_MS, "pollIntervalMs": POLL_MS}


def _raise_error_of_protocol(result: Result) -> None:
    """Raise Fault if the upstream answered with an error of the protocol: the task fails with it, and has no result."""
    failure = result.error
    if failure is not None and failure.code == "E3502" and "code" in (failure.details or {}):
        raise Fault((failure.details or {})["code"], failure.message, failure.envelope(result.trace_id))


def _unknown(failure: Failure) -> Fault:
    code = INVALID_PARAMS if failure.code in ("E3702", "E3004") else failure.row.jsonrpc
    return Fault(code, failure.message, failure.envelope(no_trace()))
