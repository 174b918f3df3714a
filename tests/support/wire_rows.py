"""One class per wire: every request that a client can make over it, with answers in the same terms as over the others.

A further endpoint is one class here and its line in `ROWS`. What a wire does not have, it refuses with LookupError.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Awaitable, Sequence
from typing import Any
from urllib.parse import urlencode

import grpc.aio
import httpx
import orjson
from mcp import MCPError

from interlock import Caller
from interlock.core.errors import Failure
from interlock.data.canonical import encode
from interlock.doors.grpc.v1 import gateway_pb2 as messages
from tests.support.answers import Heard, Json, Told, Wish, left, typed_refusal
from tests.support.endpoints import BOTH, HELLO, META, MODERN, Endpoints


class Wire:
    """One wire to a server. Requests are of the caller "full", where they name no other."""

    def __init__(self, name: str, ends: Endpoints, *, by_sdk: bool) -> None:
        self.name = name
        self._ends = ends
        # Whether MCP calls and lists are those of the SDK's client, or single requests as they stand.
        self.by_sdk = by_sdk

    def _lacks(self, what: str) -> LookupError:
        return LookupError(f"{self.name} has no request for {what}")

    # Calling

    async def heard(self, wish: Wish) -> Heard:
        """The answer to a call, word for word."""
        raise self._lacks("calls")

    async def call(self, wish: Wish) -> Told:
        """The answer to a call as a client reads it."""
        return (await self.heard(wish)).told

    async def pending(self, wish: Wish) -> Json:
        """The pending envelope of a call that waits for a person."""
        heard = await self.heard(wish)
        assert heard.pending is not None, heard.text
        return heard.pending

    async def knock(self, authorization: str | None) -> tuple[str, str | None]:
        """The status of a call with this header and the code of its refusal; None where it is not refused."""
        raise self._lacks("calls")

    # Tools

    async def listed(self, token: str = "full", cursor: str | None = None, expected: Json | None = None) -> list[str]:
        """The addresses of the listed tools, without those of the surface itself; of those that are as expected."""
        raise self._lacks("lists")

    async def listing(self) -> str:
        """All that the wire tells about the tools that it lists."""
        raise self._lacks("lists")

    async def texts(self, tool: str) -> Sequence[str]:
        """All that the wire tells about a tool to those who look for it: lists, search results, descriptions."""
        raise self._lacks("lists")

    async def described(self, tool: str) -> str:
        """All that the wire tells about a tool to those who describe or load it, and whether it refuses."""
        raise self._lacks("descriptions")

    async def search(self, query: str, expected: Json | None = None) -> Heard:
        """The data: the tools, the deferred ones, the outcome and the servers that are pending."""
        raise self._lacks("searches")

    async def load(self, tool: str) -> str:
        """Load a deferred tool."""
        raise self._lacks("loading")

    async def surface(self) -> Json:
        """The surface of the caller, with the reasons."""
        raise self._lacks("the surface")

    async def select(self, request: str, **options: Any) -> Json:
        """The selection of a tool for a request."""
        raise self._lacks("selections")

    async def recommend(self, tool: str) -> list[Json]:
        """The tools that go with a tool."""
        raise self._lacks("recommendations")

    # What one call says of another

    async def cancel(self, call: str, reason: str = "") -> str:
        """Cut a call short. The outcome."""
        raise self._lacks("cancelling by id")

    async def resume(self, call: str) -> None:
        """Go on with an approved call."""
        raise self._lacks("resuming")

    async def trace(self, call: str, token: str = "full") -> Json | str:
        """The trace of a call; the code of the refusal where there is one."""
        raise self._lacks("traces")

    async def part(self, ref: str, part: Json) -> Json:
        """A part of a large result; the envelope of the refusal where there is one."""
        raise self._lacks("parts")

    async def calls(self, **asked: Any) -> Json:
        """One page of calls, and the place where the next one begins."""
        raise self._lacks("calls that have been made")


class Library(Wire):
    """The library in the server's own process."""

    async def _caller(self, token: str) -> Caller:
        return await self._ends.app.caller_of(self._ends.tokens[token])

    async def heard(self, wish: Wish) -> Heard:
        headers = self._ends.bearer(wish.token)
        trace = [wish.traceparent or headers.get("traceparent"), headers.get("tracestate")]
        options: Json = {} if wish.timeout_ms is None else {"timeout_s": wish.timeout_ms / 1000}
        options |= {"trace_id": " ".join(filter(None, trace))} if trace[0] else {}
        result = await self._ends.app.call(
            wish.tool, wish.arguments, key=wish.key, dry_run=wish.dry_run, version=wish.version,
            token=self._ends.tokens[wish.token], **options,
        )  # fmt: skip
        document, trace_id = result.document(), result.trace_id
        text = str(document)
        if result.pending:
            assert not document["is_error"]
            return Heard(text, "pending", None, result.metadata, pending=document["pending"], trace_id=trace_id)
        if result.error is not None:
            envelope = result.error.envelope("")
            return Heard(text, result.error.code, None, result.metadata, envelope=envelope, trace_id=trace_id)
        files = left(one.document() for one in result.artifacts)
        return Heard(text, "OK", result.value, result.metadata, files=files, trace_id=trace_id)

    async def listed(self, token: str = "full", cursor: str | None = None, expected: Json | None = None) -> list[str]:
        return [one.row.address for one in await self._ends.service.tools.visible(await self._caller(token), expected)]

    async def surface(self) -> Json:
        return await self._ends.service.surface_views.show(by=await self._caller("full"))

    async def select(self, request: str, **options: Any) -> Json:
        return (await self._ends.app.select(request, caller=await self._caller("full"), **options)).document()

    async def recommend(self, tool: str) -> list[Json]:
        found = await self._ends.app.recommend(tool, caller=await self._caller("full"))
        return [{"tool": one.tool, "reason": one.reason, "callers": one.callers, "why": one.why} for one in found]

    async def cancel(self, call: str, reason: str = "") -> str:
        app = self._ends.app
        if reason:
            return await app.call_off(call, reason)  # pyright: ignore[reportArgumentType] - one of the reasons
        if await app.approvals.withdraw(call, by=await self._caller("full")):
            return "canceled"
        return await app.cancel(call)

    async def trace(self, call: str, token: str = "full") -> Json | str:
        try:
            return await self._ends.service.calls.trace(call, await self._caller(token))
        except Failure as failure:
            return failure.code


