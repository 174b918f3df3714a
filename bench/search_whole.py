"""`search`: the whole of `app.search`, with the tools of one caller and the policy, in a process of its own.

Started as `python -m bench.search_whole TOOLS REQUESTS`, it prints six figures in ms of CPU time: the first search
with each request (p50, p95), the same again (p50, p95), and how much longer a search takes after a change of the
registry, with noticing it (p50 for one added tool, and for one deprecated tool).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from bench import sets
from interlock import Interlock
from interlock.contract.manifest import Manifest, parse_manifest
from interlock.data.canonical import digest
from interlock.registry import admission
from interlock.registry.admission import TrialEvidence
from interlock.registry.retirement import deprecate
from interlock.search.index import IndexedTool
from interlock.store.port import Unit

RULES = 20
_CHANGES = 20
_AT_ONCE = 500


async def measure(tools: int, requests: int) -> list[float]:
    """Fill a data directory with the tools of the sets, many times with other names, and search it."""
    found = [one for folder in sets.found() for one in sets.load(folder).entries]
    queries = [one.text for folder in sets.found() for one in islice(sets.load(folder).queries, requests // 2)]
    with TemporaryDirectory(prefix="interlock-bench-") as name:
        async with Interlock.open(Path(name), housekeeping=False) as app:
            app.policy.path.write_text(app.policy.path.read_text() + _rules())
            for number in range(tools):
                app.journal.post(_publication(found[number % len(found)], number))
                if number % _AT_ONCE == 0:
                    await app.journal.drain()
            await app.journal.drain()
            await app.catalog.forget()
            await app.search("anything at all")  # it makes the index
            first, again = [await _timed(app, queries) for _ in range(2)]
            added = [_publication(found[number % len(found)], tools + number) for number in range(_CHANGES)]
            retired = [deprecate(f"bench.tool_{number}", "1.0.0", by="bench") for number in range(_CHANGES)]
            changed = [median([await _after(app, one, queries[0]) for one in units]) for units in (added, retired)]
            return [first[9], first[18], again[9], again[18], *changed]


async def _timed(app: Interlock, queries: Sequence[str]) -> list[float]:
    taken: list[float] = []
    for query in queries:
        began = time.process_time()
        await app.search(query)
        taken.append(1000 * (time.process_time() - began))
    return quantiles(taken, n=20)


async def _after(app: Interlock, change: Unit[Any], query: str) -> float:
    """The extra time of the first search after a committed change, compared with the search after it."""
    await app.journal.commit(change)
    began = time.process_time()
    await app.journal.changes.look()
    await app.search(query)
    then = time.process_time()
    await app.search(query)
    return 1000 * (then - began - (time.process_time() - then))


def _publication(entry: IndexedTool, number: int) -> Unit[bool]:
    manifest = _manifest(entry, number)
    content = digest(manifest.document())
    return admission.publish(manifest, content, "library:", TrialEvidence(content, True, "bench", ""), "bench")


def _rules() -> str:
    """Rules about groups, single tools and the arguments of calls, in equal parts."""
    forms = (
        '@id("g{n}") forbid (principal in Group::"guests-{n}", action, resource);',
        '@id("t{n}") forbid (principal, action == Action::"bench.tool_{n}", resource);',
        '@id("a{n}") forbid (principal, action, resource) when {{ context.arguments has amount_{n} }};',
    )
    return "\n" + "\n".join(forms[n % len(forms)].format(n=n) for n in range(RULES)) + "\n"


def _manifest(entry: IndexedTool, number: int) -> Manifest:
    properties = {
        one: {"type": "string", "description": text}
        for one, text in zip(entry.parameters, entry.parameter_texts, strict=False)
    }
    return parse_manifest(
        {
            "tool_id": f"tool_{number}",
            "namespace": "bench",
            "name": f"tool {entry.name[:50]}",
            "version": "1.0.0",
            "provider": "bench",
            "protocol": "native",
            "description": f"A tool, {entry.name}: {entry.description[:900]}",
            "mutation_class": "read_only",
            "parameters": {"type": "object", "properties": properties},
            "result_schema": {},
            "required_permissions": [],
            "idempotency": {},
            "observability": {},
        }
    )


if __name__ == "__main__":
    print(*asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2]))))
