"""The courier: whoever must be told is told once; a channel that fails is tried again, seen, and in nobody's way."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pydantic
import pytest
import pytest_asyncio
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.approvals import notify
from interlock.approvals.notify import Courier, undelivered
from interlock.approvals.webhook import verify
from interlock.call.channels import Channel
from interlock.core.errors import Failure
from interlock.core.supervise import Supervisor
from interlock.store import tables
from interlock.store.homes import home_at
from interlock.store.instance import Instance
from interlock.store.journal import Journal
from interlock.store.port import Transaction
from interlock.store.sealing import Box
from interlock.store.signing import Signer
from interlock.testing import FakeClock
from tests import warm
from tests.support.stores import bury
from tests.support.webhooks import OLDER, SECRET, Answer, Names, Receiver

TOLD = pytest.mark.supports("HITL-06")
ONCE = pytest.mark.supports("HITL-05")

# A service of apprise imports it.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")

HOUR_MS = 3_600_000
START_MS = 1_800_000_000_000


async def secrets(name: str) -> Sequence[str]:
    if name != "hook":
        raise Failure("E3602", f"there is no secret `{name}`")
    return [f"{SECRET}\n{OLDER}\n"]


class Post:
    """A home with couriers on it, as several processes would have them."""

    def __init__(self, path: Path) -> None:
        self.home = home_at(path)
        self.home.prepare()
        self.time = FakeClock(START_MS)
        self.open: list[tuple[Courier, Journal, Instance]] = []
        self.journal = self._journal()

    def _journal(self) -> Journal:
        return Journal(self.home, clock=self.time.clock, signer=Signer(self.home.keys))

    def courier(self, *channels: Channel, **options: Any) -> Courier:
        instance = self.home.instance(f"{len(self.open):026}")
        journal = self._journal()
        courier = Courier(
            journal,
            channels,
            owner=instance.id,
            alive=instance.alive,
            clock=self.time.clock,
            secrets=options.pop("secrets", secrets),
            box=Box(self.home.keys),
            supervisor=Supervisor(self.time.clock),
            **options,
        )
        self.open.append((courier, journal, instance))
        return courier

    async def write(self, channel: str, *, ticket: str = "T1", step: int = 0, lives_ms: int = HOUR_MS) -> str:
        """Leave word as a ticket does."""
        notification = f"{ticket}.{step}.{channel}"
        body = {"ticket": ticket, "tool": "bank.pay@1.0.0", "caller": "ann", "reason": "two\nlines", "impact": ""}

        def unit(transaction: Transaction) -> None:
            row: dict[str, Any] = {
                column.name: b""
                if isinstance(column.type, sa.LargeBinary)
                else 0
                if column.name.endswith("_ms")
                else ""
                for column in tables.ticket.columns
                if not column.nullable
            } | {"id": ticket, "state": "PENDING", "step": step, "expires_ms": START_MS + lives_ms}
            row |= {"params": b"", "preview": b""}  # sealed values
            places = ", ".join("?" * len(row))
            transaction.execute(
                f"INSERT INTO ticket ({', '.join(row)}) VALUES ({places}) ON CONFLICT DO NOTHING", [*row.values()]
            )
            transaction.execute(
                "INSERT INTO notification (id, ticket, step, channel, body, state, attempts, next_ms)"
                " VALUES (?, ?, ?, ?, ?, 'due', 0, ?)",
                (notification, ticket, step, channel, orjson.dumps(body).decode(), transaction.now_ms),
            )

        await self.journal.commit(unit)
        return notification

    async def set(self, statement: str, *parameters: Any) -> None:
        def unit(transaction: Transaction) -> None:
            transaction.execute(statement, parameters)

        await self.journal.commit(unit)

    def states(self) -> list[str]:
        return [state for (state,) in self.journal.reader.all("SELECT state FROM notification ORDER BY id")]

    def acts(self) -> list[dict[str, Any]]:
        rows = self.journal.reader.all("SELECT body FROM journal WHERE kind = 'approval' ORDER BY seq")
        return [orjson.loads(body) for (body,) in rows]

    async def close(self) -> None:
        for courier, journal, instance in self.open:
            await courier.close()
            await journal.close()
            instance.close()
        await self.journal.close()


@pytest_asyncio.fixture
async def post(tmp_path: Path) -> AsyncGenerator[Post]:
    opened = Post(tmp_path / "home")
    yield opened
    await opened.close()


@pytest_asyncio.fixture
async def receiver() -> AsyncGenerator[Receiver]:
    async with Receiver.open() as opened:
        yield opened


def hook(receiver: Receiver, name: str = "hook", **more: Any) -> Channel:
    return Channel.model_validate(
        {"name": name, "webhook": receiver.url, "secret": "hook", "allow_private": True} | more
    )


# Delivery


@TOLD
async def test_word_arrives_signed_by_every_valid_secret_and_is_on_record(post: Post, receiver: Receiver) -> None:
    courier = post.courier(hook(receiver))
    await post.write("hook")
    await post.write("hook", ticket="T2", step=1)
    assert await courier.deliver_due() == 2
    assert post.states() == ["sent", "sent"]
    got = {one.headers["webhook-id"]: one for one in receiver.got}
    for secret in (SECRET, OLDER):
        verify(got["T1_0_hook"].headers, got["T1_0_hook"].body, secret, START_MS / 1000)
    first, second = (orjson.loads(got[name].body) for name in ("T1_0_hook", "T2_1_hook"))
    assert (first["type"], second["type"]) == ("approval.requested", "approval.escalated")
    assert first["data"]["tool"] == "bank.pay@1.0.0"
    acts = sorted((act["call"], act["act"], act["channel"], act["step"], act["attempts"]) for act in post.acts())
    assert acts == [("T1", "notified", "hook", 0, 1), ("T2", "notified", "hook", 1, 1)]
    assert await courier.deliver_due() == 0


@TOLD
async def test_the_console_needs_no_delivery(post: Post) -> None:
    courier = post.courier(Channel(name="console", console=True))
    await post.write("console")
    await courier.deliver_due()
    assert post.states() == ["sent"]


@TOLD
async def test_a_service_that_apprise_knows_is_told_in_words(post: Post, receiver: Receiver) -> None:
    url = f"json://u:{{secret}}@127.0.0.1:{receiver.port}/inbox?redirect=yes"
    courier = post.courier(Channel.model_validate({"name": "ops", "url": url, "secret": "hook", "allow_private": True}))
    receiver.answers = [Answer(302, f"location: {receiver.url}\r\n")]
    await post.write("ops")
    await courier.deliver_due()
    assert (post.states(), len(receiver.got)) == (["retry"], 1), "a redirect is not followed"
    post.time.advance(3600 - 1)
    await courier.deliver_due()
    assert post.states() == ["sent"]
    message = orjson.loads(receiver.got[-1].body)
    assert message["title"] == "Approval needed: bank.pay@1.0.0"
    assert message["message"].splitlines() == [
        "ticket: T1", "tool: bank.pay@1.0.0", "caller: ann", "reason: two lines",
    ]  # fmt: skip


# Failure


@TOLD
async def test_a_failing_channel_is_tried_again_and_seen(post: Post, receiver: Receiver) -> None:
    courier = post.courier(hook(receiver))
    receiver.answers = [Answer(500), Answer(503), Answer(204)]
    await post.write("hook")
    pauses: list[int] = []
    for attempt in (1, 2):
        await courier.deliver_due()
        [waiting] = await undelivered(post.journal, ticket="T1")
        assert (waiting.channel, waiting.state, waiting.attempts) == ("hook", "retry", attempt)
        assert waiting.error == f"E3704 the receiver answered {500 if attempt == 1 else 503}"
        assert await courier.deliver_due() == 0, "not before its time"
        pauses.append(waiting.next_ms - post.time.now_ms)
        post.time.advance(pauses[-1] / 1000)
    assert 0 <= pauses[0] <= 5_000
    assert 0 <= pauses[1] <= 20_000
    await courier.deliver_due()
    assert (post.states(), await undelivered(post.journal)) == (["sent"], [])
    assert [(act["act"], act["attempts"]) for act in post.acts()] == [("notified", 3)]
    assert len({got.headers["webhook-id"] for got in receiver.got}) == 1, "a receiver can tell it is the same"


@TOLD
async def test_after_eight_attempts_it_is_given_up_for_all_to_see(post: Post, receiver: Receiver) -> None:
    courier = post.courier(hook(receiver))
    receiver.answers = [Answer(500) for _ in range(9)]
    await post.write("hook", lives_ms=1000 * HOUR_MS)
    for _ in range(10):
        await courier.deliver_due()
        post.time.advance(3600)
    assert len(receiver.got) == 8
    [failed] = await undelivered(post.journal)
    assert (failed.state, failed.attempts) == ("failed", 8)
    assert [(act["act"], act["attempts"]) for act in post.acts()] == [("notification_failed", 8)]


async def test_a_receiver_that_asks_for_a_pause_gets_it(post: Post, receiver: Receiver) -> None:
    courier = post.courier(hook(receiver))
    receiver.answers = [Answer(429, "retry-after: 600\r\n")]
    await post.write("hook")
    await courier.deliver_due()
    [waiting] = await undelivered(post.journal)
    assert waiting.next_ms == START_MS + 600_000
    post.time.advance(600)
    assert await courier.deliver_due() == 1
    assert post.states() == ["sent"]


async def test_nothing_is_put_off_beyond_the_ticket(post: Post, receiver: Receiver) -> None:
    courier = post.courier(hook(receiver))
    receiver.answers = [Answer(429, "retry-after: 600\r\n")]
    await post.write("hook", lives_ms=599_000)
    await courier.deliver_due()
    assert post.states() == ["failed"]
    await post.write("hook", ticket="T2", lives_ms=1000)
    post.time.advance(1)
    assert await courier.deliver_due() == 0, "it is too late to tell anybody"
    assert [act["act"] for act in post.acts()] == ["notification_failed"] * 2


async def test_nobody_is_told_of_a_ticket_that_was_decided(post: Post, receiver: Receiver) -> None:
    courier = post.courier(hook(receiver))
    await post.write("hook")
    await post.set("UPDATE ticket SET state = 'APPROVED'")
    assert await courier.deliver_due() == 0
    assert (post.states(), receiver.got, await undelivered(post.journal)) == (["dropped"], [], [])
    assert [act["act"] for act in post.acts()] == ["notification_dropped"]


@pytest.mark.parametrize("status", [400, 404, 410])
async def test_a_receiver_that_will_never_take_it_is_not_asked_again(
    post: Post, receiver: Receiver, status: int
) -> None:
    courier = post.courier(hook(receiver))
    receiver.answers = [Answer(status)]
    await post.write("hook")
    await courier.deliver_due()
    assert post.states() == ["failed"]
    await post.write("hook", ticket="T2")
    await courier.deliver_due()
    assert post.states() == (["failed", "failed"] if status == 410 else ["failed", "sent"])
    assert len(receiver.got) == (1 if status == 410 else 2), "gone is gone"


@TOLD
async def test_a_channel_that_hangs_delays_no_other(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "ATTEMPT_S", 0.3)
    async with Receiver.open() as silent:
        silent.silent = True
        courier = post.courier(hook(receiver), hook(silent, "stuck"))
        for number in range(6):
            await post.write("stuck", ticket=f"S{number}")
        await courier.wake()
        await silent.has_got(1)
        for number in range(6):
            await post.write("hook", ticket=f"T{number}")
        await courier.wake()
        await receiver.has_got(6)
        assert set(post.states()[:6]) <= {"sending", "due", "retry"}
        await courier.deliver_due()
    assert (post.states().count("sent"), post.states().count("retry")) == (6, 6)
    assert {one.error for one in await undelivered(post.journal)} == {"E3704 no answer in time"}


async def test_what_an_operator_can_mend_is_tried_again(post: Post, receiver: Receiver, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    courier = post.courier(
        hook(receiver, "nameless", secret="other"),
        hook(receiver, "fileless", secret=None, secret_file=file),
        Channel.model_validate({"name": "mistyped", "url": "jsonn://example.com"}),
    )
    for name in ("nameless", "fileless", "mistyped"):
        await post.write(name)
    await courier.deliver_due()
    assert {one.channel: one.error.split()[0] for one in await undelivered(post.journal)} == {
        "nameless": "E3602", "fileless": "E3602", "mistyped": "E3004",
    }  # fmt: skip
    file.write_text(f"{SECRET}\n{OLDER}\n")
    post.time.advance(5)
    await courier.deliver_due()
    [got] = receiver.got
    verify(got.headers, got.body, OLDER, post.time.now_ms / 1000)


async def test_a_channel_that_is_no_longer_in_the_settings_is_seen(post: Post) -> None:
    courier = post.courier()
    await post.write("removed")
    await courier.deliver_due()
    [failed] = await undelivered(post.journal)
    assert failed.error == "E3004 there is no channel `removed` in the settings"


# Once


@TOLD
@ONCE
async def test_several_processes_share_the_work_and_send_each_message_once(post: Post, receiver: Receiver) -> None:
    couriers = [post.courier(hook(receiver)) for _ in range(2)]
    ids = {(await post.write("hook", ticket=f"T{n:02}")).replace(".", "_") for n in range(20)}
    tried = await asyncio.gather(*(courier.deliver_due() for courier in couriers for _ in range(2)))
    assert sum(tried) >= 20
    assert sorted(got.headers["webhook-id"] for got in receiver.got) == sorted(ids)
    assert post.states() == ["sent"] * 20
    assert len(post.acts()) == 20


ROOT = Path(__file__).parents[2]
HOLDER = """
import sys
from interlock.store.homes import home_at
instance = home_at(sys.argv[1]).instance("K" * 26)
print("held", flush=True)
sys.stdin.read()
"""


@ONCE
async def test_what_a_killed_process_had_claimed_is_taken_over(post: Post, receiver: Receiver) -> None:
    courier = post.courier(hook(receiver))
    await post.write("hook")
    with warm.start(["-c", HOLDER, str(post.home.path)], os.environ, ROOT, python=True) as process:
        assert process.stdout.readline() == b"held\n"
        await post.set("UPDATE notification SET state = 'sending', owner = ?, attempts = 1", "K" * 26)
        assert await courier.deliver_due() == 0, "its owner lives"
    bury(post.home, "K" * 26)
    assert await courier.deliver_due() == 1
    assert [(act["act"], act["attempts"]) for act in post.acts()] == [("notified", 2)]


@ONCE
async def test_what_was_on_its_way_when_the_courier_stopped_is_sent_by_the_next(post: Post, receiver: Receiver) -> None:
    receiver.silent = True
    first = post.courier(hook(receiver))
    await post.write("hook")
    await first.wake()
    await receiver.has_got(1)
    await first.close()
    assert post.states() == ["sending"]
    receiver.silent = False
    second = post.courier(hook(receiver))
    assert await second.deliver_due() == 0, "the process of the first one still lives"
    post.open[0][2].close()
    assert await second.deliver_due() == 1
    assert [got.headers["webhook-id"] for got in receiver.got] == ["T1_0_hook"] * 2


async def test_what_could_not_be_noted_is_sent_again_by_the_same_process(post: Post, receiver: Receiver) -> None:
    courier = post.courier(hook(receiver))
    await post.write("hook")
    await post.set("UPDATE notification SET state = 'sending', owner = ?, attempts = 1", post.open[0][2].id)
    assert await courier.deliver_due() == 1
    assert post.states() == ["sent"]


async def test_what_was_taken_over_meanwhile_is_noted_by_whoever_took_it(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "ATTEMPT_S", 0.3)
    receiver.silent = True
    courier = post.courier(hook(receiver))
    await post.write("hook")
    await courier.wake()
    await receiver.has_got(1)
    other = post.home.instance("Z" * 26)
    await post.set("UPDATE notification SET owner = ?", other.id)
    await courier.deliver_due()
    assert (post.states(), await undelivered(post.journal)) == (["sending"], [])
    other.close()


@pytest.mark.parametrize("turns", range(6))
async def test_word_that_comes_while_a_lane_ends_is_not_left_lying(post: Post, receiver: Receiver, turns: int) -> None:
    courier = post.courier(hook(receiver))
    await post.write("hook")
    await courier.wake()
    await receiver.has_got(1)
    for _ in range(turns):
        await asyncio.sleep(0)
    await post.write("hook", ticket="T2")
    await courier.wake()
    await receiver.has_got(2)


HAPPENINGS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(("hook", "other"))),
    st.tuples(st.just("deliver"), st.integers(0, 1)),
    st.tuples(st.just("die"), st.integers(0, 1), st.integers(0, 12)),
    st.tuples(st.just("answer"), st.sampled_from((204, 400, 429, 500))),
    st.tuples(st.just("advance"), st.sampled_from((1, 60, 3600, 7200))),
    st.tuples(st.just("decide"), st.integers(0, 5)),
)


@ONCE
@settings(max_examples=25)
@given(st.lists(HAPPENINGS, max_size=20))
async def test_whatever_happens_every_message_has_one_end_and_is_sent_no_more_after_it(
    tmp_path_factory: pytest.TempPathFactory, happenings: list[tuple[Any, ...]]
) -> None:
    async with Receiver.open() as receiver:
        post = Post(tmp_path_factory.mktemp("post") / "home")
        channels = hook(receiver), hook(receiver, "other")
        running = [0, 1]
        for _ in running:
            post.courier(*channels)
        written = 0
        ending: list[tuple[Any, ...]] = [("advance", 3600), ("deliver", 0)] * 10
        for what, *facts in happenings + ending:
            match what:
                case "write":
                    await post.write(facts[0], ticket=f"T{written}", lives_ms=START_MS)
                    written += 1
                case "deliver":
                    await post.open[running[int(facts[0])]][0].deliver_due()
                case "die":
                    courier, _, instance = post.open[running[int(facts[0])]]
                    await courier.wake()
                    for _ in range(facts[1]):
                        await asyncio.sleep(0)
                    await courier.close()
                    instance.close()
                    running[facts[0]] = len(post.open)
                    post.courier(*channels)
                case "answer":
                    receiver.answers.append(Answer(facts[0]))
                case "advance":
                    post.time.advance(facts[0])
                case _:
                    await post.set("UPDATE ticket SET state = 'DENIED' WHERE id = ?", f"T{facts[0]}")
        states = post.states()
        ends = sorted(act["call"] for act in post.acts())
        assert len(states) == written
        assert set(states) <= {"sent", "failed", "dropped"}
        assert ends == sorted(f"T{number}" for number in range(written)), "one end each"
        arrived = {got.headers["webhook-id"] for got in receiver.got}
        rows = post.journal.reader.all("SELECT id, state, attempts FROM notification")
        assert arrived >= {row[0].replace(".", "_") for row in rows if row[1] == "sent"}
        assert len(receiver.got) <= sum(row[2] for row in rows), "no attempt that was not claimed"
        await post.close()


# Secrets and addresses

PRIVATE = [
    {"webhook": "https://127.0.0.1/s3cr3t", "secret": "hook"},
    {"webhook": "https://inner.example.com/s3cr3t", "secret": "hook"},
    {"url": "json://user:s3cr3t@10.0.0.1/"},
    {"url": "json://user:s3cr3t@2130706433/"},
    {"url": "xml://[::1]/s3cr3t"},
    {"url": "form://169.254.169.254/s3cr3t"},
    {"url": "ntfy://192.168.1.1/s3cr3t"},
    {"url": "json://inner.example.com/s3cr3t"},
    {"url": "mailtos://me:s3cr3t@example.org?smtp=inner.example.com"},
]


async def test_a_channel_to_a_private_network_is_refused_not_tried_again_and_no_secret_of_it_is_written(
    post: Post, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    addresses = [
        *PRIVATE,
        {"webhook": receiver.url, "secret": "hook", "allow_private": True},
        {"url": f"json://user:s3cr3t@127.0.0.1:{receiver.port}/s3cr3t", "allow_private": True},
        {"url": f"json://user:s3cr3t@127.0.0.1:{receiver.port}/s3cr3t?x=1", "allow_private": True},
        {"url": "s3cr3t://s3cr3t"},
    ]
    channels = [Channel.model_validate({"name": f"c{n}", **address}) for n, address in enumerate(addresses)]
    courier = post.courier(*channels, resolve=Names(["10.0.0.1"]))
    receiver.answers = [Answer(500), Answer(500)]
    for channel in channels:
        await post.write(channel.name)
    await courier.deliver_due()
    told = {one.channel: (one.state, one.error.split()[0]) for one in await undelivered(post.journal)}
    refused = [f"c{n}" for n in range(len(PRIVATE))]
    assert [told[name] for name in refused] == [("failed", "E3406")] * len(PRIVATE)
    failed = sorted(act["channel"] for act in post.acts() if act["act"] == "notification_failed")
    assert [name for name in failed if name in refused] == refused, "each once"
    written = "\n".join(
        map(
            str,
            post.journal.reader.all("SELECT * FROM notification") + post.journal.reader.all("SELECT * FROM journal"),
        )
    )
    assert len(receiver.got) == 3
    for place in (written, caplog.text, repr(channels), str(channels)):
        for secret in ("s3cr3t", SECRET.removeprefix("whsec_"), "dXNlcjpzM2NyM3Q"):
            assert secret not in place


# Settings


@pytest.mark.parametrize(
    ("words", "given_settings"),
    [
        ("exactly one of", {}),
        ("exactly one of", {"console": True, "url": "json://s3cr3t"}),
        ("https", {"webhook": "http://s3cr3t.example.com", "secret": "hook"}),
        ("https", {"webhook": "ftp://s3cr3t", "secret": "hook", "allow_private": True}),
        ("https", {"webhook": "https://[s3cr3t", "secret": "hook"}),
        ("whole address", {"webhook": "https:///s3cr3t", "secret": "hook"}),
        ("whole address", {"webhook": "https://exämple.com/s3cr3t", "secret": "hook"}),
        ("no user", {"webhook": "https://me:s3cr3t@example.com", "secret": "hook"}),
        ("needs a secret", {"webhook": "https://example.com/s3cr3t"}),
        ("not both", {"webhook": "https://example.com/s3cr3t", "secret": "hook", "secret_file": "f"}),
        ("{secret}", {"url": "json://s3cr3t", "secret": "hook"}),
        ("{secret}", {"url": "json://s3cr3t:{secret}@x"}),
        ("extra", {"console": True, "s3cr3t": 1}),
        ("pattern", {"console": True, "name": "A b"}),
    ],
)
def test_a_channel_that_makes_no_sense_is_refused_without_repeating_its_address(
    words: str, given_settings: dict[str, Any]
) -> None:
    with pytest.raises(pydantic.ValidationError) as refused:
        Channel.model_validate({"name": "x", **given_settings})
    assert words in str(refused.value).lower()
    assert "s3cr3t" not in refused.value.errors(include_input=False, include_context=False)[0]["msg"]


def test_a_channel_serves_the_groups_it_names() -> None:
    some = Channel(name="x", console=True, groups=("finance",))
    assert (some.serves("finance"), some.serves("admin")) == (True, False)
    assert Channel(name="x", console=True).serves("anybody")


# Services of apprise run in a process of their own


def _service(receiver: Receiver, name: str = "ops", **more: Any) -> Channel:
    url = f"json://user:s3cr3t@127.0.0.1:{receiver.port}/"
    return Channel.model_validate({"name": name, "url": url, "allow_private": True} | more)


def _senders() -> list[int]:
    """Processes of this one that send for a channel."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"sender.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


