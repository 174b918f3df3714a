"""Batches: several calls at once, in parallel only where each says that it may.

A call may overlap others only if its tool is declared concurrency-safe, for that very input where the tool decides by
input; reading alone is not enough. Reversible writes and calls that reach outside (`external_io`) must declare besides
that their calls are isolated from one another (`isolated_calls`). Everything else runs alone. Results come in the order
of the requests, whatever order the calls end in, and a call that is cut short for a sibling's sake still gets a result,
labelled synthetic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal

from interlock.call.phases import Request
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.threads import DEFINITIONS
from interlock.core.turns import Turn, Turns
from interlock.gateway.invoke import Gateway
from interlock.registry.catalog import Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """Rules for the other calls when one fails or the user interrupts, and for changes of the context."""

    sibling_failure: Literal["ignore", "cancel_siblings", "cancel_dependent"] = "ignore"
    interrupt: Literal["cancel", "block"] = "cancel"
    concurrent_modifiers: bool = False
    # For cancel_dependent: index of a request -> indexes it depends on.
    depends_on: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


@dataclass(slots=True)
class _Member:
    """One call of a batch."""

    index: int
    request: Request
    task: asyncio.Task[Result] | None = None
    result: Result | None = None

    @property
    def id(self) -> str:
        assert self.request.id is not None
        return self.request.id


async def may_overlap(catalog: Catalog, request: Request) -> bool | None:
    """Whether a call may overlap others. A call whose tool is not found runs alone.

    None: the tool decides by the input. The call is then started with a turn, and asks the tool once hooks and
    reviewers have left the input as it stays.
    """
    try:
        capability = None if request.caller is None else request.caller.capability
        version = await catalog.resolve(request.tool, request.version, capability)
        if not version.at_hand:
            await DEFINITIONS.run(version.compile)
        tool = version.prepared
    except Exception:  # noqa: BLE001 - the call itself says what is wrong
        return False
    manifest = tool.contract.manifest
    if tool.contract.mutation.mutation_class == "write_irreversible":
        return False
    # INVARIANT: a write and a call that reaches outside run alone unless their tool declares isolation.
    if (tool.writes or manifest.external_io) and not manifest.isolated_calls:
        return False
    return manifest.concurrency_safe if tool.handler("concurrent") is None else None


class Batch:
    """Runs one batch."""

    def __init__(self, gateway: Gateway, catalog: Catalog, policy: BatchPolicy) -> None:
        self._gateway = gateway
        self._catalog = catalog
        self._policy = policy
        self._members: list[_Member] = []
        self._turns = Turns()
        self._interrupted = False

    async def run(self, requests: Sequence[Request], interrupt: asyncio.Event | None = None) -> list[Result]:
        """Return all results, in the order of the requests. Setting the event interrupts the batch."""
        self._members = [_Member(i, self._gateway.with_id(request)) for i, request in enumerate(requests)]
        watch = None if interrupt is None else asyncio.create_task(self._watch(interrupt))
        try:
            if interrupt is not None and interrupt.is_set():
                self._interrupt()
            await self._run_all()
        except asyncio.CancelledError:
            for member in self._members:
                if member.task is not None and member.result is None:
                    self._gateway.cancellation.stop(member.id, "canceled")
            if self._turns.active:
                await asyncio.wait(self._turns.active)
            raise
        finally:
            if watch is not None:
                watch.cancel()
        return [self._delivered(member) for member in self._members]

    async def _run_all(self) -> None:
        for member in self._members:
            overlaps = await may_overlap(self._catalog, member.request)
            if overlaps is False:
                await self._turns.clear()
            why = self._doomed(member)
            if why is not None:
                member.result = await self._gateway.decline(member.request, why)
                continue
            turn = Turn() if overlaps is None else None
            task = self._start(member, turn)
            await self._turns.order(task, turn or overlaps is True, lambda member=member: self._doomed(member))
        await self._turns.clear()

    async def _watch(self, interrupt: asyncio.Event) -> None:
        await interrupt.wait()
        self._interrupt()

    def _interrupt(self) -> None:
        """Stop after an interruption: running calls are cancelled or left to finish, as declared; no other starts."""
        self._interrupted = True
        if self._policy.interrupt == "cancel":
            for member in self._members:
                if member.task is not None and member.result is None:
                    self._gateway.cancellation.stop(member.id, "canceled")

    def _start(self, member: _Member, turn: Turn | None) -> asyncio.Task[Result]:
        member.task = task = self._turns.start(self._gateway.invoke(member.request, turn))
        task.add_done_callback(lambda done: self._ended(member, done))
        return task

    def _ended(self, member: _Member, task: asyncio.Task[Result]) -> None:
        result = self._lost(member) if task.cancelled() else task.result()
        member.result = result
        if not result.ok and not result.pending and self._policy.sibling_failure != "ignore":
            for other in self._members:
                if other.task is not None and other.result is None and self._goes_with(other, member):
                    self._gateway.cancellation.stop(other.id, "sibling")

    def _lost(self, member: _Member) -> Result:
        """Return the result of a call whose task was cancelled from outside; its record says the same."""
        return Result(
            invocation_id=member.id,
            tool=member.request.tool,
            state="canceled",
            created_ms=0,
            trace_id=member.request.trace_id or "",
            metadata={},
            error=Failure("E3703", f"{member.request.tool} was cancelled"),
            source="synthetic",
        )

    def _goes_with(self, other: _Member, failed: _Member) -> bool:
        if self._policy.sibling_failure == "cancel_siblings":
            return other is not failed
        return failed.index in self._ancestors(other.index)

    def _ancestors(self, index: int) -> set[int]:
        found: set[int] = set()
        pending = list(self._policy.depends_on.get(index, ()))
        while pending:
            one = pending.pop()
            if one not in found:
                found.add(one)
                pending.extend(self._policy.depends_on.get(one, ()))
        return found

    def _doomed(self, member: _Member) -> Failure | None:
        """Return why a call that has not started must not start any more."""
        if self._interrupted:
            return Failure("E3703", "the batch was interrupted before this call started")
        if self._policy.sibling_failure == "ignore":
            return None
        failed = [m for m in self._members if m.result is not None and not m.result.ok and self._goes_with(member, m)]
        return Failure("E3412", "a sibling failed before this call started") if failed else None

    def _delivered(self, member: _Member) -> Result:
        assert member.result is not None
        overlapped = member.task in self._turns.overlapped
        return (
            member.result.without_modifiers() if overlapped and not self._policy.concurrent_modifiers else member.result
        )
