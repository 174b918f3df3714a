"""Reads the messages of a server defensively: its tools, answers, questions, errors and log."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Container, Iterator
from itertools import islice
from typing import Any, cast

import orjson

from interlock.call.connector import Definition, Interaction, RemoteCall
from interlock.call.mcp import INPUT_REQUIRED, INVALID_PARAMS, LOG_LEVELS, MISSING_CAPABILITY, QUESTIONS, Listening
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.bounds import Shortener
from interlock.data.schema import Json, compile_validator
from interlock.data.untrusted import LONGEST_TEXT, members, strings
from interlock.upstreams import wire
from interlock.upstreams.mcp.protocol import RpcError
from interlock.upstreams.mcp.questions import Questions

MAX_NAME = 256
MAX_ROUNDS = 10
_LONGEST_DATA = 4096
_MOST_PARTS = 100
_LONGEST_META = 65_536
# Icons of one tool, and the characters of their addresses, which may hold the images themselves.
_MOST_ICONS, _LONGEST_ICONS = 8, 65_536
_SIZE = expression(r"any|[0-9]{1,5}x[0-9]{1,5}", re.ASCII)


def understood(descriptors: list[Any], *, headers: bool) -> tuple[list[Definition], list[tuple[str, str]]]:
    """Return the tools that a list describes, and those that cannot be read, with the reason."""
    tools: dict[str, Definition] = {}
    refused: list[tuple[str, str]] = []
    for number, descriptor in enumerate(descriptors):
        try:
            tool = _definition(descriptor, taken=tools, headers=headers)
        except Failure as failure:
            stated = cast("Json", descriptor).get("name") if isinstance(descriptor, dict) else None
            name = stated[:MAX_NAME] if isinstance(stated, str) and stated else f"#{number + 1}"
            refused.append((name, f"INVALID_TOOL_SCHEMA: {failure.message}"))
        else:
            tools[tool.name] = tool
    return list(tools.values()), refused


def _definition(descriptor: Any, *, taken: Container[str], headers: bool) -> Definition:
    """Read a tool as its server describes it (E3105 if it cannot be read)."""
    if not isinstance(descriptor, dict):
        raise Failure("E3105", "it is not an object")
    fields = cast("Json", descriptor)
    name, description, title = fields.get("name"), fields.get("description"), fields.get("title")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise Failure("E3105", f"its name is not a text of 1 to {MAX_NAME} characters")
    if name in taken:
        raise Failure("E3105", "another tool of this server has the same name")
    if description is not None and not isinstance(description, str):
        raise Failure("E3105", "its description is not a text")
    takes, gives = fields.get("inputSchema"), fields.get("outputSchema")
    if not isinstance(takes, dict) or cast("Json", takes).get("type") != "object":
        raise Failure("E3105", "its inputSchema is not the schema of an object")
    if gives is not None and not isinstance(gives, dict):
        raise Failure("E3105", "its outputSchema is not a schema")
    compile_validator(cast("Json", takes))
    if gives is not None:
        compile_validator(cast("Json", gives))
    if members(fields.get("execution")).get("taskSupport") == "required":
        words = "it runs only as a task of MCP 2025-11-25 (`taskSupport: required`), and Interlock makes none of these"
        raise Failure("E3105", f"{words}; the tasks of 2026-07-28 it does follow")
    native: Json = {"protocol": "mcp", "name": name}
    if meta := _meta(fields.get("_meta")):
        native["_meta"] = meta
    if icons := _icons(fields.get("icons")):
        native["icons"] = icons
    if headers:
        from interlock.upstreams.mcp.headers import header_parameters

        if wanted := header_parameters(cast("Json", takes)):
            native["headers"] = wanted
    annotations = fields.get("annotations")
    hints = cast("Json", annotations) if isinstance(annotations, dict) else {}
    shown = title if isinstance(title, str) else hints.get("title")
    return Definition(
        name,
        description or "",
        cast("Json", takes),
        cast("Json | None", gives),
        native,
        hints,
        shown if isinstance(shown, str) else None,
    )


def _meta(stated: Any) -> Json:
    """The `_meta` of a server's tool, without the names that only Interlock may use. A large one is left out."""
    theirs = {name: part for name, part in members(stated).items() if not name.startswith("interlock/")}
    try:
        return theirs if theirs and len(orjson.dumps(theirs)) <= _LONGEST_META else {}
    except (orjson.JSONEncodeError, RecursionError):
        return {}


