"""MCP servers and the registry: what is found is registered and not believed, what goes away comes back as it was, and
a reader sees the tools of one moment.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pydantic
import pytest

from interlock import Interlock
from interlock.api.health import Health
from interlock.api.mcp_names import Names
from interlock.api.service import Service
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.doors.mcp.listing import Listing
from interlock.settings import Settings
from interlock.telemetry.alerts import Alert
from interlock.upstreams.connections import Looks
from interlock.upstreams.manager import PROBE_LIMIT_S
from interlock.upstreams.mcp import sessions
from interlock.upstreams.mcp.sessions import PROBE_S
from interlock.upstreams.supervisor import Restarts
from tests.registry.swapping import SETS
from tests.support.stores import beside
from tests.support.upstream_servers import Answer, Got, HttpServer, json_answer

Json = dict[str, Any]
SCRIPTED = Path(__file__).parents[1] / "support" / "mcp_servers" / "scripted.py"
SWAPPING = Path(__file__).parent / "swapping.py"
READS: Json = {"mutation_class": "read_only"}
KEPT = pytest.mark.proves("OPS-10")


def run(script: Path, *options: str) -> Json:
    return {"command": [sys.executable, "-I", "-S", str(script), *options]}


def code(result: Result) -> str | None:
    return None if result.error is None else result.error.code


class Watch:
    """Hears the alerts of a place, and waits for what others bring about."""

    def __init__(self, app: Interlock) -> None:
        self.alerts: list[Alert] = []
        self._more = asyncio.Event()
        app.gateway.telemetry.alerts.listeners.append(self._hear)

    def _hear(self, alert: Alert) -> None:
        self.alerts.append(alert)
        self._more.set()

    async def heard(self, name: str, times: int = 1) -> Alert:
        async with asyncio.timeout(60):
            while len(found := [one for one in self.alerts if one.name == name]) < times:
                self._more.clear()
                await self._more.wait()
        return found[-1]


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not (await held if inspect.isawaitable(held := true()) else held):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.002)


# Found


@pytest.mark.proves("REG-10")
@pytest.mark.parametrize("era", [(), ("--modern",)], ids=["handshake", "modern"])
async def test_what_a_server_offers_on_three_pages_is_registered_and_one_bad_descriptor_is_a_warning(
    tmp_path: Path, era: tuple[str, ...]
) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        watch = Watch(app)
        before_ms = app.clock.now_ms()
        report = await app.upstreams.add("desk", "mcp", run(SCRIPTED, *era), by=app.caller)
        assert {one.name: one.state for one in report.tools} == {
            **dict.fromkeys(("echo", "shuffle", "hang", "exit", "grow", "state"), "admitted"),
            "spoilt": "refused",
        }
        assert report.about["protocol"] == ("2026-07-28" if era else "2025-06-18")
        warning = await watch.heard("INVALID_TOOL_SCHEMA")
        assert (warning.severity, warning.facts["offered"]) == ("warning", "spoilt")

        rows = {row.address: row for row in await app.catalog.rows()}
        assert {row.origin for row in rows.values()} == {"upstream:desk"}
        assert sorted(rows) == [f"desk.{name}" for name in ("echo", "exit", "grow", "hang", "shuffle", "state")]
        found = app.journal.reader.all("SELECT DISTINCT discovered_ms FROM upstream_tool WHERE state = 'admitted'")
        assert [before_ms <= at_ms <= app.clock.now_ms() for (at_ms,) in found] == [True]

        # It announces that it only reads. Nobody has said that this is to be believed.
        contract = (await app.catalog.resolve("desk.echo")).contract
        assert contract.mutation.mutation_class == "write_irreversible"
        assert (await app.call("desk.echo", text="hi", key="k")).pending


@pytest.mark.proves("REG-10")
@pytest.mark.parametrize("options", [("--protocol", "1999-01-01"), ("--future",)])
async def test_a_server_of_another_protocol_is_not_discovered_and_that_is_the_reason(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        with pytest.raises(Failure) as caught:
            await app.upstreams.add("desk", "mcp", run(SCRIPTED, *options), by=app.caller)
        assert caught.value.details == {"sent": False, "reason": "protocol_version_mismatch"}
        assert await app.catalog.rows() == []
        assert await app.upstreams.list() == []


@pytest.mark.proves("REG-10")
@pytest.mark.parametrize("era", [(), ("--modern",)], ids=["handshake", "modern"])
async def test_a_change_that_a_server_announces_is_found_by_itself(tmp_path: Path, era: tuple[str, ...]) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        overlay = {"tools": {"grow": READS}}
        await app.upstreams.add("desk", "mcp", run(SCRIPTED, *era), by=app.caller, overlay=overlay)
        assert (await app.call("desk.grow")).ok

        async def grown() -> bool:
            return "desk.grown7" in await app.catalog.addresses()

        await until(grown)
        # What an operator said of one tool gives nothing to another.
        assert (await app.catalog.resolve("desk.grown7")).contract.mutation.mutation_class == "write_irreversible"


# Away and back


def said(got: Got) -> Answer:
    """What a small server of the era without handshake answers."""
    request: Json = orjson.loads(got.body)
    results: Json = {
        "server/discover": {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}},
        "tools/list": {"tools": [{"name": "look", "description": "Looks.", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": []},
    }
    return json_answer({"jsonrpc": "2.0", "id": request["id"], "result": results.get(request["method"], {})})


@asynccontextmanager
async def at(port: int, server: HttpServer) -> AsyncGenerator[str]:
    """A server that is there for a while."""
    server.otherwise = said
    serve = server._serve  # pyright: ignore[reportPrivateUsage] - one port, twice
    listening = await asyncio.start_server(serve, "127.0.0.1", port, reuse_port=True)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        listening.close()
        for writer in list(server._writers):  # pyright: ignore[reportPrivateUsage]
            writer.close()
        await listening.wait_closed()


@pytest.mark.proves("REG-11")
async def test_a_server_that_stops_is_noticed_by_schedule_and_its_tools_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_port: Callable[[], int]
) -> None:
    port, probes, server = closed_port(), 0, HttpServer()
    async with Interlock.open(tmp_path, upstream_probe_s=0.05) as app:
        watch, probe_all = Watch(app), app.upstreams.probe_all

        async def counted() -> None:
            nonlocal probes
            await probe_all()
            probes += 1

        monkeypatch.setattr(app.upstreams, "probe_all", counted)

        def kept() -> list[Any]:
            return [
                *app.journal.reader.all(
                    "SELECT address, version, digest, state, published_ms FROM tool_version ORDER BY 1"
                ),
                *app.journal.reader.all("SELECT name, state, pinned, discovered_ms FROM upstream_tool ORDER BY 1"),
            ]

        async with at(port, server) as url:
            overlay = {"tools": {"look": READS}}
            config: Json = {"url": url, "allow_private": True}
            await app.upstreams.add("far", "mcp", config, by=app.caller, overlay=overlay)
            assert (await app.call("far.look")).ok
            registered = kept()
            assert await _availability(app) == "AVAILABLE"

        stopped_at = probes
        await watch.heard("UPSTREAM_UNAVAILABLE")
        assert probes - stopped_at <= 2
        assert (await app.upstreams.get("far")).state == "unavailable"
        assert kept() == registered
        assert await _availability(app) == "UNAVAILABLE"
        away = await app.call("far.look")
        assert away.error is not None
        assert (away.error.code, away.error.row.error_class) == ("E3502", "dependency_unavailable")
        assert away.error.message.startswith("the upstream `far` does not answer"), "nobody tried to reach it"

        async with at(port, server):
            started_at = probes
            await watch.heard("UPSTREAM_AVAILABLE")
            assert probes - started_at <= 2
            assert (await app.call("far.look")).ok
            assert kept() == registered
            assert await _availability(app) == "AVAILABLE"


async def _availability(app: Interlock) -> str:
    return app.availability((await app.catalog.resolve("far.look")).row)


# Kept running


def at_once(_: Restarts, failures: int) -> float:
    """Stands in for the pause before a restart."""
    return 0.0 * failures


@KEPT
async def test_a_child_that_cannot_be_kept_running_is_alerted_and_readiness_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restarts, "pause", at_once)
    script = tmp_path / "server.py"
    script.write_text(SCRIPTED.read_text())
    async with HttpServer.open() as inbox:
        inbox.otherwise = lambda _: Answer(500)
        hook = {"name": "hook", "webhook": inbox.url, "secret": "hook", "allow_private": True}
        async with Interlock.open(tmp_path / "home", housekeeping=False, channels=[hook]) as app:
            await app.secrets.set("hook", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", by=app.caller.id)
            watch = Watch(app)
            await app.upstreams.add("desk", "mcp", run(script), by=app.caller, overlay={"tools": {"state": READS}})
            parts = ["store", "signer", "policy", "sinks", "upstreams", "upstreams.desk", "background"]
            ready = dict.fromkeys([*parts, *await beside(app)], "healthy")
            assert await Health(app).ready() == ("healthy", ready)

            first = await answering(app)
            os.kill(first, signal.SIGKILL)
            second = await answering(app)
            assert second != first, "it was started again and greeted"
            script.write_text("import os\nos._exit(1)\n")
            os.kill(second, signal.SIGKILL)
            failed = await watch.heard("UPSTREAM_FAILED")
            assert (failed.severity, "10" in failed.facts["reason"]) == ("critical", True)
            await app.upstreams.probe_all()
            gone = {"upstreams": "down", "upstreams.desk": "down"}
            assert await Health(app).ready() == ("degraded", {**ready, **gone})

            assert (await app.call("desk.echo", text="hi", key="k")).pending
            await app.courier.deliver_due()
            assert await Health(app).ready() == ("degraded", {**ready, **gone, "sinks": "degraded"})


async def test_readiness_tells_upstreams_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "pause", at_once)
    scripts = {name: tmp_path / f"{name}.py" for name in ("desk", "shop")}
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        watch = Watch(app)
        for name, script in scripts.items():
            script.write_text(SCRIPTED.read_text())
            await app.upstreams.add(name, "mcp", run(script), by=app.caller, overlay={"tools": {"state": READS}})
        parts = (await Health(app).ready())[1]
        assert (parts["upstreams"], parts["upstreams.desk"], parts["upstreams.shop"]) == ("healthy",) * 3
        pid = await answering(app)
        scripts["desk"].write_text("import os\nos._exit(1)\n")
        os.kill(pid, signal.SIGKILL)
        await watch.heard("UPSTREAM_FAILED")
        await app.upstreams.probe_all()
        status, parts = await Health(app).ready()
        assert (status, parts["upstreams"]) == ("degraded", "degraded")
        assert (parts["upstreams.desk"], parts["upstreams.shop"]) == ("down", "healthy")
        assert (await app.call("shop.state")).ok


@KEPT
async def test_a_child_that_hangs_is_found_by_schedule_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "PROBE_S", 0.5)
    # The schedule alone finds it: no look that an announcement at its start asks for, which would hang as well.
    monkeypatch.setattr(Looks, "begin", no_look)
    async with Interlock.open(tmp_path, upstream_probe_s=0.05) as app:
        watch, overlay = Watch(app), {"tools": {"state": READS}}
        await app.upstreams.add("desk", "mcp", run(SCRIPTED), by=app.caller, overlay=overlay)
        pid = await answering(app)
        os.kill(pid, signal.SIGSTOP)
        # Nobody calls it meanwhile.
        assert "does not answer a health request" in (await watch.heard("UPSTREAM_UNAVAILABLE")).facts["reason"]
        await watch.heard("UPSTREAM_AVAILABLE")
        assert await answering(app) != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def no_look(_: Looks, name: str) -> None:
    """Stands in for the beginning of a look at an upstream."""


async def answering(app: Interlock) -> int:
    """The process that answers."""
    return (await app.call("desk.state")).unwrap()["structuredContent"]["pid"]


@KEPT
def test_a_child_is_asked_at_least_every_five_minutes_and_has_five_seconds_to_answer() -> None:
    assert Settings.model_validate({}).upstream_probe_s <= 300
    with pytest.raises(pydantic.ValidationError):
        Settings.model_validate({"upstream_probe_s": 301})
    assert PROBE_S <= PROBE_LIMIT_S == 5.0


# Changed


# The tool whose schema changes is off until a person has looked at it.
BOTH = [frozenset(f"far.{name}" for name in names) for names in (("rate", "shape", *SETS[0]), ("rate", *SETS[1]))]


def _committed(app: Interlock) -> bool:
    """Whether the store has the new set."""
    found = app.journal.reader.all("SELECT address FROM tool_version WHERE address = 'far.new_49' AND state = 'active'")
    return bool(found)


@pytest.mark.proves("REG-12")
async def test_while_a_server_swaps_fifty_tools_readers_see_one_set_or_the_other_and_then_nothing_of_the_old(
    tmp_path: Path,
) -> None:
    stale: Json = {**READS, "stale_s": 3600}
    overlay = {"tools": {"rate": stale, "shape": stale, "old_7": stale}}
    home, seen, done = tmp_path / "home", list[frozenset[str]](), False
    rows: set[frozenset[str]] = set()
    late: list[bool] = []
    async with (
        Interlock.open(home, housekeeping=False) as interlock,
        Interlock.open(home, housekeeping=False) as elsewhere,
    ):
        await interlock.upstreams.add("far", "mcp", run(SWAPPING, str(tmp_path)), by=interlock.caller, overlay=overlay)
        tools, others = Service(interlock).tools, Service(elsewhere).tools
        listing = Listing(Service(interlock), Names(interlock))

        async def read() -> None:
            while not done:
                active = {row.address for row in await interlock.catalog.rows() if row.state == "active"}
                rows.add(frozenset(active - {"far.shape"}))  # its row stays, and nobody is offered it
                seen.append(frozenset(one.row.address for one in await tools.visible(interlock.caller)))
                seen.append(frozenset(one.row.address for one in await others.visible(elsewhere.caller)))
                described, _ = await listing.page(interlock.caller, None, shows_apps=True)
                seen.append(frozenset(one.document["_meta"]["interlock/address"] for one in described))
                # A process that has noticed the commit offers the new set: nothing is left to expire.
                swapped = _committed(interlock)
                for app in (interlock, elsewhere):
                    await app.journal.changes.look()
                blocks = [await app.affordances(budget=100_000) for app in (interlock, elsewhere)]
                for block in blocks if swapped else ():
                    assert "old_" not in block.text
                    assert "furlong" not in block.text
                    assert "new_49" in block.text
                late.append(swapped)
                seen.append(frozenset(one["name"] for one in blocks[0].loaded))
                await asyncio.sleep(0.002)

        cached = ("far.rate", "far.shape", "far.old_7")
        for name in cached:
            assert (await interlock.call(name)).ok
        (tmp_path / "broken").touch()
        for name in cached:
            old = await interlock.call(name)
            assert (old.ok, old.source) == (True, "cache"), "its contract permits an old answer"
        assert "furlong" in (await interlock.affordances(budget=100_000)).text

        reader = asyncio.create_task(read())
        await until(lambda: reader.done() or len(seen) >= 4)
        (tmp_path / "swapped").touch()
        await interlock.upstreams.probe("far")
        await until(lambda: reader.done() or seen[-4:] == [BOTH[1]] * 4)
        done = True
        await reader
        assert set(seen) == set(BOTH)
        assert set(late) == {False, True}
        assert rows == {one - {"far.shape"} for one in BOTH}

        assert code(await interlock.call("far.rate")) == "E3502", "what it answered before the change is forgotten"
        told = b"".join(one.encoded for one in (await listing.page(interlock.caller, None, shows_apps=True))[0])
        assert b"new_49" in told
        assert b"old_" not in told
        for app in (interlock, elsewhere):
            block = await app.affordances(budget=100_000)
            assert "new_49" in block.text
            assert "old_" not in block.text
            assert "furlong" not in block.text
        assert not [one for one in await tools.search("old_7", interlock.caller) if "old_" in one.version.row.address]
        gone = (await interlock.call("far.old_7")).error
        assert gone is not None
        assert (gone.code, gone.message) == ("E3102", "no version of `far.old_7` is in use any more: 1.0.0 is sunset")
        assert "if an upstream was removed, add it again" in gone.resolution

        # The new schema is there once a person has accepted it, in one step again, and nothing of the old is.
        await interlock.upstreams.accept("far", tools=["shape"], by=interlock.caller, reason="looked at it")
        for app in (interlock, elsewhere):  # another process notices a moment later, and has neither until then

            async def told_anew(app: Interlock = app) -> bool:
                text = (await app.affordances(budget=100_000)).text
                assert "furlong" not in text
                return "metres" in text

            await until(told_anew)
        assert code(await interlock.call("far.shape")) == "E3502", "what it answered under the old schema is forgotten"
        # A tool that comes back does not answer with what it said before it went.
        (tmp_path / "swapped").unlink()
        await interlock.upstreams.probe("far")

        async def back() -> bool:
            return "far.old_7" in {row.address for row in await interlock.catalog.rows() if row.state == "active"}

        await until(back)
        assert code(await interlock.call("far.old_7")) == "E3502"


@pytest.mark.proves("REG-12")
async def test_what_one_process_sees_changed_no_other_answers_from_its_cache(tmp_path: Path) -> None:
    stale: Json = {**READS, "stale_s": 3600}
    names = ("far.shape", "far.old_7")
    home, broken, swapped = (tmp_path / one for one in ("home", "broken", "swapped"))
    overlay = {"tools": {"shape": stale, "old_7": stale}}
    async with Interlock.open(home, housekeeping=False) as app, Interlock.open(home, housekeeping=False) as elsewhere:
        # Each has its own connection, and the server announces nothing: only `app` looks.
        await app.upstreams.add("far", "mcp", run(SWAPPING, str(tmp_path), "quiet"), by=app.caller, overlay=overlay)

        async def answers() -> list[str | None]:
            """Call the tools in the other process while the server is down. Returns error codes, or `cache`."""
            await elsewhere.journal.changes.look()
            broken.touch()
            told = [await elsewhere.call(name) for name in names]
            broken.unlink()
            return [code(one) or one.source for one in told]

        for name in names:
            assert (await elsewhere.call(name)).ok
        assert await answers() == ["cache", "cache"]
        await app.upstreams.refresh("far")
        assert await answers() == ["cache", "cache"], "a look that finds everything as it was drops nothing"
        swapped.touch()
        await app.upstreams.refresh("far")
        assert await answers() == ["E3210", "E3102"], "one has changed and the other is gone"
        swapped.unlink()
        await app.upstreams.refresh("far")
        await app.upstreams.accept("far", tools=["shape"], by=app.caller, reason="looked at it")
        # Both are as they were, and do not answer with what they said before.
        assert await answers() == ["E3502", "E3502"]
        for name in names:
            assert (await elsewhere.call(name)).ok
        assert await answers() == ["cache", "cache"]
