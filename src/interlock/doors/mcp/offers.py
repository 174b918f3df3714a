"""What MCP upstreams offer besides tools: resources and prompts, passed on to those who may use one of their tools.

They are read, never run, so they do not pass through the gateway; but a token that names resources must name these, and
each read is in the journal before it is answered. An upstream's own names are kept apart from others': a prompt is
`UPSTREAM-NAME`, a resource `upstream:UPSTREAM:URI`; those of an upstream without a prefix keep the names they have.
Upstreams that are reached with somebody's credentials offer only their tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.core.schema import Json
from interlock.service import Service
from interlock.store import records
from interlock.store.journal import Transaction

if TYPE_CHECKING:
    from interlock.upstreams.mcp import McpUpstream

_SCHEME = "upstream:"


class _Source(NamedTuple):
    name: str
    bare: bool
    server: McpUpstream

    def uri(self, own: str) -> str:
        return own if self.bare else f"{_SCHEME}{self.name}:{own}"

    def prompt(self, own: str) -> str:
        return own if self.bare else f"{self.name}-{own}"


class Offers:
    """Resources and prompts, as one caller may have them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def resources(self, caller: Caller) -> list[Json]:
        """Every resource that is listed."""
        found = await self._gather(caller, lambda source: source.server.list_resources())
        named = [{**one, "uri": source.uri(str(one.get("uri")))} for source, one in found]
        return [one for one in named if _covered(caller, one["uri"])]

    async def templates(self, caller: Caller) -> list[Json]:
        """Forms of the addresses of further resources."""
        found = await self._gather(caller, lambda source: source.server.list_resource_templates())
        return [{**one, "uriTemplate": source.uri(str(one.get("uriTemplate")))} for source, one in found]

    async def prompts(self, caller: Caller) -> list[Json]:
        """Every prompt."""
        found = await self._gather(caller, lambda source: source.server.list_prompts())
        return [{**one, "name": source.prompt(str(one.get("name")))} for source, one in found]

    async def read(self, uri: str, caller: Caller) -> Json:
        """A resource. To a caller who may not have it, it does not exist (E3702)."""
        if not _covered(caller, uri):
            raise Failure("E3702", f"no resource `{uri}`")
        failures: list[Failure] = []
        for source in self._sources(caller):
            own = uri if source.bare else uri.removeprefix(source.uri(""))
            if not source.bare and own == uri:
                continue
            await self._note(caller, "resource.read", source, own)
            try:
                answer = await source.server.read_resource(own)
            except Failure as failure:
                failures.append(failure)
                continue
            contents: list[Json] = answer.get("contents", [])
            return {**answer, "contents": [{**one, "uri": source.uri(str(one.get("uri", own)))} for one in contents]}
        raise failures[0] if failures else Failure("E3702", f"no resource `{uri}`")

    async def prompt(self, name: str, arguments: Mapping[str, str], caller: Caller) -> Json:
        """A prompt, filled in. To a caller who may not have it, it does not exist (E3702)."""
        failures: list[Failure] = []
        for source in self._sources(caller):
            own = name if source.bare else name.removeprefix(source.prompt(""))
            if not source.bare and own == name:
                continue
            await self._note(caller, "prompt.read", source, own)
            try:
                return await source.server.get_prompt(own, arguments)
            except Failure as failure:
                failures.append(failure)
        raise failures[0] if failures else Failure("E3702", f"no prompt `{name}`")

    def _sources(self, caller: Caller) -> list[_Source]:
        """The MCP upstreams that are there and of which the caller may use a tool."""
        from interlock.upstreams.mcp import McpUpstream

        lock = self._service.lock
        served = {
            execution.target
            for version in self._service.tools.visible(caller)
            if (execution := version.contract.manifest.execution) is not None and execution.kind == "upstream"
        }
        sources: list[_Source] = []
        for one in lock.upstreams.list():
            if one.kind != "mcp" or one.name not in served or one.state != "available" or one.credentials:
                continue
            server = lock.upstreams.connect(one.name)
            if isinstance(server, McpUpstream):
                sources.append(_Source(one.name, one.config.get("prefix") is False, server))
        return sources

    async def _gather(
        self, caller: Caller, ask: Callable[[_Source], Awaitable[list[Json]]]
    ) -> list[tuple[_Source, Json]]:
        """What all of them offer; one that does not answer now is left out."""
        sources = self._sources(caller)
        answers = await asyncio.gather(*(ask(source) for source in sources), return_exceptions=True)
        found: list[tuple[_Source, Json]] = []
        for source, answer in zip(sources, answers, strict=True):
            if isinstance(answer, Failure):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found += [(source, one) for one in answer]
        return found

    async def _note(self, caller: Caller, act: str, source: _Source, what: str) -> None:
        ref = f"upstream:{source.name}"

        def unit(transaction: Transaction) -> None:
            body = records.plain(
                "authority", ref, transaction.now_ms, act=act, by=caller.acting, of=caller.id, what=what
            )
            transaction.append("authority", ref, body)

        await self._service.lock.journal.commit(unit)


def _covered(caller: Caller, uri: str) -> bool:
    return caller.capability is None or caller.capability.covers_resource(uri)
