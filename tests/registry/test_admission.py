"""Admission: eight conditions or nothing, and what is published stays as it is."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Field, Interlock, Tool, tool
from interlock.api.interlock import Admission
from interlock.contract.manifest import parse_manifest
from interlock.contract.manifest_tools import from_manifest
from interlock.core.errors import Failure
from interlock.registry import admission
from interlock.registry.admission import CONJUNCTS, Conjunct, TrialEvidence, examine
from interlock.registry.catalog import contract_digest

Json = dict[str, Any]
AnyTool = Tool[..., Any]
Account = Annotated[str, Field(description="ledger account", examples=["cash"])]
Cents = Annotated[int, Field(description="amount", examples=[250])]

COMPLETE: Json = {
    "tool_id": "balance",
    "namespace": "demo",
    "version": "1.0.0",
    "name": "Balance",
    "description": "Balance of one account, in cents.",
    "provider": "local",
    "protocol": "native",
    "parameters": {
        "type": "object",
        "properties": {"account": {"type": "string", "description": "ledger account", "examples": ["cash"]}},
        "required": ["account"],
    },
    "result_schema": {"type": "integer"},
    "required_permissions": [],
    "timeout_class": "standard",
    "idempotency": {},
    "mutation_class": "read_only",
    "observability": {},
}
# One edit of a complete manifest that makes exactly one condition false; None takes the field away.
SPOIL: dict[Conjunct, Json] = {
    "schema_valid": {"result_schema": None},
    "auth_policy_defined": {"required_permissions": None},
    "timeout_class_assigned": {"timeout_class": "interactive", "timeout_default": 30},
    "idempotency_specified": {"idempotency": None},
    "mutation_class_labeled": {"mutation_class": None},
    "observability_instrumented": {"observability": None},
}


def declared(**edits: Any) -> Json:
    document = COMPLETE | edits
    return {name: value for name, value in document.items() if value is not None}


def working(account: str) -> int:
    return len(account)


def failing(account: str) -> int:
    raise Failure("E3502", "the ledger does not answer")


def made(document: Json, function: Any = working) -> AnyTool:
    return from_manifest(parse_manifest(document), function, {})


def passed(digest: str) -> TrialEvidence:
    return TrialEvidence(digest, True, "examples", "1 cases passed")


async def offer(app: Interlock, candidate: AnyTool) -> Admission:
    return await app.offer(candidate, "library:")


async def with_facts(app: Interlock, number: int, facts: dict[Conjunct, bool]) -> tuple[AnyTool, Admission]:
    """Offer a tool of which exactly these conditions hold."""
    document = declared(tool_id=f"tool_{number:03d}")
    for name, edit in SPOIL.items():
        if not facts[name]:
            document = {key: value for key, value in (document | edit).items() if value is not None}
    if not facts["version_registered"]:
        earlier = made(declared(tool_id=f"tool_{number:03d}", changelog="other content"))
        digest = contract_digest(earlier)
        await app.journal.commit(admission.publish(earlier.manifest, digest, "library:", passed(digest), "test"))
    candidate = made(document, working if facts["contract_tests_passing"] else failing)
    if facts["contract_tests_passing"]:
        evidence = passed(contract_digest(candidate))
        await app.journal.commit(lambda transaction: admission.record_evidence(transaction, evidence))
    return candidate, await offer(app, candidate)


@pytest.mark.proves("REG-01")
async def test_a_version_is_available_iff_all_eight_conditions_hold_and_a_refusal_names_exactly_the_others(
    tmp_path: Path,
) -> None:
    async with Interlock.open(tmp_path) as app:
        for number, held in enumerate(product((False, True), repeat=8)):
            facts = dict(zip(CONJUNCTS, held, strict=True))
            candidate, answer = await with_facts(app, number, facts)
            assert answer.admitted == all(held)
            assert set(answer.verdict.refused) == {name for name, holds in facts.items() if not holds}
            assert all(words for words in answer.verdict.refused.values())
            available = {row.digest for row in await app.catalog.rows() if row.address == candidate.manifest.address}
            assert (contract_digest(candidate) in available) == all(held)


@pytest.mark.proves("REG-01")
async def test_a_refused_version_cannot_be_called_in_any_form(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, made(declared(observability=None, idempotency=None)))
        assert not answer.admitted
        result = await app.call("demo.balance", account="cash")
        assert result.error is not None
        assert result.error.code == "E3101"


@pytest.mark.proves("REG-01")
async def test_a_refusal_lists_everything_that_is_wrong_at_once_and_what_to_do(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        with pytest.raises(Failure) as caught:
            await app.add(made(declared(observability=None, mutation_class=None, required_permissions=None)))
        failure = caught.value
        assert failure.code == "E3105"
        assert failure.details is not None
        wrong = {"auth_policy_defined", "mutation_class_labeled", "observability_instrumented"}
        assert wrong <= set(failure.details["conjuncts"])
        for words in ("say required_permissions", "say mutation_class", "say observability"):
            assert words in failure.message


@pytest.mark.proves("REG-01")
@pytest.mark.parametrize("field", ["parameters", "result_schema", "error_schema"])
def test_each_of_the_three_schemas_must_itself_be_a_schema(field: str) -> None:
    with pytest.raises(Failure) as caught:
        parse_manifest(declared(**{field: {"type": "nonsense"}}))
    assert caught.value.code == "E3105"
    assert caught.value.details is not None
    assert [fault["pointer"] for fault in caught.value.details["faults"]] == [f"/{field}"]


@pytest.mark.proves("REG-01")
async def test_evidence_recorded_for_another_digest_does_not_count(tmp_path: Path) -> None:
    candidate, other = made(declared(), failing), made(declared(changelog="other content"), failing)
    digest = contract_digest(candidate)
    verdict = examine(candidate.manifest, digest, {}, passed(contract_digest(other)))
    assert set(verdict.refused) == {"contract_tests_passing"}
    assert examine(candidate.manifest, digest, {}, passed(digest)).admitted
    async with Interlock.open(tmp_path) as app:
        evidence = passed(contract_digest(other))
        await app.journal.commit(lambda transaction: admission.record_evidence(transaction, evidence))
        assert set((await offer(app, candidate)).verdict.refused) == {"contract_tests_passing"}


@pytest.mark.proves("REG-01")
async def test_evidence_of_failed_tests_does_not_admit(tmp_path: Path) -> None:
    candidate = made(declared(), failing)
    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, candidate)
        assert set(answer.verdict.refused) == {"contract_tests_passing"}
        assert "the ledger does not answer" in answer.verdict.refused["contract_tests_passing"][0]


@pytest.mark.proves("CONTRACT-10")
async def test_the_fallback_kind_is_admitted_with_a_warning(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, made(declared(tool_kind="custom")))
        assert answer.admitted
        assert "custom" in answer.verdict.warnings[0]
        assert not (await offer(app, made(declared(tool_id="other")))).verdict.warnings


EFFECTS: list[Json] = [{"resource": "account:{account}", "operation": "UPDATE"}]


@pytest.mark.proves("EFFECT-02")
@pytest.mark.supports("EFFECT-01")
@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"mutation_class": "write_reversible", "compensable": True}, "lists what it may change"),
        ({"mutation_class": "write_irreversible", "previews": True}, "lists what it may change"),
        ({"effects": EFFECTS}, "read_only tool has no effects"),
        ({"mutation_class": "write_reversible", "effects": EFFECTS}, "compensate"),
        ({"mutation_class": "write_irreversible", "effects": EFFECTS}, "preview"),
        (
            {
                "mutation_class": "write_irreversible",
                "previews": True,
                "effects": [{"resource": "account:{acount}", "operation": "DELETE"}],
            },
            "`acount`, which is not a parameter",
        ),
    ],
)
def test_the_mutation_class_and_the_declared_effects_must_agree(edits: Json, words: str) -> None:
    candidate = made(declared(**edits))
    digest = contract_digest(candidate)
    refused = examine(candidate.manifest, digest, {}, passed(digest)).refused
    assert set(refused) == {"mutation_class_labeled"}
    assert any(words in fault for fault in refused["mutation_class_labeled"])


# Published content stays

REG_03 = pytest.mark.proves("REG-03")


@REG_03
async def test_registering_identical_content_again_changes_nothing(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        [first] = await app.add(made(declared()))
        before = (
            app.journal.reader.all("SELECT * FROM tool_version"),
            app.journal.reader.all("SELECT seq FROM journal"),
        )
        [again] = await app.add(made(declared()))
        assert (first.new, again.new) == (True, False)
        assert before == (
            app.journal.reader.all("SELECT * FROM tool_version"),
            app.journal.reader.all("SELECT seq FROM journal"),
        )


@pytest.mark.supports("REG-02")
@REG_03
async def test_other_content_under_a_published_version_is_a_conflict(tmp_path: Path) -> None:
    changed = declared(result_schema={"type": "number"})
    async with Interlock.open(tmp_path) as app:
        await app.add(made(declared()))
        digest = (await app.catalog.rows())[0].digest
        with pytest.raises(Failure) as caught:
            await app.add(made(changed))
        assert (caught.value.code, caught.value.row.http) == ("E3103", 409)
        assert "new version" in caught.value.message
        assert [row.digest for row in await app.catalog.rows()] == [digest]


@REG_03
async def test_of_two_that_publish_one_version_at_once_the_later_is_refused(tmp_path: Path) -> None:
    one, other = made(declared()), made(declared(changelog="other content"))
    async with Interlock.open(tmp_path) as app:
        for candidate, expected in ((one, None), (other, "E3103")):
            digest = contract_digest(candidate)
            unit = admission.publish(candidate.manifest, digest, "library:", passed(digest), "test")
            if expected is None:
                assert await app.journal.commit(unit)
            else:
                with pytest.raises(Failure) as caught:
                    await app.journal.commit(unit)
                assert caught.value.code == expected
        assert [row.digest for row in await app.catalog.rows()] == [contract_digest(one)]


@REG_03
async def test_many_versions_live_side_by_side_and_an_older_one_never_becomes_current(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        for version in ("1.1.0", "2.0.0", "1.1.1"):
            await app.add(made(declared(version=version)))
        assert (await app.catalog.resolve("demo.balance")).contract.version == "2.0.0"
        for version in ("1.1.0", "2.0.0", "1.1.1"):
            result = await app.call("demo.balance", account="cash", version=version)
            assert (result.ok, result.tool) == (True, f"demo.balance@{version}")


# The bump must hold the change

BUMPS = pytest.mark.proves("REG-06")
TIGHTER: Json = {
    "type": "object",
    "properties": {"account": {"type": "string", "description": "account", "examples": ["cash"], "maxLength": 9}},
    "required": ["account"],
}


@BUMPS
@pytest.mark.parametrize(
    ("version", "says_breaking", "admitted"),
    [
        ("1.0.1", False, False),
        ("1.1.0", False, False),
        ("1.1.0", True, False),
        ("2.0.0", False, False),
        ("2.0.0", True, True),
    ],
)
async def test_a_breaking_change_needs_a_major_bump_that_says_so(
    tmp_path: Path, version: str, says_breaking: bool, admitted: bool
) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(made(declared()))
        answer = await offer(app, made(declared(version=version, parameters=TIGHTER, breaking_changes=says_breaking)))
        assert answer.admitted == admitted
        assert ("version_registered" in answer.verdict.refused) == (not admitted)


@BUMPS
@pytest.mark.parametrize(("version", "admitted"), [("1.0.1", False), ("1.1.0", True), ("2.0.0", True)])
async def test_a_change_that_breaks_nobody_needs_a_minor_bump(tmp_path: Path, version: str, admitted: bool) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(made(declared(parameters=TIGHTER)))
        answer = await offer(app, made(declared(version=version)))
        assert answer.admitted == admitted
        assert ("version_registered" in answer.verdict.refused) == (not admitted)
        assert (await offer(app, made(declared(version="1.0.2", parameters=TIGHTER, changelog="words")))).admitted


PATCH, MINOR, MAJOR = "1.0.1", "1.1.0", "2.0.0"
STATES = {"type": "string", "enum": ["open", "shut"]}
MORE_STATES = {"type": "string", "enum": ["open", "shut", "gone"]}
FIELDS: Json = {
    "type": "object", "properties": {"cents": {"type": "integer"}, "note": {"type": "string"}}, "required": ["cents"],
}  # fmt: skip
FEWER: Json = {"type": "object", "properties": {"cents": {"type": "integer"}}, "required": ["cents"]}
TOLERANT: Json = {"tolerant_output": True}


def _gives(value: Any) -> Any:
    def answers(account: str) -> Any:
        return value

    return answers


@BUMPS
@pytest.mark.parametrize(
    ("before", "after", "value", "least"),
    [
        ({}, {"behaviour_change": True}, 4, MAJOR),
        ({"result_schema": STATES}, {"result_schema": MORE_STATES}, "open", MAJOR),
        ({"result_schema": STATES, **TOLERANT}, {"result_schema": MORE_STATES, **TOLERANT}, "open", MINOR),
        ({"result_schema": STATES}, {"result_schema": STATES, **TOLERANT}, "open", MAJOR),
        ({"result_schema": FIELDS}, {"result_schema": FEWER}, {"cents": 1}, MAJOR),
        ({"result_schema": FEWER}, {"result_schema": FIELDS}, {"cents": 1}, MINOR),
        ({"result_schema": FEWER}, {"result_schema": {"type": "string"}}, None, MAJOR),
        ({}, {"changelog": "only words"}, 4, PATCH),
    ],
)
@pytest.mark.parametrize("version", [PATCH, MINOR, MAJOR])
async def test_registration_holds_outputs_and_declared_behaviour_to_the_same_rule(
    tmp_path: Path, before: Json, after: Json, value: Any, least: str, version: str
) -> None:
    breaking = least == MAJOR
    later = "text" if value is None else value
    async with Interlock.open(tmp_path) as app:
        await app.add(made(declared(**before), _gives({"cents": 1} if value is None else value)))
        answer = await offer(app, made(declared(version=version, breaking_changes=breaking, **after), _gives(later)))
        assert answer.admitted == (version >= least), answer.verdict.refused
        assert ("version_registered" in answer.verdict.refused) == (version < least)
        if breaking and version == MAJOR:
            hushed = declared(version="3.0.0", breaking_changes=False, **after) | {"behaviour_change": True}
            assert "version_registered" in (await offer(app, made(hushed, _gives(later)))).verdict.refused


@BUMPS
async def test_a_patch_is_measured_against_its_own_line_and_not_the_highest_version(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(made(declared()))
        await app.add(made(declared(version="2.0.0", parameters=TIGHTER, breaking_changes=True)))
        assert (await offer(app, made(declared(version="1.0.1", changelog="as 1.0.0")))).admitted
        assert not (await offer(app, made(declared(version="1.0.2", parameters=TIGHTER)))).admitted


@BUMPS
async def test_functions_are_held_to_the_same_rule(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo", name="quote")
    async def first(account: Account) -> int:
        """Quote a price for an account."""
        return 1

    @tool(version="1.1.0", mutation_class="read_only", namespace="demo", name="quote")
    async def second(account: Account, cents: Cents) -> int:
        """Quote a price for an account."""
        return cents

    async with Interlock.open(tmp_path) as app:
        await app.add(first)
        with pytest.raises(Failure) as caught:
            await app.add(second)
        assert caught.value.code == "E3105"
        assert "cents" in caught.value.message
