"""Policy engines and registries through the gateway: what they say decides, and when they cannot, nothing runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Caller, Interlock
from interlock.audit.decisions import decision_of
from interlock.authority.decisions import Question
from interlock.authority.identities import Identity
from interlock.call.phases import Decision
from interlock.call.results import Result
from interlock.contract.standard.calls import ToolPermissionDecision
from interlock.core.errors import Failure
from interlock.testing import FakeClock
from tests.sample import TOOLS, world
from tests.support.calls import code, records
from tests.support.engines import FakeEngine, fake
from tests.support.identities import AGENT

__all__ = ["fake"]

REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))


@asynccontextmanager
async def opened(home: Path, **options: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **options) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        yield app


def remote(engine: FakeEngine, **more: Any) -> dict[str, Any]:
    return {"policy_engine": "remote", "policy_url": engine.url, **more}


def http(result: Result) -> int | None:
    return None if result.error is None else result.error.row.http


@pytest.mark.proves("AUTH-04")
async def test_an_engine_elsewhere_decides_by_the_arguments(home: Path, fake: FakeEngine) -> None:
    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        allowed = asked["context"]["arguments"]["value"] == "read"
        return {"decision": "allow" if allowed else "deny", "reason": "deleting is for others"}

    fake.answer = answer
    async with opened(home, **remote(fake)) as app:
        assert (await app.call("demo.echo", value="read")).unwrap() == "read"
        denied = await app.call("demo.echo", value="delete")
        assert (code(denied), http(denied)) == ("E3206", 403)
        assert denied.error is not None
        assert "deleting is for others" in denied.error.message
        (asked, _) = fake.asked
        assert asked["action"] == "tool.invoke"
        assert asked["resource"] == "tool:demo.echo:1.0.0"
        assert "required_permissions" in asked["context"]
        assert "timestamp" in asked["context"]


@pytest.mark.proves("AUTH-04")
async def test_an_engine_that_cannot_answer_stops_the_call_and_is_asked_again(home: Path, fake: FakeEngine) -> None:
    async with opened(home, **remote(fake, policy_timeout_s=2.0)) as app:
        fake.answer = b"\xff"
        for _ in range(2):
            broken = await app.call("demo.increment", name="a", key="k")
            assert (code(broken), http(broken)) == ("E3205", 503)
        assert len(fake.asked) == 2, "a failure is never remembered"
        fake.answer, fake.hang = {"decision": "allow"}, asyncio.Event()
        hung = await app.call("demo.increment", name="a", key="k")
        assert (code(hung), http(hung)) == ("E3205", 503)
        assert world.runs == 0
        fake.hang.set()
        fake.hang = None
        assert (await app.call("demo.increment", name="a", key="k")).unwrap() == 1
    async with opened(home, policy_engine="remote", policy_url="http://127.0.0.1:1") as app:
        down = await app.call("demo.add", a=1)
        assert (code(down), http(down)) == ("E3205", 503)


@pytest.mark.proves("AUTH-04")
@pytest.mark.parametrize(("obligation", "state"), [("require_approval", "awaiting_approval"), ("sing", "denied")])
async def test_an_obligation_is_met_or_the_answer_is_no(
    home: Path, fake: FakeEngine, obligation: str, state: str
) -> None:
    fake.answer = {"decision": "allow", "obligations": [obligation]}
    async with opened(home, **remote(fake)) as app:
        assert (await app.call("demo.increment", name="a", key="k")).state == state
    assert world.runs == 0


@pytest.mark.proves("AUTH-04")
async def test_an_alert_or_a_log_entry_that_an_engine_asks_for_is_made_at_every_call(
    home: Path, fake: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the answer is a cached one. The record keeps what was asked for."""
    async with opened(home, **remote(fake)) as app:
        heard: list[Any] = []
        app.listen(heard.append)
        for obligations in (["alert"], ["log"], ["alert", "log"], []):
            fake.answer = {"decision": "allow", "obligations": obligations}
            for _ in range(2):
                heard.clear()
                caplog.clear()
                result = await app.call("demo.echo", value=str(obligations))
                assert result.ok
                alerts = [one.data["alert"] for one in heard if one.type == "tool.alert"]
                assert alerts == ["POLICY_ALERT"] * ("alert" in obligations)
                lines = [one for one in caplog.records if "asks for a log entry" in one.getMessage()]
                assert len(lines) == ("log" in obligations)
                for line in lines:
                    assert line.getMessage().endswith(f"demo.echo@1.0.0 in call {result.invocation_id}: allow")
                    assert line.levelname == "WARNING"
                (record,) = records(app, result.invocation_id)
                assert sorted(record["decision"].get("obligations", [])) == obligations
        assert len(fake.asked) == 4
        assert app.gateway.observer.metrics["POLICY_ALERT"] == 4


