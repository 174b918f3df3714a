"""Inputs that a reviewer edited: checked like the caller's own, with every difference recorded."""

from __future__ import annotations

from typing import cast

from interlock.call.phases import Checked, Requested
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.canonical import digest, private_copy
from interlock.data.schema import Json
from interlock.gateway import input_checks
from interlock.gateway.hooks import Hooks
from interlock.gateway.inputs import difference


class EditedInputs:
    """Replaces the inputs of calls by those that their reviewers wrote."""

    def __init__(self, hooks: Hooks, clock: Clock) -> None:
        self._hooks = hooks
        self._clock = clock

    async def apply(self, checked: Checked, edited: Json, by: str, agreed: str | None) -> Checked:
        """Return the call with the input that the reviewer wrote: checked like the caller's own, differences recorded.

        The hooks run on it as they ran on the caller's input. `agreed` is the digest of the input after the hooks when
        it was approved.
        """
        requested = cast("Requested", checked)
        call, before = requested, checked.input
        recorded = len(call.more.mutations)
        arguments = input_checks.check_input(requested, private_copy(edited))
        del call.extend().mutations[recorded:]
        await self._check_meaning(checked, arguments)
        if self._hooks.registered:
            written, arguments = arguments, await self._hooks.before(requested, arguments, reviewer=by)
            if arguments != written:
                await self._check_meaning(checked, arguments)
        # INVARIANT: what runs is what the reviewer was shown.
        if agreed is not None and digest(arguments) != agreed:
            raise Failure(
                "E3211",
                "hooks make something else of the reviewer's input now than when the reviewer agreed to it",
                resolution="send the call again under a new key, so that a person decides again",
            )
        # The inputs are compared as a whole. Conversions and defaults of the reviewer's input count as the reviewer's.
        hooked = {change.pointer: change.source for change in call.more.mutations[recorded:]}
        changes = difference(f"reviewer:{by}", before, arguments)
        call.extend().mutations[recorded:] = [
            one._replace(source=hooked.get(one.pointer, one.source)) for one in changes
        ]
        call.input = arguments
        return checked

    async def _check_meaning(self, checked: Checked, arguments: Json) -> None:
        requested = checked
        if requested.tool.has_checks:
            await input_checks.check_meaning(requested.tool, arguments, requested.deadline - self._clock.monotonic())
