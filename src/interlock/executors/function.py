"""Runs Python functions: async ones on the loop, sync ones in a thread, so that the loop is never blocked.

Python cannot end a thread. A sync function that continues after its call was cut off occupies its thread until it
returns. Such a thread no longer counts among the `THREADS` that calls share, so it takes no other call's place. At most
`MOST_HUNG` threads may hang like that. Beyond that a hung thread keeps its place, and when no place is left, calls of
sync functions are refused (E3001) instead of waiting in vain. Every hung thread raises an alert.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from interlock.call.context import Context
from interlock.call.executor import Executor, not_granted
from interlock.call.phases import Call, FastRead, Granted
from interlock.contract.declare import Tool
from interlock.contract.hints import convert
from interlock.core.errors import Failure
from interlock.data.canonical import private_copy
from interlock.data.schema import Json
from interlock.executors.tool_threads import Job, ToolThreads

if TYPE_CHECKING:
    from interlock.executors.site import Alert, Site

THREADS = 64
MOST_HUNG = 192


def make(site: Site) -> FunctionExecutor:
    return FunctionExecutor(site.grant, site.alert)


class FunctionExecutor(Executor):
    """Calls the function of a tool."""

    def __init__(self, grant: object, alert: Alert) -> None:
        super().__init__(grant)
        self._alert = alert
        self._threads = ToolThreads("interlock-tool")
        self._unfinished: dict[str, Job] = {}
        self._places = asyncio.Semaphore(THREADS)
        self._hung: set[Job] = set()

    def loads(self) -> Mapping[str, Callable[[], float]]:
        return {"hung tool threads": lambda: len(self._hung) / MOST_HUNG}

    def start(self, read: FastRead) -> StartedFunction:
        """Begin a read at once. Most end without waiting for anything."""
        if read.grant is not self._grant:
            raise not_granted()
        own, read.own = read.own, None  # used by its function only from here on, and released as soon as that has ended
        return StartedFunction(read.tool.bound, read.arguments, own)

    async def resume(self, granted: Granted, started: StartedFunction) -> Any:
        """Continue a function that was started."""
        if granted.grant is not self._grant:
            raise not_granted()
        try:
            return await started
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException:  # noqa: BLE001 - what is left is SystemExit and its like
            raise _ends_the_process(granted) from None

    async def execute(self, granted: Granted, context: Context | None) -> Any:
        tool = granted.tool.bound
        call = granted
        operation = "preview" if granted.more.looking else call.request.operation
        function = tool.function if operation == "invoke" else tool.handlers[operation]
        given = granted.input
        try:
            arguments = convert(function, given) if operation == "compensate" else bind(tool, given)
            wants = (
                tool.takes_context if operation == "invoke" else operation == "compensate" and tool.undo_takes_context
            )
            positional = (context,) if context is not None and wants else ()
            if positional and operation == "invoke" and tool.context is not None:
                arguments, positional = {**arguments, tool.context: context}, ()
            if tool.is_async if operation == "invoke" else inspect.iscoroutinefunction(function):
                running = function(*positional, **arguments)
                return await (running if call.more.meter is None else call.more.meter.awaiting(running))
            work = partial(function, *positional, **arguments)
            return await self._in_thread(call, work if call.more.meter is None else call.more.meter.calling(work))
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException:  # noqa: BLE001 - what is left is SystemExit and its like
            raise _ends_the_process(call) from None

    async def _in_thread(self, call: Call, function: Callable[[], Any]) -> Any:
        if self._places.locked() and len(self._hung) >= MOST_HUNG:
            raise Failure(
                "E3001",
                f"no thread is free: {len(self._hung)} functions go on although their calls were cut off",
                resolution="an operator restarts the server, and makes the hanging tool async or runs it in a sandbox,"
                " where a timeout ends it",
            )
        await self._places.acquire()
        try:
            job = self._threads.start(function)
        except BaseException:
            self._places.release()
            raise
        self._unfinished[call.id] = job
        try:
            value = await job.waiter
        finally:
            if job.finished or job.cancel():
                self._unfinished.pop(call.id, None)
                self._places.release()
            else:
                self._note_hung(call, job)
        return await value if inspect.isawaitable(value) else value

    def _note_hung(self, call: Call, job: Job) -> None:
        """Handle a call that was cut off while its thread continues: give its place to another call,
        up to the bound.
        """
        replaced = len(self._hung) < MOST_HUNG
        self._hung.add(job)

        def ended() -> None:
            self._unfinished.pop(call.id, None)
            self._hung.discard(job)
            if not replaced:
                self._places.release()

        job.listeners.append(ended)
        if replaced:
            self._places.release()
        hung = len(self._hung)
        reason = f"it goes on in a thread after its call was cut off; {hung} such threads, at most {MOST_HUNG}"
        self._alert("TOOL_THREAD_HUNG", call, reason=reason, hung=hung)

    def unfinished(self, call_id: str) -> Job | None:
        """The pending outcome of the thread of a call that was cut off; None if nothing of it runs any more."""
        job = self._unfinished.get(call_id)
        return None if job is None or job.finished else job

    async def close(self) -> None:
        self._threads.close()


def _ends_the_process(call: Call) -> Failure:
    """The failure of a tool that raised SystemExit or the like, which would end the event loop and all other calls."""
    return Failure("E3404", f"{call.request.tool} tried to end the process")


class StartedFunction:
    """An async function that was started, and its progress: its value, an error, or what it waits for.

    Awaiting it continues from there, as if the awaiter had started it.
    """

    __slots__ = ("_coroutine", "_error", "_waits_for", "ended", "output")

    def __init__(self, tool: Tool[..., Any], call_input: Json, own: Json | None) -> None:
        self.ended = False
        self.output: Any = None
        self._error: BaseException | None = None
        try:
            if own is None:
                own = bind(tool, call_input)
            elif tool.rich:
                _enrich(tool, own)
            running = tool.function(**own)
        except BaseException as error:  # noqa: BLE001 - told to whoever awaits it; a StopIteration is no end here
            self._error = error
            return
        self._coroutine: Coroutine[Any, Any, Any] = running if running.__class__ is CoroutineType else _awaited(running)
        try:
            self._waits_for = self._coroutine.send(None)
        except StopIteration as end:
            self.ended, self.output = True, end.value
        except BaseException as error:  # noqa: BLE001 - told to whoever awaits it
            self._error = error

    def __await__(self) -> Generator[Any, Any, Any]:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # otherwise the two would hold each other, and everything that the function held
        if self.ended:
            return self.output
        waits_for = self._waits_for
        try:
            while True:
                try:
                    answer = yield waits_for
                except BaseException as error:  # noqa: BLE001 - the function's to hear, above all when it is cancelled
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(answer)
        except StopIteration as end:
            return end.value


async def _awaited(running: Awaitable[Any]) -> Any:
    return await running


def _enrich(tool: Tool[..., Any], own: Json) -> None:
    """Replace values by those that JSON does not have."""
    for name, make in tool.rich:
        if name in own:
            own[name] = make(own[name])


def bind(tool: Tool[..., Any], call_input: Json) -> Json:
    """Convert the arguments to the function's own types. INVARIANT: nothing in them is shared."""
    if tool.arguments is None:
        return private_copy(call_input)
    if not tool.arguments:
        return call_input
    arguments = dict(call_input)
    for name, make in tool.arguments:
        if name in arguments:
            arguments[name] = make(arguments[name])
    return arguments
