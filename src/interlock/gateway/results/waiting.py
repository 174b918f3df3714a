"""The results of calls that wait for an approval."""

from __future__ import annotations

from interlock.approvals.offer import advance_command
from interlock.approvals.ticket import Ticket
from interlock.call.phases import Call
from interlock.call.results import Result
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.gateway.results.metadata import ResultMetadata
from interlock.store.sealing import Box


class PendingResults:
    """Makes the results of calls that are neither done nor failed. The ticket of such a call is its record."""

    def __init__(self, clock: Clock, metadata: ResultMetadata, box: Box) -> None:
        self._clock = clock
        self._metadata = metadata
        self._box = box

    def of(self, call: Call, ticket: Ticket) -> Result:
        """Return the result of a call that waits for a person to decide on its ticket.

        It holds the command by which such calls are approved in advance, if bounds fit the call.
        """
        pending = ticket.pending()
        if (command := advance_command(ticket.opened(self._box))) is not None:
            pending["agreeInAdvance"] = command
        words = f"{call.ref} waits for a person to agree: {ticket.reason}"
        refs = () if call.decision is None else call.decision.rules
        return Result(
            invocation_id=call.id,
            tool=call.ref,
            state="awaiting_approval",
            created_ms=self._clock.now_ms(),
            trace_id=call.trace_id,
            metadata={**self._metadata.of(call), "pending": pending},
            error=Failure("E3208", words, details=pending, policy_refs=refs),
            source="synthetic",
        )
