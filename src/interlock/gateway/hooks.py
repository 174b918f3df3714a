"""Hooks: other people's code around a call, which can look, add, change the input or stop, but never permit.

A hook that raises or takes too long blocks the call. What it changes is validated again and recorded under its name.
"""

from __future__ import annotations

import asyncio
import fnmatch
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

from interlock.core.canonical import decode, private_copy
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.phases import Behavior, Call, Decision, Mutated, Requested
from interlock.core.record import record
from interlock.core.schema import Json, pointer
from interlock.gateway.handlers import being_cancelled
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
            result = await self._run(hook, call, seen, requested.deadline - self._clock.monotonic())
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
            await self._run(hook, call, seen, hook.timeout_s)
            self._observer.emit("tool.hook.post.completed", call, hook=hook.id)

    async def after_failure(self, call: Call, failure: Failure) -> None:
        """Run the failure hooks. They can only look: the call has failed already."""
        for hook in self._matching("failure", call):
            self._observer.emit("tool.hook.post.started", call, hook=hook.id)
            try:
                await self._run(hook, call, self._seen(call, {}, None, failure), hook.timeout_s)
            except Failure as blocked:
                call.warnings.append(blocked.message)
            self._observer.emit("tool.hook.post.completed", call, hook=hook.id)

    async def _run(self, hook: Hook, call: Call, seen: Seen, left_s: float) -> HookResult:
        """Run one hook within its time; anything but a clean answer blocks the call (E3211)."""
        try:
            async with asyncio.timeout(max(0.0, min(hook.timeout_s, left_s))):
                # A plain function is run in a thread: it cannot hold up the loop, nor outstay its time.
                found = (
                    hook.run(seen) if inspect.iscoroutinefunction(hook.run) else await asyncio.to_thread(hook.run, seen)
                )
                if inspect.isawaitable(found):
                    found = await found
        except TimeoutError:
            raise Failure("E3211", f"hook `{hook.id}` took too long") from None
        except BaseException as error:  # a hook is other people's code; whatever it raises blocks
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            self._observer.log_failure(call, f"hook {hook.id} failed", error)
            raise Failure("E3211", f"hook `{hook.id}` failed") from error
        if found is not None and not isinstance(found, HookResult):  # pyright: ignore[reportUnnecessaryIsInstance] - other people's code
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
