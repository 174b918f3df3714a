"""Calls that wait for a person keep their inputs, however they end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from interlock import Hook, HookResult, Interlock, Result, Seen
from interlock.audit.chain import verify
from interlock.core.errors import Failure
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests import sample
from tests.support.calls import code, records, until
from tests.support.private import CANARY
from tests.support.stores import contents
from tests.support.tickets import ANN, BEN, DAY, opened, outbox, ticket_of

Json = dict[str, Any]
SENT: Json = {"to": "carl"}
LARGE: Json = {"to": "x" * 300_000}
FILLED = {
    "before": "model_input",
    "after": "observable_input",
    "source": "default",
    "pointer": "/note",
    "value": "none",
}
HOOKED = {
    "before": "observable_input", "after": "permission_input", "source": "hook:notes", "pointer": "/note",
    "value": CANARY,
}  # fmt: skip


@pytest.fixture
def clock() -> FakeClock:
    outbox.__init__()
    sample.reset()
    return FakeClock()


def _notes(app: Interlock) -> None:
    """A hook that writes a private note."""

    def run(seen: Seen) -> HookResult:
        return HookResult(updated_input={**seen.input, "note": CANARY})

    app.hook(Hook(id="notes", when="pre", run=run))


async def _denied(app: Interlock, _: FakeClock, pending: Result) -> None:
    await app.approvals.deny(ticket_of(pending), by=BEN)


async def _nobody_decided(app: Interlock, clock: FakeClock, _: Result) -> None:
    clock.advance(DAY)
    await app.approvals.sweep()


async def _lapsed(app: Interlock, clock: FakeClock, pending: Result) -> None:
    await app.approvals.approve(ticket_of(pending), by=BEN)
    clock.advance(DAY)
    await app.approvals.sweep()


async def _void(app: Interlock, _: FakeClock, pending: Result) -> None:
    assert (await app.call("demo.mail", {"to": "dora"}, key="k")).pending


async def _void_after_a_yes(app: Interlock, clock: FakeClock, pending: Result) -> None:
    await app.approvals.approve(ticket_of(pending), by=BEN)
    await _void(app, clock, pending)


async def _withdrawn(app: Interlock, _: FakeClock, pending: Result) -> None:
    assert await app.approvals.withdraw(pending.invocation_id, by=app.caller)


async def _passed_over(app: Interlock, clock: FakeClock, pending: Result) -> None:
    patterns = {"to": f"{(await _asked(app, pending))['to'][0]}*", "note": "*"}
    until = clock.now_ms + 60_000
    await app.standing_approvals.grant("demo.mail", by=BEN, caller=ANN, arguments=patterns, uses=1, expires_ms=until)
    assert (await app.call("demo.mail", await _asked(app, pending), key="k")).ok


async def _given_up(app: Interlock, clock: FakeClock, pending: Result) -> None:
    await app.approvals.approve(ticket_of(pending), by=BEN)
    app.home.policy.write_text(app.home.policy.read_text() + "\nforbid (principal, action, resource);\n")
    clock.advance(1)
    assert code(await app.approved_calls.resume(ticket_of(pending))) == "E3206"


End = Callable[[Interlock, FakeClock, Result], Awaitable[None]]
# How a call that waits ends, and the code in its closing record.
ENDS: dict[str, tuple[End, str]] = {
    "denied": (_denied, "E3209"),
    "nobody decided": (_nobody_decided, "E3209"),
    "lapsed": (_lapsed, "E3209"),
    "void": (_void, "E3209"),
    "void after a yes": (_void_after_a_yes, "E3209"),
    "withdrawn": (_withdrawn, "E3703"),
    "passed over": (_passed_over, "E3209"),
    "given up": (_given_up, "E3206"),
}


async def _asked(app: Interlock, pending: Result) -> Json:
    return (await app.inputs(pending.invocation_id)).model_input


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("end", ENDS)
async def test_a_call_that_ends_while_it_waits_for_a_person_has_one_result_and_its_events(
    tmp_path: Path, clock: FakeClock, end: str
) -> None:
    how, expected = ENDS[end]
    heard: list[tuple[str, str, str | None]] = []
    async with opened(tmp_path / "home", clock, keep_inputs="always") as app:
        app.listen(lambda event: heard.append((event.invocation_id, event.type, event.data.get("error_code"))))
        pending = await app.call("demo.mail", SENT, key="k")
        await how(app, clock, pending)
        state = "canceled" if end == "withdrawn" else "failed"
        about = pending.invocation_id
        ends = [(about, f"tool.invocation.{state}", expected), (about, "tool.result.created", None)]
        await until(lambda: [one for one in heard if one[0] == pending.invocation_id][-2:] == ends)
        assert heard.count(ends[0]) == heard.count(ends[1]) == 1
        (closed,) = records(app, pending.invocation_id)
        assert closed["error_code"] == expected


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize("sent", [SENT, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("end", ENDS)
async def test_in_mode_always_a_call_that_ends_while_it_waits_for_a_person_keeps_its_inputs(
    tmp_path: Path,
    clock: FakeClock,
    end: str,
    sent: Json,
) -> None:
    how, expected = ENDS[end]
    async with opened(tmp_path / "home", clock, keep_inputs="always") as app:
        _notes(app)
        pending = await app.call("demo.mail", sent, key="k")
        waiting = await app.inputs(pending.invocation_id)
        await how(app, clock, pending)
        (closed,) = records(app, pending.invocation_id)
        assert closed["error_code"] == expected
        assert closed["inputMutations"] == [
            {"source": "default", "pointer": "/note"},
            {"source": "hook:notes", "pointer": "/note"},
        ]
        assert CANARY not in str(closed)
        found = await app.inputs(pending.invocation_id)
        assert found.model_input == waiting.model_input == sent
        assert found.changes == waiting.changes
        assert found.observable_input == {**sent, "note": "none"}
        assert found.permission_input == found.call_input == {**sent, "note": CANARY}
        assert found.changes == (FILLED, HOOKED)
        assert app.journal.reader.all(
            "SELECT count(*) FROM payload WHERE ref LIKE ? AND body IS NOT NULL", (f"inputs:{pending.invocation_id}%",)
        ) == [(1,)]
    at_rest = contents(home_at(tmp_path / "home"))
    assert at_rest
    assert CANARY.encode() not in at_rest
    assert verify(home_at(tmp_path / "home")).faults == ()


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize("sent", [SENT, LARGE], ids=["small", "large"])
async def test_inputs_of_a_call_that_waited_are_replaced_by_those_that_it_ran_with(
    tmp_path: Path,
    clock: FakeClock,
    sent: Json,
) -> None:
    async with opened(tmp_path / "home", clock, keep_inputs="always") as app:
        pending = await app.call("demo.mail", sent, key="k")
        await app.approvals.approve(ticket_of(pending), by=BEN, edit={"to": "dora"})
        assert (await app.inputs(pending.invocation_id)).call_input == {**sent, "note": "none"}
        assert (await app.approved_calls.resume(ticket_of(pending))).ok
        found = await app.inputs(pending.invocation_id)
        assert (found.model_input, found.permission_input["to"]) == (sent, sent["to"])
        assert found.call_input == {"to": "dora", "note": "none"}
        assert outbox.sent == [("dora", "none")]
        await app.maintain()
        assert app.journal.reader.all("SELECT name FROM fact WHERE name LIKE 'pieces%'") == []
        kept = "SELECT sum(size) FROM payload WHERE body IS NOT NULL"
        assert app.journal.reader.all("SELECT bytes FROM payload_use WHERE scope = 'home'") == app.journal.reader.all(
            kept
        )
    assert verify(home_at(tmp_path / "home")).faults == ()


@pytest.mark.proves("LIFE-05")
async def test_a_call_that_waited_and_is_refused_for_a_while_is_tried_again_with_its_inputs_kept(
    tmp_path: Path,
    clock: FakeClock,
) -> None:
    async with opened(tmp_path / "home", clock, keep_inputs="always") as app:
        pending = await app.call("demo.mail", LARGE, key="k")
        await app.approvals.approve(ticket_of(pending), by=BEN)
        requests = app.gateway._requests  # pyright: ignore[reportPrivateUsage]
        real = requests.read
        refusals = [Failure("E3003", "come back later", retry_after_ms=1) for _ in range(2)]

        async def refusing(call: Any, tool: Any = None, *, to_run: bool = True) -> Any:
            requested = await real(call, tool, to_run=to_run)
            if refusals:
                raise refusals.pop()
            return requested

        requests.read = refusing
        for _ in range(2):
            assert code(await app.approved_calls.resume(ticket_of(pending))) == "E3003"
            assert (await app.inputs(pending.invocation_id)).model_input == LARGE
        assert (await app.approved_calls.resume(ticket_of(pending))).ok
        assert (await app.inputs(pending.invocation_id)).model_input == LARGE


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize(("mode", "kept"), [("changed", True), ("never", False)])
async def test_the_other_modes_hold_for_calls_that_wait_too(
    tmp_path: Path,
    clock: FakeClock,
    mode: str,
    kept: bool,
) -> None:
    async with opened(tmp_path / "home", clock, keep_inputs=mode) as app:
        plain = await app.call("demo.mail", SENT, key="plain")
        _notes(app)
        hooked = await app.call("demo.mail", SENT, key="hooked")
        for pending in (plain, hooked):
            await app.approvals.deny(ticket_of(pending), by=BEN)
        assert (await app.inputs(plain.invocation_id)).model_input is None, "a default stands in the contract"
        assert (await app.inputs(plain.invocation_id)).changes == (FILLED,)
        assert (await app.inputs(hooked.invocation_id)).model_input == (SENT if kept else None)


@pytest.mark.proves("LIFE-05")
async def test_where_a_quota_has_no_room_the_closing_record_of_a_denied_call_says_so(
    tmp_path: Path,
    clock: FakeClock,
) -> None:
    async with opened(tmp_path / "home", clock, keep_inputs="always", payload_bytes=1000) as app:
        pending = await app.call("demo.mail", LARGE, key="k")
        await app.approvals.deny(ticket_of(pending), by=BEN)
        (closed,) = records(app, pending.invocation_id)
        assert "payload_bytes" in closed["inputsWithheld"]
        found = await app.inputs(pending.invocation_id)
        assert (found.model_input, found.withheld) == (None, closed["inputsWithheld"])
        await app.maintain()
        assert app.journal.reader.all("SELECT count(*) FROM payload_piece") == [(0,)]
