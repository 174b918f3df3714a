"""Runs tools of upstreams: passes a granted call to the connector of its upstream, with the credentials on loan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from interlock.call.connector import ALONE, RemoteCall, secret_of
from interlock.call.context import Caller, Context
from interlock.call.executor import Executor
from interlock.call.phases import Granted
from interlock.contract.attached import Attached
from interlock.contract.manifest import NetworkPolicy
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.executors.site import Site
from interlock.telemetry.trace import Recording
from interlock.telemetry.w3c import unrecorded


def make(site: Site) -> RemoteExecutor:
    return RemoteExecutor(site)


class RemoteExecutor(Executor):
    """Calls the upstreams of tools."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.grant)
        self._network, self._network_of = site.network, site.network_of
        self._clock = site.clock
        self._connect = site.connect
        self._narrowed = site.narrowed

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
            progress=None if not tool.bound.takes_context else _reporter(context),
            interaction=call.request.interaction or ALONE,
            objection=self._objection(caller, manifest.network_policy),
        )
        connector = self._connect(execution.target)
        span = None
        if isinstance(call.more.span, Recording):
            span = call.more.span.outbound("External", requested.deadline, {"upstream": execution.target})
        try:
            if span is None:
                return await connector.call(remote)
            with span:
                return await connector.call(replace(remote, span=span, traceparent=span.traceparent))
        finally:
            mapping = connector.mapping(execution.native, remote.reported)
            if mapping is not None:
                call.extend().mappings = (*call.more.mappings, {"schema_version": "0.2.0", **mapping})
            if any(fact is not None for fact in remote.provenance.values()):
                call.extend().provenance = _provenance(remote.provenance)

    def _objection(self, caller: Caller, manifest: NetworkPolicy) -> Callable[[str, int], str | None] | None:
        general, own = self._network, self._network_of.get(caller.acting)
        if own is None and not (general.deny_all_egress or manifest.deny_all_egress):
            return None
        from interlock.executors.egress.policy import upstream_objection

        return partial(upstream_objection, general=general, own=own, manifest=manifest)


def _provenance(stated: Json) -> Json:
    """Return the valid facts about its data that an upstream states. Invalid ones are dropped."""
    attached = Attached()
    for name in ("data_version", "confidence"):
        with suppress(Failure):
            attached.add_provenance({name: stated.get(name)})
    return attached.provenance


def _reporter(context: Context | None) -> Callable[[Json], None] | None:
    """Return the function that passes on progress, if there is a context for it."""
    if context is None:
        return None

    def report(facts: Json) -> None:
        context.progress(str(facts.get("message") or ""), percent=facts.get("percent"))

    return report
