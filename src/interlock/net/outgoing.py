"""Requests to services that an operator configures: policy engine, key sets of issuers, Vault, receivers of webhooks.

`Outgoing` adds to `net.client`: every address of a name is judged by one rule (`net.addresses`), an answer has so many
bytes and so much time in all, and a compressed one is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from interlock.core.record import NamedTuple
from interlock.net import addresses
from interlock.net.client import Broken, Client
from interlock.net.connection import Unreachable

if TYPE_CHECKING:
    import ssl

Trouble = Literal["unreachable", "late", "flooded", "too long", "compressed"]

CONNECT_S = 5.0


class HttpAnswer(NamedTuple):
    """An answer. Names of headers are in lower case."""

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
        judged = partial(
            addresses.checked,
            allow_private=allowed == "any",
            private_only=allowed == "private",
            resolve=resolve or addresses.resolve_by_system,
        )
        self._client = Client(
            judged,
            connections=connections,
            tls=None if tls is None else lambda: tls,
            connect_s=CONNECT_S,
            keep_alive=keep_alive,
            keep_names=False,
        )

    async def ask(
        self,
        method: str,
        url: str,
        *,
        most: int,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> HttpAnswer:
        """Send a request once. Raises Unanswered, or E3406 for an address that is not allowed.

        With `most=0` the status and the headers are all that is wanted, and the body is not waited for.
        """
        headers = {"accept": "*/*", "accept-encoding": "identity", **(headers or {})}

        def limit(_: int, named: Mapping[str, str]) -> int | None:
            return most if most and _is_plain(named) else None

        try:
            async with asyncio.timeout(timeout_s):
                status, named, content, whole = await self._client.ask(method, url, headers, body, limit)
        except Broken as broken:
            raise Unanswered("flooded" if broken.why == "flooded" else "unreachable") from None
        except Unreachable:
            raise Unanswered("unreachable") from None
        except TimeoutError:
            raise Unanswered("late") from None
        if most and not whole:
            raise Unanswered("too long" if _is_plain(named) else "compressed")
        return HttpAnswer(status, named, content)

    async def close(self) -> None:
        self._client.close()


def _is_plain(headers: Mapping[str, str]) -> bool:
    return headers.get("content-encoding", "identity").lower() == "identity"
