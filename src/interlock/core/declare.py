"""Tools from Python functions: `@tool(version="1.0.0", mutation_class="read_only")`.

The input schema comes from the type hints, the output schema from the return annotation, descriptions and examples from
`Annotated[…, Field(…)]` or the docstring. What is missing is said at declaration, in words, with the line to add. The
decorated function stays callable as itself; calling it through Interlock is what governs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import re
import sys
import tokenize
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Generic, Literal, ParamSpec, TypeVar, cast

import pydantic
import typing_extensions

from interlock.core.context import Context
from interlock.core.errors import Failure
from interlock.core.explain import authoring_faults
from interlock.core.manifest import (
    Approval,
    Effect,
    Manifest,
    MutationClass,
    NetworkPolicy,
    Precondition,
    Sandboxing,
    TimeoutClass,
    ToolKind,
    parse_manifest,
)
from interlock.core.schema import Json, walk

P = ParamSpec("P")
R = TypeVar("R")
Handler = TypeVar("Handler", bound=Callable[..., Any])


class Tool(Generic[P, R]):
    """A declared tool: the function, its manifest, and the handlers that make it safe."""

    def __init__(
        self,
        function: Callable[P, R],
        facts: Mapping[str, Any],
        annotations: Annotations,
        manifest: Manifest | None = None,
    ) -> None:
        self.function = function
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.context = annotations.context
        self.takes_context = annotations.context is not None
        self.is_async = inspect.iscoroutinefunction(function)
        self.arguments = annotations.converters
        self.whole_numbers = annotations.whole_numbers
        self.dump = annotations.dump
        self._facts = facts
        self._manifest: Manifest | None = manifest
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", "tool")
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self._facts['namespace']}.{self._facts['tool_id']}@{self._facts['version']}>"

    @property
    def manifest(self) -> Manifest:
        """The declaration in full. Handlers added later are part of it, so it is made when first asked for."""
        if self._manifest is None:
            self._manifest = parse_manifest(
                {
                    **self._facts,
                    "compensable": "compensate" in self.handlers,
                    "previews": "preview" in self.handlers,
                    **({"versioned": True} if "version_of" in self.handlers else {}),
                    "has_fixture": "fixture" in self.handlers,
                    "execution": {
                        "kind": "function",
                        "target": target_of(self.function),
                        "implementation": implementation_digest(self.function, *self.handlers.values()),
                    },
                }
            )
        return self._manifest

    def preview(self, handler: Handler) -> Handler:
        """Say what a call would do, without doing it. Takes the tool's arguments, returns a Preview."""
        return self._handle("preview", handler)

    def compensate(self, handler: Handler) -> Handler:
        """Undo a call. Takes what `ctx.compensate_with` was given, or else the call's own arguments and its result."""
        return self._handle("compensate", handler)

    def check(self, handler: Handler) -> Handler:
        """Check what a schema cannot: order, existence. Takes the arguments, returns a list of faults in words."""
        return self._handle("check", handler)

    def preflight(self, handler: Handler) -> Handler:
        """Look before acting: is what the call needs there? Takes the arguments, returns a list of faults in words."""
        return self._handle("preflight", handler)

    def version_of(self, handler: Handler) -> Handler:
        """Say which version a resource has now. Takes its name, returns a text or number, None where there is none."""
        return self._handle("version_of", handler)

    def verify(self, handler: Handler) -> Handler:
        """Confirm that the change happened. Takes `arguments` and `result`, returns a list of faults in words."""
        return self._handle("verify", handler)

    def fixture(self, handler: Handler) -> Handler:
        """A context manager that yields arguments with which the tool may really run in its contract tests."""
        return self._handle("fixture", handler)

    def concurrent(self, handler: Handler) -> Handler:
        """Say for which arguments calls may overlap others. Takes the arguments, returns true or false."""
        return self._handle("concurrent", handler)

    def undo_arguments(self, given: Mapping[str, Any], result: Any) -> Json | None:
        """What the compensation gets when the tool said nothing of it; None where that is not all that it asks for.

        A parameter that is called like one of the tool's own gets what the call was given, another one the result.
        """
        found: Json = {}
        told = False
        parameters = list(inspect.signature(self.handlers["compensate"]).parameters.values())
        for parameter in parameters[self.undo_takes_context :]:
            name, optional = parameter.name, parameter.default is not parameter.empty
            if name in given and name != "result":
                found[name] = given[name]
            elif parameter.kind in _ANYTHING or (optional and name != "result"):
                continue
            elif told:
                return None
            else:
                found[name], told = result, True
        return found

    @property
    def undo_takes_context(self) -> bool:
        """Whether the compensation wants to report what it changes."""
        handler = self.handlers.get("compensate")
        return handler is not None and Context in _hints(handler).values()

    def _handle(self, name: str, handler: Handler) -> Handler:
        if self._manifest is not None:
            raise Failure("E3105", f"{self!r} is in use already; declare its {name} handler right after the tool")
        self.handlers[name] = handler
        return handler


_ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def tool(
    *,
    version: str,
    mutation_class: MutationClass,
    name: str | None = None,
    namespace: str | None = None,
    title: str | None = None,
    description: str | None = None,
    effects: Sequence[Effect] = (),
    preconditions: Sequence[Precondition] = (),
    timeout_class: TimeoutClass | None = None,
    timeout_s: int | None = None,
    permissions: Sequence[str] = (),
    scopes: Sequence[str] = (),
    examples: Sequence[Mapping[str, Any]] = (),
    aliases: Sequence[str] = (),
    tags: Sequence[str] = (),
    search_hint: str | None = None,
    provider: str = "local",
    tool_kind: ToolKind = "function",
    concurrency_safe: bool = False,
    restart_safe: bool = False,
    external_io: bool = True,
    cancellable: bool = True,
    paged: bool = False,
    coerce_output: bool = False,
    tolerant_output: bool = False,
    breaking_changes: bool = False,
    behaviour_change: bool = False,
    redact_results: bool = True,
    max_inline_chars: int = 25_000,
    persist_output: bool = True,
    window_s: int | None = None,
    priority: int = 5,
    approval: Approval | None = None,
    sandbox: Sandboxing | bool = False,
    memory: str | None = None,
    network: NetworkPolicy | None = None,
    estimated_cost: float | None = None,
    external_service: str | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]:
    """Declare a function as a tool.

    `version` and `mutation_class` are the two facts nobody can guess; everything else has a safe default. A write tool
    also lists its `effects`, a reversible one has a `@tool.compensate` handler, an irreversible one a `@tool.preview`.
    """
    said = locals()

    def declare(function: Callable[P, R]) -> Tool[P, R]:
        identifier = name or function.__name__
        space = namespace or namespace_of(function)
        if "." in identifier:
            space, _, identifier = identifier.rpartition(".")
        # Tools may be declared inside a function, with types that only live there.
        annotations = _read_annotations(function, f"{space}.{identifier}", sys._getframe(1).f_locals)  # pyright: ignore[reportPrivateUsage]
        doc = inspect.cleandoc(description or function.__doc__ or "")
        text = _PARAMETERS.split(doc, maxsplit=1)[0].strip()
        _demand(len(text) >= 10, function, "a docstring of at least 10 characters: agents choose tools by it")
        facts: Json = {
            "tool_id": identifier,
            "namespace": space,
            "version": version,
            "name": title or identifier.replace("_", " ").title().ljust(3),
            "description": text[:2000],
            "provider": provider,
            "protocol": "native",
            "parameters": annotations.parameters,
            "result_schema": annotations.result,
            "required_permissions": list(permissions),
            "required_scopes": list(scopes),
            "mutation_class": mutation_class,
            "effects": [effect.model_dump() for effect in effects],
            "idempotency": {} if window_s is None else {"window_seconds": window_s},
            "observability": {},
            "examples": [dict(example) for example in examples],
            "aliases": list(aliases),
            "tags": list(tags),
        }
        facts |= {field: said[field] for field in _PLAIN_FACTS if said[field] is not None}
        if preconditions:
            facts["preconditions"] = [one.model_dump() for one in preconditions]
        if sandbox:
            facts["sandbox"] = {} if sandbox is True else sandbox.model_dump(exclude_unset=True)
        if memory is not None:
            facts["resource_limits"] = {"memory": memory}
        if network is not None:
            facts["network_policy"] = network.model_dump()
        if approval is not None:
            facts["approval"] = approval.model_dump()
        if timeout_s is not None:
            facts["timeout_default"] = timeout_s
        elif timeout_class is None:
            facts["timeout_class"] = "standard"
        parse_manifest(facts)  # what is wrong is said here, where it was written
        return Tool(function, facts, annotations)

    return declare


