"""The interface between a server and one endpoint. call/endpoints.py lists all endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from interlock.http.asgi import Scope
from interlock.http.route import Prepared, Route

# Stands for every method that a path has no route for: the path's own route refuses them (405).
ANY = "*"
# The key of the route that answers every path without a route.
EVERYTHING_ELSE = (ANY, "*")

# A method and a path.
Key = tuple[str, str]


class Door:
    """One endpoint. It answers on the server's HTTP port, or listens on a port of its own."""

    # The methods and paths of the route that `load` returns. They are answered as soon as it is loaded.
    loaded_later: tuple[Key, ...] = ()

    def routes(self) -> Mapping[Key, Route]:
        """The routes that answer at once, by method and path."""
        return {}

    async def load(self) -> Route:
        """Load the route of `loaded_later`, when the first request asks for it or the server has time."""
        raise NotImplementedError  # a door without `loaded_later` is never asked

    def is_endless(self, head: Scope) -> bool:
        """Whether a request is answered with events for as long as the client listens. No call depends on it."""
        return False

    async def start(self) -> int | None:
        """Listen on a port of its own, and return it. None for a door on the server's HTTP port."""
        return None

    def hurry(self) -> None:
        """Wait no longer for the calls under way on the port of its own."""

    async def stop(self) -> None:
        """Take no more calls on the port of its own, and let those under way end."""

    async def close(self) -> None:
        """Release what the door holds. No request is under way any more."""


class Later(Route):
    """A route that is loaded when it is first asked for: the MCP SDK and FastAPI take their time."""

    def __init__(self, load: Callable[[], Awaitable[Route]]) -> None:
        self._load = load
        self._loading: asyncio.Future[Route] | None = None

    async def prepare(self, head: Scope) -> Prepared:
        return await (await self.loaded()).prepare(head)

    async def loaded(self) -> Route:
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load())
        return await asyncio.shield(self._loading)

    async def settled(self) -> None:
        """Wait for a load that is under way, whatever comes of it."""
        if self._loading is not None:
            await asyncio.wait({self._loading})
