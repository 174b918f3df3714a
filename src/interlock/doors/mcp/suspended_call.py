"""One call of a client of the modern era that outlasts a request."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from interlock.call.connector import Interaction
from interlock.call.context import Caller
from interlock.call.mcp import INVALID_PARAMS, Listening
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.data.untrusted import members
from interlock.doors.mcp.calling import Fault, RunningCall, Wanted
from interlock.doors.mcp.elicitation import QUESTIONS, News, hear

MAX_WAITING = 1000
MAX_PER_CALLER = 16
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
        self.call: RunningCall | Reading | None = None
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
        return self.owner == owner_of(caller)


def owner_of(caller: Caller) -> str:
    return digest([caller.tenant, caller.id, caller.acting])


class Reading:
    """Something of an upstream that is read, and may be given up on."""

    def __init__(self, task: asyncio.Task[Json]) -> None:
        self.task = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to hear it

    def give_up(self) -> None:
        self.task.cancel()


def _checked(name: str, method: str, response: Any) -> Json:
    try:
        answer = QUESTIONS[method][1].model_validate(response, by_name=False)
    except ValidationError:
        raise Fault(INVALID_PARAMS, f"the answer to `{name}` is not the result of {method}") from None
    return answer.model_dump(by_alias=True, mode="json", exclude_none=True)
