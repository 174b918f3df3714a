"""Reads a function's type hints: its input and output schema, and the conversion of values between JSON and Python.

Reading never stops at the first fault. All faults are listed, each with its parameter and the line to write, so that an
author can correct a declaration in one go.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pydantic
import typing_extensions

from interlock.contract.context import CallContext
from interlock.contract.values import Converter, converter, is_plain
from interlock.core.expressions import expression
from interlock.data.copying import item_hint
from interlock.data.explain import authoring_faults
from interlock.data.schema import Fault, Json, pointer, walk


def is_context(hint: object) -> bool:
    """Whether a type hint requests the context of the call."""
    return isinstance(hint, type) and issubclass(hint, CallContext)


@dataclasses.dataclass(frozen=True, slots=True)
class Annotations:
    """The result of reading the type hints of a function."""

    context: str | None = None
    parameters: Json = dataclasses.field(default_factory=dict[str, Any])
    result: Json = dataclasses.field(default_factory=dict[str, Any])
    # For the parameters that need one; None if nothing is known of any.
    converters: tuple[tuple[str, Converter], ...] | None = None
    # Converters for values that JSON does not have, from JSON data that belongs to the function already.
    rich: tuple[tuple[str, Converter], ...] = ()
    # To JSON data, and back; None if results are JSON data already.
    dump: Callable[[Any], Any] | None = None
    load: Callable[[Any], Any] | None = None


def read_annotations(function: Callable[..., Any], around: Mapping[str, Any]) -> tuple[Annotations, list[Fault]]:
    """Read the hints and list their faults; `around` has the types that exist only at the declaration."""
    try:
        hints = typing.get_type_hints(function, localns=dict(around), include_extras=True)
    except NameError as error:
        return Annotations(), [Fault("", f"the type hint `{error.name}` cannot be found where it is declared")]
    except TypeError as error:
        return Annotations(), [Fault("", f"a type hint cannot be read: {error}")]
    hints = {name: readable(hint, around) for name, hint in hints.items()}
    fields, context, faults = _fields(function, hints)
    try:
        parameters = _input_schema(function, fields)
    except pydantic.errors.PydanticUserError:
        # The type of one parameter cannot be handled. They are tried one by one to find it, and only here: that
        # doubles the time.
        fields, context, faults = _fields(function, hints, each=True)
        parameters = _input_schema(function, fields)
    returns = hints.get("return", Any)
    if "return" not in hints:
        faults.append(Fault("/return", "it needs a return type, such as -> int: results are checked against it"))
    try:
        adapter, result = _adapted(returns, "serialization")
    except pydantic.errors.PydanticUserError as error:
        faults.append(Fault("/return", f"it returns a type that JSON cannot hold: {_reason(error)}"))
        returns = Any
        adapter, result = _adapted(returns, "serialization")
    faults += authoring_faults(parameters)
    made = {name: converter(hint) for name, (hint, _) in fields.items()}
    read = Annotations(
        context=context,
        parameters=parameters,
        result=_tidy(result),
        converters=tuple((name, make) for name, make in made.items() if make is not None),
        rich=tuple(
            (name, pydantic.TypeAdapter[Any](hint).validate_python)
            for name, (hint, _) in fields.items()
            if not is_plain(hint)
        ),
        dump=None if is_plain(returns) else lambda value: adapter.dump_python(value, mode="json", warnings="none"),
        load=None if is_plain(returns) else adapter.validate_python,
    )
    return read, faults


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the hints of a handler; empty if they are unavailable."""
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def parameter_hints(function: Callable[..., Any], around: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hints of a function's parameters, with types that exist only `around` it. NameError if one is not
    found.
    """
    hints = {name: hint for name, hint in getattr(function, "__annotations__", {}).items() if name != "return"}
    known = {**getattr(inspect.unwrap(function), "__globals__", {}), **around}
    # The return type is left out: it may be known to type checkers alone.
    return typing.get_type_hints(types.SimpleNamespace(__annotations__=hints), known)


def convert(function: Callable[..., Any], arguments: Json) -> Json:
    """Convert JSON arguments to the types that a handler expects."""
    hints = hints_of(function)
    # A handler's arguments are not checked against its hints: values that JSON can represent are left unchanged.
    rich = {name: readable(hint) for name, hint in hints.items() if name in arguments and not is_plain(hint)}
    return arguments | {
        name: pydantic.TypeAdapter[Any](hint).validate_python(arguments[name]) for name, hint in rich.items()
    }


def _about(name: str, message: str) -> Fault:
    return Fault(pointer(["properties", name]), message)


def _fields(
    function: Callable[..., Any], hints: Mapping[str, Any], *, each: bool = False
) -> tuple[dict[str, Any], str | None, list[Fault]]:
    """The parameters of a tool, each with its type and default; the one that takes the context; the faults of others.

    With `each`, a parameter whose type JSON cannot represent is one of the last.
    """
    fields: dict[str, Any] = {}
    context: str | None = None
    faults: list[Fault] = []
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            faults.append(_about(name, f"named parameters only: write `{name}` without * and /"))
        elif is_context(hints.get(name)):
            context = name
        elif name not in hints:
            words = f"a type for `{name}`: {name}: Annotated[str, Field(description=…, examples=[…])]"
            faults.append(_about(name, f"it needs {words}"))
        elif each and (unfit := _unfit(hints[name])) is not None:
            faults.append(_about(name, f"`{name}` has a type that JSON cannot hold: {unfit}"))
        else:
            fields[name] = (hints[name], ... if parameter.default is parameter.empty else parameter.default)
    return fields, context, faults


def _unfit(hint: Any) -> str | None:
    """Return why JSON cannot represent a type, or None if it can."""
    try:
        _adapted(hint, "validation")
    except pydantic.errors.PydanticUserError as error:
        return _reason(error)
    return None


def _adapted(hint: Any, mode: Literal["validation", "serialization"]) -> tuple[pydantic.TypeAdapter[Any], Json]:
    """A type's reader and writer, and its schema. PydanticUserError if JSON cannot represent it."""
    adapter = pydantic.TypeAdapter[Any](hint)
    return adapter, adapter.json_schema(mode=mode)


def _reason(error: pydantic.errors.PydanticUserError) -> str:
    return error.message.splitlines()[0].rstrip(".")


def _input_schema(function: Callable[..., Any], fields: dict[str, Any]) -> Json:
    # Parameters may have names that no field of a model may have (`_x`, `model_config`, `schema`), so fields are
    # numbered.
    numbered: dict[str, Any] = {
        f"p{index}": (Annotated[hint, pydantic.Field(alias=name)], default)
        for index, (name, (hint, default)) in enumerate(fields.items())
    }
    schema = _tidy(pydantic.create_model("Input", **numbered).model_json_schema(mode="validation"))
    schema.pop("description", None)
    schema.setdefault("properties", {})
    documented = _documented_parameters(function.__doc__ or "")
    for name, part in schema["properties"].items():
        if name in documented:
            part.setdefault("description", documented[name])
        derived = _derived_examples(schema, part)
        if derived and "examples" not in part:
            part["examples"] = derived
    return schema


def _tidy(schema: Json) -> Json:
    """Remove the titles that pydantic generates: they cost tokens and carry no information."""
    for node in walk(schema):
        if isinstance(node.get("title"), str):
            del node["title"]
    return schema


def _derived_examples(root: Json, part: Json) -> list[Any]:
    """Examples that the type already implies: an enumeration's values, true and false, a default."""
    target = root.get("$defs", {}).get(str(part.get("$ref", "")).rpartition("/")[2], part)
    if "enum" in target:
        return list(target["enum"])[:3]
    if "const" in target:
        return [target["const"]]
    if target.get("type") == "boolean":
        return [True, False]
    return [part["default"]] if "default" in part else []


# Where a docstring goes over to its parameters.
PARAMETERS = expression(r"\n\s*(?=Args:|:param )")
_GOOGLE = expression(r"^ {4,}(\w+)(?: \([^)]*\))?: (.+)$")
_SPHINX = expression(r"^:param (?:\w+ )?(\w+): (.+)$")


def _documented_parameters(doc: str) -> dict[str, str]:
    parameters: dict[str, str] = {}
    name, indent = "", 0
    for line in inspect.cleandoc(doc).splitlines():
        deeper = len(line) - len(line.lstrip()) > indent
        match = None if name and deeper else _GOOGLE.match(line) or _SPHINX.match(line)
        if match:
            name, indent = match.group(1), len(line) - len(line.lstrip())
            parameters[name] = match.group(2).strip()
        elif name and deeper and line.strip():
            parameters[name] += " " + line.strip()
        else:
            name, indent = "", 0
    return parameters


# Types


# Before Python 3.12 a TypedDict of `typing` does not keep all that pydantic must know of it.
_FORGETFUL = sys.version_info < (3, 12)


def readable(hint: Any, around: Mapping[str, Any] | None = None) -> Any:
    """A type with every TypedDict of `typing` in it made over into one that can be read on this Python."""
    return _made_over(hint, around or {}, ()) if _FORGETFUL else hint


def _made_over(hint: Any, around: Mapping[str, Any], inside: tuple[Any, ...]) -> Any:
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        # A recursive TypedDict is not converted; pydantic refuses it later.
        return hint if hint in inside else _typed_dict(hint, around, (*inside, hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None or origin is Literal or not any(isinstance(one, type) or typing.get_args(one) for one in args):
        return hint
    if origin is typing.Annotated:
        return Annotated[(_made_over(args[0], around, inside), *args[1:])]
    made = tuple(_made_over(one, around, inside) for one in args)
    if made == args:
        return hint
    return typing.Union[made] if origin is types.UnionType else origin[made]  # noqa: UP007 - of as many as there are


def _typed_dict(hint: Any, around: Mapping[str, Any], inside: tuple[Any, ...]) -> Any:
    items = typing.get_type_hints(hint, localns=dict(around), include_extras=True)
    made = {name: _item(hint, name, item, around, inside) for name, item in items.items()}
    again: Any = typing_extensions.TypedDict(hint.__name__, made)  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType] - made of another's items
    again.__doc__, again.__module__ = hint.__doc__, hint.__module__
    return again


def _item(hint: Any, name: str, item: Any, around: Mapping[str, Any], inside: tuple[Any, ...]) -> Any:
    origin = typing.get_origin(item)
    if origin not in (typing.Required, typing.NotRequired):
        origin = typing.Required if name in hint.__required_keys__ else typing.NotRequired
    return origin[_made_over(item_hint(item), around, inside)]
