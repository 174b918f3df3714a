"""Installs and compiles what the tests start or import: `python -m tests.prepare`, while something else uses one core.

Tests do all of this themselves when they first need it. In an empty clone that is a minute of CPU, because each worker
compiles every module that all of them import. What cannot be installed is left to the tests, which say what is missing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis.internal import charmap

from tests.support import conformance, surroundings
from tests.support.frameworks import libraries_python
from tests.support.mcp_servers.real import ROOT, environment, node_server

# What the programs of each environment import. Those of thorough runs are left to them.
LIBRARIES = {
    "providers": "anthropic.types, google.genai.types, openai.types.responses",
    "servers": "mcp_server_git, mcp_server_time",
    "integrations": "agents.mcp, anthropic, fastmcp, langchain.agents, openai",
}


def _python(name: str) -> str:
    return libraries_python() if name == "integrations" else str(environment(name) / "bin" / "python")


PROGRAMS: tuple[Callable[[], object], ...] = (
    lambda: node_server("server-everything"),
    lambda: conformance.program("@modelcontextprotocol/conformance", ""),
)


def main() -> None:
    surroundings.settle()
    # First what takes long and every test waits for.
    subprocess.run([sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-qq"], cwd=ROOT, check=False)
    for name, modules in LIBRARIES.items():
        with suppress(pytest.skip.Exception, pytest.fail.Exception):
            subprocess.run([_python(name), "-c", f"import {modules}"], cwd=ROOT, check=False)
    charmap.intervals_from_codec("utf-8")  # the characters of every text; Hypothesis keeps them in a file
    for install in PROGRAMS:
        with suppress(pytest.skip.Exception, pytest.fail.Exception):
            install()


if __name__ == "__main__":
    main()
