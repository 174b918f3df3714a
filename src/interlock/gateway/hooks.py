"""Hooks: functions of users around a call, which can observe, add, change the input or stop it, but never permit it.

A hook that raises or takes too long blocks the call. A change by a hook is validated again and recorded under its name.

Whatever a hook emits (messages, progress, decisions, context, an updated input) is an entry of `hook_outputs` with the
hook's id and phase. The entries are returned beside the result, never in it, and are part of the closing record. Their
texts are redacted and bounded. They are redacted again after each change of the input and after the last hook, because
the call may have private values by then that were unknown before: pre-hooks run before credentials are lent.
Listeners receive what pre-hooks emit after the last pre-hook, and without its texts if credentials will be lent to the
call.

Each hook runs in a task of its own, and plain functions in threads that only hooks and tools' own checks use. The call
waits for it until the hook's `timeout_s` or the call's deadline, whichever comes first, also where the hook ignores its
cancellation. The deadline ends the call (E3402); the hook's own limit blocks it (E3211). Failure hooks only observe:
one that has not ended at the call's deadline continues for the rest of its own time, and the result does not wait.
"""

from __future__ import annotations

import asyncio
import copy
import fnmatch
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from interlock.call.phases import STRENGTH, Behavior, Call, Decision, Requested, stricter
from interlock.core.errors import Failure
from interlock.core.record import record
from interlock.core.threads import WALKS
from interlock.data.bounds import LARGE, plain_text, size_of
from interlock.data.canonical import private_copy
from interlock.gateway.handlers import aside
from interlock.gateway.inputs import difference, observable
from interlock.privacy.redact import REDACTED

if TYPE_CHECKING:
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.gateway.failure_log import FailureLog
    from interlock.gateway.observe import Observer
    from interlock.gateway.progress import ProgressReporter
    from interlock.gateway.redaction import CallRedaction

When = Literal["pre", "post", "failure"]
_log = logging.getLogger("interlock.hooks")
# The phase of a hook as the standard names it (tool_hook).
_PHASE: dict[When, str] = {"pre": "pre_tool", "post": "post_tool", "failure": "failure"}
# The longest text of a hook, the number of messages and context texts of one call, and their length in total.
# A failed call returns them in the details of its error, which must fit into the trailers of gRPC.
LONGEST_TEXT = 1000
MOST_TEXTS = 20
MOST_CHARACTERS = 4000
CLOSE_S = 5.0  # the time that hooks have to end when the data directory is closed


@record
class Seen:
    """The argument of a hook: the call and its input, both read-only, and after the run the result.

    `input` is the observable input: converted and with defaults. A pre-hook sees it with the changes of the hooks
    before it. It is empty where a call failed because its input does not fit the contract.
    """

    invocation_id: str
    tool: str
    input: Mapping[str, Any]
    caller: str
    value: Any = None
    error: Failure | None = None
    remaining_s: float = 0.0  # the time for which the call waits for this hook


@record
class HookResult:
    """The answer of a hook. A field that is not set leaves the call as it is.

    `messages` are for the caller, `context` is for the model. Both reach the caller as `hook_outputs`, under the hook's
    id, and are no part of the result. Only a `pre` hook can decide (`permission`) or change the input.
    """

    updated_input: Mapping[str, Any] | None = None
    permission: Behavior | None = None
    stop: str | None = None
    context: tuple[str, ...] = ()
    progress: str | None = None
    messages: tuple[str, ...] = ()


@record
class Hook:
    """A function around calls of some tools, with the time it may take."""

    id: str
    when: When
    run: Callable[[Seen], HookResult | Awaitable[HookResult | None] | None]
    tools: str = "*"
    timeout_s: float = 1.0


