"""Build the gateway of one open data directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.api.wiring.authorizing import Authorizing
from interlock.api.wiring.executing import Executing
from interlock.api.wiring.returning import Returning
from interlock.data.bounds import LARGE, LARGE_INPUT
from interlock.gateway.failure import FailedCalls
from interlock.gateway.fast_path import FastPath
from interlock.gateway.invoke import Gateway
from interlock.gateway.request import Requests
from interlock.gateway.results.roll_back import Rollback
from interlock.gateway.stored_checkpoints import StoredCheckpoints
from interlock.gateway.validate import Validator

if TYPE_CHECKING:
    from interlock.api.wiring.shared import Outside, Shared
    from interlock.call.phases import Request
    from interlock.call.results import Result


def build_gateway(outside: Outside, shared: Shared) -> Gateway:
    """Build the phases and connect them."""

    async def invoke(request: Request) -> Result:
        return await gateway.invoke(request)

    journal, clock, settings, catalog = outside.journal, outside.clock, outside.settings, outside.catalog
    observer, redaction, failure_log = shared.observer, shared.redaction, shared.failure_log
    hooks, allowances, storage = shared.hooks, shared.allowances, shared.storage
    returning = Returning(outside, shared)
    executing = Executing(outside, shared, returning, invoke)
    authorizing = Authorizing(outside, shared, executing.previews)
    authorizer = authorizing.authorizer
    fast_path = FastPath(
        # A call that is traced, metered, audited or stored with its inputs goes through the regular phases.
        barred=shared.telemetry.tracer is not None
        or allowances.active
        or executing.audit.active
        or settings.keep_inputs == "always",
        # An input of this size cannot contain more values than it may.
        small=min(LARGE_INPUT, 2 * settings.max_values),
        large=min(LARGE, settings.max_result_bytes),
        catalog=catalog,
        quarantine=shared.quarantine,
        authorizer=authorizer,
        start=executing.runner.start,
        active=executing.runner.active,
        contexts=executing.contexts,
        hooks=hooks,
        observer=observer,
        telemetry=shared.telemetry,
        journal=journal,
        clock=clock,
        loops=allowances.loops,
        batched=settings.audit == "batched",
    )
    requests = Requests(
        catalog=catalog,
        quarantine=shared.quarantine,
        observer=observer,
        redaction=redaction,
        outputs=returning.outputs,
        undo=storage.undo,
        journal=journal,
        most_values=settings.max_values,
    )
    gateway = Gateway(
        clock=clock,
        catalog=catalog,
        fast_path=fast_path,
        requests=requests,
        validator=Validator(
            clock=clock,
            observer=observer,
            redaction=redaction,
            failure_log=failure_log,
            hooks=hooks,
            cursors=outside.cursors,
        ),
        authorizer=authorizer,
        pending=returning.pending,
        execution=executing.execution,
        runner=executing.runner,
        services=executing.services,
        cancellation=executing.cancellation,
        previews=executing.previews,
        verifier=returning.verifier,
        rollback=Rollback(observer, storage.undo, hooks, invoke),
        finisher=returning.finisher,
        failed=FailedCalls(failure_log, hooks, executing.cancellation, executing.execution, returning.failures),
        unrecorded=returning.unrecorded,
        hooks=hooks,
        observer=observer,
        failure_log=failure_log,
        reviewer_view=shared.reviewer_view,
        telemetry=shared.telemetry,
        quarantine=shared.quarantine,
        storage=storage,
        checkpoints=StoredCheckpoints(journal, settings, outside.redactor, outside.box),
        waiting_calls=authorizing.waiting_calls,
    )
    return gateway
