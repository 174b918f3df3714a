"""The same call through every door: the same data, the same error, the same record, the same events.

What is left of an answer once ids and times are gone must not depend on the wire. The clients are in `support.ways`.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Effect, Interlock, Preview, tool
from interlock.call.capability import ToolGrant
from interlock.call.events import Event
from tests import sample
from tests.conftest import TOOLS
from tests.gateway import artifact_tools
from tests.support import source
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.support.ways import DOORS, Told, Ways, Wish, left, register_people, served

Json = dict[str, Any]
# What differs from call to call, whatever the door.
_OF_THIS_CALL = (
    "call", "timestamp", "latencyMs", "traceId", "invocation_id", "door", "native", "approvalTicketId",
    "idempotencyKey", "cost",
)  # fmt: skip


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", timeout_s=1)
async def dawdle(text: sample.Text) -> str:
    """Take longer than its contract allows."""
    await asyncio.Event().wait()
    return text


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("x:{text}", "UPDATE")],
    timeout_s=1,
)  # fmt: skip
async def strand(text: sample.Text) -> str:
    """Change something, or not, and never come back."""
    await asyncio.Event().wait()
    return text


@strand.preview
def _(text: str) -> Preview:
    return Preview(impact=text)


@strand.compensate
async def _(text: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def fail(text: sample.Text) -> str:
    """Fail in an unforeseen way."""
    raise RuntimeError(text)


@asynccontextmanager
async def opened(home: Path) -> AsyncGenerator[Ways]:
    async with Interlock.open(home, housekeeping=False) as lock:
        for one in TOOLS:
            lock.catalog.attach(one)
        await admit(lock, dawdle, strand, fail, artifact_tools.leave)
        if not lock.issuer_keys.all():
            lock.issuer_keys.init("EdDSA")
            await register_people(lock)
        narrow = {"full": "*", "narrow": "demo.echo"}
        tokens = {
            name: await lock.tokens.issue(
                subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant(tools)], by=lock.caller
            )
            for name, tools in narrow.items()
        }
        async with served(lock, tokens) as ways:
            yield ways


@pytest_asyncio.fixture
async def ways(home: Path) -> AsyncGenerator[Ways]:
    async with opened(home) as made:
        yield made


def comparable(record: Json) -> Json:
    """A record without what differs from one call to the next. Writes of one test are to different things."""
    left_out = (*_OF_THIS_CALL, *(("inputHash", "compensation", "resources") if record.get("sideEffects") else ()))
    kept = {name: value for name, value in record.items() if name not in left_out}
    if "artifacts" in kept:
        kept["artifacts"] = left(kept["artifacts"])
    kept["sideEffects"] = [change["operation"] for change in record.get("sideEffects") or ()]
    if "decision" in kept:
        kept["decision"] = {name: value for name, value in kept["decision"].items() if name != "expires_at"}
    return kept


async def counts(lock: Interlock) -> Counter[str]:
    """All metrics that count something, by their names and labels.

    How long calls took and how much of its limits the server uses differs from one call to the next.
    """
    lines = (await lock.gateway.telemetry.metrics.render()).decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    timed = re.compile(r"^(\w+(_bucket|_sum|_rate)|interlock_limit_used)\b")
    return Counter({name: float(value) for name, value in samples if not timed.match(name)})  # pyright: ignore[reportArgumentType] - costs are fractions


_ID = re.compile(r"(?<![0-9A-Z])[0-9A-HJKMNP-TV-Z]{26}(?![0-9A-Z])")
_TIME = re.compile(r'"\d{4}-\d\d-\d\dT[^"]*"|(?<="elapsed_ms":)[\d.e-]+')


def _announced(event: Event) -> Json:
    """An event without ids and times."""
    told = {**event.document(), "event_id": ""}
    return orjson.loads(_TIME.sub('"TIME"', _ID.sub("ID", orjson.dumps(told).decode())))


async def through_all(
    ways: Ways, wish: Callable[[str], Wish]
) -> tuple[dict[str, Told], list[Json], list[list[Json]], list[Counter[str]]]:
    """One wish through every door, one after the other: what each told, recorded, announced and counted."""
    told: dict[str, Told] = {}
    recorded: list[Json] = []
    announced: list[list[Json]] = []
    counted: list[Counter[str]] = []
    for door in DOORS:
        events: list[Event] = []
        (before,) = ways.lock.journal.reader.all("SELECT COALESCE(MAX(seq), 0) FROM journal")[0]
        stop = ways.lock.listen(events.append)
        so_far = await counts(ways.lock)
        told[door] = await ways.ways[door](wish(door))
        stop()
        counted.append(await counts(ways.lock) - so_far)
        await ways.lock.journal.commit(lambda _: None)
        rows = ways.lock.journal.reader.all(
            "SELECT body FROM journal WHERE seq > ? AND kind IN ('closed', 'pending') ORDER BY seq", (before,)
        )
        records: list[Json] = [orjson.loads(body) for (body,) in rows]
        assert len(records) == 1, (door, records)
        assert records[0]["door"] == door.partition("-")[0]
        recorded.append(comparable(records[0]))
        # A change of the listing belongs to no call and is told when it is noticed.
        announced.append([_announced(event) for event in events if event.type != "tool.surface.updated"])
    return told, recorded, announced, counted


def same(
    told: Mapping[str, Told], recorded: list[Json], announced: list[list[Json]], counted: list[Counter[str]]
) -> Told:
    """What all doors agree on."""
    first = told["library"]
    assert told == dict.fromkeys(DOORS, first)
    for door, record in zip(DOORS, recorded, strict=True):
        assert record == recorded[0], door
    for door, events in zip(DOORS, announced, strict=True):
        assert events == announced[0], door
    for door, metrics in zip(DOORS, counted, strict=True):
        assert metrics == counted[0], door
    assert any(name.startswith("tool_") for name in counted[0]), "a call is counted"
    return first


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
async def test_a_call_is_the_same_through_every_door(ways: Ways, case: str) -> None:
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
async def test_a_file_that_a_call_left_is_read_by_its_caller_through_the_doors(ways: Ways) -> None:
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
        stranger = await ways.lock.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=ways.lock.caller)
        hidden = await http.get(f"/v1/payloads/{one['ref']}", headers={"authorization": f"Bearer {stranger}"})
        assert (hidden.status_code, hidden.json()["error"]["error_code"]) == (404, "E3702")


@pytest.mark.proves("OPS-05", "CONTRACT-14", "LIFE-10")
async def test_no_door_calls_a_write_retryable_whose_outcome_is_unknown(ways: Ways) -> None:
    told = await asyncio.gather(*(ways.ways[door](Wish("demo.strand", {"text": door}, key=door)) for door in DOORS))
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
async def test_a_key_used_at_one_door_counts_at_every_other(ways: Ways) -> None:
    for door in DOORS:
        first = await ways.ways[door](Wish("demo.increment", {"name": door}, key=f"shared-{door}"))
        for other in DOORS:
            assert await ways.ways[other](Wish("demo.increment", {"name": door}, key=f"shared-{door}")) == first
            conflict = await ways.ways[other](Wish("demo.increment", {"name": "z"}, key=f"shared-{door}"))
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
async def test_whatever_is_asked_the_doors_agree(ways: Ways, wish: Wish) -> None:
    same(*await through_all(ways, lambda _: wish))
