"""The tool lists of 22 public MCP servers: every tool becomes a contract that admission takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlock.contract.contract import contract_of
from interlock.data.schema import properties_of
from interlock.registry.admission import TrialEvidence, examine
from tests.support.catalogs import definitions, imported

CATALOGS = sorted((Path(__file__).parent / "data" / "catalogs").glob("*.json"))


def test_the_catalogs_are_those_of_22_servers_with_231_tools() -> None:
    assert (len(CATALOGS), sum(len(definitions(path)) for path in CATALOGS)) == (22, 231)


@pytest.mark.proves("REG-10")
@pytest.mark.parametrize("path", CATALOGS, ids=lambda path: path.stem)
def test_every_tool_of_a_catalog_is_admitted_as_irreversible_and_under_a_name_of_its_own(path: Path) -> None:
    done = imported(path)
    assert [(one.definition.name, one.refused) for one in done if one.refused] == []
    addresses: set[str] = set()
    for one in done:
        assert one.manifest is not None
        digest = contract_of(one.manifest).digest
        verdict = examine(one.manifest, digest, {}, TrialEvidence(digest, True, "trial", ""))
        assert verdict.admitted, verdict.refused
        assert one.manifest.mutation_class == "write_irreversible"
        assert one.manifest.execution is not None
        assert one.manifest.execution.native["name"] == one.definition.name
        described = properties_of(one.definition.input_schema)
        for name, part in properties_of(one.manifest.parameters).items():
            assert part.get("description") == described.get(name, {}).get("description"), name
        addresses.add(one.manifest.address)
    assert len(addresses) == len(done)


def test_accepting_hints_makes_reads_of_exactly_those_tools_that_claim_to_be() -> None:
    for path in CATALOGS:
        for one in imported(path, accept_hints=True):
            claimed = one.definition.hints.get("readOnlyHint") is True
            assert (one.judged.mutation_class == "read_only") == claimed, one.definition.name
            assert one.manifest is not None, one.refused


def test_what_the_catalogs_lack_is_told_tool_by_tool() -> None:
    needs = {path.stem: sum(len(one.needs) for one in imported(path)) for path in CATALOGS}
    assert {name: count for name, count in needs.items() if count} == {
        "basic-memory": 3,
        "duckduckgo": 9,
        "firecrawl": 157,
        "git": 22,
        "markitdown": 1,
        "server-everything": 1,
        "server-filesystem": 18,
        "server-github": 51,
        "server-memory": 4,
        "server-postgres": 1,
    }
