"""A person decides, from the command line: asked by one process, decided in another, run in a third."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pty
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from interlock import Failure, Interlock
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from tests import warm
from tests.support import stores
from tests.support.cli import INTERLOCK, Cli, Ended
from tests.support.ports import unused_port

Json = dict[str, Any]

TOOLS = '''
from pathlib import Path
from typing import Annotated

from interlock import Change, Effect, Field, Preview, tool
from interlock.contract.manifest import Approval, ApprovalStep

Name = Annotated[str, Field(description="which one", examples=["old"])]


@tool(
    namespace="quick", version="1.0.0", mutation_class="write_irreversible", effects=[Effect("ship:{name}", "DELETE")],
    approval=Approval(timeout_seconds=1, chain=(ApprovalStep(group="approvers"),)),
)
def sink(name: Name) -> str:
    """Sink a ship; nobody has long to think about it."""
    Path("sunk").write_text(name)
    return name


@sink.preview
def _(name: str) -> Preview:
    change = Change(
        resource=f"ship:{name}", operation="UPDATE", before={"afloat": True, "flag": "blue"},
        after={"afloat": False, "flag": "blue"},
    )
    return Preview(effects=(change,), preconditions={"the crew is off": True, "the sea is deep": False}, impact="gone")
'''

MAIL = ("call", "demo.mail_statement", '{"account": "cash", "to": "press@example.org"}', "--key", "m-1")


@dataclass(frozen=True)
class Cast:
    """Everybody's token: an agent that speaks for alice, bob who approves, and carol who is nobody in particular."""

    home: Path
    agent: str
    bob: str
    carol: str


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory, copied: Callable[[Path], Cli]) -> Cast:
    directory = tmp_path_factory.mktemp("cast")
    copied(directory)
    (directory / "quick_tools.py").write_text(TOOLS)

    async def make() -> Cast:
        async with Interlock.open(directory / "home") as app:
            await app.add_from(str(directory / "quick_tools.py"))
            people: Json = {
                "research-7": {"kind": "agent", "trust": 60, "groups": frozenset({"researchers"})},
                "alice": {"kind": "human"},
                "bob": {"kind": "human", "groups": frozenset({"approvers"})},
                "carol": {"kind": "human", "groups": frozenset({"admins"})},
            }
            dids = {name: f"did:web:example.org:{name}" for name in people}
            for name, facts in people.items():
                await app.identities.register(Identity(did=dids[name], name=name, **facts), by="test")
            await app.tokens.rotate_key("EdDSA", by=app.caller, first=True)

            async def token(name: str, user: str | None = None) -> str:
                return await app.tokens.issue(
                    subject=dids[name], user=None if user is None else dids[user], scopes=[], tools=[ToolGrant("*")],
                    resources=None, constraints={}, ttl_s=3600, by=app.caller,
                )  # fmt: skip

            agent = await token("research-7", "alice")
            return Cast(directory / "home", agent, await token("bob"), await token("carol"))

    return asyncio.run(make())


@pytest.fixture
def desk(tmp_path: Path, cast: Cast) -> Cli:
    """A home of its own with tools and people in it."""
    shutil.copytree(cast.home, tmp_path / "home")
    return Cli(tmp_path)


def holding(cli: Cli, token: str) -> Cli:
    return replace(cli, extra={"INTERLOCK_TOKEN": token})


def outbox(cli: Cli) -> str:
    path = cli.ledger.with_suffix(".outbox")
    return path.read_text() if path.exists() else ""


def approval_acts(cli: Cli) -> list[str]:
    return [record["act"] for record in records(cli, "approval")]


def refusal(ended: Ended) -> tuple[str, str]:
    assert ended.code == 1, ended.out
    return ended.json["error"]["error_code"], ended.json["error"]["message"]


async def test_whoever_agrees_while_others_run_on_the_home_hears_that_a_server_goes_on_by_itself(
    desk: Cli, cast: Cast
) -> None:
    ticket = holding(desk, cast.agent).ask(*MAIL)["pending"]["ticketId"]
    async with Interlock.open(desk.home):
        approved = await asyncio.to_thread(holding(desk, cast.bob), "approvals", "approve", ticket)
        shown = await asyncio.to_thread(desk, "approvals", "show", ticket)
    for said in (approved, shown):
        assert "a server on this data directory continues it" in said.out
        assert f"interlock calls resume {ticket}" in said.out


# The story


