"""A data directory with a chain of records, and copies of it that tests change."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from interlock import Context, Effect, Field, Interlock, Preview, tool
from interlock.audit.chain import verify
from interlock.audit.chain_verdict import ChainVerdict
from interlock.store.connection import SqliteConnection
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.support.stores import opened

Account = Annotated[str, Field(description="ledger account", examples=["cash"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def echo(account: Account) -> dict[str, str]:
    """Give back what was sent."""
    return {"account": account}


@tool(
    version="1.0.0",
    mutation_class="write_reversible",
    namespace="demo",
    effects=[Effect("balance:total", "UPDATE")],
)
def post(
    ctx: Context, account: Account, cents: Annotated[int, Field(description="amount", examples=[250])]
) -> dict[str, Any]:
    """Post an amount to an account."""
    ctx.effect("balance:total", "UPDATE", before=0, after=cents)
    return {"account": account, "balance": cents}


@post.preview
async def _(account: str, cents: int) -> Preview:
    return Preview(impact=f"adds {cents} to {account}")


@post.compensate
async def _(entry: dict[str, Any]) -> None:
    """Nothing to take back."""


async def make_home(path: Path) -> Home:
    """A home with reads, writes, replays and failures, anchored in several places, all in one moment."""
    async with Interlock.open(path, clock=FakeClock().clock) as app:
        await app.add(echo, post)
        for number in range(4):
            await app.call("demo.echo", account=f"a{number}")
            await app.call("demo.post", account="cash", cents=number, key=f"k{number}")
            await app.call("demo.post", account="cash", cents=number, key=f"k{number}")
            app.journal.anchor()
        await app.call("demo.nobody")
    return home_at(path)


@dataclass
class Copy:
    """A copy of a home that anything may be done to."""

    home: Home
    db: SqliteConnection

    def rows(self) -> list[tuple[Any, ...]]:
        return self.db.execute("SELECT seq, kind, call, body, hash FROM journal ORDER BY seq").fetchall()

    def verdict(self, **options: Any) -> ChainVerdict:
        return verify(self.home, **options)

    def relink(self, start: int) -> None:
        """Write all hashes from a record on anew, as somebody who knows the format would."""
        row = self.db.execute("SELECT hash FROM journal WHERE seq = ?", (start - 1,)).fetchone()
        head = row[0] if row else bytes(32)
        for seq, body in self.db.execute("SELECT seq, body FROM journal WHERE seq >= ? ORDER BY seq", (start,)):
            head = hashlib.sha256(head + seq.to_bytes(8, "big") + body).digest()
            self.db.execute("UPDATE journal SET hash = ? WHERE seq = ?", (head, seq))


def count(home: Home) -> int:
    with opened(home) as db:
        return db.execute("SELECT COUNT(*) FROM journal").fetchone()[0]


EARLIER = """CREATE TRIGGER journal_only_grows BEFORE INSERT ON journal
       WHEN EXISTS (SELECT 1 FROM journal WHERE seq = NEW.seq)
       BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END"""
