"""`interlock upstream import`: the configuration files of MCP clients, with real servers behind them."""

from __future__ import annotations

import asyncio
import json
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from interlock import Interlock
from interlock.demo_server import answer
from interlock.upstreams.client_config import is_setting
from tests.support.calls import code
from tests.support.cli import Cli, Ended
from tests.support.mcp_servers.real import node_server
from tests.support.stores import bodies
from tests.support.upstream_servers import Answer, Got, HttpServer, json_answer

Json = dict[str, Any]
NOTES: Json = {"command": sys.executable, "args": ["-m", "interlock.demo_server"]}
KEY = "key-0123456789abcdef"


def write(cli: Cli, document: Json | str, name: str = "config.json") -> Path:
    path = cli.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def by_name(ended: Ended) -> dict[str, Json]:
    return {one["name"]: one for one in ended.json["servers"]}


def mcp_over_http(token: str) -> Any:
    """An MCP server over HTTP that wants a token."""

    def reply(got: Got) -> Answer:
        if got.headers.get("authorization") != f"Bearer {token}":
            return Answer(401)
        if got.method != "POST":
            return Answer(405)
        asked: Json = json.loads(got.body)
        if "id" not in asked:
            return Answer(202)
        result = answer(asked["method"], asked.get("params") or {})
        error = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
        return json_answer({"jsonrpc": "2.0", "id": asked["id"], **error})

    return reply


async def test_one_command_governs_every_server_of_a_file_and_a_failing_one_stops_no_other(fresh: Cli) -> None:
    async with HttpServer.open() as server:
        server.otherwise = mcp_over_http(KEY)
        notes = fresh.path / "notes.txt"
        notes.write_text("milk and honey\n")
        variables = {"NOTES_API_KEY": KEY, "INTERLOCK_DEMO_NOTES": str(notes), "DEBUG": True}
        servers: Json = {
            "broken": {"command": "/nowhere/program"},
            "My Notes": {**NOTES, "env": variables},
            "remote": {"type": "http", "url": f"{server.url}/mcp", "headers": {"Authorization": f"Bearer {KEY}"}},
            "off": {**NOTES, "disabled": True},
            "interlock": {"command": "interlock", "args": ["serve", "--stdio"]},
        }
        path = write(fresh, {"theme": "dark", "mcpServers": servers})
        words = ("upstream", "import", str(path), "--accept-hints", "--allow-private", "--json")
        ended = await asyncio.to_thread(fresh, *words)
        told = by_name(ended)
        assert ended.code == 1, "one of them failed"
        assert {name: one["state"] for name, one in told.items()} == {
            "broken": "refused", "My Notes": "added", "remote": "added", "off": "skipped", "interlock": "skipped",
        }  # fmt: skip
        assert "/nowhere/program" in told["broken"]["reason"]
        assert told["My Notes"]["admitted"] == told["remote"]["admitted"] == 2
        assert told["My Notes"]["credentials"] == {"NOTES_API_KEY": "mcp/my-notes/notes_api_key"}
        assert told["My Notes"]["in_clear"] == ["DEBUG", "INTERLOCK_DEMO_NOTES"]
        # The file itself is as it was. The new one starts Interlock, and keeps everything but the servers.
        assert json.loads(path.read_text())["mcpServers"] == servers
        target = fresh.path / "config.interlock.json"
        assert ended.json["written"] == str(target)
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        written = json.loads(target.read_text())
        assert (written["theme"], list(written["mcpServers"])) == ("dark", ["interlock"])
        entry = written["mcpServers"]["interlock"]
        client = StdioServerParameters(command=entry["command"], args=entry["args"], env=fresh.environment)
        async with Client(client) as session:
            names = {one.name for one in (await session.list_tools()).tools}
            assert names == {"my-notes-search", "my-notes-note", "remote-search", "remote-note"}
            found = await session.call_tool("my-notes-search", {"word": "milk"})
            assert "milk and honey" in str(found.content)
            assert not (await session.call_tool("remote-search", {"word": "milk"})).is_error
    # No credential is in clear in the data directory.
    async with Interlock.open(fresh.home, housekeeping=False) as app:
        configs = json.dumps([one.config for one in await app.upstreams.list()])
    assert KEY not in configs
    assert all(KEY.encode() not in one.read_bytes() for one in fresh.home.rglob("*") if one.is_file())


