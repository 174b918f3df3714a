"""The tiers of the tests: each test has exactly one, and each tier has its command and its time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.tiers import ROOT, TIER_OF, TIERS, tier_of

PAGE = (ROOT.parent / "docs/explanation/test-tiers.md").read_text()
FILES = sorted(ROOT.rglob("test_*.py"))


@pytest.mark.proves("TEST-09")
def test_every_test_has_exactly_one_tier() -> None:
    assert len(FILES) > 100
    found = {path: tier_of(path) for path in FILES}
    assert set(found.values()) == set(TIERS)
    # Nothing is listed that is not there: a directory that was renamed would leave its tests without a tier.
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(TIER_OF)


ONE_OF_EACH = {
    "unit": "core/test_words.py",
    "contract": "registry/test_names.py",
    "integration": "store/test_addresses.py",
    "behavioural": "cli/test_budgets.py",
    "chaos": "faults/test_faults.py",
}


@pytest.mark.proves("TEST-09")
@pytest.mark.parametrize("tier", ["unit", "chaos"])
def test_the_command_of_a_tier_runs_its_tests_and_no_others(tier: str) -> None:
    files = [f"tests/{one}" for one in ONE_OF_EACH.values()]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", "--tier", tier, *files]
    ran = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    collected = {line.partition(":")[0] for line in ran.stdout.splitlines() if line.startswith("tests/")}
    assert collected == {f"tests/{ONE_OF_EACH[tier]}"}


@pytest.mark.proves("TEST-09")
@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_says_when_it_runs(tier: str) -> None:
    (line,) = re.findall(rf"^\| {tier} \|(.*)\|$", PAGE, re.MULTILINE)
    command, when = (part.strip() for part in line.split("|")[-2:])
    assert command == f"`./dev test --tier {tier}`"
    assert when
