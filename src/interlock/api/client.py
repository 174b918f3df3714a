"""Calls tools in this process by their functions, with the types of the functions.

`Interlock.call` takes names, mappings and options, which no type checker can hold against a tool. Here a call has the
parameters of the function and returns its type, so that pyright and mypy find wrong arguments and wrong uses of the
result. Options of the call, such as the idempotency key, are set beforehand with `using`.

    client = Client(app)
    balance = await client.call(balance_of, account="cash")                     # int
    entry = await client.using(key="order-17").call(post, "cash", cents=250)    # Entry
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from pydantic_core import to_jsonable_python

from interlock.call.context import Context
from interlock.contract.declare import Tool

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.call.context import Caller
    from interlock.call.results import Result

P = ParamSpec("P")
T = TypeVar("T")


class Client:
    """Typed calls of declared tools over one open data directory. They pass all six phases like any other call."""

    def __init__(self, app: Interlock, options: Mapping[str, Any] | None = None) -> None:
        self._app = app
        self._options = dict(options or {})

    def using(
        self,
        *,
        key: str | None = None,
        session: str | None = None,
        timeout_s: float | None = None,
        caller: Caller | None = None,
        token: str | None = None,
        task: str | None = None,
    ) -> Client:
        """A client with these options for its calls, beside the options of this one."""
        given = {
            "key": key, "session": session, "timeout_s": timeout_s, "caller": caller, "token": token, "task": task,
        }  # fmt: skip
        return Client(self._app, self._options | {name: one for name, one in given.items() if one is not None})

    @overload
    async def call(
        self, tool: Tool[Concatenate[Context, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def call(self, tool: Tool[Concatenate[Context, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def call(self, tool: Tool[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def call(self, tool: Tool[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def call(self, tool: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a tool, and return its result as the function declares it; raises `Failure` if there is none.

        A call that waits for a person raises too (APPROVAL_REQUIRED): `result` returns it as it is.
        """
        value = (await self._run(tool, args, kwargs)).unwrap()
        return value if tool.load is None else tool.load(value)

    @overload
    async def result(
        self, tool: Tool[Concatenate[Context, P], Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result: ...
    @overload
    async def result(self, tool: Tool[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Result: ...
    async def result(self, tool: Any, /, *args: Any, **kwargs: Any) -> Result:
        """Call a tool, and return the whole result, of a failure too. Its `value` is JSON data."""
        return await self._run(tool, args, kwargs)

    async def _run(self, tool: Tool[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        names = [name for name in inspect.signature(tool.function).parameters if name != tool.context]
        if len(args) > len(names) or kwargs.keys() & set(names[: len(args)]):
            raise TypeError(f"{tool!r} takes {', '.join(names) or 'no arguments'}, each once")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        return await self._app.call(tool, to_jsonable_python(arguments), **self._options)
