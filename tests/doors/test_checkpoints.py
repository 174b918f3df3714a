"""Checkpoints over REST: for whoever made the call, while it runs and afterwards, and for nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests import sample
from tests.support.calls import admit, until
from tests.support.rest import World, crawl, refused, world

__all__ = ["world"]


@pytest.mark.part_of("LIFE-09", rest="async calls that are submitted of themselves and told by callback")
@pytest.mark.part_of(
    "STATE-07", rest="micro checkpoints, which do not exist yet, and the size from which they are packed"
)
async def test_a_long_call_shows_its_checkpoints_while_it_runs_and_afterwards(world: World) -> None:
    await admit(world.app, crawl)
    sample.world.gate = asyncio.Event()
    heard: list[Any] = []
    world.app.listen(heard.append)
    started = (await world.invoke("demo.crawl", {"steps": 3}, execution_mode="async")).json()
    where = f"/v1/calls/{started['invocation_id']}/checkpoints"
    await until(lambda: any(one.data.get("checkpoint") == "phase_complete" for one in heard))
    running = (await world.get(where)).json()["checkpoints"]
    assert [(one["label"], one["checkpoint_type"]) for one in running] == [
        ("begun", "named"),
        ("phase_complete", "macro"),
    ]
    steps = [one.data.get("checkpoint") for one in heard if one.type == "tool.invocation.progress"]
    assert steps == [None, "begun", "phase_complete"]
    sample.world.gate.set()
    await until(lambda: world.records("closed"))
    ended = (await world.get(where)).json()["checkpoints"]
    assert ended[:2] == running
    page = (await world.get(where, after=1, limit=1)).json()
    assert page == {"checkpoints": [ended[1]], "after": 2}
    assert (await world.get(where, after=2)).json() == {"checkpoints": [ended[2]], "after": None}
    assert [one["state"]["step"] for one in ended] == [0, 1, 2]
    assert ended[2].keys() >= {"schema_version", "invocation_id", "tool_id", "tool_version", "timestamp", "checksum"}
    assert ended[2]["redacted"] == ["/mail"]
    assert "ann@example.org" not in str(ended)


async def test_the_checkpoints_of_others_are_not_there(world: World) -> None:
    await admit(world.app, crawl)
    made = (await world.invoke("demo.crawl", {"steps": 1})).json()
    none = (await world.invoke("demo.add", {"a": 1})).json()
    where = f"/v1/calls/{made['invocation_id']}/checkpoints"
    assert len((await world.get(where)).json()["checkpoints"]) == 1
    assert (await world.get(f"/v1/calls/{none['invocation_id']}/checkpoints")).json() == {
        "checkpoints": [],
        "after": None,
    }
    for by in ("boss", "root"):
        refused(await world.get(where, by), 404, "E3702")
    refused(await world.get("/v1/calls/01JUNKNOWN/checkpoints"), 404, "E3702")
    refused(await world.get(where, None), 401, "E3212")
