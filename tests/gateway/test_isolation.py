"""Sandboxed tools through the gateway: they run where they can do no harm, and end as what they did."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import pytest_asyncio

from interlock import Caller, Failure, Interlock, Tool, tool
from interlock.api.service import Ask, Service
from interlock.approvals import standing
from interlock.approvals.standing import Standing
from interlock.authority.dids import make_did_key
from interlock.authority.identities import Identity
from interlock.authority.keys import make_private
from interlock.call.connector import Connector, RemoteCall
from interlock.call.prepared import Prepared
from interlock.contract.contract import contract_of
from interlock.contract.manifest import ResourceLimits, parse_manifest
from interlock.contract.manifest_tools import without_function
from interlock.contract.standard import ExecutionKind, ToolExecutionProfile
from interlock.contract.standard.export import execution_profile
from interlock.data.schema import Json
from interlock.registry.source import load
from tests import processes
from tests.sample import Text
from tests.support import isolated_tools as cell
from tests.support.calls import admit, code, publish, records, until
from tests.support.programs import TEXT, manifest, written

TOOLS = (
    cell.double, cell.attempt, cell.count, cell.drop, cell.lent, cell.dying, cell.unbound, cell.fill, cell.fill_more,
    cell.hoard, cell.holding, cell.sends,
)  # fmt: skip
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))


@pytest_asyncio.fixture
async def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Interlock]:
    monkeypatch.setenv("A_SERVERS_SECRET", "canary-7731")
    async with Interlock.open(tmp_path / "home", housekeeping=False) as opened:
        for one in TOOLS:
            await opened.journal.commit(publish(one))
            opened.catalog.attach(one)
        yield opened


@pytest.mark.proves("EXEC-03")
async def test_a_tool_runs_isolated_and_answers_as_any_other(app: Interlock) -> None:
    assert (await app.call("cell.double", n=21)).unwrap() == 42
    assert code(await app.call("cell.double", n="x")) == "E3301"
    (record, _) = records(app)
    assert record["phases"] == ["request", "validate", "authorize", "execute", "verify", "return"]


@pytest.mark.proves("CONTRACT-01")
async def test_nothing_leaves_a_sandbox_that_is_no_part_of_the_result_by_its_schema(app: Interlock) -> None:
    heard: list[Any] = []
    app.listen(lambda event: heard.append(event.data["value"]) if event.type.endswith("partial_result") else None)
    assert (await app.call("cell.sends", what="an element")).unwrap() == [1]
    assert heard == [9]
    assert code(await app.call("cell.sends", what="something else")) == "E3303"
    assert heard == [9]


@pytest.mark.proves("EXEC-04")
@pytest.mark.proves("EXEC-05")
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
async def test_a_hostile_tool_ends_as_what_it_did(app: Interlock, what: str, expected: str) -> None:
    result = await app.call("cell.attempt", what=what, timeout_s=2 if what == "time" else None)
    assert code(result) == expected
    told = str(result.document())
    assert "/a/path" not in told
    assert "Traceback" not in told
    assert (await app.call("cell.double", n=1)).unwrap() == 2


@pytest.mark.proves("EXEC-04")
def test_storage_is_bounded_where_nothing_is_said() -> None:
    said = cell.fill.manifest
    assert said.sandbox is not None
    assert said.resource_limits == ResourceLimits.model_validate(
        {"cpu": "1", "memory": "512Mi", "ephemeral_storage": "1Gi"}
    )
    assert (said.resource_limits.storage_bytes, said.sandbox.tmp_bytes) == (1 << 30, 100 << 20)


@pytest.mark.proves("EXEC-04")
@pytest.mark.parametrize(("tool", "most"), [("cell.fill", 100), ("cell.fill_more", 1024)])
async def test_tmp_takes_as_much_as_is_allowed_and_no_more(app: Interlock, tool: str, most: int) -> None:
    assert (await app.call(tool, number=most)).unwrap() == most
    full = await app.call(tool, number=most + 1)
    assert full.error is not None
    assert (full.error.code, full.error.row.error_code) == ("E3407", "RESOURCE_EXHAUSTED")
    assert "storage" in full.error.message
    assert (await app.call("cell.double", n=1)).ok


@pytest.mark.part_of("EXEC-04", rest="limits and allowance for Python tools without `sandbox`, which are trusted code")
async def test_no_call_gets_more_than_its_agent_has_at_all(app: Interlock) -> None:
    refused = await app.call("cell.hoard", n=1)
    assert refused.error is not None
    assert (refused.error.code, refused.error.row.error_code) == ("E3407", "RESOURCE_EXHAUSTED")
    assert "allowance" in refused.error.message


@pytest.mark.part_of(
    "AUTH-09",
    rest="a tool that runs in process can read the server's memory, its files, and the variables of its environment"
    " whose names do not look like credentials or that the operator keeps, in a program that uses the library all of"
    " them, and reach the metadata address",
)
async def test_no_right_of_the_server_reaches_the_tool(app: Interlock) -> None:
    seen = (await app.call("cell.attempt", what="environment")).unwrap()
    assert "A_SERVERS_SECRET" not in seen
    assert "canary-7731" not in seen
    # As whoever the server runs, a program inside is somebody else.
    uid = (await app.call("cell.attempt", what="program")).unwrap().strip()
    assert uid != "0"
    network = await app.call("cell.attempt", what="network")
    assert code(network) == "E3406"
    assert records(app, kind="violation")
    assert code(await app.call("cell.attempt", what="files")) == "E3401"


async def test_what_a_tool_reports_from_inside_counts_as_if_it_had_run_outside(app: Interlock) -> None:
    heard: list[Any] = []
    first = await app.call("cell.count", {"name": "a"}, key="k", session="s", on_progress=heard.append)
    assert first.unwrap() == 1
    assert [one["message"] for one in heard] == ["started", "counting"]
    assert (await app.call("cell.count", {"name": "a"}, key="k", session="s")).replayed
    assert (await app.call("cell.count", {"name": "a"}, key="k2", session="s")).unwrap() == 2
    changes = [record["affectedResource"] for record in records(app, kind="mutation")]
    assert changes == ["counter:a", "session:count"] * 2
    preview = (await app.call("cell.count", name="a", dry_run=True)).unwrap()
    assert preview["impact"] != f"looked at from uid {os.getuid()}" or os.getuid() != 0
    assert (await app.undo(first.invocation_id, key="u")).ok


async def test_a_preview_inside_that_is_none_is_told_like_one_outside(app: Interlock) -> None:
    failure = (await app.call("cell.drop", name="a", dry_run=True)).error
    assert failure is not None
    assert failure.code == "E3401"
    assert "the tool's preview returned `str`; a preview handler returns Preview(" in failure.message


@pytest.mark.proves("EXEC-07")
async def test_a_credential_reaches_the_tool_by_no_way_that_others_can_see(app: Interlock) -> None:
    await app.secrets.set("cell/token", "a-lent-canary", by="local:test")
    result = (await app.call("cell.lent", what="x")).unwrap()
    assert result == "13 [REDACTED] []"


@pytest.mark.proves("EXEC-07")
async def test_a_tool_that_dies_with_a_credential_leaves_no_image_of_its_memory(
    app: Interlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await app.secrets.set("cell/token", "a-lent-canary", by="local:test")
    # A core of a byte is none: the kernel neither writes it nor pipes it to anybody.
    assert (await app.call("cell.dying", what="look")).unwrap() == "True False"
    assert code(await app.call("cell.dying", what="abort")) == "E3404"
    left = [path for path in tmp_path.rglob("*") if path.is_file()]  # noqa: ASYNC240 - a test may wait for its disk
    assert left
    assert not any("core" in path.name or b"a-lent-canary" in path.read_bytes() for path in left)


@pytest.mark.proves("AUDIT-07")
@pytest.mark.proves("EXEC-07")
async def test_while_a_program_runs_nobody_sees_its_parameters_or_its_credential(
    app: Interlock, tmp_path: Path
) -> None:
    script = "read given; cat $HOME/.secrets/cell.token >/dev/null; sleep 1; echo done"
    quiet = manifest(
        "quiet", ["sh", "-c", script], parameters={"text": TEXT}, execution={"stdin": "text"},
        required_permissions=["credentials:cell/token"],
    )  # fmt: skip
    _, (tool,) = load(written(tmp_path / "quiet.json", quiet))
    await admit(app, tool)
    await app.secrets.set("cell/token", "a-lent-canary", by="local:test")
    looks = 0
    while not looks:  # on a busy machine a program may end before anybody has looked
        call = asyncio.ensure_future(app.call("prog.quiet", text="a-sent-canary"))
        while not call.done():
            shown = b" ".join((*processes.told("cmdline"), *processes.told("environ")))
            looks += script.encode() in shown
            assert b"a-lent-canary" not in shown
            assert b"a-sent-canary" not in shown
            await asyncio.sleep(0.05)
        assert (await call).unwrap() == "done\n"


@pytest.mark.proves("EXEC-02")
async def test_full_access_is_asked_for_at_every_call(app: Interlock) -> None:
    pending = await app.call("cell.unbound", what="x")
    assert pending.pending
    await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=REVIEWER)
    assert (await app.call("cell.unbound", what="x")).unwrap() == "x"
    assert (await app.call("cell.unbound", what="x")).pending


@pytest.mark.proves("EXEC-02")
async def test_nobody_agrees_to_full_access_in_advance(app: Interlock) -> None:
    bounds: dict[str, Any] = {
        "caller": app.caller.acting, "arguments": {"what": "x"}, "uses": 5,
        "expires_ms": app.clock.now_ms() + 60_000,
    }  # fmt: skip
    with pytest.raises(Failure, match="tier 3") as refused:
        await app.standing_approvals.grant("cell.unbound", by=REVIEWER, **bounds)
    assert refused.value.code == "E3004"
    # One that is there all the same, from a version of the tool that asked for less, covers no call.
    wish = Standing(
        id="sta_old", tenant=app.caller.tenant, tool="cell.unbound", versions="1.0.0", granted_by=REVIEWER.id, **bounds
    )
    groups = frozenset({"approvers"})
    await app.journal.commit(standing.grant(wish, REVIEWER, groups, app.clock.now_ms(), ()))
    assert (await app.call("cell.unbound", what="x")).pending
    assert [one.used for one in await app.standing_approvals.list()] == [0]


# Tiers


WRITES: dict[str, Any] = {
    "mutation_class": "write_irreversible",
    "effects": [{"resource": "file:/srv/data", "operation": "CREATE"}],
    "required_permissions": ["filesystem:write:/srv/data"],
}


@pytest.mark.proves("EXEC-02")
@pytest.mark.parametrize(
    ("said", "tier"),
    [
        ({}, 0),
        ({"sandbox": {}}, 0),
        ({"sandbox": {"tier": 2}}, 0),
        ({"sandbox": {"reads": {"hosts": "/etc/hosts"}}}, 1),
        ({"sandbox": {"tier": 2, "reads": {"hosts": "/etc/hosts"}}}, 1),
        ({"execution": {"env": {"LANG": "C"}}}, 1),
        ({"required_permissions": ["filesystem:read:/srv/data"]}, 1),
        (WRITES, 1),
        ({"required_permissions": ["network:https://a.example"]}, 2),
        ({"network_policy": {"allowed_domains": ["a.example"]}}, 2),
        ({"network_policy": {"allowed_domains": ["a.example"], "deny_all_egress": True}}, 0),
        ({"network_policy": {"allowed_domains": ["a.example"]}, "sandbox": {"tier": 3}}, 3),
        ({"sandbox": {"tier": 0, "reads": {"hosts": "/etc/hosts"}}}, None),
        ({"sandbox": {"tier": 1}, "network_policy": {"allowed_domains": ["a.example"]}}, None),
    ],
)
def test_a_tool_gets_the_lowest_tier_that_covers_what_it_asks_for(
    tmp_path: Path, said: dict[str, Any], tier: int | None
) -> None:
    document = written(tmp_path / "one.json", manifest("one", ["true"], **said))
    if tier is None:
        with pytest.raises(Failure, match="/sandbox/tier"):
            load(document)
        return
    _, (one,) = load(document)
    assert one.manifest.tier == tier
    contract = contract_of(one.manifest)
    assert Prepared(contract, one, "").tier == tier
    assert execution_profile(contract).sandbox_profile == f"tier-{tier}"


@pytest.mark.proves("EXEC-02")
async def test_what_comes_through_a_door_starts_at_tier_0(app: Interlock) -> None:
    register = Service(app).registration.register
    wishes: tuple[dict[str, Any], ...] = (
        {"execution": {"env": {"LANG": "C"}}},
        {"network_policy": {"allowed_domains": ["a.example"]}},
        {"sandbox": {"reads": {"hosts": "/etc/hosts"}}},
        {"sandbox": {"tier": 3}},
        {"required_permissions": ["filesystem:read:/srv/data"]},
        {"required_permissions": ["filesystem:write:/srv/data"]},
        {"required_permissions": ["network:https://a.example"]},
    )
    for number, said in enumerate(wishes):
        with pytest.raises(Failure, match="on the machine"):
            await register(manifest(f"one{number}", ["true"], **said), by=app.caller)
    await register(manifest("plain", ["printf", "x"]), by=app.caller)
    assert (await app.catalog.resolve("prog.plain")).prepared.tier == 0


# Profiles


@pytest.mark.proves("AUTH-07")
async def test_neither_a_sandbox_nor_an_upstream_is_handed_more_scopes_than_its_tool_requires(app: Interlock) -> None:
    """Also where the caller holds more, and a token with more."""
    needed, wide = frozenset({"a:read", "b:read"}), frozenset({"a:read", "b:read", "c:read", "admin"})
    far = Receiving()
    app.connect_through(lambda _: cast("Connector", far))
    native = {"kind": "upstream", "target": "far", "native": {"name": "x"}}
    said = manifest("far", ["far"], parameters={}, namespace="kind", protocol="custom", required_scopes=sorted(needed))
    one = without_function(parse_manifest({**said, "execution": native}))
    await admit(app, one)
    app.issuer_keys.init("EdDSA")
    agent = make_did_key(make_private("EdDSA").public_key())
    await app.identities.register(Identity(did=agent, trust=90), by="test")
    token = await app.tokens.issue(subject=agent, scopes=sorted(wide), by=app.caller)
    for holder in (Caller(id="user:ann", scopes=wide), await app.caller_of(token)):
        assert holder.scopes == wide
        assert (await app.call("cell.holding", caller=holder)).unwrap() == sorted(needed)
        assert (await app.call("kind.far", caller=holder)).unwrap() == "done"
        assert far.callers.pop().scopes == needed
        for name in ("cell.holding", "kind.far"):
            lacking = replace(holder, scopes=frozenset({"a:read", "c:read"}))
            assert code(await app.call(name, caller=lacking)) == "E3206"
    assert not far.callers


class Receiving:
    """A connector that keeps the callers it is handed."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    async def call(self, call: RemoteCall) -> str:
        self.callers.append(call.caller)
        return "done"

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return None


