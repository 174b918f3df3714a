"""Heads of HTTP/1.1 requests to one origin."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlsplit

import idna

from interlock.core.expressions import expression

# Headers that say where a request ends and what its connection is for. Only this package writes them.
FRAMING = frozenset({"content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"})
PORTS = {"http": 80, "https": 443}
_UNSAFE = expression(r"[\x00-\x08\x0a-\x1f\x7f]")
# An address of which nothing has to be encoded: its origin and its target.
_PLAIN = expression(r"([a-z]+://[^/?#\s]+)(/[\x21\x22\x24-\x7e]*)")
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))


class UnsafeHeader(ValueError):  # noqa: N818 - a finding about a header
    """A header would not stay one line."""


class Origin:
    """Writes the heads of requests to one origin. `fixed` are headers that every request has, by lower-case names.

    Raises ValueError for an address that is none, and UnsafeHeader.
    """

    def __init__(self, url: str, fixed: Mapping[str, str], *, keep_alive: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme not in PORTS or not parts.hostname or "@" in parts.netloc:
            raise ValueError("not an address of HTTP without credentials")
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        self.name = _ascii(parts.hostname)
        self.port = parts.port or PORTS[parts.scheme]
        host = f"[{self.name}]" if ":" in self.name else self.name
        ours = {name: value for name, value in fixed.items() if name not in FRAMING}
        self._fixed = {"host": host if self.port == PORTS[parts.scheme] else f"{host}:{self.port}", **ours}
        if not keep_alive:
            self._fixed["connection"] = "close"
        self._lines = _lines(self._fixed)

    def head(self, method: str, target: str, headers: Mapping[str, str], length: int | None) -> bytes:
        """Write a head. `headers` replace fixed ones of the same name."""
        if not FRAMING.isdisjoint(headers):
            headers = {name: value for name, value in headers.items() if name not in FRAMING}
        if self._fixed.keys().isdisjoint(headers):
            lines = self._lines + _lines(headers)
        else:
            lines = _lines({**self._fixed, **headers})
        last = "\r\n" if length is None else f"content-length: {length}\r\n\r\n"
        return f"{method} {target} HTTP/1.1\r\n{lines}{last}".encode()


def split(url: str) -> tuple[str, str]:
    """Split an address into its origin and the target of a request, in which everything but ASCII is encoded."""
    if (plain := _PLAIN.fullmatch(url)) is not None:
        return plain[1], plain[2]
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return f"{parts.scheme}://{parts.netloc}", quote(target, safe=_PRINTABLE)


def _lines(headers: Mapping[str, str]) -> str:
    if _UNSAFE.search("".join(headers.values())):
        raise UnsafeHeader("a header holds a line break or another control character")
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _ascii(host: str) -> str:
    if host.isascii():
        return host
    try:
        return idna.encode(host, uts46=True).decode()
    except idna.IDNAError:
        raise ValueError("not a name") from None
