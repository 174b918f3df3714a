"""The cost of a call: its parts, their sum, and the meter that measures computing.

A call's cost is its own: the cost of a nested call is in the nested call's row and nowhere else, so that the cost of a
task is a plain sum over its calls, plus what was charged to the task itself.

The meter runs where the tool runs. An awaitable shares its thread with others, so its CPU time is the sum over the
steps in which the event loop resumes it; a function in a worker thread has that thread to itself. The memory that one
call uses in a shared process cannot be measured, so memory is metered only where a call has a process of its own: the
executor that started it reports its memory, and its CPU time too.

INVARIANT: no stretch of CPU or wall time is counted by two meters that are nested in one another.
"""

from __future__ import annotations

import inspect
import threading
import time
import types
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from interlock.core.amounts import MAX_AMOUNT, MILLION, millionths
from interlock.core.errors import Failure
from interlock.core.record import record

if TYPE_CHECKING:
    from interlock.call.allowances import Prices

T = TypeVar("T")

CALL_PARTS = ("compute", "external_api", "storage_io", "network", "token", "human_review")
TASK_PARTS = ("llm_inference", "retrieval")
PARTS = CALL_PARTS + TASK_PARTS
GIB = 1 << 30


@record
class Cost:
    """An amount by parts, each in whole millionths. The last two are charged to tasks, never to calls."""

    compute: int = 0
    external_api: int = 0
    storage_io: int = 0
    network: int = 0
    token: int = 0
    human_review: int = 0
    llm_inference: int = 0
    retrieval: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The parts that are not zero."""
        return {part: amount for part in PARTS if (amount := getattr(self, part))}

    @property
    def total(self) -> int:
        return (
            self.compute + self.external_api + self.storage_io + self.network + self.token + self.human_review
            + self.llm_inference + self.retrieval
        )  # fmt: skip

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{part: getattr(self, part) + getattr(other, part) for part in PARTS})

    def document(self) -> dict[str, float]:
        """The cost in units of currency, for people and documents."""
        return {**{part: amount / MILLION for part, amount in self.parts.items()}, "total": self.total / MILLION}


FREE = Cost()


def reported(parts: Mapping[str, float]) -> Cost:
    """Read the cost that a tool reports, in units of currency. E3303 for an unknown part or an invalid amount."""
    for part, amount in parts.items():
        if part not in CALL_PARTS:
            raise Failure("E3303", f"`{part}` is not a part of a call's cost; the parts are {', '.join(CALL_PARTS)}")
        # INVARIANT: no tool can report a negative cost: its caller could then spend what others were refused.
        if not 0 <= amount <= MAX_AMOUNT:
            raise Failure("E3303", f"the cost `{part}` must be between 0 and {MAX_AMOUNT:.0f}")
    return Cost(**{part: millionths(amount) for part, amount in parts.items()})


def compute_cost(cpu_ns: int, wall_ns: int, prices: Prices, memory_bytes: int = 0) -> int:
    """Millionths for the time used, and for the memory held during that time, rounded to the nearest."""
    held = memory_bytes / GIB * prices.memory_gib_s
    return millionths((cpu_ns * prices.cpu_s + wall_ns * (prices.wall_s + held)) / 1e9)


# The meter of the code that is running. Tasks and threads inherit it from their starter.
_current: ContextVar[Meter | None] = ContextVar("interlock_meter", default=None)
_nesting = threading.Lock()


class Meter:
    """The CPU and wall time of one call, over all attempts and steps. It measures one thing at a time."""

    __slots__ = (
        "_inner_cpu_ns", "_inner_running", "_inner_since_ns", "_inner_wall_ns", "_thread", "cpu_ns", "memory_bytes",
        "wall_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.cpu_ns = 0
        self.wall_ns = 0
        self.memory_bytes = 0  # the peak, where it can be measured
        self._thread = 0  # the thread that is in a step of this meter now
        self._inner_cpu_ns = 0  # the time that nested meters counted during the present step
        # Nested calls may overlap; from the first that starts to the last that ends, the time is theirs.
        self._inner_running = 0
        self._inner_since_ns = 0
        self._inner_wall_ns = 0

    @types.coroutine
    def awaiting(self, awaitable: Awaitable[T]) -> Generator[Any, Any, T]:
        """Await something and count its use: `value = await meter.awaiting(function())`."""
        inner = awaitable if inspect.iscoroutine(awaitable) else _coroutine(awaitable)
        outer = _current.get()
        started_ns = self._start(outer)
        sent: Any = None
        thrown: BaseException | None = None
        try:
            while True:
                began_ns = self._enter()
                token = _current.set(self)
                try:
                    yielded = inner.send(sent) if thrown is None else inner.throw(thrown)
                except StopIteration as done:
                    return done.value
                finally:
                    _current.reset(token)
                    self._leave(began_ns, outer)
                try:
                    sent, thrown = (yield yielded), None
                except GeneratorExit:
                    inner.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - a cancellation, mostly; it is for the inner one
                    sent, thrown = None, error
        finally:
            self._stop(started_ns, outer)

    def calling(self, function: Callable[[], T]) -> Callable[[], T]:
        """Wrap a function so that its use is counted, for a worker thread to call."""

        def metered() -> T:
            outer = _current.get()
            started_ns = self._start(outer)
            began_ns = self._enter()
            token = _current.set(self)
            try:
                return function()
            finally:
                _current.reset(token)
                self._leave(began_ns, outer)
                self._stop(started_ns, outer)

        return metered

    def cost(self, prices: Prices) -> Cost:
        """The cost of what has been used so far, at these prices."""
        return Cost(compute=compute_cost(self.cpu_ns, self.wall_ns, prices, self.memory_bytes))

    def record_use(self, cpu_ns: int, wall_ns: int, memory_bytes: int) -> None:
        """Record the use of a process that ran only this call."""
        self.cpu_ns, self.wall_ns, self.memory_bytes = cpu_ns, wall_ns, memory_bytes

    # A step: a stretch without a pause, on one thread.

    def _enter(self) -> int:
        self._thread = threading.get_ident()
        self._inner_cpu_ns = 0
        return time.thread_time_ns()

    def _leave(self, began_ns: int, outer: Meter | None) -> None:
        used_ns = time.thread_time_ns() - began_ns
        self._thread = 0
        self.cpu_ns += used_ns - self._inner_cpu_ns
        if outer is not None and outer._thread == threading.get_ident():
            # The outer meter's step is further down this very stack and will count this stretch as well.
            outer._inner_cpu_ns += used_ns

    # A run: from start to end, with its pauses.

    def _start(self, outer: Meter | None) -> int:
        self._inner_wall_ns = 0
        now_ns = time.perf_counter_ns()
        if outer is not None:
            outer._inner_began(now_ns)
        return now_ns

    def _stop(self, started_ns: int, outer: Meter | None) -> None:
        now_ns = time.perf_counter_ns()
        if outer is not None:
            outer._inner_ended(now_ns)
        with _nesting:
            if self._inner_running:  # a nested call outlives this one
                self._inner_wall_ns += now_ns - self._inner_since_ns
                self._inner_since_ns = now_ns
            self.wall_ns += now_ns - started_ns - self._inner_wall_ns

    def _inner_began(self, now_ns: int) -> None:
        with _nesting:
            if not self._inner_running:
                self._inner_since_ns = now_ns
            self._inner_running += 1

    def _inner_ended(self, now_ns: int) -> None:
        with _nesting:
            self._inner_running -= 1
            if not self._inner_running:
                self._inner_wall_ns += now_ns - self._inner_since_ns


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
