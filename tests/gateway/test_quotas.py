"""Large results are kept within quotas of the caller, the tenant and the home, which expiry frees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock import Caller, Failure, Field, Interlock, tool
from interlock.api.service import Ask, Service
from interlock.audit.retention import expire_payloads
from tests.support.calls import admit, turn, write

Size = Annotated[int, Field(description="how many characters", examples=[1])]
ANN, BOB = Caller(id="user:ann", tenant="north"), Caller(id="user:bob", tenant="north")
EVE = Caller(id="user:eve", tenant="south")


@tool(version="1.0.0", mutation_class="read_only", namespace="quota", max_inline_chars=100, persist_output=True)
async def produce(size: Size) -> str:
    """A text of so many characters."""
    return "x" * size


runs: list[int] = []


async def change(size: Size) -> int:
    """Change something."""
    runs.append(size)
    return size


async def change_much(size: Size) -> str:
    """Change something and tell much about it."""
    return "x" * size


changing, changing_much = write(change), write(change_much, max_inline_chars=100, persist_output=True)


@asynccontextmanager
async def opened(home: Path, **quotas: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **quotas) as app:
        await admit(app, produce, changing, changing_much)
        yield app


def used(app: Interlock) -> dict[str, int]:
    return dict(app.journal.reader.all("SELECT scope, bytes FROM payload_use WHERE bytes != 0", ()))


def kept(app: Interlock) -> list[int]:
    """The sizes of the results that are kept."""
    statement = "SELECT size FROM payload WHERE body IS NOT NULL AND ref LIKE 'payload:%'"
    return [size for (size,) in app.journal.reader.all(statement, ())]


@pytest.mark.parametrize(
    ("quota", "stopped", "free"),
    [
        ("payload_bytes_per_caller", [ANN], [BOB, EVE]),
        ("payload_bytes_per_tenant", [ANN, BOB], [EVE]),
        ("payload_bytes", [ANN, BOB, EVE], []),
    ],
)
async def test_a_result_over_a_quota_is_refused_with_the_quota_and_what_to_do(
    tmp_path: Path, quota: str, stopped: list[Caller], free: list[Caller]
) -> None:
    async with opened(tmp_path, **{quota: 5000}) as app:
        assert (await app.call("quota.produce", size=4000, caller=ANN)).ok
        for caller in stopped:
            refused = (await app.call("quota.produce", size=2000, caller=caller)).error
            assert refused is not None
            assert refused.code == "E3407"
            assert refused.details is not None
            assert refused.details["quota"] == quota
            assert quota in refused.resolution
            assert (await app.call("quota.produce", size=10, caller=caller)).ok, "what is small is not kept"
        for caller in free:
            assert (await app.call("quota.produce", size=2000, caller=caller)).ok


async def test_a_caller_at_a_quota_begins_no_write_and_hears_of_earlier_ones(tmp_path: Path) -> None:
    async with opened(tmp_path, payload_bytes_per_caller=3000) as app:
        runs.clear()
        assert (await app.call("demo.change", size=1, key="before", caller=ANN)).ok
        left = 3000 - used(app)["caller:north/user:ann"]
        assert (await app.call("quota.produce", size=left - 2, caller=ANN)).ok, "with its quotes, all that is left"
        refused = (await app.call("demo.change", size=2, key="after", caller=ANN)).error
        assert refused is not None
        assert refused.code == "E3407"
        assert runs == [1]
        again = await app.call("demo.change", size=1, key="before", caller=ANN)
        assert again.replayed
        assert again.value == 1
        assert runs == [1]


async def test_a_write_whose_payload_does_not_fit_is_recorded_and_says_why_the_payload_is_withheld(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, payload_bytes_per_caller=3000) as app:
        first = await app.call("demo.change_much", size=5000, key="k", caller=ANN)
        again = await app.call("demo.change_much", size=5000, key="k", caller=ANN)
        for result in (first, again):
            assert result.ok
            assert result.persistence.decision == "link"
            assert "payload_bytes_per_caller" in result.persistence.reason
            assert "withheld" in result.text()
            assert result.persistence.ref == f"payload:{first.invocation_id}"
        assert again.replayed
        with pytest.raises(Failure, match="withheld") as gone:
            await app.read_payload(f"payload:{first.invocation_id}", caller=ANN)
        assert gone.value.code == "E3702"
        (closed,) = app.journal.reader.all(
            "SELECT body FROM journal WHERE call = ? AND kind = 'closed'", (first.invocation_id,)
        )
        assert "payload_bytes_per_caller" in json.loads(closed[0])["withheld"]
        assert kept(app) == []


@pytest.mark.parametrize("writes", [False, True])
async def test_calls_at_the_same_time_do_not_go_over_a_quota_together(tmp_path: Path, writes: bool) -> None:
    async with opened(tmp_path, payload_bytes_per_tenant=5000) as app:
        results = await asyncio.gather(
            *(
                app.call("demo.change_much", size=1000, key=str(number), caller=caller)
                if writes
                else app.call("quota.produce", size=1000, caller=caller)
                for number, caller in enumerate([ANN, BOB] * 8)
            )
        )
        held = [result for result in results if result.ok and result.persistence.decision == "preview"]
        assert kept(app) == [1002] * len(held)
        assert len(held) in ((3, 4) if writes else (4,)), "what undoes a write counts as well"
        others = [result for result in results if result not in held]
        assert {result.error.code for result in others if result.error is not None} <= {"E3407"}
        assert all("withheld" in result.persistence.reason for result in others if result.ok)
        assert writes or not any(result.ok for result in others)


async def test_a_call_can_be_undone_at_a_quota(tmp_path: Path) -> None:
    async with opened(tmp_path, payload_bytes_per_caller=3000) as app:
        done = await app.call("demo.change", size=1, key="k", caller=ANN)
        await app.journal.commit(lambda transaction: transaction.execute(_FULL, ()))
        assert not (await app.call("demo.change", size=2, key="l", caller=ANN)).ok
        assert (await app.undo(done.invocation_id, key="u", caller=ANN)).ok


_FULL = (
    "INSERT INTO payload_use (scope, bytes) VALUES ('caller:north/user:ann', 4000)"
    " ON CONFLICT (scope) DO UPDATE SET bytes = 4000"
)


async def test_background_calls_have_a_bound_per_tenant(tmp_path: Path) -> None:
    async with opened(tmp_path, max_background_per_tenant=1) as app:
        calls = Service(app).calls
        ask = Ask("quota.produce", {"size": 1})
        started = await calls.start(ask, ANN, door="rest")
        with pytest.raises(Failure) as refused:
            await calls.start(ask, BOB, door="rest")
        assert refused.value.code == "E3701"
        assert "max_background_per_tenant" in refused.value.message
        others = await calls.start(ask, EVE, door="rest")
        async with asyncio.timeout(60):
            while await calls.result(started, ANN) is None or await calls.result(others, EVE) is None:
                await turn()
        await calls.start(ask, BOB, door="rest")


async def test_expiry_frees_a_quota(tmp_path: Path) -> None:
    async with opened(tmp_path, payload_bytes_per_caller=5000) as app:
        assert (await app.call("quota.produce", size=4000, caller=ANN)).ok
        assert not (await app.call("quota.produce", size=4000, caller=ANN)).ok
        await app.journal.commit(lambda transaction: transaction.execute("UPDATE payload SET expires_ms = 0", ()))
        await expire_payloads(app.journal)
        assert used(app) == {}
        assert (await app.call("quota.produce", size=4000, caller=ANN)).ok


@settings(max_examples=10)
@given(
    steps=st.lists(st.tuples(st.sampled_from([ANN, BOB, EVE]), st.integers(1, 400)), max_size=8), gone=st.integers(0, 8)
)
async def test_the_sums_are_those_of_the_payloads(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Caller, int]], gone: int
) -> None:
    async with opened(tmp_path_factory.mktemp("sums")) as app:
        for caller, size in steps:
            assert (await app.call("quota.produce", size=size, caller=caller)).ok

        def forget(transaction: Any) -> None:
            first = [ref for (ref,) in transaction.all("SELECT ref FROM payload ORDER BY ref")][:gone]
            for number, ref in enumerate(first):
                change = "UPDATE payload SET body = NULL" if number % 3 else "DELETE FROM payload"
                transaction.execute(f"{change} WHERE ref = ?", (ref,))

        await app.journal.commit(forget)
        kept: dict[str, int] = {}
        for owner, size in app.journal.reader.all("SELECT owner, size FROM payload WHERE body IS NOT NULL", ()):
            for scope in ("home", f"tenant:{owner.partition('/')[0]}", f"caller:{owner}"):
                kept[scope] = kept.get(scope, 0) + size
        assert used(app) == kept
