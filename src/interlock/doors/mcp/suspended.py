"""Calls that wait for an answer of a client of the modern era.

Such a client gets a question as the result of its request (`input_required`) and repeats the request with the answer. A
server of the handshake era asks in the middle of a call instead, and waits. So the governed call is kept running
between the two requests: it has one record, one idempotency key and one approval, and its tool runs once.

    first request       begins the call; the upstream asks; the answer holds the questions and a `requestState`
    repeated request    with that state, by the same caller, for the same tool and arguments: delivers the answers and
                        waits for the end of the call, or for its next question
    no request          within ANSWER_S: the call is cancelled, on record, and so is the request to the upstream

The time of the call's contract goes on meanwhile. A state is random, is used once, and works for no other caller or
call; any other state belongs to an upstream of the modern era and is passed on to it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from interlock.call.connector import Interaction
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.doors.mcp.calling import INVALID_PARAMS, Calling, Fault, RunningCall, Wanted, not_made
from interlock.doors.mcp.elicitation import QUESTIONS, News, hear
from interlock.upstreams.mcp.protocol import Listening

ANSWER_S = 600.0
MAX_WAITING = 1000
MAX_PER_CALLER = 16
_KEY = "interlock/key"

_Question = tuple[str, Json, "asyncio.Future[Json]"]


class _Suspended:
    """One call that its upstream may ask about, across the requests of its client."""

    def __init__(self, owner: str, binding: str, waiting: Counter[str]) -> None:
        self.owner = owner
        self.binding = binding
        self.asked = asyncio.Event()
        self.open: dict[str, _Question] = {}
        self.news: News = asyncio.Queue()
        self.call: RunningCall | None = None
        self.wanted: Wanted | None = None
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
        self.asked.set()
        try:
            return await answer
        finally:
            del self.open[name]
            self._waiting[self.owner] -= 1
            if not self._waiting[self.owner]:
                del self._waiting[self.owner]

    def told(self, kind: str, facts: Json) -> None:
        """Pass on progress or a message of the log to the request that waits now."""
        hear(self.news, kind, facts)

    def answered_by(self, asked: Interaction) -> Interaction:
        """Return the interaction of the call: the client's own, with a way to ask it."""
        if isinstance(asked, Listening):
            return replace(asked, ask=self.ask, on_log=partial(self.told, "message"))
        return replace(asked, ask=self.ask)


class SuspendedCalls:
    """The calls of clients of the modern era that can be asked."""

    def __init__(self, calling: Calling) -> None:
        self._calling = calling
        self._held: dict[str, tuple[_Suspended, asyncio.TimerHandle]] = {}
        self._waiting = Counter[str]()
        calling.before_close.append(self.give_up)

    async def call(self, wanted: Wanted, caller: Caller, news: News, *, progress: bool) -> Json:
        """Begin a call, or go on with the one whose questions this request answers. Cancelling this cancels it."""
        assert wanted.interaction is not None
        sent = wanted.interaction.answers
        owner = digest([caller.tenant, caller.id, caller.acting])
        binding = digest([owner, wanted.name, wanted.arguments, wanted.meta.get(_KEY)])
        suspended = self._resumed(sent.get("requestState"), binding, sent.get("inputResponses"))
        if suspended is None:
            suspended = _Suspended(owner, binding, self._waiting)
            suspended.news = news
            suspended.wanted = replace(wanted, interaction=suspended.answered_by(wanted.interaction))
            on_progress = partial(suspended.told, "progress") if progress else None
            suspended.call = await self._calling.begin(suspended.wanted, caller, on_progress)
        suspended.news = news
        return await self._next(suspended)

    def _resumed(self, state: Any, binding: str, responses: Any) -> _Suspended | None:
        """Return the call that a state belongs to, with the answers delivered; None if it is no state of ours.

        Raises Fault if an answer is malformed; the client may then send it again.
        """
        held = self._held.get(state) if isinstance(state, str) else None
        if held is None or held[0].binding != binding:
            return None
        suspended, timer = held
        given: list[tuple[asyncio.Future[Json], Json]] = []
        for name, (method, _, answer) in suspended.open.items():
            if isinstance(responses, dict) and name in responses:
                given.append((answer, _checked(name, method, responses[name])))
        timer.cancel()
        del self._held[state]
        for answer, value in given:
            answer.set_result(value)
        # Questions that were not answered are asked again, unless the call has ended meanwhile.
        if len(given) < len(suspended.open):
            suspended.asked.set()
        return suspended

    async def _next(self, suspended: _Suspended) -> Json:
        """Wait until the call ends or asks something."""
        call, wanted = suspended.call, suspended.wanted
        assert call is not None
        assert wanted is not None
        while not call.task.done():
            asked = asyncio.ensure_future(suspended.asked.wait())
            try:
                await asyncio.wait({call.task, asked}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                call.give_up()
                raise
            finally:
                asked.cancel()
            suspended.asked.clear()
            if suspended.open and not call.task.done():
                return self._suspend(suspended)
        try:
            result = call.task.result()
        except Failure as failure:
            return not_made(wanted, failure)
        return await self._calling.answer(wanted, result)

    def _suspend(self, suspended: _Suspended) -> Json:
        state = secrets.token_urlsafe(32)
        timer = asyncio.get_running_loop().call_later(ANSWER_S, self._expire, state)
        self._held[state] = (suspended, timer)
        asked = {name: {"method": method, "params": params} for name, (method, params, _) in suspended.open.items()}
        return {"resultType": "input_required", "inputRequests": asked, "requestState": state}

    def _expire(self, state: str) -> None:
        suspended, timer = self._held.pop(state)
        timer.cancel()
        if suspended.call is not None:
            suspended.call.give_up()

    def give_up(self) -> None:
        """Cancel every call that waits for its client, which cannot come back any more."""
        for state in list(self._held):
            self._expire(state)


def _checked(name: str, method: str, response: Any) -> Json:
    try:
        answer = QUESTIONS[method][1].model_validate(response, by_name=False)
    except ValidationError:
        raise Fault(INVALID_PARAMS, f"the answer to `{name}` is not the result of {method}") from None
    return answer.model_dump(by_alias=True, mode="json", exclude_none=True)
