"""Compare the changes that a preview predicted with those that the call made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from interlock.contract.effects import Change
from interlock.data.canonical import digest
from interlock.data.schema import Json


def predicted_changes(preview: Json) -> list[tuple[str, str]]:
    """Return the predictions of a preview as digests: the resource, the operation and the new value of each change."""
    return sorted(
        _prediction(one.get("resource"), one.get("operation"), one.get("after")) for one in preview["predicted_effects"]
    )


def _prediction(resource: Any, operation: Any, after: Any) -> tuple[str, str]:
    return digest([resource, operation]), "" if after is None else digest(after)


def preview_differences(previewed: Json, changes: Iterable[Change]) -> list[str]:
    """Return the differences between a call and its preview, in words."""
    predicted: dict[str, set[str]] = {}
    for what, after in previewed["promised"]:
        predicted.setdefault(what, set()).add(after)
    found: list[str] = []
    done: set[str] = set()
    for change in changes:
        what, after = _prediction(change.resource, change.operation, change.after)
        done.add(what)
        if what not in predicted:
            found.append(f"{change.operation} of {change.resource} was not in the preview")
        elif after and not predicted[what] & {after, ""}:
            found.append(f"{change.operation} of {change.resource} left another value than the preview said")
    if predicted.keys() - done:
        found.append(f"{len(predicted.keys() - done)} previewed changes were not made")
    return found