_PLAIN_FACTS = (
    "title", "timeout_class", "search_hint", "tool_kind", "concurrency_safe", "restart_safe", "external_io",
    "cancellable", "paged", "coerce_output", "tolerant_output", "breaking_changes", "behaviour_change",
    "redact_results", "max_inline_chars", "persist_output", "priority", "estimated_cost", "external_service",
)  # fmt: skip


def convert(function: Callable[..., Any], arguments: Json) -> Json:
    """JSON arguments as the types a handler asks for."""
    hints = _hints(function)
    rich = {name: hint for name, hint in hints.items() if name in arguments and not _is_plain(hint)}
    return arguments | {
        name: pydantic.TypeAdapter[Any](hint).validate_python(arguments[name]) for name, hint in rich.items()
    }


def from_manifest(manifest: Manifest, function: Callable[..., Any], handlers: Mapping[str, Any]) -> Tool[..., Any]:
    """A tool that a manifest declares and a plain function serves: JSON in, JSON out."""
    context = next((name for name, hint in _hints(function).items() if hint is Context), None)
    plain = Annotations(context=context)
    tool: Tool[..., Any] = Tool(function, manifest.model_dump(), plain, manifest)
    tool.handlers.update(handlers)
    return tool


def from_program(manifest: Manifest) -> Tool[..., Any]:
    """A tool that a manifest declares and a program serves. It runs in the sandbox and nowhere else."""
    execution = manifest.execution
    assert execution is not None

    def program(**_: Any) -> Any:
        raise Failure("E3405", f"{manifest.address} is a program: only Interlock calls it, in the sandbox")

    async def check(**arguments: Any) -> None:
        execution.words(arguments)

    program.__name__ = manifest.tool_id
    tool: Tool[..., Any] = Tool(program, manifest.model_dump(), Annotations(), manifest)
    tool.handlers["check"] = check
    return tool


def from_upstream(manifest: Manifest) -> Tool[..., Any]:
    """A tool that an upstream serves. Nothing of it runs here."""

    async def upstream(**_: Any) -> Any:
        raise Failure("E3405", f"{manifest.address} is served by an upstream: only Interlock calls it")

    upstream.__name__ = manifest.tool_id
    tool: Tool[..., Any] = Tool(upstream, manifest.model_dump(), Annotations(), manifest)
    # What its upstream reports of its progress is passed on.
    tool.takes_context = manifest.protocol == "mcp"
    return tool


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def target_of(function: Callable[..., Any]) -> str:
    """Where a function is found: its module's own name and its qualified name, whatever file it was loaded from."""
    module = function.__module__
    name = module.rsplit(".", 1)[-1] if module.startswith(LOADED) else module
    return f"{name}:{function.__qualname__}"


# Modules that were loaded from a file, rather than imported, live below this name.
LOADED = "interlock_tools."


def namespace_of(function: Callable[..., Any]) -> str:
    """The namespace a function gets when none is given: the name of its module, or of the file that is being run."""
    module = function.__module__
    if module == "__main__":
        module = PurePath(getattr(sys.modules["__main__"], "__file__", None) or "main").stem
    return re.sub(r"[^a-z0-9_]+", "_", module.rsplit(".", 1)[-1].lower()).strip("_") or "main"


@dataclasses.dataclass(frozen=True, slots=True)
class Annotations:
    """What the type hints of a function say."""

    context: str | None = None
    parameters: Json = dataclasses.field(default_factory=dict[str, Any])
    result: Json = dataclasses.field(default_factory=dict[str, Any])
    converters: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    whole_numbers: tuple[str, ...] = ()
    dump: Callable[[Any], Any] | None = None


def _read_annotations(function: Callable[..., Any], address: str, around: Mapping[str, Any]) -> Annotations:
    try:
        hints = typing.get_type_hints(function, localns=dict(around), include_extras=True)
    except NameError as error:
        raise Failure(
            "E3105", f"{address}: the type hint `{error.name}` cannot be found where it is declared"
        ) from None
    context: str | None = None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        _demand(
            parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY),
            function,
            f"named parameters only; write `{parameter.name}` without * and /",
        )
        if hints.get(parameter.name) is Context:
            context = parameter.name
            continue
        _demand(
            parameter.name in hints,
            function,
            f"a type for `{parameter.name}`: {parameter.name}: Annotated[str, Field(description=…, examples=[…])]",
        )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    _demand("return" in hints, function, "a return type, such as -> int: results are checked against it")
    parameters = _input_schema(function, fields)
    _demand_documented(address, parameters)
    rich = [(name, hint) for name, (hint, _) in fields.items() if not _is_plain(hint) or _holds_int(_bare(hint))]
    returns = hints["return"]
    try:
        adapter = pydantic.TypeAdapter[Any](returns)
        result = _tidy(adapter.json_schema(mode="serialization"))
    except pydantic.errors.PydanticUserError as error:
        raise _unfit(function, error) from None
    plain = _is_plain(returns)
    return Annotations(
        context=context,
        parameters=parameters,
        result=result,
        converters=tuple((name, pydantic.TypeAdapter[Any](hint).validate_python) for name, hint in rich),
        whole_numbers=tuple(name for name, (hint, _) in fields.items() if _bare(hint) is int),
        dump=None if plain else lambda value: adapter.dump_python(value, mode="json", warnings="none"),
    )


