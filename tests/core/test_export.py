"""Our contracts as the standard's documents, and what annotations cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock, demo_tools, tool
from interlock.authority.policy import Question
from interlock.core.contract import contract_of
from interlock.core.declare import tools_in
from interlock.core.export import declaration, interface
from interlock.core.manifest import parse_manifest
from interlock.core.objects import ToolDeclaration, ToolInterface
from tests import sample
from tests.sample import Number

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
    async with Interlock.open(tmp_path) as lock:
        contracts = [contract_of(plain), contract_of(boasting)]
        questions = [
            Question(lock.caller, one, one.digest, {"to": "x"}, "invoke", "", "library", None, (0, 0), 0)
            for one in contracts
        ]
        honest, claimed = [lock.policy.judge(question) for question in questions]
    assert honest.behavior == claimed.behavior == "ask"
    assert not contract_of(boasting).manifest.concurrency_safe


@pytest.mark.part_of("CONTRACT-11", rest="network decisions, which come with the sandbox")
def test_safety_facts_come_from_the_contract_and_the_unsaid_ones_are_unsafe() -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="x")
    async def silent(number: Number) -> int:
        """Says nothing about itself."""
        return number

    safety = interface(contract_of(silent.manifest)).document()["safety"]
    assert safety["is_read_only"]
    assert safety["is_open_world"]
    assert not safety["is_concurrency_safe"]
    irreversible = interface(contract_of(sample.send.manifest)).document()["safety"]
    assert irreversible["is_destructive"]
    assert irreversible["requires_approval"]
