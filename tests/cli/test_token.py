"""`interlock token`, `keys` and `identities`: authority given out, passed on, looked at and taken back."""

from __future__ import annotations

from tests.cli.conftest import Cli


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


def test_keys_rotate_and_retire_and_show_their_public_halves(fresh: Cli) -> None:
    first = fresh.ask("keys", "init", "--alg", "ES256")["kid"]
    assert "E3411" in fresh("keys", "init").err
    second = fresh.ask("keys", "rotate")["kid"]
    assert "E3411" in fresh("keys", "retire", second).err
    assert fresh("keys", "retire", first).code == 0
    (key,) = fresh.ask("keys", "jwks")["keys"]
    assert (key["kid"], key["alg"], "d" in key) == (second, "ES256", False)


def test_what_makes_no_sense_is_a_usage_error(fresh: Cli) -> None:
    assert fresh("token", "issue").code == 2
    assert fresh("token", "issue", "--agent", "a", "--ttl", "soon").code == 2
    unknown = fresh("token", "issue", "--agent", "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK")
    assert (unknown.code, "E3207" in unknown.err) == (1, True)
