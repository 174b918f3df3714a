"""The tools of the guided tour: a ledger in a file, so that what they do can be seen from outside.

INTERLOCK_DEMO_LEDGER names the file. An open data directory sets it to a file of its own; otherwise the file is among
the user's data. It holds one JSON line per entry, and only grows.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

from interlock import Change, Context, Effect, Field, Preview, tool
from interlock.core.record import dataclass

OPENING = {"cash": 1000, "savings": 0}

Account = Annotated[str, Field(description="ledger account", examples=["cash"])]
Cents = Annotated[int, Field(description="amount in cents, negative to take out", examples=[250])]


@dataclass(frozen=True)
class Entry:
    """An entry of the ledger, and the balance after it."""

    entry: int
    balance: int


@tool(namespace="demo", version="1.0.0", mutation_class="read_only")
def balance(account: Account) -> int:
    """Balance of one account, in cents."""
    with _ledger() as ledger:
        return _balance(_entries(ledger), account)


@balance.check
def _known(account: str) -> list[str]:
    return _no_such(account)


@tool(
    namespace="demo",
    version="1.2.0",
    mutation_class="write_reversible",
    effects=[Effect("account:{account}", "UPDATE")],
)
def post(ctx: Context, account: Account, cents: Cents) -> Entry:
    """Post an amount to an account."""
    with _ledger() as ledger:
        entries = _entries(ledger)
        before = _balance(entries, account)
        _append(ledger, {"entry": len(entries) + 1, "account": account, "cents": cents})
    _dawdle(ctx)  # only in the tour: here is where it gets killed
    ctx.effect(f"account:{account}", "UPDATE", before=before, after=before + cents)
    ctx.compensate_with(account=account, cents=cents)
    return Entry(entry=len(entries) + 1, balance=before + cents)


@post.check
def _postable(account: str, cents: int) -> list[str]:
    return [*_no_such(account), *(["cents must not be 0"] if cents == 0 else [])]


@post.preview
def _would_post(account: str, cents: int) -> Preview:
    with _ledger() as ledger:
        before = _balance(_entries(ledger), account)
    change = Change(resource=f"account:{account}", operation="UPDATE", before=before, after=before + cents)
    return Preview(effects=(change,), impact=f"{account} goes from {before} to {before + cents}")


@post.compensate
def _take_back(account: str, cents: int) -> Entry:
    with _ledger() as ledger:
        entries = _entries(ledger)
        _append(ledger, {"entry": len(entries) + 1, "account": account, "cents": -cents})
        return Entry(entry=len(entries) + 1, balance=_balance(entries, account) - cents)


@tool(
    namespace="demo",
    version="1.0.0",
    mutation_class="write_irreversible",
    effects=[Effect("mailbox:{to}", "CREATE")],
)
def mail_statement(
    ctx: Context,
    account: Account,
    to: Annotated[str, Field(description="who gets it", examples=["press@example.org"])],
) -> str:
    """Mail the statement of an account to somebody outside."""
    with open(_path().with_suffix(".outbox"), "a") as outbox:
        outbox.write(f"{to}: statement of {account}\n")
    ctx.effect(f"mailbox:{to}", "CREATE", after=account)
    return f"mailed to {to}"


@mail_statement.preview
def _would_mail(account: str, to: str) -> Preview:
    change = Change(resource=f"mailbox:{to}", operation="CREATE", after=account)
    return Preview(effects=(change,), impact=f"{to} would get the statement of {account}; it cannot be called back")


def _path() -> Path:
    chosen = os.environ.get("INTERLOCK_DEMO_LEDGER")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_data_dir("interlock")) / "demo-ledger.jsonl"


@contextmanager
def _ledger() -> Generator[IO[str]]:
    """The ledger's file, held by this process alone."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _entries(ledger: IO[str]) -> list[dict[str, Any]]:
    ledger.seek(0)
    return [json.loads(line) for line in ledger]


def _append(ledger: IO[str], entry: dict[str, Any]) -> None:
    ledger.write(json.dumps(entry) + "\n")
    ledger.flush()
    os.fsync(ledger.fileno())


def _balance(entries: list[dict[str, Any]], account: str) -> int:
    return OPENING[account] + sum(int(entry["cents"]) for entry in entries if entry["account"] == account)


def _no_such(account: str) -> list[str]:
    return [] if account in OPENING else [f"there is no account `{account}`; there are {', '.join(sorted(OPENING))}"]


def _dawdle(ctx: Context) -> None:
    """For the tour: report over a pipe that the entry is written, then block.

    So the process can be killed in the middle of the call.
    """
    pipe = os.environ.get("INTERLOCK_DEMO_PIPE")
    if pipe is None:
        return
    os.write(int(pipe), b"written\n")
    import time

    while not ctx.cancelled:
        time.sleep(0.01)
