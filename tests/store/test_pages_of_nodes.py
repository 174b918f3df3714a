"""Lists and results in pages at three servers on one store: each page comes from another server than the one before."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.bounds import PATIENCE_S, until
from tests.support.cluster import Three, three_nodes
from tests.support.postgres import Server

TOOLS = '''
from typing import Annotated

from typing_extensions import TypedDict

from interlock import Field, tool

Word = Annotated[str, Field(description="part of the query", examples=["a"])]


class Page(TypedDict):
    items: list[str]
    cursor: str | None
    totalCount: int


@tool(version="1.0.0", mutation_class="read_only", namespace="rows", paged=True)
async def rows(
    word: Word, cursor: Annotated[str | None, Field(description="where to go on")] = None
) -> Page:
    """Twenty-five rows, ten at a time."""
    start = int(cursor or 0)
    after = start + 10
    page = [f"{word}{number}" for number in range(25)][start:after]
    return {"items": page, "cursor": str(after) if after < 25 else None, "totalCount": 25}


for letter in "abcdefg":

    async def look(word: Word) -> str:
        """Look at something."""
        return word

    look.__name__ = look.__qualname__ = f"look_{letter}"
    globals()[look.__name__] = tool(version="1.0.0", mutation_class="read_only", namespace="rows")(look)
'''


@pytest.fixture(params=["sqlite", "postgres"])
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Three]:
    server: Server | None = request.getfixturevalue("postgres_server") if request.param == "postgres" else None
    with three_nodes(tmp_path, server, TOOLS, "rows.*") as three:
        yield three


async def test_each_page_comes_from_another_server(three: Three) -> None:
    turns = itertools.cycle(three.nodes)
    async with httpx.AsyncClient(headers=three.bearer, timeout=PATIENCE_S) as web:

        async def result(given: dict[str, Any]) -> Any:
            sent = {"tool_id": "rows.rows", "parameters": given}
            answer = await web.post(f"{next(turns).rest}/tools/invoke", json=sent)
            return answer.json()

        async def listed(kind: str, **query: str | int) -> Any:
            answer = await web.get(f"{next(turns).rest}/{kind}", params=query)
            assert answer.status_code == 200, answer.text
            return answer.json()

        rows: list[str] = []
        given: dict[str, Any] = {"word": "a"}
        for more in (True, True, False):
            page = await result(given)
            rows += page["result"]
            pagination = page["pagination"]
            assert (pagination["hasMore"], pagination["totalCount"]) == (more, 25)
            given = {"cursor": pagination["cursor"]}
        assert rows == [f"a{number}" for number in range(25)]

        tools: list[str] = []
        page = await listed("tools", limit=3)
        tools += [one["tool_id"] for one in page["tools"]]
        while page["cursor"] is not None:
            page = await listed("tools", limit=3, cursor=page["cursor"])
            tools += [one["tool_id"] for one in page["tools"]]
        assert sorted(tools) == sorted(["rows.rows", *(f"rows.look_{letter}" for letter in "abcdefg")])

        async def all_calls() -> list[str]:
            calls: list[str] = []
            page = await listed("calls", limit=1)
            calls += [one["invocation_id"] for one in page["calls"]]
            while page["before"] is not None:
                page = await listed("calls", limit=1, before=page["before"])
                calls += [one["invocation_id"] for one in page["calls"]]
            return calls

        async def shown() -> bool:
            return len(set(await all_calls())) == 3

        await until(shown)  # a server shows what others have committed a moment later