def _demand_documented(address: str, parameters: Json) -> None:
    faults = authoring_faults(parameters)
    if faults:
        raise Failure(
            "E3105",
            f"{address} cannot be declared yet: " + "; ".join(fault.message for fault in faults),
            details={"faults": [fault.document() for fault in faults]},
        )


def _input_schema(function: Callable[..., Any], fields: dict[str, Any]) -> Json:
    # Parameters may be called what no field of a model may be (`_x`, `model_config`, `schema`), so fields are numbered.
    numbered: dict[str, Any] = {
        f"p{index}": (Annotated[hint, pydantic.Field(alias=name)], default)
        for index, (name, (hint, default)) in enumerate(fields.items())
    }
    try:
        schema = pydantic.create_model("Input", **numbered).model_json_schema(mode="validation")
    except pydantic.errors.PydanticUserError as error:
        raise _unfit(function, error) from None
    schema = _tidy(schema)
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


def _unfit(function: Callable[..., Any], error: pydantic.errors.PydanticUserError) -> Failure:
    return Failure("E3105", f"{function.__name__} has a type that JSON cannot hold: {error.message.splitlines()[0]}")


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


_PARAMETERS = re.compile(r"\n\s*(?=Args:|:param )")
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


def _demand(holds: bool, function: Callable[..., Any], what: str) -> None:
    if not holds:
        raise Failure("E3105", f"tool `{function.__name__}` needs {what}")


_SCALARS = (str, int, float, bool, type(None), Any, object)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _is_plain(hint: Any) -> bool:
    """Whether JSON values are this type's values as they are, so that nothing needs converting."""
    hint = _bare(hint)
    if hint in _SCALARS or hint in (dict, list):
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, typing.Union, types.UnionType) or (origin is dict and args[0] is str):
        return all(_is_plain(arg) for arg in args)
    if origin is Literal:
        return all(type(arg) in (str, int, bool, type(None)) for arg in args)
    if typing_extensions.is_typeddict(hint):
        return all(_is_plain(_item_hint(item)) for item in typing.get_type_hints(hint, include_extras=True).values())
    return False


def _holds_int(hint: Any) -> bool:
    """Whether whole numbers lie inside a type: JSON's 5.0 must become 5 there too."""
    if typing.is_typeddict(hint):
        items = typing.get_type_hints(hint, include_extras=True).values()
        return any(_bare(_item_hint(item)) is int or _holds_int(_bare(_item_hint(item))) for item in items)
    if typing.get_origin(hint) is Literal:
        return False
    return any(_bare(one) is int or _holds_int(_bare(one)) for one in typing.get_args(hint))


def _item_hint(hint: Any) -> Any:
    wrapped = typing.get_origin(hint) in (typing.Required, typing.NotRequired)
    return typing.get_args(hint)[0] if wrapped else hint


_NOISE = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


def implementation_digest(*functions: Callable[..., Any]) -> str | None:
    """SHA-256 over the functions' source without comments and blank lines; None where there is no source."""
    hasher = hashlib.sha256()
    for function in functions:
        try:
            source = inspect.cleandoc("\n" + inspect.getsource(function))
            tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        except (OSError, TypeError, tokenize.TokenError, IndentationError):
            return None
        for token in tokens:
            if token.type not in _NOISE:
                hasher.update(f"{token.type}:{token.string}\n".encode())
    return hasher.hexdigest()


def tools_in(namespace: Mapping[str, Any]) -> list[Tool[..., Any]]:
    """The tools declared in a module's namespace, in order."""
    seen: dict[int, Tool[..., Any]] = {}
    for value in namespace.values():
        if isinstance(value, Tool):
            found = cast("Tool[..., Any]", value)
            seen.setdefault(id(found), found)
    return list(seen.values())
