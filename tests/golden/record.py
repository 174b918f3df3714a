"""Plays the corpus through every wire and notes what came of it, without what differs from run to run."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import h11
from google.protobuf.json_format import MessageToDict
from google.rpc.status_pb2 import Status

from interlock import Caller, Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.events import Event
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from interlock.doors.server import Listening, serving
from interlock.testing import FakeClock
from tests.golden.corpus import BY_CODE, CASES, RAW, Case, Decision, Json, Raw, Wanted
from tests.golden.tools import TOOLS, State, stuck
from tests.support.calls import admit
from tests.support.identities import did_of

FILES = Path(__file__).parent / "files"
WIRES = ("library", "rest", "jsonrpc", "grpc", "mcp-modern", "mcp-legacy")
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
_META: Json = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "golden", "version": "1"},
}
_ACCEPT = {"accept": "application/json, text/event-stream"}
_CHANGING = (
    ("did", re.compile(r"\bdid:key:z6Mk\w+")),
    ("id", re.compile(r"(?<![0-9A-Za-z])[0-7][0-9A-HJKMNP-TV-Z]{25}(?![0-9A-Za-z])")),
    ("span", re.compile(r"(?<=\b00-[0-9a-f]{32}-)[0-9a-f]{16}\b")),
    # Ids of MCP sessions have the same names as traces.
    ("trace", re.compile(r"\b[0-9a-f]{32}\b|(?<=mcp-session-id: )[\w-]{60,}|(?<=\"mcp_session_id\": \")[\w-]{60,}")),
    ("port", re.compile(r"(?<=127\.0\.0\.1:)\d+")),
)
# Metrics of the process and of how long things took. They differ from run to run.
_MEASURED = re.compile(r"^(\w+_(bucket|sum|rate)|interlock_limit_used|interlock_cpu\w*)\b")


class Names:
    """Gives each id that differs from run to run a name, in the order of their first appearance."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def settled(self, found: Any) -> Any:
        """The same JSON data with names for ids."""
        text = json.dumps(found, ensure_ascii=False)
        for kind, pattern in _CHANGING:
            text = pattern.sub(lambda match, kind=kind: self._name(kind, match[0]), text)
        return json.loads(text)

    def _name(self, kind: str, value: str) -> str:
        if value not in self._known:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._known[value] = f"<{kind} {self._counts[kind]}>"
        return self._known[value]


