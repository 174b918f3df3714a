"""Asking a tool's own handlers (its checks, its verifier) within the call's time and at nobody else's expense.

Plain functions run in a pool of threads that handlers and hooks share. Python cannot end a thread, so functions that
never return can use this pool up: calls that need it then run out of time. Nothing else in the process uses it.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

from interlock.core.errors import Failure
from interlock.core.threads import Threads
from interlock.data.schema import Fault

THREADS = 64
_threads = Threads("check", THREADS)


async def aside(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a plain function of other people's in a thread of the pool that only such functions use."""
    return await _threads.run(function, *args, **kwargs)


def being_cancelled() -> bool:
    """Whether somebody asked for the current task to end, or other people's code merely raised as if."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def consult(handler: Callable[..., Any], left_s: float, /, *args: Any, **kwargs: Any) -> Any:
    """What a handler answers. Plain functions run in a thread; whatever goes wrong is a failure of the call."""
    try:
        async with asyncio.timeout(max(0.0, left_s)):
            waits = inspect.iscoroutinefunction(handler)
            found = handler(*args, **kwargs) if waits else await aside(handler, *args, **kwargs)
            return await found if inspect.isawaitable(found) else found
    except TimeoutError:
        raise Failure("E3402", "the call ran out of time in one of the tool's own checks") from None
    except Failure:
        raise
    except BaseException as error:  # a handler is the tool's code; even SystemExit is only its failure
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        raise Failure("E3401", f"one of the tool's own checks failed: {type(error).__name__}") from error


async def faults_by(handler: Callable[..., Any], left_s: float, /, **kwargs: Any) -> list[Fault]:
    """What a handler finds wrong. An answer that is no list of faults is one: nobody can tell what it means."""
    # INVARIANT: what a handler does to the input or the result of a call changes neither.
    found: Any = await consult(handler, left_s, **copy.deepcopy(kwargs))
    if found is None:
        return []
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        kind = type(found).__name__
        return [Fault("", f"a check must return a list of faults in words, and this one returned a {kind}")]
    return [one if isinstance(one, Fault) else Fault("", str(one)) for one in cast("Iterable[Any]", found)]
