"""Credentials through the gateway: lent to one call, of use to nobody else, and seen nowhere.

`SPILLS` is every way in which a tool can let something out. Each is tried with a credential that was lent and with two
that came as arguments; then every byte that is left anywhere is looked through.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
import pytest_asyncio
from pydantic import BaseModel

from interlock import Caller, Context, Deadline, Effect, Failure, Field, Interlock, Preview, tool
from interlock.call.cost import FREE
from interlock.call.results import Result
from interlock.gateway.hooks import Hook, HookResult, Seen
from interlock.store.home import Home
from interlock.testing import FakeClock
from tests import processes
from tests.sample import Text
from tests.support.calls import code, lateness, publish
from tests.support.cli import Cli
from tests.support.fake_vault import TOKEN, FakeVault
from tests.support.postgres import Server
from tests.support.stores import everything_in

API_KEY, PASSWORD, LENT = "sk-secret123456", "supersecret", "Zq7-lent-canary-9431"
CANARIES = (API_KEY, PASSWORD, LENT)
ARGUMENTS: dict[str, Any] = {"api_key": API_KEY, "password": PASSWORD}
NAME = "github/token"
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))

DOORS = pytest.mark.proves("AUDIT-07")
LENDING = pytest.mark.proves("EXEC-07")

Key = Annotated[str, Field(description="a key of some service", examples=["k"])]
Which = Annotated[str, Field(description="what to do", examples=["nothing"])]
Lent = Annotated[bool, Field(description="which to use", examples=[True])]


# Every way out


def _fail(**facts: Callable[[str], Any]) -> Callable[[Context, str], Any]:
    """A failure with what it is given, each part made from the text."""

    def spill(ctx: Context, text: str) -> Any:
        said: dict[str, Any] = {name: make(text) for name, make in facts.items()}
        raise Failure("E3401", said.pop("message", "it failed"), **said)

    return spill


def _raise(ctx: Context, text: str) -> Any:
    try:
        return FREE.parts[text]
    except KeyError as error:
        raise ValueError(f"cannot use {text}") from error


def _log_error(ctx: Context, text: str) -> None:
    try:
        int(text)
    except ValueError:
        ctx.log.exception("failed with %s", text)


def _observe(text: str) -> Any:
    raise ValueError(text)


def _session(ctx: Context, text: str) -> None:
    ctx.session["kept"] = {"token": text, "and": [f"Bearer-{text}"]}


def _session_name(ctx: Context, text: str) -> None:
    ctx.session[text] = 1


def _compensation(ctx: Context, text: str) -> None:
    ctx.compensate_with(result=f"with {text}")


SPILLS: dict[str, Callable[[Context, str], Any]] = {
    "result": lambda ctx, text: text,
    "result within text": lambda ctx, text: f"used {text}, all went well",
    "result name": lambda ctx, text: {text: [text]},
    "log": lambda ctx, text: ctx.log.warning("using %s now", text),
    "log of an exception": _log_error,
    "progress": lambda ctx, text: ctx.progress(f"using {text}", percent=5),
    "progress facts": lambda ctx, text: ctx.progress("busy", current_step=f"using {text}", more={"a": [text]}),
    "progress names": lambda ctx, text: ctx.progress("busy", more={text: 1}),
    "partial": lambda ctx, text: ctx.partial(f"so far {text}"),
    "partial names": lambda ctx, text: ctx.partial({text: [text]}),
    "error message": _fail(message="cannot use {}".format),
    "error details": _fail(details=lambda text: {"with": f"using {text}", "list": [text]}),
    "error details' names": _fail(details=lambda text: {"with": {text: 1}}),
    "native error": _fail(native_error_ref="upstream:{}".format),
    "error evidence": _fail(evidence_refs=lambda text: (f"upstream:{text}",)),
    "error policy": _fail(policy_refs=lambda text: (f"upstream:{text}",)),
    "exception": _raise,
    "effect after": lambda ctx, text: ctx.effect("thing:a", "UPDATE", before=0, after=f"set to {text}"),
    "effect before": lambda ctx, text: ctx.effect("thing:a", "UPDATE", before={"was": [text]}, after=0),
    "effect resource": lambda ctx, text: ctx.effect(f"thing:{text}", "UPDATE"),
    "attestation": lambda ctx, text: ctx.attest(f"that {text} works", text, lambda: 0),
    "attestation that fails": lambda ctx, text: ctx.attest("it works", 0, lambda: _observe(text)),
    "compensation": _compensation,
    "session": _session,
    "session name": _session_name,
    "context modifier": lambda ctx, text: ctx.modify_context(note=f"use {text}", **{f"more_{text}": 1}),
    "cost": lambda ctx, text: ctx.cost(**{text: 1.0}),
}  # fmt: skip


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="spill", effects=[Effect("thing:a", "UPDATE")],
    permissions=[f"credentials:{NAME}"],
)  # fmt: skip
async def spill(ctx: Context, way: Which, api_key: Key, password: Key, lent: Lent) -> Any:
    """Let a credential out in one of many ways: the one that was lent, or those that were sent."""
    texts = [ctx.secret(NAME)] if lent else [api_key, password]
    returned: list[Any] = []
    for text in texts:
        try:
            returned.append(SPILLS[way](ctx, text))
        except Exception:
            if text is texts[-1]:
                raise
    return returned


@spill.preview
def _(way: str, api_key: str, password: str, lent: bool) -> Preview:
    return Preview(impact=f"would use {password} and {api_key}", preconditions={f"{password} works": True})


@spill.compensate
async def _(result: Any) -> None:
    return None


@tool(
    version="1.0.0", mutation_class="write_irreversible", namespace="spill", effects=[Effect("thing:a", "UPDATE")],
    permissions=[f"credentials:{NAME}"],
)  # fmt: skip
async def asked(ctx: Context, api_key: Key, password: Key) -> str:
    """A write that a person must agree to."""
    return f"{ctx.secret(NAME)} was used"


@asked.preview
def _(api_key: str, password: str) -> Preview:
    return Preview(impact=f"would use {password} and {api_key}", preconditions={"has a password": bool(password)})


@tool(version="1.0.0", mutation_class="read_only", namespace="spill", permissions=[f"credentials:{NAME}"])
async def wrong(ctx: Context, password: Key) -> dict[str, int]:
    """Return something else than was promised, with a secret in its place."""
    secret: Any = ctx.secret(NAME)
    return {secret: secret, password: secret}


@tool(version="1.0.0", mutation_class="read_only", namespace="spill")
async def strict(api_key: Annotated[str, Field(description="a key", pattern="^key-", examples=["key-1"])]) -> str:
    """A tool that takes keys of one form only."""
    return "fine"


@tool(version="1.0.0", mutation_class="read_only", namespace="spill")
async def choosy(password: Key) -> str:
    """A tool that looks at its password before it runs."""
    return "fine"


@choosy.check
def _(password: str) -> list[str]:
    return [f"{password} is too well known"]


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="spill", effects=[Effect("thing:a", "UPDATE")],
)  # fmt: skip
async def inner(ctx: Context, note: Text) -> str:
    """What another tool hands its credential to."""
    ctx.effect("thing:a", "UPDATE", after=note)
    return f"got {note}"


@inner.compensate
async def _(result: str) -> None:
    return None


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="spill", effects=[Effect("thing:a", "UPDATE")],
    permissions=[f"credentials:{NAME}"],
)  # fmt: skip
async def outer(ctx: Context) -> str:
    """Hand a credential to another tool."""
    return await ctx.call("spill.inner", note=f"use {ctx.secret(NAME)}", key="inner")


@outer.compensate
async def _(result: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="spill", permissions=[f"credentials:{NAME}"])
async def number(ctx: Context, way: Which) -> Any:
    """Let a credential out as a number."""
    pin = int(ctx.secret(NAME))
    if way == "progress":
        ctx.progress("busy", current_step=pin)
    if way == "error details":
        raise Failure("E3401", "it failed", details={"with": pin})
    return {"pin": pin} if way == "result" else None


@tool(version="1.0.0", mutation_class="read_only", namespace="spill")
async def repeat(options: Annotated[Any, Field(description="whatever else", examples=[{"a": 1}])]) -> str:
    """Say what was sent."""
    return f"used {options}"


class Page(BaseModel):
    """Some of the rows, and where the rest is."""

    items: list[str]
    cursor: str | None = None


@tool(version="1.0.0", mutation_class="read_only", namespace="spill", paged=True)
async def rows(
    ctx: Context, password: Key = "", cursor: Annotated[str | None, Field(description="the next page")] = None
) -> Page:
    """Rows of which only the first page can be had."""
    if cursor is None:
        return Page(items=["a"], cursor="2")
    ctx.log.warning("cannot use %s", password)
    raise Failure("E3401", f"cannot use {password}")


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="spill", effects=[Effect("key:{api_key}", "DELETE")],
)  # fmt: skip
async def revoke(ctx: Context, api_key: Key) -> str:
    """Have a key revoked: what it does is done to the secret itself."""
    ctx.effect(f"key:{api_key}", "DELETE")
    ctx.compensate_with(api_key=api_key)
    return "revoked"


@revoke.compensate
async def _(api_key: str) -> None:
    raise Failure("E3401", f"cannot bring {api_key} back")


def _crash(ctx: Context, text: str) -> None:
    raise type(text, (Exception,), {})


def _log_an_error(ctx: Context, text: str) -> None:
    try:
        raise type(text, (ValueError,), {})(text)
    except ValueError:
        logging.getLogger("library.other").exception("it failed")


class _Mute:
    """Something that has no text."""

    def __repr__(self) -> str:
        raise ValueError(self)


class _Whole(logging.Handler):
    """Keeps everything that records hold."""

    def __init__(self) -> None:
        super().__init__(0)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(f"{self.format(record)} {vars(record)}")


def _log_by_own_handler(ctx: Context, text: str) -> None:
    logger, handler = logging.getLogger("library.own"), _Whole()
    logger.addHandler(handler)
    try:
        logger.error("using %s and %.2s", [text], text)
    finally:
        logger.removeHandler(handler)
    logging.getLogger("library.other").warning("%s", handler.kept)
    assert text not in handler.kept[0]


# What Interlock has no hand in but for the secrets that it lends: the loggers of others, and the names of classes.
ASIDE: dict[str, Callable[[Context, str], Any]] = {
    "name of an exception": _crash,
    "logger": lambda ctx, text: logging.getLogger("library.other").warning("using %s", text),
    "logger's template": lambda ctx, text: logging.getLogger("library.other").warning(f"using {text}"),
    "logger's name": lambda ctx, text: logging.getLogger(f"library.{text}").warning("using it"),
    "logger's part": lambda ctx, text: logging.getLogger("library.other").warning("using %.3s", text),
    "logger's stack": _log_an_error,
    "logger that cannot": lambda ctx, text: logging.getLogger("library.other").warning("%s %s", text, _Mute()),
    "logger with names": lambda ctx, text: logging.getLogger("library.other").warning("%(a)s", {"a": text}),
    "encoded": lambda ctx, text: logging.getLogger("library.other").warning(
        "Basic %s", base64.b64encode(text.encode())
    ),
    "root": lambda ctx, text: logging.warning("using %s", text),
    "own handler": _log_by_own_handler,
    "thread": lambda ctx, text: _in_thread(text),
    "nothing": lambda ctx, text: logging.getLogger("library.other").warning("%s of %s", 1, 2, exc_info=OSError("x")),
}


def _in_thread(text: str) -> None:
    thread = threading.Thread(target=lambda: logging.getLogger("library.other").warning("using %s", text), name=text)
    thread.start()
    thread.join()


@tool(version="1.0.0", mutation_class="read_only", namespace="spill", permissions=[f"credentials:{NAME}"])
async def aside(ctx: Context, way: Which) -> str:
    """Let a credential that was lent out by something that is not Interlock's."""
    ASIDE[way](ctx, ctx.secret(NAME))
    return "done"