@pytest.mark.proves("AUTH-10")
async def test_what_nobody_settles_is_asked_of_a_person(home: Path, fake: FakeEngine) -> None:
    fake.answer = {"decision": "passthrough", "reason": "not ours"}
    async with opened(home, **remote(fake)) as app:
        pending = await app.call("demo.increment", name="a", key="k")
        assert pending.pending
        (record,) = records(app, kind="pending")
        decision = decision_of(record)
        ToolPermissionDecision.parse(decision)
        assert decision is not None
        assert (decision["behavior"], record["authDecision"]) == ("ask", "REQUIRES_APPROVAL")
        await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=REVIEWER)
        assert (await app.call("demo.increment", name="a", key="k")).unwrap() == 1


@pytest.mark.proves("AUTH-10")
async def test_a_decision_is_not_relied_on_past_its_end(home: Path, fake: FakeEngine) -> None:
    time = FakeClock()
    async with opened(home, clock=time.clock, **remote(fake)) as app:
        for _ in range(3):
            assert (await app.call("demo.add", a=1)).ok
        assert len(fake.asked) == 1
        time.advance(299.999)
        assert (await app.call("demo.add", a=1)).ok
        assert len(fake.asked) == 1
        time.advance(0.001)
        fake.answer = {"decision": "deny", "reason": "no more"}
        denied = await app.call("demo.add", a=1)
        assert (code(denied), len(fake.asked)) == ("E3206", 2)
        kinds = [decision_of(record) for record in records(app)]
        assert [kind["behavior"] for kind in kinds if kind is not None] == ["allow"] * 4 + ["deny"]


class Registry:
    """A registry of identities elsewhere, that says what the test wants."""

    def __init__(self) -> None:
        self.known: dict[str, Identity] = {AGENT: Identity(did=AGENT, kind="agent", name="scout")}
        self.reachable = True

    async def look_up(self, did: str) -> Identity | None:
        if not self.reachable:
            raise Failure("E3001", "the registry does not answer")
        return self.known.get(did)


@pytest.mark.proves("AUTH-03")
async def test_only_an_identity_that_the_registry_knows_now_may_call(home: Path) -> None:
    registry, time = Registry(), FakeClock()
    async with opened(home, registry=registry, clock=time.clock) as app:
        app.issuer_keys.init("EdDSA")

        token = await app.tokens.issue(subject=AGENT, by=app.caller)
        assert (await app.call("demo.add", a=1, token=token)).ok
        assert [record["agentId"] for record in records(app)] == [AGENT]
        scout = registry.known.pop(AGENT)
        time.advance(120)  # longer than anything verified is remembered
        unknown = await app.call("demo.add", a=1, token=token)
        assert (code(unknown), http(unknown)) == ("E3207", 404)
        registry.known[AGENT] = Identity(did=AGENT, kind="agent", name="scout", state="revoked")
        assert code(await app.call("demo.add", a=1, token=token)) == "E3207"
        registry.known[AGENT], registry.reachable = scout, False
        down = await app.call("demo.add", a=1, token=token)
        assert (code(down), http(down)) == ("E3001", 503)
        registry.reachable = True
        assert (await app.call("demo.add", a=1, token=token)).ok


@pytest.mark.proves("AUTH-04", "AUTH-11")
async def test_a_rule_can_match_a_native_operation(home: Path) -> None:
    (home / "policy.cedar").write_text(
        '@id("all") permit (principal, action, resource);\n'
        '@id("no-purge") forbid (principal, action, resource) when { context has native && context.native == "purge" };'
    )
    async with opened(home) as app:
        assert (await app.call("demo.add", {"a": 1}, native={"operation_id": "list"})).ok
        assert (await app.call("demo.add", {"a": 1})).ok
        purged = await app.call("demo.add", {"a": 1}, native={"operation_id": "purge"})
        assert purged.error is not None
        assert (purged.error.code, purged.error.policy_refs) == ("E3206", ("no-purge",))


class _OneDecision:
    """An engine that hands out one and the same object whatever it is asked."""

    def __init__(self) -> None:
        self.decision = Decision(behavior="allow", reason="all of it", rules=("all",), policy="one")

    def cached_for_every_call(self, caller: Caller, digest: str, now: float, now_ms: int) -> Decision | None:
        return self.decision

    def cached(self, question: Question) -> Decision | None:
        return self.decision

    async def decide(self, question: Question) -> Decision:
        return self.decision

    def forget(self, subjects: Collection[str] | None) -> None: ...

    async def close(self) -> None: ...


async def test_an_engine_may_share_a_decision_between_tools_and_callers(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_decision(*_: object) -> _OneDecision:
        return _OneDecision()

    monkeypatch.setattr("interlock.api.authority.engine", one_decision)
    async with opened(home) as app:
        for _ in range(3):  # the first call of a kind goes the long way, those after it the short one
            for tool, arguments in (("demo.add", {"a": 1}), ("demo.shout", {"text": "a"}), ("demo.echo", {"value": 1})):
                for caller in (Caller(id="user:ann"), Caller(id="user:ben", agent="agent:x")):
                    result = await app.call(tool, arguments, caller=caller)
                    (record,) = records(app, result.invocation_id)
                    assert (record["toolId"], record["callerId"]) == (tool, caller.id)
