"""Preconditions: who decided on a state that is no longer so is told, and of two who write at once one at least does.

The documents lie in a SQLite file and in a real Postgres; the callers come from two processes' worth of Interlock on
one home, and by every door.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pytest

from interlock import Context, Effect, Failure, Field, Interlock, Precondition, Preview, tool
from interlock.contract.effects import expected, manifest_faults
from interlock.contract.manifest import parse_manifest
from tests.sample import Text
from tests.support.answers import Wish
from tests.support.calls import admit, code, records
from tests.support.parity import opened, same, through_all

ROUNDS = 1000
BETWEEN_NODES = 100  # of these rounds are between two nodes, the others between two callers of one
AT_ONCE = 50

Name = Annotated[str, Field(description="name of a document", examples=["plan"])]
Shelf = Annotated[str, Field(description="where it stands", examples=["sqlite"])]
Seen = Annotated[str | None, Field(description="the version that was read; empty if there was none", examples=["1"])]


class Documents:
    """Documents with versions, in a table of whichever database."""

    def __init__(self, execute: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self._execute = execute
        execute("CREATE TABLE doc (name TEXT PRIMARY KEY, version INTEGER, body TEXT)", ())

    def read(self, name: str) -> tuple[int, str] | None:
        return self._execute("SELECT version, body FROM doc WHERE name = ?", (name,)).fetchone()

    def write(self, name: str, version: int, body: str) -> None:
        self._execute(
            "INSERT INTO doc VALUES (?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET version = excluded.version, body = excluded.body",
            (name, version, body),
        )

    def remove(self, name: str) -> None:
        self._execute("DELETE FROM doc WHERE name = ?", (name,))


shelves: dict[str, Documents] = {}
PLACE = "doc:{shelf}/{name}"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="doc",
    effects=[Effect(PLACE, "UPDATE"), Effect(PLACE, "CREATE")], preconditions=[Precondition(PLACE, "{seen}")],
)  # fmt: skip
async def edit(ctx: Context, shelf: Shelf, name: Name, body: Text, seen: Seen = None) -> int:
    """Write a document anew, as nobody careful would: what is there is read first, and written over later."""
    there = shelves[shelf].read(name)
    version = 1 if there is None else there[0] + 1
    await asyncio.sleep(0)
    shelves[shelf].write(name, version, body)
    ctx.effect(f"doc:{shelf}/{name}", "CREATE" if there is None else "UPDATE", after=body)
    return version


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="doc", effects=[Effect(PLACE, "DELETE")],
    preconditions=[Precondition(PLACE)],
)  # fmt: skip
async def remove(shelf: Shelf, name: Name) -> str:
    """Take a document away that must be there."""
    shelves[shelf].remove(name)
    return name


def version_of(resource: str) -> int | None:
    shelf, _, name = resource.removeprefix("doc:").partition("/")
    there = shelves[shelf].read(name)
    return None if there is None else there[0]


async def awaited(resource: str) -> int | None:
    return version_of(resource)


def nothing(**_: Any) -> Preview:
    return Preview()


def keep(result: Any) -> None:
    """Leave it as it is: what these tests are about does not get that far."""


for one in (edit, remove):
    one.preview(nothing)
    one.compensate(keep)
edit.version_of(awaited)
remove.version_of(version_of)


@pytest.fixture
def sqlite(tmp_path: Path) -> Generator[Documents]:
    connection = sqlite3.connect(tmp_path / "doc.db", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = OFF")
    shelves["sqlite"] = Documents(connection.execute)
    yield shelves["sqlite"]
    connection.close()


@pytest.fixture
def postgres(socket: Path) -> Generator[Documents]:
    with psycopg.connect(f"postgresql://postgres@/postgres?host={socket}", autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS doc")
        shelves["postgres"] = Documents(lambda sql, given: connection.execute(sql.replace("?", "%s").encode(), given))
        yield shelves["postgres"]
        connection.execute("DROP TABLE doc")


@asynccontextmanager
async def nodes(home: Path, count: int = 2) -> AsyncGenerator[list[Interlock]]:
    """So many processes on one home, as far as locks, keys and the journal can tell."""
    first = await Interlock.open(home, housekeeping=False)
    await admit(first, edit, remove)
    others = [await Interlock.open(home, housekeeping=False) for _ in range(count - 1)]
    for one in others:
        one.catalog.attach(edit)
        one.catalog.attach(remove)
    try:
        yield [first, *others]
    finally:
        for one in (*others, first):
            await one.close()


@pytest.mark.proves("EFFECT-06")
async def test_of_two_writes_to_sqlite_at_once_one_at_least_succeeds_and_the_other_may_conflict(
    tmp_path: Path, sqlite: Documents
) -> None:
    await race_on(tmp_path / "home", "sqlite", sqlite)


@pytest.mark.proves("EFFECT-06")
async def test_of_two_writes_to_postgres_at_once_one_at_least_succeeds_and_the_other_may_conflict(
    tmp_path: Path, postgres: Documents
) -> None:
    await race_on(tmp_path / "home", "postgres", postgres)


async def race_on(home: Path, shelf: str, documents: Documents) -> None:
    """Write many documents, each twice at once, first from two nodes and then from one."""

    async def race(locks: list[Interlock], number: int) -> None:
        name = f"d{number}"
        documents.write(name, 7, "before")
        # Both decided on version 7; or the second did not look at all.
        states = ("7", "7" if number % 2 else None)
        calls = [
            app.call("doc.edit", shelf=shelf, name=name, body=body, seen=seen, key=f"{body}{number}")
            for app, body, seen in zip(locks, "AB", states, strict=True)
        ]
        results = await asyncio.gather(*calls)
        ended = ["success" if one.error is None else one.error.row.error_code.value for one in results]
        assert set(ended) <= {"success", "CONFLICT"}
        assert ended.count("success") == 1 or (number % 2 == 0 and ended.count("success") == 2)
        version, body = documents.read(name) or (0, "")
        assert version == 7 + ended.count("success")
        assert body in [name for name, end in zip("AB", ended, strict=True) if end == "success"]

    async with nodes(home) as locks:
        for start in range(0, ROUNDS, AT_ONCE):
            here = locks if start < BETWEEN_NODES else [locks[0], locks[0]]
            await asyncio.gather(*(race(here, number) for number in range(start, start + AT_ONCE)))


@pytest.mark.proves("EFFECT-06")
async def test_a_stale_version_is_a_conflict_and_a_missing_document_a_failed_precondition(
    tmp_path: Path, sqlite: Documents
) -> None:
    async with nodes(tmp_path / "home", 1) as (app,):

        async def ask(tool: str, key: str, **arguments: Any) -> str | None:
            result = await app.call(f"doc.{tool}", shelf="sqlite", name="plan", key=key, **arguments)
            return None if result.error is None else f"{result.error.code} {result.error.row.error_code}"

        assert await ask("remove", "1") == "E3411 PRECONDITION_FAILED"
        assert await ask("edit", "2", body="a", seen="1") == "E3410 CONFLICT"
        assert await ask("edit", "3", body="a", seen="*") == "E3411 PRECONDITION_FAILED"
        assert await ask("edit", "4", body="a", seen="") is None, "there must be none, and there is none"
        assert await ask("edit", "5", body="b", seen="") == "E3411 PRECONDITION_FAILED"
        assert await ask("edit", "6", body="b", seen="1") is None
        assert await ask("edit", "6", body="b", seen="1") is None, "it is replayed, not judged by what it did itself"
        assert await ask("edit", "7", body="c", seen="1") == "E3410 CONFLICT"
        assert await ask("edit", "8", body="c") is None, "whoever states nothing is asked nothing"
        assert sqlite.read("plan") == (3, "c")
        assert await ask("remove", "1") is None, "a refused call has not used its key up"
        stale = await app.call("doc.edit", shelf="sqlite", name="plan", body="d", seen="3", key="9")
        assert stale.error is not None
        assert stale.error.details == {"stale": ["doc:sqlite/plan"], "current": {"doc:sqlite/plan": None}}
        (closed,) = records(app, stale.invocation_id)
        assert closed["outcome"] == "released"
        assert not records(app, stale.invocation_id, kind="mutation")


async def test_whoever_cannot_say_what_there_is_stops_the_call(tmp_path: Path) -> None:
    shelves["gone"] = Documents(lambda sql, given: None)
    async with nodes(tmp_path / "home", 1) as (app,):
        assert code(await app.call("doc.edit", shelf="none", name="a", body="b", seen="1", key="1")) == "E3401"


async def test_a_precondition_is_the_same_through_every_door(home: Path, sqlite: Documents) -> None:
    async with opened(home) as ways:
        await admit(ways.app, edit, remove)
        sqlite.write("plan", 7, "before")

        def stale(door: str) -> Wish:
            return Wish("doc.edit", {"shelf": "sqlite", "name": "plan", "body": "x", "seen": "6"}, key=f"s-{door}")

        def missing(door: str) -> Wish:
            return Wish("doc.remove", {"shelf": "sqlite", "name": "none"}, key=f"m-{door}")

        conflict = same(*await through_all(ways, stale))
        assert conflict.error == ("E3410", "CONFLICT", "execution_failed", True)
        failed = same(*await through_all(ways, missing))
        assert failed.error == ("E3411", "PRECONDITION_FAILED", "execution_failed", False)
        assert sqlite.read("plan") == (7, "before")


# Declaring

DOCUMENT: dict[str, Any] = {
    **edit.manifest.document(),
    "preconditions": [{"resource": PLACE, "version": "{seen}"}],
}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, None),
        ({"mutation_class": "read_only", "effects": []}, "changes nothing"),
        ({"versioned": False}, "version_of"),
        ({"sandbox": {}}, "sandboxed"),
        ({"preconditions": [{"resource": "doc:{seen}/{name}"}]}, None),
        ({"preconditions": [{"resource": "doc:{other}"}]}, "`other`, which may be absent"),
        ({"preconditions": [{"resource": PLACE, "version": "{other}"}]}, "`other`, which is not a parameter"),
    ],
)
def test_a_precondition_that_could_not_be_checked_is_not_admitted(said: dict[str, Any], words: str | None) -> None:
    faults = manifest_faults(parse_manifest(DOCUMENT | said))
    assert (words is None and not faults) or any(words in fault for fault in faults if words)


def test_what_is_stated_follows_from_the_input() -> None:
    conditions = [Precondition("doc:{name}", "{seen}"), Precondition("doc:{name}"), Precondition("new:{name}", "")]
    assert expected(conditions, {"name": "a", "seen": 3}) == (("doc:a", "3"), ("doc:a", "*"), ("new:a", ""))
    assert expected(conditions, {"name": "a"}) == (("doc:a", "*"), ("new:a", ""))
    assert expected(conditions, {"name": "a", "seen": None}) == (("doc:a", "*"), ("new:a", ""))


def test_a_tool_in_use_takes_no_further_handler() -> None:
    with pytest.raises(Failure):
        edit.version_of(version_of)
