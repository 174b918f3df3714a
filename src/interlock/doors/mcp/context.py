"""Types and helpers around the SDK's request context."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp.server import ServerRequestContext
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from interlock.api.service import native_id
from interlock.core.errors import Failure
from interlock.data.canonical import encode
from interlock.doors.mcp.calling import Fault, no_trace

if TYPE_CHECKING:
    from mcp.server.connection import Connection

    from interlock.doors.mcp.session_ids import Session

Context = ServerRequestContext[Any, Any]
LONGEST_ADDRESS = 2048
CALLER = "interlock.caller"  # where the entrance leaves the caller in a request's scope
SESSION = "interlock.session"  # and the session of a client of the handshake era


def connection(ctx: Context) -> Connection:
    """State that the SDK keeps while a client is connected. Its end is the only sign that the client left."""
    return ctx.session._connection  # pyright: ignore[reportPrivateUsage]


def state(session: ServerSession) -> dict[str, Any]:
    """The same for a session."""
    return session._connection.state  # pyright: ignore[reportPrivateUsage]


def meta(ctx: Context) -> Mapping[str, Any]:
    """The metadata of a request."""
    return (ctx.params or {}).get("_meta") or {}


def session_of(ctx: Context) -> Session | None:
    """The session of a request of the handshake era over HTTP; None for any other, and for one that opens a session."""
    return None if ctx.request is None else ctx.request.scope.get(SESSION)


def session_id(ctx: Context) -> str | None:
    """The id of a session as its client knows it. The SDK has another id for it."""
    session = session_of(ctx)
    if session is not None:
        return session.name
    return None if ctx.request is None else ctx.request.headers.get("mcp-session-id")


def native_ids(ctx: Context) -> dict[str, Any]:
    """By which ids a client knows its request."""
    ids = {"jsonrpc_request_id": native_id(ctx.request_id), "mcp_protocol_version": ctx.protocol_version}
    session = session_id(ctx)
    return ids if session is None else {**ids, "mcp_session_id": native_id(session)}


def request_identity(ctx: Context, stdio_session: str) -> str | None:
    """The client's own identity of a request: its JSON-RPC id within its session. None if it has no session.

    Ids are used once in a session. The protocol of 2026-07-28 has no sessions over HTTP: ids repeat there.
    """
    session = stdio_session
    if ctx.request is not None:
        if ctx.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
            return None
        session = session_id(ctx) or ""
    if not session or ctx.request_id is None:
        return None
    # A text and a number of the same digits are two ids.
    written = f"mcp:{session}:{encode(ctx.request_id).decode()}"
    if len(written) <= 255 and written.isascii() and written.isprintable() and " " not in written:
        return written
    return f"mcp:sha256:{hashlib.sha256(written.encode(errors='surrogatepass')).hexdigest()}"


def named(text: str) -> str:
    """A name or address that a client sent, if it is not too long to be on record and in an answer (E3004)."""
    if len(text) <= LONGEST_ADDRESS:
        return text
    failure = Failure("E3004", f"names and addresses have at most {LONGEST_ADDRESS:,} characters")
    raise MCPError(types.INVALID_PARAMS, failure.message, failure.envelope(no_trace()))


def faulty(fault: Fault) -> MCPError:
    """A fault as the SDK raises it."""
    return MCPError(fault.code, fault.message, fault.data)


def missing(failure: Failure, message: str, **data: str) -> MCPError:
    """Map E3101 and E3702 to an invalid request; other failures stay as they are."""
    if failure.code in ("E3702", "E3401"):
        return MCPError(types.INVALID_PARAMS, message, {**data, **failure.envelope(no_trace())})
    return MCPError(failure.row.jsonrpc, failure.message, {**data, **failure.envelope(no_trace())})
