"""Tasks of a server: the extension `io.modelcontextprotocol/tasks` of 2026-07-28.

A server that takes long answers a call with a handle (`resultType: "task"`). The task is polled until it ends, and its
end is the answer to the call, so the rest of Interlock sees one long call:

    working           its message is passed on as progress
    input_required    each question is put to the client of the call, once; each answer is sent as soon as it is there
    completed         the result of the call
    failed            the error of the call, as if the server had answered with it
    cancelled         the call fails

A task outlives a connection: a poll that does not get through is repeated. A call that is cancelled, runs out of time
or cannot go on cancels its task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from interlock.call.connector import RemoteCall
from interlock.call.mcp import QUESTIONS
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.data.untrusted import members, text_in
from interlock.upstreams import wire
from interlock.upstreams.mcp.protocol import RpcError
from interlock.upstreams.mcp.questions import Questions

# How often a task is polled: no more often, by default, no less often.
POLL_S = (0.05, 1.0, 60.0)
MAX_LOST_POLLS = 5
MAX_ID = 1024
MAX_QUESTIONS = 100
_SENT: Json = {"sent": True}
_UNFINISHED = ("working", "input_required")

# Sends a request about a task and returns the answer.
Send = Callable[[str, Json], Awaitable[Json]]


async def follow(
    created: Json, send: Send, forsake: Callable[[str], None], call: RemoteCall, questions: Questions
) -> Json:
    """Return the result of a task that a server created for a call.

    Raises RpcError if the task failed. `forsake` is called with its id if the task is left before its end.
    """
    name = created.get("taskId")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID:
        raise Failure("E3502", "the upstream created a task without an id", details=_SENT)
    if call.interaction.on_task is not None:
        call.interaction.on_task()
    task = _Task(name, send, call, questions)
    state = created
    try:
        while state.get("status") in _UNFINISHED:
            task.tell(state)
            task.ask(state)
            await task.pause(state)
            state = await task.poll()
    except BaseException:
        forsake(name)
        raise
    finally:
        task.close()
    return _ended(state, call)


class _Task:
    """One task that is under way."""

    def __init__(self, name: str, send: Send, call: RemoteCall, questions: Questions) -> None:
        self._name = name
        self._send = send
        self._call = call
        self._questions = questions
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._last_message = ""
        self._lost = 0

    def tell(self, state: Json) -> None:
        """Pass on the message of the task as progress, if it is another."""
        message = text_in(state.get("statusMessage"))
        if message and message != self._last_message and self._call.progress is not None:
            self._call.progress({"message": wire.excerpt(message, self._call), "percent": None})
        self._last_message = message

    def ask(self, state: Json) -> None:
        """Put the questions of the task to the client that were not put before. INVARIANT: each is put once."""
        if state.get("status") != "input_required":
            return
        for name, question in members(state.get("inputRequests")).items():
            if name in self._asked:
                continue
            method, params = members(question).get("method"), members(question).get("params", {})
            if method not in QUESTIONS or not isinstance(params, dict) or len(self._asked) >= MAX_QUESTIONS:
                raise Failure("E3502", "the upstream's task asks something that no client answers", details=_SENT)
            self._asked[name] = asyncio.create_task(self._answer(name, str(method), cast("Json", params)))

    async def _answer(self, name: str, method: str, params: Json) -> None:
        try:
            answer = await self._questions.put(method, params)
        except RpcError as error:
            # A task has no form for a question without answer.
            failure = Failure("E3411", f"the upstream was given no answer: {error.message}", details=_SENT)
            raise self._questions.explain(failure) from None
        await self._send("tasks/update", {"taskId": self._name, "inputResponses": {name: answer}})

    async def pause(self, state: Json) -> None:
        """Wait until the next poll: as long as the server asks for, or until a question was answered."""
        least, default, most = POLL_S
        wanted = state.get("pollIntervalMs")
        pause = wanted / 1000 if isinstance(wanted, int) and wanted > 0 else default
        left = self._call.left_s
        if left <= 0:
            raise Failure("E3503", "the upstream's task did not end in time", details=_SENT)
        pause = min(max(least, pause), most, left)
        open_ = {one for one in self._asked.values() if not one.done()}
        if open_:
            await asyncio.wait(open_, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(pause)
        for one in self._asked.values():
            if one.done():
                one.result()

    async def poll(self) -> Json:
        """Return the state of the task: `working` if this poll was lost on the way."""
        try:
            state = await self._send("tasks/get", {"taskId": self._name})
        except Failure as failure:
            self._lost += 1
            if self._lost > MAX_LOST_POLLS or failure.code not in ("E3502", "E3503"):
                raise Failure(failure.code, failure.message, details=_SENT) from None
            return {"status": "working"}
        except RpcError as error:
            words = f"the upstream lost its task: {wire.excerpt(error.message, self._call)}"
            raise Failure("E3502", words, details={**_SENT, "code": error.code}) from None
        self._lost = 0
        return state

    def close(self) -> None:
        """Take back the questions that were not answered."""
        for one in self._asked.values():
            if one.cancel():
                continue
            if not one.cancelled():
                one.exception()  # retrieved, because nobody may be left to hear it


def _ended(state: Json, call: RemoteCall) -> Json:
    status = state.get("status")
    if status == "completed":
        return members(state.get("result"))
    if status == "failed":
        error = members(state.get("error"))
        code: Any = error.get("code")
        raise RpcError(code if isinstance(code, int) else 0, text_in(error.get("message")), error.get("data"))
    if status == "cancelled":
        why = wire.excerpt(text_in(state.get("statusMessage")), call)
        raise Failure("E3401", f"the upstream cancelled its task{f': {why}' if why else ''}", details=_SENT)
    raise Failure("E3502", "the upstream's task is in a state that the protocol does not have", details=_SENT)
