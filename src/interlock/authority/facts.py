"""What policy rules can match in a call's arguments: paths, hosts, URLs, commands and resources, each in one form.

A rule that forbids `/etc` must also meet `/srv/../etc`, a symbolic link to it and `file:///%65tc`; one that forbids a
host must meet it in capitals, as an IDN, behind `user@`, with a trailing dot and as `0x7f.1`. So every value is brought
to its one normal form before any rule sees it, and what has no normal form is refused (E3206) rather than guessed at.

What an argument is follows from the input schema: `format: uri`, `format: path`, `format: hostname`, `x-command: true`
and their like. A string that merely looks like a URL or a path counts as one too. The sets therefore hold too much
rather than too little, which is the safe side for a rule that forbids; a rule that permits should name the argument
itself: `context.arguments.path like "/srv/*"`, where marked paths and URLs stand in their normal form.

Each set holds what contains the value as well: a path with all its ancestors, a host with its parent domains, a URL
with the prefixes of its path. `context.paths.contains("/etc")` means: in or under /etc.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, cast
from urllib.parse import unquote, unquote_to_bytes

from interlock.authority.commands import programs
from interlock.core.contract import Contract
from interlock.core.effects import predict
from interlock.core.errors import Failure
from interlock.core.schema import Json, properties_of, resolve_ref

URL_FORMATS = frozenset({"uri", "url", "iri", "uri-reference", "iri-reference"})
PATH_FORMATS = frozenset({"path", "file-path", "directory-path"})
HOST_FORMATS = frozenset({"hostname", "idn-hostname", "ipv4", "ipv6"})
SETS = ("paths", "hosts", "urls", "commands", "resources")

# Cedar reads objects with these keys as something other than data: an argument must not forge an entity.
ESCAPES = frozenset({"__entity", "__extn", "__expr"})
MAX_DEPTH = 64

_LOOKS_LIKE_URL = re.compile(
    r"[\x00-\x20]*(?:(?:[a-z][a-z0-9+.-]*:)+[/\\]{2}|(?:https?|wss?|ftp):|[/\\]{2})", re.IGNORECASE
)
_LOOKS_LIKE_PATH = re.compile(r"/|\.{1,2}(?:/|\Z)|~[^/\s]*(?:/|\Z)|file:|.*/\.\.(?:/|\Z)", re.IGNORECASE | re.DOTALL)
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029\u3000\ud800-\udfff]")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_PERCENT = re.compile(r"%(.{0,2})", re.DOTALL)
_HEX = re.compile(r"[0-9a-fA-F]{2}\Z")
_HOST = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\Z")
_NUMBER = re.compile(r"0x[0-9a-f]*\Z|[0-9]+\Z")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:0x[0-9a-f]*|[0-9]+)\Z")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PLAIN = _UNRESERVED | frozenset("!$&'()*+,;=:@/?[]|^{}<>`\"\\")
_PORTS: Mapping[str, int] = {"http": 80, "https": 443, "ws": 80, "wss": 443, "ftp": 21}
_LARGEST = Decimal("922337203685477.5807")


def facts(
    contract: Contract, arguments: Mapping[str, Any], names: Iterable[str] | None, wanted: frozenset[str]
) -> Json:
    """The wanted sets, and `arguments` (all, or those named) as Cedar can hold them; E3206 for what has no normal form.

    Sets come sorted: the same call always gives the same bytes.
    """
    root = contract.input.document
    told = set(arguments) if names is None else arguments.keys() & set(names)
    seen = _Seen(root, wanted)
    # Values that no rule reads cannot keep a call from being judged.
    looked_at = arguments.keys() if wanted.intersection(SETS) else told
    normal = {name: seen.value(arguments[name], _child([root], root, name), name) for name in looked_at}
    found: Json = {}
    if "arguments" in wanted:
        found["arguments"] = _record({name: normal[name] for name in sorted(told)}, [root], root, "", 0)
    if "resources" in wanted:
        for change in predict(contract.mutation.effects, normal):
            seen.sets["resources"].add(change.resource)
    found.update({name: sorted(seen.sets[name]) for name in SETS if name in wanted})
    return found


class _Seen:
    """What was found on a walk through the arguments, along their schema."""

    def __init__(self, root: Json, wanted: frozenset[str]) -> None:
        self._root = root
        self._paths = not wanted.isdisjoint(("paths", "resources"))
        self._urls = not wanted.isdisjoint(("urls", "hosts", "resources"))
        self._commands = "commands" in wanted
        self._arguments = "arguments" in wanted
        self.sets: dict[str, set[str]] = {name: set() for name in SETS}

    def value(self, value: Any, views: list[Json], where: str, depth: int = 0) -> Any:
        """Note what a value holds and give it back with marked paths and URLs in normal form."""
        if depth > MAX_DEPTH:
            raise Failure("E3206", f"argument `{where}` is nested too deeply for policy to look at")
        views = _expand(views, self._root)
        if isinstance(value, str):
            return self._text(value, views, where)
        if isinstance(value, list | tuple):
            items = cast("list[Any]", value)
            if items and _marked(views, "x-command") and all(isinstance(item, str) for item in items):
                self._command(shlex.join(items), where)
                # Without a shell the first word is the program, whatever it looks like.
                self.sets["commands"].update((items[0], os.path.basename(items[0])))
            inner = [view["items"] for view in views if isinstance(view.get("items"), dict)]
            return [self.value(item, inner, f"{where}.{at}", depth + 1) for at, item in enumerate(items)]
        if isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value)
            for name in named:
                self._text(name, [], where)
            return {
                name: self.value(item, _child(views, self._root, name), f"{where}.{name}", depth + 1)
                for name, item in named.items()
            }
        return value

    def _text(self, text: str, views: list[Json], where: str) -> str:
        formats = {view.get("format") for view in views}
        if _marked(views, "x-command"):
            self._command(text, where)
        elif formats & PATH_FORMATS or _marked(views, "x-path"):
            return self._path(text, where) if self._paths or self._arguments else text
        elif formats & URL_FORMATS or _marked(views, "x-url"):
            return self._url(text, where) if self._urls or self._arguments else text
        elif formats & HOST_FORMATS:
            return self._host(normal_host(text.strip("[]"), where)) if self._urls or self._arguments else text
        else:
            self._looks(text, where)
        return text

    def _looks(self, text: str, where: str) -> None:
        if self._urls and _LOOKS_LIKE_URL.match(text):
            self._url(text, where)
        if self._paths and _LOOKS_LIKE_PATH.match(text):
            self._path(text, where)

    def _path(self, text: str, where: str) -> str:
        path = normal_path(text, where)
        self.sets["paths"].update(ancestors(path))
        self.sets["resources"].add(f"file:{path}")
        return path

    def _url(self, text: str, where: str) -> str:
        url, host = normal_url(text, where)
        self.sets["urls"].update(prefixes(url))
        self.sets["resources"].add(url)
        if host:
            self._host(host)
        if url.startswith("file:"):
            self._path(text, where)
        elif not host and _LOOKS_LIKE_URL.match(rest := url.partition(":")[2]):
            self._url(rest, where)  # jdbc:mysql://host, view-source:https://host
        return url

    def _host(self, host: str) -> str:
        self.sets["hosts"].update(parents(host))
        return host

    def _command(self, text: str, where: str) -> None:
        if self._commands:
            self.sets["commands"].add(text)
            self.sets["commands"].update(programs(text, where))
        for word in re.split(r"[\s;|&()<>`'\"=]+", text):
            self._looks(word, where)


# Schemas


def _expand(views: Iterable[Json], root: Json) -> list[Json]:
    """Every schema that speaks about a value: the given ones, what they refer to, and each of their alternatives."""
    found: list[Json] = []
    waiting = list(views)
    while waiting and len(found) < 200:
        view = resolve_ref(root, waiting.pop())
        found.append(view)
        for key in ("allOf", "anyOf", "oneOf"):
            branches: Any = view.get(key)
            if isinstance(branches, list):
                waiting.extend(cast("Json", one) for one in cast("list[Any]", branches) if isinstance(one, dict))
    return found


def _child(views: Iterable[Json], root: Json, name: str) -> list[Json]:
    children: list[Json] = []
    for view in _expand(views, root):
        rest: Any = view.get("additionalProperties")
        child = properties_of(view).get(name) or (cast("Json", rest) if isinstance(rest, dict) else None)
        if child is not None:
            children.append(child)
    return children


def _marked(views: Iterable[Json], mark: str) -> bool:
    return any(view.get(mark) is True for view in views)


def types_of(views: Iterable[Json]) -> frozenset[str]:
    """The JSON types that schemas name."""
    named: set[str] = set()
    for view in views:
        said: Any = view.get("type")
        named.update([said] if isinstance(said, str) else cast("list[str]", said or []))
    return frozenset(named)


# Arguments as Cedar can hold them


def _express(value: Any, views: list[Json], root: Json, where: str, depth: int) -> Any:
    """A value in Cedar's JSON. Nulls are absent; a `number` is always a decimal; what cannot be said is refused."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise _cannot(where, "is not valid text")
        return value
    if isinstance(value, int | float):
        return _number(value, "number" in types_of(_expand(views, root)), where)
    if depth > MAX_DEPTH:
        raise _cannot(where, "is nested too deeply")
    views = _expand(views, root)
    if isinstance(value, list):
        inner = [view["items"] for view in views if isinstance(view.get("items"), dict)]
        items = cast("list[Any]", value)
        return [_express(item, inner, root, where, depth + 1) for item in items if item is not None]
    if isinstance(value, dict):
        return _record(cast("Json", value), views, root, where, depth)
    raise _cannot(where, "is of a kind policy does not know")


