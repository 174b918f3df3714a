"""Tokens, given out, passed on, looked at and taken back."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from interlock.data.schema import Json
from interlock.doors.rest import models
from interlock.doors.rest.operation import Ask, json, says

router = APIRouter(prefix="/v1", tags=["tokens"])


@router.post("/tokens/issue", **says(models.Issued, 201, "issued"))
async def issue_token(body: models.IssueBody, ask: Ask) -> Response:
    """Issue a token, which hangs below yours and holds no more. Needs `tokens:issue`."""
    issued = await ask.service.tokens.issue(
        by=ask.caller, agent=body.agent, person=body.person, user=body.behalf, scopes=body.scopes, ttl_s=body.ttl_s,
        **_narrowing(body),
    )  # fmt: skip
    return json(issued, 201)


@router.post("/tokens/delegate", **says(models.Issued, 201, "passed on"))
async def delegate_token(body: models.DelegateBody, ask: Ask) -> Response:
    """Pass a token on, narrowed: what is not said stays as it is, and nothing can become more."""
    passed = await ask.service.tokens.delegate(
        body.token or ask.token, by=ask.caller, to=body.to, scopes=body.scopes, ttl_s=body.ttl_s, **_narrowing(body)
    )
    return json(passed, 201)


@router.post("/tokens/revoke", **says(models.Revoked))
async def revoke_token(body: models.RevokeBody, ask: Ask) -> Response:
    """Void a token, a link, an identity or a key, and everything that hangs on it. Needs `tokens:issue`."""
    revoked = await ask.service.tokens.revoke(body.ref, by=ask.caller, reason=body.reason, foreign=body.foreign)
    return json(revoked)


@router.post("/tokens/inspect", **says(models.TokenPicture))
async def inspect_token(body: models.InspectBody, ask: Ask) -> Response:
    """Whether a token holds, and why not; who gave it to whom, and what each of them may do."""
    return json(await ask.service.tokens.inspect(body.token, by=ask.caller))


def _narrowing(body: models.Narrowing) -> Json:
    limits = None if body.constraints is None else body.constraints.model_dump(exclude_none=True)
    return {"tools": body.tools, "resources": body.resources, "constraints": limits}
