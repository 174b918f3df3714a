"""A session of `interlock dev`: what the developer types, what the watcher sees, and what is shown of both.

The file is watched by polling, in a thread of its own. A save is taken up between two commands, never in the middle of
one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.output import Output
from interlock.cli.result_json import result_json
from interlock.cli.values import MOST_STDIN, parse_json
from interlock.core.expressions import expression

if TYPE_CHECKING:
    from interlock.api.drafts import Draft, DraftSession
    from interlock.api.interlock import Interlock
    from interlock.api.types import Stamp, Version
    from interlock.call.results import Result
    from interlock.cli.render import Page

Json = dict[str, Any]

POLL_S = 0.3
_PROMPT = "interlock dev> "
_HELP = (
    ("TOOL", "fill in a form: one question for each parameter; enter takes what stands in brackets"),
    ("TOOL {JSON}", "call it with these arguments; KEY after them for a call that changes something"),
    ("preview TOOL …", "say what a call would do, and do nothing"),
    ("undo ID KEY", "undo a call of this session"),
    ("list", "the drafts that can be called"),
    ("quit", "end the session; so does the end of the input"),
)


class Workshop:
    """One session at a terminal, in a pipe or in a script."""

    def __init__(
        self,
        app: Interlock,
        out: Output,
        session: DraftSession,
        wanted: list[tuple[str, Any]],
        key: str | None,
        *,
        preview: bool,
    ) -> None:
        self._app = app
        self._out = out
        self._session = session
        self._wanted = wanted
        self._key = key
        self._preview = preview
        self._page = out.page()
        self._causes = _Causes(session)

    async def once(self) -> int:
        """Load, call, answer. Exits 1 if a tool was refused or a call did not succeed."""
        drafts = await self._session.load()
        if not self._out.as_json:
            self._show_drafts(drafts)
        raised = self._causes.take()
        called = [await self._wish(tool, given, self._key) for tool, given in self._wanted]
        if self._out.as_json:
            self._out.write({"drafts": [_document(one) for one in drafts], "raised": raised, "calls": called})
        return int(not all(one.callable for one in drafts) or any(one["error"] is not None for one in called))

    async def stay(self) -> int:
        """Load after every save, and do what is typed, until the input ends."""
        await self._take_up()
        console, changed = _Console(), asyncio.Event()
        loop = asyncio.get_running_loop()
        watcher = Watcher(lambda: loop.call_soon_threadsafe(changed.set))
        watcher.watch(self._session.files)
        saved = asyncio.create_task(changed.wait())
        typed = console.ask(_PROMPT)
        try:
            while True:
                await asyncio.wait({saved, typed}, return_when=asyncio.FIRST_COMPLETED)
                if saved.done():
                    changed.clear()
                    console.interrupted()
                    await self._take_up()
                    watcher.watch(self._session.files)
                    saved = asyncio.create_task(changed.wait())
                    console.again(_PROMPT)
                if typed.done():
                    if (line := typed.result()) is None or line.strip() in ("quit", "exit"):
                        return 0
                    await self._do(console, line.strip())
                    typed = console.ask(_PROMPT)
        finally:
            saved.cancel()
            watcher.stop()

    async def _take_up(self) -> None:
        """Load the file as it is now, and make the calls that were asked for with it."""
        drafts = await self._session.load()
        self._show_drafts(drafts)
        self._causes.take()
        # Where nothing could be loaded, the drafts are those that were called before.
        for tool, given in self._wanted if any(one.callable for one in drafts) else ():
            await self._wish(tool, given, self._own_key(tool))

    def _own_key(self, tool: str) -> str | None:
        """The key of the command line for the draft that there is now: another content is another action."""
        from interlock.core.errors import Failure

        if self._key is None:
            return None
        try:
            return f"{self._key}-{self._session.find(tool).row.version}"
        except Failure:
            return self._key

    async def _do(self, console: _Console, line: str) -> None:
        """Do what was typed."""
        words, dry_run = line, False
        if line.startswith("preview "):
            words, dry_run = line.removeprefix("preview ").strip(), True
        name, _, rest = words.partition(" ")
        if not name:
            return
        if name in ("help", "?"):
            self._page.table(_HELP, indent="  ")
        elif name == "list":
            self._page.table([_listed(one) for one in self._session.drafts], indent="  ")
        elif name == "undo":
            call, _, key = rest.strip().partition(" ")
            await self._shown(lambda: self._session.undo(call, key=key.strip()))
        else:
            await self._call(console, name, rest.strip(), dry_run=dry_run)

    async def _call(self, console: _Console, name: str, rest: str, *, dry_run: bool) -> None:
        from interlock.core.errors import Failure

        try:
            draft = self._session.find(name)
            given, key = _read(rest) if rest else (await self._form(console, draft), None)
        except Failure as failure:
            self._page.failure(failure)
            return
        writes = draft.contract.manifest.mutation_class != "read_only"
        if key is None and writes and not dry_run and console.people:
            proposed = f"dev-{os.urandom(4).hex()}"
            reply = await console.ask(f"  key, your own name for this action [{proposed}]: ")
            key = (reply or "").strip() or proposed
        await self._shown(lambda: self._session.call(name, given, key=key, dry_run=dry_run))

    async def _form(self, console: _Console, draft: Version) -> Json:
        """Ask for each parameter of a tool."""
        from interlock.data.explain import type_words
        from interlock.data.schema import resolve_ref

        schema = draft.contract.manifest.parameters
        required: list[str] = schema.get("required") or []
        given: Json = {}
        parts: dict[str, Json] = schema.get("properties") or {}
        for name, raw in parts.items():
            part: Json = {**resolve_ref(schema, raw), **raw}
            examples: list[Any] = part.get("examples") or []
            proposed = _as_typed(examples[0]) if examples and name in required else ""
            offer = f" [{proposed}]" if proposed else "" if name in required else " [left out]"
            reply = await console.ask(f"  {name}, {type_words(part)}: {part.get('description', '')}{offer}: ")
            text = (reply or "").strip() or proposed
            if text:
                given[name] = _as_value(schema, part, text)
        return given

    async def _wish(self, tool: str, given: Any, key: str | None) -> Json:
        """Make one call of the command line."""
        return await self._shown(lambda: self._session.call(tool, given, key=key, dry_run=self._preview))

    async def _shown(self, call: Callable[[], Awaitable[Result]]) -> Json:
        """Make a call, and show its result with the story of the call as the journal tells it."""
        from interlock.api.history import find
        from interlock.cli.call import answer
        from interlock.cli.history import explain
        from interlock.cli.viewer import Local, with_names
        from interlock.core.errors import Failure

        try:
            result = await call()
        except Failure as failure:
            if not self._out.as_json:
                self._page.failure(failure)
            return {"status": "failed", "invocation_id": None, "error": failure.envelope(self._out.trace_id)}
        viewer = await Local.of(self._app)
        history = await find(self._app, result.invocation_id)
        raised = self._causes.take()
        phases: list[str] = history.facts.get("phases") or []
        timeline = [f"Its phases: {' → '.join(phases)}."] if phases else []
        timeline += [with_names(viewer, sentence) for sentence in explain(history)]
        if not self._out.as_json:
            await answer(self._app, self._out, result)
            self._show_raised(raised)
            for sentence in timeline:
                self._page.line("  ", sentence)
        return {**result_json(result), "raised": raised, "timeline": timeline}

    def _show_drafts(self, drafts: list[Draft]) -> None:
        for one in drafts:
            _show(self._page, one)
        if not drafts:
            self._page.line("no tools in the file yet; decorate a function with @tool(…)")
        self._show_raised(self._causes.causes)

    def _show_raised(self, raised: list[str]) -> None:
        for words in raised:
            self._page.line("  raised ", words)


def _show(page: Page, draft: Draft) -> None:
    from interlock.cli.render import BAD, GOOD, MAYBE, Text

    place = f"{Path(draft.file).name}, line {draft.line}" if draft.line else Path(draft.file).name
    if draft.callable:
        tests = "" if draft.trial is None else f"{len(draft.trial.outcomes)} contract tests passed"
        page.line(GOOD, " ", Text(draft.tool, "bold"), f"   {place}", right=tests)
    else:
        page.line(BAD, " ", Text(draft.tool, "bold"), f"   {place}")
        page.table([(Text(f"    {fault}", "red"),) for fault in draft.faults])
    for note in draft.notes:
        page.line("    ", MAYBE, " ", note)


def _document(draft: Draft) -> Json:
    return {
        "tool": draft.tool,
        "callable": draft.callable,
        "file": draft.file,
        "line": draft.line,
        "faults": list(draft.faults),
        "notes": list(draft.notes),
    }


def _listed(version: Version) -> tuple[str, str, str]:
    manifest = version.contract.manifest
    return f"{version.row.address}@{version.row.version}", str(manifest.mutation_class), manifest.description


def _read(text: str) -> tuple[Any, str | None]:
    """Arguments in JSON, and the key behind them if there is one; E3004 for anything else."""
    import json

    from interlock.core.errors import Failure

    try:
        _, end = json.JSONDecoder().raw_decode(text)
        return parse_json(text[:end], "arguments", or_stdin=False), text[end:].strip() or None
    except (ValueError, RecursionError, click.UsageError):
        words = f"`{text[:60]}` is not a JSON object"
        raise Failure("E3004", words, resolution='write TOOL {"name": "value"}, or TOOL alone for a form') from None


def _as_typed(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _as_value(root: Json, part: Json, text: str) -> Any:
    """Convert what was typed for a parameter: JSON of a type that it takes, or else text if it takes text."""
    takes = _types(root, part)
    if takes == {"string"}:
        return text
    try:
        value = parse_json(text, "value", or_stdin=False)
    except click.UsageError:
        return text  # the gateway says what is wrong with it
    kind = _TYPES[value.__class__]
    fits = kind in takes or (kind == "integer" and "number" in takes)
    return text if "string" in takes and not fits else value


_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null", list: "array", dict: "object",
}  # fmt: skip


def _types(root: Json, raw: Json) -> set[str]:
    """The types of JSON that a part of a schema takes, as far as it states them."""
    from interlock.data.schema import resolve_ref

    part = resolve_ref(root, raw)
    kind: Any = part.get("type")
    if kind is not None:
        return {kind} if isinstance(kind, str) else set(kind)
    branches: list[Json] = [one for word in ("anyOf", "oneOf") for one in part.get(word) or () if isinstance(one, dict)]
    values: list[Any] = part.get("enum") or ([part["const"]] if "const" in part else [])
    return {one for branch in branches for one in _types(root, branch)} | {_TYPES[one.__class__] for one in values}


class _Causes(logging.Handler):
    """Collects the exceptions that the code of drafts raised, with file and line.

    A result names only the type of an exception; the author of a draft may see the rest. It is read from the log, which
    has it without private values, and in full once a minute for the same failure.
    """

    def __init__(self, session: DraftSession) -> None:
        super().__init__(logging.ERROR)
        self._session = session
        self._last: dict[str, str] = {}
        self.causes: list[str] = []
        logging.getLogger("interlock.gateway").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        tool = text.partition(" ")[0]
        places = [one for one in _PLACE.finditer(text) if Path(one["file"]) in self._session.files]
        if places:
            last, error = places[-1], text.rstrip().rpartition("\n")[2]
            self._last[tool] = f"{Path(last['file']).name}, line {last['line']}, in {last['name']}: {error}"
        words = self._last.get(tool)
        if words is not None and words not in self.causes:
            self.causes.append(words)

    def take(self) -> list[str]:
        """Return what was collected since the last time."""
        causes, self.causes = self.causes, []
        return causes


# A place in a traceback.
_PLACE = expression(r'^ +File "(?P<file>[^"\n]+)", line (?P<line>[0-9]+), in (?P<name>.+)$', re.MULTILINE)


class Watcher:
    """Watches files in a thread. Calls `on_change` when a file has changed and is no longer being written.

    Then it pauses until the next `watch`.
    """

    def __init__(self, on_change: Callable[[], object]) -> None:
        self._on_change = on_change
        self._known: dict[Path, Stamp | None] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="interlock-watcher", daemon=True)
        self._thread.start()

    def watch(self, known: dict[Path, Stamp | None]) -> None:
        """Watch these files, which were like this when they were loaded."""
        self._known = known

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        from interlock.api.drafts import stamps_of

        seen: dict[Path, Stamp | None] = {}
        while not self._ended.wait(POLL_S):
            known = self._known
            now = stamps_of(known)
            # Two looks that agree: not half of a save. A file that is missing is waited for.
            if now == seen and any(one is not None and one != known[path] for path, one in now.items()):
                self._known = {}
                self._on_change()
            seen = now


class _Console:
    """Lines that are typed, or that come through a pipe. Each is read in a thread, so that a save is seen meanwhile."""

    def __init__(self) -> None:
        self.people = sys.stdin.isatty()
        self._rest = b""

    def ask(self, prompt: str) -> asyncio.Future[str | None]:
        """The next line; None at the end of the input."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str | None] = loop.create_future()

        def settle(line: str | None) -> None:
            if not answer.done():
                answer.set_result(line)

        def read() -> None:
            line = self._typed(prompt) if self.people else self._piped()
            loop.call_soon_threadsafe(settle, line)

        threading.Thread(target=read, name="interlock-console", daemon=True).start()
        return answer

    def interrupted(self) -> None:
        """Leave the line of the prompt, because something else is shown."""
        if self.people:
            click.echo("")

    def again(self, prompt: str) -> None:
        """Show the prompt again behind it."""
        if self.people:
            click.echo(prompt, nl=False)

    def _typed(self, prompt: str) -> str | None:
        try:
            return input(prompt)
        except EOFError:
            return None

    def _piped(self) -> str | None:
        # Not through sys.stdin: its lock would be held when the process ends.
        while b"\n" not in self._rest and len(self._rest) <= MOST_STDIN:
            more = os.read(0, 65_536)
            if not more:
                line, self._rest = self._rest, b""
                return line.decode(errors="replace") if line else None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")
