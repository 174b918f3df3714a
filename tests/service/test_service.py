"""What operators do through any door: each act needs its scope, stays within its tenant, and leaves its record."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Caller, Failure, Interlock
from interlock.api.audit import Sought
from interlock.api.failed_authentication import Refusals
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.core.clock import iso
from interlock.gateway.reconcile import reconcile
from interlock.store import records
from interlock.testing import FakeClock
from tests.sample import TOOLS
from tests.support.calls import records as found_records
from tests.support.identities import did_of
from tests.support.stores import beside

Json = dict[str, Any]
ALL = frozenset(
    {
        "tools:admin", "tokens:issue", "policy:read", "policy:admin", "audit:read", "upstreams:admin", "secrets:admin",
        "calls:reconcile",
    }
)  # fmt: skip
ROOT = Caller(id="local:root", scopes=ALL)
ELSEWHERE = Caller(id="did:example:ann", tenant="acme", scopes=ALL)


class Place:
    """A service and its clock."""

    def __init__(self, app: Interlock, clock: FakeClock) -> None:
        self.app = app
        self.clock = clock
        self.service = Service(app)


@pytest_asyncio.fixture
async def place(home: Path) -> AsyncGenerator[Place]:
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        app.issuer_keys.init("EdDSA")
        yield Place(app, clock)


async def refusal(attempt: Any) -> Failure:
    try:
        made = attempt()
        if isinstance(made, Awaitable):
            await made
    except Failure as failure:
        return failure
    pytest.fail("it was not refused")


def acts(service: Service) -> list[tuple[str, Callable[[Caller], Any]]]:
    """Every act that needs a scope, and which."""
    text = '@id("all")\npermit (principal, action, resource);\n'
    office = service.administration
    return [
        ("tools:admin", lambda by: service.registration.register({}, by=by)),
        ("tools:admin", lambda by: service.registration.deprecate("demo.add", "1.0.0", by=by)),
        ("tools:admin", lambda by: service.upstreams.all(by=by)),
        ("tools:admin", lambda by: service.upstreams.add("bank", "mcp", {}, by=by)),
        ("tools:admin", lambda by: service.upstreams.remove("bank", by=by)),
        ("tools:admin", lambda by: service.upstreams.refresh("bank", by=by)),
        ("tools:admin", lambda by: service.upstreams.accept("bank", by=by, tools=(), reason="x")),
        ("tokens:issue", lambda by: service.tokens.issue(by=by, agent="bot")),
        ("tokens:issue", lambda by: service.tokens.revoke("x", by=by, reason="x")),
        ("tokens:issue", lambda by: office.identities.list(by=by)),
        ("tokens:issue", lambda by: office.identities.add(by=by, name="x")),
        ("tokens:issue", lambda by: office.identities.revoke("x", by=by, reason="x")),
        ("tokens:issue", lambda by: office.signing_keys.list(by=by)),
        ("tokens:issue", lambda by: office.signing_keys.make(by=by)),
        ("tokens:issue", lambda by: office.signing_keys.retire("x", by=by, reason="x")),
        ("calls:reconcile", lambda by: office.unknown_calls.settle("x", by=by, happened=False, stated=False)),
        ("policy:admin", lambda by: office.settings.show(by=by)),
        ("policy:read", lambda by: service.policy.show(by=by)),
        ("policy:read", lambda by: service.policy.check(text, by=by)),
        (
            "policy:read",
            lambda by: service.policy.explain(by=by, door="x", principal="a", tool="demo.add", arguments={}),
        ),
        ("policy:admin", lambda by: service.policy.apply(text, by=by)),
        ("audit:read", lambda by: service.audit.records(Sought(), by=by, door="x")),
        ("audit:read", lambda by: service.audit.verify(by=by, door="x")),
        ("audit:read", lambda by: service.audit.export(by=by, door="x")),
    ]


async def test_every_act_needs_its_own_scope_and_no_other_will_do(place: Place) -> None:
    head = place.app.journal.reader.all("SELECT MAX(seq) FROM journal")
    for scope, act in acts(place.service):
        also = {"policy:admin"} if scope == "policy:read" else set[str]()
        lacking = Caller(id="local:bob", scopes=ALL - {scope} - also)
        failure = await refusal(functools.partial(act, lacking))
        assert failure.code == "E3206", (scope, failure)
    # What was refused has changed and shown nothing.
    assert place.app.journal.reader.all("SELECT MAX(seq) FROM journal") == head


# Identities and keys


async def test_an_identity_that_is_revoked_is_refused_from_the_answer_on(place: Place) -> None:
    issued = await place.service.tokens.issue(by=ROOT, agent="bot")
    bearer = f"Bearer {issued['token']}"
    await place.service.authenticate(bearer)
    assert place.service.authentication.known(bearer) is not None
    await place.service.administration.identities.revoke("bot", by=ROOT, reason="lost")
    assert place.service.authentication.known(bearer) is None
    assert (await refusal(lambda: place.service.authenticate(bearer))).code == "E3201"


async def test_an_identity_that_is_refused_leaves_no_private_key(place: Place) -> None:
    add = functools.partial(place.service.administration.identities.add, by=ROOT, name="bot")
    assert (await refusal(lambda: add(groups=["no group"]))).code == "E3004"
    assert (await refusal(lambda: add(tenant="a\x1b[2J"))).code == "E3004"
    folder = place.app.home.keys / "identities"
    assert not folder.exists()
    assert (await add(groups=["readers"]))["groups"] == ["readers"]
    assert len(list(folder.iterdir())) == 1


async def test_other_requests_go_on_while_a_key_is_made_and_the_one_who_acts_is_on_record(place: Place) -> None:
    keys, before = place.service.administration.signing_keys, place.app.issuer_keys.names()
    agent = Caller(id="did:example:ann", agent="did:example:bot", scopes=ALL)
    making = asyncio.create_task(keys.make(by=agent, algorithm="RS256"))
    await asyncio.sleep(0)
    # Its turn of the loop is over, and the key is made elsewhere.
    assert place.app.issuer_keys.names() == before
    made = await making
    assert [one["kid"] for one in await keys.list(by=ROOT) if one["signs"]] == [made["kid"]]
    (first,) = [one["kid"] for one in await keys.list(by=ROOT) if not one["signs"]]
    await keys.retire(first, by=agent, reason="old")
    acts = [one for one in found_records(place.app, kind="authority") if str(one.get("act")).startswith("key.")]
    assert [(one["act"], one["by"]) for one in acts] == [("key.made", agent.acting), ("key.revoked", agent.acting)]
    several = await asyncio.gather(*(keys.make(by=agent) for _ in range(3)))
    assert len({one["kid"] for one in several}) == 3
    held = await keys.list(by=ROOT)
    assert held[-1]["signs"]
    assert {one["kid"] for one in held} == {made["kid"], *(one["kid"] for one in several)}


# Tenants


async def test_scopes_that_another_tenant_holds_change_and_show_nothing_of_the_whole_place(place: Place) -> None:
    before = place.app.home.policy.read_text(), place.app.journal.reader.all("SELECT MAX(seq) FROM journal")
    for scope, act in acts(place.service):
        if scope.partition(":")[0] in ("tools", "policy", "calls"):
            failure = await refusal(functools.partial(act, ELSEWHERE))
            assert (failure.code, "`local`" in failure.message) == ("E3206", True), (scope, failure)
    person = Caller(id="did:example:ann", tenant="acme", scopes=ALL, kind="human")
    assert (await refusal(lambda: place.app.lift_quarantine("demo.add@1.0.0", reason="x", by=person))).code == "E3206"
    assert (await refusal(lambda: place.app.upstreams.remove("bank", by=person))).code == "E3206"
    settle = functools.partial(reconcile, place.app.journal, seal=place.app.gateway.storage.outcomes.seal)
    assert (await refusal(lambda: settle(person, "x", happened=True))).code == "E3206"
    assert before == (place.app.home.policy.read_text(), place.app.journal.reader.all("SELECT MAX(seq) FROM journal"))


async def test_an_auditor_sees_the_traces_of_their_own_tenant(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False, trace_ratio=1.0) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        theirs = Caller(id="ann", tenant="acme")
        trace = (await app.call("demo.add", a=1, caller=theirs)).trace_id
        for tenant, sees in (("local", True), ("acme", True), ("other", False)):
            auditor = Caller(id="eve", tenant=tenant, scopes=frozenset({"audit:read"}))
            assert bool(app.gateway.telemetry.trace(trace, auditor)) is sees, tenant


async def test_a_token_never_takes_its_holder_into_another_tenant(place: Place) -> None:
    here, there = did_of("here"), did_of("there")
    await place.app.identities.register(Identity(did=here, name="here", kind="agent"), by="test")
    await place.app.identities.register(Identity(did=there, name="there", kind="agent", tenant="acme"), by="test")
    for did in (here, did_of("nobody")):
        failure = await refusal(lambda did=did: place.service.tokens.issue(by=ELSEWHERE, agent=did))
        assert (failure.code, did in failure.message) == ("E3207", True)
    # Whoever runs the place, and sees all of it, is told whose a name is.
    failure = await refusal(lambda: place.service.tokens.issue(by=ROOT, agent="there"))
    assert (failure.code, f"`there` is of acme: {there}" in failure.message) == ("E3207", True)
    await place.app.identities.register(Identity(did=did_of("there-too"), name="there", kind="agent"), by="test")
    # A name is a tenant's own: taking one tells nothing of another tenant, and leads nobody there.
    for caller, tenant in ((ELSEWHERE, "acme"), (ROOT, "local")):
        for name in ("here", "there"):
            (link,) = (await place.service.tokens.issue(by=caller, agent=name))["chain"]
            assert (link["name"], link["tenant"]) == (name, tenant)
    assert {one.tenant for one in await place.app.identities.all() if one.name == "here"} == {"local", "acme"}
    assert (await refusal(lambda: place.service.tokens.issue(by=ELSEWHERE, agent=did_of("nobody")))).code == "E3207"
    own = await place.service.tokens.issue(by=ELSEWHERE, agent="newcomer")
    assert await place.app.identities.find("newcomer") is None
    made = await place.app.identities.find("newcomer", "acme")
    assert made is not None
    assert (made.tenant, own["valid"]) == ("acme", True)
    assert (await place.service.tokens.issue(by=ROOT, agent=there))["valid"]

    assert (await refusal(lambda: place.service.tokens.revoke(here, by=ELSEWHERE, reason="x"))).code == "E3206"
    assert (await refusal(lambda: place.service.tokens.revoke("some-jti", by=ELSEWHERE, reason="x"))).code == "E3206"
    await place.service.tokens.revoke("newcomer", by=ELSEWHERE, reason="done")
    assert (await place.service.tokens.inspect(own["token"], by=ELSEWHERE))["valid"] is False


async def test_an_auditor_sees_the_records_of_their_own_tenant(place: Place) -> None:
    for tenant in ("acme", "other"):
        await place.app.call("demo.add", a=1, caller=Caller(id=f"ann-{tenant}", tenant=tenant))
    found, _ = await place.service.audit.records(Sought(kind="closed"), by=ELSEWHERE, door="x")
    assert [one["record"]["callerId"] for one in found] == ["ann-acme"]
    every, _ = await place.service.audit.records(Sought(kind="closed"), by=ROOT, door="x")
    assert {one["record"]["tenant"] for one in every} >= {"acme", "other"}
    for whole in (place.service.audit.verify, place.service.audit.export):
        assert (await refusal(lambda whole=whole: whole(by=ELSEWHERE, door="x"))).code == "E3206"


# Audit


async def test_records_are_found_by_tool_caller_time_and_kind(place: Place) -> None:
    ann = Caller(id="local:ann")
    await place.app.call("demo.add", a=1, caller=ann)
    place.clock.advance(60)
    between = iso(place.clock.now_ms)
    await place.app.call("demo.shout", text="x", caller=ann)
    await place.app.call("demo.add", a=1, caller=ROOT)

    async def calls(**sought: str) -> list[tuple[str, str]]:
        found, _ = await place.service.audit.records(Sought(kind="closed", **sought), by=ROOT, door="x")
        return [(one["record"]["toolId"], one["record"]["callerId"]) for one in found]

    assert await calls(caller="local:ann") == [("demo.add", "local:ann"), ("demo.shout", "local:ann")]
    assert await calls(tool="demo.add@1.0.0", since=between) == [("demo.add", "local:root")]
    assert await calls(tool="demo.add", until=between) == [("demo.add", "local:ann")]
    assert await calls(tool="demo.nothing") == []
    noted, _ = await place.service.audit.records(Sought(kind="audit.read"), by=ROOT, door="x")
    assert noted[1]["record"]["sought"] == {"kind": "closed", "tool": "demo.add@1.0.0", "since": between}


@given(st.lists(st.sampled_from(["started", "registry", "late"]), max_size=12), st.integers(1, 5), st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_pages_together_are_the_whole_whatever_was_asked_for(
    place: Place, kinds: list[Any], limit: int, data: st.DataObject
) -> None:
    start = place.app.journal.reader.all("SELECT MAX(seq) FROM journal")[0][0]

    def unit(transaction: Any) -> None:
        for kind in kinds:
            transaction.append(kind, "c", records.plain(kind, "c", transaction.now_ms, tool=kind))

    await place.app.journal.commit(unit)
    tool = data.draw(st.sampled_from([None, "late"]))
    sought = Sought(call="c", tool=tool)
    seen: list[str] = []
    after: int | None = start
    while after is not None:
        found, after = await place.service.audit.records(sought, by=ROOT, door="x", after=after, limit=limit)
        assert len(found) <= limit
        seen += [one["record"]["kind"] for one in found]
    assert seen == [kind for kind in kinds if tool in (None, kind)]


# Policy


async def test_a_policy_in_force_always_has_somebody_to_be_named_for_it(place: Place) -> None:
    text = '@id("all")\npermit (principal, action, resource);\n'
    before = place.app.home.policy.read_text()
    await place.service.policy.apply(text, by=ROOT)
    kept = place.app.home.policy.with_name("policy.cedar.previous")
    assert (place.app.home.policy.read_text(), kept.read_text()) == (text, before)
    found, _ = await place.service.audit.records(Sought(kind="authority", caller="local:root"), by=ROOT, door="x")
    assert [one["record"]["act"] for one in found] == ["policy.applied"]
    place.clock.advance(5)
    assert place.service.policy.show(by=ROOT)["text"] == text
    shown = await place.service.policy.explain(
        by=ROOT, door="x", principal="local:ann", tool="demo.add", arguments={"a": 1}
    )
    assert (shown["behavior"], shown["rules"]) == ("allow", ["all"])


# Registering


async def test_what_is_registered_through_a_door_serves_again_after_a_restart(place: Place, home: Path) -> None:
    from tests.support.rest import COMPLETE

    assert (await place.service.registration.register(COMPLETE, by=ROOT))["new"] is True
    assert (await place.service.registration.register(COMPLETE, by=ROOT))["new"] is False
    failure = await refusal(
        lambda: place.service.registration.register({**COMPLETE, "description": "Another thing"}, by=ROOT)
    )
    assert failure.code == "E3103"
    assert len(list((home / "manifests").iterdir())) == 1
    async with Interlock.open(home, housekeeping=False) as later:
        assert (await later.call("default.echo_tool", message="x")).unwrap() == {"echoed": "x"}


# Health


async def test_readiness_tells_each_dependency_and_nothing_else(place: Place) -> None:
    parts = ["store", "signer", "policy", "sinks", "upstreams", "background"]
    parts += await beside(place.app)
    assert await place.service.health.ready() == ("healthy", dict.fromkeys(parts, "healthy"))
    place.app.home.keys.joinpath("issuer", f"{10**14:015d}.{'k' * 43}.pem").write_bytes(b"damaged")
    # Whoever asks often is told what was found a moment ago.
    assert (await place.service.health.ready())[0] == "healthy"
    place.clock.advance(1)
    found = {"store": "healthy", "signer": "down", "policy": "healthy"}
    assert await place.service.health.ready() == ("down", found)


# Strangers


async def test_those_who_are_turned_away_are_counted_each_and_told_of_together(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    service, telemetry = place.service, place.app.gateway.telemetry
    before = place.app.journal.reader.all("SELECT count(*) FROM journal")
    told = asyncio.Queue[str]()
    telemetry.alerts.listeners.append(lambda alert: told.put_nowait(alert.facts["reason"]))
    service.authentication.refusals = Refusals(telemetry, tell_every_s=0.5)
    for header in (None, "Bearer a.b.c", "Basic x", "Bearer a.b.c", None):
        expected = "E3212" if header is None else "E3203"
        assert (await refusal(functools.partial(service.authenticate, header))).code == expected
    assert telemetry.metrics.signals["IDENTITY_REFUSED"] == 5
    async with asyncio.timeout(60):
        assert [await told.get(), await told.get()] == ["1 × E3203", "2 × E3203"]
    assert "IDENTITY_REFUSED: 2 × E3203" in caplog.text
    service.authentication.refusals = Refusals(telemetry, tell_every_s=3600)
    for _ in range(3):
        await refusal(functools.partial(service.authenticate, "Bearer a.b.c"))
    await service.close()
    assert [told.get_nowait(), told.get_nowait()] == ["1 × E3203", "2 × E3203"]
    assert b'interlock_signal_count{signal="IDENTITY_REFUSED"} 8' in await telemetry.metrics.render()
    assert place.app.journal.reader.all("SELECT count(*) FROM journal") == before


async def test_an_outage_of_ours_is_nobodys_attempt(place: Place) -> None:
    fired: list[str] = []
    place.app.gateway.telemetry.alerts.listeners.append(lambda alert: fired.append(alert.name))
    place.service.authentication.refusals.note(Failure("E3001", "the issuer's keys cannot be read"))
    assert fired == []
    assert place.app.gateway.telemetry.metrics.signals["IDENTITY_REFUSED"] == 0
