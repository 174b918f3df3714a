"""Allowances: what a call uses up besides its idempotency key, which is rate limits, budgets and uses of a token.

All of them are used in the transaction that makes the call's intent durable, together with its key and its approval, so
that concurrent calls, in one process or several, cannot use the same allowance. Amounts that were set aside are settled
in the write that closes the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlock.authority import budgets
from interlock.authority.budgets import Allowance, Booked, Overrun
from interlock.call.cost import FREE, Cost, Meter
from interlock.core.amounts import MILLION, millionths
from interlock.core.errors import Failure
from interlock.resilience import limits
from interlock.resilience.limits import Bucket, LoopWatch
from interlock.store import grants

if TYPE_CHECKING:
    from interlock.call.allowances import Budget
    from interlock.call.capability import Capability
    from interlock.call.context import Caller
    from interlock.call.phases import Call, Checked
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.gateway.observe import Observer
    from interlock.settings import Settings
    from interlock.store.port import Store, Transaction


class Allowances:
    """Uses up allowances, and settles what calls cost."""

    def __init__(self, *, journal: Store, settings: Settings, observer: Observer, owner: str, clock: Clock) -> None:
        self._journal = journal
        self._settings = settings
        self._observer = observer
        self._owner = owner
        self.loops = LoopWatch(settings.loops)
        self._now_ms = clock.now_ms
        self.metered = settings.prices.metered or bool(settings.budgets)
        self.active = bool(settings.budgets or settings.rate_limits or self.metered)

    def add_uses(self, checked: Checked, caller: Caller) -> None:
        """Add what the call will use up to the actions that run with its intent. One of them may refuse the call."""
        call, services = checked, _services(checked)
        uses: list[Callable[[Transaction], None]] = [*(call.more.uses or ())]
        buckets = self._buckets(checked, caller)
        if buckets:
            uses.append(lambda transaction: limits.admit(transaction, buckets))
        if heeds_suspension(checked):
            uses.append(lambda transaction: limits.check_suspended(transaction, services))
        if not call.request.dry_run:
            if caller.capability is not None:
                uses.extend(uses_of(caller.capability))
            held = self._budgets(call, caller, checked.tool.contract.address)
            if held:
                amount = _estimate(checked)
                uses.append(lambda transaction: budgets.hold(transaction, call.id, self._owner, held, amount))
        if self.metered:
            call.extend().meter = Meter()
        call.extend().uses = uses or None

    def check_rate(self, transaction: Transaction, checked: Checked, caller: Caller) -> bool:
        """Refuse (E3003, E3504) a call that a rate limit or its service does not admit now. Writes nothing.

        Returns whether there is a limit.
        """
        buckets = self._buckets(checked, caller)
        limits.check(transaction, buckets)
        limits.check_suspended(transaction, _services(checked))
        return bool(buckets)

    def check_budgets(self, transaction: Transaction, checked: Checked, caller: Caller) -> bool:
        """Refuse (E3210) a call for which a budget has no room now. Writes nothing. Returns whether there is one."""
        covering = self._budgets(checked, caller, checked.tool.contract.address)
        budgets.check(transaction, covering, _estimate(checked))
        return bool(covering)

    async def spent_and_left(self, call: Call, caller: Caller) -> tuple[int, int]:
        """Return what is spent and what is left of the tightest budget that covers a call, for policies."""
        assert call.tool is not None
        allowances = self._budgets(call, caller, call.tool.contract.address)
        if not allowances:
            return 0, 0
        used = await self._journal.read(lambda reader: [budgets.used(reader, one) for one in allowances])
        left = ((spent, one.limit - spent) for spent, one in zip(used, allowances, strict=True))
        return min(left, key=lambda one: one[1])

    def _buckets(self, checked: Checked, caller: Caller) -> tuple[Bucket, ...]:
        tool, services = checked.tool.contract.address, _services(checked)
        return limits.buckets(self._settings.rate_limits, caller=caller, tool=tool, services=services)

    def _budgets(self, call: Call, caller: Caller, tool: str) -> tuple[Allowance, ...]:
        rules: list[Budget] = list(self._settings.budgets)
        found = budgets.budget_keys(
            rules, caller=caller, session=billed_session(call), task=task_of(call), tool=tool, now_ms=call.started_ms
        )
        capability = caller.capability
        if capability is None:
            return found
        capped = (link for link in capability.links if "max_cost" in link.constraints)
        return found + tuple(
            Allowance(f"token:{link.jti}", millionths(link.constraints["max_cost"]), link.expires * 1000, "the token")
            for link in capped
        )

    def counts(self, call: Call) -> bool:
        """Whether the call's cost is to be stored."""
        if call.tool is None:
            return False
        if self.metered or (call.more.context is not None and call.more.context.costs is not FREE):
            return True
        caller = call.request.caller
        capability = None if caller is None else caller.capability
        return capability is not None and capability.capped

    def cost(self, call: Call) -> Cost:
        """Return what a call has cost so far: what its tool reported, and what was metered."""
        total = FREE if call.more.context is None else call.more.context.costs
        if call.more.meter is not None:
            total += call.more.meter.cost(self._settings.prices)
        if call.more.approval is not None and self._settings.prices.human_review:
            total += Cost(human_review=millionths(self._settings.prices.human_review))
        return total

    def charge(self, call: Call, metadata: Json, extra: Json) -> Cost:
        """Add what a call whose cost `counts` has cost to its result and to its record."""
        cost = self.cost(call)
        metadata["cost"] = cost.total / MILLION
        metadata["cost_parts"] = extra["cost"] = cost.document()
        return cost

    def give_back(self, transaction: Transaction, call: Call) -> None:
        """Free what was set aside for a call that will not run."""
        if self.counts(call):
            self.settle(transaction, call, FREE)

    def settle(self, transaction: Transaction, call: Call, cost: Cost | None) -> Booked:
        """Replace what the call set aside with what it cost, in the write that closes it."""
        if cost is None:
            return Booked()
        caller = call.request.caller
        assert caller is not None
        assert call.tool is not None
        held = self._budgets(call, caller, call.tool.contract.address)
        return budgets.settle(
            transaction, call.id, cost, held, task=task_of(call), session=billed_session(call), tenant=caller.tenant
        )

    def keep(self, transaction: Transaction, call: Call) -> Booked:
        """Count what a call set aside as spent, because its cost is not known."""
        if call.tool is None or call.request.caller is None:
            return Booked()
        amount = budgets.held_for(transaction, call.id)
        return self.settle(transaction, call, Cost(compute=amount) if call.launched else FREE)

    def note_limit(self, call: Call, failure: Failure) -> None:
        """Do not call a service again before the time that it asked for has passed."""
        service = None if call.tool is None else call.tool.contract.manifest.external_service
        if failure.code == "E3504" and failure.retry_after_ms and service is not None and not call.more.borrowed:
            self._journal.post(limits.suspend(service, self._now_ms() + failure.retry_after_ms))

    def alert_overrun(self, call: Call, overrun: Sequence[Overrun]) -> None:
        """Alert when a call cost more than a budget had left."""
        for one in overrun:
            self._observer.alert("BUDGET_OVERRUN", call, **one.document())


