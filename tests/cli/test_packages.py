"""A library of a version that does not fit is named at start, with what to do about it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.cli import INTERLOCK, Cli

MISFIT = "mcp 1.27.0 is installed; Interlock needs mcp>=2.3"


def beside_old_mcp(cli: Cli, *words: str) -> tuple[int, Any]:
    """Run a command where `mcp` 1.27 is installed, as another program's needs left it. Its exit code and its JSON."""
    metadata = cli.path / "installed" / "mcp-1.27.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: mcp\nVersion: 1.27.0\n")
    environment = {**cli.environment, "PYTHONPATH": str(cli.path / "installed")}
    command = [*INTERLOCK, *words, "--json"]
    ended = subprocess.run(command, env=environment, cwd=cli.path, stdout=subprocess.PIPE, timeout=60, check=False)
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.parametrize("words", [["serve"], ["serve", "--stdio"]])
def test_the_server_does_not_start_beside_a_library_that_does_not_fit(cli: Cli, words: list[str]):
    code, answer = beside_old_mcp(cli, *words)
    assert code == 1
    assert answer["error"]["error_code"] == "E3804"
    assert answer["error"]["message"] == f"libraries do not fit: {MISFIT}"
    assert "environment of its own" in answer["error"]["resolution"]


def test_doctor_names_the_library_that_does_not_fit(cli: Cli):
    code, answer = beside_old_mcp(cli, "doctor")
    assert code == 1
    found = [one for one in answer["findings"] if one["name"] == "packages"]
    assert [(one["status"], one["what"]) for one in found] == [("broken", MISFIT)]


def test_doctor_says_that_all_libraries_fit(cli: Cli):
    found = [one for one in cli.ask("doctor")["findings"] if one["name"] == "packages"]
    assert [one["status"] for one in found] == ["good"]
