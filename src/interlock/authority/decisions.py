"""Questions to a policy engine, the engine's interface, and the cache of decisions.

A decision is cached under everything it depended on: the caller and token, the tool's digest, and a key that the engine
makes of whatever else it read. It is kept for five minutes at most and never past the token's end. Callers are found by
identity first, since the same caller is mostly the same object, and by their facts otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from interlock.core.record import step

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.call.phases import Decision
    from interlock.contract.contract import Contract

REMEMBER_S = 300
MOST_DECISIONS = 50_000
# A key longer than this is stored as its hash.
LONG_KEY = 256


@step
class Question:
    """The question whether a caller may make a call of a tool."""

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
    """Answers questions. Raises E3205 if it cannot, and caches nothing then.

    An engine may return one decision object for many questions, callers and tools, and should if the answer is the
    same. A decision is never changed once it was returned: another answer is another object.
    """

    def cached_for_every_call(self, caller: Caller, digest: str, now: float, now_ms: int) -> Decision | None:
        """The cached decision for a caller and a tool that holds for every call, if there is one."""
        ...

    def cached(self, question: Question) -> Decision | None:
        """The cached decision for exactly this question, if any."""
        ...

    async def decide(self, question: Question) -> Decision: ...

    def forget(self, subjects: Collection[str] | None) -> None:
        """Drop the cached decisions about these callers; None means all."""
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
    """The subjects of a decision about a caller: the person, the agent, everybody in the chain between them."""
    chain = () if caller.capability is None else caller.capability.links
    return frozenset({caller.id, caller.acting, *(link.subject for link in chain)})


class DecisionSlot:
    """The cached decisions of one caller and one tool."""

    __slots__ = ("decisions", "subjects", "what")

    def __init__(self, subjects: frozenset[str], what: Any) -> None:
        self.subjects = subjects
        self.what = what
        self.decisions: dict[bytes, tuple[Decision, float]] = {}


class Memory:
    """Cache of decisions by caller, tool and what was read. The caller object is tried first: that costs one lookup."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._count = 0
        # Incremented when decisions are dropped; an answer that was requested before that is not cached.
        self.epoch = 0
        self._by_object: dict[tuple[Caller, str], DecisionSlot] = {}
        self._by_facts: dict[tuple[Any, ...], DecisionSlot] = {}
        # Decisions that hold for every call of a caller and a tool, with their end.
        self.for_every_call: dict[tuple[Caller, str], tuple[Decision, float]] = {}

    def slot(self, question: Question) -> DecisionSlot | None:
        """Return the slot of a caller and a tool, if there is one."""
        known = (question.caller, question.digest)
        slot = self._by_object.get(known)
        if slot is None:
            slot = self._by_facts.get((*caller_facts(question.caller), question.digest))
            if slot is not None:
                self._tidy()
                self._by_object[known] = slot
        return slot

    def open(self, question: Question, what: Any) -> DecisionSlot:
        """Make a slot; `what` is anything worth storing beside the decisions."""
        self._tidy()
        caller = question.caller
        slot = DecisionSlot(subjects_of(caller), what)
        self._by_object[(caller, question.digest)] = slot
        self._by_facts[(*caller_facts(caller), question.digest)] = slot
        return slot

    def get(self, slot: DecisionSlot, key: bytes, now_ms: int, every_call: Question | None = None) -> Decision | None:
        """Return the cached decision, as passed to `put`; `every_call` states that it holds for every call."""
        cached = slot.decisions.get(_short(key))
        if cached is None:
            return None
        decision, until = cached
        assert decision.expires_ms is not None
        # Two clocks: the token ends by the wall clock, and setting that back must not extend anything.
        if now_ms >= decision.expires_ms or self._monotonic() >= until:
            return None
        if every_call is not None:
            # By another object for the same caller: a token that is verified again makes one every minute.
            self.for_every_call[(every_call.caller, every_call.digest)] = cached
        return decision

    def put(self, slot: DecisionSlot, key: bytes, decision: Decision, every_call: Question | None = None) -> None:
        """Cache a decision; with `every_call`, for every call of the question's caller and tool."""
        self._tidy()
        self._count += 1
        remembered = (decision, self._monotonic() + REMEMBER_S)
        slot.decisions[_short(key)] = remembered
        if every_call is not None:
            self.for_every_call[(every_call.caller, every_call.digest)] = remembered

    def forget(self, subjects: Collection[str] | None) -> None:
        self.epoch += 1
        self.for_every_call.clear()
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
        self.for_every_call.clear()
        self._count = 0


def _short(key: bytes) -> bytes:
    return key if len(key) <= LONG_KEY else hashlib.sha256(key).digest()


def expiry(question: Question) -> int:
    """Return until when a decision may be relied on: five minutes, or the nearest end of a token."""
    until = question.now_ms + REMEMBER_S * 1000
    capability = question.caller.capability
    return until if capability is None else min(until, *(link.expires * 1000 for link in capability.links))
