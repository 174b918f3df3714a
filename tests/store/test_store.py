"""The store: its schema is what the migrations make, and its audit modes keep what they promise."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Annotated, Any

import pytest
import sqlalchemy as sa

from interlock import Failure, Field, Interlock, tool
from interlock.store import migration
from interlock.store.tables import metadata
from tests.support.calls import publish, records


def _shape(path: Path) -> dict[str, Any]:
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
    inspector = sa.inspect(engine)
    shape: dict[str, Any] = {
        table: {
            "columns": {(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)},
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "indexes": _indexes(path, table),
        }
        for table in inspector.get_table_names()
        if table != "alembic_version"
    }
    engine.dispose()
    return shape


def _indexes(path: Path, table: str) -> set[str]:
    """The statements that made a table's indexes; the inspector cannot tell those over expressions."""
    connection = sqlite3.connect(path)
    query = "SELECT sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL"
    found = {" ".join(sql.split()) for (sql,) in connection.execute(query, (table,))}
    connection.close()
    return found


def test_the_migrations_make_exactly_the_tables_the_program_declares(tmp_path: Path) -> None:
    migration.create(tmp_path / "migrated.db")
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'declared.db'}", poolclass=sa.NullPool)
    metadata.create_all(engine)
    engine.dispose()
    assert _shape(tmp_path / "migrated.db") == _shape(tmp_path / "declared.db")


async def test_in_durable_mode_a_read_is_on_disk_before_its_answer(app: Interlock, home: Path) -> None:
    result = await app.call("demo.add", a=1, b=2)
    other = sqlite3.connect(home / "interlock.db")
    assert other.execute("SELECT COUNT(*) FROM journal WHERE call = ?", (result.invocation_id,)).fetchone() == (1,)
    other.close()


async def test_in_batched_mode_reads_answer_first_and_writes_do_not(home: Path) -> None:
    from tests.sample import TOOLS

    async with Interlock.open(home, audit="batched") as batched:
        for one in TOOLS:
            batched.catalog.attach(one)
        other = sqlite3.connect(home / "interlock.db")

        def on_disk(call: str) -> int:
            return other.execute("SELECT COUNT(*) FROM journal WHERE call = ?", (call,)).fetchone()[0]

        read = await batched.call("demo.add", a=1, b=2)
        assert on_disk(read.invocation_id) == 0
        write = await batched.call("demo.increment", name="a", key="k")
        assert on_disk(write.invocation_id) == 3
        await batched.journal.drain()
        assert on_disk(read.invocation_id) == 1
        many = await asyncio.gather(*(batched.call("demo.add", a=n, b=n) for n in range(3000)))
        await batched.journal.drain()
        assert len(records(batched)) == len(many) + 2
        other.close()


async def test_housekeeping_lets_go_of_what_has_expired(app: Interlock) -> None:
    await app.call("demo.increment", name="a", key="k")
    await app.journal.commit(lambda tx: tx.execute("UPDATE reservation SET expires_ms = 0") and None)
    await app.maintain()
    assert app.journal.reader.all("SELECT COUNT(*) FROM reservation")[0][0] == 0


async def test_list_settings_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_REDACT_NAMES", "iban,passport")
    async with Interlock.open(tmp_path) as opened:
        assert opened.settings.redact_names == ("iban", "passport")


@pytest.mark.supports("AUDIT-05")
@pytest.mark.parametrize("strict", [False, True])
async def test_the_strict_setting_redacts_what_merely_looks_like_a_number_or_address(
    tmp_path: Path, strict: bool
) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="note")
    async def repeat(text: Annotated[str, Field(description="what to say", examples=["hello"])]) -> str:
        """Say a text again."""
        return text

    async with Interlock.open(tmp_path, housekeeping=False, strict_redaction=strict) as app:
        await app.journal.commit(publish(repeat))
        app.catalog.attach(repeat)
        said = [
            (await app.call("note.repeat", {"text": text})).unwrap()
            for text in ("5551234567", "1234567812345678", "300.1.1.999")
        ]
    strictly = ["[PHONE_REDACTED]", "[CREDIT_CARD_REDACTED]", "[IP_ADDRESS_REDACTED]"]
    assert said == (strictly if strict else ["5551234567", "1234567812345678", "300.1.1.999"])


@pytest.mark.proves("AUDIT-05")
async def test_patterns_and_names_of_the_settings_are_redacted_in_results_and_records(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(
        'redact_names = ["badge"]\n'
        "[[redact_patterns]]\nname = 'staff'\npattern = 'EMP-[0-9]+'\n"
        "[[redact_patterns]]\nname = 'case'\npattern = 'CASE/[A-Z]+'\nmarker = '[CASE]'\n"
    )

    @tool(version="1.0.0", mutation_class="read_only", namespace="note")
    async def repeat(text: Annotated[str, Field(description="what to say", examples=["hello"])]) -> dict[str, str]:
        """Say a text again, beside a badge."""
        return {"said": text, "badge": "blue"}

    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.journal.commit(publish(repeat))
        app.catalog.attach(repeat)
        said = (await app.call("note.repeat", {"text": "EMP-77 opened CASE/XY"})).unwrap()
        assert said == {"said": "[STAFF_REDACTED] opened [CASE]", "badge": "[REDACTED]"}
        bodies = b"".join(bytes(body) for (body,) in app.journal.reader.all("SELECT body FROM journal"))
        assert b"EMP-77" not in bodies
        assert b"CASE/XY" not in bodies
        assert b"blue" not in bodies


@pytest.mark.parametrize(
    ("line", "words"), [("pattern = '('", "no regular expression"), ("pattern = 'x*'", "matches the empty text")]
)
async def test_a_pattern_that_cannot_be_used_is_refused_with_its_place(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "settings.toml").write_text(f"[[redact_patterns]]\nname = 'staff'\n{line}\n")
    with pytest.raises(Failure) as caught:
        async with Interlock.open(tmp_path, housekeeping=False):
            pass
    assert caught.value.code == "E3108"
    assert words in caught.value.message
    assert "settings.toml, line 3" in caught.value.message


async def test_a_failure_of_the_database_says_what_was_tried(app: Interlock) -> None:
    bad, words = "SELECT nonsense FROM journal", "no such column: nonsense"
    with pytest.raises(Failure) as read:
        app.journal.reader.one(bad)
    with pytest.raises(Failure) as apart:
        await app.readers.read(lambda reader: reader.one(bad))
    with pytest.raises(Failure) as written:
        await app.journal.commit(lambda transaction: transaction.one(bad))
    told = [(one.value.code, one.value.message) for one in (read, apart, written)]
    assert told == [
        ("E3801", f"the journal cannot be read: {words}"),
        ("E3801", f"the journal cannot be read: {words}"),
        ("E3801", f"the journal cannot be written: {words}"),
    ]
