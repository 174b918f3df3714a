"""`interlock doctor` and the commands beside it on a home that has lost something: said as it is, with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from interlock import Failure, Interlock
from interlock.api.doctor import Finding, examine
from interlock.core.clock import Clock
from interlock.executors.sandbox.ladder import Rung
from interlock.gateway import isolation
from interlock.settings import load_settings
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.support import stores
from tests.support.cli import INTERLOCK, Cli
from tests.support.redis import Server

POST = {"account": "cash", "cents": 250}
FORBIDDING = '@id("reads")\npermit (principal, action == Action::"demo.balance", resource);\n'
TOOL = """
from typing import Annotated

from pydantic import Field

from interlock import tool

@tool(name="own.echo", version="1.0.0", mutation_class="read_only", examples=[{"text": "a"}])
def echo(text: Annotated[str, Field(examples=["a"])]) -> str:
    \"\"\"Say it again, word for word, as it was said.

    Args:
        text: what is said
    \"\"\"
    return text
"""


def of(cli: Cli, name: str, status: str = "broken") -> Finding:
    """The one finding of that name and status."""
    (found,) = [one for one in examine(home_at(cli.home), machine=False) if (one.name, one.status) == (name, status)]
    return found


@pytest.mark.parametrize("options", [(), ("--requirepass", "secret")])
def test_redis_is_named_where_the_settings_have_one(
    cli: Cli, make_redis: Callable[..., Server], options: tuple[str, ...]
) -> None:
    server = make_redis(*options)
    (cli.home / "settings.toml").write_text(f'redis = "{server.url}"\n')
    assert of(cli, "redis", "good").what == f"{server.url} answers"
    server.kill()
    found = of(cli, "redis", "attention")
    assert "no connection" in found.what
    assert "the setting `redis`" in found.advice


def test_a_policy_that_is_gone_denies_until_one_is_applied(cli: Cli) -> None:
    (cli.path / "strict.cedar").write_text(FORBIDDING)
    assert cli("policy", "apply", "strict.cedar").code == 0
    (cli.home / "policy.cedar").rename(cli.path / "elsewhere.cedar")
    refused = cli.call("demo.post", POST, "--key", "order-1")["error"]
    assert refused["error_code"] == "E3205"
    assert "interlock policy apply FILE" in refused["message"]
    assert not cli.ledger.exists()
    assert "policy.cedar is missing" in of(cli, "policy").what
    (cli.path / "first.cedar").write_text(cli("policy", "default").out)
    applied = cli("policy", "apply", "first.cedar")
    assert applied.out.endswith("✓ applied\n")
    assert cli.call("demo.post", POST, "--key", "order-1")["is_error"] is False
    (cli.home / "policy.cedar").write_text(FORBIDDING)
    assert "changed by hand" in of(cli, "policy", "attention").what


def test_people_who_are_gone_are_missed(cli: Cli) -> None:
    before = (cli.home / "principals.toml").read_text()
    (cli.home / "principals.toml").unlink()
    assert "interlock policy default --principals" in of(cli, "policy").what
    assert cli("policy", "default", "--principals").out == before


@pytest.mark.sqlite_only("the store's file is emptied")
def test_an_emptied_database_does_not_let_a_call_run_twice(cli: Cli) -> None:
    assert cli.call("demo.post", POST, "--key", "order-1")["is_error"] is False
    for stale in cli.home.glob("interlock.db-*"):
        stale.unlink()
    (cli.home / "interlock.db").write_bytes(b"")
    again = cli("tools", "add", "interlock.demo_tools")
    assert again.code == 1
    assert "E3804" in again.err
    assert "restore the whole data directory" in again.err
    assert cli.call("demo.post", POST, "--key", "order-1")["error"]["error_code"] == "E3804"
    assert len(cli.ledger.read_text().splitlines()) == 1
    found = of(cli, "journal")
    assert "missing or empty" in found.what
    assert "begin anew" in found.advice


@pytest.mark.sqlite_only("the store's file is set back")
def test_a_database_that_was_set_back_is_found(cli: Cli) -> None:
    before = (cli.home / "interlock.db").read_bytes()
    assert cli.call("demo.post", POST, "--key", "order-1")["is_error"] is False
    (cli.home / "interlock.db").write_bytes(before)
    assert "not as this data directory left it" in of(cli, "journal").what


def test_keys_that_are_damaged_or_gone_are_found_by_loading_them(cli: Cli) -> None:
    assert cli("keys", "init", "--alg", "EdDSA").code == 0
    assert cli("secrets", "set", "bank/key", "-", stdin="a secret of some length").code == 0
    secrets = (cli.home / "keys" / "secrets.key").rename(cli.path / "elsewhere")
    assert "something is sealed under are not here" in of(cli, "secrets key").what
    secrets.rename(cli.home / "keys" / "secrets.key")
    (issuer,) = (cli.home / "keys" / "issuer").glob("*.pem")
    for path in (cli.home / "keys" / "journal.ed25519", issuer, cli.home / "keys" / "secrets.key"):
        path.write_text("junk\n")
    for name in ("signing key", "issuer keys", "secrets key"):
        found = of(cli, name)
        assert "damaged" in found.what
        assert "from a backup" in found.advice
    refused = cli("call", "demo.balance", json.dumps({"account": "cash"}))
    assert refused.code == 1
    assert "✗ E3804  data directory cannot be used" in refused.err
    assert "the journal's signing key is damaged" in refused.err
    assert "next   restore keys/journal.ed25519" in refused.err


def test_an_end_of_the_journal_that_nobody_signed_is_pointed_out(cli: Cli) -> None:
    stores.forge(cli.store, b'"timestamp":"20', b'"timestamp":"19')
    with stores.opened(cli.store) as database:
        database.execute("DELETE FROM anchor")
    (cli.home / "anchors.jsonl").write_bytes(b"")
    assert "not signed from record 1 on, 3 in all" in of(cli, "journal", "attention").what


@pytest.mark.sqlite_only("where machines share a store, the text of the whole module is compared (ADR 39)")
def test_tools_whose_files_are_gone_or_changed_are_found(cli: Cli) -> None:
    path = cli.path / "own.py"
    path.write_text(TOOL)
    added = cli("tools", "add", "own.py")
    assert added.code == 0, added.out + added.err
    path.write_text(TOOL.replace("word for word", "letter for letter"))
    assert of(cli, "tools").what == "own.echo@1.0.0 cannot be called: it has changed"
    path.unlink()
    assert "no such file: `own.py`" in of(cli, "tools").what
    assert "interlock tools add" in of(cli, "tools").advice


def test_settings_that_cannot_be_used_are_told_with_their_place(fresh: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.home.mkdir()
    settings = fresh.home / "settings.toml"
    settings.write_text("# ours\nadit = 'durable'\ntheta_auto = 500\n\n[[budgets]]\nper = 'task'\nlimmit = 3\n")
    ended = fresh("tools", "list")
    assert ended.code == 1
    told = " ".join(ended.err.split())
    for words in (
        "✗ E3108 setup needed",
        "settings.toml, line 2: there is no setting `adit`; did you mean `audit`?",
        "settings.toml, line 3: `theta_auto` cannot be used: input should be less than or equal to 100",
        "settings.toml, line 5: `budgets.0.limit` is missing",
        "settings.toml, line 7: there is no setting `budgets.0.limmit`; did you mean `limit`?",
        "next correct what is named",
    ):
        assert words in told
    settings.write_text("audit = \n")
    assert "settings.toml cannot be read: Invalid value (at line 1, column 9)" in of(fresh, "settings").what
    settings.unlink()
    monkeypatch.setenv("INTERLOCK_THETA_AUT", "70")
    assert of(fresh, "settings", "attention").advice == "did you mean INTERLOCK_THETA_AUTO?"
    monkeypatch.setenv("INTERLOCK_AUDIT", "never")
    assert "INTERLOCK_AUDIT: `audit` cannot be used" in of(fresh, "settings").what
    with pytest.raises(Failure, match="what the program was given: there is no setting `thetaauto`"):
        load_settings(settings, audit="durable", thetaauto=1)
    assert not (fresh.home / "policy.cedar").exists()


def test_an_interpreter_that_is_reached_through_a_link_isolates_like_any_other(fresh: Cli) -> None:
    (fresh.path / "linked").symlink_to(sys.prefix)
    python = fresh.path / "linked" / Path(sys.executable).relative_to(sys.prefix)
    words = (str(python), "-m", "interlock.cli", "doctor", "--json")
    environment = {**fresh.environment, "PATH": ""}  # none of the other ways is there to be tried
    found = subprocess.run(words, env=environment, capture_output=True, check=True, timeout=60)
    told = {one["name"]: one["what"] for one in json.loads(found.stdout)["findings"]}
    assert told["sandbox"].startswith("zygote: ")


async def _two_rungs() -> list[Rung]:
    return [
        Rung("zygote", "namespaces", (0, 1, 2, 3), "no user namespaces here"),
        Rung("bubblewrap", "bwrap", (0, 1)),
        Rung("gvisor", "runsc", (0, 1), "gvisor is not installed"),
    ]


def test_a_way_of_isolating_that_failed_is_a_warning_with_what_is_lost(
    fresh: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "rungs", _two_rungs)
    zygote, bubblewrap, gvisor = list(examine(home_at(fresh.home)))[-3:]
    assert (zygote.status, zygote.what) == ("attention", "zygote is not used: no user namespaces here")
    assert zygote.advice == "calls start more slowly, and tools of tiers 2 to 3 are refused with E3405"
    assert bubblewrap.status == "good"
    assert (gvisor.status, gvisor.advice) == ("good", "")


async def test_a_clock_that_was_set_forward_is_told_with_what_to_do(tmp_path: Path) -> None:
    home = tmp_path / "home"
    now_ms = Clock().now_ms()
    clock = FakeClock(now_ms - 10 * 86_400_000)
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        await app.journal.commit(lambda transaction: None)
        clock.now_ms = now_ms
        await app.journal.commit(lambda transaction: None)
    (told,) = [one for one in examine(home_at(home), machine=False) if one.name == "clock"]
    assert told.status == "attention"
    assert "the clock was set forward by 10 d" in told.what
    assert "let a time server set it slowly" in told.advice
    assert "block (E3411) until" in told.advice


async def test_a_clock_that_is_behind_what_was_written_is_told(cli: Cli) -> None:
    assert of(cli, "clock", "good").advice == ""
    ahead = FakeClock(Clock().now_ms() + 7_200_000)
    async with Interlock.open(cli.home, clock=ahead.clock, housekeeping=False) as app:
        await app.call("demo.balance", account="cash")
    told = of(cli, "clock", "attention")
    assert "1 h 59 min behind the newest signed head" in told.what
    assert "set the clock" in told.advice
    with stores.unguarded(cli.store, put_back=False) as database:
        database.execute("DELETE FROM anchor")
    assert "behind the newest record" in of(cli, "clock", "attention").what
    with stores.opened(cli.store) as database:
        database.execute("INSERT INTO anchor VALUES (1, ?, ?, 'key', ?)", (b"\0", 2**63 - 1, b"\0"))
    assert "behind the newest record" in of(cli, "clock", "attention").what


@pytest.mark.sqlite_only("the full disk is that of the store's file")
def test_a_full_disk_is_told_as_such_and_once(cli: Cli) -> None:
    (cli.home / "interlock.db-wal").touch()
    # The index of the database's log finds no room, as on a full disk; nor would bytecode.
    limited = ["/bin/sh", "-c", 'ulimit -f 16; exec "$@"', "sh", *INTERLOCK, "doctor", "--json"]
    environment = {**cli.environment, "PYTHONDONTWRITEBYTECODE": "1", "PATH": ""}
    done = subprocess.run(limited, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "disk I/O error" not in done.stdout
    (told,) = [one for one in json.loads(done.stdout)["findings"] if "E3803" in one["what"]]
    assert "the disk that holds the data directory is full" in told["what"]
    assert "make room" in told["advice"]
