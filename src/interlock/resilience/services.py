"""The health of services: circuit breakers whose state all processes on a home share.

Theory of operation. Each process counts failures for itself, and opens its breaker at once when they are enough. Each
failure is also counted in the store, and the process whose failure is the last of enough, with those of others, opens
its breaker then. A share of failures (`failure_rate`) is that of one process. The table `breaker` has one
row for each breaker that is not closed. A change of state takes effect here at once and is then written as a
compare-and-swap: if the row is still as this process knew it, it is replaced and the change is on record; if not,
another process was first, and its row counts. The store's reader of changes reports every change to the table. A row
that differs from the one known here is the decision of another process:

    open       calls are refused until the time in the row
    half_open  another process tests the service; refused here meanwhile, and tested here if no result comes in time
    no row     the service is healthy: closed

A process that starts knows no rows, so it honours every row of the table.

A service has one breaker, which its tools share; a tool whose configuration says `per: tool` has its own, called
SERVICE#TOOL. The settings (`breakers`) override the manifest, number by number, in their order.

If the journal cannot be written, the state is no longer shared, but each process still protects the service.

INVARIANT: of several processes whose breakers change at the same time, one writes the change and the others follow it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from interlock.core.clock import Clock, iso
from interlock.core.errors import Failure
from interlock.core.formatting import wait
from interlock.core.record import NamedTuple
from interlock.core.supervise import Supervisor
from interlock.resilience import limits
from interlock.resilience.breaker import Breaker, State, answered, counts
from interlock.store import breakers, records
from interlock.store.breakers import BreakerRow

if TYPE_CHECKING:
    from interlock.contract.manifest import BreakerRule, CircuitBreakerConfig
    from interlock.store.port import Store, Transaction, Unit

# A breaker cannot stay open for longer than a contract can request.
MAX_OPEN_MS: Final = 3_600_000
# Limit on the number of configurations of one service that are remembered.
MAX_KNOWN: Final = 1000

_log = logging.getLogger("interlock.services")


class Health(NamedTuple):
    """State of a service, for health pages and metrics."""

    service: str
    state: State
    failures: int
    retry_after_ms: int
    suspended_ms: int

    @property
    def name(self) -> str:
        """The service that the breaker belongs to; an endpoint or a tool of it may have its own breaker."""
        return re.split("[ #]", self.service, maxsplit=1)[0]

    def document(self) -> dict[str, Any]:
        return {
            "service": self.service,
            "state": self.state,
            "failures": self.failures,
            "retryAfterMs": self.retry_after_ms,
            "suspendedMs": self.suspended_ms,
        }


class _Move(NamedTuple):
    old: State
    new: State
    row: BreakerRow | None
    reason: str


class _Held:
    """A service that this process calls, with its breaker."""

    __slots__ = ("breaker", "count", "known", "moves", "reason", "row", "suspend", "writer")

    def __init__(self, breaker: Breaker, suspend: Callable[[int], None], count: Callable[[Breaker, int], None]) -> None:
        self.breaker = breaker
        self.suspend = suspend
        # Counts a failure with those of other processes.
        self.count = count
        self.known: dict[int, CircuitBreakerConfig] = {}
        self.row: BreakerRow | None = None
        self.moves: deque[_Move] = deque()
        self.writer: asyncio.Task[None] | None = None
        self.reason = ""


class AdmittedCall:
    """A call that was admitted to a service. Exactly one of its methods is called when it has ended."""

    __slots__ = ("_admitted", "_held")

    def __init__(self, held: _Held, admitted: int) -> None:
        self._held: _Held | None = held
        self._admitted = admitted

    def done(self, failure: Failure | None = None, *, own_deadline: bool = False) -> None:
        """The call has ended. `own_deadline`: its caller allowed less time than the contract gives the service."""
        held, self._held = self._held, None
        if held is None:
            return
        if failure is None or answered(failure):
            held.breaker.succeeded(self._admitted)
        elif counts(failure, own_deadline=own_deadline):
            held.reason = f"{failure.code} {failure.row.title}"
            if held.breaker.failed(self._admitted):
                held.count(held.breaker, self._admitted)
        else:
            held.breaker.abandoned(self._admitted)
            if failure.code == "E3504" and failure.retry_after_ms:
                held.suspend(failure.retry_after_ms)

    def abandoned(self) -> None:
        """The call has ended without a verdict on the service."""
        held, self._held = self._held, None
        if held is not None:
            held.breaker.abandoned(self._admitted)


# many methods: one table of breakers, which calls, other processes and the store all change
class Services:
    """The services of a process. Belongs to the event loop of its journal.

    `listen` receives the service, the old state and the new one, whichever process caused the change. `publish`
    receives the same once for each change on record, in the process that has written it.
    """

    def __init__(
        self,
        journal: Store,
        clock: Clock,
        *,
        listen: Callable[[str, str, str], None] | None = None,
        publish: Callable[[str, str, str], None] = lambda service, old, new: None,
        rules: Sequence[BreakerRule] = (),
        supervisor: Supervisor | None = None,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._monotonic = clock.monotonic
        self._listen = listen
        self._publish = publish
        self._rules = tuple(rules)
        self._resolved: dict[tuple[str, str, CircuitBreakerConfig], tuple[str, CircuitBreakerConfig]] = {}
        self._supervisor = supervisor or Supervisor(clock)
        self._held: dict[str, _Held] = {}
        self._rows: dict[str, BreakerRow] = {}
        self._suspended: dict[str, int] = {}
        self._counting: set[asyncio.Future[int]] = set()
        self._changes = journal.changes
        self._changes.watch(("services",), breakers.impaired, self._changed)

    def enter(self, service: str, config: CircuitBreakerConfig, tool: str = "") -> AdmittedCall:
        """Admit a call to a service; E3501 while its breaker refuses, E3504 while it is suspended.

        Where the tools of a service are configured differently, the most cautious value of each setting applies.
        """
        if self._monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()
        if self._suspended:
            self._check_suspended(service)
        name, config = self._resolved.get((service, tool, config)) or self._resolve(service, tool, config)
        held = self._held.get(name)
        if held is None or id(config) not in held.known:
            held = self._know(name, config, service)
        return AdmittedCall(held, held.breaker.admit())

    def suspend(self, service: str, for_ms: int) -> None:
        """Suspend a service for as long as it asks, in every process on the home."""
        until_ms = self._clock.now_ms() + min(for_ms, limits.MAX_SUSPENSION_MS)
        self._suspended[service] = max(until_ms, self._suspended.get(service, 0))
        try:
            self._journal.post(limits.suspend(service, until_ms))
        except Failure as failure:
            _log.warning("the suspension of %s is known to this process only: %s", service, failure.message)

    async def answers(self, service: str) -> None:
        """End the wait of an open breaker in every process on the home, because the service answered.

        The breaker is not closed: an answer does not prove that calls succeed. The next call tests it.
        """
        await self._changes.look()
        own = f"{service}#"
        for name, row in list(self._rows.items()):
            named = name == service or name.startswith(own)
            if named and row.state == "open" and row.until_ms > self._clock.now_ms():
                await self._journal.commit(_hasten(name, row))
        await self._changes.look()

    def _changed(self, impaired: list[breakers.Impaired]) -> None:
        """Apply the decisions of other processes."""
        rows: dict[str, BreakerRow] = {}
        for service, state, since_ms, until_ms in impaired:
            if state == breakers.SUSPENDED:
                # A suspension is only ever extended, so one that is known only here is not lost.
                self._suspended[service] = max(until_ms, self._suspended.get(service, 0))
            else:
                rows[service] = BreakerRow(state, since_ms, until_ms)
        self._rows = rows
        for service, held in self._held.items():
            self._follow(service, held)

    def snapshot(self) -> tuple[Health, ...]:
        """The health of every service that was called from here or is impaired."""
        if self._monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()
        now_ms = self._clock.now_ms()
        self._suspended = {service: until for service, until in self._suspended.items() if until > now_ms}
        names = sorted(self._held.keys() | self._rows.keys() | self._suspended.keys())
        return tuple(self._health(name) for name in names)

    async def settle(self) -> None:
        """Wait until every change made so far is written."""
        while writers := [held.writer for held in self._held.values() if held.writer is not None] + [*self._counting]:
            await asyncio.wait(writers)

    # Lookup

    def _resolve(self, service: str, tool: str, config: CircuitBreakerConfig) -> tuple[str, CircuitBreakerConfig]:
        """Return the breaker of a tool, and its thresholds after the operator's rules are applied."""
        resolved = config
        for rule in self._rules:
            if fnmatchcase(service, rule.services) and fnmatchcase(tool, rule.tools):
                resolved = rule.applied(resolved)
        name = f"{service}#{tool}" if tool and resolved.per == "tool" else service
        if len(self._resolved) >= MAX_KNOWN:
            self._resolved.clear()
        self._resolved[service, tool, config] = name, resolved
        return name, resolved

    def _know(self, service: str, config: CircuitBreakerConfig, suspended: str) -> _Held:
        """Return the state of a breaker. `suspended`: the service whose suspensions apply to it."""
        held = self._held.get(service)
        if held is None:
            breaker = Breaker(
                config,
                monotonic=self._monotonic,
                service=service,
                moved=lambda old, new: self._moved(service, old, new),
            )
            held = self._held[service] = _Held(breaker, partial(self.suspend, suspended), self._count)
            self._follow(service, held)
        elif config != held.breaker.config:
            held.breaker.retune(_most_careful(held.breaker.config, config))
        if len(held.known) >= MAX_KNOWN:
            held.known.clear()
        # The reference keeps the object alive, so that no other configuration gets the same id.
        held.known[id(config)] = config
        return held

    def _check_suspended(self, service: str) -> None:
        wait_ms = self._suspended.get(service, 0) - self._clock.now_ms()
        if wait_ms > 0:
            words = f"the service `{service}` asked for a pause; calls to it are refused for another {wait(wait_ms)}"
            raise Failure("E3504", words, details={"service": service, "sent": False}, retry_after_ms=wait_ms)
        self._suspended.pop(service, None)

    def _health(self, service: str) -> Health:
        now_ms, held, row = self._clock.now_ms(), self._held.get(service), self._rows.get(service)
        suspended_ms = max(0, self._suspended.get(service, 0) - now_ms)
        if held is not None:
            breaker = held.breaker
            return Health(service, breaker.state, breaker.failures, round(breaker.wait_s * 1000), suspended_ms)
        if row is not None:
            state: State = "half_open" if row.state == "half_open" else "open"
            return Health(service, state, 0, max(0, row.until_ms - now_ms), suspended_ms)
        return Health(service, "closed", 0, 0, suspended_ms)

    # Following other processes

    def _follow(self, service: str, held: _Held) -> None:
        row = self._rows.get(service)
        if row == held.row or held.writer is not None:
            return
        held.row = row
        breaker, old = held.breaker, held.breaker.state
        if row is None:
            breaker.close()
        else:
            left_ms = min(row.until_ms - self._clock.now_ms(), MAX_OPEN_MS)
            breaker.hold(self._monotonic() + left_ms / 1000)
        if breaker.state != old:
            self._notify(service, old, breaker.state)

    # Informing other processes

    def _count(self, breaker: Breaker, admitted: int) -> None:
        """Count a failure in the store, and open the breaker if all processes together saw enough of them."""
        service, most = breaker.service, breaker.config.failure_threshold
        window_ms = round(breaker.config.window_seconds * 1000)

        def counted(future: asyncio.Future[int]) -> None:
            self._counting.discard(future)
            if not future.cancelled() and future.exception() is None and future.result() >= most:
                breaker.trip(admitted)

        try:
            future = self._journal.submit(lambda t: breakers.count_failure(t, service, most, window_ms))
        except Failure:
            return  # this process counts for itself
        self._counting.add(future)
        future.add_done_callback(counted)

    def _moved(self, service: str, old: State, new: State) -> None:
        held = self._held[service]
        now_ms = self._clock.now_ms()
        row = None if new == "closed" else BreakerRow(new, now_ms, now_ms + held.breaker.config.timeout_seconds * 1000)
        reason = held.reason if new == "open" else "answers again" if new == "closed" else "is being tried"
        held.moves.append(_Move(old, new, row, reason))
        if held.writer is None:
            held.writer = self._supervisor.spawn(f"recording of the state of {service}", self._write(service, held))
        self._notify(service, old, new)

    async def _write(self, service: str, held: _Held) -> None:
        """Write the changes of one breaker in order, until another process proves to have been first."""
        try:
            while held.moves:
                move = held.moves.popleft()
                if await self._journal.commit(_exchange(service, held.row, move)):
                    held.row = move.row
                    self._publish(service, move.old, move.new)
                else:
                    held.moves.clear()
                # Rows that were read before this point and not yet applied are outdated.
                await self._changes.look()
        except Failure as failure:
            held.moves.clear()
            _log.warning("the state of %s is known to this process only: %s", service, failure.message)
        finally:
            held.writer = None
            self._follow(service, held)  # apply what others wrote meanwhile

    def _notify(self, service: str, old: State, new: State) -> None:
        _log.warning("service %s: %s->%s", service, old, new)
        if self._listen is None:
            return
        try:
            self._listen(service, old, new)
        except Exception:  # noqa: BLE001 - a listener is other people's code, and no call's affair
            _log.exception("a listener failed")