_OPENED = """
import sys
from interlock.approvals.sender import bound, open_url
bound()  # it may not write a file
opened = open_url(sys.argv[1])
print(len(opened or ()), sum(name.startswith("apprise.plugins.") for name in sys.modules))
"""


@pytest.mark.parametrize(
    ("url", "all_plugins"),
    [
        ("json://127.0.0.1:9/", False),
        ("mailtos://me:pass@example.com", False),
        # As the service hands it out: every plugin is asked.
        ("https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", True),
    ],
)
def test_a_sender_loads_the_plugin_of_its_url_and_all_only_where_none_declares_the_scheme(
    url: str, all_plugins: bool
) -> None:
    done = subprocess.run([sys.executable, "-c", _OPENED, url], capture_output=True, text=True, check=True)
    opened, plugins = map(int, done.stdout.split())
    assert opened == 1
    assert plugins > 100 if all_plugins else plugins < 10


async def test_a_service_that_hangs_is_killed_and_the_next_message_is_sent(post: Post, receiver: Receiver) -> None:
    receiver.silent = True
    courier = post.courier(_service(receiver), attempt_s=1.0)
    await post.write("ops")
    await courier.deliver_due()
    assert [(one.state, one.error) for one in await undelivered(post.journal)] == [("retry", "E3704 no answer in time")]
    assert _senders() == []
    receiver.silent = False
    post.time.advance(60)
    await courier.deliver_due()
    assert (post.states(), _senders()) == (["sent"], [])


