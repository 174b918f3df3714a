"""Build what all phases share: observation, hooks, allowances and storage.

Only observation and quarantine are needed where no call is made: the rest is loaded and built on first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

from interlock.approvals.figures import measure
from interlock.core.record import dataclass
from interlock.gateway.observe import Observer
from interlock.gateway.persistence.pieces import Pieces
from interlock.registry.quarantine import Quarantine
from interlock.telemetry.setup import Telemetry

if TYPE_CHECKING:
    from interlock.approvals.tickets import Channels
    from interlock.authority.policy import Engine
    from interlock.authority.tokens import Tokens
    from interlock.call.connector import Connector, ReadFile
    from interlock.call.phases import Lease
    from interlock.core.clock import Clock
    from interlock.core.supervise import Supervisor
    from interlock.effects.locks import Locks
    from interlock.gateway.allowances import Allowances
    from interlock.gateway.checkpoints import CheckpointWriter
    from interlock.gateway.failure_log import FailureLog
    from interlock.gateway.hooks import Hooks
    from interlock.gateway.judge import Judge
    from interlock.gateway.paging import Cursors
    from interlock.gateway.persistence.storage import CallStorage
    from interlock.gateway.progress import ProgressReporter
    from interlock.gateway.redaction import CallRedaction
    from interlock.gateway.reviewer_view import ReviewerView
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
    tokens_of: Callable[[], Tokens]
    box: Box
    channels: Channels
    lend: Callable[[tuple[str, ...], float], Awaitable[Lease]]
    locks: Locks
    make_redactor: Callable[[], Redactor]
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

    @property
    def tokens(self) -> Tokens:
        return self.tokens_of()

    @cached_property
    def redactor(self) -> Redactor:
        return self.make_redactor()


class Shared:
    """The parts that all phases share."""

    def __init__(self, outside: Outside) -> None:
        journal, settings, clock = outside.journal, outside.settings, outside.clock
        self._outside = outside
        self.telemetry = Telemetry(
            clock, ratio=settings.trace_ratio, collector=settings.otlp_endpoint, retained=settings.traces_kept
        )
        self.telemetry.metrics.approvals = lambda: journal.read(measure)
        self.observer = Observer(clock, self.telemetry)
        self.quarantine = Quarantine(journal, clock.monotonic)
        self.pieces = Pieces(journal, outside.box, outside.instance.id)

    @cached_property
    def redaction(self) -> CallRedaction:
        from interlock.gateway.redaction import CallRedaction

        return CallRedaction(self._outside.redactor)

    @cached_property
    def failure_log(self) -> FailureLog:
        from interlock.gateway.failure_log import FailureLog

        return FailureLog(self._outside.clock, self._outside.redactor, self.redaction)

    @cached_property
    def reviewer_view(self) -> ReviewerView:
        from interlock.gateway.reviewer_view import ReviewerView

        return ReviewerView(self._outside.redactor, self.redaction)

    @cached_property
    def progress(self) -> ProgressReporter:
        from interlock.gateway.progress import ProgressReporter

        return ProgressReporter(self._outside.clock, self.observer, self.redaction)

    @cached_property
    def hooks(self) -> Hooks:
        from interlock.gateway.hooks import Hooks

        return Hooks(self._outside.clock, self.observer, self.redaction, self.failure_log, self.progress)

    @cached_property
    def allowances(self) -> Allowances:
        from interlock.gateway.allowances import Allowances

        outside = self._outside
        return Allowances(
            journal=outside.journal,
            settings=outside.settings,
            observer=self.observer,
            owner=outside.instance.id,
            clock=outside.clock,
        )

    @cached_property
    def storage(self) -> CallStorage:
        from interlock.gateway.persistence.storage import CallStorage

        outside = self._outside
        return CallStorage(outside.journal, self.redaction, outside.settings, outside.box, self.pieces)

    @cached_property
    def checkpoints(self) -> CheckpointWriter:
        from interlock.gateway.checkpoints import CheckpointWriter

        outside = self._outside
        return CheckpointWriter(
            journal=outside.journal,
            settings=outside.settings,
            redaction=self.redaction,
            progress=self.progress,
            box=outside.box,
            owner=outside.instance.id,
        )

    @cached_property
    def judge(self) -> Judge:
        from interlock.gateway.judge import Judge

        outside = self._outside
        return Judge(
            engine=outside.engine,
            verifier=outside.tokens.verifier,
            redaction=self.redaction,
            allowances=self.allowances,
            settings=outside.settings,
        )
