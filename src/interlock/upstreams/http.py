"""HTTP services: one client and one TLS context for each upstream, however many calls there are.

Theory of operation. A call's `native` determines the request; `build` (or `openapi.build`, if the operation comes from
an OpenAPI document) places the arguments in it. Before it is sent, every request is checked against three rules: it
goes to the origin that the operator configured, no argument has escaped from its path segment, and no header is more
than a line. Names are resolved under `net.addresses`, and connections go to the addresses that were checked there.
Redirects are followed for reads and on the same origin only. Answers may be compressed; the limit on their size holds
for what they expand to.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urljoin, urlsplit

import pydantic

from interlock.call.connector import Definition, Discovered, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.net.client import Broken, Client, Response
from interlock.net.connection import Unreachable, Untrusted
from interlock.upstreams import openapi, wire
from interlock.upstreams.configuration import read_config
from interlock.upstreams.http_answers import EXPLAINED, Answers
from interlock.upstreams.kinds import Site
from interlock.upstreams.openapi import Request
from interlock.upstreams.request import climbs, with_files
from interlock.upstreams.response_limits import Intake, in_thread
from interlock.upstreams.wire import Part, RemoteConfig

if TYPE_CHECKING:
    from interlock.resilience.services import Services

_READS = ("GET", "HEAD")
_BODYLESS = ("GET", "HEAD", "DELETE")
_REDIRECTS = (301, 302, 303, 307, 308)
MAX_REDIRECTS = 5
_OURS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "expect"}
    | {"x-interlock-caller", "x-interlock-agent"}
)
_NAMED = expression(r"\{([A-Za-z_][\w.-]*)\}")
_SPLITTING = expression(r"[/\\\x00-\x1f\x7f]|%(2f|5c|2e|25)", re.IGNORECASE)
_ACCEPT = "application/json, */*;q=0.5"
_ACCEPTED = {"accept": _ACCEPT, "accept-encoding": "gzip, deflate"}


class HttpTool(Part):
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
            hints={"readOnlyHint": True} if self.method in _READS else {},
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
        return tuple(wire.checked_url(url, ("http", "https")) for url in urls)

    @pydantic.field_validator("openapi")
    @classmethod
    def _document(cls, openapi: dict[str, Any] | str | None) -> dict[str, Any] | str | None:
        return wire.checked_url(openapi, ("http", "https")) if isinstance(openapi, str) else openapi

    @pydantic.model_validator(mode="after")
    def _hidden(self) -> HttpConfig:
        wire.keep_hidden(self, plain=any(url.startswith("http:") for url in self.urls))
        return self


def build(native: Json, arguments: Json, base_url: str) -> Request:
    """Build the request of a hand-written operation."""
    method, path = str(native["method"]), str(native["path"])
    query, headers, body = native.get("query"), native.get("headers"), native.get("body")
    url, rest = base_url + path, arguments
    if "{" in path or query or headers or body:
        named = set(_NAMED.findall(path)).union(*map(wire.placeholders, (query, headers, body)))
        rest = {name: value for name, value in arguments.items() if name not in named}
        url = base_url + _NAMED.sub(lambda match: _segment(arguments, match[1]), path)
    pairs: Json = wire.fill(query, arguments, rest) if query else {}
    if body is not None:
        content = wire.fill(body, arguments, rest)
    elif method in _BODYLESS:
        content, pairs = None, {**pairs, **rest}
    else:
        content = rest or None
    if pairs:
        url += _query(pairs)
    filled: dict[str, str] = {}
    if headers:
        filled = {name: wire.text_of(value) for name, value in wire.fill(headers, arguments, rest).items()}
    if content is None or content is wire.ABSENT:
        return Request(method, url, filled, None)
    return Request(method, url, {"content-type": "application/json", **filled}, wire.to_json(content))


def _segment(arguments: Json, name: str) -> str:
    if name not in arguments:
        raise Failure("E3308", f"`{name}` is part of the address and must be given")
    text = wire.text_of(arguments[name])
    # A server may decode the segment before it splits the path, so characters that could split it are not sent at all.
    if _SPLITTING.search(text):
        raise Failure("E3305", f"`{name}` is one segment of an address, and holds a slash or a control character")
    return wire.quoted(text)


def _query(pairs: Json) -> str:
    """Build a query with one pair for each item of a list; nothing for null."""
    parts: list[str] = []
    for name, value in pairs.items():
        items = cast("list[Any]", value) if isinstance(value, list) else [value]
        parts += [f"{wire.quoted(name)}={wire.quoted(item)}" for item in items if item is not None]
    return "?" + "&".join(parts) if parts else ""


class HttpUpstream:
    """Calls one HTTP service."""

    def __init__(
        self,
        name: str,
        config: HttpConfig,
        *,
        clock: Clock,
        resolve: addresses.Resolve = addresses.resolve_by_system,
        sleep: wire.Sleep = asyncio.sleep,
        services: Services | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._intake = Intake(name, config.max_response_bytes, config.max_response_values)
        self._answers = Answers(name, self._intake, clock)
        self._sender = wire.Sender(name, config.urls, config, clock=clock, sleep=sleep, services=services)
        self._client = Client(
            partial(addresses.checked, allow_private=config.allow_private, resolve=resolve),
            connections=config.max_connections,
            tls=None if config.tls == wire.Tls() else config.tls.context,
            connect_s=config.connect_timeout_s,
        )

    async def call(self, call: RemoteCall) -> Any:
        return await self._sender.send(call, lambda one, url: wire.within(one, self._name, self._ask(one, url)))

    def mapping(self, native: Json, reported: Json) -> Json | None:
        if native["protocol"] != "openapi":
            return None
        schemes = {str(one["id"]) for every in native.get("security", ()) for one in every}
        return {
            "kind": "openapi",
            "operation_id": native.get("operation_id"),
            "method": native["method"],
            "path": native["path"],
            "security_scheme_refs": sorted(schemes),
            **reported,
        }

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        document = self._config.openapi
        if document is None:
            return Discovered(tools=[tool.definition() for tool in self._config.tools])
        base_url = self._config.urls[0]
        if isinstance(document, str):
            base_url, document = document, await self._document(document, wire.Look(credentials or {}))
        discovered = await in_thread(partial(openapi.read, document, base_url=base_url))
        written = [tool.definition() for tool in self._config.tools]
        return Discovered(tools=[*discovered.tools, *written], refused=discovered.refused, about=discovered.about)

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        request = Request("HEAD", self._config.urls[0] + "/", {"accept": "*/*"}, None)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._send(request)  # any answer proves that the service is up
        except TimeoutError:
            raise wire.unreached(self._name, "does not answer") from None

    def forget(self) -> None:
        self._sender.forget()

    async def close(self) -> None:
        self._sender.close()
        self._client.close()

    async def _document(self, url: str, look: wire.Look) -> Json:
        """Fetch an OpenAPI document from its address, as JSON or YAML."""
        request = Request("GET", url, {**_ACCEPTED, **self._config.headers}, None)
        # INVARIANT: a credential is shown only to the service it is for; another party may host the document.
        if any(_origin(url) == _origin(endpoint) for endpoint in self._config.urls):
            request = self._signed(request, look)
        try:
            async with asyncio.timeout(30):
                text = await self._exchange(request, look)
        except TimeoutError:
            raise wire.late(self._name) from None
        document: Json = cast("Json", text) if isinstance(text, dict) else {}
        return await in_thread(openapi.parse, document["text"] if set(document) == {"text"} else document)

    async def _ask(self, call: RemoteCall, endpoint: str) -> Any:
        """Make one attempt at one endpoint."""
        wire.check_egress(call, endpoint)
        call.reported["server_url"] = endpoint
        if call.read_file is not None and call.native.get("body"):
            call = replace(call, arguments=await with_files(call.native, call.arguments, call.read_file))
        method, url, given, body = self._request(call, endpoint)
        headers = {**_ACCEPTED, **self._config.headers, **given, **wire.context_headers(call, self._config)}
        signed = self._signed(Request(method, url, headers, body), call)
        return await self._exchange(signed, call)

    def _signed(self, request: Request, lent: wire.Lent) -> Request:
        """Add the credential to the request."""
        auth = self._config.auth
        if auth is None:
            return request
        shown = auth.header(lent)
        if shown is not None:
            return request._replace(headers={**request.headers, shown[0]: shown[1]})
        return request._replace(url=request.url + ("&" if "?" in request.url else "?") + auth.query(lent))

    def _request(self, call: RemoteCall, endpoint: str) -> Request:
        """Build the request of the pinned operation, and check it against the rules."""
        if call.native.get("protocol") == "openapi":
            request = openapi.build(call.native, call.arguments, _base(endpoint, call.native.get("servers", ())))
        else:
            request = build(call.native, call.arguments, endpoint)
        # INVARIANT: no argument chooses the host, leaves its path segment, or adds a header.
        method, url, headers, body = request
        if not url.startswith(endpoint + "/") and _origin(url) != _origin(endpoint):
            raise Failure("E3406", f"the request would leave `{self._name}`")
        if ("/." in url or "%2" in url) and climbs(urlsplit(url).path):
            raise Failure("E3305", "an argument that is part of the address cannot be `.` or `..`")
        if not headers:
            return request
        lines = {name.lower(): _one_line(name, value) for name, value in headers.items() if name.lower() not in _OURS}
        return Request(method, url, lines, body)

    async def _exchange(self, request: Request, call: RemoteCall | wire.Look) -> Any:
        """Send a request, follow allowed redirects, and read the answer."""
        for _ in range(MAX_REDIRECTS):
            response = await self._send(request)
            if response.status not in _REDIRECTS:
                if isinstance(call, RemoteCall) and call.span is not None:
                    call.span.note({"http.response.status_code": response.status})
                return await self._answers.read(response, call)
            request = request._replace(url=self._followed(response, request.url, may=request.method in _READS))
        raise Failure("E3401", f"`{self._name}` redirects in circles", details={"status": 310})

    async def _send(self, request: Request) -> Response:
        """Send a request once."""
        try:
            return await self._client.ask(*request, self._limit)
        except Untrusted:
            raise wire.unreached(self._name, "has a certificate that is not trusted") from None
        except Unreachable:
            raise wire.unreached(self._name) from None
        except Broken as broken:
            raise (self._intake.flooded() if broken.why == "flooded" else wire.broken(self._name)) from None

    def _limit(self, status: int, _: Mapping[str, str]) -> int | None:
        """Return how much of an answer's body is read."""
        if 200 <= status < 300:
            return self._intake.max_bytes
        return None if status in _REDIRECTS else EXPLAINED

    def _followed(self, response: Response, url: str, *, may: bool) -> str:
        """Return the target of a redirect, if a request may follow it there."""
        location = response.headers.get("location", "").encode("latin-1").decode(errors="replace")
        if not may:
            raise Failure(
                "E3401",
                f"`{self._name}` redirects a request that is not followed; configure the address it redirects to",
                details={"status": response.status},
            )
        try:
            target = urljoin(url, location)
            same = _origin(target) == _origin(url)
        except ValueError:
            target, same = "", False
        if not same:
            raise Failure("E3406", f"`{self._name}` redirects to another host, which is not followed")
        return target


def _base(endpoint: str, servers: Sequence[str]) -> str:
    """Return an endpoint, with the server path of the document if the operator gave none."""
    if urlsplit(endpoint).path:
        return endpoint
    return next((server for server in servers if _origin(server) == _origin(endpoint)), endpoint)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    return parts.scheme, (parts.hostname or "").lower(), port or {"http": 80, "https": 443}.get(parts.scheme)


def _one_line(name: str, value: str) -> str:
    try:
        wire.header_safe(name, value)
    except ValueError:
        raise Failure("E3305", f"the header `{name}` must be one line of text") from None
    return value


def make(name: str, config: Json, site: Site) -> HttpUpstream:
    """Make the connector of one upstream, not connected yet."""
    return HttpUpstream(name, read_config(HttpConfig, config), clock=site.clock, services=site.services)
