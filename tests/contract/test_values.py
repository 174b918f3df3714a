"""From JSON to the values a function asks for: what pydantic would make of it, and nobody else's."""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import pytest
import pytest_asyncio
from annotated_types import Predicate
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter
from typing_extensions import TypedDict

from interlock import Context, Effect, Interlock, tool
from interlock.contract.values import converter, is_plain
from tests.support.calls import admit

pytestmark = pytest.mark.usefixtures("either_way")

Json = dict[str, Any]


class Part(TypedDict):
    number: int
    ratio: float
    kind: Literal[1, 2, "other"]
    note: NotRequired[str]
    more: NotRequired[list[int | None]]


class Whole(TypedDict, total=False):
    part: Part
    parts: dict[str, Part]
    rows: list[Part]
    count: Annotated[int, Field(ge=0)] | None
    name: Annotated[str, Field(pattern="^[^!]*$", max_length=99)]
    other: int | float


_number = st.integers(-(2**50), 2**50) | st.integers(-(2**50), 2**50).map(float)
_ratio = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**50), 2**50)
_part = st.fixed_dictionaries(
    {"number": _number, "ratio": _ratio, "kind": st.sampled_from([1, 1.0, 2, "other"])},
    optional={"note": st.text(), "more": st.lists(_number | st.none())},
)
_whole = st.fixed_dictionaries(
    {},
    optional={
        "part": _part,
        "parts": st.dictionaries(st.text(), _part),
        "rows": st.lists(_part),
        "count": st.none() | st.integers(0, 2**50).map(float) | st.integers(0, 2**50),
        "name": st.text("ab ", max_size=9),
        "other": _number | _ratio,
    },
)
_anything = st.recursive(
    st.none() | st.booleans() | _number | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=9,
)
PLAIN: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, _number),
    (float, _ratio),
    (float | None, _ratio | st.none()),
    (list[int], st.lists(_number)),
    (list[Annotated[int, Field(ge=-(2**60))]], st.lists(_number)),
    (dict[str, int], st.dictionaries(st.text(), _number)),
    (dict[str, dict[str, Part]], st.dictionaries(st.text(), st.dictionaries(st.text(), _part))),
    (list[list[str]], st.lists(st.lists(st.text()))),
    (dict[str, list[float]], st.dictionaries(st.text(), st.lists(_ratio))),
    (int | None, _number | st.none()),
    (int | str, _number | st.text()),
    (list[dict[str, int | None]] | None, st.none() | st.lists(st.dictionaries(st.text(), _number | st.none()))),
    (Part, _part),
    (Whole, _whole),
    (list[Whole], st.lists(_whole)),
    (Any, _anything),
    (dict[str, Any], st.dictionaries(st.text(), _anything)),
    (list[Any] | str | None, st.lists(_anything) | st.text() | st.none()),
    (dict, st.dictionaries(st.text(), _anything)),
]


@given(case=st.sampled_from(PLAIN).flatmap(lambda one: st.tuples(st.just(one[0]), one[1])))
def test_a_value_is_what_pydantic_makes_of_it_and_shares_nothing_with_what_was_given(case: Any) -> None:
    hint, value = case
    assert is_plain(hint)
    convert = converter(hint)
    assert convert is not None
    made = convert(value)
    assert _told(made) == _told(TypeAdapter(hint).validate_python(copy.deepcopy(value)))
    assert not _containers(made) & _containers(value)


def _told(value: Any) -> str:
    """As text, in which 5 and 5.0 differ."""
    return json.dumps(value, sort_keys=True)


def _containers(value: Any) -> set[int]:
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] - JSON
    elif isinstance(value, list):
        inner = value  # pyright: ignore[reportUnknownVariableType] - JSON
    else:
        return set()
    return {id(value), *(one for item in inner for one in _containers(item))}  # pyright: ignore[reportUnknownArgumentType] - JSON


@pytest.mark.parametrize("hint", [str, bool, str | None, Literal["a", "b"], Annotated[str, Field(max_length=3)]])
def test_what_arrives_as_it_is_and_cannot_be_changed_is_not_converted(hint: Any) -> None:
    assert converter(hint) is None


class Renamed(TypedDict):
    cents: Annotated[int, Field(alias="amount")]


class Filled(TypedDict):
    n: int
    text: Annotated[str, Field(default="q")]


class Stripped(TypedDict):
    __pydantic_config__ = ConfigDict(str_strip_whitespace=True)  # pyright: ignore[reportGeneralTypeIssues] - as pydantic wants it
    n: int
    text: str


