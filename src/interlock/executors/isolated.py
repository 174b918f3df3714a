"""Runs tools in the sandbox: Python tools, whose module is sent inside as source, and programs, word by word.

The reports of a Python tool (effects, costs, undo arguments, session values, checkpoints) are copied into its context,
where they count as the tool's own statements. A program reports nothing but its output. Either may produce files, if
its manifest says so. How the call ended is determined by the sandbox, not by the tool.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interlock.call.checkpoints import Bounds
from interlock.call.connector import secret_of
from interlock.call.context import Attestation, Context, Preview
from interlock.call.cost import Cost
from interlock.call.phases import Call, Granted
from interlock.call.prepared import Prepared
from interlock.contract.contract import Contract
from interlock.contract.declare import Tool
from interlock.contract.effects import Change
from interlock.contract.manifest import Execution, NetworkPolicy, Sandboxing
from interlock.contract.permissions import Permissions
from interlock.contract.pinned_source import Pinned
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.bounds import MOST_VALUES, TooManyValues, parse, plain_text
from interlock.data.schema import Json
from interlock.executors.sandbox.job import Job, Limits, Mount, Outcome, ProgramJob, PythonJob, failure_of
from interlock.telemetry.trace import Recording
from interlock.telemetry.w3c import headers

if TYPE_CHECKING:
    from interlock.executors.egress import Refusal, Seen
    from interlock.executors.sandbox.supervisor import Sandbox

MIN_WALL_S = 0.05
MOST_REFUSALS = 1000
# The number of bytes at the end of stderr that are searched for its last lines.
LAST_BYTES = 16 << 10
# The number and length of stderr lines in a failure for the caller.
LAST_LINES, LINE_LENGTH = 5, 200
# The number of stderr lines in the log.
LOGGED_LINES = 20
Note = Callable[[Call, Outcome], None]
State = Literal["closed", "opening", "open", "refusing"]


# The sandbox and the egress proxy are imported only when needed: most processes never need either.
async def _open(shared: Path | None) -> Sandbox:
    from interlock.executors.sandbox.supervisor import Sandbox

    return await Sandbox.open(shared=shared)


class IsolatedExecutor:
    """Calls the function behind a grant in isolation. Refuses anything without the grant of the Authorize phase."""

    def __init__(
        self,
        grant: object,
        *,
        clock: Clock,
        network: NetworkPolicy,
        network_of: Mapping[str, NetworkPolicy] | None = None,
        note: Note,
        hide: Callable[[Call, str], str],
        checkpoints: Bounds | None = None,
        shared: Path | None = None,
        opener: Callable[[], Awaitable[Sandbox]] | None = None,
    ) -> None:
        self._grant = grant
        self._clock = clock
        self._network = network
        self._network_of = network_of or {}
        self._note = note
        self._hide = hide
        self._checkpoints = checkpoints
        self._home = None if shared is None else shared.parent.resolve()
        self._opener = opener or partial(_open, shared)
        self._opening: asyncio.Future[Sandbox] | None = None

    async def run(self, granted: Granted, context: Context | None) -> Any:
        # INVARIANT: nothing runs without a grant that the Authorize phase of this gateway made.
        if granted.grant is not self._grant:
            raise Failure("E3000", "a tool can only run under a grant")
        call, tool = granted, granted.tool
        sandbox = await self._sandbox()
        refused: list[Refusal] = []
        outcome = await sandbox.run(
            self._job(granted, context, refused),
            agent="" if call.request.caller is None else call.request.caller.acting,
            exit_evidence=call.more.meter is not None,
            on_progress=None if context is None else lambda facts: context.progress(**facts),
            on_partial=None if context is None else context.partial,
            on_checkpoint=None if context is None else context.checkpoint,
        )
        self._note(call, outcome)
        if refused:
            from interlock.executors.egress import violation

            # INVARIANT: a call that tried to reach a forbidden host has failed, whatever it made of the refusal.
            raise violation(refused)
        program = _program_of(tool.contract)
        if program is not None:
            call.extend().mappings = (*call.more.mappings, _mapping(program, granted, outcome))
            call.extend().files = outcome.files
            try:
                return _printed(program, outcome, tool.ref)
            except Failure as failure:
                raise _with_last_words(failure, outcome) from None
        if outcome.status != "ok":
            raise _with_last_words(failure_of(outcome, tool.ref), outcome)
        if granted.more.looking:
            return _preview(outcome.value)
        if context is not None:
            _take_over(context, outcome.reports)
        call.extend().files = outcome.files
        return outcome.value

    async def _sandbox(self) -> Sandbox:
        """The one sandbox of this process. Opened when it is first needed: most processes never need it."""
        if self._opening is None or _broke(self._opening):
            self._opening = asyncio.ensure_future(self._opener())
        return await asyncio.shield(self._opening)

    async def warm_up(self) -> None:
        """Open the sandbox before a call needs it, with the modules that every declared tool imports.

        Isolation is found by trying, which on a busy machine can take as long as a call may.
        """
        await (await self._sandbox()).run(PythonJob(source="import interlock\ndef main(): pass", entry="main"))

    @property
    def state(self) -> State:
        """Whether the sandbox is open, and whether isolation works."""
        if self._opening is None:
            return "closed"
        if not self._opening.done():
            return "opening"
        return "refusing" if _broke(self._opening) or self._opening.result().backend is None else "open"

    def _job(self, granted: Granted, context: Context | None, refused: list[Refusal]) -> Job:
        requested = granted
        call, contract, given = requested, requested.tool.contract, granted.input
        sandboxing, tier = contract.manifest.sandbox, contract.manifest.tier
        assert sandboxing is not None
        left_s = requested.deadline - self._clock.monotonic()
        operation = "preview" if granted.more.looking else call.request.operation
        # A preview or an undo produces no files.
        files = sandboxing.artifacts if operation == "invoke" else 0
        lent = _lent(call, requested.tool.credentials)
        confined: Json = {
            "tier": tier,
            "limits": _limits(contract, sandboxing, max(MIN_WALL_S, left_s), files),
            "mounts": self._mounts(sandboxing, requested.tool.permissions, changes=operation != "preview")
            if tier < 3
            else (),
            "egress": self._egress(call, requested.tool, refused, requested.deadline) if tier == 2 else None,
            "ticket": call.more.approval,
        }
        program = _program_of(contract)
        if program is not None:
            return ProgramJob(
                argv=program.words(given),
                stdin=program.fed(given),
                cwd=program.cwd,
                env=self._environment(program, call) if tier else program.env,
                # They become files of one directory, and the name of a credential may contain slashes.
                secrets={name.replace("/", "."): value for name, value in lent.items()},
                **confined,
            )
        bound = requested.tool.bound
        pinned = source_of(bound)
        return PythonJob(
            source=pinned.text,
            package=pinned.package,
            modules=pinned.modules,
            entry=bound.function.__name__ if operation == "invoke" else f"{bound.function.__name__}:{operation}",
            filename=f"{contract.id.name}.py",
            arguments=given,
            imports=frozenset(sandboxing.imports),
            call={} if context is None else _context_data(call, context),
            checkpoints=self._checkpoints if contract.manifest.checkpoint_config.enabled and context else None,
            secrets=lent,
            **confined,
        )

    def _mounts(self, sandboxing: Sandboxing, permissions: Permissions, *, changes: bool) -> tuple[Mount, ...]:
        """Return the mounts of a call: those under names of their own, and those that permissions list.

        A preview (`changes` is False) can write to none of them.
        """
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

    def _environment(self, program: Execution, call: Call) -> dict[str, str]:
        """The environment of a program: what its manifest says, and the trace it runs under."""
        trace = headers(call.trace_id, call.more.span, self._clock.random_bytes)
        return {**{name.upper(): value for name, value in trace.items()}, **program.env}

    def _egress(
        self, call: Call, tool: Prepared, refused: list[Refusal], deadline: float
    ) -> Callable[[socket.socket], Any]:
        from interlock.executors.egress import Egress, EgressPolicy, Refusal
        from interlock.executors.egress.spans import RequestSpans

        contract, listed = tool.contract, tool.permissions.hosts
        caller = call.request.caller
        token = None if caller is None else caller.capability
        allowance = self._network if caller is None else self._network_of.get(caller.acting, self._network)
        policy = EgressPolicy(
            agent=allowance, manifest=_network(contract.manifest.network_policy, listed), token=token, listed=listed
        )

        spans = None
        if isinstance(call.more.span, Recording):
            spans = RequestSpans(call.more.span, deadline, partial(self._hide, call))

        @asynccontextmanager
        async def served(listener: socket.socket) -> AsyncGenerator[list[str]]:
            refusals: list[str] = []

            def heard(event: Refusal | Seen) -> None:
                if spans is not None:
                    spans.refuse(event) if isinstance(event, Refusal) else spans.end(event)
                if isinstance(event, Refusal) and len(refused) >= MOST_REFUSALS:
                    pass  # the call has already failed
                elif isinstance(event, Refusal):
                    refused.append(event)
                    refusals.append(f"{event.method} {event.host}: {event.reason}")
                elif event.safe is False and not contract.mutation.writes:
                    # Such a method changes something elsewhere, and this tool claims to be read-only.
                    change = Change(resource=f"http:{event.host}:{event.port}", operation="UPDATE")
                    call.extend().detected = (*call.more.detected, change)

            begin = None if spans is None else spans.begin
            proxy = Egress(policy, clock=self._clock, on_event=heard, on_begin=begin)
            serving = asyncio.ensure_future(proxy.serve(listener))
            try:
                yield refusals
            finally:
                await proxy.close()
                await asyncio.gather(serving, return_exceptions=True)

        return served

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.wait({self._opening})
            if not _broke(self._opening):
                await self._opening.result().close()


def _network(declared: NetworkPolicy, listed: Sequence[tuple[str, int]]) -> NetworkPolicy:
    """Return the tool's network policy; if it names no domains, the one that follows from its permissions."""
    if declared.allowed_domains or not listed:
        return declared
    hosts, ports = ([one[at] for one in listed] for at in (0, 1))
    return declared.model_copy(update={"allowed_domains": tuple(hosts), "allowed_ports": tuple(ports)})