class Rest(Wire):
    """HTTP and JSON."""

    async def _get(self, path: str, token: str = "full", **query: Any) -> httpx.Response:
        return await self._ends.http.get(path, params=query, headers=self._ends.bearer(token))

    async def _post(self, path: str, body: Json | None = None, query: Json | None = None) -> httpx.Response:
        return await self._ends.http.post(path, json=body, params=query, headers=self._ends.bearer())

    async def heard(self, wish: Wish) -> Heard:
        headers = self._ends.bearer(wish.token) | _traced(wish)
        answer = await self._ends.http.post("/v1/tools/invoke", json=self._ends.body(wish), headers=headers)
        body: Json = answer.json()
        text, status = f"{answer.headers}{answer.text}", answer.status_code
        if "error" in body:
            envelope: Json = body["error"]
            if envelope.get("retryAfterMs") is not None:
                assert answer.headers["retry-after"] == str(math.ceil(envelope["retryAfterMs"] / 1000))
            return Heard(text, status, envelope=envelope)
        if "pending" in body:
            assert status == 202
            return Heard(text, status, None, body, pending=body["pending"], trace_id=body.get("trace_id", ""))
        files, trace_id = left(body["artifacts"]), body["trace_id"]
        return Heard(text, status, body["result"], body, files=files, trace_id=trace_id)

    async def call(self, wish: Wish) -> Told:
        heard = await self.heard(wish)
        expected = 202 if heard.pending else 200
        assert heard.status == (expected if heard.envelope is None else Failure(heard.triple[0]).row.http)
        return heard.told

    async def knock(self, authorization: str | None) -> tuple[str, str | None]:
        body = self._ends.body(KNOCK)
        answer = await self._ends.knock("POST", "/v1/tools/invoke", body, _header(authorization))
        return str(answer.status_code), _code(answer.json().get("error"))

    async def listed(self, token: str = "full", cursor: str | None = None, expected: Json | None = None) -> list[str]:
        query = _given(cursor=cursor, expected=None if expected is None else _json(expected))
        return [one["tool_id"] for one in (await self._get("/v1/tools", token, **query)).json()["tools"]]

    async def listing(self) -> str:
        return (await self._get("/v1/tools")).text

    async def texts(self, tool: str) -> Sequence[str]:
        word = tool.partition(".")[2]
        paths = ("/v1/tools", f"/v1/tools?q={word}", f"/v1/tools/{tool}", f"/v1/tools/{tool}/versions")
        paths += tuple(
            f"/v1/tools/declarations?provider={one}"
            for one in ("openai-chat", "openai-responses", "anthropic", "gemini")
        )
        return [(await self._ends.http.get(path)).text for path in paths]

    async def described(self, tool: str) -> str:
        texts = [(await self._get(path)).text for path in (f"/v1/tools/{tool}", f"/v1/tools/{tool}/versions")]
        return str([*texts, await self.load(tool)])

    async def search(self, query: str, expected: Json | None = None) -> Heard:
        sent = _given(expected=None if expected is None else _json(expected))
        answer = await self._get("/v1/tools", q=query, **sent)
        return Heard(answer.text, answer.status_code, answer.json())

    async def load(self, tool: str) -> str:
        return (await self._post("/v1/tools/load", {"names": [tool]})).text

    async def surface(self) -> Json:
        return (await self._get("/v1/surface")).json()

    async def select(self, request: str, **options: Any) -> Json:
        return (await self._post("/v1/tools/select", {"request": request, **options})).json()

    async def recommend(self, tool: str) -> list[Json]:
        return (await self._get("/v1/tools/recommendations", tool=tool)).json()["tools"]

    async def cancel(self, call: str, reason: str = "") -> str:
        given = {"reason": reason} if reason else {}
        return (await self._post(f"/v1/calls/{call}/cancel", query=given)).json()["outcome"]

    async def resume(self, call: str) -> None:
        assert (await self._post(f"/v1/tools/resume/{call}")).status_code == 200

    async def trace(self, call: str, token: str = "full") -> Json | str:
        answer = await self._get(f"/v1/calls/{call}/trace", token)
        body: Json = answer.json()
        return body if answer.status_code == 200 else body["error"]["error_code"]

    async def part(self, ref: str, part: Json) -> Json:
        renamed = {"q" if name == "query" else name: value for name, value in part.items()}
        answer = await self._get(f"/v1/payloads/{ref}/part", **renamed)
        return answer.json() if answer.is_success else answer.json()["error"]

    async def calls(self, **asked: Any) -> Json:
        return (await self._get("/v1/calls", **asked)).json()