class Hooks:
    """The hooks of one gateway."""

    def __init__(
        self,
        clock: Clock,
        observer: Observer,
        redaction: CallRedaction,
        failure_log: FailureLog,
        progress: ProgressReporter,
    ) -> None:
        self._observer = observer
        self._redaction = redaction
        self._failure_log = failure_log
        self._progress = progress
        self._clock = clock
        self.registered: list[Hook] = []
        self._running: set[asyncio.Task[Any]] = set()

    async def before(self, requested: Requested, arguments: Json, reviewer: str | None = None) -> Json:
        """Run the pre-hooks and return the arguments as they leave them.

        With `reviewer`, the arguments are those that this reviewer wrote and approved.
        """
        call = requested
        chosen = self._matching("pre", call)
        if reviewer is not None:
            call.extend().hook_outputs.clear()  # they concern an input that does not run
        elif chosen:
            call.move("pre_hooks_running")
        begun: list[tuple[Hook, int]] = []  # each with the number of outputs before it
        completed = 0
        # INVARIANT: the texts of hooks are searched for what is private in the input as it is at that time.
        call.input = arguments
        try:
            for hook in chosen:
                # INVARIANT: a hook gets a copy that it cannot write to, and no reference to model_input.
                seen = _seen(call, frozen(private_copy(arguments)))
                self._observer.emit("tool.hook.pre.started", call, hook=hook.id)
                begun.append((hook, len(call.more.hook_outputs)))
                result = await self._run(hook, call, seen, requested.deadline)
                if result.permission is not None:
                    call.decision = stricter(call.decision, _decision(hook, result.permission))
                    _note(call, hook, "decision", behavior=result.permission)
                if result.updated_input is not None:
                    changed = len(call.more.mutations)
                    updated = _updated(requested, hook.id, arguments, thawed(result.updated_input), reviewer)
                    arguments = call.input = updated
                    _note(call, hook, "updated_input", pointers=[one.pointer for one in call.more.mutations[changed:]])
                    self.redact_outputs(call)
                completed += 1
        finally:
            self._tell(requested, begun, completed)
        return arguments

    def _tell(self, call: Requested, begun: Sequence[tuple[Hook, int]], completed: int) -> None:
        """Tell listeners what the pre-hooks emitted, now that all of them have ended."""
        outputs = call.more.hook_outputs
        if call.tool.credentials:
            # INVARIANT: nobody receives a text before it can be searched for the credentials of the call.
            outputs = [{**one, "text": REDACTED} if "text" in one else one for one in outputs]
        ends = [*(first for _, first in begun[1:]), len(outputs)]
        for place, ((hook, first), end) in enumerate(zip(begun, ends, strict=False)):
            for one in outputs[first:end]:
                if one["output"] == "progress":
                    self._report(call, hook, one["text"])
            if place < completed:
                self._observer.emit("tool.hook.pre.completed", call, hook=hook.id, outputs=outputs[first:end])

    async def after(self, requested: Requested, value: Any) -> None:
        """Run the post-hooks of a call that succeeded; one that stops or fails blocks its result."""
        call = requested
        chosen = self._matching("post", call)
        if not chosen:
            return
        call.move("post_hooks_running")
        # INVARIANT: a hook gets a copy of the result, so that it cannot change the result of the caller.
        large = size_of(value, LARGE) > LARGE
        shown = await WALKS.run(frozen, value) if large else frozen(value)
        given = await _observed(call)
        for hook in chosen:
            self._observer.emit("tool.hook.post.started", call, hook=hook.id)
            first = len(call.more.hook_outputs)
            seen = _seen(call, given, shown)
            _ignore(call, hook, await self._run(hook, call, seen, requested.deadline))
            self._observer.emit("tool.hook.post.completed", call, hook=hook.id, outputs=call.more.hook_outputs[first:])

    async def after_failure(self, call: Call, failure: Failure) -> None:
        """Run the failure hooks. They can only observe: the call has failed already."""
        chosen = self._matching("failure", call)
        given = await _observed(call) if chosen else None
        for hook in chosen:
            self._observer.emit("tool.hook.post.started", call, hook=hook.id)
            first = len(call.more.hook_outputs)
            left_s = max(0.0, min(hook.timeout_s, call.deadline - self._clock.monotonic()))
            shown = failure.saying(failure.message, copy.deepcopy(failure.details))
            seen = _seen(call, given, None, shown)
            task = self._begin(hook, replace(seen, remaining_s=left_s))
            try:
                if await _ended(task, left_s):
                    _ignore(call, hook, self._answer(hook, call, task))
                else:
                    call.extend().warnings.append(f"hook `{hook.id}` had not ended when the call did")
                    end = asyncio.get_running_loop().call_later(hook.timeout_s - left_s, task.cancel)
                    task.add_done_callback(lambda _, end=end: end.cancel())
            except Failure as blocked:
                call.extend().warnings.append(blocked.message)
            self._observer.emit("tool.hook.post.completed", call, hook=hook.id, outputs=call.more.hook_outputs[first:])

    def redact_outputs(self, call: Call) -> None:
        """Redact what the hooks of a call emitted once more, before it is returned and recorded."""
        outputs = call.more.hook_outputs
        said = [place for place, one in enumerate(outputs) if "text" in one]
        if not said:
            return
        # INVARIANT: if the redaction fails, the outputs are withheld.
        call.more.hook_outputs = []
        shown = self._redaction.redact_texts(call, [outputs[place]["text"] for place in said])
        texts = dict(zip(said, map(_bounded, shown), strict=True))
        call.more.hook_outputs = [
            {**one, "text": texts[place]} if place in texts else one for place, one in enumerate(outputs)
        ]

    async def close(self) -> None:
        """Cancel the hooks that still run, and wait a moment for them to end."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_S)

    async def _run(self, hook: Hook, call: Call, seen: Seen, deadline: float) -> HookResult:
        """Run one hook within its time. Anything but a valid answer blocks the call (E3211)."""
        left_s = deadline - self._clock.monotonic()
        if left_s <= 0:
            raise Failure("E3402", f"{call.ref} had no time left for hook `{hook.id}`")
        within_s = min(hook.timeout_s, left_s)
        task = self._begin(hook, replace(seen, remaining_s=within_s))
        if not await _ended(task, within_s):
            task.cancel()
            if left_s <= hook.timeout_s:
                raise Failure("E3402", f"{call.ref} ran out of time in hook `{hook.id}`")
            raise Failure("E3211", f"hook `{hook.id}` took too long")
        return self._answer(hook, call, task)

    def _begin(self, hook: Hook, seen: Seen) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(_called(hook.run, seen))
        # The event loop has only weak references to tasks; one that is not awaited any more must still be able to end.
        self._running.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs no warning

    def _answer(self, hook: Hook, call: Call, task: asyncio.Task[Any]) -> HookResult:
        """Return the answer of a hook that has ended; raises what blocks the call."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._failure_log.log(call, f"hook {hook.id} failed", error)
            raise Failure("E3211", f"hook `{hook.id}` failed") from error
        found = task.result()
        if found is not None and not isinstance(found, HookResult):
            raise Failure("E3211", f"hook `{hook.id}` answered with something that is not a HookResult")
        result = found or HookResult()
        if wrong := _malformed(result):
            raise Failure("E3211", f"hook `{hook.id}` answered with {wrong}")
        if result.progress is not None:
            words = _note(call, hook, "progress", text=self._text(call, result.progress))["text"]
            if hook.when != "pre":
                self._report(call, hook, words)
        self._add_texts(call, hook, "message", result.messages)
        self._add_texts(call, hook, "context", result.context)
        if result.stop is not None:
            why = self._text(call, result.stop)
            _note(call, hook, "stop", text=why)
            raise Failure("E3211", f"hook `{hook.id}` stopped the call: {why}")
        return result

    def _add_texts(self, call: Call, hook: Hook, kind: OutputKind, texts: Sequence[str]) -> None:
        """Pass on texts of a hook, as far as the call has room for them."""
        added = [one["text"] for one in call.more.hook_outputs if one["output"] in ("message", "context")]
        room = MOST_CHARACTERS - sum(map(len, added))
        for index, text in enumerate(texts):
            shown = self._text(call, text) if len(added) + index < MOST_TEXTS else None
            if shown is None or len(shown) > room:
                call.extend().warnings.append(
                    f"hook `{hook.id}` returned more text than the limit; the rest was dropped"
                )
                return
            room -= len(shown)
            _note(call, hook, kind, text=shown)

    def _report(self, call: Call, hook: Hook, words: str) -> None:
        # A progress record has no other field for its source that every protocol carries.
        self._progress.report(call, {"message": f"hook `{hook.id}`: {words}", "hook": hook.id})

    def _text(self, call: Call, text: str) -> str:
        """Return a text of a hook, redacted and bounded."""
        # INVARIANT: a hook may see private values of a call; its texts are searched for them like those of the tool.
        return _bounded(self._redaction.redact_texts(call, [text])[0])

    def _matching(self, when: When, call: Call) -> list[Hook]:
        if call.tool is None:
            return []
        name = call.tool.contract.address
        return [hook for hook in self.registered if hook.when == when and fnmatch.fnmatchcase(name, hook.tools)]