def heeds_suspension(checked: Checked) -> bool:
    """Whether the call checks, together with its intent, if its service asked not to be called for a while.

    A read has no intent; it checks when it is let through to the service (`resilience.services`).
    """
    requested = checked
    return requested.tool.service is not None and (requested.tool.writes or requested.request.dry_run)


def task_of(call: Call) -> str:
    """Return the task of a call: the one it names, or the outermost call that it belongs to."""
    return call.request.task or call.id


def billed_session(call: Call) -> str:
    """Return the session whose budget a call counts in: that of the outermost call."""
    return call.request.session if call.request.billed_to is None else call.request.billed_to


def _services(checked: Checked) -> tuple[str, ...]:
    service = checked.tool.service
    return () if service is None else (service,)


def _estimate(checked: Checked) -> int:
    return millionths(checked.tool.contract.manifest.estimated_cost or 0.0)


def check_uses(transaction: Transaction, capability: Capability) -> None:
    """Refuse (E3206) a call by a token that is used up. Writes nothing."""
    for link in capability.links:
        if "max_uses" in link.constraints:
            _check_use(transaction, link.jti, link.constraints["max_uses"], 1)


def uses_of(capability: Capability, calls: int = 1) -> list[Callable[[Transaction], None]]:
    """Return one action per link of the chain that limits its uses. Approving a call uses a token too."""
    return [
        lambda transaction, jti=link.jti, most=link.constraints["max_uses"]: _use(transaction, jti, most, calls)
        for link in capability.links
        if "max_uses" in link.constraints
    ]


def _use(transaction: Transaction, jti: str, most: int, calls: int) -> None:
    # INVARIANT: a token for n calls is used at most n times, by all processes together.
    _check_use(transaction, jti, most, calls)
    grants.add_uses(transaction, jti, calls)


def _check_use(transaction: Transaction, jti: str, most: int, calls: int) -> None:
    if grants.used(transaction, jti) + calls > most:
        gone = "and is used up" if calls == 1 else f"and {calls} are more than it has left"
        raise Failure("E3206", f"the token was good for {most} call{'s' if most > 1 else ''} {gone}")
