"""The tiers of the tests: each test has exactly one, and each tier has its command and its time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.tiers import BEHAVIOUR, ON_POSTGRES, ROOT, TIER_OF, TIERS, tier_of

PAGE = (ROOT.parent / "docs/explanation/test-tiers.md").read_text()
FILES = sorted(ROOT.rglob("test_*.py"))


@pytest.mark.proves("TEST-09")
def test_every_test_has_exactly_one_tier() -> None:
    assert len(FILES) > 100
    found = {path: tier_of(path) for path in FILES}
    assert TIERS == ("unit", "contract", "integration", "behavioural", "chaos")
    assert set(found.values()) == set(TIERS)
    # Nothing is listed that is not there: a directory that was renamed would leave its tests without a tier.
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(TIER_OF)


def test_what_runs_on_postgresql_is_there_and_the_page_names_each_directory() -> None:
    for path in (*BEHAVIOUR, *ON_POSTGRES):
        file, _, name = path.partition("::")
        assert (ROOT.parent / file).exists(), path  # pytest ends without a word where a path is not there
        assert not name or f"def {name}(" in (ROOT.parent / file).read_text(), path
        assert path.startswith(BEHAVIOUR), path
    for path in BEHAVIOUR:
        assert f"`{path.removeprefix('tests/')}`" in PAGE, path


ONE_OF_EACH = {
    "unit": "core/test_formatting.py",
    "contract": "registry/test_names.py",
    "integration": "store/test_port.py",
    "behavioural": "cli/test_budgets.py",
    "chaos": "faults/test_faults.py",
}


# One process for all of them: most of the time goes into the imports of the tests.
COLLECT = """
import sys, pytest
for tier in {tiers}:
    print("tier", tier, flush=True)
    assert pytest.main(["-n", "0", "-q", "--collect-only", "--tier", tier, *{files}]) == 0
"""


@pytest.mark.proves("TEST-09")
def test_the_command_of_a_tier_runs_its_tests_and_no_others() -> None:
    source = COLLECT.format(tiers=list(ONE_OF_EACH), files=[f"tests/{one}" for one in ONE_OF_EACH.values()])
    ran = subprocess.run([sys.executable, "-c", source], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    found: dict[str, set[str]] = {}
    tier = ""
    for line in ran.stdout.splitlines():
        if line.startswith("tier "):
            tier = line.removeprefix("tier ")
        elif line.startswith("tests/"):
            found.setdefault(tier, set()).add(line.partition(":")[0])
    assert found == {tier: {f"tests/{path}"} for tier, path in ONE_OF_EACH.items()}


@pytest.mark.part_of(
    "TEST-09",
    rest="that the tiers run at the stated times: continuous integration runs all of them for every change, and no"
    " nightly run is set up in the repository",
)
@pytest.mark.parametrize(
    ("tier", "cadence"),
    [
        ("unit", "on every save"),
        ("contract", "before every commit"),
        ("integration", "before every merge"),
        ("behavioural", "before every merge"),
        ("chaos", "before every merge, and with `--thorough` every night"),
    ],
)
def test_a_tier_says_when_it_runs(tier: str, cadence: str) -> None:
    (line,) = re.findall(rf"^\| {tier} \|(.*)\|$", PAGE, re.MULTILINE)
    command, when = (part.strip() for part in line.split("|")[-2:])
    assert command == f"`./dev test --tier {tier}`"
    assert when == cadence
