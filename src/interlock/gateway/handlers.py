"""Call a tool's own handlers (its checks, its verifier) within the call's deadline.

Plain functions run in a pool of threads that handlers and hooks share. Python cannot end a thread, so functions that
never return can exhaust this pool: calls that need it then run out of time. Nothing else in the process uses it.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from interlock.core.errors import Failure
from interlock.core.threads import Threads

if TYPE_CHECKING:
    from interlock.data.schema import Fault

THREADS = 64
_threads = Threads("check", THREADS)


async def aside(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a plain function of a tool or hook in the thread pool for such functions."""
    return await _threads.run(function, *args, **kwargs)


def being_cancelled() -> bool:
    """Whether the current task is being cancelled, as opposed to code that raised CancelledError itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def consult(handler: Callable[..., Any], left_s: float, /, *args: Any, **kwargs: Any) -> Any:
    """Return the answer of a handler. Plain functions run in a thread; any exception is a failure of the call."""
    try:
        async with asyncio.timeout(max(0.0, left_s)):
            waits = inspect.iscoroutinefunction(handler)
            found = handler(*args, **kwargs) if waits else await aside(handler, *args, **kwargs)
            return await found if inspect.isawaitable(found) else found
    except TimeoutError:
        raise Failure("E3402", "the call ran out of time in one of the tool's own checks") from None
    except Failure:
        raise
    except BaseException as error:  # a handler is code of the tool; its SystemExit too is only a failure
        if isinstance(error, asyncio.CancelledError) and being_cancelled():
            raise
        raise Failure("E3401", f"one of the tool's own checks failed: {type(error).__name__}") from error


async def agrees(handler: Callable[..., Any], left_s: float, /, **kwargs: Any) -> bool:
    """Whether a handler says yes. INVARIANT: only True means yes, and a handler that fails has not said it."""
    try:
        return await consult(handler, left_s, **copy.deepcopy(kwargs)) is True
    except Failure:
        return False


async def faults_by(handler: Callable[..., Any], left_s: float, /, **kwargs: Any) -> list[Fault]:
    """Return the faults that a handler reports. An answer that is not a list of faults counts as a fault."""
    from interlock.data.schema import Fault

    # INVARIANT: a handler cannot change the input or the result of a call.
    found: Any = await consult(handler, left_s, **copy.deepcopy(kwargs))
    if found is None:
        return []
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        kind = type(found).__name__
        return [Fault("", f"a check must return a list of faults in words, and this one returned a {kind}")]
    return [one if isinstance(one, Fault) else Fault("", str(one)) for one in cast("Iterable[Any]", found)]
