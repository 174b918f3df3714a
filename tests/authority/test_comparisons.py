"""Arguments that a rule holds against a path, a URL or a host are compared in normal form, whatever their schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.authority import facts as f
from interlock.authority.policy_check import check
from interlock.contract.contract import Contract
from tests.authority.questions import PolicyHome, contract, question

TEXT = {"type": "string"}
PLAIN = contract(dict.fromkeys(("path", "url", "host", "repo", "name"), TEXT) | {
    "paths": {"type": "array", "items": TEXT},
    "options": {"type": "object", "properties": {"to": TEXT}},
    "command": {"type": "string", "x-command": True},
})  # fmt: skip
UPSTREAM = contract(
    {"path": TEXT, "url": TEXT, "marked": {"type": "string", "x-path": True}},
    protocol="mcp",
    execution={"kind": "upstream", "target": "files", "native": {"name": "read"}, "implementation": "d"},
)


def says(tmp_path: Path, rule: str, tool: Contract, arguments: dict[str, Any]) -> str:
    return PolicyHome(tmp_path, rule).says(question(tool, arguments))


def permit(condition: str) -> str:
    return f"permit (principal, action, resource) when {{ {condition} }};"


def forbid(condition: str) -> str:
    return f"permit (principal, action, resource); forbid (principal, action, resource) when {{ {condition} }};"


OUT = (
    "/srv/../etc/passwd", "/srv/x/../../etc/passwd", "/srv//../etc", "/srv/./../etc", "/srv/link/passwd", "/srvx/y",
    "file:///srv/../etc/passwd", "/srv/..", " /srv/x", "/srv/\0x",
)  # fmt: skip


@pytest.mark.parametrize("tool", [PLAIN, UPSTREAM], ids=["in-process", "upstream"])
@pytest.mark.parametrize("path", OUT)
def test_a_permit_for_a_directory_lets_no_other_spelling_out(tmp_path: Path, tool: Contract, path: str) -> None:
    srv = tmp_path / "srv"
    srv.mkdir()
    (srv / "link").symlink_to("/etc")
    home = tmp_path / "home"
    home.mkdir()
    rule = permit(f'context.arguments.path like "{srv}/*"')
    assert says(home, rule, tool, {"path": path.replace("/srv", str(srv), 1)}) == "deny"
    assert says(home, rule, tool, {"path": f"{srv}/inside"}) == "allow"


@pytest.mark.parametrize("path", ["/srv/%2e%2e/etc", "/srv/..%2fetc", "/srv/%252e%252e/etc", "/srv\\..\\etc", "srv/x"])
def test_a_path_whose_meaning_an_upstream_decides_is_refused(tmp_path: Path, path: str) -> None:
    for rule in (permit('context.arguments.path like "/srv/*"'), forbid('context.arguments.path like "/etc/*"')):
        assert says(tmp_path, rule, UPSTREAM, {"path": path}) == "deny"
    assert says(tmp_path, forbid('context.paths.contains("/etc")'), UPSTREAM, {"marked": path}) == "deny"


@pytest.mark.parametrize("path", ["/etc//passwd", "/etc/./passwd", "/x/../etc/passwd", "file:///etc/passwd"])
@pytest.mark.parametrize(
    "condition",
    [
        'context.arguments.path == "/etc/passwd"', '["/etc/passwd", "/x"].contains(context.arguments.path)',
        'context.arguments.path like "/etc/*"', '(if true then context.arguments.path else "") like "/etc/*"',
        '!(context.arguments.path != "/etc/passwd")',
    ],
)  # fmt: skip
def test_a_forbidden_path_is_met_in_every_spelling(tmp_path: Path, condition: str, path: str) -> None:
    assert says(tmp_path, forbid(condition), PLAIN, {"path": path}) == "deny"
    assert says(tmp_path, forbid(condition), PLAIN, {"path": "/var/x"}) == "allow"


def test_what_is_in_a_list_or_an_object_is_compared_likewise(tmp_path: Path) -> None:
    rule = forbid('context.arguments.paths.contains("/etc/passwd")')
    assert says(tmp_path, rule, PLAIN, {"paths": ["/a", "/etc/../etc/passwd"]}) == "deny"
    rule = permit('context.arguments.options.to like "/srv/*"')
    assert says(tmp_path, rule, PLAIN, {"options": {"to": "/srv/../etc"}}) == "deny"
    assert says(tmp_path, rule, PLAIN, {"options": {"to": "/srv/x"}}) == "allow"


@pytest.mark.parametrize(
    "url",
    [
        "https://ok.example/api/../admin", "https://ok.example/api/%2e%2e/admin", "https://ok.example@evil.example/api/x",
        "https://ok.example:8443/api/x", "https://ok.example.evil.example/api/", "https:\\\\evil.example/api",
        "https://ok.example\\@evil.example/../api/x",
    ],
)  # fmt: skip
def test_a_permit_for_a_part_of_a_site_lets_nothing_else_through(tmp_path: Path, url: str) -> None:
    rule = permit('context.arguments.url like "https://ok.example/api/*"')
    assert says(tmp_path, rule, PLAIN, {"url": url}) == "deny"
    assert says(tmp_path, rule, PLAIN, {"url": "HTTPS://OK.example:443/api/x"}) == "allow"


@pytest.mark.parametrize(
    "host", ["evil.example/.ok.example", "evil.example#.ok.example", "x@evil.example:1/.ok.example", "a b.ok.example"]
)
def test_a_permit_for_a_domain_takes_hosts_only(tmp_path: Path, host: str) -> None:
    rule = permit('context.arguments.host like "*.ok.example"')
    assert says(tmp_path, rule, PLAIN, {"host": host}) == "deny"
    assert says(tmp_path, rule, PLAIN, {"host": "A.ok.example."}) == "allow"


def test_a_forbidden_host_is_met_in_capitals_and_a_name_that_is_no_host_is_left_alone(tmp_path: Path) -> None:
    rule = forbid('context.arguments.name == "evil.example"')
    assert says(tmp_path, rule, PLAIN, {"name": "EVIL.example."}) == "deny"
    assert says(tmp_path, rule, PLAIN, {"name": "My notes.txt"}) == "allow"


@pytest.mark.parametrize("repo", ["acme/../other/x", "acme/./x", "acme/%2e%2e/other"])
def test_pieces_between_slashes_do_not_lead_up(tmp_path: Path, repo: str) -> None:
    rule = permit('context.arguments.repo like "acme/*"')
    assert says(tmp_path, rule, PLAIN, {"repo": repo}) == "deny"
    assert says(tmp_path, rule, PLAIN, {"repo": "acme/x"}) == "allow"


@pytest.mark.parametrize("command", ["git log; rm x", "git log && rm x", "git $(rm x)", "git log >f", "git log\nrm x"])
def test_a_command_that_is_compared_as_text_is_one_program(tmp_path: Path, command: str) -> None:
    rule = permit('context.arguments.command like "git *"')
    assert says(tmp_path, rule, PLAIN, {"command": command}) == "deny"
    assert says(tmp_path, rule, PLAIN, {"command": 'git  "log"'}) == "allow"


# All of them


@given(st.lists(st.sampled_from(["/srv/a", "/srv/b/c", "/srv/../etc", "/etc", "/srv"]), max_size=4))
def test_all_paths_holds_what_contains_every_path_and_nothing_else(paths: list[str]) -> None:
    found = f.facts(PLAIN, {"paths": paths}, None, frozenset({"all_paths"}))["all_paths"]
    assert ("/srv" in found) == (bool(paths) and all(path != "/etc" and ".." not in path for path in paths))
    assert ("/" in found) == bool(paths)


def test_a_permit_by_all_lets_no_second_one_out(tmp_path: Path) -> None:
    rule = permit('context.all_paths.contains("/srv")')
    assert says(tmp_path, rule, PLAIN, {"path": "/srv/x", "paths": ["/srv/y"]}) == "allow"
    assert says(tmp_path, rule, PLAIN, {"path": "/srv/x", "paths": ["/etc/passwd"]}) == "deny"
    assert says(tmp_path, rule, PLAIN, {"command": "cp /srv/x /srv/y"}) == "allow"
    assert says(tmp_path, rule, PLAIN, {"command": "cp /srv/x /etc/y"}) == "deny"
    assert says(tmp_path, rule, PLAIN, {}) == "deny"
    rule = permit('context.all_hosts.contains("ok.example")')
    assert says(tmp_path, rule, PLAIN, {"url": "https://a.ok.example/", "path": "https://ok.example"}) == "allow"
    assert says(tmp_path, rule, PLAIN, {"url": "https://ok.example/", "name": "https://evil.example"}) == "deny"
    rule = permit('context.all_commands.contains("git")')
    assert says(tmp_path, rule, PLAIN, {"command": "git log"}) == "allow"
    for command in ("git log; rm x", "/tmp/git log", "env git log"):
        assert says(tmp_path, rule, PLAIN, {"command": command}) == "deny"


def test_a_directory_that_a_rule_names_by_a_link_is_met(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("link", "real"):
        rule = forbid(f'context.paths.contains("{tmp_path}/{name}")')
        assert says(tmp_path, rule, PLAIN, {"path": f"{tmp_path}/link/x"}) == "deny"


# Checking


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (permit('context.arguments.path like "/srv/*"'), "does not say that `path` is a path"),
        (permit('context.arguments.url like "https://x.example/*"'), "does not say that `url` is a url"),
        (permit('context.arguments.host like "*.x.example"'), "does not say that `host` is a host"),
        (permit('context.arguments.name like "a*"'), "compares `name` as it is sent"),
        (permit('context.arguments.command like "git *"'), "context.all_commands"),
        (permit('context.paths.contains("/srv")'), "context.all_paths"),
        (permit('context.hosts.contains("x.example")'), "context.all_hosts"),
        (forbid('!context.urls.contains("https://x.example")'), None),
        (forbid('context.paths.contains("/srv")'), None),
        (permit('context.all_paths.contains("/srv")'), None),
        (permit('context.arguments.path == "/srv/../etc"'), "write `/etc`"),
        (permit('context.arguments.name == "x"'), None),
    ],
)  # fmt: skip
def test_a_rule_on_raw_text_is_warned_of(rule: str, told: str | None) -> None:
    text = rule.replace("(principal, action, resource)", '(principal, action == Action::"demo.act", resource)')
    faults = check(text, [PLAIN])
    warnings = [fault.message for fault in faults if "has no name" not in fault.message and not fault.grave]
    assert any(told in message for message in warnings) if told else warnings == []


def test_a_rule_on_a_marked_argument_is_not_warned_of() -> None:
    marked = contract({"path": {"type": "string", "format": "path"}})
    rule = '@id("x") permit (principal, action == Action::"demo.act", resource) '
    assert check(rule + 'when { context has arguments && context.arguments has path && '
                 'context.arguments.path like "/srv/*" };', [marked]) == []  # fmt: skip
