"""`interlock serve` as people start it: a process of its own, real clients, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests import warm
from tests.needs import need
from tests.support.cli import INTERLOCK, PATIENCE_S, Cli, bearer, running
from tests.support.grpc import certificate
from tests.support.ports import unused_port
from tests.support.webhooks import SECRET, Receiver
from tests.support.webhooks import Answer as Failing

Json = dict[str, Any]
BALANCE = {"tool_id": "demo.balance", "parameters": {"account": "cash"}}


SANDBOXED = """
from interlock import tool

@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True)
def one() -> int:
    "Give the number one."
    return 1
"""


def test_it_opens_the_sandbox_before_any_call_where_a_tool_needs_it(cli: Cli) -> None:
    (cli.path / "cell.py").write_text(SANDBOXED)
    assert cli("tools", "add", "cell.py").code == 0
    with running(cli, "--no-grpc", "--json") as server:
        ready = server.json["rest"].removesuffix("/v1") + "/ready"
        with httpx.Client(timeout=PATIENCE_S) as client:
            until = time.monotonic() + PATIENCE_S
            while client.get(ready).json()["dependencies"].get("sandbox") != "healthy":
                assert time.monotonic() < until
                time.sleep(0.1)
        assert server.end() == (0, "")


@pytest.mark.sqlite_only("nothing is configured")
@pytest.mark.proves("OPS-07")
def test_without_a_setting_it_is_one_process_with_its_store_in_a_file_and_needs_nobody(cli: Cli) -> None:
    assert not (cli.home / "settings.toml").exists()
    with running(cli, "--no-grpc", "--token", "--json") as server:
        told, process = server.json, Path(f"/proc/{server.process.pid}")
        port = httpx.URL(told["rest"]).port
        sent = {"tool_id": "demo.post", "parameters": {"account": "cash", "cents": 5}, "idempotency_key": "one"}
        with httpx.Client(headers=bearer(told["token"]), timeout=PATIENCE_S) as client:
            answers = [client.post(f"{told['rest']}/tools/invoke", json=sent).json() for _ in range(2)]
            parts = client.get(f"{told['rest'].removesuffix('/v1')}/ready").json()["dependencies"]
        assert [one["replayed"] for one in answers] == [False, True]
        assert parts["store"] == "healthy"
        assert not {"redis", "nodes"} & parts.keys()
        assert [one.read_text() for one in process.glob("task/*/children") if one.read_text()] == []
        opened = {os.readlink(one) for one in (process / "fd").iterdir()}
        assert {Path(one).name for one in opened if ".db" in one} >= {"interlock.db", "interlock.db-wal"}
        # It has a socket at which it is asked, and asks nobody.
        rows = [row.split() for kind in ("tcp", "tcp6") for row in (process / "net" / kind).read_text().splitlines()]
        own = {row[1].rpartition(":")[2] for row in rows if f"socket:[{row[9]}]" in opened}
        assert own == {f"{port:04X}"}
        assert server.end() == (0, "")


def test_it_says_where_it_is_answers_there_and_ends_on_sigterm(cli: Cli) -> None:
    with running(cli, "--grpc-port", "0", "--token", "--json") as server:
        told = server.json
        assert (told["tools"], told["home"]) == (3, str(cli.home))
        assert told["grpc"].startswith("127.0.0.1:")
        with httpx.Client(headers=bearer(told["token"]), timeout=PATIENCE_S) as client:
            called = client.post(f"{told['rest']}/tools/invoke", json=BALANCE)
            assert (called.status_code, called.json()["result"]) == (200, 1000)
            question = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": BALANCE}
            assert client.post(told["jsonrpc"], json=question).json()["result"]["structured_content"] == 1000
            assert client.get(told["docs"]).status_code == 200
            assert "tool_invocation_count{" in client.get(told["metrics"]).text
        assert httpx.post(f"{told['rest']}/tools/invoke", json=BALANCE, timeout=60).status_code == 401
        assert server.end() == (0, "")
    with pytest.raises(httpx.ConnectError):
        httpx.get(told["docs"], timeout=60)
    # What came through the doors is on record like any other call.
    made = [(one["tool"], one["state"]) for one in cli.ask("calls", "list")["calls"]]
    assert made == [("demo.balance@1.0.0", "succeeded")] * 2


COLLECTOR = """
import gc
from interlock import tool

