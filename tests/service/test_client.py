"""The typed client, and the pytest plugin: real calls, a real type checker, a real run of pytest."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Client, Context, Effect, Failure, Field, Interlock, Preview, tool

Account = Annotated[str, Field(description="ledger account", examples=["cash"])]
Cents = Annotated[int, Field(description="amount", examples=[250])]
Day = Annotated[date, Field(description="the day", examples=["2026-01-31"])]


@dataclass
class Entry:
    """What was posted."""

    account: str
    cents: int
    on: date


@tool(version="1.0.0", mutation_class="read_only", namespace="typed")
def balance(account: Account) -> int:
    """Balance of one account, in cents."""
    return len(account)


@tool(version="1.0.0", mutation_class="read_only", namespace="typed")
async def last_entry(ctx: Context, account: Account, on: Day) -> Entry:
    """The last entry of an account on a day."""
    return Entry(account, 1, on)


UPDATES = [Effect("account:{account}", "UPDATE")]


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="typed", effects=UPDATES)
def post(account: Account, cents: Cents) -> int:
    """Post an amount to an account."""
    return cents


@post.preview
def _(account: str, cents: int) -> Preview:
    return Preview(impact=f"{account} would get {cents}")


USES = """
from interlock import Client, Interlock, Result
from tests.service.test_client import Entry, balance, last_entry
from datetime import date

async def right(client: Client) -> None:
    number: int = await client.call(balance, account="cash")
    also: int = await client.call(balance, "cash")
    entry: Entry = await client.using(key="k").call(last_entry, "cash", on=date(2026, 1, 31))
    await client.result(last_entry, account="cash", on=date(2026, 1, 31))
    print(number, also, entry.cents)

async def right_by_the_application(app: Interlock) -> None:
    result: Result[int] = await app.call(balance, account="cash")
    number: int = (await app.call(balance, "cash")).unwrap()
    entry: Entry = (await app.call(last_entry, "cash", on=date(2026, 1, 31))).unwrap()
    also: Entry = await app.using(session="s").call(last_entry, "cash", on=date(2026, 1, 31))
    print(result.ok, number, entry.cents, also.cents)
    await app.call("typed.balance", account="cash", session="s")
    await app.call("typed.balance", {"account": "cash"}, key="k")
    await app.call(balance, {"account": "cash"}, session="s", timeout_s=1)
    await app.call(balance, account="cash", key="k", session="s")

async def wrong(client: Client, app: Interlock) -> None:
    await client.call(balance, acount="cash")
    await client.call(balance, account=7)
    await client.call(balance)
    await client.call(last_entry, "cash", on="tomorrow")
    await client.result(balance, 1, 2)
    text: str = await client.call(balance, account="cash")
    (await client.call(last_entry, "cash", on=date(2026, 1, 31))).sents
    await app.call(balance, acount="cash")
    await app.call(balance, account=7)
    await app.call(balance)
    await app.call(last_entry, "cash", on="tomorrow")
    await app.using(key="k").result(balance, 1, 2)
    await app.using(kee="k").result(balance, "cash")
    await app.call("typed.balance", timeout_s="soon")
    word: str = (await app.call(balance, account="cash")).unwrap()
    (await app.call(last_entry, "cash", on=date(2026, 1, 31))).unwrap().sents
"""


async def test_a_typed_call_returns_what_the_function_declares(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "home") as app:
        await app.add(balance, last_entry, post)
        client = Client(app)
        assert await client.call(balance, "cash") == 4
        day = date(2026, 1, 31)
        assert await client.call(last_entry, "cash", on=day) == Entry("cash", 1, day)
        # It is a call like any other: checked, authorized, on record.
        wrong: Any = 7
        refused = await client.result(balance, account=wrong)
        assert refused.error is not None
        assert refused.error.code == "E3301"
        with pytest.raises(Failure) as raised:
            await client.call(post, "cash", cents=250)
        assert raised.value.code == "E3307", "a write needs a key"
        waits = await client.using(key="order-17").result(post, "cash", cents=250)
        assert waits.pending
        with pytest.raises(TypeError, match="each once"):
            await client.call(balance, "cash", account="bank")  # pyright: ignore[reportCallIssue]


async def test_a_declared_tool_is_called_as_its_function_is(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "home") as app:
        await app.add(balance, last_entry, post)
        day = date(2026, 1, 31)
        assert (await app.call(balance, "cash")).unwrap() == 4
        result = await app.call(last_entry, "cash", on=day)
        assert result.unwrap() == Entry("cash", 1, day)
        assert result.value == {"account": "cash", "cents": 1, "on": "2026-01-31"}, "the value is JSON data"
        named = await app.call("typed.last_entry", account="cash", on="2026-01-31")
        assert named.unwrap() == result.value, "a call by name knows no function"
        assert (await app.call(last_entry, {"account": "cash", "on": "2026-01-31"}, session="s")).unwrap().on == day
        assert await app.using(session="s").call(last_entry, "cash", on=day) == Entry("cash", 1, day)
        # A preview is no result of the function.
        preview = await app.using(dry_run=True).result(post, "cash", cents=250)
        assert preview.unwrap() == preview.value
        with pytest.raises(TypeError, match="each once"):
            await app.call(balance, "cash", account="bank")  # pyright: ignore[reportCallIssue]


def test_the_type_checker_finds_wrong_arguments_and_wrong_uses_of_results(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "uses.py").write_text(USES)
    config: dict[str, Any] = {"include": ["uses.py"], "extraPaths": [str(root), str(root / "src")], "strict": ["."]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=150)
    found = {one["range"]["start"]["line"] for one in json.loads(done.stdout)["generalDiagnostics"]}
    lines = USES.splitlines()
    first = lines.index("async def wrong(client: Client, app: Interlock) -> None:") + 1
    assert found == set(range(first, len(lines))), done.stdout


def test_the_plugin_gives_tests_an_interlock_and_a_client(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from tests.service.test_client import balance\n\n\n"
        "async def test_balance(interlock_app, interlock_client):\n"
        "    await interlock_app.add(balance)\n"
        '    assert await interlock_client.call(balance, account="cash") == 4\n'
        "    import interlock.api.client\n"
        '    assert type(interlock.api.client.__loader__).__name__ == "SourceFileLoader"\n'
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\npythonpath = "
        f"{Path(__file__).parents[2]}\n"
    )
    # As pytest does with a package that has a plugin, if it looks for plugins itself.
    (tmp_path / "marking.py").write_text(
        'def pytest_addoption(pluginmanager):\n    pluginmanager.rewrite_hook.mark_rewrite("interlock")\n'
    )
    # Without the plugins that come with other packages here, some of which take seconds to load.
    words = [sys.executable, "-m", "pytest", "-q", "--disable-plugin-autoload", "-p", "pytest_asyncio.plugin"]
    words += ["-p", "marking", "-p", "interlock.pytest_plugin", "test_mine.py", "--basetemp", str(tmp_path / "inner")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=150)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"interlock.pytest_plugin": "interlock.pytest_plugin"}
