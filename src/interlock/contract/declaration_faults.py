"""Faults of a declaration, in the words of the options of `@tool`, each with the line to write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from interlock.contract.function_identity import namespace_of
from interlock.contract.manifest import Manifest
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.schema import Fault, Json

# The two options that cannot be guessed: the value that is most often right, and its meaning.
NEEDED = {
    "version": ("1.0.0", ""),
    "mutation_class": ("read_only", ", or write_reversible or write_irreversible if it changes anything"),
}


def positional_faults(unnamed: tuple[Any, ...], options: Json) -> Iterator[Fault]:
    """List the arguments of `@tool` that have no name."""
    for one in unnamed:
        if isinstance(one, str) and "name" not in options:
            yield Fault("/name", f'options are named: write @tool(name="{one}", …)')
        elif not callable(one) or len(unnamed) > 1:
            yield Fault("", f"options are named: `{one!r}` has no name")


def missing_faults(options: Json) -> Iterator[Fault]:
    """List the options that cannot be guessed and are not stated."""
    for name, (line, meaning) in NEEDED.items():
        if name not in options:
            yield Fault(f"/{name}", f'`{name}` is missing: write @tool({name}="{line}"){meaning}')


def unknown_faults(options: Mapping[str, Any], stated: Json) -> Iterator[Fault]:
    """List the stated options that there are not, each with the one that was probably meant."""
    for name in stated:
        if name not in options:
            near = difflib.get_close_matches(_ALSO_CALLED.get(name, name), options, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f"; there are {', '.join(options)}"
            yield Fault(f"/{name}", f"`{name}` is not an option of @tool{hint}")


_ALSO_CALLED = {"timeout": "timeout_s", "window": "window_s", "summary": "description"}


def name_of(function: Callable[..., Any], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the bare name of a tool and its namespace."""
    identifier = options["name"] or function.__name__
    space, _, last = identifier.rpartition(".") if isinstance(identifier, str) else ("", "", identifier)
    return last, space or options["namespace"] or namespace_of(function)


# The parts of a manifest that come from an option of another name.
_OPTION_OF = {
    "name": "title", "required_permissions": "permissions", "required_scopes": "scopes", "timeout_default": "timeout_s",
    "idempotency": "window_s", "resource_limits": "memory", "network_policy": "network",
    "recorded_examples": "examples",
    "checkpoint_config": "checkpoints", "retry_policy": "retry", "circuit_breaker_config": "breaker",
}  # fmt: skip


def faults_in_options(failure: Failure, function: Callable[..., Any], options: Mapping[str, Any]) -> Iterator[Fault]:
    """Translate the faults of a manifest to the options that it was made from."""
    listed: list[Json] = (failure.details or {}).get("faults", [])
    for fault in listed:
        first, _, rest = str(fault["pointer"])[1:].partition("/")
        words = _PYDANTIC.sub("must ", str(fault["message"]))
        if first == "tool_id":
            yield Fault("/name", _renamed(*name_of(function, options), words))
            continue
        option = _OPTION_OF.get(first, first)
        given = options.get(option)
        line = f"{option}={given!r}" if isinstance(given, str | int | float) else option
        yield Fault(f"/{option}", f"`{line}` {words}" + _instead(option, given) + (f" (at {rest})" if rest else ""))


_PYDANTIC = expression(r"\A(?:input|string|value|tuple|list) should ")


def _renamed(name: str, space: str, words: str) -> str:
    snake = re.sub(r"[^a-z0-9_]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_0123456789")
    better = snake if len(snake) >= 3 else f"{space}_{snake}".strip("_")
    return f'the tool\'s name `{name}` {words}: rename the function, or write name="{better}"'


def _instead(option: str, given: Any) -> str:
    choices: tuple[Any, ...] = get_args(Manifest.model_fields[option].annotation) if option in _CHOICES else ()
    if choices:
        near = difflib.get_close_matches(str(given), [one for each in choices for one in get_args(each)], 1, 0.4)
        return f': write {option}="{near[0]}"' if near else ""
    return f': write {option}="{NEEDED[option][0]}"' if option in NEEDED else ""


_CHOICES = ("mutation_class", "timeout_class")
