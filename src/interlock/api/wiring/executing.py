"""Build what runs tools: idempotency keys, locks, credentials, contexts, executors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from interlock.effects.watched import database_watchers, file_watchers
from interlock.gateway import reconcile
from interlock.gateway.execute import Execution
from interlock.gateway.execution.active_calls import ActiveCalls
from interlock.gateway.execution.cancellation import Cancellation
from interlock.gateway.execution.credentials import Credentials
from interlock.gateway.execution.effect_audit import EffectAudit
from interlock.gateway.execution.late import LateOutcomes
from interlock.gateway.execution.preview import Previews
from interlock.gateway.execution.reserve import Reservations
from interlock.gateway.execution.resource_locks import ResourceLocks
from interlock.gateway.execution.run_tool import ToolRunner
from interlock.gateway.execution.tool_context import Contexts
from interlock.resilience.services import Services
from interlock.store import records

if TYPE_CHECKING:
    from interlock.api.wiring.returning import Returning
    from interlock.api.wiring.shared import Outside, Shared
    from interlock.call.phases import Call, Request
    from interlock.call.results import Result


class Executing:
    """The Execute phase. `invoke` makes the calls of tools that call other tools."""

    def __init__(
        self,
        outside: Outside,
        shared: Shared,
        returning: Returning,
        invoke: Callable[[Request], Awaitable[Result]],
    ) -> None:
        journal, clock, settings, instance = outside.journal, outside.clock, outside.settings, outside.instance
        observer, redaction, failure_log = shared.observer, shared.redaction, shared.failure_log
        allowances, storage, checkpoints = shared.allowances, shared.storage, shared.checkpoints
        outputs, unrecorded = returning.outputs, returning.unrecorded

        def note_start(call: Call) -> None:
            journal.post(reconcile.begin(call.id, instance.id, records.started(call, clock.now_ms())))

        active = ActiveCalls(clock.monotonic, note_start, returning.started, outside.loop)
        credentials = Credentials(outside.lend, clock, failure_log)
        self.cancellation = Cancellation(active, journal, clock, observer)
        self.services = Services(
            journal,
            clock,
            listen=observer.breaker_changed,
            publish=outside.breaker_changed,
            rules=settings.breakers,
            supervisor=outside.supervisor,
        )
        self.audit = EffectAudit(
            journal, observer, redaction, shared.quarantine, file_watchers(settings), database_watchers(settings)
        )
        self.contexts = Contexts(
            clock=clock,
            redaction=redaction,
            progress=shared.progress,
            outputs=outputs,
            sessions=storage.sessions,
            checkpoints=checkpoints,
            invoke=invoke,
            running=active.get,
        )
        self.runner = ToolRunner(
            grant=outside.grant,
            journal=journal,
            clock=clock,
            settings=settings,
            instance=instance,
            observer=observer,
            redaction=redaction,
            failure_log=failure_log,
            active=active,
            cancellation=self.cancellation,
            credentials=credentials,
            late=LateOutcomes(clock, failure_log, allowances, storage, outputs, unrecorded),
            checkpoints=checkpoints,
            connect=outside.connect,
            read_file=outside.read_file,
            make_context=self.contexts.make,
        )
        self.previews = Previews(self.runner, failure_log)
        self.execution = Execution(
            services=self.services,
            credentials=credentials,
            reservations=Reservations(
                journal=journal,
                clock=clock,
                settings=settings,
                instance=instance,
                observer=observer,
                allowances=allowances,
                storage=storage,
                outputs=outputs,
                unrecorded=unrecorded,
            ),
            locks=ResourceLocks(outside.locks, self.audit, self.cancellation, clock, failure_log),
            contexts=self.contexts,
            runner=self.runner,
            previews=self.previews,
            audit=self.audit,
            cancellation=self.cancellation,
            observer=observer,
            progress=shared.progress,
        )