@tool(version="1.0.0", mutation_class="read_only", namespace="process")
def exempt() -> bool:
    "Whether what was loaded is exempt from collection."
    return gc.get_freeze_count() > 0 and gc.get_threshold()[0] > 700
"""


def test_a_server_does_not_stop_to_collect_what_it_has_loaded(cli: Cli) -> None:
    (cli.path / "collector.py").write_text(COLLECTOR)
    assert cli("tools", "add", "collector.py").code == 0
    asked: Json = {"tool_id": "process.exempt", "parameters": {}}
    with running(cli, "--no-grpc", "--token", "--json") as server:
        told = server.json
        with httpx.Client(headers=bearer(told["token"]), timeout=PATIENCE_S) as client:
            until = time.monotonic() + PATIENCE_S
            # It goes on loading when it already answers.
            while client.post(f"{told['rest']}/tools/invoke", json=asked).json()["result"] is not True:
                assert time.monotonic() < until
        assert server.end() == (0, "")

    async def ask() -> Any:
        words = [*INTERLOCK[1:], "serve", "--stdio"]
        target = StdioServerParameters(command=sys.executable, args=words, env=cli.environment, cwd=str(cli.path))
        async with Client(target) as client:
            return (await client.call_tool("process-exempt", {})).structured_content

    assert asyncio.run(ask()) == {"result": True}


async def _through_mcp(target: Any) -> tuple[list[str], Any]:
    async with Client(target) as client:
        listed = await client.list_tools()
        called = await client.call_tool("demo-balance", {"account": "cash"})
        return sorted(one.name for one in listed.tools), called.structured_content


def test_on_an_empty_home_it_prints_all_that_a_first_call_takes(fresh: Cli) -> None:
    with running(fresh, "--no-grpc", "--token", until="Ctrl-C\n") as server:
        lines = server.said.splitlines()
        assert f"  Data      {fresh.home}" in lines
        assert lines[0].endswith("serves 3 demonstration tools")
        # The lines are pasted as they stand.
        export = next(line for line in lines if line.startswith("export TOKEN="))
        curl = next(line for line in lines if line.startswith("curl "))
        need("curl", "curl")
        script = ["bash", "-c", f"{export}\n{curl}"]
        pasted = subprocess.run(script, capture_output=True, timeout=PATIENCE_S, check=True)
        assert json.loads(pasted.stdout)["result"] == 1000
        entry: Json = json.loads(next(line for line in lines if line.startswith("{")))["mcpServers"]["interlock"]

        async def connect() -> tuple[list[str], Any]:
            async with httpx2.AsyncClient(headers=entry["headers"], timeout=PATIENCE_S) as http:
                return await _through_mcp(streamable_http_client(entry["url"], http_client=http))

        names, value = asyncio.run(connect())
        assert names == ["demo-balance", "demo-mail_statement", "demo-post"]
        assert value == {"result": 1000}
        code, err = server.end(signal.SIGINT)
    assert (code, err) == (0, "ending: calls in flight have 30 s to finish …\n")


def test_a_token_goes_to_a_terminal_and_not_into_a_log(fresh: Cli) -> None:
    with running(fresh, "--no-grpc", until="Ctrl-C\n") as server:
        assert "eyJ" not in server.said
        # The line that issues one is pasted as it stands, with the data directory that is served.
        export = next(line for line in server.said.splitlines() if line.startswith("export TOKEN="))
        program, *words = shlex.split(export.removeprefix("export TOKEN=$(").removesuffix(")"))
        assert shutil.which(program), "by its name, or by its path where that is not on the PATH"
        token = fresh(*words).out.strip()
        url = next(line.split()[1] for line in server.said.splitlines() if line.startswith("  REST"))
        called = httpx.post(f"{url}/tools/invoke", json=BALANCE, headers=bearer(token), timeout=PATIENCE_S)
        assert called.json()["result"] == 1000
        server.end()
    with running(fresh, "--no-grpc", "--json") as server:
        assert server.json["token"] is None
        server.end()
    outer, inner = pty.openpty()
    words = [*INTERLOCK, "serve", "--port", "0", "--no-grpc"]
    child = subprocess.Popen(words, stdout=inner, stderr=subprocess.DEVNULL, env=fresh.environment, cwd=fresh.path)
    os.close(inner)
    with open(outer, "rb", buffering=0) as terminal:
        said = b""
        while b"Ctrl-C" not in said and (more := terminal.read(4096)):
            said += more
        child.terminate()
        assert child.wait(PATIENCE_S) == 0
    assert b"export TOKEN=eyJ" in said


def test_an_mcp_client_can_start_it_as_its_own_server(cli: Cli) -> None:
    (cli.path / "noisy.py").write_text(
        "from interlock import tool\nprint('modules may speak')\n\n\n"
        "@tool(version='1.0.0', mutation_class='read_only', namespace='noisy')\n"
        'def hum() -> str:\n    """Hum a tune, and say so."""\n    print("so may tools")\n    return "mmm"\n'
    )
    words = [*INTERLOCK[1:], "serve", "--stdio", "--tools", "noisy.py"]
    server = StdioServerParameters(command=sys.executable, args=words, env=cli.environment, cwd=str(cli.path))
    names, value = asyncio.run(_through_mcp(server))
    assert names == ["demo-balance", "demo-mail_statement", "demo-post", "noisy-hum"]
    assert value == {"result": 1000}


HELLO: Json = {
    "id": 0, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}  # fmt: skip
NOISY = '''
import pathlib, sys, time
from interlock import tool

@tool(version="1.0.0", mutation_class="read_only", namespace="noisy", timeout_class="long_running", timeout_s=60,
      restart_safe=True)
def hum() -> str:
    """Hum a tune, and say so; for as long as the test wants."""
    print("so may tools")
    print("it has begun", file=sys.stderr, flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return "mmm"
'''


@pytest.mark.parametrize("ends", ["by itself", "by a signal"])
def test_what_tools_print_never_reaches_a_client_and_a_call_in_flight_is_answered(cli: Cli, ends: str) -> None:
    go = cli.path / "go"
    go.touch()
    (cli.path / "noisy.py").write_text(NOISY)
    assert cli("tools", "add", "noisy.py").code == 0
    go.unlink()
    # Clients start servers with an environment of their own, in which Python holds its outputs back.
    environment = {name: value for name, value in cli.environment.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [*INTERLOCK, "serve", "--stdio"],
        env=environment, cwd=cli.path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        call: Json = {"id": 1, "method": "tools/call", "params": {"name": "noisy-hum", "arguments": {}}}
        for request in (HELLO, call):
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **request}).encode() + b"\n")
            process.stdin.flush()
        said = b""
        while b"it has begun" not in said:
            line = process.stderr.readline()
            assert line, process.communicate()
            said += line
        if ends == "by a signal":
            process.send_signal(signal.SIGTERM)
        go.touch()
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [one["id"] for one in answers] == [0, 1]
        assert answers[1]["result"]["structuredContent"] == {"result": "mmm"}
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (out, process.returncode) == (b"", 0)
        assert b"so may tools" in said + err
    finally:
        process.kill()
        process.communicate()


PATIENT = """
import asyncio, pathlib, sys
from interlock import Effect, Preview, tool

