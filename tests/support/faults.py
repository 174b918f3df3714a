"""Faults of the parts behind the endpoints, and the error that a caller gets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from interlock import tool
from interlock.contract.contract import ERROR_SCHEMA
from interlock.contract.standard import ToolError
from interlock.core.errors import Failure
from interlock.core.seldom import Seldom
from interlock.data.schema import Schema
from interlock.privacy.redact import safe_log
from interlock.telemetry.logs import JsonLines
from tests import sample
from tests.support.answers import Heard
from tests.support.wires import Wires

Json = dict[str, Any]
SECRET = "sk-live-0123456789abcdef"
PASSWORD = "correcthorsebattery"
PLACE = "/srv/interlock/private/signing.key"
WORDS = f"cannot read {PLACE} with password={SECRET}"
TRACEBACK = f'{WORDS}\nTraceback (most recent call last):\n  File "{PLACE}", line 3, in run'


def sound(heard: Heard, door: str) -> Json:
    """The envelope, which has all that every envelope has and nothing that none may have."""
    envelope = heard.failure
    assert Schema(ERROR_SCHEMA).valid(envelope)
    if door != "grpc":  # which has a typed form of it, with no place for anything else
        assert ToolError.parse(envelope).document() == envelope
    for name in (
        "retryable", "humanMessage", "message", "traceId", "error_code", "errorCode", "error_class", "recoverability",
        "resolution", "policy_refs", "evidence_refs",
    ):  # fmt: skip
        assert name in envelope
    assert envelope["traceId"]
    assert envelope["humanMessage"] == envelope["message"]
    for private in (SECRET, PASSWORD, PLACE, "Traceback", "RuntimeError: ", ".py"):
        assert private not in heard.text
    return envelope


@tool(version="1.0.0", mutation_class="read_only", namespace="c")
async def explodes(how: sample.Text) -> str:
    """Fail with what nobody else should read."""
    raise state.failures[how]()


@tool(version="1.0.0", mutation_class="read_only", namespace="c")
async def choosy(text: sample.Text) -> str:
    """Never get as far as this."""
    return text


@choosy.check
def _(text: str) -> list[str]:
    raise RuntimeError(WORDS)


class State:
    """What the tools of this module did, and how they are to fail."""

    runs = 0
    failures: dict[str, Callable[[], Exception]] = {  # noqa: RUF012 - never changed
        "foreseen": lambda: Failure("E3502", TRACEBACK),
        "in its details": lambda: Failure("E3401", "see the details", details={"why": WORDS, "at": [PLACE]}),
        "as a pointer": lambda: Failure("E3401", "see there", details={"pointer": PLACE, "pointers": [PLACE, WORDS]}),
        "unforeseen": lambda: RuntimeError(WORDS),
    }


state = State()


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError(WORDS)


def failing(*_: Any, **__: Any) -> Any:
    """A failure of Interlock's own making that says where something is and quotes a credential."""
    trace = f'Traceback (most recent call last):\n  File "{PLACE}", line 3'
    details: Json = {"at": [PLACE], f"in {PLACE}": trace, "with": [SECRET], SECRET: 1, "pointer": f"/{SECRET}"}
    words = f"`{PLACE}` cannot be read with {SECRET} or password={PASSWORD}\n{trace}"
    raise Failure("E3801", words, details={**details, "password": PASSWORD}, resolution=SECRET, native_error_ref=SECRET)


def log_each_in_full(wires: Wires) -> None:
    """Lift the limit of one traceback per kind and minute: here the same fault comes through every door."""
    wires.app.gateway.failure_log._seldom = Seldom(0.0, time.monotonic)  # pyright: ignore[reportPrivateUsage]


def logged(wires: Wires, caplog: pytest.LogCaptureFixture, trace_id: str) -> str:
    """What the log says under a trace: what happened and where, without the secret."""
    form = JsonLines(lambda text: safe_log(wires.app.authority.redactor, text))
    found = [record for record in caplog.records if getattr(record, "trace_id", None) == trace_id]
    lines = "\n".join(form.format(record) for record in found if record.levelno >= logging.WARNING)
    assert SECRET not in lines
    assert PASSWORD not in lines
    return lines if PLACE in lines or "raising" in lines or "NoneType" in lines else ""


TICKET = "/v1/approvals/apr_01ARZ3NDEKTSV4RRFFQ69G5FAV"
GRANT: Json = {"tool": "demo.add", "caller": "local:x", "arguments": {"a": "1"}, "uses": 1, "expires_in_s": 60}
# Which part is broken, and the requests to every endpoint that needs it: by REST, by JSON-RPC, in a call.
BEHIND: dict[str, tuple[Callable[[Wires], list[tuple[Any, str]]], list[tuple[str, str, Json | None]], list[str]]] = {
    "approvals": (
        lambda w: [
            *((w.app.approvals, name) for name in ("list", "show", "approve", "deny")),
            *((w.app.standing_approvals, name) for name in ("list", "grant", "revoke")),
        ],
        [
            ("GET", "/v1/approvals", None), ("GET", TICKET, None), ("POST", f"{TICKET}/approve", {}),
            ("POST", f"{TICKET}/deny", {}), ("GET", "/v1/approvals/standing", None),
            ("POST", "/v1/approvals/standing", GRANT), ("DELETE", "/v1/approvals/standing/sta_x", None),
        ],
        ["approvals.list", "approvals.show", "approvals.approve", "approvals.deny"],
    ),
    "tokens": (
        lambda w: [(w.service.tokens, name) for name in ("issue", "delegate", "revoke", "inspect")],
        [
            ("POST", "/v1/tokens/issue", {"agent": "bot", "tools": ["demo.add"]}),
            ("POST", "/v1/tokens/delegate", {"to": "did:example:x"}),
            ("POST", "/v1/tokens/revoke", {"ref": "x", "reason": "lost"}),
            ("POST", "/v1/tokens/inspect", {"token": "x"}),
        ],
        [],
    ),
    "the journal's readers": (
        lambda w: [(w.app.readers, "read"), (w.app.readers, "run"), (w.service.audit, "begin_export")],
        [
            ("GET", "/v1/audit/records", None), ("GET", "/v1/audit/verify", None), ("GET", "/v1/audit/export", None),
            ("GET", "/v1/calls", None),
        ],
        ["calls.list"],
    ),
}  # fmt: skip
