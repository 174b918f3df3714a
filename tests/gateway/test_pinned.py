"""The text of a sandboxed tool is part of its version: what was admitted runs, whatever became of the file since."""

from __future__ import annotations

from pathlib import Path

from interlock import Interlock
from interlock.core.contract import contract_of
from interlock.registry.source import load
from tests.gateway.test_interleavings import admit

SOURCE = """
from interlock import tool

def helper():
    return "as admitted"

@tool(version="1.0.0", mutation_class="read_only", namespace="pinned", sandbox=True, timeout_s=20)
def say() -> str:
    "Say what the helper says."
    return helper()
"""


async def test_an_edited_file_is_not_what_runs_and_is_another_version(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "pinned_tool.py"
    file.write_text(SOURCE)
    (say,) = load(str(file))[1]
    async with Interlock.open(home, housekeeping=False) as lock:
        await admit(lock, say)
        assert (await lock.call("pinned.say")).unwrap() == "as admitted"
        # Neither the function nor its handlers are edited, only what they call.
        file.write_text(SOURCE.replace("as admitted", "as edited"))
        assert (await lock.call("pinned.say")).unwrap() == "as admitted"
    (edited,) = load(str(file))[1]
    assert contract_of(edited.manifest).digest != contract_of(say.manifest).digest
