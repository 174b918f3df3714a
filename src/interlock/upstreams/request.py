"""Requests of operations: writes arguments into the path, query, headers, cookies and body.

`build` follows the mapping that was pinned when the operation was read (see `openapi`), exactly by the styles that
OpenAPI defines. An argument is data wherever it goes: it cannot leave its segment of the path, nor add a parameter, a
cookie, a header or a part of a form. A slash in a segment is percent-encoded; `.` and `..` between slashes are refused,
because some servers decode a path before they split it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

import orjson

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.data.schema import Json

PLACE = expression(r"\{([^{}/]+)\}")
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
# How a reference to a file of an earlier call begins.
_REFERENCE = "payload:"
# The styles of parameters, the default first.
PATH_STYLES = ("simple", "label", "matrix")
QUERY_STYLES = ("form", "spaceDelimited", "pipeDelimited", "deepObject")


def kind_of_media(media: str) -> str:
    """A media type without its parameters."""
    return media.partition(";")[0].strip().lower()


def is_json(media: str) -> bool:
    """Whether a media type is written as JSON; a wildcard is."""
    kind = kind_of_media(media)
    return kind in ("application/json", "*/*", "application/*") or kind.endswith("+json")


class Request(NamedTuple):
    """A request as it is sent."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes | None


def build(native: Json, arguments: Json, base_url: str) -> Request:
    """Build the request of a call. Refuses with E3305 an argument that would be more than data."""
    query: list[str] = [native["query"]] if native.get("query") else []
    cookies: list[str] = []
    headers: dict[str, str] = {"Accept": _accepted(native["responses"])}
    filled: dict[str, str] = {}
    for one in native["parameters"]:
        value = arguments.get(one["argument"])
        if one["in"] == "path":
            filled[one["name"]] = _segment(one, value)
        elif value is None:
            continue
        elif one["in"] == "query":
            query += _pairs(one, value, lambda: _names(native, "query"))
        elif one["in"] == "header":
            headers[one["name"]] = _header(one, value)
        else:
            cookies += _pairs(one, value, lambda: _names(native, "cookie"))
    if cookies:
        headers["Cookie"] = "; ".join(cookies)
    media, body = _body(native.get("body"), arguments)
    if body is not None:
        headers["Content-Type"] = media
    return Request(native["method"], _url(base_url, _path(native["path"], filled), query), headers, body)


def _names(native: Json, where: str) -> set[str]:
    """Return the names that are taken in a part of the request: those of its parameters and of its credentials."""
    schemes = [scheme for alternative in native.get("security", ()) for scheme in alternative]
    return {one["name"] for one in (*native["parameters"], *schemes) if one.get("in") == where and "name" in one}


def _accepted(responses: Mapping[str, str]) -> str:
    modes = set(responses.values())
    if modes & {"any", "file"}:
        return "application/json, */*;q=0.5" if "json" in modes or "any" in modes else "*/*"
    return "text/*, */*;q=0.1" if "text" in modes and "json" not in modes else "application/json"


def climbs(path: str) -> bool:
    """Whether a path, decoded before or after it is split, has a segment `.` or `..`."""
    pieces = (piece for segment in path.split("/") for piece in re.split(r"[/\\]", unquote(segment)))
    return any(piece in (".", "..") for piece in pieces)


def _path(template: str, filled: Mapping[str, str]) -> str:
    path = PLACE.sub(lambda match: filled[match[1]], template)
    # INVARIANT: a request goes to the path of its operation: no argument removes or adds a segment.
    if climbs(path):
        raise Failure("E3305", "an argument would lead the request to another path")
    return path


def _url(base_url: str, path: str, query: Sequence[str]) -> str:
    base = urlsplit(base_url)
    joined = "&".join([base.query, *query] if base.query else query)
    return f"{base.scheme}://{base.netloc}{base.path.rstrip('/')}{path}" + (f"?{joined}" if joined else "")


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        raise Failure("E3308", "an argument holds a number or a text that JSON cannot carry") from None


