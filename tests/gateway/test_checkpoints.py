"""Checkpoints: on disk when the tool goes on, whole when they are read, and of nobody's business but the caller's."""

from __future__ import annotations

import asyncio
import hashlib
import random
import zlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interlock import Caller, Failure, Interlock, Result
from interlock.audit.chain import verify
from interlock.call.checkpoints import Checkpoint
from interlock.contract.standard import ToolProgress
from interlock.core.clock import iso
from interlock.data.canonical import canonical
from interlock.gateway.stored_checkpoints import compress
from interlock.store import checkpoints
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.support import checkpoint_tools as tools
from tests.support.calls import admit, code, records, until
from tests.support.stores import everything_in, opened

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("module_leaves_nothing_behind")]

WAYS = ("check.awaits", "check.blocks", "check.caged_awaits", "check.caged_blocks")
# What tools of the usual kinds would save: a crawl, a migration, a report, a conversation.
REFERENCE: tuple[dict[str, Any], ...] = (
    {"queue": [f"https://example.org/articles/{n}/comments" for n in range(300)], "seen": list(range(900))},
    {"table": "orders", "rows": [{"id": n, "status": "copied", "attempts": 1, "error": None} for n in range(400)]},
    {"sections": [{"title": f"Region {n}", "total": n * 1234.5, "currency": "EUR", "done": True} for n in range(200)]},
    {"messages": [{"role": ("user", "tool")[n % 2], "content": f"step {n} of the plan is done"} for n in range(200)]},
)

ARCHIVE = pytest.mark.part_of("STATE-06", rest="deleting named checkpoints, which does not exist yet")
MICRO = pytest.mark.part_of(
    "STATE-07", rest="micro checkpoints, which do not exist yet, and the size from which they are packed"
)
CREDENTIALS = pytest.mark.proves("AUDIT-07")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Interlock]:
    """One for all tests here, so that there is one sandbox: calls do not see one another's checkpoints."""
    home = tmp_path_factory.mktemp("checkpoints") / "home"
    async with Interlock.open(home, housekeeping=False, no_pattern_redaction=("check",)) as opened:
        await admit(opened, *tools.TOOLS)
        await opened.secrets.set("check/token", "lent-canary-77", by="local:test")
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    tools.late.clear()
    tools.between.clear()


async def follow(app: Interlock, way: str, *script: Any, **options: Any) -> tuple[Result, list[Checkpoint]]:
    result = await app.call(way, {"script": list(script)}, **options)
    return result, await app.checkpoints(result.invocation_id)


def kept(app: Interlock, result: Result) -> Any:
    """The state of a call's first checkpoint as it was saved: what the work would be taken up from."""
    rows = checkpoints.of_call(app.journal.reader, result.invocation_id)
    return app.gateway.checkpoints._opened(rows[0])  # pyright: ignore[reportPrivateUsage]


# Saving


