"""Decide where the result of a call is stored: in the answer itself, or as a payload that the answer refers to."""

from __future__ import annotations

from interlock.call.phases import Call, Verified
from interlock.call.prepared import Prepared
from interlock.call.results import INLINE, Persistence, without_private_fields
from interlock.core.threads import WALKS
from interlock.data.bounds import LARGE, is_longer, preview_chars
from interlock.data.canonical import digest


def persistence_of(verified: Verified, *, redacted: bool) -> Persistence:
    """Return what the result of a call says about itself: inline, `redacted`, or stored and referred to."""
    tool, size = verified.tool, len(verified.encoded)
    if tool.max_inline is None or not is_longer(verified.encoded, tool.max_inline):
        return without_private_fields(size) if redacted else INLINE
    return _stored(verified.id, size, tool)


def _stored(call_id: str, size: int, tool: Prepared) -> Persistence:
    ref = f"payload:{call_id}"
    if tool.private:
        return Persistence(
            decision="persist", ref=ref, size=size, reason="results of this tool are private", private=True
        )
    shown = preview_chars(tool.contract.manifest.max_inline_chars)
    return Persistence(decision="preview", ref=ref, size=size, reason="larger than max_inline_chars", shown=shown)


def payload_ref(call: Call, persistence: Persistence, size: int) -> str | None:
    """Return the payload that holds a result; None where the result stands in the row of its idempotency key.

    A large result that is returned inline becomes a payload for as long as the key lives: a row of that size would
    keep all other writers waiting.
    """
    if persistence.ref is None and call.more.scope is not None and size > LARGE:
        return f"payload:{call.id}"
    return persistence.ref


async def result_hash(verified: Verified) -> str:
    """Return the digest of a result. A large one is computed in a thread."""
    large = len(verified.encoded) > LARGE
    return await WALKS.run(digest, verified.value) if large else digest(verified.value)
