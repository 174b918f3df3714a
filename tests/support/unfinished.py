"""Business that is not finished when a store is copied: a call that waits for a person, and a service left alone."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from interlock import Caller, Effect, Failure, Field, Interlock, Preview, tool
from interlock.approvals.ticket import Ticket
from interlock.resilience.services import Health
from tests.support.calls import code, until

REVIEWER = Caller(id="local:ben", groups=frozenset({"approvers"}))
Account = Annotated[str, Field(description="an account", examples=["cash"])]


class Bank:
    """A service, and what came of the calls to it."""

    def __init__(self) -> None:
        self.down = False
        self.asked = 0
        self.paid: list[str] = []


bank = Bank()


@tool(
    version="1.0.0", mutation_class="read_only", namespace="bank", external_service="bank",
    breaker={"failure_threshold": 2, "timeout_seconds": 3600},
)  # fmt: skip
async def balance(account: Account) -> int:
    """Ask a service for the balance of an account."""
    bank.asked += 1
    if bank.down:
        raise Failure("E3502", "the bank does not answer")
    return 1


@tool(
    version="1.0.0", mutation_class="write_irreversible", namespace="bank",
    effects=[Effect("account:{account}", "UPDATE")],
)  # fmt: skip
async def pay(account: Account) -> str:
    """Pay from an account, which a person has to agree to."""
    bank.paid.append(account)
    return account


@pay.preview
def _(account: str) -> Preview:
    return Preview(impact=f"{account} is paid")


TOOLS = (balance, pay)


class Unfinished(NamedTuple):
    """A ticket, and the state of a breaker, as they were."""

    ticket: Ticket
    breaker: Health


async def begin(app: Interlock) -> Unfinished:
    """Have a call wait for a person, and a service fail until it is left alone."""
    bank.__init__()
    await app.add(*TOOLS)
    bank.down, bank.asked = True, 0
    for _ in range(2):
        assert code(await app.call("bank.balance", account="cash")) == "E3502"
    assert code(await app.call("bank.balance", account="cash")) == "E3501"
    await until(lambda: app.journal.reader.all("SELECT 1 FROM breaker"))
    waiting = await app.call("bank.pay", account="cash", key="pay")
    assert code(waiting) == "E3208"
    return Unfinished(await app.approvals.show(waiting.metadata["pending"]["ticketId"]), breaker(app))


def breaker(app: Interlock) -> Health:
    (found,) = [one for one in app.gateway.services.snapshot() if one.service == "bank"]
    return found


async def finish(app: Interlock, left: Unfinished) -> None:
    """Elsewhere the ticket is the same and can be decided, and the service is left alone as long."""
    for one in TOOLS:
        app.catalog.attach(one)
    bank.down = False
    refused = await app.call("bank.balance", account="cash")
    assert (code(refused), bank.asked) == ("E3501", 2)
    found = breaker(app)
    assert (found.state, left.breaker.state) == ("open", "open")
    assert 0 < found.retry_after_ms <= left.breaker.retry_after_ms
    assert await app.approvals.show(left.ticket.id) == left.ticket
    assert left.ticket.state == "PENDING"
    assert code(await app.call("bank.pay", account="cash", key="pay")) == "E3208"
    await app.approvals.approve(left.ticket.id, by=REVIEWER)
    assert (await app.approved_calls.resume(left.ticket.id)).ok
    assert bank.paid == ["cash"]
