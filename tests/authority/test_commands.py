"""A program is found wherever a command line would start it: shells themselves are the judges of that.

One test wraps a program in grammar, over and over, and it must be found. The other makes scripts of the same grammar,
damages them here and there, and has real shells run them: what they start was found, or the script was refused.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from interlock.authority.commands import programs
from interlock.core.errors import Failure
from tests.support.each import each

SHELLS = [found for found in map(shutil.which, ("bash", "dash")) if found]
assert SHELLS, "`./dev` itself is bash"

# Each can be put into any other.
WRAPS = (
    ">/dev/null {}", "2>&1 {}", "2> f {}", "<<<x {}", "&>f {}", ">&-{}", "{{v}}>f {}", ">|f {}", "A=1 B+=2 {}",
    "a[0]=1 {}", "A=$(true)b {}", "A=`true`b {}", "A=(x y)b {}", "A='b c' {}", "{{ {}; }}", "({})", "! {}",
    "time -p {}", "true; {}", "true && {}", "false || {}", "true | {}", "true |& {}", "true & {}", "true\n{}",
    "true \\\n; {}",
    "if {}; then true; fi", "if true; then {}; fi", "if false; then x; else {}; fi", "if [[ a ]] then {}; fi",
    "while {}; do break; done", "for x in a; do {}; done", "for x do {}; done", "until {}; do break; done",
    "f() {{ {}; }}; f", "f() ({}); f", "function f {{ {}; }}; f", "function f if true; then {}; fi; f",
    "coproc N {{ {}; }}", "cat <({})", "cat >({})", "x=$( {})", 'echo "a $( {}) b"', 'echo "${{x:-$( {})}}"',
    "echo 'a\nb' \"c\nd\"; {}", "exec {}", "env -i A=1 {}", "sudo -u a {}", "timeout 5 {}",
    "find . -exec {} \\;", "nohup nice -n 1 {}", "echo $((1 + 2)) $(( (3 << x) * 4 )); {}",
)  # fmt: skip
# These have an end that others would move.
ALONE = (
    "true # it's\n{}", "case a in *) {};; esac", "case a in b|c) true;; (a) {};; esac", "echo `{}`", 'echo "`{}`"',
    "cat <<E\n$({})\nE", "cat <<E\n`{}`\nE", "cat <<E\nit's\nE\n{}", "cat <<-'E'\n'\n\tE\n{}", "cat <<E; {}\n'\nE",
    "sh -c '{}'", "bash -o pipefail -c '{}' x \"$y\"", "su a -c '{}'", "trap '{}' EXIT", "eval {}", "coproc {}",
    "coproc for x do {}; done", "coproc case a in *) {};; esac", "xargs sh -c '{}' _ {{}}",
)  # fmt: skip
SPELLINGS = ("rm", "/bin/rm", "r\\m", '"rm"', "r\\\nm", "\\rm")


@given(
    st.sampled_from((*SPELLINGS, "'r'm", "r''m", "$'rm'")),
    st.sampled_from(["", " x", " -rf / >f"]),
    st.lists(st.sampled_from(WRAPS), max_size=5),
)
def test_a_program_is_found_in_whatever_it_is_wrapped(program: str, rest: str, wraps: list[str]) -> None:
    command = program + rest
    for wrap in wraps:
        command = wrap.format(command)
    assert "rm" in programs(command)


@each("wrap", WRAPS + ALONE)
def test_a_program_is_found_in_each_wrap(wrap: str) -> None:
    for spelling in SPELLINGS:
        assert "rm" in programs(wrap.format(spelling))


class Bait:
    """A place where shells can start one program only, and it leaves a mark."""

    def __init__(self, place: Path) -> None:
        self._mark, self._cwd, self._bin = place / "mark", place / "cwd", place / "bin"
        self._cwd.mkdir()
        self._bin.mkdir()
        bait = self._bin / "bait"
        bait.write_text(f"#!/bin/sh\n: > '{self._mark}'\nkill -9 0\n")
        bait.chmod(0o755)

    def taken(self, shell: str, script: str) -> bool:
        """Whether a shell that runs a script starts the program. It, and all that it has started, is ended then."""
        self._mark.unlink(missing_ok=True)
        nothing = subprocess.DEVNULL
        running = subprocess.Popen(
            [shell, "-c", script], cwd=self._cwd, env={"PATH": str(self._bin)}, start_new_session=True,
            stdin=nothing, stdout=nothing, stderr=nothing,
        )  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            running.wait(timeout=5)
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        return self._mark.exists()


@pytest.fixture(scope="module")
def bait(tmp_path_factory: pytest.TempPathFactory) -> Bait:
    return Bait(tmp_path_factory.mktemp("bait"))


PIECES = (
    "'",
    '"',
    "\\",
    "\n",
    " ",
    ")",
    "(",
    "((",
    "#",
    " # it's\n",
    "`",
    "$",
    "$(",
    "<",
    "<<E\n",
    "{",
    "}",
    ";",
    "=",
    "",
)


@st.composite
def scripts(draw: st.DrawFn) -> str:
    """Grammar within grammar, with some places where something is put in that does not belong there."""
    script = draw(st.sampled_from(("bait", "bait", "ba\\it", "'ba'it x", "true bait", "echo 'bait'", "ba\\\nit")))
    for wrap in draw(st.lists(st.sampled_from(WRAPS + ALONE), min_size=1, max_size=4)):
        script = wrap.format(script)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(script)))
        script = script[:place] + draw(st.sampled_from(PIECES)) + script[place + draw(st.integers(0, 1)) :]
    return script


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts())
@example(script="((# it's\nx # it's)) ; bait")
@example(script="((1<<2\n'\n2\n)) ; true '\n'; bait")
@example(script="coproc trap 'A={a,b} ba\\it' EXIT")
@example(script="A=(>'\ntrue; function f if true;then\nbait;fi;f\n'")
@example(script="eval A=(x) ba'it # x'")
@example(script='eval A=(x)b "bait\n"')
@example(script="cat <<E\na\\\nE\n'\nE\nbait #'")
@example(script="true # \\\nbait")
@example(script="$(true <<E)\nbait\nE")
@example(script="echo $'\\'' ; bait #'")
@example(script="a[ 0 ]=1 bait")
@example(script='"$(>x case) " ; bait ; \'"\'')
def test_what_a_shell_starts_was_found_or_refused(bait: Bait, script: str) -> None:
    try:
        found = programs(script)
    except Failure:
        return
    if "bait" not in found:
        assert not any(bait.taken(shell, script) for shell in SHELLS)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_bait_is_taken_by_who_starts_it(bait: Bait, shell: str) -> None:
    assert bait.taken(shell, ">f bait x")
    assert not bait.taken(shell, "echo bait")


@each(
    "command",
    [
        "$x y",
        "$(echo rm) y",
        "`echo rm` y",
        "r${x}m",
        "/bin/r?",
        "/bin/[r]m",
        "{rm,x}",
        "$'\\x72m' x",
        '"$x" y',
        "/bin/@(rm) x",
        "true; $x",
        "A=1 $x",
        "sudo $x",
        "env A=1 $x",
        'sh -c "$x"',
        "eval $x",
        "nohup nice $x",
        "echo 'open",
        'echo "open',
        "echo $(open",
        "echo `open",
        "echo ${open",
        "r\0m",
        "${ rm x; }",
        "cat <<$x\nrm\n",
        "$(" * 40,
        "`" + "\\" * 300 + "`",
    ],
)
def test_a_command_that_only_a_shell_could_understand_is_refused(command: str) -> None:
    with pytest.raises(Failure) as caught:
        programs(command, "line")
    assert caught.value.code == "E3206"
    assert "argument `line`" in caught.value.message


@each(
    "command",
    [
        "echo rm",
        "git rm x",
        "ls rm # rm",
        "echo 'rm; rm' \"rm | rm\"",
        "cat <<'E'\nrm x\n$(rm)\nE",
        "grep rm <f >rm",
        'for f in *.txt; do echo "$f" rm; done',
        "echo \\; rm",
        "x=rm true",
        "cp a rm && ls rm",
        "find $d -name '*.py'",
        "[ -f rm ] && [[ -n $x ]]",
        "echo $(( $x + 1 )) ${x:-rm}",
        'bash build.sh "$x"',
        "python3 -c 'print(1)' $x",
    ],
)
def test_a_word_that_nothing_starts_is_no_program(command: str) -> None:
    assert "rm" not in programs(command)
