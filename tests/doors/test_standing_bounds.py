"""Calls over every wire against approvals in advance: what is within the bounds runs, and nothing else does."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio
from pydantic import Field

from interlock import Caller, Effect, Preview, tool
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.support.wires import DOORS, Wires, opened

Json = dict[str, Any]
BOT = did_of("bot")
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
ORDER = "desk.order"
HUGE = 10**30
# The same text for people, in two Unicode forms.
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"
Single = str | int | float | bool | None

placed: list[Json] = []


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="desk", effects=[Effect("desk:all", "UPDATE")])
async def order(
    cents: Annotated[int, Field(description="how much", examples=[5])] = 1,
    files: Annotated[list[str] | None, Field(description="what for", examples=[["/srv/a"]])] = None,
    groups: Annotated[list[list[int]] | None, Field(description="for whom", examples=[[[1]]])] = None,
    single: Annotated[Single, Field(description="one value", examples=["a"])] = None,
    options: Annotated[Json | None, Field(description="how", examples=[{"depth": 1}])] = None,
) -> str:
    """Place an order."""
    placed.append({"cents": cents, "files": files, "groups": groups, "single": single, "options": options})
    return "placed"


@order.preview
async def _(cents: int, files: Any, groups: Any, single: Any, options: Any) -> Preview:
    return Preview(impact=f"an order for {cents} cents")


# The bound of an argument, the values of it that are covered, and others that are not.
ROWS: dict[str, tuple[str, Any, list[Any], list[Any]]] = {
    "a range": ("cents", {"minimum": 2, "maximum": 500}, [2, 2.0, 500], [1, 501, -2, HUGE, 500.0000001, "501", True]),
    "a long number": ("cents", {"maximum": HUGE}, [HUGE, -HUGE], [HUGE + 1]),
    "one long number": ("cents", 2**53 + 1, [2**53 + 1], [2**53, 2.0**53, 2**53 + 2]),
    "each path": (
        "files", {"items": "/srv/*"}, [["/srv/a"], ["/srv/a", "/srv/b/../c"]],
        [[], None, ["/srv/a", "/etc/passwd"], ["/srv/../etc/passwd"], ["/srv/a\0"], ["srv/a"], ["file:///srv/../etc"]],
    ),
    "each URL": (
        "files", {"items": "https://a.example/*"}, [["https://a.example/x"], ["HTTPS://A.example:443/x"]],
        [["https://a.example@b.example/"], ["https://a.example\\@b.example/"], ["https://a.example.b.example/"]],
    ),
    "each of a set of texts": ("files", {"items": {"enum": [COMPOSED, "b"]}}, [["b", COMPOSED]], [[DECOMPOSED], ["*"]]),
    "a list of texts": ("files", [COMPOSED], [[COMPOSED]], [[DECOMPOSED], [COMPOSED, COMPOSED], []]),
    "each of each": ("groups", {"items": {"items": {"enum": [1, 2]}}}, [[[1, 2], [1]]], [[[1], []], [[]], [[1], [3]]]),
    "a set": ("single", {"enum": [1, "1", None, "a*"]}, [1, "1", None, "a*"], [True, False, "", 0, "ab", "null"]),
    "true": ("single", True, [True], [1, "true", "True", 1.0]),
    "null": ("single", None, [None], [0, False, "", "null"]),
    "a text": ("single", COMPOSED, [COMPOSED], [DECOMPOSED, COMPOSED.upper()]),
    "an object": ("options", {"a": [1, {"b": True}]}, [{"a": [1, {"b": True}]}], [{"a": [1, {"b": 1}]}, {}, None]),
    "an object like a bound": ("options", {"enum": [{"minimum": 1}]}, [{"minimum": 1}], [{"minimum": 2}, {"enum": []}]),
}  # fmt: skip


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    placed.clear()
    async with opened(home) as made:
        await admit(made.app, order)
        yield made


async def agree(wires: Wires, arguments: Json) -> None:
    app = wires.app
    await app.standing_approvals.grant(
        ORDER, by=REVIEWER, caller=BOT, arguments=arguments, uses=100, expires_ms=app.clock.now_ms() + 60_000
    )


USUAL: Json = {"cents": 1, "files": None, "groups": None, "single": None, "options": None}


@pytest.mark.proves("HITL-09")
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("door", DOORS)
async def test_a_bound_covers_the_same_over_every_wire(wires: Wires, door: str, row: str) -> None:
    name, bound, within, beyond = ROWS[row]
    await agree(wires, {**USUAL, name: bound})
    for number, value in enumerate(beyond):
        heard = await wires.call(door, ORDER, {**USUAL, name: value}, f"no-{number}")
        # It waits for a person, or is no value of the argument.
        assert heard.pending is not None or heard.failure["error_code"] == "E3301", (value, heard)
    assert placed == []
    for number, value in enumerate(within):
        heard = await wires.call(door, ORDER, {**USUAL, name: value}, f"yes-{number}")
        assert (heard.envelope, heard.pending) == (None, None), (value, heard)
    assert placed == [{**USUAL, name: value} for value in within]


@pytest.mark.proves("HITL-09")
@pytest.mark.parametrize("door", DOORS)
async def test_a_call_with_another_argument_or_without_one_that_is_bound_waits(wires: Wires, door: str) -> None:
    await agree(wires, {"cents": {"maximum": 5}, "files": {"items": "/srv/*"}, "options": {"x-any": True}})
    given = {"cents": 5, "files": ["/srv/a"], "options": {"any": ["thing"]}}
    # The defaults of `groups` and `single`, which no pattern names, are filled in too.
    assert (await wires.call(door, ORDER, given, "unnamed")).pending is not None
    await agree(wires, {"cents": {"maximum": 5}, "files": {"items": "/srv/*"}, "options": {"x-any": True}, **NAMED})
    wrongs: list[Json] = [{"single": "x"}, {"groups": []}, {"cents": 6}, {"files": []}]
    for number, wrong in enumerate(wrongs):
        assert (await wires.call(door, ORDER, given | wrong, f"{number}")).pending is not None, wrong
    assert (await wires.call(door, ORDER, {"cents": 5, "options": {}}, "without")).pending is not None
    refused = await wires.call(door, ORDER, {**given, "more": 1}, "unknown")
    assert refused.failure["error_code"] == "E3301"
    assert placed == []
    assert (await wires.call(door, ORDER, given, "within")).pending is None
    assert (await wires.call(door, ORDER, {"files": ["/srv/a"]}, "defaults")).pending is None
    assert [one["cents"] for one in placed] == [5, 1]


NAMED: Json = {"groups": None, "single": None}


@pytest.mark.parametrize("door", DOORS)
async def test_a_person_decides_on_a_number_of_any_length(wires: Wires, door: str) -> None:
    given: Json = {"cents": HUGE + 1, "options": {"deep": [-HUGE]}}
    waits = (await wires.call(door, ORDER, given, "long")).pending
    assert waits is not None
    assert f"'cents<={HUGE + 1}'" in waits["agreeInAdvance"]
    shown = await wires.app.approvals.show(waits["ticketId"])
    assert shown.params["cents"] == HUGE + 1
    await wires.app.approvals.approve(shown.id, by=REVIEWER)
    assert (await wires.call(door, ORDER, given, "long")).pending is None
    assert placed == [{**USUAL, **given}]
