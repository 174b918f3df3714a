"""A question to a policy engine, what an engine is, and how decisions are remembered.

A decision is remembered under everything it depended on: who asks and with which token, the tool's digest, and a key
that the engine makes of what else it read. It is kept for five minutes at most and never past the token's end. Callers
are found by identity first, since the same caller is mostly the same object, and by their facts otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from interlock.call.context import Caller
from interlock.call.phases import Decision
from interlock.contract.contract import Contract
from interlock.core.record import step

REMEMBER_S = 300
MOST_DECISIONS = 50_000
# A key longer than this is kept as its hash.
LONG_KEY = 256


@step
class Question:
    """May this caller have this tool do this?"""

    caller: Caller
    contract: Contract
    digest: str
    arguments: Mapping[str, Any]
    operation: str
    session: str
    door: str
    native: str | None
    budgets: tuple[int, int]  # spent, left
    now_ms: int


class Engine(Protocol):
    """Answers questions. Raises E3205 when it cannot, and remembers nothing of that.

    An engine may hand out one decision object for many questions, callers and tools, and should where the answer is the
    same. A decision is never changed once it was handed out: another answer is another object.
    """

    def plain(self, caller: Caller, digest: str, now: float, now_ms: int) -> Decision | None:
        """The decision that is remembered for a caller and a tool whatever the call, if there is such a one."""
        ...

    def cached(self, question: Question) -> Decision | None:
        """The decision that is remembered for exactly this question, if any."""
        ...

    async def decide(self, question: Question) -> Decision: ...

    def forget(self, subjects: Collection[str] | None) -> None:
        """Drop what is remembered of these callers; None means of all."""
        ...

    async def close(self) -> None: ...


# Remembering


def caller_facts(caller: Caller) -> tuple[Any, ...]:
    """Everything about a caller that a decision may depend on."""
    token = caller.capability.digest if caller.capability is not None else None
    return (
        caller.id, caller.agent, caller.tenant, caller.kind, caller.trust, caller.groups, caller.scopes, token,
    )  # fmt: skip


def subjects_of(caller: Caller) -> frozenset[str]:
    """Whoever a decision about a caller is about: the person, the agent, everybody in the chain between them."""
    chain = () if caller.capability is None else caller.capability.links
    return frozenset({caller.id, caller.acting, *(link.subject for link in chain)})


class Slot:
    """What is remembered of one caller and one tool."""

    __slots__ = ("decisions", "subjects", "what")

    def __init__(self, subjects: frozenset[str], what: Any) -> None:
        self.subjects = subjects
        self.what = what
        self.decisions: dict[bytes, tuple[Decision, float]] = {}


class Memory:
    """Decisions by caller, tool and what was read. Found by the caller object first: that costs one look-up."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._count = 0
        # How often things were forgotten; an answer that was asked for before that is not remembered.
        self.epoch = 0
        self._by_object: dict[tuple[Caller, str], Slot] = {}
        self._by_facts: dict[tuple[Any, ...], Slot] = {}
        # Decisions that hold for a caller and a tool whatever the call, until when.
        self.plain: dict[tuple[Caller, str], tuple[Decision, float]] = {}

    def slot(self, question: Question) -> Slot | None:
        """The slot of a caller and a tool, if there is one."""
        known = (question.caller, question.digest)
        slot = self._by_object.get(known)
        if slot is None:
            slot = self._by_facts.get((*caller_facts(question.caller), question.digest))
            if slot is not None:
                self._tidy()
                self._by_object[known] = slot
        return slot

    def open(self, question: Question, what: Any) -> Slot:
        """A new slot; `what` is anything worth keeping beside the decisions."""
        self._tidy()
        caller = question.caller
        slot = Slot(subjects_of(caller), what)
        self._by_object[(caller, question.digest)] = slot
        self._by_facts[(*caller_facts(caller), question.digest)] = slot
        return slot

    def get(self, slot: Slot, key: bytes, now_ms: int, whatever: Question | None = None) -> Decision | None:
        """The decision that is remembered, as `put` was told it; `whatever` says that it holds whatever the call."""
        found = slot.decisions.get(_short(key))
        if found is None:
            return None
        decision, until = found
        assert decision.expires_ms is not None
        # Two clocks: the token ends by the wall's, and a wall clock set back makes nothing last longer.
        if now_ms >= decision.expires_ms or self._monotonic() >= until:
            return None
        if whatever is not None:
            # By another object for the same caller: a token that is verified anew makes one every minute.
            self.plain[(whatever.caller, whatever.digest)] = found
        return decision

    def put(self, slot: Slot, key: bytes, decision: Decision, whatever: Question | None = None) -> None:
        """Remember a decision; where it holds for the question's caller and tool whatever the call, as such."""
        self._tidy()
        self._count += 1
        remembered = (decision, self._monotonic() + REMEMBER_S)
        slot.decisions[_short(key)] = remembered
        if whatever is not None:
            self.plain[(whatever.caller, whatever.digest)] = remembered

    def forget(self, subjects: Collection[str] | None) -> None:
        self.epoch += 1
        self.plain.clear()
        if subjects is None:
            self._clear()
            return
        named = frozenset(subjects)
        for index in (self._by_object, self._by_facts):
            for key in [key for key, slot in index.items() if slot.subjects & named]:
                del index[key]

    def _tidy(self) -> None:
        if self._count >= MOST_DECISIONS or len(self._by_object) >= MOST_DECISIONS:
            self._clear()

    def _clear(self) -> None:
        self._by_object.clear()
        self._by_facts.clear()
        self.plain.clear()
        self._count = 0


def _short(key: bytes) -> bytes:
    return key if len(key) <= LONG_KEY else hashlib.sha256(key).digest()


def expiry(question: Question) -> int:
    """Until when a decision may be relied on: five minutes, or the end of the token that is nearest."""
    until = question.now_ms + REMEMBER_S * 1000
    capability = question.caller.capability
    return until if capability is None else min(until, *(link.expires * 1000 for link in capability.links))
