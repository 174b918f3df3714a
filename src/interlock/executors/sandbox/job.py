"""Jobs of the sandbox: the code, its limits, and its outcome.

A job is code of one of two kinds at one of four tiers. An outcome states how it ended. That is decided by evidence that
the code cannot influence: how its process died, what the kernel counted, what the supervisor itself did.

INVARIANT: what the code says about itself can choose between two failures, and can never make a success of one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from interlock.call.artifacts import File
from interlock.call.checkpoints import Bounds
from interlock.contract.permissions import own_place
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.executors.sandbox import frames

MIB, GIB = 1 << 20, 1 << 30

Tier = Literal[0, 1, 2, 3]
Status = Literal[
    "ok", "error", "crashed", "timeout", "memory", "limit", "network", "no_result", "killed", "isolation"
]  # fmt: skip

# Takes the socket that listens inside the call's network, serves it until the context ends, and returns the list to
# which it adds every refused request.
Egress = Callable[[socket.socket], AbstractAsyncContextManager[list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the use of a call. Storage is memory here: it counts towards both."""

    memory_bytes: int = 512 * MIB
    cpu_cores: float = 1.0
    cpu_s: int = 60
    wall_s: float = 30.0
    pids: int = 64
    tmp_bytes: int = 100 * MIB
    output_bytes: int = 1 * MIB
    result_bytes: int = 4 * MIB
    # The number of files it may produce, with as much content together as it may print; 0: none are collected.
    files: int = 0

    @property
    def confining(self) -> tuple[int, float, int, int, int]:
        """The limits that are applied to a process before it is known what it will run."""
        return self.memory_bytes, self.cpu_cores, self.cpu_s, self.pids, self.tmp_bytes


@dataclass(frozen=True, slots=True, order=True)
class Mount:
    """A file or directory of the host that the call may read, and its place inside; or a directory it may write to.

    Read-only ones lie below `/in`. A writable directory is at its own path. Links on the way are followed when the
    mount is described, and their target then is what the call gets.
    """

    host: Path
    inside: str
    writable: bool = False
    # Device and inode: a directory that was replaced by another since is another mount.
    identity: tuple[int, int] = field(init=False, default=(0, 0))

    def __post_init__(self) -> None:
        below_in = self.inside.startswith("/in/") and not self.writable
        at_its_own = self.inside == str(self.host) and not own_place(self.inside)
        if not (below_in or at_its_own) or ".." in self.inside.split("/"):
            raise Failure("E3308", "a file is mounted below `/in/`, a directory that is written to at its own path")
        # INVARIANT: links are followed here, on the host. Where the mount is made, `/` is another place.
        object.__setattr__(self, "host", Path(os.path.realpath(self.host)))
        with contextlib.suppress(OSError):
            seen = os.stat(self.host)
            object.__setattr__(self, "identity", (seen.st_dev, seen.st_ino))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    tier: Tier = 0
    limits: Limits = field(default_factory=Limits)
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    egress: Egress | None = None
    ticket: str | None = None
    # How long the code may clean up when it was told that its call is over. 0: it is not told, and killed at once.
    grace_s: float = 0.0

    @property
    def writes(self) -> bool:
        """Whether it can change files of the host."""
        return any(one.writable for one in self.mounts)

    def __post_init__(self) -> None:
        if self.tier == 0 and (self.mounts or self.env):
            raise Failure("E3210", "code at tier 0 gets neither files nor environment; ask for tier 1")
        if self.tier != 2 and self.egress is not None:
            raise Failure("E3210", "only code at tier 2 reaches the network through the proxy")
        if self.tier == 3 and not self.ticket:
            raise Failure("E3208", "code at tier 3 has full access: a person must agree to every run of it")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonJob(_Job):
    """A function in a module given as source. `call` is the data of its context."""

    source: str
    entry: str
    arguments: Json = field(default_factory=dict[str, Any])
    filename: str = "tool.py"
    # The package of the source, and modules that it may import, by name: their text, and whether a package.
    package: str = ""
    modules: Mapping[str, tuple[str, bool]] = field(default_factory=dict[str, tuple[str, bool]])
    imports: frozenset[str] = frozenset()
    call: Json = field(default_factory=dict[str, Any])
    checkpoints: Bounds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramJob(_Job):
    """A program and its arguments, word by word: no shell reads them."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    cwd: str = "/tmp"  # noqa: S108 - the sandbox's own, private to the call


Job = PythonJob | ProgramJob


def request_of(job: Job) -> bytes:
    """Encode the request for the code inside. Secrets travel here and nowhere else."""
    document: Json = {
        "env": dict(job.env),
        "secrets": {name: base64.b64encode(value).decode() for name, value in job.secrets.items()},
        # The size of a file that is worth sending: one byte more than is allowed suffices to refuse it.
        "files": job.limits.output_bytes + 1 if job.limits.files else 0,
        "wall_s": job.limits.wall_s,
    }
    if isinstance(job, PythonJob):
        document |= {
            "source": job.source,
            "filename": job.filename,
            "package": job.package,
            "modules": dict(job.modules),
            "entry": job.entry,
            "arguments": job.arguments,
            "imports": sorted(job.imports),
            "call": job.call,
            "checkpoints": job.checkpoints,
        }
    else:
        document |= {"argv": job.argv, "cwd": job.cwd, "stdin": base64.b64encode(job.stdin).decode()}
    return frames.frame(frames.REQUEST, json.dumps(document).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The outcome of a job. Facts of a finished process (`exit_code` to `max_rss`) are None if it was
    not waited for.
    """

    status: Status
    why: str = ""
    value: Any = None
    error: Json | None = None
    reports: Json = field(default_factory=dict[str, Any])
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = None
    signal: int | None = None
    cpu_ns: int | None = None
    max_rss: int | None = None
    wall_ns: int = 0
    violations: tuple[str, ...] = ()
    files: tuple[File, ...] = ()


