"""A schema that is made for a moment, with a store in it, and removed again with everything that it has."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import closing, contextmanager
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from interlock.core.errors import Failure
from interlock.store.failures import store_failure
from interlock.store.port import StoreError
from interlock.store.postgres.connection import PostgresConnection
from interlock.store.postgres.schema import quoted

_MAY_MAKE = "SELECT has_database_privilege(current_database(), 'CREATE')"


@contextmanager
def scratch_schema(address: str) -> Generator[str]:
    """Make a schema in the database at an address, and remove it when the block ends; the address of the schema.

    E3411 if the role may not make one.
    """
    name = f"interlock_drill_{secrets.token_hex(6)}"
    try:
        with closing(PostgresConnection(address)) as connection:
            if not connection.one(_MAY_MAKE)[0]:
                words = "the role may not make a schema in this database"
                raise Failure("E3411", words, resolution="GRANT CREATE ON DATABASE … TO the role, or name another role")
            connection.execute(f"CREATE SCHEMA {quoted(name)}")
    except StoreError as error:
        raise store_failure(error) from None
    try:
        yield _within(address, name)
    finally:
        try:
            with closing(PostgresConnection(address)) as connection:
                connection.execute(f"DROP SCHEMA {quoted(name)} CASCADE")
        except StoreError as error:
            raise store_failure(error) from None


def _within(address: str, schema: str) -> str:
    """The address of a schema: of several search paths, the last one counts."""
    parts = urlsplit(address)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    query["options"] = f"{query.get('options', '')} -csearch_path={schema}".strip()
    return parts._replace(query=urlencode(query, quote_via=quote)).geturl()
