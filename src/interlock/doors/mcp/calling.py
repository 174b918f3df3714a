"""A `tools/call`, from what a client sent to what it is answered; the same for both eras and all transports.

A tool's failure is a result with `isError`, so that a model can read it; only a name that means nothing is a fault of
the protocol. A call that waits for a person is neither: its text says what it waits for, and the same call made again
goes on once they have agreed. The protocol has no idempotency keys, so a tool that needs one lists it among its
arguments, where the caller makes it up as it does the others; a program may send it in `_meta`, or as the header
`Idempotency-Key`, instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.api.mcp_names import Names
from interlock.api.service import Ask, Service
from interlock.call.connector import Interaction
from interlock.call.context import Caller
from interlock.call.media import LARGEST, data_of, split_blocks
from interlock.call.prepared import Prepared
from interlock.call.results import Result
from interlock.contract.attached import for_models
from interlock.core.errors import Failure
from interlock.core.record import dataclass, step
from interlock.data.schema import Json
from interlock.doors.mcp.listing import KEY, Form, Listing
from interlock.doors.mcp.sampling import Question, sampled
from interlock.doors.mcp.surface_tools import LOAD, SELECT, SurfaceTools
from interlock.telemetry.w3c import joined

if TYPE_CHECKING:
    from interlock.api.comparisons import Expected
    from interlock.api.types import RunningRead

_log = logging.getLogger("interlock.doors.mcp")

DOOR = "mcp"
INVALID_PARAMS = -32602
MISSING_CAPABILITY = -32021

# What a client may say of a call in `_meta`, and of which type it is.
_KEY, _SESSION, _VERSION, _DRY_RUN = "interlock/key", "interlock/session", "interlock/version", "interlock/dryRun"
_TIMEOUT = "interlock/timeoutMs"
_META_TYPES: Mapping[str, type] = {
    _KEY: str,
    _SESSION: str,
    _VERSION: str,
    _DRY_RUN: bool,
    _TIMEOUT: int,
    "traceparent": str,
    "tracestate": str,
}
# A call without any of them in `_meta`, and without `KEY` among its arguments, consists of arguments and nothing else.
OPTIONS = frozenset(_META_TYPES)
_LONGEST_MS = 86_400_000
_WORDS: Mapping[type, str] = {
    str: "a string", bool: "true or false", int: f"a whole number from 1 to {_LONGEST_MS}",
}  # fmt: skip


class Fault(Exception):  # noqa: N818 - what is wrong with a request, not with the program
    """A request that the protocol has no result for: the error to answer it with."""

    def __init__(self, code: int, message: str, data: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


def _is(value: Any, kind: type) -> bool:
    """Whether what a client said in `_meta` is of its type, and a timeout within its bounds."""
    return type(value) is int and 0 < value <= _LONGEST_MS if kind is int else isinstance(value, kind)


@step
class Wanted:
    """A call as a client asked for it. `trace` is the W3C context of the transport; one in `meta` goes before it."""

    name: str
    arguments: Json
    meta: Mapping[str, Any]
    trace: str | None = None
    # The channel for questions to the client; None if the client declared none.
    interaction: Interaction | None = None
    # What the name stands for, where that was found out already.
    address: str | None = None
    # By which ids the client knows its request.
    native: Mapping[str, Any] | None = None
    # The version that a call by this name is made of, and the form of its results, where they were looked up already.
    looked_up: tuple[Prepared, Form] | None = None
    # The header `Idempotency-Key`, and the client's identity of this request within its session.
    key: str | None = None
    identity: str | None = None

    @property
    def answers(self) -> Json | None:
        """The client's answers to questions of an earlier round; None if it cannot get questions as a result."""
        asked = self.interaction
        return None if asked is None or not asked.calls_again or not asked.capabilities else asked.answers

    @property
    def key_place(self) -> str:
        """The place, besides the arguments, in which the client sent a key."""
        return f"_meta[{_KEY!r}]" if self.meta.get(_KEY) else "the Idempotency-Key header"


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call that was started, and may be given up on."""

    task: asyncio.Task[Result]
    id: str
    ask: Ask | None
    cancel: Callable[[], str]

    def give_up(self) -> None:
        """Cancel it, on record, unless it has ended."""
        # A call that has not begun is not found by its id yet. One that cannot be stopped runs on.
        if not self.task.done() and self.cancel() == "finished":
            self.task.cancel()


class Calling:
    """Makes calls and words their answers."""

    def __init__(self, service: Service, names: Names, listing: Listing) -> None:
        self._service = service
        self._names = names
        self._listing = listing
        self._surface_tools = SurfaceTools(service, names, lambda version: listing.described(version).document)
        self._running: set[asyncio.Task[Result]] = set()
        # Called when the endpoint is closed, before calls are waited for.
        self.before_close: list[Callable[[], None]] = []

    async def on_surface(
        self,
        name: str,
        arguments: Json,
        caller: Caller,
        client: Callable[[], Interaction | None] | None = None,
        *,
        meta: Mapping[str, Any],
        apps: bool = False,
        expected: Expected | None = None,
    ) -> Json | None:
        """The answer to a call of a tool that belongs to a surface itself, or its question; None for any other tool.

        `client` is how the client of the call is asked, if that is possible; `apps` is whether it shows interfaces.
        A search finds no tool that is not what the client expects of it (`expected`).
        """
        selector = sampled(client()) if name == SELECT and client is not None else None
        if selector is not None and _SESSION in meta:
            _check_options(meta, None)
        try:
            return await self._surface_tools.call(
                name, arguments, caller, selector, session=meta.get(_SESSION, ""), apps=apps, expected=expected
            )
        except Question as question:
            return question.result
        except Failure as failure:
            return failed(failure, no_trace(), {})

    @staticmethod
    def samples(client: Interaction | None) -> bool:
        """Whether the model of a client can be asked to choose a tool."""
        return sampled(client) is not None

    @staticmethod
    def loads(name: str) -> bool:
        """Whether a tool changes what a surface lists."""
        return name in (LOAD, SELECT)

    async def call(self, wanted: Wanted, caller: Caller, on_progress: Callable[[Json], None] | None = None) -> Json:
        """Make a call that its client may give up on: cancelling this cancels the call, on record.

        The call runs in a task of its own, because what the SDK cancels is cancelled again at every step it takes, and
        a call that ends still has a record to write.
        """
        try:
            call = await self.begin(wanted, caller, on_progress)
        except Failure as failure:
            return not_made(wanted, failure)
        try:
            result = await asyncio.shield(call.task)
        except asyncio.CancelledError:
            call.give_up()
            raise
        except Failure as failure:
            return not_made(wanted, failure)
        return await self.answer(wanted, result)

    async def begin(
        self, wanted: Wanted, caller: Caller, on_progress: Callable[[Json], None] | None = None
    ) -> RunningCall:
        """Start a call in a task of its own, which ends by itself if nobody waits for it any more."""
        ask = await self._ask(wanted, caller)
        tool = wanted.looked_up[0] if wanted.looked_up is not None and ask.version is None else None
        call_id, making = self._service.calls.open(ask, caller, door=DOOR, on_progress=on_progress, tool=tool)
        return self._in_task(making, call_id, ask)

    def follow(self, read: RunningRead) -> RunningCall:
        """Go on with a read that takes long, in a task of its own as well."""
        return self._in_task(self._service.calls.finish(read), read.id)

    def _in_task(self, making: Coroutine[Any, Any, Result], call_id: str, ask: Ask | None = None) -> RunningCall:
        # A fixed name: generating one takes a tenth of the time that creating the task takes.
        task = asyncio.Task(making, loop=asyncio.get_running_loop(), name="call")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        cancel = partial(self._service.calls.interrupt, call_id)
        return RunningCall(task, call_id, ask, cancel)

    async def call_here(self, wanted: Wanted, caller: Caller) -> Result:
        """Make a call of a tool that only computes, in the task of the request: there is no time to give up on it."""
        return await self._service.calls.invoke(await self._ask(wanted, caller), caller, door=DOOR)

    async def close(self, within_s: float = 10.0) -> None:
        """Let calls end that nobody waits for any more; after the given time they are cut off, which is on record."""
        for end in self.before_close:
            end()
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=within_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _ask(self, wanted: Wanted, caller: Caller) -> Ask:
        """The call as the client asked for it, with its key where keys belong."""
        meta, address = wanted.meta, wanted.address or self._names.address(wanted.name)
        arguments, version, key, session, timeout_s, dry_run = wanted.arguments, None, wanted.key, "", None, False
        trace = wanted.trace
        if not OPTIONS.isdisjoint(meta):
            _check_options(meta, key)
            version, key, session = meta.get(_VERSION), meta.get(_KEY) or key, meta.get(_SESSION, "")
            timeout_s, dry_run = meta[_TIMEOUT] / 1000 if _TIMEOUT in meta else None, meta.get(_DRY_RUN, False)
            if "traceparent" in meta:
                trace = joined(meta["traceparent"], meta.get("tracestate"))
        if KEY in arguments:
            # The tool that was looked up before is used; it is looked up again if a version is requested.
            if wanted.looked_up is not None and version is None:
                keyed = wanted.looked_up[1].keyed
            else:
                keyed = await self._is_keyed(address, version, caller)
            if keyed:  # the argument of that name is the one that this door added
                arguments = dict(arguments)
                sent: Any = arguments.pop(KEY)
                if key and sent and key != sent:
                    raise Fault(INVALID_PARAMS, f"`{KEY}` and {wanted.key_place} say different things")
                # A malformed one the gateway refuses, on record.
                key = (sent or key) if isinstance(sent, str) else " "
        return Ask(
            address, arguments, version, key, session, timeout_s, dry_run, None, trace, wanted.interaction,
            wanted.native, wanted.identity,
        )  # fmt: skip

    async def _is_keyed(self, address: str, version: str | None, caller: Caller) -> bool:
        """Whether a tool takes its key as an argument. If there is no such tool, the gateway says so, on record."""
        try:
            tool = await self._service.tools.named.prepared(address, version, caller.capability)
        except Failure:
            return False
        return self._listing.form(tool).keyed

    # Answers

    async def answer(self, wanted: Wanted, result: Result) -> Json:
        """The MCP result of a call."""
        if result.pending:
            return _checked(await self._pending(result), await self._form(wanted, result))
        if result.error is not None:
            # A tool that was found has a version; what it could not find is its own affair.
            if result.error.code == "E3101" and "@" not in result.tool:
                return not_made(wanted, result.error, result.trace_id)
            asked = questions(wanted.answers, result.error)
            if asked is not None:
                return {**asked, "_meta": _about(result)}
            return failed(result.error, result.trace_id, _about(result))
        form = await self._form(wanted, result)
        if result.source == "preview":
            return _checked(_described(result.text(), "preview", result.value, _about(result)), form)
        if result.persistence.ref is not None:
            return _stored(result, form)
        return _native(result) if form.native else own_result(result, form)

    async def _form(self, wanted: Wanted, result: Result) -> Form:
        """The form of the results of the version that was called. Another may have come since it was looked up."""
        if wanted.looked_up is not None and wanted.looked_up[0].ref == result.tool:
            return wanted.looked_up[1]
        address, _, version = result.tool.partition("@")
        return self._listing.form((await self._service.tools.named.exact(address, version)).prepared)

    async def _pending(self, result: Result) -> Json:
        pending: Json = result.metadata["pending"]
        ticket, who = await self._service.approvals.waited_for(result)
        groups, ahead = " or ".join(f"`{group}`" for group in ticket.approvers), pending.get("agreeInAdvance")
        return _described(
            f"Not done yet: {result.tool} waits for a person to agree ({ticket.reason}).\n"
            f"Somebody of {groups} must agree, until {pending['expiresAt']}: `interlock approvals show {ticket.id}`, "
            f"or {pending['pollEndpoint']}.\n{who}"
            "Once they have agreed, call the tool again with the same arguments: the call then goes on."
            + ("" if ahead is None else f"\nTo agree to such calls in advance, they type: `{ahead}`"),
            "pending",
            pending,
            _about(result),
        )


def _check_options(meta: Mapping[str, Any], key: str | None) -> None:
    """Refuse what a client says of a call in `_meta` where it is of the wrong type, or contradicts the key's header."""
    for name, kind in _META_TYPES.items():
        if name in meta and not _is(meta[name], kind):
            words = f"_meta[{name!r}] must be {_WORDS[kind]}"
            raise Fault(INVALID_PARAMS, words, Failure("E3004", words).envelope(no_trace()))
    if key and meta.get(_KEY) and meta[_KEY] != key:
        raise Fault(INVALID_PARAMS, f"_meta[{_KEY!r}] and the Idempotency-Key header say different things")


