"""An MCP server by hand, over its pipes: every message is written as it stands here, also those no server should send.

Options: `--protocol V` answers the handshake with that version; `--modern` speaks 2026-07-28 and nothing else;
`--bare` declares tools and nothing else; `--strict` ends when the first word is not the handshake;
`--die` ends at once; `--dumb` answers nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

Json = dict[str, Any]
OPTIONS = sys.argv[1:]
OBJECT: Json = {"type": "object", "properties": {}}
held: list[Json] = []
late: list[Json] = []
cancelled: list[Any] = []
metas: list[Json] = []
heard: list[str] = []
hello: Json = {}
tools: list[Any] = [
    {
        "name": "echo",
        "title": "Echo",
        "description": "Says what it was told.",
        "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
        "outputSchema": {"type": "object", "properties": {"text": {"type": "string"}}},
        "annotations": {"readOnlyHint": True, "x-odd": 1},
    },
    {"name": "shuffle", "description": "Waits for twenty, then answers backwards.", "inputSchema": OBJECT},
    {"name": "spoilt", "description": "Cannot be understood.", "inputSchema": {"type": "nonsense"}},
    {"name": "hang", "description": "Never answers.", "inputSchema": OBJECT},
    {"name": "exit", "description": "Ends in the middle of a call.", "inputSchema": OBJECT},
    {"name": "grow", "description": "Offers one more tool.", "inputSchema": OBJECT},
    {"name": "state", "description": "Tells about the process.", "inputSchema": OBJECT},
]
if "--failing" in OPTIONS:
    takes: Json = {"type": "object", "properties": {"word": {"type": "string"}}}
    about: Json = {"description": "Says that it failed, once it has a word.", "annotations": {"readOnlyHint": True}}
    tools.append({"name": "moody", "inputSchema": takes, **about})


def send(message: Any) -> None:
    sys.stdout.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
    sys.stdout.flush()


def answer(request: Json, result: Json) -> None:
    send({"jsonrpc": "2.0", "id": request["id"], "result": result})


def refuse(request: Json, code: int, message: str, data: Any = None) -> None:
    send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": code, "message": message, "data": data}})


def notify(method: str, params: Json | None = None) -> None:
    send({"jsonrpc": "2.0", "method": method, "params": params or {}})


def text(words: str, **more: Any) -> Json:
    return {"content": [{"type": "text", "text": words}], **more}


def ask(method: str, params: Json) -> Json:
    """Put a question to the client and wait for the answer to it."""
    send({"jsonrpc": "2.0", "id": "question", "method": method, "params": params})
    while True:
        message = json.loads(sys.stdin.readline())
        if message.get("id") == "question":
            return message


def call(request: Json) -> None:
    params: Json = request["params"]
    given: Json = params.get("arguments") or {}
    meta: Json = params.get("_meta") or {}
    metas.append(meta)
    match params["name"]:
        case "echo":
            answer(request, text(given["text"], structuredContent=given, _meta={"seen": meta}))
        case "shuffle":
            held.append(request)
            if len(held) == 20:
                for one in reversed(held):
                    notify("notifications/message", {"level": "info", "data": "between"})
                    send("this is not a message")
                    answer(one, text(str(one["params"]["arguments"]["number"])))
                answer(held[0], text("again"))
                held.clear()
        case "moody" if not given.get("word"):
            answer(request, text("fine"))
        case "fail" | "moody":
            word = given.get("word", "")
            about = {"structuredContent": {"why": 7}, "_meta": {"example.org/case": f"12 {word}"}}
            if word == "at length":
                about = {
                    "structuredContent": {"why": ["because"] * 10_000},
                    "_meta": {"example.org/case": "x" * 1_000_000},
                }
            answer(request, text(f"no: {word}", isError=True, **about))
        case "odd":
            answer(request, {"content": "not a list"})
        case "neither":
            send({"jsonrpc": "2.0", "id": request["id"]})
        case "several":
            send([{"jsonrpc": "2.0", "id": request["id"], "result": text("one of several")}])
        case "sourced":
            stated = {"interlock/call": {"provenance": {"dataVersion": "rows-7", "confidence": 0.5}}}
            answer(request, {**text("with a source"), "_meta": stated})
        case "broken":
            refuse(request, -32603, "out of order")
        case "progress":
            token = meta.get("progressToken")
            for step in (1, 2):
                notify("notifications/progress", {"progressToken": token, "progress": step, "total": 4})
            notify("notifications/progress", {"progressToken": 12345, "progress": 1})
            answer(request, text("done"))
        case "hang":
            print("hanging", file=sys.stderr, flush=True)
        case "late":
            late.append(request)
        case "exit":
            os._exit(3)
        case "wait":
            # Answers when told to by the file's disappearance, so that a test decides when.
            while os.path.exists(given["until"]):
                time.sleep(0.005)
            answer(request, text(str(os.getpid())))
        case "grow":
            tools.append({"name": f"grown{len(tools)}", "description": "New.", "inputSchema": OBJECT})
            answer(request, text("grown"))
            notify("notifications/tools/list_changed")
        case "state":
            about = {"pid": os.getpid(), "cancelled": cancelled, "env": dict(os.environ), "cwd": os.getcwd()}
            about |= {"heard": heard, "hello": hello}
            answer(request, text("", structuredContent=about))
        case "elicit":
            told = ask("elicitation/create", {"message": "how many?", "requestedSchema": OBJECT})
            answer(request, text("", structuredContent={"told": told.get("result") or told.get("error")}))
        case "sample":
            told = ask("sampling/createMessage", {"messages": [], "maxTokens": 1})
            answer(request, text("", structuredContent={"told": told.get("result") or told.get("error")}))
        case "roots":
            told = ask("roots/list", {})
            answer(request, text("", structuredContent={"told": told.get("result") or told.get("error")}))
        case "input":
            if "inputResponses" in params:
                answer(request, text(json.dumps([params["inputResponses"], params["requestState"]])))
            else:
                wanted = {"one": {"method": "elicitation/create", "params": {"message": "how many?"}}}
                answer(request, {"resultType": "input_required", "inputRequests": wanted, "requestState": "s"})
        case name:
            refuse(request, -32602, f"there is no tool {name}")


def pages(request: Json) -> None:
    """Three pages of tools, however many there are."""
    params: Json = request.get("params") or {}
    at = int(params.get("cursor") or 0)
    size = -(-len(tools) // 3)
    page: Json = {"tools": tools[at : at + size]}
    if at + size < len(tools):
        page["nextCursor"] = str(at + size)
    answer(request, page)


def main() -> None:
    if "--die" in OPTIONS:
        os._exit(1)
    first = True
    send("starting …")
    for line in sys.stdin:
        request: Json = json.loads(line)
        method = request.get("method", "")
        heard.append(method)
        if "--strict" in OPTIONS and first and method != "initialize":
            os._exit(4)
        first = False
        if "--dumb" in OPTIONS:
            continue
        match method:
            case "initialize" if "--modern" not in OPTIONS:
                hello.update(request["params"])
                more: Json = {} if "--bare" in OPTIONS else {"resources": {}, "prompts": {}}
                chosen = OPTIONS[OPTIONS.index("--protocol") + 1] if "--protocol" in OPTIONS else "2025-06-18"
                answer(
                    request,
                    {
                        "protocolVersion": chosen,
                        "capabilities": {"tools": {"listChanged": True}, **more},
                        "serverInfo": {"name": "scripted", "version": "1"},
                        "instructions": "be kind",
                    },
                )
            case "initialize":
                refuse(request, -32022, "unsupported", {"supported": ["2026-07-28"]})
            case "server/discover" if "--modern" in OPTIONS:
                answer(
                    request,
                    {
                        "supportedVersions": ["2026-07-28"],
                        "capabilities": {"tools": {"listChanged": True}, "resources": {}, "prompts": {}},
                        "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "scripted", "version": "2"}},
                    },
                )
            case "server/discover" if "--future" in OPTIONS:
                refuse(request, -32022, "unsupported", {"supported": ["2027-01-01"], "requested": "2026-07-28"})
            case "tools/list":
                pages(request)
            case "resources/list":
                answer(request, {"resources": [{"uri": "a:b", "name": "b"}]})
            case "resources/read":
                answer(request, {"contents": [{"uri": request["params"]["uri"], "text": "hello"}]})
            case "prompts/list":
                answer(request, {"prompts": [{"name": "greet"}]})
            case "prompts/get":
                said = request["params"]["arguments"]["who"]
                answer(request, {"messages": [{"role": "user", "content": {"type": "text", "text": said}}]})
            case "tools/call":
                call(request)
            case "ping":
                answer(request, {})
            case "subscriptions/listen":
                notify("notifications/subscriptions/acknowledged", request["params"])
            case "notifications/cancelled":
                cancelled.append(request["params"]["requestId"])
                if late:  # of the call that has ended
                    told = ask("elicitation/create", {"message": "how many?", "requestedSchema": OBJECT})
                    answer(late.pop(), text("", structuredContent={"told": told.get("result") or told.get("error")}))
            case _ if "id" in request and "method" in request:
                refuse(request, -32601, "no such method")
            case _:
                pass


main()
