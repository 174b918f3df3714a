"""Declares a tool that is never called. A zygote imports this module, so that the calls it serves need not.

A call loads the module of its tool, which declares its tools. The first declaration in a process loads pydantic and
builds the models of contracts: a tenth of a second of CPU, which every call would take out of its own time.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from interlock.call.artifacts import Artifact
from interlock.call.checkpoints import Checkpoint
from interlock.call.context import Caller, Change, Context, Preview
from interlock.contract.declare import tool
from interlock.contract.examples import Example
from interlock.contract.manifest import Effect, Precondition
from interlock.core.errors import Failure

LOADED = (Artifact, Caller, Change, Checkpoint, Example, Failure, Precondition, Preview)

Name = Annotated[str, Field(description="a name", examples=["a"], max_length=40)]
Number = Annotated[int | None, Field(description="a number", examples=[1])]


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="sandbox", sandbox=True,
    effects=[Effect("ready:{name}", "UPDATE")],
)  # fmt: skip
def ready(context: Context, name: Name, number: Number = None) -> dict[str, Any]:
    """Nothing: the models of its contract are built."""
    return {}
