"""Every statement, seal and signature of every write fails in turn: the write happened wholly or not at all.

A flow of calls through the public API runs again and again, each time with another name and with the next step of its
writes failing. Four things must hold. Nothing of the unit that failed is in the tables or in the journal. The answer
says what happened: the same flow, sent again, comes to its end, and each effect happens once. Others who write at the
same time hear nothing of it. And in the end the journal and all tables beside it agree.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Caller, Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.audit.chain import verify
from interlock.authority.dids import make_did_key
from interlock.authority.identities import Identity
from interlock.authority.keys import make_private
from interlock.call.results import Result
from interlock.registry import quarantine
from interlock.store.home import Home
from interlock.store.port import Changed, StoreError, Unit
from interlock.store.sealing import Box
from interlock.store.signing import Signer
from interlock.store.transaction import Transaction
from interlock.store.writer import Writer
from tests.sample import TOOLS
from tests.support import checkpoint_tools
from tests.support.calls import code
from tests.thorough import THOROUGH

REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
OPERATOR = Caller(id="local:operator", scopes=frozenset({"tokens:issue", "tools:admin"}))
BUDGETS = [{"per": "tenant", "limit": 1_000_000}, {"per": "session", "limit": 1_000_000}]

done: Counter[str] = Counter()
# What happens to the home while a call runs, by the name that the call gives.
meanwhile: dict[str, Callable[[], None]] = {}

Text = Annotated[str, Field(description="any text", examples=["a"])]
Size = Annotated[int, Field(description="how long the result is", examples=[1])]


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="fault",
    effects=[Effect("thing:{name}", "UPDATE"), Effect("session:last", "UPDATE")], estimated_cost=1.0,
)  # fmt: skip
async def work(ctx: Context, name: Text, size: Size = 1) -> str:
    """Change something, keep something in the session, cost something, and say something long."""
    done[name] += 1
    meanwhile.pop(name, lambda: None)()
    ctx.effect(f"thing:{name}", "UPDATE", before=0, after=1)
    ctx.session["last"] = name
    ctx.cost(external_api=0.25)
    ctx.compensate_with(name=name)
    return "x" * size


@work.preview
def _(name: str, size: int) -> Preview:
    return Preview(impact=f"{name}, {size}")


@work.compensate
async def _(name: str) -> None:
    done[f"undo {name}"] += 1


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="fault", effects=[Effect("mail:{to}", "CREATE")])
async def send(to: Text) -> str:
    """Send what cannot be taken back."""
    done[to] += 1
    return to


@send.preview
async def _(to: str) -> Preview:
    return Preview(impact=to)


class Faults:
    """Counts the steps of writes, and lets one of them fail."""

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift
        self._fails_at: int | None = None
        self._count = 0
        self.hit = ""
        self.wrong: list[str] = []
        self._before: tuple[str, list[tuple[Any, ...]]] | None = None
        self._undone: list[bytes] = []

    def arm(self, at: int) -> None:
        self._fails_at, self._count, self.hit = at, 0, ""

    def disarm(self) -> None:
        self._fails_at = None

    def step(self, what: str) -> None:
        if self._fails_at is None:
            return
        self._count += 1
        if self._count == self._fails_at:
            self.hit = what
            raise ERRORS[(self._count + self._shift) % len(ERRORS)]()

    def perform(self, unit: Unit[Any], transaction: Transaction) -> Any:
        """Run a unit and, before the next one, compare what the database holds when it has failed."""
        name = getattr(unit, "__qualname__", "a unit")
        now = _dump(transaction)
        self._compare(transaction, now)
        self._before = None
        transaction.__class__ = _Failing
        _Failing.faults = self
        start, hit = len(transaction.rows), self.hit
        try:
            return unit(transaction)
        except BaseException:
            if self.hit != hit:
                self._before = name, now
                self._undone = [row[3] for row in transaction.rows[start:]]
            raise
        finally:
            transaction.__class__ = Transaction

    def _compare(self, transaction: Transaction, now: list[tuple[Any, ...]]) -> None:
        if self._before is None:
            return
        name, before = self._before
        if now != before:
            self.wrong.append(f"{name} left something in the tables when it failed at: {self.hit}")
        for body in self._undone:
            if transaction.one("SELECT 1 FROM journal WHERE body = ?", (body,)) is not None:
                self.wrong.append(f"{name} left a record when it failed at: {self.hit}")


class _Failing(Transaction):
    __slots__ = ()
    faults: Faults

    def execute(self, statement: str, parameters: Any = ()) -> Changed:
        self.faults.step(statement)
        return super().execute(statement, parameters)

    def append(self, kind: str, call: str, body: bytes) -> None:
        self.faults.step(f"append {kind}")
        super().append(kind, call, body)


class _Cursor:
    """The writer's cursor: BEGIN, the head, the records of the batch, COMMIT."""

    def __init__(self, cursor: sqlite3.Cursor, faults: Faults) -> None:
        self._cursor = cursor
        self._faults = faults

    def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
        self._faults.step(statement)
        return self._cursor.execute(statement, *given)

    def executemany(self, statement: str, *given: Any) -> sqlite3.Cursor:
        self._faults.step(statement)
        return self._cursor.executemany(statement, *given)


