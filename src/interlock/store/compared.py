"""The tables whose rows are compared with the records."""

from __future__ import annotations

COMPARED = (
    "identity", "revocation", "ticket", "standing", "reservation", "session", "spend", "hold", "cost",
)  # fmt: skip
