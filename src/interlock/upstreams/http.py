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
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urljoin

from interlock.call.connector import Aged, Discovered, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.net.client import Broken, Client, Response
from interlock.net.connection import Unreachable, Untrusted
from interlock.upstreams import openapi, wire
from interlock.upstreams.http_answers import EXPLAINED, Answers
from interlock.upstreams.http_requests import (
    READS,
    HttpConfig,
    accepted,
    is_repeatable,
    origin,
    request_of,
    with_contents,
)
from interlock.upstreams.kinds import Site
from interlock.upstreams.openapi import Request
from interlock.upstreams.remote_config import Lent, Look, Tls
from interlock.upstreams.response_limits import Intake, in_thread
from interlock.upstreams.sender import Sender, Sleep

if TYPE_CHECKING:
    from interlock.resilience.services import Services

_REDIRECTS = (301, 302, 303, 307, 308)
MAX_REDIRECTS = 5


class HttpUpstream:
    """Calls one HTTP service."""

    def __init__(
        self,
        name: str,
        config: HttpConfig,
        *,
        clock: Clock,
        resolve: addresses.Resolve = addresses.resolve_by_system,
        sleep: Sleep = asyncio.sleep,
        services: Services | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._intake = Intake(name, config.max_response_bytes, config.max_response_values)
        self._answers = Answers(name, self._intake, clock, self._results)
        self._sender = Sender(
            name, config.urls, idempotent=config.idempotent, clock=clock, sleep=sleep, services=services
        )
        self._client = Client(
            partial(addresses.checked, allow_private=config.allow_private, resolve=resolve),
            connections=config.max_connections,
            tls=None if config.tls == Tls() else config.tls.context,
            connect_s=config.connect_timeout_s,
        )

    async def call(self, call: RemoteCall) -> Any:
        value = await self._sender.send(
            call,
            lambda one, url: wire.within(one, self._name, self._ask(one, url)),
            repeatable=is_repeatable(call),
        )
        if "whole_result" in call.native and not isinstance(value, Aged):
            await self._answers.whole.check(call, value)
        return value

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
            base_url, document = document, await self._document(document, Look(credentials or {}))
        discovered = await in_thread(partial(openapi.read, document, base_url=base_url))
        written = [tool.definition() for tool in self._config.tools]
        return replace(discovered, tools=[*discovered.tools, *written])

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        request = Request("HEAD", self._config.urls[0] + "/", {"accept": "*/*"}, None)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._send(request)  # any answer proves that the service is up
        except TimeoutError:
            raise wire.unreached(self._name, "does not answer") from None

    def forget(self) -> None:
        self._sender.forget()
        self._answers.whole.forget()

    async def close(self) -> None:
        self._sender.close()
        await self._answers.whole.close()
        self._client.close()

    async def _document(self, url: str, look: Look) -> Json:
        """Fetch an OpenAPI document from its address, as JSON or YAML."""
        request = Request("GET", url, {**accepted({}), **self._config.headers}, None)
        # INVARIANT: a credential is shown only to the service it is for; another party may host the document.
        if any(origin(url) == origin(endpoint) for endpoint in self._config.urls):
            request = self._signed(request, look)
        try:
            async with asyncio.timeout(30):
                text = await self._exchange(request, look)
        except TimeoutError:
            raise wire.late(self._name) from None
        document: Json = cast("Json", text) if isinstance(text, dict) else {}
        return await in_thread(openapi.parse, document["text"] if set(document) == {"text"} else document)

    async def _results(self, call: RemoteCall) -> Json:
        """Return the schemas of results that are too large for their tools, from the document."""
        document = self._config.openapi
        if document is None:
            raise Failure("E3105", f"`{self._name}` is configured without an OpenAPI document")
        if isinstance(document, str):
            document = await self._document(document, Look(call.credentials))
        return await in_thread(openapi.results, document)

    async def _ask(self, call: RemoteCall, endpoint: str) -> Any:
        """Make one attempt at one endpoint."""
        wire.check_egress(call, endpoint)
        call.reported["server_url"] = endpoint
        if call.read_file is not None and call.native.get("body"):
            call = await with_contents(call, call.read_file)
        method, url, given, body = request_of(self._name, call, endpoint)
        headers = {**accepted(call.native), **self._config.headers, **given, **wire.context_headers(call, self._config)}
        signed = self._signed(Request(method, url, headers, body), call)
        return await self._exchange(signed, call)

    def _signed(self, request: Request, lent: Lent) -> Request:
        """Add the credential to the request."""
        auth = self._config.auth
        if auth is None:
            return request
        shown = auth.header(lent)
        if shown is not None:
            return request._replace(headers={**request.headers, shown[0]: shown[1]})
        return request._replace(url=request.url + ("&" if "?" in request.url else "?") + auth.query(lent))

    async def _exchange(self, request: Request, call: RemoteCall | Look) -> Any:
        """Send a request, follow allowed redirects, and read the answer."""
        for followed in range(MAX_REDIRECTS):
            response = await self._send(request)
            if response.status not in _REDIRECTS:
                if isinstance(call, RemoteCall) and call.span is not None:
                    call.span.note({"http.response.status_code": response.status})
                return await self._answers.read(response, call, request.headers, redirected=followed > 0)
            request = request._replace(url=self._followed(response, request.url, may=request.method in READS))
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
            same = origin(target) == origin(url)
        except ValueError:
            target, same = "", False
        if not same:
            raise Failure("E3406", f"`{self._name}` redirects to another host, which is not followed")
        return target


def make(name: str, config: Json, site: Site) -> HttpUpstream:
    """Make the connector of one upstream, not connected yet."""
    return HttpUpstream(name, HttpConfig.from_document(config), clock=site.clock, services=site.services)
