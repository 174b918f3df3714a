"""The page of upstream kinds and features, written from the marks of the tests that show them."""

from __future__ import annotations

from pathlib import Path

from docs.marks import marks_of

FEATURES = (
    "discovery", "call", "errors", "results bounded", "deadline", "credentials", "retries of reads", "no resent writes",
    "changed definitions", "undo", "progress", "questions", "resources and prompts",
)  # fmt: skip
_OF_MCP = ("questions", "resources and prompts")
_ONLY_MCP = "its protocol has no such messages"
_NO_PROGRESS = "between a request and its answer, no message means progress"
_OWN_FILE = "the operator's own file describes its tools; another file is another admission"
_RUNS_ONCE = "its failures do not tell whether the same call would succeed later, so a call runs once"
# The kinds, each with the features that it cannot have, and why. Every other feature needs a test with the mark
# `shows(kind, feature)`.
KINDS: dict[str, dict[str, str]] = {
    "MCP, handshake era": {},
    "MCP 2026-07-28": {},
    "MCP over HTTP": {},
    "OpenAPI": {"progress": _NO_PROGRESS, **dict.fromkeys(_OF_MCP, _ONLY_MCP)},
    "HTTP, described by a file": {
        "changed definitions": _OWN_FILE, "progress": _NO_PROGRESS, **dict.fromkeys(_OF_MCP, _ONLY_MCP),
    },
    "gRPC": {"progress": _NO_PROGRESS, **dict.fromkeys(_OF_MCP, _ONLY_MCP)},
    "WebSocket": {
        "changed definitions": _OWN_FILE, "progress": _NO_PROGRESS, **dict.fromkeys(_OF_MCP, _ONLY_MCP),
    },
    "Function schemas of a provider": {
        "changed definitions": _OWN_FILE, "progress": _NO_PROGRESS, **dict.fromkeys(_OF_MCP, _ONLY_MCP),
    },
    "LangChain tools": {
        "retries of reads": _RUNS_ONCE,
        "progress": "a tool of LangChain returns once; its callbacks report what a model does, not how far a tool is",
        **dict.fromkeys(_OF_MCP, "a tool of LangChain has no client, and a module no such lists"),
    },
    "Program": {
        **dict.fromkeys(("retries of reads", "no resent writes"), _RUNS_ONCE),
        "changed definitions": "its manifest is the definition, and the admitted one is what runs; the program itself "
        "belongs to the machine",
        "undo": "a manifest of a program has no handlers, so whatever it changes counts as irreversible",
        "progress": "a program has no form for it: its output is its result",
        **dict.fromkeys(_OF_MCP, "a program has no client, and no such lists"),
    },
    "Python function": dict.fromkeys(_OF_MCP, "these are parts of MCP servers, and a function is none"),
}  # fmt: skip

_PAGE = """# Upstream kinds

Which features work with which kind of tool. Each ✓ is a link to the tests that show it: they are marked
`@pytest.mark.shows(kind, feature)`, and this page is made of the marks. A cell with – is something that the kind cannot
have; the reasons are [below](#what-a-kind-cannot-have). No cell is empty because a test is missing.

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

## What a kind cannot have

{reasons}

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
        f"{kind}, {feature}: {'no test shows it' if feature not in impossible else 'a test shows it'}"
        for kind, impossible in KINDS.items()
        for feature in FEATURES
        if ((kind, feature) in shown) == (feature in impossible)
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
    return _PAGE.format(table="\n".join(rows), reasons=_reasons(), sections="\n\n".join(sections))


def _reasons() -> str:
    """The reasons, each with the kinds and features that it is the reason for."""
    found: dict[tuple[str, str], list[str]] = {}
    for kind, impossible in KINDS.items():
        for reason in dict.fromkeys(impossible.values()):
            features = [feature for feature in FEATURES if impossible.get(feature) == reason]
            found.setdefault((reason, " and ".join(features)), []).append(kind)
    return "\n".join(f"- *{features}*, {'; '.join(kinds)}: {reason}." for (reason, features), kinds in found.items())


def _tests(named: list[tuple[str, str]]) -> str:
    return ", ".join(f"[`{test}`](../../{file})" for file, test in named)
