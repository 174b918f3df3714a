"""LangChain tools as an upstream: found in a Python module, run in this process, under Interlock's deadline.

The tools are the operator's own code, loaded when first needed. Plain functions run in threads of their own: one that
never ends occupies a thread of this upstream only, up to a bound, after which calls fail at once. No thread keeps the
process from ending. The message of an exception may contain anything, so only that of a ToolException, which is meant
for the model, is passed on; of any other only the type is given.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson
from pydantic import BaseModel, Field

from interlock.call.connector import Definition, Discovered, RemoteCall
from interlock.contract.manifest import Part
from interlock.core.clock import Clock
from interlock.core.errors import Failure
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
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# LangChain does not describe a tool's result: mostly text, and any JSON in general.
RESULT_SCHEMA: Json = {
    "type": ["string", "object", "array", "number", "boolean", "null"],
    "description": "What the tool returned: text, or the data it is made of.",
}


class LangChainConfig(Part):
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
        self._tools: dict[str, BaseTool] | None = None
        self._digests: dict[str, str] = {}

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return {"kind": "function_calling", "function_name": native["tool"], **reported}

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        tools: list[Definition] = []
        refused: list[tuple[str, str]] = []
        for name, tool in (await self._loaded(again=True)).items():
            if (lacking := _lacking(tool)) is not None:
                refused.append((name, lacking))
                continue
            try:
                tools.append(_definition(self._module, tool))
            except Exception as error:  # noqa: BLE001 - schemas are made by the author's types, which may raise anything
                refused.append((name, f"its input has no JSON Schema: {type(error).__name__}"))
        return Discovered(tools, refused, {"module": self._module})

    async def call(self, call: RemoteCall) -> Any:
        name = str(call.native.get("tool"))
        tool = (await self._loaded()).get(name)
        if tool is None:
            raise Failure("E3502", f"`{name}` is no longer in `{self._module}`; look at `{self._name}` again")
        # INVARIANT: a call reaches only the definition that was admitted.
        if call.definition is not None and self._digest(tool) != call.definition:
            self._on_change()
            words = f"`{name}` is not what was admitted: `{self._module}` describes it otherwise now"
            details = {"sent": False, "upstream": self._name}
            raise Failure("E3210", words, details=details, resolution=wire.look_at(self._name))
        from langchain_core.tools import ToolException

        # Tools that return their errors to the model as results would count as successes.
        bare = tool.model_copy(update={"handle_tool_error": False, "handle_validation_error": False})
        lent = {name: call.credentials[secret] for name, secret in self._lent.items() if secret in call.credentials}
        known = {"credentials": lent, "invocation_id": call.invocation_id, "key": call.key}
        config: Any = {"configurable": known, "callbacks": []}
        limit = asyncio.timeout(call.left_s)
        try:
            async with limit:
                if _is_plain(bare):
                    data = await self._threads.run(lambda: _dumped_json(bare.invoke(dict(call.arguments), config)))
                else:
                    data = _dumped_json(await bare.ainvoke(dict(call.arguments), config))
                return await self._intake.json(data)
        except Failure:
            raise
        except _NoJson as error:
            raise Failure("E3401", f"`{name}` returned a {error}, which JSON cannot hold") from None
        except ToolException as error:
            raise Failure("E3401", f"`{name}` failed: {wire.excerpt(str(error), call)}") from None
        except Exception as error:  # noqa: BLE001 - the edge of somebody else's code
            if limit.expired():
                raise Failure("E3503", f"`{name}` gave no answer in time") from None
            raise Failure("E3401", f"`{name}` failed with {type(error).__name__}") from None

    def _digest(self, tool: BaseTool) -> str:
        if tool.name not in self._digests:
            try:
                self._digests[tool.name] = definition_digest(_definition(self._module, tool))
            except Exception:  # noqa: BLE001 - schemas are made by the author's types, which may raise anything
                self._digests[tool.name] = ""
        return self._digests[tool.name]

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        try:
            await self._loaded()
        except Failure as failure:
            raise Failure("E3502", failure.message) from None

    async def close(self) -> None:
        self._tools = None

    async def _loaded(self, *, again: bool = False) -> dict[str, BaseTool]:
        if self._tools is None or again:
            # Importing may take long, so it does not block the loop.
            self._tools, self._digests = await self._threads.run(partial(_load, self._module)), {}
        return self._tools


def _load(name: str) -> dict[str, BaseTool]:
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
    return dict(sorted(tools.items()))


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
            except BaseException as raised:  # noqa: BLE001 - told to whoever waits
                error = raised
            with suppress(RuntimeError):  # the loop has ended, and nothing waits
                loop.call_soon_threadsafe(done, value, error)

        self._running += 1
        run = partial(contextvars.copy_context().run, body)
        threading.Thread(target=run, name=f"interlock-langchain-{self._name}", daemon=True).start()
        value, error = await outcome
        if error is None:
            return cast("T", value)
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        raise RuntimeError(type(error).__name__)  # SystemExit and the like end a call, not the server


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