_ASIDE = ("journal", "anchor", "segment", "alembic_version")


def _dump(transaction: Transaction) -> list[tuple[Any, ...]]:
    tables = transaction.all("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    names = [name for (name,) in tables if name not in _ASIDE]
    return [(name, *row) for name in names for row in transaction.all(f"SELECT * FROM {name}")]


@asynccontextmanager
async def opened(home: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, budgets=BUDGETS) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        await app.add(work, send, checkpoint_tools.awaits)
        yield app


# Flows. Each is sent again after a fault, and must then come to its end.


async def _ok(result: Awaitable[Result]) -> Result:
    answer = await result
    if answer.error is not None:
        raise answer.error
    return answer


async def writing(app: Interlock, name: str) -> None:
    first = await _ok(app.call("fault.work", name=name, key=name, session=name))
    again = await _ok(app.call("fault.work", name=name, key=name, session=name))
    assert again.replayed
    assert first.value == again.value == "x"
    assert done[name] == 1


async def undoing(app: Interlock, name: str) -> None:
    first = await _ok(app.call("fault.work", name=name, key=name, session=name))
    made = first.metadata.get("original_invocation_id", first.invocation_id)
    await _ok(app.undo(made, key=f"undo-{name}"))
    assert (await _ok(app.undo(made, key=f"undo-{name}"))).replayed
    assert done[f"undo {name}"] == 1


async def telling_much(app: Interlock, name: str) -> None:
    first = await _ok(app.call("fault.work", name=name, size=30_000, key=name, session=name))
    again = await _ok(app.call("fault.work", name=name, size=30_000, key=name, session=name))
    assert again.replayed
    assert again.value == first.value == "x" * 30_000
    assert done[name] == 1


async def agreeing(app: Interlock, name: str) -> None:
    waiting = await app.call("fault.send", to=name, key=name)
    if waiting.pending:
        ticket = waiting.metadata["pending"]["ticketId"]
        if app.journal.reader.all("SELECT state FROM ticket WHERE id = ?", (ticket,)) == [("PENDING",)]:
            await app.approvals.approve(ticket, by=REVIEWER)
    await _ok(app.call("fault.send", to=name, key=name))
    assert (await _ok(app.call("fault.send", to=name, key=name))).replayed
    assert done[name] == 1


async def refusing(app: Interlock, name: str) -> None:
    waiting = await app.call("fault.send", to=name, key=name)
    if waiting.pending:
        await app.approvals.deny(waiting.metadata["pending"]["ticketId"], by=REVIEWER, comment="no")
        waiting = await app.call("fault.send", to=name, key=name)
    if code(waiting) != "E3209":
        assert waiting.error is not None
        raise waiting.error
    assert done[name] == 0


async def saving(app: Interlock, name: str) -> None:
    script = [["insist", "phase_complete", {"at": name}], ["insist", "milestone_reached", {"at": name}]]
    assert (await _ok(app.call("check.awaits", script=script))).value == []


async def trusting(app: Interlock, name: str) -> None:
    did = AGENTS.setdefault(name, make_did_key(make_private("EdDSA").public_key()))
    if await app.identities.look_up(did) is None:
        await app.identities.register(Identity(did=did, name=name), by="test")
    token = await app.tokens.issue(subject=did, by=OPERATOR)
    await app.tokens.verifier.verify(token)
    await app.tokens.revoke(token, reason="over", by=OPERATOR)
    with pytest.raises(Failure):
        await app.tokens.verifier.verify(token)


AGENTS: dict[str, str] = {}


async def keeping_out(app: Interlock, name: str) -> None:
    await app.journal.commit(quarantine.impose(f"digest of {name}", f"fault.{name}", name, "caught"))
    await app.lift_quarantine(f"fault.{name}", reason="looked at", by=OPERATOR)


async def housekeeping(app: Interlock, name: str) -> None:
    await app.charge(name, part="retrieval", amount=0.5, key=name)
    await app.maintain()


FLOWS: tuple[Callable[[Interlock, str], Coroutine[Any, Any, None]], ...] = (
    writing, undoing, telling_much, agreeing, refusing, saving, trusting, keeping_out, housekeeping,
)  # fmt: skip
ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: StoreError("disk I/O error"),
    lambda: Failure("E3604", "the key cannot be read"),
    lambda: ValueError("unforeseen"),
)
# Each step fails in one of the ways; in a thorough run, in each of them.
SHIFTS = range(len(ERRORS)) if THOROUGH else (0,)
MOST_STEPS = 400


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
async def test_a_write_that_fails_at_any_step_has_not_happened_and_can_be_sent_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, flow: Callable[[Interlock, str], Coroutine[Any, Any, None]], shift: int
) -> None:
    done.clear()
    faults = Faults(shift)
    seal, sign = Box.seal, Signer.sign

    def failing_seal(self: Box, *given: Any, **more: Any) -> bytes:
        faults.step("seal")
        return seal(self, *given, **more)

    def failing_sign(self: Signer, *given: Any) -> bytes:
        faults.step("sign")
        return sign(self, *given)

    async with opened(home) as app:
        monkeypatch.setattr(Writer, "perform", staticmethod(faults.perform))
        monkeypatch.setattr(Box, "seal", failing_seal)
        monkeypatch.setattr(Signer, "sign", failing_sign)
        journal: Any = app.journal
        journal.writer._cursor = _Cursor(journal.writer._cursor, faults)
        reached = 0
        for at in range(1, MOST_STEPS):
            name = f"{flow.__name__}-{at}"
            faults.arm(at)
            try:
                await flow(app, name)
            except (Failure, ValueError, AssertionError) as failure:
                if not faults.hit:
                    raise AssertionError(f"{flow.__name__} failed by itself") from failure
            faults.disarm()
            if not faults.hit:
                reached = at
                break
            await app.journal.drain()
            try:
                await flow(app, name)
            except Exception as failure:
                raise AssertionError(f"sent again after a fault at {faults.hit!r}") from failure
            assert not faults.wrong
        assert 5 < reached < MOST_STEPS
    assert verify(Home(home)).faults == ()


