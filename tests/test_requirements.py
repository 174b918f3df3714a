"""The ledger and the tests name the same clauses, and the page that lists them says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate, marks
from tests.support.ledger import requirement_ids

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
CASES = [pytest.param(1, marks=pytest.mark.proves("A-7"))]

@PARTLY
@pytest.mark.proves("A-3", "A-4")
def test_one(): ...

@pytest.mark.part_of("A-5", rest=REST)
async def test_two(): ...

@pytest.mark.parametrize("case", CASES)
def test_three(): ...

class TestFour:
    @pytest.mark.supports("A-8")
    def test_inner(self): ...

TestMachine = pytest.mark.proves("A-6")(Machine.TestCase)
"""


@pytest.mark.parametrize(
    "mark",
    [
        marks.Mark("part_of", ("A-1",), "the rest of it", "test_one"),
        marks.Mark("proves", ("A-2",), None, marks.WHOLE_MODULE),
        marks.Mark("proves", ("A-3", "A-4"), None, "test_one"),
        marks.Mark("part_of", ("A-5",), "over doors", "test_two"),
        marks.Mark("proves", ("A-6",), None, "TestMachine"),
        marks.Mark("proves", ("A-7",), None, "test_three"),
        marks.Mark("supports", ("A-8",), None, "test_inner"),
    ],
)
def test_marks_are_found_however_they_are_written(mark: marks.Mark) -> None:
    assert mark in set(marks.marks_in(MODULE))


def test_a_mark_that_is_kept_in_a_shared_module_counts_where_it_is_imported() -> None:
    (kept,) = marks.marks_in("from tests.support.mcp import DOOR as HERE\n\n@HERE\ndef test_one(): ...")
    assert (kept.kind, kept.names, kept.test) == ("proves", ("OPS-02",), "test_one")
    source = "from tests.support.older import OLDER\n@pytest.mark.part_of('REG-14', rest=OLDER)\ndef test_one(): ..."
    (said,) = marks.marks_in(source)
    assert said.rest is not None


def test_a_mark_that_marks_nothing_does_not_count() -> None:
    assert all("A-9" not in mark.names for mark in marks.marks_in(MODULE))


PROVEN = '@pytest.mark.proves("A-1")\ndef test_whole(): ...\n'
PART = '@pytest.mark.part_of("A-1", rest="over gRPC")\ndef test_part(): ...\n'
SUPPORT = '@pytest.mark.supports("A-1")\ndef test_piece(): ...\n'


@pytest.mark.parametrize(
    ("source", "status"),
    [
        (PROVEN, "proven"),
        (PROVEN + SUPPORT, "proven"),
        (PROVEN + PART, "partly"),
        (SUPPORT, "partly"),
        (PART, "partly"),
        ("", "open"),
    ],
)
def test_a_clause_is_proven_only_when_no_test_leaves_a_rest(tmp_path: Path, source: str, status: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(source)
    assert generate.named_in_tests(tmp_path / "tests").get("A-1", generate.Proof()).status == status


def test_the_page_lists_every_rest_and_every_test(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "a.toml").write_text('[[requirement]]\nid = "A-1"\nmust = "It works."\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(PROVEN + SUPPORT + PART)
    row = next(line for line in generate.requirements_page(tmp_path / "tests").splitlines() if "`A-1`" in line)
    assert "| partly |" in row
    assert all(name in row for name in ("`test_whole`", "`test_piece`", "`test_part`", "**Left**: over gRPC"))
