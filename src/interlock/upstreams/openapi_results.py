"""Results of OpenAPI operations whose schemas are too large for their tools: checked against the document.

In some documents most responses lead, from reference to reference, to nearly everything that is defined. The schemas of
all results are therefore compiled once, as one schema with the definitions that they share: an object with one member,
the result, under the digest that its tool holds (`native["whole_result"]`). The document is read when a result needs
it: the one of the configuration, or the one at its address. If the document lacks the
digest, its description of the result has changed since the tool was admitted.

A call waits for the document for at most half of the time it has left. The upstream has already run it, so a service
that does not return its document must not make the outcome of a write unknown. Reading goes on after the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from interlock.call.connector import RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.explain import output_faults
from interlock.data.schema import Json, Schema
from interlock.upstreams.response_limits import in_thread
from interlock.upstreams.schemas import cleaned

_log = logging.getLogger("interlock.upstreams")

IN_PART = "RESULT_CHECKED_IN_PART"
# How long to wait before a document that could not be read is tried again.
_PAUSE_S = 60.0
# How long a call waits for the document at most, which is never more than half of the time that it has left.
_PATIENCE_S = 10.0


class WholeResults:
    """Checks results. `read` returns the schemas of the document, with the credentials of a call."""

    def __init__(self, read: Callable[[RemoteCall], Awaitable[Json]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._reading: asyncio.Task[None] | None = None
        self._schema: Schema | None = None
        self._again_at = 0.0

    def forget(self) -> None:
        """Read the document again when it is needed next."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading, self._schema, self._again_at = None, None, 0.0

    async def close(self) -> None:
        """End a read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))

    async def check(self, call: RemoteCall, value: Any) -> None:
        """Add the faults of a result to its call, or the warning `IN_PART` if the whole schema cannot be had.

        Raises nothing: the call was made, and what its tool holds of the schema is checked in any case.
        """
        key = call.native["whole_result"]
        if self._schema is None and self._clock.monotonic() >= self._again_at:
            if self._reading is None:
                self._reading = asyncio.create_task(self._load(call))
            reading = self._reading
            await asyncio.wait((reading,), timeout=min(_PATIENCE_S, call.left_s / 2))
            if not reading.done():
                self._again_at = self._clock.monotonic() + _PAUSE_S  # nor do others wait for it
        schema = self._schema
        if schema is None or key not in schema.properties:
            call.warnings.append(IN_PART)
            return
        call.faults.extend(await in_thread(partial(output_faults, schema, {key: value}, below=1)))

    async def _load(self, call: RemoteCall) -> None:
        try:
            self._schema = await in_thread(compiled, await self._read(call))
        except Exception as error:  # noqa: BLE001 - of a document that somebody else wrote; no call fails because of it
            self._again_at = self._clock.monotonic() + _PAUSE_S
            words = error.message if isinstance(error, Failure) else type(error).__name__
            _log.warning("results of OpenAPI operations are checked in part, without their document: %s", words)
        finally:
            if self._reading is asyncio.current_task():
                self._reading = None


def compiled(schemas: Json) -> Schema:
    """Return the schemas of a document, ready to check results by; E3105 if they cannot be used."""
    schema = Schema(cleaned(schemas, "output"), shared=True)
    schema.errors(None)  # compiles it
    return schema
