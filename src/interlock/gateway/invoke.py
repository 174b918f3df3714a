"""The governed call: six phases, in this order, for every call there is.

    Request ─► Validate ─► Authorize ─► Execute ─► Verify ─► Return

`invoke` is the only way to a tool, whatever door, retry, saga step or compensation it comes from. It always answers
with one terminal result and never raises for what a tool, a caller or a policy did; every answer is in the journal
before it is given. Each phase takes what the one before it made; Execute lives in execute.py and Return in closing.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import orjson

from interlock.approvals.ticket import Ticket
from interlock.approvals.tickets import Channels
from interlock.authority.policy import Engine
from interlock.authority.verifier import Verifier
from interlock.call.capability import Capability
from interlock.call.phases import Call, Checked, Granted, Lease, Ran, Read, Request, Requested, Verified
from interlock.call.prepared import Prepared
from interlock.call.results import Result
from interlock.core.clock import Clock, new_id, new_ids
from interlock.core.errors import Failure
from interlock.core.supervise import Supervisor
from interlock.core.threads import DEFINITIONS, INPUTS, WALKS, Threads
from interlock.data.bounds import LARGE, LARGE_INPUT, LONGEST_NAME, LONGEST_NUMBER, SMALL_INPUT, check_values, size_of
from interlock.data.canonical import canonical, decode, plain_form, private_copy
from interlock.data.schema import Json
from interlock.effects.locks import Locks
from interlock.executors.function import Begun
from interlock.executors.remote import Connect, nowhere
from interlock.gateway import idempotency, validate, verify
from interlock.gateway.active_calls import cut_off
from interlock.gateway.allowances import Allowances
from interlock.gateway.authorize import Authorizer
from interlock.gateway.checkpoints import Checkpoints
from interlock.gateway.execute import Execution
from interlock.gateway.finish import Closer
from interlock.gateway.hooks import Hooks
from interlock.gateway.observe import Observer, approvals
from interlock.gateway.obtain_approval import Asking
from interlock.gateway.outcome import terminal_state
from interlock.gateway.paging import Cursors
from interlock.gateway.straight import Straight
from interlock.privacy.redact import Redactor
from interlock.privacy.scrub import scrubbed_at
from interlock.registry.catalog import Catalog, Stranded
from interlock.registry.quarantine import Quarantine
from interlock.settings import Settings
from interlock.store import idempotency as idempotency_rows
from interlock.store.home import Instance
from interlock.store.port import Store
from interlock.store.sealing import Box
from interlock.telemetry import w3c
from interlock.telemetry.setup import Telemetry
from interlock.telemetry.trace import Recording

T = TypeVar("T")
Find = Callable[[str, str | None, Capability | None], Prepared | None]

# Bytes of JSON that cannot hold very many private values.
_FEW_PRIVATE = 1 << 14
_TRACE = re.compile(r"[0-9A-Za-z_.:-]{1,128}\Z")
# What shows that an effect is not what its contract promises; a hook's no, or a check that could not be made, does not.
_DISPROVED = frozenset(("E3303", "E3417"))


class Gateway:
    """The six phases over one home."""

    def __init__(
        self,
        *,
        journal: Store,
        catalog: Catalog,
        engine: Engine,
        verifier: Verifier,
        box: Box,
        channels: Channels,
        lend: Callable[[tuple[str, ...], float], Awaitable[Lease]],
        locks: Locks,
        redactor: Redactor,
        settings: Settings,
        clock: Clock,
        instance: Instance,
        cursors: Cursors,
        supervisor: Supervisor,
        connect: Connect = nowhere,
    ) -> None:
        self._catalog = catalog
        self._reader = journal.reader
        self._most_values = settings.max_values
        self._clock = clock
        seal = object()
        self.telemetry = Telemetry(
            clock, ratio=settings.trace_ratio, collector=settings.otlp_endpoint, kept=settings.traces_kept
        )
        self.telemetry.metrics.approvals = lambda: approvals(journal.reader)
        self._tracer = self.telemetry.tracer
        self.observer = Observer(clock, redactor, self.telemetry)
        self.hooks = Hooks(self.observer, clock)
        self._cursors = cursors
        self.quarantine = Quarantine(journal, clock.monotonic)
        allowances = Allowances(
            journal=journal, settings=settings, observer=self.observer, owner=instance.id, clock=clock
        )
        self._closer = Closer(journal, clock, redactor, settings, self.observer, allowances, box, instance.id)
        self.kept = self._closer.kept
        self.checkpoints = Checkpoints(
            journal=journal,
            settings=settings,
            observer=self.observer,
            redactor=redactor,
            box=box,
            owner=instance.id,
        )
        self.execution = Execution(
            seal=seal,
            journal=journal,
            clock=clock,
            settings=settings,
            instance=instance,
            observer=self.observer,
            closer=self._closer,
            invoke=self.invoke,
            lend=lend,
            locks=locks,
            quarantine=self.quarantine,
            checkpoints=self.checkpoints,
            supervisor=supervisor,
            connect=connect,
        )
        self.asking = Asking(
            journal=journal,
            execution=self.execution,
            observer=self.observer,
            settings=settings,
            clock=clock,
            box=box,
            channels=channels,
        )
        self._authorizer = Authorizer(
            seal=seal,
            engine=engine,
            verifier=verifier,
            asking=self.asking,
            allowances=allowances,
            observer=self.observer,
            hooks=self.hooks,
            settings=settings,
            clock=clock,
        )
        self._straight = Straight(
            # What has to be told of every call, or reckoned with it, has to be made at its pace.
            barred=self._tracer is not None
            or allowances.active
            or self.execution.watches
            or settings.keep_inputs == "always",
            # What cannot hold more values than it may.
            small=min(LARGE_INPUT, 2 * settings.max_values),
            large=min(LARGE, settings.max_result_bytes),
            catalog=catalog,
            quarantine=self.quarantine,
            authorizer=self._authorizer,
            execution=self.execution,
            hooks=self.hooks,
            observer=self.observer,
            telemetry=self.telemetry,
            journal=journal,
            clock=clock,
            loops=allowances.loops,
            batched=settings.audit == "batched",
        )

    async def invoke(self, request: Request) -> Result:
        """One call, from request to result."""
        read = self._straight.take(request)
        if read is None:
            call = self._open(request)
            return await self._answered(call, self._go_through(call))
        if isinstance(read, Result):
            return read
        if read.written is None:
            granted = self._authorizer.grant(read)
            return await self._answered(granted, self._go_on(granted, read.begun))
        try:
            await read.written
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - told like that of any other call
            return await self._answered(_recorded(read), _raise(error))
        return self._straight.tell(read)

    async def _go_through(self, call: Call) -> Result:
        """All six phases, one after the other."""
        checked = await self._validate(await self._request(call))
        granted = await self._authorizer.authorize(checked)
        if isinstance(granted, Ticket):
            return self._closer.await_person(call, granted)
        return await self._finish(await self.execution.run(granted))

    async def _go_on(self, granted: Granted, begun: Begun) -> Result:
        """The phases that are left of a read that is not as plain as it looked."""
        return await self._finish(await self.execution.go_on(granted, begun))

    async def _finish(self, ran: Ran) -> Result:
        try:
            verified = await self._verify(ran)
            if self.hooks.registered:
                await self._run_post_hooks(verified)
        except Failure as failure:
            raise await self._roll_back(ran, failure) from failure
        return await self._closer.succeed(verified)

    async def _answered(self, call: Call, work: Coroutine[Any, Any, Result]) -> Result:
        """The answer to a call, whatever becomes of the work on it."""
        request = call.request
        if self._tracer is not None:
            self._tracer.begin(call)
        if request.key is not None or request.id is not None:
            self.execution.enter(call)
        try:
            return await work
        except Failure as failure:
            return await self._close_failed(call, self._masked(call, failure))
        except asyncio.CancelledError:
            called_off = self.execution.was_called_off(call)
            failure = cut_off(call) if called_off else Failure("E3703", f"{call.ref} was cancelled by its caller")
            result = await self._close_failed(call, failure)
            if called_off:
                return result
            raise
        except Exception as error:  # noqa: BLE001 - a broken gateway still answers, and still records
            self.observer.log_failure(call, "the gateway failed", error)
            return await self._close_failed(call, Failure("E3000", "something went wrong inside Interlock"))
        finally:
            if self._tracer is not None:
                self._tracer.end(call)
            if request.key is not None or request.id is not None or call.more.held is not None:
                self.execution.release(call)
            if call.more.lease is not None:
                await self._close_lease(call, call.more.lease)

    async def _close_lease(self, call: Call, lease: Lease) -> None:
        try:
            await lease.close()
        except Exception as error:  # noqa: BLE001 - the call has ended, and its result stands
            self.observer.log_failure(call, "credentials could not be given back", error)

    def _open(self, request: Request) -> Call:
        clock = self._clock
        now_ms = clock.now_ms()
        call_id, new_trace = new_ids(now_ms, clock.random_bytes(24))
        trace_id, above = request.trace_id, None
        if trace_id is not None and w3c.claims(trace_id):
            above = w3c.read(trace_id)
            trace_id = None if above is None else above.trace_id
        if trace_id is None or not _TRACE.match(trace_id):
            trace_id = new_trace
        call = Call(request.id or call_id, trace_id, now_ms, clock.monotonic(), request)
        if above is not None:
            call.extend().span = above
        if request.hidden:
            call.extend().hidden = request.hidden
        return call

    async def _request(self, call: Call) -> Requested:
        """1. Who asks, for which tool, by when; the input as it was sent."""
        request = call.request
        if request.caller is None:
            raise Failure("E3212", "a call needs the identity it is made for")
        if not isinstance(request.arguments, dict):
            raise Failure("E3004", "arguments must be an object")
        names = (request.tool, request.session, request.key or "", request.version or "", request.task or "")
        joint = "".join(names)
        if len(joint) > LONGEST_NAME and max(map(len, names)) > LONGEST_NAME:
            call.request = _with_short_names(request)
            raise Failure(
                "E3004",
                f"the names of tools, versions, sessions, tasks and keys have at most {LONGEST_NAME} characters",
                details={"mostCharacters": LONGEST_NAME},
            )
        if not joint.isascii():
            _refuse_unwritable(names)
        self.observer.emit("tool.invocation.planned", call)
        model_input = await self._write_input(call)
        try:
            return self._select(call, model_input, self._catalog.at_hand)
        except _NotAtHandError:
            version = self._catalog.resolve(request.tool, request.version, request.caller.capability)
            await DEFINITIONS.run(version.compile)
            requested = self._select(call, model_input, self._catalog.prepared)
            await DEFINITIONS.run(self._compile_redaction, requested)
            return requested

    def _compile_redaction(self, requested: Requested) -> None:
        """Compile what knows the private parts of a large contract, before the first call needs it."""
        self.observer.sink(requested)
        self._closer.redactor_of(requested.tool)

    async def _write_input(self, call: Call) -> bytes:
        """The input as it was sent, in canonical form. A large one is copied and written apart from the event loop."""
        request = call.request
        if request.operation == "compensate":
            return b""  # comes from the call that is undone
        given: Any = request.arguments
        size = size_of(given, LARGE_INPUT)
        model_input = canonical(given) if size <= SMALL_INPUT else None if size > LARGE_INPUT else plain_form(given)
        if model_input is not None and len(model_input) <= LARGE_INPUT:
            call.input_hash = hashlib.sha256(model_input).hexdigest()
            return model_input
        # INVARIANT: nobody outside can reach what is read from here on.
        given, model_input, call.input_hash = await INPUTS.run(_read_input, given, self._most_values)
        call.request = replace(request, arguments=given)
        return model_input

    def _select(self, call: Call, model_input: bytes, find: Find) -> Requested:
        """The tool of a call, and its deadline."""
        request = call.request
        assert request.caller is not None
        if request.operation == "compensate":
            # INVARIANT: what an undo does comes from the call it undoes, never from who asks for it.
            stored = self._closer.kept.undo(request.parent or "", request.caller)
            call.extend().hidden = tuple(stored["hidden"])
            call.request = request = replace(request, session=stored.get("session", ""))
            call.model_input = model_input = canonical(stored["arguments"])
            call.input_hash = hashlib.sha256(model_input).hexdigest()
            tool = self._catalog.exact(stored["tool"], stored["version"]).prepared
        else:
            call.model_input = model_input
            if LONGEST_NUMBER < len(model_input) <= LARGE_INPUT:  # a larger one was checked where it was read
                check_values(model_input, self._most_values)
            try:
                tool = find(request.tool, request.version, request.caller.capability)
            except Stranded as missing:
                tool = self._answered_before(call, missing)
            if tool is None:
                raise _NotAtHandError
        call.tool = tool
        self.quarantine.check(tool.digest, tool.ref, call.started)
        call.move("selected")
        self.observer.emit("tool.invocation.selected", call)
        timeout = tool.contract.timeout
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise Failure("E3004", "a timeout is a number of seconds above nought")
        bound_s = timeout.default_s if request.timeout_s is None else min(request.timeout_s, timeout.max_s)
        deadline = call.started + bound_s
        if request.deadline is not None:
            # INVARIANT: a deadline only ever shrinks.
            deadline = min(deadline, request.deadline.at)
        call.deadline = deadline
        return cast("Requested", call)

    def _answered_before(self, call: Call, missing: Stranded) -> Prepared:
        """The tool of a call whose code cannot be had, where its key has an answer already. Nothing runs for that."""
        tool, request = missing.prepared, call.request
        if not tool.writes or request.key is None or request.dry_run:
            raise missing
        scope = idempotency.scope_for(request, tool.contract, call.input_hash)
        if not idempotency_rows.has_outcome(self._reader, scope, call.started_ms):
            raise missing

        def refuse(_: Any) -> None:
            raise missing

        call.extend().claims = [refuse]  # should the answer be let go of meanwhile
        return tool

    async def _validate(self, requested: Requested) -> Checked:
        """2. The input fits the contract, means something, and has been past the hooks."""
        call, tool = requested, requested.tool
        call.phases.append("validate")
        if call.request.operation == "compensate":
            validate.check_key(requested)
            arguments: Json = decode(requested.model_input)
            call.input = arguments
        else:
            assert isinstance(call.request.arguments, dict)
            given = call.request.arguments
            large = len(requested.model_input) > LARGE_INPUT
            if not large and (tool.writes or tool.has_checks or self.hooks.registered):
                # INVARIANT: nobody outside can reach what is checked from here on. A plain read runs at once, so there
                # is no step in between at which its caller could.
                given = private_copy(given)
            if tool.paged:
                given = self._cursors.restore(requested, given)
            arguments = call.input = await _apart(
                INPUTS if large else None, partial(self._check_input, requested, given)
            )
            if tool.has_checks:
                await self._check_meaning(requested, arguments)
        call.move("arguments_ready")
        self.observer.emit("tool.invocation.arguments_ready", call)
        if self.hooks.registered:
            before = arguments
            arguments = call.input = await self.hooks.before(requested, arguments)
            if tool.has_checks and arguments != before:
                await self._check_meaning(requested, arguments)
        return cast("Checked", requested)

    def _check_input(self, requested: Requested, given: Json) -> Json:
        """The arguments as the contract takes them."""
        call = requested
        if len(requested.model_input) > _FEW_PRIVATE and self.observer.hides(call):
            self.observer.check_private(call)
        try:
            return validate.check_input(requested, given)
        except Failure as failure:
            raise self.observer.bare(call, failure) from None

    async def _check_meaning(self, requested: Requested, arguments: Json) -> None:
        left_s = requested.deadline - self._clock.monotonic()
        try:
            await validate.check_meaning(requested.tool, arguments, left_s)
        except Failure as failure:
            raise self.observer.clean(requested, failure) from failure

    async def _verify(self, ran: Ran) -> Verified:
        """5. The result is what the contract promises and the effect is confirmed; nothing private is left in it."""
        requested = ran
        call, tool = requested, requested.tool
        call.phases.append("verify")
        if ran.more.source == "replay":
            return await self._closer.recall(ran)
        if ran.more.source == "preview" or call.request.operation == "compensate":
            value = self.observer.shown(call, ran.output) if ran.more.source == "preview" else None
            ran.value, ran.encoded = value, orjson.dumps(value)
            return cast("Verified", ran)
        # What is private in the input is searched for in the result, so a large input counts as well.
        large = len(requested.model_input) > LARGE_INPUT
        threads = WALKS if not verify.is_small(ran.output) else INPUTS if large else None
        try:
            value, removed = await _apart(threads, partial(self._mapped, ran))
        except Failure as failure:
            if failure.code != "E3303":
                raise
            bare = self.observer.bare(call, failure)
            at = [fault["pointer"] for fault in (bare.details or {}).get("faults", ())]
            self.observer.alert((failure.details or {})["violation"], call, at=at)
            raise bare from failure
        if ran.more.attestations or tool.has_verifier:
            try:
                await verify.confirm_effects(tool, ran, value, requested.deadline - self._clock.monotonic())
            except Failure as failure:
                raise self.observer.clean(call, failure) from failure
        verified = await _apart(threads, partial(self._closer.redact, ran, value))
        if removed:
            verified.extend().redacted = tuple(dict.fromkeys((*removed, *verified.more.redacted)))
        if tool.paged:
            verified = self._cursors.split(verified)
        if call.more.files:
            verified.extend().artifacts = await self._closer.refer(call)
        return verified

    async def _run_post_hooks(self, verified: Verified) -> None:
        """Run the post-hooks. A write that one of them stops has had its effect, so the means to undo it are kept."""
        ran = verified
        requested = ran
        if ran.more.source in ("replay", "preview") or requested.request.operation == "compensate":
            return
        try:
            await self.hooks.after(requested, verified.value)
        except (Failure, asyncio.CancelledError):
            await asyncio.shield(self._closer.kept.keep_undo_of(verified))
            raise

    def _mapped(self, ran: Ran) -> tuple[Any, tuple[str, ...]]:
        """An output as its contract has it, and where something was taken out that the call was given in private."""
        requested = ran
        call, tool = requested, requested.tool
        value = verify.map_output(tool, ran.output, self._closer.most_bytes(tool))
        if not self.observer.hides(call):
            return value, ()
        # INVARIANT: a credential that was lent or sent never leaves with the result.
        bare = self.observer.without(call, value, keep=tool.members)
        return bare, () if bare is value else tuple(scrubbed_at(value, bare))

    async def _roll_back(self, ran: Ran, failure: Failure) -> Failure:
        """A write that does not verify is undone, by a call like any other, if its tool has said how.

        The failure to tell: the one that was found, and whether what had been done is undone.
        """
        requested = ran
        call, tool = requested, requested.tool
        if failure.code == "E3416" and ran.more.compensation is not None and tool.contract.manifest.compensable:
            # What it did stands, and only its result is withheld: whether to undo it is for its caller to say.
            await self._closer.kept.keep_undo(ran)
        if failure.code not in _DISPROVED or not tool.writes or ran.more.source != "compute":
            return failure
        if call.request.operation != "invoke":
            return failure
        undone = False
        if ran.more.compensation is not None and tool.contract.manifest.compensable:
            await self._closer.kept.keep_undo(ran)
            if call.more.held is not None:
                call.more.held.release()  # the undoing needs what the call had to itself
            undo = Request(
                tool=str(tool.contract.id), arguments={}, caller=call.request.caller, key=f"rollback-{call.id}",
                trace_id=call.trace_id, operation="compensate", parent=call.id, door="gateway",
            )  # fmt: skip
            undone = (await self.invoke(undo)).ok
        name = "OUTPUT_SCHEMA_VIOLATION" if failure.code == "E3303" else "SIDE_EFFECT_INCONSISTENCY"
        self.observer.alert(name, call, rolled_back=undone)
        if not undone:
            self.observer.alert("ROLLBACK_FAILED", call)
        details = {**(failure.details or {}), "rolled_back": undone}
        return Failure(failure.code, failure.message, details=details, retryable=failure.retryable and undone)

    def _masked(self, call: Call, failure: Failure) -> Failure:
        """What the caller hears of a call that did not come as far as being authorized.

        INVARIANT: of a tool that is not the caller's to use they learn that, and neither its schema nor its versions.
        """
        caller = call.request.caller
        if caller is None or call.phases[-1] not in ("request", "validate"):
            return failure
        token, tool = caller.capability, call.tool
        if tool is None:
            return failure if token is None else self._unnamed(call.request.tool, token) or failure
        contract = tool.contract
        if token is not None and not token.covers(str(contract.id), contract.version):
            return Failure("E3204", f"the token does not name {contract.ref}")
        if lacking := sorted(set(tool.required_scopes) - caller.scopes):
            return Failure("E3206", f"{contract.ref} is not allowed: missing scope {', '.join(lacking)}")
        return failure

    def _unnamed(self, name: str, token: Capability) -> Failure | None:
        """The refusal of a tool that was found and that a token does not name in any version."""
        try:
            address = self._catalog.address(name, token)
            if self._catalog.versions(address) and not token.names(address):
                return Failure("E3204", f"the token does not name `{name}`")
        except Failure:
            pass  # there is no such tool, or it cannot be looked for now
        return None

    async def _close_failed(self, call: Call, failure: Failure) -> Result:
        """Close a call that failed. Hooks and the disk take their time, and a caller that goes away stops neither."""
        closing = asyncio.ensure_future(self._refuse(call, failure))
        try:
            return await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            if not closing.cancelled() and self.execution.was_called_off(call):
                return closing.result()  # it had failed before it was called off
            raise
        finally:
            # It has been logged. Its frames hold everything that the function held.
            failure.__cause__ = failure.__context__ = failure.__traceback__ = None

    async def _refuse(self, call: Call, failure: Failure) -> Result:
        """The other way to return: a failure is a result too, on record like any other.

        INVARIANT: whatever breaks while a call is closed, the call ends, on record, and its key is settled.
        """
        try:
            return await self._fail(call, failure)
        except Exception as error:  # noqa: BLE001 - what a tool reported, or a hook, or the disk
            self.observer.log_failure(call, "the call could not be closed", error)
            return await self._closer.end(call, error)

    async def _fail(self, call: Call, failure: Failure) -> Result:
        if self.hooks.registered and call.state in ("running", "partial_result", "yielded"):
            await self.hooks.after_failure(call, failure)
        if call.id != call.own_id and not call.more.claimed:
            # The approval was not used, so this attempt is not the call it was given for.
            self.execution.release(call)
            call.id, call.extend().approval = call.own_id, None
        if isinstance(call.more.span, Recording):
            call.more.span.fail(failure)
        if call.phases[-1] != "return":
            call.phases.append("return")
        return await self._closer.fail(call, failure, terminal_state(failure, call.state))

    async def check(self, request: Request) -> Failure | None:
        """What would be wrong with a call's input: phases 1 and 2 only, nothing is decided, run or recorded."""
        try:
            await self.checked(request)
        except Failure as failure:
            return failure
        return None

    async def checked(self, request: Request) -> Checked:
        """A call as rules and tokens would judge it; raises what is wrong with its input."""
        return await self._validate(await self._request(self._open(request)))

    async def foresee(self, checked: Checked) -> tuple[Json, Json]:
        """What a call would do: as it is, and as whoever is to agree to it may see it. Nothing is run or recorded."""
        preview = await self.execution.look(self._authorizer.to_look(checked))
        return preview, self.observer.for_reviewer(checked, preview)

    def with_id(self, request: Request) -> Request:
        """The request with the id its call will have, so that it can be stopped by it."""
        return replace(request, id=new_id(self._clock.now_ms(), self._clock.random_bytes(8)))

    async def decline(self, request: Request, failure: Failure) -> Result:
        """The result of a call that was never started: labelled synthetic, on record like any other."""
        call = self._open(request)
        if self._tracer is not None:
            self._tracer.begin(call)
        try:
            return await self._close_failed(call, failure)
        finally:
            if self._tracer is not None:
                self._tracer.end(call)

    async def pay(self) -> None:
        """Write the outcomes that could not be recorded when they came about, as far as the journal takes them now."""
        # Cut off between the disk and the list of what is owed, one would be written twice.
        await asyncio.shield(self._closer.pay())

    async def close(self) -> None:
        """End what runs, write what is owed."""
        await self.execution.close()
        await self.hooks.close()
        await self.pay()
        await self.telemetry.close()


