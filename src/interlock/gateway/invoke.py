"""The governed call: six phases, in this order, for every call there is.

    Request ─► Validate ─► Authorize ─► Execute ─► Verify ─► Return

`invoke` is the only way to a tool, whatever door, retry, saga step or compensation it comes from. It always answers
with one terminal result and never raises for what a tool, a caller or a policy did; every answer is in the journal
before it is given. Each phase is a method that takes what the one before it made.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from interlock.authority.policy import PolicyFile
from interlock.core.canonical import canonical
from interlock.core.clock import Clock, Deadline, new_id
from interlock.core.context import Change, Context
from interlock.core.effects import predict
from interlock.core.errors import Failure
from interlock.core.events import Event, Listener
from interlock.core.phases import Call, Checked, Decision, Granted, Mutated, Ran, Request, Requested, Verified
from interlock.core.redact import Redactor, SchemaRedactor, safe_message
from interlock.core.results import Result
from interlock.core.schema import Json, pointer
from interlock.executors.function import FunctionExecutor
from interlock.gateway import hooks, keys, running, validate, verify
from interlock.gateway.closing import Closer, terminal_state
from interlock.gateway.hooks import Hook, Seen
from interlock.gateway.running import Floor, Running, Why
from interlock.registry.catalog import Catalog, Version
from interlock.settings import Settings
from interlock.store import records
from interlock.store.home import Instance
from interlock.store.journal import Journal

_log = logging.getLogger("interlock.gateway")
BUSY_POLL_S = 0.02


class Gateway:
    """The six phases over one home."""

    def __init__(
        self,
        *,
        journal: Journal,
        catalog: Catalog,
        policy: PolicyFile,
        redactor: Redactor,
        settings: Settings,
        clock: Clock,
        instance: Instance,
    ) -> None:
        self._journal = journal
        self._catalog = catalog
        self._policy = policy
        self._redactor = redactor
        self._settings = settings
        self._clock = clock
        self._instance = instance
        self._seal = object()
        self._executor = FunctionExecutor(self._seal)
        self._redactors: dict[str, SchemaRedactor] = {}
        self._floor = Floor(clock.monotonic, self._note_start)
        self._doomed: dict[str, Why] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self.hooks: list[Hook] = []
        self.listeners: list[Listener] = []
        self.metrics: Counter[str] = Counter()
        self._closer = Closer(journal, clock, redactor, settings, self._redactor_of, self.emit)

    async def invoke(self, request: Request) -> Result:
        """One call, from request to result."""
        call = self._open(request)
        try:
            requested = self._request(call)
            checked = await self._validate(requested)
            granted = self._authorize(checked)
            ran = await self._execute(granted)
            verified = await self._verify(ran)
            return await self._return(verified)
        except Failure as failure:
            return await self._refuse(call, failure)
        except asyncio.CancelledError:
            await asyncio.shield(self._refuse(call, Failure("E3703", f"{request.tool} was cancelled by its caller")))
            raise
        except Exception:  # noqa: BLE001 - a broken gateway still answers, and still records
            _log.exception("call %s failed inside the gateway", call.id, extra={"trace_id": call.trace_id})
            return await self._refuse(call, Failure("E3000", "something went wrong inside Interlock"))
        finally:
            self._doomed.pop(call.id, None)
            waiting = self._waiting.pop(call.id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def check(self, request: Request) -> Failure | None:
        """What would be wrong with a call's input: phases 1 and 2 only, nothing is decided, run or recorded."""
        try:
            requested = self._request(self._open(request))
            await self._validate(requested)
        except Failure as failure:
            return failure
        return None

    # 1. Request

    def _open(self, request: Request) -> Call:
        clock = self._clock
        now_ms = clock.now_ms()
        random = clock.random_bytes(26)
        call_id = request.id or new_id(now_ms, random[:10])
        return Call(call_id, request.trace_id or random[10:].hex(), now_ms, clock.monotonic(), request)

    def _request(self, call: Call) -> Requested:
        request = call.request
        if request.caller is None:
            raise Failure("E3212", "a call needs the identity it is made for")
        if not isinstance(request.arguments, dict):
            raise Failure("E3004", "arguments must be an object")
        model_input = canonical(request.arguments)
        call.input_hash = hashlib.sha256(model_input).hexdigest()
        version = self._catalog.resolve(request.tool, request.version)
        call.contract = contract = version.contract
        call.trail.move("selected")
        timeout = contract.timeout
        bound_s = timeout.default_s if request.timeout_s is None else min(request.timeout_s, timeout.max_s)
        deadline = Deadline(at=call.started + bound_s)
        if request.deadline is not None:
            deadline = request.deadline.sooner(deadline.at)
        return Requested(call=call, tool=version, model_input=model_input, deadline=deadline)

    # 2. Validate

    async def _validate(self, requested: Requested) -> Checked:
        call, version = requested.call, _version(requested)
        call.phases.append("validate")
        if call.request.operation == "compensate":
            arguments: Json = orjson.loads(requested.model_input)
        else:
            arguments = validate.check_input(requested, version)
            if version.bound.handlers:
                await validate.check_meaning(version, arguments)
        call.trail.move("arguments_ready")
        if self.hooks:
            arguments = await self._pre_hooks(requested, arguments)
        # A read runs at once, with no step in between at which its caller could change what was checked.
        return validate.seal(requested, arguments, copied=bool(self.hooks) or version.contract.mutation.writes)

    async def _pre_hooks(self, requested: Requested, arguments: Json) -> Json:
        call, version = requested.call, _version(requested)
        chosen = hooks.matching(self.hooks, "pre", str(version.contract.id))
        if chosen:
            call.trail.move("pre_hooks_running")
        for hook in chosen:
            observed = hooks.frozen(orjson.loads(orjson.dumps(arguments)))
            self.emit("tool.hook.pre.started", call, hook=hook.id)
            result = await hooks.run_hook(hook, call, version.ref, self._seen(call, observed), self._left(requested))
            self.emit("tool.hook.pre.completed", call, hook=hook.id)
            call.additional_context.extend(result.context)
            if result.progress:
                self._progress(call, {"message": result.progress})
            if result.permission in ("deny", "ask"):
                call.decision = _stricter(call.decision, Decision(
                    behavior=result.permission, reason=f"hook {hook.id}", rules=(f"hook:{hook.id}",), policy="hooks",
                ))  # fmt: skip
            if result.updated_input is not None:
                arguments = self._update(requested, version, hook.id, arguments, hooks.thawed(result.updated_input))
        return arguments

    def _update(self, requested: Requested, version: Version, hook: str, before: Json, after: Json) -> Json:
        """A hook's change of the input: checked like the input itself, recorded under the hook's name."""
        if not version.contract.input.valid(after):
            raise Failure("E3211", f"hook `{hook}` made the input invalid")
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name) or (name in before) != (name in after):
                change = Mutated(f"hook:{hook}", pointer([name]), before.get(name), after.get(name))
                requested.call.mutations.append(change)
        return after

    # 3. Authorize

    def _authorize(self, checked: Checked) -> Granted:
        call = checked.requested.call
        contract, request = checked.requested.tool.contract, call.request
        call.phases.append("authorize")
        assert request.caller is not None
        decision = self._policy.current().decide(request.caller, contract)
        call.decision = decision = _stricter(call.decision, decision)
        lacking = [scope for scope in contract.auth.required_scopes if scope not in request.caller.scopes]
        if lacking:
            call.decision = Decision(behavior="deny", reason="missing scope", rules=(), policy=decision.policy)
            raise Failure("E3206", f"{contract.ref} needs the scope {', '.join(lacking)}")
        if self.listeners:
            self.emit("tool.permission.decided", call, behavior=decision.behavior, reason=decision.reason)
        if decision.behavior == "deny":
            raise Failure("E3206", f"{contract.ref} is not allowed: {decision.reason}", policy_refs=decision.rules)
        if decision.behavior == "ask" and not request.dry_run:
            call.trail.move("awaiting_approval")
            raise Failure(
                "E3208",
                f"{contract.ref} cannot be undone, so a person must agree first: {decision.reason}",
                policy_refs=decision.rules,
            )
        return Granted(checked=checked, decision=decision, seal=self._seal)

    # 4. Execute

    async def _execute(self, granted: Granted) -> Ran:
        requested = granted.checked.requested
        call, version = requested.call, _version(requested)
        call.phases.append("execute")
        if call.request.dry_run:
            return await self._preview(granted)
        if version.contract.mutation.writes:
            replay = await self._reserve(granted)
            if replay is not None:
                return replay
        context = self._context(granted) if version.bound.takes_context else None
        call.trail.move("running")
        if self.listeners:
            self.emit("tool.invocation.started", call)
        if version.contract.timeout.timeout_class in ("long_running", "async"):
            self._progress(call, {"message": "started", "percent": 0})
        output = await self._run(granted, context)
        if context is None:
            return Ran(granted=granted, output=output)
        return Ran(
            granted=granted,
            output=output,
            changes=tuple(context.changes),
            attestations=tuple(context.attestations),
            compensation=context.compensation,
            context=context,
        )

    async def _run(self, granted: Granted, context: Context | None) -> Any:
        requested = granted.checked.requested
        call, contract = requested.call, requested.tool.contract
        began = self._clock.monotonic()
        if requested.deadline.at <= began:
            raise Failure("E3402", f"{contract.ref} had no time left to start")
        entry = Running(call, requested.deadline, began, cancellable=contract.manifest.cancellable)
        entry.context = call.context = context
        if call.id in self._doomed:
            entry.why = self._doomed.pop(call.id)
            raise entry.failure()
        quick = contract.timeout.timeout_class == "interactive" and not contract.mutation.writes
        run = running.run_here if quick else running.run_apart
        try:
            return await run(self._floor, entry, self._executor.run(granted, context))
        except Failure as failure:
            if entry.why is not None and call.scope is not None:
                await self._await_late(granted, entry)
            raise _cleaned(failure, self._redactor) from failure
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _log.exception("tool %s failed in call %s", contract.ref, call.id, extra={"trace_id": call.trace_id})
            raise self._tool_failure(contract.mutation.writes, contract.ref, error) from error

    def _tool_failure(self, writes: bool, ref: str, error: Exception) -> Failure:
        if isinstance(error, MemoryError):
            return Failure("E3403", f"{ref} ran out of memory")
        # A write that failed in an unforeseen way may have come half way; only a read is safe to send again.
        return Failure("E3401", f"{ref} failed: {type(error).__name__}", retryable=not writes)

    async def _reserve(self, granted: Granted) -> Ran | None:
        """Make the intent durable and take the key; or find that the call has been made already."""
        requested = granted.checked.requested
        call, contract = requested.call, requested.tool.contract
        request = call.request
        assert request.caller is not None
        assert request.key is not None
        scope = keys.scope_of(request.caller, request.session, f"{contract.id}#{request.operation}", request.key)
        predicted = predict(contract.mutation.effects, granted.checked.call_input)
        call.trail.move("queued")
        claim = keys.Claim(
            scope=scope,
            tool=str(contract.id),
            version=contract.version,
            key=request.key,
            caller=request.caller.id,
            input_hash=call.input_hash,
            call=call.id,
            owner=self._instance.id,
            window_s=contract.idempotency.window(contract.timeout, self._settings.min_window_s),
            intent=records.intent(call, self._clock.now_ms(), predicted),
        )
        self._waiting[call.id] = asyncio.get_running_loop().create_future()
        while True:
            found = await self._journal.commit(keys.reserve(claim, self._instance.alive))
            if isinstance(found, keys.Reserved):
                call.scope = scope
                call.intent_at = self._clock.now_ms()
                return None
            if isinstance(found, keys.Replay):
                return self._replay(granted, found)
            await self._wait_for(found.call, requested)

    async def _wait_for(self, other: str, requested: Requested) -> None:
        """Wait for the call that holds the key, within this call's own time."""
        left = self._left(requested)
        if left <= 0:
            raise Failure(
                "E3408", "the same call is still running", retry_after_ms=250, details={"invocation_id": other}
            )
        here = self._waiting.get(other)
        try:
            async with asyncio.timeout(left if here is not None else min(left, BUSY_POLL_S)):
                await (asyncio.shield(here) if here is not None else asyncio.sleep(left))
        except TimeoutError:
            pass

    def _replay(self, granted: Granted, found: keys.Replay) -> Ran:
        self.metrics["IDEMPOTENT_REPLAY"] += 1
        return Ran(granted=granted, output=found, source="replay")

    async def _preview(self, granted: Granted) -> Ran:
        """What the call would do: from the tool's own preview if it has one, else from its side-effect manifest."""
        requested = granted.checked.requested
        version, contract = _version(requested), requested.tool.contract
        predicted = predict(contract.mutation.effects, granted.checked.call_input)
        preview: Any = None
        if version.handler("preview") is not None:
            requested.call.trail.move("running")
            preview = await self._run(granted, None)
        document = {
            "predicted_effects": [_change(change) for change in (preview.effects if preview else predicted)],
            "preconditions": dict(preview.preconditions) if preview else {},
            "impact": preview.impact if preview else "from the tool's side-effect manifest; nothing was run",
        }
        return Ran(granted=granted, output=document, source="preview")

    # 5. Verify

    async def _verify(self, ran: Ran) -> Verified:
        requested = ran.granted.checked.requested
        call, version = requested.call, _version(requested)
        call.phases.append("verify")
        if ran.source == "replay":
            found: keys.Replay = ran.output
            return self._closer.replayed(ran, found)
        if ran.source == "preview" or call.request.operation == "compensate":
            value = ran.output if ran.source == "preview" else None
            return Verified(ran=ran, value=value, encoded=orjson.dumps(value))
        try:
            value = verify.map_output(version, ran.output)
        except Failure:
            self.alert("TOOL_OUTPUT_SCHEMA_VIOLATION", call)
            raise
        if ran.attestations or version.bound.handlers:
            await verify.confirm_effects(version, ran, value)
        verified = verify.redact(ran, value, self._redactor_of(version))
        if self.hooks:
            await self._after_hooks("post", requested, verified.value, None)
        return verified

    async def _after_hooks(self, when: hooks.When, requested: Requested, value: Any, error: Failure | None) -> None:
        call, version = requested.call, _version(requested)
        chosen = hooks.matching(self.hooks, when, str(version.contract.id))
        if chosen and when == "post":
            call.trail.move("post_hooks_running")
        for hook in chosen:
            seen = self._seen(call, hooks.frozen(orjson.loads(requested.model_input)), value, error)
            self.emit("tool.hook.post.started", call, hook=hook.id)
            result = await hooks.run_hook(hook, call, version.ref, seen, hook.timeout_s)
            self.emit("tool.hook.post.completed", call, hook=hook.id)
            call.additional_context.extend(result.context)

    # 6. Return

    async def _return(self, verified: Verified) -> Result:
        call = verified.ran.granted.checked.requested.call
        call.phases.append("return")
        return await self._closer.succeed(verified, self._compensation(verified))

    async def _refuse(self, call: Call, failure: Failure) -> Result:
        """The other way to return: a failure is a result too, on record like any other."""
        if failure.row.code == "E3402" and call.contract is not None:
            self.metrics["TIMEOUT"] += 1
        if self.hooks and call.contract is not None and call.trail.state in ("running", "partial_result"):
            failure = await self._failure_hooks(call, failure)
        if call.phases[-1] != "return":
            call.phases.append("return")
        return await self._closer.fail(call, failure, terminal_state(failure, call.trail.state))

    async def _failure_hooks(self, call: Call, failure: Failure) -> Failure:
        for hook in hooks.matching(self.hooks, "failure", str(call.contract.id) if call.contract else ""):
            self.emit("tool.hook.post.started", call, hook=hook.id)
            try:
                await hooks.run_hook(hook, call, call.request.tool, self._seen(call, {}, None, failure), hook.timeout_s)
            except Failure as blocked:
                call.warnings.append(blocked.message)
            self.emit("tool.hook.post.completed", call, hook=hook.id)
        return failure

    def _compensation(self, verified: Verified) -> Json | None:
        """The concrete call that would undo this one, stored before success is reported."""
        ran = verified.ran
        version = _version(ran.granted.checked.requested)
        contract = version.contract
        if (
            ran.source != "compute"
            or ran.granted.checked.requested.call.request.operation != "invoke"
            or not contract.manifest.compensable
        ):
            return None
        arguments = ran.compensation or version.bound.undo_arguments(verified.value)
        return {"tool": str(contract.id), "version": contract.version, "arguments": arguments}

    # What calls need on their way

    def _context(self, granted: Granted) -> Context:
        requested = granted.checked.requested
        call, request = requested.call, requested.call.request
        assert request.caller is not None
        return Context(
            invocation_id=call.id,
            caller=request.caller,
            deadline=requested.deadline,
            monotonic=self._clock.monotonic,
            session=self._closer.load_session(request.caller, request.session),
            key=request.key,
            dry_run=request.dry_run,
            trace_id=call.trace_id,
            on_progress=lambda facts: self._progress(call, facts),
            on_partial=lambda value: self._partial(call, value),
            child=self._child,
        )

    async def _child(self, context: Context, tool: str, arguments: Json | None, **options: Any) -> Any:
        version = options.pop("version", None)
        key = options.pop("key", None)
        timeout_s = options.pop("timeout_s", None)
        result = await self.invoke(
            Request(
                tool=tool,
                version=version,
                arguments={**(arguments or {}), **options},
                caller=context.caller,
                key=key,
                trace_id=context.trace_id,
                deadline=context.deadline,
                timeout_s=timeout_s,
                parent=context.invocation_id,
                door="tool",
            )
        )
        return result.unwrap()

    def _progress(self, call: Call, facts: Json) -> None:
        """Pass on a progress record: numbered without gaps, never above 100 percent, never after the end."""
        if call.trail.ended:
            return
        call.progress += 1
        percent = facts.get("percent")
        record = {
            **facts,
            "progress_id": f"{call.id}:{call.progress}",
            "invocation_id": call.id,
            "sequence": call.progress,
            "status": call.trail.state,
            "message": self._redactor.text(str(facts.get("message", ""))),
            "percent": None if percent is None else max(0.0, min(100.0, float(percent))),
            "elapsed_ms": round((self._clock.monotonic() - call.started) * 1000, 3),
            "timestamp": self._clock.now_ms(),
        }
        if call.request.on_progress is not None:
            call.request.on_progress(record)
        self.emit("tool.invocation.progress", call, **record)

    def _partial(self, call: Call, value: Any) -> None:
        if call.trail.ended:
            return
        call.trail.move("partial_result")
        shown = self._redactor.value(value).value
        call.parts.append(shown)
        self.emit("tool.invocation.partial_result", call, index=len(call.parts), value=shown)

    def cancel(self, call_id: str) -> str:
        """Ask for a call to end: `canceled`, `unsupported` by its profile, or `finished` already. Always on record."""
        entry = self._floor.get(call_id)
        answer = "finished" if entry is None else "canceled" if entry.cancellable else "unsupported"
        body = records.plain("cancel", call_id, self._clock.now_ms(), answer=answer)
        self._journal.post(lambda transaction: transaction.append("cancel", call_id, body))
        if entry is not None:
            self.emit("tool.invocation.cancel_requested", entry.call, answer=answer)
            if answer == "canceled":
                entry.stop("canceled")
        return answer

    def stop(self, call_id: str, why: Why) -> None:
        """Cut a call off, now if it runs, else when it is about to."""
        entry = self._floor.get(call_id)
        if entry is not None:
            entry.stop(why)
        else:
            self._doomed[call_id] = why

    def with_id(self, request: Request) -> Request:
        """The request with the id its call will have, so that it can be stopped by it."""
        return replace(request, id=new_id(self._clock.now_ms(), self._clock.random_bytes(10)))

    async def decline(self, request: Request, failure: Failure) -> Result:
        """The result of a call that was never started: labelled synthetic, on record like any other."""
        call = self._open(request)
        return await self._refuse(call, failure)

    async def _await_late(self, granted: Granted, entry: Running) -> None:
        """A write was cut off while it ran: if it is still running, its true outcome is recorded when it ends."""
        call = granted.checked.requested.call
        future = self._executor.unfinished(call.id)
        if future is not None:
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda done: self._on_loop(loop, self._settle_late, granted, done))
        elif entry.task is not None and not entry.task.done():
            await asyncio.wait({entry.task}, timeout=running.GRACE_S)

    def _on_loop(self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop is closed: the outcome stays unknown, and reconcile lists it

    def _settle_late(self, granted: Granted, done: Any) -> None:
        version = _version(granted.checked.requested)
        try:
            value = verify.map_output(version, done.result())
        except Failure as failure:
            self._closer.settle_late(granted, None, failure)
        except Exception as error:  # noqa: BLE001 - whatever the tool raised after its time
            self._closer.settle_late(granted, None, self._tool_failure(True, version.ref, error))
        else:
            ran = Ran(granted=granted, output=value)
            self._closer.settle_late(granted, verify.redact(ran, value, self._redactor_of(version)), None)

    def _redactor_of(self, version: Version) -> SchemaRedactor:
        digest = version.row.digest
        found = self._redactors.get(digest)
        if found is None:
            contract = version.contract
            patterns = contract.manifest.redact_results and self._settings.redacts(contract.id.namespace)
            found = self._redactors[digest] = self._redactor.for_schema(contract.output.document, patterns=patterns)
        return found

    def _seen(self, call: Call, observed: Any, value: Any = None, error: Failure | None = None) -> Seen:
        caller = call.request.caller
        tool = call.contract.ref if call.contract else call.request.tool
        name = caller.id if caller else ""
        return Seen(invocation_id=call.id, tool=tool, input=observed, caller=name, value=value, error=error)

    def _left(self, requested: Requested) -> float:
        return requested.deadline.remaining_s(self._clock.monotonic())

    def _note_start(self, call: Call) -> None:
        body = records.started(call, self._clock.now_ms())
        self._journal.post(lambda transaction: transaction.append("started", call.id, body))

    def alert(self, name: str, call: Call, **facts: Any) -> None:
        """Something an operator should see."""
        self.metrics[name] += 1
        tool = call.contract.ref if call.contract else call.request.tool
        _log.warning("%s: %s in call %s", name, tool, call.id, extra={"trace_id": call.trace_id})
        self.emit("tool.alert", call, alert=name, **facts)

    def emit(self, kind: str, call: Call, **data: Any) -> None:
        if not self.listeners:
            return
        tool = call.contract.ref if call.contract else call.request.tool
        event = Event(type=kind, invocation_id=call.id, tool=tool, at_ms=self._clock.now_ms(), data=data)
        for listener in self.listeners:
            listener(event)

    def close(self) -> None:
        self._floor.close()
        self._executor.close()


def _version(requested: Requested) -> Version:
    assert isinstance(requested.tool, Version)
    return requested.tool


_STRENGTH = {"allow": 0, "ask": 1, "deny": 2}


def _stricter(one: Decision | None, other: Decision) -> Decision:
    # INVARIANT: nothing that speaks before policy can turn its deny into an allow.
    return other if one is None or _STRENGTH[other.behavior] >= _STRENGTH[one.behavior] else one


def _change(change: Change) -> Json:
    return {
        "resource": change.resource,
        "operation": change.operation,
        **({} if change.before is None else {"before": change.before}),
        **({} if change.after is None else {"after": change.after}),
    }


def _cleaned(failure: Failure, redactor: Redactor) -> Failure:
    """A tool's own failure, fit to be shown: no path, no secret, no stack."""
    message = safe_message(redactor, failure.message)
    details = None if failure.details is None else redactor.value(dict(failure.details)).value
    return Failure(
        failure.code,
        message,
        details=details,
        retryable=failure.retryable,
        retry_after_ms=failure.retry_after_ms,
        native_error_ref=failure.native_error_ref,
        policy_refs=failure.policy_refs,
        evidence_refs=failure.evidence_refs,
    )