def _even(value: int) -> bool:
    return value % 2 == 0


@pytest.mark.parametrize(
    ("hint", "given", "made"),
    [
        (Renamed, {"amount": 5.0}, {"cents": 5}),
        (Filled, {"n": 1}, {"n": 1, "text": "q"}),
        (Stripped, {"n": 1, "text": " x "}, {"n": 1, "text": "x"}),
        (Annotated[str, AfterValidator(str.upper)], "hey", "HEY"),
        (list[Annotated[int, BeforeValidator(lambda value: value + 1)]], [1, 2], [2, 3]),
        (Annotated[str, StringConstraints(strip_whitespace=True)], " ann ", "ann"),
        (list[Annotated[int, Predicate(_even)]], [2.0], [2]),
    ],
    ids=["alias", "default", "config", "after", "before", "strip", "predicate"],
)
def test_what_an_author_says_of_a_value_beside_its_type_is_done(hint: Any, given: Any, made: Any) -> None:
    convert = converter(hint)
    assert convert is not None
    assert _told(convert(given)) == _told(made)


def test_a_predicate_is_asked_wherever_it_stands() -> None:
    convert = converter(list[Annotated[int, Predicate(_even)]])
    assert convert is not None
    with pytest.raises(ValueError, match="Predicate"):
        convert([1, 3])


@pytest.mark.parametrize("hint", [typing.List, typing.Dict, list, dict], ids=repr)  # noqa: UP006 - still written
def test_a_container_of_nobody_knows_what_is_copied(hint: Any) -> None:
    convert = converter(hint)
    value: Any = [{"a": [1.0]}] if hint in (typing.List, list) else {"a": [1.0]}  # noqa: UP006
    assert convert is not None
    assert _told(convert(value)) == _told(value)
    assert not _containers(convert(value)) & _containers(value)


class Loose(BaseModel):
    facts: dict[str, Any]
    more: Any = None


@dataclass
class Looser:
    facts: list[Any]


class Roomy(TypedDict, extra_items=list[int]):
    name: str


class Heir(Roomy):
    other: NotRequired[list[int]]


@pytest.mark.parametrize("hint", [Roomy, Heir, list[Roomy], dict[str, Roomy]], ids=repr)
def test_what_a_row_holds_beside_its_members_is_nobody_elses_either(hint: Any) -> None:
    row: Any = {"name": "a", "more": [1]}
    value: Any = row if hint in (Roomy, Heir) else [row] if hint == list[Roomy] else {"x": row}
    convert = converter(hint)
    assert convert is not None
    assert _told(convert(value)) == _told(value)
    assert not _containers(convert(value)) & _containers(value)


LOOSE: list[tuple[Any, Any]] = [
    (Loose, {"facts": {"a": [1]}, "more": [{}]}),
    (list[Loose], [{"facts": {"a": {"b": []}}}]),
    (Looser, {"facts": [[1], {}]}),
    (Loose | None, {"facts": {"a": [1]}}),
]


@pytest.mark.parametrize(("hint", "value"), LOOSE)
def test_what_a_model_leaves_open_is_nobody_elses_either(hint: Any, value: Any) -> None:
    convert = converter(hint)
    assert convert is not None
    made: Any = convert(value)
    first: Any = made[0] if hint == list[Loose] else made
    assert not _containers(first.facts) & _containers(value)


def test_rows_that_share_their_parts_are_read_all_the_same() -> None:
    inner: Any = int
    for _ in range(5):
        names = [f"member {number}" for number in range(7)]
        inner = TypedDict("Row", dict.fromkeys(names, inner))  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType, reportInvalidTypeForm] - made as needed
    convert = converter(inner)
    assert convert is not None
    value: Any = 5.0
    for _ in range(5):
        value = {f"member {number}": copy.deepcopy(value) for number in range(7)}
    made = convert(value)
    assert _told(made) == _told(TypeAdapter[Any](inner).validate_python(value))
    assert not _containers(made) & _containers(value)


def test_rows_in_rows_are_read_once_however_deep() -> None:
    rows: Any = int
    for _ in range(40):
        row: Any = TypedDict("Row", {"inner": rows})  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType, reportInvalidTypeForm] - made as needed
        rows = list.__class_getitem__(row)
    assert converter(rows) is not None


# In a call


class Login(TypedDict):
    port: Annotated[int, Field(description="a port")]
    pin: Annotated[str, Field(description="a pin", json_schema_extra={"x-sensitivity": "secret"})]


