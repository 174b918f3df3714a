"""Manifests of tools, and the values that each field accepts and refuses."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
COMPLETE: Json = {
    "tool_id": "balance",
    "namespace": "bank",
    "version": "1.0.0",
    "name": "Balance",
    "description": "Balance of one account, in cents.",
    "provider": "local",
    "protocol": "native",
    "parameters": {
        "type": "object",
        "properties": {
            "account": {"type": "string", "description": "ledger account", "examples": ["cash"]},
            "token": {
                "type": "string", "description": "access token", "examples": ["abc"],
                "x-sensitivity": "credential", "x-token-cost": 12,
            },
            "tenant": {"type": "string", "description": "set by the runtime", "examples": ["t1"], "x-internal": True},
        },
        "required": ["account", "tenant"],
    },
    "result_schema": {"type": "integer"},
    "required_permissions": ["database:ledger:read"],
    "required_scopes": ["ledger.read"],
    "timeout_class": "standard",
    "idempotency": {},
    "mutation_class": "read_only",
    "observability": {},
}  # fmt: skip
# path, accepted values, refused values
REQUIRED: list[tuple[str, list[Any], list[Any]]] = [
    ("tool_id", ["abc", "a" * 255, "a_1", "z99"], ["ab", "a" * 256, "Abc", "1bc", "_bc", "a-b", "a.b", "ab\u00e9",
         "abc\n", "", 5, None]),
    ("version", ["0.0.0", "1.2.3", "1.2.3-rc.1", "1.2.3+build.5", "1.2.3-a.b+c.d", "10.20.30", "1.2.3-0"],
     ["1", "1.2", "1.2.3.4", "01.2.3", "1.02.3", "1.2.03", "1.2.3-01", "1.2.3-RC", "1.2.3+B", "v1.2.3", "1.2.3-",
     "1.2.3+", "1.2.3-a..b",
      " 1.2.3", "1.2.3\n", "1.2.-3", "\u0661.2.3", "", 1.2, None]),
    ("name", ["abc", "a" * 255, "\u00e9\u00e9\u00e9"], ["ab", "a" * 256, "", 5, None]),
    ("description", ["a" * 10, "a" * 2000], ["a" * 9, "a" * 2001, "", 5, None]),
    ("provider", ["p", "Platform Team"], [5, None, ["p"]]),
    ("protocol", ["native", "mcp", "openapi", "langchain", "custom"], ["grpc", "Native", "", None, 5]),
    ("parameters", [{}, {"type": "object", "properties": {"a": {"type": "integer"}}}, {"$defs": {"a": {}},
         "$ref": "#/$defs/a"}],
     [{"type": "text"}, {"properties": []}, {"required": "a"}, {"minLength": -1}, {"pattern": "("}, "object", True,
     None, []]),
]  # fmt: skip
