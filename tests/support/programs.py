"""Manifests of tools that are programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from interlock.data.schema import Json

TEXT: Json = {"type": "string", "description": "any text", "examples": ["hello"]}
MANY: Json = {"type": "array", "items": {"type": "string"}, "description": "texts", "examples": [["a", "b"]]}
NUMBER: Json = {"type": "integer", "description": "a number", "examples": [3]}
PRINT = "import json, sys; print(json.dumps(sys.argv[2:]))"
MARK = "98731"  # how long the hanging programs would sleep, so that they can be found


def manifest(tool_id: str, argv: list[str], result: Json | None = None, **said: Any) -> Json:
    execution = {"kind": "program", "target": argv[0], "argv": argv, **said.pop("execution", {})}
    parameters: Json = said.pop("parameters", {})
    required = said.pop("required", list(parameters))
    return {
        "tool_id": tool_id,
        "namespace": "prog",
        "version": "1.0.0",
        "name": f"Program {tool_id}",
        "description": "A program that the tests run.",
        "provider": "local",
        "protocol": "native",
        "mutation_class": "read_only",
        "parameters": {"type": "object", "properties": parameters, "required": required},
        "result_schema": {"type": "string"} if result is None else result,
        "required_permissions": [],
        "idempotency": {},
        "observability": {},
        "timeout_class": "standard",
        "execution": execution,
        **said,
    }


STRINGS: Json = {"type": "array", "items": {"type": "string"}}
TOOLS = [
    manifest(
        "echo", ["python3", "-I", "-c", PRINT, "--", "{text}", "{more...}"], STRINGS,
        parameters={"text": TEXT, "more": MANY}, required=["text"], execution={"parse": "json"},
    ),
    manifest(
        "default", ["printf", "--", "%s", "{text}"], parameters={"text": {**TEXT, "default": "unsaid"}}, required=[]
    ),
    manifest("bare", ["printf", "%s", "{text}"], parameters={"text": TEXT}),
    manifest("option", ["printf", "--", "%s", "--name={text}"], parameters={"text": TEXT}),
    manifest(
        "exits", ["sh", "-c", "echo out; printf 'one\\n\\033[31mred\\033[0m\\r\\n' >&2; exit $0", "{status}"],
        parameters={"status": NUMBER},
    ),
    manifest("segv", ["sh", "-c", "kill -SEGV $$"]),
    manifest("quits", ["sh", "-c", "echo goodbye >&2; kill -TERM $$"]),
    manifest("hang", ["sh", "-c", f"(setsid sleep {MARK} &); setsid sleep {MARK} & sleep {MARK}"]),
    manifest("flood", ["yes"]),
    manifest("unasked", ["cat"], {"type": "object"}, parameters={"text": TEXT, "more": MANY},
             execution={"parse": "json"}),
    manifest("asked", ["sh", "-c", 'printf "%s\\n%s\\n" "$1" "$(cat)"', "sh", "{text}"],
             {"type": "array", "items": {"type": "string"}}, parameters={"text": TEXT}, execution={"parse": "lines"}),
    manifest("stdin", ["cat"], {"type": "object"}, parameters={"text": TEXT, "more": MANY},
             execution={"stdin": "json", "parse": "json"}),
    manifest("words", ["wc", "-w"], {"type": "integer"}, parameters={"text": TEXT},
             execution={"stdin": "text", "parse": "json"}),
    manifest("lines", ["printf", "--", "%s\\n", "{more...}"], STRINGS, parameters={"more": MANY},
             execution={"parse": "lines"}),
    manifest("env", ["env"], STRINGS, execution={"parse": "lines", "env": {"GREETING": "a b", "LANG": "C"}}),
    manifest("where", ["pwd"], execution={"cwd": "/usr"}),
    manifest("torn", ["printf", '{"a": '], {"type": "object"}, execution={"parse": "json"}),
    manifest("binary", ["printf", "\\377"]),
    manifest("misfit", ["printf", "12"], execution={"parse": "json"}),
    manifest("missing", ["no-such-program"]),
    manifest("lent", ["sh", "-c", "wc -c < $HOME/.secrets/prog.key; cat $HOME/.secrets/prog.key; env"],
             required_permissions=["credentials:prog/key"]),
    manifest(
        "post", ["printf", "--", "%s", "{text}"], parameters={"text": TEXT}, mutation_class="write_irreversible",
        effects=[{"resource": "box:{text}", "operation": "CREATE"}],
    ),
]  # fmt: skip
NAMED: dict[str, Json] = {one["tool_id"]: one for one in TOOLS}


def written(path: Path, *documents: Json) -> str:
    path.write_text(json.dumps(documents))
    return str(path)
