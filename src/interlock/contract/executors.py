"""The executors, one row for each `execution.kind` of a manifest. A new one is a module and a row here.

A row says everything about a kind that others need to know: which manifests are accepted, how a tool is made of one,
how the gateway treats its calls, and the module that runs them. That module has a function `make(site)` that returns an
`Executor` (`interlock.executors.site`). It is named here and imported by the gateway only: a contract runs nothing.

What tools of one executor do differently follows from their `protocol`, which has a table of its own (`PROTOCOLS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from interlock.core.record import dataclass

# Of an upstream's tool, in `execution.native`: its description as the upstream has it, where a manifest cannot hold it.
OWN_DESCRIPTION: Final = "own_description"


@dataclass(frozen=True, slots=True)
class ExecutorKind:
    """One kind of execution.

    `module` runs its tools, and `sandboxed_by` those whose manifest has a sandbox: None if the kind has none, and the
    same module if every tool of the kind is sandboxed. `noun` is for messages. `fields` are the parts of `execution`
    that belong to this kind. `standard` is where its tools run, in the words of Agent Tool. `in_process`: the target is
    a Python function, which is loaded here and, without a sandbox, called here. Tools of other kinds have no handlers,
    so they cannot be undone and are previewed from the effects that they declare. `of_upstream`: the system that runs
    them belongs to others, so a call is external I/O and may fail for reasons that pass, and the operator of Interlock
    states in an overlay how calls are undone and where their keys come from. `provided_by` says how tools of the kind
    are added, if not by a manifest in a file.
    """

    module: str
    noun: str
    sandboxed_by: str | None = None
    fields: frozenset[str] = frozenset()
    standard: Literal["local", "shell", "remote"] = "remote"
    in_process: bool = False
    reports_progress: bool = False
    of_upstream: bool = False
    provided_by: str | None = None

    @property
    def always_sandboxed(self) -> bool:
        return self.sandboxed_by == self.module


EXECUTORS: Final[Mapping[str, ExecutorKind]] = {
    "function": ExecutorKind(
        "interlock.executors.function",
        "a function",
        sandboxed_by="interlock.executors.isolated",
        standard="local",
        in_process=True,
        reports_progress=True,
    ),
    "program": ExecutorKind(
        "interlock.executors.isolated",
        "a program",
        sandboxed_by="interlock.executors.isolated",
        fields=frozenset(("argv", "stdin", "parse", "env", "cwd")),
        standard="shell",
    ),
    "upstream": ExecutorKind(
        "interlock.executors.remote",
        "a tool of an upstream",
        fields=frozenset(("native", "undo")),
        of_upstream=True,
        provided_by="is an upstream's: add the upstream, and its tools come with it",
    ),
}


def kinds() -> list[str]:
    """The names of all kinds."""
    return list(EXECUTORS)


@dataclass(frozen=True, slots=True)
class ToolProtocol:
    """The traits of the tools of one `protocol`, which a manifest states.

    `written_here`: the tool was declared for Interlock, so its input is closed, and each field needs a description and
    an example. `mcp_form`: its definition and its results are those of an MCP server, and are passed on as such.
    `reports_progress`: a call can report progress, whatever runs it. `standard` is where its tools run, in the words of
    Agent Tool, if they run at a service.
    """

    written_here: bool = False
    mcp_form: bool = False
    reports_progress: bool = False
    standard: Literal["mcp", "api", "remote"] = "remote"


PROTOCOLS: Final[Mapping[str, ToolProtocol]] = {
    "native": ToolProtocol(written_here=True),
    "mcp": ToolProtocol(mcp_form=True, reports_progress=True, standard="mcp"),
    "openapi": ToolProtocol(standard="api"),
    "langchain": ToolProtocol(),
    "custom": ToolProtocol(),
}


def kind_of(name: str) -> ExecutorKind:
    """The row of a kind that a manifest names."""
    return EXECUTORS[name]


def foreign_field(name: str, stated: frozenset[str]) -> tuple[str, str] | None:
    """A stated part of `execution` that belongs to other kinds only, and the first of those; None if there is none."""
    own = EXECUTORS[name].fields
    for other, row in EXECUTORS.items():
        if strange := sorted((stated & row.fields) - own):
            return strange[0], other
    return None


def modules() -> list[str]:
    """The modules that run tools, each once."""
    named = [module for row in EXECUTORS.values() for module in (row.module, row.sandboxed_by) if module is not None]
    return list(dict.fromkeys(named))
