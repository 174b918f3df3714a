"""Limit what a caller learns about a tool that they may not use."""

from __future__ import annotations

from interlock.call.capability import Capability
from interlock.call.context import Caller, ModelSurface
from interlock.call.phases import Call
from interlock.core.errors import Failure
from interlock.registry.catalog import Catalog


async def masked(call: Call, failure: Failure, catalog: Catalog) -> Failure:
    """Return the failure that the caller gets for a call that failed before it was authorized.

    INVARIANT: a caller who may not use a tool learns only that, and neither its schema nor its versions. A caller with
    a surface does not even learn that it exists.
    """
    caller = call.request.caller
    if caller is None or call.phases[-1] not in ("request", "validate"):
        return failure
    token, tool = caller.capability, call.tool
    if tool is None and caller.surface is not None:
        known = failure.code != "E3101" and await _may_know(call.request.tool, caller, caller.surface, catalog)
        return failure if known else await catalog.unknown(call.request.tool, token)
    if tool is None:
        return failure if token is None else await _unnamed(call.request.tool, token, catalog) or failure
    contract = tool.contract
    if token is not None and not token.covers(contract.address, contract.version):
        return Failure("E3204", f"the token does not name {contract.ref}")
    if lacking := sorted(set(tool.required_scopes) - caller.scopes):
        return Failure("E3206", f"{contract.ref} is not allowed: missing scope {', '.join(lacking)}")
    return failure


async def _may_know(name: str, caller: Caller, surface: ModelSurface, catalog: Catalog) -> bool:
    """Whether a caller may know of a tool that has no version for their call, or is not a tool at all."""
    try:
        address = await catalog.address(name, caller.capability)
        versions = await catalog.versions(address)
    except Failure:
        return True  # there is no such tool, or it cannot be looked up now
    if not versions:
        return True
    shown = (caller.covers(address, one.row.version, one.content.required_scopes) for one in versions.values())
    return not surface.hides(address) and any(shown)


async def _unnamed(name: str, token: Capability, catalog: Catalog) -> Failure | None:
    """Return the refusal of a tool that exists and that the token does not name in any version."""
    try:
        address = await catalog.address(name, token)
        if await catalog.versions(address) and not token.names(address):
            return Failure("E3204", f"the token does not name `{name}`")
    except Failure:
        pass  # there is no such tool, or it cannot be looked up now
    return None
