"""The methods of the JSON-RPC endpoint: parameters are checked, the api is asked, and answers are documents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from interlock.api.listing import LEADS, Wanted, moment
from interlock.api.search import MOST_FOUND
from interlock.api.service import Ask, Service
from interlock.api.tools import DEFAULT_LIMIT
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.core.turns import Turn
from interlock.doors.jsonrpc.messages import PARAMS, Fault, expected_schemas, text_in, whole

if TYPE_CHECKING:
    from interlock.api.tools import Version
    from interlock.data.schema import Json

LONGEST_MS = 86_400_000
Method = Callable[..., Awaitable[Any]]


# many methods: one method per method of the protocol
class Methods:
    """The methods of one service, by their names in `table`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.table: Mapping[str, Method] = {
            "tools.list": self.tools,
            "tools.search": self.search,
            "tools.describe": self.tool,
            "tools.negotiate": self.negotiate,
            "tools.load": self.load,
            "tools.select": self.select,
            "tools.recommend": self.recommend,
            "surface.show": self.surface,
            "tools.invoke": self.invoke,
            "calls.list": self.calls,
            "calls.top": self.top,
            "calls.status": self.status,
            "calls.trace": self.trace,
            "calls.part": self.part,
            "calls.cancel": self.cancel,
            "calls.resume": self.resume,
            "approvals.list": self.approvals,
            "approvals.show": self.approval,
            "approvals.approve": self.approve,
            "approvals.deny": self.deny,
        }

    # Tools

    async def tools(
        self, caller: Caller, cursor: str | None = None, limit: int = 100, expected: Json | None = None
    ) -> Json:
        if limit.__class__ is not int or not 1 <= limit <= 1000:
            raise Fault(PARAMS, "invalid params: `limit` is a number from 1 to 1000")
        page = await self._service.surfaces.page(
            caller, "jsonrpc", text_in(cursor, "cursor"), limit, expected_schemas(expected)
        )
        return {"tools": [self._brief(one) for one in page.versions], "cursor": page.cursor}

    async def search(
        self, caller: Caller, query: str, limit: int = DEFAULT_LIMIT, by: str = "both", expected: Json | None = None
    ) -> Json:
        if limit.__class__ is not int or not 1 <= limit <= MOST_FOUND:
            raise Fault(PARAMS, f"invalid params: `limit` is a number from 1 to {MOST_FOUND}")
        asked, by_which = text_in(query, "query") or "", text_in(by, "by") or "both"
        found, loaded, deferred = await self._service.surfaces.search_at(
            asked, caller, "jsonrpc", limit, by_which, expected_schemas(expected)
        )
        tools = [{**self._brief(one.version), "score": one.score} for one in loaded]
        return {"tools": tools, "deferred": deferred, **found.facts()}

    async def negotiate(self, caller: Caller, expected: Json) -> Json:
        matches = await self._service.tools.negotiate(expected_schemas(expected) or {}, caller)
        return {"matches": [one.document() for one in matches]}

    async def load(self, caller: Caller, names: Any) -> Json:
        texts = cast("list[Any]", names) if isinstance(names, list) else []
        if not texts:
            raise Fault(PARAMS, "invalid params: `names` is a list of names")
        found = await self._service.surfaces.load([text_in(one, "names") or "" for one in texts], caller)
        schemas = [{"input_schema": one.contract.input.model_facing} for one in found]
        return {"tools": [{**self._brief(one), **schema} for one, schema in zip(found, schemas, strict=True)]}

    async def select(
        self,
        caller: Caller,
        request: Any,
        allocation: Any = None,
        cheaper: Any = False,
        faster: Any = False,
        intent: Any = True,
        session: Any = "",
    ) -> Json:
        if allocation is not None and (allocation.__class__ is not int or allocation < 0):
            raise Fault(PARAMS, "invalid params: `allocation` is a whole number from 0 on")
        if any(one.__class__ is not bool for one in (cheaper, faster, intent)):
            raise Fault(PARAMS, "invalid params: `cheaper`, `faster` and `intent` are true or false")
        made = await self._service.app.select(
            text_in(request, "request") or "",
            caller=caller,
            allocation=allocation,
            cheaper=cheaper,
            faster=faster,
            intent=intent,
            session=text_in(session, "session") or "",
            door="jsonrpc",
        )
        return made.document()

    async def recommend(self, caller: Caller, tool: Any = None) -> Json:
        found = await self._service.app.recommend(text_in(tool, "tool"), caller=caller)
        return {"tools": [one.document() for one in found]}

    async def surface(self, asks: Caller, caller: Any = None, cursor: Any = None, limit: Any = 200) -> Json:
        who, place, most = text_in(caller, "caller"), text_in(cursor, "cursor"), whole(limit, "limit", 1000)
        return await self._service.surface_views.show(by=asks, who=who, cursor=place, limit=most)

    async def tool(self, caller: Caller, tool_id: str, tool_version: str | None = None) -> Json:
        found = await self._service.tools.find(
            text_in(tool_id, "tool_id") or "", text_in(tool_version, "tool_version"), caller
        )
        contract = found.contract
        return {
            **self._brief(found),
            "input_schema": contract.input.model_facing,
            "output_schema": contract.delivers,
            "interface": self._service.tools.interface(found),
            "timeout": self._service.tools.timeout(found),
            "warnings": list(contract.warnings),
        }

    def _brief(self, version: Version) -> Json:
        manifest = version.contract.manifest
        return {
            "tool_id": version.row.address,
            "version": version.row.version,
            "title": manifest.title or manifest.name,
            "description": manifest.full_description,
            "mutation_class": manifest.mutation_class,
            "known_pairs": len(manifest.known_pairs),
            "availability": self._service.tools.availability(version),
        }

    async def invoke(
        self,
        caller: Caller,
        tool_id: str,
        parameters: Json | None = None,
        tool_version: str | None = None,
        idempotency_key: str | None = None,
        session_id: str = "",
        timeout_ms: float | None = None,
        dry_run: bool = False,
        execution_mode: str = "sync",
        *,
        trace: str | None = None,
        native: Json | None = None,
        turn: Turn | None = None,
    ) -> Result | Json:
        if parameters is not None and not isinstance(parameters, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - from a wire
            raise Fault(PARAMS, "invalid params: `parameters` is an object")
        if timeout_ms is not None and (timeout_ms.__class__ not in (int, float) or not 0 < timeout_ms <= LONGEST_MS):
            raise Fault(PARAMS, f"invalid params: `timeout_ms` is a number, more than 0 and at most {LONGEST_MS}")
        if dry_run.__class__ is not bool:
            raise Fault(PARAMS, "invalid params: `dry_run` is true or false")
        if execution_mode not in ("sync", "async"):
            raise Fault(PARAMS, "invalid params: `execution_mode` is sync or async")
        ask = Ask(
            text_in(tool_id, "tool_id") or "",
            parameters or {},
            version=text_in(tool_version, "tool_version"),
            key=text_in(idempotency_key, "idempotency_key"),
            session=text_in(session_id, "session_id") or "",
            timeout_s=None if timeout_ms is None else timeout_ms / 1000,
            dry_run=dry_run,
            trace=trace,
            native=native,
        )
        if execution_mode == "async":
            return {"invocation_id": await self._service.calls.start(ask, caller, door="jsonrpc"), "status": "running"}
        return await self._service.calls.invoke(ask, caller, door="jsonrpc", turn=turn)

    # Calls

    async def calls(
        self, asks: Caller, state: Any = None, error: Any = None, tool: Any = None, caller: Any = None,
        since: Any = None, until: Any = None, before: Any = None, limit: Any = 100,
    ) -> Json:  # fmt: skip
        wanted = Wanted(
            state=text_in(state, "state"), error=text_in(error, "error"), tool=text_in(tool, "tool"),
            caller=text_in(caller, "caller"), since=moment(text_in(since, "since"), "since"),
            until=moment(text_in(until, "until"), "until"),
        )  # fmt: skip
        place = None if before is None else whole(before, "before", 2**62)
        most = whole(limit, "limit", 1000)
        found, place = await self._service.listing.page(wanted, by=asks, before=place, limit=most)
        return {"calls": found, "before": place}

    async def top(
        self, caller: Caller, by: Any = "failures", since: Any = None, until: Any = None, limit: Any = 10
    ) -> Json:
        if by not in LEADS:
            raise Fault(PARAMS, f"invalid params: `by` is one of {', '.join(LEADS)}")
        begin, end = moment(text_in(since, "since"), "since"), moment(text_in(until, "until"), "until")
        return await self._service.listing.top(by, by=caller, since=begin, until=end, limit=whole(limit, "limit", 100))

    async def status(self, caller: Caller, invocation_id: str) -> Json:
        return await self._service.calls.find(text_in(invocation_id, "invocation_id") or "", caller)

    async def trace(self, caller: Caller, invocation_id: str) -> Json:
        return await self._service.calls.trace(text_in(invocation_id, "invocation_id") or "", caller)

    async def part(
        self, caller: Caller, ref: str, at: Any = "", query: Any = "", start: Any = None, stop: Any = None,
        tokens: Any = None,
    ) -> Json:  # fmt: skip
        part: Json = {"at": at, "query": query, "start": start, "stop": stop, "tokens": tokens}
        return await self._service.app.read_part(text_in(ref, "ref") or "", part, caller=caller)

    async def cancel(self, caller: Caller, invocation_id: str, reason: str | None = None) -> Json:
        call_id, why = text_in(invocation_id, "invocation_id") or "", text_in(reason, "reason")
        return {"answer": await self._service.calls.cancel(call_id, caller, why)}

    async def resume(self, caller: Caller, invocation_id: str) -> Result:
        return await self._service.calls.resume(text_in(invocation_id, "invocation_id") or "", caller)

    # Approvals

    async def approvals(self, caller: Caller) -> Json:
        return {"approvals": await self._service.approvals.tickets(by=caller)}

    async def approval(self, caller: Caller, ticket_id: str) -> Json:
        return await self._service.approvals.ticket(text_in(ticket_id, "ticket_id") or "", by=caller)

    async def approve(self, caller: Caller, ticket_id: str, comment: str = "", edit: Json | None = None) -> Json:
        ticket = text_in(ticket_id, "ticket_id") or ""
        if edit is not None and not isinstance(edit, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - from a wire
            raise Fault(PARAMS, "invalid params: `edit` is an object")
        approvals = self._service.approvals
        return await approvals.approve(ticket, by=caller, comment=text_in(comment, "comment") or "", edit=edit)

    async def deny(self, caller: Caller, ticket_id: str, comment: str = "") -> Json:
        ticket = text_in(ticket_id, "ticket_id") or ""
        return await self._service.approvals.deny(ticket, by=caller, comment=text_in(comment, "comment") or "")
