"""Bodies of upstreams."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticKnownError

from interlock.api.upstreams import addable_kinds
from interlock.doors.rest.models.common import Answer, Body, Json, Names, Text, example, few

_KINDS = addable_kinds()


def _known_kind(name: str) -> str:
    if name not in _KINDS:
        *others, last = (f"'{one}'" for one in _KINDS)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
    return name


Kind = Annotated[str, AfterValidator(_known_kind), WithJsonSchema({"type": "string", "enum": _KINDS})]


class Upstream(Answer):
    name: str
    kind: str
    state: str | None = Field(None, description="absent for a service that tools name and that is no upstream")
    tools: list[Json] = Field([])


class Probed(Answer):
    name: str
    state: str
    reason: str


class Upstreams(Answer):
    upstreams: list[Upstream]
    services: list[Json] = Field(description="breakers of services that tools name and that are no upstreams")


class AddUpstreamBody(Body):
    model_config = ConfigDict(
        json_schema_extra=example(name="bank", kind="mcp", config={"url": "https://bank.example.org/mcp"})
    )

    name: str = Field(pattern="^[a-z][a-z0-9_-]{0,62}$")
    kind: Kind
    config: Json = Field(
        description="where it is and how to show who asks; programs and files only on the machine itself"
    )
    overlay: Json | None = Field(None, description="what you say of its tools, in place of what it says itself")


class RefreshBody(Body):
    overlay: Json | None = None
    accept_hints: bool = Field(False, description="trust what the upstream says about the tools that it offers now")


class AcceptBody(Body):
    model_config = ConfigDict(json_schema_extra=example(tools=["pay"], reason="a new optional field"))

    tools: Names = Field([], description="the upstream's names of tools that changed; all of them if none is named")
    reason: Text = Field(min_length=1)
    shown: Annotated[dict[str, str], BeforeValidator(few)] = Field(
        {}, max_length=1000, description="what was looked at: tools, and the digests that were given for them as `seen`"
    )


class Report(Answer):
    upstream: str
    tools: list[Json]
    accept_hints: bool


class Removed(Answer):
    removed: str
