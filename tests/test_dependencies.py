"""The libraries that Interlock needs: each import is declared, each declared library is imported and explained."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.support.source import called, parse

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "dependencies.md"
# Users bring these themselves: agent frameworks with their agents, pytest and pytest-asyncio with their own tests, and
# an exact token counter or an encoder of another model.
OPTIONAL = {"langchain-core", "onnxruntime", "pydantic-ai-slim", "pytest", "pytest-asyncio", "rs-bpe"}
# Several distributions share these names; these are the ones that are needed.
SHARED = {
    "google": {"protobuf"},
    "opentelemetry": {"opentelemetry-api", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"},
}


def _declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {_plain(re.split(r"[\[<>=;! ]", one)[0]) for one in project["dependencies"]}


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _imported() -> set[str]:
    """The distributions of all modules that the source imports or finds by name, wherever it does."""
    distributions, found = packages_distributions(), set[str]()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
                names = [node.module]
            elif isinstance(node, ast.Call) and called(node) == "importlib.util.find_spec":
                names = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            else:
                continue
            for top in {name.partition(".")[0] for name in names} - {"interlock"} - sys.stdlib_module_names:
                found |= SHARED.get(top) or {_plain(one) for one in distributions.get(top, [top])}
    return found


def test_every_import_is_declared_and_every_declared_library_is_imported():
    assert _imported() - OPTIONAL == _declared()


def test_the_page_explains_every_library():
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert {_plain(name) for row in rows for name in re.findall(r"`([^`]+)`", row[1])} == _declared()
    assert all(cell.strip() for row in rows for cell in row[1:-1])
