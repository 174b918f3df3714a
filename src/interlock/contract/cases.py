"""Test cases derived from a contract: its examples, its bounds, and one step beyond each bound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

from interlock.contract.contract import Contract
from interlock.core.record import dataclass
from interlock.data.coerce import coerce
from interlock.data.schema import Json, Schema, resolve_ref

# Deriving and checking a case takes time in proportion to the schema. So many derived cases times properties are tried,
# and of a larger schema the first ones.
MOST_WORK = 200_000

Expectation = Literal["example", "recorded", "pair", "accepted", "refused"]


@dataclass(frozen=True, slots=True)
class Case:
    """An input and the expected outcome: run and succeed, return this output, pass validation, or be refused there.

    A `recorded` one is not run: input and, if it was `answered`, output must fit the contract.
    """

    name: str
    input: Json
    expect: Expectation
    output: Any = None
    answered: bool = False


def cases_of(contract: Contract) -> list[Case]:
    """Return the cases the contract implies. Inputs whose outcome depends on other constraints are left out, and of
    schemas with very many properties the cases beyond a bound.
    """
    schema = Schema(contract.input.model_facing)
    examples = examples_of(contract)
    cases = [_example(contract, number, one) for number, one in enumerate(examples, 1)]
    cases += [
        Case(f"known pair {number}", dict(one.input), "pair", one.output)
        for number, one in enumerate(contract.manifest.known_pairs, 1)
    ]
    base = examples[0] if examples else {}
    most = max(10, MOST_WORK // max(1, len(schema.properties)))
    for case in islice(_around(schema, base), most):
        faults = sum(1 for _ in schema.errors(coerce(schema, case.input).value))
        # A refused case breaks the rule it is named after and no other.
        if faults == (0 if case.expect == "accepted" else 1):
            cases.append(case)
    return cases


def _example(contract: Contract, number: int, example: Json) -> Case:
    for one in contract.manifest.recorded_examples:
        if one.input == example:
            return Case(f"example {number}", example, "recorded", one.output, one.answered)
    return Case(f"example {number}", example, "example")


def examples_of(contract: Contract) -> list[Json]:
    """Return the author's own examples: whole ones if there are any, else combined from each field's.

    A combination that is incomplete or does not fit is left out: a required field may have no example, and examples of
    two fields may exclude one another.
    """
    if contract.manifest.examples:
        return [dict(example) for example in contract.manifest.examples]
    schema = contract.input
    fields: dict[str, list[Any]] = {
        name: resolve_ref(schema.document, part).get("examples") or []
        for name, part in schema.properties.items()
        if name not in schema.internal
    }
    longest = max((len(values) for values in fields.values()), default=1)
    made: list[Json] = [
        {name: values[min(index, len(values) - 1)] for name, values in fields.items() if values}
        for index in range(longest)
    ]
    whole = Schema(schema.model_facing)
    fitting = [example for example in made if not any(True for _ in whole.errors(coerce(whole, example).value))]
    return [example for index, example in enumerate(fitting) if example not in fitting[:index]]


def _around(schema: Schema, base: Json) -> Iterator[Case]:
    for name in schema.document.get("required", []):
        yield Case(f"missing {name}", {key: value for key, value in base.items() if key != name}, "refused")
    yield Case("undeclared field", {**base, "undeclared_field": 1}, "refused")
    for name, raw in schema.properties.items():
        part = resolve_ref(schema.document, raw)
        for words, value, expect in _values(part):
            yield Case(f"{name} {words}", {**base, name: value}, expect)


_WRONG_TYPE: dict[str, Any] = {
    "string": {"not": "text"},
    "integer": "x",
    "number": "x",
    "boolean": "maybe",
    "array": "x",
    "object": "x",
    "null": "x",
}


def _values(part: Json) -> Iterator[tuple[str, Any, Expectation]]:
    kind = part.get("type")
    if isinstance(kind, str) and kind in _WRONG_TYPE:
        yield f"not of type {kind}", _WRONG_TYPE[kind], "refused"
    yield from _text_values(part)
    yield from _number_values(part)
    if "enum" in part:
        for choice in part["enum"]:
            yield f"equal to {choice!r}", choice, "accepted"
        yield "outside the enumeration", "\u2205 none of them", "refused"
    if "const" in part:
        yield "equal to the constant", part["const"], "accepted"
        yield "other than the constant", "\u2205 none of them", "refused"
    if isinstance(part.get("minItems"), int) and part["minItems"] > 0:
        yield "with too few items", [], "refused"


def _text_values(part: Json) -> Iterator[tuple[str, Any, Expectation]]:
    longest, shortest = part.get("maxLength"), part.get("minLength")
    if isinstance(longest, int) and longest < 100_000:
        yield "at maxLength", "x" * longest, "accepted"
        yield "beyond maxLength", "x" * (longest + 1), "refused"
    if isinstance(shortest, int) and shortest > 0:
        yield "at minLength", "x" * shortest, "accepted"
        yield "below minLength", "x" * (shortest - 1), "refused"
    if "pattern" in part or "format" in part:
        yield "of the wrong form", "\u2205 not of that form", "refused"


_STEPS = (
    ("minimum", 0, -1),
    ("maximum", 0, 1),
    ("exclusiveMinimum", 1, 0),
    ("exclusiveMaximum", -1, 0),
)


def _number_values(part: Json) -> Iterator[tuple[str, Any, Expectation]]:
    for keyword, inside, outside in _STEPS:
        bound = part.get(keyword)
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            yield f"at {keyword}", bound + inside, "accepted"
            yield f"beyond {keyword}", bound + outside, "refused"
    step = part.get("multipleOf")
    if isinstance(step, int | float) and step > 0:
        yield "a multiple", step * 2, "accepted"
        yield "between multiples", step * 2 + step / 2, "refused"
