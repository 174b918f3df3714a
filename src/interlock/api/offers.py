"""Resources and prompts of upstreams that offer them (MCP), for callers who may use one of the upstream's tools.

They are read, watched and filled in, never run, so they do not pass through the gateway; but a token that names
resources must name these, and each of those acts is in the journal before the upstream is asked. An upstream's own
names are kept apart from others': a prompt is `UPSTREAM-NAME`, a resource `upstream:UPSTREAM:URI`, the interface of an
MCP App (`ui://PATH`) is `ui://upstream.UPSTREAM/PATH`; those of an upstream without a prefix keep the names they have.
Upstreams that are reached with somebody's credentials offer only their tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from interlock.api.mcp_names import UI, served_uri
from interlock.call.connector import Interaction
from interlock.call.content import ContentConnector
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.data.schema import Json
from interlock.store import records
from interlock.store.port import Transaction
from interlock.upstreams.kinds import kind_of

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.tools import Tools
    from interlock.call.content import Content

_SCHEME = "upstream:"
T = TypeVar("T")


class Source(NamedTuple):
    """An upstream with resources and prompts. One that is `bare` has its own names here."""

    name: str
    bare: bool
    content: Content

    def uri(self, own: str) -> str:
        return own if self.bare else served_uri(self.name, own)

    def own_uri(self, uri: str) -> str | None:
        """The address at the upstream of a resource; None for one of another upstream."""
        if self.bare:
            return uri
        for head, own in ((f"{_SCHEME}{self.name}:", ""), (f"{UI}upstream.{self.name}/", UI)):
            if uri.startswith(head):
                return own + uri.removeprefix(head)
        return None

    def prompt(self, own: str) -> str:
        return own if self.bare else f"{self.name}-{own}"

    def own_prompt(self, name: str) -> str | None:
        """The name at the upstream of a prompt; None for one of another upstream."""
        if self.bare:
            return name
        head = f"{self.name}-"
        return name.removeprefix(head) if name.startswith(head) else None

    def is_covered(self, own: str, caller: Caller) -> bool:
        """Whether a caller's token covers a resource: under the address it has here, or the one in the journal."""
        token = caller.capability
        return (
            token is None
            or token.covers_resource(self.uri(own))
            or (not self.bare and token.covers_resource(f"{_SCHEME}{self.name}:{own}"))
        )


