"""Parses the target of a proxy request, in one way only.

Anything that two readers could take for two targets is refused: user names, fragments, percent signs, empty ports,
leading zeros, letters beyond ASCII. An international name comes in its ASCII form (`xn--…`), as in the lists.
"""

from __future__ import annotations

import re

from interlock.core.expressions import expression
from interlock.core.record import dataclass

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_AUTHORITY = expression(
    rf"(?:(?P<name>{_LABEL}(?:\.{_LABEL})*)\.?|(?P<bracketed>\[[0-9a-f:.]{{2,45}}\]))(?::(?P<port>[1-9][0-9]{{0,4}}))?",
    re.ASCII | re.IGNORECASE,
)
_ABSOLUTE = expression(r"http://(?P<authority>[^/?#]*)(?P<path>/[^#]*|\?[^#]*|)", re.ASCII | re.IGNORECASE)
_SHOWN = expression(
    r"(?:[a-z0-9+.-]+://)?(?:[^/?#]*@)?((?:\[[^/?#]*\]|[^/?#:]*)(?::[0-9]+)?)", re.ASCII | re.IGNORECASE
)
_LONGEST = 260  # 253 of a name, a dot, a colon and a port
_HTTP_PORT = 80


@dataclass(frozen=True, slots=True)
class Target:
    """A host in normal form, a port, and the requested path; None for a tunnel."""

    host: str
    port: int
    path: str | None

    @property
    def host_header(self) -> str:
        return self.host if self.port == _HTTP_PORT else f"{self.host}:{self.port}"

    def is_named_by(self, header: str) -> bool:
        """Whether a Host header means this target. For a tunnel it may omit the port."""
        try:
            return _authority(header, self.port if self.path is None else _HTTP_PORT) == (self.host, self.port)
        except ValueError:
            return False


def read_target(method: str, text: str) -> Target:
    """Parse the target of a request line; ValueError with the reason if it is invalid."""
    if method == "CONNECT":
        return Target(*_authority(text, None), None)
    absolute = _ABSOLUTE.fullmatch(text)
    if absolute is None:
        raise ValueError("a proxy is asked for http://HOST/… or by CONNECT")
    path = absolute["path"]
    return Target(*_authority(absolute["authority"], _HTTP_PORT), path if path.startswith("/") else f"/{path}")


def shown(text: str) -> str:
    """The part of an unreadable target that may be recorded: no path, no query, no user name or password."""
    match = _SHOWN.match(text)
    return match[1][:_LONGEST] if match else ""


def _authority(text: str, default_port: int | None) -> tuple[str, int]:
    match = _AUTHORITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"`{shown(text)}` is not a host that can be read in one way only")
    port = int(match["port"]) if match["port"] else default_port
    if port is None or port > 65_535:
        raise ValueError(f"`{shown(text)}` has no port that can be used")
    host: str = match["name"] or match["bracketed"]
    return host.lower(), port
