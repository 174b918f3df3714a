"""The context of a call that tools receive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from interlock.call.cost import FREE, reported
from interlock.contract.attached import Attached
from interlock.contract.context import CallContext
from interlock.contract.effects import Change
from interlock.core.errors import Failure
from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.call.capability import Capability
    from interlock.contract.manifest import Operation
    from interlock.core.clock import Deadline

CallerKind = Literal["human", "agent", "service"]


class ModelSurface(Protocol):
    """The tools that a model has in its context. If it `defers`, there are others, which have to be loaded."""

    @property
    def defers(self) -> bool: ...

    def has(self, address: str) -> bool:
        """Whether a tool is in it."""
        ...

    def offers(self, address: str) -> bool:
        """Whether a tool may be called; it may be in it from then on."""
        ...

    def hides(self, address: str) -> bool:
        """Whether a tool does not exist for its holder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Caller:
    """The authority under which a call is made, and the agent through which it is made.

    `id` is the person or system the task began with; `agent` the identity that acts for it, if another does. Kind,
    trust and groups are the operator's statements about that identity, never the caller's own. `passed_on` tells that
    one agent or service delegated its authority to another. `drafts` is the key of a developer's session
    (`registry.drafts`): with it, and with the tools that it calls, the session finds its drafts. It exists in one
    process only; nothing that comes from outside, or from the store, can hold it. `surface` holds back the tools whose
    schemas the caller has not loaded, and hides those that are excluded; None where they see the whole catalog.
    """

    id: str
    tenant: str = "local"
    agent: str | None = None
    scopes: frozenset[str] = frozenset()
    kind: CallerKind = "human"
    trust: int = 0
    groups: frozenset[str] = frozenset()
    capability: Capability | None = None
    passed_on: bool = False
    drafts: object = None
    surface: ModelSurface | None = field(default=None, compare=False)

    @property
    def acting(self) -> str:
        """The identity that acts: the agent if there is one."""
        return self.agent or self.id

    def covers(self, address: str, version: str, scopes: Iterable[str]) -> bool:
        """Whether their token names a version of a tool, and they hold the scopes that it requires."""
        token = self.capability
        return self.scopes.issuperset(scopes) and (token is None or token.covers(address, version))

    def governs(self, scope: str) -> bool:
        """Whether a scope lets them administer the whole server. Only callers of the tenant `local` may."""
        return self.tenant == "local" and scope in self.scopes


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The effects that a call would have, for the agent or the reviewer to look at first."""

    effects: tuple[Change, ...] = ()
    preconditions: Mapping[str, bool] = field(default_factory=dict[str, bool])
    impact: str = ""


def previewed(answer: Any) -> Preview:
    """Check the answer of a tool's preview handler. E3401 if it is not a preview: that is the tool's fault, not the
    call's.
    """
    if not isinstance(answer, Preview):
        raise _no_preview(f"the tool's preview returned `{type(answer).__name__}`")
    effects: Any = answer.effects
    preconditions: Any = answer.preconditions
    if not isinstance(effects, tuple | list) or not all(isinstance(one, Change) for one in cast("list[Any]", effects)):
        raise _no_preview("the `effects` of the tool's preview are no tuple of `Change`")
    if not isinstance(preconditions, Mapping):
        raise _no_preview("the `preconditions` of the tool's preview are no mapping")
    return answer


def _no_preview(what: str) -> Failure:
    shape = "Preview(effects=(Change(...), ...), preconditions={'what holds': True}, impact='in words')"
    return Failure("E3401", f"{what}; a preview handler returns {shape}", retryable=False)


@dataclass(frozen=True, slots=True)
class Attestation:
    """A fact a tool states about its effect, and the way to check it independently."""

    what: str
    claimed: Any
    observe: Callable[[], Any]


class _ToolLog(logging.LoggerAdapter[logging.Logger]):
    """A tool's log: under the call's trace id, and without the call's private values."""

    def __init__(self, trace_id: str, invocation_id: str, hide: Callable[[str], str]) -> None:
        ids = {"trace_id": trace_id, "invocation_id": invocation_id}
        super().__init__(logging.getLogger("interlock.tool"), ids)
        self._hide = hide

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self.isEnabledFor(level):
            text = str(msg) % args if args else str(msg)
            self.logger.log(level, "%s", self._hide(text), extra=self.extra)


