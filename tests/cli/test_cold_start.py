"""Commands load what they need and nothing else: starting them is most of what an ordinary command costs.

These tests hold the packages that are loaded, not the time that it takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import orjson
import pytest

_LOADED = """
import sys
sys.argv = ["interlock", *sys.argv[1:]]
from interlock.cli import main
try:
    main()
finally:
    own = {name for name in sys.modules if name.partition(".")[0] == "interlock"}
    others = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
    others = {name for name in others if not name.startswith("_")} - {"interlock", "distutils-precedence"}
    heavy = {"asyncio", "ssl", "email"} & sys.modules.keys()
    print(" ".join(sorted(others | heavy)), file=sys.stderr)
    print(" ".join(sorted({".".join(name.split(".")[:2]) for name in own})), file=sys.stderr)
"""
CALL = {
    "invocation_id": "01JC", "at": "2026-07-01T12:00:00.000Z", "tool": "demo.post@1.0.0", "caller": "did:web:a:bot",
    "caller_name": "bot", "tenant": "local", "key": None, "state": "succeeded", "error_code": None, "error": None,
    "source": "compute", "latency_ms": 3.0, "cost": None,
}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = orjson.dumps({"calls": [CALL], "before": None})
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


def loaded(home: Path, *words: str) -> tuple[str, set[str], set[str]]:
    """Run a command: its output, the packages of others that it loaded, and those of Interlock."""
    environment = {**os.environ, "INTERLOCK_HOME": str(home), "INTERLOCK_TOKEN": "token"}
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *words], env=environment, capture_output=True, text=True, check=True
    )
    *_, others, own = done.stderr.splitlines()
    return done.stdout, set(others.split()), set(own.split())


BARE = {"interlock", "interlock._version", "interlock.cli"}


def test_the_version_and_the_help_load_nothing_but_the_commands(tmp_path: Path) -> None:
    _, others, own = loaded(tmp_path, "--version")
    assert (others, own) == ({"click"}, BARE)
    _, others, own = loaded(tmp_path, "--help")
    assert (others, own) == ({"click"}, BARE | {"interlock.upstreams"})


def test_a_list_of_calls_of_a_server_loads_no_model_and_no_part_of_the_gateway(tmp_path: Path, server: str) -> None:
    said, others, own = loaded(tmp_path, "--server", server, "calls", "list")
    assert "demo.post@1.0.0" in said
    assert "bot" in said.splitlines()[1].split()
    assert others == {"asyncio", "click", "email", "orjson", "rich", "ssl"}
    assert own == BARE | {"interlock.core", "interlock.data"}


@pytest.mark.parametrize("words", [("calls", "list"), ("tools", "list")], ids=" ".join)
def test_lists_of_a_data_directory_read_the_database_alone(
    tmp_path: Path, admitted: Path, words: tuple[str, ...]
) -> None:
    _, others, own = loaded(admitted, *words)
    assert others == {"click", "orjson", "rich"}
    assert own <= BARE | {f"interlock.{name}" for name in ("api", "contract", "core", "data", "registry", "store")}
