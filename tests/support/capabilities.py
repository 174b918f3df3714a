"""Capabilities that are bound to resources."""

from __future__ import annotations

from typing import Annotated

from interlock import Field
from interlock.call.capability import Capability, Link, ToolGrant

Where = Annotated[str, Field(description="a file", examples=["/srv/data/a"], json_schema_extra={"format": "path"})]


def bound_to(*resources: str) -> Capability:
    link = Link(
        jti="j", subject="did:key:z", scopes=frozenset(), tools=(ToolGrant("*"),), not_before=0, expires=2**40,
        resources=resources, constraints={},
    )  # fmt: skip
    return Capability(digest="|".join(resources), issuer="i", links=(link,))