async def test_a_write_of_an_imported_server_is_described_tried_called_once_and_undone(fresh: Cli) -> None:
    """Somebody else's server, from the file of a client to a write that runs unattended and can be undone."""
    folder = fresh.path / "files"
    folder.mkdir()
    note = folder / "note.txt"
    note.write_text("before")
    program, *arguments = node_server("server-filesystem")
    path = write(fresh, {"mcpServers": {"files": {"command": program, "args": [*arguments, str(folder)]}}})
    imported = await asyncio.to_thread(fresh, "upstream", "import", str(path), "--json")
    assert by_name(imported)["files"]["state"] == "added"
    given = {"path": str(note), "content": "after"}
    undo: Json = {
        "before": {"tool": "read_text_file", "arguments": {"path": "/input/path"}},
        "tool": "write_file",
        "arguments": {"path": "/input/path", "content": "/before/structuredContent/content"},
    }
    async with Interlock.open(fresh.home, housekeeping=False) as app:

        async def refreshed(undo: Json) -> tuple[str, str]:
            write_file: Json = {"mutation_class": "write_reversible", "undo": undo}
            tools: Json = {"read_text_file": {"mutation_class": "read_only"}, "write_file": write_file}
            report = await app.upstreams.refresh("files", by=app.caller, overlay={"tools": tools})
            return next((one.state, one.reason) for one in report.tools if one.name == "write_file")

        asked = await app.call("files.write_file", given, key="one")
        assert asked.pending, "nothing says that it can be undone"
        state, reason = await refreshed(undo)
        assert (state, "example: {path: …, content: …}" in reason) == ("refused", True)
        assert code(await app.call("files.write_file", given, key="two")) == "E3102"
        state, _ = await refreshed({**undo, "example": {"path": str(note), "content": "a trial"}})
        assert state == "changed", "a person looks at what their overlay makes of it"
        await app.upstreams.accept("files", by=app.caller, reason="it is described now")
        assert note.read_text() == "before", "the trial is undone"
        done = await app.call("files.write_file", given, key="three")
        again = await app.call("files.write_file", given, key="three")
        assert (done.ok, again.replayed, note.read_text()) == (True, True, "after")
        assert (await app.undo(done.invocation_id, key="undo-three")).ok
        assert note.read_text() == "before"


async def test_a_person_who_is_alone_agrees_in_advance_to_what_their_own_client_writes(fresh: Cli) -> None:
    notes = fresh.path / "notes.txt"
    path = write(fresh, {"mcpServers": {"notes": {**NOTES, "env": {"INTERLOCK_DEMO_NOTES": str(notes)}}}})
    imported = await asyncio.to_thread(fresh, "upstream", "import", str(path))
    assert "interlock approvals alone" in imported.out
    entry = json.loads((fresh.path / "config.interlock.json").read_text())["mcpServers"]["interlock"]
    client = StdioServerParameters(command=entry["command"], args=entry["args"], env=fresh.environment)
    async with Client(client) as session:

        async def note(key: str) -> Any:
            return await session.call_tool("notes-note", {"text": "milk", "idempotency_key": key})

        async def typed(words: list[str]) -> Ended:
            return await asyncio.to_thread(fresh, *words, "--json")

        waits = await note("one")
        pending: Json = waits.meta["interlock/pending"]
        assert "`interlock approvals alone`" in waits.content[0].text
        command = shlex.split(pending["agreeInAdvance"])[1:]
        assert command[command.index("--caller") + 1].startswith("local:")
        refused = (await typed(command)).json["error"]
        assert (refused["error_code"], "interlock approvals alone" in refused["resolution"]) == ("E3206", True)
        assert (await typed(["approvals", "alone"])).code == 0
        granted = await typed(command)
        assert granted.code == 0, granted.out
        assert not notes.exists()
        for key in ("one", "two"):
            assert (await note(key)).meta.get("interlock/pending") is None
        assert notes.read_text() == "milk\n" * 2
        (record,) = [one for one in bodies(fresh.store, "approval") if one["act"] == "standing.granted"]
        assert record["alone"] is True
        # With the statement that they are alone, their standing approvals end.
        ended = await typed(["approvals", "alone", "--end"])
        assert ended.json["revoked"] == [granted.json["id"]]
        assert (await note("three")).meta["interlock/pending"]["status"] == "PENDING"
        assert notes.read_text() == "milk\n" * 2
    assert (await typed(["audit", "verify"])).code == 0


