"""Calls are held to the schemas of contracts: each keyword and format, at its bound and one step beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Field, Interlock, tool
from tests.support.calls import admit, code
from tests.support.keywords import KEYWORDS

# What a type says is converted before it is checked, so that its cases are those of conversion.
CASES = [pytest.param(*case, id=name) for name, case in KEYWORDS.items() if not name.startswith("type ")]


@pytest.mark.supports("VALID-01")
@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize(("part", "inside", "boundary", "outside"), CASES)
async def test_a_call_takes_each_keyword_and_format_at_its_bound_and_is_refused_one_step_beyond(
    home: Path, part: dict[str, Any], inside: Any, boundary: Any, outside: Any
) -> None:
    taken: list[Any] = []

    async def takes(field: Any) -> bool:
        """Take one value and remember it."""
        taken.append(field)
        return True

    field = Field(description="a value", examples=[inside], json_schema_extra=part)
    takes.__annotations__["field"] = Annotated[Any, field]
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, tool(version="1.0.0", mutation_class="read_only", namespace="bounds")(takes))
        assert (await app.catalog.resolve("bounds.takes")).contract.input.properties["field"].items() >= part.items()
        for value in (inside, boundary):
            assert (await app.call("bounds.takes", field=value)).ok
        assert taken == [inside, boundary]
        refused = await app.call("bounds.takes", field=outside)
        assert code(refused) == "E3301"
        assert refused.error is not None
        details: Any = refused.error.details
        assert [fault["pointer"] for fault in details["faults"]] == ["/field"]
        assert taken == [inside, boundary]
