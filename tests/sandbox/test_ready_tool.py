"""What modules of tools use is loaded and built before a call, in the process that calls are forked from."""

from __future__ import annotations

import textwrap

import pytest

from interlock.executors.sandbox.job import PythonJob
from interlock.executors.sandbox.supervisor import Sandbox

MODULE = """
import sys

before = set(sys.modules)

from typing import Annotated

from interlock import (
    Artifact, Caller, Change, Checkpoint, Context, Effect, Example, Failure, Field, Precondition, Preview, tool
)


@tool(version="1.0.0", mutation_class="write_reversible", namespace="n", effects=[Effect("a:{name}", "UPDATE")])
def write(context: Context, name: Annotated[str, Field(description="a name", examples=["a"])] = "a") -> dict[str, int]:
    '''Write to a place that tools write to.'''
    return {}


def main():
    return sorted(set(sys.modules) - before)
"""


@pytest.mark.asyncio(loop_scope="session")
async def test_a_call_of_a_function_loads_nothing_for_the_declaration_of_its_tool(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(PythonJob(source=textwrap.dedent(MODULE), entry="main"))
    assert (outcome.status, outcome.value) == ("ok", []), outcome
