"""The page of upstream kinds and features, written from the marks of the tests that show them."""

from __future__ import annotations

from pathlib import Path

from docs.marks import marks_of

FEATURES = (
    "discovery", "call", "errors", "results bounded", "deadline", "credentials", "retries of reads", "no resent writes",
    "changed definitions", "undo", "progress", "questions", "resources and prompts",
)  # fmt: skip
_OF_MCP = ("questions", "resources and prompts")
# The kinds, each with the features for which no test is expected: it has no such thing, or nothing is claimed. Every
# other feature needs a test with the mark `shows(kind, feature)`.
KINDS = {
    "MCP, handshake era": (),
    "MCP 2026-07-28": ("credentials", "changed definitions", "resources and prompts"),
    "MCP over HTTP": ("changed definitions", "undo", "progress"),
    "OpenAPI": ("progress", *_OF_MCP),
    "HTTP, described by a file": ("changed definitions", "undo", "progress", *_OF_MCP),
    "gRPC": ("changed definitions", "undo", "progress", *_OF_MCP),
    "WebSocket": ("changed definitions", "undo", "progress", *_OF_MCP),
    "Function schemas of a provider": FEATURES[3:],
    "LangChain tools": ("retries of reads", "no resent writes", "undo", "progress", *_OF_MCP),
    "Program": ("retries of reads", "no resent writes", "changed definitions", "undo", "progress", *_OF_MCP),
    "Python function": ("credentials", "changed definitions", "undo", *_OF_MCP),
}

_PAGE = """# Upstream kinds

Which features work with which kind of tool. Each ✓ is a link to the tests that show it: they are marked
`@pytest.mark.shows(kind, feature)`, and this page is made of the marks. A cell with – has no test of its own: either
the kind has no such thing, or nothing is claimed.

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

## The tests

{sections}
"""

Shown = dict[tuple[str, str], list[tuple[str, str]]]


def shown_in_tests(tests: Path) -> Shown:
    """The tests, by file and name, that show a feature with a kind."""
    found: Shown = {}
    for file, mark in marks_of(tests, "shows"):
        kind, *features = mark.names or ("",)
        if fault := fault_of(kind, *features):
            raise ValueError(f"{file}, {mark.test}: {fault}")
        for feature in features:
            found.setdefault((kind, feature), []).append((file, mark.test))
    return found


def fault_of(*names: str) -> str | None:
    """Return the fault in the names of a mark `shows`; None if there is none."""
    kind, *features = names or ("",)
    if kind not in KINDS:
        return f"shows() names the kind {kind!r}, which docs/upstream_features.py does not list"
    unknown = [one for one in features if one not in FEATURES]
    if unknown or not features:
        return f"shows() names the features {features}; docs/upstream_features.py lists those there are"
    return None


def contradictions(shown: Shown) -> list[str]:
    """The cells that are expected to have a test and have none, and those that have one and are not expected to."""
    return [
        f"{kind}, {feature}: {'no test shows it' if feature not in unclaimed else 'a test shows it'}"
        for kind, unclaimed in KINDS.items()
        for feature in FEATURES
        if ((kind, feature) in shown) == (feature in unclaimed)
    ]


def page(tests: Path) -> str:
    """The page. Refuses a mark that names what is not listed."""
    shown = shown_in_tests(tests)
    rows = [f"| Kind | {' | '.join(FEATURES)} |", f"|---|{':-:|' * len(FEATURES)}"]
    sections: list[str] = []
    for number, kind in enumerate(KINDS, 1):
        there = [feature for feature in FEATURES if (kind, feature) in shown]
        cells = [f"[✓](#kind-{number})" if feature in there else "–" for feature in FEATURES]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
        listed = "\n".join(f"- {feature}: {_tests(shown[kind, feature])}" for feature in there)
        sections.append(f'<a id="kind-{number}"></a>\n\n### {kind}\n\n{listed}')
    return _PAGE.format(table="\n".join(rows), sections="\n\n".join(sections))


def _tests(named: list[tuple[str, str]]) -> str:
    return ", ".join(f"[`{test}`](../../{file})" for file, test in named)
