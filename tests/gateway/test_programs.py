"""Programs as tools: a manifest and no Python. Words stay words, and a program ends as what it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from interlock import Caller, Failure, Interlock
from interlock.contract.manifest import Execution
from interlock.data.schema import Json
from interlock.registry.source import load
from interlock.telemetry.w3c import read as read_trace
from tests import processes
from tests.support.calls import code, publish, records
from tests.support.cli import Cli
from tests.support.programs import MARK, NAMED, TEXT, TOOLS, manifest, written

REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))


@pytest_asyncio.fixture
async def app(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Interlock]:
    monkeypatch.setenv("A_SERVERS_SECRET", "canary-7731")
    _, tools = load(written(tmp_path / "programs.json", *TOOLS))
    async with Interlock.open(home, housekeeping=False) as opened:
        for one in tools:
            await opened.journal.commit(publish(one))
            opened.catalog.attach(one)
        yield opened


HOSTILE = ("a b", "'\"", "$(id)", "`id`", "-rf", "--help", "line\nline", "*", ";id", "", "é\u2028🙂", "{text}", "\\x")


@pytest.mark.shows("Program", "call")
@pytest.mark.proves("EXEC-12")
async def test_arguments_reach_a_program_as_single_literal_words(app: Interlock) -> None:
    for text in HOSTILE:
        assert (await app.call("prog.echo", text=text)).unwrap() == [text]
    assert (await app.call("prog.echo", text="first", more=list(HOSTILE))).unwrap() == ["first", *HOSTILE]
    assert (await app.call("prog.lines", more=["a b", "", "c"])).unwrap() == ["a b", "", "c"]
    assert (await app.call("prog.default")).unwrap() == "unsaid"
    assert (await app.call("prog.option", text="-x y")).unwrap() == "--name=-x y"


@pytest.mark.proves("EXEC-12")
async def test_an_argument_cannot_become_an_option(app: Interlock) -> None:
    assert (await app.call("prog.bare", text="x -v")).unwrap() == "x -v"
    for text in ("-v", "--help", "-"):
        refused = await app.call("prog.bare", text=text)
        assert code(refused) == "E3305"
        (record,) = records(app, refused.invocation_id)
        assert "authorize" not in record["phases"], "nobody should be asked about what cannot be run"
    assert code(await app.call("prog.echo", text="a\0b")) == "E3305"
    assert code(await app.call("prog.echo", text="x" * 200_000)) == "E3308"


@pytest.mark.shows("Program", "errors")
@pytest.mark.proves("EXEC-05")
@pytest.mark.supports("EXEC-12")
async def test_a_failing_program_says_how_it_failed(app: Interlock) -> None:
    failed = await app.call("prog.exits", status=3)
    assert failed.error is not None
    assert failed.error.code == "E3401"
    assert failed.error.details == {"exit_code": 3, "stderr": ["one", "red"]}
    assert (await app.call("prog.exits", status=0)).unwrap() == "out\n"
    assert code(await app.call("prog.flood")) == "E3407"
    assert code(await app.call("prog.missing")) == "E3108"


@pytest.mark.proves("EXEC-05", "EXEC-12")
@pytest.mark.parametrize(("name", "signal"), [("segv", 11), ("quits", 15)])
async def test_the_caller_of_a_program_is_given_the_signal_that_ended_it(
    app: Interlock, name: str, signal: int
) -> None:
    ended = await app.call(f"prog.{name}")
    assert ended.error is not None
    assert (ended.error.code, ended.error.message) == ("E3404", f"prog.{name}@1.0.0 was ended by signal {signal}")
    assert ended.error.details == {"signal": signal, "stderr": ["goodbye"] if name == "quits" else []}
    (record,) = records(app, ended.invocation_id)
    assert (record["externalMappings"][0]["signal"], record["externalMappings"][0]["exit_code"]) == (signal, None)


@pytest.mark.proves("EXEC-12")
async def test_the_call_of_a_program_passes_the_six_phases_and_stops_at_the_one_that_fails(app: Interlock) -> None:
    called = await app.call("prog.option", text="a")
    failed = await app.call("prog.exits", status=3)
    unfit = await app.call("prog.option", text=["a"])
    misfit = await app.call("prog.misfit")
    told = [records(app, one.invocation_id)[0]["phases"] for one in (called, failed, unfit, misfit)]
    assert told == [
        ["request", "validate", "authorize", "execute", "verify", "return"],
        ["request", "validate", "authorize", "execute", "return"],
        ["request", "validate", "return"],
        ["request", "validate", "authorize", "execute", "verify", "return"],
    ]


@pytest.mark.shows("Program", "deadline")
@pytest.mark.proves("EXEC-05", "LIFE-10")
async def test_a_program_that_hangs_is_ended_with_everything_it_started(app: Interlock) -> None:
    assert code(await app.call("prog.hang", timeout_s=0.5)) == "E3402"
    async with asyncio.timeout(60):
        while any(MARK.encode() in line for line in processes.told("cmdline")):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.shows("Program", "results bounded")
@pytest.mark.proves("EXEC-05")
async def test_output_that_is_not_what_was_promised_is_no_result(app: Interlock) -> None:
    torn = await app.call("prog.torn")
    assert torn.error is not None
    assert torn.error.code == "E3404"
    assert "output protocol" in torn.error.message
    assert code(await app.call("prog.binary")) == "E3404"
    assert code(await app.call("prog.misfit")) == "E3303"


@pytest.mark.proves("EXEC-07")
async def test_parameters_come_by_stdin_unless_the_manifest_asks_for_arguments(app: Interlock) -> None:
    arguments: Json = {"text": "by itself", "more": []}
    assert (await app.call("prog.unasked", arguments)).unwrap() == arguments
    assert (await app.call("prog.asked", text="a word")).unwrap() == ["a word", ""]


_MARKED: Json = {"type": "string", "x-sensitivity": "secret"}


@pytest.mark.proves("AUDIT-07")
@pytest.mark.proves("EXEC-07")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("password", {"type": "string"}),
        ("Api_Key", {"type": "string"}),
        ("text", _MARKED),
        ("text", {"type": "array", "items": _MARKED}),
        ("text", {"type": "object", "properties": {"inner": _MARKED}}),
        ("text", {"type": "object", "properties": {"token": {"type": "string"}}}),
        ("text", {"$ref": "#/$defs/hidden"}),
        ("text", {"type": "array", "items": {"$ref": "#/$defs/hidden"}}),
    ],
)
def test_a_sensitive_parameter_is_refused_on_a_command_line_and_not_by_stdin(
    tmp_path: Path, name: str, part: Json
) -> None:
    parameters = {
        "type": "object", "properties": {name: part}, "required": [name], "additionalProperties": False,
        "$defs": {"hidden": _MARKED},
    }  # fmt: skip
    document = manifest("secretive", ["cat", "--", f"{{{name}}}"]) | {"parameters": parameters}
    with pytest.raises(Failure) as refused:
        load(written(tmp_path / "tool.json", document))
    assert "/execution/argv/2" in str(refused.value.details)
    assert "standard input" in str(refused.value.details)
    document["execution"] |= {"argv": ["cat"]}
    _, (loaded,) = load(written(tmp_path / "tool.json", document))
    assert loaded.manifest.address == "prog.secretive"


@pytest.mark.proves("EXEC-12")
async def test_parameters_come_by_stdin_where_the_manifest_says_so(app: Interlock) -> None:
    arguments = {"text": 'a "quoted"\n$(id)', "more": ["é"]}
    assert (await app.call("prog.stdin", arguments)).unwrap() == arguments
    assert (await app.call("prog.words", text="three small words")).unwrap() == 3


@pytest.mark.proves("OBS-02")
@pytest.mark.proves("EXEC-12")
async def test_directory_and_environment_are_what_the_manifest_says(app: Interlock) -> None:
    called = await app.call("prog.env")
    seen = dict(line.split("=", 1) for line in called.unwrap())
    trace = read_trace(seen.pop("TRACEPARENT"))
    assert trace is not None
    assert trace.trace_id == called.trace_id
    assert seen == {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LC_CTYPE": "C.UTF-8",
        "GREETING": "a b", "LANG": "C",
    }  # fmt: skip
    assert (await app.call("prog.where")).unwrap() == "/usr\n"


@pytest.mark.proves("OBS-02")
async def test_a_program_runs_under_the_trace_and_the_tracestate_of_the_caller(app: Interlock) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    called = await app.call("prog.env", trace_id=f"00-{trace_id}-00f067aa0ba902b7-01 vendor=value")
    seen = dict(line.split("=", 1) for line in called.unwrap())
    trace = read_trace(seen["TRACEPARENT"])
    assert trace is not None
    assert (trace.trace_id, called.trace_id, seen["TRACESTATE"]) == (trace_id, trace_id, "vendor=value")


async def test_a_program_reads_what_outside_it_was_promised(app: Interlock, tmp_path: Path) -> None:
    given = tmp_path / "given.txt"
    written(given, {"a": 1})
    reading = manifest("reading", ["cat", "/in/given"], sandbox={"reads": {"given": str(given)}})
    _, (tool,) = load(written(tmp_path / "reading.json", reading))
    await app.journal.commit(publish(tool))
    app.catalog.attach(tool)
    assert (await app.call("prog.reading")).unwrap() == '[{"a": 1}]'


async def test_what_a_program_reads_may_be_named_through_a_link_and_is_found_where_it_leads_now(
    app: Interlock, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "given.txt").write_text(name)
    current = tmp_path / "current"
    current.symlink_to(tmp_path / "first")
    sandbox = {"reads": {"given": str(current / "given.txt"), "all": str(current)}}
    reading = manifest("reading", ["cat", "/in/given", "/in/all/given.txt"], sandbox=sandbox)
    _, (tool,) = load(written(tmp_path / "reading.json", reading))
    await app.journal.commit(publish(tool))
    app.catalog.attach(tool)
    assert (await app.call("prog.reading")).unwrap() == "firstfirst"
    current.unlink()
    current.symlink_to(tmp_path / "second")
    assert (await app.call("prog.reading")).unwrap() == "secondsecond"


@pytest.mark.shows("Program", "credentials")
async def test_a_credential_is_lent_to_a_program_as_a_file(app: Interlock) -> None:
    await app.secrets.set("prog/key", "s3cret-canary", by="local:test")
    said = (await app.call("prog.lent")).unwrap()
    assert said.startswith("13\n[REDACTED]")
    assert said.count("[REDACTED]") == 1


async def test_what_a_program_was_given_is_nowhere_in_the_store(app: Interlock, home: Path) -> None:
    canary = "unlikely-argument-5512"
    await app.call("prog.echo", text=canary)
    await app.call("prog.stdin", text=canary, more=[])
    await app.call("prog.bare", text=f"-{canary}")
    assert _files_with(canary, home) == []


def _files_with(text: str, directory: Path) -> list[Path]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if text.encode() in path.read_bytes()]


def test_a_program_cannot_be_run_in_process(tmp_path: Path) -> None:
    _, (tool,) = load(written(tmp_path / "echo.json", NAMED["echo"]))
    with pytest.raises(Failure, match="sandbox") as refusal:
        tool(text="x")
    assert refusal.value.code == "E3405"


async def test_a_preview_comes_from_the_side_effect_manifest(app: Interlock) -> None:
    seen = (await app.call("prog.post", text="letter", dry_run=True)).unwrap()
    assert seen["predicted_effects"] == [{"resource": "box:letter", "operation": "CREATE"}]
    assert "nothing was run" in seen["impact"]


async def test_a_program_that_changes_something_runs_once_agreed_to(app: Interlock) -> None:
    pending = await app.call("prog.post", text="letter", key="k")
    assert pending.pending
    await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=REVIEWER)
    first = await app.call("prog.post", text="letter", key="k")
    assert first.unwrap() == "letter"
    assert (await app.call("prog.post", text="letter", key="k")).replayed
    assert "previewDifferences" not in first.metadata


@pytest.mark.shows("Program", "discovery")
@pytest.mark.proves("EXEC-12")
async def test_a_program_is_admitted_by_its_examples_like_any_tool(home: Path, tmp_path: Path) -> None:
    wrong = manifest("wrong", ["false"], version="1.0.1")
    target = written(tmp_path / "programs.json", NAMED["echo"], NAMED["post"], wrong)
    async with Interlock.open(home, housekeeping=False) as app:
        admitted, looked_at, refused = await app.add_from(target)
        assert admitted.admitted
        assert looked_at.admitted
        assert looked_at.trial is not None
        assert looked_at.trial.mode == "preview"
        assert list(refused.verdict.refused) == ["contract_tests_passing"]


@pytest.mark.supports("EXEC-12")
@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"argv": ["wc", "{nothing}"]}, "/execution/argv/1"),
        ({"argv": ["wc", "{maybe}"]}, "/execution/argv/1"),
        ({"argv": ["wc", "{anything}"]}, "/execution/argv/1"),
        ({"argv": ["wc", "-{text}"]}, "/execution/argv/1"),
        ({"argv": ["wc", "--{text}=1"]}, "/execution/argv/1"),
        ({"argv": ["wc", "-n{text}"]}, "/execution/argv/1"),
        ({"argv": ["wc", "{text}{maybe...}"]}, "/execution/argv/1"),
        ({"argv": ["wc"], "stdin": "nothing"}, "/execution/stdin"),
        ({"argv": []}, "/execution"),
        ({"argv": ["other"]}, "/execution"),
        ({"argv": ["{text}"], "target": "{text}"}, "/execution"),
        ({"argv": ["./wc"], "target": "./wc"}, "/execution"),
        ({"argv": ["wc"], "handlers": {"check": "a.py:b"}}, "/execution"),
        ({"argv": ["wc"], "kind": "function"}, "/execution"),
        ({"argv": ["wc", "a\0b"]}, "/execution/argv/1"),
        ({"argv": ["wc"], "cwd": "here"}, "/execution/cwd"),
        ({"argv": ["wc"], "env": {"A=B": "c"}}, "/execution/env/A=B/[key]"),
    ],
)
def test_a_template_that_could_go_wrong_is_refused_when_it_is_loaded(tmp_path: Path, said: Json, where: str) -> None:
    document = manifest(
        "wrong", ["wc"], parameters={"text": TEXT, "maybe": TEXT, "anything": True}, required=["text"], execution=said
    )  # fmt: skip
    with pytest.raises(Failure) as refusal:
        load(written(tmp_path / "wrong.json", document))
    assert refusal.value.code == "E3105"
    assert refusal.value.details is not None
    assert [fault["pointer"] for fault in refusal.value.details["faults"]] == [where]


@pytest.mark.supports("EXEC-12")
@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"sandbox": {"tier": 0, "reads": {"hosts": "/etc/hosts"}}}, "/sandbox/tier"),
        ({"mutation_class": "write_reversible", "effects": [{"resource": "x", "operation": "UPDATE"}]},
         "/mutation_class"),
        ({"has_fixture": True}, "/has_fixture"),
    ],
)  # fmt: skip
def test_what_a_program_cannot_promise_is_refused(tmp_path: Path, said: Json, where: str) -> None:
    with pytest.raises(Failure) as refusal:
        load(written(tmp_path / "wrong.json", manifest("wrong", ["wc"], **said)))
    assert refusal.value.details is not None
    assert [fault["pointer"] for fault in refusal.value.details["faults"]] == [where]


@pytest.mark.supports("EXEC-12")
def test_a_program_is_isolated_whatever_its_manifest_says(tmp_path: Path) -> None:
    reading = manifest("reading", ["cat", "/in/hosts"], sandbox={"reads": {"hosts": "/etc/hosts"}})
    _, tools = load(written(tmp_path / "some.json", NAMED["echo"], NAMED["env"], reading))
    assert [tool.manifest.sandbox and tool.manifest.sandbox.tier for tool in tools] == [0, 1, 1]


WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.supports("EXEC-12")
@given(st.lists(WORD, max_size=5), WORD)
def test_every_item_is_a_word_and_nothing_is_read_in_it(items: list[str], text: str) -> None:
    program = Execution(kind="program", target="p", argv=("p", "--o={text}", "--", "{text}", "{items...}"))
    assert program.words({"text": text, "items": items}) == ("p", f"--o={text}", "--", text, *items)


@pytest.mark.supports("EXEC-12")
@given(st.lists(WORD, max_size=5))
def test_no_word_of_the_input_is_an_option(items: list[str]) -> None:
    program = Execution(kind="program", target="p", argv=("p", "{items...}"))
    if any(item.startswith("-") for item in items):
        with pytest.raises(Failure, match="option"):
            program.words({"items": items})
    else:
        assert program.words({"items": items}) == ("p", *items)


@pytest.mark.supports("EXEC-12")
def test_what_is_not_text_is_one_word_of_json() -> None:
    program = Execution(kind="program", target="p", argv=("p", "--", "{value}", "{many...}"))
    values: list[tuple[Any, str]] = [(5.0, "5"), (-1, "-1"), (True, "true"), (None, "null"), ({"a": [1]}, '{"a":[1]}')]
    for value, word in values:
        assert program.words({"value": value}) == ("p", "--", word)
    assert program.words({"value": [1, 2], "many": [1, "a"]}) == ("p", "--", "[1,2]", "1", "a")


@pytest.mark.proves("EXEC-12")
def test_a_program_is_added_and_called_from_the_command_line(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    written(tmp_path / "words.json", NAMED["words"])
    assert cli("tools", "add", "words.json").code == 0
    assert cli.call("prog.words", {"text": "in four small words"})["structured_content"] == 4
