"""Pages for people: plain lines and aligned columns, with colour where there is a terminal to show it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, cast

from interlock.cli.terminal import Console, Text, cell_len, clean
from interlock.core.expressions import expression
from interlock.core.formatting import wait
from interlock.data.canonical import encode

if TYPE_CHECKING:
    from interlock.call.artifacts import Artifact
    from interlock.call.results import Result
    from interlock.core.errors import Failure

Json = dict[str, Any]
Cell = str | Text
GAP = "   "
WIDTH = 80
# The width that the last column of a table has at least.
LEAST = 20

GOOD, BAD, MAYBE, WAITS = Text("✓", "green"), Text("✗", "red"), Text("!", "yellow"), Text("…", "yellow")


def _breaks(text: str, width: int, margin: int) -> list[int]:
    """The places at which to fold a line of `width` columns: beginnings of words. Later lines have a margin."""
    found: list[int] = []
    begin, room, empty = 0, width, True
    for word in re.finditer(r"\S+", text):
        if not empty and cell_len(text[begin : word.end()]) > room:
            found.append(word.start())
            begin, room = word.start(), width - margin
        empty = False
    return found


class Page:
    """Lines on a stream."""

    def __init__(self, stream: IO[str]) -> None:
        self.console = Console(stream)

    @property
    def width(self) -> int:
        return min(self.console.width, 120) if self.console.is_terminal else WIDTH

    def line(self, *parts: Cell, right: Cell = "", whole: bool = False) -> None:
        """Parts one after the other; `right` at the right edge where there is room, else on a line of its own if that
        is a terminal. A line that is meant to be copied stays `whole`.
        """
        text = Text.assemble(_styled(part) for part in parts)
        if str(right):
            room = self.width - text.cell_len - cell_len(str(right))
            if room < len(GAP) and self.console.is_terminal:
                self.fold(text)
                text = Text("  ")
            else:
                text.append(" " * room if room > len(GAP) else GAP)
            text.append_text(_styled(right, "dim"))
        if whole:
            self.console.print(text)
        else:
            self.fold(text)

    def fold(self, text: Text, margin: str = "  ") -> None:
        """A line that is folded between words on a terminal. The lines after the first begin with `margin`."""
        if not self.console.is_terminal:
            self.console.print(text)
            return
        for number, line in enumerate(text.divide(_breaks(text.plain, self.console.width, cell_len(margin)))):
            line.rstrip()
            self.console.print(line if number == 0 else Text(margin).append_text(line))

    def facts(self, facts: Iterable[tuple[str, Cell]], indent: str = "  ") -> None:
        """Names and what is said of them, aligned."""
        self.table([(Text(indent + name, "dim"), words) for name, words in facts])

    def table(self, rows: Iterable[Sequence[Cell]], head: Sequence[str] = (), indent: str = "") -> None:
        """Aligned columns. On a terminal the last one folds; elsewhere lines stay whole.

        On a terminal of less than 80 columns, rows that do not fit are written below each other, a line for each cell.
        """
        styled = [[_styled(cell) for cell in row] for row in rows]
        if head:
            styled.insert(0, [Text(name, "dim") for name in head])
        count = max((len(row) for row in styled), default=0)
        widths = [max(row[at].cell_len for row in styled if at < len(row)) for at in range(count)]
        needed = sum(widths[:-1]) + len(GAP) * (count - 1) + min(LEAST, *widths[-1:]) if head else 0
        if self.console.is_terminal and self.width < WIDTH and needed > self.width:
            for row in styled[1:]:
                self.facts([(name, cell) for name, cell in zip(head, row, strict=False) if cell.plain], indent)
                self.line()
            return
        for row in styled:
            text = Text(indent)
            for at, cell in enumerate(row[:-1]):
                text.append_text(cell).append(" " * (widths[at] - cell.cell_len)).append(GAP)
            self._fold(text, row[-1])

    def _fold(self, text: Text, last: Text) -> None:
        """A row of a table. Its last cell is folded in its column; below the others if the column is too narrow."""
        room = self.width - text.cell_len
        if not self.console.is_terminal or last.cell_len <= room:
            text.append_text(last).rstrip()
            self.console.print(text)
        elif room < LEAST or (self.width < WIDTH and max(map(cell_len, last.plain.split()), default=0) > room):
            text.rstrip()
            self.fold(text)
            self.fold(Text("    ").append_text(last), "    ")
        else:
            margin = " " * text.cell_len
            for number, line in enumerate(last.divide(_breaks(last.plain, room, 0))):
                line.rstrip()
                self.console.print((text if number == 0 else Text(margin)).append_text(line))

    def failure(self, failure: Failure, home: str = "") -> None:
        """One readable block: the code, what happened, what to do next."""
        row = failure.row
        self.line(BAD, " ", Text(row.code, "bold"), f"  {row.title}", right=retry_words(failure))
        facts: list[tuple[str, Cell]] = []
        if failure.in_full != row.title:
            show_message(self, failure.in_full)
        if failure.code[:3] == "E38" and home:
            facts.append(("data", home))
        # Here there is no operator with a trace id at hand; there is the person who typed the command.
        advice = "run it again with --verbose and report what it shows" if row.code == "E3000" else failure.resolution
        facts.append(("next", advice))
        self.facts(facts)

    def result(self, result: Result) -> None:
        """A call's result as its caller reads it."""
        if result.error is not None:
            self._error(result, result.error)
        elif result.source == "preview":
            self._preview(result)
        else:
            self._success(result)
        self.hook_outputs(result)

    def hook_outputs(self, result: Result) -> None:
        """The outputs of hooks, each with the name of its hook."""
        for one in cast("list[Json]", result.metadata.get("hook_outputs") or []):
            words = hook_words(one)
            if words is not None:
                self.line("  ", Text(f"hook {clean(str(one['hook']))}", "bold"), " ", Text(clean(words)))

    def _error(self, result: Result, failure: Failure) -> None:
        row = failure.row
        code = Text(row.error_code.value, "bold red")
        ran_at = (failure.details or {}).get("ran_at")
        right = retry_words(failure) if ran_at is None else f"replayed: it failed once, at {clock_time(str(ran_at))}"
        self.line(BAD, " ", code, f"  {row.code}  ", result.tool, right=right)
        faults = faults_of(failure)
        if faults:
            self.table([(Text(f"  {name}", "bold"), message) for name, message in faults])
            return
        show_message(self, failure.in_full)
        self.facts([("next", _advice(failure, result.tool.partition("@")[0]))])

    def _success(self, result: Result) -> None:
        text, rest = value_words(result)
        right = duration(float(result.metadata.get("latency_ms", 0)))
        if result.replayed:
            right = f"replayed: it ran once, at {clock_time(str(result.metadata.get('executed_at', '')))}"
        shown = [GAP, text] if text else []
        self.line(GOOD, " ", Text(result.tool, "bold"), *shown, right=right)
        if rest:
            self.console.print(Text(textwrap.indent(clean(rest), "  ")))
        if result.persistence.ref is not None:
            self.facts([("all of it", f"interlock calls payload {result.persistence.ref}")])
        if result.artifacts:
            self.artifacts(result.artifacts)
        if result.handoffs:
            self.facts([("hands over", _handoff(one)) for one in result.handoffs])
        if result.content:
            self.facts([("also", _item(one)) for one in result.content])
        self._warnings(result)

    def artifacts(self, artifacts: Iterable[Artifact], indent: str = "  ") -> None:
        """The files that a call left."""
        rows = [(one.path, f"{one.size:,}", one.sha256[:16]) for one in artifacts]
        self.table(rows, ("file", "bytes", "sha256"), indent=indent)

    def _preview(self, result: Result) -> None:
        preview = cast("Json", result.value)
        self.line(GOOD, " ", Text(result.tool, "bold"), right="preview: nothing was changed")
        effects: list[Json] = preview.get("predicted_effects") or []
        rows: list[tuple[str, Cell]] = [("would", f"{one['operation']} {one['resource']}") for one in effects]
        if preview.get("impact"):
            rows.append(("impact", str(preview["impact"])))
        conditions: Mapping[str, bool] = preview.get("preconditions") or {}
        rows.extend(("holds" if holds else "does not hold", name) for name, holds in conditions.items())
        if rows:
            self.facts(rows)
        self._warnings(result)

    def _warnings(self, result: Result) -> None:
        notes = [
            _WARNINGS.get(str(code), str(code)) for code in cast("list[Any]", result.metadata.get("warnings") or [])
        ]
        changes = cast("list[Json]", result.metadata.get("input_mutations") or [])
        changed = [_name(str(one["pointer"])) for one in changes if str(one["source"]).startswith("reviewer:")]
        if changed:
            names = ", ".join(f"`{name}`" for name in changed)
            notes.append(f"this is not quite what was asked for: the reviewer changed {names}")
        notice = cast("Json", result.metadata.get("deprecation") or {})
        if notice:
            instead = f"; use {notice['successor']}" if notice.get("successor") else ""
            notes.append(f"deprecated: it runs until {clock_time(str(notice.get('removalDate')))}{instead}")
        for note in notes:
            self.line("  ", MAYBE, " ", Text(clean(note), "yellow"))


