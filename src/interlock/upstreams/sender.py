"""Sends a call to the endpoints of an upstream, with retries, until its outcome is known.

Theory of operation. Every call ends in one of a few ways, and what may follow depends on one question: can the upstream
have received it?

    E3502, sent: False   nothing was reached         anything may be sent again, to another endpoint too
    E3502, sent: True    it broke off, or said 5xx   only what may be done twice is sent again
    E3503                no answer in time           the same
    E3504                rate limited                the same, and not before the time it named
    E3401, E3416         an answer that will not change by asking again

A read may be done twice, and so may a write that carries an idempotency key to an upstream whose operator stated that
it honours keys (`idempotent`, or `idempotent_by_key` of one tool).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from interlock.call.connector import Aged, Outbound, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.resilience.endpoints import Endpoints, LastGood
from interlock.resilience.retry import Pacing, http_status, sending, unsent
from interlock.upstreams.wire import late

if TYPE_CHECKING:
    from interlock.contract.manifest import CircuitBreakerConfig
    from interlock.resilience.services import Services

Sleep = Callable[[float], Awaitable[None]]

# A timer of the event loop may go off this much early.
_TIMER_S = 0.001


class Sender:
    """Sends calls to the endpoints of one upstream, each until its outcome is known.

    A read whose contract permits it (`stale_s`) gets its last good answer if no endpoint answers.

    Several endpoints are tried in turn, as far as that is safe, and each leaves time for those after it. With
    `services`, each then has a breaker of its own, besides that of the whole upstream, which is not handled here.
    `idempotent`: the upstream does a write only once under an idempotency key.
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        idempotent: bool,
        clock: Clock,
        sleep: Sleep,
        services: Services | None,
    ) -> None:
        self._name = name
        self._urls = tuple(urls)
        self._idempotent = idempotent
        self.pacing = Pacing(monotonic=clock.monotonic, sleep=sleep, uniform=_dice(clock))
        self._last_good = LastGood(clock.monotonic)
        self._closed = False
        self._guarded: Endpoints | None = None
        if services is not None and len(urls) > 1:
            self._guarded = Endpoints(name, urls, services, cache=self._last_good)

    def send(
        self, call: RemoteCall, ask: Callable[[RemoteCall, str], Awaitable[Any]], *, repeatable: bool = True
    ) -> Coroutine[Any, Any, Any]:
        """Return the answer, or raise the last failure. `ask` is one attempt: it receives the call as it is sent, and
        the endpoint. What is not `repeatable` is not sent again if it may have arrived, whatever key it has.

        Each attempt of a traced call has a span, and the upstream receives its position.
        """
        keyed = (
            repeatable and call.key is not None and (self._idempotent or call.native.get("idempotent_by_key") is True)
        )
        safe = keyed or not call.writes
        once = self._to_one(call, ask) if len(self._urls) == 1 else self._to_several(call, ask, safe=safe)

        async def timed(until: float) -> Any:
            """Make one attempt within its own deadline. The last one has the call's, which is enforced elsewhere."""
            # INVARIANT: a call that is still being retried does not connect again after the upstream was closed.
            if self._closed:
                raise Failure("E3108", f"the upstream `{self._name}` was removed during the request")
            if until >= call.deadline:
                return await once(until)
            try:
                async with asyncio.timeout(max(0.0, until - call.monotonic())):
                    return await once(until)
            except TimeoutError:
                raise late(self._name) from None

        key, stale_s = (None, 0.0) if self._guarded is not None else _cached_as(call)
        sent = sending(timed, call.retry, self.pacing, deadline=call.deadline, safe=safe)
        return sent if key is None else self._or_old(key, stale_s, sent)

    def _to_one(
        self, call: RemoteCall, ask: Callable[[RemoteCall, str], Awaitable[Any]]
    ) -> Callable[[float], Awaitable[Any]]:
        """Return one attempt at the only endpoint, which takes its deadline."""
        url, span = self._urls[0], call.span
        if span is None:
            return lambda _: ask(call, url)
        return partial(_traced(call, span, ask), url)

    def _to_several(
        self, call: RemoteCall, ask: Callable[[RemoteCall, str], Awaitable[Any]], *, safe: bool
    ) -> Callable[[float], Awaitable[Any]]:
        """Return one attempt at all endpoints in turn, each with its part of the time."""

        async def bounded(one: RemoteCall, url: str) -> Any:
            left = len(self._urls) - self._urls.index(url)
            if left == 1 or not safe:
                return await ask(one, url)  # the last attempt
            try:
                async with asyncio.timeout(call.left_s / left):
                    return await ask(one, url)
            except TimeoutError:
                raise late(self._name) from None

        traced = None if call.span is None else _traced(call, call.span, bounded)

        def once(until: float) -> Awaitable[Any]:
            def attempt(url: str) -> Awaitable[Any]:
                return bounded(call, url) if traced is None else traced(url, until)

            if self._guarded is None or call.breaker is None:
                return self._in_turn(attempt, safe=safe)
            return self._by_breakers(self._guarded, call, attempt, call.breaker, safe=safe, until=until)

        return once

    def forget(self) -> None:
        """Drop all cached answers, because tools of the upstream have changed."""
        self._last_good.forget()

    def close(self) -> None:
        """Send nothing from now on."""
        self._closed = True

    async def _by_breakers(
        self,
        endpoints: Endpoints,
        call: RemoteCall,
        attempt: Callable[[str], Awaitable[Any]],
        breaker: CircuitBreakerConfig,
        *,
        safe: bool,
        until: float,
    ) -> Any:
        key, stale_s = _cached_as(call)

        def expired() -> bool:
            return call.monotonic() >= until - _TIMER_S

        answer = await endpoints.ask(
            attempt, breaker, safe=safe, own_deadline=call.own_deadline, expired=expired, key=key, stale_s=stale_s
        )
        return answer.value if answer.source == "live" else Aged(answer.value, answer.age_s)

    async def _or_old(self, key: str, stale_s: float, sent: Awaitable[Any]) -> Any:
        """Return an answer and cache it; if there is none, return the cached one."""
        era = self._last_good.era
        try:
            value = await sent
        except Failure as failure:
            old = None if failure.code not in _FAILOVER_CODES else self._last_good.find(key, stale_s)
            if old is None:
                raise
            return Aged(old.value, old.age_s)
        self._last_good.keep(key, value, era)
        return value

    async def _in_turn(self, attempt: Callable[[str], Awaitable[Any]], *, safe: bool) -> Any:
        for url in self._urls[:-1]:
            try:
                return await attempt(url)
            except Failure as failure:
                if failure.code not in _FAILOVER_CODES or not (safe or unsent(failure)):
                    raise
        return await attempt(self._urls[-1])


