"""Tools from Python functions: `@tool(version="1.0.0", mutation_class="read_only")`.

The input schema comes from the type hints, the output schema from the return annotation, descriptions and examples from
`Annotated[…, Field(…)]` or the docstring. All faults are reported at declaration, at once, with the line to write. The
decorated function stays callable as itself; only calls through Interlock are governed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

from pydantic import BaseModel

from interlock.contract.declaration_faults import (
    NEEDED,
    faults_in_options,
    missing_faults,
    name_of,
    positional_faults,
    unknown_faults,
)
from interlock.contract.examples import Example
from interlock.contract.function_identity import implementation_digest, target_of
from interlock.contract.hints import PARAMETERS, Annotations, hints_of, is_context, parameter_hints, read_annotations
from interlock.contract.manifest import (
    AddedType,
    Approval,
    Effect,
    Manifest,
    MutationClass,
    NetworkPolicy,
    Precondition,
    Sandboxing,
    ToolKind,
    parse_manifest,
)
from interlock.contract.pinned_source import Pinned, pin
from interlock.contract.refusals import DeclarationRefusal, collected
from interlock.contract.timeouts import TimeoutClass
from interlock.core.errors import Failure
from interlock.data.explain import brief
from interlock.data.schema import Fault, Json

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Handler = TypeVar("Handler", bound=Callable[..., Any])
Options = TypeVar("Options", bound=Callable[..., Any])


# many methods: the public decorator object; one method per part that an author can declare
class Tool(Generic[P, R_co]):
    """A declared tool: the function, its manifest, and the handlers that make it safe."""

    def __init__(
        self,
        function: Callable[P, R_co],
        facts: Mapping[str, Any],
        annotations: Annotations,
        manifest: Manifest | None = None,
    ) -> None:
        self.function = function
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.context = annotations.context
        self.takes_context = annotations.context is not None
        self.is_async: bool = inspect.iscoroutinefunction(function)
        self.arguments = annotations.converters
        self.rich = annotations.rich
        self.dump = annotations.dump
        self.load = annotations.load
        self._undo_context = False
        self._facts = facts
        self._manifest: Manifest | None = manifest
        # The digest of a manifest of this tool.
        self.digested: tuple[Manifest, str] | None = None
        # The text that runs in the sandbox: read once, when the manifest with its digest is made.
        self.pinned: Pinned | None = None
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", "tool")
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self._facts['namespace']}.{self._facts['tool_id']}@{self._facts['version']}>"

    @property
    def manifest(self) -> Manifest:
        """The complete declaration. Handlers added later are part of it, so it is made on first use."""
        if self._manifest is None:
            if "sandbox" in self._facts:
                self.pinned = pin(self.function)
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
                        "implementation": implementation_digest(
                            self.function, *self.handlers.values(), pinned=self.pinned
                        ),
                    },
                }
            )
        return self._manifest

    def as_version(self, version: str) -> Tool[P, R_co]:
        """Return the same tool under another version."""
        other = copy.copy(self)
        other._facts = {**self._facts, "version": version}
        other._manifest = self.manifest.model_copy(update={"version": version})
        return other

    def preview(self, handler: Handler) -> Handler:
        """Set the handler that previews a call without making it. Takes the tool's arguments, returns a Preview."""
        return self._handle("preview", handler)

    def compensate(self, handler: Handler) -> Handler:
        """Set the handler that undoes a call. Takes what `ctx.compensate_with` was given, or else the call's arguments
        and result.
        """
        return self._handle("compensate", handler)

    def check(self, handler: Handler) -> Handler:
        """Set the handler for checks beyond the schema: order, existence. Takes the arguments, returns a list of faults
        in words.
        """
        return self._handle("check", handler)

    def preflight(self, handler: Handler) -> Handler:
        """Set the handler that checks before acting that what the call needs exists.

        Returns a list of faults in words.
        """
        return self._handle("preflight", handler)

    def version_of(self, handler: Handler) -> Handler:
        """Set the handler that returns the current version of a resource: text or number, None if it does not exist."""
        return self._handle("version_of", handler)

    def verify(self, handler: Handler) -> Handler:
        """Set the handler that confirms the change.

        Takes `arguments` and `result`, returns a list of faults in words.
        """
        return self._handle("verify", handler)

    def fixture(self, handler: Handler) -> Handler:
        """Set a context manager that yields arguments with which the tool may really run in its contract tests."""
        return self._handle("fixture", handler)

    def concurrent(self, handler: Handler) -> Handler:
        """Set the handler that decides for which arguments calls may overlap. Takes the arguments, returns true or
        false.
        """
        return self._handle("concurrent", handler)

    def undo_arguments(self, given: Mapping[str, Any], result: Any) -> Json | None:
        """Return the default arguments of the compensation; None if it needs more than these.

        A parameter named like one of the tool's own receives the call's argument, another one the result.
        """
        arguments: Json = {}
        has_result = False
        for parameter in _parameters(self.handlers["compensate"])[self.undo_takes_context :]:
            name, optional = parameter.name, parameter.default is not parameter.empty
            if name in given and name != "result":
                arguments[name] = given[name]
            elif parameter.kind in _ANYTHING or (optional and name != "result"):
                continue
            elif has_result:
                return None
            else:
                arguments[name], has_result = result, True
        return arguments

    @property
    def undo_takes_context(self) -> bool:
        """Whether the compensation takes a context to report its changes."""
        handler = self.handlers.get("compensate")
        return handler is not None and (self._undo_context or _asks_for_context(handler))

    def _handle(self, name: str, handler: Handler) -> Handler:
        if self._manifest is not None:
            raise Failure("E3105", f"{self!r} is in use already; declare its {name} handler right after the tool")
        if name == "compensate":
            self._read_undo(handler)
        self.handlers[name] = handler
        return handler

    def _read_undo(self, handler: Callable[..., Any]) -> None:
        """Note whether a compensation takes a context. Its type may be imported where the handler is declared."""
        around = sys._getframe(3).f_locals  # pyright: ignore[reportPrivateUsage] - of the code that declares the handler
        try:
            hints = parameter_hints(handler, around)
        except (NameError, AttributeError, TypeError, SyntaxError) as error:
            words = f"a type hint of the compensate handler of {self!r} cannot be read where it is declared: {error}"
            words = f"{words}; import the type before the handler, outside `if TYPE_CHECKING`"
            if not collected(DeclarationRefusal.of(self.function, [Fault("/compensate", words)], self)):
                raise Failure("E3105", words) from None
            return
        self._undo_context = any(map(is_context, hints.values()))


