"""`interlock --verbose`: whoever sits at the machine sees why a program or an upstream failed; results do not tell."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.cli import Cli
from tests.support.http_tools import SHOP
from tests.support.programs import TEXT, manifest, written

COMPLAINS = r"""
[ "$1" = hello ] && echo fine && exit 0
printf 'no room\033[2J in the ledger\nasked by ann@example.org\n' >&2
kill -9 $$
"""


def test_a_programs_last_words_are_shown_without_what_is_private_and_told_to_nobody_else(fresh: Cli) -> None:
    ledger = manifest(
        "ledger", ["sh", "-c", COMPLAINS, "sh", "{text}"], {"type": "string"}, parameters={"text": TEXT},
        execution={"parse": "text"},
    )  # fmt: skip
    assert fresh("tools", "add", written(fresh.path / "ledger.json", ledger)).code == 0
    words = ("call", "prog.ledger", '{"text": "fail"}')
    seen, plain = fresh("--verbose", *words), fresh(*words)
    assert (seen.code, plain.code) == (1, 1)
    assert "no room in the ledger" in seen.err
    assert "ann@example.org" not in seen.err
    assert "no room" not in seen.out + plain.out + plain.err


class Shop(BaseHTTPRequestHandler):
    """A shop without orders."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass


def test_why_an_upstream_could_not_be_reached_is_shown(fresh: Cli) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Shop) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        document = {**SHOP, "servers": [{"url": f"http://127.0.0.1:{port}"}]}
        (fresh.path / "shop.json").write_text(json.dumps(document))
        assert fresh("upstream", "add", "openapi", "shop", "shop.json", "--accept-hints", "--allow-private").code == 0
        server.shutdown()
    seen = fresh("--verbose", "call", "shop.list_orders", "{}")
    assert seen.code == 1
    assert "Connect call failed" in seen.err
    assert str(port) in seen.err
    plain = fresh("call", "shop.list_orders", "{}")
    assert "Connect call failed" not in plain.out + plain.err + seen.out


SERVER = r"""
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        told = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "x", "version": "1"}}
    elif asked["method"] == "tools/list":
        told = {"tools": [{"name": "look", "description": "Look at what there is here.",
                           "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}]}
    elif asked["method"] == "tools/call" and not os.path.exists("full"):
        told = {"content": [{"type": "text", "text": "fine"}]}
    elif asked["method"] == "tools/call":
        print("the disk is full; asked by ann@example.org", file=sys.stderr, flush=True)
        sys.exit(1)
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "no"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": told}), flush=True)
"""


def test_the_last_words_of_a_server_that_ended_are_shown(fresh: Cli) -> None:
    (fresh.path / "server.py").write_text(SERVER)
    added = fresh("upstream", "add", "mcp", "disk", "--accept-hints", "--", sys.executable, "server.py")
    assert added.code == 0, added.err
    (fresh.path / "full").touch()
    seen = fresh("--verbose", "call", "disk.look", "{}")
    assert seen.code == 1
    assert "the disk is full" in seen.err
    assert "ann@example.org" not in seen.out + seen.err
    plain = fresh("call", "disk.look", "{}")
    assert "the disk is full" not in plain.out + plain.err + seen.out
