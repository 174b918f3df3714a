"""The checks of `interlock doctor` that concern the machine: Python, installed libraries, SQLite and isolation."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from interlock.api.doctor.findings import Finding

if TYPE_CHECKING:
    from interlock.store.home import Home


def check_python(_: Home) -> Iterator[Finding]:
    from interlock.data.canonical import compiled

    fits = sys.version_info >= (3, 11)
    advice = "" if fits else "install Python 3.11 or newer"
    slower = "" if compiled else ", without the compiled part (large inputs take longer)"
    found = f"{platform.python_version()} on {sys.platform}{slower}"
    yield Finding("python", "good" if fits else "broken", found, advice)


def check_packages(_: Home) -> Iterator[Finding]:
    from interlock.api.packages import REMEDY, misfits

    found = misfits()
    for one in found:
        yield Finding("packages", "broken", one, REMEDY)
    if not found:
        yield Finding("packages", "good", "all libraries have versions that fit")


def check_sqlite(_: Home) -> Iterator[Finding]:
    from interlock.store.connection import DRIVER_FITS, DRIVER_VERSION

    advice = "" if DRIVER_FITS else "use a Python built with SQLite 3.35 or newer"
    yield Finding("sqlite", "good" if DRIVER_FITS else "broken", DRIVER_VERSION, advice)


def check_sandbox(_: Home) -> Iterator[Finding]:
    import asyncio

    from interlock.gateway.isolation import rungs

    found = asyncio.run(rungs())
    first = next((rung for rung in found if rung.holds), None)
    if first is None:
        yield Finding("sandbox", "attention", "nothing isolates here", "sandboxed tools are refused with E3405")
    better = found if first is None else found[: found.index(first)]
    for rung in found:
        name = "sandbox" if rung is first else ""
        if rung.holds:
            yield Finding(name, "good", f"{rung.backend}: {rung.words}, {_tiers(rung.tiers)}")
            continue
        missed = rung in better
        lost = _lost(rung.tiers, first.tiers) if missed and first is not None else ""
        yield Finding(name, "attention" if missed else "good", f"{rung.backend} is not used: {rung.why_not}", lost)


def _lost(tiers: Sequence[int], left: Sequence[int]) -> str:
    """The consequence for tools of an isolation back end that does not work, if another one does."""
    missing = [tier for tier in tiers if tier not in left]
    refused = f", and tools of {_tiers(missing)} are refused with E3405" if missing else ""
    return f"calls start more slowly{refused}"


def _tiers(tiers: Sequence[int]) -> str:
    return f"tiers {tiers[0]} to {tiers[-1]}"
