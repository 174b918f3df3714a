"""The error codes that clauses of the ledger list."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

LEDGER = Path(__file__).parents[2] / "ledger" / "contract.toml"
CLAUSES = {entry["id"]: entry["must"] for entry in tomllib.loads(LEDGER.read_text())["requirement"]}
_ENTRY = re.compile(r"(E\d{4}) ([^,;:.]+?) (\d{3})(?=[,;.])")


def listed(clause: str) -> Iterator[tuple[str, str, int]]:
    """The codes a clause lists: E-code, condition, HTTP status."""
    for code, condition, status in _ENTRY.findall(CLAUSES[clause]):
        yield code, condition, int(status)
