"""What a function's type hints say: its input and output schema, and how values get from JSON to Python and back.

Reading never stops at the first fault. Whatever cannot be read is listed, each fault with the parameter it is about and
the line to write, so that an author mends a declaration in one go.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic
import typing_extensions

from interlock.core.context import Context
from interlock.core.explain import authoring_faults
from interlock.core.schema import Fault, Json, pointer, walk

Converter = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Annotations:
    """What the type hints of a function say."""

    context: str | None = None
    parameters: Json = dataclasses.field(default_factory=dict[str, Any])
    result: Json = dataclasses.field(default_factory=dict[str, Any])
    converters: tuple[tuple[str, Converter], ...] = ()
    dump: Callable[[Any], Any] | None = None


def read_annotations(function: Callable[..., Any], around: Mapping[str, Any]) -> tuple[Annotations, list[Fault]]:
    """What the hints say, and everything that is wrong with them; `around` has the types that only live there."""
    try:
        hints = typing.get_type_hints(function, localns=dict(around), include_extras=True)
    except NameError as error:
        return Annotations(), [Fault("", f"the type hint `{error.name}` cannot be found where it is declared")]
    except TypeError as error:
        return Annotations(), [Fault("", f"a type hint cannot be read: {error}")]
    hints = {name: readable(hint, around) for name, hint in hints.items()}
    faults: list[Fault] = []
    context: str | None = None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            faults.append(_about(name, f"named parameters only: write `{name}` without * and /"))
        elif hints.get(name) is Context:
            context = name
        elif name not in hints:
            words = f"a type for `{name}`: {name}: Annotated[str, Field(description=…, examples=[…])]"
            faults.append(_about(name, f"it needs {words}"))
        elif (unfit := _unfit(hints[name], "validation")) is not None:
            faults.append(_about(name, f"`{name}` has a type that JSON cannot hold: {unfit}"))
        else:
            fields[name] = (hints[name], ... if parameter.default is parameter.empty else parameter.default)
    returns = hints.get("return", Any)
    if "return" not in hints:
        faults.append(Fault("/return", "it needs a return type, such as -> int: results are checked against it"))
    elif (unfit := _unfit(returns, "serialization")) is not None:
        faults.append(Fault("/return", f"it returns a type that JSON cannot hold: {unfit}"))
        returns = Any
    parameters = _input_schema(function, fields)
    faults += authoring_faults(parameters)
    converters = {name: converter(hint) for name, (hint, _) in fields.items()}
    adapter = pydantic.TypeAdapter[Any](returns)
    read = Annotations(
        context=context,
        parameters=parameters,
        result=_tidy(adapter.json_schema(mode="serialization")),
        converters=tuple((name, convert) for name, convert in converters.items() if convert is not None),
        dump=None if is_plain(returns) else lambda value: adapter.dump_python(value, mode="json", warnings="none"),
    )
    return read, faults


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The hints of a handler; none where they cannot be had."""
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def convert(function: Callable[..., Any], arguments: Json) -> Json:
    """JSON arguments as the types a handler asks for."""
    hints = {name: readable(hint) for name, hint in hints_of(function).items() if name in arguments}
    converters = {name: converter(hint) for name, hint in hints.items()}
    return arguments | {name: as_type(arguments[name]) for name, as_type in converters.items() if as_type is not None}


def _about(name: str, message: str) -> Fault:
    return Fault(pointer(["properties", name]), message)


def _unfit(hint: Any, mode: Literal["validation", "serialization"]) -> str | None:
    """Why JSON cannot hold a type, or None where it can."""
    try:
        pydantic.TypeAdapter[Any](hint).json_schema(mode=mode)
    except pydantic.errors.PydanticUserError as error:
        return error.message.splitlines()[0].rstrip(".")
    return None


def _input_schema(function: Callable[..., Any], fields: dict[str, Any]) -> Json:
    # Parameters may be called what no field of a model may be (`_x`, `model_config`, `schema`), so fields are numbered.
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
    """Without the titles pydantic makes up: they cost tokens and say nothing."""
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
PARAMETERS = re.compile(r"\n\s*(?=Args:|:param )")
_GOOGLE = re.compile(r"^ {4,}(\w+)(?: \([^)]*\))?: (.+)$")
_SPHINX = re.compile(r"^:param (?:\w+ )?(\w+): (.+)$")