@tool(version="1.0.0", mutation_class="write_reversible", namespace="patient", effects=[Effect("x", "UPDATE")])
async def change() -> str:
    "Change something, as soon as the test wants."
    print("begun", file=sys.stderr, flush=True)
    while not pathlib.Path("go").exists():
        await asyncio.sleep(0.01)
    return "changed"

@change.preview
def _() -> Preview:
    return Preview(impact="x")

@change.compensate
async def _() -> None:
    return None
"""


@pytest.mark.part_of("OPS-11", rest="manifests are validated and not applied to a cluster")
@pytest.mark.parametrize("ends", [True, False], ids=["in time", "too late"])
def test_a_call_that_outlives_the_drain_timeout_is_cut_off_as_unknown_and_a_shorter_one_is_answered(
    cli: Cli, ends: bool
) -> None:
    (cli.path / "patient.py").write_text(PATIENT)
    assert cli("tools", "add", "patient.py").code == 0
    drain_s = PATIENCE_S if ends else 1
    asked: Json = {"tool_id": "patient.change", "parameters": {}, "idempotency_key": "k"}
    words = ("--no-grpc", "--token", "--drain-timeout", str(drain_s))
    with running(cli, *words, until="Ctrl-C\n") as server, ThreadPoolExecutor(1) as threads:
        token = server.said.partition("export TOKEN=")[2].split()[0]
        rest = server.said.partition("REST")[2].split()[0]
        asking = threads.submit(
            httpx.post, f"{rest}/tools/invoke", json=asked, headers=bearer(token), timeout=PATIENCE_S
        )
        while (line := server.process.stderr.readline()) != b"begun\n":
            assert line, asking.result().text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr.readline() == f"ending: calls in flight have {drain_s} s to finish …\n".encode()
        if ends:
            with pytest.raises(httpx.ConnectError):  # nobody else is let in, from the next turn of the server on
                _ask_until_refused(rest)
            assert not asking.done()
            (cli.path / "go").touch()
        answer = asking.result()
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert (server.process.returncode, b"Traceback" in err) == (0, False)
    unknown = cli.ask("calls", "reconcile")["unknown"]
    if ends:
        assert (answer.status_code, answer.json()["result"], unknown) == (200, "changed", [])
    else:
        assert (answer.status_code, answer.json()["error"]["error_code"]) == (503, "E3001")
        (stranded,) = unknown
        assert stranded["tool"] == "patient.change"
        # The key is blocked: nobody knows whether the write took effect.
        assert cli("call", "patient.change", "{}", "--key", "k").code == 1


def _ask_until_refused(rest: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with suppress(httpx.ReadError, httpx.RemoteProtocolError):  # accepted, and closed before it had said anything
            httpx.get(f"{rest}/tools", timeout=PATIENCE_S)


def _stdio(cli: Cli) -> warm.Started:
    return warm.start(("serve", "--stdio"), cli.environment, cli.path)


def _said(process: warm.Started, *messages: Json) -> None:
    for message in messages:
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    process.stdin.flush()


@pytest.mark.supports("CONTRACT-13")
def test_a_line_over_the_limit_is_answered_with_an_error_and_the_next_one_is_served(cli: Cli) -> None:
    with _stdio(cli) as process:
        _said(process, HELLO)
        assert json.loads(process.stdout.readline())["id"] == 0
        process.stdin.write(b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": {"x": "' + b"y" * 20_000_000)
        process.stdin.write(b'"}}\n')
        _said(process, {"id": 8, "method": "ping"})
        refused, served = (json.loads(process.stdout.readline()) for _ in range(2))
        assert (refused["id"], refused["error"]["data"]["error_code"]) == (7, "E3309")
        assert (served["id"], served["result"]) == (8, {})
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert (out, process.returncode) == (b"", 0)


BROKEN = """
import pathlib
from interlock import tool