OutputKind = Literal["message", "progress", "decision", "context", "updated_input", "stop"]


def _note(call: Call, hook: Hook, kind: OutputKind, **facts: Any) -> Json:
    """Add something that a hook emitted to the hook outputs, under the hook's name."""
    output: Json = {"hook": hook.id, "phase": _PHASE[hook.when], "output": kind, **facts}
    call.extend().hook_outputs.append(output)
    return output


def _ignore(call: Call, hook: Hook, result: HookResult) -> None:
    """Warn of requests that a hook made after the run, when they have no effect any more."""
    if result.permission is not None or result.updated_input is not None:
        call.extend().warnings.append(
            f"hook `{hook.id}` decided or changed the input after the run, which has no effect"
        )


def _seen(call: Call, observed: Any, value: Any = None, error: Failure | None = None) -> Seen:
    caller = call.request.caller
    name = caller.id if caller else ""
    return Seen(invocation_id=call.id, tool=call.ref, input=observed, caller=name, value=value, error=error)


def _bounded(text: str) -> str:
    shown = plain_text(text, LONGEST_TEXT + 1)
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[: LONGEST_TEXT - 1]}…"


def _malformed(result: HookResult) -> str | None:
    """Return the field of a hook's answer that has the wrong type; None if all are right."""
    for name in ("context", "messages"):
        texts: Any = getattr(result, name)
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(one, str) for one in texts):  # pyright: ignore[reportUnknownVariableType] - whatever the hook put there
            return f"`{name}` that is not a sequence of texts"
    for name in ("stop", "progress"):
        if not isinstance(getattr(result, name), str | None):
            return f"`{name}` that is not a text"
    if result.permission is not None and result.permission not in STRENGTH:
        return "`permission` that is no decision"
    updated: Any = result.updated_input
    return None if isinstance(updated, Mapping | None) else "`updated_input` that is not a mapping"


