"""Bodies of the journal, budgets and health."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from interlock.doors.rest.models.common import Answer, Json, Moment, Name, Query


class RecordsQuery(Query):
    call: str | None = Field(None, max_length=600)
    tool: str | None = Field(None, max_length=600, description="by name, or NAME@VERSION")
    caller: str | None = Field(None, max_length=600)
    kind: str | None = Field(None, max_length=40)
    since: Moment | None = None
    until: Moment | None = None
    after: int = Field(0, ge=0, le=2**62, description="the place that the page before ended at")
    limit: int = Field(100, ge=1, le=1000)


class Record(Answer):
    seq: int
    hash: str
    record: Json


class Records(Answer):
    records: list[Record]
    after: int | None = Field(description="where to go on; null at the end. A page may be short and have more after it")


class Verdict(Answer):
    intact: bool
    records: int
    head: Json
    faults: list[Json]


class BudgetsQuery(Query):
    task: Name | None = Field(None, description="a task whose budget is asked about too")
    all: bool = Field(False, description="what everybody has used; needs `audit:read`, and is on record")


class Used(Answer):
    tenant: str
    spent: float
    held: float = Field(description="set aside for calls that run")
    left: float = Field(description="below zero once more was spent than allowed")


class Budget(Answer):
    budget: str = Field(description="in words, as a refusal names it", examples=["5 per tenant and 1 d"])
    per: Literal["call", "task", "session", "tenant", "caller"]
    limit: float
    tools: str
    period_s: int | None
    ends_at: str | None = Field(description="when its period ends and the whole limit is there again")
    used: list[Used] = Field(description="by caller; those who are not listed have used nothing")


class Budgets(Answer):
    budgets: list[Budget]


class Alive(Answer):
    status: Literal["healthy"]
    version: str


class Ready(Answer):
    status: Literal["healthy", "degraded", "down"]
    dependencies: dict[str, Literal["healthy", "degraded", "down"]]