@pytest.mark.parametrize("shift", SHIFTS)
async def test_others_in_the_batch_of_a_write_that_fails_hear_nothing_of_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    done.clear()
    faults = Faults(shift)

    def perform(unit: Unit[Any], transaction: Transaction) -> Any:
        """Fail the units of one call alone."""
        transaction.__class__ = _Failing
        _Failing.faults = faults if _about(unit) == "victim" else Faults()
        try:
            return unit(transaction)
        finally:
            transaction.__class__ = Transaction

    async with opened(home) as app:
        monkeypatch.setattr(Writer, "perform", staticmethod(perform))
        at = 0
        for at in range(1, MOST_STEPS):
            faults.arm(at)
            names = [f"{kind}-{at}" for kind in ("left", "victim", "right")]
            sent = (app.call("fault.work", name=name, key=name, session=name) for name in names)
            left, _, right = await asyncio.gather(*sent)
            assert left.ok
            assert right.ok
            faults.disarm()
            again = await app.call("fault.work", name=names[1], key=names[1], session=names[1])
            assert again.ok
            assert [done[name] for name in names] == [1, 1, 1]
            if not faults.hit:
                break
        assert at > 5
    assert verify(Home(home)).faults == ()


def _about(unit: Any) -> str:
    """The kind of caller that a unit is about: the first part of the key of its call."""
    cells = dict(zip(unit.__code__.co_freevars, unit.__closure__ or (), strict=True))
    key: str | None = None
    if "wanted" in cells:
        key = cells["wanted"].cell_contents.key
    elif "call" in cells:
        key = cells["call"].cell_contents.request.key
    return (key or "").partition("-")[0]


@pytest.mark.parametrize("size", [1, 30_000])
async def test_an_outcome_that_cannot_be_sealed_is_owed_and_written_once_it_can(home: Path, size: int) -> None:
    done.clear()
    async with opened(home) as app:
        assert (await app.call("fault.work", name="first", key="first", session="s")).ok
        key_file = home / "keys" / "secrets.key"
        meanwhile["a"] = lambda: key_file.chmod(0o644)
        unsealed = await app.call("fault.work", name="a", size=size, key="a", session="s")
        assert code(unsealed) == "E3409"
        assert unsealed.error is not None
        assert unsealed.error.details is not None
        assert unsealed.error.details["executed"]
        assert app.journal.reader.all("SELECT state FROM reservation WHERE key = 'a'") == [("executing",)]
        assert verify(Home(home)).intact
        key_file.chmod(0o600)
        assert (await app.call("fault.work", name="b", key="b", session="s")).ok
        again = await app.call("fault.work", name="a", size=size, key="a", session="s")
        assert (again.replayed, again.value, done["a"]) == (True, "x" * size, 1)
        assert (await app.undo(unsealed.invocation_id, key="undo")).ok
        assert done["undo a"] == 1
    assert verify(Home(home)).intact