def _record(value: Json, views: list[Json], root: Json, where: str, depth: int) -> Json:
    if forged := ESCAPES & value.keys():
        raise _cannot(where or min(forged), f"uses the reserved name `{min(forged)}`")
    prefix = f"{where}." if where else ""
    return {
        name: _express(item, _child(views, root, name), root, f"{prefix}{name}", depth + 1)
        for name, item in value.items()
        if item is not None
    }


def _number(value: float, always_decimal: bool, where: str) -> Any:
    if isinstance(value, int) and not always_decimal:
        if not -(2**63) <= value < 2**63:
            raise _cannot(where, "is too large")
        return value
    try:
        exact = Decimal(repr(value))
        fits = exact.is_finite() and abs(exact) <= _LARGEST and exact == exact.quantize(Decimal("0.0001"))
    except InvalidOperation:
        fits = False
    if not fits:
        raise _cannot(where, "is not a decimal of at most four places")
    return {"__extn": {"fn": "decimal", "arg": f"{Decimal(repr(value)):.4f}"}}


def _cannot(where: str, why: str) -> Failure:
    return Failure("E3206", f"argument `{where}` {why}, so no rule can look at it")


# Normal forms


def normal_path(text: str, where: str = "path") -> str:
    """The one absolute path that text names, with `..` and symbolic links resolved as far as they exist."""
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
    try:
        return os.path.realpath(text)
    except (OSError, ValueError):
        raise Failure("E3206", f"argument `{where}` is not a path") from None


