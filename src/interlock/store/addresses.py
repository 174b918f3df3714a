"""Where connections may go: public addresses, and nowhere else unless an operator says so.

Whoever may choose an address that this machine then connects to could reach what only this machine can: its own ports,
its neighbours, the cloud's metadata service. Three things prevent it:

1. A name is resolved here, and *every* address it has must be allowed. Numbers are read as the system reads them
   (decimal, hex, octal, short), and IPv4 inside IPv6 is taken out, before they are judged.
2. The connection goes to an address that was judged. Nobody resolves the name a second time, so a name that changes its
   mind in between (rebinding) gains nothing. TLS still checks the certificate for the name.
3. Some addresses are never allowed, `allow_private` or not: metadata services, link-local, multicast, reserved.
"""

from __future__ import annotations

import ipaddress
import socket
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from interlock.core.errors import Failure
from interlock.core.threads import LOOKUPS

if TYPE_CHECKING:
    import ssl

    import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Reach = Literal["public", "private", "never"]
Resolve = Callable[[str], Awaitable[Sequence[str]]]

# The standard library's own idea of `is_global` changes between versions; a table does not.
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # a cloud's host agent, in the middle of public space
            "100.100.100.200/32", "fd00:ec2::254/128",  # metadata services in the middle of private space
            "0.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15",
            "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
            "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
        ),
    )
)  # fmt: skip
_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7"),
    )
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def parse(host: str) -> Address | None:
    """The address that a host is, however it is written; None for a name."""
    text = unicodedata.normalize("NFKC", host).replace("。", ".").strip("[]").removesuffix(".")
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        pass
    if not text.isascii() or any(character.isspace() for character in text):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(text))
    except (OSError, ValueError):
        return None


def reach(address: Address) -> Reach:
    """Whose network an address belongs to: everybody's, our own, or nobody's to connect to."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = _inside(address)
        if inner is not None:
            return reach(inner)
    if any(address in network for network in _NEVER):
        return "never"
    if any(address in network for network in _PRIVATE):
        return "private"
    # IPv6 outside global unicast is not handed out to anybody: the forms that embed IPv4, link- and site-local,
    # multicast, and whatever comes to be reserved.
    return "public" if address.version == 4 or address in _GLOBAL_UNICAST else "never"


def _inside(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that connections to this one really go to."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped


async def resolve_by_system(host: str) -> Sequence[str]:
    """The addresses of a name, as the system knows them. OSError when it has none."""
    found = await LOOKUPS.run(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


async def checked(host: str, *, allow_private: bool = False, resolve: Resolve = resolve_by_system) -> tuple[str, ...]:
    """The addresses of a host, all of them allowed; E3406 when one is not, OSError when there is none."""
    literal = parse(host)
    texts = [str(literal)] if literal is not None else await resolve(host)
    allowed: list[str] = []
    for text in texts:
        address = parse(text)
        where = "never" if address is None else reach(address)
        if where == "never" or (where == "private" and not allow_private):
            raise Failure("E3406", _refusal(host, where))
        allowed.append(str(address))
    if not allowed:
        raise OSError(f"{host} has no address")
    return tuple(allowed)


def _refusal(host: str, where: Reach) -> str:
    if where == "private":
        return f"`{host}` is on a private network; allow private networks for it, or use a public address"
    return f"`{host}` leads to an address that is never connected to; use a public address"


def connection_pool(
    *,
    allow_private: bool = False,
    resolve: Resolve = resolve_by_system,
    dial: httpcore.AsyncNetworkBackend | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> httpcore.AsyncConnectionPool:
    """A pool of HTTP connections that only ever go to checked addresses. `dial` makes the connections themselves.

    It follows no redirects, reads no proxy from the environment, and raises E3406 from the request.
    """
    import httpcore

    class Guarded(httpcore.AsyncNetworkBackend):
        """Resolves, judges, and connects to what was judged. The pool goes on to check TLS for the name."""

        def __init__(self) -> None:
            self._dial = dial or cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())

        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
            local_address: str | None = None,
            socket_options: Iterable[Any] | None = None,
        ) -> httpcore.AsyncNetworkStream:
            try:
                addresses = await checked(host, allow_private=allow_private, resolve=resolve)
            except OSError:
                raise httpcore.ConnectError("the name has no address") from None
            each_s = None if timeout is None else timeout / len(addresses)
            for address in addresses[:-1]:
                try:
                    return await self._dial.connect_tcp(address, port, each_s, local_address, socket_options)
                except (httpcore.ConnectError, httpcore.ConnectTimeout):
                    pass  # the next one may answer
            return await self._dial.connect_tcp(addresses[-1], port, each_s, local_address, socket_options)

        async def sleep(self, seconds: float) -> None:
            await self._dial.sleep(seconds)

    return httpcore.AsyncConnectionPool(network_backend=Guarded(), ssl_context=ssl_context, max_connections=20)
