"""The dataclasses of `core.record` behave as those of the standard library do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, asdict, field, replace
from typing import Any

import pytest

from interlock.core import record


@record.dataclass(frozen=True, slots=True)
class Point:
    """A place on a plane."""

    x: int
    y: int = 0
    seen: list[str] = field(default_factory=list[str], compare=False, repr=False)


@record.dataclass(frozen=True, slots=True, kw_only=True)
class Named(Point):
    name: str
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", len(self.name))


@record.dataclass(slots=True)
class Counter:
    value: int = 0


@record.dataclass(frozen=True)
class Lazy:
    value: int

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7


class Further(Point):
    """A subclass that is no dataclass, with attributes of its own."""


def test_objects_are_made_by_position_by_name_and_from_defaults() -> None:
    assert (Point(1), Point(x=1, y=2)) == (Point(1, 0), Point(1, 2))
    assert Point(1).seen is not Point(1).seen
    assert dataclasses.astuple(Named(1, 2, name="abc")) == (1, 2, [], "abc", 3)
    assert Further(3).y == 0


@pytest.mark.parametrize("given", [{}, {"x": 1, "z": 2}])
def test_fields_that_are_missing_or_unknown_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"Point\.__init__\(\).*'[xz]'"):
        Point(**given)
    with pytest.raises(TypeError, match="positional"):
        Named(1, 2, [], "abc")  # pyright: ignore[reportCallIssue] - the name is given by keyword alone


def test_frozen_objects_refuse_changes_and_have_a_hash() -> None:
    point = Point(1)
    for change in (lambda: setattr(point, "x", 2), lambda: delattr(point, "x")):
        with pytest.raises(FrozenInstanceError, match="field 'x'"):
            change()
    further = Further(1)
    further.other = 5  # pyright: ignore[reportAttributeAccessIssue] - a subclass with a dictionary
    with pytest.raises(FrozenInstanceError):
        further.y = 5  # pyright: ignore[reportAttributeAccessIssue] - frozen
    assert hash(Point(1, 2, ["a"])) == hash(Point(1, 2))
    assert len({Point(1), Point(1), Point(2)}) == 2


def test_objects_are_equal_if_their_class_and_compared_fields_are() -> None:
    assert Point(1, 2, ["a"]) == Point(1, 2)
    assert Point(1) != Point(2)
    assert Point(1) != Further(1)
    assert Counter(1) == Counter(1)
    assert Counter.__hash__ is None
    assert not hasattr(Counter(), "__dict__")


def test_methods_of_the_class_stay() -> None:
    assert Lazy(1) == Lazy(2)
    assert hash(Lazy(1)) == 7


def test_copies_pickles_and_replacements_are_equal() -> None:
    named = Named(1, name="abc")
    assert copy.copy(named) == copy.deepcopy(named) == pickle.loads(pickle.dumps(named)) == named
    assert replace(Point(1), y=5) == Point(1, 5)
    assert asdict(Point(1)) == {"x": 1, "y": 0, "seen": []}
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_the_text_of_an_object_names_its_fields() -> None:
    assert repr(Named(1, name="abc")) == "Named(x=1, y=0, name='abc', length=3)"


class Row(record.NamedTuple):
    """A row of a table."""

    name: str
    size: int = 0

    @property
    def twice(self) -> int:
        return 2 * self.size


class Single(record.NamedTuple):
    value: object


def test_named_tuples_are_made_and_read_as_those_of_the_standard_library() -> None:
    row = Row("a", 3)
    assert (row, row.name, row.size, row.twice, row[1]) == (("a", 3), "a", 3, 6, 3)
    assert (Row("b"), Row(size=1, name="c")) == (("b", 0), ("c", 1))
    assert Single((1, 2)).value == (1, 2)
    assert (repr(row), Row.__doc__, Row.__name__) == ("Row(name='a', size=3)", "A row of a table.", "Row")
    assert (Row._fields, Row._field_defaults) == (("name", "size"), {"size": 0})
    assert (row._replace(size=4), Row._make(["d", 1]), row._asdict()) == (("a", 4), ("d", 1), {"name": "a", "size": 3})
    match row:
        case Row(name, size):
            assert (name, size) == ("a", 3)


def test_named_tuples_can_be_copied_and_pickled() -> None:
    row = Row("a", 3)
    for same in (copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row))):
        assert (same, type(same)) == (row, Row)


def test_named_tuples_refuse_what_those_of_the_standard_library_refuse() -> None:
    for wrong in (Row, lambda: Row("a", 1, 2), lambda: Row("a", other=2), lambda: Row._make(["a"])):  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError):
            wrong()  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="other"):
        Row("a")._replace(other=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(AttributeError):
        Row("a").size = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="come first"):
        type(record.NamedTuple)("Late", (), {"__annotations__": {"a": int, "b": int}, "a": 1})