@pytest.mark.proves("HITL-03")
def test_what_an_agent_asks_for_runs_once_after_a_person_has_seen_it_and_agreed(desk: Cli, cast: Cast) -> None:
    agent, bob = holding(desk, cast.agent), holding(desk, cast.bob)
    asked = agent.ask(*MAIL)
    assert (asked["status"], asked["is_error"]) == ("awaiting_approval", False)
    ticket = asked["pending"]["ticketId"]
    assert asked["error"]["errorCode"] == "APPROVAL_REQUIRED"
    assert outbox(desk) == ""

    listed = bob("approvals", "list").out
    assert "research-7 for alice" in listed
    assert ticket in listed
    shown = bob("approvals", "show", f"#{ticket[-6:].lower()}").out
    for words in (
        "research-7 for alice", "demo.mail_statement@1.0.0", "to        press@example.org", "cannot be undone",
        "CREATE mailbox:press@example.org   nothing → cash", "it cannot be called back", "told     approvers",
        f"interlock approvals approve {ticket}", ", then denied",
    ):  # fmt: skip
        assert words in shown

    approved = bob("approvals", "approve", ticket, "--comment", "as agreed")
    assert approved.code == 0
    assert f"interlock calls resume {ticket}" in approved.out
    assert "a server" not in approved.out
    ran = agent.ask(*MAIL)
    assert (ran["status"], ran["invocation_id"]) == ("succeeded", asked["invocation_id"])
    assert agent.ask(*MAIL)["metadata"]["replayed"] is True
    assert outbox(desk) == "press@example.org: statement of cash\n"
    document = desk.ask("approvals", "show", ticket)
    assert (document["status"], document["comment"], document["told"]) == ("USED", "as agreed", [])

    history = desk("calls", "show", asked["invocation_id"]).out
    for words in (ticket, "REQUIRES_APPROVAL", "bob (did:web:example.org:bob) agreed: as agreed", "used up"):
        assert words in history
    story = " ".join(desk.ask("audit", "explain", asked["invocation_id"])["story"])
    for words in (
        "alice (did:web:example.org:alice) asked for", "The agent research-7", "asked for a person's approval of it",
        "bob (did:web:example.org:bob) agreed: as agreed", "that it would CREATE mailbox:press@example.org",
        "It changed mailbox:press@example.org",
    ):  # fmt: skip
        assert words in story


def test_a_call_that_waits_goes_on_when_another_process_agrees(desk: Cli, cast: Cast) -> None:
    words = (*MAIL, "--wait", "--json")
    with warm.start(words, holding(desk, cast.agent).environment, desk.path) as child:
        first, second = child.stderr.readline().decode(), child.stderr.readline().decode()
        assert "waits for a person" in first
        assert desk("approvals", "approve", second.split()[-1]).code == 0
        out, _ = child.communicate()
    assert child.returncode == 0
    assert json.loads(out)["status"] == "succeeded"
    assert outbox(desk) == "press@example.org: statement of cash\n"


def test_nobody_has_to_wait_for_longer_than_they_said(desk: Cli, cast: Cast) -> None:
    ended = holding(desk, cast.agent)(*MAIL, "--wait", "0.1", "--json")
    assert ended.code == 1
    assert ended.json["status"] == "awaiting_approval"
    assert "somebody in approvers" in ended.err


@pytest.mark.supports("OPS-01")
def test_a_reviewer_may_change_the_input_and_the_changed_one_runs(desk: Cli, cast: Cast) -> None:
    asked = holding(desk, cast.agent).ask(*MAIL)
    ticket = asked["pending"]["ticketId"]
    assert refusal(desk("approvals", "approve", ticket, "--edit", '{"to": 7}', "--json"))[0] == "E3301"
    edited = desk("approvals", "approve", ticket, "--edit", '{"to": "desk@example.org"}', "--comment", "us first")
    shown = desk("approvals", "show", ticket).out
    for words in ("press@example.org → desk@example.org", "CREATE mailbox:desk@example.org"):
        assert words in edited.out
        assert words in shown
    assert "mailbox:press@example.org" not in shown
    assert "with the input edited" in edited.out
    assert "approved" in desk("calls", "list").out
    assert "1 approved and not run yet" in desk("doctor").out
    resumed = desk.ask("calls", "resume", ticket[-8:])
    assert (resumed["status"], resumed["invocation_id"]) == ("succeeded", asked["invocation_id"])
    assert outbox(desk) == "desk@example.org: statement of cash\n"
    assert "with the input changed (to): us first" in desk("calls", "show", asked["invocation_id"]).out
    story = desk("audit", "explain", asked["invocation_id"]).out
    assert "The reviewer local:" in story
    assert "as they changed it they were shown that it would CREATE mailbox:desk@example.org" in " ".join(story.split())
    assert "the reviewer changed `to`" in holding(desk, cast.agent)(*MAIL).out
    assert "nothing to go on with" in desk("calls", "resume").out
    assert refusal(desk("calls", "resume", ticket, "--json"))[0] == "E3411"


