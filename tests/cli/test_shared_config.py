"""`interlock config push`: policy, principals and settings in the store, in force wherever they are followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlock import Failure, Interlock
from interlock.api.doctor import examine
from interlock.store.homes import home_at
from tests.support import stores
from tests.support.cli import Cli

FORBIDDING = '@id("reads")\npermit (principal, action == Action::"demo.balance", resource);\n'
POST = {"account": "cash", "cents": 250}
FOLLOWS = "shared_config = true\n"


def push(cli: Cli, *words: str, **files: str) -> tuple[int, str]:
    """Push the shared configuration with some files changed."""
    folder = cli.path / f"version{len(list(cli.path.glob('version*')))}"
    folder.mkdir()
    for name, text in files.items():
        (folder / {"policy": "policy.cedar", "settings": "settings.toml"}.get(name, "principals.toml")).write_text(text)
    ended = cli("config", "push", "--from", str(folder), *words)
    return ended.code, ended.out + ended.err


@pytest.fixture
def following(cli: Cli) -> Cli:
    """A home that follows version 1, which was its own configuration."""
    (cli.home / "settings.toml").write_text("payload_days = 30\nlog_level = 'debug'\n")
    assert cli("config", "push").code == 0
    (cli.home / "settings.toml").write_text(FOLLOWS)
    (cli.home / "policy.cedar").unlink()
    (cli.home / "principals.toml").unlink()
    return cli


def test_what_was_pushed_is_in_force_in_place_of_the_files(following: Cli) -> None:
    shown = {one["name"]: (one["value"], one["source"]) for one in following.ask("config", "show")["settings"]}
    assert shown["payload_days"] == (30, "shared version 1")
    assert shown["log_level"] == ("info", "default")  # of one machine
    assert following.call("demo.post", POST, "--key", "a")["status"] == "succeeded"
    assert push(following, "--instead-of", "1", policy=FORBIDDING)[0] == 0
    assert following.call("demo.post", POST, "--key", "b")["error"]["error_code"] == "E3206"
    # A file here opens nothing, and is reported.
    (following.home / "policy.cedar").write_text("permit (principal, action, resource);")
    assert following.call("demo.post", POST, "--key", "c")["error"]["error_code"] == "E3206"
    (told,) = [one for one in examine(home_at(following.home), machine=False) if one.name == "nodes"]
    assert told.status == "attention"
    assert "policy.cedar of this data directory does not count" in told.what
    differs = following("config", "diff", "--json")
    assert (differs.code, differs.json["shared"]["followed"]) == (1, True)
    assert "+permit (principal, action, resource);" in differs.json["shared"]["different"]["policy.cedar"]
    assert following("config", "check").code == 0
    assert following("policy", "check").code == 0


def test_a_version_is_recorded_listed_and_put_back(following: Cli) -> None:
    assert push(following, "--instead-of", "1", policy=FORBIDDING)[0] == 0
    assert following("config", "rollback", "1").code == 0
    assert following.call("demo.post", POST, "--key", "a")["status"] == "succeeded"
    versions = following.ask("config", "history")["versions"]
    assert [one["version"] for one in versions] == [3, 2, 1]
    assert all(one["by"].startswith("local:") for one in versions)
    assert sum(one.get("act") == "config.pushed" for one in stores.bodies(following.store)) == 3
    assert following("config", "pull", "earlier", "--version", "2").code == 0
    assert (following.path / "earlier" / "policy.cedar").read_text() == FORBIDDING
    assert "has policy.cedar" in following("config", "pull", "earlier").err
    assert following("audit", "verify").code == 0


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"policy": "permit (principal, action, resource)"}, "policy.cedar: line 1"),
        ({"policy": 'permit (principal, action == Action::"demo.post", resource) when { context.arguments.x > 1 };'},
         "policy.cedar: line 1"),
        ({"principals": "[[principal]]\nid = 'a'\ntrust = 101\n"}, "principals.toml: `principal.0.trust`"),
        ({"settings": "# ours\naudti = 'batched'\n"}, "settings.toml: line 2: there is no setting `audti`"),
        ({"settings": "payload_days = '7'\n"}, "settings.toml: line 1: `payload_days` cannot be used"),
        ({"settings": "vault_url = 'https://a:b@vault'\n"}, "settings.toml: line 1: `vault_url` holds a credential"),
        ({"settings": "x = \n"}, "settings.toml: "),
        ({"policy": "// " + "x" * (1 << 20)}, "policy.cedar: it has more than 1 MiB"),
    ],
)  # fmt: skip
async def test_what_cannot_be_used_is_refused_before_it_is_stored(
    files: dict[str, str], told: str, tmp_path: Path
) -> None:
    from interlock.api.shared_config import SharedConfiguration

    names = {"policy": "policy.cedar", "principals": "principals.toml", "settings": "settings.toml"}
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        shared = SharedConfiguration(app)
        here = {name: (tmp_path / name).read_text() for name in ("policy.cedar", "principals.toml")}
        await shared.push(here, by=app.caller, instead_of=None)
        with pytest.raises(Failure) as refused:
            await shared.push({names[name]: text for name, text in files.items()}, by=app.caller, instead_of=1)
        assert refused.value.code == "E3004"
        assert refused.value.details
        assert refused.value.details["faults"][0].startswith(told)
        assert [one["version"] for one in await shared.history()] == [1]


def test_a_push_replaces_what_its_author_has_seen_and_needs_the_right(following: Cli) -> None:
    code, told = push(following, policy=FORBIDDING)
    assert (code, "E3410" in told, "--instead-of" in told) == (1, True, True)
    code, told = push(following, "--instead-of", "1", policy="permit (principal, action, resource)")
    assert (code, "policy.cedar: line 1" in told, "nothing was changed" in told) == (1, True, True)
    assert "interlock config pull DIR" in following("config", "push").err
    token = following("token", "issue", "--agent", "worker", "--tool", "demo.*", "--ttl", "1h").out.strip()
    code, told = push(Cli(following.path, {"INTERLOCK_TOKEN": token}), "--instead-of", "1", policy=FORBIDDING)
    assert (code, "policy:admin" in told) == (1, True)
    assert len(following.ask("config", "history")["versions"]) == 1


def test_a_policy_that_is_applied_where_it_is_followed_is_pushed(following: Cli) -> None:
    (following.path / "new.cedar").write_text(FORBIDDING)
    applied = following("policy", "apply", "new.cedar")
    assert applied.code == 0, applied.err
    assert following.call("demo.post", POST, "--key", "a")["error"]["error_code"] == "E3206"
    assert [one["version"] for one in following.ask("config", "history")["versions"]] == [2, 1]
    assert not (following.home / "policy.cedar").exists()


@pytest.mark.parametrize("where", ["file", "variable"])
def test_a_setting_here_that_is_not_the_shared_one_stops_the_start(following: Cli, where: str) -> None:
    (following.home / "settings.toml").write_text(FOLLOWS + "payload_days = 30\n")
    assert following("tools", "search", "post").code == 0
    if where == "file":
        (following.home / "settings.toml").write_text(FOLLOWS + "payload_days = 31\n")
    cli = following if where == "file" else Cli(following.path, {"INTERLOCK_PAYLOAD_DAYS": "31"})
    place = "settings.toml, line 2" if where == "file" else "INTERLOCK_PAYLOAD_DAYS"
    refused = cli("call", "demo.post", "{}")
    assert (refused.code, "E3108" in refused.err) == (1, True)
    assert f"{place}: `payload_days` is not what all machines share (shared version 1)" in refused.err


def test_without_a_configuration_to_follow_nothing_starts(cli: Cli) -> None:
    (cli.home / "settings.toml").write_text(FOLLOWS)
    refused = cli("call", "demo.post", "{}")
    assert (refused.code, "E3108" in refused.err) == (1, True)
    assert "INTERLOCK_SHARED_CONFIG=false interlock config push" in refused.err
    assert Cli(cli.path, {"INTERLOCK_SHARED_CONFIG": "false"})("config", "push").code == 0
    assert cli.call("demo.post", POST, "--key", "a")["status"] == "succeeded"


async def test_a_text_that_was_changed_in_the_store_is_not_used(tmp_path: Path) -> None:
    from interlock.api.shared_config import SharedConfiguration

    async with Interlock.open(tmp_path, housekeeping=False) as app:
        here = {name: (tmp_path / name).read_text() for name in ("policy.cedar", "principals.toml")}
        await SharedConfiguration(app).push(here, by=app.caller, instead_of=None)
        await app.journal.commit(
            lambda transaction: transaction.execute("UPDATE shared_config SET files = replace(files, 'local', 'other')")
        )
    with pytest.raises(Failure) as refused:
        async with Interlock.open(tmp_path, shared_config=True):
            pass
    assert refused.value.code == "E3804"