def _scalar(value: Any) -> str:
    """Return text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else _json(value).decode()


def _encoded(value: Any, safe: str = "") -> str:
    try:
        return quote(_scalar(value), safe=safe)
    except UnicodeEncodeError:  # half of a surrogate pair
        raise Failure("E3305", "an argument holds a text that is not Unicode") from None


_CLIMBING = expression(r"\\|%(2f|5c|2e|25)", re.IGNORECASE)
_CONTROL = expression(r"[\x00-\x1f\x7f]")


def _segment(one: Json, value: Any) -> str:
    texts = _simple(one, value)
    for text in texts:
        if _CLIMBING.search(text) or _CONTROL.search(text):
            words = "a backslash, a percent-encoded slash or dot, or a control character"
            raise Failure("E3305", f"`{one['argument']}` is one segment of a path, and holds {words}")
        if climbs(text):
            raise Failure("E3305", f"`{one['argument']}` is one segment of a path, and cannot hold `.` or `..`")
    encoded = [_encoded(text, "=" if one["explode"] and isinstance(value, dict) else "") for text in texts]
    if not any(encoded):
        raise Failure("E3305", f"`{one['argument']}` is a segment of the path, and is empty")
    match one["style"]:
        case "label":
            return "." + ("." if one["explode"] else ",").join(encoded)
        case "matrix":
            name = _encoded(one["name"])
            if not one["explode"] or not isinstance(value, dict | list):
                return f";{name}={','.join(encoded)}"
            return "".join(f";{part}" if isinstance(value, dict) else f";{name}={part}" for part in encoded)
        case _:
            return ",".join(encoded)


def _simple(one: Json, value: Any) -> list[str]:
    """The texts that style `simple` joins by commas."""
    if one["style"] == "json":
        return [_json(value).decode()]
    if isinstance(value, dict):
        items = cast("Json", value).items()
        if one["explode"]:
            return [f"{name}={_scalar(part)}" for name, part in items]
        return [_scalar(each) for pair in items for each in pair]
    if isinstance(value, list):
        return [_scalar(part) for part in cast("list[Any]", value)]
    return [] if value is None else [_scalar(value)]


def _header(one: Json, value: Any) -> str:
    text = ",".join(_simple(one, value))
    if _CONTROL.search(text):
        raise Failure("E3305", f"`{one['argument']}` is a header, and holds a line break or a control character")
    if not text.isascii():
        raise Failure("E3308", f"`{one['argument']}` is a header, and may hold ASCII characters only")
    return text.strip()


_DELIMITERS = {"form": ",", "spaceDelimited": "%20", "pipeDelimited": "%7C"}
# Characters that `allowReserved` leaves unchanged, except those that would end the value.
_RESERVED = "/:?@!$'()*,"


def _pairs(one: Json, value: Any, others: Callable[[], set[str]]) -> list[str]:
    """Return `name=value` for a query, a cookie or a form, in the parameter's style. `others` are taken names."""
    name, style, explode = _encoded(one["name"]), one.get("style", "form"), one.get("explode", True)
    safe = _RESERVED if one.get("reserved") else ""
    if style == "json":
        return [f"{name}={quote(_json(value), safe='')}"]
    if style == "deepObject":
        return list(_deep(name, value))
    if isinstance(value, dict):
        items = cast("Json", value)
        if not explode:
            return [f"{name}={','.join(_encoded(each, safe) for pair in items.items() for each in pair)}"]
        strange = sorted(items.keys() & (others() - {one["name"]}))
        if strange:
            raise Failure("E3305", f"`{one['argument']}` would set the parameter `{strange[0]}`, which is another's")
        return [f"{_encoded(key)}={_encoded(part, safe)}" for key, part in items.items()]
    if isinstance(value, list):
        parts = [_encoded(part, safe) for part in cast("list[Any]", value)]
        return [f"{name}={part}" for part in parts] if explode else [f"{name}={_DELIMITERS[style].join(parts)}"]
    return [f"{name}={_encoded(value, safe)}"]


def _deep(name: str, value: Any) -> Iterator[str]:
    """`name[key]=value`, and so on inwards; the brackets are encoded, as they must be."""
    if isinstance(value, dict):
        for key, part in cast("Json", value).items():
            yield from _deep(f"{name}%5B{_encoded(key)}%5D", part)
    elif isinstance(value, list):
        for index, part in enumerate(cast("list[Any]", value)):
            yield from _deep(f"{name}%5B{index}%5D", part)
    elif value is not None:
        yield f"{name}={_encoded(value)}"