def _exchange(service: str, known: BreakerRow | None, move: _Move) -> Unit[bool]:
    """Unit that writes a change if the row is still as it was known; returns whether it did."""

    def unit(transaction: Transaction) -> bool:
        if breakers.find(transaction, service) != known:
            return False
        if move.row is None:
            breakers.delete(transaction, service)
        else:
            breakers.put(transaction, service, move.row, move.reason)
        facts: dict[str, Any] = {"service": service, "from": move.old, "to": move.new, "reason": move.reason}
        if move.row is not None:
            facts["until"] = iso(move.row.until_ms)
        body = records.plain("registry", service, transaction.now_ms, event="service.breaker", **facts)
        transaction.append("registry", service, body)
        return True

    return unit


def _hasten(service: str, known: BreakerRow) -> Unit[None]:
    def unit(transaction: Transaction) -> None:
        breakers.end_open(transaction, service, known.since_ms, transaction.now_ms)

    return unit


def _most_careful(one: CircuitBreakerConfig, other: CircuitBreakerConfig) -> CircuitBreakerConfig:
    return type(one)(
        failure_threshold=min(one.failure_threshold, other.failure_threshold),
        success_threshold=max(one.success_threshold, other.success_threshold),
        timeout_seconds=max(one.timeout_seconds, other.timeout_seconds),
        half_open_max_calls=min(one.half_open_max_calls, other.half_open_max_calls),
        window_seconds=max(one.window_seconds, other.window_seconds),
        failure_rate=_lower(one.failure_rate, other.failure_rate),
        failure_rate_calls=min(one.failure_rate_calls, other.failure_rate_calls),
        canary_share=_lower(one.canary_share, other.canary_share),
        per=one.per,
    )


def _lower(one: float | None, other: float | None) -> float | None:
    """Return the lower of two shares, or the one that is set."""
    return other if one is None else one if other is None else min(one, other)
