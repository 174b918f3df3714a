"""The page of upstream kinds and features, written from the list of tests that show them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

_PAGE = """# Upstream kinds

Which features work with which kind of tool, and the test that shows it. Each ✓ is a link to a file of tests; the names
are in [features.toml](../../tests/upstreams/features.toml). A cell without one has no test of its own: either the
kind has no such thing, or nothing is claimed.

Everything that does not depend on the kind is the same for all of them: admission, validation, policy, approvals,
idempotency keys, circuit breakers, budgets and the record.

{table}
- *Results bounded*: an answer that is too large or does not fit is refused before it is used.
- *No resent writes*: a write that may have arrived is not sent again by itself.
- *Changed definitions*: a tool that is described otherwise than when it was admitted is not called.
- *Undo*: a write is undone by another operation of the upstream, as [the overlay](../how-to/overlays.md) states.
- *Questions*: elicitation, sampling and roots reach the client whose call raised them.

How many operations of public OpenAPI documents are admitted: [OpenAPI documents](../explanation/openapi-documents.md).
Which clients work: [MCP clients](../explanation/mcp-clients.md).
"""


def page(tests: Path) -> str:
    """The page. Refuses a test that does not exist."""
    stated = tomllib.loads((tests / "upstreams" / "features.toml").read_text())
    features: list[str] = stated.pop("features")
    rows = [f"| Kind | {' | '.join(features)} |", f"|---|{':-:|' * len(features)}"]
    for kind, shown in stated.items():
        unknown = shown.keys() - set(features)
        if unknown:
            raise ValueError(f"{kind}: {min(unknown)} is no feature of the list")
        cells = [_cell(tests, shown[one]) if one in shown else "" for one in features]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    return _PAGE.format(table="\n".join(rows) + "\n")


def _cell(tests: Path, named: str) -> str:
    file, _, test = named.partition("::")
    if re.search(rf"^(async )?def {test}\(", (tests / file).read_text(), re.MULTILINE) is None:
        raise ValueError(f"there is no test {named}")
    return f"[✓](../../tests/{file})"
