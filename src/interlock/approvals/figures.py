"""Figures about approvals for the metrics: how many calls wait, and how long decisions took."""

from __future__ import annotations

from collections import Counter

from interlock.store import tickets as stored
from interlock.store.port import Reader
from interlock.telemetry.metrics import Approvals


def measure(reader: Reader) -> Approvals:
    """Return how many calls wait for each group, and how long each decision so far took."""
    from interlock.approvals import tickets  # most commands measure nothing

    pending = Counter((ticket.tool, ticket.approvers[-1]) for ticket in tickets.listing(reader))
    decided = stored.resolutions(reader)
    return Approvals(
        pending, [(tool, _resolution(state), float(until - since)) for tool, state, since, until in decided]
    )


def _resolution(state: str) -> str:
    """Return the decision on a ticket, whatever happened to the ticket since."""
    return state.lower() if state in ("DENIED", "AUTO_DENIED") else "approved"