def ancestors(path: str) -> Iterator[str]:
    """A normal path and every directory above it."""
    while True:
        yield path
        if path == "/":
            return
        path = os.path.dirname(path)


def normal_url(text: str, where: str = "url") -> tuple[str, str]:
    """A URL's one form, and its host (empty if it has none). User, default port, dot segments and fragment are gone."""
    if _UNSAFE.search(text):
        raise Failure("E3206", f"argument `{where}` holds blanks or control characters, which no URL may")
    if text[:1] in ("/", "\\"):
        text = f"https:{text}"  # whoever leaves the scheme out gets the usual one
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
    kept = f":{int(port)}" if port and int(port) != _PORTS.get(scheme) else ""
    return (normal_host(host, where) if host else ""), kept


def normal_host(text: str, where: str = "host") -> str:
    """A host's one form: lower case, ASCII, no trailing dot; addresses written the usual way."""
    wrong = Failure("E3206", f"argument `{where}` has a malformed host")
    if ":" in text:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            raise wrong from None
        if address.scope_id is not None:
            raise wrong
        return str(address.ipv4_mapped or address)
    try:
        host = _ascii_host(unquote_to_bytes(text).decode())
    except ValueError:  # idna's and the codec's errors are among them
        raise wrong from None
    if not _HOST.match(host) or len(host) > 253:
        raise wrong
    return _ipv4(host.split("."), wrong) if _ENDS_IN_NUMBER.match(host) else host


def _ascii_host(text: str) -> str:
    if text.isascii() and "xn--" not in text.lower():
        return text.lower().removesuffix(".")
    import idna

    mapped = idna.uts46_remap(text, std3_rules=False, transitional=False).removesuffix(".")
    # Labels that say they are encoded must decode to what they would be encoded to.
    return mapped if mapped.isascii() and "xn--" not in mapped else idna.encode(mapped).decode()


def _ipv4(parts: list[str], wrong: Failure) -> str:
    """Dotted form of an address as system libraries read it: one to four numbers, also octal and hexadecimal."""
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
    """Percent-encoding in one form: what needs none is decoded, hex is in capitals, other text is UTF-8."""

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
    kept: list[str] = []
    segments = path.split("/")
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment)
    trailing = bool(kept) and segments[-1] in ("", ".", "..")
    return "/" + "/".join(kept) + ("/" if trailing else "")


def prefixes(url: str) -> Iterator[str]:
    """A normal URL, and everything it lies under: its path by path, and its origin."""
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
    """A normal host and the domains it belongs to. An address belongs to none."""
    yield host
    if ":" in host or _ENDS_IN_NUMBER.match(host):
        return
    while "." in host:
        host = host.partition(".")[2]
        yield host