def _body(body: Json | None, arguments: Json) -> tuple[str, bytes | None]:
    """The media type and the bytes of a body; no bytes if there is none."""
    if body is None:
        return "", None
    media, known = str(body["media"]), cast("list[Json]", body.get("properties", []))
    if "argument" in body:
        if body["argument"] not in arguments:
            return media, None
        value: Any = arguments[body["argument"]]
    else:
        value = {one["name"]: arguments[one["argument"]] for one in known if one["argument"] in arguments}
        if not value and not body["required"]:
            return media, None
    match body.get("written"):
        case "text":
            return media, _scalar(value).encode(errors="replace")
        case "base64":
            return media, _from_base64(body["argument"], value)
        case _ if is_json(media):
            return media, _json(value)
        case _:
            pass
    if not isinstance(value, dict):
        raise Failure("E3308", f"`{body['argument']}` is a form: send an object")
    fields = {one["name"]: one for one in known} or {name: {"file": True} for name in body.get("files", ())}
    if media == MULTIPART:
        return _multipart(cast("Json", value), fields)
    return media, "&".join(_form(cast("Json", value), fields)).encode()


async def with_files(native: Json, arguments: Json, read: Callable[[str], Awaitable[bytes]]) -> Json:
    """The arguments of a call, in which bytes are read where the caller names a file that an earlier call left.

    Arguments that are bytes are in base64, or such a reference, `payload:…`, which is no base64.
    """
    body = cast("Json", native.get("body") or {})
    fields = cast("list[Json]", body.get("properties", []))
    names = [str(one["argument"]) for one in fields if one.get("file")]
    if body.get("written") == "base64":
        names.append(str(body["argument"]))
    found = {**arguments, **{name: await _read(arguments[name], read) for name in names if name in arguments}}
    whole: Any = found.get(body.get("argument", ""))
    if isinstance(whole, dict) and body.get("files"):
        given = cast("Json", whole)
        files = {name: await _read(given[name], read) for name in body["files"] if name in given}
        found[str(body["argument"])] = {**given, **files}
    return found


async def _read(value: Any, read: Callable[[str], Awaitable[bytes]]) -> Any:
    if isinstance(value, list):
        return [await _read(one, read) for one in cast("list[Any]", value)]
    return await read(value) if isinstance(value, str) and value.startswith(_REFERENCE) else value


def _from_base64(argument: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value  # of a file of an earlier call
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise Failure("E3308", f"`{argument}` is bytes: send them in base64") from None


def _multipart(value: Json, known: Mapping[str, Json]) -> tuple[str, bytes]:
    """Encode a multipart form (RFC 7578): a part for each field, and one for each item of a list."""
    parts = list(_parts(value, known))
    # INVARIANT: no argument ends its part. The boundary depends on all of them, so none can contain it.
    hashed = hashlib.sha256()
    for head, content in parts:
        hashed.update(head + content)
    boundary = hashed.hexdigest().encode()
    body = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, content) for head, content in parts)
    return f"{MULTIPART}; boundary={boundary.decode()}", body + b"--%b--\r\n" % boundary


def _parts(value: Json, known: Mapping[str, Json]) -> Iterator[tuple[bytes, bytes]]:
    for name, given in value.items():
        field = known.get(name, {})
        items: Iterable[Any] = cast("list[Any]", given) if isinstance(given, list) else [given]
        for item in items:
            if item is None:
                continue
            shown = f'form-data; name="{_quoted(name)}"'
            media = str(field.get("media") or "")
            if field.get("file"):
                content = _from_base64(str(field.get("argument", name)), item)
                shown, media = f'{shown}; filename="{_quoted(name)}"', media or "application/octet-stream"
            else:
                content = _scalar(item).encode(errors="replace")
                media = media or ("" if isinstance(item, str | int | float | bool) else "application/json")
            head = f"Content-Disposition: {shown}" + (f"\r\nContent-Type: {media}" if media else "")
            yield head.encode(errors="replace"), content


def _quoted(name: str) -> str:
    """The name of a field in a header of its part, as browsers write it."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _form(value: Json, known: Mapping[str, Json]) -> Iterator[str]:
    """Encode a form: lists repeat their name, and objects are written as JSON unless the document says how."""
    for name, part in value.items():
        parameter = {"argument": name, **known.get(name, {}), "name": name}
        if isinstance(part, dict) and "style" not in parameter:
            parameter["style"] = "json"
        if part is not None:
            yield from _pairs(parameter, part, lambda: {*known, *value})