def _broke(opening: asyncio.Future[Sandbox]) -> bool:
    """Whether opening has failed. Missing isolation is no failure: the sandbox refuses every call with the reason."""
    return opening.done() and (opening.cancelled() or opening.exception() is not None)


def source_of(tool: Tool[..., Any]) -> Pinned:
    """Return the pinned source of a tool; E3405 if it has none that could be sent inside.

    INVARIANT: what runs is the text that the tool's digest covers, whatever has become of the file since.
    """
    pinned = tool.pinned
    if pinned is None or "." in tool.function.__qualname__:
        raise Failure("E3405", "a sandboxed tool is a function at the top of a module that is a file")
    return pinned


def _program_of(contract: Contract) -> Execution | None:
    execution = contract.manifest.execution
    return execution if execution is not None and execution.kind == "program" else None


def _mapping(program: Execution, granted: Granted, outcome: Outcome) -> Json:
    """The external mapping of a program run: the program, the digest of its words, the host, and how it ended."""
    contract = granted.tool.contract
    words = "\0".join(program.words(granted.input))
    return {
        "schema_version": "0.2.0",
        "kind": "cli",
        "command_id": program.target,
        "argv_ref": f"sha256:{hashlib.sha256(words.encode(errors='surrogatepass')).hexdigest()}",
        "cwd_ref": program.cwd,
        "env_policy_ref": f"profile:{contract.ref}",
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "sandbox_ref": f"tier-{contract.manifest.tier}",
    }