# Reading a signature and its hints takes longer than most of a call, and neither changes.
@functools.lru_cache(maxsize=4096)
def _parameters(handler: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(handler).parameters.values())


@functools.lru_cache(maxsize=4096)
def _asks_for_context(handler: Callable[..., Any]) -> bool:
    return any(map(is_context, hints_of(handler).values()))


_ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _kindly(declare: Options) -> Options:
    """Replace Python's messages for a forgotten, misspelt or unnamed option, which do not say what to write."""
    options = inspect.signature(declare).parameters

    @functools.wraps(declare)
    def tool(*unnamed: Any, **stated: Any) -> Any:
        faults = [*positional_faults(unnamed, stated), *missing_faults(stated), *unknown_faults(options, stated)]
        if not faults and not unnamed:
            return declare(**stated)
        known = {name: stated.get(name, option.default) for name, option in options.items()}
        declarer = _declarer(known | {name: stated.get(name, line) for name, (line, _) in NEEDED.items()}, faults)
        # Bare `@tool` and `tool(function, …)` get the function at once.
        return declarer(unnamed[0], above=2) if len(unnamed) == 1 and callable(unnamed[0]) else declarer

    return cast("Options", tool)


@_kindly
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
    examples: Sequence[Mapping[str, Any] | Example] = (),
    known_pairs: Sequence[Mapping[str, Any]] = (),
    aliases: Sequence[str] = (),
    tags: Sequence[str] = (),
    search_hint: str | None = None,
    provider: str = "local",
    tool_kind: ToolKind = "function",
    concurrency_safe: bool = False,
    isolated_calls: bool = False,
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
    max_result_bytes: int | None = None,
    persist_output: bool = True,
    private_output: bool = False,
    content_types: Sequence[AddedType] = (),
    expected_artifacts: Sequence[str] = (),
    expected_resources: Sequence[str] = (),
    window_s: int | None = None,
    priority: int = 5,
    approval: Approval | None = None,
    sandbox: Sandboxing | bool = False,
    memory: str | None = None,
    network: NetworkPolicy | None = None,
    estimated_cost: float | None = None,
    external_service: str | None = None,
    checkpoints: Sequence[str] | bool = False,
    retry: Mapping[str, Any] | None = None,
    breaker: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]:
    """Declare a function as a tool.

    `version` and `mutation_class` cannot be guessed; everything else has a safe default. A write tool also lists its
    `effects`, a reversible one has a `@tool.compensate` handler, an irreversible one a `@tool.preview`. One that saves
    `checkpoints` says so, or lists the labels that are milestones. `retry` and `breaker` are the parts `retry_policy`
    and `circuit_breaker_config` of the manifest.
    """
    return _declarer(locals(), [])


