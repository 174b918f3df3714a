"""Ids that clients choose and get back: the ids of JSON-RPC and MCP requests, and progress tokens.

They are in every answer, in events and on record, so their size is bounded.
"""

from __future__ import annotations

from typing import Any, Final, cast

import orjson

from interlock.core.errors import Failure
from interlock.data.canonical import may_hold_long_number
from interlock.data.schema import Json

LONGEST: Final = 256
RULE: Final = f"a string of at most {LONGEST} characters or an integer of 64 bits"
_LEAST, _MOST = -(2**63), 2**63 - 1


def usable(given: Any) -> bool:
    """Whether an id can be sent back."""
    if given.__class__ is int:
        return _LEAST <= given <= _MOST
    return given.__class__ is str and len(given) <= LONGEST


def check_text(body: bytes) -> None:
    """Refuse (E3004) a JSON-RPC message with an id or a progress token that is too long. Nothing else is checked."""
    if len(body) <= LONGEST and not may_hold_long_number(body):
        return
    try:
        message: Any = orjson.loads(body)
    except ValueError:
        return  # no message at all; its reader says so
    if isinstance(message, dict):
        check(cast("Json", message).get("id"), cast("Json", message).get("params"))


def check(request_id: Any, params: Any) -> None:
    """Refuse (E3004) an id or a progress token that is too long. One of another type is for the protocol to refuse."""
    meta: Any = cast("Json", params).get("_meta") if isinstance(params, dict) else None
    token: Any = cast("Json", meta).get("progressToken") if isinstance(meta, dict) else None
    for name, given in (("id", request_id), ("progressToken", token)):
        # orjson reads an integer of more than 64 bits as a double. No id has a fraction, either.
        if given.__class__ in (int, str, float) and not usable(given):
            raise Failure("E3004", f"`{name}` must be {RULE}", resolution="number your requests, or use short ids")