# The codes with which a tool may itself state the kind of its failure.
_OWN_CODES = frozenset((
    "E3109", "E3308", "E3401", "E3407", "E3410", "E3411", "E3502", "E3503", "E3504", "E3602", "E3902", "E3906",
))  # fmt: skip


def failure_of(outcome: JobOutcome, ref: str) -> Failure:
    """Convert an outcome that is not a success to a failure for callers: no path, no output, nothing of the host."""
    signal = None if outcome.signal is None else f"signal {outcome.signal}"
    match outcome.status:
        case "error":
            return _own_failure(outcome, ref)
        case "timeout":
            return Failure("E3402", f"{ref} did not finish in time and was ended with everything it had started")
        case "memory":
            return Failure("E3403", f"{ref} used more memory than its limit")
        case "crashed":
            return Failure("E3404", f"{ref} was ended by {signal or 'a fault of its own'}")
        case "no_result":
            why = f": {outcome.why}" if outcome.why else ""
            return Failure("E3404", f"{ref} ended without a result that can be read{why}")
        case "killed":
            return Failure("E3703", f"{ref} was cancelled and ended with everything it had started")
        case "network":
            return Failure("E3406", f"{ref} reached for a network that it is not allowed")
        case "limit":
            return Failure("E3407", f"{ref} reached its limit of {outcome.why}")
        case "isolation" | "ok":
            return Failure("E3405", f"{ref} was not run: {outcome.why or 'it could not be isolated'}")


def _own_failure(outcome: JobOutcome, ref: str) -> Failure:
    error = outcome.error or {}
    if error.get("code") in _OWN_CODES:
        return Failure(error["code"], str(error.get("message", "")), retryable=bool(error.get("retryable")))
    if outcome.exit_code:
        return Failure("E3401", f"{ref} failed with exit code {outcome.exit_code}")
    return Failure("E3401", f"{ref} failed: {error.get('type', 'an error')}")
