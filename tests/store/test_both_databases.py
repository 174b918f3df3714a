"""Every function of every repository runs on SQLite and on PostgreSQL and finds and writes the same.

The functions are called with values made from their annotations. The functions that write come first, with the same
names and numbers, so that those that read find rows.
"""

from __future__ import annotations

import importlib
import inspect
import json
import secrets
import types
import typing
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.core.errors import Failure
from interlock.store import idempotency, sealing
from interlock.store.expressions import last_element, member
from interlock.store.home import Home
from interlock.store.port import Reader, StatementError, StoreConnection, StoreError
from interlock.store.port import Transaction as TransactionPort
from interlock.store.postgres import connection as postgres
from interlock.store.postgres import schema
from interlock.store.postgres.dialect import translate
from interlock.store.transaction import Transaction, insert
from tests.support.postgres import Server
from tests.support.source import repositories

MODULES = [path.stem for path in repositories() if path.stem not in ("port", "__init__")]
# Texts that hold JSON, by the names of their columns.
DOCUMENTS = {"parts": "{}", "groups": "[]", "facts": "{}", "offered": "{}"}


@pytest.fixture
def sqlite(tmp_path: Path) -> Generator[StoreConnection]:
    with closing(Home(tmp_path).open_database()) as connection:
        yield connection


@pytest.fixture(scope="module")
def empty_store(postgres_server: Server) -> Generator[str]:
    """The database that others are copies of: a copy takes less than the tables would."""
    name = f"empty_{secrets.token_hex(6)}"
    with postgres_server.connect() as administrator:
        administrator.execute(f"CREATE DATABASE {name}".encode())
        with closing(postgres.PostgresConnection(postgres_server.at(name))) as connection:
            connection.execute("BEGIN")
            schema.create(connection)
            connection.execute("COMMIT")
        yield name
        administrator.execute(f"DROP DATABASE {name}".encode())


@pytest.fixture
def on_postgres(postgres_server: Server, empty_store: str) -> Generator[postgres.PostgresConnection]:
    name = f"store_{secrets.token_hex(6)}"
    with postgres_server.connect() as administrator:
        administrator.execute(f"CREATE DATABASE {name} TEMPLATE {empty_store}".encode())
        with closing(postgres.PostgresConnection(postgres_server.at(name))) as connection:
            yield connection
        administrator.execute(f"DROP DATABASE {name}".encode())


def functions(module: str) -> list[tuple[str, Callable[..., Any]]]:
    """The functions of a repository that are handed a reader or a transaction; those that write come first."""
    loaded = importlib.import_module(f"interlock.store.{module}")
    found: list[tuple[bool, str, Callable[..., Any]]] = []
    for name, function in vars(loaded).items():
        if not inspect.isfunction(function) or function.__module__ != loaded.__name__:
            continue
        first = next(iter(inspect.signature(function).parameters.values()), None)
        if first is not None and first.annotation in ("Reader", "Transaction"):
            found.append((first.annotation == "Reader", name, function))
    return [(name, function) for _, name, function in sorted(found, key=lambda one: one[0])]


