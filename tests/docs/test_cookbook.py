"""The rules of the Cedar cookbook decide its cases: each of its two cases has another answer where the rule differs."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.api.policy import Policy, run_cases
from interlock.authority.identities import Identity
from interlock.contract.declare import Tool
from interlock.data.schema import Json
from tests.support.calls import until
from tests.support.pages import blocks_of
from tests.support.source import ROOT

PAGE = ROOT / "docs" / "how-to" / "policy-cookbook.md"
FILES = {block.file: block.text for block in blocks_of(PAGE) if block.file}
RULES = {name: text for name, text in FILES.items() if name.startswith("rules/")}
ADD = re.compile(r"identities add (\S+) --name (\S+) --trust (\d+)(?: --group (\S+))?(?: --tenant (\S+))?")


@dataclass
class Cookbook:
    """A data directory with the tools and callers of the page."""

    app: Interlock

    async def run(self, name: str, cases: list[Json], instead: str | None = None) -> list[Json]:
        """The answers to cases under all rules of the page, with another text in place of one of them."""
        text = "\n".join(instead if instead is not None and one == name else text for one, text in RULES.items())
        await Policy(self.app).apply(text, by=self.app.caller)
        await until(lambda: self.app.policy.rules.text == text)  # the file is read again after a moment
        return (await run_cases(self.app, self.app.caller, cases, door="cli"))["cases"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cookbook(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cookbook]:
    folder = tmp_path_factory.mktemp("cookbook")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    spec = importlib.util.spec_from_file_location("cookbook_tools", folder / "tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    async with Interlock.open(folder / "home", housekeeping=False) as app:
        tools: list[Tool[..., Any]] = [one for one in vars(module).values() if isinstance(one, Tool)]
        await app.add(*tools)
        for did, name, trust, group, tenant in ADD.findall(PAGE.read_text()):
            groups = frozenset({group} - {""})
            one = Identity(did=did, name=name, trust=int(trust), groups=groups, tenant=tenant or "local")
            await app.identities.register(one, by=app.caller.acting)
        yield Cookbook(app)


def test_the_page_has_twenty_rules_with_two_cases_each() -> None:
    assert len(RULES) == 20
    assert [name.replace("rules", "cases").replace(".cedar", ".toml") for name in RULES] == [
        name for name in FILES if name.startswith("cases/")
    ]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.usefixtures("module_leaves_nothing_behind")
@pytest.mark.parametrize("name", RULES)
async def test_a_rule_lets_one_call_through_and_stops_another(name: str, cookbook: Cookbook) -> None:
    rule = re.findall(r'@id\("([^"]+)"\)', RULES[name])[0]
    cases: list[Json] = tomllib.loads(FILES[name.replace("rules", "cases").replace(".cedar", ".toml")])["case"]
    for case in cases:
        if "at" in case:
            case["at"] = str(case["at"])
    passes, stops = await cookbook.run(name, cases)
    assert passes["passed"], passes
    assert stops["passed"], stops
    assert stops["answer"] in {"deny", "ask"} - {passes["answer"]}
    if "permit (" in RULES[name]:
        assert passes["rules"] == [rule]
        assert stops["rules"] == []
        # Without the rule nothing permits the first call; if the rule permitted everything, the second would pass too.
        assert [one["answer"] for one in await cookbook.run(name, cases, "")] == ["deny", "deny"]
        whole = f'@id("{rule}")\npermit (principal, action, resource);'
        assert rule in (await cookbook.run(name, cases, whole))[1]["rules"]
    else:
        assert rule not in passes["rules"]
        assert stops["rules"] == [rule]
        # Without the rule the second call passes, or another rule asks a person.
        other = (await cookbook.run(name, cases, ""))[1]
        assert other["answer"] != stops["answer"]
        assert other["answer"] in ("allow", "ask")
