"""Commands in the process of the tests do what they do in one of their own, and leave it as it was."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time

import pytest

from tests.support import in_process
from tests.support.cli import Cli

TOOL = """
import os
import sys
from interlock import tool

os.environ["TZ"] = "Asia/Tokyo"

@tool(version="1.0.0", mutation_class="read_only", namespace="here")
async def place() -> list[str]:
    "Where a call runs."
    print("printed by the tool")
    return [os.getcwd(), os.environ["OF_THE_COMMAND"], sys.argv[1], "first"]
"""


def _state() -> dict[str, object]:
    """State of the whole process, which a command must leave as it was."""
    loggers = [logging.getLogger(), logging.getLogger("interlock")]
    return {
        "environment": dict(os.environ),
        "place": os.getcwd(),
        "path": sys.path[:],
        "arguments": sys.argv,
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "open": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
        "collector": gc.get_threshold(),
        "signals": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)],
        "loggers": [(one.handlers[:], one.level, one.propagate) for one in loggers],
        "zone": time.tzname,
    }


def test_a_command_leaves_the_process_as_it_was(fresh: Cli) -> None:
    (fresh.path / "more.py").write_text(TOOL)
    (fresh.path / "installed.py").write_text(TOOL.replace('"here"', '"there"'))
    cli = Cli(fresh.path, {"OF_THE_COMMAND": "yes"})
    before, loaded, frozen = _state(), set(sys.modules), gc.get_freeze_count()
    assert in_process.fits(("tools", "add", "more.py"), cli.environment)
    assert cli("tools", "add", "more.py", "installed").code == 0
    assert cli.call("here.place")["structured_content"] == [str(fresh.path), "yes", "call", "first"]
    assert "printed by the tool" in cli("call", "there.place").out
    assert cli("--verbose", "call", "here.place", '{"of": 3}').code == 1
    assert cli("call", "here.place", "-", stdin="{}").code == 0
    assert cli("no such command").code == 2
    assert _state() == before
    assert gc.get_freeze_count() <= frozen
    assert [one for one in set(sys.modules) - loaded if "more" in one or "installed" in one] == []


@pytest.mark.parametrize(
    "words",
    [
        ("tools", "list", "--json"), ("call", "demo.balance", "{", "--json"), ("tools", "show", "nothing"), ("--help",),
        ("call",), ("audit", "verify", "--json"), ("policy", "show"), ("keys", "list"), ("--odd", "--json"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_ends_alike_in_a_process_of_its_own(words: tuple[str, ...], cli: Cli) -> None:
    there, here = cli.apart(*words), cli(*words)
    assert (here.code, len(here.out.splitlines())) == (there.code, len(there.out.splitlines()))
    assert here.err == there.err


def test_a_command_reads_a_file_as_it_is_now(fresh: Cli) -> None:
    """Not as an earlier command of this process has read it. Its size differs, which Python looks at too."""
    module = fresh.path / "mine.py"
    for number in range(3):
        text = TOOL.replace("1.0.0", f"1.0.{number}").replace("first", "again " * number)
        module.write_text(text)
        cli = Cli(fresh.path, {"OF_THE_COMMAND": "yes"})
        assert cli("tools", "add", "mine").code == 0
        assert cli.call("here.place")["structured_content"][-1] == "again " * number


async def test_a_command_beside_an_event_loop_has_a_process_of_its_own(cli: Cli) -> None:
    assert not in_process.fits(("tools", "list"), cli.environment)
    assert cli("tools", "list").code == 0
