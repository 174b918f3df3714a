"""Answers to MCP requests over HTTP: the POST of a message and the stream of events, as their bytes arrive.

The connection calls an `EventStream` or `Post` with each piece of an answer; no task waits. What a server sends too
much of is charged to the conversation's meter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, Protocol, cast

from interlock.call.mcp import METHOD_NOT_FOUND
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.bounds import exactly
from interlock.data.schema import Json
from interlock.data.untrusted import members
from interlock.net.connection import HttpConnection, Trouble
from interlock.upstreams.mcp.events import Events, Meter
from interlock.upstreams.mcp.session import Session
from interlock.upstreams.response_limits import SMALL, in_thread
from interlock.upstreams.wire import retry_after_ms

SESSION = "mcp-session-id"
EVENT = 4  # lines of an event
MAX_REDIRECTS = 5
RESUME_S = 1.0
MAX_RESUMED = 2  # attempts in a row that failed
_INVALID_REQUEST, _PARSE_ERROR, _INTERNAL_ERROR, _CONNECTION_CLOSED = -32600, -32700, -32603, -32000
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_IGNORED = 65_536
# A request of the handshake era that nobody waits for: its answer may still come, for this long.
_ABANDONED_S = 30.0


class Conversation(Protocol):
    """The conversation that an answer belongs to (`mcp.http.Http`)."""

    session: Session
    clock: Clock
    meter: Meter
    session_id: str | None
    posts: dict[int, Post]

    async def post(self, post: Post, target: str = "") -> None: ...

    async def get(self, stream: EventStream, last_id: str) -> bool: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def redirected(self, headers: Mapping[str, str]) -> tuple[str, str]: ...

    def abort(self) -> None: ...


class EventStream:
    """The answer to a GET: a stream of events, each given to `take`, which says whether it was the last one.

    `on_head` is called when the server has begun to answer.
    """

    on_head: Callable[[], None] | None = None

    def __init__(self, http: Conversation, take: Callable[[Any], bool]) -> None:
        self.connection: HttpConnection | None = None
        self.status = 0
        self.moved_to = ""
        self.events = Events(http.meter)
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._http = http
        self._take = take
        self._reads = self._complete = False
        self._ignored = 0

    @property
    def pause_s(self) -> float:
        """The pause before the stream is opened again."""
        return RESUME_S if self.events.retry_ms is None else self.events.retry_ms / 1000

    def again(self) -> None:
        self.over, self.moved_to = asyncio.get_running_loop().create_future(), ""

    def cut(self) -> None:
        """End the connection, unless it is free for others already."""
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.cut_for(self)

    def head(self, connection: HttpConnection, status: int, headers: Mapping[str, str]) -> None:
        self.connection = connection
        self.status = status
        media = headers.get("content-type", "").lower()
        self._reads = status == 200 and media.startswith("text/event-stream") and _uncompressed(headers)
        if status in _REDIRECTS:
            self.moved_to, _ = self._http.redirected(headers)
        if self.on_head is not None:
            self.on_head()

    def body(self, data: bytes) -> bool:
        if not self._reads or self._complete:
            self._ignored += len(data)
            if self._ignored > _MOST_IGNORED:
                self.cut()
                self._finish(good=False)
            return False
        try:
            whole, many = self.events.feed(data)
            if whole:
                self._read(whole)
        except Failure as failure:
            self.refuse(failure)
            return True
        return many

    def _read(self, whole: bytes) -> None:
        if len(whole) <= SMALL:
            self._deliver(self.events.read(whole))
            return
        assert self.connection is not None
        self.connection.pause()
        self._http.spawn(self._read_large(whole, self.connection))

    async def _read_large(self, whole: bytes, connection: HttpConnection) -> None:
        try:
            self._deliver(await in_thread(self.events.read, whole))
        except Failure as failure:
            self.refuse(failure)
        finally:
            connection.resume()

    def _deliver(self, messages: list[Any]) -> None:
        for message in messages:
            if not self._complete and self._take(message):
                self._complete = True
        if self._complete and self.connection is not None:
            self.connection.linger()

    def refuse(self, failure: Failure) -> None:
        self._finish(good=False)

    def _finish(self, *, good: bool) -> None:
        self._complete = True
        if not good:
            self.cut()
        if not self.over.done():
            self.over.set_result(good)

    def done(self) -> None:
        self.connection = None
        if self._reads and not self._complete and (rest := self.events.rest()):
            try:
                self._deliver(self.events.read(rest))
            except Failure as failure:
                self.refuse(failure)
                return
        self._finish(good=self._reads)

    def broke(self, why: Trouble) -> None:
        self.connection = None
        self._finish(good=False)


# many methods: one state machine per message: its answer in each form, and each way to end it
class Post(EventStream):
    """A message on its way, and the reading of its answer. `number` is the id of a request."""

    def __init__(
        self, http: Conversation, number: int | None, content: bytes, headers: Mapping[str, str], *, opens: bool
    ) -> None:
        super().__init__(http, self.take)
        self.number = number
        self.content = content
        self.headers = headers
        self._opens = opens
        self._body = bytearray()
        self._charged = 0
        self._kind: Literal["nothing", "json", "error", "events"] = "nothing"
        self._redirects = 0
        self._resuming: asyncio.Task[None] | None = None

    # How the request ends

    def forget(self) -> None:
        """Nobody waits for an answer any more."""
        if self.number is not None:
            self._http.posts.pop(self.number, None)
        self._complete = True
        if not self.over.done():
            self.over.set_result(True)

    def abandon(self, *, at_once: bool) -> None:
        """Give up the answer: at once, or after some time in which the server may act on a cancellation."""
        self.forget()
        if self._resuming is not None:
            self._resuming.cancel()
        if at_once:
            self.cut()
        else:
            asyncio.get_running_loop().call_later(_ABANDONED_S, self.cut)

    def refuse(self, failure: Failure) -> None:
        """Fail the request, and read nothing more."""
        self.fail(failure)
        self.cut()

    def fail(self, failure: Failure) -> None:
        number = self.number
        waits = not self._complete
        self.forget()
        if number is not None and waits:
            self._http.session.fail(number, failure)

    def error(self, code: int, words: str) -> None:
        """Answer the request in the place of the server."""
        self.take({"error": {"code": code, "message": words}})

    def take(self, message: Any) -> bool:
        """Take a message of the answer; returns whether it is the answer itself."""
        session = self._http.session
        if not isinstance(message, dict):
            message = {"error": {"code": _PARSE_ERROR, "message": "the upstream's answer is not a message"}}
        fields = cast("Json", message)
        if "method" in fields:
            session.hear(fields, of=self.number)
            return False
        # INVARIANT: what answers a POST answers its request by its id, and no other. An error may have none.
        waits, number = not self._complete, self.number
        if fields.get("id") != number and not ("error" in fields and fields.get("id") is None):
            words = "the upstream's answer has the id of another request"
            fields = {"error": {"code": _INVALID_REQUEST, "message": words}}
        self.forget()
        if number is not None and waits and session.hear({**fields, "id": number}, self.status):
            self._http.meter.allowance.give(EVENT + self.events.charged)
        return True

    # Reading

    def head(self, connection: HttpConnection, status: int, headers: Mapping[str, str]) -> None:
        self.connection = connection
        self.status = status
        if not _uncompressed(headers):
            words = "the upstream answered in a compressed form, which it was asked not to do"
            self.refuse(Failure("E3401", words))
        elif status in _REDIRECTS and "location" in headers:
            self._redirected(status, headers)
        elif self.number is not None:
            self._judge(status, headers)
            if self._complete:
                connection.linger()

    def _redirected(self, status: int, headers: Mapping[str, str]) -> None:
        self.moved_to, shown = self._http.redirected(headers)
        self._redirects += 1
        if status not in (307, 308) or not self.moved_to or self._redirects > MAX_REDIRECTS:
            self.moved_to = ""
            words = f"the upstream redirects to {shown}, which is not followed; if it is meant, use that address"
            self.error(_INVALID_REQUEST, words)

    def _judge(self, status: int, headers: Mapping[str, str]) -> None:
        media = headers.get("content-type", "").lower()
        is_json = media.startswith("application/json")
        failure = _failure(status, self._http.clock, headers, in_session=SESSION in self.headers, is_json=is_json)
        if failure is not None:
            self.fail(failure)
        elif status == 202:
            self.error(_INVALID_REQUEST, "the upstream answered a request with 202 Accepted")
        elif status >= 400:
            if is_json:
                self._kind = "error"
            else:
                self._error_of(status)
        else:
            if self._opens and headers.get(SESSION):
                self._http.session_id = headers[SESSION]
            if is_json:
                self._kind = "json"
            elif media.startswith("text/event-stream"):
                self._kind, self._reads = "events", True
            else:
                self.error(_INVALID_REQUEST, f"the upstream answered in an unexpected form: {media[:100]}")

    def _error_of(self, status: int) -> None:
        if status == 404:
            self.error(METHOD_NOT_FOUND, "Not Found")
        else:
            self.error(_INTERNAL_ERROR, f"the upstream answered with status {status}")

    def body(self, data: bytes) -> bool:
        if self._kind not in ("json", "error") or self._complete:
            return super().body(data)
        self._body += data
        self._charged += 1
        meter = self._http.meter
        try:
            meter.charge(1)
            if len(self._body) > meter.intake.max_bytes:
                raise meter.intake.too_large()
        except Failure as failure:
            self.refuse(failure)
        return False

    def done(self) -> None:
        self.connection = None
        if self._complete:
            self.forget()
        elif self.moved_to:
            self._http.spawn(self._follow())
        elif self._kind in ("json", "error"):
            self._http.meter.allowance.give(self._charged)  # it was the answer to a request
            if len(self._body) > SMALL:
                self._http.spawn(self._answer_large())
            else:
                self._answer(self._parse)
        elif self.number is None:
            self.forget()
        else:
            super().done()

    async def _follow(self) -> None:
        target, self.moved_to = self.moved_to, ""
        try:
            await self._http.post(self, target)
        except Failure as failure:
            self._complete = False
            self.fail(failure)

    def _parse(self) -> Any:
        content = bytes(self._body)
        self._http.meter.intake.check(content)
        return exactly(content)

    def _answer(self, parse: Callable[[], Any]) -> None:
        try:
            message = parse()
        except Failure as failure:
            self.fail(failure)
            return
        except ValueError as error:
            message = {"error": {"code": _PARSE_ERROR, "message": f"the upstream's answer is not JSON: {error}"}}
        fields = members(message)
        if self._kind == "error" and not isinstance(fields.get("error"), dict):
            self._error_of(self.status)
        elif not self.take(message):
            self.error(_CONNECTION_CLOSED, "the upstream answered with a message that is no answer")

    async def _answer_large(self) -> None:
        try:
            message = await in_thread(self._parse)
        except (Failure, ValueError) as error:
            caught = error

            def parse() -> Any:
                raise caught

            self._answer(parse)
        else:
            self._answer(lambda: message)

    def _finish(self, *, good: bool) -> None:
        """The stream is over, though no answer came: it is resumed, if its events have ids."""
        if self._complete:
            self.forget()
        elif self.events.last_id:
            self._resuming = self._http.spawn(self._resume())
        else:
            self.error(_CONNECTION_CLOSED, "the upstream's stream ended without an answer")

    async def _resume(self) -> None:
        failed, last_id, pause_s = 0, self.events.last_id, self.pause_s
        while failed < MAX_RESUMED and not self._complete:
            await asyncio.sleep(pause_s)
            stream = EventStream(self._http, self.take)
            good = await self._http.get(stream, last_id)
            failed = 0 if good else failed + 1
            last_id, pause_s = stream.events.last_id or last_id, stream.pause_s
        self.error(_CONNECTION_CLOSED, "the upstream's stream ended without an answer and could not be resumed")

    def broke(self, why: Trouble) -> None:
        self.connection = None
        if why == "flooded" and self.status:
            self.fail(self._http.meter.intake.flooded())
            self._http.abort()
        elif self._reads and why == "broke off":
            self._finish(good=False)
        else:
            self.fail(Failure("E3502", f"the connection to the upstream {_BROKE[why]}", details={"sent": True}))


_BROKE = {
    "broke off": "broke off before it had answered",
    "flooded": "carried a head over the limits",
    "unreadable": "carried something that is not HTTP",
    "followed": "carried something that is not HTTP",
}


def _failure(
    status: int, clock: Clock, headers: Mapping[str, str], *, in_session: bool, is_json: bool
) -> Failure | None:
    """Convert a status outside the protocol to a failure."""
    ref = f"http:{status}"
    if status == 429:
        pause, words = retry_after_ms(headers.get("retry-after"), clock.now_ms()), "the upstream asks for a pause"
        return Failure("E3504", words, retry_after_ms=pause, details={"sent": False}, native_error_ref=ref)
    if status in (401, 403):
        return Failure(
            "E3502",
            f"the upstream does not accept our credentials ({status})",
            details={"sent": False},
            resolution="store what it wants to be shown (interlock secrets set NAME), and add it with"
            " --secret Authorization=NAME, or the header that it asks for",
            native_error_ref=ref,
        )
    if status == 404 and in_session:
        # Without the status: the request is repeated in a new session, whatever statuses its policy names.
        return Failure(
            "E3502", "the upstream has forgotten the session", details={"sent": False, "reason": "session_gone"}
        )
    if status >= 500 and not is_json:
        words = f"the upstream answered with status {status}"
        return Failure("E3502", words, details={"sent": True}, native_error_ref=ref)
    return None


def _uncompressed(headers: Mapping[str, str]) -> bool:
    return headers.get("content-encoding", "identity").lower() in ("identity", "")
