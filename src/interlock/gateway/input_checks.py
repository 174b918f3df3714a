"""Checks of an input: against the contract, the idempotency key, and by the tool's own checks."""

from __future__ import annotations

import copy
from decimal import Decimal, InvalidOperation
from typing import Any

from interlock.call.endpoints import key_example, no_identity
from interlock.call.phases import ABSENT, Mutated, Request, Requested
from interlock.call.prepared import Prepared
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.coerce import Coerced, coerce
from interlock.data.defaults import DefaultPlan
from interlock.data.explain import input_faults
from interlock.data.fragments import attacks
from interlock.data.schema import Fault, Json, pointer
from interlock.gateway.handlers import faults_by

# So many conversions of an input are recorded one by one. The rest are recorded by the member they lie in, or, if these
# are as many, as one change of the whole input.
MOST_RECORDED = 1000
_KEY = expression(r"[\x21-\x7e]{1,255}\Z")


def check_input(requested: Requested, given: Json) -> Json:
    """Return the arguments with text converted and defaults filled in. A refusal has one entry per fault."""
    tool, call = requested.tool, requested
    key = call.request.key
    wrong_key = tool.key_required if key is None else _KEY.match(key) is None
    faults = _key_faults(tool, call.request) if wrong_key else []
    arguments = given
    try:
        fits = tool.fits_input(given)
    except (ValueError, TypeError, OverflowError, RecursionError):
        fits = False
    if not fits:
        arguments = _coerced(requested, given, faults)
    if faults:
        raise _refusal(tool, faults, "E3307")
    if tool.inner_defaults is not None:
        arguments = _with_inner_defaults(requested, tool.inner_defaults, arguments)
    for name, default in tool.defaults:
        if name not in arguments:
            arguments = {**arguments, name: copy.deepcopy(default)}
            call.extend().mutations.append(Mutated("default", pointer([name]), ABSENT, default))
    return arguments


def _with_inner_defaults(requested: Requested, plan: DefaultPlan, given: Json) -> Json:
    """Return the arguments with the defaults that objects in them lack.

    Fills in no default if the arguments would then not fit the schema, or if there are too many defaults to record.
    """
    arguments, filled = plan.fill(given)
    if not filled:
        return given
    call = requested
    if len(filled) > MOST_RECORDED:
        call.extend().warnings.append(f"INPUT_DEFAULTS_OMITTED count={len(filled)}")
        return given
    if not requested.tool.contract.input.valid({**dict(requested.tool.defaults), **arguments}):
        return given
    call.extend().mutations.extend(Mutated("default", place, ABSENT, default) for place, default in filled)
    return arguments


def check_key(requested: Requested) -> None:
    """Refuse (E3307) an idempotency key that is missing or malformed, for a call whose input needs no check."""
    faults = _key_faults(requested.tool, requested.request)
    if faults:
        raise _refusal(requested.tool, faults, "E3307")


def _coerced(requested: Requested, given: Json, faults: list[Fault]) -> Json:
    """Return the arguments with their text converted, if that makes them fit."""
    tool = requested.tool
    coerced = coerce(tool.facing, given)
    wrong = input_faults(tool.facing, coerced.value)
    if wrong:
        raise _refusal(tool, wrong + faults, _code(tool.facing.errors(coerced.value)))
    call, changes = requested, coerced.changes
    call.extend().mutations.extend(Mutated("coercion", *change) for change in changes[:MOST_RECORDED])
    if len(changes) > MOST_RECORDED:
        call.extend().mutations.extend(_together(given, coerced))
        call.extend().warnings.append(f"INPUT_MUTATIONS_OMITTED count={len(changes) - MOST_RECORDED}")
    return coerced.value


def _together(given: Json, coerced: Coerced) -> list[Mutated]:
    """Return the conversions beyond the first ones as changes of whole members.

    INVARIANT: every difference is recorded.
    """
    members = dict.fromkeys(change.pointer.split("/", 2)[1] for change in coerced.changes[MOST_RECORDED:])
    if len(members) > MOST_RECORDED:
        return [Mutated("coercion", "", given, coerced.value)]
    names = {name: name.replace("~1", "/").replace("~0", "~") for name in members}
    return [Mutated("coercion", f"/{at}", given[name], coerced.value[name]) for at, name in names.items()]


def _key_faults(tool: Prepared, request: Request) -> list[Fault]:
    key = request.key
    if key is None:
        if request.dry_run:
            return []
        example = key_example(request.door)
        words = f"missing; a call that changes something needs a key of your own, say {example}"
        if tool.key_from == "request":
            words = no_identity(request.door) or words
        return [Fault("/idempotencyKey", words)]
    if _KEY.match(key):
        return []
    return [Fault("/idempotencyKey", "a key has 1 to 255 visible ASCII characters and no spaces")]


def _code(errors: list[Any]) -> str:
    """Return E3302 if text is a number that the type cannot hold without loss; otherwise E3301."""
    lossy = any(error.kind.name == "type" and _is_number(error.instance) for error in errors)
    return "E3302" if lossy else "E3301"


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and Decimal(value).is_finite()
    except InvalidOperation:
        return False


def _refusal(tool: Prepared, faults: list[Fault], code: str) -> Failure:
    listing = "; ".join(f"{fault.pointer.lstrip('/') or 'input'}: {fault.message}" for fault in faults[:10])
    return Failure(code, listing, details={"faults": [fault.document() for fault in faults], "tool": tool.ref})


async def check_meaning(tool: Prepared, arguments: Json, left_s: float) -> None:
    """Check what a schema cannot express: fragments first, then the tool's own `check`, then its `preflight`.

    Nothing has been executed yet.
    """
    wrong = attacks(tool.contract.input, arguments) if tool.has_fragments else []
    if wrong:
        raise _refusal(tool, wrong, "E3305")
    for name in ("check", "preflight"):
        handler = tool.handler(name)
        if handler is None:
            continue
        faults = await faults_by(handler, left_s, **arguments)
        if faults:
            raise _refusal(tool, faults, "E3308")
