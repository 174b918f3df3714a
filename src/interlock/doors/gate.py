"""The gate: the route that every connection asks first. It checks Host and Origin, and finds the route of the path.

All routes see only requests whose host is one of ours: a page in a browser must not reach a server on loopback by a
name of its own (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.bounds import MOST_REQUEST_VALUES, check_values
from interlock.doors.door import ANY
from interlock.doors.listening import Listening
from interlock.http.asgi import MAX_BODY, App, Receive, Scope, Send, replay
from interlock.http.connection_limits import MOST_PER_PEER
from interlock.http.route import PerRequest, Prepared, Reply, ResponseStream, Route, guarded, refused

_WITH_BODY = frozenset(("POST", "PUT", "PATCH", "DELETE"))


class Gate(Route):
    """Every HTTP request passes here first: the gate finds the route that answers it."""

    def __init__(
        self,
        listening: Listening,
        routes: Mapping[tuple[str, str], Route],
        wide: Route,
        *,
        most_values: int = MOST_REQUEST_VALUES,
        most_per_peer: int = MOST_PER_PEER,
        endless: Callable[[Scope], bool] = lambda _: False,
    ) -> None:
        self.most_per_peer = most_per_peer
        self._endless = endless
        self._hosts = frozenset(one.lower().encode() for one in listening.hosts)
        self._origins = frozenset(one.lower() for one in listening.origins)
        self._routes = routes
        self._wide = wide
        self._wide_with_body = _CountedBody(wide, most_values)
        self._passed: set[bytes] = set()

    async def prepare(self, head: Scope) -> Prepared:
        if head["type"] != "http":
            return _NO_HTTP
        unwelcome = self._unwelcome(head)
        if unwelcome is not None:
            return refused(unwelcome)
        method, path = head["method"], head["path"]
        route = self._routes.get((method, path))
        if route is None and method == "HEAD":
            route = self._routes.get(("GET", path))
        route = route or self._routes.get((ANY, path))
        if route is None and method in _WITH_BODY:
            return self._wide_with_body
        try:
            prepared = await (route or self._wide).prepare(head)
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            return refused(error)
        return ResponseStream(guarded(prepared.app)) if isinstance(prepared, ResponseStream) else prepared

    def is_endless(self, head: Scope) -> bool:
        return self._endless(head)

    def _unwelcome(self, scope: Scope) -> Failure | None:
        """Check `Host` and `Origin`: the failure of a request that is refused, None for any other."""
        host: bytes | None = None
        origin: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"host":
                # With two Host headers, another program might use the other one, so neither is accepted.
                host = value if host is None else b""
            elif name == b"origin":
                origin = value if origin is None else b""
        if host not in self._passed and not self._ours(host):
            return Failure("E3210", "this server does not go by that name; see `interlock serve --name`")
        if origin is not None and not self._welcome(origin, host):
            return Failure("E3210", "pages of that origin may not call this server")
        return None

    def _ours(self, host: bytes | None) -> bool:
        if host is None:
            return False
        if _HOST(host) and without_port(host.lower()) in self._hosts:
            if len(self._passed) < 1000:
                self._passed.add(host)
            return True
        return False

    def _welcome(self, origin: bytes, host: bytes | None) -> bool:
        stated = origin.decode("latin-1").lower()
        if stated in self._origins:
            return True
        scheme, _, place = stated.partition("://")
        return scheme in ("http", "https") and bool(place) and host is not None and place.encode() == host.lower()


class _CountedBody:
    """Hands requests to an application whose framework would read a body without a bound on its values."""

    max_body = MAX_BODY

    def __init__(self, app: App, most_values: int) -> None:
        self._app = app
        self._most_values = most_values

    async def __call__(self, body: bytes, sent: PerRequest) -> ResponseStream:
        check_values(body, self._most_values)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, replay(body, receive), send)

        return ResponseStream(guarded(app))

    def refuse(self, error: Exception, sent: PerRequest) -> Reply:
        return refused(error)


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1003})


_NO_HTTP = ResponseStream(_refuse_websocket)
_HOST = expression(rb"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@?#\s]{1,255})(:[0-9]{1,5})?").fullmatch


def without_port(host: bytes) -> bytes:
    """The name in a `Host` header."""
    if host.startswith(b"["):
        return host[1:].partition(b"]")[0]
    return host.partition(b":")[0]
