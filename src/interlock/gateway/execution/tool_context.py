"""The context that a tool receives: its caller, deadline and session, and functions to report and to call others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from interlock.call.connector import secret_of
from interlock.call.context import Caller, Context
from interlock.call.phases import NOTHING, Call, Granted, Request
from interlock.core.clock import Clock, Deadline
from interlock.core.errors import Failure
from interlock.effects.session import SessionState
from interlock.gateway import token_checks
from interlock.gateway.checkpoints import CheckpointWriter
from interlock.gateway.persistence.sessions import SessionStore
from interlock.gateway.progress import ProgressReporter
from interlock.gateway.redaction import CallRedaction
from interlock.gateway.results.outputs import Outputs
from interlock.telemetry import w3c

if TYPE_CHECKING:
    from interlock.call.results import Result
    from interlock.data.schema import Json


class Contexts:
    """Makes the contexts of calls."""

    def __init__(
        self,
        *,
        clock: Clock,
        redaction: CallRedaction,
        progress: ProgressReporter,
        outputs: Outputs,
        sessions: SessionStore,
        checkpoints: CheckpointWriter,
        invoke: Callable[[Request], Awaitable[Result]],
        running: Callable[[str], Call | None],
    ) -> None:
        self._clock = clock
        self._redaction = redaction
        self._progress = progress
        self._outputs = outputs
        self._sessions = sessions
        # Whether `make` may read on the event loop. Otherwise `prepare` reads, where the caller can wait.
        self.near = sessions.near
        self._checkpoints = checkpoints
        self._invoke = invoke
        self._running = running

    async def prepare(self, granted: Granted) -> Context:
        """The same as `make`, for a store that the event loop must not wait for: a session that is needed is read."""
        stored = None
        if granted.tool.writes or not granted.tool.bound.is_async:
            assert granted.request.caller is not None
            stored = await self._sessions.read_far(granted.request.caller, granted.request.session)
        return self.make(granted, stored)

    def make(self, granted: Granted, stored: tuple[int, str] | None = None) -> Context:
        """Return the context of a granted call. `stored` is its session, if it has been read."""
        call, request = granted, granted.request
        assert request.caller is not None
        read = partial(self._sessions.read, request.caller, request.session)
        # A write must not begin if its session cannot be read. The thread of a sync function reads no database. Where
        # the store is not near, `prepare` has read the session before; a context without it only reports effects.
        if stored is None and self.near and (granted.tool.writes or not granted.tool.bound.is_async):
            stored = read()
        session = SessionState(read) if stored is None else SessionState(None, *stored)
        caller, deadline = narrowed(granted), Deadline(at=granted.deadline)
        progress, part = self._progress, self._outputs.shown_part
        return Context(
            invocation_id=call.id,
            caller=caller,
            deadline=deadline,
            monotonic=self._clock.monotonic,
            session=session,
            key=request.key,
            dry_run=request.dry_run,
            trace_id=call.trace_id,
            trace=lambda: w3c.headers(call.trace_id, call.more.span, self._clock.random_bytes),
            on_progress=lambda facts: progress.report(call, facts),
            on_partial=lambda value: progress.partial(call, part(granted, value)),
            on_yield=lambda value: progress.partial(call, part(granted, value, whole=True), yielded=True),
            hide=lambda text: self._redaction.redact_text(call, text),
            child=partial(self._call_below, granted, caller, deadline),
            secret=lambda name: _secret(call, name),
            task=request.task or call.id,
            save=lambda label, state: self._checkpoints.save(call, label, state, runs=lambda: self._runs(call)),
            native=request.native,
        )

    def _runs(self, call: Call) -> bool:
        """Whether a call's tool is at work: neither done, in whatever way, nor cut off."""
        return call.more.why is None and self._running(call.id) is call

    async def _call_below(
        self,
        call: Granted,
        caller: Caller,
        deadline: Deadline,
        context: Context,
        tool: str,
        arguments: Json | None,
        /,
        **options: Any,
    ) -> Any:
        """Call another tool for the tool of a call: with its own authority and within its deadline."""
        request = call.request
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
                hidden=tuple(self._redaction.private_values(call)),
            )
        )
        context.failed_below = result.error
        return result.unwrap()


def left_nothing(call: Call, context: Context) -> bool:
    """Whether a tool has only read from its context: it has reported nothing and has not changed its session."""
    session = context.session
    return call.more is NOTHING and context.unused and not (isinstance(session, SessionState) and session.changed)


def _secret(call: Call, name: str) -> str:
    if call.more.lease is None:
        raise Failure("E3206", f"{call.ref} asks for the secret `{name}` and its manifest names none")
    return call.more.lease[secret_of(name, call.request.caller)].reveal()


def narrowed(granted: Granted) -> Caller:
    """Return the caller as the tool sees them, and as its own calls are made: with what the tool requires, no more."""
    caller = granted.request.caller
    assert caller is not None
    # INVARIANT: the authority of an invocation is the caller's, cut down to what its tool requires. A token
    # that names resources is narrowed to those of the call.
    capability = caller.capability
    if capability is not None and capability.bound:
        reach = token_checks.reach_of(granted.tool.contract, granted.input)
        capability = replace(capability, within=reach)
    scopes = caller.scopes.intersection(granted.tool.required_scopes)
    # A surface is what a model has in its context; the calls of a tool are its author's.
    if capability is not caller.capability or caller.surface is not None:
        return replace(caller, scopes=scopes, capability=capability, surface=None)
    return caller if scopes == caller.scopes else _with_scopes(caller, scopes)


@lru_cache(maxsize=256)
def _with_scopes(caller: Caller, scopes: frozenset[str]) -> Caller:
    """Return a caller with fewer scopes. Those of one token are the same object in call after call."""
    return replace(caller, scopes=scopes)