def _documented_parameters(doc: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name, indent = "", 0
    for line in inspect.cleandoc(doc).splitlines():
        deeper = len(line) - len(line.lstrip()) > indent
        match = None if name and deeper else _GOOGLE.match(line) or _SPHINX.match(line)
        if match:
            name, indent = match.group(1), len(line) - len(line.lstrip())
            found[name] = match.group(2).strip()
        elif name and deeper and line.strip():
            found[name] += " " + line.strip()
        else:
            name, indent = "", 0
    return found


# Types


_SCALARS = (str, int, float, bool, type(None), Any, object)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def is_plain(hint: Any) -> bool:
    """Whether JSON values are this type's values as they are, but for the spelling of whole numbers."""
    if typing.get_origin(hint) is typing.Annotated and any(map(_transforms, hint.__metadata__)):
        return False
    hint = _bare(hint)
    if hint in _SCALARS or hint in (dict, list):
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, typing.Union, types.UnionType) or (origin is dict and args[0] is str):
        return all(is_plain(arg) for arg in args)
    if origin is Literal:
        return all(type(arg) in (str, int, bool, type(None)) for arg in args)
    if typing_extensions.is_typeddict(hint):
        return all(is_plain(item) for _, item in _items(hint))
    return False


def _transforms(said: Any) -> bool:
    """Whether what is said beside a type makes another value of what was given."""
    if isinstance(said, pydantic.StringConstraints):
        return bool(said.strip_whitespace or said.to_lower or said.to_upper)
    return hasattr(said, "__get_pydantic_core_schema__")


def converter(hint: Any) -> Converter | None:
    """How JSON's values become a type's; None where they are its values already."""
    return _whole_numbers(hint) if is_plain(hint) else pydantic.TypeAdapter[Any](hint).validate_python


def _whole_numbers(hint: Any) -> Converter | None:
    """JSON has one kind of number: where a plain type says `int`, 5.0 must become 5. Only those places are visited."""
    hint = _bare(hint)
    if hint is int:
        return _whole_number
    if typing_extensions.is_typeddict(hint):
        found = _in_members(hint)
        return _in_items(found) if found else None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and (one := _whole_numbers(args[0])) is not None:
        if typing_extensions.is_typeddict(_bare(args[0])):
            return _in_rows(_in_members(_bare(args[0])))
        return _in_numbers if one is _whole_number else lambda value: [one(item) for item in value]
    if origin is dict and (one := _whole_numbers(args[1])) is not None:
        return lambda value: {name: one(item) for name, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        some = [arg for arg in args if arg is not type(None)]
        if len(some) == 1 and (one := _whole_numbers(some[0])) is not None:
            return lambda value: None if value is None else one(value)
        if any(_whole_numbers(arg) for arg in some):
            return pydantic.TypeAdapter[Any](hint).validate_python
    return None


def _in_members(typed_dict: Any) -> list[tuple[str, Converter]]:
    return [(name, within) for name, item in _items(typed_dict) if (within := _whole_numbers(item)) is not None]


def _whole_number(value: Any) -> Any:
    return int(value) if value.__class__ is float else value


def _in_numbers(value: list[Any]) -> list[Any]:
    return [_whole_number(item) for item in value] if float in map(type, value) else value


def _in_items(converters: list[tuple[str, Converter]]) -> Converter:
    numbers, others = _apart(converters)

    def convert(value: Json) -> Json:
        changed = value
        for name in numbers:
            item: Any = value.get(name)
            if item.__class__ is float:
                changed = {**changed, name: int(item)}
        for name, within in others:
            if name in value:
                item = within(value[name])
                if item is not value[name]:
                    changed = {**changed, name: item}
        return changed

    return convert


def _in_rows(converters: list[tuple[str, Converter]]) -> Converter:
    """For lists of typed dicts, which are often long and seldom hold anything to convert."""
    numbers, others = _apart(converters)
    one = _in_items(converters)

    def convert(rows: list[Json]) -> list[Json]:
        if not others:
            for row in rows:
                for name in numbers:
                    if row.get(name).__class__ is float:
                        return [one(row) for row in rows]
            return rows
        return [one(row) for row in rows]

    return convert


def _apart(converters: list[tuple[str, Converter]]) -> tuple[list[str], list[tuple[str, Converter]]]:
    numbers = [name for name, within in converters if within is _whole_number]
    return numbers, [(name, within) for name, within in converters if within is not _whole_number]


def _items(typed_dict: Any) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(typed_dict, include_extras=True).items():
        yield name, _item_hint(hint)


def _item_hint(hint: Any) -> Any:
    wrapped = typing.get_origin(hint) in (typing.Required, typing.NotRequired)
    return typing.get_args(hint)[0] if wrapped else hint


# Before Python 3.12 a TypedDict of `typing` does not keep all that pydantic must know of it.
_FORGETFUL = sys.version_info < (3, 12)


def readable(hint: Any, around: Mapping[str, Any] | None = None) -> Any:
    """A type with every TypedDict of `typing` in it made over into one that can be read on this Python."""
    return _made_over(hint, around or {}, ()) if _FORGETFUL else hint


def _made_over(hint: Any, around: Mapping[str, Any], inside: tuple[Any, ...]) -> Any:
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        # One that holds itself is left as it is, and refused.
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
    said = typing.get_origin(item)
    if said not in (typing.Required, typing.NotRequired):
        said = typing.Required if name in hint.__required_keys__ else typing.NotRequired
    return said[_made_over(_item_hint(item), around, inside)]
