"""Opens the endpoints of `interlock.call.endpoints`, each by the module that its row names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from interlock.call import endpoints

if TYPE_CHECKING:
    from interlock.api.service import Service
    from interlock.doors.door import Door
    from interlock.doors.listening import Listening


class StdioDoor(Protocol):
    """A door that serves one client over stdin and stdout."""

    async def run_stdio(self, token: str | None = None) -> None: ...

    async def drain(self, within_s: float) -> None:
        """Wait until the calls under way have ended; after the given time they are cut off."""
        ...


class _Module(Protocol):
    """A module that serves an endpoint."""

    def open_door(self, service: Service, listening: Listening, /) -> Door | None:
        """A door that does not listen yet; None if `listening` leaves it out."""
        ...

    def open_stdio(self, service: Service, /) -> StdioDoor: ...


def open_doors(service: Service, listening: Listening) -> dict[str, Door]:
    """The doors of a server by their names, in the order of the table."""
    rows = endpoints.ENDPOINTS.items()
    opened = {name: _module(row.module).open_door(service, listening) for name, row in rows}
    return {name: door for name, door in opened.items() if door is not None}


def open_stdio(service: Service) -> StdioDoor:
    """The door for one client over stdin and stdout."""
    return _module(next(row for row in endpoints.ENDPOINTS.values() if row.stdio).module).open_stdio(service)


def _module(name: str) -> _Module:
    return cast("_Module", importlib.import_module(name))
