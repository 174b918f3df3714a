"""Phase 4. The intent is on disk, the key is ours, and the tool runs within its time; or it ran before and is not run.

Everything here needs a grant. What can go wrong between intent and outcome is decided here too: a tool that is cut off
is stopped, and if it was a write that runs on regardless, its true outcome is recorded when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from interlock.call.connector import Aged, secret_of
from interlock.call.context import Caller, Context, previewed
from interlock.call.phases import REASONS, Call, Granted, Lease, Ran, Read, Reason, Request, Requested, Source, Why
from interlock.call.results import Result
from interlock.contract.effects import Change, expected, predict
from interlock.core.clock import Clock, Deadline
from interlock.core.errors import Failure
from interlock.core.supervise import Supervisor
from interlock.core.threads import INPUTS
from interlock.data.bounds import LARGE_INPUT
from interlock.data.schema import Json
from interlock.effects.locks import Claim, Locks, check_preconditions
from interlock.effects.session import SessionState
from interlock.executors.function import MOST_HUNG, Begun, FunctionExecutor
from interlock.executors.isolated import IsolatedExecutor, State
from interlock.executors.remote import Connect, RemoteExecutor, nowhere
from interlock.executors.sandbox.job import Outcome
from interlock.gateway import active_calls, idempotency, reconcile, token_checks
from interlock.gateway.active_calls import Floor
from interlock.gateway.checkpoints import Checkpoints
from interlock.gateway.effect_audit import Watching
from interlock.gateway.finish import Closer
from interlock.gateway.handlers import consult
from interlock.gateway.observe import Observer
from interlock.gateway.persistence import session_id
from interlock.registry.quarantine import Quarantine
from interlock.resilience.services import Services
from interlock.settings import Settings
from interlock.store import records
from interlock.store.home import Instance
from interlock.store.port import Store, Transaction
from interlock.telemetry import w3c

BUSY_POLL_S = 0.02
# How long a credential rests whose service said it is used too much and did not say for how long.
REST_MS = 60_000


class Execution:
    """Runs granted calls, once."""

    def __init__(
        self,
        *,
        seal: object,
        journal: Store,
        clock: Clock,
        settings: Settings,
        instance: Instance,
        observer: Observer,
        closer: Closer,
        invoke: Callable[[Request], Awaitable[Result]],
        lend: Callable[[tuple[str, ...], float], Awaitable[Lease]],
        locks: Locks,
        quarantine: Quarantine,
        checkpoints: Checkpoints,
        supervisor: Supervisor,
        connect: Connect = nowhere,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._settings = settings
        self._instance = instance
        self._observer = observer
        self._closer = closer
        # The stored results, inputs and sessions of calls.
        self.kept = closer.kept
        self._invoke = invoke
        self._lend = lend
        self._locks = locks
        self._checkpoints = checkpoints
        self.services = Services(
            journal, clock, listen=self._note_service, rules=settings.breakers, supervisor=supervisor
        )
        self._watching = Watching(journal, settings, observer, quarantine)
        # Whether what calls change is watched, so that calls have to be kept apart from one another.
        self.watches = self._watching.active
        self._executor = FunctionExecutor(seal, self._note_hung)
        self.start: Callable[[Read], Begun] = self._executor.start
        self._isolated_executor = IsolatedExecutor(
            seal, clock=clock, network=settings.egress, network_of=settings.egress_of, note=self._note_outcome,
            hide=observer.hide, checkpoints=checkpoints.bounds, shared=instance.home.sandbox,
        )  # fmt: skip
        self._remote_executor = RemoteExecutor(
            seal, clock=clock, connect=connect, network=settings.egress, network_of=settings.egress_of
        )
        self.warm_up = self._isolated_executor.warm_up
        self._floor = Floor(clock.monotonic, self._note_start)
        # Calls that can be stopped by their id before they run, those that were, and by whom they are made.
        self._entered: dict[str, tuple[Call, asyncio.Task[Any]]] = {}
        self._doomed: dict[str, Why] = {}
        self._called_off: dict[str, Why] = {}
        # Calls that others wait for under the same key.
        self._holders: dict[str, asyncio.Future[None]] = {}
        # Late outcomes that are being recorded.
        self._settling: set[asyncio.Task[None]] = set()

    def run(self, granted: Granted) -> Awaitable[Ran]:
        """Run a granted call, or find that it has been run. No coroutine of its own, as every call comes by here."""
        granted.phases.append("execute")
        service = granted.tool.service
        return self._run(granted) if service is None or granted.more.looking else self._run_at(service, granted)

    async def go_on(self, granted: Granted, begun: Begun) -> Ran:
        """Go on with a read that has begun and is not done."""
        return await self._carry_out(granted, None, begun)

    async def _run_at(self, service: str, granted: Granted) -> Ran:
        """Run what a service answers. One that keeps failing is left alone (E3501)."""
        requested = granted
        call, tool = requested, requested.tool
        entry = self.services.enter(service, tool.contract.manifest.circuit_breaker_config, str(tool.contract.id))
        try:
            ran = await self._run(granted)
            if ran.more.source == "compute":
                entry.done()
            return ran
        except Failure as failure:
            if call.launched and not call.more.borrowed:
                promised = call.started + tool.contract.timeout.default_s
                entry.done(failure, own_deadline=requested.deadline < promised)
            raise
        finally:
            entry.abandoned()  # unless it said something about the service

    async def _run(self, granted: Granted) -> Ran:
        requested = granted
        call, tool = requested, requested.tool
        if tool.credentials and call.more.claims is not None and not granted.more.looking:
            # What cannot be had must not use anything up.
            await self._lend_to(requested)
        if call.more.claims is not None and (granted.more.looking or not tool.writes):
            await self._claim(call)
        if granted.more.looking:
            return await self._preview(granted)
        if tool.writes:
            replay = await self._reserve(granted)
            if replay is not None:
                return replay
        if tool.credentials and call.more.lease is None:
            await self._lend_to(requested)
        if tool.writes or self._watching.active or call.request.parent is not None:
            claims = [
                *(self._claim_on(call, change.resource) for change in call.more.predicted),
                *self._watching.claims,
            ]
            stated = expected(tool.contract.manifest.preconditions, granted.input)
            claims += [Claim(resource, "read") for resource, _ in stated]
            call.extend().held = await self._locks.hold(call.id, claims, requested.deadline, call.request.parent)
            if stated and call.request.operation == "invoke":
                await self._check_preconditions(requested, stated)
        undo = call.request.operation == "compensate"
        wanted = tool.bound.undo_takes_context if undo else tool.bound.takes_context
        context = self._context(granted) if wanted else None
        call.move("running")
        if self._observer.heard(call):
            self._observer.emit("tool.invocation.started", call)
        if call.request.on_progress is not None and not tool.contract.manifest.reports_progress:
            call.extend().warnings.append("PROGRESS_UNSUPPORTED")
        if tool.slow:
            self._observer.progress(call, {"message": "started", "percent": 0})
        return await self._carry_out(granted, context)

    async def _carry_out(self, granted: Granted, context: Context | None, begun: Begun | None = None) -> Ran:
        call = granted
        before = await self._watching.before() if self._watching.active else None
        # INVARIANT: a tool that fails, or is cut off, is held to its word like one that succeeds.
        try:
            output = await self._bounded(granted, context, begun)
        except Failure:
            await self._judge(call, context, before)
            raise
        except asyncio.CancelledError:
            with suppress(Failure):  # the tool is convicted all the same; the caller has gone
                await asyncio.shield(self._judge(call, context, before))
            raise
        if before is not None or context is not None or call.more.detected:
            await self._judge(call, context, before)
        source: Source = "compute"
        if isinstance(output, Aged):
            # INVARIANT: an old answer is never passed off as a fresh one.
            call.extend().warnings.append(f"CACHED_RESULT age_s={output.age_s:.3f}")
            output, source = output.value, "cache"
        granted.output = output
        if source != "compute":
            call.extend().source = source
        if context is not None:
            # INVARIANT: what a tool reports after it has returned changes nothing.
            more = call.extend()
            more.changes, more.attestations = tuple(context.changes), tuple(context.attestations)
            more.compensation = context.compensation
        return cast("Ran", granted)

    async def _check_preconditions(self, requested: Requested, stated: Sequence[tuple[str, str]]) -> None:
        """Refuse what was decided on a state that is no longer so. Nobody can change it from here on but this call."""
        look = requested.tool.handler("version_of")
        assert look is not None
        now: dict[str, str | None] = {}
        try:
            for resource in {resource for resource, _ in stated}:
                found = await consult(look, requested.deadline - self._clock.monotonic(), resource)
                now[resource] = None if found is None else str(found)
            check_preconditions(stated, now)
        except Failure as failure:
            raise self._observer.clean(requested, failure) from failure

    async def _judge(self, call: Call, context: Context | None, before: Sequence[Any] | None) -> None:
        """Hold what a call did against what its tool declares. One that runs on regardless is not done yet."""
        assert call.tool is not None
        if call.more.runs_on:
            return
        if before is not None or context is not None or call.more.detected:
            await self._watching.judge(call, call.tool, context, before)

    async def _lend_to(self, requested: Requested) -> None:
        left_s = requested.deadline - self._clock.monotonic()
        caller = requested.request.caller
        # INVARIANT: a secret that is the caller's own is that of nobody else.
        names = tuple(secret_of(name, caller) for name in requested.tool.credentials)
        try:
            requested.extend().lease = await self._lend(names, left_s)
        except Failure as failure:
            # A source of secrets is a system of somebody else's, and says what it likes.
            raise await self._cleaned(requested, failure) from failure

    async def _bounded(self, granted: Granted, context: Context | None, begun: Begun | None = None) -> Any:
        requested = granted
        call, tool = requested, requested.tool
        call.extend().context = context
        if begun is None and call.deadline <= self._clock.monotonic():
            raise Failure("E3402", f"{tool.ref} had no time left to start")
        if call.id in self._doomed:
            call.extend().why = self._doomed.pop(call.id)
            raise active_calls.cut_off(call)
        run = self._floor.run_here if tool.quick and tool.bound.is_async else self._floor.run_apart
        call.launched = True
        try:
            if tool.isolated:
                output = await run(call, self._isolated_executor.run(granted, context))
            elif tool.remote:
                output = await run(call, self._remote_executor.run(granted, context, narrowed(granted)))
            else:
                output = await run(call, self._executor.run(granted, context, begun))
            call.returned = True
            return output
        except Failure as failure:
            if call.more.why is not None and call.more.scope is not None:
                await self._watch_late(granted)
            call.extend().borrowed = context is not None and failure is context.failed_below
            if call.more.lease is not None and failure.code == "E3504" and not call.more.borrowed:
                # The service has had enough of these credentials; the next call gets others, if there are any.
                for name in (secret_of(name, call.request.caller) for name in tool.credentials):
                    await call.more.lease.rate_limited(name, failure.retry_after_ms or REST_MS)
            raise await self._cleaned(requested, failure) from failure
        except asyncio.CancelledError:
            if call.more.scope is not None:
                await self._watch_late(granted)
            raise
        except Exception as error:  # an executor's edge: whatever the tool raised becomes a failure
            self._observer.log_failure(call, f"{tool.ref} failed", error)
            # The name of an exception's class is the tool's own words too.
            raise await self._cleaned(requested, tool_failure(tool.writes, tool.ref, error)) from error

    async def _cleaned(self, requested: Requested, failure: Failure) -> Failure:
        """A tool's failure, fit to be shown. A large input is searched for what is private in it in a thread."""
        if len(requested.model_input) <= LARGE_INPUT and len(failure.message) <= LARGE_INPUT:
            return self._observer.clean(requested, failure)
        return await INPUTS.run(self._observer.clean, requested, failure)

    # Once

    async def _reserve(self, granted: Granted) -> Ran | None:
        """Make the intent durable and take the key; or find that the call has been made already."""
        requested = granted
        call, contract = requested, requested.tool.contract
        request = call.request
        assert request.caller is not None
        assert request.key is not None
        predicted = call.extend().predicted = predict(contract.mutation.effects, granted.input)
        call.move("queued")
        self._observer.emit("tool.invocation.queued", call)
        window_s = contract.idempotency.window(contract.timeout, self._settings.min_window_s)
        if request.operation == "compensate":
            window_s = max(window_s, self._settings.undo_days * 86_400)
        claim = idempotency.Claim(
            scope=idempotency.scope_for(request, contract, call.input_hash),
            tool=str(contract.id),
            version=contract.version,
            key=request.key,
            caller=request.caller.id,
            input_hash=call.input_hash,
            call=call.id,
            owner=self._instance.id,
            window_s=window_s,
            intent=records.intent(call, self._clock.now_ms(), self._closer.told(call, predicted), window_s),
        )
        # INVARIANT: nothing is begun whose outcome could not be sealed for its key.
        self._closer.kept.check_key()
        if self._closer.owes:
            # The key may be held by a call that has ended and could not be recorded: nobody would ever let go of it.
            await asyncio.shield(self._closer.pay())
        while True:
            found = await self._committed(call, claim)
            if isinstance(found, idempotency.Reserved):
                call.extend().scope = claim.scope
                call.extend().noted = call.extend().claimed = True
                self._holders[call.id] = asyncio.get_running_loop().create_future()
                return None
            if isinstance(found, idempotency.Replay):
                self._observer.metrics["IDEMPOTENT_REPLAY"] += 1
                granted.output, call.extend().source = found, "replay"
                return cast("Ran", granted)
            await self._wait_for(found.call, requested)

    async def _claim(self, call: Call) -> None:
        """Use up what a call that takes no key is allowed by."""
        claims = call.more.claims or ()
        claiming = self._journal.submit(lambda transaction: idempotency.claim_all(transaction, claims))
        try:
            await asyncio.shield(claiming)
        except asyncio.CancelledError:
            claiming.add_done_callback(lambda claimed: self._give_back(call, None, claimed))
            raise
        call.extend().claimed = True

    async def _committed(
        self, call: Call, claim: idempotency.Claim
    ) -> idempotency.Reserved | idempotency.Replay | idempotency.Busy:
        """Ask for the key. If the caller goes away meanwhile and the key turns out ours, it is given back."""
        caller = call.request.caller
        assert caller is not None
        # INVARIANT: what was called before is answered and what was done can be undone, whatever a quota says.
        undoes = call.request.operation == "compensate"
        room = None if undoes else partial(self._closer.kept.check_room, caller=caller, size=1)
        unit = idempotency.reserve(claim, self._instance.alive, call.more.claims or (), room)
        asking = self._journal.submit(unit)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda asked: self._give_back(call, claim, asked))
            raise

    def _give_back(self, call: Call, claim: idempotency.Claim | None, asked: asyncio.Future[Any]) -> None:
        """Give back what was claimed for a call whose caller went away: its key and its budget, not its approval."""
        if asked.cancelled() or asked.exception() is not None:
            return
        if claim is not None and not isinstance(asked.result(), idempotency.Reserved):
            return

        def unit(transaction: Transaction) -> None:
            if claim is not None and idempotency.is_open(transaction, claim.scope, claim.call):
                idempotency.settle(transaction, claim.scope, claim.call, "released", None)
                if not transaction.has("closed", claim.call):
                    # Its intent is on record and its end is not: the record says why its key is free.
                    transaction.append("settled", claim.call, idempotency.given_back(call, claim, transaction.now_ms))
            self._closer.give_back(transaction, call)

        self._closer.commit_or_owe(call, unit)

    async def _wait_for(self, other: str, requested: Requested) -> None:
        """Wait for the call that holds the key, within this call's own time."""
        left = requested.deadline - self._clock.monotonic()
        if left <= 0:
            details = {"invocation_id": other}
            raise Failure("E3408", "the same call is still running", retry_after_ms=250, details=details)
        here = self._holders.get(other)
        try:
            # A holder in another process is asked after now and then; one in this process tells.
            async with asyncio.timeout(left if here is not None else min(left, BUSY_POLL_S)):
                await (asyncio.shield(here) if here is not None else asyncio.sleep(left))
        except TimeoutError:
            pass

    def release(self, call: Call) -> None:
        """The call is closed: whoever waited for its key or its resources may go on."""
        if call.more.held is not None and not call.more.runs_on:
            call.more.held.release()
        self._doomed.pop(call.id, None)
        self._entered.pop(call.own_id, None)
        holder = self._holders.pop(call.id, None)
        if holder is not None and not holder.done():
            holder.set_result(None)

    # Looking first

    async def _preview(self, granted: Granted) -> Ran:
        requested = granted
        if requested.tool.handler("preview") is not None:
            requested.move("running")
        granted.output = await self.look(granted)
        granted.extend().source = "preview"
        return cast("Ran", granted)

    async def look(self, granted: Granted) -> Json:
        """What the call would do: from the tool's own preview if it has one, else from its side-effect manifest."""
        requested = granted
        call, contract = requested, requested.tool.contract
        effects = predict(contract.mutation.effects, granted.input)
        preconditions: dict[str, bool] = {}
        impact = "from the tool's side-effect manifest; nothing was run"
        if requested.tool.handler("preview") is not None and call.request.operation == "invoke":
            try:
                answer = await self._bounded(granted, None)
            finally:
                if call.state == "awaiting_approval":
                    call.launched = call.returned = False  # only a look: the call itself has not begun
            try:
                preview = previewed(answer)
            except Failure as failure:
                raise self._observer.clean(call, failure) from failure
            effects, preconditions, impact = preview.effects or effects, dict(preview.preconditions), preview.impact
        cost = contract.manifest.estimated_cost
        return {
            "predicted_effects": [_change(change) for change in effects],
            "preconditions": preconditions,
            "impact": impact,
            **({} if cost is None else {"estimated_cost": cost}),
        }

    # What tools get

    def _context(self, granted: Granted) -> Context:
        requested = granted
        call, request = requested, requested.request
        assert request.caller is not None
        session: SessionState = self._closer.kept.session(request.caller, request.session)
        if requested.tool.writes or not requested.tool.bound.is_async:
            # A write begins nothing whose session cannot be read. The thread of a sync function reads no database.
            session.read()
        caller = narrowed(granted)
        return Context(
            invocation_id=call.id,
            caller=caller,
            deadline=Deadline(at=requested.deadline),
            monotonic=self._clock.monotonic,
            session=session,
            key=request.key,
            dry_run=request.dry_run,
            trace_id=call.trace_id,
            trace=lambda: w3c.headers(call.trace_id, call.more.span, self._clock.random_bytes),
            on_progress=lambda facts: self._observer.progress(call, facts),
            on_partial=lambda value: self._observer.partial(call, self._closer.shown_part(granted, value)),
            on_yield=lambda value: self._observer.partial(call, self._closer.shown_part(granted, value), yielded=True),
            hide=lambda text: self._observer.hide(call, text),
            child=self._caller_below(granted, caller),
            secret=lambda name: self._secret(call, name),
            task=request.task or call.id,
            save=lambda label, state: self._checkpoints.save(call, label, state, runs=lambda: self._runs(call)),
        )

    def _runs(self, call: Call) -> bool:
        """Whether a call's tool is at work: neither done, in whatever way, nor cut off."""
        return call.more.why is None and self._floor.get(call.id) is call

    def _secret(self, call: Call, name: str) -> str:
        if call.more.lease is None:
            raise Failure("E3206", f"{call.ref} asks for the secret `{name}` and its manifest names none")
        return call.more.lease[secret_of(name, call.request.caller)].reveal()

    def _caller_below(self, granted: Granted, caller: Caller) -> Callable[..., Awaitable[Any]]:
        """What a tool calls other tools with: its own authority and time, whatever it makes of its context."""
        call, deadline = granted, Deadline(at=granted.deadline)
        request = call.request

        async def below(context: Context, tool: str, arguments: Json | None, **options: Any) -> Any:
            result = await self._invoke(
                Request(
                    tool=tool,
                    version=options.pop("version", None),
                    key=options.pop("key", None),
                    timeout_s=options.pop("timeout_s", None),
                    arguments={**(arguments or {}), **options},
                    caller=caller,
                    trace_id=call.trace_id,
                    deadline=deadline,
                    parent=call.id,
                    door="tool",
                    task=request.task or call.id,
                    billed_to=request.billed_to or request.session,
                    hidden=tuple(self._observer.hidden(call)),
                )
            )
            context.failed_below = result.error
            return result.unwrap()

        return below

    # Stopping

    def cancel(self, call_id: str, reason: Reason = "interruption") -> str:
        """Ask for a call to end: `canceled`, `unsupported` by its profile, or `finished` already. Always on record."""
        call, task = self._floor.get(call_id), None
        if call is None:
            call, task = self._entered.get(call_id, (None, None))
        if call is None or (task is not None and (call.launched or call.recorded)):
            answer = "finished"
        elif call.tool is None or call.tool.contract.manifest.cancellable:
            answer = "canceled"
        else:
            answer = "unsupported"
        self._journal.post(reconcile.note_cancel(call_id, call, self._clock.now_ms(), answer, reason))
        ref = "" if call is None else call.ref
        self._observer.mention("tool.invocation.cancel_requested", call_id, ref, answer=answer)
        if call is not None and answer == "canceled":
            if task is None:
                active_calls.stop(call, REASONS[reason])
            else:
                self._called_off[call_id] = REASONS[reason]
                task.cancel()
        return answer

    def enter(self, call: Call) -> None:
        """From here on a call that may wait, or whose id others know, can be stopped by it before it runs."""
        task = asyncio.current_task()
        assert task is not None
        self._entered[call.own_id] = call, task

    def was_called_off(self, call: Call) -> bool:
        """Whether it was `cancel` that interrupted the call; if so, the interruption is over with this answer."""
        entered = self._entered.get(call.own_id)
        if entered is None or call.own_id not in self._called_off:
            return False
        call.extend().why = self._called_off.pop(call.own_id)
        entered[1].uncancel()
        return True

    def stop(self, call_id: str, why: Why) -> None:
        """Cut a call off, now if it runs, else when it is about to."""
        call = self._floor.get(call_id)
        if call is None:
            self._doomed[call_id] = why
        else:
            active_calls.stop(call, why)

    async def _watch_late(self, granted: Granted) -> None:
        """A write was cut off while it ran: if it is still running, its true outcome is recorded when it ends."""
        call = granted
        future = self._executor.unfinished(call.id)
        call.extend().runs_on = future is not None
        if future is not None:
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda done: _on_loop(loop, self._settle_late, granted, done))
        elif call.more.task is not None and not call.more.task.done():
            await asyncio.wait({call.more.task}, timeout=active_calls.GRACE_S)

    def _note_hung(self, call: Call, hung: int) -> None:
        """A sync function goes on in its thread although its call was cut off."""
        reason = f"it goes on in a thread after its call was cut off; {hung} such threads, at most {MOST_HUNG}"
        self._observer.alert("TOOL_THREAD_HUNG", call, reason=reason, hung=hung)

    @property
    def sandbox(self) -> State:
        """Whether the sandbox is open."""
        return self._isolated_executor.state

    def hung_share(self) -> float:
        """The share of the threads that may hang which do."""
        return self._executor.hung / MOST_HUNG

    def _claim_on(self, call: Call, resource: str) -> Claim:
        """What a call wants to itself. The values of a session are that session's alone."""
        name = resource.removeprefix("session:")
        if name == resource or call.request.caller is None:
            return Claim(resource)
        return Claim(f"session:{session_id(call.request.caller, call.request.session).hex()}/{name}")

    def _settle_late(self, granted: Granted, done: Future[Any]) -> None:
        task = asyncio.ensure_future(self._closer.settle_late(granted, done))
        self._settling.add(task)

        def settled(task: asyncio.Task[None]) -> None:
            self._settling.discard(task)
            if granted.more.held is not None:
                granted.more.held.release()
            if not task.cancelled() and (error := task.exception()) is not None:
                self._observer.log_failure(granted, "the late outcome of the call could not be recorded", error)

        task.add_done_callback(settled)

    def _note_outcome(self, call: Call, outcome: Outcome) -> None:
        """What the sandbox saw: attempts at what is not allowed are alerts, and on record."""
        if call.more.meter is not None and outcome.cpu_ns is not None:
            call.more.meter.told(outcome.cpu_ns, outcome.wall_ns, outcome.max_rss or 0)
        if not outcome.violations:
            return
        self._observer.alert("SANDBOX_VIOLATION", call, what=list(outcome.violations)[:20])
        violations = [self._observer.hide(call, what) for what in outcome.violations[:100]]
        body = records.about("violation", call, self._clock.now_ms(), toolId=call.ref, violations=violations)
        self._journal.post(lambda transaction: transaction.append("violation", call.id, body))

    def _note_service(self, service: str, before: str, after: str) -> None:
        if after != "half_open":
            facts = {"alert": "SERVICE_BREAKER", "service": service, "from": before, "to": after}
            self._observer.announce("tool.alert", "", "", **facts)

    def _note_start(self, call: Call) -> None:
        body = records.started(call, self._clock.now_ms())
        self._journal.post(reconcile.begin(call.id, self._instance.id, body))

    async def close(self) -> None:
        await self._floor.close()
        while self._settling:
            await asyncio.wait(self._settling)
        await self.services.settle()
        self._executor.close()
        await self._isolated_executor.close()
        self._watching.close()
        self._locks.close()