class JsonRpc(Wire):
    """JSON-RPC 2.0 over HTTP."""

    async def heard(self, wish: Wish) -> Heard:
        text = await self._ends.rpc_text("tools.invoke", self._ends.body(wish), wish.token, _traced(wish))
        body: Json = orjson.loads(text)
        if "error" in body:
            return Heard(text, body["error"]["code"], envelope=body["error"]["data"])
        result: Json = body["result"]
        trace_id = next((one[6:] for one in result["telemetry_refs"] if one.startswith("trace:")), "")
        about = result["metadata"]
        if "pending" in result:
            return Heard(text, 0, None, about, pending=result["pending"], trace_id=trace_id)
        items: list[Json] = [one for one in result["content"] if one["type"] == "artifact_ref"]
        assert [one["ref"] for one in items] == result["artifact_refs"]
        files = left({**one, "size": one["size_bytes"]} for one in items)
        return Heard(text, 0, result["structured_content"], about, files=files, trace_id=trace_id)

    async def knock(self, authorization: str | None) -> tuple[str, str | None]:
        request: Json = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": self._ends.body(KNOCK)}
        body: Json = (await self._ends.knock("POST", "/rpc", request, _header(authorization))).json()
        error: Json = body.get("error", {})
        return str(error.get("code")), _code(error.get("data"))

    async def _result(self, method: str, params: Json, token: str = "full") -> Any:
        return (await self._ends.rpc(method, params, token))["result"]

    async def listed(self, token: str = "full", cursor: str | None = None, expected: Json | None = None) -> list[str]:
        result = await self._result("tools.list", _given(cursor=cursor, expected=expected), token)
        return [one["tool_id"] for one in result["tools"]]

    async def listing(self) -> str:
        return str([await self._ends.rpc_text("tools.describe", {"tool_id": one}) for one in await self.listed()])

    async def texts(self, tool: str) -> Sequence[str]:
        described = await self._ends.rpc_text("tools.describe", {"tool_id": tool})
        return await self._ends.rpc_text("tools.list", {}), described

    async def described(self, tool: str) -> str:
        return await self._ends.rpc_text("tools.describe", {"tool_id": tool}) + await self.load(tool)

    async def search(self, query: str, expected: Json | None = None) -> Heard:
        text = await self._ends.rpc_text("tools.search", {"query": query, **_given(expected=expected)})
        return Heard(text, 0, orjson.loads(text).get("result"))

    async def load(self, tool: str) -> str:
        return await self._ends.rpc_text("tools.load", {"names": [tool]})

    async def surface(self) -> Json:
        return await self._result("surface.show", {})

    async def select(self, request: str, **options: Any) -> Json:
        return await self._result("tools.select", {"request": request, **options})

    async def recommend(self, tool: str) -> list[Json]:
        return (await self._result("tools.recommend", {"tool": tool}))["tools"]

    async def cancel(self, call: str, reason: str = "") -> str:
        given = {"reason": reason} if reason else {}
        return (await self._result("calls.cancel", {"invocation_id": call, **given}))["answer"]

    async def resume(self, call: str) -> None:
        await self._result("calls.resume", {"invocation_id": call})

    async def trace(self, call: str, token: str = "full") -> Json | str:
        answer = await self._ends.rpc("calls.trace", {"invocation_id": call}, token)
        return answer["result"] if "result" in answer else answer["error"]["data"]["error_code"]

    async def part(self, ref: str, part: Json) -> Json:
        answer = await self._ends.rpc("calls.part", {"ref": ref, **part})
        return answer["result"] if "result" in answer else answer["error"]["data"]

    async def calls(self, **asked: Any) -> Json:
        return await self._result("calls.list", asked)