async def test_an_endless_answer_of_a_service_ends_its_own_process_only(post: Post, receiver: Receiver) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x" * (1 << 20))
                await writer.drain()
                sent += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        receiver.port = server.sockets[0].getsockname()[1]
        courier = post.courier(_service(receiver), attempt_s=60.0)
        await post.write("ops")
        await courier.deliver_due()
    assert (post.states(), _senders()) == (["retry"], [])
    assert sent < 300, "megabytes; the process may have 256"


async def test_a_service_sees_no_proxy_password_or_credential_of_the_environment(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with Receiver.open() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login eve password s3cr3t\n")
        (tmp_path / ".netrc").chmod(0o600)
        url = f"json://127.0.0.1:{receiver.port}/"
        courier = post.courier(_service(receiver, url=url))
        await post.write("ops")
        await courier.deliver_due()
        assert (post.states(), proxy.got) == (["sent"], [])
        assert "authorization" not in receiver.got[0].headers


async def test_a_channel_uses_the_proxy_that_it_names(post: Post, receiver: Receiver) -> None:
    public = Channel.model_validate(
        {"name": "ops", "url": "json://service.example.com/in", "proxy": f"http://127.0.0.1:{receiver.port}"}
    )
    courier = post.courier(public)
    await post.write("ops")
    await courier.deliver_due()
    assert (post.states(), receiver.got[0].path) == (["sent"], "http://service.example.com/in")


@pytest.mark.parametrize(
    "given_settings",
    [
        {"url": "json://x", "proxy": "socks5://s3cr3t"},
        {"url": "json://x", "proxy": "http://[s3cr3t"},
        {"console": True, "proxy": "http://s3cr3t"},
    ],
)
def test_a_proxy_is_an_http_address_and_goes_with_a_url(given_settings: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError, match="a proxy is an http or https address") as refused:
        Channel.model_validate({"name": "x", **given_settings})
    assert "s3cr3t" not in str(refused.value)


async def test_a_name_that_changes_its_address_after_the_check_leads_nowhere_else(
    post: Post, receiver: Receiver
) -> None:
    names = Names(["127.0.0.1"], ["169.254.169.254"])
    courier = post.courier(_service(receiver, url=f"json://moving.example.com:{receiver.port}/"), resolve=names)
    await post.write("ops")
    await courier.deliver_due()
    assert (post.states(), names.asked) == (["sent"], 1), "nobody but us resolves it"
    await post.write("ops", ticket="T2")
    await courier.deliver_due()
    assert [one.error.split()[0] for one in await undelivered(post.journal)] == ["E3406"]


async def test_datagrams_and_sockets_of_this_machine_are_held_to_the_same_rule(post: Post) -> None:
    channel = Channel.model_validate({"name": "ops", "url": "rsyslog://127.0.0.1:9/user"})
    courier = post.courier(channel)
    await post.write("ops")
    await courier.deliver_due()
    assert [one.error.split()[0] for one in await undelivered(post.journal)] == ["E3406"]


async def test_a_courier_that_is_closed_leaves_no_sending_process(post: Post, receiver: Receiver) -> None:
    receiver.silent = True
    courier = post.courier(_service(receiver))
    await post.write("ops")
    await courier.wake()
    async with asyncio.timeout(60), receiver.arrived:
        await receiver.arrived.wait_for(lambda: receiver.got)
    assert len(_senders()) == 1
    await courier.close()
    assert _senders() == []


async def test_an_alert_names_a_channel_that_fails_again_and_again_once(post: Post, receiver: Receiver) -> None:
    alerts: list[tuple[str, int, str]] = []

    def alert(channel: str, failures: int, reason: str) -> None:
        alerts.append((channel, failures, reason))

    courier = post.courier(hook(receiver), alert=alert)
    receiver.answers = [*(Answer(500) for _ in range(5)), Answer(204), Answer(404)]
    await post.write("hook", lives_ms=1000 * HOUR_MS)
    for _ in range(6):
        await courier.deliver_due()
        post.time.advance(3600)
    assert alerts == [("hook", 3, "E3704 the receiver answered 500")]
    assert post.states() == ["sent"]
    await post.write("hook", ticket="T2", lives_ms=1000 * HOUR_MS)
    await courier.deliver_due()
    assert alerts[1:] == [("hook", 1, "E3704 the receiver answered 404")]
