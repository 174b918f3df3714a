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
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from interlock.api.service import Service
from interlock.call.connector import Interaction
from interlock.call.context import Caller
from interlock.call.mcp import INVALID_PARAMS, Listening
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.data.untrusted import members
from interlock.doors.mcp.calling import Calling, Fault, RunningCall, Wanted, not_made
from interlock.doors.mcp.context import Context
from interlock.doors.mcp.elicitation import QUESTIONS, News, hear
from interlock.doors.mcp.tasks import Tasks, takes_tasks

ANSWER_S = 600.0
MAX_WAITING = 1000
MAX_PER_CALLER = 16
_KEY = "interlock/key"

_Question = tuple[str, Json, "asyncio.Future[Json]"]


class SuspendedCall:
    """One call that its upstream may ask about, across the requests of its client."""

    def __init__(self, owner: str, binding: str, waiting: Counter[str], clock: Clock) -> None:
        self.owner = owner
        self.binding = binding
        self.changed = asyncio.Event()
        self.open: dict[str, _Question] = {}
        # Where the request that waits now hears of progress and log messages. None if none waits.
        self.news: News | None = None
        self.call: RunningCall | _Reading | None = None
        self.wanted: Wanted | None = None
        # Whether the client takes a task, and whether the upstream has made one of the call.
        self.takes_task = False
        self.is_task = False
        # The last progress, and when the call was heard of last.
        self.message = ""
        self.changed_ms = 0
        self._clock = clock
        self._numbers = itertools.count(1)
        self._waiting = waiting

    async def ask(self, method: str, params: Json) -> Json:
        """Wait for the client's answer to a question of the upstream."""
        if self._waiting[self.owner] >= MAX_PER_CALLER or self._waiting.total() >= MAX_WAITING:
            raise Failure("E3411", f"more than {MAX_PER_CALLER} questions of this caller wait for an answer already")
        name = f"question-{next(self._numbers)}"
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self.open[name] = (method, params, answer)
        self._waiting[self.owner] += 1
        self._note()
        try:
            return await answer
        finally:
            self.open.pop(name, None)
            self._waiting[self.owner] -= 1
            if not self._waiting[self.owner]:
                del self._waiting[self.owner]

    def questions(self) -> Json:
        """The questions that wait for an answer."""
        return {name: {"method": method, "params": params} for name, (method, params, _) in self.open.items()}

    def answer(self, responses: Any) -> None:
        """Deliver the client's answers to open questions. Raises Fault if one is malformed; then none is delivered."""
        sent = members(responses)
        given = {name: _checked(name, self.open[name][0], sent[name]) for name in self.open.keys() & sent.keys()}
        for name, value in given.items():
            _, _, answer = self.open.pop(name)
            if not answer.done():
                answer.set_result(value)
        self.changed_ms = self._clock.now_ms()

    def report(self, kind: str, facts: Json) -> None:
        """Pass on progress or a message of the log to the request that waits now."""
        if self.news is not None:
            hear(self.news, kind, facts)
        if kind == "progress":
            self.message, self.changed_ms = str(facts["message"] or self.message), self._clock.now_ms()

    def made_task(self) -> None:
        """Note that the upstream has made a task of the call."""
        self.is_task = True
        self._note()

    def _note(self) -> None:
        self.changed_ms = self._clock.now_ms()
        self.changed.set()

    def answered_by(self, asked: Interaction) -> Interaction:
        """Return the interaction of the call: the client's own, with a way to ask it."""
        asked = replace(asked, ask=self.ask, on_task=self.made_task if self.takes_task else None)
        return replace(asked, on_log=partial(self.report, "message")) if isinstance(asked, Listening) else asked

    def belongs_to(self, caller: Caller) -> bool:
        return self.owner == _owner(caller)


class _Reading:
    """Something of an upstream that is read, and may be given up on."""

    def __init__(self, task: asyncio.Task[Json]) -> None:
        self.task = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to hear it

    def give_up(self) -> None:
        self.task.cancel()


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
        owner = _owner(caller)
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
        """The same for something that is read from an upstream: its content, or the questions about it.

        `what` tells it from others. Raises the Failure of reading it.
        """
        owner = _owner(caller)
        binding = digest([owner, what])
        suspended = self._resumed(asked.answers.get("requestState"), binding, asked.answers.get("inputResponses"))
        if suspended is None:
            suspended = SuspendedCall(owner, binding, self._waiting, self._clock)
            suspended.call = _Reading(asyncio.ensure_future(begin(suspended.answered_by(asked))))
        asked_first = await self._next(suspended, caller)
        assert isinstance(suspended.call, _Reading)
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
                created = self.tasks.create(suspended, caller)
                if created is not None:
                    return created
                suspended.takes_task = False
            if suspended.open:
                return self._suspend(suspended)
        return None

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


def _owner(caller: Caller) -> str:
    return digest([caller.tenant, caller.id, caller.acting])


def _checked(name: str, method: str, response: Any) -> Json:
    try:
        answer = QUESTIONS[method][1].model_validate(response, by_name=False)
    except ValidationError:
        raise Fault(INVALID_PARAMS, f"the answer to `{name}` is not the result of {method}") from None
    return answer.model_dump(by_alias=True, mode="json", exclude_none=True)
