"""Bounds how many sessions of the handshake era one caller may have open.

The SDK keeps sessions and ends them; it has one bound for all callers together. Here each session is noted with its
caller when it is opened. A caller at the cap gets a new session in the place of their own that has been idle longest,
which is ended by the protocol's own means (DELETE). Where all of them are in use, the new one is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

from interlock.core.errors import Failure
from interlock.doors.asgi import Message, Receive, Scope, Send, header

Handle = Callable[[Scope, Receive, Send], Awaitable[None]]
_ID = b"mcp-session-id"


@dataclass(slots=True)
class _Session:
    used: float
    in_flight: int = 0


class Sessions:
    """The open sessions by caller."""

    def __init__(self, handle: Handle, most: int) -> None:
        self._handle = handle
        self._most = most
        self._callers: dict[str, dict[str, _Session]] = {}

    def count(self, caller: str) -> int:
        """How many sessions a caller has open."""
        return len(self._callers.get(caller, {}))

    async def handle(self, caller: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request to the SDK, and note which session it opens, uses or ends. E3407 at the cap."""
        session_id = header(scope, _ID)
        if session_id is None:
            if scope["method"] == "POST":
                await self._make_room(caller, scope)
            await self._handle(scope, receive, self._noting(caller, send))
            return
        session = self._callers.get(caller, {}).get(session_id)
        if session is None:
            await self._handle(scope, receive, send)
            return
        session.in_flight += 1
        try:
            await self._handle(scope, receive, self._forgetting(caller, session_id, scope["method"], send))
        finally:
            session.in_flight -= 1
            session.used = monotonic()

    def _noting(self, caller: str, send: Send) -> Send:
        """Note the session that an answer says is open now."""

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                for name, value in message["headers"]:
                    if name.lower() == _ID:
                        self._callers.setdefault(caller, {})[value.decode("latin-1")] = _Session(monotonic())
            await send(message)

        return note

    def _forgetting(self, caller: str, session_id: str, method: str, send: Send) -> Send:
        """Forget a session that its client ends, or that the SDK does not know any more."""

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start" and (
                message["status"] == 404 or (method == "DELETE" and message["status"] < 400)
            ):
                self._forget(caller, session_id)
            await send(message)

        return note

    def _forget(self, caller: str, session_id: str) -> None:
        theirs = self._callers.get(caller, {})
        theirs.pop(session_id, None)
        if not theirs:
            self._callers.pop(caller, None)

    async def _make_room(self, caller: str, scope: Scope) -> None:
        while self.count(caller) >= self._most:
            idle = [(one.used, name) for name, one in self._callers[caller].items() if not one.in_flight]
            if not idle:
                raise Failure(
                    "E3407",
                    f"{self._most} MCP sessions of this caller are open, and all are in use",
                    resolution="end sessions that are not needed (DELETE), or use one for several requests",
                )
            _, name = min(idle)
            self._forget(caller, name)
            headers = [one for one in scope["headers"] if one[0] not in (_ID, b"content-length", b"content-type")]
            await self._handle(
                {**scope, "method": "DELETE", "headers": [*headers, (_ID, name.encode())]}, _ended, _mute
            )


async def _ended() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _mute(_: Message) -> None:
    return None