class Waiting:
    """An upstream that answers when it is told to."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def call(self, call: RemoteCall) -> str:
        await self.answer.wait()
        return "done"

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return None


far = Waiting()
FIXED: dict[str, Any] = {"version": "1.0.0", "mutation_class": "read_only", "namespace": "kind"}


async def held(text: Text) -> str:
    """Wait until it is let go."""
    await far.answer.wait()
    return text


def of_kind(kind: str) -> Tool[..., Any]:
    """A tool of each kind, none of which can be cancelled."""
    here: dict[str, dict[str, Any]] = {
        "local": {},
        "native": {"tool_kind": "native_tool"},
        "browser": {"tool_kind": "browser_action"},
        "model": {"tool_kind": "model_task"},
        "peer_agent": {"tool_kind": "peer_agent_tool"},
        "hybrid": {"external_service": "bank"},
    }
    if kind in here:
        return tool(name=f"{kind}_tool", cancellable=False, **FIXED, **here[kind])(held)
    program = manifest(f"{kind}_tool", ["sleep", "0.3"], parameters={}, namespace="kind", cancellable=False)
    if kind == "shell":
        return without_function(parse_manifest({**program, "sandbox": {}}))
    native = {"kind": "upstream", "target": "far", "native": {"name": "x"}}
    protocol = {"mcp": "mcp", "api": "openapi", "remote": "custom"}[kind]
    return without_function(parse_manifest({**program, "execution": native, "protocol": protocol}))


@pytest.mark.proves("EXEC-01")
@pytest.mark.parametrize("kind", get_args(ExecutionKind))
async def test_a_profile_states_what_can_be_done_and_the_rest_is_answered_as_unsupported(
    app: Interlock, kind: str
) -> None:
    far.answer = asyncio.Event()
    app.connect_through(lambda _: cast("Connector", far))
    one = of_kind(kind)
    await admit(app, one)
    profile = execution_profile(contract_of(one.manifest)).document()
    ToolExecutionProfile.parse(profile)
    assert (profile["kind"], profile["timeout_ms"]) == (kind, 5000)
    assert profile.get("sandbox_profile") == ("tier-0" if kind == "shell" else None)
    assert profile["supports_progress"] == (kind not in ("shell", "api", "remote"))
    assert profile["supports_abort"] == (kind == "shell")
    assert not profile["supports_cancellation"]
    assert not profile["supports_resume"]
    calls = Service(app).calls
    arguments = {} if kind in ("shell", "mcp", "api", "remote") else {"text": "a"}
    call = await calls.start(Ask(one.manifest.address, arguments), app.caller, door="library")
    await until(lambda: app.gateway.runner.active.get(call))
    assert await calls.cancel(call, app.caller) == "unsupported"
    with pytest.raises(Failure) as refused:
        await calls.resume(call, app.caller)
    assert (refused.value.code, refused.value.row.error_class) == ("E3109", "capability_gap")
    far.answer.set()
    await until(lambda: calls.result(call, app.caller))
    ended = await calls.result(call, app.caller)
    assert ended is not None
    assert ended.ok, "nobody stopped it"
    assert await calls.cancel(call, app.caller) == "finished"
    await app.journal.commit(lambda _: None)  # the answers are on record by now
    assert [one["answer"] for one in records(app, call, kind="cancel")] == ["unsupported", "finished"]
    heard: list[Any] = []
    followed = await app.call(one.manifest.address, arguments, on_progress=heard.append)
    assert followed.ok
    unsupported = "PROGRESS_UNSUPPORTED" in followed.metadata.get("warnings", ())
    assert unsupported != profile["supports_progress"]
    assert heard == []


@pytest.mark.proves("EXEC-01")
async def test_what_a_profile_states_is_offered(app: Interlock) -> None:
    far.answer = asyncio.Event()
    await admit(app, one := tool(name="loose_tool", **FIXED)(held))
    profile = execution_profile(contract_of(one.manifest))
    assert (profile.supports_abort, profile.supports_cancellation) == (True, True)
    calls = Service(app).calls
    call = await calls.start(Ask("kind.loose_tool", {"text": "a"}), app.caller, door="library")
    await until(lambda: app.gateway.runner.active.get(call))
    assert await calls.cancel(call, app.caller) == "canceled"
    await until(lambda: calls.result(call, app.caller))
    ended = await calls.result(call, app.caller)
    assert ended is not None
    assert ended.state == "canceled"
    heard: list[Any] = []
    assert (await app.call("cell.count", {"name": "a"}, key="k", on_progress=heard.append)).ok
    assert [one["message"] for one in heard] == ["started", "counting"]


@pytest.mark.proves("EXEC-01")
@pytest.mark.parametrize(
    "wrong", [{"kind": "cloud"}, {"timeout_ms": -1}, {"supports_abort": "yes"}, {"profile_id": ""}, {"kind": None}]
)
def test_a_profile_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    fine = execution_profile(contract_of(cell.double.manifest)).document()
    ToolExecutionProfile.parse(fine)
    with pytest.raises(Failure):
        ToolExecutionProfile.parse(fine | wrong)