async def _called(run: Callable[[Seen], Any], seen: Seen) -> Any:
    try:
        found = run(seen) if inspect.iscoroutinefunction(run) else await aside(run, seen)
        return await found if inspect.isawaitable(found) else found
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # SystemExit and similar exceptions would end the event loop
        raise RuntimeError(f"the hook raised {type(error).__name__}") from error


async def _ended(task: asyncio.Task[Any], left_s: float) -> bool:
    """Wait for a hook. Returns whether it ended in time. Cancelling the caller cancels the hook as well."""
    try:
        done, _ = await asyncio.wait({task}, timeout=left_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    return bool(done)


def _decision(hook: Hook, behavior: Behavior) -> Decision:
    rules = (f"hook:{hook.id}",)
    return Decision(behavior=behavior, reason=f"hook {hook.id}", rules=rules, policy="hooks", source="hook")


def _updated(requested: Requested, hook: str, before: Json, after: Json, reviewer: str | None) -> Json:
    """Return the input as a hook changed it: checked like the input itself, recorded under the hook's name.

    A change of a reviewer's input comes after the decision about the caller's own input, so the reviewer is named too.
    """
    try:
        after = private_copy(after)
        valid = requested.tool.contract.input.valid(after)
    except Failure:  # it is not JSON data
        valid = False
    if not valid:
        raise Failure("E3211", f"hook `{hook}` made the input invalid")
    source = f"hook:{hook}" if reviewer is None else f"reviewer:{reviewer}+hook:{hook}"
    requested.extend().mutations.extend(difference(source, before, after))
    return after


async def _observed(call: Call) -> Any:
    """Return the observable input of a call, read-only. A large one is made in a thread."""
    large = len(call.model_input) > LARGE
    return await WALKS.run(_frozen_input, call) if large else _frozen_input(call)


def _frozen_input(call: Call) -> Any:
    return frozen(observable(call))


def frozen(value: Any) -> Any:
    """Return a view of JSON data that raises when written to."""
    if isinstance(value, dict):
        return MappingProxyType({name: frozen(item) for name, item in cast("Json", value).items()})
    if isinstance(value, list):
        return tuple(frozen(item) for item in cast("list[Any]", value))
    return value


def thawed(value: Any) -> Any:
    """Return plain JSON data from such a view."""
    if isinstance(value, Mapping):
        return {name: thawed(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [thawed(item) for item in cast("list[Any]", value)]
    return value
