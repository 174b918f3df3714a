"""Negotiates a protocol version with a server of either era.

Unless the era is known, a server is first asked in the modern way. It may answer so, state that it speaks an older
version, or not answer at all: some servers of the handshake era are silent until they are greeted, and modern ones may
be slow to start. A silent server is therefore also greeted in the old way, and its answer decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from interlock.call.mcp import HANDSHAKE, META, MODERN, UNSUPPORTED_VERSION
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.data.untrusted import members, strings
from interlock.upstreams.mcp.protocol import ABOUT_US, UNSENT, Era, RpcError, ServerInfo

START_S = 30.0
# A server that is silent for this long is also greeted in the way of the handshake era.
DISCOVER_S = 5.0


class Negotiating(Protocol):
    """A conversation whose version is not agreed on yet. `server` is set to what the server says of itself."""

    server: ServerInfo

    @property
    def capabilities(self) -> Json: ...

    def declared(self, capabilities: Json, /) -> Json: ...

    def request(self, method: str, params: Json | None = None, *, within_s: None) -> Coroutine[Any, Any, Json]: ...

    def notify(self, method: str, /) -> Coroutine[Any, Any, None]: ...


async def agree(session: Negotiating, era: Era) -> None:
    """Identify the server and agree on a version; E3502 if there is none in common, or it takes too long."""
    try:
        async with asyncio.timeout(START_S):
            await _negotiate(session, era)
    except TimeoutError:
        raise Failure("E3502", "the upstream did not agree on a version in time", details=UNSENT) from None


async def _negotiate(session: Negotiating, era: Era) -> None:
    if era == "handshake":
        await _initialize(session)
        return
    session.server = ServerInfo(MODERN[0])
    discovery = asyncio.ensure_future(session.request("server/discover", within_s=None))
    try:
        await asyncio.wait({discovery}, timeout=DISCOVER_S if era == "auto" else START_S)
        if not discovery.done() and era == "auto" and await _greeted_before(session, discovery):
            return
        supported = _modern(session, discovery)
    finally:
        discovery.cancel()
        await asyncio.gather(discovery, return_exceptions=True)
    if supported is None:
        return
    if era == "modern":
        raise _mismatch(supported)
    session.server = ServerInfo("")
    await _initialize(session)


async def _greeted_before(session: Negotiating, discovery: asyncio.Future[Json]) -> bool:
    """Greet a silent server in the old way too, because it may be old or slow to start: its answer decides."""
    session.server = ServerInfo("")
    greeting = asyncio.ensure_future(_initialize(session))
    try:
        await asyncio.wait({discovery, greeting}, return_when=asyncio.FIRST_COMPLETED)
        if discovery.done():
            session.server = ServerInfo(MODERN[0])
            return False
        await greeting
        return True
    finally:
        greeting.cancel()
        await asyncio.gather(greeting, return_exceptions=True)


def _modern(session: Negotiating, discovery: asyncio.Future[Json]) -> list[Any] | None:
    """Return None if the server speaks the modern era; else the versions it states."""
    if not discovery.done():
        return []
    try:
        answer = discovery.result()
    except RpcError as error:
        if error.code == UNSUPPORTED_VERSION and not set(_supported(error.data)) & {*HANDSHAKE}:
            raise _mismatch(_supported(error.data)) from None
        return []
    supported = strings(answer.get("supportedVersions"))
    if MODERN[0] not in supported:
        return supported
    _adopt(session, MODERN[0], answer, members(answer.get("_meta")).get(f"{META}serverInfo"))
    return None


async def _initialize(session: Negotiating) -> None:
    able = session.declared(session.capabilities)
    offer: Json = {"protocolVersion": HANDSHAKE[0], "capabilities": able, "clientInfo": ABOUT_US}
    try:
        answer = await session.request("initialize", offer, within_s=None)
    except RpcError as error:
        if error.code == UNSUPPORTED_VERSION or _supported(error.data):
            raise _mismatch(_supported(error.data)) from None
        words = f"the upstream refused the handshake: {error.message[:200]}"
        details = {"sent": False, "reason": "handshake_refused"}
        raise Failure("E3502", words, details=details, native_error_ref=error.native_ref) from None
    chosen = answer.get("protocolVersion")
    if chosen not in HANDSHAKE:
        raise _mismatch([str(chosen)])
    _adopt(session, chosen, answer, answer.get("serverInfo"))
    await session.notify("notifications/initialized")


def _adopt(session: Negotiating, protocol: str, answer: Json, info: Any) -> None:
    instructions = answer.get("instructions")
    session.server = ServerInfo(
        protocol,
        str(members(info).get("name") or ""),
        str(members(info).get("version") or ""),
        members(answer.get("capabilities")),
        instructions if isinstance(instructions, str) else None,
    )


def _mismatch(offered: list[str]) -> Failure:
    theirs = ", ".join(offered[:10])[:200] or "nothing it would name"
    return Failure(
        "E3502",
        f"no protocol version in common: the upstream speaks {theirs}; this program {', '.join((*MODERN, *HANDSHAKE))}",
        details={"sent": False, "reason": "protocol_version_mismatch"},
    )


def _supported(data: Any) -> list[str]:
    return strings(members(data).get("supported"))
