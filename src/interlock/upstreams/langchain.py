"""LangChain tools as an upstream: found in a Python module, run in this process, under Interlock's deadline.

The tools are the operator's own code, loaded when first needed. Plain functions run in threads of their own: one that
never ends occupies a thread of this upstream only, up to a bound, after which calls fail at once. Coroutines run in an
event loop of this upstream, in a thread: one that blocks, swallows its cancellation or raises SystemExit does it there.
No thread keeps the process from ending. Everything that runs the author's code, the dump of a result and the text of an
exception too, happens in these threads. The message of an exception may contain anything, so only that of a
ToolException, which is meant for the model, is passed on; of any other only the type is given.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson
from pydantic import BaseModel, Field

from interlock.call.connector import Definition, Discovered, RemoteCall
from interlock.contract.manifest import ManifestPart
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.data.canonical import private_copy
from interlock.data.schema import Json
from interlock.upstreams import wire
from interlock.upstreams.configuration import read_config
from interlock.upstreams.kinds import Site
from interlock.upstreams.manifests import definition_digest
from interlock.upstreams.response_limits import MAX_BYTES, MAX_VALUES, Intake

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

T = TypeVar("T")

# The names of functions that every provider of models takes.
_NAME = expression(r"[A-Za-z0-9_-]{1,64}")
# Characters of an error message that are looked at, of which fewer are passed on.
_LONGEST_MESSAGE = 10_000
_ENDING_S = 5.0
# LangChain does not describe a tool's result: mostly text, and any JSON in general.
RESULT_SCHEMA: Json = {"type": ["string", "object", "array", "number", "boolean", "null"]}


class LangChainConfig(ManifestPart):
    """The module of the tools, as `import` names it, and the name under which each secret is lent."""

    module: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$", max_length=500)
    credentials: dict[str, str] = Field(default_factory=dict[str, str])
    max_threads: int = Field(64, ge=1, le=1000)
    max_response_bytes: int = Field(MAX_BYTES, ge=1, le=1_073_741_824)
    max_response_values: int = Field(MAX_VALUES, ge=1, le=100_000_000)


class LangChainUpstream:
    """The tools of one module. Its instances of BaseTool are found by name, in lists and tuples too.

    A tool finds the credentials on loan to a call, its id and its idempotency key in the `configurable` part of its
    config.
    """

    def __init__(
        self, name: str, config: LangChainConfig, *, clock: Clock, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._name = name
        self._on_change = on_change
        self._module = config.module
        self._lent = config.credentials
        self._intake = Intake(name, config.max_response_bytes, config.max_response_values)
        self._threads = _Threads(name, config.max_threads)
        self._loop = _Loop(name, config.max_threads)
        self._tools: dict[str, _Loaded] | None = None

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return {"kind": "function_calling", "function_name": native["tool"], **reported}

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        tools: list[Definition] = []
        refused: list[tuple[str, str]] = []
        for name, found in (await self._loaded(again=True)).items():
            if found.definition is None:
                refused.append((name, found.lacking))
            else:
                tools.append(found.definition)
        return Discovered(tools, refused, {"module": self._module})

    async def call(self, call: RemoteCall) -> Any:
        name = str(call.native.get("tool"))
        found = (await self._loaded()).get(name)
        if found is None:
            raise Failure("E3502", f"`{name}` is no longer in `{self._module}`; look at `{self._name}` again")
        # INVARIANT: a call reaches only the definition that was admitted.
        if call.definition is not None and found.digest != call.definition:
            self._on_change()
            words = f"`{name}` is not what was admitted: `{self._module}` describes it otherwise now"
            details = {"sent": False, "upstream": self._name}
            raise Failure("E3210", words, details=details, resolution=wire.look_at(self._name))
        # Tools that return their errors to the model as results would count as successes.
        bare = found.tool.model_copy(update={"handle_tool_error": False, "handle_validation_error": False})
        lent = {name: call.credentials[secret] for name, secret in self._lent.items() if secret in call.credentials}
        known = {"credentials": lent, "invocation_id": call.invocation_id, "key": call.key}
        config: Any = {"configurable": known, "callbacks": []}
        limit = asyncio.timeout(call.left_s)
        try:
            async with limit:
                # A tool may change what it is given; the input of the call stays what it was.
                if _is_plain(bare):
                    data = await self._threads.run(lambda: _run(bare, private_copy(dict(call.arguments)), config))
                else:
                    data = await self._loop.run(lambda: _await(bare, private_copy(dict(call.arguments)), config))
                return await self._intake.json(data)
        except Failure:
            raise
        except _NoJson as error:
            raise Failure("E3401", f"`{name}` returned a {error}, which JSON cannot hold") from None
        except _ToolError as error:
            raise Failure("E3401", f"`{name}` failed: {wire.excerpt(str(error), call)}") from None
        except Exception as error:  # noqa: BLE001 - the edge of somebody else's code
            if limit.expired():
                raise Failure("E3503", f"`{name}` gave no answer in time") from None
            raise Failure("E3401", f"`{name}` failed with {type(error).__name__}") from None

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        try:
            await self._loaded()
        except Failure as failure:
            raise Failure("E3502", failure.message) from None

    def forget(self) -> None:
        """Do nothing: answers are not cached."""

    async def close(self) -> None:
        self._tools = None
        await self._loop.close()

    async def _loaded(self, *, again: bool = False) -> dict[str, _Loaded]:
        if self._tools is None or again:
            # Importing may take long, so it does not block the loop.
            self._tools = await self._threads.run(partial(_load, self._module))
        return self._tools


class _Loaded(NamedTuple):
    """A tool of the module, and its definition with its digest, or the reason why it has none."""

    tool: BaseTool
    definition: Definition | None
    digest: str = ""
    lacking: str = ""


def _load(name: str) -> dict[str, _Loaded]:
    try:
        from langchain_core.tools import BaseTool
    except ModuleNotFoundError:
        raise Failure("E3108", "LangChain is not installed here: pip install langchain-core") from None
    module = _import(name)
    tools: dict[str, BaseTool] = {}
    for value in vars(module).values():
        several = cast("Iterable[Any]", value) if isinstance(value, list | tuple) else (value,)
        tools |= {tool.name: tool for tool in several if isinstance(tool, BaseTool)}
    if not tools:
        raise Failure("E3105", f"no LangChain tools in `{name}`; decorate a function with langchain_core's @tool")
    return {tool: _loaded_tool(name, tools[tool]) for tool in sorted(tools)}


def _loaded_tool(module: str, tool: BaseTool) -> _Loaded:
    try:
        if (lacking := _lacking(tool)) is not None:
            return _Loaded(tool, None, lacking=lacking)
        definition = _definition(module, tool)
        return _Loaded(tool, definition, definition_digest(definition))
    except BaseException as error:  # noqa: BLE001 - schemas are made by the author's types, which may raise anything
        return _Loaded(tool, None, lacking=f"its input has no JSON Schema: {type(error).__name__}")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Failure("E3105", f"no module named `{error.name}`; give the name of an importable module") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the author's code runs at import; whatever it raises is a refusal
        raise Failure("E3105", f"`{name}` cannot be loaded: {type(error).__name__}") from None


def _lacking(tool: BaseTool) -> str | None:
    """The reason why a model could not call a tool or would not know what it does; None where it could and would."""
    if _NAME.fullmatch(tool.name) is None:
        return "its name is not one that models can write: letters, digits, _ and -, at most 64 of them"
    return None if tool.description.strip() else "it does not say what it does; give it a description or a docstring"


def _definition(module: str, tool: BaseTool) -> Definition:
    schema: Any = tool.tool_call_schema
    document = cast("Json", schema if isinstance(schema, dict) else schema.model_json_schema())
    # The tool's purpose is stated once, in its description.
    takes = {word: value for word, value in document.items() if word not in ("title", "description")}
    return Definition(
        name=tool.name,
        description=tool.description,
        input_schema={"type": "object", "properties": {}, **takes},
        output_schema=RESULT_SCHEMA,
        native={"protocol": "langchain", "module": module, "tool": tool.name},
    )


class _Threads:
    """Threads for work that may never end. Each is a daemon, and their number is bounded."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._running = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return the value of `work`, or raise its exception. A caller that stops waiting leaves the thread behind,
        still counted.
        """
        if self._running >= self._most:
            words = f"all {self._most} threads of `{self._name}` are taken by calls that have not ended"
            raise Failure(
                "E3502",
                words,
                details={"sent": False},
                resolution="find the tool that hangs and restart the server; max_threads sets how many there may be",
            )
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def done(value: T | None, error: BaseException | None) -> None:
            self._running -= 1
            if not outcome.done():
                outcome.set_result((value, error))

        def body() -> None:
            value, error = None, None
            try:
                value = work()
            except BaseException as raised:  # noqa: BLE001 - told to the waiter
                error = raised
            with suppress(RuntimeError):  # the loop has ended, and nothing waits
                loop.call_soon_threadsafe(done, value, error)

        self._running += 1
        run = partial(contextvars.copy_context().run, body)
        threading.Thread(target=run, name=f"interlock-langchain-{self._name}", daemon=True).start()
        value, error = await outcome
        return _result_of(value, error)


class _Loop:
    """An event loop in a daemon thread, started when first needed, for coroutines that may do anything.

    A coroutine that its caller no longer waits for is cancelled. One that goes on nevertheless is counted, and their
    number is bounded.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._left = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the value of a coroutine, or raise its exception."""
        if self._left >= self._most:
            raise Failure(
                "E3502",
                f"{self._most} calls of `{self._name}` were cancelled and have not ended",
                details={"sent": False},
                resolution="find the tool that does not end and restart the server; max_threads sets how many there"
                " may be",
            )
        here, loop = asyncio.get_running_loop(), self._started()
        outcome: asyncio.Future[tuple[T | None, BaseException | None]] = here.create_future()
        tasks: list[asyncio.Task[tuple[T | None, BaseException | None]]] = []

        def done(value: T | None, error: BaseException | None) -> None:
            if outcome.done():
                self._left -= 1
            else:
                outcome.set_result((value, error))

        async def body() -> tuple[T | None, BaseException | None]:
            try:
                return await work(), None
            except BaseException as raised:  # noqa: BLE001 - told to the waiter
                return None, raised

        def tell(task: asyncio.Task[tuple[T | None, BaseException | None]]) -> None:
            value, error = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
            with suppress(RuntimeError):  # the loop of the call has ended, and nothing waits
                here.call_soon_threadsafe(done, value, error)

        def begin() -> None:
            tasks.append(loop.create_task(body()))
            tasks[0].add_done_callback(tell)

        def end() -> None:
            for task in tasks:
                task.cancel()

        loop.call_soon_threadsafe(begin)
        try:
            value, error = await outcome
        except asyncio.CancelledError:
            if outcome.cancelled():
                self._left += 1
                loop.call_soon_threadsafe(end)
            raise
        return _result_of(value, error)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, self._ended = asyncio.new_event_loop(), asyncio.get_running_loop().create_future()
            run = partial(_run_loop, self._loop, asyncio.get_running_loop(), self._ended)
            threading.Thread(target=run, name=f"interlock-langchain-{self._name}", daemon=True).start()
        return self._loop

    async def close(self) -> None:
        loop, ended, self._loop, self._ended = self._loop, self._ended, None, None
        if loop is not None and ended is not None:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.wait((ended,), timeout=_ENDING_S)  # a tool that blocks leaves its thread behind


def _run_loop(loop: asyncio.AbstractEventLoop, owner: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    """Run a loop until it is stopped. SystemExit and the like end the task that raised them, and not the loop."""
    stopped = False
    while not stopped:
        try:
            loop.run_forever()
            stopped = True
        except BaseException:  # noqa: BLE001, S112 - the task has it, and its waiter is told
            continue
    try:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_ENDING_S / 2))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except BaseException:  # noqa: BLE001, S110 - the last words of somebody else's code
        pass
    finally:
        with suppress(RuntimeError):
            loop.close()
        with suppress(RuntimeError):  # nothing waits any more
            owner.call_soon_threadsafe(_over, ended)


def _over(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _result_of(value: T | None, error: BaseException | None) -> T:
    """Run foreign code. An exception that would end a task or the process is an ordinary failure here."""
    if error is None:
        return cast("T", value)
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        raise error
    raise type(f"{type(error).__name__}", (_EndedError,), {})()


class _EndedError(Exception):
    """A tool raised what ends a task or a process. The name of the type tells what."""


class _ToolError(Exception):
    """The text of a ToolException."""


def _run(tool: BaseTool, arguments: Json, config: Any) -> bytes:
    from langchain_core.tools import ToolException

    try:
        return _dumped_json(tool.invoke(arguments, config))
    except ToolException as error:
        raise _ToolError(_text(error)) from None


async def _await(tool: BaseTool, arguments: Json, config: Any) -> bytes:
    from langchain_core.tools import ToolException

    try:
        return _dumped_json(await tool.ainvoke(arguments, config))
    except ToolException as error:
        raise _ToolError(_text(error)) from None


def _text(error: Exception) -> str:
    try:
        return str(error)[:_LONGEST_MESSAGE]
    except BaseException as raised:  # noqa: BLE001 - the author's code, in a thread of its own
        return f"{type(error).__name__}, whose text cannot be read: {type(raised).__name__}"


def _is_plain(tool: BaseTool) -> bool:
    """Whether a tool has nothing to await, so that LangChain would run it in the loop's default threads."""
    from langchain_core.tools import BaseTool, StructuredTool, Tool

    if isinstance(tool, StructuredTool | Tool):
        return tool.coroutine is None
    return type(tool)._arun is BaseTool._arun  # pyright: ignore[reportPrivateUsage] - the method that authors override


class _NoJson(Exception):  # noqa: N818 - never leaves this module
    """A tool returned a value that JSON cannot represent; the name of its type."""


def _dumped_json(value: Any) -> bytes:
    """Convert the value to JSON: models are dumped; any other value that JSON cannot represent is a failure of the
    tool.
    """
    try:
        return orjson.dumps(value, default=_dumped)
    except (TypeError, orjson.JSONEncodeError):
        raise _NoJson(type(value).__name__) from None


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, set | frozenset):
        return list(cast("Iterable[Any]", value))
    raise TypeError


def make(name: str, config: Json, site: Site) -> LangChainUpstream:
    """Make the connector of one upstream, not connected yet."""
    return LangChainUpstream(name, read_config(LangChainConfig, config), clock=site.clock, on_change=site.changed)
