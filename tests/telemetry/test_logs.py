"""Log lines are JSON, name the trace and the call they belong to, and hold no secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Interlock
from interlock.data.schema import Json
from interlock.privacy.redact import RedactionRules, Redactor, safe_log
from interlock.telemetry import logs
from interlock.telemetry.logs import LogFormat

SECRET = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
REDACTOR = Redactor(RedactionRules())


def redact(text: str) -> str:
    return safe_log(REDACTOR, text)


class Log:
    """A log written to memory."""

    def __init__(self, form: LogFormat) -> None:
        self.stream = io.StringIO()
        self.undo = logs.configure(form, "info", redact=redact, stream=self.stream)

    def lines(self) -> list[Json]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    opened = Log("json")
    yield opened
    opened.undo()


@pytest.mark.part_of("OBS-09", rest="saga_compensation_failure, which nothing fires yet")
async def test_every_line_of_a_call_is_json_with_both_ids_and_without_its_secrets(app: Interlock, log: Log) -> None:
    broken = await app.call("seen.crash", how="raise")
    wrong = await app.call("seen.liar", text="b")
    work = await app.call("seen.worker", password="hunter2hunter2")
    await app.call("demo.echo", value=SECRET)
    lines = log.lines()
    told = {(line["trace_id"], line["invocation_id"]) for line in lines if line["logger"] != "interlock.tool"}
    assert told == {(broken.trace_id, broken.invocation_id), (wrong.trace_id, wrong.invocation_id)}
    (tool,) = [line for line in lines if line["logger"] == "interlock.tool"]
    assert tool["trace_id"] == work.trace_id
    for line in lines:
        assert {"time", "level", "logger", "message", "trace_id", "invocation_id"} <= line.keys()
    written = log.stream.getvalue()
    assert "hunter2" not in written
    assert SECRET not in written
    assert "RuntimeError" in written


def test_a_line_of_any_library_is_redacted_with_its_stack(log: Log) -> None:
    try:
        int(f"token {SECRET}")
    except ValueError:
        logging.getLogger("somebody.else").exception("calling with %s failed", SECRET)
    (line,) = log.lines()
    assert line["level"] == "error"
    assert "ValueError" in line["error"]
    assert SECRET not in log.stream.getvalue()
    assert (line["trace_id"], line["invocation_id"]) == (None, None)


def test_libraries_are_heard_when_they_warn_and_we_from_the_level_that_was_asked_for(log: Log) -> None:
    logging.getLogger("somebody.else").info("chatter")
    logging.getLogger("interlock.somewhere").debug("detail")
    logging.getLogger("interlock.somewhere").info("news")
    assert [line["message"] for line in log.lines()] == ["news"]


@given(st.text(st.characters(exclude_categories=())), st.text())
def test_whatever_is_logged_is_one_line_of_json(message: str, trace: str) -> None:
    record = logging.makeLogRecord({"name": "x", "msg": "%s", "args": (message,), "trace_id": trace})
    written = logs.JsonLines(lambda text: text).format(record)
    assert "\n" not in written
    line: Any = json.loads(written)
    assert line["trace_id"] == (trace or None)


def test_what_a_command_keeps_to_itself_is_written_by_a_server_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    ours = logging.getLogger("interlock")
    quiet = logging.NullHandler()
    ours.addHandler(quiet)
    ours.propagate = False
    try:
        undo = logs.configure("text", "info", redact=lambda text: text)
        logging.getLogger("interlock.alerts").warning("UPSTREAM_UNAVAILABLE: notes")
        undo()
        assert capsys.readouterr().err.count("UPSTREAM_UNAVAILABLE: notes") == 1
        assert (ours.propagate, quiet in ours.handlers) == (False, True)
    finally:
        ours.removeHandler(quiet)
        ours.propagate = True


def test_lines_for_people_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log("text")
    try:
        logging.getLogger("interlock.x").warning("with %s", SECRET, extra={"trace_id": "T1", "invocation_id": "I1"})
        try:
            int("no")
        except ValueError:
            logging.getLogger("interlock.x").exception("failed")
    finally:
        log.undo()
    first, second, *rest = log.stream.getvalue().splitlines()
    assert first.endswith(" trace_id=T1 invocation_id=I1")
    assert " warning interlock.x: with " in first
    assert SECRET not in first
    assert second.endswith("failed")
    assert rest[-1].startswith("ValueError: ")
    assert capsys.readouterr() == ("", "")


def test_the_log_is_left_as_it_was_found() -> None:
    before = list(logging.getLogger().handlers), logging.getLogger("interlock").level
    Log("json").undo()
    assert (list(logging.getLogger().handlers), logging.getLogger("interlock").level) == before
