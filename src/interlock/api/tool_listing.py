"""The registered versions of tools, for a person at the data directory itself. It needs the database alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.core.clock import iso
from interlock.data.schema import Schema
from interlock.store import quarantine, tools, upstreams
from interlock.store.port import Reader

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.registry.catalog import Catalog
    from interlock.registry.latency import Latencies
    from interlock.registry.version import Version
    from interlock.store.port import Store

Json = dict[str, Any]


def every_version(reader: Reader) -> list[Json]:
    """Every version, in order of name, with its state and availability."""
    held = {one.digest for one in quarantine.entries(reader) if one.lifted_ms is None}
    available = _available(reader)
    return [_document(row, held, available) for row in tools.all_versions(reader)]


def _document(row: tools.ToolVersionRow, held: set[str], available: set[str]) -> Json:
    manifest: Json = orjson.loads(row.manifest or "{}")
    return {
        "tool": row.address,
        "version": row.version,
        "mutation_class": manifest.get("mutation_class"),
        "state": "quarantined" if row.digest in held else row.state,
        "availability": _availability(row.origin, available),
        "description": next(iter(str(manifest.get("description", "")).splitlines()), ""),
        "digest": row.digest,
        "origin": row.origin,
        "published_at": iso(row.published_ms),
        "known_pairs": len(manifest.get("known_pairs") or ()),
        "deprecation": None if row.notice is None else tools.Notice(**orjson.loads(row.notice)).document(),
    }


def _available(reader: Reader) -> set[str]:
    """The origins of tools whose upstream answers."""
    return {f"upstream:{one.name}" for one in upstreams.every(reader) if one.state == "available"}


def _availability(origin: str, available: set[str]) -> str:
    return "AVAILABLE" if not origin.startswith("upstream:") or origin in available else "UNAVAILABLE"


def version_at_rest(reader: Reader, path: Path, name: str, spec: str | None) -> Version:
    """The same as `any_version`, of a data directory that is not open. No function of a tool is loaded."""
    from interlock.core.clock import Clock
    from interlock.registry.catalog import Catalog
    from interlock.store.at_rest import StoreAtRest, at_once
    from interlock.store.homes import home_at

    now_ms = home_at(path).now_ms(reader)
    catalog = Catalog(cast("Store", StoreAtRest(reader)), Clock(now_ms=lambda: now_ms), Path(os.devnull))
    return at_once(_any_version(catalog, name, spec))


async def any_version(parts: Parts, name: str, spec: str | None) -> Version:
    """A version to look at, also one that can no longer be called. Checks no rights."""
    return await _any_version(parts.catalog, name, spec)


async def _any_version(catalog: Catalog, name: str, spec: str | None) -> Version:
    if spec:
        found = (await catalog.versions(await catalog.address(name))).get(spec.lstrip("=v "))
        if found is not None:
            return found
    return await catalog.resolve(name, spec)


def contract_at_rest(reader: Reader, version: Version) -> Json:
    """A version with its contract, its state, and its time limits as measured. See `contract_document`."""
    from interlock.registry.latency import Latencies, measure

    latencies = Latencies()
    latencies.measured = measure(reader)
    return contract_document(version, _availability(version.row.origin, _available(reader)), latencies)


def contract_document(version: Version, availability: str, latencies: Latencies) -> Json:
    """A version with its contract, its state and its time limits. Every fact is in it once.

    It is the stored document, which was checked when the version was admitted; no model of it is loaded.
    """
    from interlock.contract.executors import PROTOCOLS
    from interlock.data.explain import undocumented

    row, manifest = version.row, version.content.document
    written_here = PROTOCOLS[manifest["protocol"]].written_here
    takes = Schema(manifest["parameters"], closed=written_here, shared=True)
    return {
        "tool": row.address,
        "version": row.version,
        "digest": row.digest,
        "state": row.state,
        "availability": availability,
        "origin": row.origin,
        "deprecation": None if row.notice is None else row.notice.document(),
        "input_schema": takes.model_facing,
        "output_schema": manifest["result_schema"],
        "manifest": {name: value for name, value in manifest.items() if name not in BESIDE_MANIFEST},
        "known_pairs": len(manifest.get("known_pairs", ())),
        "timeout": latencies.describe(f"{row.address}@{row.version}", manifest),
        "warnings": [] if written_here else list(undocumented(manifest["parameters"])),
    }


# Parts of a manifest that have a place of their own beside it. The input schema is there as callers may use it; the
# name is `tool`, and the timeout class is one of the time limits.
BESIDE_MANIFEST = frozenset({
    "tool_id", "namespace", "version", "parameters", "result_schema", "known_pairs", "timeout_class",
})  # fmt: skip