def questions(answers: Json | None, failure: Failure) -> Json | None:
    """The questions of an upstream to the client; a fault in the client's answers raises Fault."""
    details = failure.details or {}
    code = details.get("code")
    if code == MISSING_CAPABILITY or (code == INVALID_PARAMS and answers):
        raise Fault(code, failure.message, details.get("data"))
    asked: Any = details.get("inputRequired")
    if answers is None or not isinstance(asked, dict):
        return None
    return {**cast("Json", asked), "resultType": "input_required"}


def fault_of(error: Exception) -> Fault:
    """The answer to a request that raised something.

    A failure is answered as it is. For any other error the answer has only a trace id; the rest is in the log.
    """
    trace_id = no_trace()
    if isinstance(error, Failure):
        failure = error
    else:
        failure = Failure("E3000", "something went wrong inside Interlock")
        _log.error("an MCP request failed", exc_info=error, extra={"trace_id": trace_id})
    return Fault(failure.row.jsonrpc, failure.message, failure.envelope(trace_id))


def no_trace() -> str:
    """The trace id of a failure that happened before there was a call."""
    return os.urandom(16).hex()


def not_made(wanted: Wanted, failure: Failure, trace_id: str | None = None) -> Json:
    """The answer to a call that came to nothing before there was a tool to make it of."""
    trace_id = trace_id or (no_trace() if wanted.trace is None else wanted.trace[3:35])
    if failure.code == "E3101":
        raise Fault(INVALID_PARAMS, f"Unknown tool: {wanted.name}", failure.envelope(trace_id))
    return failed(failure, trace_id, {})


