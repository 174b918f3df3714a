"""The same call through every door: the same data, the same error, the same record, the same events.

Without ids and times, an answer must not depend on the wire. The clients are in `tests/support/wire_rows.py`.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.call.capability import ToolGrant
from tests.support import source
from tests.support.answers import Wish
from tests.support.identities import did_of
from tests.support.parity import opened, same, through_all
from tests.support.wires import DOORS, SdkWires

Json = dict[str, Any]


@pytest_asyncio.fixture
async def ways(home: Path) -> AsyncGenerator[SdkWires]:
    async with opened(home) as made:
        yield made


CASES: Mapping[str, tuple[Callable[[str], Wish], Any]] = {
    "valid": (lambda _: Wish("demo.add", {"a": 2, "b": 3}), 5),
    "empty": (lambda _: Wish("demo.echo", {"value": None}), None),
    "invalid": (lambda _: Wish("demo.add", {"a": "two"}), "E3301"),
    "unknown": (lambda _: Wish("demo.nothing", {}), "E3101"),
    "not in the token": (lambda _: Wish("demo.add", {"a": 1}, token="narrow"), "E3204"),
    "gated": (lambda door: Wish("demo.send", {"to": "ann"}, key=f"k-{door}"), "pending"),
    "slow": (lambda _: Wish("demo.dawdle", {"text": "a"}), "E3402"),
    "failing": (lambda _: Wish("demo.fail", {"text": "a"}), "E3401"),
    "written": (lambda door: Wish("demo.increment", {"name": door}, key=f"w-{door}"), 1),
    "leaving files": (lambda _: Wish("file.leave", {"files": {"a.txt": "aGk=", "b/c": "/wD/"}}), 2),
    "looked at": (lambda door: Wish("demo.increment", {"name": "x"}, key=f"d-{door}", dry_run=True), None),
}


@pytest.mark.proves("OPS-05")
@pytest.mark.parametrize("case", CASES)
async def test_a_call_is_the_same_through_every_door(ways: SdkWires, case: str) -> None:
    wish, expected = CASES[case]
    told = same(*await through_all(ways, wish))
    if expected == "pending":
        assert told.pending
    elif isinstance(expected, str):
        assert told.error is not None
        assert told.error[0] == expected
    elif case != "looked at":
        assert told.data == expected


@pytest.mark.supports("CONTRACT-19")
@pytest.mark.proves("OPS-05")
async def test_a_file_that_a_call_left_is_read_by_its_caller_through_the_doors(ways: SdkWires) -> None:
    told = same(*await through_all(ways, CASES["leaving files"][0]))
    contents = {"a.txt": b"hi", "b/c": b"\xff\x00\xff"}
    assert told.files == tuple((path, hashlib.sha256(held).hexdigest(), len(held)) for path, held in contents.items())
    async with httpx.AsyncClient(base_url=ways.base, headers=ways.bearer(), timeout=60) as http:
        body = {"tool_id": "file.leave", "parameters": {"files": {"b": "/wD/"}}}
        (one,) = (await http.post("/v1/tools/invoke", json=body)).json()["artifacts"]
        read = await http.get(f"/v1/payloads/{one['ref']}")
        assert (read.content, read.headers["content-type"]) == (b"\xff\x00\xff", "application/octet-stream")
        assert read.headers["content-disposition"] == "attachment"
        assert read.headers["x-content-type-options"] == "nosniff"
        stranger = await ways.app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=ways.app.caller)
        hidden = await http.get(f"/v1/payloads/{one['ref']}", headers={"authorization": f"Bearer {stranger}"})
        assert (hidden.status_code, hidden.json()["error"]["error_code"]) == (404, "E3702")


@pytest.mark.proves("OPS-05", "CONTRACT-14", "LIFE-10")
async def test_no_door_calls_a_write_retryable_whose_outcome_is_unknown(ways: SdkWires) -> None:
    told = await asyncio.gather(
        *(ways.rows[door].call(Wish("demo.strand", {"text": door}, key=door)) for door in DOORS)
    )
    for door, one in zip(DOORS, told, strict=True):
        assert one.error == ("E3402", "DEADLINE_EXCEEDED", "timeout", False), door
        assert one.advice == "settle it with interlock calls reconcile", door


@pytest.mark.proves("OPS-05")
def test_only_the_gateway_reaches_the_executors() -> None:
    """Read in the code: no door, service or command imports what runs tools, and none runs a tool by itself."""
    importers: set[str] = set()
    for name, node in source.nodes_with("interlock.executors"):
        layer = name.partition("/")[0]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("interlock.executors"):
            importers.add(layer)
        if isinstance(node, ast.Import) and any(one.name.startswith("interlock.executors") for one in node.names):
            importers.add(layer)
    assert importers == {"gateway", "executors"}


@pytest.mark.proves("OPS-05")
async def test_a_key_used_at_one_door_counts_at_every_other(ways: SdkWires) -> None:
    for door in DOORS:
        first = await ways.rows[door].call(Wish("demo.increment", {"name": door}, key=f"shared-{door}"))
        for other in DOORS:
            assert await ways.rows[other].call(Wish("demo.increment", {"name": door}, key=f"shared-{door}")) == first
            conflict = await ways.rows[other].call(Wish("demo.increment", {"name": "z"}, key=f"shared-{door}"))
            assert conflict.error is not None
            assert conflict.error[0] == "E3306"


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_wishes = st.one_of(
    _values.map(lambda value: Wish("demo.echo", {"value": value})),
    _values.map(lambda value: Wish("demo.add", {"a": value})),
    st.text(max_size=4).map(lambda name: Wish("demo.echo", {name: name})),
    _values.map(lambda value: Wish("demo.add", {"a": 1, "b": value}, token="narrow")),
    st.sampled_from(["add", "send", "nothing", "increment"]).map(lambda name: Wish(f"demo.{name}", {}, key="none")),
    st.sampled_from(["send", "increment"]).map(lambda name: Wish(f"demo.{name}", {"to": "a", "name": "a"})),
)


@pytest.mark.proves("OPS-05")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wish=_wishes)
async def test_whatever_is_asked_the_doors_agree(ways: SdkWires, wish: Wish) -> None:
    same(*await through_all(ways, lambda _: wish))
