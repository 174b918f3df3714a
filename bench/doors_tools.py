"""The tools that are served: reads and a write that compute nothing, so that what is measured is the way to them.

`balance` is declared for speed. `looked_up`, `looked_up_here` and `looked_up_with_context` are the same read as people
declare it who give speed no thought.
"""

from __future__ import annotations

from typing import Annotated

from interlock import Change, Context, Effect, Field, Preview, tool

ACCOUNTS = {"cash": 1000, "savings": 0}

Account = Annotated[str, Field(description="ledger account", examples=["cash"])]
Cents = Annotated[int, Field(description="amount in cents, negative to take out", examples=[250])]


@tool(namespace="ledger", version="1.0.0", mutation_class="read_only", timeout_class="interactive", external_io=False)
async def balance(account: Account) -> int:
    """Balance of one account, in cents."""
    return ACCOUNTS.get(account, 0)


@tool(namespace="ledger", version="1.0.0", mutation_class="read_only")
async def looked_up(account: Account) -> int:
    """Balance of one account, in cents: an async function, declared without flags."""
    return ACCOUNTS.get(account, 0)


@tool(namespace="ledger", version="1.0.0", mutation_class="read_only")
def looked_up_here(account: Account) -> int:
    """Balance of one account, in cents: a plain function, which runs in a thread."""
    return ACCOUNTS.get(account, 0)


@tool(namespace="ledger", version="1.0.0", mutation_class="read_only")
async def looked_up_with_context(ctx: Context, account: Account) -> int:
    """Balance of one account, in cents: a function that takes the context of its call."""
    return ACCOUNTS.get(account, 0)


@tool(
    namespace="ledger",
    version="1.0.0",
    mutation_class="write_reversible",
    timeout_class="standard",
    external_io=False,
    effects=[Effect("account:{account}", "UPDATE")],
)
async def post(ctx: Context, account: Account, cents: Cents) -> int:
    """Post an amount to an account; the balance after it."""
    before = ACCOUNTS.get(account, 0)
    ctx.effect(f"account:{account}", "UPDATE", before=before, after=before + cents)
    ctx.compensate_with(account=account, cents=cents)
    return before + cents


@post.preview
async def _would_post(account: str, cents: int) -> Preview:
    before = ACCOUNTS.get(account, 0)
    change = Change(resource=f"account:{account}", operation="UPDATE", before=before, after=before + cents)
    return Preview(effects=(change,), impact=f"{account} goes from {before} to {before + cents}")


@post.compensate
async def _take_back(account: str, cents: int) -> int:
    return ACCOUNTS.get(account, 0)