ALogin = Annotated[Login, Field(description="how", examples=[{"port": 1, "pin": "none"}])]
Names = Annotated[list[str], Field(description="names", examples=[["a"]])]
Numbers = Annotated[list[int], Field(description="numbers", examples=[[1]])]
seen: list[Any] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="greedy")
def connect(login: ALogin) -> str:
    """Take the pin out of what was given, and tell it."""
    return f"connected with {login.pop('pin')}"  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType, reportAttributeAccessIssue, reportCallIssue] - what is wrong with it


@tool(version="1.0.0", mutation_class="read_only", namespace="greedy")
def empty(names: Names, numbers: Numbers) -> int:
    """Use up what was given."""
    names.clear()
    numbers.clear()
    return 0


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="greedy", effects=[Effect("list:all", "UPDATE")]
)  # fmt: skip
def push(ctx: Context, names: Names, numbers: Numbers) -> int:
    """Use up what was given, for good."""
    names.clear()
    numbers.clear()
    ctx.effect("list:all", "UPDATE")
    return 0


@push.verify
def _(result: int, arguments: Json) -> list[str]:
    seen.append(copy.deepcopy(arguments))
    return []


@push.compensate
def _(names: list[str], numbers: list[int]) -> None:
    seen.append({"names": names, "numbers": numbers})


MANIFEST = """
tool_id: take
namespace: greedy
version: 1.0.0
name: Take
description: Use up what was given.
provider: local
protocol: native
mutation_class: read_only
parameters:
  type: object
  properties:
    names: {type: array, items: {type: string}, description: names, examples: [[a]]}
    rows: {type: object, additionalProperties: true, description: rows, examples: [{a: [1]}]}
  required: [names]
  additionalProperties: true
result_schema: {type: integer}
required_permissions: []
idempotency: {}
observability: {}
timeout_class: interactive
external_io: false
execution: {target: "greedy.py:take"}
"""


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_what_a_tool_of_a_manifest_does_to_its_arguments_reaches_nobody(
    app: Interlock, tmp_path: Path, kind: str
) -> None:
    body = "names.clear(); rows['a'].clear(); more['b'].clear(); return 0"
    (tmp_path / "greedy.py").write_text(f"{kind} take(names, rows={{'a': []}}, more={{'b': []}}): {body}")
    (tmp_path / "greedy.yaml").write_text(MANIFEST)
    await app.add_from(str(tmp_path / "greedy.yaml"))
    given: Json = {"names": ["a"], "rows": {"a": [1]}, "more": {"b": [2]}}
    as_given = copy.deepcopy(given)
    for _ in range(3):
        assert (await app.call("greedy.take", given)).ok
        assert given == as_given


@tool(version="1.0.0", mutation_class="read_only", namespace="greedy")
def count(names: Names) -> list[str]:
    """Tell what was given, once its own checks have been at it."""
    return names


@count.check
def _(names: list[str]) -> None:
    names.append("checked")


@count.verify
def _(arguments: Json, result: list[str]) -> None:
    arguments["names"].append("verified")
    result.append("verified")


async def test_what_a_tools_checks_do_to_its_input_or_its_result_reaches_nobody(app: Interlock) -> None:
    await admit(app, count)
    given: Json = {"names": ["a"]}
    assert (await app.call("greedy.count", given)).unwrap() == ["a"]
    assert given == {"names": ["a"]}


@pytest_asyncio.fixture
async def greedy(app: Interlock) -> AsyncGenerator[Interlock]:
    await admit(app, connect, empty, push)
    seen.clear()
    yield app


async def test_a_secret_that_a_tool_takes_out_of_its_argument_is_hidden_all_the_same(greedy: Interlock) -> None:
    result = await greedy.call("greedy.connect", login={"port": 1, "pin": "violet-horse-19"})
    assert result.unwrap() == "connected with [REDACTED]"


async def test_what_a_tool_does_to_its_arguments_reaches_nobody(greedy: Interlock) -> None:
    given: Json = {"names": ["a", "b"], "numbers": [1, 2]}
    as_given = copy.deepcopy(given)
    assert (await greedy.call("greedy.empty", given)).ok
    assert given == as_given, "what its caller holds"
    done = await greedy.call("greedy.push", given, key="k")
    assert done.ok
    assert seen == [as_given], "what is verified"
    assert (await greedy.undo(done.invocation_id, key="u")).ok
    assert seen == [as_given, as_given], "what is undone"
    assert given == as_given
