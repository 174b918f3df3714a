"""Interlock: a governed tool execution layer for AI agents.

from interlock import Context, Effect, Field, Interlock, tool
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interlock._version import __version__

if TYPE_CHECKING:
    from pydantic import Field

    from interlock.api.client import Client
    from interlock.api.interlock import Admission, Interlock
    from interlock.call.artifacts import Artifact
    from interlock.call.checkpoints import Checkpoint
    from interlock.call.context import Caller, Context, Preview
    from interlock.call.events import Event
    from interlock.call.phases import Request
    from interlock.call.results import Result
    from interlock.contract.declare import Tool, tool
    from interlock.contract.effects import Change
    from interlock.contract.examples import Example
    from interlock.contract.manifest import Approval, ApprovalStep, Effect, Precondition, Sandboxing
    from interlock.core.clock import Clock, Deadline
    from interlock.core.errors import ErrorClass, ErrorCode, Failure
    from interlock.gateway.batch import BatchPolicy
    from interlock.gateway.hooks import Hook, HookResult, Seen

# Names are looked up when first used: `interlock --help` must not wait for a database driver.
_HOMES = {
    "Admission": "interlock.api.interlock",
    "Approval": "interlock.contract.manifest",
    "ApprovalStep": "interlock.contract.manifest",
    "Artifact": "interlock.call.artifacts",
    "BatchPolicy": "interlock.gateway.batch",
    "Caller": "interlock.call.context",
    "Change": "interlock.call.context",
    "Checkpoint": "interlock.call.checkpoints",
    "Client": "interlock.api.client",
    "Clock": "interlock.core.clock",
    "Context": "interlock.call.context",
    "Deadline": "interlock.core.clock",
    "Effect": "interlock.contract.manifest",
    "ErrorClass": "interlock.core.errors",
    "ErrorCode": "interlock.core.errors",
    "Event": "interlock.call.events",
    "Example": "interlock.contract.examples",
    "Failure": "interlock.core.errors",
    "Field": "pydantic",
    "Hook": "interlock.gateway.hooks",
    "HookResult": "interlock.gateway.hooks",
    "Interlock": "interlock.api.interlock",
    "Precondition": "interlock.contract.manifest",
    "Preview": "interlock.call.context",
    "Request": "interlock.call.phases",
    "Result": "interlock.call.results",
    "Sandboxing": "interlock.contract.manifest",
    "Seen": "interlock.gateway.hooks",
    "Tool": "interlock.contract.declare",
    "tool": "interlock.contract.declare",
}

__all__ = [
    "Admission",
    "Approval",
    "ApprovalStep",
    "Artifact",
    "BatchPolicy",
    "Caller",
    "Change",
    "Checkpoint",
    "Client",
    "Clock",
    "Context",
    "Deadline",
    "Effect",
    "ErrorClass",
    "ErrorCode",
    "Event",
    "Example",
    "Failure",
    "Field",
    "Hook",
    "HookResult",
    "Interlock",
    "Precondition",
    "Preview",
    "Request",
    "Result",
    "Sandboxing",
    "Seen",
    "Tool",
    "__version__",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'interlock' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
