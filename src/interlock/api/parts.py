"""The composition root: the parts of one open data directory, built and connected.

    Parts ◄── the operations of this package ◄── Interlock (library), Service (endpoints), command line

Everything that an operation needs is an attribute here. Operations live in modules of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

from interlock.api import demonstration
from interlock.api.authority import Authority
from interlock.api.background import BackgroundTasks, open_sandbox
from interlock.api.storage import Storage
from interlock.api.wiring.on_demand import OnDemand
from interlock.api.wiring.shared import Outside, Shared
from interlock.approvals.notify import Courier
from interlock.core.supervise import Supervisor
from interlock.effects.locks import Locks
from interlock.gateway.ownership import Ownership
from interlock.gateway.paging import Cursors
from interlock.gateway.remote_cancel import RemoteCancel
from interlock.registry.catalog import Catalog, Row, Version
from interlock.registry.latency import Latencies, measure

if TYPE_CHECKING:
    from interlock.authority.identities import DidRegistry
    from interlock.call.connector import Connector, ReadFile
    from interlock.call.context import Caller
    from interlock.call.events import Listener
    from interlock.core.clock import Clock
    from interlock.settings import Settings
    from interlock.store.home import Home
    from interlock.upstreams.decisions import TryOut
    from interlock.upstreams.manager import Upstreams

Connect = Callable[[str], "Connector"]

# A process that runs this long opens the sandbox before a call needs it. Most commands are shorter.
WARM_AFTER_S = 1.0
# How often the timeout classes that measured latency calls for are computed.
MEASURE_EVERY_S = 300.0


class Parts(OnDemand):
    """The parts of one open data directory.

    `try_out` runs the contract tests of tools that an upstream offers. It is given because it opens a data directory of
    its own, and what opens one is built on this class. `read_file` reads the files that earlier calls left.
    """

    def __init__(
        self,
        home: Home,
        *,
        clock: Clock,
        store_clock: Clock,
        settings: Settings,
        caller: str | None,
        try_out: TryOut,
        read_file: ReadFile,
        registry: DidRegistry | None = None,
    ) -> None:
        self.home = home
        self.settings = settings
        # Where the settings come from that are not at their default. Opening a data directory sets it.
        self.setting_sources: Mapping[str, str] = {}
        self.clock = clock
        self._storage = storage = Storage.open(home, settings, clock, store_clock)
        self.journal, self.readers, self.instance = storage.journal, storage.readers, storage.instance
        self.supervisor = Supervisor(clock, self._alert_background, self._tell_background)
        self.catalog = Catalog(self.journal, clock, home.manifests, shared=not home.near)
        self.has_exclusions = bool(settings.surface_excluded)
        self.catalog.suggests = not self.has_exclusions
        self.ownership = Ownership(self.journal, self.catalog, settings.environment)
        self.latencies = Latencies()
        self.remote_cancel = RemoteCancel(self.journal, self.instance)
        self.authority = authority = Authority(
            home,
            self.journal,
            clock=clock,
            settings=settings,
            supervisor=self.supervisor,
            caller=caller,
            registry=registry,
        )
        self.policy, self.engine = authority.policy, authority.engine
        self.identities, self.issuer_keys = authority.identities, authority.issuer_keys
        self.secrets, self.box = authority.secrets, authority.box
        self.messages = authority.messages
        self._try_out = try_out
        self.cursors = Cursors(home.keys)
        self.connect: Connect = self._connect_upstream
        outside = Outside(
            journal=self.journal,
            catalog=self.catalog,
            engine=self.engine,
            tokens_of=lambda: authority.tokens,
            box=self.box,
            channels=self._channels_of,
            lend=authority.lend,
            locks=Locks(home, clock=clock, instance=self.instance),
            make_redactor=lambda: authority.redactor,
            settings=settings,
            clock=clock,
            instance=self.instance,
            cursors=self.cursors,
            supervisor=self.supervisor,
            breaker_changed=self.messages.breaker_changed,
            connect=lambda name: self.connect(name),
            read_file=read_file,
            loop=asyncio.get_running_loop(),
        )
        shared = Shared(outside)
        super().__init__(outside, shared, authority.revive)
        self.observer, self.telemetry, self.quarantine = shared.observer, shared.telemetry, shared.quarantine
        self.telemetry.alerts.watch("journal queue", lambda: self.journal.fill)
        self.telemetry.alerts.watch("unread changes", self.journal.changes.stale_share)
        announce = self.observer.announce
        self.catalog.on_change = self.observer.surface_changed
        self.journal.watch_ended(self.observer.ended)
        self.journal.watch_clock(lambda facts: announce("tool.alert", "", "", alert="CLOCK_STEPPED", **facts))
        self.courier = Courier(
            self.journal,
            settings.channels,
            owner=self.instance.id,
            alive=self.instance.alive,
            clock=clock,
            secrets=authority.secret_texts,
            box=self.box,
            supervisor=self.supervisor,
            attempt_s=settings.notify_timeout_s,
            alert=self._channel_fails,
        )
        self.background = BackgroundTasks(
            home=home,
            journal=self.journal,
            clock=clock,
            settings=settings,
            sweep_tickets=self.sweep_tickets,
            approved_calls=lambda: self.approved_calls,
            courier=self.courier,
            upstreams=lambda: self.upstreams,
            announce=announce,
            write_unrecorded=self.write_unrecorded,
            release_pieces=shared.pieces.release,
            cancel_requested=lambda: self.remote_cancel.cancel_requested(self.cancel_here),
            instance=self.instance,
            alerts=self.telemetry.alerts,
            supervisor=self.supervisor,
            secret=authority.secret_texts,
        )
        if settings.housekeeping:
            self.warm_up(WARM_AFTER_S)
            self.supervisor.every("classes by latency", MEASURE_EVERY_S, self.measure, at_once=False)
        self._end_demonstration = demonstration.keep_in(home.path)

    @cached_property
    def upstreams(self) -> Upstreams:
        """Systems that others run. Most programs have none, so their modules are loaded on first use."""
        from interlock.api.connecting import make_upstreams

        services, states = self.gateway.services, self.upstream_states
        logs = self.home.path / "logs"
        return make_upstreams(self._outside, self._shared, services, states, logs=logs, try_out=self._try_out)

    async def close(self) -> None:
        """Finish pending writes, anchor the chain, and release the data directory."""
        await self.supervisor.stop()
        await self.courier.close()
        if "upstreams" in vars(self):
            await self.upstreams.finish()
        if self.makes_calls:
            await self.gateway.close()
        else:
            await self.telemetry.close()
        if "upstreams" in vars(self):
            await self.upstreams.close()
        await self.authority.close()
        await self.supervisor.close()
        await self._storage.close()
        self.catalog.release()
        self._end_demonstration()

    @property
    def caller(self) -> Caller:
        """The caller where none is named: the local user as principals.toml describes them, or whom `act_as` set."""
        return self.authority.caller

    def availability(self, row: Row) -> str:
        """AVAILABLE, or UNAVAILABLE for a version of an upstream that did not answer its last probe.

        Its tools are kept: calls fail at once (E3502), and the first probe that succeeds makes them available again.
        """
        upstream = row.origin.removeprefix("upstream:")
        return "AVAILABLE" if upstream == row.origin or self.upstream_states.answers(upstream) else "UNAVAILABLE"

    def enabled(self, version: Version) -> bool:
        """Whether a version can be called now: it is not retired, not in quarantine, and its upstream answers."""
        retired = version.gone(self.clock.now_ms()) or self.quarantine.holds(version.row.digest)
        return not retired and self.availability(version.row) == "AVAILABLE"

    def listen(self, listener: Listener, *, call: str | None = None) -> Callable[[], None]:
        """Hear of every event as it happens, or of those of one call. Returns a function that ends it."""
        if call is not None:
            return self.observer.follow(call, listener)
        return self.observer.listen(listener)

    async def measure(self) -> None:
        """Compute from the journal which timeout class measured latency calls for. A server does so by itself."""
        self.latencies.measured = await self.readers.read(measure)

    def warm_up(self, after_s: float = 0.0) -> asyncio.Task[None]:
        """Open the sandbox in the background where the data directory has tools that need it.

        Otherwise the first call would wait for it, out of its own time. Runs by itself in a process that stays.
        """
        work = partial(open_sandbox, self.readers, lambda: self.gateway.runner.warm_up(), after_s)
        return self.supervisor.keep("opening of the sandbox", work)

    def connect_through(self, connect: Connect) -> None:
        """Reach upstreams through the connections of another data directory."""
        self.connect = connect

    def _connect_upstream(self, name: str) -> Connector:
        return self.upstreams.connections.get(name)

    def _channels_of(self, group: str) -> list[str]:
        return [channel.name for channel in self.settings.channels if channel.serves(group) and not channel.console]

    def _alert_background(self, task: str, reason: str) -> None:
        announce = self.observer.announce
        announce("tool.alert", "", "", alert="BACKGROUND_TASK_FAILED", task=task, reason=reason)

    def _tell_background(self) -> None:
        """Let other processes on this data directory, such as `interlock doctor`, see which background tasks fail."""
        self.instance.report({"failing": [[one.task, one.failures, one.error] for one in self.supervisor.failing]})

    def _channel_fails(self, channel: str, failures: int, reason: str) -> None:
        """Raise an alert about a channel that notifies nobody."""
        facts = {"channel": channel, "failures": failures, "reason": reason}
        self.observer.announce("tool.alert", "", "", alert="CHANNEL_FAILING", **facts)
