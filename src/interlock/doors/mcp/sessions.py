"""Sessions of the handshake era: which this server holds, how many a caller may have, and opening them again.

The SDK keeps sessions and ends them; it has one bound for all callers together, and an id of its own for each. Here
each session is noted with its caller when its client is greeted, under an id from which any server on the store can
open it again (session_ids.py). A server that gets a request of a session that it does not hold greets the SDK itself,
as the client did at another server, and goes on as in a session of its own. What a server remembers for a session does
not move with it: resource subscriptions, the log level and calls in flight.

A caller at the cap gets a new session in the place of their own that has been idle longest, which is ended by the
protocol's own means (DELETE). Where all of them are in use, the new one is refused. A request that is refused leaves no
session, ends none, and its answer names none.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import orjson
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.mcp import refusals
from interlock.doors.mcp.context import SESSION
from interlock.doors.mcp.session_ids import QUESTION, Agreed, Session, SessionIds, stated
from interlock.http.asgi import Message, Receive, Scope, Send, header, replay

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock

Handle = Callable[[Scope, Receive, Send], Awaitable[None]]
_ID = b"mcp-session-id"
# So many sessions that their clients have ended are remembered, so that they are not opened again.
_MOST_ENDED = 10_000
# Headers of a request that do not belong to a message that this server sends the SDK itself.
_OF_THE_REQUEST = (_ID, b"content-length", b"content-type", b"accept", b"mcp-protocol-version")
_QUESTION = re.compile(rb'"id"\s*:\s*"' + QUESTION.encode())


class Sessions:
    """The open sessions by caller."""

    def __init__(self, handle: Handle, app: Interlock) -> None:
        self._handle = handle
        self._ids = SessionIds(app)
        self._most = app.settings.max_mcp_sessions
        self._server = token_hex(8)
        self._callers: dict[str, dict[str, Session]] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def held(self, caller: str) -> list[str]:
        """The ids of the sessions of a caller that this server holds."""
        return list(self._callers.get(caller, {}))

    async def handle(
        self, caller: str, acting: str | None, scope: Scope, receive: Receive, send: Send, body: bytes
    ) -> None:
        """Hand a request to the SDK in the session that it names, or opens. E3407 at the cap."""
        name, version = header(scope, _ID), header(scope, b"mcp-protocol-version")
        if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await self._handle(scope, replay(body, receive), send)
            return
        owner = f"{caller}\n{acting}"
        if name is None:
            await self._open(caller, owner, scope, replay(body, receive), send, body)
            return
        if self._is_answer_to_another(body):
            await refusals.refuse(send, 409, refusals.asked_elsewhere())
            return
        # A session that the SDK has ended, because it was idle, is opened again.
        for last in (False, True):
            session = await self._find(caller, owner, name, scope)
            if session is None:
                # The SDK refuses it, also where a client has guessed an id of the SDK's own.
                await self._handle(_with_id(scope, b"-"), replay(body, receive), send)
                return
            if await self._pass_on(caller, session, scope, replay(body, receive), send, last=last):
                return

    # Sessions that are held

    async def _find(self, caller: str, owner: str, name: str, scope: Scope) -> Session | None:
        """The session of an id, opened again if this server does not hold it. None if it is no session of theirs."""
        held = self._callers.get(caller, {}).get(name)
        if held is not None:
            return held if held.owner == owner else None
        agreed = await self._ids.read(name, owner)
        if agreed is None or name in self._ended:
            return None
        held = self._callers.get(caller, {}).get(name)
        if held is not None:  # another request has opened it while the id was read
            return held
        opening = self._opening.get(name)
        if opening is None:
            opening = self._opening[name] = asyncio.ensure_future(self._open_again(caller, owner, name, agreed, scope))
            opening.add_done_callback(partial(self._opened, name))
        return await asyncio.shield(opening)

    def _opened(self, name: str, opening: asyncio.Task[Session]) -> None:
        del self._opening[name]
        if not opening.cancelled():
            opening.exception()  # for who waited; it may be that nobody does any more

    async def _open_again(self, caller: str, owner: str, name: str, agreed: Agreed, scope: Scope) -> Session:
        await self._make_room(caller, scope)
        params = {
            "protocolVersion": agreed.version,
            "capabilities": agreed.capabilities,
            "clientInfo": {"name": "a client of another server", "version": "0"},
        }
        answer = await self._say(scope, None, {"id": 0, "method": "initialize", "params": params})
        if answer.status >= 400 or not answer.session:
            raise Failure("E3001", "this server has no room for a further MCP session", retry_after_ms=1000)
        return self._hold(caller, Session(name, answer.session, owner, self._server, monotonic()))

    async def _pass_on(
        self, caller: str, session: Session, scope: Scope, receive: Receive, send: Send, *, last: bool
    ) -> bool:
        """Hand a request to the SDK. False if the SDK does not know the session any more, and nothing was sent."""
        gone = False

        async def note(message: Message) -> None:
            nonlocal gone
            if message["type"] == "http.response.start":
                status = message["status"]
                ended = scope["method"] == "DELETE" and status < 400
                gone = status == 404 and not last
                if ended or status == 404:
                    self._forget(caller, session)
                if ended:
                    self._end_for_good(session.name)
                message = _renamed(message, session)
            if not gone:
                await send(message)

        session.in_flight += 1
        try:
            if scope["method"] == "GET" and not session.announced:
                # The client may have told another server that it is ready. Who listens here hears of changes here.
                session.announced = True
                await self._say(scope, session.local, {"method": "notifications/initialized"})
            await self._handle(_within(scope, session), receive, note)
        finally:
            session.in_flight -= 1
            session.used = monotonic()
        return not gone

    def _hold(self, caller: str, session: Session) -> Session:
        self._callers.setdefault(caller, {})[session.name] = session
        return session

    def _forget(self, caller: str, session: Session) -> None:
        theirs = self._callers.get(caller, {})
        if theirs.get(session.name) is session:
            del theirs[session.name]
        if not theirs:
            self._callers.pop(caller, None)

    def _end_for_good(self, name: str) -> None:
        self._ended[name] = None
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def _is_answer_to_another(self, body: bytes) -> bool:
        """Whether a message is the answer to a question of another server."""
        if _QUESTION.search(body) is None:
            return False
        try:
            document: Any = orjson.loads(body)
        except orjson.JSONDecodeError:
            return False
        message = cast("Json", document) if isinstance(document, dict) else {}
        asked = str(message.get("id"))
        return "method" not in message and asked.startswith(QUESTION) and asked.split("-")[1] != self._server

    # New sessions

    async def _open(self, caller: str, owner: str, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
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
                    name = await self._ids.make(owner, Agreed(opening.version, stated(body)))
                    session = Session(name, opening.session, owner, self._server, monotonic())
                    self._hold(caller, session)
                    ready[0] = _renamed(ready[0], session)
            if full is None:
                for one in ready:
                    await send(one)

        await self._handle(scope, receive, note)
        if opening.session and (full is not None or not opening.greeted):
            await self._end(opening.session, scope)
        if full is not None:
            raise full

    async def _make_room(self, caller: str, scope: Scope) -> None:
        while len(self.held(caller)) >= self._most:
            idle = [one for one in self._callers[caller].values() if not one.in_flight]
            if not idle:
                raise Failure(
                    "E3407",
                    f"{self._most} MCP sessions of this caller are open, and all are in use",
                    resolution="end sessions that are not needed (DELETE), or use one for several requests",
                )
            session = min(idle, key=lambda one: one.used)
            self._forget(caller, session)
            await self._end(session.local, scope)

    # Messages of this server to the SDK

    async def _end(self, local: str, scope: Scope) -> None:
        await self._handle(_own(scope, "DELETE", b"", local), replay(b"", _nothing), _mute)

    async def _say(self, scope: Scope, local: str | None, message: Json) -> _Answer:
        body = orjson.dumps({"jsonrpc": "2.0", **message})
        answer = _Answer()
        await self._handle(_own(scope, "POST", body, local), replay(body, _nothing), partial(_hear, answer))
        return answer


class _Answer:
    """The status and the session of an answer of the SDK."""

    status = 500
    session = ""


async def _hear(answer: _Answer, message: Message) -> None:
    if message["type"] == "http.response.start":
        answer.status = message["status"]
        answer.session = _session_in(message)


class _Opening:
    """The answer to a request without a session. Its head is held back until its body shows whether it greets.

    The SDK names a session in the head of every such answer, even of one that refuses the request.
    """

    def __init__(self) -> None:
        self.session = ""
        self.version = ""
        self.greeted = False
        self._held: list[Message] = []
        self._decided = False

    def filter(self, message: Message) -> list[Message]:
        """The messages that can be sent on by now."""
        if self._decided:
            return [message]
        self._held.append(message)
        if message["type"] == "http.response.start":
            if message["status"] < 400:
                self.session = _session_in(message)
            if self.session:
                return []
        else:
            answer = _message_in(message.get("body", b""))
            if answer is None and message.get("more_body"):
                return []
            if self.session and answer is not None and "result" in answer:
                self.greeted = True
                self.version = str(answer["result"].get("protocolVersion"))
        self._decided = True
        if not self.greeted:
            start = self._held[0]
            self._held[0] = {**start, "headers": [one for one in start["headers"] if one[0].lower() != _ID]}
        return self._held


def _session_in(start: Message) -> str:
    return next((value.decode("latin-1") for name, value in start["headers"] if name.lower() == _ID), "")


def _renamed(start: Message, session: Session) -> Message:
    """The head of an answer of the SDK, with the session's id for its client."""
    name = session.name.encode()
    headers = [(key, name if key.lower() == _ID else value) for key, value in start["headers"]]
    return {**start, "headers": headers}


