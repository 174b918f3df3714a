"""Sandboxed tools on machines that share a PostgreSQL store: they run from their text there, and need no file."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from interlock import Interlock
from interlock.contract.source_text import stored_text, tool_of_text
from interlock.core.errors import Failure
from interlock.registry.source import load
from interlock.store.postgres.connection import PostgresConnection
from tests.support.calls import until
from tests.support.cli import Cli
from tests.support.postgres import Server

NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")
TOOL = '''
"""Notes of a session, made in the sandbox. A line as long as this one, with “quotes” that are no ASCII characters."""
from typing import Annotated

import interlock
from interlock import Context as Ctx, Effect, Field, Preview, tool
from words import greeting

Name = Annotated[str, Field(description="a name", examples=["a"])]
Loud = Annotated[bool, Field(description="whether it is said loudly", examples=[False])]


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="notes", sandbox=True,
    effects=[Effect("note:{name}", "CREATE")],
)
async def note(name: Name, ctx: Ctx, loud: Loud = False) -> dict[str, str]:  # a comment
    """Note a name in the session."""
    ctx.session[name] = greeting(name)
    # A comment that is no part of the function.
    return dict(ctx.session)


@note.preview
def _(name: str, loud: bool = False) -> Preview:
    return Preview(impact=f"a note about {name}")


@note.compensate
def _(ctx: "interlock.Context", name: str) -> None:
    del ctx.session[name]


@tool(version="1.0.0", mutation_class="read_only", namespace="notes", sandbox=True)
def whole(name: Name) -> str:
    """Say a greeting."""
    return greeting(name)
'''
WORDS = "def greeting(name):\n    return 'hello ' + name\n"
MANIFEST = """
tool_id: count
namespace: notes
version: 1.0.0
name: Count letters
description: How many letters a word has.
provider: local
protocol: native
mutation_class: read_only
parameters:
  type: object
  required: [word]
  properties:
    word: {type: string, description: the word, examples: [four]}
