"""Bodies of surfaces: what a caller is offered, and loading tools."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from interlock.api.selection import MOST_REQUEST
from interlock.api.surface_view import MOST, PAGE
from interlock.api.surfaces import MOST_AT_ONCE
from interlock.doors.rest.models.common import Answer, Body, Json, Name, Query, example


class SurfaceQuery(Query):
    caller: Name | None = Field(None, description="a registered name or an id; yours if left out")
    cursor: str | None = Field(None, max_length=600, description="where the page before ended")
    limit: int = Field(PAGE, ge=1, le=MOST, description="how many tools are looked at")


class Surface(Answer):
    """The surface of a caller. All loaded tools of a surface that defers are on every page."""

    caller: str
    agent: str | None
    tenant: str
    revision: int = Field(description="raised by each change of what is offered; 0 if nothing is deferred")
    changed_at: str | None
    surface: Json = Field(description="a tool_surface of the Agent Tool standard 0.2.0")
    reasons: dict[str, str] = Field(
        description="for each tool: pinned, role, recent, retrieved, deferred, or why it is blocked or excluded"
    )
    cursor: str | None = Field(description="where to go on; null at the end")


class LoadBody(Body):
    model_config = ConfigDict(json_schema_extra=example(names=["demo.balance"]))

    names: Annotated[list[Name], Field(min_length=1, max_length=MOST_AT_ONCE, fail_fast=True)]


class SelectBody(Body):
    model_config = ConfigDict(json_schema_extra=example(request="how much is in the cash account"))

    request: str = Field(min_length=1, max_length=MOST_REQUEST, description="what is to be done, in words")
    allocation: int | None = Field(None, ge=0, description="how many tokens the schemas of all candidates may take")
    cheaper: bool = Field(False, description="choose the cheaper of tools with equal expected success")
    faster: bool = Field(False, description="choose the faster of tools with equal expected success")
    intent: bool = Field(True, description="false: the kind of help does not narrow the candidates")
    session: str = Field("", max_length=600, description="the session whose budgets count")


class Selected(Answer):
    """The outcome of a selection. No call was made."""

    id: str
    intent: Json | None
    stages: list[Json] = Field(description="what each stage left of the tools before it, and why")
    candidates: list[Json]
    chosen: str | None = Field(description="the tool; null where none fits")
    parameters: Json | None = Field(description="the parameters that a model chose")
    refused: str | None = Field(description="why the choice of a model was refused")
    gate: Json | None = Field(description="ALLOW, REQUIRE_APPROVAL or DENY, with the reason")
    tokens: Json


class RecommendationsQuery(Query):
    tool: Name | None = Field(None, description="a tool that the others are used with; left out, any that you use")


class Recommendation(Answer):
    tool: str
    reason: Literal["together", "group"]
    callers: int = Field(description="how many other callers speak for it")
    why: str


class Recommendations(Answer):
    tools: list[Recommendation]


class Loaded(Answer):
    tools: list[Json]
