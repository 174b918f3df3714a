"""The table of OpenAPI documents says what reading them gives, for the documents that are in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import openapi_admission

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "openapi-documents.md"
DOCUMENTS = sorted((ROOT / "tests" / "upstreams" / "data" / "openapi").glob("*.json.gz"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name.partition(".")[0])
def test_a_document_is_admitted_as_the_table_says(path: Path) -> None:
    (row,) = [one for one in openapi_admission.rows([path], None, 0, "") if not one.startswith(("| Document", "|--"))]
    assert row in PAGE.read_text().splitlines()