def _within(scope: Scope, session: Session) -> Scope:
    """A client's request, with the session's id for the SDK."""
    return {**_with_id(scope, session.local.encode()), SESSION: session}


def _with_id(scope: Scope, local: bytes) -> Scope:
    return {**scope, "headers": [(key, local if key == _ID else value) for key, value in scope["headers"]]}


def _own(scope: Scope, method: str, body: bytes, local: str | None) -> Scope:
    """A request of this server in the name of a client's request."""
    headers = [one for one in scope["headers"] if one[0] not in _OF_THE_REQUEST]
    if method == "POST":
        headers += [
            (b"content-type", b"application/json"),
            (b"accept", b"application/json, text/event-stream"),
            (b"content-length", str(len(body)).encode()),
        ]
    if local is not None:
        headers.append((_ID, local.encode()))
    return {**scope, "method": method, "headers": headers}


def _message_in(body: bytes) -> Json | None:
    """The message in a piece of an event stream; None where the piece holds none."""
    for line in body.splitlines():
        if line.startswith(b"data:") and line[5:].strip():
            return orjson.loads(line[5:])
    return None


async def _nothing() -> Message:
    """Wait as for a client that stays: the SDK listens for its going while it answers."""
    return await asyncio.get_running_loop().create_future()


async def _mute(_: Message) -> None:
    return None
