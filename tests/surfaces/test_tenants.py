"""Whatever callers of two tenants search, load, call and look at, none learns of a tool of the other."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from interlock import Failure, Interlock
from interlock.api.calls import Ask
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.context import Caller
from interlock.call.events import Event
from interlock.data.schema import Json
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.support.surface_tools import offer
from tests.thorough import examples

T = TypeVar("T")
TENANTS = ("red", "blue")
# What tools are called, and what is asked for: names, parts of names, names with a mistake, and what tools do.
TOPICS = ("invoice", "salary", "parcel", "weather")
tenants = st.sampled_from(TENANTS)
topics = st.sampled_from(TOPICS)
doors = st.sampled_from(("rest", "mcp"))
spaces, ends = st.sampled_from(("", "red.", "blue.")), st.sampled_from(("_of_red", "_of_blue", "_of", "", "x"))
# What an agent expects of a tool: nothing, what these offer, and what they do not.
EXPECTED: list[Json] = [{}, *({"type": "object", "required": [name]} for name in ("value", "loudness"))]
asked_for = st.builds("{}{}{}".format, spaces, topics, ends)


class Tenants(RuleBasedStateMachine):
    """Two tenants with tools, each a caller with a token for those of its own namespace."""

    prepared: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.runner = asyncio.Runner()
        self.events: list[Event] = []
        self.callers: dict[str, Caller] = {}
        self.tools: set[str] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def open(self) -> None:
        self.run(self._open())

    async def _open(self) -> None:
        home = shutil.copytree(self.prepared, Path(self.folder) / "home")
        opening = Interlock.open(
            home, housekeeping=False, surface="search", surface_doors=("mcp", "rest"), search_encoder="none",
            recommend_callers=1,
        )  # fmt: skip
        self.app = await opening.__aenter__()
        self.closing = opening
        if not self.app.issuer_keys.all():
            self.app.issuer_keys.init("EdDSA")
        self.service = Service(self.app)
        self.app.listen(self.events.append)
        for tenant in TENANTS:
            await self.app.identities.register(
                Identity(did=did_of(tenant), name=tenant, kind="agent", trust=80, tenant=tenant), by="test"
            )
            await self._issue(tenant, [ToolGrant(f"{tenant}.*")])

    async def _issue(self, tenant: str, grants: list[ToolGrant]) -> None:
        token = await self.app.tokens.issue(subject=did_of(tenant), tools=grants, by=self.app.caller)
        self.callers[tenant] = await self.app.caller_of(token)

    def teardown(self) -> None:
        if self.callers:
            self.run(self._close())
        self.runner.close()
        shutil.rmtree(self.folder)

    async def _close(self) -> None:
        await self.service.close()
        await self.closing.__aexit__(None, None, None)

    @rule(tenant=tenants, topic=topics)
    def add(self, tenant: str, topic: str) -> None:
        name = f"{topic}_of_{tenant}"
        if name not in self.tools:
            self.tools.add(name)
            self.run(self._add(offer(name, f"Look after the {topic} of somebody.", namespace=tenant)))

    async def _add(self, tool: Any) -> None:
        await admit(self.app, tool)
        await self.app.catalog.forget()

    @rule(tenant=tenants, topic=topics, every=st.booleans())
    def grant(self, tenant: str, topic: str, every: bool) -> None:
        grants = [ToolGrant(f"{tenant}.*" if every else f"{tenant}.{topic}_of_{tenant}")]
        self.run(self._issue(tenant, grants))

    @rule(tenant=tenants, door=doors, query=asked_for, schema=st.none() | st.sampled_from(EXPECTED))
    def search(self, tenant: str, door: str, query: str, schema: Any) -> None:
        expected = None if schema is None else {query: schema}
        self.told(tenant, query, self._search(tenant, door, query, expected))

    async def _search(self, tenant: str, door: str, query: str, expected: Json | None) -> Any:
        caller = await self.service.surfaces.attach(self.callers[tenant], door)
        found, loaded, deferred = await self.service.surfaces.search_at(query, caller, door, 10, "both", expected)
        return [one.document() for one in (*found, *loaded)], deferred, found.facts()

    @rule(tenant=tenants, name=asked_for)
    def load(self, tenant: str, name: str) -> None:
        self.told(tenant, name, self._load(tenant, name))

    async def _load(self, tenant: str, name: str) -> Any:
        found = await self.service.surfaces.load([name, *sorted(self._own(tenant))[:1]], self.callers[tenant])
        return [one.row.address for one in found]

    def _own(self, tenant: str) -> list[str]:
        return [f"{tenant}.{one}" for one in self.tools if one.endswith(tenant)]

    @rule(tenant=tenants, door=doors, name=asked_for)
    def call(self, tenant: str, door: str, name: str) -> None:
        self.told(tenant, name, self._call(tenant, door, name))

    async def _call(self, tenant: str, door: str, name: str) -> Any:
        caller = await self.service.surfaces.attach(self.callers[tenant], door)
        result = await self.service.calls.invoke(Ask(name, {"value": "x"}), caller, door=door)
        return result.document()

    @rule(tenant=tenants, door=doors, name=asked_for, schema=st.none() | st.sampled_from(EXPECTED))
    def look(self, tenant: str, door: str, name: str, schema: Any) -> None:
        expected = None if schema is None else {name: schema}
        self.told(tenant, name, self._look(tenant, door, expected))

    async def _look(self, tenant: str, door: str, expected: Json | None) -> Any:
        caller = await self.service.surfaces.attach(self.callers[tenant], door)
        surfaces = self.service.surfaces
        # MCP lists a surface with tools of its own before it.
        if door == "mcp":
            listed = await surfaces.listed(caller, "", expected)
        else:
            listed = (await surfaces.page(caller, door, None, 100, expected)).versions
        # A surface that defers: whatever is expected puts nothing on it.
        assert {one.row.address for one in listed} <= set(await surfaces.offered(caller))
        shown = await self.service.surface_views.show(by=self.callers[tenant])
        with pytest.raises(Failure) as refused:
            await self.service.surface_views.show(by=self.callers[tenant], who=_other(tenant))
        return [one.row.address for one in listed], shown, refused.value.envelope("")

    @rule(tenant=tenants, query=asked_for, budget=st.sampled_from((0, 40, 400, 4000)))
    def fit(self, tenant: str, query: str, budget: int) -> None:
        self.told(tenant, query, self._fit(tenant, query, budget))

    async def _fit(self, tenant: str, query: str, budget: int) -> Any:
        """What a window is offered, what tools cost in it, and the schema of one of them."""
        caller = self.callers[tenant]
        offered = [await self.app.affordances(budget=budget, query=one, caller=caller) for one in (query, "")]
        costs = await self.app.token_costs(caller=caller)
        window = await self.app.window(8000, caller=caller)
        loaded = await window.load(query)
        try:
            part: Any = await self.app.schema_part(query, "", caller=caller)
        except Failure as failure:
            part = failure.envelope("")
        return [one.document() for one in (*offered, loaded)], costs, part

    @rule(tenant=tenants, query=asked_for, name=asked_for, faster=st.booleans())
    def choose(self, tenant: str, query: str, name: str, faster: bool) -> None:
        self.told(tenant, query, self._choose(tenant, query, faster))
        self.told(tenant, name, self._recommend(tenant, name))

    async def _choose(self, tenant: str, query: str, faster: bool) -> Any:
        made = await self.app.select(query, caller=self.callers[tenant], cheaper=True, faster=faster, intent=False)
        offered: list[Any] = []

        async def selector(_: str, tools: Any) -> Any:
            offered.extend(tools)
            return {"tool": f"{_other(tenant)}.invoice_of_{_other(tenant)}", "parameters": {"value": "x"}}

        named = await self.app.select(query, caller=self.callers[tenant], selector=selector, intent=False)
        assert named.chosen is None
        # The tool that the model named is its own word: it comes back in the refusal.
        return made.document(), offered, {**named.document(), "refused": None, "stages": []}

    async def _recommend(self, tenant: str, name: str) -> Any:
        caller = self.callers[tenant]
        found = [one.document() for one in await self.app.recommend(caller=caller)]
        return found, [one.document() for one in await self.app.recommend(name, caller=caller)]

    def told(self, tenant: str, said: str, work: Coroutine[Any, Any, Any]) -> None:
        """Do something as a caller: nothing that comes back names a tool of the other tenant, but their own words."""
        self.events.clear()
        try:
            answer = self.run(work)
        except Failure as failure:
            answer = failure.envelope("")
        text = orjson.dumps([answer, [one.document() for one in self.events]], default=str).decode()
        text = text.replace(said, "") if said else text
        foreign = [one for one in self.tools if one.endswith(_other(tenant)) and one in text]
        assert not foreign, text


def _other(tenant: str) -> str:
    return TENANTS[1 - TENANTS.index(tenant)]


@pytest.mark.proves("SURF-01", "SURF-03")
def test_no_caller_learns_of_a_tool_of_another_tenant(prepared_home: Path) -> None:
    Tenants.prepared = prepared_home
    machine = Tenants.TestCase
    machine.settings = settings(max_examples=examples(6), stateful_step_count=20, deadline=None)
    machine().runTest()
