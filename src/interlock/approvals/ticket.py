"""The ticket: what it is bound to, and its representations for people and programs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import orjson

from interlock.approvals import mechanism
from interlock.core.clock import iso, new_id
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.canonical import decode, encode

if TYPE_CHECKING:
    from interlock.contract.manifest import Approval
    from interlock.data.schema import Json
    from interlock.store.sealing import Box
    from interlock.store.tickets import TicketRow

TicketState = Literal["PENDING", "APPROVED", "USED", "DENIED", "AUTO_DENIED", "LAPSED", "VOID"]

_REJECTED = ("DENIED", "AUTO_DENIED", "LAPSED")


@dataclass(frozen=True, slots=True)
class Step:
    """A group of approvers, and when it is notified, counted from the ticket's creation."""

    group: str
    after_ms: int


class Sealed:
    """The displayable part of a call as the store has it: sealed. In rows of an older version it is clear text."""

    __slots__ = ("changed", "params", "preview")

    def __init__(self, params: bytes | str, preview: bytes | str, changed: bytes | str | None = None) -> None:
        self.params = params
        self.preview = preview
        self.changed = changed


@dataclass(frozen=True, slots=True)
class Shown:
    """The displayable part of a call: its input without private values, and a preview.

    `changed` is the same of an edit: the input as edited by its reviewer, the names they changed, and its preview.
    """

    params: Json
    preview: Json
    changed: Json | None = None

    def sealed(self, box: Box, ticket: str) -> Sealed:
        """Seal it for the store."""
        changed = None if self.changed is None else seal(box, ticket, "changed", self.changed)
        return Sealed(seal(box, ticket, "params", self.params), seal(box, ticket, "preview", self.preview), changed)


def seal(box: Box, ticket: str, part: str, value: Json) -> bytes:
    """Seal one displayable part of a ticket for the store."""
    return box.seal(encode(value), purpose="shown", about=f"{ticket} {part}")


@dataclass(frozen=True, slots=True, kw_only=True)
# many methods: a public record; most are properties that read one field
class Ticket:
    """A ticket as stored. Its sealed parts must be opened before they are shown."""

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
        """Return the ticket with its displayable parts opened. E3601 or E3604 if they cannot be opened."""
        if isinstance(self.shown, Shown):
            return self
        at_rest = self.shown

        def part(name: str, stored: bytes | str) -> Json:
            about = f"{self.id} {name}"
            return decode(
                stored.encode() if isinstance(stored, str) else box.open(stored, purpose="shown", about=about)
            )

        changed = None if at_rest.changed is None else part("changed", at_rest.changed)
        shown = Shown(part("params", at_rest.params), part("preview", at_rest.preview), changed)
        return replace(self, shown=shown)

    @property
    def _open(self) -> Shown:
        assert isinstance(self.shown, Shown), "a ticket is opened before it is shown"
        return self.shown

    @property
    def params(self) -> Json:
        """The input without private values."""
        return self._open.params

    @property
    def preview(self) -> Json:
        """The preview of the call."""
        return self._open.preview

    @property
    def changed(self) -> Json | None:
        """The displayable part of an edit."""
        return self._open.changed

    @property
    def agreed_preview(self) -> Json:
        """The preview of the call as it was, or is to be, approved."""
        return self.preview if self.changed is None else self.changed["preview"]

    def _edit(self) -> Json | None:
        if self.changed is None:
            return None
        changes = [{"argument": name, "from": was, "to": now} for name, (was, now) in self.differences().items()]
        return {"params": self.changed["params"], "preview": self.changed["preview"], "changes": changes}

    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Each argument that the reviewer changed, with its old and new value."""
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
        """The groups notified so far: only their members may decide on it."""
        return tuple(step.group for step in self.chain[: self.step + 1])

    def same_wish(self, other: Ticket) -> bool:
        """Whether two tickets request exactly the same."""
        return self.terms() == other.terms()

    def terms(self) -> Json:
        """The subject of an approval except its end; the record of the approval says the same."""
        return {
            "tenant": self.tenant, "callerId": self.caller, "requestedBy": self.requester, "toolId": self.tool,
            "version": self.version, "operation": self.operation, "digest": self.digest, "policy": self.policy,
        }  # fmt: skip

    def pending(self) -> Json:
        """The response to the caller while a person decides."""
        return {
            "code": "APPROVAL_REQUIRED",
            "ticketId": self.id,
            "pollEndpoint": f"/v1/approvals/{self.id}",
            "expiresAt": iso(self.expires_ms),
            "status": self.state,
            "reason": self.reason,
        }

    def late(self) -> str | None:
        """The reason why it was denied by timeout, if it was."""
        words = {"AUTO_DENIED": "nobody decided", "LAPSED": "it was approved, but not run"}.get(self.state)
        return None if words is None else f"{words} before {iso(self.expires_ms)}"

    def rejection(self) -> Failure | None:
        """The failure for its caller, if it ended without an approval."""
        if not self.rejected:
            return None
        no = f"{self.resolved_by} said no" + (f": {self.comment}" if self.comment else "")
        details = {"ticketId": self.id, "status": self.state, "invocation_id": self.call, "approval": self.outcome()}
        return Failure("E3209", f"{self.ref} was not approved: {self.late() or no}", details=details)

    def outcome(self) -> Json | None:
        """The mechanism and the person or rule that decided it; None while it is open, and if it became void."""
        late = self.late()
        if late is not None:
            return mechanism.timeout(self.id, late)
        if self.state not in ("APPROVED", "USED", "DENIED"):
            return None
        return mechanism.human_review(self.id, self.resolved_by, approved=self.state != "DENIED")

    def document(self) -> Json:
        """The ticket for people and programs. Contains nothing that had to be sealed."""
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
    """Compute when each group is notified: at the time its step names, else at its share of a fraction
    of the timeout.
    """
    length = len(approval.chain)
    share_ms = approval.escalation_fraction * approval.timeout_seconds * 1000 / length
    return tuple(
        Step(step.group, round(share_ms * place) if step.after_seconds is None else step.after_seconds * 1000)
        for place, step in enumerate(approval.chain)
    )


def ticket_id(now_ms: int, random: bytes) -> str:
    """Make a ticket id: short, and ordered by time."""
    return f"apr_{new_id(now_ms, random)}"


def from_row(row: TicketRow) -> Ticket:
    """Read a ticket from its row in the store."""
    values = row._asdict()
    chain = cast("list[tuple[str, int]]", orjson.loads(values.pop("chain")))
    head = orjson.loads(values.pop("head"))
    shown = Sealed(values.pop("params"), values.pop("preview"), values.pop("changed"))
    steps = tuple(Step(group, after_ms) for group, after_ms in chain)
    return Ticket(**values, shown=shown, head=head, chain=steps)
