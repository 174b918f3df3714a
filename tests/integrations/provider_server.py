"""A server that speaks as much of the APIs of OpenAI and Anthropic as one conversation needs, from a script.

It is a fake: no model can be reached from the tests. The requests come from the providers' own libraries, which also
read its answers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model makes. `arguments` may be text that is no JSON."""

    id: str
    name: str
    arguments: Json | str

    @property
    def text(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


Turn = list[Call] | str


def chat(turn: Turn) -> Json:
    """A chat completion."""
    message: Json = {"role": "assistant", "content": turn if isinstance(turn, str) else None}
    if not isinstance(turn, str):
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.text}} for one in turn
        ]
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def responses(turn: Turn) -> Json:
    """A response of the responses API."""
    if isinstance(turn, str):
        text: Json = {"type": "output_text", "text": turn, "annotations": []}
        output: list[Json] = [
            {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
        ]
    else:
        output = [
            {"type": "function_call", "id": f"fc_{one.id}", "call_id": one.id, "name": one.name, "arguments": one.text}
            for one in turn
        ]
    facts: Json = {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "tools": []}
    return {**facts, "output": output, "parallel_tool_calls": True, "tool_choice": "auto"}


def anthropic(turn: Turn) -> Json:
    """A message of Anthropic's API."""
    if isinstance(turn, str):
        content: list[Json] = [{"type": "text", "text": turn}]
    else:
        content = [{"type": "tool_use", "id": one.id, "name": one.name, "input": one.arguments} for one in turn]
    usage = {"input_tokens": 1, "output_tokens": 1}
    reason = "end_turn" if isinstance(turn, str) else "tool_use"
    facts = {"id": "msg", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    return {**facts, "content": content, "stop_reason": reason, "usage": usage}


@dataclass(slots=True)
class Provider:
    """The server: its address, what it is going to answer, and the requests it got."""

    write: Callable[[Turn], Json]
    url: str = ""
    script: list[Turn] = field(default_factory=list[Turn])
    requests: list[Json] = field(default_factory=list[Json])

    def say(self, *turns: Turn) -> None:
        """What the model is going to say next, one turn for each request."""
        self.script[:] = turns


@contextmanager
def serving(write: Callable[[Turn], Json]) -> Generator[Provider]:
    provider = Provider(write)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            provider.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(provider.write(provider.script.pop(0))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
