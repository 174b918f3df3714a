"""Drafts: tools that a developer is writing. Their session calls them; to everybody else there is no such tool."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from interlock import Failure, Interlock
from interlock.api.drafts import DraftSession
from interlock.call.context import Caller
from tests.support.calls import code, records
from tests.support.wires import WIRES, wired

HEAD = """
from typing import Annotated
from interlock import Context, Effect, Example, Field, Preview, tool
from helper import FACTOR

Number = Annotated[int, Field(description="a number", examples=[2])]
"""
GOOD = '''

@tool(version="1.0.0", mutation_class="read_only")
def scale(number: Number) -> int:
    """Multiply a number by the factor of the house."""
    return number * FACTOR


@tool(version="1.0.0", mutation_class="read_only", examples=[Example({"number": 2}, live=False)])
async def scale_twice(ctx: Context, number: Number) -> int:
    """Multiply a number twice, by way of the other tool."""
    return await ctx.call("mine.scale", number=await ctx.call("mine.scale", number=number))
'''
WRITE = '''

@tool(version="2.0.0-rc.1", mutation_class="write_irreversible", effects=[Effect("house:{number}", "DELETE")])
def wreck(number: Number) -> str:
    """Tear a house down."""
    return f"no more {number}"


@wreck.preview
def _(number: int) -> Preview:
    return Preview(impact=f"{number} would be gone")
'''
BAD = '''

@tool(version="one", mutation_class="read_only")
def misnumbered(number: Number) -> int:
    """Say a version that is none."""
    return number


@tool(version="1.0.0", mutation_class="write_reversible", effects=[Effect("house", "UPDATE")])
def unreadable(number: Number) -> int:
    """Have an undo of which nobody knows what it takes."""
    return number


@unreadable.compensate
def _(number: "Nowhere") -> None: ...


@tool(version="1.0.0", mutation_class="read_only")
def lying(number: Number) -> int:
    """Return something else than it declares."""
    return "a word"


@tool(version="1.0.0", mutation_class="write_reversible")
def careless(number: Number) -> int:
    """Change something that it does not name."""
    return number
'''


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the file of a developer, and the module beside it that it imports."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "helper", raising=False)  # that of another test

    def save(text: str, factor: int = 3) -> Path:
        (tmp_path / "helper.py").write_text(f"FACTOR = {factor}\n")
        (tmp_path / "mine.py").write_text(HEAD + text)
        return tmp_path / "mine.py"

    return save


def line_of(path: Path, function: str) -> int:
    """The line of a function's decorator, where Python has it begin."""
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines) if f"def {function}(" in line)


async def test_no_other_caller_finds_a_draft_over_any_wire_or_process(home: Path, write: Callable[..., Path]) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        session = DraftSession(app, write(GOOD))
        assert [one.tool for one in await session.load()] == ["mine.scale@1.0.0-dev.1", "mine.scale_twice@1.0.0-dev.1"]
        assert (await session.call("mine.scale", {"number": 2})).unwrap() == 6
        assert (await session.call("scale_twice", {"number": 2})).unwrap() == 18, "drafts find each other"
        async with wired(app) as wires:  # even of the process that holds the drafts
            for door in WIRES:
                for name in ("mine.scale", "scale", "mine.scale@1.0.0-dev.1"):
                    heard = await wires.call(door, name, {"number": 2})
                    assert heard.envelope is None or heard.failure["error_code"] == "E3101", (door, name, heard.text)
                    assert "dev.1" not in heard.text.replace(name, ""), (door, name, heard.text)
                    assert heard.data is None, (door, name, heard.text)
            asked = {"tool_id": "mine.scale", "tool_version": "1.0.0-dev.1", "parameters": {"number": 2}}
            for path, body in (("/v1/tools/invoke", asked), ("/rpc", {"method": "tools.invoke", "params": asked})):
                answer = await wires.http.post(
                    path, json={"jsonrpc": "2.0", "id": 1, **body} if path == "/rpc" else body
                )
                assert "E3101" in answer.text, answer.text
            for listing in ("/v1/tools", "/v1/tools?q=scale", "/v1/tools/mine.scale"):
                assert "dev.1" not in (await wires.http.get(listing)).text
            assert "scale" not in await wires.mcp("tools/list", {}, modern=True)
        # Not even the same person, outside of the session.
        assert code(await app.call("mine.scale", number=2)) == "E3101"
        assert code(await app.call("mine.scale", number=2, version="1.0.0-dev.1")) == "E3101"
        async with Interlock.open(home, housekeeping=False) as other:
            assert code(await other.call("mine.scale", number=2, version="1.0.0-dev.1")) == "E3101"
        drafted = [one for one in records(app, kind="registry") if one["event"] == "tool.drafted"]
        assert [one["tool"] for one in drafted] == ["mine.scale@1.0.0-dev.1", "mine.scale_twice@1.0.0-dev.1"]