def made(kind: Any, name: str) -> Any:
    """A value of an annotation."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is str and name in DOCUMENTS:
        return DOCUMENTS[name]
    if kind is memoryview:
        return memoryview(b"x")
    if kind in (str, int, bytes, float, bool):
        return {"str": "1", "int": 1, "bytes": b"\x01xxxxxxxx", "float": 1.0, "bool": True}[kind.__name__]
    if origin in (typing.Union, types.UnionType):
        return made(arguments[0], name)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        kinds = arguments[:1] if arguments[-1] is Ellipsis else arguments
        return tuple(made(one, name) for one in kinds)
    if origin in (list, Sequence, Collection, Iterable, Iterator, set, frozenset):
        return [made(arguments[0], name)]
    if origin in (dict, Mapping):
        return {"id": "1"}
    if kind is idempotency.NewKey:
        return _key("1")
    if inspect.isclass(kind):
        hints = typing.get_type_hints(kind, None, _LATE)
        return kind(**{field: made(hint, field) for field, hint in hints.items() if not field.startswith("_")})
    raise AssertionError(f"no value for {name}: {kind}")


def called(function: Callable[..., Any], given: Reader) -> Any:
    """The result of a function, or its error, in a form that can be compared."""
    hints = typing.get_type_hints(function, vars(importlib.import_module(function.__module__)), _LATE)
    parameters = list(inspect.signature(function).parameters.values())
    values = {one.name: made(hints[one.name], one.name) for one in parameters[1:]}
    positional = [values.pop(one.name) for one in parameters[1:] if one.kind is not one.KEYWORD_ONLY]
    result = function(given, *positional, **values)
    return list(cast("Iterator[Any]", result)) if isinstance(result, Iterator) else result


_LATE = {"Reader": Reader, "Transaction": TransactionPort, "LifecycleState": str, "CallerKind": str}


def answers(module: str, transaction: Transaction) -> Iterator[tuple[str, Any]]:
    for name, function in functions(module):
        try:
            answer = transaction.apart(called, function, transaction)
            transaction.write_later()
        except (StatementError, Failure) as error:
            answer = type(error)
        yield name, answer


@pytest.mark.parametrize("module", MODULES)
def test_a_repository_does_the_same_on_both_databases(
    module: str, sqlite: StoreConnection, on_postgres: postgres.PostgresConnection
) -> None:
    found: list[dict[str, Any]] = []
    for connection in (sqlite, on_postgres):
        connection.execute("BEGIN")
        transaction = Transaction(connection, 0, bytes(32), 1_700_000_000_000)
        body = b'{"call":"1","kind":"closed","tenant":"1","callerId":"1","toolId":"1","cost":{"total":2.5}}'
        transaction.append("closed", "1", body)
        insert(connection.statements(), transaction.rows)
        transaction.rows.clear()
        found.append(dict(answers(module, transaction)))
        connection.execute("COMMIT")
    assert found[1] == found[0]


def test_a_key_is_reserved_once_and_finished_with_or_without_an_outcome(
    sqlite: StoreConnection, on_postgres: postgres.PostgresConnection
) -> None:
    quotas = [("home", 10), ("tenant:1", 10), ("caller:1", 10)]
    rows = [idempotency.new_key(_key(name), b"ticket", quotas) for name in "abca"]
    found: list[Any] = []
    for connection in (sqlite, on_postgres):
        connection.execute("BEGIN")
        transaction = Transaction(connection, 0, bytes(32), 1_700_000_000_000)
        transaction.insert_early(rows[:3])
        idempotency.finish(transaction, b"a", "a", "done", b"sealed")
        transaction.write_later()
        idempotency.finish(transaction, b"b", "b", "done", None)
        transaction.early.clear()
        again = transaction.inserted(rows[3])
        found.append((again, [idempotency.find(transaction, key.encode()) for key in "abc"]))
        connection.execute("COMMIT")
    assert found[1] == found[0]
    assert not found[0][0]
    assert [row.result for row in found[0][1]] == [b"sealed", None, None]


def _key(name: str) -> idempotency.NewKey:
    return idempotency.NewKey(name.encode(), "tool", "1.0.0", name, "1", "hash", name, "owner", 60_000)


def test_rows_under_an_older_key_are_sealed_again(
    tmp_path: Path, sqlite: StoreConnection, on_postgres: postgres.PostgresConnection
) -> None:
    box = sealing.Box(tmp_path / "keys")
    for connection in (sqlite, on_postgres):
        connection.execute("BEGIN")
        transaction = Transaction(connection, 0, bytes(32), 1_700_000_000_000)
        for place in sealing.LASTING:
            assert sealing.seal_again(box, place, place.before)(transaction) is None
        connection.execute("COMMIT")


def test_a_text_with_a_nul_character_is_refused_with_words_that_say_so(
    on_postgres: postgres.PostgresConnection,
) -> None:
    with pytest.raises(Failure, match="NUL character") as refused:
        on_postgres.execute("SELECT name FROM fact WHERE name = ?", ("a\0b",))
    assert refused.value.code == "E3004"


TEXTS = st.sampled_from(["planned", "running", "succeeded", "x'01'", "?"])
VALUES = st.recursive(
    TEXTS | st.none() | st.integers(0, 9),
    lambda one: (
        st.lists(one, max_size=6) | st.dictionaries(st.sampled_from(["states", "phases", "a"]), one, max_size=3)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    others=st.lists(st.tuples(st.sampled_from(["phases", "policy", "sideEffects", "summary"]), VALUES), max_size=4),
    states=st.none() | st.lists(TEXTS, max_size=6),
    place=st.integers(0, 4),
)
def test_members_of_a_document_and_last_elements_of_lists_are_the_same_on_both_databases(
    sqlite: StoreConnection,
    on_postgres: postgres.PostgresConnection,
    others: list[tuple[str, Any]],
    states: list[str] | None,
    place: int,
) -> None:
    """Wherever in the document they stand: a path that counts from the end is wrong behind other lists."""
    members = [*others[:place], ("states", states), ("tool", "demo.add"), *others[place:]]
    statement = f"SELECT {member('body', 'tool')}, {last_element('body', 'states')} FROM (SELECT ? AS body) AS one"
    body = json.dumps(dict(members)).encode()
    expected = ("demo.add", states[-1] if states else None)
    assert sqlite.execute(statement, (body,)).fetchone() == expected
    assert on_postgres.execute(statement, (body,)).fetchone() == expected


def test_what_is_within_a_text_is_no_placeholder() -> None:
    statement = "SELECT '?', 'it''s ?2' FROM a WHERE b = ? AND c = ?1 AND d = x'01' AND e LIKE 'f%'"
    assert translate(statement).decode() == (
        "SELECT '?', 'it''s ?2' FROM a WHERE b = $1 AND c = $1 AND d = '\\x01'::bytea AND e LIKE 'f%'"
    )


@pytest.mark.proves("AUDIT-03")
def test_the_ledger_refuses_to_be_changed(on_postgres: postgres.PostgresConnection) -> None:
    on_postgres.execute("INSERT INTO journal VALUES (1, 'closed', 'a', 'b'::bytea, 'c'::bytea)")
    on_postgres.execute("INSERT INTO anchor VALUES (1, 'c'::bytea, 1, 'k', 's'::bytea)")
    for statement in (
        "UPDATE journal SET kind = 'x'",
        "DELETE FROM journal",
        "TRUNCATE journal",
        "UPDATE anchor SET at_ms = 2",
        "DELETE FROM anchor",
        "TRUNCATE anchor",
        "INSERT INTO journal VALUES (1, 'closed', 'a', 'b'::bytea, 'c'::bytea)",
    ):
        with pytest.raises(StatementError):
            on_postgres.execute(statement)


@pytest.mark.proves("AUDIT-03")
def test_a_runtime_role_can_read_the_ledger_and_add_to_it_and_no_more(postgres_server: Server) -> None:
    address = postgres_server.new_schema()
    role = f"r{secrets.token_hex(6)}"
    with postgres_server.connect() as administrator:
        administrator.execute(f'CREATE ROLE "{role}" LOGIN'.encode())
    with closing(postgres.PostgresConnection(address)) as owner:
        owner.execute("BEGIN")
        schema.create(owner, role)
        owner.execute("COMMIT")
    with closing(postgres.PostgresConnection(address.replace("postgres@", f"{role}@"))) as runtime:
        runtime.execute("INSERT INTO journal VALUES (1, 'closed', 'a', 'b'::bytea, 'c'::bytea)")
        runtime.execute("INSERT INTO fact (name, value) VALUES ('a', 'b')")
        runtime.execute("DELETE FROM fact")
        for statement in (
            "UPDATE journal SET kind = 'x'",
            "DELETE FROM journal",
            "TRUNCATE journal",
            "DELETE FROM anchor",
            "INSERT INTO segment VALUES (1, 1, 'c'::bytea, 1, 'k', 's'::bytea)",
            "ALTER TABLE journal DISABLE TRIGGER ALL",
            "DROP TABLE journal",
            "UPDATE alembic_version SET version_num = '9999'",
        ):
            with pytest.raises(StoreError, match=r"permission denied|must be owner"):
                runtime.execute(statement)
