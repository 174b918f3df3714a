"""Warnings of `policy check`: valid rules that may still allow what their author did not intend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from interlock.authority.comparisons import LIKE, normal_pattern, wild
from interlock.authority.normalize import written_path
from interlock.data.subschemas import COMMAND, HOST, PATH, URL

if TYPE_CHECKING:
    from interlock.authority.comparisons import Comparison
    from interlock.contract.contract import Contract
    from interlock.data.subschemas import Place

Json = dict[str, Any]

_SAYING = {
    PATH: "`format: path` or x-path",
    URL: "`format: uri` or x-url",
    HOST: "`format: hostname` or x-host",
}
_SETS = ("paths", "hosts", "urls", "commands")


def cautions(effect: str, conditions: Any, compares: Iterable[Comparison], tools: Iterable[Contract]) -> Iterator[str]:
    """Yield warnings for a rule that can apply to these tools, each once."""
    listed = list(tools)
    compared = list(compares)
    warnings = [
        *(caution for one in compared for caution in _first_raw(one, listed)),
        *(caution for one in compared for caution in _unreachable(one)),
    ]
    if effect == "permit":
        warnings.extend(_any_of_many(name) for name in _contained(conditions, positive=True))
    yield from dict.fromkeys(warnings)


def _first_raw(one: Comparison, tools: Iterable[Contract]) -> Iterator[str]:
    """Yield the warning for the first of many tools it applies to: a rule for all tools is warned of once."""
    warnings = (list(_raw(one, tool)) for tool in tools if one.names and one.names[0] in tool.input.properties)
    yield from next(filter(None, warnings), ())


def _raw(one: Comparison, tool: Contract) -> Iterator[str]:
    """Warn of a comparison with an argument that the tool's schema treats as plain text."""
    place = tool.input.places.root
    inherited: frozenset[str] = frozenset()
    for name in one.names:
        place = place.member(name)
        inherited |= place.kinds
    kinds, name = inherited | _inside(place), ".".join(one.names)
    if COMMAND in kinds:
        if LIKE in one.readings:
            yield f"compares the command `{name}` as text; context.all_commands tells which program it starts"
        return
    if kinds:
        return
    meant = [kind for kind in _SAYING if kind in one.readings]
    if meant:
        yield (
            f"the schema of {tool.id} does not say that `{name}` is a {meant[0]}, so no set of paths, hosts or URLs is "
            f"sure to hold it; mark it with {_SAYING[meant[0]]}, or with `kind: {meant[0]}` in an upstream's overlay"
        )
    elif one.readings:
        yield f"compares `{name}` as it is sent: another spelling of the same thing is another text"


def _inside(place: Place) -> frozenset[str]:
    """The marks of a list's elements."""
    return place.element(0).kinds if "array" in place.types else frozenset()


def _unreachable(one: Comparison) -> Iterator[str]:
    """Warn of a path that no argument in normal form can equal."""
    for text in one.texts if PATH in one.readings else ():
        normal = normal_pattern(text) if wild(text) else written_path(text.rstrip("/") or "/")
        if normal not in (None, text):
            yield f"names `{text}`, and paths are compared in normal form; write `{normal}`"


def _any_of_many(name: str) -> str:
    return f"permits by context.{name}, where one of many is enough; context.all_{name} is about every one of them"


def _contained(node: Any, *, positive: bool) -> Iterator[str]:
    """Yield the sets that a rule tests for an element, where that makes the rule apply."""
    if isinstance(node, list):
        for one in cast("list[Any]", node):
            yield from _contained(one, positive=positive)
    if not isinstance(node, dict):
        return
    known = cast("Json", node)
    if known.get("kind") == "unless":
        positive = not positive
    for word, inner in known.items():
        if word in ("contains", "containsAny") and positive and isinstance(inner, dict):
            left: Any = cast("Json", inner).get("left")
            if isinstance(left, dict) and (name := _set(cast("Json", left))):
                yield name
        yield from _contained(inner, positive=positive != (word == "!"))


def _set(node: Json) -> str | None:
    step: Any = node.get(".")
    if isinstance(step, dict):
        inner = cast("Json", step)
        if inner.get("left") == {"Var": "context"} and inner.get("attr") in _SETS:
            return str(inner["attr"])
    return None
