"""Clients over MCP hear that their list has changed, whoever loaded a tool with their token, and where."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest

from interlock.call.capability import ToolGrant
from interlock.testing import FakeClock
from tests import warm
from tests.support.calls import admit, until
from tests.support.endpoints import ERAS
from tests.support.identities import did_of
from tests.support.lifecycles import Place, opened
from tests.support.surface_tools import TOOLS, offer

BOTH_ERAS = pytest.mark.parametrize("era", ERAS)
LENT = offer("read_mail", "Read the mail of a mailbox.", permissions=["credential:mail/key"])

LOADS = """
import asyncio, sys
from interlock import Interlock
from interlock.api.service import Service

async def main(home, token):
    async with Interlock.open(home, housekeeping=False, surface="search") as app:
        service = Service(app)
        await service.surfaces.load(["office.forecast"], await app.caller_of(token))
        await service.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Hearing:
    """An MCP client that counts how often it is told that its list of tools may be another."""

    def __init__(self) -> None:
        self.client: Any = None
        self.told = 0

    async def hear(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self.told += 1

    async def names(self) -> list[str]:
        return [one.name for one in (await self.client.list_tools()).tools if one.name.startswith("office-")]

    async def after(self, times: int = 1) -> list[str]:
        """The tools that it is shown once it was told so often."""
        await until(lambda: self.told >= times)
        return await self.names()


@asynccontextmanager
async def _hearing(place: Place, era: str, token: str = "full") -> AsyncGenerator[Hearing]:
    session = Hearing()
    async with place.session(era, token, message_handler=session.hear) as session.client:
        if era == "mcp-legacy":
            await session.names()
            yield session
        else:
            async with session.client.listen(tools_list_changed=True):
                await session.names()
                yield session


@asynccontextmanager
async def _office(home: Path, **more: Any) -> AsyncGenerator[Place]:
    settings = {"surface": "search", "surface_doors": ("mcp", "rest"), **more}
    async with opened(home, **settings) as place:
        await admit(place.app, *TOOLS, LENT)
        await place.app.catalog.forget()
        place.tokens["other"] = await place.app.tokens.issue(
            subject=did_of("bot"), tools=[ToolGrant("office.*")], by=place.app.caller
        )
        yield place


async def _load(place: Place, name: str, token: str = "full") -> None:
    answer = await place.http.post("/v1/tools/load", json={"names": [name]}, headers=place.bearer(token))
    assert answer.status_code == 200, answer.text


@BOTH_ERAS
async def test_every_client_of_a_token_hears_what_one_of_them_has_loaded(home: Path, era: str) -> None:
    async with _office(home) as place, _hearing(place, era) as one, _hearing(place, era) as another:
        loaded = await one.client.call_tool("load_tools", {"names": ["office-forecast"]})
        assert not loaded.is_error
        assert await another.after() == ["office-forecast"]
        assert await one.after() == ["office-forecast"]
        # A load that changes nothing is no news: the next notification is about the next tool.
        await one.client.call_tool("load_tools", {"names": ["office-forecast"]})
        await one.client.call_tool("load_tools", {"names": ["office-translate"]})
        assert await another.after(2) == ["office-forecast", "office-translate"]
        assert another.told == 2


@BOTH_ERAS
async def test_a_client_hears_of_a_load_by_another_endpoint_and_of_none_by_another_token(home: Path, era: str) -> None:
    async with _office(home) as place, _hearing(place, era) as mine, _hearing(place, era, "other") as other:
        await _load(place, "office.forecast")
        assert await mine.after() == ["office-forecast"]
        await _load(place, "office.translate", "other")
        assert await other.after() == ["office-translate"]
        # Each was told of its own: the first notification of the one came before the load of the other.
        assert (mine.told, other.told) == (1, 1)


@BOTH_ERAS
async def test_a_client_hears_of_a_tool_that_a_call_has_loaded(home: Path, era: str) -> None:
    async with _office(home, surface_unloaded="load") as place, _hearing(place, era) as one:
        async with _hearing(place, era) as another:
            done = await one.client.call_tool("office-forecast", {"value": "Rome"})
            assert done.structured_content == {"result": "forecast Rome"}
            assert await another.after() == ["office-forecast"]
        assert await one.after() == ["office-forecast"]


@BOTH_ERAS
async def test_a_client_hears_of_a_load_in_another_process(home: Path, era: str) -> None:
    async with _office(home) as place, _hearing(place, era) as session:
        words = ["-c", LOADS, str(home), place.tokens["full"]]
        with warm.start(words, os.environ, Path(__file__).parents[2], python=True) as process:
            assert await asyncio.to_thread(process.wait, 60) == 0, process.communicate()[1].decode()
        assert await session.after() == ["office-forecast"]


@BOTH_ERAS
async def test_a_client_hears_of_a_credential_that_expires(home: Path, era: str) -> None:
    clock = FakeClock()
    async with _office(home, clock=clock.clock) as place:
        ends_ms = clock.now_ms + 60_000
        await place.app.secrets.set("mail/key", "s3cret-value", by="test", expires_ms=ends_ms)
        await _load(place, "office.read_mail")
        async with _hearing(place, era) as session:
            assert await session.names() == ["office-read_mail"]
            told = session.told
            clock.advance(61)
            assert await session.after(told + 1) == []
