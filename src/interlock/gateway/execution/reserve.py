"""Reserve the idempotency key of a write: its intent is durable before it runs, and it runs once."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, cast

from interlock.contract.effects import predict
from interlock.core.errors import Failure
from interlock.gateway import idempotency
from interlock.store import records
from interlock.store.idempotency import NewKey, new_key

if TYPE_CHECKING:
    from interlock.call.phases import Call, Granted, Ran, Requested
    from interlock.core.clock import Clock
    from interlock.gateway.allowances import Allowances
    from interlock.gateway.observe import Observer
    from interlock.gateway.persistence.storage import CallStorage
    from interlock.gateway.results.outputs import Outputs
    from interlock.gateway.results.unrecorded import UnrecordedOutcomes
    from interlock.settings import Settings
    from interlock.store.instance import Instance
    from interlock.store.port import Store, Transaction

# A holder of a key in another process is polled at this interval.
BUSY_POLL_S = 0.02


class Reservations:
    """Reserves idempotency keys, and uses up what calls are allowed by (approvals, budgets, rate limits)."""

    def __init__(
        self,
        *,
        journal: Store,
        clock: Clock,
        settings: Settings,
        instance: Instance,
        observer: Observer,
        allowances: Allowances,
        storage: CallStorage,
        outputs: Outputs,
        unrecorded: UnrecordedOutcomes,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._settings = settings
        self._instance = instance
        self._observer = observer
        self._allowances = allowances
        self._storage = storage
        self._outputs = outputs
        self._unrecorded = unrecorded
        # Calls of this process that hold a key, each with a future if others wait for it.
        self._holders: dict[str, asyncio.Future[None] | None] = {}

    async def reserve(self, granted: Granted) -> Ran | None:
        """Make the intent durable and reserve the key. Returns a replay if the call has been made already."""
        call, contract, request = granted, granted.tool.contract, granted.request
        assert request.caller is not None
        more = call.more
        predicted = more.predicted = more.foreseen or predict(contract.mutation.effects, granted.input)
        call.move("queued")
        if self._observer.audience:
            self._observer.emit("tool.invocation.queued", call)
        window_s = max(granted.tool.window_s, self._settings.min_window_s)
        if request.operation == "compensate":
            window_s = max(window_s, self._settings.undo_days * 86_400)
        # Whether the key is the caller's own, by which a ticket is found as well.
        theirs = request.key and request.key != request.identity and more.collects is None
        ticket_scope = None if theirs else idempotency.ticket_scope(request, contract, call.input_hash)
        scope = more.collects or idempotency.scope_for(request, contract, call.input_hash, request.key, call.id)
        wanted = NewKey(
            scope, contract.address, contract.version, request.key or "", request.caller.id, call.input_hash, call.id,
            self._instance.id, window_s * 1000,
        )  # fmt: skip
        shown = self._outputs.writable(call, predicted) if more.private else predicted
        intent = records.intent(call, self._clock.now_ms(), shown, window_s)
        if not self._storage.outcomes.box.in_hand:
            self._storage.outcomes.check_key()
        if self._unrecorded.waiting:
            # The key may be held by a call that has ended and could not be recorded: nobody would ever release it.
            await asyncio.shield(self._unrecorded.write_all())
        early, check, uses = None, None, more.uses or ()
        if request.operation != "compensate":  # INVARIANT: a quota stops neither a replay nor an undo.
            payloads = self._storage.payloads
            check = partial(payloads.check_room, caller=request.caller, size=1)
            if not uses:
                early = new_key(wanted, ticket_scope or scope, payloads.quotas(request.caller))
        unit = idempotency.reserve(
            wanted, intent, self._instance.alive, self._storage.outcomes.check_key,
            ticket_scope=ticket_scope, early=early, uses=uses, check=check,
        )  # fmt: skip
        while True:
            try:
                found = await self._journal.submit(unit, early)
            except asyncio.CancelledError:
                # The unit runs nevertheless, and before the one that is submitted now.
                self._give_back_key(call, wanted)
                raise
            if isinstance(found, idempotency.Reserved):
                more.scope = wanted.scope
                more.noted = more.used = True
                self._holders[call.id] = None
                return None
            if isinstance(found, idempotency.Replay):
                self._observer.metrics["IDEMPOTENT_REPLAY"] += 1
                granted.output, more.source = found, "replay"
                return cast("Ran", granted)
            await self._wait_for(found.call, granted)

    async def use_up(self, call: Call) -> None:
        """Use up what a call without an idempotency key is allowed by."""
        uses = call.more.uses or ()
        using = self._journal.submit(lambda transaction: idempotency.run_all(transaction, uses))
        try:
            await asyncio.shield(using)
        except asyncio.CancelledError:
            using.add_done_callback(lambda used: self._give_back_uses(call, used))
            raise
        call.extend().used = True

    def release(self, call: Call) -> None:
        """Wake the calls that wait for the key of a call that is closed."""
        holder = self._holders.pop(call.id, None)
        if holder is not None and not holder.done():
            holder.set_result(None)

    def _give_back_key(self, call: Call, wanted: NewKey) -> None:
        """Give back the key and the budget of a call whose caller was cancelled, if it got them. Its approval stays
        used.
        """

        def unit(transaction: Transaction) -> None:
            if not idempotency.is_open(transaction, wanted.scope, wanted.call):
                return
            idempotency.settle(transaction, wanted.scope, wanted.call, "released", None)
            if not transaction.has("closed", wanted.call):
                # Its intent is on record and its end is not: the record says why its key is free.
                transaction.append("settled", wanted.call, idempotency.given_back(call, wanted, transaction.now_ms))
            self._allowances.give_back(transaction, call)

        self._unrecorded.commit_or_retry(call, unit)

    def _give_back_uses(self, call: Call, used: asyncio.Future[None]) -> None:
        """Give back the budget of a call without a key whose caller was cancelled."""
        if not used.cancelled() and used.exception() is None:
            self._unrecorded.commit_or_retry(call, lambda transaction: self._allowances.give_back(transaction, call))

    async def _wait_for(self, other: str, requested: Requested) -> None:
        """Wait for the call that holds the key, within the deadline of this call."""
        left = requested.deadline - self._clock.monotonic()
        if left <= 0:
            details = {"invocation_id": other}
            raise Failure("E3408", "the same call is still running", retry_after_ms=250, details=details)
        here = None
        if other in self._holders:
            here = self._holders[other] = self._holders[other] or asyncio.get_running_loop().create_future()
        try:
            # A holder in this process wakes its waiters; one in another process is polled.
            async with asyncio.timeout(left if here is not None else min(left, BUSY_POLL_S)):
                await (asyncio.shield(here) if here is not None else asyncio.sleep(left))
        except TimeoutError:
            pass