class Connection:
    """One connection that is kept alive, as clients have it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._h11 = h11.Connection(h11.CLIENT)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Json:
        """One request. The answer: its status, its headers in their order, and its body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        sent = {"host": "127.0.0.1", **headers, "content-length": str(len(body))}
        for event in (h11.Request(method=method, target=path, headers=list(sent.items())), h11.Data(body)):
            writer.write(self._h11.send(event) or b"")
        writer.write(self._h11.send(h11.EndOfMessage()) or b"")
        answer: Json = {}
        content = b""
        while not isinstance(event := self._h11.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                async with asyncio.timeout(30):
                    self._h11.receive_data(await reader.read(65_536))
            elif isinstance(event, h11.Response):
                told = [(name.decode(), value.decode()) for name, value in event.headers.raw_items()]
                answer = {
                    "status": event.status_code,
                    "headers": [f"{name}: {value}" for name, value in told if name.lower() != "date"],
                }
            elif isinstance(event, h11.Data):
                content += event.data
        if self._h11.our_state is h11.MUST_CLOSE or self._h11.their_state is not h11.DONE:
            await self.close()
        else:
            self._h11.start_next_cycle()
        try:
            return {**answer, "body": json.loads(content)}
        except ValueError:
            return {**answer, "body": content.decode().splitlines()}

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()
        self._streams, self._h11 = None, h11.Connection(h11.CLIENT)


class Player:
    """Plays cases against one server, over every wire."""

    def __init__(self, app: Interlock, clock: FakeClock, port: int, grpc_port: int, tokens: Mapping[str, str]) -> None:
        self.app = app
        self._clock = clock
        self._port = port
        self._tokens = tokens
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        self._stub = GatewayStub(self._channel)
        self._http = Connection(port)
        self._session: dict[str, str] = {}

    async def close(self) -> None:
        await self._http.close()
        await self._channel.close(grace=None)

    async def play(
        self, name: str, case: Case, over: str, *, listen: bool = False, measure: bool = False
    ) -> dict[str, list[Any]]:
        """One case over one wire: the answers, the records, the events, and which metrics went up by how much.

        Calls take shorter ways where nobody listens to events. Reading the metrics takes longer than most cases.
        """
        State.clear()
        (before,) = self.app.journal.reader.all("SELECT COALESCE(MAX(seq), 0) FROM journal")[0]
        events: list[Event] = []
        counted = await self._metrics() if measure else {}
        stop = self.app.listen(events.append) if listen else lambda: None
        late = asyncio.create_task(self._let_time_pass())
        answers: list[Json] = []
        for step in case:
            if isinstance(step, Decision):
                await self._decide(step)
            else:
                answers.append(await self._ask(_filled(step, f"{name}-{over}"), over))
        await self.app.journal.commit(lambda _: None)
        stop()
        late.cancel()
        rows = self.app.journal.reader.all("SELECT body FROM journal WHERE seq > ? ORDER BY seq", (before,))
        after = await self._metrics() if measure else {}
        played = {
            "answers": answers,
            "records": [json.loads(body) for (body,) in rows],
            "events": [_event(one) for one in events if one.type != "tool.surface.updated"],
            "metrics": [[one, after[one] - counted.get(one, 0)] for one in after if after[one] != counted.get(one, 0)],
        }
        return Names().settled(played)

    async def ask(self, request: Raw) -> Json:
        """One request as it stands, on a connection of its own."""
        token = {"authorization": f"Bearer {self._tokens['full']}"} if request.token else {}
        connection = Connection(self._port)
        try:
            headers = {**token, "content-type": "application/json", **request.headers}
            answer = await connection.ask(request.method, request.path, headers, request.body)
        finally:
            await connection.close()
        return Names().settled(answer)

    async def _metrics(self) -> dict[str, float]:
        lines = (await self.app.gateway.telemetry.metrics.render()).decode().splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in samples if not _MEASURED.match(name)}

    async def _let_time_pass(self) -> None:
        """Move the clock past the time of each tool that waits without end."""
        while True:
            await stuck.began.wait()
            stuck.began.clear()
            self._clock.advance(5)

    async def _decide(self, step: Decision) -> None:
        rows = self.app.journal.reader.all("SELECT body FROM journal WHERE kind = 'pending' ORDER BY seq DESC LIMIT 1")
        decide = self.app.approvals.approve if step.approve else self.app.approvals.deny
        await decide(json.loads(rows[0][0])["approvalTicketId"], by=REVIEWER)

    def _bearer(self, wanted: Wanted) -> dict[str, str]:
        token = self._tokens[wanted.token]
        return {"authorization": f"Bearer {token}"} if token else {}

    async def _ask(self, wanted: Wanted, name: str) -> Json:
        match name:
            case "library":
                return await self._library(wanted)
            case "rest":
                return await self._post("/v1/tools/invoke", _body(wanted), self._bearer(wanted))
            case "jsonrpc":
                request = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": _body(wanted)}
                return await self._post("/rpc", request, self._bearer(wanted))
            case "grpc":
                return await self._grpc(wanted)
            case "mcp-modern":
                headers = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": wanted.tool}
                return await self._post("/mcp", _mcp(wanted, _META), {**self._bearer(wanted), **_ACCEPT, **headers})
            case _:
                return await self._legacy(wanted)

    async def _post(self, path: str, body: Any, headers: Mapping[str, str]) -> Json:
        return await self._http.ask("POST", path, {"content-type": "application/json", **headers}, _bytes(body))

    async def _library(self, wanted: Wanted) -> Json:
        try:
            result = await self.app.call(
                wanted.tool, wanted.arguments, key=wanted.key, dry_run=wanted.dry_run, version=wanted.version,
                token=self._tokens[wanted.token],
            )  # fmt: skip
        except TypeError as error:
            return {"raises": f"TypeError: {error}"}
        return {"state": result.state, "source": result.source, "document": result.document()}

    async def _grpc(self, wanted: Wanted) -> Json:
        request = wire.InvokeRequest(
            tool_id=wanted.tool, arguments_json=_bytes(wanted.arguments), idempotency_key=wanted.key,
            dry_run=wanted.dry_run, version=wanted.version,
        )  # fmt: skip
        try:
            answer = await self._stub.Invoke(request, metadata=tuple(self._bearer(wanted).items()))
        except grpc.aio.AioRpcError as error:
            trailers = cast("dict[str, Any]", dict(error.trailing_metadata() or ()))  # pyright: ignore[reportArgumentType, reportCallIssue] - grpc's own stubs are loose here
            packed: bytes = trailers.pop("grpc-status-details-bin", b"")
            details = _message(Status.FromString(packed)) if packed else None
            return {"code": error.code().name, "message": error.details(), "details": details, "trailers": trailers}
        return _message(answer)

    async def _legacy(self, wanted: Wanted) -> Json:
        bearer = self._bearer(wanted)
        if wanted.token not in self._session:
            client = {"name": "golden", "version": "1"}
            params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
            hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
            begun = await self._post("/mcp", hello, {**bearer, **_ACCEPT})
            found = [one.partition(": ")[2] for one in begun["headers"] if one.lower().startswith("mcp-session-id:")]
            if not found:
                return begun
            self._session[wanted.token] = found[0]
        session = {"mcp-session-id": self._session[wanted.token], "mcp-protocol-version": "2025-06-18"}
        return await self._post("/mcp", _mcp(wanted, {}), {**bearer, **_ACCEPT, **session})


