"""Every registered version of every tool, for a person at the data directory itself. It needs the database alone."""

from __future__ import annotations

from typing import Any

import orjson

from interlock.core.clock import iso
from interlock.store import quarantine, tools, upstreams
from interlock.store.port import Reader

Json = dict[str, Any]


def every_version(reader: Reader) -> list[Json]:
    """Every version, in order of name, with its state and availability."""
    held = {one.digest for one in quarantine.entries(reader) if one.lifted_ms is None}
    available = {f"upstream:{one.name}" for one in upstreams.every(reader) if one.state == "available"}
    return [_document(row, held, available) for row in tools.all_versions(reader)]


def _document(row: tools.Row, held: set[str], available: set[str]) -> Json:
    manifest: Json = orjson.loads(row.manifest or "{}")
    answers = not row.origin.startswith("upstream:") or row.origin in available
    return {
        "tool": row.address,
        "version": row.version,
        "mutation_class": manifest.get("mutation_class"),
        "state": "quarantined" if row.digest in held else row.state,
        "availability": "AVAILABLE" if answers else "UNAVAILABLE",
        "description": next(iter(str(manifest.get("description", "")).splitlines()), ""),
        "digest": row.digest,
        "origin": row.origin,
        "published_at": iso(row.published_ms),
        "known_pairs": len(manifest.get("known_pairs") or ()),
        "deprecation": None if row.notice is None else tools.Notice(**orjson.loads(row.notice)).document(),
    }