def show_message(page: Page, text: str) -> None:
    """A message as it stands below its heading. No line of it can be taken for a line of ours: each is indented."""
    for line in clean(text).split("\n"):
        page.fold(Text(f"  {line}"))


def progress_bar(percent: float) -> str:
    """Progress as a bar of twenty characters, with its number: `[#####···············]  25 %`."""
    done = round(max(0.0, min(percent, 100.0)) / 5)
    return f"[{'#' * done}{'·' * (20 - done)}] {percent:3.0f} %"


def hook_words(output: Json) -> str | None:
    """One thing that a hook emitted, in words; None for a stop, which the failure itself tells."""
    kind = output["output"]
    if kind == "stop":
        return None
    if kind == "decision":
        return f"decided: {output['behavior']}"
    if kind == "updated_input":
        return f"changed the input at {', '.join(output['pointers']) or 'no place'}"
    return f"{kind}: {output['text']}"


_WARNINGS = {"WRITE_TOOL_NO_MUTATION": "it reported no change, though it may make some; ctx.effect(…) reports them"}


def _advice(failure: Failure, tool: str) -> str:
    """Advice for a person at the machine that the tool runs on."""
    if failure.code != "E3401" or failure.retryable:
        return "send the same call again" if failure.code == "E3401" else failure.resolution
    again = " under a new key" if "ran_at" in (failure.details or {}) else ""
    return f"the tool's operator sees the cause with: interlock --verbose call {tool} …{again}"


