"""Bodies of approval tickets and standing approvals."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from interlock.doors.rest.models.common import TICKET, Answer, Body, Json, Name, Query, Text, example


class TicketsQuery(Query):
    all: bool = Field(False, description="those that were decided too, the newest first")


class Ticket(Answer):
    id: str = Field(examples=[TICKET])
    invocation_id: str
    toolId: str  # noqa: N815 - the ticket's own name
    status: str = Field(description="PENDING, APPROVED, USED, DENIED, AUTO_DENIED, LAPSED or VOID")
    params: Json
    preview: Json
    readable: list[str] = Field(description="what a person should know before deciding, a line for each thing")
    expiresAt: str  # noqa: N815 - the ticket's own name


class Tickets(Answer):
    tickets: list[Ticket]


class ApproveBody(Body):
    model_config = ConfigDict(json_schema_extra=example(comment="us first", edit={"to": "desk@example.org"}))

    comment: Text = ""
    edit: Json | None = Field(None, description="agree with these arguments changed; null takes one out")


class DenyBody(Body):
    model_config = ConfigDict(json_schema_extra=example(comment="not before Monday"))

    comment: Text = ""


class GrantBody(Body):
    model_config = ConfigDict(
        json_schema_extra=example(
            tool="demo.mail_statement",
            caller="scout",
            arguments={"account": "cash", "to": "*@example.org"},
            uses=5,
            expires_in_s=604_800,
        )
    )

    tool: Name
    caller: Name = Field(description="a name, a DID, or group:NAME for all members of a group, which share the uses")
    arguments: Json = Field(
        description="a pattern for every argument; an argument that is not named is not covered. A text, in which * and"
        ' ? match; the bounds of a number, {"minimum": 1, "maximum": 100}; a set of values, {"enum": ["cash", "giro"]};'
        ' a bound for each item of a list, {"items": "/srv/*"}; any text, {"type": "string"}; any value,'
        ' {"x-any": true}; or a value as it must be'
    )
    uses: int = Field(ge=1, le=10_000)
    expires_in_s: int = Field(ge=1, le=90 * 86_400)
    versions: Name | None = None


class Advance(Answer):
    id: str
    tool: str
    caller: str
    uses: int
    used: int
    revoked: bool


class Advances(Answer):
    standing: list[Advance]
