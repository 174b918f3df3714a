"""The table of OpenAPI documents says what reading them gives: in a normal run for the documents in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import openapi_admission
from tests.support.mcp_servers.real import node_archive
from tests.thorough import THOROUGH

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "openapi-documents.md"
DOCUMENTS = sorted(openapi_admission.OWN.glob("*.json.gz"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name.partition(".")[0])
def test_a_document_is_admitted_as_the_table_says(path: Path) -> None:
    assert openapi_admission.row_of(path) in PAGE.read_text().splitlines()


@pytest.mark.skipif(not THOROUGH, reason="fetches 74 MB and reads more than 300 documents")
def test_every_row_of_the_table_is_what_reading_the_documents_gives(tmp_path: Path) -> None:
    for package, integrity in openapi_admission.PACKAGES.items():
        node_archive(package, integrity, tmp_path / package)
    assert "\n".join(openapi_admission.page(tmp_path)) + "\n" == PAGE.read_text()
