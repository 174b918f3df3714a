"""`interlock calls checkpoints`: a line for each, and with --json the states."""

from __future__ import annotations

from interlock import Interlock
from tests.support import checkpoint_tools as tools
from tests.support.calls import admit
from tests.support.cli import Cli


async def test_checkpoints_are_listed_with_label_time_and_size_and_as_documents(fresh: Cli) -> None:
    async with Interlock.open(fresh.home, housekeeping=False) as app:
        await admit(app, *tools.TOOLS)
        script = [["insist", "begun", {"at": 1}], ["insist", "phase_complete", [0] * 100]]
        call = (await app.call("check.awaits", {"script": script})).invocation_id
    heads, *lines = fresh("calls", "checkpoints", call[:20]).out.splitlines()
    assert heads.split() == ["when", "label", "type", "size"]
    assert [line.split()[-4:] for line in lines] == [
        ["begun", "named", "8", "bytes"], ["phase_complete", "macro", "201", "bytes"],
    ]  # fmt: skip
    told = fresh.ask("calls", "checkpoints", call)["checkpoints"]
    assert [(one["label"], one["state"]) for one in told] == [("begun", {"at": 1}), ("phase_complete", [0] * 100)]
    assert fresh("calls", "show", call).out.count("bytes") == 2
