"""Calls that other processes on this data directory run: which process it is, and how to ask it to end them.

A process stops its own calls. For a call of another process it stores a request; every process periodically looks for
requests addressed to it (`cancel_requested`), and its answer is the call's `cancel` record, as always. A request that
no process takes up, because that process does no background work or has died meanwhile, is withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson

from interlock.call.phases import REASONS, Reason
from interlock.store import facts, idempotency, ledger
from interlock.store.calls import BEGUN
from interlock.store.instance import Instance
from interlock.store.port import Reader, Store, Unit

EVERY_S = 0.05
TRIES = 100
_REQUEST = "cancel:"


class RemoteCancel:
    """Cancels calls of other processes on the same data directory."""

    def __init__(self, journal: Store, instance: Instance) -> None:
        self._journal = journal
        self._instance = instance

    async def runs(self, call_id: str) -> str | None:
        """Return the other process that runs a call now, if there is one and it is alive."""
        me, alive = self._instance.id, self._instance.alive

        def work(reader: Reader) -> str | None:
            runners = idempotency.runners(reader, call_id, BEGUN + call_id)
            return next((owner for owner in runners if owner != me and alive(owner)), None)

        return await self._journal.read(work)

    async def ended(self, call_id: str) -> None:
        """Wait until no other process runs the call any more."""
        while await self.runs(call_id) is not None:  # noqa: ASYNC110 - only the store tells that another process ended
            await asyncio.sleep(EVERY_S)

    async def cancel(self, call_id: str, owner: str, reason: Reason = "interruption") -> str:
        """Ask the process that runs a call to end it. Returns its answer, or `unsupported` if it gives none."""
        before = len(await self._answers(call_id))
        await self._journal.commit(_request(call_id, owner, reason))
        for _ in range(TRIES):
            answers = (await self._answers(call_id))[before:]
            if answers:
                return str(orjson.loads(answers[0])["answer"])
            if await self.runs(call_id) is None:
                answers = (await self._answers(call_id))[before:]  # it may have answered and ended between two looks
                if answers:
                    return str(orjson.loads(answers[0])["answer"])
                break
            await asyncio.sleep(EVERY_S)
        await self._journal.commit(_take(call_id, owner))
        return "finished" if await self.runs(call_id) is None else "unsupported"

    async def _answers(self, call_id: str) -> list[bytes]:
        return await self._journal.read(lambda reader: ledger.of_kind(reader, call_id, "cancel"))

    async def cancel_requested(self, cancel: Callable[[str, Reason], str]) -> None:
        """Cancel the calls that other processes asked this one to cancel."""
        mine = self._instance.id
        asked = [_request_value(mine, reason) for reason in REASONS]
        requests = await self._journal.read(lambda reader: facts.between_with(reader, _REQUEST, "cancel;", asked))
        for name, value in requests:
            call_id = name.removeprefix(_REQUEST)
            if await self._journal.commit(_take(call_id, mine)):
                cancel(call_id, list(REASONS)[asked.index(value)])


def _request_value(owner: str, reason: Reason) -> str:
    """Return who requested a cancellation and why. A process of an older version sends only the former."""
    return owner if reason == "interruption" else f"{owner} {reason}"


def _request(call_id: str, owner: str, reason: Reason) -> Unit[None]:
    return lambda transaction: facts.put(transaction, _REQUEST + call_id, _request_value(owner, reason))


def _take(call_id: str, owner: str) -> Unit[bool]:
    """Return a unit that takes up or withdraws a request. It returns whether the request was still there."""
    value = [_request_value(owner, reason) for reason in REASONS]
    return lambda transaction: facts.remove_with(transaction, _REQUEST + call_id, value)
