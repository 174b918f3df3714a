"""Results of OpenAPI operations whose schemas are too large for their tools: checked against the document.

In some documents most responses lead, from reference to reference, to nearly everything that is defined. The schemas of
all results are therefore compiled once, as one schema with the definitions that they share: an object with one member,
the result, under the digest that its tool holds (`native["whole_result"]`). The document is read when a result needs
it: the one of the configuration, or the one at its address. A digest that it does not have is that of another
description.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from interlock.call.connector import RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.explain import faults_below
from interlock.data.schema import Fault, Json, compile_validator
from interlock.upstreams.response_limits import in_thread
from interlock.upstreams.schemas import cleaned

IN_PART = "RESULT_CHECKED_IN_PART"
# How long a document that could not be read is left alone.
_PAUSE_S = 60.0


class WholeResults:
    """Checks results. `read` returns the schemas of the document, with the credentials of a call."""

    def __init__(self, read: Callable[[RemoteCall], Awaitable[Json]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._reading = asyncio.Lock()
        self._validator: Any = None
        self._keys: frozenset[str] = frozenset()
        self._again_at = 0.0

    def forget(self) -> None:
        """Read the document again when it is needed next."""
        self._validator, self._again_at = None, 0.0

    async def check(self, call: RemoteCall, value: Any) -> None:
        """Note the faults of a result in its call. If the document cannot say them, its warnings say so.

        Raises nothing: the call was made, and what its tool holds of the schema is checked in any case.
        """
        key = call.native["whole_result"]
        if self._validator is None and self._clock.monotonic() >= self._again_at:
            async with self._reading:
                if self._validator is None:
                    await self._load(call)
        if self._validator is None or key not in self._keys:
            call.warnings.append(IN_PART)
            return
        call.faults.extend(await in_thread(_faults, self._validator, key, value))

    async def _load(self, call: RemoteCall) -> None:
        try:
            async with asyncio.timeout(call.left_s):
                schemas = await self._read(call)
                self._validator = await in_thread(compiled, schemas)
                self._keys = frozenset(schemas["properties"])
        except (Failure, TimeoutError):
            self._again_at = self._clock.monotonic() + _PAUSE_S


def compiled(schemas: Json) -> Any:
    """Return the validator of the schemas of a document; E3105 if they cannot be used."""
    return compile_validator(cleaned(schemas, "output"))


def _faults(validator: Any, key: str, value: Any) -> list[Fault]:
    whole = {key: value}
    return [] if validator.is_valid(whole) else faults_below(validator.iter_errors(whole), 1)
