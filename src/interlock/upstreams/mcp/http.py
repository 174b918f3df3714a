"""MCP over HTTP: a message is a POST, and its answer is a JSON document or a stream of events.

Nothing waits in a task of its own for an answer: the connection hands what arrives to the message's `Post`, and that
to the session. `send` returns once a request is written, so a failure before that is known to have reached nobody.

    answer          belongs to the request whose POST it answers, and has its id; any other fails the request
    broken stream   is resumed by GET with the id of its last event, if its events have ids; nothing is posted twice
    cancellation    closes the stream of the request in the modern era; before it, the server is sent the message
    redirects       are followed by 307 and 308 on the same origin only
    compression     is refused: a few bytes could expand to any number, and we asked for none

Imported only when an upstream is reached by its address, because the SDK is slow to load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote, urljoin, urlsplit

import orjson
from mcp.shared.inbound import encode_header_value

from interlock.call.mcp import MODERN
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.supervise import start_in
from interlock.data.schema import Json
from interlock.data.untrusted import members
from interlock.net import addresses
from interlock.net.connection import Pool, Unreachable
from interlock.net.heads import Origin, UnsafeHeader, split
from interlock.upstreams.mcp.events import Meter
from interlock.upstreams.mcp.posts import EVENT, MAX_REDIRECTS, MAX_RESUMED, SESSION, EventStream, Post
from interlock.upstreams.mcp.session import Session
from interlock.upstreams.remote_config import Tls
from interlock.upstreams.response_limits import Allowance, Intake

CLOSE_S = 5.0
NOTICE_S = 30.0
LISTENS_S = 1.0
MAX_CONNECTIONS = 1024
_REQUEST = 100  # reopening a stream costs as much as this many messages
_FLOODED = "the upstream sent far more messages than it was asked for, so the conversation was ended"
_VERSION = "mcp-protocol-version"
_TARGET = expression(r"/[\x21-\x7e]*")


class Http:
    """A conversation over HTTP."""

    def __init__(
        self,
        url: str,
        origin: Origin,
        session: Session,
        pool: Pool,
        clock: Clock,
        intake: Intake,
        allowance: Allowance,
    ) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.session = session
        self.clock = clock
        self.meter = Meter(intake, allowance, lambda: self._end(_FLOODED))
        self.session_id: str | None = None  # the server's id of this conversation, if its era has such ids
        self.posts: dict[int, Post] = {}
        self._url = url
        self._origin = origin
        self._target = quote(split(url)[1], safe="/%:@!$&'()*+,;=~?")
        self._pool = pool
        self._version = ""
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls,
        url: str,
        headers: Mapping[str, str],
        session: Session,
        *,
        clock: Clock,
        intake: Intake,
        allowance: Allowance,
        allow_private: bool = False,
        tls: Tls | None = None,
    ) -> Http:
        """Prepare a conversation; nothing is sent yet. Raises E3406 for an address that is not allowed."""
        # INVARIANT: a name is resolved and checked once; connections go there whatever it resolves to later.
        found = await addresses.checked(urlsplit(url).hostname or "", allow_private=allow_private)

        async def judged() -> Sequence[str]:
            return found

        try:
            origin = Origin(url, _fixed(headers))
        except UnsafeHeader:
            raise _unsafe() from None
        except ValueError:
            raise OSError("not an address") from None
        context = (tls or Tls()).context() if origin.secure else None
        pool = Pool(judged, origin.port, tls=context, name=origin.name, most=MAX_CONNECTIONS)
        return cls(url, origin, session, pool, clock, intake, allowance)

    # Sending

    def send(self, message: Json, headers: dict[str, str]) -> Awaitable[None] | None:
        """Send a message. A request is then written; anything else is answered, which has to be awaited."""
        if self.ended.done():
            raise Failure("E3502", "the connection to the upstream is closed", details={"sent": False})
        method = message.get("method")
        if method == "notifications/cancelled" and self._withdrawn(members(message.get("params")).get("requestId")):
            return None
        number = cast("int | None", message.get("id")) if method is not None else None
        if "mcp-name" in headers:
            headers["mcp-name"] = encode_header_value(headers["mcp-name"])
        self._version = "" if method == "initialize" else headers.setdefault(_VERSION, self._version)
        if not self._version:
            headers.pop(_VERSION, None)
        if self.session_id is not None:
            headers[SESSION] = self.session_id
        post = Post(self, number, _encoded(message), headers, opens=method == "initialize")
        if number is None:
            return self._notify(post, begins=method == "notifications/initialized")
        request = self._head("POST", headers, len(post.content)) + post.content
        self.posts[number] = post
        post.connection = self._pool.send_now(request, post)
        return None if post.connection is not None else self.post(post)

    async def _notify(self, post: Post, *, begins: bool) -> None:
        """Send a message that is no request, and wait until it is accepted: the next may depend on it."""
        await self.post(post)
        await asyncio.wait({post.over, self.ended}, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        post.cut()
        if begins and self.session_id is not None:
            begun = asyncio.Event()
            self.spawn(self._listen(begun.set))
            if self.session.capabilities:
                # A question outside of answers is lost if it comes before there is a stream for it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LISTENS_S):
                        await begun.wait()

    async def post(self, post: Post, target: str = "") -> None:
        """Write a message; a request that cannot be written is forgotten."""
        head = self._head("POST", post.headers, len(post.content), target)
        try:
            post.connection = await self._pool.send(head + post.content, post)
        except BaseException as error:
            post.forget()
            if isinstance(error, Unreachable):
                raise Failure("E3502", "the upstream cannot be reached", details={"sent": False}) from None
            raise

    def _withdrawn(self, number: Any) -> bool:
        """Give up the answer to a request; returns whether the server need not be told."""
        post = self.posts.get(number)
        if post is None:
            return self._version in MODERN
        modern = post.headers.get(_VERSION) in MODERN
        post.abandon(at_once=modern)
        return modern

    def _head(self, method: str, headers: Mapping[str, str], length: int | None, target: str = "") -> bytes:
        try:
            return self._origin.head(method, target or self._target, headers, length)
        except UnsafeHeader:
            raise _unsafe() from None

    def redirected(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return the path that an answer redirects to on this origin, else nothing; and the address for people,
        without secrets.
        """
        try:
            there, here = urlsplit(urljoin(self._url, headers.get("location", ""))), urlsplit(self._url)
            shown = f"{there.scheme}://{there.hostname}{there.path}"[:200]
            same = (there.scheme, there.hostname, there.port) == (here.scheme, here.hostname, here.port)
        except ValueError:
            return "", "an address that cannot be read"
        target = (there.path or "/") + (f"?{there.query}" if there.query else "")
        return (target if same and _TARGET.fullmatch(target) else ""), shown

    # Streams that are opened by GET

    async def _listen(self, begun: Callable[[], None]) -> None:
        """Read the GET stream on which a handshake-era server sends messages outside of answers.

        Calls `begun` when the stream is open, or when the server offers none.
        """

        def take(message: Any) -> bool:
            if self.session.hear(message):
                self.meter.allowance.give(EVENT)
            return False

        failed, last_id = 0, ""
        while failed < MAX_RESUMED:
            stream = EventStream(self, take)
            stream.on_head = begun
            good = await self.get(stream, last_id)
            if stream.status == 405:
                return  # it has nothing to say
            failed = 0 if good else failed + 1
            last_id = stream.events.last_id or last_id
            await asyncio.sleep(stream.pause_s)

    async def get(self, stream: EventStream, last_id: str) -> bool:
        """Open a stream and wait for its end; returns whether there was one and it ended well."""
        headers = {_VERSION: self._version} if self._version else {}
        if self.session_id is not None:
            headers[SESSION] = self.session_id
        if last_id:
            headers["last-event-id"] = last_id
        target = ""
        for _ in range(MAX_REDIRECTS):
            try:
                self.meter.charge(_REQUEST)
                stream.connection = await self._pool.send(self._head("GET", headers, None, target), stream)
            except (Unreachable, Failure):
                return False
            try:
                good = await stream.over
            finally:
                stream.cut()
            target = stream.moved_to
            if not target:
                return good
            stream.again()
        return False

    # Ending

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return start_in(self._tasks, work)

    def abort(self) -> None:
        self._end("the connection to the upstream was closed")

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        self._pool.close()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        if self.session_id is not None and not self.ended.done():
            headers = {SESSION: self.session_id, **({_VERSION: self._version} if self._version else {})}
            farewell = EventStream(self, lambda _: True)
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._pool.send(self._head("DELETE", headers, None), farewell)
                    await farewell.over
            except (Unreachable, TimeoutError):
                pass  # it forgets the session by itself
        self._end("the connection to the upstream was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _fixed(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of every request: the configured ones, and ours in their place."""
    return {
        "user-agent": "interlock",
        **{name.lower(): value for name, value in headers.items()},
        "accept": "application/json, text/event-stream",
        "accept-encoding": "identity",
        "content-type": "application/json",
    }


def _unsafe() -> Failure:
    words = "a header for the upstream holds a line break or another control character"
    return Failure("E3502", words, details={"sent": False})


def _encoded(message: Json) -> bytes:
    try:
        return orjson.dumps(message)
    except TypeError:
        pass  # whole numbers beyond 64 bits, which Python writes exactly
    try:
        return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError):
        raise Failure("E3302", "an argument is a text that is not Unicode", details={"sent": False}) from None