@ARCHIVE
@MICRO
@pytest.mark.parametrize("way", WAYS)
async def test_a_checkpoint_is_a_labelled_document_of_its_call_and_on_record(app: Interlock, way: str) -> None:
    state = {"pages": 40, "next": [41, None, 0.5], "naïve": "😀"}
    script: list[Any] = [["checkpoint", "begun", {}], *(["checkpoint", one, state] for one in tools.MACRO)]
    result, saved = await follow(app, way, *script)
    assert result.unwrap() == ["saved"] * 4
    kinds = [(one.label, one.checkpoint_type) for one in saved]
    assert kinds == [("begun", "named"), *((label, "macro") for label in tools.MACRO)]
    checksum = hashlib.sha256(canonical(state)).hexdigest()
    assert saved[1].document() == {
        "schema_version": "1.0",
        "checkpoint_id": f"{result.invocation_id}:2",
        "invocation_id": result.invocation_id,
        "sequence": 2,
        "tool_id": way,
        "tool_version": "1.0.0",
        "checkpoint_type": "macro",
        "label": "phase_complete",
        "timestamp": iso(saved[1].at_ms),
        "size": len(orjson.dumps(state)),
        "checksum": checksum,
        "state": state,
        "redacted": [],
        "error": None,
    }
    told = records(app, result.invocation_id, "checkpoint")
    assert [(one["label"], one["type"]) for one in told] == kinds
    assert [one["checkpoint"] for one in told] == [1, 2, 3, 4]
    assert (told[1]["sha256"], told[1]["bytes"]) == (checksum, saved[1].size)
    assert "state" not in told[1]
    assert verify(home_at(app.home.path)).intact


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@MICRO
@settings(max_examples=60)
@given(state=VALUE)
async def test_what_is_read_is_what_was_saved(app: Interlock, state: Any) -> None:
    result, saved = await follow(app, "check.awaits", ["checkpoint", "kept", state])
    assume(result.ok)  # two names that are one in canonical form are refused as an argument already
    assert [(one.state, one.error, one.redacted) for one in saved] == [(state, None, ())]


STEP = st.one_of(
    st.tuples(st.just("progress"), st.sampled_from("abc")),
    st.tuples(st.just("partial"), st.integers(0, 9)),
    st.tuples(st.just("checkpoint"), st.sampled_from(("begun", "phase_complete")), VALUE),
)


@MICRO
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=10)
@given(script=st.lists(STEP, max_size=12))
async def test_progress_parts_and_checkpoints_keep_their_order(
    app: Interlock, way: str, script: list[tuple[Any, ...]]
) -> None:
    heard: list[tuple[Any, ...]] = []

    def hear(event: Any) -> None:
        if event.type == "tool.invocation.partial_result":
            heard.append(("partial", event.data["value"]))
        elif event.type == "tool.invocation.progress":
            label = event.data.get("checkpoint")
            heard.append(("progress", event.data["message"]) if label is None else ("checkpoint", label))

    stop = app.listen(hear)
    result, saved = await follow(app, way, *map(list, script))
    stop()
    assume(result.ok)
    steps = [step for step in script if step[0] == "checkpoint"]
    assert result.unwrap() == ["saved"] * len(steps)
    assert heard == [step[:2] for step in script]
    assert [("checkpoint", one.label, one.state) for one in saved] == steps


@MICRO
@pytest.mark.parametrize("label", ["asked", "phase_complete"])
@pytest.mark.parametrize("state", REFERENCE, ids=["crawl", "migration", "report", "conversation"])
async def test_at_rest_a_state_is_packed_and_encrypted(app: Interlock, state: dict[str, Any], label: str) -> None:
    text = orjson.dumps({**state, "canary": "a-plain-canary"})
    assert compress(text)[:2] == b"\x1f\x8b", "gzip"
    assert zlib.decompress(compress(text), 31) == text
    _, (saved,) = await follow(app, "check.awaits", ["insist", label, orjson.loads(text)])
    query = "SELECT size, length(body) FROM checkpoint WHERE call = ?"
    ((size, stored),) = app.journal.reader.all(query, (saved.invocation_id,))
    assert size == len(text) == saved.size
    assert stored < size * 0.4, "less than 60 % were saved"
    assert b"a-plain-canary" not in everything_in(app.home)


# Refusals


