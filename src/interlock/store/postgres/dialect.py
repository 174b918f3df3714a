"""The dialect of PostgreSQL: statements and values of repositories, as its driver takes them.

Repositories hold one text of each statement, for both databases. What differs is translated here, once per statement:
placeholders (`?` and `?1` become `$1`), binary literals (`x'01'`), and the JSON of a binary column, which is decoded
and not cast. Functions that SQLite has and PostgreSQL lacks (`instr`, `hex`, `json_extract`) are made with the schema.

Integers are sent as 64 bits and texts as texts, whatever their value, so that a statement has one plan. Booleans are
sent and read as integers, as SQLite has them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from psycopg.adapt import Loader
from psycopg.types.numeric import Int8Dumper
from psycopg.types.string import StrDumper

from interlock.core.expressions import expression

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.abc import Buffer

# Texts, then placeholders. Nothing within a text is one.
_TOKENS = expression(r"(?<![\w'])x'([0-9a-f]*)'|('(?:[^']|'')*')|\?(\d*)")
# Of reads that are to go by the table itself, and of the list of tables.
_HINTS = expression(r" NOT INDEXED| INDEXED BY \w+")
_TABLES = "(SELECT tablename AS name FROM pg_tables WHERE schemaname = current_schema()) AS tables"
# Not by a path that ends in -1: PostgreSQL counts that from the end of the document's first list, whichever it is.
_LAST = expression(r"json_extract\(CAST\((\w+) AS TEXT\), '\$\.(\w+)\[#-1\]'\)")
_MEMBER = expression(r"json_extract\(CAST\((\w+) AS TEXT\), ('[^']*')\)")
_AMOUNT = expression(r"\((json_extract\(\w+, '[^']*'\)) \+ 0\)")


@lru_cache(maxsize=1024)
def translate(statement: str) -> bytes:
    """A statement of a repository as PostgreSQL understands it."""
    count = 0

    def token(match: re.Match[str]) -> str:
        nonlocal count
        digits, text, number = match.groups()
        if digits is not None:
            return rf"'\x{digits}'::bytea"
        if text is not None:
            return text
        count += 1
        return f"${number or count}"

    plain = _LAST.sub(r"(json_extract(\1, '$.\2')::json ->> -1)", statement)
    plain = _AMOUNT.sub(r"CAST(\1 AS DOUBLE PRECISION)", _MEMBER.sub(r"json_extract(\1, \2)", plain))
    plain = _HINTS.sub("", plain).replace("sqlite_master", _TABLES)
    return _TOKENS.sub(token, plain).encode()


class _Boolean(Int8Dumper):
    """Sends a boolean as an integer."""

    def dump(self, obj: Any) -> Buffer | None:
        return b"1" if obj else b"0"


class _Integer(Loader):
    """Reads a boolean as an integer."""

    def load(self, data: Buffer) -> int:
        return 1 if bytes(data) == b"t" else 0


class _Text(Loader):
    """Reads a text as the bytes that it has, in a form that tells it from a binary value."""

    def load(self, data: Buffer) -> bytearray:
        return bytearray(data)


def adapt(connection: Connection[Any], *, text_as_bytes: bool = False) -> None:
    """Let a connection send and read values as the port of the store describes them."""
    adapters = connection.adapters
    adapters.register_dumper(int, Int8Dumper)
    adapters.register_dumper(bool, _Boolean)
    adapters.register_dumper(str, StrDumper)
    adapters.register_loader("bool", _Integer)
    if text_as_bytes:
        adapters.register_loader("text", _Text)
