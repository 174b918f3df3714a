"""Tools from Python functions: what the hints say, what is demanded at declaration, and what a call delivers."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional
from uuid import UUID

import pytest
import pytest_asyncio
from pydantic import BaseModel
from typing_extensions import TypedDict

from interlock import Context, Effect, Failure, Field, Interlock, Preview, Tool, tool
from interlock.registry.source import load

Json = dict[str, Any]
AnyTool = Tool[..., Any]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


Whole = Annotated[int, Field(description="a whole number", examples=[1])]
Note = Annotated[str, Field(description="a note", examples=["n"])]


@dataclass
class Point:
    x: Whole
    y: Whole = 0


@dataclass
class Line:
    points: Annotated[list[Point], Field(description="where it goes")]
    label: Annotated[str | None, Field(description="a label", examples=["a"])] = None
    tags: Annotated[list[str], Field(description="tags", examples=[[]])] = field(default_factory=list[str])


class Row(TypedDict):
    id: Whole
    note: NotRequired[Note]


class Event(BaseModel):
    title: str = Field(description="what happens", min_length=1)
    at: datetime = Field(description="when it happens")
    level: Annotated[Level, Field(description="how bad it is", examples=[1])] = Level.LOW


Name = Annotated[str, Field(description="a name", examples=["ada"], min_length=1, max_length=40, pattern="^[a-z]+$")]
heard: dict[str, Any] = {}


@tool(version="1.0.0", mutation_class="read_only", namespace="types", redact_results=False)
async def gather(
    ctx: Context,
    name: Name,
    colour: Annotated[Colour, Field(description="a colour")],
    level: Annotated[Level, Field(description="how loud")],
    mode: Annotated[Literal["fast", "slow"], Field(description="how")],
    point: Annotated[Point, Field(description="a place", examples=[{"x": 1}])],
    line: Annotated[Line, Field(description="places", examples=[{"points": [{"x": 1, "y": 2}]}])],
    row: Annotated[Row, Field(description="a row", examples=[{"id": 1}])],
    event: Annotated[Event, Field(description="an event", examples=[{"title": "a", "at": "2026-01-02T03:04:05Z"}])],
    when: Annotated[datetime, Field(description="a time", examples=["2026-01-02T03:04:05Z"])],
    grid: Annotated[list[list[int]], Field(description="numbers", examples=[[[1, 2], [3]]])],
    places: Annotated[dict[str, Point], Field(description="by name", examples=[{"home": {"x": 1}}])],
    day: Annotated[date | None, Field(description="a day", examples=["2026-01-02"])] = None,
    key: Annotated[Optional[UUID], Field(description="a key", examples=[None])] = None,  # noqa: UP045 - both spellings
    count: Whole = 5,
    ratio: Annotated[float, Field(description="a ratio", examples=[0.5], ge=0, le=1)] = 0.5,
    loud: Annotated[bool, Field(description="whether")] = False,
) -> Line:
    """Take one of each kind of type."""
    heard.update(locals())
    return Line([point, *line.points], label=colour.value)


@tool(version="1.0.0", mutation_class="read_only", namespace="types", redact_results=False)
def happen(title: Annotated[str, Field(description="what", examples=["tea"])]) -> dict[str, list[Event]]:
    """Make an event, in a thread."""
    return {"events": [Event(title=title, at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), level=Level.HIGH)]}


@tool(version="1.0.0", mutation_class="read_only", namespace="types", redact_results=False)
def pick(index: Whole) -> Colour | None:
    """Pick a colour, or none."""
    return Colour.BLUE if index else None


Several = Annotated[list[int], Field(description="some numbers", examples=[[1, 2]])]
ByName = Annotated[dict[str, int], Field(description="numbers by name", examples=[{"a": 1}])]


@tool(version="1.0.0", mutation_class="read_only", namespace="types", redact_results=False)
def numbers(
    one: Whole,
    maybe: Annotated[int | None, Field(description="a number or nothing", examples=[1])] = None,
    several: Several = [],  # noqa: B006 - never changed
    by_name: ByName = {},  # noqa: B006 - never changed
) -> list[str]:
    """Say which Python types arrived."""
    every = [one, *([] if maybe is None else [maybe]), *several, *by_name.values()]
    return [type(number).__name__ for number in every]


ARGUMENTS: Json = {
    "name": "ada",
    "colour": "blue",
    "level": 2,
    "mode": "slow",
    "point": {"x": 1},
    "line": {"points": [{"x": 2, "y": 3}], "label": "l"},
    "row": {"id": 7},
    "event": {"title": "tea", "at": "2026-01-02T03:04:05+02:00", "level": 2},
    "when": "2026-01-02T03:04:05Z",
    "grid": [[1], [2, 3]],
    "places": {"home": {"x": 4, "y": 5}},
    "day": "2026-02-28",
    "key": "00000000-0000-0000-0000-000000000001",
    "count": 3,
    "ratio": 1,
    "loud": True,
}


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncGenerator[Interlock]:
    heard.clear()
    async with Interlock.open(tmp_path / "home") as opened:
        yield opened


# What the hints say

PROPERTIES: Json = gather.manifest.parameters["properties"]
DEFINITIONS: Json = gather.manifest.parameters["$defs"]


def described(name: str) -> Json:
    """A parameter's schema, its reference followed, without the words for readers."""
    part = dict(PROPERTIES[name])
    ref = part.pop("$ref", None)
    whole: Json = part | DEFINITIONS[ref.rpartition("/")[2]] if ref else part
    return {key: value for key, value in whole.items() if key not in ("description", "examples")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("name", {"type": "string", "minLength": 1, "maxLength": 40, "pattern": "^[a-z]+$"}),
        ("colour", {"type": "string", "enum": ["red", "blue"]}),
        ("level", {"type": "integer", "enum": [1, 2]}),
        ("mode", {"type": "string", "enum": ["fast", "slow"]}),
        ("when", {"type": "string", "format": "date-time"}),
        ("grid", {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
        ("places", {"type": "object", "additionalProperties": {"$ref": "#/$defs/Point"}}),
        ("day", {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None}),
        ("key", {"anyOf": [{"type": "string", "format": "uuid"}, {"type": "null"}], "default": None}),
        ("count", {"type": "integer", "default": 5}),
        ("ratio", {"type": "number", "minimum": 0, "maximum": 1, "default": 0.5}),
        ("loud", {"type": "boolean", "default": False}),
    ],
)
def test_a_hint_becomes_the_schema_it_stands_for(name: str, expected: Json) -> None:
    assert described(name) == expected


@pytest.mark.parametrize(
    ("name", "properties", "required"),
    [
        ("point", {"x", "y"}, ["x"]),
        ("line", {"points", "label", "tags"}, ["points"]),
        ("row", {"id", "note"}, ["id"]),
        ("event", {"title", "at", "level"}, ["title", "at"]),
    ],
)
def test_a_dataclass_a_typed_dict_and_a_model_become_objects(
    name: str, properties: set[str], required: list[str]
) -> None:
    part = described(name)
    assert part["type"] == "object"
    assert set(part["properties"]) == properties
    assert part["required"] == required


def test_parameters_without_a_default_are_required_and_the_context_is_no_parameter() -> None:
    with_default = {"day", "key", "count", "ratio", "loud"}
    assert "ctx" not in PROPERTIES
    assert set(gather.manifest.parameters["required"]) == set(PROPERTIES) - with_default
    assert gather.takes_context
    assert "Context" not in repr(gather.manifest.document())


def test_made_up_titles_are_left_out_and_a_field_named_title_is_kept() -> None:
    assert "Title" not in repr(gather.manifest.parameters)
    assert "title" in DEFINITIONS["Event"]["properties"]
    assert set(happen.manifest.parameters["properties"]) == {"title"}


def test_the_return_annotation_becomes_the_result_schema() -> None:
    result = gather.manifest.result_schema
    assert result is not None
    assert result["type"] == "object"
    assert set(result["properties"]) == {"points", "label", "tags"}
    assert pick.manifest.result_schema is not None
    assert pick.manifest.result_schema["anyOf"][-1] == {"type": "null"}


def test_examples_follow_from_enumerations_booleans_and_defaults() -> None:
    assert PROPERTIES["colour"]["examples"] == ["red", "blue"]
    assert PROPERTIES["mode"]["examples"] == ["fast", "slow"]
    assert PROPERTIES["loud"]["examples"] == [True, False]
    assert PROPERTIES["name"]["examples"] == ["ada"]


def test_the_shortest_form_has_safe_defaults() -> None:
    manifest = pick.manifest
    assert manifest.address == "types.pick"
    assert (manifest.version, manifest.mutation_class) == ("1.0.0", "read_only")
    assert manifest.timeout_class == "standard"
    assert manifest.required_permissions == ()
    assert manifest.concurrency_safe is False
    assert manifest.restart_safe is False
    assert manifest.external_io is True
    assert manifest.redact_results is False
    assert manifest.description == "Pick a colour, or none."
    assert repr(pick) == "<tool types.pick@1.0.0>"


async def test_a_decorated_function_stays_callable_as_itself() -> None:
    assert pick(1) is Colour.BLUE
    assert pick(index=0) is None
    assert happen("tea")["events"][0].title == "tea"
    assert pick.__name__ == "pick"
    assert pick.__doc__ == "Pick a colour, or none."
    assert list(inspect.signature(pick).parameters) == ["index"]
    assert not pick.is_async
    assert gather.is_async

    @tool(version="1.0.0", mutation_class="read_only")
    async def later(index: Whole) -> int:
        """Give the number back later."""
        await asyncio.sleep(0)
        return index

    assert await later(3) == 3
    assert later.manifest.namespace == "test_declare"


# Declared in a file of its own

HEADER = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated, Any, Callable, Optional
from interlock import Context, Effect, Field, Preview, tool

class Odd:
    pass

read = tool(version="1.0.0", mutation_class="read_only")
Number = Annotated[int, Field(description="a number", examples=[1])]

"""


def declared(tmp_path: Path, source: str) -> AnyTool:
    path = tmp_path / "made.py"
    path.write_text(HEADER + inspect.cleandoc(source) + "\n")
    [made] = load(str(path))[1]
    return made


def find(parameters: str, *, returns: str = " -> int", doc: str = "Find a number.", by: str = "@read") -> str:
    return f"{by}\ndef find({parameters}){returns}:\n    {doc!r}\n"


def field_of(**said: Any) -> str:
    return "Field(" + ", ".join(f"{name}={value!r}" for name, value in said.items()) + ")"


ODD = f"x: Annotated[Odd, {field_of(description='d', examples=[1])}]"
CALLABLE = f"x: Annotated[Callable[[], int], {field_of(description='d', examples=[1])}]"
OUTER = f"x: Annotated[str, {field_of(description='d', examples=['a'], json_schema_extra={'x-sensitivity': 'top'})}]"
UNFIT = "a type that JSON cannot hold"
OMISSIONS: dict[str, tuple[str, list[str]]] = {
    "a type": (find("x"), ["`find`", "a type for `x`", "x: Annotated[str, Field(description=…, examples=[…])]"]),
    "a description": (
        find("x: Annotated[int, Field(examples=[1])]"),
        ["`find`", "`x` needs a description", "Field(description=…)"],
    ),
    "an example": (
        find("x: Annotated[int, Field(description='a number')]"),
        ["`find`", "`x` needs an example", "Field(examples=[…])"],
    ),
    "everything, said at once": (
        find("x: int, y: str"),
        ["`x` needs a description", "`x` needs an example", "`y` needs a description", "`y` needs an example"],
    ),
    "an example that fits": (
        find("x: Annotated[int, Field(description='a number', examples=['one'])]"),
        ["the example `one` of `x` does not fit its own schema"],
    ),
    "a return type": (find("x: Number", returns=""), ["`find`", "a return type", "-> int"]),
    "a docstring": (
        "@read\ndef find(x: Number) -> int: ...",
        ["`find`", "a docstring of at least 10 characters", "agents choose tools by it"],
    ),
    "a docstring that says something": (find("x: Number", doc="Find."), ["at least 10 characters"]),
    "names for all parameters": (find("*x: int"), ["named parameters only", "`x`", "without * and /"]),
    "names for all options": (find("**x: int"), ["named parameters only", "`x`", "without * and /"]),
    "names for positions": (find("x: Number, /"), ["named parameters only", "`x`", "without * and /"]),
    "a hint that exists": (find("x: Nothing"), ["`find`", "the type hint `Nothing` cannot be found"]),
    "a parameter type JSON can hold": (find(CALLABLE), ["find", UNFIT]),
    "a parameter type that can be read": (find(ODD), ["find", UNFIT, "Odd"]),
    "a return type JSON can hold": (find("x: Number", returns=" -> Callable[[], int]"), ["find", UNFIT]),
    "a return type that can be read": (find("x: Number", returns=" -> Odd"), ["find", UNFIT, "Odd"]),
    "a real version": (
        find("x: Number", by='@tool(version="1.0", mutation_class="read_only")'),
        ["`version='1.0'`", "MAJOR.MINOR.PATCH", 'write version="1.0.0"'],
    ),
    "a mutation class": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="reads")'),
        ["`mutation_class='reads'`", 'write mutation_class="read_only"'],
    ),
    "a long enough name": (
        find("x: Number").replace("find", "go"),
        ["`go`", "at least 3 characters", 'write name="made_go"'],
    ),
    "a known sensitivity": (find(OUTER), ["x-sensitivity of `x` must be one of", "secret"]),
}


@pytest.mark.part_of(
    "CONTRACT-06",
    rest="a schema of an upstream that says nothing of other properties, which stays open unless an operator closes "
    "it: in JSON Schema silence declares it open (docs/adr/0043), and the note can be read to close it",
)
@pytest.mark.parametrize(("source", "words"), [pytest.param(*case, id=name) for name, case in OMISSIONS.items()])
def test_what_a_declaration_lacks_is_said_when_it_is_declared_and_how_to_write_it(
    source: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(Failure) as caught:
        declared(tmp_path, source)
    assert caught.value.code == "E3105"
    for part in words:
        assert part in caught.value.message
    assert "Traceback" not in caught.value.message
    assert "errors.pydantic.dev" not in caught.value.message


MISUSES: dict[str, tuple[str, list[str]]] = {
    "no options at all": (
        "@tool\ndef find(x: Number) -> int:\n    'Find a number.'\n",
        ["`find`", 'write @tool(version="1.0.0")', 'write @tool(mutation_class="read_only")'],
    ),
    "empty brackets": (
        find("x: Number", by="@tool()"),
        ["`find`", 'write @tool(version="1.0.0")', 'write @tool(mutation_class="read_only")'],
    ),
    "one of the two": (find("x: Number", by='@tool(version="1.0.0")'), ['write @tool(mutation_class="read_only")']),
    "a misspelt option": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", descripton="d")'),
        ["`descripton` is not an option of @tool", "did you mean `description`?"],
    ),
    "an option that is called otherwise": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", timeout=3)'),
        ["`timeout` is not an option of @tool", "did you mean `timeout_s`?"],
    ),
    "an unknown option": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", bogus=1)'),
        ["`bogus` is not an option of @tool", "there are version, mutation_class"],
    ),
    "a name without its name": (
        find("x: Number", by='@tool("demo.find", version="1.0.0", mutation_class="read_only")'),
        ['write @tool(name="demo.find", …)'],
    ),
    "a text for a list": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", examples="cash", tags="money")'),
        ["`examples` is a list: write examples=[{", "`tags` is a list: write tags=["],
    ),
    "an effect without its list": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", effects=Effect("a", "UPDATE"))'),
        ["`effects` is a list: write effects=[Effect("],
    ),
    "an effect that is a dictionary": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", effects=[{"resource": "a"}])'),
        ["`effects` is a list of Effect(…), and `{'resource': 'a'}` is none: write effects=[Effect("],
    ),
    "other things in a list": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", examples=["x"])'),
        ["`examples` is a list of objects, and `x` is none: write examples=["],
    ),
    "an unknown operation": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", effects=[Effect("x", "FROB")])'),
        ["Effect(…)", "operation", "'CREATE', 'UPDATE' or 'DELETE'"],
    ),
    "an effect of too many parts": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", effects=[Effect("x", "", "", 4)])'),
        ["Effect(…) takes resource, operation, scope"],
    ),
    "a part that is not one": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", approval="admins")'),
        ["`approval`", "write approval=Approval(…)"],
    ),
    "a time in words": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", timeout_s="long")'),
        ["`timeout_s='long'` must be a valid integer"],
    ),
    "a memory of no size": (
        find("x: Number", by='@tool(version="1.0.0", mutation_class="read_only", memory="much")'),
        ["`memory='much'` must match"],
    ),
    "a method": (
        "pass\nclass Ledger:\n    @read\n    def find(self, x: Number) -> int:\n        'Find a number.'\n",
        ["a method cannot be a tool", "`self`", "outside the class `Ledger`"],
    ),
    "a lambda": ("find = read(lambda x: 1)", ["a lambda has no name", "write def"]),
    "a class": ("@read\nclass find: ...", ["only a function can be a tool", "write def"]),
    "what is none": ("find = read(3)", ["only a function can be a tool"]),
    "what is a tool": (find("x: Number", by="@read\n@read"), ["it is a tool already"]),
    "a name in another style": (
        "@read\ndef findIt(x: Number) -> int:\n    'Find a number.'\n",
        ["`findIt`", 'write name="find_it"'],
    ),
    "everything, said at once": (
        "@tool(mutation_class='reads', bogus=1)\ndef go(x, *y: int):\n    pass\n",
        [
            "`go` (line 13)", '\n  - `version` is missing: write @tool(version="1.0.0")', "\n  - `bogus`", "docstring",
            "\n  - it needs a type for `x`", "write `y` without *", "a return type", "at least 3 characters",
            'write mutation_class="read_only"',
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "words"), [pytest.param(*case, id=name) for name, case in MISUSES.items()])
def test_a_declaration_is_refused_in_words_that_say_what_to_write(
    source: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(Failure) as caught:
        declared(tmp_path, source)
    assert caught.value.code == "E3105"
    for part in words:
        assert part in caught.value.message
    for foreign in ("manifest", "pydantic", "TypeError", "positional"):
        assert foreign not in caught.value.message
    listed = (caught.value.details or {"faults": []})["faults"]
    assert all(fault["message"] in caught.value.message for fault in listed)


def test_a_function_may_be_given_with_its_options(tmp_path: Path) -> None:
    source = "def find(x: Number) -> int:\n    'Find a number.'\n    return x\n"
    made = declared(tmp_path, source + 'made = tool(find, version="1.0.0", mutation_class="read_only")')
    assert (repr(made), made(3)) == ("<tool made.find@1.0.0>", 3)


TYPED_DICTS = """
    import typing

    class Place(typing.TypedDict, total=False):
        town: Annotated[str, Field(description="a town", examples=["Ulm"])]
        street: typing.Required[Annotated[str, Field(description="a street", examples=["High"])]]

    class Row(typing.TypedDict):
        "A row of a table."
        a: Annotated[int, Field(description="a number")]
        when: typing.NotRequired[Annotated[datetime, Field(description="when", examples=["2026-01-02T03:04:05Z"])]]
        places: Annotated[list[Place] | None, Field(description="places")]

    @read
    def find(x: Annotated[Row, Field(description="a row", examples=[{"a": 1, "places": None}])]) -> dict[str, Row]:
        "Find a row."
        assert [type(value) for value in x.values()] in ([int, type(None)], [int, datetime, list])
        return {"found": x}
"""


async def test_a_typed_dict_may_come_from_either_module(app: Interlock, tmp_path: Path) -> None:
    made = declared(tmp_path, "from datetime import datetime\n" + inspect.cleandoc(TYPED_DICTS))
    row = made.manifest.parameters["$defs"]["Row"]
    assert row["required"] == ["a", "places"]
    assert row["description"] == "A row of a table."
    assert made.manifest.parameters["$defs"]["Place"]["required"] == ["street"]
    await app.add(made)
    given = {"a": 1.0, "when": "2026-01-02T03:04:05Z", "places": [{"street": "High"}]}
    found = (await app.call("made.find", {"x": given})).unwrap()
    assert found == {"found": {"a": 1, "when": "2026-01-02T03:04:05Z", "places": [{"street": "High"}]}}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on, it can be read")
def test_a_typed_dict_that_holds_itself_is_refused_with_the_parameter_and_the_import_that_works(tmp_path: Path) -> None:
    source = "import typing\n\nclass Node(typing.TypedDict):\n    nodes: list['Node']\n\n" + find("x: Node")
    with pytest.raises(Failure) as caught:
        declared(tmp_path, source)
    assert "`x` has a type that JSON cannot hold" in caught.value.message
    assert "typing_extensions.TypedDict" in caught.value.message
    assert "errors.pydantic.dev" not in caught.value.message


@pytest.mark.parametrize(
    "name", ["_hidden", "model_config", "model_fields", "schema", "json", "copy", "title", "type", "self"]
)
def test_a_parameter_may_have_any_name(name: str, tmp_path: Path) -> None:
    made = declared(tmp_path, f'@read\ndef find({name}: Number) -> int:\n    "Find a number."\n    return {name}')
    assert made.manifest.parameters["properties"] == {
        name: {"type": "integer", "description": "a number", "examples": [1]}
    }
    assert made.manifest.parameters["required"] == [name]


GOOGLE = '''
@read
def find(who: str = "ada", times: int = 1, loud: bool = False) -> int:
    """Find somebody.

    Goes through all rooms.

    Args:
        who: whom to find
        times (int): how often
            to try
        loud: whether to shout

    Returns:
        count: how many there were
    """
'''
SPHINX = '''
@read
def find(who: str = "ada", times: int = 1, loud: bool = False) -> int:
    """Find somebody.

    Goes through all rooms.

    :param who: whom to find
    :param int times: how often
        to try
    :param loud: whether to shout
    :returns: how many there were
    """
'''


@pytest.mark.parametrize("source", [GOOGLE, SPHINX], ids=["google", "sphinx"])
def test_parameters_are_described_by_the_docstring(source: str, tmp_path: Path) -> None:
    properties = declared(tmp_path, source).manifest.parameters["properties"]
    assert properties["who"]["description"] == "whom to find"
    assert properties["times"]["description"].startswith("how often")
    assert properties["loud"]["description"] == "whether to shout"
    assert properties["who"]["examples"] == ["ada"]
    assert properties["loud"]["examples"] == [True, False]


@pytest.mark.parametrize("source", [GOOGLE, SPHINX], ids=["google", "sphinx"])
def test_a_description_that_goes_on_in_the_next_line_is_read_to_its_end(source: str, tmp_path: Path) -> None:
    properties = declared(tmp_path, source).manifest.parameters["properties"]
    assert properties["times"]["description"] == "how often to try"


@pytest.mark.parametrize("source", [GOOGLE, SPHINX], ids=["google", "sphinx"])
def test_the_description_of_the_tool_ends_where_the_parameters_begin(source: str, tmp_path: Path) -> None:
    assert declared(tmp_path, source).manifest.description == "Find somebody.\n\nGoes through all rooms."


def test_a_field_goes_before_the_docstring(tmp_path: Path) -> None:
    made = declared(
        tmp_path,
        '''
        @read
        def find(x: Number) -> int:
            """Find a number.

            Args:
                x: another description
            """
        ''',
    )
    assert made.manifest.parameters["properties"]["x"]["description"] == "a number"


def test_a_handler_declared_after_the_tool_is_in_use_is_refused() -> None:
    @tool(version="1.0.0", mutation_class="write_irreversible", effects=[Effect("mail:{to}", "CREATE")])
    def post(to: Name) -> str:
        """Post a letter to somebody."""
        return to

    @post.preview
    def _(to: str) -> Preview:
        return Preview(impact=to)

    assert post.manifest.previews is True
    assert post.manifest.compensable is False

    def undo(to: str) -> None:
        raise AssertionError(to)

    with pytest.raises(Failure, match="declare its compensate handler right after the tool") as caught:
        post.compensate(undo)
    assert caught.value.code == "E3105"


def _writes() -> Any:
    @tool(version="1.0.0", mutation_class="write_reversible", effects=[Effect("mail:{to}", "CREATE")])
    def post(to: Name) -> str:
        """Post a letter to somebody."""
        return to

    return post


def test_a_compensation_gets_a_context_whose_type_is_imported_where_it_is_declared() -> None:
    from interlock import Context as Local

    post = _writes()

    @post.compensate
    def _(ctx: Local, to: str) -> None:
        raise AssertionError(to)

    assert post.undo_takes_context
    assert post.undo_arguments({"to": "you"}, "sent") == {"to": "you"}


def test_a_compensation_whose_hints_cannot_be_read_is_refused_when_it_is_declared() -> None:
    post = _writes()

    def undo(ctx: Nowhere, to: str) -> None:  # noqa: F821 # pyright: ignore
        raise AssertionError(to)

    with pytest.raises(Failure, match=r"Nowhere.*import the type before the handler") as caught:
        post.compensate(undo)
    assert caught.value.code == "E3105"


# The digest of the code

CODE = '''
@read
def find(x: Number) -> int:
    """Find a number."""
    doubled = x * 2
    return doubled + 1
'''


def implementation(tmp_path: Path, source: str) -> str:
    tmp_path.mkdir(exist_ok=True)
    execution = declared(tmp_path, source).manifest.execution
    assert execution is not None
    assert execution.implementation is not None
    assert re.fullmatch(r"[0-9a-f]{64}", execution.implementation)
    return execution.implementation


@pytest.mark.parametrize(
    "source",
    [
        CODE.replace("    doubled", "    # twice as much\n    doubled"),
        CODE.replace("x * 2", "x * 2  # twice"),
        CODE.replace("    return", "\n\n    return"),
        CODE.replace("    return", "    # one\n\n    # more\n    return"),
        "\n\n\n# above\n" + CODE,
        CODE + "\n\n# below\n",
    ],
    ids=["comment line", "comment behind", "blank lines", "both", "above", "below"],
)
def test_comments_and_blank_lines_do_not_change_the_digest_of_the_code(source: str, tmp_path: Path) -> None:
    assert implementation(tmp_path / "a", source) == implementation(tmp_path / "b", CODE)


@pytest.mark.parametrize(
    "source",
    [
        CODE.replace("x * 2", "x * 3"),
        CODE.replace("doubled + 1", "doubled - 1"),
        CODE.replace("doubled", "tripled"),
        CODE.replace("return doubled + 1", "return '# no comment' and 1"),
        CODE.replace("    return", "    if x:\n        return 0\n    return"),
        CODE + "\n\n@find.check\ndef _(x: int) -> list[str]:\n    return []\n",
    ],
)
def test_any_change_of_the_code_changes_its_digest(source: str, tmp_path: Path) -> None:
    assert implementation(tmp_path / "a", source) != implementation(tmp_path / "b", CODE)


def test_the_place_of_a_file_does_not_change_the_declaration(tmp_path: Path) -> None:
    assert implementation(tmp_path / "a", CODE) == implementation(tmp_path / "b", CODE)
    here, there = declared(tmp_path / "a", CODE).manifest, declared(tmp_path / "b", CODE).manifest
    assert here.document() == there.document()


# What a call delivers


async def test_a_call_delivers_real_python_values(app: Interlock) -> None:
    await app.add(gather)
    result = await app.call("types.gather", ARGUMENTS)
    assert result.ok, result.error
    assert heard.pop("ctx").__class__ is Context
    assert heard == {
        "name": "ada",
        "colour": Colour.BLUE,
        "level": Level.HIGH,
        "mode": "slow",
        "point": Point(1, 0),
        "line": Line([Point(2, 3)], "l", []),
        "row": {"id": 7},
        "event": Event(title="tea", at=datetime.fromisoformat("2026-01-02T03:04:05+02:00"), level=Level.HIGH),
        "when": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "grid": [[1], [2, 3]],
        "places": {"home": Point(4, 5)},
        "day": date(2026, 2, 28),
        "key": UUID(int=1),
        "count": 3,
        "ratio": 1,
        "loud": True,
    }
    assert isinstance(heard["colour"], Colour)
    assert isinstance(heard["level"], Level)


async def test_results_come_back_as_json(app: Interlock) -> None:
    await app.add(gather, happen, pick)
    assert (await app.call("types.gather", ARGUMENTS)).unwrap() == {
        "points": [{"x": 1, "y": 0}, {"x": 2, "y": 3}],
        "label": "blue",
        "tags": [],
    }
    assert (await app.call("types.happen", title="tea")).unwrap() == {
        "events": [{"title": "tea", "at": "2026-01-02T03:04:05Z", "level": 2}]
    }
    assert (await app.call("types.pick", index=1)).unwrap() == "blue"
    assert (await app.call("types.pick", index=0)).unwrap() is None


@pytest.mark.supports("REG-07")
@pytest.mark.proves("CONTRACT-06")
async def test_declared_defaults_are_filled_in_as_python_values(app: Interlock) -> None:
    await app.add(gather)
    given = {name: value for name, value in ARGUMENTS.items() if name not in ("day", "key", "count", "ratio", "loud")}
    assert (await app.call("types.gather", given)).ok
    assert [heard[name] for name in ("day", "key", "count", "ratio", "loud")] == [None, None, 5, 0.5, False]


@pytest.mark.proves("CONTRACT-06")
@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"color": "red"}, "color: `color` is not a parameter; did you mean `colour`?"),
        ({"colour": "green"}, "colour: `green` is not one of `red`, `blue`"),
        ({"name": "Ada Lovelace"}, "name: "),
        ({"when": "yesterday"}, "when: "),
        ({"ratio": 1.5}, "ratio: `1.5`"),
        ({"point": {"x": 1, "z": 2}}, "point/z: "),
        ({"key": "not-a-uuid"}, "key: "),
    ],
)
async def test_a_call_outside_the_contract_is_refused_before_the_tool_runs(
    app: Interlock, edits: Json, words: str
) -> None:
    await app.add(gather)
    heard.clear()
    error = (await app.call("types.gather", ARGUMENTS | edits)).error
    assert error is not None
    assert error.row.error_code == "INVALID_INPUT"
    assert words in error.message
    assert heard == {}


async def test_a_whole_float_reaches_a_whole_number_parameter_as_one(app: Interlock) -> None:
    await app.add(numbers)
    assert (await app.call("types.numbers", one=5.0)).unwrap() == ["int"]
    assert (await app.call("types.numbers", one=1e15)).unwrap() == ["int"]
    assert not (await app.call("types.numbers", one=5.5)).ok


@pytest.mark.parametrize("arguments", [{"maybe": 2.0}, {"several": [2.0, 3]}, {"by_name": {"a": 2.0}}], ids=repr)
async def test_a_whole_float_inside_a_type_arrives_as_a_whole_number_too(app: Interlock, arguments: Json) -> None:
    await app.add(numbers)
    result = await app.call("types.numbers", {"one": 1} | arguments)
    assert set(result.unwrap()) == {"int"}


@pytest.mark.parametrize(
    "signature", ["ctx: Context, x: Number", "x: Number, ctx: Context", "x: Number, *, ctx: Context"]
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_the_context_may_stand_anywhere_among_the_parameters(
    app: Interlock, tmp_path: Path, signature: str, kind: str
) -> None:
    made = declared(
        tmp_path,
        f'@read\n{kind} find({signature}) -> int:\n    "Find a number."\n    assert ctx.invocation_id\n    return x',
    )
    assert list(made.manifest.parameters["properties"]) == ["x"]
    [admission] = await app.add(made)
    assert admission.admitted
    assert (await app.call("made.find", x=3)).unwrap() == 3


async def test_a_tool_without_parameters_takes_none(app: Interlock, tmp_path: Path) -> None:
    await app.add(declared(tmp_path, '@read\ndef find() -> int:\n    "Find a number."\n    return 4'))
    assert (await app.call("made.find")).unwrap() == 4
    error = (await app.call("made.find", x=1)).error
    assert error is not None
    assert "`x` is not a parameter; the tool takes none" in error.message
