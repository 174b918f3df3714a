"""Hooks: other people's code around a call, which can look, add, change the input or stop, but never permit.

A hook that raises or takes too long blocks the call. What it changes is validated again and recorded under its name.

Each hook runs in a task of its own, and plain functions in threads that only hooks and tools' own checks use. The call
waits for it until the hook's `timeout_s` or the call's deadline, whichever comes first, also where the hook ignores its
cancellation. The deadline ends the call (E3402); the hook's own limit blocks it (E3211). Failure hooks only observe:
one that has not ended when the call's time is over goes on for the rest of its own time, and the answer does not wait.
"""

from __future__ import annotations

import asyncio
import fnmatch
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, cast

from interlock.core.canonical import decode, private_copy
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.phases import Behavior, Call, Decision, Mutated, Requested
from interlock.core.record import record
from interlock.core.schema import Json, pointer
from interlock.gateway.handlers import aside
from interlock.gateway.observe import Observer

When = Literal["pre", "post", "failure"]
_log = logging.getLogger("interlock.hooks")


@record
class Seen:
    """What a hook is shown: the call and its input, which it cannot write to; after the run, the result."""

    invocation_id: str
    tool: str
    input: Mapping[str, Any]
    caller: str
    value: Any = None
    error: Failure | None = None
    remaining_s: float = 0.0  # how long the call waits for this hook


