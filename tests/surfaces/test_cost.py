"""The list of a surface costs what the surface holds, however large the catalog is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from interlock import Interlock
from interlock.api.mcp_names import Names
from interlock.api.service import Service
from interlock.doors.mcp.listing import Listing
from interlock.testing import FakeClock
from tests.support.calls import publish
from tests.support.surface_tools import offer

SHOWN = [offer(f"shown_{number}", "One that is on the surface.") for number in range(5)]


class Calls:
    """Counts the calls of Python functions."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "interlock" in frame.f_code.co_filename:
            self.count += 1


@pytest.mark.supports("SURF-01")
async def test_a_list_of_a_surface_takes_as_many_steps_in_a_large_catalog_as_in_a_small_one(home: Path) -> None:
    pinned = ({"tools": [one.manifest.address for one in SHOWN]},)
    # Time stands still, so that nothing that was read becomes too old between two steps.
    options: dict[str, Any] = {"surface": "search", "surface_pinned": pinned, "clock": FakeClock().clock}
    async with Interlock.open(home, housekeeping=False, **options) as app:
        service = Service(app)
        listing = Listing(service, Names(app))
        steps: list[int] = []
        others = [offer(f"other_{number}", "One of the many others.") for number in range(200)]
        for more in (SHOWN, others):

            def unit(transaction: Any, more: Any = more) -> None:
                for one in more:
                    publish(one)(transaction)

            await app.journal.commit(unit)
            await app.catalog.forget()
            counts: list[int] = []
            for _ in range(4):
                with Calls() as calls:
                    caller = await service.surfaces.attach(app.caller, "mcp")
                    described, cursor = await listing.page(caller, None, shows_apps=True)
                counts.append(calls.count)
                assert len(described) == 3 + len(SHOWN)
                assert cursor is None
            steps.append(min(counts[1:]))  # the first one reads the catalog
        small, large = steps
        assert large <= 1.2 * small, steps
        await service.close()
