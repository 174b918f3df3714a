"""Normal forms of paths, URLs and hosts; E3206 for a text that has none.

A rule that forbids `/etc` must also match `/srv/../etc`, a symbolic link to it and `file:///%65tc`; one that forbids a
host must match it in capitals, as an IDN, behind `user@`, with a trailing dot, as `0x7f.1` and as an IPv6 address that
stands for an IPv4 one. Texts are therefore compared in their normal form only.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, unquote_to_bytes

from interlock.core.errors import Failure
from interlock.core.expressions import expression

# Blanks and control characters around a URL or a host: readers ignore them.
BLANKS = "".join(map(chr, range(0x21)))

_UNSAFE = expression(r"[\x00-\x20\x7f-\xa0\u2028\u2029\u3000\ud800-\udfff]")
_SCHEME = expression(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_PERCENT = expression(r"%(.{0,2})", re.DOTALL)
_HEX = expression(r"[0-9a-fA-F]{2}\Z")
_HOST = expression(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\Z")
_NUMBER = expression(r"0x[0-9a-f]*\Z|[0-9]+\Z")
_ENDS_IN_NUMBER = expression(r"(?:.*\.)?(?:0x[0-9a-f]*|[0-9]+)\Z")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PLAIN = _UNRESERVED | frozenset("!$&'()*+,;=:@/?[]|^{}<>`\"\\")
_PORTS: Mapping[str, int] = {"http": 80, "https": 443, "ws": 80, "wss": 443, "ftp": 21}
_SEPARATOR = expression(r"[/\\]")
# IPv4 addresses in IPv6: RFC 6052's well-known prefix, and the obsolete compatible form.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")


def normal_path(text: str, where: str = "path", *, here: bool = True) -> str:
    """Return the one absolute path that a text names, with `..` and symbolic links resolved as far as they exist.

    A tool that does not run in this process has another working directory, and may see other files: a path of such a
    tool (not `here`) is refused if its meaning depends on them.
    """
    if text != text.strip():
        raise Failure("E3206", f"argument `{where}` is a path with blanks around it; write it without them")
    if text[:5].lower() == "file:":
        rest = text[5:].replace("\\", "/")
        if rest.startswith("//"):
            host, slash, rest = rest[2:].partition("/")
            if host.lower() not in ("", "localhost"):
                raise Failure("E3206", f"argument `{where}` names a file on another host")
            rest = slash + rest
        text = unquote(re.split(r"[?#]", rest, maxsplit=1)[0])
    if text.startswith("~"):
        raise Failure("E3206", f"argument `{where}` begins with `~`; write the whole path")
    if not text or "\0" in text:
        raise Failure("E3206", f"argument `{where}` is not a path")
    if not here and not text.startswith("/"):
        words = "is a relative path, and nobody knows from which directory the tool takes it; write the whole path"
        raise Failure("E3206", f"argument `{where}` {words}")
    if not here and (("\\" in text) or climbs(text)):
        raise Failure("E3206", f"argument `{where}` is a path with `..` or a backslash; write it without them")
    try:
        return os.path.realpath(text)
    except (OSError, ValueError):
        raise Failure("E3206", f"argument `{where}` is not a path") from None


def climbs(text: str) -> bool:
    """Whether a text contains `.` or `..` between slashes, or would after percent-decoding."""
    if "." not in text and "%" not in text:
        return False
    for _ in range(5):
        if any(step in (".", "..") for step in _SEPARATOR.split(text)):
            return True
        plain = unquote(text, errors="replace")
        if plain == text:
            return False
        text = plain
    return True


def written_path(text: str) -> str | None:
    """Return a path as written, without `..` but with its symbolic links; None if it is not absolute."""
    return os.path.normpath(f"/{text.lstrip('/')}") if text.startswith("/") else None


def ancestors(path: str) -> Iterator[str]:
    """A normal path and every directory above it."""
    while True:
        yield path
        if path == "/":
            return
        path = os.path.dirname(path)


def normal_url(text: str, where: str = "url") -> tuple[str, str]:
    """Normalise a URL and return its host (empty if it has none). User, default port, dot segments and fragment are
    removed.
    """
    text = text.strip(BLANKS)
    if _UNSAFE.search(text):
        raise Failure("E3206", f"argument `{where}` holds blanks or control characters, which no URL may")
    if text[:1] in ("/", "\\"):
        text = f"https:{text}"  # a URL without a scheme gets the usual one
    scheme_match = _SCHEME.match(text)
    if scheme_match is None:
        raise Failure("E3206", f"argument `{where}` is not a URL with a scheme")
    scheme, rest = scheme_match.group(1).lower(), text[scheme_match.end() :].partition("#")[0]
    if scheme in _PORTS:
        before, question, query = rest.partition("?")
        rest = "//" + before.replace("\\", "/").lstrip("/") + question + query
    if not rest.startswith("//"):
        return f"{scheme}:{_percent(rest, where)}", ""
    authority = re.split(r"[/?]", rest[2:], maxsplit=1)[0]
    path, question, query = rest[2 + len(authority) :].partition("?")
    host, port = _authority(authority, scheme, where)
    if not host and scheme != "file":
        raise Failure("E3206", f"argument `{where}` is a URL without a host")
    shown = f"[{host}]" if ":" in host else host
    normal = f"{scheme}://{shown}{port}{_dots(_percent(path, where))}"
    return normal + (f"?{_percent(query, where)}" if question else ""), host


def other_reading(text: str) -> str | None:
    """Return a URL as programs read it to which a backslash is no slash, if that is another host; otherwise None.

    `https://a.example\\@b.example/` leads to a.example by the rules of browsers, and to b.example by RFC 3986.
    """
    if "\\" not in text or "@" not in text:
        return None
    scheme, slashes, rest = text.strip(BLANKS).partition("//")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    before, _, place = authority.rpartition("@")
    return f"{scheme}//{place}{rest[len(authority) :]}" if slashes and "\\" in before else None


def _authority(authority: str, scheme: str, where: str) -> tuple[str, str]:
    place = authority.rpartition("@")[2]
    if place.startswith("["):
        host, bracket, after = place[1:].partition("]")
        colon, port = after[:1], after[1:]
        if not bracket or ":" not in host or colon not in ("", ":"):
            raise Failure("E3206", f"argument `{where}` has a malformed host")
    else:
        host, colon, port = place.partition(":")
    if port and not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise Failure("E3206", f"argument `{where}` has a malformed port")
    suffix = f":{int(port)}" if port and int(port) != _PORTS.get(scheme) else ""
    return (normal_host(host, where) if host else ""), suffix


def normal_host(text: str, where: str = "host") -> str:
    """Normalise a host: lower case, ASCII, no trailing dot; addresses in the usual form."""
    wrong = Failure("E3206", f"argument `{where}` has a malformed host")
    text = text.strip(BLANKS)
    if ":" in text:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            raise wrong from None
        if address.scope_id is not None:
            raise wrong
        return str(_ipv4_of(address) or address)
    try:
        host = _ascii_host(unquote_to_bytes(text).decode())
    except ValueError:  # includes the errors of idna and of the codec
        raise wrong from None
    if not _HOST.match(host) or len(host) > 253:
        raise wrong
    return _ipv4(host.split("."), wrong) if _ENDS_IN_NUMBER.match(host) else host


def _ipv4_of(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address stands for, if any."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    old = address in _COMPATIBLE and int(address) > 0xFFFF  # `::` and `::1` are addresses of their own
    return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if old or address in _NAT64 else address.sixtofour


def _ascii_host(text: str) -> str:
    if text.isascii() and "xn--" not in text.lower():
        return text.lower().removesuffix(".")
    import idna

    mapped = idna.uts46_remap(text, std3_rules=False, transitional=False).removesuffix(".")
    # A label in encoded form must decode to a text that encodes to the same label.
    return mapped if mapped.isascii() and "xn--" not in mapped else idna.encode(mapped).decode()


def _ipv4(parts: list[str], wrong: Failure) -> str:
    """Return the dotted form of an address as system libraries read it: one to four numbers, also octal and
    hexadecimal.
    """
    if len(parts) > 4 or not all(_NUMBER.match(part) for part in parts):
        raise wrong
    try:
        numbers = [
            int(part, 16 if part[:2] == "0x" else 8 if part[0] == "0" and len(part) > 1 else 10) for part in parts
        ]
    except ValueError:
        raise wrong from None
    *first, last = numbers
    if any(number > 255 for number in first) or last >= 256 ** (5 - len(parts)):
        raise wrong
    return str(ipaddress.IPv4Address(sum(number << 8 * (3 - at) for at, number in enumerate(first)) + last))


def _percent(text: str, where: str) -> str:
    """Normalise percent-encoding: unnecessary ones are decoded, hex is in capitals, other text is UTF-8."""

    def one(match: re.Match[str]) -> str:
        if not _HEX.match(match.group(1)):
            raise Failure("E3206", f"argument `{where}` has a malformed percent-encoding")
        character = chr(int(match.group(1), 16))
        return character if character in _UNRESERVED else match.group().upper()

    text = _PERCENT.sub(one, text)
    if text.isascii():
        return text
    return "".join(
        character if character in _PLAIN or character == "%" else "".join(f"%{byte:02X}" for byte in character.encode())
        for character in text
    )


def _dots(path: str) -> str:
    """A path without dot segments and doubled slashes."""
    parts: list[str] = []
    segments = path.split("/")
    for segment in segments:
        if segment == "..":
            del parts[-1:]
        elif segment not in ("", "."):
            parts.append(segment)
    trailing = bool(parts) and segments[-1] in ("", ".", "..")
    return "/" + "/".join(parts) + ("/" if trailing else "")


def prefixes(url: str) -> Iterator[str]:
    """Yield a normal URL, and everything it lies under: its path by path, and its origin."""
    yield url
    scheme, mark, rest = url.partition("://")
    if not mark:
        return
    origin, _, path = rest.partition("?")[0].partition("/")
    place = f"{scheme}://{origin}"
    yield place
    yield f"{place}/"
    for segment in filter(None, path.split("/")):
        place = f"{place}/{segment}"
        yield place


def parents(host: str) -> Iterator[str]:
    """Yield a normal host and the domains it belongs to. An address belongs to none."""
    yield host
    if ":" in host or _ENDS_IN_NUMBER.match(host):
        return
    while "." in host:
        host = host.partition(".")[2]
        yield host
