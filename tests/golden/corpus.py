"""The corpus: cases of one or more requests. Every case is sent through every wire, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from interlock.core.errors import CODES

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request for a call, as every wire can carry it. `{case}` in texts becomes the case and the wire."""

    tool: str
    arguments: Any = field(default_factory=dict[str, Any])
    key: str | None = None
    dry_run: bool = False
    version: str | None = None
    token: str = "full"


@dataclass(frozen=True, slots=True)
class Decision:
    """A reviewer decides about the ticket that the last request opened."""

    approve: bool


@dataclass(frozen=True, slots=True)
class Raw:
    """One HTTP request as it stands, for everything that is not a call."""

    method: str
    path: str
    body: bytes = b""
    token: bool = True
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


Case = Sequence[Wanted | Decision]


def _one(tool: str, _arguments: Any = None, **options: Any) -> Case:
    return (Wanted(f"gold.{tool}", {} if _arguments is None else _arguments, **options),)


_SEND = Wanted("gold.send", {"to": "{case}"}, key="{case}")
_COUNT = Wanted("gold.count", {"name": "{case}"}, key="{case}")

CASES: Mapping[str, Case] = {
    "read": (Wanted("gold.add", {"a": 2, "b": 3}),) * 3,
    "read-default": _one("add", {"a": 2}),
    "read-thread": _one("shout", {"text": "größe\n\u2028"}),
    "read-null": _one("echo", {"value": None}),
    "read-data": _one("echo", {"value": {"a": [1, 2.5, -0.0, True, None, "é\u0000"], "b": {}, "": ""}}),
    "read-big-number": _one("echo", {"value": 2**70}),
    "read-progress": _one("climb", {"steps": 3}),
    "read-private": _one("person", {"name": "Ann"}),
    "read-kept": _one("much", {"times": 200}),
    "read-isolated": _one("isolated", {"text": "abc"}),
    "read-version": _one("add", {"a": 1}, version="1.0.0"),
    "read-range": _one("add", {"a": 1}, version="^1.0"),
    "write": (_COUNT,),
    "write-again": (_COUNT, _COUNT),
    "write-other-arguments": (_COUNT, Wanted("gold.count", {"name": "other"}, key="{case}")),
    "write-without-key": _one("count", {"name": "a"}),
    "write-bad-key": _one("count", {"name": "a"}, key="k" * 300),
    "write-unknown": (Wanted("gold.strand", {"name": "{case}"}, key="{case}"),) * 2,
    "dry-run": _one("count", {"name": "a"}, key="{case}", dry_run=True),
    "dry-run-read": _one("add", {"a": 1}, dry_run=True),
    "approval-pending": (_SEND, _SEND),
    "approval-given": (_SEND, Decision(approve=True), _SEND),
    "approval-refused": (_SEND, Decision(approve=False), _SEND),
    "invalid": _one("add", {"a": "two"}),
    "invalid-missing": _one("add", {"b": 1}),
    "invalid-more": _one("add", {"a": 1, "c": 2}),
    "invalid-not-an-object": _one("add", [1]),
    "invalid-own-check": _one("checked", {"text": "bad"}),
    "unknown-tool": _one("nothing", {}),
    "unknown-version": _one("add", {"a": 1}, version="9.0.0"),
    "unknown-range": _one("add", {"a": 1}, version="not a range"),
    "token-narrow": _one("add", {"a": 1}, token="narrow"),
    "token-none": _one("add", {"a": 1}, token="none"),
    "token-malformed": _one("add", {"a": 1}, token="malformed"),
    "token-forged": _one("add", {"a": 1}, token="forged"),
    "token-expired": _one("add", {"a": 1}, token="expired"),
    "fails": _one("fail", {"code": "unforeseen"}),
    "fails-isolated": _one("isolated", {"text": "fail"}),
    "fails-crash": _one("isolated", {"text": "crash"}),
    "fails-time": _one("dawdle", {"text": "a"}),
    "fails-result": _one("misfit", {"text": "a"}),
}
# A tool that fails with each code of the table.
BY_CODE: Mapping[str, Case] = {code: _one("fail", {"code": code}) for code in CODES}


def _rpc(method: str, params: str = "{}") -> Raw:
    return Raw("POST", "/rpc", f'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}'.encode())


def _mcp(method: str, params: str = "") -> Raw:
    spoken = "io.modelcontextprotocol"
    meta = f'"_meta":{{"{spoken}/protocolVersion":"2026-07-28","{spoken}/clientCapabilities":{{}}}}'
    body = f'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{{{meta}{params}}}}}'
    headers = {
        "accept": "application/json, text/event-stream", "mcp-protocol-version": "2026-07-28", "mcp-method": method,
    }  # fmt: skip
    return Raw("POST", "/mcp", body.encode(), headers=headers)


RAW: Mapping[str, Raw] = {
    "health": Raw("GET", "/health", token=False),
    "ready": Raw("GET", "/ready", token=False),
    "tools": Raw("GET", "/v1/tools"),
    "tools page": Raw("GET", "/v1/tools?limit=2"),
    "tools without token": Raw("GET", "/v1/tools", token=False),
    "tool": Raw("GET", "/v1/tools/gold.add"),
    "no tool": Raw("GET", "/v1/tools/gold.nothing"),
    "declarations": Raw("GET", "/v1/tools/declarations?limit=2"),
    "no call": Raw("GET", "/v1/calls/01MCC5Y3S0F416E11001D5159C"),
    "no path": Raw("GET", "/v1/nothing"),
    "no method": Raw("DELETE", "/v1/tools/invoke"),
    "no json": Raw("POST", "/v1/tools/invoke", b"{"),
    "no body": Raw("POST", "/v1/tools/invoke"),
    "no object": Raw("POST", "/v1/tools/invoke", b"[]"),
    "unknown member": Raw("POST", "/v1/tools/invoke", b'{"tool_id":"gold.add","parameters":{"a":1},"other":1}'),
    "other type": Raw("POST", "/v1/tools/invoke", b"a=1", headers={"content-type": "text/plain"}),
    "foreign host": Raw("GET", "/v1/tools", headers={"host": "example.org"}),
    "foreign origin": Raw("GET", "/v1/tools", headers={"origin": "https://example.org"}),
    "rpc no json": Raw("POST", "/rpc", b"{"),
    "rpc no request": Raw("POST", "/rpc", b"{}"),
    "rpc no method": _rpc("nothing"),
    "rpc empty batch": Raw("POST", "/rpc", b"[]"),
    "rpc batch": Raw(
        "POST", "/rpc",
        b'[{"jsonrpc":"2.0","id":1,"method":"tools.invoke","params":{"tool_id":"gold.add","parameters":{"a":1}}},'
        b'{"jsonrpc":"2.0","method":"tools.invoke","params":{"tool_id":"gold.add","parameters":{"a":1}}},{"id":2}]',
    ),
    "rpc tools": _rpc("tools.list"),
    "mcp discover": _mcp("server/discover"),
    "mcp tools": _mcp("tools/list"),
    "mcp ping": _mcp("ping"),
    "mcp no method": _mcp("nothing/at-all"),
    "mcp resources": _mcp("resources/list"),
    "mcp prompts": _mcp("prompts/list"),
    "mcp no json": Raw("POST", "/mcp", b"{", headers={"accept": "application/json, text/event-stream"}),
    "mcp without token": Raw("POST", "/mcp", b"{}", token=False),
    "mcp get": Raw("GET", "/mcp"),
}  # fmt: skip