@record
class HookResult:
    """What a hook asks for. Everything unsaid leaves the call as it is."""

    updated_input: Mapping[str, Any] | None = None
    permission: Behavior | None = None
    stop: str | None = None
    context: tuple[str, ...] = ()
    progress: str | None = None


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

    def __init__(self, observer: Observer, clock: Clock) -> None:
        self._observer = observer
        self._clock = clock
        self.registered: list[Hook] = []
        self._running: set[asyncio.Task[Any]] = set()

    async def before(self, requested: Requested, arguments: Json) -> Json:
        """Run the pre-hooks; the arguments as they leave them."""
        call = requested.call
        chosen = self._matching("pre", call)
        if chosen:
            call.move("pre_hooks_running")
        for hook in chosen:
            # INVARIANT: a hook sees a copy it cannot write to; model_input is out of its reach altogether.
            seen = self._seen(call, frozen(private_copy(arguments)))
            self._observer.emit("tool.hook.pre.started", call, hook=hook.id)
            result = await self._run(hook, call, seen, requested.deadline)
            self._observer.emit("tool.hook.pre.completed", call, hook=hook.id)
            if result.progress is not None:
                self._observer.progress(call, {"message": result.progress})
            if result.permission is not None:
                call.decision = stricter(call.decision, _decision(hook, result.permission))
            if result.updated_input is not None:
                arguments = _updated(requested, hook.id, arguments, thawed(result.updated_input))
        return arguments

    async def after(self, requested: Requested, value: Any) -> None:
        """Run the post-hooks of a call that succeeded; one that stops or fails blocks its result."""
        call = requested.call
        chosen = self._matching("post", call)
        if chosen:
            call.move("post_hooks_running")
        for hook in chosen:
            self._observer.emit("tool.hook.post.started", call, hook=hook.id)
            seen = self._seen(call, frozen(decode(requested.model_input)), value)
            await self._run(hook, call, seen, requested.deadline)
            self._observer.emit("tool.hook.post.completed", call, hook=hook.id)

    async def after_failure(self, call: Call, failure: Failure) -> None:
        """Run the failure hooks. They can only look: the call has failed already."""
        for hook in self._matching("failure", call):
            self._observer.emit("tool.hook.post.started", call, hook=hook.id)
            left_s = max(0.0, min(hook.timeout_s, call.deadline - self._clock.monotonic()))
            task = self._begin(hook, replace(self._seen(call, {}, None, failure), remaining_s=left_s))
            try:
                if await _ended(task, left_s):
                    self._answer(hook, call, task)
                else:
                    call.warnings.append(f"hook `{hook.id}` had not ended when the call did")
                    asyncio.get_running_loop().call_later(hook.timeout_s - left_s, task.cancel)
            except Failure as blocked:
                call.warnings.append(blocked.message)
            self._observer.emit("tool.hook.post.completed", call, hook=hook.id)

    async def _run(self, hook: Hook, call: Call, seen: Seen, deadline: float) -> HookResult:
        """Run one hook within its time; anything but a clean answer blocks the call (E3211)."""
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
        # The loop holds tasks weakly; one that is not waited for any more must still be there to end.
        self._running.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that nothing warns that nobody did

    def _answer(self, hook: Hook, call: Call, task: asyncio.Task[Any]) -> HookResult:
        """The answer of a hook that has ended; raises what blocks the call."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._observer.log_failure(call, f"hook {hook.id} failed", error)
            raise Failure("E3211", f"hook `{hook.id}` failed") from error
        found = task.result()
        if found is not None and not isinstance(found, HookResult):
            raise Failure("E3211", f"hook `{hook.id}` answered with something that is not a HookResult")
        result = found or HookResult()
        if result.stop is not None:
            why = self._observer.hide(call, result.stop)
            raise Failure("E3211", f"hook `{hook.id}` stopped the call: {why}")
        # INVARIANT: a hook may see what a call was given; what it says is looked through like the tool's own words.
        call.additional_context.extend(self._observer.without(call, text) for text in result.context)
        return result

    def _matching(self, when: When, call: Call) -> list[Hook]:
        if call.tool is None:
            return []
        name = str(call.tool.contract.id)
        return [hook for hook in self.registered if hook.when == when and fnmatch.fnmatchcase(name, hook.tools)]

    def _seen(self, call: Call, observed: Any, value: Any = None, error: Failure | None = None) -> Seen:
        caller = call.request.caller
        name = caller.id if caller else ""
        return Seen(invocation_id=call.id, tool=call.ref, input=observed, caller=name, value=value, error=error)


async def _called(run: Callable[[Seen], Any], seen: Seen) -> Any:
    try:
        found = run(seen) if inspect.iscoroutinefunction(run) else await aside(run, seen)
        return await found if inspect.isawaitable(found) else found
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # what is left is SystemExit and its like, which would end the event loop
        raise RuntimeError(f"the hook raised {type(error).__name__}") from error


async def _ended(task: asyncio.Task[Any], left_s: float) -> bool:
    """Wait for a hook; whether it ended in time. A caller that goes away takes the hook along."""
    try:
        done, _ = await asyncio.wait({task}, timeout=left_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    return bool(done)


_STRENGTH: dict[Behavior, int] = {"passthrough": -1, "allow": 0, "ask": 1, "deny": 2}


def stricter(one: Decision | None, other: Decision) -> Decision:
    """The stricter of two decisions."""
    # INVARIANT: nothing that speaks before policy can turn its deny into an allow.
    return other if one is None or _STRENGTH[other.behavior] >= _STRENGTH[one.behavior] else one


def _decision(hook: Hook, behavior: Behavior) -> Decision:
    return Decision(behavior=behavior, reason=f"hook {hook.id}", rules=(f"hook:{hook.id}",), policy="hooks")


def _updated(requested: Requested, hook: str, before: Json, after: Json) -> Json:
    """A hook's change of the input: checked like the input itself, recorded under the hook's name."""
    if not requested.tool.contract.input.valid(after):
        raise Failure("E3211", f"hook `{hook}` made the input invalid")
    for name in sorted(before.keys() | after.keys()):
        if (name in before, before.get(name)) != (name in after, after.get(name)):
            change = Mutated(f"hook:{hook}", pointer([name]), before.get(name), after.get(name))
            requested.call.mutations.append(change)
    return after


def frozen(value: Any) -> Any:
    """A view of JSON data that raises when written to."""
    if isinstance(value, dict):
        return MappingProxyType({name: frozen(item) for name, item in cast("Json", value).items()})
    if isinstance(value, list):
        return tuple(frozen(item) for item in cast("list[Any]", value))
    return value


def thawed(value: Any) -> Any:
    """Plain JSON data from such a view."""
    if isinstance(value, Mapping):
        return {name: thawed(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [thawed(item) for item in cast("list[Any]", value)]
    return value
