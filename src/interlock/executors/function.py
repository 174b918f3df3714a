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
from contextlib import suppress
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from interlock.call.executor import Executor, not_granted
from interlock.core.errors import Failure
from interlock.data.canonical import private_copy
from interlock.executors.tool_threads import Job, ToolThreads

if TYPE_CHECKING:
    from interlock.call.context import Context
    from interlock.call.phases import Call, FastRead, Granted
    from interlock.contract.declare import Tool
    from interlock.data.schema import Json
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
        # The jobs of calls that were cut off, and whether another call has got their places.
        self._hung: dict[Job, bool] = {}

    def loads(self) -> Mapping[str, Callable[[], float]]:
        return {"hung tool threads": lambda: len(self._hung) / MOST_HUNG}

    def start(self, read: FastRead, context: Context | None = None) -> Started:
        """Begin a read: at once if it only computes, otherwise in a task or a thread of its own."""
        if read.grant is not self._grant:
            raise not_granted()
        tool = read.tool.bound
        own, read.own = read.own, None  # used by its function only from here on, and released as soon as that has ended
        if tool.is_async and read.tool.computes:
            return StartedFunction(tool, read.arguments, own, context)
        if not tool.is_async and self._places.locked():
            raise Failure("E3001", "no thread is free")  # the regular phases wait for one
        try:
            work = partial(tool.function, **_own_arguments(tool, read.arguments, own, context))
        except Exception:
            raise
        except BaseException:  # noqa: BLE001 - what is left is SystemExit and its like
            raise _ends_the_process(read.request.tool) from None
        if tool.is_async:
            return StartedTask(_guarded(work, read.request.tool))
        with suppress(StopIteration):
            self._places.acquire().send(None)  # a place is free, so this does not wait
        return StartedThread(self._start_job(read.id, work))

    def resume(self, granted: Granted, started: Started) -> Coroutine[Any, Any, Any] | asyncio.Task[Any]:
        """Continue a function that was started."""
        if granted.grant is not self._grant:
            raise not_granted()
        if isinstance(started, StartedTask):
            return started.task
        if isinstance(started, StartedThread):
            return _guarded(partial(self._output, granted, started.job), granted.request.tool)
        return _guarded(lambda: started, granted.request.tool)

    async def execute(self, granted: Granted, context: Context | None) -> Any:
        tool = granted.tool.bound
        call = granted
        operation = "preview" if granted.more.looking else call.request.operation
        function = tool.function if operation == "invoke" else tool.handlers[operation]
        given = granted.input
        try:
            arguments = _converted(function, given) if operation == "compensate" else bind(tool, given)
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
            raise _ends_the_process(call.request.tool) from None

    async def _in_thread(self, call: Call, function: Callable[[], Any]) -> Any:
        if self._places.locked() and len(self._hung) >= MOST_HUNG:
            raise Failure(
                "E3001",
                f"no thread is free: {len(self._hung)} functions go on although their calls were cut off",
                resolution="an operator restarts the server, and makes the hanging tool async or runs it in a sandbox,"
                " where a timeout ends it",
            )
        await self._places.acquire()
        value = await self._output(call, self._start_job(call.id, function))
        return await value if inspect.isawaitable(value) else value

    def _start_job(self, call_id: str, function: Callable[[], Any]) -> Job:
        """Run a function in a thread. It has the place that was acquired for it until it comes back."""
        try:
            job = self._unfinished[call_id] = self._threads.start(function)
        except BaseException:
            self._places.release()
            raise

        def came_back() -> None:
            self._unfinished.pop(call_id, None)
            if not self._hung.pop(job, False):
                self._places.release()

        job.listeners.append(came_back)
        return job

    async def _output(self, call: Call, job: Job) -> Any:
        """Wait for a job and return what its function returned."""
        try:
            if not job.finished:
                await job.wait()
        finally:
            if not job.finished and not job.cancel():
                self._note_hung(call, job)
        return job.result()

    def _note_hung(self, call: Call, job: Job) -> None:
        """Handle a call that was cut off while its thread continues: give its place to another call,
        up to the bound.
        """
        replaced = self._hung[job] = len(self._hung) < MOST_HUNG
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


