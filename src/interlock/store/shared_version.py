"""One version of the shared configuration (`store.shared_config`)."""

from __future__ import annotations

from interlock.core.record import NamedTuple


class SharedConfig(NamedTuple):
    """One version of the shared configuration, with the texts by the names of the files."""

    version: int
    files: dict[str, str]
    by: str
    at_ms: int