async def test_beside_a_published_version_the_session_gets_the_draft_and_others_what_is_published(
    home: Path, write: Callable[..., Path]
) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        path = write(GOOD)
        assert all(one.admitted for one in await app.add_from(str(path)))
        session = DraftSession(app, path)
        write(GOOD.replace("number * FACTOR", "number * FACTOR + 1"))
        (note,) = (await session.load())[0].notes
        assert "1.0.0 is published with other content" in note, "told before it would be refused"
        assert (await app.call("mine.scale", number=2)).unwrap() == 6
        assert (await session.call("mine.scale", {"number": 2})).unwrap() == 7
        assert (await session.call("scale_twice", {"number": 2})).unwrap() == 22, "a draft calls the other draft"
        assert (await app.call("mine.scale", number=2)).unwrap() == 6


async def test_drafts_are_numbered_on_and_take_up_what_changed_beside_them(
    home: Path, write: Callable[..., Path]
) -> None:
    path = write(GOOD)
    async with Interlock.open(home, housekeeping=False) as app:
        session = DraftSession(app, path)
        await session.load()
        assert session.files.keys() == {path, path.with_name("helper.py")}
        write(GOOD, factor=5)
        assert (await session.load())[0].tool == "mine.scale@1.0.0-dev.2"
        assert (await session.call("scale", {"number": 2})).unwrap() == 10
    async with Interlock.open(home, housekeeping=False) as app:
        session = DraftSession(app, write(WRITE))
        assert [one.tool for one in await session.load()] == ["mine.wreck@2.0.0-rc.1.dev.1"]
        write(GOOD)
        assert (await session.load())[0].tool == "mine.scale@1.0.0-dev.3"
        with pytest.raises(Failure, match=r"`wreck` is no draft that can be called; there are: `mine.scale`"):
            await session.call("wreck", {"number": 1}, key="k")


async def test_everything_that_is_wrong_is_told_at_once_with_file_line_and_tool(
    home: Path, write: Callable[..., Path]
) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        path = write(GOOD + BAD)
        session = DraftSession(app, path)
        told = await session.load()
        assert [(one.tool.partition("@")[0], one.line) for one in told] == [
            ("mine.scale", line_of(path, "scale")),
            ("mine.scale_twice", line_of(path, "scale_twice")),
            ("misnumbered", line_of(path, "misnumbered")),
            ("unreadable", line_of(path, "unreadable")),
            ("mine.lying", line_of(path, "lying")),
            ("mine.careless", line_of(path, "careless")),
        ]
        assert {one.file for one in told} == {str(path)}
        words = {one.tool.partition("@")[0].removeprefix("mine."): " ".join(one.faults) for one in told}
        assert words["scale"] == words["scale_twice"] == ""
        assert 'write version="1.0.0"' in words["misnumbered"]
        assert "name 'Nowhere' is not defined" in words["unreadable"]
        assert "contract tests failed" in words["lying"]
        assert "effects=[Effect(" in words["careless"]
        assert "add a @tool.compensate handler" in words["careless"]
        # A file that does not run to its end: what was refused above is told too, and the drafts stay as they were.
        write(BAD + "\n1 / 0\n")
        told = await session.load()
        assert [one.tool for one in told] == ["misnumbered", "unreadable", "mine.py"]
        assert (told[-1].line, told[-1].faults) == (
            len(path.read_text().splitlines()),
            ("ZeroDivisionError: division by zero",),
        )
        assert (await session.call("scale", {"number": 2})).unwrap() == 6
        # The fault may be in what the file imports.
        path.with_name("helper.py").write_text("FACTOR = (\n")
        (broken,) = await session.load()
        assert (Path(broken.file).name, broken.line) == ("helper.py", 1)
        write(GOOD)
        assert all(one.callable for one in await session.load())


async def test_a_call_that_a_person_must_agree_to_goes_on_in_its_session_alone(
    home: Path, write: Callable[..., Path]
) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        session = DraftSession(app, write(WRITE))
        await session.load()
        pending = await session.call("wreck", {"number": 7}, key="k")
        assert pending.pending
        ticket = pending.metadata["pending"]["ticketId"]
        boss = Caller(id="local:boss", groups=frozenset({"approvers"}))
        await app.approvals.approve(ticket, by=boss, comment="go")
        assert await app.approved_calls.resume_all() == [], "what continues approved calls leaves it alone"
        with pytest.raises(Failure, match="is a draft; send the call again in the session"):
            await app.approved_calls.resume(ticket)
        assert (await session.call("wreck", {"number": 7}, key="k")).unwrap() == "no more 7"


async def test_drafts_need_the_right_to_add_tools_in_person(home: Path, write: Callable[..., Path]) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        app.act_as(Caller(id="local:guest"))
        with pytest.raises(Failure, match="tools:admin, held in person") as raised:
            DraftSession(app, write(GOOD))
        assert raised.value.code == "E3206"


async def test_a_pre_release_is_admitted_by_its_contract_tests(home: Path, write: Callable[..., Path]) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        (admission,) = await app.add_from(str(write(WRITE)))
        assert (admission.tool, admission.admitted) == ("mine.wreck@2.0.0-rc.1", True)
