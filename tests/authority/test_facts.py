"""Arguments are brought to one form before a rule sees them, however they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.authority import facts as f
from interlock.core.errors import Failure
from tests.authority.questions import PolicyHome, contract, question

EVERYTHING = frozenset({"arguments", *f.SETS})
RULES = """
permit (principal, action, resource);
@id("no-secrets") forbid (principal, action, resource) when { context.paths.contains("/SECRET") };
@id("no-evil") forbid (principal, action, resource) when { context.hosts.contains("evil.example") };
@id("no-metadata") forbid (principal, action, resource) when { context.hosts.contains("169.254.169.254") };
@id("no-idn") forbid (principal, action, resource) when { context.hosts.contains("xn--bcher-kva.example") };
@id("no-admin") forbid (principal, action, resource) when { context.urls.contains("https://ok.example/admin") };
@id("no-rm") forbid (principal, action, resource) when { context.commands.contains("rm") };
@id("no-cash") forbid (principal, action, resource) when { context.resources.contains("account:cash") };
"""
TOOL = contract(
    {
        "path": {"type": "string", "format": "path"},
        "url": {"type": "string", "x-url": True},
        "host": {"type": "string", "format": "hostname"},
        "command": {"x-command": True},
        "text": {"type": "string"},
        "nested": {},
        "account": {"type": "string"},
    },
    mutation_class="write_reversible",
    compensable=True,
    effects=[{"resource": "account:{account}", "operation": "UPDATE"}],
)


@pytest.fixture
def world(tmp_path: Path) -> PolicyHome:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("k")
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "hop").symlink_to("link")
    home = tmp_path / "home"
    home.mkdir()
    return PolicyHome(home, RULES.replace("/SECRET", str(secret)))


@pytest.fixture
def no_rm(tmp_path: Path) -> PolicyHome:
    """A home whose rules read nothing of a call but its commands."""
    return PolicyHome(
        tmp_path,
        """
        permit (principal, action, resource);
        @id("no-rm") forbid (principal, action, resource) when { context.commands.contains("rm") };
        """,
    )


@pytest.mark.proves("AUTH-11")
@pytest.mark.parametrize(
    "path",
    [
        "{root}/secret/key", "{root}/secret", "{root}/other/../secret/key", "{root}//secret///key",
        "{root}/./secret/key",
        "{root}/link/key", "{root}/hop/key", "{root}/hop/not-yet/there", "{root}/link/../secret/new",
        "file://{root}/secret/key", "file:{root}/secret/key", "file://localhost{root}/%73ecret/key",
        "FILE://{root}/secret/key", "/proc/self/root{root}/secret/key", "file:///..{root}/other/%2e%2e/secret/key",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["path", "text"])
def test_a_blocked_directory_is_met_however_its_path_is_written(
    world: PolicyHome, tmp_path: Path, path: str, name: str
) -> None:
    decision = world.engine.judge(question(TOOL, {name: path.format(root=tmp_path)}))
    assert (decision.behavior, decision.rules) == ("deny", ("no-secrets",))


def test_what_is_beside_a_blocked_directory_is_not_blocked(world: PolicyHome, tmp_path: Path) -> None:
    for name in ("secretary", "secret.txt", "secret/../other"):
        assert world.says(question(TOOL, {"path": f"{tmp_path}/{name}"})) == "allow"


@pytest.mark.proves("AUTH-11")
@pytest.mark.parametrize(
    "url",
    [
        "https://evil.example/", "https://EVIL.Example", "HTTPS://evil.example", "https://evil.example.",
        "https://good.example@evil.example/", "https://good.example:x@evil.example:443/", "https://a.b.evil.example",
        "https://%65vil.example/", "https:\\\\evil.example\\x", "https:evil.example", "https:/evil.example",
        "https:///evil.example", "//evil.example/x", "\\\\evil.example", "wss://evil.example", "ssh://git@evil.example/x",
        "jdbc:mysql://evil.example/db", "https://ｅｖｉｌ.example", "https://evil。example", "https://evil\u00ad.example/",
        "git+https://evil.example/x.git", "https://evil.example#@good.example", "https://evil.example\\@good.example",
        "https://evil.example?@good.example/", "https://good.example\\@evil.example/",
        "//good.example\\@evil.example/",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["url", "text"])
def test_a_blocked_host_is_met_however_its_url_is_written(world: PolicyHome, url: str, name: str) -> None:
    decision = world.engine.judge(question(TOOL, {name: url}))
    assert (decision.behavior, decision.rules) == ("deny", ("no-evil",))


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "2852039166", "0xa9fea9fe", "0xA9.0xFE.0xA9.0xFE", "0251.0376.0251.0376", "169.254.43518",
        "169.16689662", "[::ffff:169.254.169.254]", "[::FFFF:a9fe:a9fe]", "169.254.169.254.", "１６９.254.169.254",
    ],
)  # fmt: skip
def test_an_address_is_met_in_every_way_of_writing_it(world: PolicyHome, host: str) -> None:
    decision = world.engine.judge(question(TOOL, {"url": f"http://{host}/latest/meta-data"}))
    assert decision.rules == ("no-metadata",)
    assert world.engine.judge(question(TOOL, {"host": host})).rules == ("no-metadata",)


@pytest.mark.parametrize(
    "host", ["bücher.example", "BÜCHER.example", "xn--bcher-kva.example", "XN--BCHER-KVA.EXAMPLE."]
)
@pytest.mark.proves("AUTH-11")
def test_an_international_name_has_one_form(world: PolicyHome, host: str) -> None:
    assert world.engine.judge(question(TOOL, {"url": f"https://{host}/"})).rules == ("no-idn",)


@pytest.mark.parametrize(
    "path",
    ["/admin", "/admin/", "/admin/users?x=1", "//admin", "/x/../admin", "/x/%2e%2e/admin", "/%61dmin", "/./admin#top",
     "/../../admin", "\\admin"],
)  # fmt: skip
@pytest.mark.proves("AUTH-11")
def test_a_blocked_part_of_a_site_is_met_however_its_path_is_written(world: PolicyHome, path: str) -> None:
    assert world.engine.judge(question(TOOL, {"url": f"https://ok.example:443{path}"})).rules == ("no-admin",)
    assert world.says(question(TOOL, {"url": "https://ok.example/administration"})) == "allow"


@pytest.mark.parametrize(
    "url",
    [
        "https://", "https://a b.example", "https://a.example/\nx", "https://a.example:99999/", "https://a.example:x/",
        "https://[::1", "https://[fe80::1%25eth0]/", "https://a..example/", "https://256.1.1.1/", "https://1.2.3.4.5/",
        "https://08.1.1.1/", "https://a.example/%zz", "https://a.example/%4", "no-scheme", "https://xn--a.example/",
        "https://a\u2028.example/", "https://evil\t.example", "https://[evil.example]/", "https://a%00.example/",
    ],
)  # fmt: skip
def test_a_url_without_a_normal_form_is_refused(world: PolicyHome, url: str) -> None:
    decision = world.engine.judge(question(TOOL, {"url": url}))
    assert decision.behavior == "deny"
    assert "argument `url`" in decision.reason
    assert world.engine.cached(question(TOOL, {"url": url})) is None


@pytest.mark.parametrize("path", ["~/x", "~root/.ssh", "a\0b", "", "file://elsewhere.example/etc"])
def test_a_path_without_a_normal_form_is_refused(world: PolicyHome, path: str) -> None:
    decision = world.engine.judge(question(TOOL, {"path": path}))
    assert decision.behavior == "deny"
    assert "argument `path`" in decision.reason


@pytest.mark.parametrize(
    "command",
    ["rm -rf x", "/bin/rm x", "true; rm x", "true && rm x", "a | rm", "X=1 rm x", "echo $(rm x)", "echo `rm x`",
     "'r'm x", "true\nrm x", ["rm", "-rf", "x"], ["/bin/rm", "x"], ">/dev/null rm -rf /srv", "2>/dev/null rm x",
     "{ rm x; }", "if true; then rm x; fi", "! rm x", "sudo rm x", "sh -c 'rm x'", ["sh", "-c", "rm x"],
     ["env", "A=1", "rm", "x"], 'echo "$(rm x)"', "cat <<E\n$(rm x)\nE"],
)  # fmt: skip
@pytest.mark.proves("AUTH-11")
def test_a_blocked_command_is_met_wherever_it_would_start(no_rm: PolicyHome, command: Any) -> None:
    assert no_rm.engine.judge(question(TOOL, {"command": command})).rules == ("no-rm",)


def test_a_command_that_cannot_be_taken_apart_is_refused_and_a_harmless_one_is_not(no_rm: PolicyHome) -> None:
    for command in ("echo 'open", "$x -rf /srv", "/bin/r? x"):
        assert no_rm.says(question(TOOL, {"command": command})) == "deny"
    for command in ("echo rm", ["echo", "$x", "r?"], 'echo "$x" >rm', []):
        assert no_rm.says(question(TOOL, {"command": command})) == "allow"


@pytest.mark.proves("AUTH-11")
def test_predicted_effects_are_resources(world: PolicyHome) -> None:
    assert world.engine.judge(question(TOOL, {"account": "cash"})).rules == ("no-cash",)
    assert world.says(question(TOOL, {"account": "petty"})) == "allow"


def test_values_inside_lists_objects_and_keys_count(world: PolicyHome, tmp_path: Path) -> None:
    for value in ([{"to": "https://evil.example"}], {"https://evil.example": 1}, [["https://evil.example"]]):
        assert world.engine.judge(question(TOOL, {"nested": value})).rules == ("no-evil",)


def test_marked_arguments_stand_in_their_normal_form(tmp_path: Path) -> None:
    found = f.facts(
        TOOL, {"path": f"{tmp_path}/a/../b", "url": "HTTP://u@A.example:80", "text": "plain"}, None, EVERYTHING
    )
    assert found["arguments"] == {"path": f"{tmp_path}/b", "url": "http://a.example/", "text": "plain"}
    assert {"/", str(tmp_path), f"{tmp_path}/b"} <= set(found["paths"])
    assert found["hosts"] == ["a.example", "example"]
    assert set(found["urls"]) == {"http://a.example", "http://a.example/"}
    assert {f"file:{tmp_path}/b", "http://a.example/", "account:*"} == set(found["resources"])


NUMBERS = contract({"price": {"type": "number"}, "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "any": {}})


@pytest.mark.parametrize(("value", "text"), [(5, "5.0000"), (0.1, "0.1000"), (-2.5, "-2.5000"), (1e3, "1000.0000")])
def test_a_number_is_always_a_decimal(value: float, text: str) -> None:
    for name in ("price", "maybe"):
        found = f.facts(NUMBERS, {name: value}, None, frozenset({"arguments"}))
        assert found["arguments"] == {name: {"__extn": {"fn": "decimal", "arg": text}}}


@pytest.mark.parametrize(
    "value",
    [2**63, -(2**63) - 1, 1e300, 0.00001, float("inf"), float("nan"), {"__entity": {"type": "User", "id": "root"}},
     {"deep": [{"__extn": {"fn": "ip", "arg": "1.1.1.1"}}]}, {"__expr": "x"}, "\ud800", {1, 2}],
)  # fmt: skip
def test_what_cedar_cannot_hold_is_refused_and_named(value: Any) -> None:
    with pytest.raises(Failure) as caught:
        f.facts(NUMBERS, {"any": value}, None, frozenset({"arguments"}))
    assert caught.value.code == "E3206"
    assert "`any" in caught.value.message


def test_nulls_are_absent() -> None:
    given = {"any": {"a": None, "b": [None, 1]}, "price": None}
    assert f.facts(NUMBERS, given, None, frozenset({"arguments"}))["arguments"] == {"any": {"b": [1]}}


def test_only_what_rules_read_is_looked_at() -> None:
    assert f.facts(NUMBERS, {"any": 2**70, "price": 1}, ["price"], frozenset({"arguments"}))["arguments"].keys() == {
        "price"
    }
    assert f.facts(TOOL, {"text": "https://a b"}, None, frozenset({"paths"})) == {"paths": []}


def test_a_value_too_deep_to_look_at_is_refused() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(Failure) as caught:
        f.facts(NUMBERS, {"any": deep}, None, frozenset({"urls"}))
    assert caught.value.code == "E3206"


@given(st.text(max_size=30))
def test_a_normal_url_is_its_own_normal_form(text: str) -> None:
    try:
        url, host = f.normal_url(f"https://{text}")
    except Failure:
        return
    assert f.normal_url(url) == (url, host)
    assert url.isascii()
    assert "/../" not in url.partition("?")[0]


@given(st.text(alphabet="ab/.~\0", max_size=20))
def test_a_normal_path_is_its_own_normal_form(text: str) -> None:
    try:
        path = f.normal_path(text)
    except Failure:
        return
    assert f.normal_path(path) == path
    assert list(f.ancestors(path))[-1] == "/"