class Grpc(Wire):
    """The gRPC service."""

    async def heard(self, wish: Wish) -> Heard:
        request = messages.InvokeRequest(
            tool_id=wish.tool, arguments_json=encode(wish.arguments), idempotency_key=wish.key,
            dry_run=wish.dry_run, version=wish.version,
        )  # fmt: skip
        metadata = tuple((self._ends.bearer(wish.token) | _traced(wish)).items())
        timeout_s = None if wish.timeout_ms is None else wish.timeout_ms / 1000
        try:
            answer = await self._ends.stub.Invoke(request, metadata=metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return typed_refusal(error)
        about: Json = {**orjson.loads(answer.metadata_json), "source": answer.source}
        outcome = answer.WhichOneof("outcome")
        assert (outcome == "pending") == ("pending" in about)
        files = tuple((one.path, one.sha256, one.size) for one in answer.artifacts)
        return Heard(
            str(answer), "OK", orjson.loads(answer.value_json) if outcome == "value_json" else None, about,
            pending=about.get("pending"), files=files, trace_id=answer.trace_id,
        )  # fmt: skip

    async def knock(self, authorization: str | None) -> tuple[str, str | None]:
        request = messages.InvokeRequest(tool_id=KNOCK.tool, arguments_json=orjson.dumps(KNOCK.arguments))
        try:
            await self._ends.stub.Invoke(request, metadata=tuple(_header(authorization).items()))
        except grpc.aio.AioRpcError as error:
            return error.code().name, typed_refusal(error).triple[0]
        return "OK", None

    async def listed(self, token: str = "full", cursor: str | None = None, expected: Json | None = None) -> list[str]:
        sent = None if expected is None else orjson.dumps(expected)
        request = messages.DiscoverRequest(page_token=cursor or "", expected_json=sent)
        found = await self._ends.stub.Discover(request, metadata=self._ends.metadata(token))
        return [one.tool_id for one in found.tools]

    async def listing(self) -> str:
        found = await self._ends.stub.Discover(messages.DiscoverRequest(), metadata=self._ends.metadata())
        return str(found.tools)

    async def texts(self, tool: str) -> Sequence[str]:
        stub, metadata = self._ends.stub, self._ends.metadata()
        asked = (messages.DiscoverRequest(), messages.DiscoverRequest(query=tool.partition(".")[2]))
        listed = [str(await stub.Discover(one, metadata=metadata)) for one in asked]
        return [*listed, str(await stub.Describe(messages.DescribeRequest(tool_id=tool), metadata=metadata))]

    async def described(self, tool: str) -> str:
        describing = self._ends.stub.Describe(messages.DescribeRequest(tool_id=tool), metadata=self._ends.metadata())
        return str([await _text(describing), await self.load(tool)])

    async def search(self, query: str, expected: Json | None = None) -> Heard:
        sent = None if expected is None else orjson.dumps(expected)
        request = messages.DiscoverRequest(query=query, expected_json=sent)
        answer = await self._ends.stub.Discover(request, metadata=self._ends.metadata())
        data: Json = {
            "deferred": [orjson.loads(one) for one in answer.deferred_json],
            "tools": [{"tool_id": one.tool_id} for one in answer.tools],
            "outcome": answer.outcome,
            "pending": [{"server": name, "state": state} for name, state in answer.pending.items()],
        }
        return Heard(str(answer), "OK", data)

    async def load(self, tool: str) -> str:
        request = messages.LoadRequest(names=[tool])
        return await _text(self._ends.stub.Load(request, metadata=self._ends.metadata()))

    async def surface(self) -> Json:
        answer = await self._ends.stub.Surface(messages.SurfaceRequest(), metadata=self._ends.metadata())
        return {"surface": orjson.loads(answer.surface_json), "reasons": dict(answer.reasons)}

    async def select(self, request: str, *, intent: bool = True, **options: Any) -> Json:
        asked = messages.SelectRequest(request=request, without_intent=not intent, **options)
        answer = await self._ends.stub.Select(asked, metadata=self._ends.metadata())
        selection: Json = orjson.loads(answer.selection_json)
        fields = (answer.id, answer.chosen, answer.answer)
        assert fields == (selection["id"], selection["chosen"] or "", selection["gate"]["answer"])
        return selection

    async def recommend(self, tool: str) -> list[Json]:
        answer = await self._ends.stub.Recommend(messages.RecommendRequest(tool=tool), metadata=self._ends.metadata())
        return [
            {"tool": one.tool, "reason": one.reason, "callers": one.callers, "why": one.why} for one in answer.tools
        ]

    async def cancel(self, call: str, reason: str = "") -> str:
        request = messages.CancelRequest(invocation_id=call, reason=reason)
        answer = await self._ends.stub.Cancel(request, metadata=self._ends.metadata())
        return messages.CancelOutcome.Name(answer.outcome).removeprefix("CANCEL_OUTCOME_").lower()

    async def resume(self, call: str) -> None:
        await self._ends.stub.Resume(messages.ResumeRequest(invocation_id=call), metadata=self._ends.metadata())

    async def trace(self, call: str, token: str = "full") -> Json | str:
        request = messages.TraceRequest(invocation_id=call)
        try:
            answer = await self._ends.stub.Trace(request, metadata=self._ends.metadata(token))
        except grpc.aio.AioRpcError as error:
            return typed_refusal(error).triple[0]
        spans = [
            {
                "name": one.name, "trace_id": one.trace_id, "span_id": one.span_id,
                "parent_span_id": one.parent_span_id or None, "start": one.start, "duration_ms": one.duration_ms,
                "status": one.status, "attributes": orjson.loads(one.attributes_json),
                "events": orjson.loads(one.events_json),
            }
            for one in answer.spans
        ]  # fmt: skip
        return {
            "invocation_id": answer.invocation_id, "trace_id": answer.trace_id, "complete": answer.complete,
            "spans": spans,
        }  # fmt: skip

    async def part(self, ref: str, part: Json) -> Json:
        request = messages.PartRequest(ref=ref, **part)
        try:
            answer = await self._ends.stub.Part(request, metadata=self._ends.metadata())
        except grpc.aio.AioRpcError as error:
            return typed_refusal(error).failure
        value = orjson.loads(answer.value_json)
        return {"value": value, "of": answer.of, "tokens": answer.tokens, "truncated": answer.truncated}

    async def calls(self, **asked: Any) -> Json:
        answer = await self._ends.stub.Calls(messages.CallsRequest(**asked), metadata=self._ends.metadata())
        lines = [{"invocation_id": line.invocation_id} for line in answer.calls]
        return {"calls": lines, "before": answer.before or None}


class Mcp(Wire):
    """MCP over HTTP, in one of its two eras."""

    @property
    def modern(self) -> bool:
        return self.name == "mcp-modern"

    def _meta(self, wish: Wish) -> Json:
        given = {
            "interlock/dryRun": wish.dry_run or None, "interlock/key": wish.key, "interlock/version": wish.version,
            "interlock/timeoutMs": wish.timeout_ms, "traceparent": wish.traceparent or None,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}

    async def _request(self, method: str, params: Json, token: str = "full") -> str:
        return await self._ends.mcp(method, params, modern=self.modern, token=token)

    async def tool(self, name: str, arguments: Json, expected: Json | None = None) -> str:
        """The answer of one of the tools that are there over MCP only."""
        return await self._request("tools/call", {"name": name, "arguments": arguments, **_expects(expected)})

    async def heard(self, wish: Wish) -> Heard:
        name = wish.tool.replace(".", "-")
        params = {"name": name, "arguments": wish.arguments, "_meta": self._meta(wish)}
        text = await self._request("tools/call", params, wish.token)
        body: Json = orjson.loads(text)
        if "error" in body:
            return Heard(text, body["error"]["code"], envelope=body["error"].get("data"))
        result: Json = body["result"]
        meta: Json = result["_meta"]
        if "interlock/error" in meta:
            assert result["isError"]
            return Heard(text, "isError", envelope=meta["interlock/error"])
        about: Json = meta.get("interlock/call", {})
        trace_id = about.get("traceId", "")
        if "interlock/pending" in meta:
            assert not result.get("isError")
            return Heard(text, "result", None, about, pending=meta["interlock/pending"], trace_id=trace_id)
        if "interlock/preview" in meta:
            return Heard(text, "preview", meta["interlock/preview"], about, trace_id=trace_id)
        data = result["structuredContent"]
        return Heard(text, "result", data, about, files=left(about.get("artifacts", ())), trace_id=trace_id)

    async def call(self, wish: Wish) -> Told:
        heard = await (self._by_sdk(wish) if self.by_sdk else self.heard(wish))
        if heard.envelope is not None or heard.pending is not None or heard.status == "preview":
            return heard.told
        data = heard.data["result"] if set(heard.data) == {"result"} else heard.data
        return Told(data, files=heard.files, deprecation=heard.about.get("deprecation"))

    async def _by_sdk(self, wish: Wish) -> Heard:
        """The answer to a call as the SDK's client reads it, which reads all files too."""
        async with self._ends.session(self.name, wish.token) as client:
            try:
                answer: Any = await client.call_tool(wish.tool, wish.arguments, meta=self._meta(wish))
            except MCPError as error:
                return Heard(str(error), error.error.code, envelope=error.error.data)
            about: Json = answer.meta.get("interlock/call", {})
            files = left(about.get("artifacts", ()))
            links = [one for one in answer.content if one.type == "resource_link"]
            assert [(one.name, one.size) for one in links] == [(path, size) for path, _, size in files]
            for link, (_, sha256, _) in zip(links, files, strict=True):
                (read,) = (await client.read_resource(link.uri)).contents
                assert hashlib.sha256(_bytes(read)).hexdigest() == sha256
        meta: Json = answer.meta
        text = str(answer)
        if "interlock/error" in meta:
            assert answer.is_error
            return Heard(text, "isError", envelope=meta["interlock/error"])
        trace_id = about.get("traceId", "")
        if "interlock/pending" in meta:
            assert not answer.is_error
            return Heard(text, "result", None, about, pending=meta["interlock/pending"], trace_id=trace_id)
        if "interlock/preview" in meta:
            return Heard(text, "preview", meta["interlock/preview"])
        return Heard(text, "result", answer.structured_content, about, files=files, trace_id=trace_id)

    async def pending(self, wish: Wish) -> Json:
        """A client of MCP can give the key as an argument too."""
        heard = await self._by_sdk(Wish(wish.tool, {**wish.arguments, "idempotency_key": wish.key}, token=wish.token))
        assert heard.pending is not None, heard.text
        return heard.pending

    async def knock(self, authorization: str | None) -> tuple[str, str | None]:
        headers = {**_header(authorization), "accept": BOTH}
        if self.modern:
            name = KNOCK.tool.replace(".", "-")
            headers |= {"mcp-protocol-version": MODERN, "mcp-method": "tools/call", "mcp-name": name}
            params: Json = {"name": name, "arguments": KNOCK.arguments, "_meta": META}
            body: Json = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        else:
            body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}
        answer = await self._ends.knock("POST", "/mcp", body, headers)
        told: Json = orjson.loads(answer.text) if answer.text.startswith("{") else {}
        return str(answer.status_code), _code(told.get("interlock"))

    async def listed(self, token: str = "full", cursor: str | None = None, expected: Json | None = None) -> list[str]:
        if self.by_sdk:
            async with self._ends.session(self.name, token) as client:
                answer = await client.list_tools(cursor=cursor, meta=_expects(expected).get("_meta"))
                return [one.meta["interlock/address"] for one in answer.tools]
        params = {**_given(cursor=cursor), **_expects(expected)}
        found = orjson.loads(await self._request("tools/list", params, token))["result"]
        addresses = [one.get("_meta", {}).get("interlock/address") for one in found["tools"]]
        return [one for one in addresses if one is not None]

    async def listing(self) -> str:
        return await self._request("tools/list", {})

    async def texts(self, tool: str) -> Sequence[str]:
        return [await self.listing()]

    async def described(self, tool: str) -> str:
        return await self.load(tool)

    async def search(self, query: str, expected: Json | None = None) -> Heard:
        text = await self.tool("search_tools", {"queries": [query]}, expected)
        result: Json = orjson.loads(text)["result"]
        found = result["structuredContent"]["results"][0]
        data: Json = {"pending": [], **found, "deferred": result.get("_meta", {}).get("interlock/deferred", [])}
        data["tools"] = [one for one in found["tools"] if one["loaded"]]
        return Heard(text, "result", data)

    async def load(self, tool: str) -> str:
        return await self.tool("load_tools", {"names": [tool.replace(".", "-")]})

    async def trace(self, call: str, token: str = "full") -> Json | str:
        async with self._ends.session(self.name, token) as client:
            try:
                (content,) = (await client.read_resource(f"trace:{call}")).contents
            except MCPError as error:
                return "E3702" if "Resource not found" in str(error) else str(error)
        return orjson.loads(content.text)

    async def part(self, ref: str, part: Json) -> Json:
        uri = f"{ref}?{urlencode(part)}" if part else f"{ref}?at="
        answer = orjson.loads(await self._request("resources/read", {"uri": uri}))
        return orjson.loads(answer["result"]["contents"][0]["text"]) if "result" in answer else answer["error"]["data"]