def test_an_input_that_a_reviewer_changed_leaves_no_key_to_miss(desk: Cli, cast: Cast) -> None:
    ticket = holding(desk, cast.agent).ask(*MAIL)["pending"]["ticketId"]
    assert desk("approvals", "approve", ticket, "--edit", '{"to": "desk@example.org"}').code == 0
    assert desk("calls", "resume", ticket).code == 0
    assert desk("doctor").code == 0


def test_a_no_ends_the_call_and_its_reason_reaches_whoever_asked(desk: Cli, cast: Cast) -> None:
    agent = holding(desk, cast.agent)
    ticket = agent.ask(*MAIL)["pending"]["ticketId"]
    denied = desk.ask("approvals", "deny", ticket, "--comment", "not before Monday")
    assert (denied["status"], denied["comment"]) == ("DENIED", "not before Monday")
    code, message = refusal(agent(*MAIL, "--json"))
    assert code == "E3209"
    assert "said no: not before Monday" in message
    assert refusal(desk("approvals", "approve", ticket, "--json"))[0] == "E3411"
    assert desk.ask("approvals", "list") == {"tickets": []}
    assert [one["status"] for one in desk.ask("approvals", "list", "--all")["tickets"]] == ["DENIED"]
    assert outbox(desk) == ""


def test_silence_is_a_no(desk: Cli, cast: Cast) -> None:
    ended = holding(desk, cast.agent)("call", "quick.sink", '{"name": "old"}', "--key", "s", "--wait", "--json")
    code, message = refusal(ended)
    assert code == "E3209"
    assert "nobody decided" in message
    (ticket,) = desk.ask("approvals", "list", "--all")["tickets"]
    assert ticket["status"] == "AUTO_DENIED"
    assert refusal(desk("approvals", "approve", ticket["id"], "--json"))[0] == "E3411"
    shown = desk("approvals", "show", ticket["id"]).out
    for words in ("afloat   true → false", "✓ the crew is off", "✗ the sea is deep", "AUTO_DENIED"):
        assert words in shown
    assert "flag" not in shown
    told = desk("calls", "show", ticket["invocation_id"]).out
    assert "nobody decided in time" in told
    assert not (desk.path / "sunk").exists()


@pytest.mark.proves("HITL-12")
def test_the_command_line_tells_by_which_mechanism_each_call_was_approved(desk: Cli, cast: Cast) -> None:
    agent, bob = holding(desk, cast.agent), holding(desk, cast.bob)
    calls = {"auto": agent.call("demo.post", {"account": "cash", "cents": 5}, "--key", "p-1")}
    ticket = agent.ask(*MAIL)["pending"]["ticketId"]
    bob("approvals", "approve", ticket)
    calls["human_review"] = agent.ask(*MAIL)
    bounds = ("--arg", "account=cash", "--arg", "to=*@example.org", "--uses", "1", "--expires", "7d")
    given = desk.ask("approvals", "grant", "demo.mail_statement", "--caller", "research-7", *bounds)
    calls["standing"] = agent.ask(*MAIL[:-1], "m-2")
    late = agent("call", "quick.sink", '{"name": "old"}', "--key", "s", "--wait", "--json")
    calls["timeout"] = late.json
    told = {mechanism: call["metadata"]["approval"] for mechanism, call in calls.items()}
    assert {mechanism: one["mechanism"] for mechanism, one in told.items()} == {name: name for name in calls}
    assert told["auto"]["rule"]
    assert (told["human_review"]["by"], told["human_review"]["ticketId"]) == ("did:web:example.org:bob", ticket)
    assert (told["standing"]["rule"], told["standing"]["by"]) == (given["id"], given["grantedBy"])
    assert "nobody decided before" in told["timeout"]["rule"]
    for mechanism, call in calls.items():
        story = " ".join(desk.ask("audit", "explain", call["invocation_id"])["story"])
        assert f"through {mechanism}, by " in story


