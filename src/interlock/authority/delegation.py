"""Delegation of tokens: the derived link, the checks of every new chain, and signing by the holder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from interlock.authority import jws
from interlock.authority.dids import keys_within
from interlock.call.capability import (
    DEEPEST,
    Link,
    ToolGrant,
    link_faults,
    ranged,
    read_above,
    read_link,
    widenings,
    write_above,
    write_link,
)
from interlock.core.clock import Clock, new_id
from interlock.core.errors import Failure


def narrowed(
    parent: Link,
    *,
    subject: str,
    jti: str,
    now_s: int,
    scopes: Sequence[str] | None = None,
    tools: Sequence[ToolGrant] | None = None,
    resources: Sequence[str] | None = None,
    constraints: Mapping[str, Any] | None = None,
    ttl_s: int | None = None,
) -> Link:
    """Derive a link from another, changed as requested. Whether it is narrower is not checked here."""
    return Link(
        jti=jti,
        subject=subject,
        scopes=parent.scopes if scopes is None else frozenset(scopes),
        tools=parent.tools if tools is None else ranged(tools, parent),
        not_before=max(now_s, parent.not_before),
        expires=parent.expires if ttl_s is None else now_s + ttl_s,
        resources=parent.resources if resources is None else tuple(resources),
        constraints={**parent.constraints, **(constraints or {})},
    )


def delegate_offline(
    parent_token: str,
    *,
    private: Any,
    subject: str,
    clock: Clock,
    scopes: Sequence[str] | None = None,
    tools: Sequence[ToolGrant] | None = None,
    resources: Sequence[str] | None = None,
    constraints: Mapping[str, Any] | None = None,
    ttl_s: int | None = None,
) -> str:
    """Delegate a token that one holds, signed with one's own key, without its issuer.

    `private` is the signing key of the DID that holds the token. More than the token holds is refused (E3206).
    """
    opened = jws.take_apart(parent_token)
    parent = read_link(opened.claims)
    links = (*read_above(opened.claims.get("act")), parent)
    now_ms = clock.now_ms()
    link = narrowed(
        parent,
        subject=subject,
        jti=f"{parent.jti}/{new_id(now_ms, clock.random_bytes(8))}",
        now_s=now_ms // 1000,
        scopes=scopes,
        tools=tools,
        resources=resources,
        constraints=constraints,
        ttl_s=ttl_s,
    )
    check_new((*links, link), None)
    held = keys_within(parent.subject)
    if held is not None and held[0].key != private.public_key():
        raise Failure("E3206", f"the key is not the key of `{parent.subject}`, who holds the token")
    claims = {"iss": parent.subject, "aud": opened.claims.get("aud"), "iat": now_ms // 1000, "proof": parent_token}
    return jws.sign(claims | chain_claims((*links, link)), private, None if held is None else held[0].kid)


def check_new(links: tuple[Link, ...], max_ttl_s: int | None) -> None:
    """Refuse to issue a chain that would not verify: E3004 if it is invalid, E3206 if it is wider."""
    faults = [fault for link in links for fault in link_faults(link)]
    if len(links) > DEEPEST:
        faults.append(f"the delegation chain would be deeper than {DEEPEST} links")
    if max_ttl_s is not None and links[-1].expires - links[-1].not_before > max_ttl_s:
        faults.append(f"a token lives {max_ttl_s} seconds at most")
    if faults:
        raise Failure("E3004", f"the token cannot be issued: {'; '.join(faults)}", details={"faults": faults})
    check_once(links)
    more = [words for parent, child in pairwise(links) for words in widenings(parent, child)]
    if more:
        raise Failure("E3206", f"a token may only be passed on narrower: {'; '.join(more)}", details={"wider": more})


def check_once(links: Sequence[Link]) -> None:
    """Refuse a chain with a repeated subject: the last holder would be taken for the earlier one."""
    seen: set[str] = set()
    for link in links:
        if link.subject in seen:
            raise Failure("E3206", f"a token cannot come back to `{link.subject}`, who passed it on")
        seen.add(link.subject)


def chain_claims(links: Sequence[Link]) -> dict[str, Any]:
    """Encode a chain as the claims of a token."""
    act = write_above(links[:-1])
    return write_link(links[-1]) | ({} if act is None else {"act": act})
