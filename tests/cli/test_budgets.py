"""`interlock budgets`: what each budget of a home has left, for whom, and until when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from interlock import Interlock
from interlock.authority import budgets
from interlock.core.amounts import millionths
from tests.support.cli import Cli

SETTINGS = """
[[budgets]]
per = "tenant"
limit = 5.0
period_s = 86400

[[budgets]]
per = "task"
limit = 3.0

[[budgets]]
per = "caller"
limit = 2.0
tools = "mail.*"

[[budgets]]
per = "call"
limit = 1.0
"""


async def test_each_budget_says_what_is_spent_set_aside_and_left_and_when_it_starts_over(fresh: Cli) -> None:
    fresh.home.mkdir()
    (fresh.home / "settings.toml").write_text(SETTINGS)
    async with Interlock.open(fresh.home, housekeeping=False) as app:
        await app.charge("report", part="retrieval", amount=1.5, key="1")
        await app.charge("\U0010ffff", part="retrieval", amount=0.5, key="1")
        held = budgets.budget_keys(
            app.settings.budgets, caller=app.caller, session="", task="report", tool="any", now_ms=app.clock.now_ms()
        )
        await app.journal.commit(lambda tx: budgets.hold(tx, "01CALL", app.instance.id, held, millionths(0.25)))
        told = fresh.ask("budgets")["budgets"]
        page = fresh("budgets").out
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    tenant, task, caller, call = told
    assert (tenant["budget"], tenant["limit"], tenant["ends_at"][:19]) == (
        "5 per tenant and 1 d", 5.0, midnight.isoformat()[:19],
    )  # fmt: skip
    assert tenant["used"] == [{"tenant": "local", "spent": 2.0, "held": 0.25, "left": 2.75}]
    assert task["used"] == [
        {"tenant": "local", "task": "report", "spent": 1.5, "held": 0.25, "left": 1.25},
        {"tenant": "local", "task": "\U0010ffff", "spent": 0.5, "held": 0.0, "left": 2.5},
    ]
    assert (task["ends_at"], caller["used"], caller["tools"], call["used"]) == (None, [], "mail.*", [])
    head, *lines = [line.split("   ") for line in page.splitlines()]
    assert [cell.strip() for cell in head if cell.strip()] == ["budget", "for", "spent", "set aside", "left", "ends"]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert rows[0][:5] == ["5 per tenant and 1 d", "local", "2", "0.25", "2.75"]
    assert rows[0][5].endswith(")")
    assert rows[1] == ["3 per task", "local, report", "1.5", "0.25", "1.25"]
    assert rows[3] == ["2 per caller for mail.*", "nobody yet", "0", "0", "2"]
    assert rows[4] == ["1 per call", "each", "0", "0", "1"]


def test_a_home_without_budgets_says_how_to_set_one(fresh: Cli) -> None:
    assert "[[budgets]]" in fresh("budgets").out
    assert fresh.ask("budgets") == {"budgets": []}
