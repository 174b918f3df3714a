"""Checkpoints: states that a running call saves for its caller.

A checkpoint is one write: its row, and a record in the journal with its label and the digest of its state, never the
state itself. The state is stored exactly as it was saved, so that the work can be resumed from it, except that the
private values of the call are removed first. It is compressed with gzip and encrypted, bound to its call, its number
and all other columns of its row. Readers see it redacted, like a result that no schema describes.

A call that saves something is recorded as started, so that it is found if its process dies. A call that has its outcome
saves no more: a checkpoint that was queued for the journal comes before the closing record, and others are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from interlock.call.checkpoints import (
    Bounds,
    CheckpointType,
    check_label,
    checkpoint_id,
    not_offered,
    refuse_more,
    written,
)
from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.gateway import reconcile
from interlock.gateway.stored_checkpoints import about, compress, owner_of
from interlock.privacy.scrub import scrubbed_at
from interlock.store import checkpoints, records
from interlock.store.checkpoints import CheckpointRow
from interlock.telemetry.trace import Recording

if TYPE_CHECKING:
    from interlock.call.phases import Call
    from interlock.gateway.progress import ProgressReporter
    from interlock.gateway.redaction import CallRedaction
    from interlock.settings import Settings
    from interlock.store.port import Store, Transaction
    from interlock.store.sealing import Box

# A state of this many bytes or more is compressed in a thread, so that other calls do not wait for it.
_LARGE = 1 << 16


class CheckpointWriter:
    """Saves the checkpoints of running calls."""

    def __init__(
        self,
        *,
        journal: Store,
        settings: Settings,
        redaction: CallRedaction,
        progress: ProgressReporter,
        box: Box,
        owner: str,
    ) -> None:
        self._journal = journal
        self._redaction = redaction
        self._progress = progress
        self._box = box
        self._owner = owner
        self.bounds = Bounds(settings.checkpoints_per_call, settings.checkpoint_bytes)

    async def save(self, call: Call, label: str, state: Any, *, runs: Callable[[], bool]) -> None:
        """Save the state of a call while it `runs`. It is on disk when this returns; E3902 if that failed."""
        tool, caller = call.tool, call.request.caller
        assert tool is not None
        assert caller is not None
        config = tool.contract.manifest.checkpoint_config
        if not config.enabled:
            raise not_offered(tool.ref)
        if not runs():
            raise _over(call)
        check_label(label)
        text, sha256 = written(state, self.bounds.size)
        redacted: list[str] = []
        if call.more.private:
            # INVARIANT: a credential that was lent or sent is in no checkpoint, not even in its label.
            if self._redaction.without_private_values(call, label) != label:
                raise Failure("E3308", "the label of a checkpoint holds something that the call was given in private")
            bare = self._redaction.without_private_values(call, state)
            if bare is not state:
                redacted = list(scrubbed_at(state, bare))
                text, sha256 = written(bare, self.bounds.size)
        compressed = compress(text) if len(text) < _LARGE else await WALKS.run(compress, text)
        # INVARIANT: the checkpoints of a call are in the journal before its closing record. Nothing else runs between
        # here and the queue of the journal, and the closing of the call queues behind it.
        if not runs():
            raise _over(call)
        kind: CheckpointType = "macro" if label in config.macro_events else "named"
        first, call.extend().noted = not call.more.noted, True
        name, version, most = tool.contract.address, tool.contract.version, self.bounds.number
        owner, gone = owner_of(caller), orjson.dumps(redacted).decode()

        def unit(transaction: Transaction) -> int:
            seq = checkpoints.next_number(transaction, call.id)
            if seq > most:
                raise refuse_more(most)
            at_ms = transaction.now_ms
            facts = (call.id, seq, owner, name, version, kind, label, at_ms, len(text), sha256, gone)
            body = self._box.seal(compressed, purpose="checkpoint", about=about(facts))
            if first:
                reconcile.begin(call.id, self._owner, records.started(call, at_ms))(transaction)
            checkpoints.insert(transaction, CheckpointRow(*facts, body))
            recorded = {"checkpoint": seq, "type": kind, "label": label, "bytes": len(text), "sha256": sha256}
            transaction.append("checkpoint", call.id, records.checkpoint(call, at_ms, **recorded))
            return seq

        try:
            seq = await self._journal.commit(unit)
        except Failure as failure:
            call.extend().noted = not first
            if failure.code == "E3407":
                raise
            raise Failure("E3902", f"the checkpoint `{label}` was not written: {failure.message}") from failure
        self._report(call, label, seq, len(text))

    def _report(self, call: Call, label: str, seq: int, size: int) -> None:
        if isinstance(call.more.span, Recording):
            call.more.span.event("tool.checkpoint", label=label, sequence=seq, bytes=size)
        facts = {"checkpoint": label, "checkpoint_id": checkpoint_id(call.id, seq)}
        self._progress.report(call, {"message": f"saved checkpoint {label}", **facts})


def _over(call: Call) -> Failure:
    return Failure("E3902", f"{call.ref} has its outcome; nothing more is saved of it")
