"""Interlock: a governed tool execution layer for AI agents.

from interlock import Context, Effect, Field, Interlock, tool
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interlock._version import __version__

if TYPE_CHECKING:
    from pydantic import Field

    from interlock.app import Admission, Interlock
    from interlock.core.artifacts import Artifact
    from interlock.core.checkpoints import Checkpoint
    from interlock.core.clock import Clock, Deadline
    from interlock.core.context import Caller, Change, Context, Preview
    from interlock.core.declare import Tool, tool
    from interlock.core.errors import ErrorClass, ErrorCode, Failure
    from interlock.core.events import Event
    from interlock.core.manifest import Approval, ApprovalStep, Effect, Precondition, Sandboxing
    from interlock.core.phases import Request
    from interlock.core.results import Result
    from interlock.gateway.batch import BatchPolicy
    from interlock.gateway.hooks import Hook, HookResult, Seen

# Names are looked up when first used: `interlock --help` must not wait for a database driver.
_HOMES = {
    "Admission": "interlock.app",
    "Approval": "interlock.core.manifest",
    "ApprovalStep": "interlock.core.manifest",
    "Artifact": "interlock.core.artifacts",
    "BatchPolicy": "interlock.gateway.batch",
    "Caller": "interlock.core.context",
    "Change": "interlock.core.context",
    "Checkpoint": "interlock.core.checkpoints",
    "Clock": "interlock.core.clock",
    "Context": "interlock.core.context",
    "Deadline": "interlock.core.clock",
    "Effect": "interlock.core.manifest",
    "ErrorClass": "interlock.core.errors",
    "ErrorCode": "interlock.core.errors",
    "Event": "interlock.core.events",
    "Failure": "interlock.core.errors",
    "Field": "pydantic",
    "Hook": "interlock.gateway.hooks",
    "HookResult": "interlock.gateway.hooks",
    "Interlock": "interlock.app",
    "Precondition": "interlock.core.manifest",
    "Preview": "interlock.core.context",
    "Request": "interlock.core.phases",
    "Result": "interlock.core.results",
    "Sandboxing": "interlock.core.manifest",
    "Seen": "interlock.gateway.hooks",
    "Tool": "interlock.core.declare",
    "tool": "interlock.core.declare",
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
    "Clock",
    "Context",
    "Deadline",
    "Effect",
    "ErrorClass",
    "ErrorCode",
    "Event",
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
