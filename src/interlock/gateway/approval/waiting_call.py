"""Calls that wait for approval: everything that is needed to continue one, encrypted and stored with its ticket.

The call can be continued after a crash and in another process.
"""

from __future__ import annotations

from interlock.approvals.ticket import Ticket, seal
from interlock.call.capability import Capability, Link, ToolGrant
from interlock.call.context import Caller
from interlock.call.phases import Request, Requested
from interlock.data.canonical import decode, encode
from interlock.data.schema import Json
from interlock.store.sealing import Box

_PURPOSE = "ticket"


class WaitingCalls:
    """Encrypts and decrypts calls that wait, and what a reviewer made of them."""

    def __init__(self, box: Box) -> None:
        self._box = box

    def seal(self, content: Json, ticket_id: str) -> bytes:
        """Return the content of a waiting call, or of an edit of it, encrypted."""
        return self._box.seal(encode(content), purpose=_PURPOSE, about=ticket_id)

    def unseal(self, sealed: bytes, ticket_id: str) -> Json:
        """Return the content that was encrypted for a ticket."""
        return decode(self._box.open(sealed, purpose=_PURPOSE, about=ticket_id))

    def open(self, ticket: Ticket) -> Ticket:
        """Return a ticket with its decrypted contents."""
        return ticket.opened(self._box)

    def seal_edit(self, ticket_id: str, shown: Json, names: list[str], preview: Json) -> bytes:
        """Return an edit by a reviewer as the store keeps it, encrypted."""
        return seal(self._box, ticket_id, "changed", {"params": shown, "names": names, "preview": preview})

    def request(self, ticket: Ticket) -> Request:
        """Return the request of a waiting call, as it was made."""
        assert ticket.sealed is not None
        content = self.unseal(ticket.sealed, ticket.id)
        caller = stored_caller(content.pop("caller"))
        del content["promised"]
        return Request(**content, id=ticket.call, caller=caller)


def content_of(requested: Requested, now: float) -> Json:
    """Return everything that is needed to continue a call in another process."""
    request = requested.request
    assert request.caller is not None
    return {
        "tool": request.tool,
        "version": requested.tool.contract.version,
        "arguments": decode(requested.model_input),
        "key": request.key,
        "identity": request.identity,
        "session": request.session,
        "trace_id": requested.trace_id,
        # The time spent waiting does not count against the deadline.
        "timeout_s": max(0.001, requested.deadline - now),
        "operation": request.operation,
        "native": None if request.native is None else dict(request.native),
        "parent": request.parent,
        "door": request.door,
        "task": request.task,
        "caller": _caller_document(request.caller),
    }


def _caller_document(caller: Caller) -> Json:
    facts: Json = {
        "id": caller.id, "tenant": caller.tenant, "agent": caller.agent, "scopes": sorted(caller.scopes),
        "kind": caller.kind, "trust": caller.trust, "groups": sorted(caller.groups), "capability": None,
        "passed_on": caller.passed_on,
    }  # fmt: skip
    capability = caller.capability
    if capability is not None:
        links = [
            {
                "jti": link.jti, "subject": link.subject, "scopes": sorted(link.scopes),
                "tools": [[grant.tool, grant.versions] for grant in link.tools], "not_before": link.not_before,
                "expires": link.expires, "resources": link.resources, "constraints": dict(link.constraints),
            }
            for link in capability.links
        ]  # fmt: skip
        facts["capability"] = {
            "digest": capability.digest, "issuer": capability.issuer, "links": links, "keys": capability.keys,
            "within": capability.within,
        }  # fmt: skip
    return facts


def stored_caller(facts: Json) -> Caller:
    """Return the caller of a call that waited, as they were when they made it."""
    found: Json | None = facts["capability"]
    capability = None
    if found is not None:
        links = tuple(_stored_link(link) for link in found["links"])
        within = found.get("within")
        capability = Capability(
            digest=found["digest"], issuer=found["issuer"], links=links, keys=tuple(found["keys"]),
            within=None if within is None else tuple(within),
        )  # fmt: skip
    return Caller(
        id=facts["id"], tenant=facts["tenant"], agent=facts["agent"], scopes=frozenset(facts["scopes"]),
        kind=facts["kind"], trust=facts["trust"], groups=frozenset(facts["groups"]), capability=capability,
        passed_on=facts.get("passed_on", False),
    )  # fmt: skip


def _stored_link(facts: Json) -> Link:
    return Link(
        jti=facts["jti"],
        subject=facts["subject"],
        scopes=frozenset(facts["scopes"]),
        tools=tuple(ToolGrant(tool, versions) for tool, versions in facts["tools"]),
        not_before=facts["not_before"],
        expires=facts["expires"],
        resources=None if facts["resources"] is None else tuple(facts["resources"]),
        constraints=facts["constraints"],
    )
