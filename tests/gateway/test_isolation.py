"""Sandboxed tools through the gateway: they run where they can do no harm, and end as what they did."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from interlock import Caller, Interlock
from tests.gateway import isolated_tools as cell
from tests.gateway.test_idempotency import code
from tests.gateway.test_lifecycle import _publish, records  # pyright: ignore[reportPrivateUsage]

TOOLS = (cell.double, cell.attempt, cell.count, cell.lent, cell.unbound)
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))


@pytest_asyncio.fixture
async def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Interlock]:
    monkeypatch.setenv("A_SERVERS_SECRET", "canary-7731")
    async with Interlock.open(tmp_path / "home", housekeeping=False) as opened:
        for one in TOOLS:
            await opened.journal.commit(_publish(one))
            opened.catalog.attach(one)
        yield opened


@pytest.mark.part_of("EXEC-03", rest="the escape suite itself, which runs on the sandbox")
async def test_a_tool_runs_isolated_and_answers_as_any_other(lock: Interlock) -> None:
    assert (await lock.call("cell.double", n=21)).unwrap() == 42
    assert code(await lock.call("cell.double", n="x")) == "E3301"
    (record, _) = records(lock)
    assert record["phases"] == ["request", "validate", "authorize", "execute", "verify", "return"]


@pytest.mark.part_of("EXEC-04", rest="disks, forks and twenty at once, which run on the sandbox")
@pytest.mark.part_of("EXEC-05", rest="programs, which run on the sandbox")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("files", "E3401"),
        ("network", "E3406"),
        ("memory", "E3403"),
        ("time", "E3402"),
        ("crash", "E3404"),
        ("output", "E3407"),
        ("error", "E3401"),
    ],
)
async def test_a_hostile_tool_ends_as_what_it_did(lock: Interlock, what: str, expected: str) -> None:
    result = await lock.call("cell.attempt", what=what, timeout_s=2 if what == "time" else None)
    assert code(result) == expected
    told = str(result.document())
    assert "/a/path" not in told
    assert "Traceback" not in told
    assert (await lock.call("cell.double", n=1)).unwrap() == 2


@pytest.mark.proves("AUTH-09")
async def test_no_right_of_the_server_reaches_the_tool(lock: Interlock) -> None:
    seen = (await lock.call("cell.attempt", what="environment")).unwrap()
    assert "A_SERVERS_SECRET" not in seen
    assert "canary-7731" not in seen
    # As whoever the server runs, a program inside is somebody else.
    uid = (await lock.call("cell.attempt", what="program")).unwrap().strip()
    assert uid != "0"
    network = await lock.call("cell.attempt", what="network")
    assert code(network) == "E3406"
    assert records(lock, kind="violation")
    assert code(await lock.call("cell.attempt", what="files")) == "E3401"


async def test_what_a_tool_reports_from_inside_counts_as_if_it_had_run_outside(lock: Interlock) -> None:
    heard: list[Any] = []
    first = await lock.call("cell.count", {"name": "a"}, key="k", session="s", on_progress=heard.append)
    assert first.unwrap() == 1
    assert [one["message"] for one in heard] == ["counting"]
    assert (await lock.call("cell.count", {"name": "a"}, key="k", session="s")).replayed
    assert (await lock.call("cell.count", {"name": "a"}, key="k2", session="s")).unwrap() == 2
    changes = [record["affectedResource"] for record in records(lock, kind="mutation")]
    assert changes == ["counter:a", "session:count"] * 2
    preview = (await lock.call("cell.count", name="a", dry_run=True)).unwrap()
    assert preview["impact"] != f"looked at from uid {os.getuid()}" or os.getuid() != 0
    assert (await lock.undo(first.invocation_id, key="u")).ok


@pytest.mark.part_of("EXEC-07", rest="core dumps")
async def test_a_credential_reaches_the_tool_by_no_way_that_others_can_see(lock: Interlock) -> None:
    await lock.secrets.set("cell/token", "a-lent-canary", by="local:test")
    result = (await lock.call("cell.lent", what="x")).unwrap()
    assert result == "13 [REDACTED] []"


@pytest.mark.part_of("EXEC-02", rest="the matrix of tiers, which runs on the sandbox")
async def test_full_access_is_asked_for_at_every_call(lock: Interlock) -> None:
    pending = await lock.call("cell.unbound", what="x")
    assert pending.pending
    await lock.approvals.approve(pending.metadata["pending"]["ticketId"], by=REVIEWER)
    assert (await lock.call("cell.unbound", what="x")).unwrap() == "x"
    assert (await lock.call("cell.unbound", what="x")).pending