def _styled(part: Cell, style: str = "") -> Text:
    return (part if isinstance(part, Text) else Text(part, style)).in_one_line()


def retry_words(failure: Failure) -> str:
    if not failure.retryable:
        return "not retryable"
    later = "" if failure.retry_after_ms is None else f" after {wait(failure.retry_after_ms)}"
    # A failure with an advice of its own says there what has to change first.
    usual = failure.resolution == failure.row.resolution
    return (_AGAIN.get(failure.code, "retryable") if usual else "retryable") + later


# Where sending the very same call again would only meet the same refusal.
_AGAIN = {
    "E3103": "retryable with another version",
    "E3408": "retryable with the same key",
    "E3410": "retryable once the state is read again",
}


def faults_of(failure: Failure) -> list[tuple[str, str]]:
    """The faults a failure lists, each under the name of the argument it is about."""
    details: Mapping[str, Any] = failure.details or {}
    listed = details.get("faults")
    if not isinstance(listed, list):
        return []
    faults = [cast("Json", fault) for fault in cast("list[Any]", listed) if isinstance(fault, dict)]
    return [(_name(str(fault.get("pointer", ""))), str(fault.get("message", ""))) for fault in faults]


def _name(pointer: str) -> str:
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.lstrip("/").split("/")]
    return ".".join(filter(None, steps)) or "input"


_SHORT = 60


def value_words(result: Result) -> tuple[str, str]:
    """A value in one line, or nothing and the lines that show it."""
    if result.persistence.ref is not None:
        return f"{result.persistence.size:,} characters, kept as {result.persistence.ref}", ""
    value = result.value
    if value is None:
        return "", ""
    line = _one_line(value)
    if "\n" not in line and len(line) <= _SHORT:
        return line, ""
    if isinstance(value, str):
        return "", value
    return "", json.dumps(value, indent=2, ensure_ascii=False)


def _one_line(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value:
        members = cast("Json", value)
        if all(not isinstance(item, dict | list) for item in members.values()):
            return ", ".join(f"{name} {_one_line(item)}" for name, item in members.items())
    return encode(value).decode()


def duration(ms: float) -> str:
    if ms < 1:
        return "<1 ms"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


# Text that cannot be taken for a number, a list, an object or nothing at all.
_PLAIN = expression(r"""(?!(?:nothing|null|true|false|-?[0-9.]+(?:[eE].*)?)\Z)(?!["{[])\S(?:[^\n\r\t]*\S)?""")


def value_text(value: Any) -> str:
    """A value of an input or a change, in one line: plain where that is clear, as JSON where it is not."""
    if value is None:
        return "nothing"
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else encode(value).decode()


def change_lines(effect: Mapping[str, Any]) -> Iterator[str]:
    """A predicted change: what is done to which resource, and what of it would be otherwise."""
    before, after = effect.get("before"), effect.get("after")
    what = f"{effect.get('operation')} {effect.get('resource')}"
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = cast("Json", before), cast("Json", after)
        names = [name for name in {**old, **new} if (name in old, old.get(name)) != (name in new, new.get(name))]
        yield what
        yield from (f"  {name}   {value_text(old.get(name))} → {value_text(new.get(name))}" for name in names)
    elif before is None and after is None:
        yield what
    else:
        yield f"{what}   {value_text(before)} → {value_text(after)}"


def local(stamp: str) -> datetime | None:
    """A recorded time in the reader's own zone."""
    try:
        return datetime.fromisoformat(stamp).astimezone()
    except ValueError:
        return None


def clock_time(stamp: str) -> str:
    """The time of day, with the date when it was not today."""
    at = local(stamp)
    if at is None:
        return stamp
    today = at.date() == datetime.now(at.tzinfo).date()
    return f"{at:%H:%M:%S}" if today else f"{at:%Y-%m-%d %H:%M:%S}"


def _handoff(one: Json) -> str:
    """A handoff in one line. It grants nothing, and says so."""
    to = one["to"].get("agent") or one["to"].get("tool")
    named = ", ".join((*one["authority"]["scopes"], *one["authority"]["resources"])) or "no authority"
    return f"{clean(json.dumps(one['what']))} to {clean(to)}, naming {clean(named)}, until {one['expires_at']}"


def _item(one: Json) -> str:
    """An item of content in one line."""
    words = one.get("name") or one.get("uri") or one.get("path") or one.get("text") or one.get("mime_type") or ""
    return f"{one['type']} {clean(str(words).partition(chr(10))[0][:100])}".strip()
