"""Reads the configuration of an upstream and reports each fault with its place and a correction."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

import pydantic

from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.overlay import unknown

Config = TypeVar("Config", bound=pydantic.BaseModel)


def read_config(model: type[Config], document: Json) -> Config:
    """Read and check a configuration. Refuses with E3004 one that cannot be used."""
    try:
        return model.model_validate(document)
    except pydantic.ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
    raise Failure("E3004", "the upstream's configuration: " + "; ".join(_words(model, one) for one in faults[:5]))


def _words(model: type[pydantic.BaseModel], fault: Any) -> str:
    """Describe one fault of a configuration: its place, and what to write instead."""
    place: tuple[int | str, ...] = fault["loc"]
    where = f"`{'.'.join(map(str, place))}`" if place else "it"
    match fault["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"{where} is " + unknown(str(place[-1]), _fields_at(model, place[:-1]), "not a field there")
        case "literal_error":
            return f"{where} is one of {fault['ctx']['expected']}"
        case kind if kind.endswith("_type"):
            return f"{where} is not {_TYPES.get(kind.removesuffix('_type'), 'of the right type')}"
        case _:
            message = str(fault["msg"]).removeprefix("Value error, ")
            return f"{where}: {message[0].lower()}{message[1:]}"


_TYPES = {
    "string": "a text",
    "dict": "an object",
    "model": "an object",
    "tuple": "a list",
    "list": "a list",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
}


def _fields_at(model: type[pydantic.BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """Return the fields that are allowed at a place of a configuration."""
    for step in place:
        if isinstance(step, int):
            continue
        field = model.model_fields.get(step)
        inner = None if field is None else _model_of(field.annotation)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_of(annotation: Any) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_of(part)) is not None), None)