ROWS: dict[str, type[Wire]] = {
    "library": Library, "rest": Rest, "jsonrpc": JsonRpc, "grpc": Grpc, "mcp-modern": Mcp, "mcp-legacy": Mcp,
}  # fmt: skip
# A call that anybody with a token for all tools may make.
KNOCK = Wish("demo.add", {"a": 1, "b": 1})


def _traced(wish: Wish) -> dict[str, str]:
    return {"traceparent": wish.traceparent} if wish.traceparent else {}


def _given(**parameters: Any) -> Json:
    return {name: value for name, value in parameters.items() if value is not None}


def _json(document: Json) -> str:
    return orjson.dumps(document).decode()


def _expects(expected: Json | None) -> Json:
    return {} if expected is None else {"_meta": {"interlock/expects": expected}}


def _header(authorization: str | None) -> dict[str, str]:
    return {} if authorization is None else {"authorization": authorization}


def _code(envelope: Any) -> str | None:
    return None if envelope is None else envelope["error_code"]


def _bytes(read: Any) -> bytes:
    """The content of a resource: text, or bytes in base64."""
    return read.text.encode() if hasattr(read, "text") else base64.b64decode(read.blob)


async def _text(answered: Awaitable[Any]) -> str:
    """The answer of an RPC, or the envelope of its refusal."""
    try:
        return str(await answered)
    except grpc.aio.AioRpcError as error:
        return str(typed_refusal(error).envelope)
