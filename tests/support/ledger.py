"""The clauses of the ledger."""

from __future__ import annotations

import tomllib
from pathlib import Path

LEDGER = Path(__file__).parents[2] / "ledger"


def requirement_ids() -> set[str]:
    """Every clause id of the ledger."""
    files = (tomllib.loads(path.read_text()) for path in sorted(LEDGER.glob("*.toml")))
    return {requirement["id"] for file in files for requirement in file["requirement"]}
