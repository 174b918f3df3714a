"""Files that calls leave: kept with the result and for its caller alone, or refused for what is wrong with them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Caller, Failure, Interlock, Result
from interlock.api.service import Service
from interlock.audit.retention import expire_payloads
from interlock.call.artifacts import File, refer
from interlock.cli.artifacts import check, save
from interlock.contract.manifest import Sandboxing, parse_manifest
from interlock.contract.standard import ToolResult
from interlock.privacy.scrub import holds
from interlock.registry.source import load
from tests.support import artifact_tools as files
from tests.support.calls import admit, code, records
from tests.support.cli import Cli
from tests.support.programs import TEXT, manifest, written
from tests.support.stores import refusing

pytestmark = pytest.mark.usefixtures("module_leaves_nothing_behind")
ON_MODULE = pytest.mark.asyncio(loop_scope="module")
TOOLS = (files.leave, files.misuse, files.spill, files.report, files.none, files.outside)
CANARY = 'a "lent" cänary'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts") / "home"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(home: Path) -> AsyncGenerator[Interlock]:
    """One for all tests here: each looks at its own calls, and the sandbox is warm."""
    async with Interlock.open(home, housekeeping=False) as opened:
        await admit(opened, *TOOLS)
        yield opened


def in_base64(contents: dict[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in contents.items()}


def kept(app: Interlock, result: Result) -> int:
    """How many files of a call are in the store."""
    return app.journal.reader.all(
        "SELECT count(*) FROM payload WHERE ref LIKE 'payload:' || ? || '.%'", (result.invocation_id,)
    )[0][0]


# What is kept


@ON_MODULE
async def test_files_come_back_by_reference_with_their_hashes_and_are_their_callers_alone(app: Interlock) -> None:
    contents = {"a.csv": b"a,b\n", "sub/ü b.bin": bytes(range(256)), "empty": b""}
    result = await app.call("file.leave", files=in_base64(contents))
    assert result.unwrap() == 3
    left = {one.path: one for one in result.artifacts}
    assert left.keys() == contents.keys()
    for path, content in contents.items():
        one = left[path]
        assert (one.size, one.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert await app.read_payload(one.ref) == content
        with pytest.raises(Failure, match="no payload"):
            await app.read_payload(one.ref, caller=Caller(id="local:other"))
    (record,) = records(app, result.invocation_id)
    assert record["artifacts"] == [one.document() for one in result.artifacts]
    assert (await Service(app).calls.status(result.invocation_id, app.caller))["artifacts"] == record["artifacts"]
    assert (await app.call("file.misuse", what="nothing")).artifacts == ()


@ON_MODULE
async def test_the_result_object_of_the_standard_names_them(app: Interlock) -> None:
    result = await app.call("file.leave", files=in_base64({"a": b"x"}))
    document = orjson.loads(orjson.dumps(result.document()))
    ToolResult.parse(document)
    (one,) = result.artifacts
    assert document["artifact_refs"] == [one.ref]
    item = {"type": "artifact_ref", "ref": one.ref, "path": "a", "size_bytes": 1, "sha256": one.sha256}
    assert document["content"][1:] == document["model_facing_content"][1:] == [item]


@ON_MODULE
async def test_a_large_result_and_files_are_kept_apart(app: Interlock, tmp_path: Path) -> None:
    both = manifest(
        "both", ["sh", "-c", "echo left > $INTERLOCK_OUT/one; printf two > /tmp/out/two; cat"],
        parameters={"text": TEXT}, sandbox={"artifacts": 2}, max_inline_chars=100, execution={"stdin": "text"},
    )  # fmt: skip
    _, (tool,) = load(written(tmp_path / "both.json", both))
    await admit(app, tool)
    result = await app.call("prog.both", text="x" * 200)
    assert result.ok
    assert result.persistence.ref is not None
    assert [await app.read_payload(one.ref) for one in result.artifacts] == [b"left\n", b"two"]
    assert orjson.loads(await app.read_payload(result.persistence.ref)) == "x" * 200


@ON_MODULE
async def test_they_are_gone_when_payloads_are_and_their_record_stays(app: Interlock) -> None:
    result = await app.call("file.leave", files=in_base64({"a": b"x", "b": b"y"}))
    assert kept(app, result) == 2
    await app.journal.commit(lambda tx: tx.execute("UPDATE payload SET expires_ms = 0") and None)
    assert await expire_payloads(app.journal) >= 2
    with pytest.raises(Failure, match="expired"):
        await app.read_payload(result.artifacts[0].ref)
    (record,) = records(app, result.invocation_id)
    assert len(record["artifacts"]) == 2


@ON_MODULE
async def test_a_replay_gives_the_same_files_again(app: Interlock) -> None:
    first = await app.call("file.report", {"number": 1}, key="k")
    again = await app.call("file.report", {"number": 1}, key="k")
    assert again.replayed
    assert again.artifacts == first.artifacts != ()
    assert (await app.call("file.report", {"number": 1}, key="k2")).artifacts != first.artifacts
    assert records(app, again.invocation_id)[0]["artifacts"] == [one.document() for one in first.artifacts]
    assert (kept(app, first), kept(app, again)) == (1, 0)


@ON_MODULE
async def test_who_only_looks_or_undoes_leaves_nothing(app: Interlock) -> None:
    looked = await app.call("file.report", {"number": 2}, dry_run=True)
    assert (looked.unwrap()["impact"], looked.artifacts) == ("False", ())
    done = await app.call("file.report", {"number": 2}, key="done")
    undone = await app.undo(done.invocation_id, key="u")
    assert undone.ok, undone.error
    assert undone.artifacts == ()
    assert [kept(app, one) for one in (looked, done, undone)] == [0, 1, 0]


@ON_MODULE
async def test_files_and_the_record_of_success_are_written_together_or_not_at_all(app: Interlock) -> None:
    with refusing(app.home, "payload", "NEW.ref LIKE '%.2'"):
        failed = await app.call("file.leave", files=in_base64({"a": b"x", "b": b"y"}))
    assert not failed.ok
    assert kept(app, failed) == 0
    assert "artifacts" not in str(records(app, failed.invocation_id))
    assert (await app.call("file.leave", files=in_base64({"a": b"x", "b": b"y"}))).ok


# What is not


@pytest.mark.parametrize(
    ("what", "expected", "words"),
    [
        ("many", "E3407", "4 files"),
        ("thousands", "E3407", "4 files"),
        ("large", "E3407", "the size of its files"),
        ("large together", "E3407", "the size of its files"),
        ("sparse", "E3407", "the size of its files"),
        ("giant", "E3407", "storage"),
        ("growing", "E3407", "the size of its files"),
        ("deep", "E3407", "the length of a file's path"),
        ("long", "E3407", "the length of a file's path"),
        ("no text", "E3404", "not plain text"),
        ("lines", "E3404", "not plain text"),
        ("terminal", "E3404", "not plain text"),
        ("reversed", "E3404", "not plain text"),
        ("forged", "E3404", "a result that can be read"),
        ("twice", "E3404", "a result that can be read"),
        ("unreadable", "E3401", "UnreadableFile"),
        ("failure", "E3401", "ValueError"),
    ],
)
@ON_MODULE
async def test_what_nobody_could_keep_fails_the_call_and_nothing_of_it_is_kept(
    app: Interlock, what: str, expected: str, words: str
) -> None:
    result = await app.call("file.misuse", what=what)
    assert code(result) == expected
    assert result.error is not None
    assert words in result.error.message
    assert (result.artifacts, kept(app, result)) == ((), 0)
    assert (await app.call("file.misuse", what="nothing")).ok


@pytest.mark.parametrize(("what", "found"), [("links", {"file": b"kept"}), ("linked", {}), ("removed", {})])
@ON_MODULE
async def test_links_and_pipes_are_no_files_and_none_is_followed(
    app: Interlock, what: str, found: dict[str, bytes]
) -> None:
    result = await app.call("file.misuse", what=what)
    assert result.ok, result.error
    assert {one.path: await app.read_payload(one.ref) for one in result.artifacts} == found


@ON_MODULE
async def test_a_program_that_leaves_a_file_nobody_can_read_is_not_one_that_could_not_be_started(
    app: Interlock, tmp_path: Path
) -> None:
    shut = manifest("shut", ["sh", "-c", "umask 777; > out/a"], sandbox={"artifacts": 1})
    _, (tool,) = load(written(tmp_path / "shut.json", shut))
    await admit(app, tool)
    assert code(await app.call("prog.shut")) == "E3401"


@pytest.mark.parametrize("what", ["as it is", "base64", "escaped", "in UTF-16", "in hex", "an argument", "in its name"])
@ON_MODULE
async def test_a_file_with_something_private_in_it_is_not_kept(app: Interlock, home: Path, what: str) -> None:
    await app.secrets.set("file/token", CANARY, by="local:test")
    result = await app.call("file.spill", what=what, pin="pin-canary-19")
    assert code(result) == "E3304"
    assert kept(app, result) == 0
    told = str(result.document()) + str(records(app, result.invocation_id))
    stored = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())  # noqa: ASYNC240 - a test may wait for its disk
    assert "pin-canary-19" not in told
    assert CANARY not in told
    assert not holds([stored], ["pin-canary-19", CANARY])
    assert (await app.call("file.spill", what="nothing", pin="pin-canary-19")).ok


@ON_MODULE
async def test_personal_data_in_the_name_of_a_file_is_not_written_down(app: Interlock) -> None:
    result = await app.call("file.leave", files=in_base64({"ann@example.org": b"x", "bob@example.org": b"y"}))
    assert [one.path for one in result.artifacts] == ["[EMAIL_REDACTED]", "[EMAIL_REDACTED].2"]
    assert "example.org" not in str(records(app, result.invocation_id))
    assert await app.read_payload(result.artifacts[1].ref) == b"y"


# Where it is said


@ON_MODULE
async def test_without_a_word_in_the_manifest_there_is_nowhere_to_leave_files(app: Interlock) -> None:
    assert (await app.call("file.none", what="look")).unwrap() == "False"
    for tool in ("file.none", "file.outside"):
        refused = await app.call(tool, what="out")
        assert refused.error is not None
        assert (refused.error.code, "Sandboxing(artifacts=…)" in refused.error.message) == ("E3411", True)


def test_files_are_said_of_sandboxed_tools_alone(tmp_path: Path) -> None:
    assert files.leave.manifest.sandbox == Sandboxing(artifacts=40)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"artifacts": 2}, "write sandbox: {artifacts: …}"),
        ({"sandbox": {"artifacts": 1001}}, "/sandbox/artifacts"),
        ({"sandbox": {"artifacts": True}}, "/sandbox/artifacts"),
    ]
    for said, words in wrong:
        with pytest.raises(Failure, match="refused") as refusal:
            load(written(tmp_path / "wrong.json", manifest("wrong", ["true"], **said)))
        assert words in refusal.value.message
    upstream = manifest("far", ["true"], sandbox={"artifacts": 1})
    upstream["execution"] = {"kind": "upstream", "target": "far", "native": {"name": "x"}}
    with pytest.raises(Failure, match="leaves no artifacts"):
        parse_manifest(upstream)


# Any files


_NAME = st.text(st.characters(categories=["L", "N", "P", "S"], exclude_characters="/"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and name.isprintable() and "@" not in name
)
_TREE = st.dictionaries(
    _NAME, st.one_of(st.binary(max_size=40), st.dictionaries(_NAME, st.binary(max_size=9), max_size=3))
)


def _flat(tree: dict[str, Any]) -> dict[str, bytes]:
    flat: dict[str, bytes] = {}
    for name, item in tree.items():
        flat |= {name: item} if isinstance(item, bytes) else {f"{name}/{below}": one for below, one in item.items()}
    return flat


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_TREE.map(_flat).filter(lambda flat: len(flat) <= 40))
@ON_MODULE
async def test_whatever_is_left_comes_back_as_it_was(app: Interlock, tree: dict[str, bytes]) -> None:
    result = await app.call("file.leave", files=in_base64(tree))
    assert result.ok, result.error
    found = {one.sha256: await app.read_payload(one.ref) for one in result.artifacts}
    assert len(result.artifacts) == len(tree)
    assert sorted(found.values()) == sorted(set(tree.values()))
    shown = {one.path for one in result.artifacts}
    assert shown == tree.keys() or any("REDACTED" in path for path in shown)


@given(st.lists(st.sampled_from(["a", "a.2", "a.3", "a.2.3", "b"]), max_size=8))
def test_no_two_files_of_a_call_are_told_under_one_path_or_reference(shown: list[str]) -> None:
    names = iter(shown)
    told = refer("01A", [File(str(n), b"") for n, _ in enumerate(shown)], lambda _: next(names))
    assert len({one.path for one in told}) == len({one.ref for one in told}) == len(shown)


# On disk


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=_TREE.map(_flat))
def test_files_are_written_below_the_directory_and_over_nothing(tmp_path_factory: Any, tree: dict[str, bytes]) -> None:
    top: Path = tmp_path_factory.mktemp("saved")
    save(tree, top / "in")
    assert {str(path.relative_to(top / "in")): path.read_bytes() for path in top.rglob("*") if path.is_file()} == tree
    if tree:
        with pytest.raises(Failure, match="already"):
            save({**tree, "new file of its own": b""}, top / "in")
        assert not (top / "in" / "new file of its own").exists()


@pytest.mark.parametrize("path", ["link/a", "link", "../a", "file/a"])
def test_no_file_is_written_outside_of_the_directory(tmp_path: Path, path: str) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "file").touch()
    (inside / "link").symlink_to(outside)
    with pytest.raises(Failure) as refused:
        save({path: b"x"}, inside)
    assert refused.value.code == "E3410"
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "a").exists()


def test_no_file_that_is_there_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"mine")
    with pytest.raises(Failure) as refused:
        save({"a": b"x", "b": b"x"}, tmp_path)
    told = refused.value
    assert (told.code, told.resolution) == ("E3410", "choose another directory")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b").read_bytes() == b"mine"


def test_a_file_that_is_not_what_the_journal_says_is_not_written() -> None:
    (one,) = refer("01A", [File("a", b"as it was")], str)
    assert check({one: b"as it was"}) == {"a": b"as it was"}
    with pytest.raises(Failure, match="audit verify"):
        check({one: b"as it is"})


def test_from_the_command_line_files_are_shown_and_fetched(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    script = 'mkdir out/parts; printf %s "$1" > out/parts/one; printf rest > out/two; echo 2'
    split = manifest(
        "split", ["sh", "-c", script, "sh", "{text}"],
        {"type": "integer"}, parameters={"text": TEXT}, sandbox={"artifacts": 2}, execution={"parse": "json"},
    )  # fmt: skip
    written(tmp_path / "split.json", split)
    assert cli("tools", "add", "split.json").code == 0
    result = cli.call("prog.split", {"text": "hello"})
    call, digest = result["invocation_id"], hashlib.sha256(b"hello").hexdigest()
    assert [one["sha256"] for one in result["content"] if one.get("path") == "parts/one"] == [digest]
    assert "parts/one   5 bytes   payload:" in cli("calls", "show", call).out
    assert f"It left the file parts/one (5 bytes, sha256 {digest})." in cli("audit", "explain", call).out
    saved = cli.ask("calls", "save", call, "got")["saved"]
    assert [one["path"] for one in saved] == ["parts/one", "two"]
    assert saved[0]["sha256"] == digest
    assert (tmp_path / "got/parts/one").read_text() == "hello"
    assert (tmp_path / "got/two").read_text() == "rest"