def failed(failure: Failure, trace_id: str, about: Json) -> Json:
    content: Any = (failure.details or {}).get("content")
    return {
        "content": cast("list[Json]", content) if _is_content(content) else [_text(_words(failure))],
        "isError": True,
        "resultType": "complete",
        "_meta": {**about, "interlock/error": failure.envelope(trace_id)},
    }


def own_result(result: Result, form: Form) -> Json:
    """The result of one of our own tools."""
    value = {"result": result.value} if form.wraps else result.value
    return {
        "content": [_text(result.text()), *_items(result)],
        "structuredContent": value,
        "isError": False,
        "resultType": "complete",
        "_meta": _about(result),
    }


def _native(result: Result) -> Json:
    """The result of an MCP upstream, unchanged."""
    value = cast("Json", result.value)
    meta: Json = value.get("_meta") or {}
    return {**value, "isError": False, "resultType": "complete", "_meta": {**meta, **_about(result)}}


def _stored(result: Result, form: Form) -> Json:
    """A result that is kept apart. The images and recordings of an MCP upstream are shown all the same: it is their
    base64 that makes results large, and a client does not give it to the model as text. So is the structured content
    that its output schema promises.
    """
    ref, size = result.persistence.ref, result.persistence.size
    native = form.native and not result.persistence.private
    rest, media = split_blocks(result.value) if native else (result.value, [])
    answer = _described(replace(result, value=rest).text(), "kept", {"ref": ref, "size": size}, _about(result))
    link = {"type": "resource_link", "uri": ref, "name": f"result of {result.tool}", "mimeType": "application/json"}
    shown = [one for one in media if len(data_of(one) or "") <= LARGEST]
    answer["content"] += [{**link, "size": size}, *shown, *_items(result)]
    # INVARIANT: a write that was done is never told as an error, whatever the size of its result.
    if form.exact and "structuredContent" in rest and (form.writes or size <= LARGEST):
        return {**answer, "structuredContent": rest["structuredContent"]}
    return _checked(answer, form)


