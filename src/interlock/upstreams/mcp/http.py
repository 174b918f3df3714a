"""MCP over HTTP: a message is a POST, and its answer is a JSON document or a stream of events.

Nothing waits in a task of its own for an answer: the connection hands what arrives to the message's `_Post`, and that
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
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, cast
from urllib.parse import quote, urljoin, urlsplit

import idna
import orjson
from mcp.shared.inbound import encode_header_value, find_invalid_x_mcp_header, mcp_param_headers, x_mcp_header_map

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.bounds import exactly
from interlock.data.schema import Json
from interlock.store import addresses
from interlock.store.http_client import HttpConnection, Pool, Trouble, Unreachable
from interlock.upstreams.mcp.events import Events, Meter
from interlock.upstreams.mcp.protocol import METHOD_NOT_FOUND, MODERN, members
from interlock.upstreams.mcp.session import Session
from interlock.upstreams.response_limits import SMALL, Allowance, Intake, in_thread
from interlock.upstreams.wire import Tls, retry_after_ms

CLOSE_S = 5.0
NOTICE_S = 30.0
RESUME_S = 1.0
MAX_RESUMED = 2  # attempts in a row that failed
MAX_REDIRECTS = 5
_EVENT = 4  # lines of an event
_REQUEST = 100  # reopening a stream costs as much as this many messages
_FLOODED = "the upstream sent far more messages than it was asked for, so the conversation was ended"
_INVALID_REQUEST, _PARSE_ERROR, _INTERNAL_ERROR, _CONNECTION_CLOSED = -32600, -32700, -32603, -32000
_SESSION = "mcp-session-id"
_VERSION = "mcp-protocol-version"
_OURS = frozenset({"content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"})
_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_TARGET = re.compile(r"/[\x21-\x7e]*")
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_IGNORED = 65_536
# A request of the handshake era that nobody waits for: its answer may still come, for this long.
_ABANDONED_S = 30.0


class Http:
    """A conversation over HTTP."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
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
        self.posts: dict[int, _Post] = {}
        self._origin = _Origin(url, headers)
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
        # INVARIANT: a name is resolved and checked once; connections go to that address whatever it resolves to later.
        parts = urlsplit(url)
        host = parts.hostname or ""
        address = (await addresses.checked(host, allow_private=allow_private))[0]
        secure = parts.scheme == "https"
        context = (tls or Tls()).context() if secure else None
        pool = Pool(address, parts.port or (443 if secure else 80), tls=context, name=_ascii(host))
        return cls(url, headers, session, pool, clock, intake, allowance)

    # Sending

    def send(self, message: Json, headers: Mapping[str, str]) -> Awaitable[None] | None:
        """Send a message. A request is then written; anything else is answered, which has to be awaited."""
        if self.ended.done():
            raise Failure("E3502", "the connection to the upstream is closed", details={"sent": False})
        method = message.get("method")
        if method == "notifications/cancelled" and self._withdrawn(members(message.get("params")).get("requestId")):
            return None
        number = cast("int | None", message.get("id")) if method is not None else None
        named = dict(headers)
        if "mcp-name" in named:
            named["mcp-name"] = encode_header_value(named["mcp-name"])
        self._version = "" if method == "initialize" else named.setdefault(_VERSION, self._version)
        if not self._version:
            named.pop(_VERSION, None)
        if self.session_id is not None:
            named[_SESSION] = self.session_id
        post = _Post(self, number, _encoded(message), named, opens=method == "initialize")
        if number is None:
            return self._notify(post, begins=method == "notifications/initialized")
        request = self._origin.head("POST", named, len(post.content)) + post.content
        self.posts[number] = post
        post.connection = self._pool.send_now(request, post)
        return None if post.connection is not None else self.post(post)

    async def _notify(self, post: _Post, *, begins: bool) -> None:
        """Send a message that is no request, and wait until it is accepted: the next may depend on it."""
        await self.post(post)
        await asyncio.wait({post.over, self.ended}, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        post.cut()
        if begins and self.session_id is not None:
            self.spawn(self._listen())

    async def post(self, post: _Post, target: str = "") -> None:
        """Write a message; a request that cannot be written is forgotten."""
        head = self._origin.head("POST", post.headers, len(post.content), target)
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

    # Streams that are opened by GET

    async def _listen(self) -> None:
        """Hear what a server of the handshake era has to say outside of answers."""

        def take(message: Any) -> bool:
            if self.session.hear(message):
                self.meter.allowance.give(_EVENT)
            return False

        failed, last_id = 0, ""
        while failed < MAX_RESUMED:
            stream = _Stream(self, take)
            good = await self.get(stream, last_id)
            if stream.status == 405:
                return  # it has nothing to say
            failed = 0 if good else failed + 1
            last_id = stream.events.last_id or last_id
            await asyncio.sleep(stream.pause_s)

    async def get(self, stream: _Stream, last_id: str) -> bool:
        """Open a stream and wait for its end; returns whether there was one and it ended well."""
        headers = {_VERSION: self._version} if self._version else {}
        if self.session_id is not None:
            headers[_SESSION] = self.session_id
        if last_id:
            headers["last-event-id"] = last_id
        target = ""
        for _ in range(MAX_REDIRECTS):
            try:
                self.meter.charge(_REQUEST)
                stream.connection = await self._pool.send(self._origin.head("GET", headers, None, target), stream)
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
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def redirected(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return where an answer redirects to: its path if the origin is the same, and the address for people."""
        return self._origin.redirected(headers.get("location", ""))

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
            headers = {_SESSION: self.session_id, **({_VERSION: self._version} if self._version else {})}
            farewell = _Stream(self, lambda _: True)
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._pool.send(self._origin.head("DELETE", headers, None), farewell)
                    await farewell.over
            except (Unreachable, TimeoutError):
                pass  # it forgets the session by itself
        self._end("the connection to the upstream was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Stream:
    """The answer to a GET: a stream of events, each given to `take`, which says whether it was the last one."""

    def __init__(self, http: Http, take: Callable[[Any], bool]) -> None:
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
class _Post(_Stream):
    """A message on its way, and the reading of its answer. `number` is the id of a request."""

    def __init__(
        self, http: Http, number: int | None, content: bytes, headers: Mapping[str, str], *, opens: bool
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
            session.hear(fields)
            return False
        # INVARIANT: what answers a POST answers its request by its id, and no other. An error may have none.
        waits, number = not self._complete, self.number
        if fields.get("id") != number and not ("error" in fields and fields.get("id") is None):
            words = "the upstream's answer has the id of another request"
            fields = {"error": {"code": _INVALID_REQUEST, "message": words}}
        self.forget()
        if number is not None and waits and session.hear({**fields, "id": number}):
            self._http.meter.allowance.give(_EVENT + self.events.charged)
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
        failure = _failure(status, self._http.clock, headers, in_session=_SESSION in self.headers, is_json=is_json)
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
            if self._opens and headers.get(_SESSION):
                self._http.session_id = headers[_SESSION]
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
            stream = _Stream(self._http, self.take)
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
}


def _failure(
    status: int, clock: Clock, headers: Mapping[str, str], *, in_session: bool, is_json: bool
) -> Failure | None:
    """Convert a status outside the protocol to a failure."""
    if status == 429:
        pause = retry_after_ms(headers.get("retry-after"), clock.now_ms())
        return Failure("E3504", "the upstream asks for a pause", retry_after_ms=pause, details={"sent": False})
    if status in (401, 403):
        return Failure(
            "E3502",
            f"the upstream does not accept our credentials ({status})",
            details={"sent": False},
            resolution="store what it wants to be shown (interlock secrets set NAME), and add it with"
            " --secret Authorization=NAME, or the header that it asks for",
        )
    if status == 404 and in_session:
        return Failure(
            "E3502", "the upstream has forgotten the session", details={"sent": False, "reason": "session_gone"}
        )
    if status >= 500 and not is_json:
        return Failure("E3502", f"the upstream answered with status {status}", details={"sent": True})
    return None


def _uncompressed(headers: Mapping[str, str]) -> bool:
    return headers.get("content-encoding", "identity").lower() in ("identity", "")


class _Origin:
    """Writes the heads of requests to one address. Raises E3502 for a header that would not stay one line."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
        host = _ascii(parts.hostname or "")
        self._target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (
            "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?") if parts.query else ""
        )
        self._fixed = {
            "host": (f"[{host}]" if ":" in host else host) + port,
            "user-agent": "interlock",
            **{name.lower(): value for name, value in headers.items() if name.lower() not in _OURS},
            "accept": "application/json, text/event-stream",
            "accept-encoding": "identity",
            "content-type": "application/json",
        }
        self._lines = _lines(self._fixed)

    def head(self, method: str, headers: Mapping[str, str], length: int | None, target: str = "") -> bytes:
        first = f"{method} {target or self._target} HTTP/1.1\r\n"
        last = "\r\n" if length is None else f"content-length: {length}\r\n\r\n"
        if self._fixed.keys().isdisjoint(headers):
            return (first + self._lines + _lines(headers) + last).encode()
        return (first + _lines({**self._fixed, **headers}) + last).encode()

    def redirected(self, location: str) -> tuple[str, str]:
        """Return the path of a location on this origin, else nothing; and the location for people, without secrets."""
        try:
            there, here = urlsplit(urljoin(self._url, location)), urlsplit(self._url)
            shown = f"{there.scheme}://{there.hostname}{there.path}"[:200]
            same = (there.scheme, there.hostname, there.port) == (here.scheme, here.hostname, here.port)
        except ValueError:
            return "", "an address that cannot be read"
        target = (there.path or "/") + (f"?{there.query}" if there.query else "")
        return (target if same and _TARGET.fullmatch(target) else ""), shown


def _lines(headers: Mapping[str, str]) -> str:
    if _UNSAFE.search("".join(headers.values())):
        words = "a header for the upstream holds a line break or another control character"
        raise Failure("E3502", words, details={"sent": False})
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _ascii(host: str) -> str:
    if host.isascii():
        return host
    try:
        return idna.encode(host, uts46=True).decode()
    except idna.IDNAError:
        raise OSError("not a name") from None


def _encoded(message: Json) -> bytes:
    try:
        return orjson.dumps(message)
    except TypeError:
        pass  # whole numbers beyond 64 bits, which Python writes exactly
    try:
        return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError):
        raise Failure("E3302", "an argument is a text that is not Unicode", details={"sent": False}) from None


def header_parameters(schema: Json) -> list[list[str]]:
    """Return the arguments that a server wants repeated in headers: the path to each, then its header; E3105 if
    invalid.
    """
    if (fault := find_invalid_x_mcp_header(schema)) is not None:
        raise Failure("E3105", fault)
    return [[*path, header] for path, header in x_mcp_header_map(schema).items()]


def parameter_headers(wanted: list[list[str]], arguments: Json) -> dict[str, str]:
    """Make those headers for one call."""
    return mcp_param_headers({tuple(path): header for *path, header in wanted}, arguments)