@tool(version="1.0.0", mutation_class="read_only", namespace="own")
def breaks() -> str:
    "Fail, once it was admitted, in a way that nobody foresaw."
    if pathlib.Path("admitted").exists():
        raise RuntimeError("cannot read /srv/private/signing.key with password=correcthorsebattery")
    return "sound"
"""


@pytest.mark.proves("CONTRACT-13")
def test_the_log_of_a_server_over_stdio_says_what_its_client_is_not_told_under_the_same_trace(cli: Cli) -> None:
    (cli.path / "broken.py").write_text(BROKEN)
    assert cli("tools", "add", "broken.py").code == 0
    (cli.path / "admitted").touch()
    (cli.home / "settings.toml").write_text('log_format = "json"')
    with _stdio(cli) as process:
        _said(process, HELLO, {"id": 1, "method": "tools/call", "params": {"name": "own-breaks", "arguments": {}}})
        assert json.loads(process.stdout.readline())["id"] == 0
        line = process.stdout.readline()
        _, log = process.communicate(timeout=PATIENCE_S)
        envelope: Json = json.loads(line)["result"]["_meta"]["interlock/error"]
        assert envelope["error_code"] == "E3401"
        entries: list[Json] = [json.loads(one) for one in log.splitlines()]
        (entry,) = [one for one in entries if one["trace_id"] == envelope["traceId"]]
        assert entry["level"] in ("warning", "error")
        for detail in ("Traceback", "RuntimeError: cannot read /srv/private/signing.key", "in breaks"):
            assert detail in str(entry)
            assert detail not in line.decode()
        assert b"correcthorse" not in log + line


@pytest.mark.supports("CONTRACT-13")
def test_a_line_of_too_many_values_or_with_a_long_id_is_refused_and_the_next_one_is_served(cli: Cli) -> None:
    with _stdio(cli) as process:
        _said(process, HELLO)
        assert json.loads(process.stdout.readline())["id"] == 0
        _said(process, {"id": 7, "method": "ping", "params": {"x": [1] * 300_000}}, {"id": "x" * 257, "method": "ping"})
        _said(process, {"id": 8, "method": "ping"})
        refused, nameless, served = (json.loads(process.stdout.readline()) for _ in range(3))
        assert (refused["id"], refused["error"]["data"]["error_code"]) == (7, "E3004")
        assert (nameless["id"], nameless["error"]["data"]["error_code"]) == (None, "E3004")
        assert (served["id"], served["result"]) == (8, {})
        process.communicate(timeout=PATIENCE_S)


def test_a_client_that_does_not_read_neither_fills_the_memory_nor_keeps_the_server_from_ending(cli: Cli) -> None:
    with _stdio(cli) as process:
        _said(process, HELLO)
        assert json.loads(process.stdout.readline())["id"] == 0
        # Both pipes are filled: more answers than a pipe holds, and then more requests than are read meanwhile.
        os.set_blocking(process.stdin.fileno(), False)
        lists = b"".join(
            json.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/list", "params": {}}).encode() + b"\n"
            for number in range(1, 1000)
        )
        written = 0
        idle = 0
        while idle < 20 and written < 30_000_000:
            try:
                written += os.write(process.stdin.fileno(), lists)
                idle = 0
            except BlockingIOError:
                idle += 1
                select.select([], [process.stdin], [], 0.25)
        assert written < 5_000_000, "it stops reading"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_with_two_files_it_speaks_tls(cli: Cli) -> None:
    cert, key = certificate(cli.path)
    with running(
        cli, "--no-grpc", "--cert", str(cert), "--key", str(key), "--name", "localhost", "--token", "--json"
    ) as server:
        told = server.json
        assert told["rest"].startswith("https://localhost:")
        assert told["grpc"] is None
        trusted = ssl.create_default_context(cafile=str(cert))
        called = httpx.post(
            f"{told['rest']}/tools/invoke", json=BALANCE, headers=bearer(told["token"]), verify=trusted, timeout=60
        )
        assert called.json()["result"] == 1000
        assert server.end()[0] == 0


def test_without_tools_and_without_a_token_it_says_how_to_go_on(fresh: Cli) -> None:
    words = ("--host", "0.0.0.0", "--bare", "--no-token", "--no-grpc")
    with running(fresh, *words, until="Ctrl-C\n") as server:
        assert "serves 0 tools; clients elsewhere are refused until you say by which name" in server.said
        assert "  REST      http://127.0.0.1:" in server.said
        assert "interlock tools add FILE.py" in server.said
        assert "eyJ" not in server.said
        code, err = server.end()
        assert code == 0
        assert "warning: this is plain HTTP on a network: tokens and results travel in clear" in err


def test_all_addresses_are_those_of_both_protocols(fresh: Cli) -> None:
    with running(fresh, "--host", "::", "--no-grpc", "--json") as server:
        told = server.json
        port = told["base_url"].rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]") if socket.has_dualstack_ipv6() else ("[::1]",):
            assert httpx.get(f"http://{host}:{port}/health", timeout=PATIENCE_S).status_code == 200
        assert httpx.get(f"{told['base_url']}/health", timeout=PATIENCE_S).status_code == 200


def test_behind_a_proxy_it_speaks_of_itself_by_its_public_address(fresh: Cli) -> None:
    port = unused_port()
    with running(
        fresh, "--public-url", "https://tools.example.com/", "--port", str(port), "--no-grpc", "--json"
    ) as server:
        assert server.json["mcp"] == "https://tools.example.com/mcp"
        here, named = f"http://127.0.0.1:{port}", {"host": "tools.example.com"}
        with httpx.Client(base_url=here, headers=named, timeout=PATIENCE_S) as client:
            metadata = client.get("/.well-known/oauth-protected-resource/mcp").json()
            challenge = client.post("/mcp", json={}).headers["www-authenticate"]
            # Whoever asks by another name than loopback's came through somebody else.
            assert client.get("/metrics").status_code == 401
        assert metadata["resource"] == "https://tools.example.com/mcp"
        assert 'resource_metadata="https://tools.example.com/' in challenge
        assert httpx.get(f"{here}/metrics", timeout=PATIENCE_S).status_code == 200


def test_a_port_that_is_taken_is_named_and_the_way_out_too(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = cli("serve", "--port", port, "--no-grpc")
        assert ended.code == 1
        assert f"127.0.0.1:{port}" in ended.err
        assert "--port" in ended.err
        ended = cli("serve", "--port", "0", "--grpc-port", port)
        assert ended.code == 1
        assert "E3108" in ended.err
        assert "--grpc-port, or --no-grpc" in ended.err
        assert "add_port" not in ended.err, "what the library says of it is not for people"
    nowhere = cli("serve", "--port", "0", "--host", "203.0.113.7", "--no-grpc")
    assert "choose an address of this machine with --host" in nowhere.err


def test_what_cannot_be_meant_is_a_usage_error(fresh: Cli) -> None:
    wrong = fresh.path / "wrong.pem"
    wrong.write_text("not a key")
    for words, message in (
        (("--cert", str(wrong)), "TLS needs both --cert and --key"),
        (("--cert", str(wrong), "--key", str(wrong)), "are no certificate (PEM)"),
        (("--port", "99999"), "not in the range"),
        (("--name", "http://x/"), "--name takes a host name or an address"),
        (("--origin", "foo"), "--origin takes scheme and host"),
        (("--public-url", "tools.example.com"), "--public-url takes scheme and host"),
        (("--cert", "missing.pem", "--key", str(wrong)), "does not exist"),
    ):
        ended = fresh("serve", *words)
        assert ended.code == 2
        assert message in ended.err
    assert not fresh.home.exists()


ECHO = """
def echo_tool(message):
    return {"echoed": message}
