"""The addresses that a server listens on, and the host names that clients may use for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from urllib.parse import urlsplit

from interlock.call.endpoints import DRAIN_S, default_ports
from interlock.core.record import dataclass

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Listening:
    """The addresses and TLS files of a server. `names` are host names that clients may use besides loopback.

    `ports` are those of endpoints that have their own; one without is left out.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    ports: Mapping[str, int] = field(default_factory=default_ports)
    certificate: Path | None = None
    key: Path | None = None
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    drain_s: int = DRAIN_S
    # Where clients find us, if something stands in between that has an address of its own.
    public_url: str | None = None

    @property
    def secure(self) -> bool:
        return self.certificate is not None

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def hosts(self) -> frozenset[str]:
        own = () if self.host in ("0.0.0.0", "::") else (self.host,)  # noqa: S104 - compared, not bound
        public = () if self.public_url is None else (urlsplit(self.public_url).hostname or "",)
        return frozenset((*LOOPBACK, *own, *public, *self.names))
