"""Paging by cursor alone."""

from __future__ import annotations

from typing import Any

import pytest

from interlock import Caller, Interlock
from tests.support.calls import code
from tests.support.paging import rows


@pytest.fixture
async def paged(app: Interlock) -> Interlock:
    from tests.support.calls import publish

    await app.journal.commit(publish(rows))
    app.catalog.attach(rows)
    return app


@pytest.mark.proves("CONTRACT-07")
async def test_the_cursor_alone_fetches_the_next_page(paged: Interlock) -> None:
    result = await paged.call("p.rows", prefix="a", secret="hush")
    gathered: list[int] = []
    pages = 0
    while True:
        envelope = result.envelope()
        assert envelope.keys() == {"data", "pagination", "provenance", "execution"}
        assert envelope["provenance"].keys() >= {
            "source", "retrievedAt", "dataVersion", "invocationId", "timestamp", "freshness", "confidence",
        }  # fmt: skip
        assert envelope["execution"].keys() >= {"executionDurationMs", "resourceCost"}
        gathered += envelope["data"]
        pages += 1
        pagination = envelope["pagination"]
        assert pagination["totalCount"] == 25
        if not pagination["hasMore"]:
            break
        assert "hush" not in pagination["cursor"]
        result = await paged.call("p.rows", cursor=pagination["cursor"])
    assert (gathered, pages) == (list(range(25)), 3)


@pytest.mark.proves("CONTRACT-07")
async def test_a_cursor_is_good_for_its_own_caller_and_tool_only(paged: Interlock) -> None:
    first = await paged.call("p.rows", prefix="a", secret="hush")
    token: Any = first.metadata["pagination"]["cursor"]
    assert code(await paged.call("p.rows", {"cursor": token}, caller=Caller(id="local:thief"))) == "E3308"
    assert code(await paged.call("p.rows", {"cursor": token[:-4] + "AAAA"})) == "E3308"
    assert code(await paged.call("p.rows", {"cursor": "made up"})) == "E3308"