def _printed(program: Execution, outcome: Outcome, ref: str) -> Any:
    """Read the output of a program as its manifest says, or raise its failure."""
    if outcome.status == "error" and outcome.exit_code:
        details = {"exit_code": outcome.exit_code, "stderr": _complaint(outcome)}
        raise Failure("E3401", f"{ref} failed with exit code {outcome.exit_code}", details=details)
    if outcome.status == "error" and (outcome.error or {}).get("type") in _NOT_THERE:
        raise Failure("E3108", f"{ref} cannot be started: `{program.target}` or its directory is not in the sandbox")
    if outcome.status == "crashed" and outcome.signal is not None:
        details = {"signal": outcome.signal, "stderr": _complaint(outcome)}
        raise Failure("E3404", f"{ref} was ended by signal {outcome.signal}", details=details)
    if outcome.status != "ok":
        raise failure_of(outcome, ref)
    try:
        if program.parse == "json":
            return parse(outcome.stdout)
        text = outcome.stdout.decode()
    except TooManyValues:
        raise Failure("E3407", f"{ref} reached its limit of the number of values") from None
    except (ValueError, RecursionError):
        wanted = "JSON" if program.parse == "json" else "UTF-8"
        raise Failure("E3404", f"{ref} did not keep to its output protocol: what it printed is not {wanted}") from None
    if program.parse == "text":
        return text
    if text.count("\n") > MOST_VALUES:
        raise Failure("E3407", f"{ref} reached its limit of {MOST_VALUES} lines")
    return text.removesuffix("\n").split("\n") if text else []


_NOT_THERE = ("FileNotFoundError", "NotADirectoryError", "PermissionError")


def _last_lines(stderr: bytes, most: int) -> list[str]:
    """The last lines of stderr, without characters that control a terminal."""
    text = stderr[-LAST_BYTES:].decode(errors="replace")
    lines = plain_text(text, LAST_BYTES).splitlines()
    return [line for line in lines if line.strip()][-most:]


def _complaint(outcome: Outcome) -> list[str]:
    """The last lines of stderr, for the caller."""
    return [line[:LINE_LENGTH] for line in _last_lines(outcome.stderr, LAST_LINES)]


def _with_last_words(failure: Failure, outcome: Outcome) -> Failure:
    """Add the last lines of stderr to a failure as a note: for the log, not for the caller.

    Lines stay whole, so that the logger can find private values in them.
    """
    lines = _last_lines(outcome.stderr, LOGGED_LINES)
    if lines:
        failure.add_note("\n".join(("its last words on stderr:", *lines)))
    return failure


def _limits(contract: Contract, sandboxing: Sandboxing, wall_s: float, files: int) -> Limits:
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


def _lent(call: Call, names: tuple[str, ...]) -> dict[str, bytes]:
    lease, caller = call.more.lease, call.request.caller
    return {} if lease is None else {name: lease[secret_of(name, caller)].reveal().encode() for name in names}


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
    for item in reports.get("content", ()):
        context.attached.add_content(item)
    context.attached.add_views(reports.get("views", {}))
    context.attached.add_provenance(reports.get("provenance", {}))
    for one in reports.get("handoffs", ()):
        context.attached.add_handoff({**one, **(one.get("authority") or {})}, context.caller)
    changes: Json = reports.get("session", {})
    for name in [name for name in context.session if name not in changes]:
        del context.session[name]
    context.session.update(changes)
