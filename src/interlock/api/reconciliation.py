"""Operations on calls whose outcome is unknown: list them, and settle one as a person decided who looked."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from interlock.api.rights import require_here
from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.data.explain import input_faults
from interlock.gateway.reconcile import SCOPE, UnknownCall, reconcile, unknown_calls
from interlock.store import ledger

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json


class Reconciliation:
    """Lists and settles calls whose outcome is unknown, for callers with `calls:reconcile`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def unknown(self, *, by: Caller) -> list[Json]:
        """Every call that a person must decide on, oldest first. Without a token, the caller reads their own files."""
        if by.capability is not None:
            require_here(by, SCOPE, "listing calls of unknown outcome")
        return [one.document() for one in await unknown_calls(self._parts.journal)]

    async def settle(self, call_id: str, *, by: Caller, happened: bool, result: Any = None, stated: bool) -> Json:
        """Settle a call. If it happened, its key answers with the result from now on; if not, the key is free.

        `stated` says whether a result was given. E3004 for one that the tool could not have returned, and for none
        where the tool returns something.
        """
        require_here(by, SCOPE, "settling a call")
        if stated and not happened:
            raise Failure("E3004", "a result is stated of a call that happened only")
        parts = self._parts
        found = next((one for one in await unknown_calls(parts.journal) if one.call == call_id), None)
        if found is None:
            raise Failure("E3702", f"no call `{call_id}` waits to be settled; see interlock calls reconcile")
        if happened:
            await self._check_result(found, result, stated=stated)
        seal = parts.storage.outcomes.seal
        await reconcile(parts.journal, by, call_id, seal=seal, happened=happened, value=result)
        return {**found.document(), "happened": happened, "result": result, "by": by.acting}

    async def _check_result(self, one: UnknownCall, value: Any, *, stated: bool) -> None:
        """Refuse (E3004) a result that the tool could not have given: it is replayed as the tool's own."""
        if not stated and await self._operation(one.call) == "compensate":
            return  # the undoing of a call returns nothing
        try:
            schema = (await self._parts.catalog.versions(one.tool))[one.version].contract.output
        except (KeyError, Failure):
            return  # the version is gone from the registry; the person's word stands
        faults = await WALKS.run(partial(input_faults, schema, value, "field of the result"))
        if not faults:
            return
        tool = f"{one.tool}@{one.version}"
        if not stated:
            words = f"{tool} returns something; say what it was, as its idempotency key will answer with it"
            raise Failure("E3004", words, resolution="add the result: --result JSON, or `result` in the request")
        listing = "; ".join(f"{fault.pointer.lstrip('/') or 'result'}: {fault.message}" for fault in faults[:5])
        raise Failure(
            "E3004",
            f"{tool} could not have returned that: {listing}",
            details={"faults": [fault.document() for fault in faults]},
            resolution=f"write the result as the tool would have given it: interlock tools show {one.tool}",
        )

    async def _operation(self, call_id: str) -> str:
        first = await self._parts.journal.read(lambda reader: ledger.first_of_call(reader, call_id))
        return "" if first is None else str(orjson.loads(first).get("operation"))
