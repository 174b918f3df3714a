"""A tool in the process of a server or of `interlock call` finds no credential in its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli
from tests.support.postgres import Server

REST = (
    "a tool that runs in process can read the server's memory, its files, and the variables of its environment whose"
    " names do not look like credentials or that the operator keeps, in a program that uses the library all of them,"
    " and reach the metadata address"
)
CANARY = "canary-88213"
TOOLS = '''
import os
from pathlib import Path
from typing import Any

from interlock import tool


@tool(version="1.0.0", mutation_class="read_only", namespace="spy")
def look() -> list[str]:
    """Everything that the environment says."""
    told = [f"{name}={value}" for name, value in os.environ.items()]
    shown = Path("/proc/self/environ").read_text().split("\\0")
    with os.popen("env") as inherited:
        return [*told, *shown, inherited.read()]
'''
CREDENTIALS = {
    "OPENAI_API_KEY": CANARY,
    "VAULT_TOKEN": CANARY,
    "AWS_SECRET_ACCESS_KEY": CANARY,
    "AWS_ACCESS_KEY_ID": CANARY,
    "DB_PASSWORD": CANARY,
    "DATABASE_URL": f"postgres://app:{CANARY}@db/app",
    "GOOGLE_APPLICATION_CREDENTIALS": f"/etc/{CANARY}.json",
    "SSH_AUTH_SOCK": f"/run/{CANARY}",
}


def _call(cli: Cli, *words: str, stdin: str = "", **extra: str) -> str:
    """What a real process prints. Its environment block is its own, unlike that of a fork."""
    environment = {**cli.environment, **CREDENTIALS, "HARMLESS": "stays-here", **extra}
    command = [sys.executable, "-m", "interlock.cli", *words]
    done = subprocess.run(command, env=environment, cwd=cli.path, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sqlite_only("it has a store on a server of its own")
@pytest.mark.parametrize("variable", ["PGPASSFILE", "PGPASSWORD"])
def test_a_process_keeps_the_password_of_its_store(variable: str, fresh: Cli) -> None:
    """Connections to the store are also opened after the tools were loaded."""
    server = Server()
    try:
        with server.connect() as connection:
            connection.execute("CREATE ROLE app LOGIN PASSWORD 'of-the-store'")
            connection.execute("CREATE SCHEMA app AUTHORIZATION app")
            rules = server.place / "data" / "pg_hba.conf"
            rules.write_text("local all app scram-sha-256\n" + rules.read_text())
            connection.execute("SELECT pg_reload_conf()")
        passfile = fresh.path / "pgpass"
        passfile.write_text("*:*:*:app:of-the-store\n")
        passfile.chmod(0o600)
        given = {
            "INTERLOCK_STORE": server.address.replace("postgres@", "app@"),
            variable: str(passfile) if variable == "PGPASSFILE" else "of-the-store",
        }
        (fresh.path / "spy_tools.py").write_text(TOOLS)
        _call(fresh, "tools", "add", "spy_tools.py", **given)
        shown = json.loads(_call(fresh, "call", "spy.look", "--json", **given))
        assert shown["status"] == "succeeded"
        assert CANARY not in json.dumps(shown)
        without = {**given, variable: ""}
        refused = subprocess.run(
            [sys.executable, "-m", "interlock.cli", "call", "spy.look"],
            env={**fresh.environment, **without}, cwd=fresh.path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert refused.returncode != 0
        assert "refuses the user of this process" in refused.stderr
    finally:
        server.remove()


@pytest.fixture
def spied(fresh: Cli) -> Cli:
    (fresh.path / "spy_tools.py").write_text(TOOLS)
    assert fresh("tools", "add", "spy_tools.py").code == 0
    return fresh


@pytest.mark.part_of("AUTH-09", rest=REST)
def test_a_tool_of_a_call_finds_no_credential(spied: Cli) -> None:
    told = _call(spied, "call", "spy.look", "--json")
    assert "stays-here" in told
    assert CANARY not in told


@pytest.mark.part_of("AUTH-09", rest=REST)
def test_a_tool_of_a_server_finds_no_credential(spied: Cli) -> None:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    asked: list[dict[str, Any]] = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "spy-look", "arguments": {}}},
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "interlock.cli", "serve", "--stdio"],
        env={**spied.environment, **CREDENTIALS, "HARMLESS": "stays-here"},
        cwd=spied.path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        for one in asked:
            process.stdin.write(json.dumps(one) + "\n")
        process.stdin.flush()
        told = ""
        for line in process.stdout:
            if json.loads(line).get("id") == 2:
                told = line
                break
        process.stdin.close()
    assert "stays-here" in told
    assert CANARY not in told


def test_a_variable_that_tools_need_is_kept_by_name(spied: Cli) -> None:
    told = _call(spied, "call", "spy.look", "--json", INTERLOCK_KEEP_ENVIRONMENT="DB_PASSWORD,OTHER")
    assert f"DB_PASSWORD={CANARY}" in told
    assert f"OPENAI_API_KEY={CANARY}" not in told


async def test_a_program_that_uses_the_library_keeps_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from interlock import Interlock

    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    async with Interlock.open(tmp_path / "home", housekeeping=False):
        assert os.environ["OPENAI_API_KEY"] == CANARY
