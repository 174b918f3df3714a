"""Runs tools of upstreams: passes a granted call to the connector of its upstream, with the credentials on loan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from interlock.call.connector import ALONE, Aged, Connector, RemoteCall, secret_of
from interlock.call.executor import Executor
from interlock.contract.attached import Attached
from interlock.core.errors import Failure
from interlock.telemetry.trace import Recording
from interlock.telemetry.w3c import unrecorded

if TYPE_CHECKING:
    from interlock.call.conditional import Demand
    from interlock.call.context import Caller, Context
    from interlock.call.phases import Granted
    from interlock.contract.manifest import NetworkPolicy
    from interlock.contract.recipes import PinnedStep, Recipe
    from interlock.data.schema import Json
    from interlock.executors.site import Site


def make(site: Site) -> RemoteExecutor:
    return RemoteExecutor(site)


class RemoteExecutor(Executor):
    """Calls the upstreams of tools.

    Of a context it needs only progress, which most reads do not report: their context is made with the first report.
    """

    makes_context = True

    def __init__(self, site: Site) -> None:
        super().__init__(site.grant)
        self._network, self._network_of = site.network, site.network_of
        self._clock = site.clock
        self._connect = site.connect
        self._read_file = site.read_file
        self._narrowed = site.narrowed
        self._make_context = site.make_context

    async def execute(self, granted: Granted, context: Context | None) -> Any:
        # INVARIANT: a connector sees no more authority than its tool requires.
        caller = self._narrowed(granted)
        requested = granted
        call, tool = requested, requested.tool
        manifest = tool.contract.manifest
        execution = manifest.execution
        assert execution is not None
        lease = call.more.lease
        remote = RemoteCall(
            tool=tool.ref,
            native=execution.native,
            definition=execution.implementation,
            arguments=granted.input,
            invocation_id=call.id,
            caller=caller,
            deadline=requested.deadline,
            own_deadline=requested.own_deadline,
            monotonic=self._clock.monotonic,
            traceparent=unrecorded(call.trace_id, self._clock.random_bytes(8))
            if call.more.span is None
            else call.more.span.traceparent,
            tracestate="" if call.more.span is None else call.more.span.state,
            key=call.request.key,
            writes=tool.writes,
            credentials={}
            if lease is None
            else {name: lease[secret_of(name, caller)].reveal() for name in tool.credentials},
            retry=manifest.retry_policy,
            breaker=manifest.circuit_breaker_config,
            progress=self._reporter(granted, context) if tool.bound.takes_context else None,
            interaction=call.request.interaction or ALONE,
            objection=self._objection(caller, manifest.network_policy),
            # Files are read with the rights of the caller: with those that the tool needs, some might be hidden.
            read_file=lambda ref: self._read_file(ref, call.request.caller or caller),
        )
        connector = self._connect(execution.target)
        recipe, undoes = execution.undo, call.request.operation == "compensate"
        if undoes:
            if recipe is None:
                raise Failure("E3405", f"{tool.ref} does not say how it is undone")
            remote = replace(remote, native=recipe.native, definition=recipe.implementation)
        roots: Json = {"input": granted.input}
        if recipe is not None and recipe.before is not None and not undoes:
            roots |= await self._read_before(connector, remote, recipe, recipe.before)
        output = await self._send(granted, connector, remote)
        if recipe is not None and not undoes:
            _state_undo(granted, context, recipe, {**roots, "result": output})
        return output

    async def _read_before(self, connector: Connector, write: RemoteCall, recipe: Recipe, step: PinnedStep) -> Json:
        """Read what the write is going to change, for its undo.

        INVARIANT: without a before-image nothing is written, unless the write demands that there is none and its undo
        takes nothing of it.
        """
        from interlock.contract import recipes  # models, loaded where a tool has a recipe

        try:
            arguments = recipes.fill(step, {"input": write.arguments})
            read = replace(
                write, native=step.native, definition=step.implementation, arguments=arguments, writes=False, key=None,
                reported={}, files=[], faults=[], warnings=[], provenance={},
            )  # fmt: skip
            before = await connector.call(read)
        except Failure as failure:
            from interlock.call.conditional import ABSENT, demand_of

            absent = (failure.details or {}).get("status") in ABSENT
            demand = demand_of(write.native, write.arguments) if absent else None
            if demand == "none" and not recipes.needs_image(recipe):
                return {}
            raise _unread(failure, demand) from failure
        if isinstance(before, Aged):
            raise Failure("E3502", "nothing was changed: the upstream does not answer", details={"sent": False})
        return {"before": before}

    async def _send(self, granted: Granted, connector: Connector, remote: RemoteCall) -> Any:
        """Make one request, and note what the upstream states about it."""
        call, execution = granted, granted.tool.contract.manifest.execution
        assert execution is not None
        span = None
        if isinstance(call.more.span, Recording):
            span = call.more.span.outbound("External", call.deadline, {"upstream": execution.target})
        try:
            if span is None:
                return await connector.call(remote)
            with span:
                return await connector.call(replace(remote, span=span, traceparent=span.traceparent))
        finally:
            mapping = connector.mapping(remote.native, remote.reported)
            if mapping is not None:
                call.extend().mappings = (*call.more.mappings, {"schema_version": "0.2.0", **mapping})
            if remote.files:
                call.extend().files = tuple(remote.files[-1:])  # those of attempts that failed are not the answer
            if (remote.warnings or remote.faults) and call.request.operation != "compensate":  # that has its own result
                call.extend().warnings += remote.warnings
                call.extend().faults = tuple(remote.faults)
            if any(fact is not None for fact in remote.provenance.values()):
                call.extend().provenance = _provenance(remote.provenance)

    def _reporter(self, granted: Granted, context: Context | None) -> Callable[[Json], None] | None:
        """Return the function that passes on progress; None for a call whose operation has no context."""
        without = granted.tool.writes or granted.more.looking or granted.request.operation != "invoke"
        if context is None and without:
            return None

        def report(facts: Json) -> None:
            nonlocal context
            if context is None:
                context = granted.extend().context = self._make_context(granted)
            context.progress(str(facts.get("message") or ""), percent=facts.get("percent"))

        return report

    def _objection(self, caller: Caller, manifest: NetworkPolicy) -> Callable[[str, int], str | None] | None:
        general, own = self._network, self._network_of.get(caller.acting)
        if own is None and not (general.deny_all_egress or manifest.deny_all_egress):
            return None
        from interlock.executors.egress.policy import upstream_objection

        return partial(upstream_objection, general=general, own=own, manifest=manifest)


def _unread(failure: Failure, demand: Demand | None) -> Failure:
    """Convert the failure to read what a write is going to change. With a `demand`, nothing is there."""
    details = {**(failure.details or {}), "sent": False}
    if demand is None:
        words = f"nothing was changed, because what is there could not be read first: {failure.message}"
        return failure.saying(words, details)
    code, resolution = "E3411", None
    words = f"nothing was changed, because what must be there is not: {failure.message}"
    if demand == "version":
        code, words = "E3410", f"nothing was changed, because the version that was read is gone: {failure.message}"
    elif demand == "none":
        words = (
            "nothing was changed: there is nothing yet, as the call demands, but it could not be undone, because its"
            " undo writes back what was there before"
        )
        resolution = (
            "create it with a tool whose undo removes it; or an operator calls this one write_irreversible, and a"
            " person is asked for each call"
        )
    return Failure(
        code, words, details={**details, "preconditionFailed": True}, resolution=resolution,
        native_error_ref=failure.native_error_ref,
    )  # fmt: skip


def _state_undo(granted: Granted, context: Context | None, recipe: Recipe, roots: Json) -> None:
    """State with which arguments the call is undone. If they are not there, it cannot be undone, and says so."""
    from interlock.contract import recipes  # models, loaded where a tool has a recipe

    try:
        arguments = recipes.fill(recipe, roots)
    except Failure as failure:
        granted.extend().warnings.append(f"NOT_UNDOABLE {failure.message}")
        return
    if context is None:
        granted.extend().compensation = arguments
    else:
        context.compensation = arguments


def _provenance(stated: Json) -> Json:
    """Return the valid facts about its data that an upstream states. Invalid ones are dropped."""
    attached = Attached()
    for name in ("data_version", "confidence"):
        with suppress(Failure):
            attached.add_provenance({name: stated.get(name)})
    return attached.provenance
