"""Makes the executors of a gateway: one of each module that contract/executors.py names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from interlock.contract import executors
from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.call.checkpoints import Bounds
    from interlock.call.connector import Connector, ReadFile
    from interlock.call.context import Caller, Context
    from interlock.call.executor import Executor
    from interlock.call.phases import Call, Granted
    from interlock.contract.manifest import NetworkPolicy
    from interlock.core.clock import Clock


class Alert(Protocol):
    """Alerts operators about a call."""

    def __call__(self, name: str, call: Call, /, **facts: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The parts of the gateway that an executor may use.

    `grant` is the object that Authorize puts on granted calls. `network` is what this gateway's tools may reach, and
    `network_of` that of single agents. `connect` returns the connector of an upstream by its name; it raises E3502 if
    the upstream is known to be away. `read_file` reads a file that an earlier call of a caller left. `narrowed` returns
    the caller of a call with no more authority than its tool requires. `make_context` returns a context for a call that
    was started without one. `hide` removes the private values of a call from a text. `violated` records attempts at
    what the sandbox forbids. `sandbox` is the file through which the processes of a data directory share the resources
    of a sandbox, and `grace_s` the time that code in it has to clean up once its call is over.
    """

    grant: object
    clock: Clock
    network: NetworkPolicy
    network_of: Mapping[str, NetworkPolicy]
    connect: Callable[[str], Connector]
    read_file: ReadFile
    narrowed: Callable[[Granted], Caller]
    make_context: Callable[[Granted], Context]
    alert: Alert
    hide: Callable[[Call, str], str]
    violated: Callable[[Call, Sequence[str]], None]
    checkpoints: Bounds | None
    sandbox: Path | None
    grace_s: float


class _Module(Protocol):
    """A module that runs tools."""

    def make(self, site: Site, /) -> Executor: ...


def make_executors(site: Site) -> dict[str, Executor]:
    """The executors by their modules."""
    return {name: cast("_Module", importlib.import_module(name)).make(site) for name in executors.modules()}
