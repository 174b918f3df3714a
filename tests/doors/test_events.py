"""A stream of events that breaks off is taken up behind the last event that came through; what is lost is said."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from interlock import Caller, Context, Interlock, tool
from interlock.api import progress
from interlock.api.service import Ask, Service
from tests import sample
from tests.support.calls import admit, until
from tests.support.servers import Place, post

Json = dict[str, Any]
Frame = tuple[int | None, str, Json]


class Stage:
    """What the tool is to report, one word at a time."""

    words: asyncio.Queue[str | None]


stage = Stage()


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", timeout_class="long_running")
async def telling(ctx: Context, name: sample.Text) -> str:
    """Report what the test says, until it says no more."""
    while (word := await stage.words.get()) is not None:
        ctx.progress(word)
    return name


async def say(*said: str | None) -> None:
    for word in said:
        stage.words.put_nowait(word)
    await until(stage.words.empty)


@asynccontextmanager
async def following(place: Place, call: str, last: str | None = None) -> AsyncGenerator[AsyncIterator[Frame]]:
    """The frames of one connection, each by its number, its class and what it tells."""
    listeners = place.app.gateway.observer.followers
    headers = place.bearer if last is None else {**place.bearer, "last-event-id": last}
    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(base_url=place.base, headers=headers, timeout=60) as client,
        client.stream("GET", f"/v1/calls/{call}/events") as stream,
    ):
        assert stream.status_code == 200
        await until(lambda: bool(listeners) or last is not None)
        yield _frames(stream)


async def _frames(stream: httpx.Response) -> AsyncIterator[Frame]:
    lines: dict[str, str] = {}
    async for line in stream.aiter_lines():
        if line:
            name, _, said = line.partition(": ")
            lines[name] = said
        elif "data" in lines:
            number = int(lines["id"]) if "id" in lines else None
            yield number, lines["event"].removeprefix("tool.invocation."), orjson.loads(lines["data"])
            lines = {}


async def hear(frames: AsyncIterator[Frame], word: str) -> list[Frame]:
    """What comes up to a report."""
    heard: list[Frame] = []
    async for frame in frames:
        heard.append(frame)
        if frame[1] == "progress" and frame[2]["data"]["message"] == word:
            break
    return heard


def told(frames: list[Frame]) -> list[str]:
    return [one["data"]["message"] if kind == "progress" else kind for _, kind, one in frames]


@pytest_asyncio.fixture
async def call(here: Place) -> AsyncGenerator[str]:
    await admit(here.app, telling)
    stage.words = asyncio.Queue()
    asked = {"tool_id": "demo.telling", "parameters": {"name": "x"}, "execution_mode": "async"}
    yield (await post(here, "/v1/tools/invoke", json.dumps(asked))).json()["invocation_id"]
    stage.words.put_nowait(None)


async def test_whoever_comes_back_goes_on_behind_the_last_event_it_has(here: Place, call: str) -> None:
    async with following(here, call) as frames:
        await say("a", "b")
        first = await hear(frames, "b")
    await say("c")  # while nobody is connected
    async with following(here, call, str(first[-1][0])) as frames:
        await say("d", None)
        second = [frame async for frame in frames]
    assert told(second)[:2] == ["c", "d"]
    assert told(second)[-1] == "status"
    numbers = [number for number, _, _ in (*first, *second)]
    assert numbers == list(range(1, len(numbers) + 1))
    # The same again, now that it has ended; and of one who has not asked for it, only how it ended.
    async with following(here, call, str(first[-1][0])) as frames:
        assert [frame async for frame in frames] == second
    async with following(here, call, str(numbers[-1])) as frames:
        assert told([frame async for frame in frames]) == ["status"]
    assert not here.app.gateway.observer.followers


async def test_what_is_kept_no_longer_is_said_to_be_missed(
    here: Place, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVENTS", 2)
    async with following(here, call) as frames:
        await say("a")
        first = await hear(frames, "a")
    await say("b", "c", "d")
    async with following(here, call, str(first[-1][0])) as frames:
        (lost, *rest) = await hear(frames, "d")
    assert (lost[0], lost[1], lost[2]["missed"]) == (None, "events_missed", 1)
    assert told(rest) == ["c", "d"]
    last = first[-1][0]
    assert last is not None
    assert [number for number, _, _ in rest] == [last + 2, last + 3]


async def test_of_a_call_that_nobody_followed_nobody_knows_what_was_missed(here: Place, call: str) -> None:
    await say("a")
    async with following(here, call, "7") as frames:
        lost = await anext(frames)
        await say("b")
        heard = await hear(frames, "b")
    assert (lost[0], lost[1], lost[2]["missed"]) == (None, "events_missed", None)
    assert (told(heard), heard[0][0]) == (["b"], 1)
    async with following(here, call, "no number") as frames:
        await say("c")
        assert told(await hear(frames, "c")) == ["c"]


async def test_a_trail_is_let_go_of_a_moment_after_its_last_follower(
    here: Place, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "MOMENT_S", 0.0)
    async with following(here, call) as frames:
        await say("a")
        await hear(frames, "a")
    await until(lambda: not here.app.gateway.observer.followers)


async def test_numbers_go_on_where_an_earlier_trail_ended_and_what_lies_between_is_said_to_be_missed(
    here: Place, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "MOMENT_S", 0.0)
    async with following(here, call) as frames:
        await say("a", "b")
        first = await hear(frames, "b")
    await until(lambda: not here.app.gateway.observer.followers)
    async with following(here, call) as others:  # somebody else, who has no number
        await say("c", "d", "e", "f")
        heard = await hear(others, "f")
        async with following(here, call, str(first[-1][0])) as frames:
            (lost, *second) = await hear(frames, "f")
    assert (lost[0], lost[1], lost[2]["missed"]) == (None, "events_missed", None)
    assert second == heard
    assert told(second) == ["c", "d", "e", "f"]
    assert not {number for number, _, _ in first} & {number for number, _, _ in second}


async def test_of_a_trail_that_was_let_go_of_nothing_stays_behind(
    here: Place, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[weakref.ref[progress.EventHistory]] = []

    class Watched(progress.EventHistory):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            begun.append(weakref.ref(self))

    monkeypatch.setattr(progress, "EventHistory", Watched)
    monkeypatch.setattr(progress, "MOMENT_S", 0.0)
    for _ in range(3):
        async with following(here, call) as frames:
            await say("a")
            await hear(frames, "a")
        await until(lambda: not here.app.gateway.observer.followers)

    def left() -> list[Any]:  # the task of the last response may still have its end before it
        gc.collect()
        return [one() for one in begun if one() is not None]

    await until(lambda: not left())
    assert len(begun) == 3


async def test_whoever_is_told_of_the_end_is_told_how_it_ended(app: Interlock) -> None:
    await admit(app, telling)
    stage.words = asyncio.Queue()
    calls, caller = Service(app).calls, Caller(id="local:ann")
    before = asyncio.all_tasks()
    call_id = await calls.start(Ask(tool="demo.telling", arguments={"name": "x"}), caller, door="rest")
    (running,) = asyncio.all_tasks() - before
    stage.words.put_nowait("a")
    stage.words.put_nowait(None)
    last: Json = {}
    async for _, event in calls.follow(call_id, caller):
        last = event
        while not running.done():  # noqa: ASYNC110 - it comes back in the very turn in which the call ends
            await asyncio.sleep(0)
    assert last["status"] == "succeeded"
