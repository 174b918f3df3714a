"""Defaults that a schema declares inside of objects and lists. Those of its top level are `Schema.defaults`.

A plan has the places of a schema that lead to a default, and is made once. An object that was sent gets the defaults of
the properties that it lacks; what was not sent is not made up. Where a place has alternatives, its defaults count only
if a single one of them can be meant.
"""

from __future__ import annotations

import copy
from typing import Any, cast

from interlock.data.coerce import coerce, only_alternative
from interlock.data.schema import Json, Schema, pointer, properties_of, resolve_ref

# Places of an input that lie deeper are left as they are.
_DEEPEST = 100

Filled = tuple[str, Any]


class DefaultPlan:
    """The defaults of one place of a schema, and the places inside of it."""

    __slots__ = ("defaults", "first", "inner", "others", "rest")

    def __init__(self) -> None:
        self.defaults: tuple[tuple[str, Any], ...] = ()
        self.inner: dict[str, DefaultPlan] = {}
        # The plan of other members of an object, of the first elements of a list, and of the rest of them.
        self.others: DefaultPlan | None = None
        self.first: tuple[DefaultPlan, ...] = ()
        self.rest: DefaultPlan | None = None

    def fill(self, value: Json) -> tuple[Json, list[Filled]]:
        """Return an input with its defaults, and the place and the value of each. The input itself is not changed."""
        filled: list[Filled] = []
        return self._filled(value, (), filled), filled

    def lacks(self, value: Any) -> bool:
        """Whether an input lacks a default."""
        filled: list[Filled] = []
        self._filled(value, (), filled)
        return bool(filled)

    def at(self, place: str) -> tuple[str, Any] | None:
        """Return the name and the default of a place; None if it has none."""
        *path, name = (one.replace("~1", "/").replace("~0", "~") for one in place.split("/")[1:])
        plan: DefaultPlan | None = self
        for step in path:
            plan = None if plan is None else plan._inside(step)
        return None if plan is None else next((one for one in plan.defaults if one[0] == name), None)

    def _inside(self, step: str) -> DefaultPlan | None:
        if step in self.inner:
            return self.inner[step]
        if self.others is not None or not step.isdecimal():
            return self.others
        return self.first[int(step)] if int(step) < len(self.first) else self.rest

    def _filled(self, value: Any, path: tuple[str | int, ...], filled: list[Filled]) -> Any:
        if len(path) > _DEEPEST:
            return value
        if isinstance(value, dict):
            return self._filled_object(cast("Json", value), path, filled)
        if isinstance(value, list):
            return self._filled_list(cast("list[Any]", value), path, filled)
        return value

    def _filled_list(self, items: list[Any], path: tuple[str | int, ...], filled: list[Filled]) -> list[Any]:
        plans = [self.first[at] if at < len(self.first) else self.rest for at in range(len(items))]
        made = [
            one if plan is None else plan._filled(one, (*path, at), filled)
            for at, (one, plan) in enumerate(zip(items, plans, strict=True))
        ]
        return made if any(new is not old for new, old in zip(made, items, strict=True)) else items

    def _filled_object(self, value: Json, path: tuple[str | int, ...], filled: list[Filled]) -> Json:
        made = value
        for name, one in value.items() if self.others is not None else ():
            plan = self.inner.get(name, self.others)
            assert plan is not None
            made = _with(made, value, name, plan._filled(one, (*path, name), filled))
        for name, plan in self.inner.items() if self.others is None else ():
            if name in value:
                made = _with(made, value, name, plan._filled(value[name], (*path, name), filled))
        for name, default in self.defaults:
            if name not in value:
                made = _with(made, value, name, copy.deepcopy(default))
                filled.append((pointer([*path, name]), default))
        return made


def _with(made: Json, before: Json, name: str, value: Any) -> Json:
    """Return an object with a member, as a copy if it is still the one from before."""
    if name in before and before[name] is value:
        return made
    return {**made, name: value}


def inner_defaults(schema: Schema) -> DefaultPlan | None:
    """Return the plan of the defaults inside of a schema; None if there are none."""
    plan = DefaultPlan()
    try:
        _describe(plan, schema, schema.document, {}, None)
    except RecursionError:  # a schema that leads back to itself before it says anything
        return None
    return plan if _leads_somewhere(plan) else None


def converted_and_filled(facing: Schema, schema: Schema, arguments: Json) -> tuple[Json, Json]:
    """Return arguments converted as the schema for callers says, without and with the inner defaults."""
    given: Json = coerce(facing, arguments).value
    plan = inner_defaults(schema)
    return given, given if plan is None else plan.fill(given)[0]


def default_at(schema: Schema, place: str) -> tuple[str, Any] | None:
    """Return the name and the default of a place of an input; None if there is none."""
    name = place.removeprefix("/")
    if "/" in name:
        plan = inner_defaults(schema)
        return None if plan is None else plan.at(place)
    plain = name.replace("~1", "/").replace("~0", "~")
    return next((one for one in schema.defaults if one[0] == plain), None)


def _plan(schema: Schema, node: Any, plans: dict[str, DefaultPlan]) -> DefaultPlan | None:
    """Return the plan of a place. Places that refer to one definition share its plan."""
    if not isinstance(node, dict):
        return None
    part = cast("Json", node)
    ref = part.get("$ref")
    if isinstance(ref, str):
        if ref in plans:
            return plans[ref]
        part = {"$ref": ref}
    plan = DefaultPlan()
    if isinstance(ref, str):
        plans[ref] = plan
    _describe(plan, schema, resolve_ref(schema.document, part), plans, ())
    return plan


def _describe(
    plan: DefaultPlan, schema: Schema, part: Json, plans: dict[str, DefaultPlan], trail: tuple[str, ...] | None
) -> None:
    """Add to a plan what a schema says about objects and about lists. `trail` is None for the whole of a schema, whose
    own defaults are not part of the plan; else it has the references that lead here.
    """
    root = schema.document
    node = only_alternative(root, part, "object")
    known = {name for name, _ in plan.defaults}
    for name, one in properties_of(node).items():
        stated = {} if trail is None else resolve_ref(root, one)
        if "default" in stated and name not in known and schema.takes(stated, stated["default"]):
            plan.defaults += ((name, stated["default"]),)
        inner = _plan(schema, one, plans)
        if inner is not None:
            plan.inner.setdefault(name, inner)
    plan.others = plan.others or _plan(schema, node.get("additionalProperties"), plans)
    listed = only_alternative(root, part, "array")
    first: Any = listed.get("prefixItems")
    if isinstance(first, list) and not plan.first:
        made = (_plan(schema, one, plans) for one in cast("list[Any]", first))
        plan.first = tuple(one or DefaultPlan() for one in made)
    plan.rest = plan.rest or _plan(schema, listed.get("items"), plans)
    every: Any = part.get("allOf")
    for one in cast("list[Any]", every) if isinstance(every, list) else ():
        ref = cast("Json", one).get("$ref") if isinstance(one, dict) else None
        if isinstance(one, dict) and (trail is None or ref not in trail):
            further = trail if trail is None or not isinstance(ref, str) else (*trail, ref)
            _describe(plan, schema, resolve_ref(root, cast("Json", one)), plans, further)


def _leads_somewhere(plan: DefaultPlan) -> bool:
    """Whether a default can be reached."""
    seen: set[int] = set()
    waiting = [plan]
    while waiting:
        one = waiting.pop()
        if one.defaults:
            return True
        if id(one) not in seen:
            seen.add(id(one))
            waiting += [*one.inner.values(), *one.first, *filter(None, (one.others, one.rest))]
    return False
