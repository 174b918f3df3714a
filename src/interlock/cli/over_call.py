"""Commands about one call of the caller's, found by its ID or the beginning of one."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from interlock.cli.command import acting, as_holder, over_home
from interlock.core.record import NamedTuple

if TYPE_CHECKING:
    from interlock.api.history import History
    from interlock.api.interlock import Interlock
    from interlock.call.context import Caller
    from interlock.cli.output import Output


class TargetCall(NamedTuple):
    """The call that a command is about, its caller, and the token that the command was given."""

    history: History
    caller: Caller
    token: str | None

    @property
    def call(self) -> str:
        """The whole ID of the call."""
        return self.history.call


def over_call(body: Callable[..., Awaitable[int]]) -> Callable[..., None]:
    """Make a command of a coroutine function on a call of the caller's. Adds --token; the argument is `call_id`."""

    @as_holder
    @over_home
    @functools.wraps(body)
    async def run(app: Interlock, out: Output, /, call_id: str, token: str | None, **given: Any) -> int:
        from interlock.api.history import find

        caller = await acting(app, token)
        return await body(app, out, TargetCall(await find(app, call_id, caller), caller, token), **given)

    return run
