"""Build what all phases share: observation, hooks, allowances and storage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

from interlock.approvals.figures import measure
from interlock.core.record import dataclass
from interlock.gateway.allowances import Allowances
from interlock.gateway.checkpoints import CheckpointWriter
from interlock.gateway.failure_log import FailureLog
from interlock.gateway.hooks import Hooks
from interlock.gateway.observe import Observer
from interlock.gateway.persistence.storage import CallStorage
from interlock.gateway.progress import ProgressReporter
from interlock.gateway.redaction import CallRedaction
from interlock.gateway.reviewer_view import ReviewerView
from interlock.registry.quarantine import Quarantine
from interlock.telemetry.setup import Telemetry

if TYPE_CHECKING:
    from interlock.approvals.tickets import Channels
    from interlock.authority.policy import Engine
    from interlock.authority.verifier import Verifier
    from interlock.call.connector import Connector, ReadFile
    from interlock.call.phases import Lease
    from interlock.core.clock import Clock
    from interlock.core.supervise import Supervisor
    from interlock.effects.locks import Locks
    from interlock.gateway.judge import Judge
    from interlock.gateway.paging import Cursors
    from interlock.privacy.redact import Redactor
    from interlock.registry.catalog import Catalog
    from interlock.settings import Settings
    from interlock.store.instance import Instance
    from interlock.store.port import Store
    from interlock.store.sealing import Box


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The parts of an open data directory that the gateway uses."""

    journal: Store
    catalog: Catalog
    engine: Engine
    verifier: Verifier
    box: Box
    channels: Channels
    lend: Callable[[tuple[str, ...], float], Awaitable[Lease]]
    locks: Locks
    redactor: Redactor
    settings: Settings
    clock: Clock
    instance: Instance
    cursors: Cursors
    supervisor: Supervisor
    # Tells other processes that a breaker is in another state: service, old state, new state.
    breaker_changed: Callable[[str, str, str], None]
    connect: Callable[[str], Connector]
    # Reads a file that an earlier call of a caller left.
    read_file: ReadFile
    # The loop that the data directory was opened on. What uses it may be built where none runs.
    loop: asyncio.AbstractEventLoop
    # The object that Authorize puts on granted calls. Executors run nothing without it.
    grant: object = field(default_factory=object)


class Shared:
    """The parts that all phases share."""

    def __init__(self, outside: Outside) -> None:
        journal, settings, clock, owner = outside.journal, outside.settings, outside.clock, outside.instance.id
        self._outside = outside
        self.telemetry = Telemetry(
            clock, ratio=settings.trace_ratio, collector=settings.otlp_endpoint, retained=settings.traces_kept
        )
        self.telemetry.metrics.approvals = lambda: journal.read(measure)
        self.redaction = redaction = CallRedaction(outside.redactor)
        self.failure_log = failure_log = FailureLog(clock, outside.redactor, redaction)
        self.reviewer_view = ReviewerView(outside.redactor, redaction)
        self.observer = observer = Observer(clock, self.telemetry)
        self.progress = progress = ProgressReporter(clock, observer, redaction)
        self.hooks = Hooks(clock, observer, redaction, failure_log, progress)
        self.quarantine = Quarantine(journal, clock.monotonic)
        self.allowances = Allowances(journal=journal, settings=settings, observer=observer, owner=owner, clock=clock)
        self.storage = CallStorage(journal, redaction, settings, outside.box, owner)
        self.checkpoints = CheckpointWriter(
            journal=journal,
            settings=settings,
            redaction=redaction,
            progress=progress,
            box=outside.box,
            owner=owner,
        )

    @cached_property
    def judge(self) -> Judge:
        """Decides about calls. Many commands ask about none, so it is loaded on first use."""
        from interlock.gateway.judge import Judge

        outside = self._outside
        return Judge(
            engine=outside.engine,
            verifier=outside.verifier,
            redaction=self.redaction,
            allowances=self.allowances,
            settings=outside.settings,
        )