def _checked(answer: Json, form: Form) -> Json:
    """An answer that is not the tool's result. An error, where the output schema allows nothing but results."""
    return {**answer, "isError": True} if form.exact else answer


def _items(result: Result) -> list[Json]:
    """The content and the files of a call besides its value, as MCP content blocks."""
    return [*map(_item, for_models(result.content)), *_files(result)]


def _item(item: Json) -> Json:
    """An item of content. What this protocol has no type for is text or a link."""
    uri, mime = item.get("uri"), {"mimeType": item["mime_type"]} if item.get("mime_type") else {}
    match item["type"]:
        case "image" | "audio" if item.get("data"):
            return {"type": item["type"], "data": item["data"], **mime}
        case "embedded_resource":
            held = {name: item[name] for name in ("text", "blob") if item.get(name)} or {"text": ""}
            return {"type": "resource", "resource": {"uri": uri, **mime, **held}}
        case "json":
            return _text(orjson.dumps(item["value"]).decode())
        case "text" | "diff":
            return _text(str(item.get("text") or item.get("diff") or ""))
        case _ if uri:
            size = {"size": item["size_bytes"]} if "size_bytes" in item else {}
            return {"type": "resource_link", "uri": uri, "name": item.get("name") or uri, **mime, **size}
        case _:
            held = {"blob": item.get("data", ""), **mime}
            return {"type": "resource", "resource": {"uri": f"data:{item.get('mime_type', '')}", **held}}


