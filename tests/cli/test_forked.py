"""Commands that are forked off a process need not load the program anew: it has loaded it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support import forked

TOOL = """
from typing import Annotated
from interlock import Field, tool
Number = Annotated[int, Field(description="a whole number", examples=[1])]

@tool(version="1.0.0", mutation_class="read_only", namespace="here")
async def add(a: Number) -> int:
    "Add one to a whole number."
    return a + 1
"""
RUN = """
import json, sys
import interlock.cli
before = set(sys.modules)
sys.argv = ["interlock", *json.loads(sys.argv[1])]
try:
    interlock.cli.main()
except SystemExit as end:
    assert not end.code or "doctor" in sys.argv, (sys.argv, end.code)  # it finds something on most machines
print(json.dumps(sorted(one for one in set(sys.modules) - before if one.startswith("interlock."))))
"""
COMMANDS = (
    ("tools", "add", "more.py"), ("tools", "list"), ("call", "here.add", '{"a": 1}'), ("calls", "list"), ("doctor",),
    ("approvals", "list"), ("keys", "list"), ("audit", "verify"),
)  # fmt: skip


def test_a_command_that_is_forked_off_finds_the_program_loaded(tmp_path: Path) -> None:
    """Each module that `tests.warm` does not load is loaded by hundreds of commands in a whole run."""
    (tmp_path / "more.py").write_text(TOOL)
    environment = {**os.environ, "INTERLOCK_HOME": str(tmp_path / "home")}
    loaded: dict[str, list[str]] = {}
    for words in COMMANDS:
        done = subprocess.run(
            [*forked.python(), "-c", RUN, json.dumps(words)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        loaded[" ".join(words)] = json.loads(done.stdout.splitlines()[-1])
    assert not any(loaded.values()), f"{loaded}: name these modules in tests/warm.py"
