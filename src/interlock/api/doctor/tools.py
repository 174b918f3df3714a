"""The checks of `interlock doctor` that concern tools: whether they load as admitted, and how long they take."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from interlock.api.doctor.findings import Finding, if_usable

if TYPE_CHECKING:
    from interlock.core.errors import Failure
    from interlock.store.home import Home
    from interlock.store.inspection import Origin
    from interlock.store.port import Reader


def check_tools(home: Home) -> Iterator[Finding]:
    from interlock.contract.declare import Tool
    from interlock.core.errors import Failure
    from interlock.registry.catalog import contract_digest
    from interlock.registry.source import reload
    from interlock.store.inspection import origins

    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    with if_usable(home) as reader:
        if reader is None:
            return
        rows = origins(reader)
        total = len(rows)
        rows = [row for row in rows if not _stored(home, reader, row)]
        changed = [_other_text(home, reader, row) for row in rows]
    found: dict[str, dict[str, Tool[..., object]] | Failure] = {}
    good = total - len(rows)
    for (address, version, origin, digest), another in zip(rows, changed, strict=True):
        if another is not None:
            there = another  # and is not loaded: that would execute it
        else:
            if origin not in found:
                try:
                    tools = reload(origin, home.manifests)
                    found[origin] = {f"{tool.manifest.address}@{tool.manifest.version}": tool for tool in tools}
                except Failure as failure:
                    found[origin] = failure
            there = found[origin]
        tool = None if isinstance(there, Failure) else there.get(f"{address}@{version}")
        if tool is not None and contract_digest(tool) == digest:
            good += 1
            continue
        reason = "it has changed" if tool is not None else "it is no longer there"
        reason = there.message if isinstance(there, Failure) else reason
        advice = "put it back as it was admitted, or publish what is there as a new version: interlock tools add"
        if isinstance(there, Failure) and there.details:
            advice = there.details.get("install") or advice
        yield Finding("tools", "broken", f"{address}@{version} cannot be called: {reason}", advice)
    if good or not total:
        yield Finding("tools", "good", f"{good} of {total} added from files and modules load as they were admitted")


def _stored(home: Home, reader: Reader, row: Origin) -> bool:
    """Whether all of a tool is in a store that machines share, so that it needs no file."""
    from interlock.registry.tool_code import admitted_source, runs_from_text, stored_text_of, stored_tool
    from interlock.store.inspection import admitted_manifest

    text = None if home.near else admitted_manifest(reader, row)
    if text is None or stored_tool(text, row.origin) is not None:
        return text is not None
    if not runs_from_text(admitted_source(reader, row.digest)):
        return False
    found = stored_text_of(reader, row.digest)
    return found is not None and _unusable(text, found) is None


def _unusable(manifest: str, text: bytes | Failure) -> Failure | None:
    """Why no tool can be made of a text in the store."""
    from interlock.core.errors import Failure
    from interlock.registry.tool_code import tool_from_text

    try:
        tool_from_text(manifest, text)
    except Failure as failure:
        return failure
    return None


def _other_text(home: Home, reader: Reader, row: Origin) -> Failure | None:
    """Why a tool is not loaded: that would execute another text than when it was admitted. None where it would not."""
    from interlock.core.errors import Failure
    from interlock.registry.tool_code import (
        admitted_source,
        code_here,
        native_code,
        refuse_other_code,
        runs_from_text,
        source_changed,
        stored_text_of,
    )
    from interlock.store.inspection import admitted_manifest

    text = admitted_manifest(reader, row)
    if text is None:
        return None
    source = admitted_source(reader, row.digest)
    admitted = None if home.near else native_code(source)
    if not home.near and runs_from_text(source):
        found = stored_text_of(reader, row.digest)
        if found is not None and (failure := _unusable(text, found)) is not None:
            return failure
    if admitted is None:
        changed = source_changed(source, text, row.origin, home.manifests)
        return Failure("E3103", "it has changed") if changed else None
    try:
        refuse_other_code(code_here(text, row.origin, home.manifests), admitted, row.origin)
    except Failure as failure:
        return failure
    return None


def check_latency(home: Home) -> Iterator[Finding]:
    import orjson

    from interlock.registry.latency import differs, measure
    from interlock.store.inspection import active_manifests

    with if_usable(home) as reader:
        if reader is None:
            return
        found = measure(reader)
        for address, version, text in active_manifests(reader) if found else ():
            timing = found.get(f"{address}@{version}")
            if timing is None:
                continue
            manifest = orjson.loads(text)
            if (wanted := differs(manifest, timing)) is not None:
                what = f"{address}@{version} states {manifest['timeout_class']}; of {timing.calls:,} calls 99 % took"
                advice = f"state timeout_class: {wanted} in its next version, or leave it out"
                yield Finding("latency", "attention", f"{what} at most {timing.p99_s * 1000:,.0f} ms", advice)
