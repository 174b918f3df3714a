"""One ticket: what it is bound to, and how people and programs are told of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import orjson

from interlock.approvals import mechanism
from interlock.contract.manifest import Approval
from interlock.core.clock import iso, new_id
from interlock.data.schema import Json
from interlock.store.sealing import Box
from interlock.store.tickets import TicketRow

TicketState = Literal["PENDING", "APPROVED", "USED", "DENIED", "AUTO_DENIED", "LAPSED", "VOID"]

_REJECTED = ("DENIED", "AUTO_DENIED", "LAPSED")


@dataclass(frozen=True, slots=True)
class Step:
    """A group of approvers and when, counted from the ticket's creation, it is told."""

    group: str
    after_ms: int


class Sealed:
    """What may be shown of a call, as the store has it: sealed. In rows of an older version it is clear text."""

    __slots__ = ("changed", "params", "preview")

    def __init__(self, params: bytes | str, preview: bytes | str, changed: bytes | str | None = None) -> None:
        self.params = params
        self.preview = preview
        self.changed = changed


@dataclass(frozen=True, slots=True)
class Shown:
    """What may be shown of a call: its input without what is private, and what it would do.

    `changed` is the same of an edit: the input as its reviewer wants it, the names they changed, what it would do then.
    """

    params: Json
    preview: Json
    changed: Json | None = None

    def sealed(self, box: Box, ticket: str) -> Sealed:
        """The same as the store keeps it."""
        changed = None if self.changed is None else seal(box, ticket, "changed", self.changed)
        return Sealed(seal(box, ticket, "params", self.params), seal(box, ticket, "preview", self.preview), changed)


def seal(box: Box, ticket: str, part: str, value: Json) -> bytes:
    """One part of what is shown of a ticket, as the store keeps it."""
    return box.seal(orjson.dumps(value), purpose="shown", about=f"{ticket} {part}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One ticket as it is stored. What is sealed of it must be opened before it is shown."""

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
    shown: Sealed | Shown
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

    def opened(self, box: Box) -> Ticket:
        """The ticket with what may be shown of it. E3601 or E3604 when it cannot be opened."""
        if isinstance(self.shown, Shown):
            return self
        at_rest = self.shown

        def part(name: str, found: bytes | str) -> Json:
            about = f"{self.id} {name}"
            return orjson.loads(found if isinstance(found, str) else box.open(found, purpose="shown", about=about))

        changed = None if at_rest.changed is None else part("changed", at_rest.changed)
        shown = Shown(part("params", at_rest.params), part("preview", at_rest.preview), changed)
        return replace(self, shown=shown)

    @property
    def _open(self) -> Shown:
        assert isinstance(self.shown, Shown), "a ticket is opened before it is shown"
        return self.shown

    @property
    def params(self) -> Json:
        """The input without what is private."""
        return self._open.params

    @property
    def preview(self) -> Json:
        """What the call would do."""
        return self._open.preview

    @property
    def changed(self) -> Json | None:
        """What may be shown of an edit."""
        return self._open.changed

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

    def late(self) -> str | None:
        """Why time decided against it, if it did."""
        words = {"AUTO_DENIED": "nobody decided", "LAPSED": "it was approved, but not run"}.get(self.state)
        return None if words is None else f"{words} before {iso(self.expires_ms)}"

    def outcome(self) -> Json | None:
        """By which mechanism it was decided, and by whom or what; None while it is open, and where it became void."""
        late = self.late()
        if late is not None:
            return mechanism.timeout(self.id, late)
        if self.state not in ("APPROVED", "USED", "DENIED"):
            return None
        return mechanism.human_review(self.id, self.resolved_by, approved=self.state != "DENIED")

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
            "approval": self.outcome(),
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


def from_row(row: TicketRow) -> Ticket:
    """A ticket from its row in the store."""
    values = row._asdict()
    chain = cast("list[tuple[str, int]]", orjson.loads(values.pop("chain")))
    head = orjson.loads(values.pop("head"))
    shown = Sealed(values.pop("params"), values.pop("preview"), values.pop("changed"))
    steps = tuple(Step(group, after_ms) for group, after_ms in chain)
    return Ticket(**values, shown=shown, head=head, chain=steps)
