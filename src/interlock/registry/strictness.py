"""Checks that a manifest governs a function no less than the declaration of that function does.

The author of `@tool` above a function stated what it changes, what a caller must hold, what it takes and what it hides.
A manifest may offer the function again: under another name, in other words, more strictly. If it states less, a call
would be allowed to do what the author's own tool never was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from interlock.call.capability import CLASSES
from interlock.contract.manifest import IdempotencyPart, Manifest, MutationClass
from interlock.data.schema import Fault, Json
from interlock.registry.containment import contains
from interlock.registry.expansion import closed

Rule = tuple[Callable[[Any, Any], bool], str]


def loosenings(declared: Manifest, offered: Manifest) -> list[Fault]:
    """List everything in which a manifest governs less than the declaration, each with the required value."""
    compared = ((name, getattr(declared, name), getattr(offered, name), rule) for name, rule in _RULES.items())
    return [
        Fault(f"/{name}", f"{words}: the function is declared with {_shown(before)}")
        for name, before, after, (holds, words) in compared
        if not holds(before, after)
    ]


def _same(declared: Any, offered: Any) -> bool:
    return declared == offered


def _all_of(declared: tuple[Any, ...] | None, offered: tuple[Any, ...] | None) -> bool:
    return set(declared or ()) <= set(offered or ())


def _not_claimed(declared: bool, offered: bool) -> bool:
    return declared or not offered


def _stays(declared: bool, offered: bool) -> bool:
    return offered or not declared


def _no_weaker(declared: MutationClass | None, offered: MutationClass | None) -> bool:
    # A missing value counts as the worst one, on the side where that is safe.
    return CLASSES.index(offered or CLASSES[0]) >= CLASSES.index(declared or CLASSES[-1])


def _no_less(declared: float | None, offered: float | None) -> bool:
    return (offered or 0) >= (declared or 0)


def _no_shorter(declared: IdempotencyPart | None, offered: IdempotencyPart | None) -> bool:
    return _no_less(declared and declared.window_seconds, offered and offered.window_seconds)


def _no_wider(declared: Json, offered: Json) -> bool:
    if _marked(declared):
        return declared == offered
    return contains(closed(declared), closed(offered))


def _hides_as_much(declared: Json | None, offered: Json | None) -> bool:
    return declared is None or not _marked(declared) or declared == offered


def _marked(schema: Json) -> bool:
    """Whether a schema marks its values: what is private, what is a path."""
    return b'"x-' in orjson.dumps(schema)


def _isolates(declared: Any, offered: Any) -> bool:
    return declared is None or declared == offered


_AS_IT_IS: Rule = (_same, "must be as declared")
_RULES: Mapping[str, Rule] = {
    "mutation_class": (_no_weaker, "must be as strong or stronger"),
    "parameters": (_no_wider, "must take nothing that the function does not, and keep its marks"),
    "result_schema": (_hides_as_much, "must keep the marks of what is private"),
    "required_permissions": (_all_of, "must list what the function needs"),
    "required_scopes": (_all_of, "must list what a caller must hold"),
    "known_pairs": (_all_of, "must keep the pairs that the function is held to"),
    "tags": (_all_of, "must list the tags that policies go by"),
    "estimated_cost": (_no_less, "must be as much or more"),
    "idempotency": (_no_shorter, "must keep keys as long or longer"),
    "redact_results": (_stays, "must stay on"),
    "external_io": (_stays, "must stay on"),
    "private_output": (_stays, "must stay on"),
    "concurrency_safe": (_not_claimed, "must not be claimed"),
    "restart_safe": (_not_claimed, "must not be claimed"),
    "tolerant_output": (_not_claimed, "must not be claimed"),
    "coerce_output": (_not_claimed, "must not be claimed"),
    "persist_output": (_not_claimed, "must stay off"),
    "sandbox": (_isolates, "must isolate it in the same way"),
    **dict.fromkeys(
        ("protocol", "effects", "preconditions", "approval", "network_policy", "resource_limits", "external_service",
         "paged"),
        _AS_IT_IS,
    ),
}  # fmt: skip


def _shown(value: Any) -> str:
    """Format a declared value as a manifest would state it."""
    return orjson.dumps(value, default=lambda part: part.model_dump(mode="json")).decode()