class _NotAtHandError(Exception):
    """The contract of the called tool is large and was not compiled yet."""


def _recorded(read: Read) -> Call:
    """The call of a read whose success is being written."""
    call = read.requested()
    call.phases += ("verify", "return")
    call.returned = call.recorded = True
    return call


async def _raise(error: BaseException) -> Result:
    raise error


async def _apart(threads: Threads | None, walk: Callable[[], T]) -> T:
    """Walk over data: at once if it is small, in a thread if it is large."""
    return walk() if threads is None else await threads.run(walk)


def _read_input(arguments: Json, most_values: int) -> tuple[Json, bytes, str]:
    """A copy of a large input, its canonical form and the digest of that."""
    try:
        given: Json = private_copy(arguments)
    except (TypeError, ValueError, RecursionError):
        given = arguments  # no JSON: the canonical form says what is wrong with it
    except RuntimeError:
        raise Failure("E3004", "the arguments were changed while they were read") from None
    model_input = canonical(given)
    check_values(model_input, most_values)
    return given, model_input, hashlib.sha256(model_input).hexdigest()


def _with_short_names(request: Request) -> Request:
    """A request that is refused for the length of its names, as it is recorded."""

    def short(name: str) -> str:
        return name if len(name) <= LONGEST_NAME else f"{name[:100]}…"

    key, version, task = (
        None if name is None else short(name) for name in (request.key, request.version, request.task)
    )
    return replace(
        request, tool=short(request.tool), session=short(request.session), key=key, version=version, task=task
    )


def _refuse_unwritable(names: Sequence[str]) -> None:
    """Names and ids go into records and keys; what cannot be written there is refused (E3004)."""
    for text in names:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Failure("E3004", "names, versions, sessions and keys must be valid Unicode") from None
