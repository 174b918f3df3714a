"""One conversation that every integration goes through: a read, a write sent twice, mistakes, and an approval."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

from interlock.integrations import Toolkit
from tests import sample
from tests.integrations.provider_server import Call, Turn
from tests.integrations.world import World

# The model speaks these turns, and what it was told is returned: the text of every answer, by the id of the call.
Converse = Callable[[Toolkit, list[Turn]], Awaitable[dict[str, str]]]


async def play(world: World, converse: Converse) -> None:
    """Play the conversation, and check what the model was told and what is on record."""
    kit = Toolkit(world.app, token=world.token)
    told = await converse(
        kit,
        [
            [Call("c1", "demo__add", {"a": 1, "b": 2})],
            [Call("c2", "demo__increment", {"name": "visits"})],
            [Call("c2", "demo__increment", {"name": "visits"})],
            [Call("c3", "demo__add", {"a": "many"})],
            [Call("c4", "demo__send", {"to": "ann"})],
            "done",
        ],
    )
    assert told["c1"] == "3"
    assert told["c2"] == "1"
    assert "`many` is not a whole number" in told["c3"]
    assert "waits for a person" in told["c4"]
    assert "make the same call again" in told["c4"]
    assert sample.world.counters == {"visits": 1}
    # Nobody has agreed yet, and asking again makes no second ticket.
    assert "waits for a person" in (await converse(kit, [[Call("c5", "demo__send", {"to": "ann"})], "done"]))["c5"]
    assert await world.approve_all() == 1
    assert await converse(kit, [[Call("c6", "demo__send", {"to": "ann"})], "done"]) == {"c6": "ann"}
    assert sample.world.runs == 2
    # Some frameworks remember which calls they have made, and do not make the second one at all.
    assert [name for name, _ in itertools.groupby(world.calls())] == [
        ("demo.add", "SUCCESS"),
        ("demo.increment", "SUCCESS"),
        ("demo.add", "ERROR"),
        ("demo.send", "SUCCESS"),
    ]
