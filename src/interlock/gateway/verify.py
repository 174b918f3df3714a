"""Phase 5. The result fits its contract and the effect is what the tool says it is, or nobody hears of success."""

from __future__ import annotations

import inspect
from typing import Any

import orjson

from interlock.core.coerce import coerce
from interlock.core.errors import Failure
from interlock.core.explain import output_faults
from interlock.core.phases import Ran, Verified
from interlock.core.redact import SchemaRedactor
from interlock.core.schema import Fault, Json
from interlock.registry.catalog import Version


def map_output(version: Version, output: Any) -> Any:
    """The output as JSON data, checked against the output schema. Done exactly once per call."""
    dump = version.bound.dump
    try:
        value = output if dump is None else dump(output)
    except Exception as error:  # a value its own type cannot write down breaks the contract as surely as a wrong one
        raise _violation(version, [Fault("", f"cannot be written as JSON: {type(error).__name__}")]) from error
    schema = version.contract.output
    if not schema.valid(value):
        if version.contract.manifest.coerce_output:
            coerced = coerce(schema, value)
            if schema.valid(coerced.value):
                return coerced.value
        raise _violation(version, output_faults(schema, value))
    return value


def _violation(version: Version, faults: list[Fault]) -> Failure:
    return Failure(
        "E3303",
        f"{version.ref} returned something its contract does not allow",
        details={"violation": "TOOL_OUTPUT_SCHEMA_VIOLATION", "faults": [fault.document() for fault in faults]},
    )


async def confirm_effects(version: Version, ran: Ran, value: Any) -> None:
    """Check what the tool attested, and ask its own verifier whether the change happened."""
    faults: list[Json] = []
    for attestation in ran.attestations:
        observed = attestation.observe()
        if inspect.isawaitable(observed):
            observed = await observed
        if observed != attestation.claimed:
            faults.append({"what": attestation.what, "message": "what was found is not what the tool claimed"})
    verifier = version.handler("verify")
    if verifier is not None:
        found = verifier(arguments=ran.granted.checked.call_input, result=value)
        if inspect.isawaitable(found):
            found = await found
        faults.extend({"what": "verify", "message": str(fault)} for fault in found or ())
    if faults:
        raise Failure(
            "E3417",
            f"{version.ref} reported success, but its effect could not be confirmed",
            details={"violation": "SIDE_EFFECT_INCONSISTENCY", "faults": faults},
        )


def redact(ran: Ran, value: Any, redactor: SchemaRedactor) -> Verified:
    """The verified result with nothing in it that its reader may not see."""
    if redactor.trivial:
        return Verified(ran=ran, value=value, encoded=_encode(value))
    caller = ran.granted.checked.requested.call.request.caller
    shown = redactor.apply(value, disclose=caller.scopes if caller else frozenset())
    return Verified(ran=ran, value=shown.value, encoded=_encode(shown.value), redacted=tuple(shown.paths))


def _encode(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # whole numbers beyond 64 bits
        import json

        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
