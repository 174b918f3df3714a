"""Table `tool_source`: the text of sandboxed tools, by its digest. Tools of one module share a row.

A fact maps the digest of a tool's content to the digest of its text. Rows are never removed, like those of versions.
"""

from __future__ import annotations

import hashlib

from interlock.core.errors import Failure
from interlock.store import facts
from interlock.store.port import Reader, Transaction

_TEXT_OF = "text:"


def put(transaction: Transaction, tool: str, body: bytes) -> bool:
    """Store the text of a tool, unless it has one. `tool` is the digest of the tool's content.

    Returns whether the text was stored.
    """
    digest = hashlib.sha256(body).hexdigest()
    statement = "INSERT INTO tool_source (digest, body) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING"
    transaction.execute(statement, (digest, body))
    return facts.put_once(transaction, f"{_TEXT_OF}{tool}", digest)


def get(reader: Reader, tool: str) -> bytes | None:
    """The text of a tool; None if there is none. E3804 if it is not what was stored."""
    statement = "SELECT digest, body FROM tool_source WHERE digest = (SELECT value FROM fact WHERE name = ?)"
    row = reader.one(statement, (f"{_TEXT_OF}{tool}",))
    if row is None:
        return None
    digest, body = row
    if hashlib.sha256(body).hexdigest() != digest:
        raise Failure("E3804", "the text of the tool in the store is not what was stored")
    return bytes(body)
