"""Programs in the sandbox: the job of a call, word by word, and the output that the program printed."""

from __future__ import annotations

import hashlib
from typing import Any

from interlock.call.phases import Call, Granted
from interlock.contract.manifest import Execution
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.bounds import MOST_VALUES, TooManyValues, parse, plain_text
from interlock.data.schema import Json
from interlock.executors.confinement import lent_to
from interlock.executors.sandbox.job import JobOutcome, ProgramJob, failure_of
from interlock.telemetry.w3c import headers

# The number of bytes at the end of stderr that are searched for its last lines.
LAST_BYTES = 16 << 10
# The number and length of stderr lines in a failure for the caller.
LAST_LINES, LINE_LENGTH = 5, 200


def program_job(program: Execution, granted: Granted, confined: Json, clock: Clock, grace_s: float) -> ProgramJob:
    """The job of a call of a program."""
    tool, given = granted.tool, granted.input
    return ProgramJob(
        argv=program.words(given),
        stdin=program.fed(given),
        cwd=program.cwd,
        env=_environment(program, granted, clock) if tool.contract.manifest.tier else program.env,
        # They become files of one directory, and the name of a credential may contain slashes.
        secrets={name.replace("/", "."): value for name, value in lent_to(granted, tool.credentials).items()},
        grace_s=grace_s,
        **confined,
    )


def program_output(program: Execution, granted: Granted, outcome: JobOutcome) -> Any:
    """The output of a program, as its manifest says that it is read; or its failure."""
    more = granted.extend()
    more.mappings = (*more.mappings, _mapping(program, granted, outcome))
    more.files = outcome.files
    return _printed(program, outcome, granted.tool.ref)


def _environment(program: Execution, call: Call, clock: Clock) -> dict[str, str]:
    """The environment of a program: what its manifest says, and the trace it runs under."""
    trace = headers(call.trace_id, call.more.span, clock.random_bytes)
    return {**{name.upper(): value for name, value in trace.items()}, **program.env}


def _mapping(program: Execution, granted: Granted, outcome: JobOutcome) -> Json:
    """The external mapping of a program run: the program, the digest of its words, the host, and how it ended."""
    contract = granted.tool.contract
    words = "\0".join(program.words(granted.input))
    return {
        "schema_version": "0.2.0",
        "kind": "cli",
        "command_id": program.target,
        "argv_ref": f"sha256:{hashlib.sha256(words.encode(errors='surrogatepass')).hexdigest()}",
        "cwd_ref": program.cwd,
        "env_policy_ref": f"profile:{contract.ref}",
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "sandbox_ref": f"tier-{contract.manifest.tier}",
    }


def _printed(program: Execution, outcome: JobOutcome, ref: str) -> Any:
    """Read the output of a program as its manifest says, or raise its failure."""
    if outcome.status == "error" and outcome.exit_code:
        details = {"exit_code": outcome.exit_code, "stderr": _complaint(outcome)}
        raise Failure("E3401", f"{ref} failed with exit code {outcome.exit_code}", details=details)
    if outcome.status == "error" and (outcome.error or {}).get("type") in _NOT_THERE:
        raise Failure("E3108", f"{ref} cannot be started: `{program.target}` or its directory is not in the sandbox")
    if outcome.status == "crashed" and outcome.signal is not None:
        details = {"signal": outcome.signal, "stderr": _complaint(outcome)}
        raise Failure("E3404", f"{ref} was ended by signal {outcome.signal}", details=details)
    if outcome.status != "ok":
        raise failure_of(outcome, ref)
    try:
        if program.parse == "json":
            return parse(outcome.stdout)
        text = outcome.stdout.decode()
    except TooManyValues:
        raise Failure("E3407", f"{ref} reached its limit of the number of values") from None
    except (ValueError, RecursionError):
        wanted = "JSON" if program.parse == "json" else "UTF-8"
        raise Failure("E3404", f"{ref} did not keep to its output protocol: what it printed is not {wanted}") from None
    if program.parse == "text":
        return text
    if text.count("\n") > MOST_VALUES:
        raise Failure("E3407", f"{ref} reached its limit of {MOST_VALUES} lines")
    return text.removesuffix("\n").split("\n") if text else []


_NOT_THERE = ("FileNotFoundError", "NotADirectoryError", "PermissionError")


def last_lines(stderr: bytes, most: int) -> list[str]:
    """The last lines of stderr, without characters that control a terminal."""
    text = stderr[-LAST_BYTES:].decode(errors="replace")
    lines = plain_text(text, LAST_BYTES).splitlines()
    return [line for line in lines if line.strip()][-most:]


def _complaint(outcome: JobOutcome) -> list[str]:
    """The last lines of stderr, for the caller."""
    return [line[:LINE_LENGTH] for line in last_lines(outcome.stderr, LAST_LINES)]