def test_hints_are_accepted_after_the_first_import_by_the_command_that_a_second_one_gives(fresh: Cli) -> None:
    path = write(fresh, {"mcpServers": {"notes": {**NOTES, "env": {"INTERLOCK_DEMO_NOTES": "notes.txt"}}}})
    words = ("upstream", "import", str(path))
    assert by_name(fresh(*words, "--json"))["notes"]["state"] == "added"

    def classes() -> dict[str, str]:
        return {one["name"]: one["mutation_class"] for one in by_name(fresh(*words, "--json"))["notes"]["tools"]}

    assert set(classes().values()) == {"write_irreversible"}
    again = fresh(*words, "--accept-hints", "--json")
    told = by_name(again)["notes"]
    assert (again.code, told["state"]) == (0, "known")
    command = "interlock upstream refresh notes --accept-hints"
    assert told["next"].endswith(command)
    assert command in fresh(*words, "--accept-hints").out
    # Nothing is trusted before a person has accepted what the hints change.
    report = fresh.ask(*shlex.split(command)[1:])
    hinted = {one["name"] for one in report["tools"] if one["state"] == "changed"}
    assert hinted
    assert hinted < {one["name"] for one in report["tools"]}
    assert fresh("upstream", "accept", "notes", "--reason", "they only read").code == 0
    assert {name for name, class_ in classes().items() if class_ == "read_only"} == hinted
    accepted = by_name(fresh(*words, "--accept-hints", "--json"))["notes"]
    assert (accepted["state"], accepted.get("next")) == ("known", None)


def test_a_plan_starts_stores_and_writes_nothing(fresh: Cli) -> None:
    marker = fresh.path / "started"
    starts = {"command": "/bin/sh", "args": ["-c", f"touch {marker}"], "env": {"API_TOKEN": KEY}}
    path = write(fresh, {"mcpServers": {"starts": starts}})
    shown = fresh("upstream", "import", str(path), "--dry-run")
    assert shown.code == 0
    assert "API_TOKEN, as the secret mcp/starts/api_token" in shown.out
    assert "nothing was started, stored or written" in shown.out
    assert KEY not in shown.out
    assert not marker.exists()
    assert list(fresh.path.glob("*.interlock.json")) == []
    assert fresh.ask("secrets", "list") == {"secrets": []}
    assert fresh.ask("upstream", "list")["upstreams"] == []


def test_what_vs_code_writes_is_read_with_its_comments_inputs_and_variables(fresh: Cli) -> None:
    text = """{
      // servers of this workspace
      "inputs": [{"id": "key", "type": "promptString", "description": "API key", "password": true}],
      "servers": {
        "here": {"type": "stdio", "command": "%s", "args": ["${workspaceFolder}/server.py", "a // b"],
                 "env": {"MODE": "${env:NOTES_MODE}", "OTHER": "${UNSET_HERE:-plain}"}},
        "asks": {"command": "x", "env": {"API_KEY": "${input:key}"}}, /* a person is asked */
      },
    }"""
    path = write(fresh, text % sys.executable, ".vscode/mcp.json")
    (fresh.path / "server.py").write_text("from interlock import demo_server\ndemo_server.main()\n")
    cli = Cli(fresh.path, {"NOTES_MODE": "quiet"})
    ended = cli("upstream", "import", str(path), "--json")
    told = by_name(ended)
    assert told["here"]["state"] == "added"
    assert told["here"]["runs"] == [sys.executable, f"{fresh.path}/server.py", "a // b"]
    assert told["asks"]["state"] == "refused"
    assert "import the file in a terminal" in told["asks"]["reason"]
    written = json.loads((path.parent / "mcp.interlock.json").read_text())
    assert set(written) == {"servers"}, "inputs that no server uses any more are left out"
    assert written["servers"]["interlock"]["type"] == "stdio"


