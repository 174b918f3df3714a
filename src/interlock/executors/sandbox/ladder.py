"""The supported ways of isolation, best first, and which of them this host offers.

A rung is not trusted because its parts seem to exist. It is tried: a probe runs on it and inspects its surroundings.
The rung holds only if the probe runs, sees no process but its own, cannot write to its root and cannot open a socket.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlock.core.record import dataclass
from interlock.executors.sandbox.cgroups import Cgroups
from interlock.executors.sandbox.child import Backend, IsolationError, Shape
from interlock.executors.sandbox.job import JobOutcome, Limits, PythonJob
from interlock.executors.sandbox.pool import Host, Zygotes
from interlock.executors.sandbox.watch import Watch

BACKENDS = ("zygote", "bubblewrap", "gvisor")

_PROBE = PythonJob(
    source="""
import os, socket
def main():
    seen = []
    try:
        open("/probe", "w")
        seen.append("the root can be written to")
    except OSError:
        pass
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM).connect(("127.0.0.1", 9))
        seen.append("a connection can be made")
    except OSError:
        pass
    if os.getuid() == 0:
        seen.append("the user is root")
    others = [one for one in os.listdir("/proc") if one.isdigit() and int(one) > 9]
    if others:
        seen.append("other processes can be seen")
    with open("/proc/self/status") as file:
        facts = dict(line.split(":", 1) for line in file)
    if int(facts.get("CapEff", "0"), 16):
        seen.append("there are capabilities")
    return seen
""",
    entry="main",
    limits=Limits(wall_s=20.0),
)


@dataclass(frozen=True, slots=True)
class Rung:
    """One way of isolation: its parts, the tiers it covers, and why it does not hold if it does not."""

    backend: str
    words: str
    tiers: tuple[int, ...]
    why_not: str = ""
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.why_not


async def climb(
    host: Host, backends: Sequence[str], *, cgroups: bool, spares: int, recycle_after: int
) -> tuple[Backend | None, list[Rung]]:
    """Find the first back end that holds, and return it with the rungs tried."""
    rungs: list[Rung] = []
    for name in backends:
        backend, rung = await _try(name, host, cgroups=cgroups, spares=spares, recycle_after=recycle_after)
        rungs.append(rung)
        if backend is not None:
            return backend, rungs
    return None, rungs


async def probe_all(host: Host, known: Sequence[Rung]) -> list[Rung]:
    """Try the rungs that were not tried yet and return all."""
    rungs = {rung.backend: rung for rung in known}
    for name in BACKENDS:
        if name not in rungs:
            backend, rungs[name] = await _try(name, host, cgroups=True, spares=0, recycle_after=1)
            if backend is not None:
                await backend.close()
    return [rungs[name] for name in BACKENDS if name in rungs]


async def _try(name: str, host: Host, *, cgroups: bool, spares: int, recycle_after: int) -> tuple[Backend | None, Rung]:
    groups, notes = None, list[str]()
    if cgroups:
        try:
            groups = Cgroups.open()
        except OSError as error:
            notes.append(f"no cgroups, so memory is bounded per process and watched for the tree: {error}")
    backend: Backend
    if name == "zygote":
        backend = Zygotes(host, groups, spares=spares, recycle_after=recycle_after)
        words = "own namespaces, seccomp, Landlock, forked from a zygote"
    elif name == "bubblewrap":
        from interlock.executors.sandbox.oneshot import Bubblewrap

        backend, words = Bubblewrap(host, groups), "bubblewrap with our own seccomp filter, one process tree a call"
    else:
        from interlock.executors.sandbox.gvisor import Gvisor

        backend, words = Gvisor(host, groups), "gVisor (runsc): a kernel of its own, one container a call"
    tiers = tuple(sorted(backend.tiers))
    why_not = await _probe(backend)
    if not why_not:
        return backend, Rung(name, words, tiers, notes=tuple(notes))
    await backend.close()
    return None, Rung(name, words, tiers, why_not, tuple(notes))


async def _probe(backend: Backend) -> str:
    """Run a probe. Returns an empty text if it found itself confined; else why not."""
    try:
        child = await backend.take(Shape.of(_PROBE))
    except IsolationError as error:
        return str(error)
    try:
        watch = Watch(
            child, _PROBE, exit_evidence=True, on_progress=None, on_partial=None, on_checkpoint=None, refused=[]
        )
        return _verdict(await watch.outcome(None))
    finally:
        backend.give_back(child)


def _verdict(outcome: JobOutcome) -> str:
    if outcome.status != "ok":
        return f"the probe ended as {outcome.status}: {outcome.why or outcome.error or 'no reason given'}"
    return "; ".join(outcome.value)