def _traced(
    call: RemoteCall, span: Outbound, ask: Callable[[RemoteCall, str], Awaitable[Any]]
) -> Callable[[str, float], Awaitable[Any]]:
    """Trace the attempts at a call. Each takes its endpoint and its deadline."""
    number = 0

    async def attempt(url: str, until: float) -> Any:
        nonlocal number
        number += 1
        own = span.below("Attempt", until, {"external.attempt": number, **_address(url)})
        if own is None:
            return await ask(call, url)
        with own:
            try:
                return await ask(replace(call, span=own, traceparent=own.traceparent), url)
            except Failure as failure:
                if (status := http_status(failure)) is not None:
                    own.note({"http.response.status_code": status})
                raise

    return attempt


def _address(url: str) -> dict[str, str | int]:
    """The host and port of an endpoint for a span; nothing else of the address."""
    try:
        host, port = urlsplit(url).hostname, urlsplit(url).port
    except ValueError:
        return {}
    return {} if host is None else {"server.address": host} | ({} if port is None else {"server.port": port})


def _cached_as(call: RemoteCall) -> tuple[str | None, float]:
    """Return the key under which an answer may be cached, and for how long; no key if it may not.

    INVARIANT: nobody receives an answer to another caller or to another request.
    """
    stale_s = call.native.get("stale_s")
    if stale_s is None or call.writes:
        return None, 0.0
    caller = call.caller
    return digest([call.tool, caller.tenant, caller.id, caller.agent, call.arguments]), float(stale_s)


# Codes on which another endpoint may succeed.
_FAILOVER_CODES = frozenset({"E3502", "E3503", "E3504"})


def _dice(clock: Clock) -> Callable[[float, float], float]:
    return lambda low, high: low + (high - low) * int.from_bytes(clock.random_bytes(6)) / 2**48
