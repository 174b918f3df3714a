"""Notifies approvers: the courier sends the rows that tickets left in the table `notification`.

    due ─► sending ─► sent                a receiver accepted it
     │        │  └──► failed              no receiver ever will, or not before the ticket expires
     │        └─► retry ─► sending …      not now; again after a growing pause
     └─► dropped                          decided before it could be sent

A row is claimed in a transaction, so several processes share the work and each row is sent by one of them. If the
process that claimed a row dies, another takes the row over. A process may die between sending and recording it, so a
message can arrive twice, under the same id; it is never lost.

Each channel is a lane of its own. A channel that hangs or fails delays only its own messages. It never delays tickets:
they expire by the store's clock, whether anybody was notified or not.

INVARIANT: rows, records, logs and errors name a channel and never its address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from interlock.core.errors import Failure
from interlock.core.threads import DISK
from interlock.data.canonical import encode
from interlock.store import notifications, records

if TYPE_CHECKING:
    from interlock.approvals.services import DeliveryOutcome, NotificationService
    from interlock.approvals.webhook import Webhooks
    from interlock.call.channels import Channel
    from interlock.core.clock import Clock
    from interlock.core.supervise import Supervisor
    from interlock.data.schema import Json
    from interlock.net.addresses import Resolve
    from interlock.store.notifications import DueRow, Undelivered
    from interlock.store.port import Reader, Store, Transaction, Unit
    from interlock.store.sealing import Box

# Returns the values of a secret, newest first. There are several texts or lines while a secret is being rotated.
Secrets = Callable[[str], Awaitable[Sequence[str]]]

ATTEMPTS = 8
ATTEMPT_S = 10.0  # of a webhook; `notify_timeout_s` for services of apprise
FAILING_AFTER = 3
AT_ONCE = 4
_FIRST_PAUSE_MS, _GROWTH, _LONGEST_PAUSE_MS = 5_000, 4, 3_600_000
_log = logging.getLogger("interlock.notify")


async def undelivered(journal: Store, *, ticket: str | None = None, limit: int = 50) -> list[Undelivered]:
    """List notifications that failed or are being retried, the latest first."""
    return await journal.read(lambda reader: notifications.undelivered(reader, ticket, limit))


# many methods: the steps of one delivery, over the same lanes and limits
class Courier:
    """Sends due notifications. One per process; belongs to the event loop."""

    def __init__(
        self,
        journal: Store,
        channels: Iterable[Channel],
        *,
        owner: str,
        alive: Callable[[str], bool],
        clock: Clock,
        secrets: Secrets,
        box: Box,
        supervisor: Supervisor,
        attempt_s: float = ATTEMPT_S,
        alert: Callable[[str, int, str], None] = lambda channel, failures, reason: None,
        webhooks: Webhooks | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self._journal = journal
        self._channels = {channel.name: channel for channel in channels}
        self._owner = owner
        self._alive = alive
        self._clock = clock
        self._secrets = secrets
        self._box = box
        self._supervisor = supervisor
        self._webhooks = webhooks
        self._resolve = resolve
        self._services = {
            channel.name: self._service(channel, attempt_s)
            for channel in self._channels.values()
            if channel.url is not None
        }
        self._alert = alert
        self._failures: dict[str, int] = {}
        self._alerted: set[str] = set()
        self._lanes: dict[str, asyncio.Task[int]] = {}
        self._gone: set[str] = set()

    def _service(self, channel: Channel, attempt_s: float) -> NotificationService:
        # Loaded where a channel needs it, as the client of HTTP and what resolves names.
        from interlock.approvals.services import NotificationService

        return NotificationService(channel, self._resolver(), attempt_s)

    def _resolver(self) -> Resolve:
        from interlock.net.addresses import resolve_by_system

        return self._resolve or resolve_by_system

    async def wake(self) -> None:
        """Start sending what is due, without waiting for it."""
        for name in await self._due_channels():
            if name not in self._lanes:
                self._lanes[name] = self._supervisor.spawn(f"notifications by {name}", self._run_lane(name))

    async def deliver_due(self) -> int:
        """Try every due notification once and record the outcome. Returns the number of messages tried."""
        await self.wake()
        lanes = list(self._lanes.values())
        if lanes:
            await asyncio.wait(lanes)
        return sum(lane.result() for lane in lanes if not lane.cancelled())

    async def close(self) -> None:
        """Stop. Messages being sent stay claimed until this process has ended, and are then sent by another."""
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.cancel()
        if lanes:
            await asyncio.wait(lanes)
        for service in self._services.values():
            await service.close()
        if self._webhooks is not None:
            await self._webhooks.close()

    # Lanes

    async def _due_channels(self) -> set[str]:
        now_ms = self._clock.now_ms()

        def due(reader: Reader) -> set[str]:
            lanes = notifications.lanes(reader, now_ms)
            return {channel for channel, state, owner in lanes if self._may_take(state, owner)}

        return await self._journal.read(due)

    def _may_take(self, state: str, owner: str | None) -> bool:
        # A lane claims rows only when it is sending nothing, so a row that is still ours was left behind.
        return state != "sending" or owner is None or owner == self._owner or not self._alive(owner)

    async def _run_lane(self, name: str) -> int:
        tried = 0
        try:
            while claimed := await self._journal.commit(self._claim(name)):
                tried += len(claimed)
                # All of them end before a failure ends the lane, so that rows it leaves are really left behind.
                ended = await asyncio.gather(*map(self._deliver, claimed), return_exceptions=True)
                for error in filter(None, ended):
                    raise error
        except Failure as failure:  # the journal cannot be written; the rows are still there when it can
            _log.warning("notifications wait: %s", failure.message)
        finally:
            # INVARIANT: no turn of the loop lies between the claim that found nothing and this line, so a writer that
            # wakes the courier after writing a row either is seen by that claim or starts a new lane.
            del self._lanes[name]
            if name in self._services:
                await self._services[name].release()
        return tried

    def _claim(self, name: str) -> Unit[list[DueRow]]:
        """Unit that claims the next rows of a channel and closes those whose ticket no longer needs a decision."""
        # A service has one process: messages that wait for it must not use up their time waiting.
        at_once = 1 if name in self._services else AT_ONCE

        def unit(transaction: Transaction) -> list[DueRow]:
            claimed: list[DueRow] = []
            for due in notifications.due(transaction, name, transaction.now_ms):
                if len(claimed) == at_once or not self._may_take(due.state, due.owner):
                    continue
                if due.ticket_state not in ("PENDING", "AUTO_DENIED"):
                    _finish(transaction, due, "dropped", "the ticket was decided first")
                elif due.expires_ms <= transaction.now_ms:
                    _finish(transaction, due, "failed", "E3704 the ticket expired before this could be delivered")
                else:
                    notifications.claim(transaction, due.id, self._owner)
                    claimed.append(due._replace(attempts=due.attempts + 1))
            return claimed

        return unit

    # One message

    async def _deliver(self, due: DueRow) -> None:
        outcome = await self._attempt(due)
        self._count(due.channel, outcome)
        await self._journal.commit(self._note(due, outcome, max(self._pause_ms(due.attempts), outcome.wait_ms)))

    def _count(self, channel: str, outcome: DeliveryOutcome) -> None:
        """Raise an alert when a channel has failed several times in a row or gives up; once until it succeeds."""
        if outcome.result == "sent":
            self._failures.pop(channel, None)
            self._alerted.discard(channel)
            return
        failures = self._failures[channel] = self._failures.get(channel, 0) + 1
        if channel not in self._alerted and (failures >= FAILING_AFTER or outcome.result == "failed"):
            self._alerted.add(channel)
            self._alert(channel, failures, outcome.error)

    async def _attempt(self, due: DueRow) -> DeliveryOutcome:
        from interlock.approvals.services import DeliveryOutcome

        channel = self._channels.get(due.channel)
        if channel is None:
            return DeliveryOutcome("failed", f"E3004 there is no channel `{due.channel}` in the settings")
        if due.channel in self._gone:
            return DeliveryOutcome("failed", "E3704 the receiver said it is gone; correct the channel and start again")
        if channel.console:
            return DeliveryOutcome("sent")
        try:
            outcome = await (self._post(channel, due) if channel.webhook is not None else self._send(channel, due))
        except TimeoutError:
            return DeliveryOutcome("retry", "E3704 no answer in time")
        except Failure as failure:
            if failure.code == "E3406":  # its message names the host, which may be secret
                return DeliveryOutcome(
                    "failed", "E3406 the channel leads to an address that is not public; see allow_private"
                )
            # A missing secret or a mistyped address: an operator may correct it while retries go on.
            return DeliveryOutcome("retry", f"{failure.code} {failure.message}")
        except Exception as error:  # noqa: BLE001 - a channel's edge; the message and trace may hold the address
            _log.error("channel %s broke: %s", channel.name, type(error).__name__)
            return DeliveryOutcome("retry", f"E3000 the channel broke: {type(error).__name__}")
        if outcome.gone:
            self._gone.add(channel.name)
        return outcome

    async def _post(self, channel: Channel, due: DueRow) -> DeliveryOutcome:
        assert channel.webhook is not None
        # The signed text of a webhook is separated by full stops, so an id must not contain any.
        message_id = due.id.replace(".", "_")
        event = "approval.requested" if due.step == 0 else "approval.escalated"
        body = encode({"type": event, "id": message_id, "data": await self._message(due)})
        async with asyncio.timeout(ATTEMPT_S):
            if self._webhooks is None:
                # Loaded where a channel needs it: it loads a client of HTTP.
                from interlock.approvals.webhook import Webhooks

                self._webhooks = Webhooks(self._clock, resolve=self._resolver())
            return await self._webhooks.send(
                channel.webhook.get_secret_value(),
                body,
                await self._secrets_of(channel),
                message_id,
                allow_private=channel.allow_private,
            )

    async def _send(self, channel: Channel, due: DueRow) -> DeliveryOutcome:
        # Loaded where there is a channel: models, and what starts processes.
        from interlock.approvals.services import Broken, DeliveryOutcome
        from interlock.call.channels import SECRET

        assert channel.url is not None
        url = channel.url.get_secret_value()
        if SECRET in url:
            async with asyncio.timeout(ATTEMPT_S):
                url = url.replace(SECRET, quote((await self._secrets_of(channel))[0], safe=""))
        try:
            if await self._services[channel.name].send(url, *_in_words(await self._message(due), due.step)):
                return DeliveryOutcome("sent")
        except Broken:
            return DeliveryOutcome(
                "retry", "E3704 the process that sends for the channel broke off; its memory is limited"
            )
        return DeliveryOutcome("retry", "E3704 the service did not take the message")

    async def _message(self, due: DueRow) -> Json:
        """Build the message. A row of an older version contains it; otherwise it is made from the ticket."""
        if due.body:
            return orjson.loads(due.body)
        from interlock.approvals import tickets  # loaded where there is something to send

        ticket = await self._journal.read(lambda reader: tickets.load(reader, due.ticket))
        return tickets.message(ticket.opened(self._box), due.step)

    async def _secrets_of(self, channel: Channel) -> list[str]:
        if channel.secret is not None:
            texts = await self._secrets(channel.secret)
        else:
            assert channel.secret_file is not None
            try:
                texts = [await DISK.run(channel.secret_file.read_text)]
            except (OSError, UnicodeDecodeError):
                texts = ()
        secrets = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
        if not secrets:
            raise Failure("E3602", f"the secret of channel `{channel.name}` cannot be found; store it first")
        return secrets

    def _pause_ms(self, attempts: int) -> int:
        """Return the pause after a number of attempts: random, up to a growing bound, so that many
        clients spread out.
        """
        bound = min(_FIRST_PAUSE_MS * _GROWTH ** (attempts - 1), _LONGEST_PAUSE_MS)
        return int.from_bytes(self._clock.random_bytes(4), "big") * bound >> 32

    def _note(self, due: DueRow, outcome: DeliveryOutcome, pause_ms: int) -> Unit[None]:
        def unit(transaction: Transaction) -> None:
            if notifications.owner(transaction, due.id) != self._owner:
                return  # taken over by another process, which records the outcome
            next_ms = transaction.now_ms + pause_ms
            if outcome.result == "retry" and due.attempts < ATTEMPTS and next_ms < due.expires_ms:
                notifications.retry(transaction, due.id, next_ms, outcome.error)
            else:
                _finish(transaction, due, "sent" if outcome.result == "sent" else "failed", outcome.error or None)

        return unit


_ACTS = {"sent": "notified", "failed": "notification_failed", "dropped": "notification_dropped"}


def _finish(transaction: Transaction, due: DueRow, state: str, error: str | None) -> None:
    notifications.finish(transaction, due.id, state, error)
    facts: Json = {"act": _ACTS[state], "channel": due.channel, "step": due.step, "attempts": due.attempts}
    if error is not None:
        facts["error"] = error
    transaction.append("approval", due.ticket, records.plain("approval", due.ticket, transaction.now_ms, **facts))


def _in_words(body: Json, step: int) -> tuple[str, str]:
    """Make title and text of a message for people."""
    still = "still " if step else ""
    # Values come from agents; with each on one line, none can pretend to be another.
    facts = {name: _on_one_line(value) for name, value in body.items() if value not in ("", {}, None)}
    text = "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items())
    return f"Approval {still}needed: {facts.get('tool', 'a call')}", text


def _on_one_line(value: Any) -> str:
    text = value if isinstance(value, str) else encode(value).decode()
    return " ".join(text.split())
