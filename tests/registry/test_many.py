"""A home with very many tools: what is asked for is read, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Interlock
from interlock.api import doctor
from interlock.api.policy_faults import faults_of
from interlock.api.service import Service
from interlock.authority import policy_check
from interlock.contract.contract import admitted_contract, parse_contract
from interlock.store.port import Transaction
from interlock.store.tables import tool_version
from interlock.store.tools import bump_epoch
from tests.sample import TOOLS

MANY = 600
KINDS = 3  # reads, writes that can be undone, and others
PAGE = 50


def _offered(transaction: Transaction, number: int, text: str = "") -> None:
    """One more tool, like `demo.add` but for its name."""
    columns = [one.name for one in tool_version.columns]
    row = transaction.one(f"SELECT {', '.join(columns)} FROM tool_version WHERE address = 'demo.add'")
    assert row is not None
    known = dict(zip(columns, row, strict=True))
    manifest = orjson.loads(known["manifest"])
    manifest["namespace"] = "many"
    manifest["tool_id"] = f"add_{number:05}"
    manifest["description"] += text
    known |= {
        "address": f"many.add_{number:05}", "digest": f"{number:05}{text}", "manifest": orjson.dumps(manifest).decode(),
    }  # fmt: skip
    names, holders = ", ".join(known), ", ".join("?" * len(known))
    transaction.execute(
        "DELETE FROM tool_version WHERE address = ? AND version = ?", (known["address"], known["version"])
    )
    transaction.execute(f"INSERT INTO tool_version ({names}) VALUES ({holders})", tuple(known.values()))


async def _offer(app: Interlock, *numbers: int, text: str = "") -> None:
    def unit(transaction: Transaction) -> None:
        for number in numbers:
            _offered(transaction, number, text)
        bump_epoch(transaction, [f"many.add_{number:05}" for number in numbers])

    await app.journal.commit(unit)
    await app.catalog.forget()


class Counted:
    """How many contracts were compiled and how many manifests were read since it was last asked."""

    def __init__(self, app: Interlock, patch: pytest.MonkeyPatch) -> None:
        self.parsed = self.read = 0
        self._reader = app.journal.reader

        def read(text: str, digest: str) -> Any:
            self.parsed += 1
            return admitted_contract(text, digest)

        patch.setattr("interlock.contract.contract.admitted_contract", read)
        patch.setattr(app.journal, "reader", self)

    def all(self, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        rows = self._reader.all(statement, parameters)
        if "manifest" in statement:
            self.read += len(rows)
        return rows

    def one(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        return next(iter(self.all(statement, parameters)), None)

    def each(self, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        return iter(self.all(statement, parameters))

    def since(self) -> tuple[int, int]:
        found = self.parsed, self.read
        self.parsed = self.read = 0
        return found


async def test_pages_compile_one_tool_of_each_kind_and_a_change_of_one_tool_reads_that_tool(
    app: Interlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _offer(app, *range(MANY))
    counted, tools = Counted(app, monkeypatch), Service(app).tools
    seen: list[str] = []
    cursor = None
    while True:
        page = await tools.page(app.caller, cursor, PAGE)
        seen += [one.row.address for one in page.versions]
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == sorted(seen)
    assert len(seen) == MANY + len(TOOLS)
    # The policy is asked about one tool of each kind that its rules can tell apart.
    assert counted.since() == (KINDS, MANY + len(TOOLS))
    assert all(one.contract.ref.startswith("demo.") for one in (await tools.page(app.caller, None, 3)).versions)
    assert counted.since() == (1, 0)  # two of them were asked about
    await _offer(app, 7, text=" It is another one now.")
    found = (await tools.page(app.caller, "many.add_00006", 1)).versions[0]
    assert counted.since() == (0, 1)
    assert found.contract.manifest.description.endswith("another one now.")
    assert all(one.contract.ref.startswith("demo.") for one in (await tools.page(app.caller, None, 3)).versions)
    assert counted.since() == (1, 0)


async def test_a_page_looks_at_as_many_tools_as_it_shows(app: Interlock, monkeypatch: pytest.MonkeyPatch) -> None:
    await _offer(app, *range(MANY))
    tools = Service(app).tools
    looked: list[str] = []
    holds = app.gateway.quarantine.holds

    def look(digest: str) -> bool:
        looked.append(digest)
        return holds(digest)

    monkeypatch.setattr(app.gateway.quarantine, "holds", look)
    for cursor in (None, "many.add_00300", "many.add_00500"):
        looked.clear()
        assert len((await tools.page(app.caller, cursor, PAGE)).versions) == PAGE
        assert len(looked) == PAGE + 1


RULES = """
@id("all") permit (principal, action, resource);
@id("named") forbid (principal, action == Action::"demo.add", resource) when { context.arguments.a > 5 };
"""
LOOSE = (
    '@id("loose") permit (principal, action, resource)'
    ' when { context.arguments has %s && context.arguments.%s == "x" };'
)
TEXTS = (
    RULES,
    '@id("wrong") permit (principal, action == Action::"demo.add", resource) when { context.arguments.a == "x" };',
    '@id("gone") permit (principal, action == Action::"demo.gone", resource == Tool::"demo.nothing");',
    '@id("there") permit (principal, action, resource == Tool::"many.add_00003");',
    LOOSE % ("a", "a"),
    LOOSE % ("text", "text"),
    LOOSE % ("nobody_has_this", "nobody_has_this"),
    "permit (",
)


@pytest.mark.parametrize("text", TEXTS)
async def test_a_policy_is_found_as_right_or_wrong_as_by_all_contracts(app: Interlock, text: str) -> None:
    await _offer(app, *range(5))
    contracts = [one.contract for one in await app.catalog.everything()]
    whole = policy_check.check(text, contracts, set())
    assert [(one.line, one.rule, one.grave) for one in await faults_of(app, text)] == [
        (one.line, one.rule, one.grave) for one in whole
    ]


async def test_checking_a_policy_compiles_the_contracts_that_it_depends_on(
    app: Interlock, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _offer(app, *range(MANY))
    counted = Counted(app, monkeypatch)
    assert [fault for fault in await faults_of(app, RULES) if fault.grave] == []
    assert counted.since()[0] == 1
    app.home.policy.write_text(RULES)
    compiled: list[Any] = []

    def parse(document: Any) -> Any:
        compiled.append(document)
        return parse_contract(document)

    monkeypatch.setattr("interlock.contract.contract.parse_contract", parse)
    findings = [one for one in doctor.examine(app.home, machine=False) if one.name == "policy"]
    assert [one.status for one in findings if one.status == "broken"] == []
    assert len(compiled) == 1
