"""The states of a call, as a table.

A call is always in one of twenty states. `MOVES` lists every transition; inapplicable states are skipped, terminal
states never change. The diagram in docs/reference/states.md is drawn from this table.

    planned ─► selected ─► arguments_ready ─► (hooks, approval, queue) ─► running ─► succeeded, failed, timed_out …
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from interlock.core.errors import Failure

State = Literal[
    "planned",
    "selected",
    "schema_parse_failed",
    "arguments_ready",
    "validation_failed",
    "pre_hooks_running",
    "awaiting_approval",
    "approved",
    "denied",
    "queued",
    "running",
    "needs_input",
    "partial_result",
    "post_hooks_running",
    "yielded",
    "succeeded",
    "failed",
    "canceled",
    "timed_out",
    "blocked",
]
STATES: tuple[State, ...] = get_args(State)
# The states of a fast-path read.
FAST_PATH_STATES: tuple[State, ...] = ("planned", "selected", "arguments_ready", "running")

_ENDS_EARLY: tuple[State, ...] = ("blocked", "failed", "canceled", "timed_out")
_AFTER_RUN: tuple[State, ...] = ("post_hooks_running", "succeeded", "failed", "canceled", "timed_out", "blocked")

MOVES: Mapping[State, tuple[State, ...]] = {
    "planned": ("selected", "schema_parse_failed", "denied", *_ENDS_EARLY),
    "selected": ("arguments_ready", "schema_parse_failed", "validation_failed", "denied", *_ENDS_EARLY),
    "arguments_ready": (
        "pre_hooks_running",
        "validation_failed",
        "awaiting_approval",
        "approved",
        "denied",
        "queued",
        "running",
        "succeeded",  # a replay or a preview answers without running again
        *_ENDS_EARLY,
    ),
    "pre_hooks_running": (
        "arguments_ready",
        "validation_failed",
        "awaiting_approval",
        "approved",
        "denied",
        "queued",
        "running",
        "succeeded",
        *_ENDS_EARLY,
    ),
    "awaiting_approval": ("approved", "denied", *_ENDS_EARLY),
    "approved": ("queued", "running", "succeeded", "denied", *_ENDS_EARLY),
    "queued": ("running", "succeeded", *_ENDS_EARLY),
    "running": ("needs_input", "partial_result", "yielded", *_AFTER_RUN),
    "needs_input": ("running", *_ENDS_EARLY),
    "partial_result": ("running", "partial_result", "yielded", *_AFTER_RUN),
    "yielded": ("running", "partial_result", *_AFTER_RUN),
    "post_hooks_running": ("succeeded", *_ENDS_EARLY),
    "schema_parse_failed": (),
    "validation_failed": (),
    "denied": (),
    "succeeded": (),
    "failed": (),
    "canceled": (),
    "timed_out": (),
    "blocked": (),
}

TERMINAL: frozenset[State] = frozenset(state for state, moves in MOVES.items() if not moves)

# The outcome of each terminal state for analytics.
HISTORY: Mapping[State, Literal["success", "error", "timeout", "cancelled"]] = {
    "schema_parse_failed": "error",
    "validation_failed": "error",
    "denied": "error",
    "succeeded": "success",
    "failed": "error",
    "canceled": "cancelled",
    "timed_out": "timeout",
    "blocked": "error",
}

_ALLOWED: Mapping[State, frozenset[State]] = {state: frozenset(moves) for state, moves in MOVES.items()}


class Trail:
    """The states that one call has been through. `move` is the only transition, and refuses what the table does not
    list.
    """

    __slots__ = ("state", "states")

    def __init__(self) -> None:
        self.state: State = "planned"
        self.states: list[State] = ["planned"]

    def move(self, state: State) -> None:
        # INVARIANT: no call ever makes a transition that the table does not list, so exactly one terminal state is
        # reached.
        if state not in _ALLOWED[self.state]:
            raise Failure("E3000", f"a call cannot go from {self.state} to {state}")
        self.state = state
        self.states.append(state)

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL
