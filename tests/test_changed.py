"""`./dev test --changed` leaves out no test that a change can touch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.changed import ROOT, read_modules, touched

# What each of these loads at once, without a test being run.
LOADED = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.modules if name.partition(".")[0] in ("interlock", "tests", "docs")]))
"""


@pytest.mark.parametrize("test", ["core/test_formatting.py", "doors/test_budgets.py", "cli/test_doctor.py"])
def test_every_module_that_a_test_loads_is_known_to_touch_it(test: str) -> None:
    modules = read_modules()
    name = modules.names[f"tests/{test}"]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, name], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    loaded = set(json.loads(done.stdout)) & set(modules.names.values())  # without what was compiled
    assert len(loaded) > 3
    reached = {modules.names[file] for file in modules.reached(f"tests/{test}")}
    assert loaded <= reached


def test_a_command_touches_the_tests_that_run_commands_and_not_those_of_the_core() -> None:
    found = touched({"src/interlock/cli/doctor.py"})
    assert found is not None
    assert {"tests/cli/test_doctor.py", "tests/cli/test_cli.py", "tests/docs/test_docs.py"} <= found
    assert "tests/core/test_formatting.py" not in found


@pytest.mark.parametrize(
    "file", ["tests/conftest.py", "tests/leaks.py", "pyproject.toml", "src/interlock/data/_walk.c"]
)
def test_a_file_that_all_tests_share_or_whose_readers_are_unknown_touches_every_test(file: str) -> None:
    assert touched({"docs/tutorial.md", file}) is None


def test_a_page_touches_the_tests_of_the_pages_and_data_the_tests_beside_it() -> None:
    own = {"tests/test_changed.py"}  # which names these files too
    pages = {f"tests/docs/{one.name}" for one in (ROOT / "tests" / "docs").glob("test_*.py")}
    assert touched({"docs/tutorial.md"}) == pages | own
    assert touched({"docs/explanation/test-tiers.md"}) == {*pages, "tests/test_tiers.py"} | own
    assert touched({"tests/golden/files/raw.json"}) == {"tests/golden/test_golden.py"}