def _icons(stated: Any) -> list[Json]:
    """The icons of a tool that may be shown: of https addresses, or images in the text itself. Others are left out."""
    icons: list[Json] = []
    left = _LONGEST_ICONS
    for one in cast("list[Any]", stated)[:_MOST_ICONS] if isinstance(stated, list) else ():
        fields = members(one)
        source, kind, theme = fields.get("src"), fields.get("mimeType"), fields.get("theme")
        if not isinstance(source, str) or not source.startswith(("https://", "data:image/")):
            continue
        if len(source) > left or not source.isascii() or not source.isprintable():
            continue
        left -= len(source)
        icon: Json = {"src": source}
        if isinstance(kind, str) and len(kind) <= MAX_NAME and kind.isascii() and kind.isprintable():
            icon["mimeType"] = kind
        if sizes := [size for size in strings(fields.get("sizes")) if _SIZE.fullmatch(size)][:_MOST_ICONS]:
            icon["sizes"] = sizes
        if theme in ("light", "dark"):
            icon["theme"] = theme
        icons.append(icon)
    return icons


async def rounds(
    answer: Json, ask: Callable[[Json], Awaitable[Json]], params: Json, interaction: Interaction, questions: Questions
) -> Json:
    """Send a request again with the client's answers as long as the server's `answer` asks questions that can be
    answered. Returns the last answer.
    """
    for _ in range(MAX_ROUNDS):
        answers = await _answers(answer, interaction, questions)
        if answers is None:
            break
        answer = await ask({**params, **answers})
    return answer


async def _answers(answer: Json, interaction: Interaction, questions: Questions) -> Json | None:
    """Return the answers to a server's questions, if the client can be asked all of them right away."""
    if answer.get("resultType") != INPUT_REQUIRED or interaction.ask is None or interaction.calls_again:
        return None
    wanted: list[tuple[str, str, Json]] = []
    for name, question in members(answer.get("inputRequests")).items():
        method, params = members(question).get("method"), members(question).get("params", {})
        if QUESTIONS.get(str(method)) not in interaction.capabilities or not isinstance(params, dict):
            return None
        wanted.append((name, str(method), cast("Json", params)))
    if not wanted:
        return None
    # All at once: none of them waits for the answer to another.
    answers = await asyncio.gather(
        *(questions.put(method, params) for _, method, params in wanted), return_exceptions=True
    )
    responses: Json = {}
    for (name, _, _), one in zip(wanted, answers, strict=True):
        if isinstance(one, RpcError):
            # This era has no form for a question without answer, so the server is not asked again.
            raise questions.explain(Failure("E3411", f"the upstream was given no answer: {one.message}"))
        if isinstance(one, BaseException):
            raise one
        responses[name] = one
    state = {"requestState": answer["requestState"]} if "requestState" in answer else {}
    return {"inputResponses": responses, **state}


def value(answer: Json, call: RemoteCall) -> Json:
    """Return the value of a call; E3401 if the tool itself failed, E3411 if the server asks for more first."""
    if answer.get("resultType") == INPUT_REQUIRED:
        raise _wants_more(answer)
    content = answer.get("content", [])
    if not isinstance(content, list):
        raise Failure("E3502", "the upstream's answer is not the result of a tool", details={"sent": True})
    value: Json = {"content": content}
    if "structuredContent" in answer:
        value["structuredContent"] = answer["structuredContent"]
    if isinstance(answer.get("_meta"), dict):
        value["_meta"] = answer["_meta"]
    if answer.get("isError") is True:
        brief = _brief(value)
        words = " ".join(_texts(brief["content"]))
        raise Failure("E3401", wire.excerpt(words, call) or "the tool says that it failed", details=brief)
    return value


