"""Allowed destinations of connections: public addresses, and others only if an operator allows them.

A caller who may choose an address that this machine then connects to could reach what only this machine can: its own
ports, its neighbours, the cloud's metadata service. Three rules prevent it:

1. A name is resolved here, and *every* address it has must be allowed. Numbers are read as the system reads them
   (decimal, hex, octal, short), and IPv4 inside IPv6 is extracted, before they are checked.
2. The connection goes to an address that was checked. The name is not resolved a second time, so a name that changes in
   between (rebinding) gains nothing. TLS still checks the certificate for the name.
3. Some addresses are never allowed, `allow_private` or not: metadata services, link-local, multicast, reserved.

`localhost` must lead to this machine, whatever the system's resolver says.
"""

from __future__ import annotations

import ipaddress
import socket
import unicodedata
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from interlock.core.errors import Failure
from interlock.core.threads import LOOKUPS

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Reach = Literal["public", "private", "never"]
# Where a client may connect: to public addresses, to private ones as well, or to private ones only.
Allowed = Literal["public", "any", "private"]
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
    """Parse a host as an address, however it is written; None for a name."""
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
    """Classify an address: public, private, or never to be connected to."""
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
    """Return the IPv4 address that connections to this one really go to."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped


async def resolve_by_system(host: str) -> Sequence[str]:
    """Resolve a name by the system. OSError if it has no address."""
    infos = await LOOKUPS.run(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for *_, place in infos))


async def checked(
    host: str, *, allow_private: bool = False, private_only: bool = False, resolve: Resolve = resolve_by_system
) -> tuple[str, ...]:
    """Return the addresses of a host, all of them allowed; E3406 if one is not, OSError if there is none."""
    literal = parse(host)
    texts = [str(literal)] if literal is not None else await resolve(host)
    here = host.lower().removesuffix(".") == "localhost"
    allowed: list[str] = []
    for text in texts:
        address = parse(text)
        where = "never" if address is None or (here and not address.is_loopback) else reach(address)
        private = where == "private"
        if where == "never" or (private and not allow_private and not private_only) or (private_only and not private):
            raise Failure("E3406", _refusal(host, where))
        allowed.append(str(address))
    if not allowed:
        raise OSError(f"{host} has no address")
    return tuple(allowed)


def _refusal(host: str, where: Reach) -> str:
    if where == "private":
        return f"`{host}` is on a private network; allow private networks for it, or use a public address"
    if where == "public":
        return f"`{host}` leads to a public address, which is not connected to without TLS; use an encrypted address"
    return f"`{host}` leads to an address that is never connected to; use a public address"


def grpc_target(addresses: Sequence[str], port: str | int) -> str:
    """Return the target of a gRPC channel to these addresses. They are of one family: no target mixes them."""
    family = "ipv6" if ":" in addresses[0] else "ipv4"
    same = [address for address in addresses if (":" in address) == (family == "ipv6")]
    return f"{family}:" + ",".join(f"[{one}]:{port}" if family == "ipv6" else f"{one}:{port}" for one in same)
