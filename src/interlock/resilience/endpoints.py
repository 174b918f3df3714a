"""The endpoints of one service: a primary and up to two fallbacks, each with its own breaker.

Theory of operation. Endpoints are tried in the configured order. One whose breaker refuses is skipped. After a failure
the next one is tried only if that is safe: repeating the request does no harm, or nothing was sent. An answer is final
even if it is an error: no other endpoint is tried then. If no endpoint answered, the call fails with the error of each.

Where a contract permits a stale answer, the last good one may be returned. It is always marked as cached, with its age.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import orjson

from interlock.contract.manifest import CircuitBreakerConfig
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.resilience.breaker import counts
from interlock.resilience.retry import unsent
from interlock.resilience.services import Services

MAX_ENDPOINTS: Final = 3
CACHE_BYTES: Final = 16_777_216
LARGE_SHARE: Final = 8


class EndpointAnswer(NamedTuple):
    """An answer of a service; `at` is set if it came from the cache."""

    value: Any
    source: Literal["live", "cache"] = "live"
    age_s: float = 0.0


class LastGood:
    """Cache of the last good answers, bounded in size; the least recently stored are dropped first.

    A key must distinguish everything that must not be mixed up: the tool, the caller and the input. Requests are sent
    in an `era`, which ends when everything is forgotten: an answer to a request of an earlier era is not stored.
    """

    def __init__(self, monotonic: Callable[[], float], *, max_bytes: int = CACHE_BYTES) -> None:
        self._monotonic = monotonic
        self._max_bytes = max_bytes
        self._bytes = 0
        self.era = 0
        # Stored as JSON, so every reader gets a copy and cannot change what the next one receives.
        self._answers: OrderedDict[str, tuple[float, bytes]] = OrderedDict()

    def keep(self, key: str, value: Any, era: int) -> None:
        """Store an answer in place of the previous one, unless it is so large that others would have to be dropped."""
        if era != self.era:
            return
        self._drop(key)
        try:
            encoded = orjson.dumps(value)
        except TypeError:
            return  # a whole number beyond 64 bits; the answer is simply not cached
        if _size(key, encoded) > self._max_bytes // LARGE_SHARE:
            return
        self._answers[key] = (self._monotonic(), encoded)
        self._bytes += _size(key, encoded)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._answers)))

    def find(self, key: str, stale_s: float) -> EndpointAnswer | None:
        """Return the last good answer if it is not older than `stale_s`."""
        stored = self._answers.get(key)
        if stored is None:
            return None
        at, encoded = stored
        age_s = self._monotonic() - at
        return EndpointAnswer(orjson.loads(encoded), "cache", age_s) if age_s <= stale_s else None

    def forget(self) -> None:
        """Drop all answers, because the same request may mean something else from now on."""
        self._answers.clear()
        self._bytes = 0
        self.era += 1

    def _drop(self, key: str) -> None:
        dropped = self._answers.pop(key, None)
        if dropped is not None:
            self._bytes -= _size(key, dropped[1])


def _size(key: str, encoded: bytes) -> int:
    return len(key) + len(encoded)


class Endpoint(NamedTuple):
    """The address of a service, and the name of its breaker."""

    name: str
    url: str


class Endpoints:
    """The endpoints of one service, in the order in which they are tried."""

    def __init__(
        self,
        service: str,
        urls: Sequence[str],
        services: Services,
        *,
        cache: LastGood | None = None,
    ) -> None:
        self.service = service
        self.all = tuple(Endpoint(_name(service, url), url) for url in urls)
        if not 1 <= len(self.all) <= MAX_ENDPOINTS:
            raise Failure("E3004", f"a service has 1 to {MAX_ENDPOINTS} endpoints; `{service}` was given {len(urls)}")
        if len({endpoint.name for endpoint in self.all}) < len(self.all):
            raise Failure("E3004", f"the endpoints of `{service}` are not different servers")
        self._services = services
        self._cache = cache

    async def ask(
        self,
        send: Callable[[str], Awaitable[Any]],
        config: CircuitBreakerConfig,
        *,
        safe: bool,
        own_deadline: bool = False,
        expired: Callable[[], bool] = lambda: False,
        key: str | None = None,
        stale_s: float | None = None,
    ) -> EndpointAnswer:
        """Send a request to the first endpoint that accepts it; E3502 with the error of each if none does.

        `expired` tells whether the time of the request is up, which ends the search; the endpoint that did not answer
        until then has failed, unless the caller allowed less time than the contract does (`own_deadline`). `key` and
        `stale_s` are given for reads whose contract permits an answer of up to that age.
        """
        tried: list[tuple[str, Failure]] = []
        era = 0 if self._cache is None else self._cache.era
        for name, url in self.all:
            try:
                answer = await self._send(name, url, send, config, own_deadline, expired)
            except Failure as failure:
                tried.append((name, failure))
                over = failure.code in _PASSED_OVER or counts(failure, own_deadline=False)
                if not over or not (safe or unsent(failure)):
                    raise
                if expired():
                    break
            else:
                if self._cache is not None and key is not None and stale_s is not None:
                    self._cache.keep(key, answer, era)
                return EndpointAnswer(answer)
        cached = None if self._cache is None or key is None or stale_s is None else self._cache.find(key, stale_s)
        if cached is None:
            raise self._none_answers(tried)
        return cached

    async def _send(
        self,
        name: str,
        url: str,
        send: Callable[[str], Awaitable[Any]],
        config: CircuitBreakerConfig,
        own_deadline: bool,
        expired: Callable[[], bool],
    ) -> Any:
        entry = self._services.enter(name, config)
        try:
            answer = await send(url)
        except Failure as failure:
            entry.done(failure, own_deadline=own_deadline)
            raise
        except asyncio.CancelledError:
            # Work is cancelled at its deadline too. Only then does it tell something about the endpoint.
            if expired():
                entry.done(Failure("E3503"), own_deadline=own_deadline)
            else:
                entry.abandoned()
            raise
        except BaseException:
            entry.abandoned()
            raise
        entry.done()
        return answer

    def _none_answers(self, tried: Sequence[tuple[str, Failure]]) -> Failure:
        if len(tried) == 1:
            return tried[0][1]
        waits = [failure.retry_after_ms for _, failure in tried if failure.retry_after_ms is not None]
        errors = [{"endpoint": name, "error_code": failure.code, "message": failure.message} for name, failure in tried]
        return Failure(
            "E3502",
            f"none of the {len(tried)} endpoints of `{self.service}` answers",
            details={
                "service": self.service,
                "endpoints": errors,
                "sent": not all(unsent(failure) for _, failure in tried),
            },
            retry_after_ms=min(waits) if len(waits) == len(tried) else None,
        )


# Codes on which the next endpoint is tried: refused by the breaker, or suspended at its own request.
_PASSED_OVER: Final = frozenset({"E3501", "E3504"})


def _name(service: str, url: str) -> str:
    """The name of an endpoint: its host and port, without path, query or credentials."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _no_address(service) from None
    if not parts.scheme or not host:
        raise _no_address(service)
    where = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{'' if port is None else f':{port}'}"
    return f"{service} {where}{parts.path.rstrip('/')}"


def _no_address(service: str) -> Failure:
    return Failure("E3004", f"an endpoint of `{service}` is not an address such as https://host:port/path")
