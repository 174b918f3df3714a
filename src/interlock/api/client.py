"""Calls tools in this process by their functions, with the types of the functions.

A call has the parameters of the function and returns its type, so that pyright and mypy find wrong arguments and wrong
uses of the result. Python's types cannot mix the parameters of a function with further ones, so the options of a call,
such as the idempotency key, are set beforehand with `using`.

    client = Client(app)
    balance = await client.call(balance_of, account="cash")                     # int
    entry = await client.using(key="order-17").call(post, "cash", cents=250)    # Entry
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from interlock.api.requests import by_name

if TYPE_CHECKING:
    from interlock.call.context import Caller, Context
    from interlock.call.results import Result
    from interlock.contract.declare import Tool
    from interlock.core.clock import Deadline
    from interlock.data.schema import Json

P = ParamSpec("P")
T = TypeVar("T")


class CallOptions(TypedDict, total=False):
    """Options of a call, as `Interlock.call` has them."""

    key: str | None
    session: str
    version: str | None
    timeout_s: float | None
    deadline: Deadline | None
    dry_run: bool
    caller: Caller | None
    token: str | None
    task: str | None
    trace_id: str | None
    native: Mapping[str, Any] | None
    on_progress: Callable[[Json], None] | None
    door: str


class Calling(Protocol):
    """Makes calls: an open data directory."""

    async def call(
        self, tool: Tool[..., Any], arguments: Mapping[str, Any] | None, /, **options: Unpack[CallOptions]
    ) -> Result: ...


class Client:
    """Typed calls of declared tools over one open data directory. They pass all six phases like any other call."""

    def __init__(self, app: Calling, options: CallOptions | None = None) -> None:
        self._app = app
        self._options: CallOptions = options or {}

    def using(self, **options: Unpack[CallOptions]) -> Client:
        """A client with these options for its calls, beside the options of this one."""
        return Client(self._app, {**self._options, **options})

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
        return (await self._run(tool, args, kwargs)).unwrap()

    @overload
    async def result(
        self, tool: Tool[Concatenate[Context, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result[T]: ...
    @overload
    async def result(
        self, tool: Tool[Concatenate[Context, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result[T]: ...
    @overload
    async def result(
        self, tool: Tool[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result[T]: ...
    @overload
    async def result(self, tool: Tool[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Result[T]: ...
    async def result(self, tool: Any, /, *args: Any, **kwargs: Any) -> Result[Any]:
        """Call a tool, and return the whole result, of a failure too. Its `value` is JSON data."""
        return await self._run(tool, args, kwargs)

    async def _run(self, tool: Tool[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result[Any]:
        return await self._app.call(tool, by_name(tool, args, kwargs), **self._options)
