"""Upstreams, brought in and let go of through a door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlock.api.rights import require, require_here
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.kinds import kind_of

if TYPE_CHECKING:
    from interlock.api.parts import Parts

# What reaches into the machine that this runs on.
_ON_THE_MACHINE = frozenset(("command", "env", "cwd", "module", "allow_private", "tls"))


class Upstreams:
    """Systems that others run, for those who bring them in."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def all(self, *, by: Caller) -> list[Json]:
        """Every upstream, what it was last seen to offer, and what became of that."""
        require_here(by, "tools:admin", "looking at upstreams")
        known = self._parts.upstreams
        return [
            {**one.document(), "tools": [tool.document() for tool in known.offers(one.name)]} for one in known.list()
        ]

    def services(self, *, by: Caller) -> list[Json]:
        """The breakers of services that tools name (`external_service`) and that are no upstreams."""
        require_here(by, "tools:admin", "looking at upstreams")
        upstreams = {one.name for one in self._parts.upstreams.list()}
        found = self._parts.gateway.execution.services.snapshot()
        return [one.document() for one in found if one.name not in upstreams]

    def one(self, name: str, *, by: Caller) -> Json:
        """One upstream with its breakers; of its tools that changed, what differs from when they were admitted."""
        require_here(by, "tools:admin", "looking at upstreams")
        document = self._parts.upstreams.document(name)
        found = self._parts.gateway.execution.services.snapshot()
        return {**document, "services": [one.document() for one in found if one.name == name]}

    async def probe(self, name: str, *, by: Caller) -> Json:
        """Ask an upstream whether it is there, and whether it offers what it did."""
        require_here(by, "tools:admin", "probing an upstream")
        state = await self._parts.upstreams.probe(name)
        return {"name": name, "state": state, "reason": self._parts.upstreams.get(name).reason}

    async def add(self, name: str, kind: str, config: Json, *, by: Caller, overlay: Json | None = None) -> Json:
        """Connect to an upstream that runs elsewhere, and serve those of its tools that are admitted."""
        require_here(by, "tools:admin", "adding an upstream")
        # INVARIANT: through a door nobody starts a program, loads code, reads a file or reaches into the network that
        # this machine is in. Whoever wants that is on the machine.
        if reaching := _ON_THE_MACHINE & config.keys() or ({kind} if kind_of(kind).in_process else set[str]()):
            words = f"`{min(reaching)}` reaches into this machine: interlock upstream add, on the machine itself"
            raise Failure("E3206", words)
        if config.keys() & {"auth", "credentials"}:
            require(by, "secrets:admin", "sending stored credentials to an upstream")
        return (await self._parts.upstreams.add(name, kind, config, by=by, overlay=overlay)).document()

    async def refresh(self, name: str, *, by: Caller, overlay: Json | None = None) -> Json:
        """Look again at what an upstream offers."""
        require_here(by, "tools:admin", "refreshing an upstream")
        return (await self._parts.upstreams.refresh(name, by=by, overlay=overlay)).document()

    async def accept(
        self, name: str, *, by: Caller, tools: Sequence[str], reason: str, shown: Mapping[str, str] | None = None
    ) -> Json:
        """Take changed definitions as new versions, as a person who has looked at them."""
        require_here(by, "tools:admin", "accepting a changed definition")
        return (await self._parts.upstreams.accept(name, by=by, tools=tools, reason=reason, shown=shown)).document()

    async def remove(self, name: str, *, by: Caller) -> Json:
        """Let go of an upstream; its tools are sunset."""
        require_here(by, "tools:admin", "removing an upstream")
        await self._parts.upstreams.remove(name, by=by)
        return {"removed": name}