# many methods: the public interface of a running tool; each method is one thing that a tool may ask for
class Context(CallContext):
    """Progress, cancellation, deadline, log, session, dry run, effects and compensation of one call.

    Tools take it as their first argument; it never appears in their schema. Its methods may be called from the tool's
    own thread.
    """

    def __init__(
        self,
        *,
        invocation_id: str,
        caller: Caller,
        deadline: Deadline,
        monotonic: Callable[[], float],
        session: MutableMapping[str, Any],
        key: str | None,
        dry_run: bool,
        trace_id: str,
        trace: Callable[[], Mapping[str, str]],
        on_progress: Callable[[dict[str, Any]], None],
        on_partial: Callable[[Any], None],
        child: Callable[..., Awaitable[Any]],
        hide: Callable[[str], str],
        secret: Callable[[str], str],
        task: str,
        save: Callable[[str, Any], Awaitable[None]],
        save_blocking: Callable[[str, Any], None] | None = None,
        out: Path | None = None,
        on_yield: Callable[[Any], None] | None = None,
        native: Mapping[str, Any] | None = None,
    ) -> None:
        self.invocation_id = invocation_id
        self.caller = caller
        self.deadline = deadline
        self.session = session
        self.idempotency_key = key
        self.dry_run = dry_run
        self.trace_id = trace_id
        self._native = native
        self._trace = trace
        self._hide = hide
        self.changes: list[Change] = []
        self.attestations: list[Attestation] = []
        self.compensation: dict[str, Any] | None = None
        self.modifiers: dict[str, Any] = {}
        self.attached: Attached | None = None
        self.last_progress: dict[str, Any] | None = None
        self._monotonic = monotonic
        self._on_progress = on_progress
        self._on_partial = on_partial
        self._on_yield = on_yield or on_partial
        self._child = child
        self._secret = secret
        self._save = save
        self._save_blocking = save_blocking
        self.task = task
        self._out = out
        self.costs = FREE
        self.failed_below: Exception | None = None
        self._cancelled = False
        import asyncio  # what reads a data directory at rest has callers, and makes no context

        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @cached_property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """The log of the tool: under the call's trace id, and without what the call must keep to itself."""
        return _ToolLog(self.trace_id, self.invocation_id, self._hide)

    @property
    def trace_headers(self) -> dict[str, str]:
        """The position of this call in its trace, as W3C headers: `traceparent`, and `tracestate` if there is one.

        A tool sends them to the services that it calls, so that one trace shows the whole path.
        """
        return dict(self._trace())

    @property
    def native(self) -> dict[str, Any]:
        """The caller's own names of this call, such as the id of a tool call at a model's provider. A copy.

        They are statements of the caller, on record with the call and checked by nobody.
        """
        return deepcopy(dict(self._native or {}))

    @property
    def unused(self) -> bool:
        """Whether the tool has reported nothing with it: no change, progress, cost, content or the like."""
        return (
            self.costs is FREE and self.last_progress is None and not self.attached
            and not (self.changes or self.attestations or self.compensation or self.modifiers)
        )  # fmt: skip

    @property
    def remaining_s(self) -> float:
        """Seconds left before the call is cut off."""
        return self.deadline.remaining_s(self._monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether the call was cancelled or has run out of time. Long loops in threads should check it."""
        return self._cancelled or self.remaining_s <= 0

    def progress(self, /, message: str = "", *, percent: float | None = None, **facts: Any) -> None:
        """Report progress: a message, a percentage, and any of current_step, total_steps, bytes_read, bytes_written,
        line_count and artifact_refs. Nothing is passed on once the call has ended.
        """
        self.last_progress = {"message": message, "percent": percent}
        self._on_loop(self._on_progress, {**self.last_progress, **facts})

    def partial(self, value: Any) -> None:
        """Send an ordered part of the result early. It never replaces the final result."""
        self._on_loop(self._on_partial, value)

    def yield_result(self, value: Any) -> None:
        """Send an interim result that can be used as it is, and continue. It never replaces the final result.

        It is one of the ordered parts of the call, sent as `tool.invocation.yielded`. In the sandbox it is sent as an
        ordinary part.
        """
        self._on_loop(self._on_yield, value)

    async def checkpoint(self, label: str, state: Any) -> None:
        """Save the progress of the work: JSON, under a label. When it returns, it is on disk.

        E3906 if the state is not JSON, E3407 if it is too large, E3902 if it could not be written. The manifest must
        enable checkpoints, and names the labels (`macro_events`) that are milestones.
        """
        await self._save(label, state)

    def checkpoint_blocking(self, label: str, state: Any) -> None:
        """The same for a tool that is not async: its thread waits until the checkpoint is on disk."""
        if self._save_blocking is not None:
            self._save_blocking(label, state)
        elif threading.get_ident() == self._thread:
            # Waiting here would block the loop, which could then never save it.
            raise Failure("E3308", "an async tool saves with `await context.checkpoint(…)`")
        else:
            import asyncio

            asyncio.run_coroutine_threadsafe(self.checkpoint(label, state), self._loop).result()

    def effect(self, resource: str, operation: Operation, *, before: Any = None, after: Any = None) -> None:
        """Report a change that was made, for the record and for undoing it."""
        self.changes.append(Change(resource=resource, operation=operation, before=before, after=after))

    def compensate_with(self, **arguments: Any) -> None:
        """State the arguments for undoing this call; by default they are the call's own arguments and its result."""
        self.compensation = arguments

    def attest(self, what: str, claimed: Any, observe: Callable[[], Any]) -> None:
        """State a fact about the effect (a file's hash, a row count) that is checked before success is reported."""
        self.attestations.append(Attestation(what, claimed, observe))

    def secret(self, name: str) -> str:
        """A credential that the tool's manifest names (`credentials:NAME`), lent for this call alone.

        It is removed from everything the call produces: its result, its log, its errors.
        """
        return self._secret(name)

    @property
    def out(self) -> Path:
        """The directory for files to store with the result, if the tool's manifest allows them.

        The caller receives them by reference once the call has succeeded. Links are not followed.
        """
        if self._out is None:
            raise Failure("E3411", "this tool leaves no files; say how many with sandbox=Sandboxing(artifacts=…)")
        return self._out

    def cost(self, **parts: float) -> None:
        """Report the cost of the call: external_api, storage_io, network, token, human_review or compute."""
        self.costs += reported(parts)

    def attach(self, type: str, **fields: Any) -> None:  # noqa: A002 - the standard's name
        """Add an item of content to the result: text, json, image, audio, video, file, resource_link,
        embedded_resource, log or diff, with the fields that the standard gives it. Bytes become base64.

            ctx.attach("image", mime_type="image/png", data=chart)
            ctx.attach("diff", diff=patch, path="README.md")
        """
        self.attaching().add_content({"type": type, **fields})

    def show(self, *, model: str | None = None, summary: str | None = None, search: str | None = None) -> None:
        """State how the result is shown: to a model, in one line to people, and in the search of a transcript.

        The value itself stays unchanged, for callers that read structured data.
        """
        self.attaching().add_views({"model": model, "summary": summary, "search": search})

    def provenance(self, *, data_version: str | None = None, confidence: float | None = None) -> None:
        """State the version of the data that the result was made from, and the confidence in it, from 0 to 1.

        The result carries both in its `provenance`. Without them the version is null and the confidence 1.

            ctx.provenance(data_version=rates.etag, confidence=0.8)
        """
        self.attaching().add_provenance({"data_version": data_version, "confidence": confidence})

    def handoff(
        self,
        what: Mapping[str, Any],
        *,
        agent: str | None = None,
        tool: str | None = None,
        scopes: Sequence[str] = (),
        resources: Sequence[str] = (),
        expires_s: float = 3600,
    ) -> None:
        """Hand work over to an agent or to a tool: the work, the authority and the period.

        The result lists it and the journal records it. It grants nothing: the receiver needs a token of its own that
        covers what it does. It can name no scope and no resource that this call itself lacks.
        """
        to = {name: one for name, one in (("agent", agent), ("tool", tool)) if one is not None}
        handoff = {"what": what, "to": to, "scopes": scopes, "resources": resources, "expires_s": expires_s}
        self.attaching().add_handoff(handoff, self.caller)

    def attaching(self) -> Attached:
        """The attachments of the tool's value, to add to."""
        self.attached = self.attached or Attached()
        return self.attached

    def modify_context(self, **modifiers: Any) -> None:
        """Request changes to the conversation's context; the scheduler decides whether they are allowed."""
        self.modifiers.update(modifiers)

    async def call(self, tool: str, arguments: Mapping[str, Any] | None = None, /, **options: Any) -> Any:
        """Call another tool on the same authority and within the same deadline. Returns its result."""
        return await self._child(self, tool, arguments, **options)

    def cancel(self) -> None:
        """Set the flag that `cancelled` shows. Called by the gateway."""
        self._cancelled = True

    def _on_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        if threading.get_ident() == self._thread:
            function(argument)
        else:
            self._loop.call_soon_threadsafe(function, argument)
