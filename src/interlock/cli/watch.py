"""Watching tickets: what is new is shown as it comes, and on a terminal a key decides.

Everything is done by one task: it looks for tickets, then waits a moment for keys. A line that is being typed is kept
here and echoed by hand, so that neither a thread nor the loop ever blocks on the terminal.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

import click

from interlock.cli.output import Output
from interlock.cli.render import Text
from interlock.cli.tickets import concerns, decided, document, parse_changes, short, show_brief, show_ticket
from interlock.cli.values import parse_json
from interlock.cli.viewer import Local, Remote, Viewer
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Ticket
    from interlock.call.context import Caller
    from interlock.cli.remote import Server

Json = dict[str, Any]
_MENU = "[a]pprove  [e]dit  [d]eny  [p]review in full  [n]ext  [q]uit"


class TicketSource(Protocol):
    """A source of tickets, and the place to decide them: a data directory, or a server."""

    look_every_s: float

    async def waiting(self) -> list[Ticket]:
        """The tickets that wait and that are the watcher's affair."""
        ...

    async def ticket(self, ticket_id: str) -> Ticket:
        """One ticket as it is now."""
        ...

    async def viewer(self, ticket: Ticket | None = None) -> Viewer:
        """The facts for pages, with those about the messages of one ticket."""
        ...

    async def approve(self, ticket_id: str, comment: str, edit: Json | None) -> None:
        """Agree to a call, with its input changed if `edit` says so."""
        ...

    async def deny(self, ticket_id: str, comment: str) -> None:
        """Refuse a call."""
        ...


class LocalTickets:
    """The tickets of an open data directory."""

    look_every_s = 0.3

    def __init__(self, app: Interlock, by: Caller, *, everything: bool) -> None:
        self._app = app
        self._by = by
        self._everything = everything

    async def waiting(self) -> list[Ticket]:
        found = await self._app.approvals.list()
        return [one for one in found if self._everything or await concerns(self._app, one, self._by)]

    async def ticket(self, ticket_id: str) -> Ticket:
        return await self._app.approvals.show(ticket_id)

    async def viewer(self, ticket: Ticket | None = None) -> Viewer:
        return await Local.of(self._app, ticket)

    async def approve(self, ticket_id: str, comment: str, edit: Json | None) -> None:
        app, by = self._app, self._by
        await decided(app, ticket_id, by, app.approvals.approve(ticket_id, by=by, comment=comment, edit=edit))

    async def deny(self, ticket_id: str, comment: str) -> None:
        app, by = self._app, self._by
        await decided(app, ticket_id, by, app.approvals.deny(ticket_id, by=by, comment=comment))


class ServerTickets:
    """The tickets of a server that the holder of the token may see."""

    look_every_s = 1.0

    def __init__(self, server: Server) -> None:
        self._server = server

    async def waiting(self) -> list[Ticket]:
        from interlock.api.approval_documents import ticket_of

        return [ticket_of(one) for one in (await self._server.get("/v1/approvals"))["tickets"]]

    async def ticket(self, ticket_id: str) -> Ticket:
        from interlock.api.approval_documents import ticket_of

        return ticket_of(await self._server.get(f"/v1/approvals/{ticket_id}"))

    async def viewer(self, ticket: Ticket | None = None) -> Viewer:
        found = None if ticket is None else await self._server.get(f"/v1/approvals/{ticket.id}")
        return await Remote.of(self._server, found)

    async def approve(self, ticket_id: str, comment: str, edit: Json | None) -> None:
        await self._server.post(f"/v1/approvals/{ticket_id}/approve", {"comment": comment, "edit": edit})

    async def deny(self, ticket_id: str, comment: str) -> None:
        await self._server.post(f"/v1/approvals/{ticket_id}/deny", {"comment": comment})


async def watch(source: TicketSource, out: Output, *, for_s: float) -> None:
    """Watch until the time is up, somebody interrupts, or `q` is pressed."""
    watching = _Watch(source, out)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, watching.stop)
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not out.as_json
    with _keys(watching.keys.put_nowait) if on_terminal else contextlib.nullcontext():
        await watching.run(for_s, on_terminal=on_terminal)


@contextlib.contextmanager
def _keys(take: Callable[[str], None]) -> Generator[None]:
    """Hand over keys as they are pressed; nothing once the terminal is gone."""
    import termios
    import tty

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        raw = os.read(terminal, 1024)
        take(decoder.decode(raw) if raw else _STOP)

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


_STOP, _ENTER, _BACK, _ESCAPE = "\x04", "\r\n", "\x7f\b", "\x1b"
_HAPPENED = {
    "DENIED": "denied", "AUTO_DENIED": "nobody decided in time, so it was denied", "USED": "it ran",
    "LAPSED": "approved, but not run in time", "VOID": "void: the call was changed or withdrawn",
}  # fmt: skip