def test_importing_again_adds_what_was_corrected_and_keeps_the_rest(fresh: Cli) -> None:
    path = write(fresh, {"mcpServers": {"notes": NOTES, "later": {"command": "/nowhere/program"}}})
    assert fresh("upstream", "import", str(path)).code == 1
    path = write(fresh, {"mcpServers": {"notes": NOTES, "later": {**NOTES, "env": {"LATER_TOKEN": KEY}}}})
    again = fresh("upstream", "import", str(path), "--json")
    assert (again.code, {name: one["state"] for name, one in by_name(again).items()}) == (
        0,
        {"notes": "known", "later": "added"},
    )


def test_credentials_of_a_server_that_could_not_be_added_are_not_left_behind(fresh: Cli) -> None:
    path = write(fresh, {"mcpServers": {"broken": {"command": "/nowhere/program", "env": {"TOKEN": KEY}}}})
    ended = fresh("upstream", "import", str(path), "--json")
    assert (ended.code, ended.json["written"]) == (1, None)
    assert fresh.ask("secrets", "list") == {"secrets": []}


def test_a_file_of_somebody_else_is_not_written_over(fresh: Cli) -> None:
    path = write(fresh, {"mcpServers": {"notes": NOTES}})
    other = write(fresh, {"mcpServers": {"precious": NOTES}}, "config.interlock.json")
    before = other.read_text()
    refused = fresh("upstream", "import", str(path))
    assert (refused.code, "--output" in refused.err, other.read_text()) == (2, True, before)
    assert fresh.ask("upstream", "list")["upstreams"] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"other": 1}', "no `mcpServers` and no `servers`"),
        ('{"mcpServers": {"a": {}, "a": {}}}', "appears twice"),
    ],
)
def test_a_file_that_lists_no_servers_is_refused_whole(fresh: Cli, text: str, words: str) -> None:
    refused = fresh("upstream", "import", str(write(fresh, text)))
    assert (refused.code, words in refused.err) == (1, True)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (7, "not an object"),
        ({}, "neither `command` nor `url`"),
        ({"command": "x", "url": "https://x.example"}, "both `command` and `url`"),
        ({"command": ["x"]}, "`command` is not a text"),
        ({"command": "x", "args": "y"}, "`args` is not a list"),
        ({"command": "x", "env": {"A": []}}, "`env.A` is not a text"),
        ({"command": "x", "env": {"A": "${UNSET_HERE}"}}, "`UNSET_HERE`, which is not set"),
        ({"command": "${workspaceFolder}/x"}, "does not belong to a workspace"),
        ({"command": "x", "envFile": ".env"}, "envFile"),
        ({"url": "ftp://x.example"}, "http"),
    ],
)
def test_an_entry_that_cannot_be_used_is_reported_with_the_reason(fresh: Cli, entry: Any, words: str) -> None:
    told = by_name(fresh("upstream", "import", str(write(fresh, {"mcpServers": {"odd": entry}})), "--json"))
    assert told["odd"]["state"] == "refused"
    assert words in told["odd"]["reason"]


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("TZ", "Europe/Zurich", True),
        ("LOG_LEVEL", "debug", True),
        ("PORT", "8080", True),
        ("ALLOWED_DIR", "/srv/data", True),
        ("BASE_URL", "https://api.example.com/v1", True),
        ("API_KEY", "", True),
        ("GITHUB_PERSONAL_ACCESS_TOKEN", "x", False),
        ("OPENAI_API_KEY", "debug", False),
        ("DATABASE_URL", "postgres://user:pw@db.example.com/x", False),
        ("ENDPOINT", "https://api.example.com/?key=1234", False),
        ("MODE", "ghp_0123456789abcdef", False),
        ("CUSTOM", "9f86d081884c7d659a2feaa0c55ad015", False),
    ],
)
def test_a_value_counts_as_a_credential_unless_it_is_evidently_a_setting(name: str, value: str, setting: bool) -> None:
    assert is_setting(name, value) is setting
