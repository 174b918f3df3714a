"""Python functions in the sandbox: the job of a call, with the source of the tool's module, and what it reported."""

from __future__ import annotations

from typing import Any

from interlock.call.checkpoints import Bounds
from interlock.call.context import Attestation, Context, Preview
from interlock.call.cost import Cost
from interlock.call.phases import Call, Granted
from interlock.contract.declare import Tool
from interlock.contract.effects import Change
from interlock.contract.pinned_source import Pinned
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.executors.confinement import lent_to, operation_of
from interlock.executors.sandbox.job import JobOutcome, PythonJob


def function_job(
    granted: Granted, context: Context | None, confined: Json, checkpoints: Bounds | None, grace_s: float
) -> PythonJob:
    """The job of a call of a function."""
    tool, manifest, operation = granted.tool, granted.tool.contract.manifest, operation_of(granted)
    assert manifest.sandbox is not None
    bound = tool.bound
    pinned = source_of(bound)
    return PythonJob(
        source=pinned.text,
        package=pinned.package,
        modules=pinned.modules,
        entry=bound.function.__name__ if operation == "invoke" else f"{bound.function.__name__}:{operation}",
        filename=f"{tool.contract.id.name}.py",
        arguments=granted.input,
        imports=frozenset(manifest.sandbox.imports),
        call={} if context is None else _context_data(granted, context),
        checkpoints=checkpoints if manifest.checkpoint_config.enabled and context else None,
        secrets=lent_to(granted, tool.credentials),
        # A function that is not async hears of its end from its context only.
        grace_s=grace_s if bound.is_async or bound.takes_context or bound.undo_takes_context else 0.0,
        **confined,
    )


def function_output(granted: Granted, context: Context | None, outcome: JobOutcome) -> Any:
    """The output of a function that returned. Its reports are copied into the context."""
    if granted.more.looking:
        return _preview(outcome.value)
    if context is not None:
        _take_over(context, outcome.reports)
    granted.extend().files = outcome.files
    return outcome.value


def source_of(tool: Tool[..., Any]) -> Pinned:
    """Return the pinned source of a tool; E3405 if it has none that could be sent inside.

    INVARIANT: what runs is the text that the tool's digest covers, whatever has become of the file since.
    """
    pinned = tool.pinned
    if pinned is None or "." in tool.function.__qualname__:
        raise Failure("E3405", "a sandboxed tool is a function at the top of a module that is a file")
    return pinned


def _context_data(call: Call, context: Context) -> Json:
    """The data of the tool's context inside the sandbox: the caller and the call. Not the token, not the home."""
    caller = context.caller
    return {
        "invocation_id": call.id,
        "caller": {"id": caller.id, "tenant": caller.tenant, "agent": caller.agent, "scopes": sorted(caller.scopes)},
        "session": dict(context.session),
        "key": call.request.key,
        "dry_run": call.request.dry_run,
        "trace_id": call.trace_id,
        "trace_headers": context.trace_headers,
        "task": context.task,
        "native": context.native,
    }


def _preview(document: Json) -> Preview:
    """Read a preview that was made inside."""
    return Preview(
        effects=tuple(Change(**change) for change in document["effects"]),
        preconditions=document["preconditions"],
        impact=document["impact"],
    )


def _take_over(context: Context, reports: Json) -> None:
    """Copy the reports of the tool into its context."""
    context.changes.extend(Change(**change) for change in reports.get("changes", ()))
    for fact in reports.get("attestations", ()):
        context.attestations.append(Attestation(fact["what"], fact["claimed"], lambda seen=fact["observed"]: seen))
    context.compensation = reports.get("compensation") or context.compensation
    context.modifiers.update(reports.get("modifiers") or {})
    cost = Cost(**reports.get("cost", {}))
    if cost.total:
        context.costs += cost
    attached = context.attaching()
    for item in reports.get("content", ()):
        attached.add_content(item)
    attached.add_views(reports.get("views", {}))
    attached.add_provenance(reports.get("provenance", {}))
    for one in reports.get("handoffs", ()):
        attached.add_handoff({**one, **(one.get("authority") or {})}, context.caller)
    changes: Json = reports.get("session", {})
    for name in [name for name in context.session if name not in changes]:
        del context.session[name]
    context.session.update(changes)