class _Line:
    """A line that is being typed, which the terminal does not echo."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._then: Callable[[str], Awaitable[None]] | None = None
        self._typed: list[str] = []

    @property
    def open(self) -> bool:
        return self._then is not None

    def ask(self, question: str, then: Callable[[str], Awaitable[None]]) -> None:
        """Put a question; `then` is called with the line that answers it."""
        self._say(question)
        self._then, self._typed = then, []

    def press(self, key: str) -> Awaitable[None] | None:
        """Take one key. Returns the consequence of the line once it is complete."""
        then, line = self._then, self._typed
        assert then is not None
        if key in _ENTER or key == _ESCAPE:
            self._then = None
            self._say("\n")
            return None if key == _ESCAPE else then("".join(line))
        if key in _BACK:
            if line:
                line.pop()
                self._say("\b \b")
        elif key.isprintable():
            line.append(key)
            self._say(key)
        return None


class _Watch:
    """The state of the watch: the tickets shown, the selected one, and the line being typed about it.

    INVARIANT: keys are about one ticket, the one they were offered with; that another one comes changes nothing.
    """

    def __init__(self, source: TicketSource, out: Output) -> None:
        self.keys: asyncio.Queue[str] = asyncio.Queue()
        self._source = source
        self._out = out
        self._known: dict[str, Ticket] = {}
        self._skipped: set[str] = set()
        self._current: str | None = None
        self._line = _Line(_say)

    def stop(self) -> None:
        self.keys.put_nowait(_STOP)

    async def run(self, for_s: float, *, on_terminal: bool) -> None:
        give_up = time.monotonic() + for_s
        while (left_s := give_up - time.monotonic()) > 0:
            if not self._line.open:
                await self._look()
                if on_terminal:
                    self._offer()
            try:
                pressed = await asyncio.wait_for(self.keys.get(), min(self._source.look_every_s, left_s))
            except TimeoutError:
                continue
            for key in pressed:
                if key == _STOP or (key == "q" and not self._line.open):
                    return
                await self._press(key)

    # Showing

    async def _look(self) -> None:
        """Tell what is new since the last look."""
        waiting = {one.id: one for one in await self._source.waiting()}
        for ticket_id, before in list(self._known.items()):
            now = waiting.get(ticket_id) or await self._source.ticket(ticket_id)
            if (now.state, now.step) != (before.state, before.step):
                await self._tell(now.state.lower() if now.state != before.state else "escalated", now)
            self._known[ticket_id] = now
            if now.state not in ("PENDING", "APPROVED"):
                del self._known[ticket_id]
        for ticket_id, ticket in waiting.items():
            if ticket_id not in self._known:
                self._known[ticket_id] = ticket
                await self._tell("asked", ticket)

    async def _tell(self, event: str, ticket: Ticket) -> None:
        if self._out.as_json:
            self._out.write({"event": event, "ticket": document(await self._source.viewer(ticket), ticket)})
            return
        page = self._out.page()
        if event == "asked":
            show_brief(await self._source.viewer(), page, ticket)
        else:
            page.line(Text(short(ticket), "bold cyan"), f"  {ticket.ref}   {await self._words(event, ticket)}")
        sys.stdout.flush()

    async def _words(self, event: str, ticket: Ticket) -> str:
        if event == "escalated":
            return f"nobody has decided yet; {ticket.chain[ticket.step].group} were asked too"
        if event in ("approved", "denied"):
            changed = ", with the input edited" if ticket.edited is not None else ""
            comment = f": {ticket.comment}" if ticket.comment else ""
            who = (await self._source.viewer()).name_of(ticket.resolved_by or "")
            return f"{event} by {who}{changed}{comment}"
        return _HAPPENED[ticket.state]

    def _offer(self) -> None:
        """Offer the keys for the oldest ticket that waits, once."""
        waiting = [one.id for one in self._known.values() if one.state == "PENDING"]
        if self._current in waiting:
            return
        self._current = next((one for one in waiting if one not in self._skipped), None)
        if self._current is not None:
            _say(f"{short(self._known[self._current])}: {_MENU}\n")

    # Typing

    async def _press(self, key: str) -> None:
        if self._line.open:
            if (decision := self._line.press(key)) is not None:
                await self._decide(decision)
        elif self._current is not None and key in "aednp":
            await self._act(key, self._known[self._current])

    async def _act(self, key: str, ticket: Ticket) -> None:
        about = f"{short(ticket)} {ticket.ref}"
        if key == "p":
            show_ticket(await self._source.viewer(ticket), self._out.page(), ticket)
            _say(f"{short(ticket)}: {_MENU}\n")
        elif key == "n":
            self._skipped.add(ticket.id)
            self._current = None
        elif key == "a":
            self._line.ask(f"approve {about}? a comment or nothing, then Enter; Esc goes back: ", self._approve)
        elif key == "d":
            self._line.ask(f"deny {about}? say why, then Enter; Esc goes back: ", self._deny)
        else:
            self._line.ask(f"approve {about} with these arguments changed, as JSON; Esc goes back: ", self._edit)

    async def _decide(self, decision: Awaitable[None]) -> None:
        """Carry a decision out; what keeps it from being one is shown, and the ticket is offered again."""
        try:
            await decision
        except Failure as failure:
            self._out.page().failure(failure)
            self._current = None
        except click.UsageError as error:
            _say(f"{error.message}\n")
            self._current = None

    async def _approve(self, line: str, edit: Json | None = None) -> None:
        await self._source.approve(self._current or "", line, edit)

    async def _edit(self, line: str) -> None:
        await self._approve("", parse_changes(parse_json(line, "edit", or_stdin=False)))

    async def _deny(self, line: str) -> None:
        await self._source.deny(self._current or "", line)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
