"""Compensation recipes: how a write of an upstream is undone by another tool of the same upstream.

A recipe names the tool that undoes the write, and where its arguments come from: the input of the call, its result, or
what a tool that only reads returned before the write (the before-image).

    undo:
      tool: delete_issue
      arguments: {owner: /input/owner, number: /result/structuredContent/number}
      example: {owner: trials, title: A trial of Interlock}

    undo:
      before: {tool: read_file, arguments: {path: /input/path}}
      tool: write_file
      arguments: {path: /input/path, content: /before/content/0/text}
      example: {path: /files/trial.txt, content: A trial of Interlock}

A source of an argument is a JSON pointer that begins with /input, /result or /before. `{text: POINTER, at: POINTER}`
reads a text that holds JSON, as servers without output schemas return it; `{value: …}` is a constant. Admission makes
the write of the `example` and undoes it: a recipe without one is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from interlock.core.errors import Failure
from interlock.data.bounds import check_values
from interlock.data.canonical import decode, encode
from interlock.data.schema import Json

# Bytes of the arguments of an undo: they are stored with every call.
# The remark on a recipe that was tried without a before-image.
ONLY_RUN = "proven is only that its undo runs: without `before`, the recipe reads nothing to compare"
MOST_BYTES = 8 << 20
# Values in a text that holds JSON.
MOST_VALUES = 100_000
_STEPS = r"(/([^~/]|~[01])*)*$"
Pointer = Annotated[str, StringConstraints(pattern=r"^/(input|result|before)" + _STEPS, max_length=500)]
Within = Annotated[str, StringConstraints(pattern="^" + _STEPS, max_length=500)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants", defer_build=True)


class InText(_Part):
    """A value in the JSON that a text holds."""

    text: Pointer
    at: Within = ""


class Constant(_Part):
    """A value that is always the same."""

    value: Any


Source = Pointer | InText | Constant


class Step(_Part):
    """A tool of the upstream, by the upstream's own name, and where its arguments come from."""

    tool: str = Field(min_length=1, max_length=500)
    arguments: dict[str, Source] = Field(default_factory=dict[str, Source], max_length=100)


class Undo(Step):
    """The recipe that undoes a write. Admission makes the write with the input in `example`, and undoes it."""

    before: Step | None = None
    example: dict[str, Any] | None = None


class PinnedStep(Step):
    """A step with the operation of its upstream, as it was when the recipe was admitted."""

    native: dict[str, Any]
    implementation: str
    required: tuple[str, ...] = Field((), strict=False)


class Recipe(PinnedStep):
    """The recipe that undoes a write, as it was admitted."""

    before: PinnedStep | None = None
    example: dict[str, Any] | None = None


def faults(undo: Undo, given: Collection[str]) -> Iterator[str]:
    """List the sources of a recipe that do not exist; `given` are the parameters of the write."""
    if undo.before is not None:
        yield from _faults_of(undo.before, given, ("input",), "is not there before the write")
    roots = ("input", "result") if undo.before is None else ("input", "result", "before")
    yield from _faults_of(undo, given, roots, "needs `before`, which says how it is read")


def _faults_of(step: Step, given: Collection[str], roots: Collection[str], absent: str) -> Iterator[str]:
    for name, source in step.arguments.items():
        at = _place(source)
        root, _, rest = at.removeprefix("/").partition("/")
        if at and root not in roots:
            yield f"`{name}` of `{step.tool}` takes {at}, and /{root} {absent}"
        elif root == "input" and _unescaped(rest.partition("/")[0]) not in given:
            yield f"`{name}` of `{step.tool}` takes {at}, which is not a parameter of the tool"


def fill(step: PinnedStep, roots: Mapping[str, Any]) -> Json:
    """Return the arguments of a step, as a copy. E3308 if a required one is not there, or if they are too large."""
    filled: Json = {}
    for name, source in step.arguments.items():
        try:
            filled[name] = _taken(source, roots)
        except (LookupError, ValueError, Failure):
            if name in step.required:
                raise Failure(
                    "E3308", f"`{name}` of `{step.tool}` is missing: nothing is at {_place(source)}"
                ) from None
    written = encode(filled)
    if len(written) > MOST_BYTES:
        raise Failure("E3308", f"the arguments of `{step.tool}` have more than {MOST_BYTES:,} bytes")
    return decode(written)


def needs_image(recipe: Recipe) -> bool:
    """Whether the undo takes something of the before-image."""
    return any(_place(source).split("/")[1:2] == ["before"] for source in recipe.arguments.values())


def image(recipe: Recipe, before: Any) -> Any:
    """The part of an answer of `before` that an undo has to bring back: what the recipe takes, else all of it.

    The rest of an answer may be another each time it is read, such as the time of the reading.
    """
    taken: Json = {}
    for name, source in recipe.arguments.items():
        if _place(source).split("/")[1:2] == ["before"]:
            try:
                taken[name] = _taken(source, {"before": before})
            except (LookupError, ValueError, Failure):
                taken[name] = None
    return taken or before


def _taken(source: Source, roots: Mapping[str, Any]) -> Any:
    if isinstance(source, Constant):
        return source.value
    if isinstance(source, str):
        return _at(roots, source)
    text = _at(roots, source.text)
    written = text.encode() if isinstance(text, str) else b""
    if len(written) > MOST_BYTES:
        raise ValueError("a long text")
    check_values(written, MOST_VALUES)
    return _at(orjson.loads(written), source.at)


def _at(value: Any, place: str) -> Any:
    """The value at a JSON pointer; LookupError if there is none."""
    for written in place.split("/")[1:]:
        step = _unescaped(written)
        if isinstance(value, dict):
            value = cast("Json", value)[step]
        elif isinstance(value, list) and step.isdecimal() and step.isascii():
            value = cast("list[Any]", value)[int(step)]
        else:
            raise LookupError(place)
    return value


def _place(source: Source) -> str:
    return "" if isinstance(source, Constant) else source if isinstance(source, str) else source.text


def _unescaped(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")
