"""Sandboxed tools hear that their call was cancelled or is out of time, whichever door it came through."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from interlock import Caller
from interlock.registry.source import load
from interlock.testing import FakeClock
from tests.support.answers import Told, Wish
from tests.support.calls import admit, until
from tests.support.lifecycles import Place, opened
from tests.support.programs import manifest, written
from tests.support.wires import BY_ID, DOORS

ABORTED = pytest.mark.proves("LIFE-02")
# Each begins a file, and takes it away when it hears that its call is over.
SOURCE = '''
"""Tools that leave nothing half done."""

import asyncio
from pathlib import Path
from typing import Annotated

from interlock import Context, Effect, Field, Preview, tool

Name = Annotated[str, Field(description="name of a file", examples=["a"])]
FACTS = {
    "version": "1.0.0", "mutation_class": "write_reversible", "namespace": "abort", "sandbox": True,
    "effects": [Effect("file:SHOP/{name}", "CREATE")], "permissions": ["filesystem:write:SHOP"],
}


@tool(**FACTS)
async def waits(ctx: Context, name: Name) -> str:
    """Begin a file, and wait."""
    file = Path("SHOP", name)
    file.write_text("half")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        Path("SHOP", f"{name}-heard").write_text(str(ctx.cancelled))
        file.unlink()
        ctx.effect("file:SHOP/not-counted", "CREATE")
        return "not-counted"
    return "never"


@tool(**FACTS)
def works(ctx: Context, name: Name) -> str:
    """Begin a file, and work."""
    file = Path("SHOP", name)
    file.write_text("half")
    while not ctx.cancelled:
        pass
    Path("SHOP", f"{name}-heard").write_text(str(ctx.cancelled))
    file.unlink()
    ctx.effect("file:SHOP/not-counted", "CREATE")
    return "not-counted"


@waits.preview
def _previewed(name: Name) -> Preview:
    return Preview(impact=name)


@works.preview
def _seen(name: Name) -> Preview:
    return Preview(impact=name)


@waits.compensate
def _undone(name: Name) -> None:
    Path("SHOP", name).unlink(missing_ok=True)


@works.compensate
def _taken_back(name: Name) -> None:
    Path("SHOP", name).unlink(missing_ok=True)
'''
SHELL = (
    'trap \'printf True > "SHOP/$1-heard"; rm "SHOP/$1"; printf not-counted; exit 0\' TERM; '
    'printf half > "SHOP/$1"; while :; do sleep 0.01; done'
)
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
TOOLS = ("waits", "works", "runs")


@pytest.fixture
def shop() -> Iterator[Path]:
    """A directory outside /tmp, which every sandbox has to itself."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        place = Path(directory).resolve() / "shop"
        place.mkdir()
        yield place


@pytest.fixture
def clock() -> FakeClock:
    """The time of calls, which passes when a test says so."""
    return FakeClock()


@pytest_asyncio.fixture
async def place(home: Path, tmp_path: Path, shop: Path, clock: FakeClock) -> AsyncGenerator[Place]:
    async with opened(home, sandbox_grace_s=1.0, clock=clock.clock) as made:
        (tmp_path / "aborts.py").write_text(SOURCE.replace("SHOP", str(shop)))
        program = manifest(
            "runs", ["sh", "-c", SHELL.replace("SHOP", str(shop)), "sh", "{name}"], sandbox={}, namespace="abort",
            parameters={"name": {"type": "string", "description": "a file", "examples": ["a"]}},
            mutation_class="write_irreversible", effects=[{"resource": f"file:{shop}/{{name}}", "operation": "CREATE"}],
            required_permissions=[f"filesystem:write:{shop}"],
        )  # fmt: skip
        tools = [*load(str(tmp_path / "aborts.py"))[1], *load(written(tmp_path / "runs.json", program))[1]]
        await admit(made.app, *tools)
        yield made


async def _begun(place: Place, shop: Path, door: str, wish: Wish) -> tuple[asyncio.Future[Told], str]:
    """A call whose tool is at work, and its id."""
    if wish.tool == "abort.runs":  # it cannot be undone, so a person is asked
        assert (await place.rows[door].call(wish)).pending
        asked = await place.last()
        await place.app.approvals.approve(asked["approvalTicketId"], by=REVIEWER)
    before = len(place.events)
    task = asyncio.ensure_future(place.rows[door].call(wish))
    file = shop / wish.arguments["name"]
    await until(lambda: task.done() or (file.exists() and file.read_text() == "half"))
    assert not task.done(), task.result()
    started = [one.invocation_id for one in place.events[before:] if one.type == "tool.invocation.started"]
    return task, started[0]


async def _closed(place: Place, call: str) -> dict[str, object]:
    await until(lambda: any(one["call"] == call for one in place.records("closed")))
    (record,) = [one for one in place.records("closed") if one["call"] == call]
    return record


@ABORTED
@pytest.mark.parametrize("name", TOOLS)
async def test_through_every_door_a_sandboxed_tool_hears_that_its_call_is_cancelled(
    place: Place, shop: Path, name: str
) -> None:
    for door in DOORS:
        task, call = await _begun(place, shop, door, Wish(f"abort.{name}", {"name": door}, key=f"k-{door}"))
        if door in BY_ID:
            assert await place.rows[door].cancel(call) == "canceled", door
            told = await task
            assert told.error is not None
            assert told.error[0] == "E3703", door
        else:
            task.cancel()
        record = await _closed(place, call)
        assert record["error_code"] == "E3703", door
        # All of it had ended when the call was closed, and what it said then is nowhere.
        assert (shop / f"{door}-heard").read_text() == "True", door
        assert not (shop / door).exists(), door
        assert "not-counted" not in str(place.records("mutation", "closed")), door


@ABORTED
@pytest.mark.parametrize("name", TOOLS)
async def test_through_every_door_a_sandboxed_tool_hears_that_its_time_is_up(
    place: Place, shop: Path, name: str, clock: FakeClock
) -> None:
    for door in DOORS:
        task, call = await _begun(place, shop, door, Wish(f"abort.{name}", {"name": door}, key=f"k-{door}"))
        clock.advance(31)
        told = await task
        assert told.error is not None
        assert told.error[0] == "E3402", door
        assert (await _closed(place, call))["error_code"] == "E3402", door
        assert (shop / f"{door}-heard").read_text() == "True", door
        assert not (shop / door).exists(), door
        assert "not-counted" not in str(place.records("mutation", "closed")), door