result_schema: {type: integer}
required_permissions: []
idempotency: {}
observability: {}
timeout_class: standard
sandbox: {}
execution: {target: "counting.py:count"}
"""


def machines(tmp_path: Path, store: str, more: str = "") -> tuple[Cli, Cli]:
    """Two machines. Only the first one has the files of the tools, which it has added."""
    clis: list[Cli] = []
    for name in "ab":
        (tmp_path / name).mkdir()
        clis.append(Cli(tmp_path / name, {"INTERLOCK_STORE": store}))
    first, second = clis
    (first.path / "note_tools.py").write_text(TOOL + more)
    (first.path / "words.py").write_text(WORDS)
    (first.path / "counting.py").write_text("def count(word):\n    return len(word)\n")
    (first.path / "counting.yaml").write_text(MANIFEST)
    for target in ("note_tools.py", "counting.yaml"):
        added = first("tools", "add", target)
        assert added.code == 0, added.err
    shutil.copytree(first.home, second.home, ignore=NOT_COPIED)
    return first, second


def test_a_machine_without_the_files_runs_and_undoes_what_another_has_admitted(
    tmp_path: Path, postgres_server: Server
) -> None:
    first, second = machines(tmp_path, postgres_server.new_schema())
    said = second.call("notes.whole", {"name": "you"})
    assert said["structured_content"] == "hello you", said
    assert second.call("notes.count", {"word": "four"})["structured_content"] == 4
    made = second.call("notes.note", {"name": "a"}, "--key", "k", "--session", "s")
    assert made["structured_content"] == {"a": "hello a"}, made
    again = first.call("notes.note", {"name": "a"}, "--key", "k", "--session", "s")
    assert again["structured_content"] == {"a": "hello a"}  # replayed
    undone = second("calls", "undo", made["invocation_id"], "--key", "undo")
    assert undone.code == 0, undone.err
    assert first.call("notes.note", {"name": "b"}, "--key", "l", "--session", "s")["structured_content"] == {
        "b": "hello b"
    }
    assert "3 of 3 added from files and modules load as they were admitted" in second("doctor").out

    # An edited file is not what runs, on any machine: it is what was admitted.
    (first.path / "words.py").write_text(WORDS.replace("hello", "goodbye"))
    assert first.call("notes.whole", {"name": "you"})["structured_content"] == "hello you"


async def test_a_text_that_is_stored_later_is_found_by_machines_that_run(
    tmp_path: Path, postgres_server: Server
) -> None:
    """A tool of a version that stored no texts, which is added once more."""
    store = postgres_server.new_schema()
    first, second = machines(tmp_path, store)
    with closing(PostgresConnection(store)) as owner:
        owner.execute("DELETE FROM fact WHERE name LIKE 'text:%'")
        owner.execute("DELETE FROM tool_source")
    async with Interlock.open(second.home, store=store, housekeeping=False) as app:
        refused = (await app.call("notes.whole", name="you")).error
        assert refused is not None
        assert refused.code == "E3108"
        added = await asyncio.to_thread(first, "tools", "add", "note_tools.py")
        assert added.code == 0, added.err

        async def runs() -> bool:
            return (await app.call("notes.whole", name="you")).ok

        await until(runs)


async def test_a_large_text_is_read_apart_from_the_event_loop(tmp_path: Path, postgres_server: Server) -> None:
    store = postgres_server.new_schema()
    _, second = machines(tmp_path, store, "# A line of a module that has many of them.\n" * 1000)
    on_the_loop = Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            on_the_loop[frame.f_code.co_qualname] += 1

    async with Interlock.open(second.home, store=store, housekeeping=False) as app:
        sys.setprofile(note)
        try:
            result = await app.call("notes.whole", name="you")
        finally:
            sys.setprofile(None)
    assert result.unwrap() == "hello you"
    assert on_the_loop["Interlock.call"] > 0
    assert on_the_loop["tool_of_text"] == 0


def test_a_text_that_was_changed_in_the_store_is_not_run(tmp_path: Path, postgres_server: Server) -> None:
    store = postgres_server.new_schema()
    first, second = machines(tmp_path, store)
    edit = "convert_to(replace(convert_from(body, 'UTF8'), 'hello', 'jello'), 'UTF8')"
    with closing(PostgresConnection(store)) as owner:
        owner.execute(f"UPDATE tool_source SET body = {edit}")
        for cli in (first, second):
            error = cli.call("notes.whole", {"name": "you"})["error"]
            assert error["error_code"] == "E3108"
            assert "the text of the tool in the store is not what was stored" in error["message"]
        assert "is not what was stored" in second("doctor").out
        # Not even if its digest was changed as well: the manifest states another one.
        owner.execute("UPDATE tool_source SET digest = encode(sha256(body), 'hex')")
        owner.execute(
            "UPDATE fact SET value = (SELECT digest FROM tool_source WHERE position('jello'::bytea IN body) > 0)"
            " WHERE name LIKE 'text:%' AND value NOT IN (SELECT digest FROM tool_source)"
        )
        for cli in (first, second):
            error = cli.call("notes.whole", {"name": "you"})["error"]
            assert error["error_code"] == "E3108"
            assert "notes.whole@1.0.0 in the store is another one" in error["message"]
        assert "in the store is another one" in second("doctor").out


@pytest.fixture
def loaded(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "words.py").write_text(WORDS)
    (tmp_path / "note_tools.py").write_text(TOOL.replace("from words import greeting", "greeting = str"))
    return {tool.manifest.tool_id: tool for tool in load(str(tmp_path / "note_tools.py"))[1]}


def test_a_tool_made_of_its_text_has_the_contract_and_the_parameters_of_the_loaded_one(loaded: dict[str, Any]) -> None:
    for tool in loaded.values():
        body = stored_text(tool)
        assert body is not None
        made = tool_of_text(tool.manifest, body)
        assert made.manifest == tool.manifest
        assert (made.is_async, made.takes_context) == (tool.is_async, tool.takes_context)
    made = tool_of_text(loaded["note"].manifest, stored_text(loaded["note"]) or b"")
    assert made.undo_takes_context
    assert made.undo_arguments({"name": "a", "loud": True}, None) == loaded["note"].undo_arguments(
        {"name": "a", "loud": True}, None
    )
    with pytest.raises(Failure) as only_inside:
        made.function(name="a")
    assert only_inside.value.code == "E3405"


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("return greeting(name)", "return greeting(name) + '!'"),
        ("return Preview(impact=f", "return Preview(impact='' + f"),
        ("# A comment", "# Another comment"),
        ("def whole(name: Name)", "def whole(name: Name, other: str = '')"),
    ],
)
def test_no_tool_is_made_of_another_text(loaded: dict[str, Any], was: str, becomes: str) -> None:
    for tool in loaded.values():
        body = (stored_text(tool) or b"").decode()
        assert was in body
        with pytest.raises(Failure) as refused:
            tool_of_text(tool.manifest, body.replace(was, becomes).encode())
        assert refused.value.code == "E3103"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"7", b'["a", "b"]', b'[7, "", []]', b'["", "", [7]]', b'["", "", [["a", 7]]]',
        b'["", "", [["a", [7, 1]]]]', b'["", "", [[[], ["", 1]]]]',
    ],
)  # fmt: skip
def test_no_tool_is_made_of_a_text_of_another_form(loaded: dict[str, Any], body: bytes) -> None:
    with pytest.raises(Failure) as refused:
        tool_of_text(loaded["whole"].manifest, body)
    assert refused.value.code == "E3103"


def test_a_tool_with_an_annotation_of_many_parts_is_made_of_its_text(tmp_path: Path) -> None:
    file = tmp_path / "many.py"
    file.write_text(
        "import interlock\nfrom typing import Annotated\nfrom interlock import Field, tool\n\n"
        '@tool(version="1.0.0", mutation_class="read_only", namespace="notes", sandbox=True)\n'
        f"def many(a: Annotated[{' | '.join(['int'] * 400)}, Field(description='a', examples=[1])],"
        " ctx: interlock.Context) -> int:\n"
        '    """Say the number one."""\n    return 1\n'
    )
    (many,) = load(str(file))[1]
    assert tool_of_text(many.manifest, stored_text(many) or b"").takes_context


def test_of_a_tool_that_is_not_declared_at_the_top_of_its_module_no_text_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    text = TOOL.replace("from words import greeting", "greeting = str").partition("@tool(version")[0]
    file.write_text(
        text.replace("@note.preview\n", "").replace("def _(name: str, loud", "def shown(name: str, loud")
        + "\n\nnote.preview(shown)\n"
    )
    (note,) = load(str(file))[1]
    assert "preview" in note.handlers
    assert stored_text(note) is None
