"""`interlock demo`: a tour in which everything really happens, in a data directory that is thrown away.

Each step prints the command as a person would type it, runs it in a process of its own, and lets it speak for itself.
The tour checks exit codes only; no line of any answer is written down here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import without_home
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.cli.render import Page

Json = dict[str, Any]
PATIENCE_S = 60


@click.command(short_help="A guided tour: declare, call, approve, recover, prove.")
@click.option("--pause/--no-pause", default=None, help="Wait for Enter between steps [default: only in a terminal].")
@click.option("--keep", is_flag=True, help="Keep the data directory afterwards, to look around in it.")
@without_home
def demo(out: Output, /, pause: bool | None, keep: bool) -> int:
    """A guided tour: declare, call, be refused, replay, delegate, approve, crash, recover, serve, prove.

    Everything in it is real: real processes, a real kill -9, a real journal in a data directory of its own.

    \b
    interlock demo
    interlock demo --no-pause
    """
    waits = sys.stdin.isatty() and sys.stdout.isatty() if pause is None else pause
    directory = tempfile.mkdtemp(prefix="interlock-demo-")
    with contextlib.ExitStack() as stack:
        if not keep:
            import shutil

            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        tour = Tour(Path(directory), out, waits=waits and not out.as_json)
        for step in STEPS:
            tour.begin(step)
            step(tour)
    note = f"; its data directory is {directory}" if keep else ""
    document = {"finished": not tour.surprises, "steps": tour.steps, "home": directory if keep else None}

    def show(page: Page) -> None:
        from interlock.cli.render import Text

        page.line("")
        if tour.surprises:
            page.line(Text(f"the tour did not go as it should: {'; '.join(tour.surprises)}", "red"))
            return
        page.line(Text("That was the tour", "bold"), note, ". Your own tools: interlock tools add FILE.py")

    out.answer(document, show)
    return 1 if tour.surprises else 0


# many methods: one method per step of the tour
class Tour:
    """The data directory of the tour, and the commands that it runs."""

    def __init__(self, directory: Path, out: Output, *, waits: bool) -> None:
        self.home = directory / "home"
        self.ledger = directory / "ledger.jsonl"
        self.out = out
        self.waits = waits
        self.surprises: list[str] = []
        self.steps: list[Json] = []
        self._environment = {
            **os.environ,
            "INTERLOCK_HOME": str(self.home),
            "INTERLOCK_STORE": "",
            "INTERLOCK_DEMO_LEDGER": str(self.ledger),
        }
        self._page = None if out.as_json else out.page()

    # Speaking

    def begin(self, step: Callable[[Tour], None]) -> None:
        """Announce a step by its first line of documentation, after the reader is ready."""
        title, _, text = (step.__doc__ or "").strip().partition("\n")
        self.steps.append({"title": title, "commands": []})
        if self._page is None:
            return
        if self.waits and len(self.steps) > 1:
            click.pause("\nEnter goes on …", err=True)
        from interlock.cli.render import Text

        self._page.line("")
        self._page.line(Text(f"{len(self.steps)}. {title}", "bold cyan"))
        for line in filter(None, (line.strip() for line in text.splitlines())):
            self._page.line(Text(line, "italic"))

    def show_source(self, *functions: Callable[..., Any]) -> None:
        """The source of these functions, as it stands in its file."""
        if self._page is None:
            return
        import inspect

        source = "\n\n".join(inspect.getsource(function).rstrip() for function in functions)
        if self._page.console.is_terminal:
            from rich.console import Console
            from rich.syntax import Syntax

            Console().print(Syntax(source, "python", theme="ansi_dark", background_color="default"))
        else:
            self._page.console.print(source)

    # Acting

    def run(self, *words: str, code: int = 0) -> None:
        """Run an interlock command and let it speak."""
        self._speak(shlex.join(["interlock", *words]), [*_INTERLOCK, *words], code)

    def shell(self, command: str, arguments: Sequence[str]) -> None:
        """Run something that is not Interlock, shown as `command`."""
        self._speak(command, arguments, 0)

    def ask(self, *words: str) -> Any:
        """The JSON answer of an interlock command."""
        return json.loads(self._process([*_INTERLOCK, *words, "--json"], quiet=True).stdout)

    def _speak(self, command: str, arguments: Sequence[str], code: int) -> None:
        self._prompt(command)
        ended = self._process(arguments, quiet=self.out.as_json)
        self._note(command, ended.returncode, code, ended.stdout)

    def _process(self, arguments: Sequence[str], *, quiet: bool) -> subprocess.CompletedProcess[bytes]:
        piped = subprocess.PIPE if quiet else None
        return subprocess.run(  # noqa: S603 - every word of these commands is in this file
            arguments,
            env=self._environment,
            cwd=self.home.parent,
            stdout=piped,
            # What a command says meanwhile belongs to the tour, in its place.
            stderr=piped or subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )

    def secret(self, name: str, *words: str) -> None:
        """Keep what an interlock command prints in a variable, as a shell would; later commands can name it."""
        command = f"export {name}=$({shlex.join(['interlock', *words])})"
        self._prompt(command)
        ended = self._process([*_INTERLOCK, *words], quiet=True)
        self._environment[name] = ended.stdout.decode().strip()
        if self._page is not None:
            self._page.line(ended.stderr.decode().strip())
        self._note(command, ended.returncode, 0, None)

    def take(self, name: str) -> str:
        """Take a variable away, as it is not set in somebody else's terminal."""
        return self._environment.pop(name)

    def give(self, name: str, value: str) -> None:
        self._environment[name] = value

    def forget(self, name: str) -> None:
        """Unset such a variable."""
        self._prompt(f"unset {name}")
        del self._environment[name]

    def say(self, name: str, value: str) -> None:
        """Set a variable for the commands that follow."""
        self._prompt(f"export {name}={shlex.quote(value)}")
        self._environment[name] = value

    def in_another_terminal(self, first: Sequence[str], then: Callable[[], None]) -> None:
        """Start a command that waits, do something else meanwhile, and let the first come to its end."""
        self._prompt(shlex.join(["interlock", *first]) + " &")
        waiting = subprocess.Popen(  # noqa: S603 - as above
            [*_INTERLOCK, *first],
            env=dict(self._environment),
            cwd=self.home.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        then()
        output, _ = waiting.communicate(timeout=PATIENCE_S)
        if self._page is not None:
            sys.stdout.write(output.decode())
            sys.stdout.flush()
        self._note(shlex.join(["interlock", *first]), waiting.returncode, 0, output)

    @contextlib.contextmanager
    def serving(self) -> Generator[Json]:
        """A server in the background for as long as the block lasts, and what it says of itself."""
        words = ("serve", "--port", "0", "--no-grpc", "--token", "--json")
        self._prompt(shlex.join(["interlock", *words]) + " &")
        server = subprocess.Popen(  # noqa: S603 - as above
            [*_INTERLOCK, *words],
            env=dict(self._environment),
            cwd=self.home.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert server.stdout is not None
        try:
            # Empty when it ended before it began; the tour then says so by its exit code.
            yield json.loads(server.stdout.readline() or b"{}")
        finally:
            self._prompt(f"kill {server.pid}")
            server.terminate()
            code = server.wait(PATIENCE_S)
            server.stdout.close()
            self._note(shlex.join(["interlock", *words]), code, 0, None)

    def post(self, url: str, body: Json, token: str, **headers: str) -> Json:
        """Send JSON as any client would, and show what comes back."""
        import urllib.error
        import urllib.request

        sent = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        options = " ".join(f"-H '{name}: {text}'" for name, text in sent.items())
        command = f"curl -s {url} {options} -H \"Authorization: Bearer $TOKEN\" -d '{json.dumps(body)}'"
        self._prompt(command)
        sent["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(url, json.dumps(body).encode(), sent)  # noqa: S310 - the server of this tour
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:  # noqa: S310 - as above
                heard: bytes = response.read()
        except urllib.error.HTTPError as error:
            heard = error.read()
            self.surprises.append(f"`{url}` answered {error.code}")
        if self._page is not None:
            self._page.line(heard.decode().strip())
            sys.stdout.flush()
        self._note(command, 0, 0, heard)
        return json.loads(heard)

    def wait_for_ticket(self) -> str:
        """The id of the ticket that waits, as soon as there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            waiting: list[Json] = self.ask("approvals", "list")["tickets"]
            if waiting:
                return str(waiting[0]["id"])
        self.surprises.append("nothing asked for approval")
        return "apr_none"

    def kill_in_the_middle(self, *words: str) -> None:
        """Start a call in a process of its own, and kill it between the effect and the record of it."""
        reader, writer = os.pipe()
        environment = {**self._environment, "INTERLOCK_DEMO_PIPE": str(writer)}
        self._prompt(shlex.join(["interlock", *words]) + " &")
        child = subprocess.Popen(  # noqa: S603 - as above
            [*_INTERLOCK, *words],
            env=environment,
            pass_fds=[writer],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(writer)
        # Comes when the tool has written its entry; is empty when the process ended without that.
        with open(reader, "rb") as pipe:
            written = pipe.readline()
        self._prompt(f"kill -9 {child.pid}")
        child.send_signal(signal.SIGKILL)
        ended = child.wait(PATIENCE_S)
        if not written:
            self.surprises.append("the call ended before it could be killed")
        self._note(f"kill -9 {child.pid}", ended, -signal.SIGKILL, None)

    def _prompt(self, command: str) -> None:
        if self._page is not None:
            from interlock.cli.render import Text

            self._page.line(Text("$ ", "green"), Text(command, "bold"))
            sys.stdout.flush()

    def _note(self, command: str, code: int, expected: int, output: bytes | None) -> None:
        commands: list[Json] = self.steps[-1]["commands"]
        commands.append({"command": command, "exit": code, "said": None if output is None else output.decode()})
        if code != expected:
            self.surprises.append(f"`{command}` exited with {code}")


_INTERLOCK = (sys.executable, "-m", "interlock.cli")


# The steps


def declare(tour: Tour) -> None:
    """A tool is a function, and the facts that make it safe
    Type hints become its schema. It says what it may change, how to look first, and how to undo.
    """
    from interlock import demo_tools

    post = demo_tools.post
    tour.show_source(post.function, post.handlers["preview"], post.handlers["compensate"])
    tour.run("tools", "add", "interlock.demo_tools")
    tour.run("call", "demo.balance", '{"account": "cash"}')


def hallucinate(tour: Tour) -> None:
    """An agent makes up an argument
    Nothing runs, and the answer says what to send instead.
    """
    tour.run("call", "demo.post", '{"acount": "cash", "cents": "2,50"}', "--key", "order-17", code=1)


def repeat(tour: Tour) -> None:
    """The same call twice runs once
    Networks fail and agents repeat themselves. Under the caller's own key, the second call gets the first one's result.
    """
    tour.run("call", "demo.post", '{"account": "cash", "cents": 250}', "--key", "order-17")
    tour.run("call", "demo.post", '{"account": "cash", "cents": 250}', "--key", "order-17")
    tour.run("call", "demo.balance", '{"account": "cash"}')


def narrow(tour: Tour) -> None:
    """An agent gets a token, and no more than that
    It may read balances and mail statements for ten minutes, in the name of alice. It tries to post all the same.
    """
    tools = ("--tool", "demo.balance", "--tool", "demo.mail_statement@^1.0.0")
    tour.secret("INTERLOCK_TOKEN", "token", "issue", "--agent", "scout", "--for", "alice", *tools, "--ttl", "10m")
    tour.run("call", "demo.balance", '{"account": "cash"}')
    tour.run("call", "demo.post", '{"account": "cash", "cents": 250}', "--key", "scout-1", code=1)


def approve(tour: Tour) -> None:
    """A person decides what cannot be undone
    The agent may look at what would happen. Doing it waits for somebody, who decides in a terminal the agent cannot
    reach. It then runs once, however often it is sent.
    """
    mail = ("call", "demo.mail_statement", '{"account": "cash", "to": "press@example.org"}')
    tour.run(*mail, "--dry-run")

    def review() -> None:
        token = tour.take("INTERLOCK_TOKEN")
        ticket = tour.wait_for_ticket()
        tour.run("approvals", "show", ticket)
        tour.run("approvals", "approve", ticket, "--comment", "the press was promised it")
        tour.give("INTERLOCK_TOKEN", token)

    tour.in_another_terminal((*mail, "--key", "mail-1", "--wait"), review)
    tour.run(*mail, "--key", "mail-1")
    tour.shell(f"cat {tour.ledger.stem}.outbox", ["cat", f"{tour.ledger.stem}.outbox"])


def silence(tour: Tour) -> None:
    """Nobody answers, and that is a no
    Here approvers have one second instead of a day. Nothing is ever approved by waiting.
    """
    tour.say("INTERLOCK_APPROVAL", '{"timeout_seconds": 1}')
    mail = ("call", "demo.mail_statement", '{"account": "savings", "to": "press@example.org"}')
    tour.run(*mail, "--key", "mail-2", "--wait", code=1)
    tour.shell(f"cat {tour.ledger.stem}.outbox", ["cat", f"{tour.ledger.stem}.outbox"])
    tour.forget("INTERLOCK_APPROVAL")
    tour.forget("INTERLOCK_TOKEN")


def pry(tour: Tour) -> None:
    """Code that nobody trusts runs where it can do no harm
    The tool goes for the host's files and for its network. Each attempt ends as what it was.
    """
    tour.run("tools", "add", "interlock.demo_suspects")
    tour.run("call", "demo.pry", '{"at": "files"}', code=1)
    tour.run("call", "demo.pry", '{"at": "network"}', code=1)
    tour.run("call", "demo.pry", '{"at": "nothing"}')


def lie(tour: Tour) -> None:
    """A tool says that it only reads, and does not
    What it changed is not kept, and no agent can call it again before a person has looked.
    """
    tour.run("call", "demo.peek", '{"account": "cash"}')
    tour.run("call", "demo.peek", '{"account": "savings"}', code=1)
    tour.run("call", "demo.peek", '{"account": "cash"}', code=1)
    tour.run("tools", "quarantine")


def serve(tour: Tour) -> None:
    """Any client calls the same tools
    One command opens every endpoint. A program calls over REST, a model's client over MCP, each with a token, and each
    call is on record like any other.
    """
    with tour.serving() as served:
        if not served:
            return
        body: Json = {"tool_id": "demo.balance", "parameters": {"account": "cash"}}
        rest = tour.post(f"{served['rest']}/tools/invoke", body, served["token"])
        meta: Json = {
            "io.modelcontextprotocol/protocolVersion": _MCP,
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "tour", "version": "1.0.0"},
        }
        params: Json = {"name": "demo-balance", "arguments": {"account": "cash"}, "_meta": meta}
        mcp = tour.post(
            served["mcp"],
            {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params},
            served["token"],
            Accept="application/json, text/event-stream",
            MCP_Protocol_Version=_MCP,
            Mcp_Method="tools/call",
            Mcp_Name="demo-balance",
        )
        if mcp.get("result", {}).get("structuredContent") != {"result": rest.get("result")}:
            tour.surprises.append("REST and MCP gave different answers")


_MCP = "2026-07-28"


def adopt(tour: Tour) -> None:
    """Somebody else's tools, under control in a minute
    An MCP server says that one of its tools only reads. Nobody believes it yet: a person is asked for every call of
    either, and nothing reaches the server before.
    """
    add, module = ("upstream", "add", "mcp", "notes", "--"), ("-m", "interlock.demo_server")
    tour.shell(shlex.join(["interlock", *add, "python", *module]), [*_INTERLOCK, *add, sys.executable, *module])
    tour.secret("INTERLOCK_TOKEN", "token", "issue", "--agent", "scout", "--for", "alice", "--tool", "notes.*")
    note = ("call", "notes.note", '{"text": "buy milk"}', "--key", "note-1")
    tour.run(*note, code=1)
    token = tour.take("INTERLOCK_TOKEN")
    tour.run("approvals", "approve", tour.wait_for_ticket(), "--comment", "there is none left")
    tour.give("INTERLOCK_TOKEN", token)
    tour.run(*note)
    tour.forget("INTERLOCK_TOKEN")
    tour.shell("cat notes.txt", ["cat", "notes.txt"])


def crash(tour: Tour) -> None:
    """A process is killed in the middle of a write
    The entry is in the ledger, its result was never recorded, and the process is gone. A retry is not let through:
    nobody could say whether it would post twice.
    """
    post = ("call", "demo.post", '{"account": "cash", "cents": 500}', "--key", "order-18")
    tour.kill_in_the_middle(*post)
    tour.run(*post, code=1)
    tour.run("calls", "reconcile")


def recover(tour: Tour) -> None:
    """A person looks, and settles it
    The ledger has the entry, so it happened. From then on the key answers with that result, and nothing runs twice.
    """
    tour.shell(f"tail -n 1 {tour.ledger.name}", ["tail", "-n", "1", tour.ledger.name])
    unknown: list[Json] = tour.ask("calls", "reconcile")["unknown"]
    if not unknown:
        tour.surprises.append("the killed call was not found")
        return
    entry: Json = json.loads(tour.ledger.read_text().splitlines()[-1])
    balance: int = tour.ask("call", "demo.balance", '{"account": "cash"}')["structured_content"]
    result = json.dumps({"entry": entry["entry"], "balance": balance})
    call: str = unknown[0]["invocation_id"]
    tour.run("calls", "reconcile", call, "--happened", "--result", result)
    tour.run("call", "demo.post", '{"account": "cash", "cents": 500}', "--key", "order-18")
    tour.run("call", "demo.balance", '{"account": "cash"}')
    tour.run("audit", "explain", call)


def tamper(tour: Tour) -> None:
    """Somebody edits the journal
    Every record carries the hash of all before it, and heads are signed. First as it is, then after an edit by someone
    who has the file and knows SQL.
    """
    tour.run("audit", "verify")
    edit = (
        "DROP TRIGGER journal_never_changes;"
        " UPDATE journal SET body = CAST(replace(CAST(body AS TEXT), ':1250', ':9250') AS BLOB)"
        " WHERE kind = 'mutation'"
    )
    database = f"{tour.home.name}/interlock.db"
    program = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])"
    tour.shell(f'sqlite3 {database} "{edit}"', [sys.executable, "-c", program, database, edit])
    tour.run("audit", "verify", code=1)


STEPS: tuple[Callable[[Tour], None], ...] = (
    declare, hallucinate, repeat, narrow, approve, silence, pry, lie, serve, adopt, crash, recover, tamper,
)  # fmt: skip
