"""A tool whose schema is not loaded, as a `deferred_tool_ref` of the standard."""

from __future__ import annotations

from typing import Final

import orjson

from interlock.data.schema import Json
from interlock.registry.version import Version

_FEWEST_WORDS: Final = 3
_MOST_WORDS: Final = 10


def deferred_ref(version: Version, surface_id: str, pending: str | None = None) -> Json:
    """Describe a tool for a caller who has not loaded its schema.

    `pending` is the upstream that serves it, while that does not answer.
    """
    namespace, _, name = version.row.address.partition(".")
    origin = version.row.origin
    return {
        "schema_version": "0.2.0",
        "tool_id": version.row.address,
        "name": name,
        "namespace": namespace,
        "search_hint": _hint(orjson.loads(version.content.manifest)),
        "source": origin if origin.startswith("upstream:") else "registry",
        "schema_visibility": "hidden",
        "loading_state": "deferred" if pending is None else "pending",
        "reason": "deferred_until_discovered",
        "pending_provider_or_server": pending,
        "selection_ref": surface_id,
    }


def _hint(manifest: Json) -> str | None:
    """The search hint of a tool, or the first words of its description; None if these are too few."""
    for text in (manifest.get("search_hint"), manifest.get("description")):
        words = str(text or "").split()
        if len(words) >= _FEWEST_WORDS:
            return " ".join(words[:_MOST_WORDS])
    return None