@MICRO
@pytest.mark.parametrize("way", ["check.blocks", "check.caged_blocks"])
async def test_what_is_not_json_is_refused_and_nothing_of_it_is_kept(app: Interlock, way: str) -> None:
    result, saved = await follow(app, way, ["unserialisable"], ["checkpoint", "after", 1])
    assert result.unwrap() == [*["E3906"] * 6, "saved"]
    assert [one.label for one in saved] == ["after"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_label_is_a_plain_name(app: Interlock, way: str) -> None:
    wrong: list[Any] = ["", " a", "a b", "-a", "é", "a" * 101, "a\n", 7, None]
    result, saved = await follow(app, way, *(["checkpoint", label, {}] for label in wrong), ["insist", "a" * 100, {}])
    assert result.unwrap() == ["E3308"] * len(wrong)
    assert [one.label for one in saved] == ["a" * 100]


async def test_size_and_number_are_bounded(tmp_path: Path) -> None:
    home = tmp_path / "bounded"
    async with Interlock.open(home, housekeeping=False, checkpoint_bytes=1024, checkpoints_per_call=3) as app:
        await admit(app, *tools.TOOLS)
        most, more = ["checkpoint", "most", "x" * 1022], ["checkpoint", "more", "x" * 1023]
        for way in WAYS:
            result, saved = await follow(app, way, most, more, most, most, most)
            assert result.unwrap() == ["saved", "E3407", "saved", "saved", "E3407"]
            assert [one.size for one in saved] == [1024] * 3


async def test_a_tool_that_does_not_say_it_saves_checkpoints_cannot(app: Interlock) -> None:
    assert code(await app.call("check.unsaid", script=[])) == "E3109"


async def test_waiting_for_a_checkpoint_on_the_loop_itself_is_refused(app: Interlock) -> None:
    result = await app.call("check.confused", script=[])
    assert code(result) == "E3308"
    assert await app.checkpoints(result.invocation_id) == []


@pytest.mark.sqlite_only("the file of the store may not grow")
@ARCHIVE
async def test_a_store_that_cannot_be_written_is_told_to_the_tool(app: Interlock) -> None:
    journal = app.journal.writer._connection  # pyright: ignore[reportPrivateUsage] - the disk is made small
    pages = journal.execute("PRAGMA page_count").fetchone()[0]

    def limit(most: int) -> None:
        journal.execute(f"PRAGMA max_page_count={most}")

    tools.between.extend((lambda: limit(pages), lambda: limit(1 << 30)))
    large = random.Random(7).randbytes(100_000).hex()
    result, saved = await follow(
        app, "check.awaits", ["checkpoint", "before", 1], ["between"], ["checkpoint", "phase_complete", large],
        ["checkpoint", "asked", large], ["between"], ["checkpoint", "after", 2],
    )  # fmt: skip
    assert result.unwrap() == ["saved", "E3902", "E3902", "saved"]
    assert [one.label for one in saved] == ["before", "after"]
    assert verify(home_at(app.home.path)).intact


@pytest.mark.parametrize("way", WAYS)
async def test_a_failure_to_save_that_a_tool_lets_through_is_the_calls_own(app: Interlock, way: str) -> None:
    result, _ = await follow(app, way, ["insist", "large", "x" * (1 << 20)])
    assert code(result) == "E3407"
    assert code((await follow(app, way, ["insist", "a b", 1]))[0]) == "E3308"


# The end of a call


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_that_is_cancelled_keeps_what_it_saved_and_saves_no_more(app: Interlock, way: str) -> None:
    request = app.gateway.with_id(app.request(way, {"script": [["insist", "begun", {"at": 1}], ["wait"]]}))
    call = asyncio.ensure_future(app.gateway.invoke(request))
    assert request.id is not None
    await until(lambda: records(app, request.id, "checkpoint"))
    assert await app.cancel(request.id) == "canceled"
    assert code(await call) == "E3703"
    if way == "check.blocks":
        await until(lambda: tools.late)
        assert tools.late == ["E3902"]
    assert [(one.label, one.state) for one in await app.checkpoints(request.id)] == [("begun", {"at": 1})]
    _ends_with_its_closing(app, request.id)


@pytest.mark.parametrize("way", ["check.awaits", "check.caged_awaits"])
async def test_a_call_that_runs_out_of_time_keeps_what_it_saved(tmp_path: Path, way: str) -> None:
    time = FakeClock()
    async with Interlock.open(tmp_path / "timed", clock=time.clock, housekeeping=False) as app:
        await admit(app, *tools.TOOLS)
        request = app.gateway.with_id(app.request(way, {"script": [["insist", "begun", {"at": 1}], ["wait"]]}))
        call = asyncio.ensure_future(app.gateway.invoke(request))
        assert request.id is not None
        await until(lambda: records(app, request.id, "checkpoint"))
        time.advance(3600)
        assert code(await call) == "E3402"
        assert [one.state for one in await app.checkpoints(request.id)] == [{"at": 1}]
        _ends_with_its_closing(app, request.id)


async def test_a_tool_that_dies_keeps_what_it_saved(app: Interlock) -> None:
    result, saved = await follow(app, "check.caged_blocks", ["insist", "begun", {"at": 1}], ["die"])
    assert code(result) == "E3404"
    assert [one.state for one in saved] == [{"at": 1}]
    _ends_with_its_closing(app, result.invocation_id)


@pytest.mark.parametrize("way", ["check.awaits", "check.hurries"])
@pytest.mark.parametrize("end", ["return", "fail"])
async def test_what_a_tool_left_running_saves_nothing_after_the_end(app: Interlock, way: str, end: str) -> None:
    result, _ = await follow(app, way, ["insist", "begun", 0], ["leave", 40], *([["fail"]] if end == "fail" else []))
    assert result.ok == (end == "return")
    await until(lambda: len(tools.late) == 40)
    await app.journal.drain()
    saved = await app.checkpoints(result.invocation_id)
    assert {"E3902"} <= set(tools.late) <= {"saved", "E3902"}
    assert 1 + tools.late.count("saved") == len(saved)
    _ends_with_its_closing(app, result.invocation_id)


def _ends_with_its_closing(app: Interlock, call: str) -> None:
    rows = app.journal.reader.all("SELECT kind FROM journal WHERE call = ? ORDER BY seq", (call,))
    kinds = [kind for (kind,) in rows if kind != "cancel"]
    assert kinds[0] == "started", "a call that saves something is on record as begun"
    assert kinds[-1] == "closed"
    assert kinds.count("closed") == 1
    assert app.journal.reader.all("SELECT 1 FROM fact WHERE name = ?", (f"begun:{call}",)) == []


@ARCHIVE
async def test_housekeeping_lets_go_of_no_checkpoint(tmp_path: Path) -> None:
    time = FakeClock()
    async with Interlock.open(tmp_path / "old", clock=time.clock, housekeeping=False) as app:
        await admit(app, *tools.TOOLS)
        steps = ["insist", "asked", 1], ["insist", "phase_complete", 2]
        result, saved = await follow(app, "check.awaits", *steps)
        for _ in range(2):
            time.advance(90 * 86_400)
            await app.maintain()
            assert await app.checkpoints(result.invocation_id) == saved


async def test_who_only_looks_saves_nothing(app: Interlock) -> None:
    before = app.journal.reader.all("SELECT COUNT(*) FROM checkpoint")
    result = await app.call("check.keeps", api_key="a", password="b", dry_run=True)
    assert result.unwrap()["impact"] == "looked"
    assert await app.checkpoints(result.invocation_id) == []
    assert app.journal.reader.all("SELECT COUNT(*) FROM checkpoint") == before


# Reading


async def test_only_the_caller_that_made_a_call_reads_its_checkpoints(app: Interlock) -> None:
    ann, bob = (Caller(id=name, scopes=app.caller.scopes | {"audit:read"}) for name in ("ann", "bob"))
    theirs = await app.call("check.awaits", {"script": [["insist", "begun", 1]]}, caller=ann)
    without = await app.call("check.awaits", {"script": []}, caller=ann)
    assert [one.state for one in await app.checkpoints(theirs.invocation_id, caller=ann)] == [1]
    assert await app.checkpoints(without.invocation_id, caller=ann) == []
    same_name = Caller(id="ann", tenant="elsewhere", scopes=ann.scopes)
    for call in (theirs.invocation_id, without.invocation_id, "01JUNKNOWN"):
        for caller in (bob, same_name, None):
            with pytest.raises(Failure) as refused:
                await app.checkpoints(call, caller=caller)
            assert refused.value.code == "E3702"


DAMAGE = {
    "the state": "body = CAST(substr(body, 1, length(body) - 1) || x'00' AS BLOB)",
    "half of it": "body = substr(body, 1, 30)",
    "nothing but nought": f"body = x'{'00' * 100}'",
    "the label": "label = 'phase_complete'",
    "whose it is": "owner = 'local/bob'",
    "the checksum": "sha256 = sha256 || '0'",
    "another's state": "body = (SELECT body FROM checkpoint one WHERE one.call = checkpoint.call AND one.seq = 1)",
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_checkpoint_that_is_not_what_was_saved_says_so_and_the_others_are_listed(
    app: Interlock, damage: str
) -> None:
    result, _ = await follow(app, "check.awaits", *(["insist", f"n{n}", {"n": n}] for n in (1, 2, 3)))
    with opened(app.home) as other:
        change = f"UPDATE checkpoint SET {DAMAGE[damage]} WHERE call = ? AND seq = 2"
        assert other.execute(change, (result.invocation_id,)).rowcount == 1
    first, second, third = await app.checkpoints(result.invocation_id)
    assert (first.state, second.state, third.state) == ({"n": 1}, None, {"n": 3})
    assert second.error is not None
    assert second.error.code == "E3904"
    assert second.document()["error"]["error_code"] == "E3904"


async def test_a_reader_sees_a_state_as_they_would_see_a_result(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "redacting", housekeeping=False) as app:
        await admit(app, *tools.TOOLS)
        state = {"mail": "ann@example.org", "n": 1}
        result, (saved,) = await follow(app, "check.awaits", ["insist", "begun", state])
        assert saved.state["n"] == 1
        assert "ann@example.org" not in str(saved.state)
        assert saved.redacted == ("/mail",)
        assert kept(app, result) == state


@CREDENTIALS
async def test_credentials_are_in_no_checkpoint(app: Interlock, caplog: pytest.LogCaptureFixture) -> None:
    given = {"api_key": "sk-secret123456", "password": "supersecret"}
    heard: list[str] = []
    stop = app.listen(lambda event: heard.append(str(event.document())))
    with caplog.at_level("DEBUG"):
        result = await app.call("check.keeps", given, key="k")
    stop()
    assert result.unwrap() == {"label": "E3308"}
    (saved,) = await app.checkpoints(result.invocation_id)
    assert saved.redacted == ("/api_key", "/note")
    note = "used [REDACTED] and [REDACTED]"
    assert saved.state == {"api_key": "[REDACTED]", "note": note, "mail": "ann@example.org"} == kept(app, result)
    told = "".join([*heard, caplog.text, str(result.document()), str(saved.document())])
    for canary in (*given.values(), "lent-canary-77"):
        assert canary not in told
        assert canary.encode() not in everything_in(app.home)
    assert b"ann@example.org" not in everything_in(app.home)


# Telling


@pytest.mark.parametrize("way", WAYS)
async def test_a_checkpoint_is_progress_that_its_caller_hears_of(app: Interlock, way: str) -> None:
    heard: list[Any] = []
    steps = ["insist", "phase_complete", 1], ["progress", "half way"]
    result, (saved,) = await follow(app, way, *steps, on_progress=heard.append)
    first, second = heard
    assert (first["checkpoint"], first["message"]) == ("phase_complete", "saved checkpoint phase_complete")
    assert first["checkpoint_id"] == saved.id
    assert ToolProgress.parse(first).document()["checkpoint"] == "phase_complete"
    assert (second.get("checkpoint"), second["message"]) == (None, "half way")
    assert "warnings" not in result.metadata