TOOLS = (aside, spill, asked, wrong, strict, choosy, inner, outer, number, repeat, rows, revoke)


@asynccontextmanager
async def opened(home: Path, *tools: Any, **settings: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        for one in tools or TOOLS:
            await app.journal.commit(publish(one))
            app.catalog.attach(one)
        yield app


class Leaks:
    """Everything that is left of what a test did, and what of it should not be there."""

    def __init__(self, app: Interlock, caplog: pytest.LogCaptureFixture) -> None:
        self.app = app
        self._caplog = caplog
        self._told: list[str] = []
        self.everything = ""
        app.listen(lambda event: self._told.append(f"event {event.document()}"))

    def tell(self, result: Result) -> Result:
        self._told.append(f"result {result.document()} {result.text()} {result.summary()} {result.metadata}")
        return result

    async def call(self, name: str, **given: Any) -> Result:
        """A call whose result and progress are looked through as well."""
        heard = self._told.append
        return self.tell(await self.app.call(name, on_progress=lambda said: heard(f"progress {said}"), **given))

    async def found(self, secrets: Sequence[str] = CANARIES) -> dict[str, list[str]]:
        """Where each secret is to be seen."""
        await self.app.journal.drain()
        places = {f"{text.split(' ')[0]} {number}": text for number, text in enumerate(self._told)}
        places |= {"log": self._caplog.text, "written": await asyncio.to_thread(_written, self.app.home)}
        self.everything = "".join(places.values())
        seen = {secret: [name for name, text in places.items() if secret in text] for secret in secrets}
        return {secret: where for secret, where in seen.items() if where}


def _written(home: Home) -> str:
    """Every file of a home and everything in its store, and how this process and those it has started were called."""
    return b"\n".join((everything_in(home), processes.called())).decode("latin-1")


@pytest_asyncio.fixture
async def leaks(home: Path, caplog: pytest.LogCaptureFixture) -> AsyncGenerator[Leaks]:
    caplog.set_level("DEBUG")
    async with opened(home) as app:
        await app.secrets.set(NAME, LENT, by="local:test")
        yield Leaks(app, caplog)


@DOORS
@LENDING
@pytest.mark.parametrize("lent", [True, False], ids=["lent", "sent"])
@pytest.mark.parametrize("way", SPILLS)
async def test_a_credential_gets_out_in_no_way(leaks: Leaks, way: str, lent: bool) -> None:
    given = {"way": way, "lent": lent, "key": "k", "session": "s", **ARGUMENTS}
    result = await leaks.call("spill.spill", **given)
    await leaks.call("spill.spill", **given)
    if result.ok:
        leaks.tell(await leaks.app.undo(result.invocation_id, key="undo"))
    assert await leaks.found() == {}


@DOORS
@LENDING
@pytest.mark.parametrize("way", ASIDE)
async def test_a_credential_gets_out_neither_by_other_loggers_nor_by_names(
    leaks: Leaks, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    result = await leaks.call("spill.aside", way=way)
    assert code(result) == ("E3401" if way == "name of an exception" else None)
    leaks.tell(result)
    assert await leaks.found() == {}
    assert not any(LENT in f"{vars(record)}" for record in caplog.records)
    assert caplog.records, "what is logged is not lost"
    assert LENT not in "".join(capsys.readouterr())
    logging.getLogger("library.other").warning("afterwards %s", LENT)
    assert caplog.messages[-1] == f"afterwards {LENT}", "records are as ever once nothing is lent"
    assert logging.getLogRecordFactory() is logging.LogRecord


async def test_records_without_a_credential_are_as_they_were_made(
    leaks: Leaks, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await leaks.call("spill.aside", way="nothing")).ok
    (record,) = [record for record in caplog.records if record.name == "library.other"]
    assert (record.msg, record.args) == ("%s of %s", (1, 2))
    assert record.exc_info is not None


KEY = "\n".join(
    ("-----BEGIN OPAQUE KEY-----", "c2Vj/cmV0LWxpbmUtb25l+LW9mLXR3bw", "c2VjcmV0LWxpbmUt/dHdvLW9mLXR3bw", "")
)


@DOORS
@pytest.mark.parametrize("way", SPILLS)
async def test_a_credential_of_several_lines_gets_out_in_no_way_and_line(leaks: Leaks, way: str) -> None:
    await leaks.app.secrets.set(NAME, KEY, by="local:test")
    result = await leaks.call("spill.spill", way=way, lent=True, key="k", session="s", **ARGUMENTS)
    if result.ok:
        leaks.tell(await leaks.app.undo(result.invocation_id, key="undo"))
    assert await leaks.found((KEY, *KEY.splitlines()[1:])) == {}


@DOORS
async def test_a_preview_shows_no_credential(leaks: Leaks) -> None:
    result = await leaks.call("spill.spill", way="result", lent=False, dry_run=True, **ARGUMENTS)
    assert "[REDACTED]" in result.unwrap()["impact"]
    assert await leaks.found() == {}


@DOORS
async def test_a_ticket_holds_credentials_sealed_and_shows_none(leaks: Leaks) -> None:
    app = leaks.app
    pending = await leaks.call("spill.asked", key="k", **ARGUMENTS)
    assert code(pending) == "E3208"
    ticket = await app.approvals.show(pending.metadata["pending"]["ticketId"])
    assert ticket.params == {"api_key": "[REDACTED]", "password": "[REDACTED]"}
    assert "[REDACTED]" in ticket.preview["impact"]
    await app.approvals.approve(ticket.id, by=REVIEWER, comment="agreed")
    assert (await leaks.call("spill.asked", key="k", **ARGUMENTS)).unwrap() == "[REDACTED] was used"
    assert await leaks.found() == {}


@DOORS
@pytest.mark.parametrize(
    ("name", "given", "refused"),
    [
        pytest.param("spill.wrong", {"password": PASSWORD}, "E3303", id="output"),
        pytest.param("spill.strict", {"api_key": API_KEY}, "E3301", id="input"),
        pytest.param("spill.strict", {"api_key": "key-1", "password": PASSWORD}, "E3301", id="unknown argument"),
        pytest.param("spill.choosy", {"password": PASSWORD}, "E3308", id="check"),
    ],
)
async def test_a_refusal_quotes_no_credential(leaks: Leaks, name: str, given: dict[str, str], refused: str) -> None:
    assert code(await leaks.call(name, **given)) == refused
    assert await leaks.found() == {}


@DOORS
@pytest.mark.parametrize(
    "way",
    [
        "result",
        "progress",
        "error details",
    ],
)
async def test_a_credential_that_is_a_number_is_still_one(leaks: Leaks, way: str) -> None:
    pin = "73519264"
    await leaks.app.secrets.set(NAME, pin, by="local:test")
    result = await leaks.call("spill.number", way=way)
    assert (result.ok, await leaks.found((pin,))) == (way != "error details", {})


@DOORS
@pytest.mark.parametrize(
    "options",
    [
        {"password": PASSWORD},
        {"deep": [{"api_key": API_KEY}]},
        {"password": [PASSWORD]},
        {"password": {"now": PASSWORD}},
    ],
)
async def test_a_credential_is_one_however_deep_it_lies(leaks: Leaks, options: dict[str, Any]) -> None:
    result = await leaks.call("spill.repeat", options=options)
    assert "[REDACTED]" in result.unwrap()
    assert await leaks.found() == {}


async def test_a_credential_that_is_a_common_word_leaves_the_form_of_a_result(leaks: Leaks) -> None:
    assert (await leaks.call("spill.rows", password="items")).unwrap() == ["a"]


@DOORS
async def test_a_credential_that_came_by_a_cursor_is_still_one(leaks: Leaks) -> None:
    page = await leaks.call("spill.rows", password=PASSWORD)
    assert page.unwrap() == ["a"]
    assert code(await leaks.call("spill.rows", cursor=page.metadata["pagination"]["cursor"])) == "E3401"
    assert await leaks.found() == {}


@DOORS
async def test_a_credential_that_a_hook_put_in_is_still_one(leaks: Leaks) -> None:
    leaks.app.hook(Hook(id="adds", when="pre", run=lambda seen: HookResult(updated_input={**seen.input, **ARGUMENTS})))
    given = {"way": "error message", "lent": False, "api_key": "none", "password": "none"}
    assert code(await leaks.call("spill.spill", key="k", **given)) == "E3401"
    assert await leaks.found() == {}


@DOORS
async def test_a_credential_that_names_what_is_changed_is_still_one(leaks: Leaks) -> None:
    assert (await leaks.call("spill.revoke", api_key=API_KEY, key="k")).ok
    assert await leaks.found() == {}


@DOORS
@pytest.mark.parametrize("way", ["raises", "stops", "adds", "reports", "says"])
async def test_a_hook_that_looks_at_credentials_lets_none_out(leaks: Leaks, way: str) -> None:
    def look(seen: Seen) -> HookResult:
        text = str(seen.input["password"])
        if way == "raises":
            raise ValueError(text)
        said: dict[str, Any] = {
            "stops": {"stop": text}, "adds": {"context": (text,)}, "reports": {"progress": text},
            "says": {"messages": (text,)},
        }  # fmt: skip
        return HookResult(**said[way])

    leaks.app.hook(Hook(id="looks", when="pre", run=look))
    await leaks.call("spill.spill", way="log", lent=False, key="k", **ARGUMENTS)
    assert await leaks.found() == {}


@DOORS
@pytest.mark.proves("LIFE-02")
@pytest.mark.parametrize("way", ["log", "error message", "stopped by a hook"])
async def test_a_credential_that_a_hook_told_before_it_was_lent_is_redacted_after_the_hooks(
    leaks: Leaks, way: str
) -> None:
    leaks.app.hook(Hook(id="tells", when="pre", run=lambda _: HookResult(messages=(f"mind {LENT}",))))
    if way == "stopped by a hook":
        leaks.app.hook(Hook(id="stops", when="post", run=lambda _: HookResult(stop="no", messages=(LENT,))))
    result = await leaks.app.call("spill.spill", way="log" if "hook" in way else way, lent=True, key="k", **ARGUMENTS)
    document = str(result.document())
    assert "mind [REDACTED]" in document
    assert LENT not in document
    assert result.ok is (way == "log")
    assert await leaks.found() == {}
    assert LENT not in await asyncio.to_thread(_written, leaks.app.home)


@DOORS
async def test_a_credential_that_is_handed_to_another_tool_is_still_one(leaks: Leaks) -> None:
    await leaks.call("spill.outer", key="k")
    assert await leaks.found() == {}


@DOORS
async def test_an_export_of_the_ledger_holds_no_credential(leaks: Leaks, home: Path) -> None:
    for number, (way, lent) in enumerate(itertools.product(SPILLS, (True, False))):
        await leaks.call("spill.spill", way=way, lent=lent, key=f"k{number}", **ARGUMENTS)
    exported = (await asyncio.to_thread(Cli(home.parent), "audit", "export")).out
    assert '"toolId":"spill.spill"' in exported
    assert not any(canary in exported for canary in CANARIES)
    assert await leaks.found() == {}
    assert "[REDACTED]" in leaks.everything


@DOORS
async def test_no_file_of_a_database_server_holds_a_credential(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tables with their dead rows, the write-ahead log, and a log of every statement with what it was given."""
    server = Server(("listen_addresses=", "fsync=off", "autovacuum=off", "log_statement=all"))
    try:
        async with opened(tmp_path / "home", store=server.address) as app:
            leaks = Leaks(app, caplog)
            await app.secrets.set(NAME, LENT, by="local:test")
            for number, (way, lent) in enumerate(itertools.product(SPILLS, (True, False))):
                given = {"way": way, "lent": lent, "key": f"k{number}", "session": f"s{number}", **ARGUMENTS}
                result = await leaks.call("spill.spill", **given)
                if result.ok:
                    leaks.tell(await app.undo(result.invocation_id, key=f"undo{number}"))
            pending = await leaks.call("spill.asked", key="asked", **ARGUMENTS)
            await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=REVIEWER, comment="agreed")
            assert (await leaks.call("spill.asked", key="asked", **ARGUMENTS)).ok
            for name, given in (("wrong", {"password": PASSWORD}), ("strict", {"api_key": API_KEY})):
                assert not (await leaks.call(f"spill.{name}", **given)).ok
            await leaks.call("spill.outer", key="outer")
            assert await leaks.found() == {}
        files = await asyncio.to_thread(server.files)
    finally:
        server.remove()
    parts = {part: b"\n".join(text for name, text in files.items() if name.startswith(part)) for part in SERVER_PARTS}
    for part, text in parts.items():
        assert any(form in text for form in forms("spill.spill")), f"{part} is where the server writes"
    found = [
        (name, one) for one in CANARIES for name, text in files.items() if any(form in text for form in forms(one))
    ]
    assert found == []
    assert any(b"[REDACTED]" in text for text in files.values())


SERVER_PARTS = "data/base/", "data/pg_wal/", "log"


def forms(text: str) -> tuple[bytes, ...]:
    """A text as it stands in tables and statements, and as the log shows bytes."""
    return text.encode(), text.encode().hex().encode(), base64.b64encode(text.encode()).rstrip(b"=")


# Lending


class Stage:
    """What the tools below did, and when they may go on."""

    def __init__(self) -> None:
        self.runs = 0
        self.seen: list[Any] = []
        self.contexts: list[Context] = []
        self.failure: Failure | None = None
        self.held = threading.Event()
        self.go = threading.Event()
        self.steps: list[Callable[[], Awaitable[Any] | None]] = []
        self.found: list[str] = []


stage = Stage()


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="lend", effects=[Effect("thing:a", "UPDATE")],
    permissions=[f"credentials:{NAME}"],
)  # fmt: skip
async def use(ctx: Context, which: Which) -> str:
    """Use a credential, the one that is named."""
    stage.runs += 1
    stage.contexts.append(ctx)
    stage.seen.append(ctx.secret(which))
    if stage.failure is not None:
        raise stage.failure
    return "used"


@use.preview
def _(which: str) -> Preview:
    return Preview(impact=which)


@use.compensate
async def _(result: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="lend")
async def bare(ctx: Context, which: Which) -> str:
    """Ask for a credential without having said so."""
    return ctx.secret(which)


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="lend", effects=[Effect("thing:a", "UPDATE")],
    permissions=[f"credentials:{NAME}"],
)  # fmt: skip
def run_on(ctx: Context, way: Which, password: Key) -> str:
    """Take a credential, outstay the time, and then do something with it."""
    held = ctx.secret(NAME)
    stage.held.set()
    assert stage.go.wait(60)
    try:
        stage.seen.append(ctx.secret(NAME))
    except Failure as failure:
        stage.seen.append(failure.code)
    if way == "fails":
        raise Failure("E3401", f"cannot use {held} and {password}", details={"with": held})
    if way == "crashes":
        raise type(held, (Exception,), {})
    ctx.log.warning("still using %s and %s", held, password)
    ctx.progress(f"still using {held}")
    ctx.partial(held)
    ctx.effect("thing:a", "UPDATE", after=held)
    return f"{held} {password}"


@run_on.compensate
async def _(result: str) -> None:
    return None


@pytest.fixture(autouse=True)
def _fresh_stage() -> None:
    stage.__init__()


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def lend(home: Path, time: FakeClock) -> AsyncGenerator[Interlock]:
    async with opened(home, use, bare, run_on, clock=time.clock) as app:
        await app.secrets.set(NAME, LENT, by="local:test")
        yield app


@LENDING
async def test_a_tool_gets_the_credential_that_its_manifest_names_and_no_other(lend: Interlock) -> None:
    await lend.secrets.set("other/token", "another", by="local:test")
    assert (await lend.call("lend.use", which=NAME, key="a")).ok
    assert stage.seen == [LENT]
    assert code(await lend.call("lend.use", which="other/token", key="b")) == "E3206"
    assert code(await lend.call("lend.bare", which=NAME)) == "E3206"
    assert stage.seen == [LENT]


@LENDING
async def test_a_credential_is_void_once_its_call_has_ended(lend: Interlock) -> None:
    await lend.call("lend.use", which=NAME, key="a")
    with pytest.raises(Failure) as refused:
        stage.contexts[0].secret(NAME)
    assert refused.value.code == "E3603"


@LENDING
async def test_a_rotation_between_two_calls_is_picked_up_by_the_second(lend: Interlock) -> None:
    await lend.call("lend.use", which=NAME, key="a")
    await lend.secrets.set(NAME, "rotated", by="local:test")
    await lend.call("lend.use", which=NAME, key="b")
    assert stage.seen == [LENT, "rotated"]


@tool(
    version="1.0.0", mutation_class="read_only", namespace="lend", permissions=[f"credentials:{NAME}"], timeout_s=4,
)  # fmt: skip
async def hold(ctx: Context, which: Which) -> list[str]:
    """Look at a credential at every step of what happens meanwhile."""
    found = stage.found = list[str]()
    for step in stage.steps:
        held = step()
        if held is not None:
            await held
        try:
            found.append("old" if ctx.secret(NAME) == LENT else "new")
        except Failure as failure:
            found.append(failure.code)
    return found


@LENDING
@pytest.mark.parametrize(
    ("options", "lasts_s"), [({}, 4.0), ({"timeout_s": 2.5}, 2.5), ({"deadline_s": 1.5}, 1.5)],
    ids=["the tool's timeout", "the call's timeout", "the deadline of whoever waits"],
)  # fmt: skip
async def test_a_credential_is_lent_for_as_long_as_the_call_may_take_and_no_longer(
    home: Path, time: FakeClock, options: dict[str, float], lasts_s: float
) -> None:
    async with opened(home, hold, clock=time.clock) as app:
        await app.secrets.set(NAME, LENT, by="local:test")
        given: dict[str, Any] = {name: value for name, value in options.items() if name != "deadline_s"}
        if "deadline_s" in options:
            given["deadline"] = Deadline(at=time.monotonic_s + options["deadline_s"])
        # Nothing of this waits, so nobody can end the call before it has looked.
        stage.steps = [lambda: time.advance(lasts_s - 0.001), lambda: time.advance(0.001)]
        result = await app.call("lend.hold", which="x", **given)
        assert result.ok or code(result) == "E3402"
        assert stage.found == ["old", "E3603"]


@LENDING
async def test_a_rotation_during_a_call_is_not_seen_by_it(home: Path, time: FakeClock) -> None:
    async with opened(home, hold, clock=time.clock) as app:
        await app.secrets.set(NAME, LENT, by="local:test")
        stage.steps = [lambda: None, lambda: app.secrets.set(NAME, "rotated", by="local:test"), lambda: None]
        assert (await app.call("lend.hold", which="x")).unwrap() == ["old", "old", "old"]
        stage.steps = [lambda: None]
        assert (await app.call("lend.hold", which="x")).unwrap() == ["new"]


@LENDING
async def test_a_replay_and_a_look_borrow_nothing(lend: Interlock) -> None:
    assert (await lend.call("lend.use", which=NAME, key="a")).ok
    await lend.secrets.remove(NAME, by="local:test")
    assert (await lend.call("lend.use", which=NAME, key="a")).replayed
    assert (await lend.call("lend.use", which=NAME, dry_run=True)).ok
    assert code(await lend.call("lend.use", which=NAME, key="b")) == "E3602"
    assert stage.runs == 1


async def _absent(app: Interlock, time: FakeClock) -> None:
    await app.secrets.remove(NAME, by="local:test")


async def _expired(app: Interlock, time: FakeClock) -> None:
    await app.secrets.set(NAME, LENT, by="local:test", expires_ms=time.now_ms + 1000)
    time.advance(1)


@pytest.mark.proves("EXEC-08")
@LENDING
@pytest.mark.parametrize(("damage", "refused"), [(_absent, "E3602"), (_expired, "E3603")])
async def test_a_credential_that_cannot_be_had_stops_the_call_and_leaves_its_key_free(
    lend: Interlock, time: FakeClock, damage: Callable[[Interlock, FakeClock], Any], refused: str
) -> None:
    await damage(lend, time)
    result = await lend.call("lend.use", which=NAME, key="a")
    assert (code(result), stage.runs) == (refused, 0)
    assert LENT not in str(result.document())
    await lend.secrets.set(NAME, "mended", by="local:test")
    assert (await lend.call("lend.use", which=NAME, key="a")).unwrap() == "used"
    assert stage.seen == ["mended"]


@pytest.mark.sqlite_only("on PostgreSQL, a data directory with another sealing key is not opened")
@pytest.mark.proves("EXEC-08")
async def test_a_credential_that_was_sealed_with_another_key_stops_the_call_until_it_is_set_again(home: Path) -> None:
    async with opened(home, use) as app:
        await app.secrets.set(NAME, LENT, by="local:test")
    (home / "keys" / "secrets.key").write_bytes(bytes(32))
    async with opened(home, use) as app:
        result = await app.call("lend.use", which=NAME, key="a")
        assert (code(result), stage.runs) == ("E3604", 0)
        assert LENT not in str(result.document())
        await app.secrets.set(NAME, "mended", by="local:test")
        assert (await app.call("lend.use", which=NAME, key="a")).ok
        assert stage.seen == ["mended"]


async def test_a_credential_that_cannot_be_had_uses_no_approval_up(leaks: Leaks) -> None:
    app = leaks.app
    pending = await app.call("spill.asked", key="k", **ARGUMENTS)
    await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=REVIEWER)
    await app.secrets.remove(NAME, by="local:test")
    assert code(await app.call("spill.asked", key="k", **ARGUMENTS)) == "E3602"
    await app.secrets.set(NAME, LENT, by="local:test")
    assert (await app.call("spill.asked", key="k", **ARGUMENTS)).ok


@pytest.fixture
def vault() -> Iterator[FakeVault]:
    fake = FakeVault()
    yield fake
    fake.close()


@asynccontextmanager
async def over_vault(home: Path, tmp_path: Path, vault: FakeVault, **more: Any) -> AsyncGenerator[Interlock]:
    token = tmp_path / "vault-token"
    token.write_text(TOKEN)
    settings = {"secrets": "vault", "vault_url": vault.address, "vault_token_file": token, **more}
    async with opened(home, use, bare, run_on, **settings) as app:
        yield app


@pytest.mark.proves("EXEC-08")
async def test_a_vault_that_is_down_stops_the_call_until_it_is_back(
    home: Path, tmp_path: Path, vault: FakeVault
) -> None:
    async with over_vault(home, tmp_path, vault) as app:
        vault.put(f"secret/data/{NAME}", value=LENT)
        vault.fails = (503, "Vault is sealed")
        assert code(await app.call("lend.use", which=NAME, key="a")) == "E3601"
        vault.fails = None
        assert (await app.call("lend.use", which=NAME, key="a")).ok
        assert stage.seen == [LENT]


@LENDING
async def test_a_credential_issued_for_a_call_is_refused_by_its_issuer_afterwards(
    home: Path, tmp_path: Path, vault: FakeVault
) -> None:
    async with over_vault(home, tmp_path, vault, vault_issued={NAME: "database/creds/reader"}) as app:
        assert (await app.call("lend.use", which=NAME, key="a")).ok
        (issued,) = stage.seen
        assert vault.leases == {}
        # Its term was that of the call, not of the role.
        assert [0 < term <= 30 for term in vault.terms.values()] == [True]
        password = issued.split('"password":"')[1].split('"')[0]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as service:
            answer = await service.get(f"{vault.address}/service", headers={"X-Credential": password})
        assert answer.status_code == 401


@pytest.mark.proves("EXEC-08")
@pytest.mark.parametrize("retry_after_ms", [5000, None])
async def test_a_credential_that_met_a_rate_limit_rests_and_the_next_call_gets_another(
    lend: Interlock, time: FakeClock, retry_after_ms: int | None
) -> None:
    await lend.secrets.set(NAME, "spare", slot="spare", by="local:test")
    stage.failure = Failure("E3504", "slow down", retry_after_ms=retry_after_ms)
    limited = await lend.call("lend.use", which=NAME, key="a")
    assert limited.error is not None
    assert (limited.error.code, limited.error.retry_after_ms) == ("E3504", retry_after_ms)
    stage.failure = None
    assert (await lend.call("lend.use", which=NAME, key="a")).ok
    assert stage.seen == [LENT, "spare"]
    time.advance((retry_after_ms or 60_000) / 1000)
    assert (await lend.call("lend.use", which=NAME, key="b")).ok
    assert stage.seen == [LENT, "spare", LENT]


@DOORS
@LENDING
@pytest.mark.parametrize("way", ["returns", "fails", "crashes"])
async def test_a_tool_that_outstays_its_time_can_neither_use_its_credential_nor_let_it_out(
    home: Path, time: FakeClock, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    caplog.set_level("DEBUG")
    async with opened(home, run_on, clock=time.clock) as app:
        await app.secrets.set(NAME, LENT, by="local:test")
        leaks = Leaks(app, caplog)
        given = {"way": way, "password": PASSWORD, "key": "k", "timeout_s": 5}
        running = asyncio.create_task(leaks.call("lend.run_on", **given))
        assert await asyncio.to_thread(stage.held.wait, 10)
        time.advance(6)
        cut_off = await running
        assert code(cut_off) == "E3402"
        stage.go.set()
        await lateness(app, cut_off)
        assert stage.seen == ["E3603"]
        await leaks.call("lend.run_on", **given)
        assert await leaks.found() == {}
