"""Bodies of identities, signing keys, settings, and calls whose outcome is unknown."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from interlock.doors.rest.models.common import CALL, Answer, Body, Name, Names, Text, example

AGENT = "did:web:example.com:agents:a1"
Reason = Annotated[Text, Field(min_length=1, description="why, for the record")]


class IdentityBody(Body):
    model_config = ConfigDict(json_schema_extra=example(did=AGENT, name="a1", kind="agent", trust=40))

    did: Name | None = Field(None, description="without it a did:key is made, whose private key stays on the server")
    name: str = Field("", max_length=200)
    kind: Literal["agent", "human", "service"] = "agent"
    trust: int = Field(0, ge=0, le=100, description="policies read it")
    groups: Names = Field([])
    tenant: Name = "local"


class Identity(Answer):
    did: str
    name: str
    kind: Literal["agent", "human", "service"]
    tenant: str
    trust: int
    groups: list[str]
    state: Literal["active", "revoked"]


class Identities(Answer):
    identities: list[Identity]


class RegisteredIdentity(Identity):
    warnings: list[str] = Field(description="others that have or had the name")


class RevokeIdentityBody(Body):
    model_config = ConfigDict(json_schema_extra=example(who="researcher", reason="its machine was lost"))

    who: Name = Field(description="a DID, or a name in the tenant `local`")
    reason: Reason


class RevokedIdentity(Answer):
    did: str
    name: str
    state: Literal["revoked"]


class SigningKey(Answer):
    kid: str
    algorithm: Literal["RS256", "EdDSA", "ES256"]
    made: str
    signs: bool = Field(description="whether new tokens are signed with it; the others verify")


class SigningKeys(Answer):
    keys: list[SigningKey]


class MakeKeyBody(Body):
    model_config = ConfigDict(json_schema_extra=example(algorithm="EdDSA"))

    algorithm: Literal["RS256", "EdDSA", "ES256"] | None = Field(
        None, description="that of the key before it if not given; RS256 for the first"
    )
    first: bool = Field(False, description="refuse where there is a key already")


class RetireKeyBody(Body):
    model_config = ConfigDict(json_schema_extra=example(kid="4bPC…", reason="rotated a week ago"))

    kid: Name
    reason: Reason = "retired"


class RetiredKey(Answer):
    kid: str
    retired: bool


class Jwks(Answer):
    """A JWK set (RFC 7517)."""

    keys: list[dict[str, str]]


class Setting(Answer):
    name: str
    value: Any = Field(description="credentials are masked")
    source: str = Field(description="a line of settings.toml, a variable, a shared version, the program, or `default`")
    variable: str


class Settings(Answer):
    settings: list[Setting]


class UnknownCall(Answer):
    invocation_id: str
    at: str
    tool: str
    version: str
    key: str
    caller: str


class UnknownCalls(Answer):
    unknown: list[UnknownCall]


class SettleBody(Body):
    model_config = ConfigDict(json_schema_extra=example(happened=True, result={"entry": 91}))

    happened: bool = Field(
        description="whether it took effect; if not, its idempotency key is free and the same call may run"
    )
    result: Any = Field(
        None, description="what it returned, if it happened: its idempotency key answers with it from now on"
    )


class SettledCall(UnknownCall):
    model_config = ConfigDict(json_schema_extra={"examples": [{"invocation_id": CALL, "happened": False}]})

    happened: bool
    result: Any
    by: str


class Settled(Answer):
    settled: SettledCall
