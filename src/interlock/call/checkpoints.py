"""Checkpoints: the progress of a call, saved by its tool so that the work can be resumed from there.

A state is JSON. Its text is stored unchanged, so that reading it returns what was saved; its checksum is that of the
canonical form, so that it does not depend on the spelling. A label names a point of the work: one of the manifest's
`macro_events` makes the checkpoint a `macro` one, any other a `named` one.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple, dataclass
from interlock.data.canonical import canonical, encode

if TYPE_CHECKING:
    from interlock.data.schema import Json

SCHEMA_VERSION = "1.0"
CheckpointType = Literal["macro", "named"]
_LABEL = expression(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,99}")


class Bounds(NamedTuple):
    """Limits on the number of checkpoints of a call, and on the bytes of each."""

    number: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint as its reader may see it. With an `error` its state is lost, but not the facts about it.

    `redacted` lists, as JSON pointers, what was removed from the state: when it was saved, or now.
    """

    invocation_id: str
    sequence: int
    tool_id: str
    tool_version: str
    checkpoint_type: CheckpointType
    label: str
    at_ms: int
    size: int
    checksum: str
    state: Any = None
    redacted: tuple[str, ...] = ()
    error: Failure | None = None

    @property
    def id(self) -> str:
        return checkpoint_id(self.invocation_id, self.sequence)

    def document(self) -> Json:
        failure = self.error
        return {
            "schema_version": SCHEMA_VERSION,
            "checkpoint_id": self.id,
            "invocation_id": self.invocation_id,
            "sequence": self.sequence,
            "tool_id": self.tool_id,
            "tool_version": self.tool_version,
            "checkpoint_type": self.checkpoint_type,
            "label": self.label,
            "timestamp": iso(self.at_ms),
            "size": self.size,
            "checksum": self.checksum,
            "state": self.state,
            "redacted": list(self.redacted),
            "error": None if failure is None else {"error_code": failure.code, "message": failure.message},
        }


def checkpoint_id(call: str, sequence: int) -> str:
    return f"{call}:{sequence}"


def check_label(label: Any) -> None:
    """Refuse (E3308) an invalid label of a checkpoint."""
    if not isinstance(label, str) or _LABEL.fullmatch(label) is None:
        raise Failure(
            "E3308", "the label of a checkpoint is a letter or digit and up to 99 more of these or of `_.:/-`"
        )


def written(state: Any, most: int) -> tuple[bytes, str]:
    """Return the JSON text of a state, and its checksum. E3906 if it is not JSON, E3407 if it is too long."""
    try:
        checksum = hashlib.sha256(canonical(state)).hexdigest()
        text = encode(state)
    except Failure as failure:
        raise Failure("E3906", f"the state cannot be saved: {failure.message}") from None
    if len(text) > most:
        raise Failure("E3407", f"the state of a checkpoint has at most {most} bytes, and this one {len(text)}")
    return text, checksum


def refuse_more(most: int) -> Failure:
    """The refusal (E3407) of a checkpoint beyond the number that a call may save."""
    return Failure("E3407", f"a call saves at most {most} checkpoints")


def not_offered(ref: str) -> Failure:
    """The refusal (E3109) of a checkpoint of a tool that does not declare checkpoints."""
    return Failure("E3109", f"{ref} saves no checkpoints: its manifest does not enable them (checkpoint_config)")