# Who may decide


def test_the_environment_does_not_make_anybody_somebody_else(desk: Cli) -> None:
    mine = desk.ask(*MAIL)["pending"]["ticketId"]
    posing = replace(desk, extra=dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME"), "boss"))
    code, message = refusal(posing("approvals", "approve", mine, "--json"))
    assert code == "E3206"
    assert "asked for this call" in message
    assert "boss" not in message


def test_a_person_who_states_on_record_that_they_are_alone_decides_on_their_own_calls(desk: Cli, cast: Cast) -> None:
    mine = desk.ask(*MAIL)["pending"]["ticketId"]
    refused = desk("approvals", "approve", mine, "--json")
    assert refusal(refused)[0] == "E3206"
    assert "interlock approvals alone" in refused.json["error"]["resolution"]
    assert refusal(holding(desk, cast.bob)("approvals", "alone", "--json"))[0] == "E3206"
    assert desk.ask("approvals", "alone", "--reason", "my own laptop")["alone"] is True
    assert "may decide on their own calls" in desk("doctor").out
    assert desk.ask("approvals", "approve", mine)["status"] == "APPROVED"
    (record,) = [one for one in records(desk, "approval") if one["act"] == "approved"]
    assert record["alone"] is True
    assert desk.ask("approvals", "alone", "--end")["alone"] is False
    again = desk.ask(*MAIL[:-1], "another")["pending"]["ticketId"]
    assert refusal(desk("approvals", "approve", again, "--json"))[0] == "E3206"
    assert "may decide on their own calls" not in desk("doctor").out
    assert desk("audit", "verify").code == 0


def records(desk: Cli, kind: str) -> list[Json]:
    return stores.bodies(desk.store, kind)


@pytest.mark.supports("HITL-06")
def test_only_a_person_who_was_asked_and_did_not_ask_may_decide(desk: Cli, cast: Cast) -> None:
    mine = desk.ask(*MAIL)["pending"]["ticketId"]
    theirs = holding(desk, cast.agent).ask(*MAIL)["pending"]["ticketId"]
    attempts = {
        "asked for this call, so somebody else must decide": (desk, mine),
        "an agent never can": (holding(desk, cast.agent), theirs),
        "is not among those who were asked": (holding(desk, cast.carol), theirs),
    }
    for words, (who, ticket) in attempts.items():
        code, message = refusal(who("approvals", "approve", ticket, "--json"))
        assert code == "E3206"
        assert words in message
        assert "in approvers: local:*, bob" in message
    assert refusal(holding(desk, cast.agent)("approvals", "deny", theirs, "--json"))[0] == "E3206"
    assert approval_acts(desk) == ["refused"] * 4
    assert {one["status"] for one in desk.ask("approvals", "list")["tickets"]} == {"PENDING"}
    assert outbox(desk) == ""


def test_a_token_shows_the_tickets_that_are_its_holders_affair(desk: Cli, cast: Cast) -> None:
    mine = desk.ask(*MAIL)["pending"]["ticketId"]
    theirs = holding(desk, cast.agent).ask(*MAIL)["pending"]["ticketId"]

    def seen(token: str) -> set[str]:
        return {one["id"] for one in holding(desk, token).ask("approvals", "list")["tickets"]}

    assert seen(cast.bob) == {mine, theirs}
    assert seen(cast.agent) == {theirs}
    assert seen(cast.carol) == set()
    assert "nothing waits for you" in holding(desk, cast.carol)("approvals", "list").out
    assert refusal(holding(desk, cast.carol)("approvals", "show", theirs, "--json"))[0] == "E3702"


async def test_to_somebody_of_another_tenant_a_ticket_is_like_none_and_nobody_is_named(desk: Cli, cast: Cast) -> None:
    ticket = holding(desk, cast.agent).ask(*MAIL)["pending"]["ticketId"]
    tokens: dict[str, str] = {}
    async with Interlock.open(desk.home) as app:
        for name, group in (("eve", "approvers"), ("mallory", "guests"), ("dave", "guests")):
            did, groups = f"did:web:acme.example:{name}", frozenset({group})
            person = Identity(did=did, name=name, kind="human", tenant="acme", groups=groups)
            await app.identities.register(person, by="test")
            tokens[name] = await app.tokens.issue(
                subject=did, scopes=[], tools=[ToolGrant("*")], ttl_s=3600, by=app.caller
            )
    eve = holding(desk, tokens["eve"])
    attempts = [("show", ticket), ("deny", ticket)]
    attempts += [("approve", one) for one in (ticket, ticket[-8:], "apr_01M7ETAX1RAFF8FEA10B286E99")]
    for act, one in attempts:
        words = f"no ticket has the id `{one}`; see interlock approvals list"
        assert refusal(eve("approvals", act, one, "--json")) == ("E3702", words), act
    # Of a ticket of their own they hear who can decide, and not who else there is.
    theirs = holding(desk, tokens["mallory"]).ask(*MAIL)["pending"]["ticketId"]
    code, message = refusal(holding(desk, tokens["dave"])("approvals", "approve", theirs, "--json"))
    assert (code, "in approvers: eve, local operators" in message) == ("E3206", True), message
    _, message = refusal(holding(desk, cast.carol)("approvals", "deny", theirs, "--json"))
    assert "in approvers: local:*, bob, eve" in message


def test_a_token_that_is_none_is_refused_like_any_call_and_on_record(desk: Cli) -> None:
    stranger = holding(desk, "nonsense")
    ended = stranger(*MAIL, "--json")
    assert refusal(ended)[0] == "E3203"
    assert desk.ask("calls", "list")["calls"][0]["invocation_id"] == ended.json["invocation_id"]
    assert refusal(stranger("approvals", "list", "--json"))[0] == "E3203"


# In advance


@pytest.mark.proves("HITL-09")
def test_nothing_is_agreed_to_in_advance_without_every_bound(desk: Cli, cast: Cast) -> None:
    bounds = {"--caller": "research-7", "--uses": "1", "--expires": "7d"}
    named = ("--arg", "account=cash", "--arg", "to=*@example.org")
    for missing in bounds:
        left = (word for name, value in bounds.items() if name != missing for word in (name, value))
        ended = desk("approvals", "grant", "demo.mail_statement", *named, *left)
        assert (ended.code, missing in ended.err) == (2, True), ended
    assert desk("approvals", "grant", *named, *(word for pair in bounds.items() for word in pair)).code == 2
    open_ended = desk("approvals", "grant", "demo.mail_statement", *(word for pair in bounds.items() for word in pair))
    assert open_ended.code == 1
    assert "add a pattern for `account`" in " ".join((open_ended.out + open_ended.err).split())
    assert desk.ask("approvals", "standing")["standing"] == []


def test_what_was_agreed_to_in_advance_runs_at_once_until_it_is_used_up(desk: Cli, cast: Cast) -> None:
    agent = holding(desk, cast.agent)
    bounds = ("--arg", "account=cash", "--arg", "to=*@example.org", "--uses", "1", "--expires", "7d")
    given = desk.ask("approvals", "grant", "demo.mail_statement", "--caller", "research-7", *bounds)
    assert (given["versions"], given["uses"], given["caller"]) == ("1.0.0", 1, "did:web:example.org:research-7")
    ran = agent.ask(*MAIL)
    assert ran["status"] == "succeeded"
    assert "agreed in advance to 1 such calls" in desk("calls", "show", ran["invocation_id"]).out
    again = agent.ask(*MAIL[:-1], "m-2")
    assert again["status"] == "awaiting_approval"
    assert "used up" in desk("approvals", "standing").out
    taken = desk.ask("approvals", "revoke", given["id"][-6:].lower())
    assert (taken["revoked"], taken["used"]) == (True, 1)
    assert "taken back" in desk("approvals", "standing").out
    assert outbox(desk).count("\n") == 1


def test_what_was_agreed_to_for_a_group_is_there_for_its_members(desk: Cli, cast: Cast) -> None:
    bounds = ("--arg", "account=cash", "--arg", "to=*@example.org", "--uses", "1", "--expires", "7d")
    given = desk.ask("approvals", "grant", "demo.mail_statement", "--caller", "group:researchers", *bounds)
    assert given["caller"] == "group:researchers"
    assert "group:researchers" in desk("approvals", "standing").out
    assert [one["id"] for one in holding(desk, cast.agent).ask("approvals", "standing")["standing"]] == [given["id"]]
    assert holding(desk, cast.agent).ask(*MAIL)["status"] == "succeeded"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--caller", "group:nobodies", "--arg", "to=a"), "E3207", "no caller is in the group `nobodies`"),
        (("--caller", "research-7", "--arg", "account=*", "--arg", "to=*"), "E3004", "needs its bounds"),
        (("--caller", "research-7", "--arg", "subject=x"), "E3004", "takes no `subject`; it takes account, to"),
        (("--caller", "nobody", "--arg", "to=a"), "E3207", "nobody is known as `nobody`"),
        (("--caller", "*:*", "--arg", "account=cash", "--arg", "to=a"), "E3004", "without a wildcard"),
    ],
    ids=["no such group", "anything goes", "no such argument", "no such caller", "every caller"],
)
def test_what_has_no_bounds_cannot_be_agreed_to(desk: Cli, words: tuple[str, ...], code: str, said: str) -> None:
    refused = desk("approvals", "grant", "demo.mail_statement", *words, "--uses", "1", "--expires", "1d", "--json")
    assert refusal(refused)[0] == code
    assert said in refusal(refused)[1]


