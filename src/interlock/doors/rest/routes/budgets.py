"""Routes of budgets."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from interlock.doors.rest import models
from interlock.doors.rest.invoke import DOOR
from interlock.doors.rest.operation import Ask, json, says

router = APIRouter(prefix="/v1", tags=["budgets"])


@router.get("/budgets", **says(models.Budgets))
async def list_budgets(ask: Ask, query: Annotated[models.BudgetsQuery, Query()]) -> Response:
    """The amount spent, reserved and left of each budget: for you, your tenant, and a task that you name."""
    shown = await ask.service.budgets.show(by=ask.caller, door=DOOR, task=query.task, every=query.all)
    return json({"budgets": shown})
