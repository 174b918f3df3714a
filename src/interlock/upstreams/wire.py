"""One request to an upstream, over HTTP, gRPC or WebSocket: the headers it carries, and the failures it may end in.

A caller's idempotency key is sent as a digest that also covers the caller and the tool: two callers who choose the same
key must not receive each other's answers from an upstream that knows them both as us.

Credentials come with each call and are never stored; they are removed from everything an upstream says about a failure
before anybody reads it.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import hashlib
import socket
from collections.abc import Awaitable
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import orjson

from interlock.call.connector import RemoteCall
from interlock.core.errors import Failure
from interlock.net import addresses
from interlock.privacy.redact import REDACTED, Redactor, safe_message
from interlock.upstreams.remote_config import Lent, RemoteConfig
from interlock.upstreams.schemas import visible

T = TypeVar("T")

EXCERPT = 500
_LOOKED_AT = EXCERPT * 8
LONGEST_PAUSE_MS = 86_400_000


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


def to_json(value: Any) -> bytes:
    """Encode a value as JSON; E3302 for values that JSON cannot carry to everybody."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise Failure("E3302", "an argument is a number beyond 64 bits or a text that is not Unicode") from None


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
