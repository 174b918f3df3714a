"""A running server, asked over its REST interface with a token. Commands with --server are carried out there."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any, Literal, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

import click

from interlock.core.errors import CODES, Failure

Json = dict[str, Any]
T = TypeVar("T")
TIMEOUT_S = 30.0
# A call is answered when it has ended, and nobody knows how long that takes.
CALL_TIMEOUT_S = 3600.0
_MOST_BYTES = 64 << 20
_AT_ONCE = 1 << 16

Method = Literal["GET", "POST", "PUT", "DELETE"]


class Server:
    """One server and the token to show it. No proxy is used and no redirect followed: the token is for it alone."""

    def __init__(self, url: str, token: str | None, *, insecure: bool = False) -> None:
        base = urlsplit(url)
        try:
            host, _ = base.hostname, base.port
        except ValueError:
            host = None
        if base.scheme not in ("http", "https") or host is None or base.query or base.fragment or "@" in base.netloc:
            raise click.UsageError(f"`{url}` is not the URL of a server; write http://HOST:PORT or https://HOST:PORT")
        if base.scheme == "http" and not insecure and not _is_loopback(host):
            words = f"{url} would get the token over plain HTTP, where anybody on the way can read it"
            raise click.UsageError(f"{words}; write https://, or --insecure-http if the network is your own")
        self.url = url
        self._token = token
        self._place = base.netloc
        self._connect = HTTPSConnection if base.scheme == "https" else HTTPConnection
        self._path = base.path.rstrip("/").removesuffix("/v1")

    @property
    def token(self) -> str:
        """The token; E3212 where there is none."""
        if self._token is None:
            words = "a server needs a token: set INTERLOCK_TOKEN, or name a file with --token-file"
            raise Failure("E3212", words)
        return self._token

    async def get(self, path: str, **query: Any) -> Json:
        """The JSON object at a path. Query parameters that are None are left out; those with several values repeat."""
        return await self.ask("GET", path, query=query)

    async def post(self, path: str, body: Json, *, timeout_s: float = TIMEOUT_S) -> Json:
        """The answer to a body that is posted."""
        return await self.ask("POST", path, body, timeout_s=timeout_s)

    async def ask(
        self, method: Method, path: str, body: Json | None = None, *, query: Json | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Json:  # fmt: skip
        """One request. Refusals of the server are raised with their codes; E3502 where it does not answer."""
        status, document = await self.answer(method, path, body, query=query, timeout_s=timeout_s)
        if status < 300:
            return document
        raise failure_of(document) or Failure("E3502", f"{self.url} answered {status}")

    async def answer(
        self, method: Method, path: str, body: Json | None = None, *, query: Json | None = None,
        timeout_s: float = TIMEOUT_S, with_token: bool = True,
    ) -> tuple[int, Json]:  # fmt: skip
        """The HTTP status and the document of one request, whatever they are; E3502 where there is no answer."""
        fields = {name: value for name, value in (query or {}).items() if value is not None}
        whole = self._path + path + (f"?{urlencode(fields, doseq=True)}" if fields else "")
        headers = self._headers() if with_token else {"Accept": "application/json"}
        try:
            status, read = await asyncio.to_thread(self._exchange, method, whole, body, headers, timeout_s, _whole)
        except (OSError, HTTPException) as error:
            raise self._silent(error) from None
        return status, self._document(status, read)

    async def observe(
        self, path: str, body: Json, report: Callable[[Json], None], *, timeout_s: float
    ) -> tuple[int, Json]:
        """The same for a body that is posted. `report` hears of progress, where the server tells of it."""
        headers = {**self._headers(), "Accept": "text/event-stream, application/json"}
        loop = asyncio.get_running_loop()

        def heard(answer: HTTPResponse) -> tuple[int, bytes] | Json:
            if not str(answer.getheader("Content-Type")).startswith("text/event-stream"):
                return answer.status, answer.read(_MOST_BYTES)
            for event in _in_events(answer):
                if "body" in event:
                    return event
                loop.call_soon_threadsafe(report, event)
            raise IncompleteRead(b"")

        try:
            reply = await asyncio.to_thread(self._exchange, "POST", self._path + path, body, headers, timeout_s, heard)
        except (OSError, HTTPException) as error:
            raise self._silent(error) from None
        return (reply["status"], reply["body"]) if isinstance(reply, dict) else (reply[0], self._document(*reply))

    async def scopes(self) -> frozenset[str]:
        """The scopes that the token holds."""
        picture = await self.post("/v1/tokens/inspect", {"token": self.token})
        return frozenset(picture["chain"][-1]["scopes"]) if picture["chain"] else frozenset()

    async def stream(self, path: str) -> AsyncGenerator[bytes]:
        """The bytes at a path, some at a time. E3502 where the connection ends before the answer does."""
        pieces = self._streamed(self._path + path, self._headers(), _in_pieces)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        except (OSError, HTTPException) as error:
            if isinstance(error, IncompleteRead):
                raise Failure("E3502", f"{self.url} ended the connection before the answer was complete") from None
            raise self._silent(error) from None

    async def events(self, path: str) -> AsyncGenerator[Json]:
        """The events at a path, each when it happens, until the server ends the stream."""
        headers = {**self._headers(), "Accept": "text/event-stream"}
        found = self._streamed(self._path + path, headers, _in_events)
        try:
            while (event := await asyncio.to_thread(next, found, None)) is not None:
                if (failure := failure_of({"error": event})) is not None:
                    raise failure
                yield event
        except (OSError, HTTPException) as error:
            raise self._silent(error) from None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}

    def _exchange(
        self,
        method: Method,
        path: str,
        body: Json | None,
        headers: dict[str, str],
        timeout_s: float,
        read: Callable[[HTTPResponse], T],
    ) -> T:
        from interlock.data.canonical import encode

        sent = None if body is None else encode(body)
        if sent is not None:
            headers = {**headers, "Content-Type": "application/json"}
        connection = self._connect(self._place, timeout=timeout_s)
        try:
            connection.request(method, path, sent, headers)
            return read(connection.getresponse())
        finally:
            connection.close()

    def _streamed(self, path: str, headers: dict[str, str], read: Callable[[HTTPResponse], Iterator[T]]) -> Iterator[T]:
        """An answer that is read bit by bit."""
        connection = self._connect(self._place, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                document = self._document(answer.status, answer.read(_MOST_BYTES))
                raise failure_of(document) or Failure("E3502", f"{self.url} answered {answer.status}")
            yield from read(answer)
        finally:
            connection.close()

    def _silent(self, error: Exception) -> Failure:
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
        advice = "start `interlock serve` there, or check the address and the network"
        return Failure("E3502", f"{self.url} does not answer: {why}", resolution=advice)

    def _document(self, status: int, body: bytes) -> Json:
        from interlock.data.canonical import decode

        try:
            document: Any = decode(body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Failure("E3502", f"{self.url} answered {status} without a JSON object; it is not an Interlock server")
        return cast("Json", document)


def _whole(answer: HTTPResponse) -> tuple[int, bytes]:
    return answer.status, answer.read(_MOST_BYTES)


def _in_pieces(answer: HTTPResponse) -> Iterator[bytes]:
    while piece := answer.read(_AT_ONCE):
        yield piece


def _in_events(answer: HTTPResponse) -> Iterator[Json]:
    from interlock.data.canonical import decode

    # While nothing happens the server writes comments, more often than the connection waits.
    while line := answer.readline(_MOST_BYTES):
        if line.startswith(b"data: "):
            yield decode(line.removeprefix(b"data: "))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def part(text: str) -> str:
    """A text as one part of a path."""
    return quote(text, safe="")


def failure_of(document: Json) -> Failure | None:
    """The failure that a document tells of, as it was on the server; None if it tells of none."""
    error: Any = document.get("error")
    fields = cast("Json", error) if isinstance(error, dict) else {}
    row = CODES.get(str(fields.get("error_code")))
    if row is None:
        return None
    retryable = bool(fields.get("retryable"))
    return Failure(
        row.code,
        str(fields.get("message")),
        details=fields.get("details"),
        retryable=retryable,
        retry_after_ms=fields.get("retryAfterMs"),
        native_error_ref=fields.get("native_error_ref"),
        policy_refs=tuple(fields.get("policy_refs") or ()),
        evidence_refs=tuple(fields.get("evidence_refs") or ()),
        resolution=fields.get("resolution"),
        unsettled=bool(row.retryable) and not retryable,
    )