def _declarer(options: Mapping[str, Any], misuse: list[Fault]) -> Callable[..., Any]:
    def declare(function: Callable[..., Any], above: int = 1) -> Tool[..., Any]:
        # Tools may be declared inside a function, with types that exist only there.
        around = sys._getframe(above).f_locals  # pyright: ignore[reportPrivateUsage]
        faults = [*misuse, *_not_a_function(function)]
        if faults != misuse:
            return _refused(function, faults)
        annotations, unread = read_annotations(function, around)
        doc = inspect.cleandoc(options["description"] or function.__doc__ or "")
        text = PARAMETERS.split(doc, maxsplit=1)[0].strip()
        if len(text) < 10:
            faults.append(
                Fault("/description", "it needs a docstring of at least 10 characters: agents choose tools by it")
            )
        facts = _facts(function, options, text, annotations, faults)
        try:
            parse_manifest(facts)  # faults are reported here, where they were written
        except Failure as failure:
            faults += faults_in_options(failure, function, options)
        if faults or unread:
            return _refused(function, [*faults, *unread])
        return Tool(function, facts, annotations)

    return declare


def _not_a_function(function: Any) -> Iterator[Fault]:
    """Describe the fault of a decorated object that is not a plain function."""
    if isinstance(function, Tool):
        yield Fault("", "it is a tool already: decorate a function once")
    elif isinstance(function, type) or not callable(function) or not hasattr(function, "__name__"):
        yield Fault("", "only a function can be a tool: write def NAME(…) and put @tool(…) above it")
    elif function.__name__ == "<lambda>":
        yield Fault("", "a lambda has no name and no docstring: write def NAME(…)")
    else:
        first = next(iter(inspect.signature(function).parameters.values()), None)
        owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
        untyped = first is not None and first.annotation is first.empty
        if first is not None and untyped and first.name in ("self", "cls") and owner not in ("", "<locals>"):
            words = f"a method cannot be a tool, no caller can send `{first.name}`"
            yield Fault("", f"{words}: write a function outside the class `{owner}`")


def _refused(function: Any, faults: list[Fault]) -> Tool[..., Any]:
    """Raise the failure with all faults of a declaration, each with the line to write.

    While refusals are collected, return a tool that stands for it, so that the rest of the module is loaded.
    """
    name = getattr(function, "__name__", None) or repr(function)
    stand_in: Tool[..., Any] = Tool(function, {"namespace": "", "tool_id": name, "version": ""}, Annotations())
    if collected(DeclarationRefusal.of(function, faults, stand_in)):
        return stand_in
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" (line {code.co_firstlineno})"
    words = [fault.message for fault in faults]
    listing = f" {words[0]}" if len(words) == 1 else "".join(f"\n  - {one}" for one in words)
    raise Failure(
        "E3105",
        f"`{name}`{where} cannot be declared as a tool yet:{listing}",
        details={"faults": [fault.document() for fault in faults]},
    )


