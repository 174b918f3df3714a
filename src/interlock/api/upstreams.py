"""Operations on upstreams: list, show, probe, add, refresh, accept changes, remove."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlock.api.rights import require, require_here
from interlock.call.context import Caller
from interlock.contract import upstream_kinds
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.kinds import kind_of

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.resilience.services import Health
    from interlock.upstreams.repository import Report


# Fields of any kind's configuration that use the machine the server runs on: its network, and files of certificates.
_OF_ALL_KINDS = frozenset(("allow_private", "tls"))


class Upstreams:
    """Adds, reviews and removes upstreams, for callers with `tools:admin`.

    With `on_machine`, the caller has a shell on the machine itself, and may add upstreams that run programs there.
    """

    def __init__(self, parts: Parts, *, on_machine: bool = False) -> None:
        self._parts = parts
        self._on_machine = on_machine

    async def all(self, *, by: Caller) -> Json:
        """Every upstream with its tools, and the breakers of other services."""
        require_here(by, "tools:admin", "looking at upstreams")
        return await list_upstreams(self._parts)

    async def one(self, name: str, *, by: Caller) -> Json:
        """One upstream with its breakers; of its tools that changed, the difference to when they were admitted."""
        require_here(by, "tools:admin", "looking at upstreams")
        return await show_upstream(self._parts, name)

    async def probe(self, name: str, *, by: Caller) -> Json:
        """Check whether an upstream answers, and whether it offers the same tools as before."""
        require_here(by, "tools:admin", "probing an upstream")
        state = await self._parts.upstreams.probe(name)
        return {"name": name, "state": state, "reason": (await self._parts.upstreams.get(name)).reason}

    async def add(self, name: str, kind: str, config: Json, *, by: Caller, overlay: Json | None = None) -> Json:
        """Connect to an upstream, and serve those of its tools that are admitted."""
        self._check(kind, config, by)
        return await self._report(await self._parts.upstreams.add(name, kind, config, by=by, overlay=overlay), config)

    async def preview(self, name: str, kind: str, config: Json, *, by: Caller, overlay: Json | None = None) -> Json:
        """Report what adding an upstream would do. Connects to it, and changes nothing."""
        self._check(kind, config, by)
        return await self._report(await self._parts.upstreams.try_connecting(name, kind, config, overlay), config)

    def _check(self, kind: str, config: Json, by: Caller) -> None:
        require_here(by, "tools:admin", "adding an upstream")
        if self._on_machine:
            return
        # INVARIANT: through an endpoint nobody starts a program, loads code, reads a file or reaches the network that
        # this machine is in. That needs a shell on the machine.
        if reaching := _on_the_machine() & config.keys() or ({kind} if kind_of(kind).in_process else set[str]()):
            words = f"`{min(reaching)}` reaches into this machine: interlock upstream add, on the machine itself"
            raise Failure("E3206", words)
        if config.keys() & {"auth", "credentials"}:
            require(by, "secrets:admin", "sending stored credentials to an upstream")

    async def refresh(self, name: str, *, by: Caller, overlay: Json | None = None, accept_hints: bool = False) -> Json:
        """Discover the tools of an upstream again. Changed ones are kept out until a person accepts them."""
        require_here(by, "tools:admin", "refreshing an upstream")
        report = await self._parts.upstreams.refresh(name, by=by, overlay=overlay, accept_hints=accept_hints)
        return await self._report(report)

    async def accept(
        self, name: str, *, by: Caller, tools: Sequence[str], reason: str, shown: Mapping[str, str] | None = None
    ) -> Json:
        """Accept changed definitions as new versions, as a person who has reviewed them."""
        require_here(by, "tools:admin", "accepting a changed definition")
        report = await self._parts.upstreams.accept(name, by=by, tools=tools, reason=reason, shown=shown)
        return await self._report(report)

    async def remove(self, name: str, *, by: Caller) -> Json:
        """Remove an upstream; its tools are sunset."""
        require_here(by, "tools:admin", "removing an upstream")
        await self._parts.upstreams.remove(name, by=by)
        return {"removed": name}

    async def _report(self, report: Report, config: Json | None = None) -> Json:
        if config is None:
            config = (await self._parts.upstreams.get(report.upstream)).config
        return {**report.document(), "accept_hints": bool(config.get("accept_hints"))}


def addable_kinds() -> list[str]:
    """The kinds of upstream that an endpoint may add."""
    return [name for name, kind in upstream_kinds.KINDS.items() if not kind.in_process]


def _on_the_machine() -> frozenset[str]:
    """The fields of configurations that use the machine the server runs on, or the network that it is in."""
    return _OF_ALL_KINDS.union(*(one.on_machine for one in upstream_kinds.KINDS.values()))


async def list_upstreams(parts: Parts) -> Json:
    """Every upstream with its tools, and the breakers of other services that tools name (`external_service`)."""
    from interlock.upstreams.repository import documents

    known = await parts.journal.read(documents)
    names = {one["name"] for one in known}
    services = await _services(parts)
    return {"upstreams": known, "services": [one.document() for one in services if one.name not in names]}


async def show_upstream(parts: Parts, name: str) -> Json:
    """One upstream, or one other service that tools name, with its breakers."""
    services = [one.document() for one in await _services(parts) if one.name == name]
    if services and all(one.name != name for one in await parts.upstreams.list()):
        return {"name": name, "kind": "external_service", "services": services}
    return {**await parts.upstreams.document(name), "services": services}


async def _services(parts: Parts) -> tuple[Health, ...]:
    """The health of services, once what other processes told of them has been read."""
    await parts.journal.changes.caught_up()
    return parts.gateway.services.snapshot()
