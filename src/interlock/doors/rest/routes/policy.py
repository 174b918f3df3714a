"""Routes of the policy: show, check, explain, test and apply, and dropping cached decisions."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from interlock.doors.rest import models
from interlock.doors.rest.invoke import DOOR
from interlock.doors.rest.operation import Ask, json, says

router = APIRouter(prefix="/v1", tags=["policy"])


@router.get("/policy", **says(models.Policy))
async def show_policy(ask: Ask) -> Response:
    """The rules in force, as they are written. Needs `policy:read`."""
    return json(ask.service.policy.show(by=ask.caller))


@router.put("/policy", **says(models.Applied))
async def apply_policy(body: models.ApplyBody, ask: Ask) -> Response:
    """Make a text the policy, if it has no faults. Needs `policy:admin`; on record."""
    return json(await ask.service.policy.apply(body.text, by=ask.caller, instead_of=body.instead_of))


@router.post("/policy/check", **says(models.Checked))
async def check_policy(body: models.PolicyBody, ask: Ask) -> Response:
    """Check a policy text against the registered tools. Needs `policy:read`."""
    return json(await ask.service.policy.check(body.text, by=ask.caller))


@router.post("/policy/forget", **says(models.Forgotten))
async def forget_decisions(body: models.ForgetBody, ask: Ask) -> Response:
    """Drop cached decisions in every process, after a policy engine changed its answers. Needs `policy:admin`."""
    return json(await ask.service.policy.forget(body.subjects, by=ask.caller))


@router.post("/policy/explain", **says(models.Explanation))
async def explain_policy(body: models.ExplainBody, ask: Ask) -> Response:
    """Why somebody may make a call, or may not, and what would have to change. Needs `policy:read`."""
    return json(await ask.service.policy.explain(by=ask.caller, door=DOOR, **body.model_dump()))


@router.post("/policy/test", **says(models.Cases))
async def check_policy_cases(body: models.CasesBody, ask: Ask) -> Response:
    """Compare the decision on each case with the one that it expects. Needs `policy:read`."""
    cases = [case.model_dump() for case in body.cases]
    return json(await ask.service.policy.test(cases, by=ask.caller, door=DOOR))
