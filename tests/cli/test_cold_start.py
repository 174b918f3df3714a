"""Commands load what they need and nothing else: starting them is most of what an ordinary command costs.

These tests hold the packages that are loaded, not the time that it takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import orjson
import pytest

from interlock import Interlock
from interlock.api.tool_listing import any_version, contract_document
from interlock.api.upstreams import list_upstreams
from tests.support.cli import Cli

_LOADED = """
import sys
commands = " ".join(sys.argv[1:]).split(" , ") if "," in sys.argv else [None]
from interlock.cli import main
try:
    for words in commands:
        sys.argv = ["interlock", *(sys.argv[1:] if words is None else words.split())]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
finally:
    own = {name for name in sys.modules if name.partition(".")[0] == "interlock"}
    others = {name for name in sys.modules if "." not in name} - sys.stdlib_module_names
    others = {name for name in others if not name.startswith("_")} - {"interlock", "distutils-precedence"}
    heavy = {"asyncio", "ssl", "email", "importlib.metadata"} & sys.modules.keys()
    print(" ".join(sorted(others | heavy)), file=sys.stderr)
    print(" ".join(sorted(own)), file=sys.stderr)
"""
CALL = {
    "invocation_id": "01JC", "at": "2026-07-01T12:00:00.000Z", "tool": "demo.post@1.0.0", "caller": "did:web:a:bot",
    "caller_name": "bot", "tenant": "local", "key": None, "state": "succeeded", "error_code": None, "error": None,
    "source": "compute", "latency_ms": 3.0, "cost": None,
}  # fmt: skip


TOOL = {
    "tool_id": "demo.post", "version": "1.0.0", "mutation_class": "write_reversible", "state": "active",
    "availability": "AVAILABLE", "description": "Post an amount.", "published_at": "2026-07-01T12:00:00.000Z",
    "known_pairs": 0, "deprecation": None, "score": 0.5,
}  # fmt: skip
FOUND: dict[str, object] = {"by": "words", "note": "", "outcome": "found", "pending": [], "deferred": []}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        told: dict[str, object] = {"calls": [CALL], "before": None}
        if self.path.startswith("/v1/tools"):
            told = {"tools": [TOOL], "cursor": None, **FOUND}
        body = orjson.dumps(told)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the method it replaces
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


def packages(own: set[str]) -> set[str]:
    return {".".join(name.split(".")[:2]) for name in own}


def loaded(home: Path, *words: str) -> tuple[str, set[str], set[str]]:
    """Run a command: its output, the packages of others that it loaded, and those of Interlock."""
    said, others, own = modules(home, *words)
    return said, others, packages(own)


def modules(home: Path, *words: str) -> tuple[str, set[str], set[str]]:
    """The same with every module of Interlock. Several commands, with commas between them, run in one process."""
    environment = {**os.environ, "INTERLOCK_HOME": str(home)}
    if "--server" in words:
        environment["INTERLOCK_TOKEN"] = "token"
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *words], env=environment, capture_output=True, text=True, check=True
    )
    *_, others, own = done.stderr.splitlines()
    return done.stdout, set(others.split()), set(own.split())


Once = Callable[[str], tuple[str, set[str], set[str]]]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, copied: Callable[[Path], Cli]) -> Once:
    """Run a command that changes nothing, once for all tests: its output, and the modules that it loaded."""
    home = copied(tmp_path_factory.mktemp("once")).home

    @cache
    def run(words: str) -> tuple[str, set[str], set[str]]:
        return modules(home, *words.split())

    return run


OF_A_FILE = pytest.mark.sqlite_only("what is loaded is counted without the driver of a server")
BARE = {"interlock", "interlock._version", "interlock.cli"}


@OF_A_FILE
def test_the_version_and_the_help_load_nothing_but_the_commands(tmp_path: Path) -> None:
    _, others, own = loaded(tmp_path, "--version")
    assert (others, own) == ({"click"}, BARE)
    _, others, own = loaded(tmp_path, "--help")
    assert (others, own) == ({"click"}, BARE | {"interlock.call", "interlock.contract", "interlock.core"})


@OF_A_FILE
@pytest.mark.parametrize(
    ("words", "row"),
    [
        ("calls list", {"bot", "demo.post@1.0.0"}),
        ("tools list", {"demo.post", "1.0.0", "active"}),
        ("tools search post", {"demo.post", "1.0.0", "write_reversible"}),
    ],
)
def test_lists_of_a_server_load_no_model_and_no_part_of_the_gateway(
    tmp_path: Path, server: str, words: str, row: set[str]
) -> None:
    said, others, own = loaded(tmp_path, "--server", server, *words.split())
    assert row <= set(said.splitlines()[1].split())
    assert others == {"asyncio", "click", "email", "orjson", "ssl"}
    assert own == BARE | {"interlock.core", "interlock.data"}


# What answers these commands is the database alone: no model of a contract and no part of the gateway is loaded.
READS = (
    "calls list", "calls top", "calls show CALL", "tools list", "tools show demo.post", "tools quarantine",
    "approvals list", "approvals show TICKET", "approvals standing", "identities list", "upstream list", "audit verify",
    "secrets list", "budgets", "keys list",
)  # fmt: skip
GATEWAY = {f"interlock.{name}" for name in ("doors", "effects", "executors", "gateway", "http", "resilience", "trials")}
# Of what Interlock depends on, these serve endpoints, migrate databases, send messages and connect to upstreams.
SELDOM = {
    "alembic", "apprise", "fastapi", "google", "grpc", "httpx", "jwt", "keyring", "mcp", "opentelemetry", "sqlalchemy",
    "starlette", "uvicorn", "yaml",
}  # fmt: skip


@OF_A_FILE
def test_commands_that_read_a_data_directory_read_the_database_alone(cli: Cli) -> None:
    cli("call", "demo.mail_statement", '{"account": "cash", "to": "a@b.example"}', "--key", "k")
    (ticket,) = cli.ask("approvals", "list")["tickets"]
    assert cli("token", "issue", "--agent", "bot").code == 0
    asked = " , ".join(READS).replace("CALL", ticket["invocation_id"]).replace("TICKET", ticket["id"])
    # In one process: what any of them loads is loaded at the end.
    said, others, own = loaded(cli.home, *asked.split())
    assert "demo.mail_statement" in said
    assert others <= {"click", "cryptography", "orjson"}
    assert not own & (GATEWAY | {"interlock.settings", "interlock.telemetry"})


@OF_A_FILE
@pytest.mark.parametrize("words", ["tools diff demo.post 1.2.0 1.2.0", "upstream show notes"])
def test_contracts_are_shown_without_the_gateway(cli: Cli, words: str) -> None:
    if words.startswith("upstream"):
        assert cli("upstream", "add", "mcp", "notes", "--", sys.executable, "-m", "interlock.demo_server").code == 0
    _, others, own = loaded(cli.home, *words.split())
    assert not others & SELDOM
    assert not own & GATEWAY
    assert not {"pydantic", "pydantic_core"} & others


@OF_A_FILE
def test_a_call_loads_neither_endpoints_nor_what_admits_tools(cli: Cli) -> None:
    _, others, own = loaded(cli.home, "call", "demo.balance", '{"account": "cash"}')
    assert not others & SELDOM
    assert not own & {"interlock.doors", "interlock.http", "interlock.settings", "interlock.trials"}
    assert "importlib.metadata" not in others  # pydantic would load it to look for plugins
    _, _, each = modules(cli.home, "call", "demo.balance", '{"account": "cash"}')
    assert len(each) <= 306


@OF_A_FILE
def test_the_story_of_a_call_is_told_without_the_phases(cli: Cli) -> None:
    call = cli.call("demo.balance", {"account": "cash"})["invocation_id"]
    for words, told, most in ((("audit", "explain"), "demo.balance", 165), (("calls", "trace"), call, 193)):
        said, others, own = modules(cli.home, *words, call)
        assert told in said
        assert not {"interlock.api.wiring.gateway", "interlock.gateway.invoke", "interlock.executors"} & own
        assert not {"pydantic", "typing_extensions"} & others
        assert len(own) <= most


# An open data directory without a sandboxed call needs neither the models of jobs nor what compares versions.
@OF_A_FILE
@pytest.mark.parametrize("words", ["health", "policy explain me demo.post", "tools export --format anthropic"])
def test_commands_on_an_open_data_directory_load_no_endpoint_and_no_sandbox(once: Once, words: str) -> None:
    _, others, own = once(words)
    assert not others & (SELDOM | {"numpy"})
    assert not packages(own) & {"interlock.doors", "interlock.http", "interlock.trials"}


# These open the data directory and make no call: nothing that runs a tool is loaded, nor the module that a tool is in.
@OF_A_FILE
@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("health", 162), ("surface show", 177), ("tools select balance", 238),
    ],
)  # fmt: skip
def test_commands_that_make_no_call_load_neither_the_phases_nor_the_tools(once: Once, words: str, most: int) -> None:
    _, others, own = once(words)
    for part in ("api.wiring.gateway", "gateway.invoke", "gateway.execute", "gateway.approval.review", "executors"):
        assert f"interlock.{part}" not in own
    assert not {"interlock.demo_tools", "interlock.contract.declare", "interlock.search.embedders"} & own
    assert not {"httptools", "idna", "jsonschema_rs", "rich"} & others
    assert len(own) <= most


# These ask the policy and the contracts, and no part of an open data directory.
@OF_A_FILE
@pytest.mark.parametrize(
    ("words", "most"), [("policy explain me demo.post", 121), ("tools export --format anthropic", 117)]
)
def test_rules_are_explained_and_tools_exported_from_the_database_alone(once: Once, words: str, most: int) -> None:
    said, others, own = once(words)
    assert "demo" in said
    assert others == {"cedarpy", "click", "cryptography", "orjson"}
    assert not {"interlock.api.parts", "interlock.gateway", "interlock.store.journal"} & own
    assert len(own) <= most


# A search needs numpy. What it takes of the rest of the time is the policy, and no part of an open data directory.
@OF_A_FILE
def test_a_search_reads_the_database_alone(cli: Cli) -> None:
    said, others, own = modules(cli.home, "tools", "search", "balance")
    assert "demo.balance" in said
    assert others == {"cedarpy", "click", "cryptography", "numpy", "orjson"}
    assert not {"interlock.api.parts", "interlock.gateway", "interlock.store.journal"} & own
    assert len(own) <= 117


# A token names another caller, and settings may name another source of vectors.
@OF_A_FILE
def test_a_search_that_the_database_alone_does_not_answer_opens_the_data_directory(cli: Cli) -> None:
    (cli.home / "settings.toml").write_text('surface_excluded = [{ tools = ["demo.*"] }]\n')
    said, _, own = modules(cli.home, "tools", "search", "balance")
    assert "demo.balance" not in said
    assert "interlock.api.parts" in own


def test_a_gateway_that_is_built_late_raises_the_alerts_of_its_limits(cli: Cli) -> None:
    """The limits of what runs tools are watched from the first call on, those of the data directory before."""

    async def limits() -> tuple[set[str], set[str]]:
        async with Interlock.open(cli.home, housekeeping=False) as app:
            before = set(app.telemetry.alerts.levels())
            assert (await app.call("demo.balance", account="cash")).state == "succeeded"
            return before, set(app.telemetry.alerts.levels())

    before, after = asyncio.run(limits())
    assert "hung tool threads" not in before
    assert before < after
    assert "hung tool threads" in after


def test_what_a_program_asks_first_may_be_asked_between_two_runs_of_its_loop(cli: Cli) -> None:
    with asyncio.Runner() as runner:
        app = runner.run(Interlock.open(cli.home, housekeeping=False).start())
        listing = app.approvals.list()
        assert runner.run(listing) == []
        call = app.gateway.invoke(app.request("demo.balance", {"account": "cash"}))
        assert runner.run(call).state == "succeeded"
        runner.run(app.close())


@OF_A_FILE
def test_the_inputs_of_a_call_are_shown_without_its_tool_and_without_models(cli: Cli) -> None:
    call = cli.call("demo.balance", {"account": "cash"})["invocation_id"]
    said, others, own = modules(cli.home, "calls", "inputs", call)
    assert "nothing was changed on the way" in said
    assert not {"pydantic", "pydantic_core", "jsonschema_rs"} & others
    assert not {"interlock.demo_tools", "interlock.api.service", "interlock.registry.source"} & own


@OF_A_FILE
def test_an_upstream_is_told_healthy_without_what_connects_to_it(cli: Cli) -> None:
    assert cli("upstream", "add", "mcp", "notes", "--", sys.executable, "-m", "interlock.demo_server").code == 0
    _, others, own = modules(cli.home, "health")
    assert not {"pydantic", "pydantic_core"} & others
    assert not {name for name in own if name.startswith("interlock.upstreams.")}


# These open the data directory, and read no contract.
@OF_A_FILE
@pytest.mark.parametrize("words", ["health", "policy show", "keys list"])
def test_commands_that_read_no_contract_load_no_models(once: Once, words: str) -> None:
    _, others, own = once(words)
    assert "interlock.gateway" in packages(own)
    assert not {"email", "idna", "pydantic", "pydantic_core", "jsonschema_rs"} & others
    assert "interlock.settings" not in own


# These read contracts that were admitted, and run no tool.
@OF_A_FILE
@pytest.mark.parametrize(
    "words",
    [
        "policy explain me demo.post", "tools search balance", "tools export --format anthropic", "surface show",
        "tools select balance",
    ],
)  # fmt: skip
def test_commands_that_read_admitted_contracts_load_no_models(once: Once, words: str) -> None:
    said, others, own = once(words)
    assert "demo" in said
    assert not {"pydantic", "pydantic_core"} & others
    assert "interlock.settings" not in own


@OF_A_FILE
@pytest.mark.parametrize("words", ["tools search balance", "tools select balance"])
def test_searches_load_no_stemmers_of_other_languages_and_no_metadata_of_packages(once: Once, words: str) -> None:
    _, others, _ = once(words)
    assert "numpy" in others
    assert not {"email", "snowballstemmer"} & others


def test_the_types_of_numpy_are_there_for_code_that_asks_for_them():
    """A hook of a data directory may use them, in a command that loads vectors without them."""
    code = (
        "import sys; from interlock.cli.command import lean_vectors; lean_vectors(); import numpy;"
        "assert 'numpy._typing._array_like' not in sys.modules; import numpy.typing;"
        "print(numpy.typing.NDArray[numpy.int8], numpy.linalg.eigh([[2.0]]).eigenvalues[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["numpy.ndarray[tuple[typing.Any,", "...],", "numpy.dtype[numpy.int8]]", "2.0"]


@OF_A_FILE
def test_tokens_are_issued_and_inspected_without_what_fetches_keys(cli: Cli) -> None:
    said, others, _ = loaded(cli.home, "token", "issue", "--agent", "bot")
    assert others == {"asyncio", "cedarpy", "click", "cryptography", "orjson", "ssl"}
    _, others, _ = loaded(cli.home, "token", "inspect", said.strip())
    assert not others & (SELDOM | {"email", "pydantic"})


@OF_A_FILE
def test_an_examination_loads_no_driver_of_a_server_and_no_settings(cli: Cli) -> None:
    _, others, own = loaded(cli.home, "doctor")
    assert not others & {"psycopg", "yaml"}
    assert "interlock.settings" not in own


@OF_A_FILE
def test_the_migrations_are_listed_without_what_runs_them(cli: Cli) -> None:
    said, others, own = loaded(cli.home, "migrate", "status")
    assert "0001" in said
    assert others == {"click", "orjson"}
    assert own <= BARE | {f"interlock.{name}" for name in ("api", "call", "core", "contract", "data", "store")}


@OF_A_FILE
def test_default_settings_are_shown_without_their_models(cli: Cli) -> None:
    said, others, own = loaded(cli.home, "config", "show")
    assert "housekeeping" in said
    assert others <= {"asyncio", "click", "orjson", "ssl"}
    assert not own & {"interlock.gateway", "interlock.settings"}


def test_a_local_user_without_the_scope_lists_no_credentials(cli: Cli) -> None:
    assert cli("secrets", "set", "github/token", "-", stdin="a value").code == 0
    at_rest = cli.ask("secrets", "list")["secrets"]
    assert [one["name"] for one in at_rest] == ["github/token"]
    principals = cli.home / "principals.toml"
    text = principals.read_text()
    principals.write_text(text + "# somebody changed it\n")
    assert cli.ask("secrets", "list")["secrets"] == at_rest
    principals.write_text(text.replace('"secrets:admin", ', ""))
    ended = cli("secrets", "list")
    assert ended.code == 1
    assert "listing credentials needs the scope `secrets:admin`" in ended.err


def test_a_forged_signature_is_refused_by_commands_that_only_read(cli: Cli) -> None:
    kept = cli.home / "keys" / "journal.head"
    head = json.loads(kept.read_bytes())
    head["signature"] = "00" * 64
    kept.write_text(json.dumps(head))
    ended = cli("tools", "list")
    assert ended.code == 1
    assert "the signature of keys/journal.head does not verify" in ended.err


async def test_what_is_read_at_rest_is_what_an_open_data_directory_tells(cli: Cli) -> None:
    cli("identities", "add", "--name", "scout", "--group", "readers")
    cli("call", "demo.mail_statement", '{"account": "cash", "to": "a@b.example"}', "--key", "k")
    (ticket,) = cli.ask("approvals", "list")["tickets"]
    approvals = (("approvals", "list"), ("approvals", "list", "--all"), ("approvals", "show", ticket["id"]))
    at_rest = [cli.ask(*words) for words in approvals]
    shown, upstreams = cli.ask("tools", "show", "demo.post"), cli.ask("upstream", "list")
    identities = cli.ask("identities", "list")["identities"]
    # Settings may say where the keys of sealed parts are, so now the data directory is opened for tickets.
    (cli.home / "settings.toml").write_text("")
    assert [cli.ask(*words) for words in approvals] == at_rest
    async with Interlock.open(cli.home, housekeeping=False) as app:
        version = await any_version(app, "demo.post", None)
        await app.measure()
        told = contract_document(version, app.availability(version.row), app.latencies)
        assert orjson.loads(orjson.dumps(told)) == shown
        assert await list_upstreams(app) == upstreams
        assert [one.did for one in await app.identities.all()] == [one["did"] for one in identities]