def _files(result: Result) -> list[Json]:
    """The files that a call left, as resources of this door."""
    return [{"type": "resource_link", "uri": one.ref, "name": one.path, "size": one.size} for one in result.artifacts]


def _described(text: str, what: str, of: Any, about: Json) -> Json:
    """An answer that is not the tool's result: see `INSTEAD` in listing.py."""
    return {
        "content": [_text(text)],
        "structuredContent": {"interlock": {what: of}},
        "isError": False,
        "resultType": "complete",
        "_meta": {**about, f"interlock/{what}": of},
    }


def _about(result: Result) -> Json:
    """The metadata of every answer."""
    metadata = result.metadata
    call: Json = {"id": result.invocation_id, "traceId": result.trace_id, "source": result.source}
    for name in _METADATA & metadata.keys():
        call[name] = metadata[name]
    if result.error is None:
        call |= result.about()
    if result.artifacts:
        call["artifacts"] = [one.document() for one in result.artifacts]
    return {"interlock/call": call}


_METADATA = frozenset(("approval", "pagination", "deprecation", "warnings", "hook_outputs", "handoffs"))


def _words(failure: Failure) -> str:
    row = failure.row
    later = "" if failure.retry_after_ms is None else f" (after {failure.retry_after_ms} ms)"
    details = "" if not failure.details else f"\n{orjson.dumps(failure.details, default=str).decode()}"
    return f"{row.error_code} ({row.code}): {failure.message}\nWhat to do: {failure.resolution}{later}{details}"


def _is_content(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, dict) for one in cast("list[Any]", value))


def _text(text: str) -> Json:
    return {"type": "text", "text": text}
