"""An upstream that offers what a test says, and the manager of upstreams over it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlock import Interlock
from interlock.authority.secrets import open_lease
from interlock.call.connector import Connector, Definition, Discovered, RemoteCall
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.testing import FakeClock
from interlock.upstreams.manager import Upstreams
from interlock.upstreams.states import UpstreamStates

MODULE = "tests.support.langchain_tools"


def definition(name: str, **facts: Any) -> Definition:
    schema: Json = {"type": "object", "properties": {"text": {"type": "string", "description": "what to say"}}}
    plain = Definition(
        name=name, description=f"The tool {name} says a text again.", input_schema=schema,
        output_schema={"type": "object", "properties": {"said": {"type": "string"}}, "required": ["said"]},
        native={"protocol": "http", "name": name},
    )  # fmt: skip
    return replace(plain, **facts)


class Scripted:
    """An upstream that offers what it is told to, and counts what it is asked."""

    def __init__(self) -> None:
        self.offers: list[Definition] = [definition("say"), definition("look", hints={"readOnlyHint": True})]
        self.refused: list[tuple[str, str]] = []
        self.away = False
        self.calls: list[RemoteCall] = []
        self.failure: Failure | None = None
        self.changed: Callable[[], None] = lambda: None

    def make(self, name: str, kind: str, config: Json, changed: Callable[[], None]) -> Connector:
        self.changed = changed
        return self

    async def call(self, call: RemoteCall) -> Any:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure
        return {"said": call.arguments.get("text", "")}

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return None

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        if self.away:
            raise Failure("E3502", "nobody is at home")
        return Discovered(tuple(self.offers), tuple(self.refused), {"server": "scripted"})

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        if self.away:
            raise Failure("E3502", "nobody is at home")

    def forget(self) -> None:
        return None

    async def close(self) -> None:
        return None


@asynccontextmanager
async def opened(
    home: Path, server: Scripted, clock: FakeClock | None = None, **settings: Any
) -> AsyncGenerator[tuple[Interlock, Upstreams]]:
    async with Interlock.open(
        home, housekeeping=False, clock=None if clock is None else clock.clock, **settings
    ) as app:
        upstreams = Upstreams(
            journal=app.journal, catalog=app.catalog, clock=app.clock, make=server.make,
            states=UpstreamStates(app.journal, app.clock),
            lend=lambda names, s: open_lease(app.secrets, names, lifetime_s=s, clock=app.clock),
            try_out=app.admissions.try_out_all, announce=app.gateway.observer.announce,
            mention=app.gateway.observer.mention,
            look=app.gateway.quarantine.look, supervisor=app.supervisor,
            owner=app.instance.id, alive=app.instance.alive, probe_every_s=60.0,
        )  # fmt: skip
        app.connect_through(upstreams.connections.get)
        yield app, upstreams
        await upstreams.close()


async def states(upstreams: Upstreams) -> dict[str, str]:
    return {one.name: one.state for one in await upstreams.offers("far")}