"""
# As the seed has it: without mutation class, idempotency, descriptions and all else that admission asks for.
BARE: Json = {
    "tool_id": "echo_tool",
    "version": "1.0.0",
    "name": "Echo Tool",
    "description": "Echoes input back",
    "parameters": {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]},
    "result_schema": {"type": "object", "properties": {"echoed": {"type": "string"}}},
}
COMPLETE: Json = {
    **BARE,
    "provider": "local",
    "protocol": "native",
    "mutation_class": "read_only",
    "parameters": {
        "type": "object",
        "properties": {"message": {"type": "string", "description": "what to send back", "examples": ["Hello World"]}},
        "required": ["message"],
    },
    "required_permissions": [],
    "idempotency": {},
    "observability": {},
    "timeout_class": "standard",
    "execution": {"target": "echoes.py:echo_tool"},
}


def written(path: Path, document: Json) -> str:
    path.write_text(json.dumps(document))
    return path.name


@pytest.mark.proves("OPS-01")
def test_the_echo_flow_and_its_denial_through_the_command_line(fresh: Cli) -> None:
    (fresh.path / "echoes.py").write_text(ECHO)
    refused = fresh.ask("tools", "add", written(fresh.path / "bare.json", BARE))
    assert refused["admitted"] == []
    assert "/provider" in json.dumps(refused)
    added = fresh("tools", "add", written(fresh.path / "echo.json", COMPLETE), "--json")
    assert (added.code, "default.echo_tool" in added.out) == (0, True), added.out + added.err
    token = fresh("token", "issue", "--agent", "caller", "--tool", "default.echo_tool").out.strip()
    holder = Cli(fresh.path, {"INTERLOCK_TOKEN": token})
    result = holder.call("default.echo_tool", {"message": "Hello World"})
    assert result["structured_content"] == {"echoed": "Hello World"}
    assert holder.ask("calls", "show", result["invocation_id"])["state"] == "succeeded"
    found = holder.ask("tools", "search", "echoes", "input")["tools"]
    assert [one["tool"] for one in found] == ["default.echo_tool"]
    assert holder.ask("tools", "search", "nothing", "like", "it")["tools"] == []
    malformed = holder.call("default.echo_tool", {"massage": "Hello World"})
    assert malformed["error"]["error_code"] == "E3301"
    # Denied: the token names another tool.
    other = fresh("token", "issue", "--agent", "other", "--tool", "default.nothing").out.strip()
    denied = Cli(fresh.path, {"INTERLOCK_TOKEN": other}).call("default.echo_tool", {"message": "Hello World"})
    assert denied["error"]["error_code"] == "E3204"
    # A tool that the token does not name is not found either.
    assert Cli(fresh.path, {"INTERLOCK_TOKEN": other}).ask("tools", "search", "echoes")["tools"] == []
    # Audit and query, as over REST.
    explained = fresh.ask("audit", "explain", result["invocation_id"])
    assert "default.echo_tool" in " ".join(explained["story"])
    assert fresh("audit", "verify").code == 0
    listed = fresh.ask("calls", "list")["calls"]
    assert result["invocation_id"] in [one["invocation_id"] for one in listed]
    finished = holder.ask("calls", "cancel", result["invocation_id"])
    assert finished == {"invocation_id": result["invocation_id"], "outcome": "finished"}


@pytest.mark.proves("OPS-01")
def test_a_call_that_waits_for_a_person_is_cancelled_on_the_command_line(cli: Cli) -> None:
    waiting = cli.call("demo.mail_statement", {"account": "cash", "to": "a@example.com"}, "--key", "k")
    assert waiting["status"] == "awaiting_approval"
    cancelled = cli("calls", "cancel", waiting["invocation_id"], "--json")
    assert (cancelled.code, cancelled.json["outcome"]) == (0, "canceled")
    again = cli("calls", "cancel", waiting["invocation_id"])
    assert again.code == 1
    assert "it has ended already" in again.out


HOOKED = """
[[channels]]
name = "hook"
webhook = "{url}"
secret_file = "{secret}"
allow_private = true
"""


@pytest.mark.proves("HITL-06")
async def test_a_running_server_notifies_approvers_by_itself_and_sends_again_what_failed(cli: Cli) -> None:
    (cli.path / "secret").write_text(SECRET)
    async with Receiver.open() as receiver:
        receiver.answers = [Failing(503)]
        (cli.home / "settings.toml").write_text(HOOKED.format(url=receiver.url, secret=cli.path / "secret"))
        with running(cli, "--no-grpc", "--token", "--json") as server:
            told = server.json
            question = {
                "tool_id": "demo.mail_statement",
                "parameters": {"account": "cash", "to": "a@example.com"},
                "idempotency_key": "k",
            }
            async with httpx.AsyncClient(headers=bearer(told["token"]), timeout=PATIENCE_S) as client:
                asked = await client.post(f"{told['rest']}/tools/invoke", json=question)
            assert asked.status_code == 202
            async with asyncio.timeout(PATIENCE_S), receiver.arrived:
                await receiver.arrived.wait_for(lambda: len(receiver.got) >= 2)
            assert server.end() == (0, "")
    first, again = receiver.got
    assert first.headers["webhook-id"] == again.headers["webhook-id"]
    assert json.loads(again.body)["data"]["ticket"] == asked.json()["pending"]["ticketId"]
