"""Reports of the code inside, as the host accepts them: typed, bounded and cleaned before anything else uses them.

There is one function for each kind of frame. A body of another form ends the call (`Malformed`, `TooMuch`); nothing is
repaired, because honest code cannot send it. Only error messages are cut and cleaned instead: honest code may raise any
text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from interlock.call.artifacts import File
from interlock.call.cost import CALL_PARTS
from interlock.core.amounts import MAX_AMOUNT, MILLION
from interlock.data.bounds import TooManyValues, parse, plain_text
from interlock.data.schema import Json
from interlock.executors.sandbox import frames
from interlock.executors.sandbox.frames import Malformed, TooMuch
from interlock.executors.sandbox.job import Job, Limits, ProgramJob, PythonJob

MOST_PROGRESS, MOST_PARTIAL = 64 << 10, 256 << 10
_MESSAGE, _TYPE, _NAME, _RESOURCE, _IMPACT = 2000, 100, 256, 4096, 2000
_MOST_REPORTS, _MOST_FACTS = 10_000, 64
_MOST_COST = int(MAX_AMOUNT * MILLION)
_MOST_ERRNO = 4095
_EXITS = range(-64, 256)

Check = Callable[[Any], Any]


def reader_for(job: Job) -> frames.Reader:
    """Make a reader of the frames that this job may send."""
    limits = job.limits
    most = {frames.RESULT: limits.result_bytes}
    if isinstance(job, PythonJob):
        most |= {frames.PROGRESS: MOST_PROGRESS, frames.PARTIAL: min(MOST_PARTIAL, limits.result_bytes)}
        most[frames.CHECKPOINT] = 0 if job.checkpoints is None else job.checkpoints.size + frames.CHECKPOINT_HEAD
    files = 0
    if limits.files:
        most[frames.FILE] = limits.output_bytes + 1 + frames.FILE_HEAD
        files = limits.output_bytes + 1 + limits.files * frames.FILE_HEAD
    return frames.Reader(limits.result_bytes + files, most)


def document(body: bytes) -> Any:
    """Parse the JSON of a frame."""
    try:
        return parse(body)
    except TooManyValues:
        raise TooMuch("the number of values") from None
    except UnicodeError:
        raise Malformed("a text in it is not valid Unicode") from None
    except (ValueError, RecursionError) as error:
        surrogate = "surrogate" in str(error)
        raise Malformed("a text in it is not valid Unicode" if surrogate else "it is not JSON") from None


def progress(body: bytes) -> Json:
    """Read a progress report: a message, a percentage, and further facts under short names."""
    facts = _fields(document(body), "a progress report")
    if len(facts) > _MOST_FACTS:
        raise TooMuch("the facts in a progress report")
    percent = facts.get("percent")
    if percent is not None and not _is_number(percent):
        raise Malformed("the percentage of a progress report is not a number")
    if not isinstance(facts.get("message", ""), str):
        raise Malformed("the message of a progress report is not a text")
    return {_name(name, "a progress report"): _cleaned(value, 8) for name, value in facts.items()}


def file(body: bytes, limits: Limits) -> File:
    """Read a file, if its path is acceptable."""
    line, _, content = body.partition(b"\n")
    try:
        path = document(line)
    except Malformed:
        raise Malformed("a file has a name that is not plain text") from None
    if not isinstance(path, str) or not limits.files:
        raise Malformed
    parts = path.split("/")
    if len(parts) > frames.DEEPEST_PATH or len(path) > frames.LONGEST_PATH:
        raise TooMuch("the length of a file's path")
    if not path.isprintable() or plain_text(path, len(path)) != path:
        raise Malformed("a file has a name that is not plain text")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise Malformed
    return File(path, content)


def checkpoint(body: bytes) -> tuple[int, str, Any]:
    """Read the number, the label and the state of a checkpoint."""
    line, _, text = body.partition(b"\n")
    fields = _fields(document(line), "a checkpoint")
    number, label = fields.get("number"), fields.get("label")
    if type(number) is not int or not isinstance(label, str):
        raise Malformed
    return number, label, document(text)


def result(body: bytes, job: Job) -> Json:
    """Read the result as the code reports it: `ok` with a value and reports, or an error; a program
    with its exit code.
    """
    fields = _fields(document(body), "a result")
    ok = fields.get("ok")
    if ok is not True and ok is not False:
        raise Malformed
    if isinstance(job, ProgramJob):
        return _program(fields) if ok else {"ok": False, "error": _error(fields.get("error"))}
    if "exit" in fields:
        raise Malformed
    if not ok:
        return {"ok": False, "error": _error(fields.get("error"))}
    value = fields.get("value")
    if job.entry.endswith(":preview"):
        value = _preview(value)
    return {"ok": True, "value": value, "reports": _reports(fields.get("reports"))}


def _program(fields: Json) -> Json:
    code = fields.get("exit")
    if type(code) is not int or code not in _EXITS:
        raise Malformed
    return {"ok": True, "exit": code}


def _error(value: Any) -> Json:
    """Read the error as the code reports it. Its message is cut, then cleaned."""
    given = _fields(value, "an error")
    kind, message = given.get("type"), given.get("message", "")
    if not isinstance(kind, str) or not isinstance(message, str):
        raise Malformed
    error: Json = {"type": plain_text(kind, _TYPE), "message": plain_text(message, _MESSAGE)}
    number, code = given.get("errno"), given.get("code")
    if type(number) is int and 0 <= number <= _MOST_ERRNO:
        error["errno"] = number
    if isinstance(code, str):
        error |= {"code": plain_text(code, 8), "retryable": given.get("retryable") is True}
    return error


def _preview(value: Any) -> Json:
    given = _fields(value, "a preview")
    preconditions = _fields(given.get("preconditions"), "a preview")
    impact = given.get("impact")
    if not isinstance(impact, str) or not all(isinstance(held, bool) for held in preconditions.values()):
        raise Malformed("its preview does not have the form of one")
    return {
        "effects": [_change(one) for one in _list(given.get("effects"), "a preview")],
        "preconditions": {_name(name, "a preview", _RESOURCE): held for name, held in preconditions.items()},
        "impact": plain_text(impact, _IMPACT),
    }


def _reports(document: Any) -> Json:
    if document is None or document == {}:
        return {}
    given = _fields(document, "a report")
    if not given.keys() <= _REPORTS.keys():
        raise Malformed("it reports something of an unknown kind")
    return {name: _REPORTS[name](value) for name, value in given.items()}


def _change(value: Any) -> Json:
    given = _fields(value, "a change")
    if not given.keys() <= {"resource", "operation", "before", "after"}:
        raise Malformed("it reports a change that does not have the form of one")
    return {
        "resource": _name(given.get("resource"), "a change", _RESOURCE),
        "operation": _name(given.get("operation"), "a change"),
        "before": given.get("before"),
        "after": given.get("after"),
    }


def _attestation(value: Any) -> Json:
    given = _fields(value, "a fact")
    if not given.keys() >= {"claimed", "observed"}:
        raise Malformed("it attests to a fact that does not have the form of one")
    what = _name(given.get("what"), "a fact", _RESOURCE)
    return {"what": what, "claimed": given["claimed"], "observed": given["observed"]}


def _cost(value: Any) -> dict[str, int]:
    """Read whole millionths by part. INVARIANT: no part is negative, and their sum fits a budget."""
    given = _fields(value, "a cost")
    if not given.keys() <= set(CALL_PARTS):
        raise Malformed("it reports a cost of an unknown kind")
    if not all(type(amount) is int and amount >= 0 for amount in given.values()) or sum(given.values()) > _MOST_COST:
        raise Malformed("it reports a cost that cannot be")
    return cast("dict[str, int]", given)


def _named(what: str) -> Check:
    """Accept an object with short, plain names. Its values are data."""

    def check(document: Any) -> Json:
        given = _fields(document, what)
        if len(given) > _MOST_REPORTS:
            raise TooMuch(f"{_MOST_REPORTS} reports")
        return {_name(name, what): value for name, value in given.items()}

    return check


def _each(check: Check, what: str) -> Check:
    return lambda value: [check(one) for one in _list(value, what)]


_REPORTS: Mapping[str, Check] = {
    "changes": _each(_change, "a change"),
    "attestations": _each(_attestation, "a fact"),
    "compensation": lambda value: None if value is None else _named("what undoes it")(value),
    "modifiers": _named("a modifier"),
    "cost": _cost,
    "session": _named("a session value"),
    # The context of the host checks each of these again, by the same rules as for a tool in this process.
    "content": _each(_named("an item of content"), "an item of content"),
    "views": _named("a view"),
    "handoffs": _each(_named("a handoff"), "a handoff"),
    "provenance": _named("a fact about the data"),
}


def _fields(value: Any, what: str) -> Json:
    if not isinstance(value, dict):
        raise Malformed(f"{what} in it is not an object")
    return cast("Json", value)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed(f"{what} in it does not stand in a list")
    items = cast("list[Any]", value)
    if len(items) > _MOST_REPORTS:
        raise TooMuch(f"{_MOST_REPORTS} reports")
    return items


def _name(value: Any, what: str, most: int = _NAME) -> str:
    # Most names are plain ASCII, which is a fast test; thousands of them come in one frame.
    if not isinstance(value, str) or not 0 < len(value) <= most or not _is_plain(value):
        raise Malformed(f"{what} in it has a name that is too long or not plain text")
    return value


def _is_plain(text: str) -> bool:
    return (text.isascii() and text.isprintable()) or plain_text(text, len(text)) == text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e15


def _cleaned(data: Any, depth: int) -> Any:
    """Clean small data of texts that control a terminal."""
    if isinstance(data, str):
        return plain_text(data, _MESSAGE)
    if depth == 0 and isinstance(data, dict | list):
        raise TooMuch("the depth of a progress report")
    if isinstance(data, dict):
        members = cast("Json", data).items()
        return {plain_text(name, _NAME): _cleaned(value, depth - 1) for name, value in members}
    if isinstance(data, list):
        return [_cleaned(one, depth - 1) for one in cast("list[Any]", data)]
    if isinstance(data, int) and not -(1 << 63) <= data < 1 << 64:
        raise Malformed("a number in a progress report is out of range")
    return data
