"""The page of upstream kinds and features says what the marks of the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate, upstream_features

TESTS = Path(__file__).parent
PAGE = generate.REFERENCE / "upstream-features.md"


def test_the_page_is_up_to_date() -> None:
    written = (generate.ROOT / PAGE).read_text()
    assert written.partition("\n")[2] == upstream_features.page(TESTS), "run ./dev docs"


def test_every_cell_has_a_test_or_a_reason() -> None:
    assert upstream_features.contradictions(upstream_features.shown_in_tests(TESTS)) == []


def test_the_page_has_the_reason_of_every_cell_without_a_test() -> None:
    page = upstream_features.page(TESTS)
    for kind, impossible in upstream_features.KINDS.items():
        for feature, reason in impossible.items():
            (line,) = [
                one
                for one in page.splitlines()
                if one.endswith(f": {reason}.") and f"{feature}" in one.partition("*, ")[0] and kind in one
            ]
            assert reason in line


def shown(tmp_path: Path, *marks: str) -> upstream_features.Shown:
    (tmp_path / "tests").mkdir()
    source = "".join(f"@pytest.mark.shows({mark})\n" for mark in marks)
    (tmp_path / "tests" / "test_it.py").write_text(f"{source}async def test_one(): ...\n")
    return upstream_features.shown_in_tests(tmp_path / "tests")


def test_a_cell_whose_test_is_gone_is_named_and_so_is_one_that_got_a_test(tmp_path: Path) -> None:
    found = upstream_features.contradictions(shown(tmp_path, '"gRPC", "call", "progress"', '"OpenAPI", "errors"'))
    assert "gRPC, progress: a test shows it" in found
    assert "gRPC, errors: no test shows it" in found
    assert not [one for one in found if one.startswith(("gRPC, call", "OpenAPI, errors", "gRPC, questions"))]


def test_a_cell_links_to_its_tests(tmp_path: Path) -> None:
    shown(tmp_path, '"gRPC", "call", "errors"')
    page = upstream_features.page(tmp_path / "tests")
    (row,) = (line for line in page.splitlines() if line.startswith("| gRPC "))
    assert row.count("✓") == 2
    assert "- errors: [`test_one`](../../tests/test_it.py)" in page


@pytest.mark.parametrize("mark", ["", '"gRPC"', '"gRCP", "call"', '"gRPC", "calls"', 'made_up(), "call"'])
def test_a_mark_that_names_what_is_not_listed_is_refused(tmp_path: Path, mark: str) -> None:
    with pytest.raises(ValueError, match=r"test_it\.py, test_one: shows\(\) names .* docs/upstream_features\.py"):
        shown(tmp_path, mark)