class Offers:
    """Resources and prompts, as one caller may have them. `changed` gets the kind of list that may have changed."""

    def __init__(self, parts: Parts, tools: Tools, changed: Callable[[str], None]) -> None:
        self._parts = parts
        self._tools = tools
        self._changed = changed

    async def attend(self, caller: Caller) -> None:
        """Hear from now on of changes in what a caller may have."""
        await self._sources(caller)

    async def resources(self, caller: Caller) -> list[Json]:
        """Every resource that is listed."""
        found = await self._gather(caller, lambda source: source.content.list_resources())
        owned = [(source, str(one.get("uri")), one) for source, one in found]
        return [{**one, "uri": source.uri(own)} for source, own, one in owned if source.is_covered(own, caller)]

    async def templates(self, caller: Caller) -> list[Json]:
        """Forms of the addresses of further resources."""
        found = await self._gather(caller, lambda source: source.content.list_resource_templates())
        return [{**one, "uriTemplate": source.uri(str(one.get("uriTemplate")))} for source, one in found]

    async def prompts(self, caller: Caller) -> list[Json]:
        """Every prompt."""
        found = await self._gather(caller, lambda source: source.content.list_prompts())
        return [{**one, "name": source.prompt(str(one.get("name")))} for source, one in found]

    async def read(self, uri: str, caller: Caller, interaction: Interaction) -> Json:
        """A resource. To a caller who may not have it, it does not exist (E3702)."""

        async def ask(source: Source, own: str) -> Json:
            answer = await source.content.read_resource(own, interaction, caller)
            contents: list[Json] = answer.get("contents", [])
            return {**answer, "contents": [{**one, "uri": source.uri(str(one.get("uri", own)))} for one in contents]}

        return await self.of_resource(uri, caller, "resource.read", ask)

    async def prompt(self, name: str, arguments: Mapping[str, str], caller: Caller, interaction: Interaction) -> Json:
        """A prompt, filled in. To a caller who may not have it, it does not exist (E3702)."""
        return await self._of_prompt(
            name,
            caller,
            "prompt.read",
            lambda source, own: source.content.get_prompt(own, arguments, interaction, caller),
        )

    async def complete(self, ref: Json, argument: Json, context: Json | None, caller: Caller) -> Json:
        """The completions of an upstream for an argument of a prompt or of a resource template."""
        if ref["type"] == "ref/prompt":
            return await self._of_prompt(
                ref["name"],
                caller,
                "prompt.complete",
                lambda source, own: source.content.complete({**ref, "name": own}, argument, context),
            )
        return await self.of_resource(
            ref["uri"],
            caller,
            "resource.complete",
            lambda source, own: source.content.complete({**ref, "uri": own}, argument, context),
        )

    async def of_resource(self, uri: str, caller: Caller, act: str, ask: Callable[[Source, str], Awaitable[T]]) -> T:
        """The answer of the upstream that has a resource, which is asked by the address it has there."""
        owners = _owners(await self._sources(caller), Source.own_uri, uri)
        covered = [(source, own) for source, own in owners if source.is_covered(own, caller)]
        return await self._first(f"no resource `{uri}`", covered, caller, act, ask)

    async def _of_prompt(self, name: str, caller: Caller, act: str, ask: Callable[[Source, str], Awaitable[T]]) -> T:
        owners = _owners(await self._sources(caller), Source.own_prompt, name)
        return await self._first(f"no prompt `{name}`", owners, caller, act, ask)

    async def _first(
        self,
        missing: str,
        owners: list[tuple[Source, str]],
        caller: Caller,
        act: str,
        ask: Callable[[Source, str], Awaitable[T]],
    ) -> T:
        """The first answer. Several upstreams may have the thing only where they have no prefix."""
        failures: list[Failure] = []
        for source, own in owners:
            await self._note(caller, act, source, own)
            try:
                return await ask(source, own)
            except Failure as failure:
                if "inputRequired" in (failure.details or {}):
                    raise  # it has the thing, and asks
                failures.append(failure)
        raise failures[0] if failures else Failure("E3702", missing)

    async def _sources(self, caller: Caller) -> list[Source]:
        """The upstreams that are there and of which the caller may use a tool."""
        origins = {version.row.origin for version in await self._tools.visible(caller)}
        served = {origin.removeprefix("upstream:") for origin in origins if origin.startswith("upstream:")}
        sources: list[Source] = []
        for one in await self._parts.upstreams.list():
            if not kind_of(one.kind).offers_content or one.name not in served:
                continue
            if one.state != "available" or one.credentials:
                continue
            try:
                server = _connector(self._parts, one.name)
            except Failure:
                continue  # it went away just now, or is another one now
            server.attend(self._changed)
            sources.append(Source(one.name, one.config.get("prefix") is False, server.content))
        return sources

    def content_of(self, upstream: str) -> Content:
        """The resources and prompts of an upstream. E3502 if it does not answer, E3109 if it offers none."""
        return _connector(self._parts, upstream).content

    async def _gather(
        self, caller: Caller, ask: Callable[[Source], Awaitable[list[Json]]]
    ) -> list[tuple[Source, Json]]:
        """The offers of all upstreams; one that does not answer is left out."""
        sources = await self._sources(caller)
        answers = await asyncio.gather(*(ask(source) for source in sources), return_exceptions=True)
        found: list[tuple[Source, Json]] = []
        for source, answer in zip(sources, answers, strict=True):
            if isinstance(answer, Failure):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found += [(source, one) for one in answer]
        return found

    async def _note(self, caller: Caller, act: str, source: Source, what: str) -> None:
        ref = f"upstream:{source.name}"

        def unit(transaction: Transaction) -> None:
            body = records.plain(
                "authority", ref, transaction.now_ms, act=act, by=caller.acting, of=caller.id, what=what
            )
            transaction.append("authority", ref, body)

        await self._parts.journal.commit(unit)


def _connector(parts: Parts, upstream: str) -> ContentConnector:
    server = parts.upstreams.connections.get(upstream)
    if isinstance(server, ContentConnector):
        return server
    raise Failure("E3109", f"`{upstream}` offers no resources")


def _owners(sources: list[Source], own: Callable[[Source, str], str | None], name: str) -> list[tuple[Source, str]]:
    """Return the upstreams that may own a name, each with its own name for it.

    INVARIANT: a name with the prefix of an upstream is sent to that upstream only.
    """
    owners = [(source, there) for source in sources if (there := own(source, name)) is not None]
    return [one for one in owners if not one[0].bare] or owners
