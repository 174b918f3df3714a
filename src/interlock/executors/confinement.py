"""The bounds of a sandboxed call: its limits, its mounts, its network and the credentials that are lent to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.call.connector import secret_of
from interlock.contract.effects import Change
from interlock.core.errors import Failure
from interlock.telemetry.trace import Recording

if TYPE_CHECKING:
    from interlock.call.phases import Call, Granted
    from interlock.call.prepared import Prepared
    from interlock.contract.contract import Contract
    from interlock.contract.manifest import NetworkPolicy, Sandboxing
    from interlock.contract.permissions import Permissions
    from interlock.data.schema import Json
    from interlock.executors.egress import EgressRefusal, Seen
    from interlock.executors.sandbox.job import Limits, Mount
    from interlock.executors.site import Site

MIN_WALL_S = 0.05
MOST_REFUSALS = 1000


class Confinement:
    """Bounds the jobs of one executor."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._home = None if site.sandbox is None else site.sandbox.parent.resolve()

    def of(self, granted: Granted, refused: list[EgressRefusal]) -> Json:
        """The bounds of a call, as the fields of its job. Attempts to reach a forbidden host are added to `refused`."""
        tool, manifest = granted.tool, granted.tool.contract.manifest
        sandboxing, tier = manifest.sandbox, manifest.tier
        assert sandboxing is not None
        left_s = granted.deadline - self._site.clock.monotonic()
        operation = operation_of(granted)
        # A preview or an undo produces no files.
        files = sandboxing.artifacts if operation == "invoke" else 0
        mounts = self._mounts(sandboxing, tool.permissions, changes=operation != "preview") if tier < 3 else ()
        return {
            "tier": tier,
            "limits": _limits(tool.contract, sandboxing, max(MIN_WALL_S, left_s), files),
            "mounts": mounts,
            "egress": self._egress(granted, tool, refused, granted.deadline) if tier == 2 else None,
            "ticket": granted.more.approval,
        }

    def _mounts(self, sandboxing: Sandboxing, permissions: Permissions, *, changes: bool) -> tuple[Mount, ...]:
        """Return the mounts of a call: those under names of their own, and those that permissions list.

        A preview (`changes` is False) can write to none of them.
        """
        from interlock.executors.sandbox.job import Mount

        named = (Mount(Path(host), f"/in/{name}") for name, host in sandboxing.reads.items())
        read = (Mount(Path(path), f"/in{path}") for path in permissions.only_readable)
        written = (Mount(Path(path), path, writable=changes) for path in permissions.writable)
        mounts = (*named, *read, *written)
        home = self._home
        for one in mounts if home is not None else ():
            # INVARIANT: no sandboxed code sees the keys and the journal.
            if home is not None and (one.host.is_relative_to(home) or home.is_relative_to(one.host)):
                raise Failure(
                    "E3405", f"`{one.inside}` was not mounted: the data directory of Interlock is in it or above it"
                )
        return mounts

    def _egress(
        self, call: Call, tool: Prepared, refused: list[EgressRefusal], deadline: float
    ) -> Callable[[socket.socket], Any]:
        from interlock.executors.egress import Egress, EgressPolicy, EgressRefusal
        from interlock.executors.egress.spans import RequestSpans

        contract, listed = tool.contract, tool.permissions.hosts
        caller = call.request.caller
        token = None if caller is None else caller.capability
        general, single = self._site.network, self._site.network_of
        allowance = general if caller is None else single.get(caller.acting, general)
        policy = EgressPolicy(
            agent=allowance, manifest=_network(contract.manifest.network_policy, listed), token=token, listed=listed
        )

        spans = None
        if isinstance(call.more.span, Recording):
            spans = RequestSpans(call.more.span, deadline, partial(self._site.hide, call))

        @asynccontextmanager
        async def served(listener: socket.socket) -> AsyncGenerator[list[str]]:
            refusals: list[str] = []

            def heard(event: EgressRefusal | Seen) -> None:
                if spans is not None:
                    spans.refuse(event) if isinstance(event, EgressRefusal) else spans.end(event)
                if isinstance(event, EgressRefusal) and len(refused) >= MOST_REFUSALS:
                    pass  # the call has already failed
                elif isinstance(event, EgressRefusal):
                    refused.append(event)
                    refusals.append(f"{event.method} {event.host}: {event.reason}")
                elif event.safe is False and not contract.mutation.writes:
                    # Such a method changes something elsewhere, and this tool claims to be read-only.
                    change = Change(resource=f"http:{event.host}:{event.port}", operation="UPDATE")
                    call.extend().detected = (*call.more.detected, change)

            begin = None if spans is None else spans.begin
            proxy = Egress(policy, clock=self._site.clock, on_event=heard, on_begin=begin)
            serving = asyncio.ensure_future(proxy.serve(listener))
            try:
                yield refusals
            finally:
                await proxy.close()
                await asyncio.gather(serving, return_exceptions=True)

        return served


def operation_of(granted: Granted) -> str:
    """The operation of the tool that a call runs."""
    return "preview" if granted.more.looking else granted.request.operation


def lent_to(call: Call, names: tuple[str, ...]) -> dict[str, bytes]:
    """The credentials that are lent to a call."""
    lease, caller = call.more.lease, call.request.caller
    return {} if lease is None else {name: lease[secret_of(name, caller)].reveal().encode() for name in names}


def _network(declared: NetworkPolicy, listed: Sequence[tuple[str, int]]) -> NetworkPolicy:
    """Return the tool's network policy; if it names no domains, the one that follows from its permissions."""
    if declared.allowed_domains or not listed:
        return declared
    hosts, ports = ([one[at] for one in listed] for at in (0, 1))
    return declared.model_copy(update={"allowed_domains": tuple(hosts), "allowed_ports": tuple(ports)})


def _limits(contract: Contract, sandboxing: Sandboxing, wall_s: float, files: int) -> Limits:
    from interlock.executors.sandbox.job import Limits

    declared = contract.manifest.resource_limits
    return Limits(
        memory_bytes=declared.memory_bytes,
        cpu_cores=declared.cores,
        cpu_s=max(1, round(wall_s * max(1.0, declared.cores))),
        wall_s=wall_s,
        pids=sandboxing.pids,
        tmp_bytes=min(declared.storage_bytes, sandboxing.tmp_bytes),
        output_bytes=sandboxing.output_bytes,
        files=files,
    )
