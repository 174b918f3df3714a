"""Phase 2. The input fits the contract, or the answer says everything that is wrong with it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

from interlock.core.coerce import coerce
from interlock.core.errors import Failure
from interlock.core.explain import input_faults
from interlock.core.phases import Checked, Mutated, Requested
from interlock.core.schema import Fault, Json, pointer
from interlock.registry.catalog import Version

_KEY = re.compile(r"[\x21-\x7e]{1,255}\Z")


def check_input(requested: Requested, version: Version) -> Json:
    """The arguments with text converted and defaults filled; refuses with one entry per fault."""
    call = requested.call
    given: Any = call.request.arguments
    faults = _key_faults(requested, version)
    schema = version.facing
    arguments: Json = given
    if not schema.valid(given):
        coerced = coerce(schema, given)
        arguments = coerced.value
        wrong = _supplied_internal(version, given) or input_faults(schema, arguments)
        if wrong:
            raise _refusal(version, wrong + faults, _code(schema.errors(arguments)))
        call.mutations.extend(Mutated("coercion", *change) for change in coerced.changes)
    if faults:
        raise _refusal(version, faults, "E3307")
    missing = [(name, default) for name, default in version.contract.input.defaults if name not in arguments]
    if missing:
        arguments = dict(arguments)
        for name, default in missing:
            arguments[name] = copy.deepcopy(default)
            call.mutations.append(Mutated("default", pointer([name]), None, default))
    return arguments


def _key_faults(requested: Requested, version: Version) -> list[Fault]:
    request = requested.call.request
    key = request.key
    if key is None:
        if version.contract.idempotency.key_required and not request.dry_run:
            return [
                Fault("/idempotencyKey", "missing; a call that changes something needs a key of your own, say order-17")
            ]
        return []
    if _KEY.match(key):
        return []
    return [Fault("/idempotencyKey", "a key has 1 to 255 visible ASCII characters and no spaces")]


def _supplied_internal(version: Version, given: Mapping[str, Any]) -> list[Fault]:
    # Not named: callers are not told which fields the runtime keeps to itself.
    internal = version.contract.input.internal
    return [Fault("", "a field that callers may not set was sent")] if internal & given.keys() else []


def _code(errors: list[Any]) -> str:
    """E3302 where text stands for a number that the type cannot hold without loss; otherwise E3301."""
    lossy = any(error.kind.name == "type" and _is_number(error.instance) for error in errors)
    return "E3302" if lossy else "E3301"


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and Decimal(value).is_finite()
    except InvalidOperation:
        return False


def _refusal(version: Version, faults: list[Fault], code: str) -> Failure:
    listing = "; ".join(f"{fault.pointer.lstrip('/') or 'input'}: {fault.message}" for fault in faults[:10])
    return Failure(code, listing, details={"faults": [fault.document() for fault in faults], "tool": version.ref})


async def check_meaning(version: Version, arguments: Json) -> None:
    """Run the tool's own checks: semantics first, then what must be there. Nothing has happened yet."""
    for name in ("check", "preflight"):
        handler = version.handler(name)
        if handler is None:
            continue
        found = handler(**arguments)
        if inspect.isawaitable(found):
            found = await found
        faults = [fault if isinstance(fault, Fault) else Fault("", str(fault)) for fault in found or ()]
        if faults:
            raise _refusal(version, faults, "E3308")


def seal(requested: Requested, arguments: Json, *, copied: bool) -> Checked:
    """The checked call. With `copied`, neither the caller nor a hook can reach what the tool will get."""
    sealed: Json = orjson.loads(orjson.dumps(arguments)) if copied else arguments
    return Checked(requested=requested, permission_input=sealed, call_input=sealed)
