"""The ledger and the tests name the same clauses, and the page that lists them says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate
from tests.conftest import requirement_ids

TESTS = Path(__file__).parent


def test_every_clause_that_a_test_names_is_in_the_ledger() -> None:
    assert generate.named_in_tests(TESTS).keys() <= requirement_ids()


def test_every_clause_of_the_ledger_is_on_the_page_with_what_the_tests_say_of_it() -> None:
    page = (generate.ROOT / generate.REFERENCE / "requirements.md").read_text()
    rows = {line.split("`")[1]: line.split("|")[2].strip() for line in page.splitlines() if line.startswith("| `")}
    named = generate.named_in_tests(TESTS)
    assert rows == {clause: named.get(clause, generate.Proof()).status for clause in requirement_ids()}


def test_no_id_stands_for_two_clauses() -> None:
    ids = [clause for clauses in generate.ledger(TESTS).values() for clause, _ in clauses]
    assert sorted(set(ids)) == sorted(ids)


def test_the_page_is_up_to_date() -> None:
    page = generate.ROOT / generate.REFERENCE / "requirements.md"
    assert page.read_text() == generate.requirements_page(TESTS), "run ./dev docs"


MODULE = """
import pytest
REST = "over doors"
PARTLY = pytest.mark.part_of("A-1", rest="the rest of it")
IDLE = pytest.mark.proves("A-9")
pytestmark = pytest.mark.proves("A-2")

@PARTLY
@pytest.mark.proves("A-3", "A-4")
def test_one(): ...

@pytest.mark.part_of("A-5", rest=REST)
def test_two(): ...

TestMachine = pytest.mark.proves("A-6")(Machine.TestCase)
"""


@pytest.mark.parametrize(
    ("ids", "rest"),
    [
        (("A-1",), "the rest of it"),
        (("A-2",), None),
        (("A-3", "A-4"), None),
        (("A-5",), "over doors"),
        (("A-6",), None),
    ],
)
def test_marks_are_found_however_they_are_written(ids: tuple[str, ...], rest: str | None) -> None:
    assert generate.Mark(ids, rest) in set(generate.marks_in(MODULE))


def test_a_mark_that_marks_nothing_does_not_count() -> None:
    assert all("A-9" not in mark.ids for mark in generate.marks_in(MODULE))
