"""Shared code of the connectors for HTTP, gRPC and WebSocket services.

Theory of operation. Every call ends in one of a few ways, and what may follow depends on one question: can the upstream
have received it?

    E3502, sent: False   nothing was reached         anything may be sent again, to another endpoint too
    E3502, sent: True    it broke off, or said 5xx   only what may be done twice is sent again
    E3503                no answer in time           the same
    E3504                rate limited                the same, and not before the time it named
    E3401, E3416         an answer that will not change by asking again

A read may be done twice, and so may a write that carries an idempotency key to an upstream whose operator stated that
it honours keys (`idempotent`, or `idempotent_by_key` of one tool). A caller's key is sent as a digest that also covers
the caller and the tool: two callers who choose the same key must not receive each other's answers from an upstream that
knows them both as us.

Credentials come with each call and are never stored; they are removed from everything an upstream says about a failure
before anybody reads it.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import hashlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast
from urllib.parse import quote, urlsplit

import orjson
import pydantic

from interlock.call.connector import Aged, Outbound, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.data.canonical import digest
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.privacy.redact import REDACTED, Redactor, safe_message
from interlock.resilience.endpoints import Endpoints, LastGood
from interlock.resilience.retry import Pacing, http_status, sending, unsent
from interlock.upstreams.response_limits import MAX_BYTES, MAX_VALUES
from interlock.upstreams.schemas import visible

if TYPE_CHECKING:
    import ssl

    from interlock.contract.manifest import CircuitBreakerConfig
    from interlock.resilience.services import Services

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]

EXCERPT = 500
_LOOKED_AT = EXCERPT * 8
LONGEST_PAUSE_MS = 86_400_000
# A timer of the event loop may go off this much early.
_TIMER_S = 0.001
_CREDENTIAL_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})


class Part(pydantic.BaseModel):
    """A piece of a configuration: closed, immutable."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Tls(Part):
    """The trusted authorities and our certificate. By default, the system's authorities and no certificate."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @pydantic.model_validator(mode="after")
    def _whole(self) -> Tls:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a certificate needs its private key: set both cert_file and key_file")
        return self

    def context(self) -> ssl.SSLContext:
        """Make a TLS context. It is costly: one for each connector, never one for each call."""
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError):
            raise Failure("E3108", "the upstream's ca_file, cert_file or key_file cannot be read") from None
        return context

    def read(self, which: Literal["ca_file", "cert_file", "key_file"]) -> bytes | None:
        """Read one of the files, for libraries that want its content."""
        path: Path | None = getattr(self, which)
        try:
            return None if path is None else path.read_bytes()
        except OSError:
            raise Failure("E3108", f"the upstream's {which} cannot be read") from None


class Lent(Protocol):
    """A holder of credentials: a call, or a look."""

    @property
    def credentials(self) -> Mapping[str, str]: ...


class Look(NamedTuple):
    """A look at an upstream, which belongs to no call."""

    credentials: Mapping[str, str]


class Auth(Part):
    """The way a credential is sent to the upstream. `secret` is its name in the secrets store, never its value."""

    kind: Literal["bearer", "header", "query", "basic"]
    secret: str = pydantic.Field(min_length=1)
    name: str = ""  # of the header or query parameter
    user: str = ""  # for basic, where the secret is only the password

    @pydantic.model_validator(mode="after")
    def _named(self) -> Auth:
        if (self.kind in ("header", "query")) != bool(self.name):
            raise ValueError("header and query need `name`, bearer and basic have none")
        if self.user and self.kind != "basic":
            raise ValueError("`user` is for basic only")
        return self

    def value(self, lent: Lent) -> str:
        """The credential on loan; E3602 if there is none."""
        value = lent.credentials.get(self.secret)
        if not value:
            raise Failure("E3602", f"the upstream asks for the credential `{self.secret}`: interlock secrets set")
        return value

    def header(self, lent: Lent) -> tuple[str, str] | None:
        """The header that carries it; None if the query does."""
        if self.kind == "query":
            return None
        value = self.value(lent)
        if self.kind == "basic":
            pair = f"{self.user}:{value}" if self.user else value
            return "authorization", "Basic " + base64.b64encode(pair.encode()).decode()
        if not value.isascii() or not value.isprintable():
            raise Failure("E3602", f"the credential `{self.secret}` cannot stand in a header; store it again")
        return ("authorization", f"Bearer {value}") if self.kind == "bearer" else (self.name.lower(), value)

    def query(self, lent: Lent) -> str:
        """The text to append to a query; empty if a header carries it."""
        return f"{quote(self.name, safe='')}={quote(self.value(lent), safe='')}" if self.kind == "query" else ""


class RemoteConfig(Part):
    """The configuration that all connectors share."""

    auth: Auth | None = None
    headers: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    tls: Tls = Tls.model_construct()
    allow_private: bool = False
    # Send the caller with each call (x-interlock-caller, x-interlock-agent). By default only on one's own networks.
    send_caller: bool | None = None
    idempotent: bool = False  # the upstream does a write only once under an idempotency key
    connect_timeout_s: float = pydantic.Field(5.0, gt=0, le=60)
    max_response_bytes: int = pydantic.Field(MAX_BYTES, ge=1, le=1_073_741_824)
    max_response_values: int = pydantic.Field(MAX_VALUES, ge=1, le=100_000_000)  # numbers, texts, lists and objects

    @property
    def sends_caller(self) -> bool:
        """Whether the upstream is sent the caller's id, which is personal data to a third party."""
        return self.allow_private if self.send_caller is None else self.send_caller

    @pydantic.field_validator("headers")
    @classmethod
    def _no_credentials(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if name.lower() in _CREDENTIAL_HEADERS:
                raise ValueError(f"`{name}` would keep a credential in clear; name the secret in `auth`")
            header_safe(name, value)
        return {name.lower(): value for name, value in headers.items()}


def keep_hidden(config: RemoteConfig, *, plain: bool) -> None:
    """Refuse (ValueError) to send a credential over the internet in clear text."""
    if plain and config.auth is not None and not config.allow_private:
        raise ValueError("a credential is only sent under TLS, or on private networks that are allowed")


def checked_url(url: str, schemes: Sequence[str]) -> str:
    """Return an endpoint without its last slash; ValueError unless it is a plain address without credentials."""
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError(
            f"an endpoint begins with {' or '.join(f'{scheme}://' for scheme in schemes)} and names a host"
        )
    if "@" in parts.netloc:
        raise ValueError("an endpoint holds no user or password; name the secret in `auth`")
    if parts.fragment:
        raise ValueError("an endpoint has no fragment")
    _ = parts.port
    return url.rstrip("/")


def unreached(name: str, why: str = "cannot be reached", *, retry_after_ms: int | None = None) -> Failure:
    """The failure if nothing was sent."""
    return Failure("E3502", f"`{name}` {why}", details={"sent": False}, retry_after_ms=retry_after_ms)


def broken(name: str) -> Failure:
    """The failure if the upstream may have acted, but did not answer."""
    return Failure("E3502", f"`{name}` broke off before it had answered", details={"sent": True})


def late(name: str) -> Failure:
    return Failure("E3503", f"`{name}` did not answer in time", details={"sent": True})


def look_at(name: str) -> str:
    """The advice for a definition that differs from the admitted one."""
    return f"look: interlock upstream show {name}, then: interlock upstream accept {name} --reason WHY"


@lru_cache(maxsize=1)
def _redactor() -> Redactor:
    return Redactor()


def excerpt(text: str, lent: Lent | None) -> str:
    """Shorten an upstream's message about a failure: one line, without credentials."""
    forms = [
        form
        for secret in (() if lent is None else lent.credentials.values())
        for form in (secret, quote(secret, safe=""), base64.b64encode(secret.encode()).decode())
        if form
    ]
    longest = max(map(len, forms), default=0)
    # INVARIANT: texts are cut before anything else looks at them; what follows takes time for each character.
    whole = len(text) <= _LOOKED_AT
    text = text[: _LOOKED_AT + longest]
    for form in forms:
        text = text.replace(form, REDACTED)
    if not whole and longest:
        text = text[:-longest]  # it may end with the beginning of a credential that was cut in two
    text = safe_message(_redactor(), visible(text))
    return " ".join(text.split())[:EXCERPT]


def retry_after_ms(given: str | None, now_ms: int) -> int | None:
    """Read the pause that an upstream requests by its Retry-After: seconds or a date."""
    if not given:
        return None
    if given.isascii() and given.isdecimal():
        return min(int(given[:9]) * 1000, LONGEST_PAUSE_MS)
    try:
        until_ms = int(email.utils.parsedate_to_datetime(given).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
    return min(max(until_ms - now_ms, 0), LONGEST_PAUSE_MS)


def sent_key(call: RemoteCall) -> str | None:
    """The idempotency key that the upstream receives, specific to this caller and tool."""
    if call.key is None or not call.writes:
        return None
    parts = (call.caller.tenant, call.caller.id, call.tool.partition("@")[0], call.key)
    return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()[:32]


def check_egress(call: RemoteCall, url: str) -> None:
    """Refuse (E3406) an address that the caller may not reach."""
    if call.objection is None:
        return
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
    why = call.objection(parts.hostname or "", port)
    if why is not None:
        raise Failure(
            "E3406", f"{call.tool} is not let out: {why}", details={"sent": False},
            resolution="an operator can list the host and port for this agent in `egress_of`",
        )  # fmt: skip


def context_headers(call: RemoteCall, config: RemoteConfig) -> dict[str, str]:
    """The headers of a call besides its arguments: trace, caller, time left, idempotency key."""
    headers = call.trace | call.identity if config.sends_caller else call.trace
    headers["x-interlock-deadline-ms"] = str(int(call.left_s * 1000))
    if (key := sent_key(call)) is not None:
        headers["idempotency-key"] = key
    return headers


_TOKEN = expression(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def header_safe(name: str, value: str) -> None:
    """Refuse (ValueError) a header that would not stay one line."""
    if not _TOKEN.fullmatch(name) or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise ValueError(f"the header `{name}` cannot hold this")


class Sender:
    """Sends calls to the endpoints of one upstream, each until its outcome is known.

    A read whose contract permits it (`stale_s`) gets its last good answer if no endpoint answers.

    Several endpoints are tried in turn, as far as that is safe, and each leaves time for those after it. With
    `services`, each then has a breaker of its own, besides that of the whole upstream, which is not handled here.
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        config: RemoteConfig,
        *,
        clock: Clock,
        sleep: Sleep,
        services: Services | None,
    ) -> None:
        self._name = name
        self._urls = tuple(urls)
        self._idempotent = config.idempotent
        self.pacing = Pacing(monotonic=clock.monotonic, sleep=sleep, uniform=_dice(clock))
        self._last_good = LastGood(clock.monotonic)
        self._closed = False
        self._guarded: Endpoints | None = None
        if services is not None and len(urls) > 1:
            self._guarded = Endpoints(name, urls, services, cache=self._last_good)

    def send(self, call: RemoteCall, ask: Callable[[RemoteCall, str], Awaitable[Any]]) -> Coroutine[Any, Any, Any]:
        """Return the answer, or raise the last failure. `ask` is one attempt: it receives the call as it is sent, and
        the endpoint.

        Each attempt of a traced call has a span, and the upstream receives its position.
        """
        keyed = call.key is not None and (self._idempotent or call.native.get("idempotent_by_key") is True)
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


async def within(call: RemoteCall, name: str, work: Awaitable[T]) -> T:
    """Await `work` until the call's deadline; E3503 if it takes longer."""
    try:
        async with asyncio.timeout(call.left_s):
            return await work
    except TimeoutError:
        raise late(name) from None


async def dial(host: str, port: int, *, allow_private: bool, resolve: addresses.Resolve) -> socket.socket:
    """Connect a socket to the first address of a host that accepts it. All of them are checked (E3406) before."""
    loop = asyncio.get_running_loop()
    refused: OSError | None = None
    for address in await addresses.checked(host, allow_private=allow_private, resolve=resolve):
        one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        one.setblocking(False)
        try:
            await loop.sock_connect(one, (address, port))
            return one
        except OSError as error:
            one.close()
            refused = error
        except BaseException:
            one.close()
            raise
    raise refused or OSError("no address")


# Templates: how arguments are placed in an operation that was described by hand.

_PLACEHOLDER = expression(r"\{([A-Za-z_*][\w.*-]*)\}")
REST = "{*}"


class Absent:
    """Marks an argument that was not given."""


ABSENT = Absent()


def placeholders(template: Any) -> set[str]:
    """Return the names that a template mentions."""
    if isinstance(template, str):
        return set(_PLACEHOLDER.findall(template))
    if isinstance(template, Mapping):
        values: Iterable[Any] = cast("Mapping[str, Any]", template).values()
    elif isinstance(template, list | tuple):
        values = cast("Sequence[Any]", template)
    else:
        return set()
    return {name for value in values for name in placeholders(value)}


def fill(template: Any, values: Json, rest: Json) -> Any:
    """Fill the placeholders of a template. `{name}` alone becomes the value itself, within a text its text; `{*}`
    becomes all other arguments. Absent arguments are left out.
    """
    if isinstance(template, str):
        if template == REST:
            return rest
        whole = _PLACEHOLDER.fullmatch(template)
        if whole:
            return values.get(whole[1], ABSENT)
        return _PLACEHOLDER.sub(lambda match: text_of(values.get(match[1], "")), template)
    if isinstance(template, Mapping):
        pairs = cast("Mapping[str, Any]", template)
        filled = {name: fill(part, values, rest) for name, part in pairs.items()}
        return {name: part for name, part in filled.items() if part is not ABSENT}
    if isinstance(template, list | tuple):
        parts = [fill(part, values, rest) for part in cast("Sequence[Any]", template)]
        return [part for part in parts if part is not ABSENT]
    return template


def text_of(value: Any) -> str:
    """Format a value for a text, a path or a query."""
    return value if isinstance(value, str) else to_json(value).decode()


def to_json(value: Any) -> bytes:
    """Encode a value as JSON; E3302 for values that JSON cannot carry to everybody."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise Failure("E3302", "an argument is a number beyond 64 bits or a text that is not Unicode") from None


def quoted(value: Any) -> str:
    """Percent-encode a value for an address, so that it is only data."""
    text = text_of(value)
    if text.isalnum() and text.isascii():
        return text
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise Failure("E3302", "an argument is a text that is not Unicode") from None
