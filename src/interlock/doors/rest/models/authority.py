"""Bodies of tokens and of the policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from interlock.doors.rest.models.common import CALL, Answer, Body, Json, Name, Names, Text, example


class Limits(Body):
    """Limits that narrow a token."""

    max_uses: int | None = Field(None, ge=1)
    max_cost: float | None = Field(None, ge=0)
    mutation_class: Literal["read_only", "write_reversible", "write_irreversible"] | None = None
    environments: Names | None = None
    surface: Name | None = Field(None, description="what its surface is for: task:ID, turn:ID, skill:ID, peer_agent")


class Narrowing(Body):
    tools: Names | None = Field(None, description="TOOL, ns.* or *, each with @RANGE where wanted")
    resources: Names | None = None
    constraints: Limits | None = None


class IssueBody(Narrowing):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"agent": "scout", "for": "alice", "tools": ["demo.*@^1.0.0"], "ttl_s": 900}]}
    )

    agent: Name | None = Field(None, description="the agent that holds it; a new name is registered")
    person: Name | None = Field(None, description="the person that holds it, instead of an agent")
    behalf: Name | None = Field(None, alias="for", description="the person on whose behalf the agent acts")
    scopes: Names = Field([])
    ttl_s: int = Field(3600, ge=1, le=31_536_000)


class DelegateBody(Narrowing):
    model_config = ConfigDict(json_schema_extra=example(to="summarizer", tools=["demo.balance"], ttl_s=300))

    to: Name
    token: Name | None = Field(
        None, max_length=65_536, description="the token to pass on; by default the one of the request"
    )
    scopes: Names | None = None
    ttl_s: int | None = Field(None, ge=1, le=31_536_000)


class RevokeBody(Body):
    model_config = ConfigDict(json_schema_extra=example(ref=CALL, reason="the task is done"))

    ref: str = Field(
        min_length=1, max_length=65_536, description="a token, a jti or its beginning, a name, a DID or a key's id"
    )
    reason: Text = Field(min_length=1)
    foreign: bool = Field(False, description="it was never seen here, and is meant all the same")


class InspectBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"token": "eyJ…"}]})

    token: str = Field(min_length=1, max_length=65_536)


class TokenPicture(Answer):
    valid: bool
    code: str | None
    why: str | None
    chain: list[Json]


class Issued(TokenPicture):
    token: str
    registered: list[str] = Field(description="names that were not known, and have an identity of their own now")
    reissued: list[str] = Field(
        default_factory=list[str], description="of these, names that a revoked identity had before"
    )


class Revoked(Answer):
    revoked: str


class Policy(Answer):
    version: str
    digest: str
    text: str
    rules: list[Json]


class PolicyBody(Body):
    model_config = ConfigDict(
        json_schema_extra=example(
            text='@id("reads") permit (principal, action, resource) when { resource.mutation_class == "read_only" };'
        )
    )

    text: str = Field(max_length=1_000_000)


class ApplyBody(PolicyBody):
    instead_of: str | None = Field(None, max_length=200, description="the digest of the policy that you have read")


class Checked(Answer):
    usable: bool
    faults: list[Json]


class Applied(Answer):
    applied: bool
    changed: bool
    previous_kept: bool = Field(description="whether the former policy is kept in policy.cedar.previous")
    diff: list[str]
    faults: list[Json]


class ForgetBody(Body):
    subjects: list[Annotated[str, Field(min_length=1, max_length=2048)]] | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="ids of people and agents whose cached decisions are dropped; without it, everybody's",
    )


class Forgotten(Answer):
    forgotten: bool
    subjects: list[str] | None


Operation = Literal["invoke", "preview", "compensate"]


class ExplainBody(Body):
    model_config = ConfigDict(
        json_schema_extra=example(principal="scout", tool="demo.post", arguments={"account": "cash", "cents": 250})
    )

    principal: Name = Field(description="the name or DID of an identity, an id of principals.toml, or `me`: yourself")
    tool: Name
    arguments: Json = Field({})
    operation: Operation = "invoke"


class PolicyCase(Body):
    principal: Name = Field("me", description="as in an explanation")
    tool: Name
    arguments: Json = Field({})
    operation: Operation = "invoke"
    expect: Literal["allow", "ask", "deny"]
    rule: Name | None = Field(None, description="a rule that must be among those that decide")
    at: Name | None = Field(
        None, description="when the call is made, with a zone: 2026-11-17T23:30:00Z; now by default"
    )
    door: Name | None = Field(None, description="the endpoint it comes through: rest, mcp, jsonrpc, grpc, cli")
    budget_left: int = Field(0, description="what is left to spend", ge=0, lt=2**63)


class CasesBody(Body):
    model_config = ConfigDict(json_schema_extra=example(cases=[{"tool": "demo.balance", "expect": "allow"}]))

    cases: list[PolicyCase] = Field(min_length=1, max_length=1000, fail_fast=True)


class Cases(Answer):
    cases: list[Json] = Field(description="each case with the decision (`answer`), the reason (`why`) and `passed`")
    failed: int


class Explanation(Answer):
    behavior: str = Field(description="allow, ask or deny")
    reason: str
    rules: list[str]
    would_have_to_change: list[str]
    standing: list[Json] = Field(
        description="standing approvals of this tool for this principal, and whether each covers the call"
    )
    gate: str | None = Field(description="why a person is asked although no rule says so")
