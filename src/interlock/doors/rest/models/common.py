"""The parts that all bodies share: strictness, bounds, names, examples, and the error envelope."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import pydantic
from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field

from interlock.core.expressions import expression
from interlock.data.bounds import LONGEST_NAME

Json = dict[str, Any]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
# Only the first fault of a list is reported: a hostile list could have tens of thousands.
Names = Annotated[list[Name], Field(max_length=1000, fail_fast=True)]
Text = Annotated[str, Field(max_length=10_000)]
_DATE = expression(r"\d{4}-\d\d-\d\d[Tt ]")


def _with_date(value: Any) -> Any:
    """Refuse a bare number: it would be read as seconds since 1970, which the document does not offer."""
    if isinstance(value, str) and _DATE.match(value) is None:
        raise ValueError("a time has a date, a time of day and an offset, as 2026-11-16T18:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_with_date)]
Status = Literal["success", "error", "timeout", "cancelled", "running", "pending"]

CALL = "01M7ETAWZ6CA43EAB55115CDBC"
TICKET = "apr_01M7ETAX1RAFF8FEA10B286E99"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


_MOST_MEMBERS = 1000


def few(sent: object) -> object:
    """Refuse an object of too many members before each of them is looked at."""
    if _members(sent) > _MOST_MEMBERS:
        raise ValueError(f"the object has more than {_MOST_MEMBERS} members")
    return sent


def _members(sent: object) -> int:
    return len(cast("Json", sent)) if isinstance(sent, dict) else 0


def example(**fields: Any) -> Json:
    return {"examples": [fields]}


_MOST_FIELDS = 100


class Body(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, sent: object) -> object:
        """Refuse what cannot be of the documented form at once: each unknown field would be a fault of its own."""
        if _members(sent) > _MOST_FIELDS:
            raise ValueError(f"the object has more than {_MOST_FIELDS} fields; see /docs")
        return sent


class Query(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid")


class Answer(pydantic.BaseModel):
    model_config = ConfigDict(extra="allow")


class Envelope(Answer):
    """The error envelope, the same at every endpoint."""

    error_code: str = Field(pattern="^E3[0-9]{3}$", examples=["E3204"])
    errorCode: str = Field(examples=["AUTHORIZATION_DENIED"])  # noqa: N815 - the envelope's own name
    error_class: str = Field(examples=["permission_denied"])
    message: str
    resolution: str
    retryable: bool
    traceId: str  # noqa: N815 - the envelope's own name
    retryAfterMs: int | None = None  # noqa: N815 - the envelope's own name
    details: Json | None = None


class Refusal(Answer):
    """The answer to a request that was refused or failed."""

    error: Envelope
    detail: str = Field(examples=["E3204: the token does not name demo.post"])
    invocation_id: str | None = None
    tool_result: Json | None = Field(None, description="the terminal result of a call, as it is on record")