def _event(event: Event) -> Json:
    """An event without its number, which counts all events of the process."""
    return {name: value for name, value in event.document().items() if name != "event_id"}


def _bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _message(message: Any) -> Json:
    """A gRPC message as JSON data, with the documents in it read. Maps come in any order, so names are sorted."""

    def read(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: read(one, key) for key, one in sorted(cast("Json", value).items())}
        if isinstance(value, list):
            return [read(one) for one in cast("list[Any]", value)]
        return json.loads(base64.b64decode(value)) if name.endswith("_json") else value

    return read(MessageToDict(message, preserving_proto_field_name=True))


def _filled(wanted: Wanted, case: str) -> Wanted:
    """The request with the name of its case and wire, so that no two of them are about the same thing."""

    def fill(value: Any) -> Any:
        return value.replace("{case}", case) if isinstance(value, str) else value

    arguments = wanted.arguments
    if isinstance(arguments, dict):
        arguments = {key: fill(value) for key, value in cast("Json", arguments).items()}
    return Wanted(wanted.tool, arguments, fill(wanted.key), wanted.dry_run, wanted.version, wanted.token)


def _body(wanted: Wanted) -> Json:
    more = {"idempotency_key": wanted.key, "tool_version": wanted.version}
    given = {name: value for name, value in more.items() if value is not None}
    return {"tool_id": wanted.tool, "parameters": wanted.arguments, "dry_run": wanted.dry_run, **given}


def _mcp(wanted: Wanted, meta: Json) -> Json:
    more = {
        "interlock/key": wanted.key,
        "interlock/version": wanted.version,
        "interlock/dryRun": wanted.dry_run or None,
    }
    meta = {**meta, **{name: value for name, value in more.items() if value is not None}}
    params = {"name": wanted.tool, "arguments": wanted.arguments, "_meta": meta}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


@asynccontextmanager
async def playing(home: Path) -> AsyncGenerator[Player]:
    """A player before a server on a clock that stands still."""
    clock = FakeClock(seed="golden")
    async with Interlock.open(home, housekeeping=False, clock=clock.clock) as app:
        await admit(app, *TOOLS)
        app.issuer_keys.init("EdDSA")
        for name, kind in (("ann", "human"), ("bot", "agent")):
            await app.identities.register(
                Identity(did=did_of(name), name=name, kind=cast("Any", kind), trust=80), by="test"
            )

        async def issue(tools: str, seconds: int) -> str:
            return await app.tokens.issue(
                subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant(tools)], by=app.caller, ttl_s=seconds
            )

        expired = await issue("*", 60)
        clock.advance(120)
        full = await issue("*", 86_400)
        tokens = {
            "full": full, "narrow": await issue("gold.echo", 86_400), "none": "", "malformed": "not.a.token",
            "forged": full[:-8] + ("AAAAAAAA" if not full.endswith("AAAAAAAA") else "BBBBBBBB"), "expired": expired,
        }  # fmt: skip
        async with serving(Service(app), Listening(port=0, ports={"grpc": 0})) as server:
            player = Player(app, clock, server.port, server.ports["grpc"], tokens)
            try:
                yield player
            finally:
                await player.close()


async def played(home: Path) -> dict[str, str]:
    """The text of every golden file, by its name. The order of cases is fixed: the clock moves on in some of them."""
    made: dict[str, str] = {}
    async with playing(home) as player:
        for name, case in CASES.items():
            found: dict[str, dict[str, list[Any]]] = {}
            for over in WIRES:
                heard = await player.play(f"{name}-heard", case, over, listen=True)
                found[over] = {**await player.play(name, case, over, measure=True), "events": heard["events"]}
            made[name] = _written(found)
        codes: dict[str, dict[str, list[Any]]] = {}
        for code, case in BY_CODE.items():
            codes[code] = {over: (await player.play(code, case, over))["answers"] for over in WIRES}
        made["codes"] = _written(codes)
        made["raw"] = _written({"http": {name: [await player.ask(request)] for name, request in RAW.items()}})
    return made


def _written(found: Mapping[str, Mapping[str, list[Any]]]) -> str:
    """JSON with one line for each answer, record, event and metric, so that differences are easy to read."""
    blocks: list[str] = []
    for name, sections in found.items():
        parts: list[str] = []
        for section, items in sections.items():
            lines = ",\n   ".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in items)
            parts.append(f'  "{section}": [' + (f"\n   {lines}\n  ]" if items else "]"))
        blocks.append(f' "{name}": {{\n' + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"
