"""Identities, signing keys and settings, for those who operate the server."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from interlock.doors.rest.models import administration as models
from interlock.doors.rest.operation import Ask, json, says

router = APIRouter(prefix="/v1")


@router.get("/identities", tags=["identities"], **says(models.Identities))
async def list_identities(ask: Ask) -> Response:
    """The identities of your tenant, revoked ones included; in the tenant `local`, of all. Needs `tokens:issue`."""
    return json({"identities": await ask.service.administration.identities.list(by=ask.caller)})


@router.post("/identities", tags=["identities"], **says(models.RegisteredIdentity, 201, "registered"))
async def add_identity(body: models.IdentityBody, ask: Ask) -> Response:
    """Register an identity that may hold tokens. Needs `tokens:issue` in the tenant `local`."""
    return json(await ask.service.administration.identities.add(by=ask.caller, **body.model_dump()), 201)


@router.post("/identities/revoke", tags=["identities"], **says(models.RevokedIdentity))
async def revoke_identity(body: models.RevokeIdentityBody, ask: Ask) -> Response:
    """Revoke an identity, with every token that it holds or delegated. Needs `tokens:issue` in the tenant `local`."""
    return json(await ask.service.administration.identities.revoke(body.who, by=ask.caller, reason=body.reason))


@router.get("/keys", tags=["keys"], **says(models.SigningKeys))
async def list_keys(ask: Ask) -> Response:
    """The keys that verify tokens of this server, without their private halves. Needs `tokens:issue` in the tenant
    `local`."""
    return json({"keys": await ask.service.administration.signing_keys.list(by=ask.caller)})


@router.post("/keys", tags=["keys"], **says(models.SigningKey, 201, "made"))
async def make_key(body: models.MakeKeyBody, ask: Ask) -> Response:
    """Make a key that signs tokens from now on; its private half stays on the server. Needs `tokens:issue` in the
    tenant `local`."""
    made = await ask.service.administration.signing_keys.make(by=ask.caller, algorithm=body.algorithm, first=body.first)
    return json(made, 201)


@router.post("/keys/retire", tags=["keys"], **says(models.RetiredKey))
async def retire_key(body: models.RetireKeyBody, ask: Ask) -> Response:
    """Remove a key that signs no longer: tokens that it signed are void. Needs `tokens:issue` in the tenant `local`."""
    return json(await ask.service.administration.signing_keys.retire(body.kid, by=ask.caller, reason=body.reason))


@router.get("/keys/jwks", tags=["keys"], **says(models.Jwks))
async def show_jwks(ask: Ask) -> Response:
    """The public halves of the keys as a JWK set, for services that verify tokens of this server."""
    return json(ask.service.administration.signing_keys.jwks())


@router.get("/settings", tags=["settings"], **says(models.Settings))
async def show_settings(ask: Ask) -> Response:
    """The settings that the server was started with, and where each comes from; credentials are masked. Needs
    `policy:admin` in the tenant `local`."""
    return json({"settings": ask.service.administration.settings.show(by=ask.caller)})
