"""Bounds how many sessions of the handshake era one caller may have open.

The SDK keeps sessions and ends them; it has one bound for all callers together. Here each session is noted with its
caller when its client is greeted. A caller at the cap gets a new session in the place of their own that has been idle
longest, which is ended by the protocol's own means (DELETE). Where all of them are in use, the new one is refused. A
request that is refused leaves no session, ends none, and its answer names none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic

import orjson

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.http.asgi import Message, Receive, Scope, Send, header

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
        """The number of open sessions of a caller."""
        return len(self._callers.get(caller, {}))

    async def handle(self, caller: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request to the SDK, and note which session it opens, uses or ends. E3407 at the cap."""
        session_id = header(scope, _ID)
        if session_id is None:
            await self._open(caller, scope, receive, send)
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

    async def _open(self, caller: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand over a request that may open a session. It stays open if the client is greeted and there is room."""
        opening = _Opening()
        full: Failure | None = None

        async def note(message: Message) -> None:
            nonlocal full
            ready = opening.filter(message)
            if opening.greeted and ready and ready[0]["type"] == "http.response.start":
                try:
                    await self._make_room(caller, scope)
                except Failure as failure:
                    full = failure
                else:
                    self._callers.setdefault(caller, {})[opening.session] = _Session(monotonic())
            if full is None:
                for one in ready:
                    await send(one)

        await self._handle(scope, receive, note)
        if opening.session and (full is not None or not opening.greeted):
            await self._end(opening.session, scope)
        if full is not None:
            raise full

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
            await self._end(name, scope)

    async def _end(self, session_id: str, scope: Scope) -> None:
        headers = [one for one in scope["headers"] if one[0] not in (_ID, b"content-length", b"content-type")]
        ending = {**scope, "method": "DELETE", "headers": [*headers, (_ID, session_id.encode())]}
        await self._handle(ending, _ended, _mute)


class _Opening:
    """The answer to a request without a session. Its head is held back until its body shows whether it greets.

    The SDK names a session in the head of every such answer, even of one that refuses the request.
    """

    def __init__(self) -> None:
        self.session = ""
        self.greeted = False
        self._held: list[Message] = []
        self._decided = False

    def filter(self, message: Message) -> list[Message]:
        """The messages that can be sent on by now."""
        if self._decided:
            return [message]
        self._held.append(message)
        if message["type"] == "http.response.start":
            named = [value.decode("latin-1") for name, value in message["headers"] if name.lower() == _ID]
            if named and message["status"] < 400:
                self.session = named[0]
                return []
        else:
            answer = _message_in(message.get("body", b""))
            if answer is None and message.get("more_body"):
                return []
            self.greeted = bool(self.session) and answer is not None and "result" in answer
        self._decided = True
        if not self.greeted:
            start = self._held[0]
            self._held[0] = {**start, "headers": [one for one in start["headers"] if one[0].lower() != _ID]}
        return self._held


def _message_in(body: bytes) -> Json | None:
    """The message in a piece of an event stream; None where the piece holds none."""
    for line in body.splitlines():
        if line.startswith(b"data:") and line[5:].strip():
            return orjson.loads(line[5:])
    return None


async def _ended() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _mute(_: Message) -> None:
    return None
