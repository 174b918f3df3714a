"""Comparisons of tools: with what an agent expects of them, and of one version with another.

An agent may expect something of tools: by name, a schema of the input that it would send, as an object or as JSON text.
A tool that does not offer a part which the agent requires is kept off its surface.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from interlock.contract.versions import bump_between
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.bounds import MOST_REQUEST_VALUES, check_values, exactly
from interlock.data.schema import Json, compile_validator
from interlock.registry.version import Version

if TYPE_CHECKING:
    from interlock.registry.compat import VersionSurface
    from interlock.registry.negotiation import Negotiation

MOST_EXPECTED = 1000
# Values in all schemas together. Compiling and comparing them takes about 15 µs for each, on the event loop.
MOST_EXPECTED_VALUES = 2500

# A schema for each name, as an object or as JSON text. Pairs, where names were translated: a tool may have several.
Expected = Mapping[str, Any] | Sequence[tuple[str, Any]] | str | bytes


@dataclass(frozen=True, slots=True)
class Match:
    """The result of comparing a tool with what an agent expects of it."""

    version: Version
    comparison: Negotiation

    @property
    def usable(self) -> bool:
        from interlock.registry.negotiation import CompatOutcome

        return self.comparison.outcome is not CompatOutcome.INCOMPATIBLE

    def document(self) -> Json:
        row = self.version.row
        return {
            "tool_id": row.address,
            "version": row.version,
            "outcome": self.comparison.outcome.value,
            "missing": list(self.comparison.missing),
        }


def match(version: Version, expected: Any) -> Match:
    """Compare a tool with what is expected of it."""
    from interlock.registry.negotiation import negotiate

    return Match(version, negotiate(expected, version.contract.input.model_facing))


def _read(text: str | bytes) -> Mapping[str, Any]:
    """Read what is expected from JSON text: an object, a schema for each tool (E3004)."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        check_values(raw, MOST_REQUEST_VALUES)
        sent: Any = exactly(raw)
    except (ValueError, RecursionError):
        sent = None
    if not isinstance(sent, dict):
        raise Failure("E3004", "what is expected must be an object as JSON text in UTF-8, a schema for each tool")
    return cast("Json", sent)


def checked(expected: Expected) -> Sequence[tuple[str, Any]]:
    """The expectations, each a name and a schema, after a check that all of them are schemas (E3004)."""
    if isinstance(expected, str | bytes):
        expected = _read(expected)
    pairs = list(expected.items()) if isinstance(expected, Mapping) else expected
    if len(pairs) > MOST_EXPECTED:
        raise Failure("E3004", f"say what is expected of {MOST_EXPECTED} tools at most")
    if _more_values([schema for _, schema in pairs], MOST_EXPECTED_VALUES):
        raise Failure(
            "E3004",
            f"the schemas of what is expected hold more than {MOST_EXPECTED_VALUES:,} values together",
            resolution="ask about fewer tools at a time, or state only the parts that you need",
        )
    for name, schema in pairs:
        try:
            compile_validator(schema)
        except Failure as failure:
            raise Failure("E3004", f"what is expected of `{name}` is not a schema: {failure.message}") from None
    return pairs


def compare_versions(before: Version, after: Version) -> Json:
    """The changes for callers between two versions, and the step up in version that they need."""
    from interlock.registry.compat import classify

    found = classify(_surface(before), _surface(after))
    return {
        "tool": before.row.address,
        "old": before.row.version,
        "new": after.row.version,
        "level": found.level,
        "bump": bump_between(before.row.version, after.row.version),
        "changes": [
            {"level": one.level, "side": one.side, "pointer": one.pointer, "what": one.what} for one in found.changes
        ],
    }


def _surface(version: Version) -> VersionSurface:
    from interlock.registry.compat import VersionSurface

    manifest = version.contract.manifest
    return VersionSurface(
        input=manifest.parameters,
        output=True if manifest.result_schema is None else manifest.result_schema,
        tolerant_output=manifest.tolerant_output,
        declared_behaviour_change=manifest.behaviour_change,
    )


def _more_values(document: Any, most: int) -> bool:
    """Whether a document holds more values than `most`. Looks at no more than that."""
    waiting: list[Any] = [document]
    while waiting:
        one = waiting.pop()
        inner: Collection[Any] = ()
        if isinstance(one, Mapping):
            inner = cast("Mapping[str, Any]", one).values()
        elif isinstance(one, list):
            inner = cast("list[Any]", one)
        most -= len(inner)
        if most < 0:
            return True
        waiting.extend(inner)
    return False