def _brief(value: Json) -> Json:
    """Shorten a tool's error to a readable length; the details are redacted and recorded."""
    content = cast("list[Any]", value["content"])
    if len(content) <= _MOST_PARTS and len(wire.to_json(value)) <= LONGEST_TEXT:
        return value
    texts = [text[:_LONGEST_DATA] for text in islice(_texts(content), LONGEST_TEXT // _LONGEST_DATA)]
    brief: Json = {"content": [{"type": "text", "text": text} for text in texts]}
    for name in value.keys() & {"structuredContent", "_meta"}:
        short = value[name]
        if len(wire.to_json(short)) > LONGEST_TEXT:
            short = Shortener(characters=_LONGEST_DATA, values=_MOST_PARTS).shorten(short)
        if len(wire.to_json(short)) <= LONGEST_TEXT:
            brief[name] = short
    return brief


def pass_on_log(listens: Listening, message: Json, *, call: RemoteCall) -> None:
    """Pass on a log message of a server, cleaned, if its level is at least the one that the client asked for."""
    level, logger, data = message.get("level"), message.get("logger"), message.get("data")
    if level not in LOG_LEVELS or LOG_LEVELS.index(level) < LOG_LEVELS.index(listens.level):
        return
    words = data if isinstance(data, str) else json.dumps(data)  # accepts numbers of any length
    named = {"logger": wire.excerpt(logger, call)} if isinstance(logger, str) else {}
    listens.on_log({"level": level, "data": wire.excerpt(words, call), **named})


def _texts(content: list[Any]) -> Iterator[str]:
    for block in content:
        text = cast("Json", block).get("text") if isinstance(block, dict) else None
        if isinstance(text, str):
            yield text


def _wants_more(answer: Json) -> Failure:
    wanted = {name: answer[name] for name in ("inputRequests", "requestState") if name in answer}
    return Failure("E3411", "the server asks for more before it goes on", details={"inputRequired": wanted})


def plain(answer: Json) -> Json:
    """Return an answer without the parts that only concern the conversation."""
    if answer.get("resultType") == INPUT_REQUIRED:
        raise _wants_more(answer)
    return {name: value for name, value in answer.items() if name not in ("resultType", "ttlMs", "cacheScope")}


def refusal(error: RpcError, call: RemoteCall | None) -> Failure:
    """Convert a server's error. What it calls an error in the request is the tool's answer; the rest
    is the upstream's.
    """
    message, details = wire.excerpt(error.message, call) or "no reason given", _error_data(error)
    if error.code == INVALID_PARAMS:
        words = f"the upstream refused the arguments: {message}"
        return Failure("E3401", words, details=details, native_error_ref=error.native_ref)
    if error.code == MISSING_CAPABILITY:
        # INVARIANT: by the protocol the server has not run the tool, so the key of the call is free for another client.
        needed = ", ".join(f"`{name}`" for name in _required(error.data)) or "what the message names"
        return Failure(
            "E3411",
            f"the upstream serves this only to clients that can do more: {message}",
            details={**details, "requiredCapabilities": _required(error.data)},
            resolution=f"make the call with an MCP client that declares {needed}",
            native_error_ref=error.native_ref,
        )
    words = f"the upstream answered with an error: {message}"
    return Failure("E3502", words, details={**details, "sent": True}, native_error_ref=error.native_ref)


def _required(data: Any) -> list[str]:
    """Return the names of the capabilities and extensions that a server wants its client to declare."""
    wanted = members(members(data).get("requiredCapabilities"))
    names = [*(name for name in wanted if name != "extensions"), *members(wanted.get("extensions"))]
    return [name[:MAX_NAME] for name in names[:_MOST_PARTS]]


def _error_data(error: RpcError) -> Json:
    """Return the data of a server's error, if it is short."""
    brief = error.data is not None and len(orjson.dumps(error.data)) <= _LONGEST_DATA
    return {"code": error.code, **({"data": error.data} if brief else {})}


def stated_of_data(answer: Json) -> Json:
    """Return the data version and the confidence that a server states, under Interlock's own key; empty without it."""
    stated = members(answer.get("_meta")).get("interlock/call")
    if stated is None:
        return {}
    source = members(members(stated).get("provenance"))
    return {"data_version": source.get("dataVersion"), "confidence": source.get("confidence")}