def _ends_the_process(tool: str) -> Failure:
    """The failure of a tool that raised SystemExit or the like, which would end the event loop and all other calls."""
    return Failure("E3404", f"{tool} tried to end the process")


async def _guarded(function: Callable[[], Awaitable[Any]], tool: str) -> Any:
    """Call a function of a tool, or wait for one that was started. It cannot end the process."""
    try:
        return await function()
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException:  # noqa: BLE001 - what is left is SystemExit and its like
        raise _ends_the_process(tool) from None


class StartedTask:
    """An async function that runs in a task of its own.

    `waiter` is done when the function has ended, or earlier, when its call goes on in the regular phases.
    """

    __slots__ = ("task", "waiter")

    def __init__(self, running: Coroutine[Any, Any, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[None] = loop.create_future()
        # A fixed name: generating one takes a tenth of the time that creating the task takes.
        self.task = asyncio.Task(running, loop=loop, name="tool")
        self.task.add_done_callback(self._wake)

    def _wake(self, _: Any) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)

    @property
    def done(self) -> bool:
        return self.task.done()

    @property
    def ended(self) -> bool:
        """Whether the function has returned. One that has raised has not."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None

    @property
    def output(self) -> Any:
        return self.task.result()


class StartedThread:
    """A sync function that runs in a thread. Its `waiter` is that of its job."""

    __slots__ = ("job", "waiter")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.waiter = job.waiter

    @property
    def done(self) -> bool:
        return self.job.finished and not inspect.isawaitable(self.job.value)

    @property
    def ended(self) -> bool:
        """Whether the function has returned, and not something to await. One that has raised has not."""
        return self.job.error is None and self.done

    @property
    def output(self) -> Any:
        return self.job.value


class StartedFunction:
    """An async function that was started, and its progress: its value, an error, or what it waits for.

    Awaiting it continues from there, as if the awaiter had started it.
    """

    __slots__ = ("_coroutine", "_error", "_waits_for", "ended", "output")

    # It runs in the task of its call, which need not wait for anybody else.
    waiter: None = None

    def __init__(
        self, tool: Tool[..., Any], call_input: Json, own: Json | None, context: Context | None = None
    ) -> None:
        self.ended = False
        self.output: Any = None
        self._error: BaseException | None = None
        try:
            if own is None or context is not None:
                own = _own_arguments(tool, call_input, own, context)
            elif tool.rich:
                _enrich(tool, own)
            running = tool.function(**own)
        except BaseException as error:  # noqa: BLE001 - told to the awaiting task; a StopIteration is no end here
            self._error = error
            return
        self._coroutine: Coroutine[Any, Any, Any] = running if running.__class__ is CoroutineType else awaited(running)
        try:
            self._waits_for = self._coroutine.send(None)
        except StopIteration as end:
            self.ended, self.output = True, end.value
        except BaseException as error:  # noqa: BLE001 - told to the awaiting task
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


Started = StartedFunction | StartedTask | StartedThread


async def awaited(running: Awaitable[Any]) -> Any:
    return await running


def _own_arguments(tool: Tool[..., Any], call_input: Json, own: Json | None, context: Context | None) -> Json:
    """Return the arguments of a function. `own` is a copy of the input for it alone, if there is one."""
    if own is None:
        own = bind(tool, call_input)
    elif tool.rich:
        _enrich(tool, own)
    return own if context is None or tool.context is None else {**own, tool.context: context}


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


def _converted(function: Callable[..., Any], given: Json) -> Json:
    from interlock.contract.hints import convert  # loaded here: most calls have converters, and undo none

    return convert(function, given)
