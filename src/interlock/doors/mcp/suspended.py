"""Calls of clients of the modern era that outlast one request: they wait for an answer, or become tasks.

Such a client gets a question as the result of its request (`input_required`) and repeats the request with the answer. A
server of the handshake era asks in the middle of a call instead, and waits. So the governed call is kept running
between the two requests: it has one record, one idempotency key and one approval, and its tool runs once.

    first request       begins the call; the upstream asks; the answer holds the questions and a `requestState`
    repeated request    with that state, by the same caller, for the same tool and arguments: delivers the answers and
                        waits for the end of the call, or for its next question
    no request          within ANSWER_S: the call is cancelled, on record, and so is the request to the upstream

A prompt or a resource of an upstream that asks is kept in the same way while it is read. A call of a client that takes
tasks becomes one after some time, see `tasks`; its questions are then those of the task.

The time of the call's contract goes on meanwhile. A state is random, is used once, and works for no other caller or
call; any other state belongs to an upstream of the modern era and is passed on to it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from interlock.api.service import Service
from interlock.call.connector import Interaction
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.doors.mcp.calling import Calling, RunningCall, Wanted, not_made
from interlock.doors.mcp.context import Context
from interlock.doors.mcp.elicitation import News
from interlock.doors.mcp.suspended_call import Reading, SuspendedCall, owner_of
from interlock.doors.mcp.tasks import Tasks, takes_tasks

ANSWER_S = 600.0
_KEY = "interlock/key"


class SuspendedCalls:
    """The calls of clients of the modern era that can be asked, or take tasks."""

    def __init__(self, service: Service, calling: Calling) -> None:
        self._calling = calling
        self._clock = service.app.clock
        self.tasks = Tasks(service, calling)
        self._held: dict[str, tuple[SuspendedCall, asyncio.TimerHandle]] = {}
        self._waiting = Counter[str]()
        calling.before_close.append(self.give_up)

    @staticmethod
    def may_outlast(ctx: Context, wanted: Wanted) -> bool:
        """Whether a call may outlast its request: its client takes questions, or a task, as the answer."""
        asked = wanted.interaction
        return (asked is not None and asked.calls_again and bool(asked.capabilities)) or takes_tasks(ctx)

    async def call(self, ctx: Context, wanted: Wanted, caller: Caller, news: News, *, progress: bool) -> Json:
        """Begin a call, or go on with the one whose questions this request answers. Cancelling this cancels it."""
        takes_task = takes_tasks(ctx)
        asked = wanted.interaction or Interaction(calls_again=True)
        sent = asked.answers
        owner = owner_of(caller)
        binding = digest([owner, wanted.name, wanted.arguments, wanted.meta.get(_KEY)])
        suspended = self._resumed(sent.get("requestState"), binding, sent.get("inputResponses"))
        if suspended is None:
            suspended = SuspendedCall(owner, binding, self._waiting, self._clock)
            suspended.news, suspended.takes_task = news, takes_task
            suspended.wanted = replace(wanted, interaction=suspended.answered_by(asked))
            on_progress = partial(suspended.report, "progress") if progress or takes_task else None
            try:
                suspended.call = await self._calling.begin(suspended.wanted, caller, on_progress)
            except Failure as failure:
                return not_made(suspended.wanted, failure)
        suspended.news, suspended.takes_task = news, takes_task
        asked_first = await self._next(suspended, caller)
        if asked_first is not None:
            return asked_first
        assert isinstance(suspended.call, RunningCall)
        assert suspended.wanted is not None
        try:
            result = suspended.call.task.result()
        except Failure as failure:
            return not_made(suspended.wanted, failure)
        return await self._calling.answer(suspended.wanted, result)

    async def read(
        self,
        what: list[Any],
        asked: Interaction,
        caller: Caller,
        begin: Callable[[Interaction], Coroutine[Any, Any, Json]],
    ) -> Json:
        """Like `call`, for a resource or prompt of an upstream: returns its content, or questions to the client.

        `what` identifies what is read. Raises the Failure of reading it.
        """
        owner = owner_of(caller)
        binding = digest([owner, what])
        suspended = self._resumed(asked.answers.get("requestState"), binding, asked.answers.get("inputResponses"))
        if suspended is None:
            suspended = SuspendedCall(owner, binding, self._waiting, self._clock)
            suspended.call = Reading(asyncio.ensure_future(begin(suspended.answered_by(asked))))
        asked_first = await self._next(suspended, caller)
        assert isinstance(suspended.call, Reading)
        return suspended.call.task.result() if asked_first is None else asked_first

    def _resumed(self, state: Any, binding: str, responses: Any) -> SuspendedCall | None:
        """Return the call that a state belongs to, with the answers delivered; None if it is no state of ours.

        Raises Fault if an answer is malformed; the client may then send it again.
        """
        held = self._held.get(state) if isinstance(state, str) else None
        if held is None or held[0].binding != binding:
            return None
        suspended, timer = held
        suspended.answer(responses)
        timer.cancel()
        del self._held[state]
        # Questions that were not answered are asked again, unless the call has ended meanwhile.
        if suspended.open:
            suspended.changed.set()
        return suspended

    async def _next(self, suspended: SuspendedCall, caller: Caller) -> Json | None:
        """Wait until the call ends (None), asks something, or becomes a task."""
        call = suspended.call
        assert call is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + self.tasks.after_s
        while not call.task.done():
            changed = asyncio.ensure_future(suspended.changed.wait())
            left = max(0.0, until - loop.time()) if suspended.takes_task else None
            try:
                await asyncio.wait({call.task, changed}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                call.give_up()
                raise
            finally:
                changed.cancel()
            suspended.changed.clear()
            if call.task.done():
                break
            if suspended.takes_task and (suspended.is_task or loop.time() >= until):
                suspended.takes_task = False
                created = await self._task_of(suspended, caller)
                if created is not None:
                    return created
            if suspended.open:
                return self._suspend(suspended)
        return None

    async def _task_of(self, suspended: SuspendedCall, caller: Caller) -> Json | None:
        try:
            return await self.tasks.create(suspended, caller)
        except asyncio.CancelledError:
            assert suspended.call is not None
            suspended.call.give_up()
            raise

    def _suspend(self, suspended: SuspendedCall) -> Json:
        state = secrets.token_urlsafe(32)
        timer = asyncio.get_running_loop().call_later(ANSWER_S, self._expire, state)
        self._held[state] = (suspended, timer)
        return {"resultType": "input_required", "inputRequests": suspended.questions(), "requestState": state}

    def _expire(self, state: str) -> None:
        suspended, timer = self._held.pop(state)
        timer.cancel()
        if suspended.call is not None:
            suspended.call.give_up()

    def give_up(self) -> None:
        """Cancel every call that waits for its client, which cannot come back any more."""
        for state in list(self._held):
            self._expire(state)
