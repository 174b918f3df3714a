"""`interlock token`, `keys` and `identities`: authority given out, passed on, looked at and taken back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support import stores
from tests.support.cli import Cli


def test_a_token_is_issued_passed_on_looked_at_and_revoked(fresh: Cli) -> None:
    assert fresh("keys", "init", "--alg", "EdDSA").code == 0
    issued = fresh("token", "issue", "--agent", "bot", "--for", "alice", "--tool", "demo.*@^1.0.0", "--scope", "a:read")
    assert issued.code == 0
    token = issued.out.strip()
    assert token.count(".") == 2
    assert "bot for alice · demo.*@^1.0.0 · a:read · 1 h" in issued.err
    assert token not in issued.err

    wider = fresh("token", "delegate", "--token", token, "--to", "helper", "--scope", "admin", "--tool", "mail.send")
    assert wider.code == 1
    assert wider.out == ""
    assert "E3206" in wider.err
    assert "`admin`" in wider.err
    assert "`mail.send`" in wider.err

    # The holder's own key signs as well as the home's: two identities have one here, and one of them holds the token.
    told = {one["name"]: one["did"] for one in fresh.ask("identities", "list")["identities"]}
    key = fresh.home / "keys" / "identities" / f"{told['bot'].rpartition(':')[2]}.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    below = fresh("token", "delegate", "--token", token, "--to", "helper", "--key", str(key), "--max-uses", "1")
    assert below.code == 0

    shown = fresh("token", "inspect", stdin=below.out)
    assert shown.code == 0
    assert [name for name in ("alice", "└─ bot", "└─ helper", "max uses") if name not in shown.out] == []

    assert fresh("token", "revoke", token, "--reason", "done").code == 0
    after = fresh("token", "inspect", below.out.strip(), "--json")
    assert after.code == 1
    assert (after.json["code"], [link["revoked"] for link in after.json["chain"]]) == ("E3201", [False, True, False])


def test_pages_name_the_agent_and_the_person_it_acted_for(cli: Cli) -> None:
    token = cli("token", "issue", "--agent", "bot", "--for", "alice").out.strip()
    arguments = {"account": "cash", "cents": 250}
    made = cli.call("demo.post", arguments, "--key", "k", "--token", token)["invocation_id"]
    cli.call("demo.balance", {"account": "cash"})
    names = {one["did"]: one["name"] for one in cli.ask("identities", "list")["identities"]}
    for who in ("bot", "alice", *names):
        listed = cli.ask("calls", "list", "--caller", who)["calls"]
        assert [(one["invocation_id"], one["agent_name"], one["caller_name"]) for one in listed] == [
            (made, "bot", "alice")
        ], who
        assert (names[listed[0]["agent"]], names[listed[0]["caller"]]) == ("bot", "alice")
    shown = cli("calls", "list").out
    assert "bot for alice" in shown
    (own,) = (one for one in cli.ask("calls", "list")["calls"] if one["invocation_id"] != made)
    assert (own["agent"], own["agent_name"]) == (None, None)
    explained = cli("policy", "explain", "bot", "demo.post", json.dumps(arguments)).out
    assert "allow  bot calls demo.post@" in explained
    assert "did:" not in shown + explained
    refused = cli("calls", "undo", made, "--key", "u")
    assert (refused.code, "only the caller that made a call may undo it" in refused.out) == (1, True)


def test_keys_rotate_and_retire_and_show_their_public_halves(fresh: Cli) -> None:
    first = fresh.ask("keys", "init", "--alg", "ES256")["kid"]
    assert "E3411" in fresh("keys", "init").err
    second = fresh.ask("keys", "rotate")["kid"]
    assert "E3411" in fresh("keys", "retire", second).err
    assert fresh("keys", "retire", first).code == 0
    (key,) = fresh.ask("keys", "jwks")["keys"]
    assert (key["kid"], key["alg"], "d" in key) == (second, "ES256", False)


def test_a_lost_issuer_key_is_told_and_never_replaced_in_silence(fresh: Cli) -> None:
    """A backup that forgot keys/issuer: whoever issues, looks or asks the doctor learns it, and says how to go on."""
    issue = ("token", "issue", "--agent", "bot")
    older = fresh.ask("keys", "init", "--alg", "EdDSA")["kid"]
    lost = fresh.ask("keys", "rotate")["kid"]
    assert fresh(*issue).code == 0
    issuer = fresh.home / "keys" / "issuer"
    (old_file, lost_file) = sorted(issuer.glob("*.pem"))
    for gone in (lost_file, old_file):
        gone.rename(fresh.path / gone.name)
        refused = fresh(*issue)
        assert (refused.code, refused.out) == (1, "")
        assert "E3804" in refused.err
        assert lost in refused.err
        assert "interlock keys rotate" in refused.err
    for words in (("keys", "init"), ("keys", "list"), ("doctor",)):
        told = fresh(*words)
        assert told.code != 0
        assert "E3804" in told.out + told.err
    assert list(issuer.glob("*.pem")) == []

    (fresh.path / lost_file.name).rename(lost_file)
    assert fresh(*issue).code == 0
    lost_file.unlink()
    replaced = fresh.ask("keys", "rotate")["kid"]
    assert replaced not in (older, lost)
    assert fresh(*issue).code == 0


def test_a_key_that_was_retired_is_not_taken_for_lost(fresh: Cli) -> None:
    first = fresh.ask("keys", "init", "--alg", "EdDSA")["kid"]
    assert fresh("token", "issue", "--agent", "bot").code == 0
    assert fresh("token", "revoke", first, "--reason", "it leaked").code == 0
    assert fresh("token", "issue", "--agent", "bot").code == 0


def test_what_makes_no_sense_is_a_usage_error(fresh: Cli) -> None:
    assert fresh("token", "issue").code == 2
    assert fresh("token", "issue", "--agent", "a", "--ttl", "soon").code == 2
    unknown = fresh("token", "issue", "--agent", "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK")
    assert (unknown.code, "E3207" in unknown.err) == (1, True)


def test_a_name_means_whoever_bears_it_here_and_others_are_shown_with_their_tenant(fresh: Cli) -> None:
    assert fresh("keys", "init", "--alg", "EdDSA").code == 0
    theirs = fresh.ask("identities", "add", "--name", "bot", "--tenant", "acme")["did"]
    fresh("identities", "add", "--name", "bot")
    ours = fresh.ask("token", "issue", "--agent", "bot")
    (link,) = ours["chain"]
    assert (link["name"], link["tenant"], link["subject"] == theirs) == ("bot", "local", False)
    issued = fresh("token", "issue", "--agent", theirs)
    assert issued.err.startswith("bot of acme · ")
    assert "bot of acme  agent" in fresh("token", "inspect", stdin=issued.out).out
    forged = fresh("token", "inspect", issued.out.strip()[:-8] + "AAAAAAAA").out
    assert "bot" not in forged
    assert "not looked up" in forged
    assert "bot of acme" in fresh("identities", "list").out
    back = fresh("token", "delegate", "--token", ours["token"], "--to", "bot")
    assert (back.code, "E3206" in back.err) == (1, True)


def test_a_token_for_the_name_of_a_revoked_identity_warns_that_it_is_another(fresh: Cli) -> None:
    fresh("keys", "init", "--alg", "EdDSA")
    first = fresh.ask("token", "issue", "--agent", "helper")
    assert (first["registered"], first["reissued"]) == (["helper"], [])
    assert fresh("identities", "revoke", "helper", "--reason", "lost").code == 0
    again = fresh("token", "issue", "--agent", "helper")
    assert "warning: an identity named helper was revoked; this is a new one" in again.err
    assert "warning" not in fresh("token", "issue", "--agent", "helper").err, "it is known now"
    assert fresh("identities", "revoke", "helper", "--reason", "lost too").code == 0
    added = fresh("identities", "add", "--name", "helper")
    assert (added.code, "was revoked; this is a new one" in added.err) == (0, True)


def test_a_second_identity_of_a_name_warns_and_the_name_is_refused_with_what_to_type(fresh: Cli) -> None:
    first = fresh.ask("identities", "add", "--name", "bot")["did"]
    assert fresh("identities", "add", "--name", "bot", "--tenant", "acme").err == "", "another tenant has its own names"
    added = fresh("identities", "add", "--name", "bot", "--json")
    second = added.json["did"]
    assert (added.code, f"warning: bot is already the name of {first};" in added.err) == (0, True)
    refused = fresh("identities", "revoke", "bot", "--reason", "lost", "--json").json["error"]
    assert refused["error_code"] == "E3004"
    assert refused["details"]["dids"] == [first, second]
    assert refused["resolution"].endswith(f"interlock identities revoke {first} --reason WHY")
    assert fresh("identities", "revoke", second, "--reason", "lost").code == 0
    assert fresh("identities", "revoke", "bot", "--reason", "lost").code == 0, "one is left"


def test_a_name_of_another_tenant_is_refused_with_its_did_and_a_new_one_is_said_to_be_registered(fresh: Cli) -> None:
    fresh("keys", "init", "--alg", "EdDSA")
    theirs = fresh.ask("identities", "add", "--name", "bot", "--tenant", "acme", "--trust", "60")["did"]
    held = fresh.ask("token", "issue", "--agent", "helper", "--for", "alice")
    assert held["registered"] == ["helper", "alice"]
    for words in (("issue", "--agent", "bot"), ("delegate", "--token", held["token"], "--to", "bot")):
        refused = fresh.ask("token", *words)["error"]
        assert refused["error_code"] == "E3207", words
        assert f"`bot` is of acme: {theirs}" in refused["message"], words
    assert [one["did"] for one in fresh.ask("identities", "list")["identities"] if one["name"] == "bot"] == [theirs]

    slip = fresh("token", "issue", "--agent", "hleper", "--for", "alice")
    assert "hleper was not known and is registered now" in slip.err
    assert "alice was not" not in slip.err
    assert slip.out.strip().count(".") == 2
    assert fresh.ask("token", "issue", "--agent", "hleper")["registered"] == []


def test_the_delegation_of_the_help_works_and_a_range_that_is_not_said_is_the_one_above(fresh: Cli) -> None:
    fresh("keys", "init", "--alg", "EdDSA")
    token = fresh("token", "issue", "--agent", "researcher", "--tool", "demo.*@^1.0.0", "--ttl", "1h").out.strip()
    narrow = ("--to", "summarizer", "--ttl", "5m", "--max-uses", "1")
    passed = fresh.ask("token", "delegate", "--token", token, "--tool", "demo.balance", *narrow)
    assert passed["chain"][-1]["tools"] == ["demo.balance@^1.0.0"]
    wider = fresh("token", "delegate", "--token", token, "--tool", "demo.balance@>=1.0.0", *narrow)
    assert (wider.code, "`demo.balance` is held above in ^1.0.0 only, not in >=1.0.0" in wider.err) == (1, True)
    empty = fresh("token", "delegate", "--token", token, "--tool", "demo.balance@", *narrow)
    assert (empty.code, "names no range" in empty.err) == (2, True)


def test_whoever_holds_the_token_of_the_environment_acts_in_every_command(cli: Cli) -> None:
    cli("keys", "init", "--alg", "EdDSA")
    posted = cli.call("demo.post", {"account": "cash", "cents": 5}, "--key", "k")["invocation_id"]
    issued = cli.ask("token", "issue", "--agent", "clerk", "--tool", "demo.*", "--scope", "audit:read")
    clerk = issued["chain"][-1]["subject"]
    holder = replace(cli, extra={"INTERLOCK_TOKEN": issued["token"]})
    assert holder.ask("policy", "explain", "me", "demo.balance")["principal"] == clerk
    assert holder.ask("calls", "undo", posted, "--key", "u")["error"]["error_code"] == "E3702"  # not a call of theirs
    for words in (("token", "issue", "--agent", "other"), ("secrets", "list"), ("calls", "resume"), ("serve",)):
        assert holder.ask(*words)["error"]["error_code"] == "E3206", words
    assert "tools:admin" in json.dumps(holder.ask("tools", "add", "interlock.demo_tools")["refused"])
    assert holder("audit", "export", "--out", "all.jsonl").code == 0
    assert clerk in (cli.path / "all.jsonl").read_text().splitlines()[-1]  # that it was read, and by whom
    # To look is to look at the home's own files, whatever token there is; a bad one does nothing at all.
    bad = replace(cli, extra={"INTERLOCK_TOKEN": "ey.no.token"})
    assert bad("calls", "list").code == 0
    assert bad.ask("audit", "export", "--out", "none.jsonl")["error"]["error_code"] == "E3203"


@pytest.mark.parametrize("token", ["", " "])
def test_an_empty_token_in_the_environment_does_not_stand_for_the_local_user(cli: Cli, token: str) -> None:
    holder = replace(cli, extra={"INTERLOCK_TOKEN": token})
    for words in (
        ("call", "demo.balance", '{"account": "cash"}'), ("audit", "export", "--out", "none.jsonl"),
        ("token", "issue", "--agent", "other"), ("secrets", "list"), ("calls", "resume"), ("serve",),
    ):  # fmt: skip
        assert holder.ask(*words)["error"]["error_code"] == "E3203", words
    assert "INTERLOCK_TOKEN is set but empty" in holder("secrets", "list").err
    assert holder("calls", "list").code == 0, "to look is to look at the home's own files"


def test_the_list_of_tools_says_of_each_how_many_known_pairs_it_has(cli: Cli) -> None:
    assert {one["known_pairs"] for one in cli.ask("tools", "list")["tools"]} == {0}


def test_the_trace_of_a_call_that_another_process_made_is_told_from_its_record(cli: Cli) -> None:
    call = cli.call("demo.balance", {"account": "cash"})["invocation_id"]
    told = cli.ask("calls", "trace", call)
    assert (told["invocation_id"], told["complete"]) == (call, False)
    assert [(one["name"], one["status"]) for one in told["spans"]] == [("tool.invoke", "OK")]
    shown = cli("calls", "trace", call)
    assert (shown.code, "not kept here" in shown.out) == (0, True)
    unserved = cli.ask("calls", "trace", call, "--url", "http://127.0.0.1:1", "--token", "a.b.c")
    assert unserved["error"]["error_code"] == "E3203"
    assert cli.ask("calls", "trace", call, "--url", "http://127.0.0.1:1")["error"]["error_code"] == "E3212"
    assert cli.ask("calls", "trace", "01ARZ3NDEKTSV4RRFFQ69G5FAV")["error"]["error_code"] == "E3702"


def test_an_auditor_of_another_tenant_is_told_the_story_of_its_own_calls_and_of_no_others(cli: Cli) -> None:
    cli("keys", "init", "--alg", "EdDSA")
    ours = cli.call("demo.balance", {"account": "cash"})["invocation_id"]
    did = cli.ask("identities", "add", "--name", "ann", "--kind", "human", "--tenant", "acme")["did"]
    reads, blind = (
        replace(cli, extra={"INTERLOCK_TOKEN": cli.ask("token", "issue", "--person", did, *scope)["token"]})
        for scope in (("--scope", "audit:read"), ())
    )
    theirs = reads.call("demo.balance", {"account": "cash"})["invocation_id"]
    for name in (theirs, theirs[:6]):  # the beginning of ours, too
        told = reads.ask("audit", "explain", name)
        assert (told["invocation_id"], did in told["story"][0]) == (theirs, True)
    for name in (ours, "01JCNOSUCHCALL"):
        refused = reads.ask("audit", "explain", name)["error"]
        words = f"no call `{name}` in this journal; see interlock calls list"
        assert (refused["error_code"], refused["message"]) == ("E3702", words)
    assert blind.ask("audit", "explain", theirs)["error"]["error_code"] == "E3206"
    assert reads.ask("audit", "export", "--out", "all.jsonl")["error"]["error_code"] == "E3206"
    noted = stores.bodies(cli.store, "audit.read")
    assert [(one["by"], one["subject"]) for one in noted] == [(did, theirs)] * 2


def test_only_what_was_seen_here_is_revoked_unless_it_is_said_to_be_foreign(fresh: Cli) -> None:
    fresh("keys", "init", "--alg", "EdDSA")
    issued = fresh.ask("token", "issue", "--agent", "bot", "--for", "alice")
    user, leaf = (link["jti"] for link in issued["chain"])
    for ref in ("", "nobody", leaf[:4], f"{leaf}x", "did:key:zzz", "did:key:zzz#k", "some-issuer#k"):
        refused = fresh.ask("token", "revoke", ref, "--reason", "x")
        assert refused["error"]["error_code"] == "E3207", ref
    assert fresh.ask("token", "inspect", issued["token"])["valid"]
    assert fresh.ask("token", "revoke", "01FOREIGN", "--reason", "x", "--foreign") == {"revoked": "link 01FOREIGN"}
    assert fresh.ask("token", "revoke", user[:-2], "--reason", "x") == {"revoked": f"link {user}"}
    assert fresh.ask("token", "revoke", leaf[:-2], "--reason", "x") == {"revoked": f"link {leaf}"}
    other = fresh.ask("token", "issue", "--agent", "bot")
    assert fresh.ask("token", "revoke", "bot", "--reason", "x")["revoked"].startswith("identity did:key:")
    assert not fresh.ask("token", "inspect", other["token"])["valid"]