def narrowed(granted: Granted) -> Caller:
    """The caller as the tool sees them, and as its own calls are made: with what the tool requires, no more."""
    requested = granted
    caller = requested.request.caller
    assert caller is not None
    # INVARIANT: the authority of an invocation is the caller's, cut down to what its tool requires. Where the token
    # names resources, those of the call are all that is left of them.
    capability = caller.capability
    if capability is not None and capability.bound:
        reach = token_checks.reach_of(requested.tool.contract, granted.input)
        capability = replace(capability, within=reach)
    scopes = caller.scopes.intersection(requested.tool.required_scopes)
    if scopes == caller.scopes and capability is caller.capability:
        return caller
    return replace(caller, scopes=scopes, capability=capability)


def tool_failure(writes: bool, ref: str, error: BaseException) -> Failure:
    """What an unforeseen exception of a tool means."""
    if isinstance(error, MemoryError):
        return Failure("E3403", f"{ref} ran out of memory")
    # A write that failed in an unforeseen way may have come half way; only a read is safe to send again.
    return Failure("E3401", f"{ref} failed: {type(error).__name__}", retryable=not writes)


def _on_loop(
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[Granted, Future[Any]], None],
    granted: Granted,
    done: Future[Any],
) -> None:
    try:
        loop.call_soon_threadsafe(settle, granted, done)
    except RuntimeError:
        pass  # the loop is closed: the outcome stays unknown, and reconcile lists it


def _change(change: Change) -> Json:
    facts: Json = {"resource": change.resource, "operation": change.operation}
    if change.before is not None:
        facts["before"] = change.before
    if change.after is not None:
        facts["after"] = change.after
    return facts
