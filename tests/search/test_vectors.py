"""Vectors of tools in a database with pgvector, and in the file of a data directory: the same ranking."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest

from interlock import Failure, Interlock
from interlock.api.doctor import examine
from interlock.authority.tokens import ToolGrant
from interlock.registry.retirement import deprecate, move
from interlock.search.likeness import Floats
from interlock.search.table import shipped
from interlock.store.vector_cache import VectorCache
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.support.office import OFFERED, some_tool
from tests.support.postgres import Server
from tests.support.upstream_servers import HttpServer, json_answer
from tests.support.wires import wired

ENCODER = Path(__file__).parents[2] / "packages" / "search-encoder" / "src" / "interlock_search_encoder"
QUERIES = (
    "send message to user",
    "bill the client",
    "will it rain tomorrow?",
    "a text for a customer, by mail",
    "Translate this letter into German. Send it to the customer. Then delete the file that is in the folder.",
    "qwertz asdfgh",
)
MORE = [some_tool(f"read_part_{number}", f"Read part {number} of a letter or a file.") for number in range(40)]


@pytest.fixture(scope="module")
def with_vectors() -> Iterator[Server]:
    server = Server(vectors=True)
    with server.connect() as connection:
        # Beside the schemas of stores, as an administrator may have it.
        connection.execute("CREATE SCHEMA extensions")
        connection.execute("CREATE EXTENSION vector SCHEMA extensions")
    yield server
    server.remove()


@asynccontextmanager
async def _opened(home: Path, store: str, **settings: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, store=store, housekeeping=False, **settings) as app:
        await admit(app, *OFFERED, *MORE)
        await app.catalog.forget()
        yield app


async def _found(app: Interlock, query: str, by: str, limit: int = 10, **more: Any) -> list[tuple[str, float]]:
    answer = await app.search(query, by=by, limit=limit, **more)
    assert (answer.by, answer.note) == (by, None)
    return [(one.version.row.address, one.score) for one in answer]


@pytest.mark.proves("REG-14")
@pytest.mark.parametrize("encoder", ["table", str(ENCODER)])
async def test_the_ranking_by_pgvector_is_that_of_the_index_in_memory(
    tmp_path: Path, with_vectors: Server, encoder: str
) -> None:
    store = with_vectors.new_schema()
    async with (
        _opened(tmp_path / "file", "", search_encoder=encoder) as here,
        _opened(tmp_path / "server", store, search_encoder=encoder, search_vectors="store") as there,
    ):
        for query in QUERIES:
            for by in ("meaning", "both"):
                expected, found = await _found(here, query, by), await _found(there, query, by)
                assert len(found) == len(expected)
                # The database rounds to two bytes a number: what is equally near may change places.
                for (name, score), (other, value) in zip(expected, found, strict=True):
                    assert value == pytest.approx(score, abs=0.003)
                    assert name == other or dict(expected).get(other, expected[-1][1]) == pytest.approx(
                        score, abs=0.003
                    )
        assert (await _found(there, "send message to user", "meaning"))[0][0] == "office.send_email"
        # The index of the second has no vectors: they were compared in the database, which has a row for each text.
        ids = list(await there.tools.index.surface(there.caller))
        assert await there.tools.index.vectors(ids) is None
        rows = there.journal.reader.all("SELECT model, dimension, count(*) FROM tool_vector GROUP BY model, dimension")
        width = 384 if encoder != "table" else shipped().documents(["x"]).shape[1]
        assert [(dimension, count) for _, dimension, count in rows] == [(width, len(OFFERED) + len(MORE))]
        assert rows[0][0].startswith("table:" if encoder == "table" else "onnx:")


@pytest.mark.proves("REG-14")
async def test_the_database_is_asked_about_the_callers_tools_that_can_be_called(
    tmp_path: Path, with_vectors: Server
) -> None:
    settings: dict[str, Any] = {"search_encoder": "table", "search_vectors": "store"}
    async with _opened(tmp_path, with_vectors.new_schema(), **settings) as app, wired(app) as wires:
        tools = [ToolGrant("office.forecast"), ToolGrant("office.translate")]
        wires.bear(await app.tokens.issue(subject=did_of("bot"), tools=tools, by=app.caller))

        async def found() -> dict[str, float]:
            rest = await wires.http.get("/v1/tools", params={"q": "letter in another language", "by": "meaning"})
            return {one["tool_id"]: one["score"] for one in rest.json()["tools"]}

        assert (await _found(app, "letter", "meaning", limit=50))[0][0].startswith("office.")
        before = await found()
        assert "office.translate" in before
        assert before.keys() <= {"office.translate", "office.forecast"}
        await admit(app, *(some_tool(f"letter_{number}", "Letter in another language.") for number in range(5)))
        await app.catalog.forget()
        assert len(await _found(app, "letter in another language", "meaning", limit=50)) > 5
        assert await found() == before
        for unit, expected in (
            (deprecate("office.translate", "1.0.0", by="test"), True),
            (move("office.translate", "1.0.0", "sunset", by="test"), False),
            (move("office.translate", "1.0.0", "removed", by="test"), False),
        ):
            await app.journal.commit(unit)
            await app.catalog.forget()
            assert ("office.translate" in await found()) is expected
            assert ("office.translate" in dict(await _found(app, "translate", "meaning", limit=50))) is expected


@pytest.mark.proves("REG-14")
async def test_with_vectors_in_the_database_words_and_names_are_found_while_the_encoder_cannot_be_reached(
    tmp_path: Path, with_vectors: Server
) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(HttpServer.open())
        server.otherwise = lambda got: json_answer(
            {"embeddings": shipped().documents(orjson.loads(got.body)["input"]).tolist()}
        )
        settings: dict[str, Any] = {"search_encoder": f"ollama:tiny@{server.url}", "search_vectors": "store"}
        async with _opened(tmp_path, with_vectors.new_schema(), **settings) as app, wired(app) as wires:
            assert (await _found(app, "send message to user", "meaning"))[0][0] == "office.send_email"
            rows = app.journal.reader.one("SELECT count(*) FROM tool_vector")
            assert rows[0] >= len(OFFERED)
            await stack.aclose()
            with pytest.raises(Failure, match="cannot be reached") as refused:
                await app.search("translate a text", by="meaning")
            assert refused.value.code == "E3106"
            rest = await wires.http.get("/v1/tools", params={"q": "translate a text", "by": "meaning"})
            assert (rest.status_code, rest.json()["error"]["error_code"]) == (500, "E3106")
            for by in ("both", "words"):
                answer = await app.search("translate a text", by=by)
                assert (answer[0].version.row.address, answer.by) == ("office.translate", "words")
            assert (await app.search("office.forecast"))[0].version.row.address == "office.forecast"
            assert (await app.catalog.resolve("office.forecast", "1.0.0")).row.address == "office.forecast"


async def test_machines_of_one_store_share_vectors_and_a_restart_computes_none(
    tmp_path: Path, with_vectors: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    table = shipped()
    documents = table.documents

    def counted(texts: list[str]) -> Any:
        made.extend(texts)
        return documents(texts)

    monkeypatch.setattr(table, "documents", counted)
    settings: dict[str, Any] = {"search_encoder": "table", "search_vectors": "store"}
    store = with_vectors.new_schema()
    async with _opened(tmp_path, store, **settings) as app:
        first = await _found(app, "bill the client", "both")
        assert len(made) == len(OFFERED) + len(MORE)
        async with Interlock.open(tmp_path, store=store, housekeeping=False, **settings) as other:
            assert await _found(other, "bill the client", "both") == first
    async with Interlock.open(tmp_path, store=store, housekeeping=False, **settings) as again:
        assert await _found(again, "bill the client", "both") == first
    assert len(made) == len(OFFERED) + len(MORE)


async def test_rows_of_another_length_than_the_vectors_of_requests_are_replaced(
    tmp_path: Path, with_vectors: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service has another model under the name that it had, so the numbers of its rows cannot be compared."""
    table = shipped()
    documents, queries, store = table.documents, table.queries, with_vectors.new_schema()
    whole = documents(["x"]).shape[1]
    for width in (whole // 2, whole):
        monkeypatch.setattr(table, "documents", partial(_beginnings, documents, width))
        monkeypatch.setattr(table, "queries", partial(_beginnings, queries, width))
        async with _opened(tmp_path, store, search_encoder="table", search_vectors="store") as app:
            assert (await _found(app, "bill the client", "meaning"))[0][0] == "office.create_invoice"
            assert (await _found(app, "bill the client", "both"))[0][0] == "office.create_invoice"
            rows = app.journal.reader.all("SELECT dimension, count(*) FROM tool_vector GROUP BY dimension")
            assert rows == [(width, len(OFFERED) + len(MORE))]


def _beginnings(encode: Callable[[Sequence[str]], Floats], width: int, texts: Sequence[str]) -> Floats:
    return encode(texts)[:, :width]


@pytest.mark.parametrize("where", ["file", "without the extension", "with an old one"])
async def test_where_the_database_has_no_vectors_they_are_in_memory_and_doctor_says_so(
    tmp_path: Path, with_vectors: Server, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    store = "" if where == "file" else with_vectors.new_schema()
    if where != "file":
        with with_vectors.connect() as connection:
            connection.execute(f"CREATE DATABASE bare{where.count('old')}".encode())
        store = with_vectors.address.replace("/postgres?", f"/bare{where.count('old')}?")
    if where == "with an old one":
        with closing(psycopg.connect(store, autocommit=True)) as connection:
            connection.execute("CREATE EXTENSION vector")
            connection.execute("UPDATE pg_extension SET extversion = '0.6.2' WHERE extname = 'vector'")
    async with _opened(tmp_path, store, search_encoder="table", search_vectors="store") as app:
        assert (await _found(app, "bill the client", "meaning"))[0][0] == "office.create_invoice"
        ids = list(await app.tools.index.surface(app.caller))
        assert await app.tools.index.vectors(ids) is not None
        reason = {
            "file": "the store is a file",
            "without the extension": "lacks the extension `vector`",
            "with an old one": "pgvector 0.6.2 is too old",
        }[where]
        assert reason in caplog.text
        (tmp_path / "settings.toml").write_text('search_vectors = "store"\n')
        (told,) = [one.what for one in examine(app.home, machine=False) if "search_vectors" in one.what]
        assert reason in told


def test_a_cache_that_is_damaged_full_or_not_writable_costs_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "search" / "vectors.db"
    cache = VectorCache(path, "a")
    assert cache.get([b"1"]) == {}
    cache.put(2, [(b"1", b"abcd"), (b"2", b"efgh")])
    VectorCache(path, "b").put(2, [(b"1", b"zzzz")])
    assert cache.get([b"2", b"1", b"3"]) == {b"1": b"abcd", b"2": b"efgh"}
    # Another dimension takes the place of the old one, and what is not as long as it says is not used.
    cache.put(1, [(b"1", b"xy")])
    assert cache.get([b"1"]) == {b"1": b"xy"}
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("SELECT DISTINCT model FROM tool_vector ORDER BY 1").fetchall() == [("a",), ("b",)]
        connection.execute("UPDATE tool_vector SET dimension = 7 WHERE digest = ?", (b"2",))
    assert cache.get([b"2"]) == {}
    monkeypatch.setattr("interlock.store.vector_cache.MOST_BYTES", 8)
    cache.put(1, [(bytes([number]), b"uv") for number in range(9)])
    assert len(cache.get([bytes([number]) for number in range(9)])) == 4
    path.write_bytes(b"no database at all " * 99)
    assert cache.get([b"1"]) == {}
    cache.put(1, [(b"1", b"xy")])
    assert cache.get([b"1"]) == {b"1": b"xy"}
    assert VectorCache(tmp_path / "search" / "vectors.db" / "below", "a").get([b"1"]) == {}
    VectorCache(Path("/proc/vectors.db"), "a").put(1, [(b"1", b"xy")])
