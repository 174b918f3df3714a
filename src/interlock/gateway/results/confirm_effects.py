"""Check that a change happened: by what the tool attested, and by its own verifier."""

from __future__ import annotations

from typing import Any

from interlock.call.phases import Ran
from interlock.call.prepared import Prepared
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.gateway.handlers import consult, faults_by


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
