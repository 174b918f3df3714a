"""Phase 5. The result fits its contract and the effect is what the tool says it is, or nobody hears of success."""

from __future__ import annotations

from typing import Any

from interlock.call.phases import Ran
from interlock.call.prepared import Prepared
from interlock.core.errors import Failure
from interlock.data.bounds import LARGE, result_too_large, size_of
from interlock.data.coerce import coerce
from interlock.data.explain import output_faults
from interlock.data.schema import Fault, Json
from interlock.gateway.handlers import consult, faults_by


def is_small(output: Any) -> bool:
    """Whether an output can be checked, redacted and encoded on the event loop without holding others up."""
    return size_of(output, LARGE, steps=10_000) <= LARGE


def map_output(tool: Prepared, output: Any, most: int) -> Any:
    """The output as JSON data, checked against the output schema. Done exactly once per call.

    Refused (E3416) if it takes more than `most` bytes as JSON: that is estimated before anything else looks at it.
    What is no data at all (TOOL_OUTPUT_CORRUPTION) is told apart from data that breaks the contract.
    """
    check_size(tool, output, most)
    try:
        # What ran isolated was written down inside already.
        value = output
        if tool.dump is not None and not tool.isolated:
            value = tool.dump(output)
            check_size(tool, value, most)
        if tool.fits_output(value):
            return value
    except Failure:
        raise
    except Exception as error:  # a value its own type cannot write down breaks the contract as surely as a wrong one
        faults = [Fault("", f"cannot be written as JSON: {type(error).__name__}")]
        raise _violation(tool, faults, "TOOL_OUTPUT_CORRUPTION") from error
    schema = tool.contract.output
    if tool.contract.manifest.coerce_output:
        coerced = coerce(schema, value)
        if schema.valid(coerced.value):
            return coerced.value
    raise _violation(tool, output_faults(schema, value))


def check_size(tool: Prepared, value: Any, most: int) -> None:
    """Refuse (E3416) what takes more than `most` bytes as JSON."""
    if size_of(value, most) > most:
        raise result_too_large(tool.ref, most, writes=tool.writes)


def _violation(tool: Prepared, faults: list[Fault], what: str = "TOOL_OUTPUT_SCHEMA_VIOLATION") -> Failure:
    return Failure(
        "E3303",
        f"{tool.ref} returned something its contract does not allow",
        details={"violation": what, "faults": [fault.document() for fault in faults]},
    )


async def confirm_effects(tool: Prepared, ran: Ran, value: Any, left_s: float) -> None:
    """Check what the tool attested, and ask its own verifier whether the change happened."""
    faults: list[Json] = [
        {"what": attestation.what, "message": "what was found is not what the tool claimed"}
        for attestation in ran.more.attestations
        if await consult(attestation.observe, left_s) != attestation.claimed
    ]
    verifier = tool.handler("verify")
    if verifier is not None:
        found = await faults_by(verifier, left_s, arguments=ran.input, result=value)
        faults.extend({"what": "verify", "message": fault.message} for fault in found)
    if faults:
        raise Failure(
            "E3417",
            f"{tool.ref} reported success, but its effect could not be confirmed",
            details={"violation": "SIDE_EFFECT_INCONSISTENCY", "faults": faults},
        )
