"""The egress policy of a call: the hosts it may reach, its limits, and the record of its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.net import addresses

if TYPE_CHECKING:
    from interlock.call.capability import Capability
    from interlock.contract.manifest import NetworkPolicy

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_LISTED = 10  # refusals that a failure lists


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressPolicy:
    """Two lists that must both name a host and its port, and the acting party's token if it names resources.

    `allow_private` is for tests and comes from no manifest.
    """

    agent: NetworkPolicy
    manifest: NetworkPolicy
    token: Capability | None = None
    # The hosts and ports that the tool's permissions list, if they list any.
    listed: Sequence[tuple[str, int]] = ()
    allow_private: bool = False

    def objection(self, host: str, port: int) -> str | None:
        """Return why a call may not connect there; None if it may."""
        address = addresses.parse(host)
        if address is not None and host != str(address):
            return f"`{host}` is an address in another form; use a name that is allowed"
        for whose, policy in (("the agent's allowance", self.agent), ("the tool's manifest", self.manifest)):
            if policy.deny_all_egress:
                return f"{whose} denies all egress"
            if not any(_covers(domain.lower(), host, address) for domain in policy.allowed_domains):
                return f"`{host}` is not among the allowed domains of {whose}"
            if port not in policy.allowed_ports:
                return f"port {port} is not among the allowed ports of {whose}"
        if self.listed and not any(port == other and _covers(name, host, address) for name, other in self.listed):
            return f"`{host}:{port}` is not among the permissions of the tool"
        if self.token is not None and not self.token.covers_resource(f"host:{host}:{port}"):
            return f"the agent's token does not name `host:{host}:{port}`"
        return None


def upstream_objection(
    host: str, port: int, *, general: NetworkPolicy, own: NetworkPolicy | None, manifest: NetworkPolicy
) -> str | None:
    """Return why a call may not reach its upstream; None if it may.

    An operator who registers an upstream allows its address, for its tools and in general. Therefore only a denial of
    all egress, and the calling agent's own list, if there is one, can object.
    """
    allowance = general if own is None else own
    for whose, policy in (("the agent's allowance", allowance), ("the tool's manifest", manifest)):
        if policy.deny_all_egress:
            return f"{whose} denies all egress"
    if own is None:
        return None
    address = addresses.parse(host)
    if not any(_covers(domain.lower(), host, address) for domain in own.allowed_domains):
        return f"`{host}` is not among the allowed domains of the agent's allowance"
    return None if port in own.allowed_ports else f"port {port} is not among the allowed ports of the agent's allowance"


def _covers(domain: str, host: str, address: addresses.Address | None) -> bool:
    if domain.startswith("*."):
        return address is None and host.endswith(domain[1:])
    return domain == host


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the connections of one call."""

    connections: int = 32  # at a time; more wait
    requests: int = 10_000
    refusals: int = 1_000  # recorded; more are only counted
    wire_bytes: int = 256 * 2**20  # to and from the world together
    head_bytes: int = 32 * 2**10  # of a request, and of an answer
    head_s: float = 10.0  # from the moment one is waited for
    resolve_s: float = 10.0
    connect_s: float = 10.0  # for all the addresses of a name
    idle_s: float = 60.0  # without a byte in either direction
    total_s: float = 3600.0  # a connection; the call's own deadline ends it sooner
    farewell_s: float = 1.0  # for a client to read the last answer


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRefusal:
    """An attempt of a call that was refused. Parts that could not be read are empty."""

    host: str
    port: int | None
    method: str
    reason: str
    at: int  # milliseconds since 1970
    begun: bool = False  # whether the request was let through first and is in `requests`
    code: Literal["E3406", "E3407"] = "E3406"  # refused by the policy, or a limit was reached


@dataclass(slots=True, kw_only=True)
class Seen:
    """A request that was let through. Status and bytes grow while it lasts; without `bytes_out` nothing ever left."""

    method: str
    host: str
    port: int
    status: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    # Whether it was completed: its answer was passed on whole, or its tunnel was set up.
    whole: bool = False
    # Why it was not completed, as the status of a span.
    error: str | None = None

    @property
    def safe(self) -> bool | None:
        """Whether the method only reads; None for a tunnel, whose content is not visible."""
        return None if self.method == "CONNECT" else self.method in SAFE_METHODS


def violation(refusals: Sequence[EgressRefusal]) -> Failure:
    """The failure of a call after refusals: E3406, or E3407 if it only ran into limits."""
    first = next((refusal for refusal in refusals if refusal.code == "E3406"), refusals[0])
    more = f" (the first of {len(refusals)} refusals)" if len(refusals) > 1 else ""
    reasons = [
        {"host": one.host, "port": one.port, "method": one.method, "reason": one.reason, "at": one.at}
        for one in refusals[:_LISTED]
    ]
    return Failure(
        first.code,
        f"the tool's network access was refused: {first.reason}{more}",
        details={"refusals": reasons, "count": len(refusals)},
    )