def _facts(
    function: Callable[..., Any], stated: Mapping[str, Any], text: str, annotations: Annotations, faults: list[Fault]
) -> Json:
    """Build the manifest from the options, the docstring and the hints; adds the faults of the options."""

    def listed(option: str, kind: type | tuple[type, ...] = object) -> list[Any]:
        value = stated[option]
        items = list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple | set | frozenset) else None
        others = [one for one in items or () if not isinstance(one, kind)]
        if items is None or others:
            of = f" of {_ITEMS[option]}, and `{brief(others[0])}` is none" if others else ""
            faults.append(Fault(f"/{option}", f"`{option}` is a list{of}: write {_LISTS[option]}"))
            return []
        return items

    def part(option: str, kind: type[BaseModel]) -> Json:
        value = stated[option]
        if not isinstance(value, kind):
            faults.append(Fault(f"/{option}", f"`{option}` has parts: write {option}={kind.__name__}(…)"))
            return {}
        return value.model_dump(exclude_unset=option == "sandbox")

    identifier, space = name_of(function, stated)
    examples = [one if isinstance(one, Example) else Example(one) for one in listed("examples", (Mapping, Example))]
    facts: Json = {
        "tool_id": identifier,
        "namespace": space,
        "version": stated["version"],
        "name": stated["title"] or identifier.replace("_", " ").title().ljust(3),
        "description": text[:2000].ljust(10),
        "provider": stated["provider"],
        "protocol": "native",
        "parameters": annotations.parameters,
        "result_schema": annotations.result,
        "required_permissions": listed("permissions"),
        "required_scopes": listed("scopes"),
        "mutation_class": stated["mutation_class"],
        "effects": [effect.model_dump() for effect in listed("effects", Effect)],
        "idempotency": {} if stated["window_s"] is None else {"window_seconds": stated["window_s"]},
        "observability": {},
        "examples": [dict(example.arguments) for example in examples],
        "aliases": listed("aliases"),
        "tags": listed("tags"),
    }
    facts |= {field: stated[field] for field in _PLAIN_FACTS if stated[field] is not None}
    for name in ("content_types", "expected_artifacts", "expected_resources"):
        if stated[name]:
            facts[name] = listed(name)
    if recorded := [pair for one in examples if (pair := one.recorded()) is not None]:
        facts["recorded_examples"] = recorded
    if stated["known_pairs"]:
        facts["known_pairs"] = [dict(one) for one in listed("known_pairs", Mapping)]
    if stated["preconditions"]:
        facts["preconditions"] = [one.model_dump() for one in listed("preconditions", Precondition)]
    if stated["sandbox"]:
        facts["sandbox"] = {} if stated["sandbox"] is True else part("sandbox", Sandboxing)
    if stated["memory"] is not None:
        facts["resource_limits"] = {"memory": stated["memory"]}
    if stated["network"] is not None:
        facts["network_policy"] = part("network", NetworkPolicy)
    if stated["approval"] is not None:
        facts["approval"] = part("approval", Approval)
    if stated["checkpoints"] is not False:
        events = [] if stated["checkpoints"] is True else listed("checkpoints")
        facts["checkpoint_config"] = {"enabled": True, "macro_events": events}
    for option, field in (("retry", "retry_policy"), ("breaker", "circuit_breaker_config")):
        if stated[option] is not None:
            facts[field] = dict(stated[option]) if isinstance(stated[option], Mapping) else stated[option]
    if stated["timeout_s"] is not None:
        facts["timeout_default"] = stated["timeout_s"]
    elif stated["timeout_class"] is None:
        facts["timeout_class"] = "standard"
    return facts


_LISTS = {
    "permissions": 'permissions=["filesystem:read:/srv/data"]',
    "scopes": 'scopes=["reports:write"]',
    "effects": 'effects=[Effect("account:{account}", "UPDATE")]',
    "examples": 'examples=[{"account": "cash"}]',
    "known_pairs": 'known_pairs=[{"input": {"account": "cash"}, "output": 100}]',
    "aliases": 'aliases=["old_name"]',
    "tags": 'tags=["accounts"]',
    "content_types": 'content_types=["image", "log"]',
    "expected_artifacts": 'expected_artifacts=["report.pdf"]',
    "expected_resources": 'expected_resources=["https://wiki.example/*"]',
    "preconditions": 'preconditions=[Precondition("account:{account}", "{version}")]',
    "checkpoints": 'checkpoints=["half_done"]',
}
_ITEMS = {"effects": "Effect(…)", "examples": "objects", "known_pairs": "objects", "preconditions": "Precondition(…)"}


_PLAIN_FACTS = (
    "title", "timeout_class", "search_hint", "tool_kind", "concurrency_safe", "isolated_calls", "restart_safe",
    "external_io", "cancellable", "paged", "coerce_output", "tolerant_output", "breaking_changes", "behaviour_change",
    "redact_results", "max_inline_chars", "max_result_bytes", "persist_output", "private_output", "priority",
    "estimated_cost", "external_service",
)  # fmt: skip


def tools_in(namespace: Mapping[str, Any]) -> list[Tool[..., Any]]:
    """The tools declared in a module's namespace, in order."""
    seen: dict[int, Tool[..., Any]] = {}
    for value in namespace.values():
        if isinstance(value, Tool):
            tool_ = cast("Tool[..., Any]", value)
            seen.setdefault(id(tool_), tool_)
    return list(seen.values())
