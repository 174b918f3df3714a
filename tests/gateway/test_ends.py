"""Every call ends and every key is settled, whatever a tool reports and whatever breaks while the call is closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Context, Effect, Interlock, Preview, tool
from interlock.call.cost import Cost
from interlock.contract.effects import Change
from interlock.data.canonical import digest
from tests import sample
from tests.support import isolated_tools as cell
from tests.support.calls import FIELDS, admit, code
from tests.support.failures import FAILURES, SURROGATE, fall, looped


def _deep() -> Any:
    found: Any = 1
    for _ in range(3000):
        found = [found]
    return found


def _set_cost(ctx: Context, amount: Any) -> None:
    ctx.costs = Cost(network=amount)


REPORTS: dict[str, Callable[[Context], Any]] = {
    "a resource that is no text": lambda ctx: ctx.effect(SURROGATE, "UPDATE"),
    "a value that is no JSON": lambda ctx: ctx.effect("x:a", "UPDATE", after=object()),
    "a value that holds itself": lambda ctx: ctx.effect("x:a", "UPDATE", after=looped()),
    "a value too deep": lambda ctx: ctx.effect("x:a", "UPDATE", after=_deep()),
    "a value too large": lambda ctx: ctx.effect("x:a", "UPDATE", after=10**30),
    "a change that is none": lambda ctx: ctx.changes.append(7),  # pyright: ignore[reportArgumentType]
    "an operation that is none": lambda ctx: ctx.changes.append(Change(resource="x:a", operation=7)),  # pyright: ignore[reportArgumentType]
    "a session name that is no text": lambda ctx: ctx.session.__setitem__(SURROGATE, 1),
    "a modifier that is no JSON": lambda ctx: ctx.modify_context(a=object()),
    "a modifier that is no text": lambda ctx: ctx.modify_context(a=SURROGATE),
    "an undo that is no JSON": lambda ctx: ctx.compensate_with(a=object()),
    "an undo that is no text": lambda ctx: ctx.compensate_with(a=SURROGATE),
    "a cost past counting": lambda ctx: _set_cost(ctx, 10**30),
    "a cost below nothing": lambda ctx: _set_cost(ctx, -50_000_000),
    "a cost without end": lambda ctx: _set_cost(ctx, float("inf")),
    "a cost that is no number": lambda ctx: _set_cost(ctx, "much"),
    "a part that is no text": lambda ctx: ctx.partial(SURROGATE),
    "a part that is no JSON": lambda ctx: ctx.partial(object()),
    "a fact that is no text": lambda ctx: ctx.attest(SURROGATE, SURROGATE, lambda: SURROGATE),
}


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("x:a", "UPDATE")],
    concurrency_safe=True,
)  # fmt: skip
async def report(ctx: Context, name: sample.Name) -> str:
    """Report something odd, and succeed."""
    REPORTS[name](ctx)
    return name


@report.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@report.compensate
async def _(name: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def calm(name: sample.Name) -> str:
    """Say it back."""
    return name


async def _ends(app: Interlock, name: str, arguments: dict[str, Any]) -> str:
    result = await app.call(name, **arguments, key="once")
    again = await app.call(name, **arguments, key="once")
    assert result.state in ("succeeded", "failed")
    assert again.ok == result.ok
    # The key is not held any more, and the call has one intent and one end.
    assert app.journal.reader.all("SELECT count(*) FROM reservation WHERE state = 'executing'", ())[0][0] == 0
    kinds = [
        kind for (kind,) in app.journal.reader.all("SELECT kind FROM journal WHERE call = ?", (result.invocation_id,))
    ]
    assert kinds.count("intent") == kinds.count("closed") == 1
    (body,) = app.journal.reader.all(
        "SELECT body FROM journal WHERE call = ? AND kind = 'closed'", (result.invocation_id,)
    )[0]
    closed = orjson.loads(body)
    assert closed.keys() >= FIELDS
    said = (closed["operation"], closed["toolId"], closed["version"], closed["mutationClass"], closed["authDecision"])
    assert said == ("invoke", name, "1.0.0", "write_reversible", "ALLOW")
    # By which rule of which policy it was judged is on record however it ends.
    intent = orjson.loads(
        app.journal.reader.all("SELECT body FROM journal WHERE call = ? AND kind = 'intent'", (result.invocation_id,))[
            0
        ][0]
    )
    assert closed["policy"] == intent["policy"]
    assert closed["policy"]
    assert closed["rules"] == intent["rules"] == ["reads-and-undoable-writes"]
    assert closed["decision"].pop("expires_at") > closed["timestamp"]
    reason = "rule reads-and-undoable-writes"
    assert closed["decision"] == {"behavior": "allow", "mode": "enforce", "source": "policy", "reason": reason}
    assert (closed["status"], closed["errorCode"] is None) == ("SUCCESS" if result.ok else "ERROR", result.ok)
    assert (closed["traceId"], closed["callerId"]) == (result.trace_id, app.caller.id)
    assert closed["inputHash"] == digest(arguments)
    assert closed["latencyMs"] >= 0
    assert app.journal.reader.all("SELECT count(*) FROM hold", ())[0][0] == 0
    # The service goes on.
    assert (await app.call("demo.calm", name="still here")).unwrap() == "still here"
    return result.invocation_id


@pytest.mark.supports("AUDIT-01")
@pytest.mark.parametrize("name", REPORTS)
async def test_a_call_ends_whatever_its_tool_reports(app: Interlock, name: str) -> None:
    await admit(app, report, calm)
    await _ends(app, "demo.report", {"name": name})


# The errors in the log, once each: what the tool failed with, or that its failure could not be written down.
UNWRITTEN = ("the closing of call {} failed", "the call could not be closed in call {}")
LOGGED = {
    "a message that is no text": UNWRITTEN,
    "details that are no JSON": (),
    "details that are no text": UNWRITTEN,
    "a text that is no text": ("demo.fall@1.0.0 failed in call {}",),
    "details that hold themselves": ("demo.fall@1.0.0 failed in call {}",),
}


@pytest.mark.supports("AUDIT-01")
@pytest.mark.parametrize("name", FAILURES)
async def test_a_call_ends_whatever_its_tool_fails_with(
    app: Interlock, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await admit(app, fall, calm)
    call = await _ends(app, "demo.fall", {"name": name})
    lines = caplog.text.encode().decode().splitlines()  # which raises where a line could not be written
    told = [line.partition(" ")[2] for line in map(str.strip, lines) if line.startswith("ERROR    interlock.gateway:")]
    assert [line.partition(".py:")[2].partition(" ")[2] for line in told] == [one.format(call) for one in LOGGED[name]]
    if name == "a text that is no text":
        assert "ValueError: \\ud800" in lines


FORGED = {
    "a negative cost": 'R{"ok":true,"value":"a","reports":{"cost":{"network":-50000000}}}',
    "a cost without end": 'R{"ok":true,"value":"a","reports":{"cost":{"network":1e999}}}',
    "a cost past counting": f'R{{"ok":true,"value":"a","reports":{{"cost":{{"network":{10**30}}}}}}}',
    "a session that is no text": r'R{"ok":true,"value":"a","reports":{"session":{"\ud800":1}}}',
    "a result that is no text": r'R{"ok":true,"value":"\ud800"}',
    "a change of another form": 'R{"ok":true,"value":"a","reports":{"changes":[{"self":1}]}}',
    "a report of nothing": 'R{"ok":true,"value":"a","reports":7}',
    "an exit code": 'R{"ok":true,"value":"a","exit":77}',
    "a number without end": 'R{"ok":true,"value":1e999}',
    "progress named self": 'P{"self":1,"percent":"all"}',
    "an error that steers": r'R{"ok":false,"error":{"type":"\u001b[2J\u202e","message":"\u001b]0;x","code":"E3411"}}',
}


@pytest.mark.supports("EXEC-03")
async def test_a_forged_frame_ends_its_call_and_changes_no_budget(home: Path) -> None:
    budget = {"per": "caller", "limit": 10.0}
    async with Interlock.open(home, budgets=[budget], housekeeping=False) as app:
        await admit(app, cell.forge, calm)
        for number, (name, frame) in enumerate(FORGED.items()):
            result = await app.call("cell.forge", frame=frame, key=f"key-{number}")
            assert code(result) == ("E3411" if name == "an error that steers" else "E3404"), name
            assert not (await app.call("cell.forge", frame=frame, key=f"key-{number}")).ok, name
            assert not {"\x1b", "\u202e"} & set(str(result.document())), name
            assert "77" not in str(result.error)
            assert app.journal.reader.all("SELECT count(*) FROM reservation WHERE state = 'executing'", ())[0][0] == 0
            assert app.journal.reader.all("SELECT count(*) FROM hold", ())[0][0] == 0
            ((spent, held),) = app.journal.reader.all("SELECT spent, held FROM spend", ())
            assert 0 <= spent <= 10_000_000, name
            assert held == 0
        assert (await app.call("demo.calm", name="still here")).unwrap() == "still here"
