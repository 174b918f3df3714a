"""Values that not everybody may see."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel

from interlock import Field, tool
from tests.sample import Text

CANARY = "Quux-7731-canary"


class Person(BaseModel):
    name: str
    mail: Annotated[str, Field(json_schema_extra={"x-sensitivity": "pii", "x-disclose": "pii:read"})]
    note: str
    password: str


@tool(version="1.0.0", mutation_class="read_only", namespace="r")
async def person(text: Text) -> Person:
    """A person with things not everybody may see."""
    return Person(name="Ann", mail="ann@example.org", note=f"call 555-123-4567, {text}", password="supersecret")
