"""Commands with --server: a running server carries them out, and they show what the same commands show locally."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from tests import warm
from tests.support import stores
from tests.support.cli import INTERLOCK, Cli, Ended, running

SCOPES = ("audit:read", "calls:reconcile", "policy:admin", "policy:read", "tools:admin", "tokens:issue")
MAIL = ("call", "demo.mail_statement", '{"account": "cash", "to": "a@example.org"}')
BUDGETS = """
[[budgets]]
per = "caller"
limit = 10.0
period_s = 86400

[[budgets]]
per = "session"
limit = 2.0
tools = "demo.survey"
"""
CASES = """
[[case]]
tool = "demo.balance"
arguments = { account = "cash" }
expect = "allow"

[[case]]
principal = "bob"
tool = "demo.mail_statement"
expect = "ask"
"""
# It runs until a file is there, and reports progress meanwhile.
COUNTING = '''
import asyncio
import pathlib

from typing import Annotated

from interlock import Context, Field, tool

File = Annotated[str, Field(description="what is waited for", examples=["/"])]


@tool(namespace="demo", version="1.0.0", mutation_class="read_only", timeout_class="long_running")
async def count(ctx: Context, file: File) -> int:
    """Count until a file is there."""
    number = 0
    while not pathlib.Path(file).exists():
        ctx.progress("half of it", percent=50)
        await asyncio.sleep(0.02)
        number = 1
    return number


@tool(namespace="demo", version="1.0.0", mutation_class="read_only", max_inline_chars=200)
async def orders(many: Annotated[int, Field(description="how many", examples=[2])]) -> list[dict[str, str]]:
    """List orders."""
    return [{"id": str(number), "note": "x y " * 9} for number in range(many)]


@tool(namespace="demo", version="1.0.0", mutation_class="read_only", estimated_cost=2.0)
async def survey(ctx: Context, many: Annotated[int, Field(description="how many", examples=[2])]) -> int:
    """Survey the whales of a harbour."""
    ctx.cost(external_api=2.0)
    return many
'''
# Ids, digests and times of two runs of one command are their own; what is left is compared word for word.
_OWN = (
    (re.compile(r"\b(?:apr_)?01[0-9A-Z]{24}\b"), "ID"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z"), "TIME"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"<?\d[\d.]* (?:ms|s|min|h|d|days?|hours?|minutes?|seconds?)\b(?: \d+ (?:s|min|h)\b)?"), "SPAN"),
    (re.compile(r" {2,}"), "  "),
)


def bare(text: str) -> str:
    for pattern, word in _OWN:
        text = pattern.sub(word, text)
    return text


@dataclass(frozen=True)
class Place:
    """A home with the demo tools, and a server that runs on it."""

    cli: Cli
    url: str

    def token(self, holder: str) -> str:
        """The name of a file with a token: ann governs and audits, bob may approve, eve only calls."""
        return str(self.cli.path / f"{holder}.token")

    def here(self, holder: str, *words: str) -> Ended:
        return self.cli("--token-file", self.token(holder), *words)

    def there(self, holder: str, *words: str) -> Ended:
        return self.cli("--server", self.url, "--token-file", self.token(holder), *words)

    def ticket(self, key: str) -> str:
        """The ticket of a call of ann's that waits for a person."""
        return self.there("ann", *MAIL, "--key", key, "--json").json["pending"]["ticketId"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Generator[Place]:
    cli = Cli(tmp_path_factory.mktemp("served"))
    assert cli("tools", "add", "interlock.demo_tools").code == 0
    (cli.path / "counting.py").write_text(COUNTING)
    assert cli("tools", "add", "counting.py").code == 0
    (cli.home / "settings.toml").write_text(BUDGETS)
    (cli.path / "cases.toml").write_text(CASES)
    assert cli("identities", "add", "--name", "bob", "--kind", "human", "--group", "approvers").code == 0
    for holder, scopes in (("ann", SCOPES), ("bob", ()), ("eve", ())):
        granted = [word for scope in scopes for word in ("--scope", scope)]
        issued = cli("token", "issue", "--person", holder, *granted)
        assert issued.code == 0, issued.err
        (cli.path / f"{holder}.token").write_text(issued.out)
    with running(cli, "--no-grpc", "--no-token", "--json") as server:
        yield Place(cli, server.json["base_url"])


# Looking

LOOKING = {
    "tools list": ("tools", "list"),
    "tools search": ("tools", "search", "account"),
    "tools search by words": ("tools", "search", "account", "--by", "words"),
    "tools search by meaning": ("tools", "search", "how much money is there", "--by", "meaning", "--limit", "2"),
    "calls list": ("calls", "list"),
    "calls list of a tool": ("calls", "list", "--tool", "demo.balance", "--since", "1d"),
    "calls running": ("calls", "running"),
    "calls top": ("calls", "top", "--by", "calls", "--since", "2026-01-01T00:00:00Z"),
    "approvals list": ("approvals", "list", "--all"),
    "budgets": ("budgets",),
    "policy check": ("policy", "check"),
    "policy show": ("policy", "show"),
    "policy explain": ("policy", "explain", "me", "demo.post", '{"account": "cash", "cents": 250}'),
    "policy explain somebody": ("policy", "explain", "bob", "demo.mail_statement"),
    "policy test": ("policy", "test", "cases.toml"),
    "tools diff": ("tools", "diff", "demo.post", "1.2.0", "1.2.0"),
    "tools export": ("tools", "export", "--format", "anthropic"),
    "tools export of two": ("tools", "export", "--format", "openai-chat", "--strict", "demo.post", "demo.balance"),
    "tools quarantine": ("tools", "quarantine"),
    "tools select": ("tools", "select", "--faster", "how much is in the cash account"),
    "identities list": ("identities", "list"),
    "keys list": ("keys", "list"),
    "keys jwks": ("keys", "jwks"),
    "config show of some": ("config", "show", "--changed", "budgets", "recommend_callers"),
    "calls reconcile": ("calls", "reconcile"),
    "upstream list": ("upstream", "list"),
    "health": ("health",),
}
# What a server does not tell, by the name of the command: where tools come from and which file the policy is.
UNTOLD = {
    "tools list": ("digest", "origin"),
    "policy check": ("file",),
    "tools select": ("id",),
    "config show of some": ("home",),
}


def without(document: Any, names: tuple[str, ...]) -> Any:
    if isinstance(document, list):
        return [without(one, names) for one in cast("list[Any]", document)]
    if isinstance(document, dict):
        members = cast("dict[str, Any]", document)
        return {name: without(one, names) for name, one in members.items() if name not in names}
    return document


@pytest.mark.parametrize("name", LOOKING)
def test_a_command_shows_of_a_server_what_it_shows_of_its_data_directory(place: Place, name: str) -> None:
    words = LOOKING[name]
    place.there("ann", "call", "demo.balance", '{"account": "cash"}')
    place.ticket("looking")
    here, there = place.here("ann", *words), place.there("ann", *words)
    assert there.code == here.code == 0, there.err
    assert bare(there.out) == bare(here.out)
    here, there = place.here("ann", *words, "--json"), place.there("ann", *words, "--json")
    untold = UNTOLD.get(name, ())
    assert json.loads(bare(json.dumps(without(there.json, untold)))) == json.loads(
        bare(json.dumps(without(here.json, untold)))
    )


@pytest.mark.parametrize(
    ("words", "level", "code"),
    [
        (("demo.balance", '{"account": "cash"}', "--tokens", "200"), 0, 0),
        (("demo.orders", '{"many": 40}', "--tokens", "2000"), 0, 0),
        (("demo.orders", '{"many": 40}', "--tokens", "240"), 3, 0),
        (("demo.orders", '{"many": 40}', "--tokens", "165"), "pointer", 0),
        (("demo.nothing", "{}", "--tokens", "200"), 0, 1),
        (("demo.balance", '{"account": "cash"}', "--tokens", "3"), None, 1),
    ],
)
def test_a_result_is_printed_as_a_model_reads_it(place: Place, words: tuple[str, ...], level: Any, code: int) -> None:
    here, there = place.here("ann", "call", *words), place.there("ann", "call", *words)
    assert there.code == here.code == code, there.err
    assert bare(there.out) == bare(here.out)
    told = place.there("ann", "call", *words, "--json").json
    assert told["level"] == level
    assert told["tokens"] <= int(words[-1])
    assert (told["context"] or "").count("<") == (0 if level is None else 2)


def test_what_a_session_has_spent_counts_for_its_selections(place: Place) -> None:
    assert place.there("ann", "call", "demo.survey", '{"many": 2}', "--session", "monday").code == 0
    for ask in (place.here, place.there):
        told = [
            ask("ann", "tools", "select", "survey the whales of a harbour", "--session", session, "--json").json
            for session in ("monday", "tuesday")
        ]
        assert [one["chosen"] for one in told] == ["demo.survey", "demo.survey"]
        assert [one["gate"]["answer"] for one in told] == ["DENY", "ALLOW"]
        assert told[0]["gate"]["check"] == "cost"


def test_the_contract_of_a_tool_is_shown_but_for_where_it_comes_from(place: Place) -> None:
    here, there = (
        place.here("ann", "tools", "show", "demo.post@^1"),
        place.there("ann", "tools", "show", "demo.post@^1"),
    )
    assert (here.code, there.code) == (0, 0)
    kept = [line for line in here.out.splitlines() if line.split()[:1] not in (["digest"], ["from"])]
    assert there.out.splitlines() == kept
    told = place.there("ann", "tools", "show", "demo.post", "--json").json
    known = place.here("ann", "tools", "show", "demo.post", "--json").json
    for part in ("tool", "version", "state", "availability", "timeout", "input_schema", "output_schema", "known_pairs"):
        assert told[part] == known[part]


def test_one_call_and_one_ticket_are_shown_alike(place: Place) -> None:
    ticket = place.ticket("shown")
    call = place.there("ann", "approvals", "show", ticket, "--json").json["invocation_id"]
    made = place.there(
        "ann", "call", "demo.post", '{"account": "cash", "cents": 3}', "--key", "shown-post", "--json"
    ).json
    ended = made["invocation_id"]
    for words in (
        ("approvals", "show", ticket),
        ("calls", "show", call),
        ("calls", "show", ended),
        ("calls", "inputs", ended),
        ("audit", "explain", call),
        ("audit", "explain", ended),
    ):
        here, there = place.here("ann", *words), place.there("ann", *words)
        assert (here.code, there.code) == (0, 0), there.err
        assert bare(there.out) == bare(here.out)
    assert (
        place.there("ann", "calls", "show", call, "--json").json
        == place.here("ann", "calls", "show", call, "--json").json
    )


def test_a_caller_without_audit_read_sees_how_their_own_calls_stand(place: Place) -> None:
    made = place.there("eve", "call", "demo.balance", '{"account": "cash"}', "--json").json
    shown = place.there("eve", "calls", "show", made["invocation_id"], "--json")
    assert (shown.code, shown.json["state"], shown.json["tool_id"]) == (0, "succeeded", "demo.balance")
    assert made["invocation_id"] in place.there("eve", "calls", "show", made["invocation_id"]).out
    of_ann = place.there("ann", "call", "demo.balance", '{"account": "cash"}', "--json").json["invocation_id"]
    refused = place.there("eve", "calls", "show", of_ann, "--json")
    assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3702")


# Calling


@pytest.mark.parametrize(
    "words",
    [
        ("demo.balance", '{"account": "cash"}'),
        ("demo.post", '{"account": "cash"}', "--key", "faulty"),
        ("demo.post", '{"account": "cash", "cents": 5}', "--key", "preview", "--dry-run"),
        ("demo.nope", "{}"),
        ("demo.balance@^7", '{"account": "cash"}'),
        ("demo.balance", "[]"),
    ],
    ids=["success", "bad input", "preview", "no such tool", "no such version", "no object"],
)
def test_a_call_ends_alike_here_and_there(place: Place, words: tuple[str, ...]) -> None:
    here, there = place.here("ann", "call", *words), place.there("ann", "call", *words)
    if words[1] == "[]":
        # The REST interface takes objects only, and says so before there is a call.
        assert (here.code, there.code) == (1, 1)
        assert "E3004" in there.err
        return
    assert there.code == here.code
    assert bare(there.out) == bare(here.out)
    here, there = place.here("ann", "call", *words, "--json"), place.there("ann", "call", *words, "--json")
    for part in ("status", "is_error", "structured_content", "content", "summary", "redaction_state"):
        assert bare(json.dumps(there.json.get(part))) == bare(json.dumps(here.json.get(part))), part
    codes = [None if one.json["error"] is None else one.json["error"]["error_code"] for one in (here, there)]
    assert codes[0] == codes[1]


def test_a_call_at_a_server_says_on_a_terminal_that_it_runs(place: Place) -> None:
    words = ("--server", place.url, "--token-file", place.token("ann"), "call", "demo.balance", '{"account": "cash"}')
    code, shown = warm.at_terminal(words, place.cli.environment, place.cli.path)
    assert code == 0
    assert f"demo.balance runs at {place.url} …" in shown
    assert "demo.balance@1.0.0" in shown.rpartition("\x1b[K")[2]


def test_a_key_sent_twice_is_answered_with_the_first_result(place: Place) -> None:
    words = ("call", "demo.post", '{"account": "cash", "cents": 1}', "--key", "once", "--json")
    first, again, local = (
        place.there("ann", *words).json,
        place.there("ann", *words).json,
        place.here("ann", *words).json,
    )
    assert not first["metadata"]["replayed"]
    assert again["metadata"]["replayed"]
    assert local["metadata"]["replayed"]
    assert first["structured_content"] == again["structured_content"] == local["structured_content"]


def test_a_kept_result_and_the_checkpoints_of_a_call_are_read_alike(place: Place) -> None:
    made = place.there("ann", "call", "demo.orders", '{"many": 40}', "--json").json["invocation_id"]
    for words in (("calls", "payload", made), ("calls", "payload", f"payload:{made}"), ("calls", "checkpoints", made)):
        for form in ((), ("--json",)):
            here, there = place.here("ann", *words, *form), place.there("ann", *words, *form)
            assert (here.code, there.code, there.out) == (0, 0, here.out), there.err
        assert place.there("eve", *words, "--json").json["error"]["error_code"] == "E3702"
    assert len(place.there("ann", "calls", "payload", made, "--json").json["content"]) == 40


def test_a_large_result_is_told_by_its_size(place: Place) -> None:
    (place.cli.path / "large.py").write_text(
        "from interlock import tool\n\n"
        '@tool(version="1.0.0", mutation_class="read_only", namespace="large", max_inline_chars=100)\n'
        'def text() -> str:\n    "Give a long text."\n    return "x" * 5000\n'
    )
    assert place.cli("tools", "add", "large.py").code == 0
    here, there = place.here("ann", "call", "large.text"), place.there("ann", "call", "large.text")
    assert (here.code, there.code) == (0, 0)
    assert bare(there.out) == bare(here.out)
    assert "characters, kept as payload:" in there.out


# Deciding


DECISIONS = {"approve": ("approve",), "edit": ("approve", "--edit", '{"to": "b@example.org"}'), "deny": ("deny",)}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_is_taken_alike(place: Place, name: str) -> None:
    verb, *rest = DECISIONS[name]
    first, second = place.ticket(f"{name}-here"), place.ticket(f"{name}-there")
    here = place.here("bob", "approvals", verb, first, *rest, "--comment", "seen")
    there = place.there("bob", "approvals", verb, second[-8:], *rest, "--comment", "seen")
    assert (here.code, there.code) == (0, 0), there.err
    assert bare(there.out) == bare(here.out)


def test_a_refused_decision_keeps_its_code(place: Place) -> None:
    ticket = place.ticket("refused")
    for end in (place.here, place.there):
        refused = end("ann", "approvals", "approve", ticket, "--json")
        assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206")


def test_a_call_that_waits_goes_on_when_a_person_agrees(place: Place) -> None:
    words = ("--server", place.url, "--token-file", place.token("ann"), *MAIL, "--key", "waits", "--wait", "100")
    with warm.start(words, place.cli.environment, place.cli.path) as caller:
        told = caller.stderr.readline().decode() + caller.stderr.readline().decode()
        assert "APPROVAL_REQUIRED" in told
        assert place.there("bob", "approvals", "approve", told.split()[-1]).code == 0
        out, _ = caller.communicate(100)
    assert caller.returncode == 0, out.decode()
    assert "demo.mail_statement@1.0.0" in out.decode()


@pytest.mark.proves("OPS-01")
def test_a_call_in_the_background_is_started_by_one_command_and_followed_by_another(place: Place) -> None:
    words = ("call", "demo.balance", '{"account": "cash"}')
    started = place.there("ann", *words, "--background")
    assert (started.code, started.err) == (0, "")
    call = started.out.strip()
    followed = place.there("ann", "calls", "follow", call, "--json")
    assert (followed.code, followed.json["invocation_id"], followed.json["state"]) == (0, call, "succeeded")
    assert followed.json["result"] == place.there("ann", *words, "--json").json["structured_content"]
    shown = place.there("ann", "calls", "follow", call)
    assert (shown.code, shown.out.split()[:1]) == (0, [call])
    told = place.there("ann", *words, "--background", "--json").json
    assert told["status"] == "running"
    here = place.here("ann", "calls", "follow", call, "--json")
    assert (here.code, here.json["state"]) == (0, "succeeded")
    # One that waits for a person, one that fails, and what cannot be.
    waiting = place.there("ann", *MAIL, "--key", "behind", "--background").out.strip()
    told = place.there("ann", "calls", "follow", waiting, "--json")
    assert (told.code, told.json["state"]) == (1, "awaiting_approval")
    failed = place.there("ann", "call", "demo.balance", '{"account": 5}', "--background").out.strip()
    assert place.there("ann", "calls", "follow", failed).code == 1
    assert place.there("eve", "calls", "follow", call).code == 1
    assert place.here("ann", *words, "--background").code == 2
    assert place.there("ann", *words, "--background", "--wait").code == 2


def test_a_call_that_waits_is_refused_when_a_person_says_no(place: Place) -> None:
    ticket = place.ticket("denied")
    assert place.there("bob", "approvals", "deny", ticket, "--comment", "no").code == 0
    here, there = (end("ann", *MAIL, "--key", "denied", "--wait", "5", "--json") for end in (place.here, place.there))
    assert (there.code, there.json["error"]["error_code"]) == (here.code, here.json["error"]["error_code"])
    assert there.code == 1


def test_an_approved_call_is_resumed_and_a_waiting_one_is_cancelled(place: Place) -> None:
    ticket = place.ticket("cancelled")
    call = place.there("ann", "approvals", "show", ticket, "--json").json["invocation_id"]
    cancelled = place.there("ann", "calls", "cancel", call)
    assert (cancelled.code, cancelled.out.split()[:2]) == (0, ["canceled", call])
    again = place.there("ann", "calls", "cancel", call, "--json")
    assert (again.code, again.json) == (1, {"invocation_id": call, "outcome": "finished"})
    unknown = place.there("ann", "calls", "resume", "apr_01JZZZZZZZZZZZZZZZZZZZZZZZ", "--json")
    assert (unknown.code, unknown.json["error"]["error_code"]) == (1, "E3702")


def test_a_call_is_undone(place: Place) -> None:
    made = place.there("ann", "call", "demo.post", '{"account": "cash", "cents": 7}', "--key", "to-undo", "--json").json
    undone = place.there("ann", "calls", "undo", made["invocation_id"], "--key", "undo-it", "--json")
    assert (undone.code, undone.json["status"]) == (0, "succeeded")


def test_going_on_and_undoing_at_a_server_say_so_on_a_terminal(place: Place) -> None:
    at = ("--server", place.url, "--token-file", place.token("ann"))
    ticket = place.ticket("shown-on-a-terminal")
    assert place.there("bob", "approvals", "approve", ticket).code == 0
    resumed = warm.at_terminal((*at, "calls", "resume", ticket), place.cli.environment, place.cli.path)[1]
    assert f"demo.mail_statement goes on at {place.url} …" in resumed
    post = ("call", "demo.post", '{"account": "cash", "cents": 8}', "--key", "to-undo-2", "--json")
    made = place.there("ann", *post).json["invocation_id"]
    undone = warm.at_terminal((*at, "calls", "undo", made, "--key", "u-2"), place.cli.environment, place.cli.path)[1]
    assert f"{place.url} undoes {made} …" in undone


# Operating


def both(place: Place, *words: str) -> tuple[Ended, Ended]:
    """A command of ann's, in the data directory and at the server."""
    return place.here("ann", *words), place.there("ann", *words)


def test_versions_are_deprecated_alike(place: Place) -> None:
    text = (
        "from interlock import tool\n\n"
        '@tool(version="{}", mutation_class="read_only", namespace="old")\n'
        'def text() -> str:\n    "Give a text."\n    return "x"\n'
    )
    for version in ("1.0.0", "1.0.1"):
        (place.cli.path / "old.py").write_text(text.format(version))
        assert place.cli("tools", "add", "old.py").code == 0
    (place.cli.path / "old.py").unlink()
    here = place.here("ann", "tools", "deprecate", "old.text@1.0.0", "--days", "30")
    there = place.there("ann", "tools", "deprecate", "old.text@1.0.1", "--days", "30")
    assert (here.code, there.code) == (0, 0), there.err
    assert bare(there.out).replace("1.0.1", "1.0.0") == bare(here.out)
    amended = [
        end("ann", "tools", "deprecate", "old.text@1.0.0", "--amend", "--guide", "https://example.org/x", "--json")
        for end in (place.here, place.there)
    ]
    assert [one.code for one in amended] == [0, 0], amended[1].out
    assert amended[0].json["deprecation"]["migrationGuide"] == "https://example.org/x"
    assert bare(json.dumps(amended[0].json)) == bare(json.dumps(amended[1].json))
    refused = both(place, "tools", "deprecate", "old.text")
    assert [one.code for one in refused] == [2, 2]
    for end in (place.here, place.there):
        denied = end("eve", "tools", "deprecate", "old.text@1.0.0", "--json")
        assert (denied.code, denied.json["error"]["error_code"]) == (1, "E3206")
        assert "`tools:admin`" in denied.json["error"]["message"]


def test_what_is_not_in_quarantine_is_not_released(place: Place) -> None:
    for ended in both(place, "tools", "release", "demo.post@1.0.0", "--reason", "seen", "--json"):
        assert (ended.code, ended.json["error"]["error_code"]) == (1, "E3101")
    refused = place.there("eve", "tools", "quarantine", "--json")
    assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206")


def test_upstreams_are_added_looked_at_and_removed_alike(place: Place) -> None:
    tools = [{"name": "rate", "description": "The rate of a currency.", "parameters": {"type": "object"}}]
    (place.cli.path / "tools.json").write_text(json.dumps([{"type": "function", "function": one} for one in tools]))
    (place.cli.path / "overlay.yaml").write_text("tools: {rate: {mutation_class: read_only}}\n")
    ends = {"near": place.here, "faraway": place.there}

    def alike(*words: str, name_at: int) -> list[Ended]:
        told = [
            end("ann", *words[:name_at], name, *words[name_at:], "--url", "https://rates.example.com")
            if "add" in words
            else end("ann", *words[:name_at], name, *words[name_at:])
            for name, end in ends.items()
        ]
        assert [one.code for one in told] == [0, 0], told[1].err
        shown = [bare(one.out.replace(name, "NAME")) for name, one in zip(ends, told, strict=True)]
        assert shown[0] == shown[1]
        return told

    alike("upstream", "add", "functions", "tools.json", "--dry-run", name_at=3)
    alike("upstream", "add", "functions", "tools.json", name_at=3)
    alike("upstream", "refresh", "--overlay", "overlay.yaml", name_at=2)
    changed = alike("upstream", "show", name_at=2)
    assert "as admitted and as offered now" in changed[1].out
    alike("upstream", "accept", "--reason", "read it", name_at=2)
    assert place.there("ann", "upstream", "list", "--json").json == place.here("ann", "upstream", "list", "--json").json
    alike("upstream", "remove", name_at=2)


def test_an_upstream_that_runs_on_the_machine_is_not_added_at_a_server(place: Place) -> None:
    refused = place.there("ann", "upstream", "add", "mcp", "files", "--json", "--", "true")
    assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206")
    assert "reaches into this machine" in refused.json["error"]["message"]
    denied = place.there("eve", "upstream", "remove", "files", "--json")
    assert (denied.code, denied.json["error"]["error_code"]) == (1, "E3206")


def test_cached_decisions_are_dropped_alike(place: Place) -> None:
    for words in (("bob", "me"), ()):
        ends = both(place, "policy", "forget", *words)
        assert [one.code for one in ends] == [0, 0]
        assert ends[0].out == ends[1].out
    assert "about everybody" in ends[1].out
    denied = place.there("eve", "policy", "forget", "--json")
    assert (denied.code, denied.json["error"]["error_code"]) == (1, "E3206")


def test_a_policy_is_applied_alike(place: Place) -> None:
    first = place.cli("policy", "default").out
    texts = {"here": first + "// one\n", "there": first + "// two\n", "broken": "permit (nobody"}
    for name, text in texts.items():
        (place.cli.path / f"{name}.cedar").write_text(text)
    try:
        assert place.here("ann", "policy", "apply", "here.cedar").code == 0
        there = place.there("ann", "policy", "apply", "there.cedar")
        assert there.code == 0, there.err
        again = both(place, "policy", "apply", "there.cedar")
        assert again[0].out == again[1].out
        assert "nothing to change" in again[1].out
        assert ("-// one" in there.out, "+// two" in there.out) == (True, True)
        broken = both(place, "policy", "apply", "broken.cedar", "--json")
        assert [one.code for one in broken] == [1, 1]
        assert broken[0].json == broken[1].json
        for end in (place.here, place.there):
            denied = end("eve", "policy", "apply", "here.cedar", "--json")
            assert (denied.code, denied.json["error"]["error_code"]) == (1, "E3206")
        assert place.cli("policy", "show").out.rstrip().endswith("// two")
    finally:
        (place.cli.path / "first.cedar").write_text(first)
        assert place.cli("policy", "apply", "first.cedar").code == 0


# Administering


def test_identities_are_registered_and_revoked_alike(place: Place) -> None:
    facts = ("--kind", "service", "--trust", "40", "--group", "readers")
    here, there = (
        end("ann", "identities", "add", f"did:web:example.com:{name}", "--name", name, *facts)
        for name, end in (("near", place.here), ("faraway", place.there))
    )
    assert (here.code, there.code, there.out.strip()) == (0, 0, "did:web:example.com:faraway"), there.err
    listed = {one["name"]: one for one in place.cli.ask("identities", "list")["identities"]}
    facts_of = {name: {**listed[name], "did": "", "name": ""} for name in ("near", "faraway")}
    assert facts_of["near"] == facts_of["faraway"]
    assert (listed["faraway"]["trust"], listed["faraway"]["groups"]) == (40, ["readers"])
    # A did:key is made where its private key stays: on the server.
    made = place.there("ann", "identities", "add", "--name", "keyed", "--json")
    private = place.cli.home / "keys" / "identities" / f"{made.json['did'].rpartition(':')[2]}.pem"
    assert private.exists()
    assert "PRIVATE" not in made.out
    again = both(place, "identities", "add", "did:web:example.com:other", "--name", "keyed")
    assert [one.code for one in again] == [0, 1], "the DID is registered by the first"
    assert f"warning: keyed is already the name of {made.json['did']}" in again[0].err
    warned = place.there("ann", "identities", "add", "--name", "keyed", "--json").json["warnings"]
    assert "did:web:example.com:other" in warned[0]
    ambiguous = both(place, "identities", "revoke", "keyed", "--reason", "lost", "--json")
    assert [one.json["error"]["error_code"] for one in ambiguous] == ["E3004", "E3004"]
    assert bare(ambiguous[0].json["error"]["message"]) == bare(ambiguous[1].json["error"]["message"])
    token = place.there("ann", "token", "issue", "--agent", "faraway", "--ttl", "10m").out
    gone = [end("ann", "identities", "revoke", name, "--reason", "lost") for name, end in
            (("near", place.here), ("faraway", place.there))]  # fmt: skip
    assert [one.code for one in gone] == [0, 0], gone[1].err
    assert gone[1].out.replace("faraway", "near") == gone[0].out
    refused = place.there("ann", "token", "inspect", token.strip(), "--json")
    assert (refused.code, refused.json["valid"]) == (1, False)
    unknown = place.there("ann", "identities", "revoke", "did:web:example.com:nobody", "--reason", "lost", "--json")
    assert unknown.json["error"]["error_code"] == "E3207"


def test_signing_keys_are_made_and_retired_alike_and_their_private_halves_stay_on_the_server(place: Place) -> None:
    first = place.there("ann", "keys", "rotate", "--alg", "ES256", "--json")
    assert (first.code, first.json["algorithm"], first.json["signs"]) == (0, "ES256", True), first.out
    assert set(first.json) == {"kid", "algorithm", "made", "signs"}
    (file,) = (place.cli.home / "keys" / "issuer").glob(f"*.{first.json['kid']}.pem")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    issued = place.there("ann", "token", "issue", "--agent", "signed-for", "--ttl", "10m").out.strip()
    assert place.there("ann", "token", "inspect", issued).code == 0
    second = both(place, "keys", "rotate", "--json")
    assert [(one.code, one.json["algorithm"]) for one in second] == [(0, "ES256")] * 2
    signing = place.there("ann", "keys", "retire", second[1].json["kid"], "--json")
    assert (signing.code, signing.json["error"]["error_code"]) == (1, "E3411")
    retired = place.there("ann", "keys", "retire", first.json["kid"], "--reason", "replaced")
    assert (retired.code, not file.exists()) == (0, True), retired.err
    assert f"{first.json['kid']} is retired; what it signed is void" in retired.out
    assert place.there("ann", "token", "inspect", issued).code == 1
    assert place.here("ann", "keys", "retire", second[0].json["kid"]).code == 0
    taken = both(place, "keys", "init", "--json")
    assert [one.code for one in taken] == [1, 1]
    assert taken[0].json["error"]["error_code"] == taken[1].json["error"]["error_code"]
    public = place.there("eve", "keys", "jwks").json["keys"]
    assert second[1].json["kid"] in [one["kid"] for one in public]
    assert not any("d" in one for one in public)


def test_the_settings_of_a_server_are_those_it_was_started_with(place: Place) -> None:
    settings = place.cli.home / "settings.toml"
    before = settings.read_text()
    settings.write_text("recommend_callers = 7\n" + before)
    try:
        here, there = both(place, "config", "show", "recommend_callers", "--json")
    finally:
        settings.write_text(before)
    assert [one.json["settings"][0]["value"] for one in (here, there)] == [7, 3]
    assert there.json["settings"][0]["source"] == "default"
    assert "home" not in there.json
    misspelled = both(place, "config", "show", "recomend_callers")
    assert [one.code for one in misspelled] == [2, 2]
    assert "did you mean `recommend_callers`?" in misspelled[1].err


def test_tools_are_recommended_to_the_holder_of_a_token_alike(place: Place) -> None:
    for number in range(3):
        issued = place.cli("token", "issue", "--agent", f"user-{number}")
        (place.cli.path / f"user-{number}.token").write_text(issued.out)
        for words in (("demo.balance", '{"account": "cash"}'), ("demo.count", '{"file": "/"}')):
            assert place.there(f"user-{number}", "call", *words).code == 0
    here, there = (end("eve", "tools", "recommend", "demo.balance") for end in (place.here, place.there))
    assert (here.code, there.code) == (0, 0), there.err
    assert "demo.count" in there.out
    assert there.out == here.out
    told = [end("eve", "tools", "recommend", "demo.balance", "--json").json for end in (place.here, place.there)]
    assert told[0] == told[1]
    hidden = both(place, "tools", "recommend", "demo.nothing", "--json")
    assert [one.json["error"]["error_code"] for one in hidden] == ["E3101", "E3101"]


def cut_off(place: Place, key: str) -> str:
    """Kill a write of a process beside the server in its middle; the call that nobody can know the outcome of."""
    alive = set(stores.lives(place.cli.store))
    place.cli.kill("call", "demo.post", '{"account": "cash", "cents": 500}', "--key", key)
    if dead := set(stores.lives(place.cli.store)) - alive:
        stores.bury(place.cli.store, *dead)
    (call,) = [one["invocation_id"] for one in place.cli.ask("calls", "reconcile")["unknown"] if one["key"] == key]
    return call


def test_a_call_of_unknown_outcome_is_settled_at_a_server(place: Place) -> None:
    happened, not_happened = cut_off(place, "cut-one"), cut_off(place, "cut-two")
    here, there = both(place, "calls", "reconcile")
    assert (there.code, happened in there.out, not_happened in there.out) == (0, True, True), there.err
    assert there.out == here.out
    misfit = both(place, "calls", "reconcile", happened, "--happened", "--result", '{"entry": "one"}', "--json")
    assert [one.json["error"]["error_code"] for one in misfit] == ["E3004", "E3004"]
    assert misfit[1].json["error"]["message"] == misfit[0].json["error"]["message"]
    unsaid = place.there("ann", "calls", "reconcile", happened, "--happened")
    assert (unsaid.code, "returns something; say what it was" in unsaid.err) == (1, True)
    assert place.there("ann", "calls", "reconcile", happened).code == 2
    for call in (happened, not_happened):
        refused = place.there("eve", "calls", "reconcile", call, "--did-not-happen", "--json")
        assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206")
    result = '{"entry": 1, "balance": 1500}'
    settled = place.there("ann", "calls", "reconcile", happened, "--happened", "--result", result)
    assert (settled.code, "it happened; its idempotency key answers with this result" in settled.out) == (0, True), (
        settled.err
    )
    freed = place.there("ann", "calls", "reconcile", not_happened[:20], "--did-not-happen", "--json")
    assert (freed.json["settled"]["invocation_id"], freed.json["settled"]["happened"]) == (not_happened, False)
    record = place.there("ann", "calls", "show", not_happened, "--json").json["records"][-1]["record"]
    assert (record["kind"], record["by"]) == ("settled", freed.json["settled"]["by"])
    assert record["by"].startswith("did:")
    replayed = place.cli.ask("call", "demo.post", '{"account": "cash", "cents": 500}', "--key", "cut-one")
    assert (replayed["metadata"]["replayed"], replayed["structured_content"]) == (True, json.loads(result))
    twice = place.there("ann", "calls", "reconcile", happened, "--did-not-happen", "--json")
    assert twice.json["error"]["error_code"] == "E3702"


# Commands that need a right at a server. A holder of no scopes is refused each of them.
ADMINISTERING = [
    ("identities", "list"), ("identities", "add", "--name", "more"), ("identities", "revoke", "bob", "--reason", "x"),
    ("keys", "list"), ("keys", "init"), ("keys", "rotate"), ("keys", "retire", "x"), ("config", "show"),
    ("calls", "reconcile"),
]  # fmt: skip


@pytest.mark.parametrize("words", ADMINISTERING, ids=" ".join)
def test_a_caller_without_the_right_administers_nothing(place: Place, words: tuple[str, ...]) -> None:
    refused = place.there("eve", *words, "--json")
    assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206")


def test_an_issuer_of_another_tenant_sees_its_identities_alone_and_changes_no_keys(place: Place) -> None:
    did = place.cli("identities", "add", "--name", "mia", "--tenant", "acme").out.strip()
    issued = place.cli("token", "issue", "--agent", did, "--scope", "tokens:issue", "--scope", "policy:admin",
                       "--scope", "calls:reconcile")  # fmt: skip
    (place.cli.path / "mia.token").write_text(issued.out)
    listed = place.there("mia", "identities", "list", "--json").json["identities"]
    assert [(one["did"], one["tenant"]) for one in listed] == [(did, "acme")]
    for words in ADMINISTERING[1:]:
        refused = place.there("mia", *words, "--json")
        assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206"), words


# Tokens and the journal


def test_tokens_are_issued_inspected_passed_on_and_revoked(place: Place) -> None:
    issued = place.there(
        "ann", "token", "issue", "--agent", "scout", "--tool", "demo.balance@^1", "--ttl", "10m", "--json"
    )
    assert issued.code == 0, issued.out
    assert issued.json["registered"] == ["scout"]
    text = issued.json["token"]
    here, there = place.here("ann", "token", "inspect", text), place.there("ann", "token", "inspect", text)
    assert (here.code, there.code) == (0, 0)
    assert bare(there.out) == bare(here.out)
    passed = place.there("ann", "token", "delegate", "--token", text, "--to", "helper", "--ttl", "1m")
    assert passed.code == 0, passed.err
    assert place.there("ann", "token", "revoke", text, "--reason", "done").code == 0
    ends = [end("ann", "token", "inspect", passed.out.strip(), "--json") for end in (place.here, place.there)]
    assert [(one.code, one.json["code"]) for one in ends] == [(1, "E3201")] * 2


def test_a_reviewer_agrees_in_advance_at_a_server_and_takes_it_back(place: Place) -> None:
    words = ("approvals", "grant", "demo.mail_statement", "--caller", "eve", "--arg", "account=cash")
    bounds = ("--arg", "to=*@example.net", "--uses", "2", "--expires", "1d")
    here, there = place.here("bob", *words, *bounds), place.there("bob", *words, *bounds)
    assert (here.code, there.code) == (0, 0), there.err
    mail = ("call", "demo.mail_statement", '{"account": "cash", "to": "a@example.net"}', "--key", "ahead", "--json")
    assert place.there("eve", *mail).json["status"] == "succeeded"
    listed = place.there("bob", "approvals", "standing", "--json").json["standing"]
    assert listed == place.here("bob", "approvals", "standing", "--json").json["standing"]
    ids = [one["id"] for one in listed if one["arguments"]["to"] == "*@example.net"]
    taken = [place.there("bob", "approvals", "revoke", one[-8:], "--json").json["revoked"] for one in ids]
    assert taken == [True, True]
    refused = place.there("eve", *words, *bounds, "--json")
    assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206")
    assert place.there("bob", "approvals", "grant", "demo.post", "--caller", "eve", "--arg", "a=1", "--where", "a<2",
                       "--uses", "1", "--expires", "1d").code == 2  # fmt: skip


def test_the_journal_is_exported_whole_and_verifies(place: Place) -> None:
    target = place.cli.path / "journal.jsonl"
    told = place.there("ann", "audit", "export", "--out", str(target), "--json")
    lines = target.read_bytes().splitlines()
    assert (told.code, told.json["records"], told.json["through"]) == (0, len(lines), json.loads(lines[-1])["seq"])
    assert place.cli("audit", "verify", "--export", str(target)).code == 0
    assert place.there("ann", "audit", "export", "--out", str(target), "--json").json["error"]["error_code"] == "E3411"
    assert place.there("ann", "audit", "export").out.splitlines()[0].encode() == lines[0]
    assert place.there("ann", "audit", "verify", "--json").json["intact"]
    told = place.there("ann", "audit", "explain", "01JCXK2M4Q8Z0000000000000A", "--json")
    assert told.json["error"]["error_code"] == "E3702"
    for words in (("export",), ("explain", "01JCXK2M4Q8Z0000000000000A")):
        refused = place.there("eve", "audit", *words, "--json")
        assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206")
    refused = place.there("eve", "audit", "export", "--json")
    assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3206")


def test_a_reviewer_watches_the_tickets_of_a_server(place: Place) -> None:
    words = ("--server", place.url, "--token-file", place.token("bob"), "approvals", "watch", "--json")
    ticket = place.ticket("watched")
    with warm.start(words, place.cli.environment, place.cli.path) as watcher:
        watcher.stdin.close()

        def heard(event: str) -> Any:
            for line in watcher.stdout:
                told = json.loads(line)
                if (told["event"], told["ticket"]["id"]) == (event, ticket):
                    return told["ticket"]
            raise AssertionError(f"the watcher ended before it told that the ticket was {event}")

        assert heard("asked")["toolId"] == "demo.mail_statement"
        assert place.there("bob", "approvals", "deny", ticket, "--comment", "not today").code == 0
        assert heard("denied")["comment"] == "not today"
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait() == 0


# What is refused


@pytest.mark.parametrize(
    "words",
    [
        ("backup", "copy"), ("restore", "copy"), ("doctor",), ("serve",), ("tools", "add", "x.py"), ("audit", "purge"),
        ("demo",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_for_the_data_directory_itself_says_so(place: Place, words: tuple[str, ...]) -> None:
    (place.cli.path / "copy").mkdir(exist_ok=True)
    refused = place.there("ann", *words)
    assert refused.code == 2
    assert "works on a data directory itself" in refused.err


@pytest.mark.parametrize("words", [("list",), ("set", "mail", "-"), ("remove", "mail"), ("rotate-key",)], ids=" ".join)
def test_stored_credentials_are_never_handled_through_a_server(place: Place, words: tuple[str, ...]) -> None:
    refused = place.there("ann", "secrets", *words)
    assert refused.code == 2
    assert "handles stored credentials, which neither come from nor leave their machine by a server" in refused.err
    assert "run it where the directory is" in refused.err


def test_what_needs_neither_runs_all_the_same(place: Place) -> None:
    assert place.there("ann", "policy", "default").out == place.cli("policy", "default").out


def test_progress_is_shown_while_a_call_is_followed_on_a_terminal(place: Place, tmp_path: Path) -> None:
    go = tmp_path / "go"
    call = place.there("ann", "call", "demo.count", json.dumps({"file": str(go)}), "--background").out.strip()
    terminal, side = os.openpty()
    words = ("--server", place.url, "--token-file", place.token("ann"), "calls", "follow", call)
    follower = subprocess.Popen([*INTERLOCK, *words], env=place.cli.environment, stdout=subprocess.PIPE, stderr=side)
    os.close(side)
    seen = b""
    with contextlib.suppress(OSError):  # what reading raises once the follower has ended
        while text := os.read(terminal, 1000):
            seen += text
            if b"50 %  half of it" in seen:
                go.touch()
    go.touch()
    out, _ = follower.communicate(timeout=100)
    os.close(terminal)
    assert b"half of it" in seen
    assert (follower.returncode, "succeeded" in out.decode()) == (0, True)


def test_progress_is_shown_while_a_call_is_made_at_a_server_on_a_terminal(place: Place, tmp_path: Path) -> None:
    go = tmp_path / "go"
    terminal, side = os.openpty()
    wanted = ("call", "demo.count", json.dumps({"file": str(go)}))
    words = ("--server", place.url, "--token-file", place.token("ann"), *wanted)
    caller = subprocess.Popen([*INTERLOCK, *words], env=place.cli.environment, stdout=subprocess.PIPE, stderr=side)
    os.close(side)
    seen = b""
    with contextlib.suppress(OSError):  # what reading raises once the command has ended
        while text := os.read(terminal, 1000):
            seen += text
            if b"50 %  half of it" in seen:
                go.touch()
    go.touch()
    out, _ = caller.communicate(timeout=100)
    os.close(terminal)
    assert b"demo.count runs at" in seen
    assert b"half of it" in seen
    assert (caller.returncode, "demo.count@1.0.0   1" in out.decode()) == (0, True)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://tools.example.com", "plain HTTP"),
        ("http://192.0.2.7:8080", "plain HTTP"),
        ("ftp://127.0.0.1", "is not the URL of a server"),
        ("127.0.0.1:8080", "is not the URL of a server"),
        ("http://ann:secret@127.0.0.1", "is not the URL of a server"),
    ],
)
def test_a_token_is_sent_to_no_place_where_others_can_read_it(place: Place, url: str, words: str) -> None:
    refused = place.cli("--server", url, "--token-file", place.token("ann"), "tools", "list")
    assert refused.code == 2
    assert words in refused.err


def test_plain_http_elsewhere_is_possible_when_it_is_asked_for(place: Place) -> None:
    refused = place.cli(
        "--server",
        "http://nowhere.invalid:1",
        "--insecure-http",
        "--token-file",
        place.token("ann"),
        "tools",
        "list",
        "--json",
    )
    assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3502")


def test_a_server_without_a_token_or_with_a_bad_one(place: Place) -> None:
    told = place.cli("--server", place.url, "tools", "list", "--json")
    assert (told.code, told.json["error"]["error_code"]) == (1, "E3212")
    assert place.cli("--server", place.url, "health").code == 0
    bad = place.cli.path / "bad.token"
    bad.write_text("a.b.c\n")
    told = place.cli("--server", place.url, "--token-file", str(bad), "tools", "list", "--json")
    assert (told.code, told.json["error"]["error_code"]) == (1, "E3203")
    bad.write_text("\n")
    assert place.cli("--server", place.url, "--token-file", str(bad), "tools", "list").code == 2


def test_home_and_server_exclude_each_other_and_what_is_said_beats_the_environment(place: Place) -> None:
    assert place.cli("--home", str(place.cli.home), "--server", place.url, "health").code == 2
    named = Cli(place.cli.path, {"INTERLOCK_SERVER": "http://127.0.0.1:9"})
    assert named("health", "--json").json["error"]["error_code"] == "E3502"
    assert named("--home", str(place.cli.home), "health").code == 0
    assert Cli(place.cli.path, {"INTERLOCK_SERVER": place.url})("health").code == 0


def test_what_is_no_interlock_server_is_told_apart(place: Place) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with closing(connection):
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")

        speaking = threading.Thread(target=answer)
        speaking.start()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        told = place.cli("--server", url, "--token-file", place.token("ann"), "tools", "list", "--json")
        speaking.join(30)
    assert (told.code, told.json["error"]["error_code"]) == (1, "E3502")
    assert "is not an Interlock server" in told.json["error"]["message"]


def test_an_export_that_breaks_off_leaves_no_file(place: Place) -> None:
    target = place.cli.path / "broken.jsonl"
    with closing(socket.create_server(("127.0.0.1", 0))) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with closing(connection):
                connection.recv(65_536)
                connection.sendall(b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\n{"seq":1\r\n')

        speaking = threading.Thread(target=answer)
        speaking.start()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        told = place.cli(
            "--server", url, "--token-file", place.token("ann"), "audit", "export", "--out", str(target), "--json"
        )
        speaking.join(30)
    assert (told.code, told.json["error"]["error_code"]) == (1, "E3502")
    assert not target.exists()


def test_a_login_serves_later_commands_without_a_data_directory_until_it_is_ended(place: Place, tmp_path: Path) -> None:
    places = {"INTERLOCK_HOME": "", "XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path)}
    reviewer = Cli(tmp_path, places)
    assert reviewer("login").code == 1
    refused = reviewer("login", place.url, "--json", stdin="a.b.c\n")
    assert (refused.code, refused.json["error"]["error_code"]) == (1, "E3203")
    file = tmp_path / "config" / "interlock" / "login.json"
    assert not file.exists(), "a token that the server refuses is not kept"
    token = Path(place.token("ann")).read_text()
    logged_in = reviewer("login", f"{place.url}/", "--json", stdin=token)
    assert (logged_in.json["server"], logged_in.json["name"]) == (place.url, "ann")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token.strip() not in logged_in.out + reviewer("login").out

    assert reviewer("tools", "list").out == place.there("ann", "tools", "list").out
    assert "works on a data directory itself" in reviewer("doctor").err
    # What is said in the command, or by a variable, counts more. The token is for the server of the login alone.
    elsewhere = reviewer("--server", "http://127.0.0.1:9", "tools", "list", "--json").json
    assert elsewhere["error"]["error_code"] == "E3212"
    assert reviewer("--server", place.url, "tools", "list").code == 0
    assert Cli(tmp_path, {**places, "INTERLOCK_TOKEN": "a.b.c"})("tools", "list").code == 1
    assert place.cli("--home", str(place.cli.home), "tools", "list").code == 0
    assert not (tmp_path / "interlock").exists(), "no data directory was made"

    file.chmod(0o644)
    assert "others can read" in reviewer("tools", "list").err
    assert "logged out" in reviewer("logout").out
    assert not file.exists()
    assert "not logged in" in reviewer("logout").out
