"""HTTP to services that an operator configures: one client for all of them, with the same bounds.

The policy engine, the key sets of issuers, Vault and the receivers of webhooks are asked with `Outgoing`. HTTP
upstreams have rules of their own for requests and answers, and share the session (`open_session`). What holds for all:

    names       are resolved on threads of our own, every address is judged (`store.addresses`), and the connection goes
                to an address that was judged
    floods      the parser is given bounded parts; a connection that sends mostly heads and sizes of chunks is cut
                (`store.metered`)
    once        nothing is sent twice: a request that broke off is not repeated by the library
    environment neither its proxies nor its credentials are used

`Outgoing` adds: no redirect is followed, an answer has so many bytes and so much time in all, and a compressed one is
refused.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from interlock.store import addresses

if TYPE_CHECKING:
    import ssl

    import aiohttp

Judge = Callable[[str], Awaitable[Sequence[str]]]
Trouble = Literal["unreachable", "late", "flooded", "too long", "compressed"]

CONNECT_S = 5.0
KEEP_ALIVE_S = 30.0


class Answer(NamedTuple):
    """An answer. `headers` are found by any spelling of their names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Unanswered(Exception):  # noqa: N818 - a finding about the other side
    """No answer came that could be read. Holds nothing of the request: neither its address nor its headers."""

    def __init__(self, why: Trouble) -> None:
        super().__init__(why)
        self.why: Trouble = why


class Outgoing:
    """Asks services over HTTP. Belongs to one event loop; connections are opened when they are first needed."""

    def __init__(
        self,
        allowed: addresses.Allowed = "public",
        *,
        keep_alive: bool = False,
        connections: int = 20,
        tls: ssl.SSLContext | None = None,
        resolve: addresses.Resolve | None = None,
    ) -> None:
        self._judge = partial(
            addresses.checked,
            allow_private=allowed == "any",
            private_only=allowed == "private",
            resolve=resolve or addresses.resolve_by_system,
        )
        self._keep_alive = keep_alive
        self._connections = connections
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        method: str,
        url: str,
        *,
        most: int,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        unread_s: float | None = None,
    ) -> Answer:
        """Send a request once. Raises Unanswered, or E3406 for an address that is not allowed.

        With `unread_s` the status is what matters: a body that is longer than `most` or not there in that time is cut.
        """
        import aiohttp
        import yarl

        from interlock.store.metered import Flooded

        headers = {"accept-encoding": "identity", **(headers or {})}
        try:
            async with asyncio.timeout(timeout_s):
                host = urlsplit(url).hostname or ""
                if addresses.parse(host) is not None:
                    await self._judge(host)  # the library does not resolve it, so it would not be judged
                async with self._opened().request(
                    method, yarl.URL(url, encoded=True), headers=headers, data=body, allow_redirects=False
                ) as response:
                    if unread_s is not None:
                        body = await _beginning(response, most, unread_s)
                    elif response.headers.get("content-encoding", "identity").lower() == "identity":
                        body = await _read(response, most)
                    else:
                        raise Unanswered("compressed")
                    return Answer(response.status, response.headers, body)
        except Flooded:
            raise Unanswered("flooded") from None
        except TimeoutError:
            raise Unanswered("late") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise Unanswered("unreachable") from None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = open_session(
                self._judge,
                _once,
                tls=self._tls,
                connections=self._connections,
                keep_alive=self._keep_alive,
                keep_names=False,
                decompress=False,
            )
        return self._session


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    body = bytearray()
    while part := await response.content.readany():
        body += part
        if len(body) > most:
            response.close()
            raise Unanswered("too long")
    return bytes(body)


async def _beginning(response: aiohttp.ClientResponse, most: int, seconds: float) -> bytes:
    """As much of a body as there is in so many bytes and seconds. A short one leaves the connection for others."""
    import aiohttp

    try:
        async with asyncio.timeout(seconds):
            return await _read(response, most)
    except (TimeoutError, Unanswered, aiohttp.ClientError):
        response.close()
        return b""


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Turns a broken connection into an exception that the library does not know, so it does not send again."""
    import aiohttp

    from interlock.store.metered import Flooded

    try:
        return await handler(request)
    except Flooded:
        raise Unanswered("flooded") from None
    except TimeoutError:
        raise Unanswered("late") from None
    except (aiohttp.ClientError, ConnectionError):
        raise Unanswered("unreachable") from None


def open_session(
    judge: Judge,
    once: aiohttp.ClientMiddlewareType,
    *,
    tls: ssl.SSLContext | None = None,
    connections: int,
    connect_s: float = CONNECT_S,
    keep_alive: bool = True,
    keep_names: bool = True,
    decompress: bool = True,
) -> aiohttp.ClientSession:
    """A session whose connections are metered and go to addresses that `judge` gives for a name.

    With `keep_names` these addresses are remembered for some seconds.

    `once` is its middleware. It must turn every broken connection into an exception that aiohttp does not know: left to
    itself, aiohttp sends GET, PUT and DELETE a second time when a kept connection breaks.
    """
    import aiohttp
    from aiohttp.abc import AbstractResolver, ResolveResult

    from interlock.store.metered import MeteredHandler

    class Judged(AbstractResolver):
        """Gives the addresses of a name if every one of them is allowed."""

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            return [
                ResolveResult(
                    hostname=host,
                    host=address,
                    port=port,
                    family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                    proto=0,
                    flags=socket.AI_NUMERICHOST,
                )
                for address in await judge(host)
                if family in (socket.AF_UNSPEC, socket.AF_INET6 if ":" in address else socket.AF_INET)
            ]

        async def close(self) -> None:
            pass

    keeping: dict[str, Any] = {"keepalive_timeout": KEEP_ALIVE_S} if keep_alive else {"force_close": True}
    connector = aiohttp.TCPConnector(
        limit=connections, resolver=Judged(), use_dns_cache=keep_names, ssl=True if tls is None else tls, **keeping
    )
    # The library has no public way to choose its protocol.
    factory: Any = partial(MeteredHandler, asyncio.get_running_loop())
    connector._factory = factory  # pyright: ignore[reportPrivateUsage]
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),  # what one caller is handed is no other caller's business
        headers={"user-agent": "interlock"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        middlewares=(once,),
        auto_decompress=decompress,
    )
