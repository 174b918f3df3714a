"""Failures on the command line: an envelope for programs (`--json`), words for people."""

from __future__ import annotations

import orjson
import pytest

from tests import warm
from tests.support.answers import Heard
from tests.support.cli import Cli
from tests.support.faults import sound


@pytest.mark.proves("CONTRACT-13")
def test_a_command_that_fails_without_a_call_prints_an_envelope_under_whose_trace_the_log_has_the_reason(
    fresh: Cli,
) -> None:
    fresh.home.mkdir()
    (fresh.home / "settings.toml").write_text("nothing_like_it = 1")
    code, out, err = warm.run(("--verbose", "tools", "list", "--json"), fresh.environment, fresh.path)
    envelope = sound(Heard(out.decode(), "cli", envelope=orjson.loads(out)["error"]), "rest")
    assert (code, envelope["error_code"]) == (1, "E3108")
    assert len(envelope["traceId"]) == 32
    assert f"trace_id={envelope['traceId']}" in err.decode()
    assert "Traceback" in err.decode(), "the reason is in the log alone"


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize(
    "words",
    [
        ("nothing",),
        ("calls", "nothing"),
        ("call",),
        ("call", "demo.add", "{"),
        ("calls", "list", "--odd"),
        ("--odd", "calls", "list"),
    ],
)
def test_a_command_that_is_not_understood_prints_an_envelope_where_json_is_asked_for(
    fresh: Cli, words: tuple[str, ...]
) -> None:
    ended = fresh(*words, "--json")
    assert ended.code == 2
    envelope = sound(Heard(ended.out, "cli", envelope=ended.json["error"]), "rest")
    assert (envelope["error_code"], envelope["retryable"]) == ("E3004", False)
    assert "Error: " in ended.err, "a person reads it as ever"
    plain = fresh(*words)
    assert (plain.code, plain.out) == (2, "")


@pytest.mark.proves("CONTRACT-13")
def test_a_person_at_the_command_line_reads_code_message_and_next_step_of_a_failed_call(cli: Cli) -> None:
    asked = ("call", "demo.nothing", "{}")
    told = cli(*asked, "--json").json["error"]
    shown = cli(*asked)
    assert shown.code == 1
    for words in (told["errorCode"], told["error_code"], told["humanMessage"], told["resolution"]):
        assert words in " ".join(shown.out.split()), shown.out
