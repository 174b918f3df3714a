"""Our contracts as the standard's documents, and what annotations cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock, demo_tools, tool
from interlock.authority.policy import Question
from interlock.call.prepared import Prepared
from interlock.contract.contract import contract_of
from interlock.contract.declare import tools_in
from interlock.contract.manifest import NetworkPolicy, parse_manifest
from interlock.contract.manifest_tools import from_manifest
from interlock.contract.standard import ToolDeclaration, ToolInterface
from interlock.contract.standard.export import declaration, execution_profile, interface, permission_profile
from interlock.data.schema import Json
from interlock.executors.egress import EgressPolicy
from interlock.gateway.batch import may_overlap
from tests import sample
from tests.sample import Number
from tests.support import isolated_tools as cell
from tests.support.calls import admit

SHIPPED = [*tools_in(vars(demo_tools)), *tools_in(vars(sample))]


@pytest.mark.proves("CONTRACT-09")
@pytest.mark.parametrize("one", SHIPPED, ids=repr)
def test_every_tool_exports_a_declaration_that_the_standard_accepts(one: Any) -> None:
    document = declaration(contract_of(one.manifest)).document()
    ToolDeclaration.parse(document)
    for name in ("schema_version", "tool_id", "namespace", "name", "description", "lifecycle", "tool_kind"):
        assert name in document
    assert document["input_contract"]["model_input_schema"]["type"] == "object"
    ToolInterface.parse(interface(contract_of(one.manifest)).document())


@pytest.mark.proves("CONTRACT-09")
async def test_annotations_that_claim_safety_change_no_decision(tmp_path: Path) -> None:
    plain = sample.send.manifest
    boasting = parse_manifest(
        {**plain.document(), "annotations": {"readOnlyHint": True, "approved": True, "concurrency_safe": True}}
    )
    async with Interlock.open(tmp_path) as app:
        contracts = [contract_of(plain), contract_of(boasting)]
        questions = [
            Question(app.caller, one, one.digest, {"to": "x"}, "invoke", "", "library", None, (0, 0), 0)
            for one in contracts
        ]
        honest, claimed = [app.policy.judge(question) for question in questions]
    assert honest.behavior == claimed.behavior == "ask"


@pytest.mark.proves("CONTRACT-10")
@pytest.mark.parametrize(
    ("state", "lifecycle"),
    [("active", "available"), ("deprecated", "deprecated"), ("sunset", "deprecated"), ("removed", "retired")],
)
def test_an_exported_declaration_says_the_lifecycle_of_its_registry_state(state: Any, lifecycle: str) -> None:
    assert declaration(contract_of(sample.add.manifest), state).document()["lifecycle"] == lifecycle


CLAIMS: list[Json] = [
    {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True, "openWorldHint": False},
    {"approved": True, "requires_approval": False, "permission": "allow"},
    {"concurrency_safe": True, "isolated_calls": True, "mutation_class": "read_only"},
    {"network_policy": {"allowed_domains": ["*.example"]}, "sandbox": None},
]


FORBID = 'forbid (principal, action, resource) when { context.arguments.to == "x" };\n'


@pytest.mark.proves("CONTRACT-09")
@pytest.mark.parametrize(("rules", "behaviors"), [("", ("ask", "allow")), (FORBID, ("deny", "deny"))])
async def test_annotations_change_neither_whether_a_tool_runs_alone_nor_who_is_asked_nor_where_it_gets_to(
    home: Path, rules: str, behaviors: tuple[str, str]
) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        app.home.policy.write_text(app.home.policy.read_text() + rules)
        without: Json = {}
        for number, facts in enumerate(({}, REVERSIBLE)):
            without = await decided(app, 500 + number, facts)
            assert without == {"alone": True, "network": False, "behavior": behaviors[number]}
            for claim, annotations in enumerate(CLAIMS):
                said = await decided(app, 600 + 10 * number + claim, {**facts, "annotations": annotations})
                assert said == without, annotations
        assert await decided(app, 700, REVERSIBLE | {"concurrency_safe": True, "isolated_calls": True}) != without


@pytest.mark.proves("CONTRACT-09")
@pytest.mark.parametrize("one", [cell.double, cell.attempt, sample.add, sample.send], ids=repr)
def test_annotations_change_nothing_about_the_sandbox(one: Any) -> None:
    claims = {"sandbox": False, "tier": 0, "isolated": False, "trusted": True, "openWorldHint": False}
    boasting = parse_manifest({**one.manifest.document(), "annotations": claims})
    assert boasting.annotations == claims
    assert (boasting.sandbox, boasting.tier) == (one.manifest.sandbox, one.manifest.tier)
    plain, claimed = contract_of(one.manifest), contract_of(boasting)
    assert execution_profile(claimed) == execution_profile(plain)
    assert permission_profile(claimed) == permission_profile(plain)
    ready, boasted = (Prepared(contract, one, contract.digest) for contract in (plain, claimed))
    assert (boasted.isolated, boasted.tier) == (ready.isolated, ready.tier)


@pytest.mark.proves("AUTH-10")
def test_a_permission_profile_states_risk_access_sandbox_approval_credential_and_redaction_facts_alone() -> None:
    guarded = {
        **sample.send.manifest.document(),
        "required_permissions": ["filesystem:read:/srv/data", "network:https://api.example", "credential:bank"],
        "sandbox": {"tier": 2, "reads": {"prices": "/srv/prices"}},
        "network_policy": {"allowed_domains": ["api.example"], "allowed_ports": [443]},
        "redact_results": False,
    }
    assert permission_profile(contract_of(parse_manifest(guarded))).document() == {
        "schema_version": "0.2.0",
        "profile_id": "permissions:demo.send@1.0.0",
        "risk": "write_irreversible",
        "data_access": ["filesystem:read:/srv/data", "filesystem:read:/srv/prices"],
        "write_effects": ["CREATE mail:{to}"],
        "network_scope": ["api.example:443"],
        "credentials": ["credential:bank"],
        "sandbox_profile": "tier-2",
        "requires_approval": True,
        "redaction": "schema and names",
        "policy_refs": [],
    }


@pytest.mark.proves("CONTRACT-11")
def test_safety_facts_come_from_the_contract_and_the_unsaid_ones_are_unsafe() -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="x")
    async def silent(number: Number) -> int:
        """Says nothing about itself."""
        return number

    safety = interface(contract_of(silent.manifest)).document()["safety"]
    assert safety["is_read_only"]
    assert safety["is_open_world"]
    assert not safety["is_concurrency_safe"]
    assert "sandbox_profile" not in safety
    assert interface(contract_of(cell.double.manifest)).document()["safety"]["sandbox_profile"] == "tier-0"
    irreversible = interface(contract_of(sample.send.manifest)).document()["safety"]
    assert irreversible["is_destructive"]
    assert irreversible["requires_approval"]


# What is said of a tool's safety, added to a manifest that says nothing of it; and the one decision that it changes.
REVERSIBLE: Json = {"mutation_class": "write_reversible"}
FACTS: list[tuple[Json, Json, str | None]] = [
    ({}, {"concurrency_safe": True}, None),  # what cannot be undone never overlaps anything, whatever it says
    ({}, REVERSIBLE, "behavior"),
    ({}, {"mutation_class": "read_only", "effects": []}, "behavior"),
    ({}, {"network_policy": {"allowed_domains": ["service.example"]}}, "network"),
    ({}, {"external_io": False}, None),
    (REVERSIBLE, {"concurrency_safe": True}, None),  # writes and open-world calls must be isolated besides
    (REVERSIBLE | {"isolated_calls": True}, {"concurrency_safe": True}, "alone"),
    (REVERSIBLE | {"concurrency_safe": True}, {"isolated_calls": True}, "alone"),
    (REVERSIBLE, {"network_policy": {"allowed_domains": ["service.example"]}}, "network"),
    (REVERSIBLE, {"external_io": False}, None),
]


async def decided(app: Interlock, number: int, said: Json) -> Json:
    """What becomes of a tool that says this of itself: does it run alone, may it be called, where does it get to?"""
    document = {**sample.send.manifest.document(), "tool_id": f"tool_{number:03d}", **said}
    made = from_manifest(parse_manifest(document), sample.send.function, {})
    await admit(app, made)
    contract = contract_of(made.manifest)
    request = app.request(contract.manifest.address, {"to": "x"}, key="k")
    asked = Question(app.caller, contract, contract.digest, {"to": "x"}, "invoke", "", "library", None, (0, 0), 0)
    everywhere = NetworkPolicy.model_validate({"allowed_domains": ["service.example"]})
    egress = EgressPolicy(agent=everywhere, manifest=contract.manifest.network_policy)
    return {
        "alone": not await may_overlap(app.catalog, request),
        "behavior": app.policy.judge(asked).behavior,
        "network": egress.objection("service.example", 443) is None,
    }


@pytest.mark.proves("CONTRACT-11")
async def test_a_tool_that_says_nothing_is_governed_as_unsafe_and_each_fact_changes_only_its_own_decision(
    home: Path,
) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        assert await decided(app, 0, {}) == {"alone": True, "behavior": "ask", "network": False}
        for number, (before, fact, changed) in enumerate(FACTS, 1):
            without = await decided(app, 2 * number, before)
            said = await decided(app, 2 * number + 1, before | fact)
            assert {name for name in said if said[name] != without[name]} == ({changed} if changed else set()), fact
