"""HTTP services: the operations that their configuration describes by hand, and the requests that calls become.

INVARIANT: no argument chooses the host, leaves its segment of the path, or adds a header.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import pydantic

from interlock.call.conditional import is_conditional, tells_version
from interlock.call.connector import Definition, RemoteCall
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.schema import Json
from interlock.upstreams import conditions, templates, wire
from interlock.upstreams.remote_config import ConfigPart, RemoteConfig, checked_url, header_safe, keep_hidden
from interlock.upstreams.request import Request, climbs, with_files
from interlock.upstreams.request import build as build_openapi

READS = ("GET", "HEAD")
_BODYLESS = ("GET", "HEAD", "DELETE")
_OURS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "expect"}
    | {"x-interlock-caller", "x-interlock-agent"}
)
_NAMED = expression(r"\{([A-Za-z_][\w.-]*)\}")
_SPLITTING = expression(r"[/\\\x00-\x1f\x7f]|%(2f|5c|2e|25)", re.IGNORECASE)

_ACCEPTED = {"accept": "application/json, */*;q=0.5", "accept-encoding": "gzip, deflate"}
# A compressed answer has a tag of its own, which servers make weak or lengthen, and do not know in a write.
_UNCOMPRESSED = {**_ACCEPTED, "accept-encoding": "identity"}


class HttpTool(ConfigPart):
    """An operation described by hand.

    `{name}` in path, query, headers and body stands for the argument `name`. Other arguments go into the query, or into
    a JSON body if the method has one.
    """

    name: str = pydantic.Field(min_length=1, max_length=128)
    description: str = pydantic.Field(min_length=1)
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    path: str = pydantic.Field(pattern=r"^/[^?#]*$")
    query: dict[str, Any] = pydantic.Field(default_factory=dict[str, Any])
    headers: dict[str, str] = pydantic.Field(default_factory=dict[str, str])
    body: Any = None
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None = None

    def definition(self) -> Definition:
        native: Json = {"protocol": "http", "method": self.method, "path": self.path}
        native |= {name: getattr(self, name) for name in ("query", "headers", "body") if getattr(self, name)}
        return Definition(
            name=self.name,
            description=self.description,
            input_schema=self.input_schema,
            output_schema=self.output_schema,
            native=native,
            hints={"readOnlyHint": True} if self.method in READS else {},
        )


class HttpConfig(RemoteConfig):
    """An HTTP service: its address, its credentials and its operations.

    `openapi` is a document, or the address of one.
    """

    urls: tuple[str, ...] = pydantic.Field(min_length=1, max_length=3)
    tools: tuple[HttpTool, ...] = ()
    openapi: dict[str, Any] | str | None = None
    max_connections: int = pydantic.Field(100, ge=1, le=10_000)

    @pydantic.field_validator("urls")
    @classmethod
    def _endpoints(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_url(url, ("http", "https")) for url in urls)

    @pydantic.field_validator("openapi")
    @classmethod
    def _document(cls, openapi: dict[str, Any] | str | None) -> dict[str, Any] | str | None:
        return checked_url(openapi, ("http", "https")) if isinstance(openapi, str) else openapi

    @pydantic.model_validator(mode="after")
    def _hidden(self) -> HttpConfig:
        keep_hidden(self, plain=any(url.startswith("http:") for url in self.urls))
        return self


def build(native: Json, arguments: Json, base_url: str) -> Request:
    """Build the request of a hand-written operation."""
    method, path = str(native["method"]), str(native["path"])
    query, headers, body = native.get("query"), native.get("headers"), native.get("body")
    url, rest = base_url + path, arguments
    if "{" in path or query or headers or body:
        named = set(_NAMED.findall(path)).union(*map(templates.placeholders, (query, headers, body)))
        rest = {name: value for name, value in arguments.items() if name not in named}
        url = base_url + _NAMED.sub(lambda match: _segment(arguments, match[1]), path)
    pairs: Json = templates.fill(query, arguments, rest) if query else {}
    if body is not None:
        content = templates.fill(body, arguments, rest)
    elif method in _BODYLESS:
        content, pairs = None, {**pairs, **rest}
    else:
        content = rest or None
    if pairs:
        url += _query(pairs)
    filled: dict[str, str] = {}
    if headers:
        filled = {name: templates.text_of(value) for name, value in templates.fill(headers, arguments, rest).items()}
    if content is None or content is templates.ABSENT:
        return Request(method, url, filled, None)
    return Request(method, url, {"content-type": "application/json", **filled}, wire.to_json(content))


def _segment(arguments: Json, name: str) -> str:
    if name not in arguments:
        raise Failure("E3308", f"`{name}` is part of the address and must be given")
    text = templates.text_of(arguments[name])
    # A server may decode the segment before it splits the path, so characters that could split it are not sent at all.
    if _SPLITTING.search(text):
        raise Failure("E3305", f"`{name}` is one segment of an address, and holds a slash or a control character")
    return templates.quoted(text)


def _query(pairs: Json) -> str:
    """Build a query with one pair for each item of a list; nothing for null."""
    parts: list[str] = []
    for name, value in pairs.items():
        items = cast("list[Any]", value) if isinstance(value, list) else [value]
        parts += [f"{templates.quoted(name)}={templates.quoted(item)}" for item in items if item is not None]
    return "?" + "&".join(parts) if parts else ""


async def with_contents(call: RemoteCall, read_file: Callable[[str], Awaitable[bytes]]) -> RemoteCall:
    """Replace references to files of earlier calls in the body by their contents."""
    return replace(call, arguments=await with_files(call.native, call.arguments, read_file))


def accepted(native: Json) -> dict[str, str]:
    """Return the headers that say which answers to an operation are read."""
    return _UNCOMPRESSED if tells_version(native) else _ACCEPTED


def is_repeatable(call: RemoteCall) -> bool:
    """Whether a key makes it harmless to send the request of a call again after its answer was lost."""
    return not (call.writes and is_conditional(call.native, call.arguments))


def request_of(name: str, call: RemoteCall, endpoint: str) -> Request:
    """Build the request of a pinned operation, and check it against the rules. `name` is that of the upstream."""
    arguments, condition = conditions.arguments_of(call), conditions.header_of(call)
    if call.native.get("protocol") == "openapi":
        request = build_openapi(call.native, arguments, _base(endpoint, call.native.get("servers", ())))
    else:
        request = build(call.native, arguments, endpoint)
    method, url, headers, body = request
    if not url.startswith(endpoint + "/") and origin(url) != origin(endpoint):
        raise Failure("E3406", f"the request would leave `{name}`")
    if ("/." in url or "%2" in url) and climbs(urlsplit(url).path):
        raise Failure("E3305", "an argument that is part of the address cannot be `.` or `..`")
    if not headers and not condition:
        return request
    lines = {one.lower(): _one_line(one, value) for one, value in headers.items() if one.lower() not in _OURS}
    return Request(method, url, {**lines, **condition}, body)


def _base(endpoint: str, servers: Sequence[str]) -> str:
    """Return an endpoint, with the server path of the document if the operator gave none."""
    if urlsplit(endpoint).path:
        return endpoint
    return next((server for server in servers if origin(server) == origin(endpoint)), endpoint)


def origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    return parts.scheme, (parts.hostname or "").lower(), port or {"http": 80, "https": 443}.get(parts.scheme)


def _one_line(name: str, value: str) -> str:
    try:
        header_safe(name, value)
    except ValueError:
        raise Failure("E3305", f"the header `{name}` must be one line of text") from None
    return value