def test_numbers_can_be_agreed_to_within_bounds_and_beyond_them_a_person_is_asked(desk: Cli, cast: Cast) -> None:
    (desk.home / "settings.toml").write_text("ask_all_writes = true\n")
    agent = holding(desk, cast.agent)
    words = ("approvals", "grant", "demo.post", "--caller", "research-7", "--arg", "account=cash", "--uses", "5")
    within = ("--where", "cents>0", "--where", "cents <= 250")
    given = desk.ask(*words, *within, "--expires", "1d")
    assert given["arguments"] == {"account": "cash", "cents": {"exclusiveMinimum": 0, "maximum": 250}}
    assert "account=cash, cents>0, cents<=250" in desk("approvals", "standing").out
    outcomes = {
        cents: agent.call("demo.post", {"account": "cash", "cents": cents}, "--key", f"k{cents}")["status"]
        for cents in (250, 251, -1, 1)
    }
    waits = "awaiting_approval"
    assert outcomes == {250: "succeeded", 251: waits, -1: waits, 1: "succeeded"}
    assert desk.ask("approvals", "standing")["standing"][0]["used"] == 2
    assert desk("audit", "verify").code == 0


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        (("cents~3",), 2, "write NAME<=NUMBER"),
        (("cents<=much",), 2, "write NAME<=NUMBER"),
        (("cents<=true",), 2, "write NAME<=NUMBER"),
        (("cents<=1", "cents<=2"), 2, "`cents<=` is said twice"),
        (("account<=1",), 2, "`account` is bounded twice"),
        (("amount<=1",), 1, "takes no `amount`"),
        (("cents>=3", "cents<=2"), 1, "no number is within the bounds of `cents`"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(desk: Cli, where: tuple[str, ...], code: int, said: str) -> None:
    given = [word for one in where for word in ("--where", one)]
    words = ("--caller", "research-7", "--arg", "account=cash", "--uses", "1", "--expires", "1d")
    refused = desk("approvals", "grant", "demo.post", *words, *given)
    assert (refused.code, said in refused.err) == (code, True), refused.err


def test_a_bound_of_any_size_is_the_one_that_was_written(desk: Cli) -> None:
    words = ("--caller", "research-7", "--arg", "account=cash", "--uses", "1", "--expires", "1d")
    bounds = [word for most in (10**30 - 1, 2**63) for word in ("--where", f"cents<{'=' * (most % 2)}{most}")]
    assert desk("approvals", "grant", "demo.post", *words, *bounds).code == 0
    assert f"cents<={10**30 - 1}, cents<{2**63}" in desk("approvals", "standing").out
    endless = desk("approvals", "grant", "demo.post", *words, "--where", f"cents<={'9' * 5000}")
    assert (endless.code, "write NAME<=NUMBER" in endless.err) == (2, True)


def test_an_argument_may_be_any_text_beside_one_that_is_bounded(desk: Cli, cast: Cast) -> None:
    words = ("approvals", "grant", "demo.mail_statement", "--caller", "research-7", "--uses", "2", "--expires", "1d")
    given = desk(*words, "--arg", "account=cash", "--any-text", "to")
    assert (given.code, "account=cash, to any text" in given.out) == (0, True), given.err
    assert desk.ask("approvals", "standing")["standing"][0]["arguments"]["to"] == {"type": "string"}
    agent = holding(desk, cast.agent)
    anybody = json.dumps({"account": "cash", "to": "anybody @ all\non two lines"})
    explained = desk("policy", "explain", "research-7", "demo.mail_statement", anybody).out
    assert "covers this call" in explained
    assert "with account=cash, to any text" in explained
    assert agent.ask("call", "demo.mail_statement", anybody, "--key", "any")["status"] == "succeeded"
    other = json.dumps({"account": "giro", "to": "a@example.org"})
    assert agent.ask("call", "demo.mail_statement", other, "--key", "other")["status"] == "awaiting_approval"
    # Something must be bounded, once, and a number is no text.
    anything = refusal(desk(*words, "--any-text", "to", "--any-text", "account", "--json"))
    assert anything == ("E3004", "a standing approval needs its bounds: a pattern that says more than anything goes")
    assert desk(*words, "--arg", "to=x", "--any-text", "to").code == 2
    number = ("approvals", "grant", "demo.post", "--caller", "research-7", "--uses", "1", "--expires", "1d")
    refused = refusal(desk(*number, "--arg", "account=cash", "--any-text", "cents", "--json"))
    assert refused == ("E3004", "`cents` is not a text, so it cannot be any text")


def test_an_argument_may_be_one_of_a_set_of_values(desk: Cli, cast: Cast) -> None:
    (desk.home / "settings.toml").write_text("ask_all_writes = true\n")
    agent = holding(desk, cast.agent)
    words = ("approvals", "grant", "demo.post", "--caller", "research-7", "--uses", "5", "--expires", "1d")
    accounts = ("--arg", "account=cash", "--arg", "account=savings")
    amounts = ("--arg", "cents=100", "--arg", "cents=250")
    given = desk.ask(*words, *accounts, *amounts)
    assert given["arguments"] == {"account": {"enum": ["cash", "savings"]}, "cents": {"enum": [100, 250]}}
    assert "account one of cash savings, cents one of 100 250" in desk("approvals", "standing").out
    outcomes = {
        (account, number): agent.call("demo.post", {"account": account, "cents": number}, "--key", f"{account}{number}")
        for account, number in (("cash", 250), ("savings", 100), ("savings", 200), ("cash", 1))
    }
    waits = "awaiting_approval"
    assert [one["status"] for one in outcomes.values()] == ["succeeded", "succeeded", waits, waits]
    assert desk.ask("approvals", "standing")["standing"][0]["used"] == 2
    explained = [
        desk("policy", "explain", "research-7", "demo.post", json.dumps({"account": "savings", "cents": cents})).out
        for cents in (100, 101)
    ]
    assert ["covers this call" in one for one in explained] == [True, False]
    refused = desk(*words, "--arg", "account=ca*", "--arg", "account=savings", *amounts)
    assert (refused.code, "for a set of values, and values have no * and ?" in refused.err) == (2, True)


def test_a_text_has_no_bounds_of_a_number(desk: Cli) -> None:
    words = ("--caller", "research-7", "--where", "to<=3", "--arg", "account=cash", "--uses", "1", "--expires", "1d")
    refused = refusal(desk("approvals", "grant", "demo.mail_statement", *words, "--json"))
    assert refused == ("E3004", "`to` is not a number, so it has no least and no most")


def test_an_agent_cannot_agree_in_advance(desk: Cli, cast: Cast) -> None:
    words = ("approvals", "grant", "demo.post", "--caller", "local:x", "--arg", "cents=250", "--uses", "1")
    code, message = refusal(holding(desk, cast.agent)(*words, "--expires", "1d", "--json"))
    assert code == "E3206"
    assert "an agent never can" in message


# Names


async def test_a_piece_of_an_id_means_its_ticket_only_while_no_other_fits(desk: Cli) -> None:
    async with Interlock.open(desk.home, housekeeping=False) as app:
        mail = {"account": "cash", "to": "press@example.org"}
        pending = [await app.call("demo.mail_statement", mail, key=f"k-{number}") for number in range(2)]
        ids: list[str] = [one.metadata["pending"]["ticketId"] for one in pending]
        for one in ids:
            for piece in (one, one[4:], one[-8:], f"#{one[-8:].lower()}", f"{one[:26]}…", one.lower()):
                assert (await app.approvals.show(piece)).id == one
        for piece in ("", "apr_", ids[0][:7], ids[0][4:9], ids[0][-3:], "%", "____", "nonsense"):
            with pytest.raises(Failure) as caught:
                await app.approvals.show(piece)
            assert caught.value.code == "E3702"


# Watching


@contextmanager
def running(cli: Cli, *words: str, **streams: Any) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen([*INTERLOCK, *words], env=cli.environment, cwd=cli.path, text=True, **streams) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.proves("HITL-06")
@pytest.mark.parametrize("who", ["the local user", "bob"])
def test_a_watcher_at_the_console_hears_of_tickets_and_of_what_becomes_of_them(desk: Cli, cast: Cast, who: str) -> None:
    (desk.home / "settings.toml").write_text('[[channels]]\nname = "console"\nconsole = true\n')
    watching = holding(desk, cast.bob) if who == "bob" else desk
    with warm.start(("approvals", "watch", "--json"), watching.environment, watching.path) as watcher:
        watcher.stdin.close()
        asked = holding(desk, cast.agent).ask(*MAIL)
        heard = json.loads(watcher.stdout.readline())
        assert (heard["event"], heard["ticket"]["id"]) == ("asked", asked["pending"]["ticketId"])
        assert "demo.mail_statement" in json.dumps(heard["ticket"])
        assert desk("approvals", "deny", heard["ticket"]["id"]).code == 0
        assert json.loads(watcher.stdout.readline())["event"] == "denied"
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait() == 0
    assert "not delivered" not in desk("doctor").out


class Terminal:
    """A terminal, as a person sits at it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.shown = ""

    def until(self, words: str) -> None:
        while words not in self.shown:
            self.shown += os.read(self._descriptor, 4096).decode()
        self.shown = self.shown.partition(words)[2]

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())


def test_a_reviewer_decides_with_a_key_about_the_ticket_it_was_offered_for(desk: Cli, cast: Cast) -> None:
    agent = holding(desk, cast.agent)
    tickets = [agent.ask(*MAIL[:-1], key)["pending"]["ticketId"] for key in ("m-1", "m-2", "m-3")]
    ours, theirs = pty.openpty()
    terminal = Terminal(ours)
    # On a narrow terminal the sentences waited for would be wrapped.
    wide = replace(desk, extra={**desk.extra, "COLUMNS": "200"})
    with running(wide, "approvals", "watch", stdin=theirs, stdout=theirs, stderr=theirs) as watcher:
        os.close(theirs)
        terminal.until("[a]pprove")
        terminal.press("p")
        terminal.until("what it would do")
        terminal.until("[a]pprove")
        terminal.press("a")
        terminal.until("Esc goes back: ")
        terminal.press("\x1b")
        terminal.press("a")
        terminal.until("Esc goes back: ")
        terminal.press("finee\x7f\r")
        terminal.until("approved by local:")
        terminal.until("[a]pprove")
        terminal.press("e")
        terminal.until("Esc goes back: ")
        terminal.press("nonsense\r")
        terminal.until("not valid JSON")
        terminal.until("[a]pprove")
        terminal.press("e")
        terminal.until("Esc goes back: ")
        terminal.press('{"to": "desk@example.org"}\r')
        terminal.until("with the input edited")
        terminal.until("[a]pprove")
        terminal.press("d")
        terminal.until("Esc goes back: ")
        terminal.press("no\r")
        terminal.until("denied by local:")
        terminal.press("q")
        assert watcher.wait(30) == 0
    os.close(ours)
    decided = [desk.ask("approvals", "show", ticket) for ticket in tickets]
    assert [one["status"] for one in decided] == ["APPROVED", "APPROVED", "DENIED"]
    assert [one["comment"] for one in decided] == ["fine", "", "no"]
    assert [one["user_modified"] for one in decided] == [False, True, False]


# Telling


@contextmanager
def receiver() -> Generator[tuple[int, list[Json]]]:
    """A webhook's receiver on this machine, and what it was sent."""
    received: list[Json] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_approvers_are_told_before_the_process_ends_and_who_was_not_reached_is_shown(desk: Cli, cast: Cast) -> None:
    (desk.path / "secret").write_text(f"whsec_{base64.b64encode(bytes(32)).decode()}\n")
    closed = unused_port()
    with receiver() as (port, received):
        channels = "\n".join(
            f'[[channels]]\nname = "{name}"\nwebhook = "http://127.0.0.1:{at}/"\nallow_private = true\n'
            f'secret_file = "{desk.path / "secret"}"\n'
            for name, at in (("good", port), ("bad", closed))
        )
        (desk.home / "settings.toml").write_text(channels)
        ticket = holding(desk, cast.agent).ask(*MAIL)["pending"]["ticketId"]
        assert [one["data"]["ticket"] for one in received] == [ticket]
    shown = desk("approvals", "show", ticket).out
    assert "approvers, by good" in shown
    assert "by bad, " in shown
    assert "E3704" in shown
    assert "not delivered by `bad`" in desk("doctor").out
