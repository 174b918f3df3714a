"""Rights to change the ledger that nobody should have are found, whichever way a role came by them."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from interlock import Interlock
from interlock.api.doctor import examine
from interlock.audit.chain import verify
from interlock.store.homes import home_at
from tests import sample
from tests.support.postgres import Server


class Roles:
    """A store whose tables one role owns and another one uses, and a third role that has no business there."""

    def __init__(self, server: Server) -> None:
        store = server.new_schema()
        self.schema = store.rpartition("search_path%3D")[2]
        self.owner, self.runtime, self.stranger, self.group = (
            f"{name}_{secrets.token_hex(3)}" for name in ("owner", "runtime", "stranger", "group")
        )
        self._server = server
        for name in (self.owner, self.runtime, self.stranger):
            self.run(f"CREATE ROLE {name} LOGIN")
        self.run(f"CREATE ROLE {self.group}")
        self.run(f"ALTER SCHEMA {self.schema} OWNER TO {self.owner}")
        self.store = store.replace("postgres@", f"{self.runtime}@")
        self.admin = store.replace("postgres@", f"{self.owner}@")

    def run(self, statement: str) -> None:
        with closing(psycopg.connect(self._server.address, autocommit=True)) as connection:
            connection.execute(statement.encode())

    def filled(self, statement: str) -> str:
        """A statement or a finding about these roles and tables."""
        names: dict[str, Any] = {name: getattr(self, name) for name in ("owner", "runtime", "stranger", "group")}
        tables = {name: f"{self.schema}.{name}" for name in ("journal", "anchor", "segment")}
        return statement.format(**names, **tables, schema=self.schema, admin="postgres")

    def remove(self) -> None:
        names = ", ".join((self.owner, self.runtime, self.stranger, self.group))
        self.run(f"DROP SCHEMA {self.schema} CASCADE")
        self.run(f"DROP OWNED BY {names} CASCADE")
        self.run(f"DROP ROLE {names}")


@pytest.fixture
def roles(postgres_server: Server) -> Generator[Roles]:
    made = Roles(postgres_server)
    yield made
    made.remove()


@pytest.mark.parametrize(("statement", "named"), [
    ("GRANT DELETE ON {journal} TO {stranger}", "the role `{stranger}` has the right DELETE on the table `journal`"),
    ("GRANT UPDATE ON {anchor} TO PUBLIC", "the role `PUBLIC` has the right UPDATE on the table `anchor`"),
    (
        "GRANT UPDATE (body) ON {journal} TO {runtime}",
        "the role `{runtime}` has the right UPDATE on the column `body` of the table `journal`",
    ),
    (
        "GRANT UPDATE (hash) ON {segment} TO PUBLIC",
        "the role `PUBLIC` has the right UPDATE on the column `hash` of the table `segment`",
    ),
    ("GRANT TRUNCATE ON {journal} TO {group}", "the role `{group}` has the right TRUNCATE on the table `journal`"),
    ("GRANT TRIGGER ON {journal} TO {stranger}", "the role `{stranger}` has the right TRIGGER on the table `journal`"),
    ("GRANT INSERT ON {segment} TO {runtime}", "the role `{runtime}` has the right INSERT on the table `segment`"),
    (
        "GRANT {owner} TO {stranger}",
        "the role `{stranger}` is a member of the role `{owner}`, which owns the ledger",
    ),
    (
        "ALTER ROLE {runtime} NOINHERIT; GRANT {owner} TO {runtime}",
        "the role `{runtime}` is a member of the role `{owner}`, which owns the ledger",
    ),
    (
        "GRANT pg_write_all_data TO {stranger}",
        "the role `{stranger}` is a member of the role `pg_write_all_data`, which may change every table",
    ),
    (
        "ALTER TABLE {segment} OWNER TO {group}",
        "the role `{group}` owns the table `segment`, and another one the store",
    ),
    (
        "ALTER SCHEMA {schema} OWNER TO {runtime}",
        "the role `{runtime}` owns the schema `{schema}`, and another one the ledger in it",
    ),
    (
        "ALTER SCHEMA {schema} OWNER TO {group}; GRANT {group} TO {runtime}",
        "the role `{runtime}` is a member of the role `{group}`, which owns the schema and may drop the ledger",
    ),
    (
        "ALTER SCHEMA {schema} OWNER TO {admin}; GRANT {admin} TO {runtime}",
        "the role `{runtime}` is a member of the role `{admin}`, which owns the schema and may drop the ledger",
    ),
], ids=str)  # fmt: skip
async def test_a_right_to_change_the_ledger_is_found_whichever_way_a_role_came_by_it(
    tmp_path: Path, roles: Roles, statement: str, named: str
) -> None:
    sample.reset()
    async with Interlock.open(tmp_path, store=roles.store, store_admin=roles.admin, housekeeping=False) as app:
        await app.add(sample.increment)
        assert (await app.call("demo.increment", name="a", key="k")).ok
    home = home_at(tmp_path, roles.store)

    def found() -> tuple[list[str], list[str]]:
        broken = [one.what for one in examine(home, machine=False) if one.status == "broken"]
        return broken, [one.what for one in verify(home).faults]

    assert found() == ([], [])
    roles.run(roles.filled(statement))
    what = roles.filled(named)
    doctor, verified = found()
    assert what in doctor
    assert what in verified


async def test_a_right_by_way_of_two_memberships_is_found(tmp_path: Path, roles: Roles) -> None:
    async with Interlock.open(tmp_path, store=roles.store, store_admin=roles.admin, housekeeping=False):
        pass
    for member, role in ((roles.group, roles.owner), (roles.stranger, roles.group)):
        roles.run(f"GRANT {role} TO {member}")
    faults = [one.what for one in verify(home_at(tmp_path, roles.store)).faults]
    assert faults == [
        f"the role `{member}` is a member of the role `{roles.owner}`, which owns the ledger"
        for member in (roles.group, roles.stranger)
    ]


async def test_the_owner_of_the_database_owns_a_schema_of_whoever_owns_the_database(
    tmp_path: Path, roles: Roles
) -> None:
    """That is how the schema `public` is made since version 15."""
    async with Interlock.open(tmp_path, store=roles.store, store_admin=roles.admin, housekeeping=False):
        pass
    roles.run(f"ALTER SCHEMA {roles.schema} OWNER TO pg_database_owner")

    def faults() -> list[str]:
        return [one.what for one in verify(home_at(tmp_path, roles.store)).faults]

    assert faults() == []  # of a superuser
    try:
        roles.run(f"ALTER DATABASE postgres OWNER TO {roles.owner}")
        assert faults() == []
        roles.run(f"ALTER DATABASE postgres OWNER TO {roles.stranger}")
        assert faults() == [
            f"the role `{roles.stranger}` owns the schema `{roles.schema}`, and another one the ledger in it"
        ]
    finally:
        roles.run("ALTER DATABASE postgres OWNER TO postgres")
