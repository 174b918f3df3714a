"""Turn the output of a tool into JSON data that fits its contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from interlock.call.prepared import Prepared
from interlock.core.errors import Failure
from interlock.data.bounds import LARGE, result_too_large, size_of
from interlock.data.coerce import coerce
from interlock.data.explain import output_faults
from interlock.data.schema import Fault

# An output of at most LARGE bytes is checked, redacted and encoded on the event loop, which delays no other calls. One
# that is not plain data must also have at most so many values.
MOST_STEPS = 10_000


def map_output(tool: Prepared, output: Any, most: int, *, small: bool = False) -> Any:
    """Return the output as JSON data, checked against the output schema. Done exactly once per call.

    Refused (E3416) if it takes more than `most` bytes as JSON, which is estimated before anything else is done with it.
    The size of a `small` output was estimated already.
    The failure tells output that cannot be encoded at all (TOOL_OUTPUT_CORRUPTION) from data that breaks the contract.
    """
    if not small or most < LARGE:
        check_size(tool, output, most)
    try:
        # The output of an isolated tool was encoded inside the sandbox already.
        value = output
        if tool.dump is not None and not tool.isolated:
            value = tool.dump(output)
            check_size(tool, value, most)
        if (tool.fits_fast is not None and tool.fits_fast(value)) or tool.contract.output.fits(value):
            return value
    except Failure:
        raise
    except Exception as error:  # a value that its own type cannot encode breaks the contract like a wrong one
        faults = [Fault("", f"cannot be written as JSON: {type(error).__name__}")]
        raise violation(tool, faults, "TOOL_OUTPUT_CORRUPTION") from error
    schema = tool.contract.output
    if tool.contract.manifest.coerce_output:
        coerced = coerce(schema, value)
        if schema.valid(coerced.value):
            return coerced.value
    raise violation(tool, output_faults(schema, value))


def check_part(tool: Prepared, value: Any, *, whole: bool) -> None:
    """Refuse (E3303) a value sent before the result that the output schema does not allow: as a part of a result, or,
    if it can be used as it is, as a whole one.
    """
    schema = tool.contract.output if whole else tool.contract.output.piece
    try:
        fits = schema.fits(value)
    except Exception as error:
        faults = [Fault("", f"cannot be written as JSON: {type(error).__name__}")]
        raise violation(tool, faults, "TOOL_OUTPUT_CORRUPTION") from error
    if not fits:
        raise violation(tool, output_faults(schema, value))


def check_size(tool: Prepared, value: Any, most: int) -> None:
    """Refuse (E3416) a value that takes more than `most` bytes as JSON."""
    if size_of(value, most) > most:
        raise result_too_large(tool.ref, most, writes=tool.writes)


def violation(tool: Prepared, faults: Sequence[Fault], what: str = "TOOL_OUTPUT_SCHEMA_VIOLATION") -> Failure:
    """Return the failure (E3303) of a call whose output has these faults."""
    return Failure(
        "E3303",
        f"{tool.ref} returned something its contract does not allow",
        details={"violation": what, "faults": [fault.document() for fault in faults]},
    )
