"""Hooks: other people's code around a call, which can look, add, change the input or stop, but never permit.

A hook that raises or takes too long blocks the call. What it changes is validated again and recorded under its name.
"""

from __future__ import annotations

import asyncio
import fnmatch
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from interlock.core.errors import Failure
from interlock.core.phases import Behavior, Call
from interlock.core.schema import Json

When = Literal["pre", "post", "failure"]
_log = logging.getLogger("interlock.hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a hook is shown: the call and its input, which it cannot write to; after the run, the result."""

    invocation_id: str
    tool: str
    input: Mapping[str, Any]
    caller: str
    value: Any = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HookResult:
    """What a hook asks for. Everything unsaid leaves the call as it is."""

    updated_input: Mapping[str, Any] | None = None
    permission: Behavior | None = None
    stop: str | None = None
    context: tuple[str, ...] = ()
    progress: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A function around calls of some tools, with the time it may take."""

    id: str
    when: When
    run: Callable[[Seen], HookResult | Awaitable[HookResult | None] | None]
    tools: str = "*"
    timeout_s: float = 1.0


@dataclass(slots=True)
class Gathered:
    """What all pre-hooks of a call asked for together."""

    input: Json
    permission: Behavior | None = None
    by: list[str] = field(default_factory=list[str])


async def run_hook(hook: Hook, call: Call, tool: str, seen: Seen, remaining_s: float) -> HookResult:
    """Run one hook within its time; anything but a clean answer blocks the call (E3211)."""
    try:
        found = hook.run(seen)
        if inspect.isawaitable(found):
            async with asyncio.timeout(max(0.0, min(hook.timeout_s, remaining_s))):
                found = await found
    except TimeoutError:
        raise Failure("E3211", f"hook `{hook.id}` took too long") from None
    except Exception as error:  # a hook is other people's code; whatever it raises blocks
        _log.exception("hook %s failed in call %s (%s)", hook.id, call.id, tool, extra={"trace_id": call.trace_id})
        raise Failure("E3211", f"hook `{hook.id}` failed") from error
    result = found or HookResult()
    if result.stop is not None:
        raise Failure("E3211", f"hook `{hook.id}` stopped the call: {result.stop}")
    return result


def matching(hooks: list[Hook], when: When, tool: str) -> list[Hook]:
    return [hook for hook in hooks if hook.when == when and fnmatch.fnmatchcase(tool, hook.tools)]


def frozen(value: Any) -> Any:
    """A view of JSON data that raises when written to."""
    if isinstance(value, dict):
        return MappingProxyType({name: frozen(item) for name, item in value.items()})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
    if isinstance(value, list):
        return tuple(frozen(item) for item in value)  # pyright: ignore[reportUnknownVariableType] - JSON
    return value


def thawed(value: Any) -> Any:
    """Plain JSON data from such a view."""
    if isinstance(value, Mapping):
        return {name: thawed(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType] - JSON
    if isinstance(value, list | tuple):
        return [thawed(item) for item in value]  # pyright: ignore[reportUnknownVariableType] - JSON
    return value
