"""One ticket: what it is bound to, and how people and programs are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from interlock.core.clock import iso, new_id
from interlock.core.manifest import Approval
from interlock.core.schema import Json

TicketState = Literal["PENDING", "APPROVED", "USED", "DENIED", "AUTO_DENIED", "LAPSED", "VOID"]

_REJECTED = ("DENIED", "AUTO_DENIED", "LAPSED")
COLUMNS = (
    "id, call, scope, tool, version, operation, tenant, caller, requester, digest, policy, reason, state, step, chain,"
    " params, preview, head, sealed, created_ms, expires_ms, resolved_ms, resolved_by, comment, edited,"
    " changed"
)


@dataclass(frozen=True, slots=True)
class Step:
    """A group of approvers and when, counted from the ticket's creation, it is told."""

    group: str
    after_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One ticket as it is stored."""

    id: str
    call: str
    scope: bytes
    tool: str
    version: str
    operation: str
    tenant: str
    caller: str
    requester: str
    digest: str
    policy: str
    reason: str
    chain: tuple[Step, ...]
    params: Json
    preview: Json
    head: Json
    sealed: bytes | None
    expires_ms: int
    created_ms: int = 0
    state: TicketState = "PENDING"
    step: int = 0
    resolved_ms: int | None = None
    resolved_by: str | None = None
    comment: str | None = None
    edited: bytes | None = None
    # What may be shown of an edit: the input as its reviewer wants it, and what that would do.
    changed: Json | None = None

    @property
    def agreed_preview(self) -> Json:
        """What the call would do as it was agreed to, or is to be."""
        return self.preview if self.changed is None else self.changed["preview"]

    def _edit(self) -> Json | None:
        if self.changed is None:
            return None
        changes = [{"argument": name, "from": was, "to": now} for name, (was, now) in self.differences().items()]
        return {"params": self.changed["params"], "preview": self.changed["preview"], "changes": changes}

    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Each argument that the reviewer changed, as it was and as it is now."""
        if self.changed is None:
            return {}
        now: Json = self.changed["params"]
        return {name: (self.params.get(name), now.get(name)) for name in self.changed["names"]}

    @property
    def ref(self) -> str:
        return f"{self.tool}@{self.version}"

    @property
    def rejected(self) -> bool:
        return self.state in _REJECTED

    @property
    def approvers(self) -> tuple[str, ...]:
        """The groups that were told so far: only their members may resolve it."""
        return tuple(step.group for step in self.chain[: self.step + 1])

    def same_wish(self, other: Ticket) -> bool:
        """Whether two tickets ask for exactly the same."""
        return self.terms() == other.terms()

    def terms(self) -> Json:
        """What an approval is of, but for its end: the record of it says the same."""
        return {
            "tenant": self.tenant, "callerId": self.caller, "requestedBy": self.requester, "toolId": self.tool,
            "version": self.version, "operation": self.operation, "digest": self.digest, "policy": self.policy,
        }  # fmt: skip

    def pending(self) -> Json:
        """What the caller is told while a person decides."""
        return {
            "code": "APPROVAL_REQUIRED",
            "ticketId": self.id,
            "pollEndpoint": f"/v1/approvals/{self.id}",
            "expiresAt": iso(self.expires_ms),
            "status": self.state,
            "reason": self.reason,
        }

    def document(self) -> Json:
        """The ticket for people and programs. Holds nothing that had to be sealed."""
        return {
            "id": self.id,
            "invocation_id": self.call,
            "toolId": self.tool,
            "version": self.version,
            "operation": self.operation,
            "params": self.params,
            "preview": self.preview,
            "reason": self.reason,
            "callerId": self.caller,
            "requestedBy": self.requester,
            "requestedAt": iso(self.created_ms),
            "expiresAt": iso(self.expires_ms),
            "escalationChain": [
                {"group": step.group, "at": iso(self.created_ms + step.after_ms), "notified": place <= self.step}
                for place, step in enumerate(self.chain)
            ],
            "status": self.state,
            "resolvedBy": self.resolved_by,
            "resolvedAt": None if self.resolved_ms is None else iso(self.resolved_ms),
            "comment": self.comment,
            "user_modified": self.edited is not None,
            "edit": self._edit(),
            "input_digest": self.digest,
            "policy": self.policy,
        }


def chain_of(approval: Approval) -> tuple[Step, ...]:
    """When each group is told: at the time its step names, else at its share of a fraction of the timeout."""
    length = len(approval.chain)
    share_ms = approval.escalation_fraction * approval.timeout_seconds * 1000 / length
    return tuple(
        Step(step.group, round(share_ms * place) if step.after_seconds is None else step.after_seconds * 1000)
        for place, step in enumerate(approval.chain)
    )


def ticket_id(now_ms: int, random: bytes) -> str:
    """A fresh ticket id: short to say, in order of time."""
    return f"apr_{new_id(now_ms, random)}"


def from_row(row: Sequence[Any]) -> Ticket:
    """A ticket as the store has it, in the order of `COLUMNS`."""
    values: Json = dict(zip(COLUMNS.split(", "), row, strict=True))
    chain = cast("list[tuple[str, int]]", orjson.loads(values.pop("chain")))
    documents = {name: orjson.loads(values.pop(name)) for name in ("params", "preview", "head")}
    changed: str | None = values.pop("changed")
    documents["changed"] = None if changed is None else orjson.loads(changed)
    return Ticket(**values, **documents, chain=tuple(Step(group, after_ms) for group, after_ms in chain))
