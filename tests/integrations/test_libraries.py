"""The real libraries of agent frameworks and model providers, in an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlock import Failure, Interlock
from interlock.integrations import adopt
from tests.integrations import page
from tests.support.frameworks import libraries_python
from tests.support.mcp_servers.real import ROOT

CASES = Path(__file__).with_name("libraries.py")


@pytest.mark.timeout(1800)  # the libraries are installed here, once
def test_the_libraries_call_governed_tools(tmp_path: Path):
    options = ["-n", "0", "-p", "no:cacheprovider", "-W", "ignore", "--timeout=900", f"--basetemp={tmp_path / 'cases'}"]
    command = [libraries_python(), "-m", "pytest", *options, str(CASES)]
    # The libraries are large: without bytecode, loading them takes longer than the tests.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "7 passed" in done.stdout


@pytest.mark.parametrize(
    "name", ["ask_openai", "ask_openai_responses", "ask_anthropic", "ask_langchain", "ask_agents", "ask_pydantic_ai"]
)
def test_governed_tools_take_five_lines_around_each_library(name: str):
    (block,) = [one for one in page.BLOCK.findall(page.PAGE.read_text()) if f"def {name}(" in one]
    function = block[block.index("async def") :]
    assert len(function.splitlines()) <= 1 + 5, "the line of the function, and five"


async def test_a_server_that_no_module_has_cannot_be_adopted(tmp_path: Path):
    async with Interlock.open(tmp_path / "home") as app:
        for server in (object(), "nowhere", "server.py:", ":mcp"):
            with pytest.raises(Failure, match=r"at its top level|is no place"):
                await adopt(app, server, name="shop")


def test_an_adopted_server_loads_nothing_of_the_gateway():
    loaded = "import sys, interlock.integrations.mcp_server; print(*(m for m in sys.modules if 'interlock' in m))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "interlock", "interlock._version", "interlock.integrations", "interlock.integrations.mcp_server",
    }  # fmt: skip
